"""The outcomes of promises: handed out, released, cancelled; the mark, which lets most be forgotten; the cursor.

    waits -> in flight -> released          handed out in order, durable in the same order
    waits -> cancelled

The *mark* (S, N) says that all promises due before S and numbered below N are settled, except those of bulk
attaches that came after it with numbers set aside before (`late`). Only what it does not cover is remembered by
name. "All is settled up to T" steps back whenever a promise comes whose instant has passed; the mark does not,
so what it covers may be forgotten. It moves on when T has caught up with it. What a paused campaign holds is excepted
for as long as it is held (holds.py), and its settled pairs are remembered.

A name is a pair (instant, number): a promise that goes on at another instant is another pair, and its old pair counts
as settled.

The *cursor* says how far the sending has come: the latest second of which a message has been sent (the tick), and
how many of that second have been sent durably (the local index). It follows from the release records alone, so a
successor that has the log has the cursor. A promise that came too late, or a clock that was set back, leaves it as it
is: it never decreases, and does not depend on the order of the records. It says how far, and not which: promises of
the tick that were cancelled are not counted, and one that came late into it may stand before others that are. Which
promises are settled is said by the pairs, so a restart from an older cursor repeats nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from timeball import limits
from timeball.message import Int64Array
from timeball.schedule.columns import FEW
from timeball.schedule.due_index import DueIndex
from timeball.schedule.holds import Holds
from timeball.schedule.moved import Moved

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Settled:
    """All settled promises: these pairs, and those due before `before_ms` with numbers below `before_seq`.

    Except, of the latter, those of the ranges `late` = (first_seq, rows): numbers that were set aside before
    `before_seq` and whose promises came after it, by a bulk attach. Of them only the pairs are settled.
    """

    before_ms: int
    due_ms: Int64Array
    seq: Int64Array
    before_seq: int = 1 << 62
    late: tuple[tuple[int, int], ...] = ()
    released: int = 0  # so many pairs, the last ones, were released; the others were cancelled or moved

    def may_wait(self, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these numbers, of promises due before `before_ms`, may not be settled."""
        waits = np.asarray(seq >= self.before_seq)
        for first_seq, rows in self.late:
            waits |= (seq >= first_seq) & (seq < first_seq + rows)
        return waits

    def may_touch(self, min_seq: int, max_seq: int) -> bool:
        """Return whether `may_wait` can be true of any number in [min_seq, max_seq]."""
        late = any(min_seq < first_seq + rows and max_seq >= first_seq for first_seq, rows in self.late)
        return late or max_seq >= self.before_seq


NOTHING_SETTLED = Settled(-(1 << 62), _NONE, _NONE, 0)


@dataclass(frozen=True, slots=True, order=True)
class ReleaseCursor:
    """`tick_ms` is the first instant of the second; 0 and 0 before anything has been sent."""

    tick_ms: int = 0
    local_index: int = 0

    def after(self, due_ms: Int64Array) -> ReleaseCursor:
        """Return the cursor when promises for these instants have been sent besides, in any order."""
        if len(due_ms) == 0:
            return self
        last_ms = int(due_ms[0]) if len(due_ms) == 1 else int(due_ms.max())
        tick_ms = last_ms - last_ms % limits.SECOND_MS
        # A promise that came too late. The cursor never decreases, or a successor would repeat seconds that were
        # sent.
        if tick_ms < self.tick_ms:
            return self
        sent = int(np.count_nonzero(due_ms >= tick_ms)) if len(due_ms) > 1 else 1
        return ReleaseCursor(tick_ms, sent + (self.local_index if tick_ms == self.tick_ms else 0))


NOTHING_SENT = ReleaseCursor()


