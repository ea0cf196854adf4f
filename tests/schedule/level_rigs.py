"""`delay_levels` under the contract: queues of a disk, levels as long as any promise of the suite, and wrong ones.

The contract's instants are any instants, those of a level one after the other; so each queue here is many
stretches. The queues' indexes are caches: each start makes them anew from the log.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tests.schedule.rigs import AHEAD_MS
from tests.schedule.stage import BEGINNING, Restart
from tests.schedule.world import World

from timeball import limits
from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndex, QueueIndexes
from timeball.message import LOG_SCHEMA, SCHEDULE_TOPIC, Int64Array, Kind, int64
from timeball.schedule.delay_levels.fifo import DelayLevels
from timeball.schedule.delay_levels.levels import LevelTable
from timeball.schedule.delay_levels.queue import LevelQueue, Position
from timeball.schedule.delay_levels.settled import SettledPlaces
from timeball.schedule.strategy import Settled, Strategy
from timeball.schedule.wheel import Run
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile

LEVELS = 3
ROW_BYTES = 91
PROPERTIES = "REAL_TOPIC\x01t\x02REAL_QID\x01-1\x02"


class LevelsRig:
    """`delay_levels`, or a subclass of it that is wrong; promises go round three levels."""

    name = "delay_levels"
    has_table = False
    kind = Kind.PROMISE

    def __init__(self, strategy: type[DelayLevels] = DelayLevels, gather_bytes: int = 64 * ROW_BYTES) -> None:
        self._class, self._gather_bytes = strategy, gather_bytes
        self._starts = self._turn = 0
        self._next = [0] * LEVELS
        self.indexes: list[QueueIndex] = []

    def start(self, world: World, restart: Restart) -> DelayLevels:
        self._starts += 1
        facts, lengths = restart.state or ({}, [0] * LEVELS)  # type: ignore[misc]
        self.indexes = [QueueIndexes(world.files).queue("t", n) for n in range(LEVELS)]
        self._begin(world, lengths)
        for rows in world.reader.rows(world.reader.first_seq, world.reader.next_seq, [self.kind]):
            self._index(rows)
        self._next = [index.max_offset for index in self.indexes]
        strategy = self._class(
            world.reader, world.reader_thread, LevelTable((3 * limits.DELAY_MS_MAX,) * LEVELS), lambda: self.indexes,
            ahead_ms=AHEAD_MS, gather_bytes=self._gather_bytes,
            on_change=world.wake, on_failure=world.failures.append,
        )  # fmt: skip
        strategy.restore(facts, restart.settled_since)
        return strategy

    def _begin(self, world: World, lengths: list[int]) -> None:
        """Queues whose first rows the log has let go begin with the first that is left."""
        kept = [*world.reader.rows(world.reader.first_seq, world.reader.next_seq, [self.kind])]
        for number, (index, length) in enumerate(zip(self.indexes, lengths, strict=True)):
            offsets = [
                rows.column("queue_offset").to_numpy()[rows["queue_id"].to_numpy() == number] for rows in kept
            ]
            index.start_at(int(np.concatenate([*offsets, [length]])[0]))

    def dress(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        queue = (self._turn + np.arange(rows.num_rows)) % LEVELS
        self._turn += rows.num_rows
        offset = np.empty(rows.num_rows, dtype=np.int64)
        for number in range(LEVELS):
            mine = np.flatnonzero(queue == number)
            offset[mine] = self._next[number] + np.arange(len(mine))
            self._next[number] += len(mine)
        columns = {
            "kind": pa.array(np.full(rows.num_rows, self.kind, dtype=np.int8)),
            "topic": pa.array([SCHEDULE_TOPIC] * rows.num_rows),
            "properties": pa.array([PROPERTIES] * rows.num_rows),
            "queue_id": pa.array(queue.astype(np.int32)),
            "queue_offset": pa.array(offset),
        }
        return pa.RecordBatch.from_arrays(
            [columns.get(name, rows.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
        )

    def kept(self, rows: pa.RecordBatch, first_seq: int) -> None:
        self._index(rows.append_column("seq", pa.array(first_seq + np.arange(rows.num_rows))))

    def _index(self, rows: pa.RecordBatch) -> None:
        queue, seq, due = (rows.column(name).to_numpy() for name in ("queue_id", "seq", "due_ms"))
        for number, index in enumerate(self.indexes):
            mine = queue == number
            index.append(seq[mine], np.full(int(mine.sum()), ROW_BYTES), due[mine])

    def state(self, strategy: Strategy) -> object:
        assert isinstance(strategy, DelayLevels)
        return strategy.state(), [index.max_offset for index in self.indexes]

    def settled(self, strategy: Strategy) -> Settled:
        """What its state says, promise by promise."""
        assert isinstance(strategy, DelayLevels)
        parts = []
        for number, facts in strategy.state().items():
            index = self.indexes[number]
            offsets = [
                np.arange(index.min_offset, facts.offset),
                *(np.arange(a, a + n) for a, n in facts.settled),
            ]
            parts.append(index.at(np.concatenate(offsets)))
        due, seq = (
            np.concatenate([np.empty(0, np.int64), *(part[name].astype(np.int64) for part in parts)])
            for name in ("tag", "seq")
        )
        return Settled(BEGINNING, due, seq, 0)

    def is_busy(self, strategy: Strategy) -> bool:
        assert isinstance(strategy, DelayLevels)
        return strategy._gathering is not None

    def settled_before_ms(self, strategy: Strategy) -> int:
        assert isinstance(strategy, DelayLevels)
        return strategy.settled_before_ms

    def rows_in_memory(self, strategy: Strategy) -> int:
        assert isinstance(strategy, DelayLevels)
        flight = sum(len(seq) for _, seq, _ in strategy._in_flight)
        return flight + sum(map(len, (strategy._wheel, strategy._settled)))

    def first_needed_seq(self, strategy: Strategy) -> int | None:
        assert isinstance(strategy, DelayLevels)
        return strategy.first_waiting_seq

    async def ready_to_cancel(self, strategy: Strategy) -> None:
        pass

    async def attach(self, strategy: Strategy, attachment: Attachment) -> None:
        raise AssertionError("there is no table")

    def live_files(self, strategy: Strategy) -> list[DataFile]:
        return []


# -- negative controls: each breaks one promise of the contract ------------------------------------------------


class NotTheEarliest(DelayLevels):
    """Hands out what is in memory, whatever earlier is still on disk."""

    def _bound(self, now_ms: int) -> Position | None:
        return None


class SettlesWhatItHandsOut(DelayLevels):
    """Moves a queue's offset when a promise is handed out, not when its release is durable."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().due(now_ms, limit)
        if rows is not None:
            self._settled.release(int64(rows.column("queue_offset")))
        return rows

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        self._in_flight.popleft()


