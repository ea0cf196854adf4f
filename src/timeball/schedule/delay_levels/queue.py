"""The queue of one level: its pending messages are ranges of the consume queue, which take no memory per message.

An entry of the consume queue contains the sequence number and, in its tag field, the due time. So a scan reads no
messages. All messages of a level wait equally long, so the queue is sorted by due time, and a search finds the due
entries. A clock step breaks this order once, and so does a level that became shorter. Then the queue consists of
several *stretches*. Each is sorted, and none blocks another. Because a level is a duration, all entries of a stretch
may be due earlier or later than they state, by the *shift* of the stretch (schedule/durations.py).

    … settled … | low … opened, or settled out of order … | stretch: next … end | stretch: next … end |

`low` is the offset of the level: the first entry that is not known to be settled (released or cancelled). A checkpoint
saves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from timeball.log.queue_entry import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.model.message import Int64Array
from timeball.schedule.columns import CHUNK, leading
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.outcomes import Outcomes

Columns = tuple[Int64Array, Int64Array, Int64Array]  # release times, original due times, sequence numbers
# Maps sequence numbers to the ms by which entries are due later than they state.
ShiftOf = Callable[[Int64Array], Int64Array]


@dataclass(slots=True)
class Stretch:
    """The entries [next, end), which are not opened. They are sorted by due time."""

    next: int
    end: int
    head_ms: int  # the due time of entry `next`
    last_ms: int  # the due time of entry `end - 1`
    shift_ms: int = 0  # ms by which the entries are due later than they state; negative: earlier

    @property
    def first_due_ms(self) -> int:
        """The time at which the first entry is due, with the shift."""
        return self.head_ms + self.shift_ms


class LevelQueue:
    """The entries of one level. `number` is the queue in the schedule topic, level - 1."""

    def __init__(self, number: int, index: QueueIndex, duration_ms: int | None) -> None:
        """Start at the first entry of the index. `duration_ms` is None if the table no longer has this level."""
        self.number, self.index = number, index
        self._duration_ms = duration_ms
        self.low = self.added_to = index.min_offset  # entries before `added_to` have been added
        self.stretches: list[Stretch] = []

    @property
    def waiting_rows(self) -> int:
        """The number of entries from `low` on. Some of them may be settled, out of order."""
        return self.added_to - self.low

    def extend_duration(self, duration_ms: int) -> None:
        """Treat the level as at least `duration_ms` long: a shorter table must not release accepted messages early."""
        if self._duration_ms is not None:
            self._duration_ms = max(self._duration_ms, duration_ms)

    # -- adding entries --------------------------------------------------------------------------------------

    def add_new(self, near_ms: int) -> Int64Array | None:
        """Add the new entries of the index. Return the numbers of those that count as opened, or None.

        These are the first entries due up to `near_ms`, and only if the queue has no stretch. The reason is that the
        offset of the level passes entries in order.
        """
        if self.added_to == self.index.max_offset:
            return None
        offset, entries = self.added_to, self.index.read(self.added_to, self.index.max_offset - self.added_to)
        self.added_to += len(entries)
        due, near_count = _due(entries), 0
        if not self.stretches:
            near_count = int(np.argmin(np.append(due <= near_ms, False)))
        self._extend(offset + near_count, due[near_count:])
        return _seq(entries[:near_count]) if near_count else None

    def rebuild(self, shift_of: ShiftOf | None = None) -> None:
        """Treat all entries from `low` on as unopened. The backlog skips settled ones when it opens them."""
        self.stretches, offset, self.added_to = [], self.low, self.index.max_offset
        while offset < self.added_to:
            entries = self.index.read(offset, min(CHUNK, self.added_to - offset))
            self._extend(offset, _due(entries), None if shift_of is None else shift_of(_seq(entries)))
            offset += len(entries)

    def _extend(self, offset: int, due: Int64Array, shift_ms: Int64Array | None = None) -> None:
        """Add unopened entries from `offset` on, to the last stretch or as new stretches."""
        if not len(due):
            return
        shift_ms = np.zeros(len(due), np.int64) if shift_ms is None else shift_ms
        # A new stretch begins where due times go back, or where the shift changes.
        begins = np.concatenate(([0], np.flatnonzero((np.diff(due) < 0) | (np.diff(shift_ms) != 0)) + 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(due)], strict=True):
            last, head_ms = self.stretches[-1] if self.stretches else None, int(due[begin])
            shift, last_ms = int(shift_ms[begin]), int(due[end - 1])
            # In the usual case the new entries continue the last stretch, and no stretch is added.
            if last and last.shift_ms == shift and last.end == offset + begin and last.last_ms <= head_ms:
                last.end, last.last_ms = offset + end, last_ms
            else:
                self.stretches.append(Stretch(offset + begin, offset + end, head_ms, last_ms, shift))

    # -- opening entries -------------------------------------------------------------------------------------

    def first_due_ms(self) -> int | None:
        """Find the time at which the first entry of a stretch is due. None if there are no stretches."""
        return min((stretch.first_due_ms for stretch in self.stretches), default=None)

    def open(self, until_ms: int, rows_max: int) -> list[Columns]:
        """Open up to `rows_max` entries of each stretch that are due, with the shift, before `until_ms`."""
        opened = []
        for stretch in [stretch for stretch in self.stretches if stretch.first_due_ms < until_ms]:
            end = min(stretch.end, stretch.next + rows_max)
            entries = leading(self._read, "tag", stretch.next, end, until_ms - stretch.shift_ms)
            stretch.next += len(entries)
            if stretch.next == stretch.end:
                self.stretches.remove(stretch)
            else:
                stretch.head_ms = int(_due(self.index.read(stretch.next, 1))[0])
            due = _due(entries)
            # `due` is returned as well, because outcomes identify a message by its original due time.
            opened.append((due + stretch.shift_ms if stretch.shift_ms else due, due, _seq(entries)))
        return opened

    def _read(self, begin: int, end: int) -> EntryArray:
        return self.index.read(begin, end - begin)

    # -- clocks ----------------------------------------------------------------------------------------------

    def shorten_long_waits(self, now_ms: int) -> None:
        """Shift stretches so that no entry waits longer than the duration of the level from now on.

        An entry that would wait longer was accepted before the clock was set back, perhaps while no broker ran, so that
        the size of the step is not known. The last entry of its stretch then waits for the whole duration, and each
        earlier one for as much less as it was accepted earlier.
        """
        if self._duration_ms is None:
            return
        for stretch in self.stretches:
            stretch.shift_ms = min(stretch.shift_ms, now_ms + self._duration_ms - stretch.last_ms)

    # -- settled entries -------------------------------------------------------------------------------------

    def first_late_ms(self) -> int:
        """Find the earliest original due time of entries that are postponed. FAR_MS if there are none."""
        postponed = (stretch.head_ms for stretch in self.stretches if stretch.shift_ms > 0)
        return min(postponed, default=FAR_MS)

    def advance(self, outcomes: Outcomes) -> None:
        """Move `low` past settled entries."""
        end = min((stretch.next for stretch in self.stretches), default=self.added_to)
        while self.low < end:
            entries = self.index.read(self.low, min(CHUNK, end - self.low))
            settled = outcomes.is_settled(_due(entries), _seq(entries))
            # Only up to the first unsettled entry, although later ones may be settled already.
            count = int(np.argmin(np.append(settled, False)))
            self.low += count
            if count < len(entries):
                return

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log that is needed, as of the last `advance`. None if no row is needed."""
        return int(_seq(self.index.read(self.low, 1))[0]) if self.low < self.added_to else None

    def find_entries(self, seq: Int64Array) -> Int64Array:
        """Look up the original due times of these numbers among the entries from `low` on. -1 for other numbers."""
        low, high = np.full(len(seq), self.low), np.full(len(seq), self.index.max_offset)
        while (unfinished := low < high).any():
            middle = (low + high) // 2
            is_below = np.zeros(len(seq), dtype=np.bool_)
            # A bisection for all numbers at once: each round is one look-up of a column in the index.
            is_below[unfinished] = _seq(self.index.at(middle[unfinished])) < seq[unfinished]
            low = np.where(unfinished & is_below, middle + 1, low)
            high = np.where(unfinished & ~is_below, middle, high)
        candidates = np.flatnonzero(low < self.index.max_offset)
        due_ms = np.full(len(seq), -1, dtype=np.int64)
        if len(candidates):
            entries = self.index.at(low[candidates])
            is_exact = _seq(entries) == seq[candidates]
            due_ms[candidates[is_exact]] = _due(entries)[is_exact]
        return due_ms


def _due(entries: EntryArray) -> Int64Array:
    return entries["tag"].astype(np.int64)


def _seq(entries: EntryArray) -> Int64Array:
    return entries["seq"].astype(np.int64)