class Outcomes:
    """Pairs are columns (due_ms, seq); `len` counts them: 16 bytes each, 32 once looked up."""

    def __init__(self) -> None:
        # Hand-outs, oldest first: (due_ms, seq, recorded_ms).
        self._in_flight: deque[tuple[Int64Array, Int64Array, Int64Array]] = deque()
        self.in_flight_rows = 0
        # Promises for an instant that are not settled durably, wherever they wait; a number that the log decides.
        self.waiting_rows = 0
        self._released, self._cancelled = DueIndex(), DueIndex()
        self._mark = NOTHING_SETTLED  # without pairs
        self.holds = Holds()
        self.moved = Moved()  # the promises that were given another instant
        self.cursor = NOTHING_SENT  # how far the sending has come, durably

    def __len__(self) -> int:
        return self.in_flight_rows + len(self._released) + len(self._cancelled)

    @property
    def cancelled_rows(self) -> int:
        """Return how many are cancelled and not covered by the mark."""
        return len(self._cancelled)

    @property
    def first_in_flight_ms(self) -> int | None:
        """Return the earliest instant of promises that are handed out and not durable."""
        return min((int(due.min()) for due, _, _ in self._in_flight), default=None)

    # -- changes -------------------------------------------------------------------------------------------

    def hand_out(self, due_ms: Int64Array, seq: Int64Array, recorded_ms: Int64Array) -> None:
        """Count these, waiting until now, as in flight. Their release records come in this order.

        `recorded_ms`: their instants as the records have them, which for a level may be earlier than `due_ms`.
        """
        self._in_flight.append((due_ms, seq, recorded_ms))
        self.in_flight_rows += len(seq)

    def released(self, seq: Int64Array) -> None:
        """Count the oldest in flight, or the first of them, as released: their records are durable."""
        handed_due, handed, recorded_ms = self._in_flight.popleft()
        count = len(seq)
        # In another order there is a mistake, and going on would lose a promise or release it twice.
        assert handed is seq or np.array_equal(handed[:count], seq), (
            "releases become durable in the order in which they were handed out"
        )
        if count < len(handed):  # large bodies: one run was several frames
            self._in_flight.appendleft((handed_due[count:], handed[count:], recorded_ms[count:]))
        self.in_flight_rows -= count
        self.waiting_rows -= count
        self._released.add(handed_due[:count], seq)
        self.cursor = self.cursor.after(recorded_ms[:count])

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Cancel those of these promises that waited until now; return which."""
        # A promise in flight does not wait: its release record was decided on first, so the cancel comes too late.
        waiting = self.waits(due_ms, seq)
        self.waiting_rows -= int(np.count_nonzero(waiting))
        self._cancelled.add(due_ms[waiting], seq[waiting])
        return waiting

    def add_settled(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Count these as released, which are no promises or have been released under another instant."""
        self._released.add(due_ms, seq)

    # -- answers -------------------------------------------------------------------------------------------

    def waits(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these are neither settled nor in flight."""
        if len(seq) <= FEW and not len(self.holds):  # as most answers of consumers are
            pairs = zip(due_ms.tolist(), seq.tolist(), strict=True)
            return np.array([self._waits(*pair) for pair in pairs], dtype=np.bool_)
        waiting = ~self.is_settled(due_ms, seq)
        for _, handed_out, _ in self._in_flight:
            # By number alone: while it is in flight a promise has one instant only.
            waiting &= ~np.isin(seq, handed_out)
        return waiting

    def may_load(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these wait and are not held."""
        waiting = self.waits(due_ms, seq)
        return waiting & ~self.holds.contains(due_ms, seq) if len(self.holds) else waiting

    def is_settled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these are cancelled, or released durably."""
        # The mark first, as it covers most; the pairs are only the exceptions to it.
        settled = (due_ms < self._mark.before_ms) & ~self._mark.may_wait(seq)
        if len(self.holds):
            settled &= ~self.holds.contains(due_ms, seq)
        settled |= self._cancelled.contains(due_ms, seq)
        settled |= self._released.contains(due_ms, seq)
        return np.asarray(settled)

    def _waits(self, due_ms: int, seq: int) -> bool:
        """Return what `waits` does, of one, while nothing is held."""
        if due_ms < self._mark.before_ms and not self._mark.may_touch(seq, seq):
            return False
        if self._cancelled.has(due_ms, seq) or self._released.has(due_ms, seq):
            return False
        return not any(bool((handed_out == seq).any()) for _, handed_out, _ in self._in_flight)

    @property
    def first_cancelled_ms(self) -> int:
        """Return the earliest instant of those that `was_cancelled` knows; FAR_MS without any."""
        return self._cancelled.first_due_ms

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these were cancelled, or moved, and are not covered by the mark."""
        return self._cancelled.contains(due_ms, seq)

    # -- the mark, and what a checkpoint saves -------------------------------------------------------------

    def move_mark(self, before_ms: int, next_seq: int) -> None:
        """Remember that all promises due before `before_ms` and numbered below `next_seq` are settled."""
        # Both numbers move together: `next_seq` is the log's end now, so every promise below it has been seen.
        if before_ms >= self._mark.before_ms:  # it never moves back
            self._mark = Settled(before_ms, _NONE, _NONE, next_seq)
            # The mark says it from now on, so memory holds pairs of the future and of the last second only.
            for index in (self._cancelled, self._released):
                due, seq = index.pop_before(before_ms, 0)
                if len(self.holds) and (held := self.holds.contains(due, seq)).any():
                    index.add(due[held], seq[held])  # the mark does not cover them
            self.moved.forget_before(before_ms)

    def add_late(self, ranges: Iterable[tuple[int, int]], new_rows: int = 0) -> None:
        """Except promises with these numbers, (first_seq, rows), from the mark: set aside long ago, they come now.

        `new_rows` of them were not counted before.
        """
        self.waiting_rows += new_rows
        self._mark = replace(self._mark, late=(*self._mark.late, *ranges))

    def hold(self, name: str, ranges: Sequence[tuple[int, int]], settled_before_ms: int) -> int:
        """Hold what waits of these ranges; return the instant before which all of them are settled."""
        # Promises that came after the mark may be due before it. Of others nothing is remembered before it.
        is_late = any(self._mark.may_touch(first_seq, first_seq + rows - 1) for first_seq, rows in ranges)
        from_ms = settled_before_ms if is_late else max(settled_before_ms, self._mark.before_ms)
        self.holds.add(name, ranges, from_ms)
        return from_ms

    def settled(self) -> Settled:
        """Return all that is settled."""
        pairs = [index.pairs() for index in (self._cancelled, self._released)]
        due, seq = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
        return replace(self._mark, due_ms=due, seq=seq, released=len(pairs[1][1]))

    def restore(
        self, settled: Settled, cursor: ReleaseCursor = NOTHING_SENT, *, waiting_rows: int = 0
    ) -> None:
        """Begin with what a checkpoint and the log behind it say: what is settled, how many wait, what was sent."""
        self.cursor, self.waiting_rows = cursor, waiting_rows
        self._mark = replace(settled, due_ms=_NONE, seq=_NONE, released=0)
        cut = len(settled.seq) - settled.released
        self._cancelled.add(settled.due_ms[:cut], settled.seq[:cut])
        self._released.add(settled.due_ms[cut:], settled.seq[cut:])
