"""The strategies under the contract, a rig each, and wrong ones that the contract must catch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball.message import Int64Array, Kind
from timeball.schedule.due_index import DueIndex
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.places import Placed
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled, Strategy
from timeball.schedule.wheel import Run
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile, Position

AHEAD_MS = 10_000
GATHER_BYTES = 64 * 512  # 64 rows by the first guess: most gathers of a test are cut by it


class HourLogRig:
    """`hour_log`, or a subclass of it that is wrong."""

    name = "hour_log"
    has_table = True
    kind = Kind.PROMISE

    def __init__(self, strategy: type[HourLog] = HourLog, gather_bytes: int = GATHER_BYTES) -> None:
        self._class, self._gather_bytes = strategy, gather_bytes

    def start(self, world: World, restart: Restart) -> HourLog:
        settling = Settling()
        settling.restore(restart.settled)
        strategy = self._class(
            world.files, world.reader, world.reader_thread, restart.entries, settling,
            ahead_ms=AHEAD_MS, gather_bytes=self._gather_bytes,
            on_change=world.wake, on_failure=world.failures.append,
        )  # fmt: skip
        strategy.restore(restart.settled, Placed(restart.tail_due_ms, restart.tail_seq, restart.tail_seq))
        return strategy

    def dress(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def kept(self, rows: pa.RecordBatch, first_seq: int) -> None:
        pass

    def state(self, strategy: Strategy) -> object:
        return None

    def settled(self, strategy: Strategy) -> Settled:
        assert isinstance(strategy, HourLog)
        return strategy.settled()

    def is_busy(self, strategy: Strategy) -> bool:
        assert isinstance(strategy, HourLog)
        return strategy._gathering is not None or bool(strategy._behind) or bool(strategy.dispatched.fetching)

    def settled_before_ms(self, strategy: Strategy) -> int:
        assert isinstance(strategy, HourLog)
        return strategy.settled_before_ms

    def rows_in_memory(self, strategy: Strategy) -> int:
        assert isinstance(strategy, HourLog)
        kept = (strategy._tail, strategy._wheel, strategy._parking, strategy._settling, strategy.dispatched)
        return sum(map(len, kept))

    def first_needed_seq(self, strategy: Strategy) -> int | None:
        return None

    async def ready_to_cancel(self, strategy: Strategy) -> None:
        assert isinstance(strategy, HourLog)
        await strategy.quiet()

    async def attach(self, strategy: Strategy, attachment: Attachment) -> None:
        assert isinstance(strategy, HourLog)
        await strategy.attach(attachment)

    def live_files(self, strategy: Strategy) -> list[DataFile]:
        assert isinstance(strategy, HourLog)
        return strategy.pending.all()


# -- negative controls: each breaks one promise of the contract ------------------------------------------------


class Early(HourLog):
    """Hands out a millisecond before the instant."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().due(now_ms + 1, limit)


class Forgets(HourLog):
    """Loses the last of several rows handed out."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().due(now_ms, limit)
        return rows if rows is None or rows.num_rows < 2 else rows.slice(0, rows.num_rows - 1)


class Doubles(HourLog):
    """Hands out every third batch once more."""

    _last: pa.RecordBatch | None = None
    _calls = 0

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._calls += 1
        rows = super().due(now_ms, limit)
        if rows is None and self._calls % 3 == 0 and self._last is not None:
            rows, self._last = self._last, None
            return rows if rows.num_rows <= limit else None
        self._last = rows if rows is not None else self._last
        return rows


class Unsorted(HourLog):
    """Hands out the right rows in reverse."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().due(now_ms, limit)
        return None if rows is None else rows.take(pa.array(np.arange(rows.num_rows)[::-1]))


class DeafToCancels(HourLog):
    """Says that a promise is cancelled and hands it out all the same."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        answers = super().cancel(due_ms, seq)
        self._settling._cancelled.remove(due_ms, seq)
        return answers


class CancelsAll(HourLog):
    """Says of every promise that it was still waiting."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        return super().cancel(due_ms, seq) | True


class SleepsTooLong(HourLog):
    """Wants to be called a minute late."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else upcoming + 60_000


class TurnsInPlace(HourLog):
    """Wants to be called again at once, whatever there is to do."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else min(upcoming, 0)


class NeverWakes(HourLog):
    """Lets the ticker sleep through the arrival of something earlier."""

    def admit(self, promises: pa.RecordBatch) -> None:
        wake, self._on_change = self._on_change, lambda: None
        super().admit(promises)
        self._on_change: Callable[[], None] = wake


class SettlesTooMuch(HourLog):
    """Tells a checkpoint that all is settled up to the horizon."""

    def _settled_before_ms(self) -> int:
        return self._loaded[0]


class KeepsTheCancelled(HourLog):
    """Remembers what is cancelled, and hands it out all the same."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        settling = self._settling
        cancelled, settling._cancelled = settling._cancelled, DueIndex()
        rows = super().due(now_ms, limit)
        settling._cancelled = cancelled
        return rows


class LosesOnTheWay(HourLog):
    """Loses the last of many rows that a gather loads."""

    def _load(self, near: list[DataFile], tail_at: Int64Array, low: Position, high: Position) -> list[Run]:
        runs = super()._load(near, tail_at, low, high)
        return [run.part(0, len(run.due) - 1) if len(run.due) > 5 else run for run in runs]


class BlindBehindTheHorizon(HourLog):
    """Does not look for what a file brings that is near, or late already."""

    def _load_behind_horizon(self, files: list[DataFile], settled: Settled | None = None) -> None:
        pass


class AttachesInAGather(HourLog):
    """Does not wait for a gather before rows change place."""

    async def attach(self, attachment: Attachment) -> None:
        gathering, self._gathering = self._gathering, None
        await super().attach(attachment)
        self._gathering = gathering


class ForgetsAtARestart(HourLog):
    """Starts from the mark alone, and not from the pairs that are settled besides."""

    def restore(self, settled: Settled, waiting: Placed) -> None:
        self._settling._cancelled = DueIndex()
        super().restore(settled, waiting)


WRONG: list[type[HourLog]] = [
    Early, Forgets, Doubles, Unsorted, DeafToCancels, CancelsAll, SleepsTooLong, TurnsInPlace, NeverWakes,
    SettlesTooMuch, KeepsTheCancelled, LosesOnTheWay, BlindBehindTheHorizon, AttachesInAGather, ForgetsAtARestart,
]  # fmt: skip
