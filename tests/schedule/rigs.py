"""The rigs of the backlogs: how each is built for a `World`, and how its scheduled messages look in the log."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
from tests.schedule.stage import Built, Restart
from tests.schedule.world import World

from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndex, QueueIndexes
from timeball.model import limits
from timeball.model.errors import SetupError
from timeball.model.message import LOG_SCHEMA, SCHEDULE_TOPIC, Kind
from timeball.schedule import level_cascade as cascade
from timeball.schedule import timer_wheel as wheel
from timeball.schedule.backlog import Backlog
from timeball.schedule.delay_levels import DelayLevels, LevelsState, LevelTable
from timeball.schedule.hour_log import HourLog
from timeball.schedule.level_cascade import CascadeState, LevelCascade
from timeball.schedule.locations import NOTHING
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.timer_wheel import Slots, TimerWheel, WheelState
from timeball.table.data_file import DataFile

AHEAD_MS = 10_000
GATHER_BYTES = 64 * 512  # some tens of rows by the first estimate, so that it limits most reads of bodies

DEFAULT = Slots.of(1_000, 3 * limits.DAY_MS, AHEAD_MS)
# This ring has no margin: the record of an opened slot is overwritten after one lap, even if it is not settled.
MINUTE = Slots(1_000, reach=61, count=61)
# Messages are rolled every few seconds. A reach of 3 s with slots of 1 ms is less than may be configured.
TINY = Slots(1, reach=3_000, count=60_000)


class HourLogRig:
    """`hour_log`, or a wrong variant of it."""

    name = "hour_log"
    has_table = True
    kind = Kind.SCHEDULED
    has_files = False  # besides those of the table

    def __init__(
        self,
        backlog: type[Any] = HourLog,
        *,
        scheduler: type[Scheduler] = Scheduler,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        self._class, self.scheduler, self.gather_bytes = backlog, scheduler, gather_bytes
        self.ahead_ms = AHEAD_MS

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        files, thread = world.files, world.reader_thread
        backlog = self._class(files, world.reader, thread, restart.entries, ahead_ms=self.ahead_ms)
        return Built(backlog, None, restart.waiting, table=backlog)

    def encode(self, rows: pa.RecordBatch, backlog: Backlog) -> pa.RecordBatch:
        return backlog.encode_for_log(rows, rows["store_ms"][0].as_py())

    def keep(self, rows: pa.RecordBatch, first_seq: int) -> None:
        pass

    def state(self, state: msgspec.Struct | None) -> object:
        return None if state is None else msgspec.json.decode(msgspec.json.encode(state))

    def rows_in_memory(self, backlog: Any) -> int:
        return len(backlog._tail)

    def live_files(self, backlog: Any) -> list[DataFile]:
        return backlog.pending.all() if self.has_table else []


class WheelRig(HourLogRig):
    """`timer_wheel` with rings of several shapes."""

    name = "timer_wheel"
    has_table = False
    has_files = True
    slots: ClassVar[Slots] = MINUTE

    def __init__(
        self,
        backlog: type[Any] = TimerWheel,
        *,
        scheduler: type[Scheduler] = Scheduler,
        gather_bytes: int = GATHER_BYTES,
        slots: Slots = MINUTE,
        congest_rows: int = 0,
        arrivals_max: int = 8,  # so that some batches are written at once, and others with the next checkpoint
    ) -> None:
        super().__init__(backlog, scheduler=scheduler, gather_bytes=gather_bytes)
        self._slots, self._congest_rows, self._arrivals_max = slots, congest_rows, arrivals_max

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        backlog = self._class(
            world.files, world.reader, world.reader_thread, outcomes, slots=self._slots,
            congest_rows=self._congest_rows, ahead_ms=AHEAD_MS, arrivals_max=self._arrivals_max,
        )  # fmt: skip
        state = None
        try:
            if restart.state is not None:
                state = msgspec.convert(restart.state, WheelState)
                wheel.check(world.files, self._slots, state)
        except SetupError:
            state = None
        return Built(backlog, state, restart.waiting if state is None else restart.since)

    def rows_in_memory(self, backlog: Any) -> int:
        return backlog.arrival_rows + sum(len(held) for held in backlog._kept_entries)


class CascadeRig(HourLogRig):
    """`level_cascade` with a lead of four seconds, so that waits of seconds already take hops."""

    name = "level_cascade"
    has_table = False
    has_files = True

    def __init__(self, backlog: type[Any] = LevelCascade, **rest: Any) -> None:
        super().__init__(backlog, **rest)
        self.ahead_ms = cascade.lead_ms_of(1_000)

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        backlog = self._class(world.files, world.reader, outcomes, ahead_ms=self.ahead_ms)
        state = None
        if restart.state is not None:
            state = msgspec.convert(restart.state, CascadeState)
            cascade.check(world.files, state, backlog.lead_ms)  # all records within the saved bounds exist
        return Built(backlog, state, restart.waiting if state is None else restart.since)

    def rows_in_memory(self, backlog: Any) -> int:
        return sum(queue.opened_rows for queue in backlog.queues)


LEVELS = 3
ROW_BYTES = 91
PROPERTIES = "REAL_TOPIC\x01t\x02REAL_QID\x01-1\x02"


class LevelsRig(HourLogRig):
    """`delay_levels`: messages are distributed over three levels, as long as any delay of the suite.

    The contract's due times are arbitrary, while those of a level ascend. So each queue has many stretches here. The
    queue indexes are caches, which each start rebuilds from the log.
    """

    name = "delay_levels"
    has_table = False
    kind = Kind.SCHEDULED

    def __init__(
        self, backlog: type[Any] = DelayLevels, gather_bytes: int = 64 * ROW_BYTES, **rest: Any
    ) -> None:
        super().__init__(backlog, gather_bytes=gather_bytes, **rest)
        self._turn = 0
        self._next = [0] * LEVELS
        self.indexes: list[QueueIndex] = []

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        facts, lengths = restart.state or ({}, [0] * LEVELS)  # type: ignore[misc]
        self.indexes = [QueueIndexes(world.files).queue("t", n) for n in range(LEVELS)]
        self._begin(world, lengths)
        for rows in world.reader.rows(world.reader.first_seq, world.reader.next_seq, [self.kind]):
            self._index(rows)
        self._next = [index.max_offset for index in self.indexes]
        table = LevelTable((3 * limits.DELAY_MS_MAX,) * LEVELS)
        backlog = self._class(world.reader, table, lambda: self.indexes, outcomes, ahead_ms=AHEAD_MS)
        return Built(backlog, LevelsState({int(n): LevelFacts(low) for n, low in facts.items()}), NOTHING)

    def _begin(self, world: World, lengths: list[int]) -> None:
        """Start queues at their first kept entry if the log no longer has their first rows."""
        first_kept_seq = [*world.reader.rows(world.reader.first_seq, world.reader.next_seq, [self.kind])]
        for number, (index, length) in enumerate(zip(self.indexes, lengths, strict=True)):
            offsets = [
                rows.column("queue_offset").to_numpy()[rows["queue_id"].to_numpy() == number]
                for rows in first_kept_seq
            ]
            index.start_at(int(np.concatenate([*offsets, [length]])[0]))

    def encode(self, rows: pa.RecordBatch, backlog: Backlog) -> pa.RecordBatch:
        queue = (self._turn + np.arange(rows.num_rows)) % LEVELS
        self._turn += rows.num_rows
        offset = np.empty(rows.num_rows, dtype=np.int64)
        for number in range(LEVELS):
            mask = np.flatnonzero(queue == number)
            offset[mask] = self._next[number] + np.arange(len(mask))
            self._next[number] += len(mask)
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

    def keep(self, rows: pa.RecordBatch, first_seq: int) -> None:
        self._index(rows.append_column("seq", pa.array(first_seq + np.arange(rows.num_rows))))

    def _index(self, rows: pa.RecordBatch) -> None:
        queue, seq, due = (rows.column(name).to_numpy() for name in ("queue_id", "seq", "due_ms"))
        for number, index in enumerate(self.indexes):
            mask = queue == number
            index.append(seq[mask], np.full(int(mask.sum()), ROW_BYTES), due[mask])

    def state(self, state: Any) -> object:
        facts = {number: facts.offset for number, facts in state.levels.items()}
        return facts, [index.max_offset for index in self.indexes]

    def rows_in_memory(self, backlog: Any) -> int:
        return 0