class SavesOnlyOffsets(DelayLevels):
    """Forgets what is settled out of turn, as RocketMQ's file of offsets does."""

    def state(self) -> dict[int, LevelFacts]:
        return {number: LevelFacts(facts.offset) for number, facts in super().state().items()}


class SkipsToTheEnd(DelayLevels):
    """Begins behind what was accepted since the checkpoint."""

    def restore(self, state: dict[int, LevelFacts], settled_seq: Int64Array) -> None:
        super().restore(state, settled_seq)
        for queue in self._queues.values():
            queue.stretches = queue.stretches[:1]


class TakesQueuesForSorted(DelayLevels):
    """Trusts that a level's queue is always sorted by instant."""

    def _wait_on_disk(self, queue: LevelQueue, places: Int64Array, due: Int64Array, seq: Int64Array) -> None:
        super()._wait_on_disk(queue, places, np.maximum.accumulate(due), seq)


class LosesBodies(DelayLevels):
    """Loses the last of many rows that a gather loads."""

    def _load(self, due: Int64Array, seq: Int64Array, places: Int64Array) -> tuple[Run, Int64Array]:
        run, strangers = super()._load(due, seq, places)
        return run if len(run.due) < 6 else run.part(0, len(run.due) - 1), strangers


class NothingIsCancelled(SettledPlaces):
    """Knows what was settled so far, and takes no cancel any more."""

    def __init__(self, known: SettledPlaces, queues: dict[int, LevelQueue]) -> None:
        super().__init__(queues)
        self._released, self._cancelled = known._released, known._cancelled

    def cancel(self, places: Int64Array) -> None:
        pass


class HandsOutTheCancelled(DelayLevels):
    """Says that a promise is cancelled and hands it out all the same."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        self._settled = NothingIsCancelled(self._settled, self._queues)
        return super().cancel(due_ms, seq)


class TrustsTheWheel(DelayLevels):
    """Keeps the bodies it has when the clock is set back, and reads the queues again all the same."""

    def _follow_clock(self, now_ms: int) -> None:
        wheel = self._wheel
        super()._follow_clock(now_ms)
        self._wheel = wheel


WRONG_LEVELS: list[type[DelayLevels]] = [
    NotTheEarliest, SettlesWhatItHandsOut, SavesOnlyOffsets, SkipsToTheEnd, TakesQueuesForSorted, LosesBodies,
    HandsOutTheCancelled,
]  # fmt: skip
