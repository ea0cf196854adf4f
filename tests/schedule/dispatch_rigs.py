"""`hour_log` with a dispatcher beside it, who brings what he reads in the files: all, nothing, half, twice, too late.

He acts between two ticks, as a request on the loop does. What he brings is handed out, if it may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tests.schedule.rigs import GATHER_BYTES, HourLogRig
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball.message import Int64Array, int64
from timeball.schedule.hour_log.dispatched import Dispatched, Window
from timeball.schedule.hour_log.pending import load
from timeball.schedule.hour_log.placement import FIRST, NEVER
from timeball.schedule.hour_log.store import HourLog
from timeball.table.data_file import Position

LEASE_MS, PAUSE_MS = 9_000, 4_000  # he is at work for so long, and away for so long
LATE_MS = 1_500

Times = Callable[[Int64Array, Int64Array], Int64Array]  # (due_ms, seq) -> how often each is brought now


def everything(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.ones(len(seq), np.int64)


def nothing(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.zeros(len(seq), np.int64)


def half(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return seq % 2


def twice(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.full(len(seq), 2)


def too_late(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return (late_ms >= LATE_MS).astype(np.int64)


def anyhow(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    """Of six promises two are brought, and one each twice, never, too late, and only while nobody looks."""
    return np.choose(seq % 6, [1, 1, 2, 0, too_late(late_ms, seq), (late_ms % 2).astype(np.int64)])


class Watched(HourLog):
    """See the module."""

    times: Times = staticmethod(everything)
    brought: ClassVar[int] = 0  # of all of them: how much was taken

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        is_at_work = now_ms % (LEASE_MS + PAUSE_MS) < LEASE_MS
        if is_at_work and not self.dispatched.is_leased(now_ms):
            self.dispatched.lease(now_ms, LEASE_MS)
        for batch in self.read(now_ms, limit):
            taken = self.bring(batch)
            if taken is not None:
                Watched.brought += taken.num_rows
                return taken
        return super().due(now_ms, limit)

    def read(self, now_ms: int, limit: int) -> list[pa.RecordBatch]:
        """What is due and lies in files, wherever else it is; and rows nobody ever wrote."""
        rows = load(self.pending.all(), FIRST, (now_ms + 1, 0))
        if rows is None:
            return []
        due, seq = int64(rows["due_ms"]), int64(rows["seq"])
        rows = rows.take(pa.array(np.repeat(np.arange(len(seq)), self.times(now_ms - due, seq))))
        strange = rows.slice(0, 3)
        parts = [rows.slice(at, limit) for at in range(0, rows.num_rows, limit)]
        return [*(other(strange, name) for name in ("seq", "due_ms")), *parts] if rows.num_rows else []


def bring(world: World, seqs: list[int]) -> list[int]:
    """A dispatcher reads these in their files and brings them in this order; returns what was taken of them."""
    assert isinstance(world.strategy, HourLog)
    rows = load(world.live_files(), FIRST, NEVER)
    assert rows is not None
    at = [int(np.flatnonzero(int64(rows["seq"]) == seq)[0]) for seq in seqs]
    taken = world.strategy.bring(rows.take(pa.array(at, pa.int64()))) if seqs else None
    return [] if taken is None else [seq for _, seq in world.model.hand_out(taken, world.now_ms, len(seqs))]


def other(rows: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """The same rows with other numbers, or other instants."""
    return rows.set_column(rows.schema.get_field_index(name), name, pc.subtract(rows[name], 1_000_000_007))


class DispatchRig(HourLogRig):
    """An hour log that leaves to its dispatcher what is overdue, too: more is left to him that way."""

    hands = 2

    def __init__(
        self, times: Times = everything, strategy: type[Watched] = Watched, gather_bytes: int = GATHER_BYTES
    ) -> None:
        super().__init__(strategy, gather_bytes)
        self._times = times

    def start(self, world: World, restart: Restart) -> HourLog:
        strategy = super().start(world, restart)
        assert isinstance(strategy, Watched)
        strategy.times = self._times
        strategy.dispatched._grace_ms = 0
        strategy.dispatched.__class__ = TakesAll
        return strategy


class TakesAll(Dispatched):
    """See DispatchRig."""

    def begin(self, now_ms: int) -> Position:
        return FIRST if self.is_leased(now_ms) else NEVER


# -- negative controls -----------------------------------------------------------------------------------------


class BelievesHim(Watched):
    """Takes whatever the dispatcher brings."""

    def bring(self, promises: pa.RecordBatch) -> pa.RecordBatch | None:
        return promises


class TakesTwice(Watched):
    """Does not note what has been brought."""

    def bring(self, promises: pa.RecordBatch) -> pa.RecordBatch | None:
        dispatched = self.dispatched
        size = len(dispatched)
        windows = [Window(w.due, w.seq, w.is_open.copy(), w.cursor) for w in dispatched._windows]
        taken = super().bring(promises)
        dispatched._windows, dispatched._size = windows, size
        return taken


class BringsTheCancelled(Watched):
    """Does not ask whether what is brought was cancelled meanwhile."""

    def bring(self, promises: pa.RecordBatch) -> pa.RecordBatch | None:
        settling = self._settling
        was_cancelled, settling.was_cancelled = (
            settling.was_cancelled,
            lambda due, seq: np.zeros(len(seq), bool),
        )
        try:
            return super().bring(promises)
        finally:
            settling.was_cancelled = was_cancelled


class NeverLooksBehind(Watched):
    """Relies on its dispatcher."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self.dispatched.fetch_if_needed = lambda *arguments: None
        return super().due(now_ms, limit)


class SettlesWhatIsOut(Watched):
    """Calls settled what it has left to somebody else."""

    def _settled_before_ms(self) -> int:
        windows, self.dispatched._windows = self.dispatched._windows, []
        before_ms = super()._settled_before_ms()
        self.dispatched._windows = windows
        return before_ms


class CannotCancelWhatIsOut(Watched):
    """Says of what it has left to somebody else that it waits no more."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> np.ndarray:
        contains, self.dispatched.contains = (
            self.dispatched.contains,
            lambda due, seq: np.zeros(len(seq), bool),
        )
        try:
            return super().cancel(due_ms, seq)
        finally:
            self.dispatched.contains = contains


WRONG_WITH_A_DISPATCHER: list[type[Watched]] = [
    BelievesHim, TakesTwice, BringsTheCancelled, NeverLooksBehind, SettlesWhatIsOut, CannotCancelWhatIsOut,
]  # fmt: skip
