"""Durations: scheduled messages with a relative due time (retries, delays). They follow elapsed time.

When a message is accepted, its duration is converted once to a due time on the scheduler's clock. If that clock is set
afterwards, the due time in the log no longer matches the elapsed time and must be *shifted* by the step.

    offset    the scheduler's clock minus the boot clock, which only grows
    shift     the offset now, minus the offset when the message was accepted; nonzero only after a step

The offset changes rarely, so it is stored by sequence number: an *epoch* begins with the first row that was accepted
under another offset. The pairs (due_ms, seq) of all durations are stored beside the backlogs, 16 bytes each. They have
no effect until a clock is set. After a step the scheduler takes the pending ones out of their backlogs and loads them
itself at their shifted due times. Outcomes and the log still identify them by the original pairs.

After a restart the rows in the log show which messages are durations. They are read at the first clock step, or at
once if the clock is behind the store time of any row. Such a row was stored before the clock was set back. Its message
waits at most its whole duration, counted from the start.

This module does not depend on leases or topics: the broker decides which messages are durations
(broker/accepting/durations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from timeball.io.clock import OFFSET_JITTER_MS, STEP_MS, SchedulerClock
from timeball.log.reader import LogReader
from timeball.model.message import Int64Array
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.locations import Locations, Waiting
from timeball.schedule.outcomes import Outcomes

# 16 MB, scanned once a second. Further durations follow the wall clock, like due times.
ROWS_MAX = 1_000_000
# With more epochs than this the two oldest are merged.
EPOCHS_MAX = 256
# The clock stands still during a small step back, and the offset changes all that time. It is followed at this
# interval, in ms.
FOLLOW_MS = 1_000
# Pairs that `first_original_due_ms` checks at a time.
LOOK_ROWS = 4_096

_NONE = np.empty(0, np.int64)


Bools = npt.NDArray[np.bool_]
Pairs = tuple[Int64Array, Int64Array]  # (due_ms, seq)


class Shifted(NamedTuple):
    """Pending messages at shifted due times, with the original due times, by which outcomes identify them."""

    due_ms: Int64Array
    original_due_ms: Int64Array
    seq: Int64Array


NOTHING = Shifted(_NONE, _NONE, _NONE)


class StoredDurations(NamedTuple):
    """Durations in the rows of earlier runs, sorted by number, with the time at which each row was stored."""

    waiting: Waiting
    store_ms: Int64Array


# Reads the durations in the rows of the log from the first number up to the second one, not included. Blocks.
Find = Callable[[LogReader, int, int], StoredDurations]


class Durations:
    """All durations and their shifts. Belongs to the event loop."""

    def __init__(
        self,
        outcomes: Outcomes,
        next_seq: Callable[[], int],
        clock: SchedulerClock | None = None,
        find: Find | None = None,
    ) -> None:
        """`next_seq` returns the number of the next row of the log.

        Without a clock no step is ever noticed. `find` reads the durations from before the start. The scheduler calls
        it at the first step.
        """
        self._outcomes, self._next_seq, self._clock, self.find = outcomes, next_seq, clock, find
        self.begun_seq = next_seq()  # rows below it were written before this start
        self._begun_ms = 0 if clock is None else clock.now_ms()
        # True from `begin` to the first `apply` if the clock is behind the newest row.
        self._is_behind = False
        self.files_to_seq = 0  # messages in rows below it are in files
        # The numbers of durations whose rows were stored later than this start, and the difference in ms. Sorted by
        # number, usually empty.
        self._future_seq = self._future_ms = _NONE
        offset_ms = 0 if clock is None else clock.offset_ms
        self._epochs = [(-FAR_MS, offset_ms)]  # (first number, offset in ms from there on)
        self._offset_ms = self._applied_ms = offset_ms
        self._applied_elapsed_ms = -FAR_MS
        # The pairs of pending durations, and of some settled ones. The scheduler appends new ones to `newest`, unless
        # `is_full`. `_index` moves them to `_pairs`.
        self._pairs, self.newest, self.is_full = DueIndex(), list[Pairs](), False
        self.has_changed = False  # true if the shifts may have to be applied, see `is_off`
        self._locations = Locations()  # of the durations that were rewritten
        # The numbers of the shifted durations (settled ones included), which the scheduler loads itself, and their
        # original due times in the same order. Sorted by number. Replaced, never changed in place, because the reader
        # thread reads them.
        self.shifted_seqs = self._original_due_by_number = _NONE
        # Sorted by `original_due_ms`. Settled pairs at its beginning are removed.
        self._pending_shifted = NOTHING
        if clock is not None:
            clock.on_offset = self._offset_changed

    def __len__(self) -> int:
        return len(self._index())

    def _index(self) -> DueIndex:
        """Move the newest pairs into the index and return it."""
        if self.newest:
            due_ms, seq = (np.concatenate(columns) for columns in zip(*self.newest, strict=True))
            self.newest.clear()
            self._pairs.add(due_ms, seq)
        return self._pairs

    # -- messages ----------------------------------------------------------------------------------------------

    def begin(self, newest_ms: int, files_to_seq: int) -> None:
        """Start after an earlier run whose newest row was stored at `newest_ms`.

        If the clock is behind `newest_ms`, it was set back, perhaps before the last rows were stored. Messages in rows
        below `files_to_seq` are in files.
        """
        self.files_to_seq = files_to_seq
        self._is_behind = self.has_changed = newest_ms > self._begun_ms + OFFSET_JITTER_MS

    def add_stored(self, stored: StoredDurations) -> None:
        """Add durations from before the start. None of them waits longer than its whole duration from the start on."""
        waiting, later_ms = stored.waiting, stored.store_ms - self._begun_ms
        self._index().add(waiting.due_ms, waiting.seq)
        self._locations.add(waiting.seq, waiting.row_seq)
        # Stored later than the start by this clock, so the clock was set back. `shift_of` subtracts the difference.
        in_future = later_ms > 0
        self._future_seq, self._future_ms = waiting.seq[in_future], later_ms[in_future]

    def rewritten(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> None:
        """Record the new rows of the durations among these messages."""
        # `pop` first: a message that is rewritten twice must not have two locations.
        if len(self._index()) and (is_duration := self._index().contains(due_ms, seq)).any():
            self._locations.pop(seq[is_duration])
            self._locations.add(seq[is_duration], row_seq[is_duration])

    def rows_of(self, seq: Int64Array) -> Int64Array:
        """Find the rows of the log that contain these messages, or contained them before a file did."""
        return self._locations.rows_of(seq)

    def forget_before(self, mark_ms: int) -> None:
        """Forget the durations due before the mark, which are settled (released or cancelled)."""
        if (pairs := self._index()).first_due_ms < mark_ms:
            _, seq = pairs.pop_before(mark_ms, 0)
            if len(self._locations):
                self._locations.pop(seq)
        self.is_full = len(self._index()) >= ROWS_MAX

    # -- steps of the clock ------------------------------------------------------------------------------------

    def _offset_changed(self, offset_ms: int) -> None:
        """Begin an epoch with the next row of the log.

        The clock calls this within the reading that shows the step, so no row was accepted in between.
        """
        first_seq = self._next_seq()
        self._offset_ms, self.has_changed = offset_ms, True
        # No row was accepted in the last epoch, so the new one replaces it.
        if self._epochs[-1][0] == first_seq:
            self._epochs.pop()
        self._epochs.append((first_seq, offset_ms))
        if len(self._epochs) > EPOCHS_MAX:
            # The smaller offset gives the later due time, so this makes no duration shorter.
            self._epochs[:2] = [(self._epochs[0][0], min(self._epochs[0][1], self._epochs[1][1]))]

    @property
    def is_off(self) -> bool:
        """True if the shifts must be applied now, because the offset has changed."""
        if not self.has_changed:
            return False
        if self._is_behind:
            return True
        changed_ms = self._offset_ms - self._applied_ms
        # A step forward is followed at once, else a duration would end early. So is a large step back.
        if changed_ms > OFFSET_JITTER_MS or changed_ms < -STEP_MS:
            return True
        if changed_ms >= -OFFSET_JITTER_MS or self._clock is None:
            self.has_changed = False  # the offset has returned to the applied one
            return False
        # During a small step back, the offset changes all the time.
        return self._clock.elapsed_ms() - self._applied_elapsed_ms >= FOLLOW_MS

    def apply(self) -> int:
        """Make `shift_of` use the current offset. Returns the change of the offset since the last call, in ms."""
        step_ms = self._offset_ms - self._applied_ms
        self._applied_ms, self._is_behind, self.has_changed = self._offset_ms, False, False
        if self._clock is not None:
            self._applied_elapsed_ms = self._clock.elapsed_ms()
        return step_ms

    def shift_of(self, seq: Int64Array) -> Int64Array:
        """Compute how many ms later than their rows state these durations are due. Negative: earlier."""
        first_seq, offset_ms = np.array(self._epochs, np.int64).T
        shift_ms: Int64Array = self._applied_ms - offset_ms[np.searchsorted(first_seq, seq, side="right") - 1]
        # Durations that were stored later than the start count from the start (see `add_stored`).
        if len(self._future_seq):
            indexes = np.minimum(np.searchsorted(self._future_seq, seq), len(self._future_seq) - 1)
            shift_ms = shift_ms - np.where(self._future_seq[indexes] == seq, self._future_ms[indexes], 0)
        return shift_ms

    def shifted(self) -> Shifted:
        """Collect all pending durations with shifted due times. From now on `contains` is true for exactly these."""
        due_ms, seq = self._index().pairs()
        shift_ms = self.shift_of(seq)
        # Durations that were shifted before stay included, even with a shift of 0: their backlogs may have opened them
        # meanwhile.
        is_included = (np.abs(shift_ms) > OFFSET_JITTER_MS) | self.contains(seq)
        # Settled durations are removed from the mask.
        is_included[is_included] = self._outcomes.are_pending(due_ms[is_included], seq[is_included])
        original_due_ms, seq, shift_ms = due_ms[is_included], seq[is_included], shift_ms[is_included]
        order = np.argsort(seq)
        self.shifted_seqs, self._original_due_by_number = seq[order], original_due_ms[order]
        self._pending_shifted = Shifted(original_due_ms + shift_ms, original_due_ms, seq)
        return self._pending_shifted

    def contains(self, seq: Int64Array) -> Bools:
        """Compute a mask of the numbers that are shifted durations, which the scheduler loads itself."""
        return is_in(self.shifted_seqs, seq)

    def original_due_times(self, seq: Int64Array) -> Int64Array:
        """Find the original due times of messages that the last `shifted` returned (any thread).

        The result for other numbers has no meaning.
        """
        original_due_ms = self._original_due_by_number
        # A gather that began before the last step may ask for other numbers. Its result is discarded.
        indexes = np.minimum(np.searchsorted(self.shifted_seqs, seq), len(original_due_ms) - 1)
        return original_due_ms[indexes] if len(original_due_ms) else seq

    def first_original_due_ms(self) -> int:
        """Find the earliest original due time among the pending shifted durations. FAR_MS if there are none.

        The mark (outcomes.py) must not pass it.
        """
        pending = self._pending_shifted
        while len(pending.seq):
            # Settled pairs are removed from the beginning, LOOK_ROWS at a time. Usually the first rows contain a
            # pending pair.
            head = slice(0, LOOK_ROWS)
            settled = self._outcomes.is_settled(pending.original_due_ms[head], pending.seq[head])
            settled_rows = int(np.argmin(np.append(settled, False)))
            if settled_rows:
                pending = self._pending_shifted = Shifted(*(column[settled_rows:] for column in pending))
            if settled_rows < LOOK_ROWS:
                break
        return int(pending.original_due_ms[0]) if len(pending.seq) else FAR_MS


def is_in(sorted_seqs: Int64Array, seq: Int64Array) -> Bools:
    """Compute a mask of the numbers that are in `sorted_seqs`."""
    if not len(sorted_seqs):
        return np.zeros(len(seq), np.bool_)
    indexes = np.minimum(np.searchsorted(sorted_seqs, seq), len(sorted_seqs) - 1)
    return np.asarray(sorted_seqs[indexes] == seq)
