"""Scheduled messages whose due time was given as a duration: leases, retries, delays. They follow elapsed time.

A duration becomes a due time on the scheduler's clock once, when the message is accepted. When that clock is set
afterwards, the due time in the log no longer says when the duration has passed: it has to be *shifted* by the step.

    offset    the scheduler's clock minus the boot clock, which only grows
    shift     the offset now, minus the offset when the message was accepted; nonzero only after a step

The offset changes rarely, so it is kept by sequence number: an *epoch* begins with the first row that was accepted
under another offset. The pairs (due_ms, seq) of all durations are kept beside the backlogs, 16 bytes each, and say
nothing as long as no clock is set. After a step the scheduler takes those that wait out of their backlogs' hands, and
loads them itself at their shifted due times. They keep the pairs by which outcomes and the log know them.

After a restart the rows say which are durations. They are read at the first step, and at once when the clock is behind
the last row. A row that seems to be from the future was stored before the clock was set back: it waits no longer than
its whole duration.

This knows neither leases nor topics: the broker says which messages are durations (broker/durations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from timeball.clock import OFFSET_JITTER_MS, STEP_MS, SchedulerClock
from timeball.log.reader import LogReader
from timeball.message import Int64Array
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.locations import Locations, Waiting
from timeball.schedule.outcomes import Outcomes

# 16 MB, looked at once a second. Further ones follow the wall clock, like due times.
ROWS_MAX = 1_000_000
EPOCHS_MAX = 256
# A small step back is waited for, and the offset changes for as long: it is followed so often.
FOLLOW_MS = 1_000
LOOK_ROWS = 4_096

_NONE = np.empty(0, np.int64)


Bools = npt.NDArray[np.bool_]


class Shifted(NamedTuple):
    """Messages that wait at shifted due times: when they are due now, and the pairs that outcomes know."""

    due_ms: Int64Array
    promised_ms: Int64Array
    seq: Int64Array


NOTHING = Shifted(_NONE, _NONE, _NONE)


class Found(NamedTuple):
    """Durations in rows of an earlier run, sorted by number, and when each row was stored, by the clock of then."""

    waiting: Waiting
    store_ms: Int64Array


Pairs = tuple[Int64Array, Int64Array]

# Read the durations among rows from one number to another; blocking.
Find = Callable[[LogReader, int, int], Found]


class Durations:
    """Belongs to the event loop. `next_seq`: the number that the next row of the log gets."""

    def __init__(
        self,
        outcomes: Outcomes,
        next_seq: Callable[[], int],
        clock: SchedulerClock | None = None,
        find: Find | None = None,
    ) -> None:
        """Without a clock no step is ever noticed. `find`: those of before the start, asked at the first step."""
        self._outcomes, self._next_seq, self._clock, self.find = outcomes, next_seq, clock, find
        self.begun_seq = next_seq()  # rows below it were written before this start
        self._begun_ms = 0 if clock is None else clock.now_ms()
        self._is_behind = False
        self.files_to_seq = 0  # what rows below it hold lies in files
        # Rows stored later than this start, by the clock of then, and by how much; sorted by number, mostly none.
        self._early_seq = self._early_ms = _NONE
        offset_ms = 0 if clock is None else clock.offset_ms
        self._epochs = [(-FAR_MS, offset_ms)]  # the first number, and the offset since
        self._offset_ms = self._applied_ms = offset_ms
        self._applied_elapsed_ms = -FAR_MS
        # Those that wait, and some that are settled. The scheduler appends to `newest`, as long as there is room.
        self._pairs, self.newest, self.is_full = DueIndex(), list[Pairs](), False
        self.has_changed = False  # the offset has, since the shifts were applied
        self._locations = Locations()  # of those that were written again
        # Of those that the scheduler loads itself, settled ones included.
        self.known = self._promised_by_number = (
            _NONE  # sorted; replaced, never changed: the reader thread looks
        )
        self._waiting = NOTHING  # sorted by `promised_ms`, without the settled ones at its beginning
        if clock is not None:
            clock.on_offset = self._offset_changed

    def __len__(self) -> int:
        return len(self._folded())

    def _folded(self) -> DueIndex:
        """Return all pairs."""
        if self.newest:
            due_ms, seq = (np.concatenate(columns) for columns in zip(*self.newest, strict=True))
            self.newest.clear()
            self._pairs.add(due_ms, seq)
        return self._pairs

    # -- messages ----------------------------------------------------------------------------------------------

    def begin(self, last_ms: int, files_to_seq: int) -> None:
        """Begin behind rows the last of which was stored at `last_ms`: a clock that is behind was set back meanwhile.

        What rows below `files_to_seq` hold lies in files.
        """
        self.files_to_seq = files_to_seq
        self._is_behind = self.has_changed = last_ms > self._begun_ms + OFFSET_JITTER_MS

    def adopt(self, found: Found) -> None:
        """Take note of durations of before the start. None waits longer from the start on than its whole duration."""
        waiting, later_ms = found.waiting, found.store_ms - self._begun_ms
        self._folded().add(waiting.due_ms, waiting.seq)
        self._locations.add(waiting.seq, waiting.row_seq)
        late = later_ms > 0
        self._early_seq, self._early_ms = waiting.seq[late], later_ms[late]

    def rewritten(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> None:
        """Take note of where messages lie now, as far as they are durations."""
        if len(self._folded()) and (ours := self._folded().contains(due_ms, seq)).any():
            self._locations.pop(seq[ours])
            self._locations.add(seq[ours], row_seq[ours])

    def rows_of(self, seq: Int64Array) -> Int64Array:
        """Return the rows of the log in which these messages lie, or lay before they went into a file."""
        return self._locations.rows_of(seq)

    def forget_before(self, mark_ms: int) -> None:
        """Forget what is settled: all that was due before the mark."""
        if (pairs := self._folded()).first_due_ms < mark_ms:
            _, seq = pairs.pop_before(mark_ms, 0)
            if len(self._locations):
                self._locations.pop(seq)
        self.is_full = len(self._folded()) >= ROWS_MAX

    # -- steps of the clock ------------------------------------------------------------------------------------

    def _offset_changed(self, offset_ms: int) -> None:
        """Begin an epoch. Called by the clock within the reading that shows the step, before any row follows it."""
        first_seq = self._next_seq()
        self._offset_ms, self.has_changed = offset_ms, True
        if self._epochs[-1][0] == first_seq:
            self._epochs.pop()
        self._epochs.append((first_seq, offset_ms))
        if len(self._epochs) > EPOCHS_MAX:
            # The smaller offset makes the later due time: no duration becomes shorter by this.
            self._epochs[:2] = [(self._epochs[0][0], min(self._epochs[0][1], self._epochs[1][1]))]

    @property
    def is_off(self) -> bool:
        """Return whether the shifts have changed, so that they are to be followed now."""
        if not self.has_changed:
            return False
        changed_ms = self._offset_ms - self._applied_ms
        if self._is_behind:
            return True
        # Forward at once: else a duration would end early.
        if changed_ms > OFFSET_JITTER_MS or changed_ms < -STEP_MS:
            return True
        if changed_ms >= -OFFSET_JITTER_MS or self._clock is None:
            self.has_changed = False  # and back again
            return False
        return self._clock.elapsed_ms() - self._applied_elapsed_ms >= FOLLOW_MS

    def apply(self) -> int:
        """Let the shifts be those of the offset now; return the step that they follow."""
        step_ms = self._offset_ms - self._applied_ms
        self._applied_ms, self._is_behind, self.has_changed = self._offset_ms, False, False
        if self._clock is not None:
            self._applied_elapsed_ms = self._clock.elapsed_ms()
        return step_ms

    def shift_of(self, seq: Int64Array) -> Int64Array:
        """Return by how much durations accepted in these rows are due later than the rows say; negative: earlier."""
        first_seq, offset_ms = np.array(self._epochs, np.int64).T
        shift_ms: Int64Array = self._applied_ms - offset_ms[np.searchsorted(first_seq, seq, side="right") - 1]
        if len(self._early_seq):
            at = np.minimum(np.searchsorted(self._early_seq, seq), len(self._early_seq) - 1)
            shift_ms = shift_ms - np.where(self._early_seq[at] == seq, self._early_ms[at], 0)
        return shift_ms

    def shifted(self) -> Shifted:
        """Return all that wait at other due times than their own; `contains` knows them from now on."""
        due_ms, seq = self._folded().pairs()
        shift_ms = self.shift_of(seq)
        # Those shifted before stay here, also at a shift of nothing: their backlogs may have given them up meanwhile.
        chosen = (np.abs(shift_ms) > OFFSET_JITTER_MS) | self.contains(seq)
        chosen[chosen] = self._outcomes.waits(due_ms[chosen], seq[chosen])
        promised_ms, seq, shift_ms = due_ms[chosen], seq[chosen], shift_ms[chosen]
        order = np.argsort(seq)
        self.known, self._promised_by_number = seq[order], promised_ms[order]
        self._waiting = Shifted(promised_ms + shift_ms, promised_ms, seq)
        return self._waiting

    def contains(self, seq: Int64Array) -> Bools:
        """Return which of these the scheduler loads itself."""
        return is_in(self.known, seq)

    def promised_of(self, seq: Int64Array) -> Int64Array:
        """Return the due times by which outcomes know these, of those that `shifted` returned last (any thread)."""
        promised_ms = self._promised_by_number
        # A gather of before the last step may ask for others; what it reads is thrown away.
        at = np.minimum(np.searchsorted(self.known, seq), len(promised_ms) - 1)
        return promised_ms[at] if len(promised_ms) else seq

    def first_promised_ms(self) -> int:
        """Return the earliest of those due times that is not settled: the mark must not pass it."""
        waiting = self._waiting
        while len(waiting.seq):
            head = slice(0, LOOK_ROWS)
            settled = self._outcomes.is_settled(waiting.promised_ms[head], waiting.seq[head])
            done = int(np.argmin(np.append(settled, False)))
            if done:
                waiting = self._waiting = Shifted(*(column[done:] for column in waiting))
            if done < LOOK_ROWS:
                break
        return int(waiting.promised_ms[0]) if len(waiting.seq) else FAR_MS


def is_in(known: Int64Array, seq: Int64Array) -> Bools:
    """Return which of these numbers are among `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(seq), np.bool_)
    at = np.minimum(np.searchsorted(known, seq), len(known) - 1)
    return np.asarray(known[at] == seq)
