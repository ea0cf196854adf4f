"""What has become of promises: handed out, released, cancelled, and the mark that lets most of it be forgotten.

    waits -> in flight -> released          handed out in order, durable in the same order
    waits -> cancelled

The *mark* (S, N) says that all promises due before S and numbered below N are settled, except those of bulk
attaches that came after it with numbers set aside before (`late`). Only what it does not cover is remembered by
name. "All is settled up to T" steps back whenever a promise comes whose instant has passed; the mark does not,
so what it covers may be forgotten. It moves on when T has caught up with it.

A promise is known by its instant and the number of its first row, for ever: however often a wheel or a cascade
writes it again, this does not change. It refuses releases that become durable in another order than the one in
which they were handed out: there is a mistake, and to go on would be to lose one or keep it twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from timeball.message import Int64Array
from timeball.schedule.due_index import DueIndex
from timeball.schedule.moved import Moved
from timeball.schedule.strategy import Settled
from timeball.schedule.tick import NOTHING_SENT, Tick

_NONE = np.empty(0, np.int64)
_NOTHING = Settled(-(1 << 62), _NONE, _NONE, 0)


class Settling:
    """See the module. Pairs are columns (due_ms, seq); `len` counts them: 16 bytes each, 24 once asked for."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Int64Array, Int64Array]] = deque()  # hand-outs, oldest first
        self._released, self._cancelled = DueIndex(), DueIndex()
        self._mark = _NOTHING  # without pairs
        self.moved = Moved()  # of the cancelled ones, those that go on under another number
        self.tick = NOTHING_SENT  # how far the sending has come, durably
        # Of each strategy that shares this, before which instant all it keeps is settled: the mark speaks for all.
        self.bounds: list[Callable[[], int]] = []

    def __len__(self) -> int:
        return sum(len(seq) for _, seq in self._in_flight) + len(self._released) + len(self._cancelled)

    @property
    def cancelled_rows(self) -> int:
        """Cancelled, and not yet covered by the mark."""
        return len(self._cancelled)

    @property
    def first_in_flight_ms(self) -> int | None:
        """The earliest instant of what is handed out and not durable."""
        return min((int(due[0]) for due, _ in self._in_flight), default=None)

    # -- what becomes of them ------------------------------------------------------------------------------

    def hand_out(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """These, sorted and waiting until now, are in flight. Their release records come in this order."""
        self._in_flight.append((due_ms, seq))

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """The release records of the oldest in flight, or of the first of them, are durable."""
        handed_due, handed = self._in_flight.popleft()
        count = len(seq)
        assert np.array_equal(handed[:count], seq), (
            "releases become durable in the order in which they were handed out"
        )
        if count < len(handed):  # large bodies: one run was several frames
            self._in_flight.appendleft((handed_due[count:], handed[count:]))
        self._released.add(due_ms, seq)
        self.tick = self.tick.after(due_ms)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these promises waited until now: they are cancelled, and remembered as that."""
        waiting = self.waits(due_ms, seq)
        self._cancelled.add(due_ms[waiting], seq[waiting])
        return waiting

    # -- what is known of them -----------------------------------------------------------------------------

    def waits(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these are neither settled nor in flight."""
        waiting = ~self.is_settled(due_ms, seq)
        for _, handed_out in self._in_flight:
            waiting &= ~np.isin(seq, handed_out)
        return waiting

    def is_settled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these are cancelled, or released durably."""
        settled = (due_ms < self._mark.before_ms) & ~self._mark.may_wait(seq)
        settled |= self._cancelled.contains(due_ms, seq)
        settled |= self._released.contains(due_ms, seq)
        return np.asarray(settled)

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these were cancelled, and are not covered by the mark.

        What was settled before a restart counts as cancelled: a release is covered soon, so what is remembered for
        longer than the log keeps its rows was cancelled, and of the others the log knows better.
        """
        return self._cancelled.contains(due_ms, seq)

    # -- the mark, and what a checkpoint saves -------------------------------------------------------------

    def move_mark(self, before_ms: int, next_seq: int) -> None:
        """All promises due before `before_ms` and numbered below `next_seq` are settled. It never moves back."""
        before_ms = min((before_ms, *(bound() for bound in self.bounds)))
        if before_ms >= self._mark.before_ms:
            self._mark = Settled(before_ms, _NONE, _NONE, next_seq)
            self._cancelled.pop_before(before_ms, 0)
            self._released.pop_before(before_ms, 0)
            self.moved.forget_before(before_ms)

    def add_late(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Promises with these numbers, (first_seq, rows), set aside long ago, come only now."""
        self._mark = replace(self._mark, late=(*self._mark.late, *ranges))

    def settled(self) -> Settled:
        """All that is settled."""
        pairs = [index.pairs() for index in (self._cancelled, self._released)]
        due, seq = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
        return replace(self._mark, due_ms=due, seq=seq)

    def restore(self, settled: Settled, tick: Tick = NOTHING_SENT) -> None:
        """Recovery: begin with what a checkpoint and the log behind it say is settled, and how far it has come."""
        self.tick = tick
        self._mark = replace(settled, due_ms=_NONE, seq=_NONE)
        self._cancelled.add(settled.due_ms, settled.seq)
