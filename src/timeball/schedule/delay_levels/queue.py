"""One level's queue: what waits in it, as stretches of the consume queue; no memory for what waits.

An entry of the consume queue holds the sequence number and, in its tag field, the due time, so that the scan
opens no message. All messages of a level wait equally long: the queue is sorted by due time, and due entries are found
by a search. A clock that is set breaks that, once a step; so does a level that got shorter. Then the queue is several
*stretches*, each sorted by itself, and none blocks another. Entries wait for a duration, so a stretch may be due
earlier or later than its entries say: by its shift (schedule/durations.py).

    … settled … | low … opened, or settled out of turn … | stretch: next … end | stretch: next … end |

`low` is the level's offset, the first entry not known to be settled: that is what a checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from timeball.log.queue_entry import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array
from timeball.schedule.columns import CHUNK, leading
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.outcomes import Outcomes

Columns = tuple[Int64Array, Int64Array, Int64Array]  # when to release, when it was promised for, number
ShiftOf = Callable[[Int64Array], Int64Array]  # by number, how much later than it says an entry is due


@dataclass(slots=True)
class Stretch:
    """Entries [next, end) that have not been opened, sorted by due time."""

    next: int
    end: int
    head_ms: int  # due time of entry `next`
    last_ms: int  # and of entry `end - 1`
    shift_ms: int = 0  # so much later than they say the entries count as due; negative: earlier

    @property
    def first_due_ms(self) -> int:
        """Return when the first entry counts as due."""
        return self.head_ms + self.shift_ms


class LevelQueue:
    """The entries of one level. `number` is the queue in the schedule topic, level - 1."""

    def __init__(self, number: int, index: QueueIndex, duration_ms: int | None) -> None:
        """Begin at the index's first entry; `duration_ms` None: the table has no such level any more."""
        self.number, self.index = number, index
        self._duration_ms = duration_ms
        self.low = self.known = index.min_offset  # entries before `known` have been added
        self.stretches: list[Stretch] = []

    @property
    def waiting_rows(self) -> int:
        """Return how many entries from `low` on there are, some of which may be settled out of turn."""
        return self.known - self.low

    def longest_wait(self, wait_ms: int) -> None:
        """Count the level as at least this long: a shorter table must not release an accepted message early."""
        if self._duration_ms is not None:
            self._duration_ms = max(self._duration_ms, wait_ms)

    # -- coming ----------------------------------------------------------------------------------------------

    def add_new(self, near_ms: int) -> Int64Array | None:
        """Keep the entries that the index has got; return the numbers of those that count as opened.

        Only entries due up to `near_ms` may, and none behind a stretch: an offset passes both in order.
        """
        if self.known == self.index.max_offset:
            return None
        offset, entries = self.known, self.index.read(self.known, self.index.max_offset - self.known)
        self.known += len(entries)
        due, near = _due(entries), 0
        if not self.stretches:
            near = int(np.argmin(np.append(due <= near_ms, False)))
        self._extend(offset + near, due[near:])
        return _seq(entries[:near]) if near else None

    def rebuild(self, shift_of: ShiftOf | None = None) -> None:
        """Count all entries from `low` on as not opened; those that are settled are left out later."""
        self.stretches, offset, self.known = [], self.low, self.index.max_offset
        while offset < self.known:
            entries = self.index.read(offset, min(CHUNK, self.known - offset))
            self._extend(offset, _due(entries), None if shift_of is None else shift_of(_seq(entries)))
            offset += len(entries)

    def _extend(self, offset: int, due: Int64Array, shift_ms: Int64Array | None = None) -> None:
        if not len(due):
            return
        shift_ms = np.zeros(len(due), np.int64) if shift_ms is None else shift_ms
        # Wherever the instants go back, or count otherwise, another stretch begins.
        begins = np.concatenate(([0], np.flatnonzero((np.diff(due) < 0) | (np.diff(shift_ms) != 0)) + 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(due)], strict=True):
            last, head_ms = self.stretches[-1] if self.stretches else None, int(due[begin])
            shift, last_ms = int(shift_ms[begin]), int(due[end - 1])
            # The usual case: the new entries go on where the last stretch ends, and no stretch is added.
            if last and last.shift_ms == shift and last.end == offset + begin and last.last_ms <= head_ms:
                last.end, last.last_ms = offset + end, last_ms
            else:
                self.stretches.append(Stretch(offset + begin, offset + end, head_ms, last_ms, shift))

    # -- going -----------------------------------------------------------------------------------------------

    def first_due_ms(self) -> int | None:
        """Return when the first entry of a stretch counts as due."""
        return min((stretch.first_due_ms for stretch in self.stretches), default=None)

    def open(self, until_ms: int, rows_max: int) -> list[Columns]:
        """Take up to `rows_max` entries of each stretch that count as due before `until_ms`."""
        found = []
        for stretch in [stretch for stretch in self.stretches if stretch.first_due_ms < until_ms]:
            end = min(stretch.end, stretch.next + rows_max)
            entries = leading(self._read, "tag", stretch.next, end, until_ms - stretch.shift_ms)
            stretch.next += len(entries)
            if stretch.next == stretch.end:
                self.stretches.remove(stretch)
            else:
                stretch.head_ms = int(_due(self.index.read(stretch.next, 1))[0])
            due = _due(entries)
            # `due` goes along: outcomes know a promise by the instant that it was accepted for.
            found.append((due + stretch.shift_ms if stretch.shift_ms else due, due, _seq(entries)))
        return found

    def _read(self, begin: int, end: int) -> EntryArray:
        return self.index.read(begin, end - begin)

    # -- clocks ----------------------------------------------------------------------------------------------

    def notice_set_back(self, now_ms: int) -> None:
        """Let no entry wait longer than the level is long: one that would was accepted before the clock was set back.

        By how much it was set back while no broker ran is not known. The last entry of such a stretch waits for the
        whole duration, and those before it for as much less as they were accepted earlier.
        """
        if self._duration_ms is None:
            return
        for stretch in self.stretches:
            stretch.shift_ms = min(stretch.shift_ms, now_ms + self._duration_ms - stretch.last_ms)

    # -- what is settled -------------------------------------------------------------------------------------

    def first_late_ms(self) -> int:
        """Return the earliest instant of entries that count as due later; FAR_MS when none does."""
        late = (stretch.head_ms for stretch in self.stretches if stretch.shift_ms > 0)
        return min(late, default=FAR_MS)

    def advance(self, outcomes: Outcomes) -> None:
        """Move `low` past settled entries."""
        end = min((stretch.next for stretch in self.stretches), default=self.known)
        while self.low < end:
            entries = self.index.read(self.low, min(CHUNK, end - self.low))
            settled = outcomes.is_settled(_due(entries), _seq(entries))
            # Up to the first that is not settled: those settled out of turn behind it wait for it.
            count = int(np.argmin(np.append(settled, False)))
            self.low += count
            if count < len(entries):
                return

    def needed_seq(self) -> int | None:
        """Return the oldest row of the log that is needed, as of the last `advance`."""
        return int(_seq(self.index.read(self.low, 1))[0]) if self.low < self.known else None

    def find_entries(self, seq: Int64Array) -> Int64Array:
        """Return the due times of rows with these numbers among those from `low` on; -1 for others."""
        low, high = np.full(len(seq), self.low), np.full(len(seq), self.index.max_offset)
        while (open_ := low < high).any():
            middle = (low + high) // 2
            below = np.zeros(len(seq), dtype=np.bool_)
            # A bisection for all numbers at once: each round is one look-up of a column in the index.
            below[open_] = _seq(self.index.at(middle[open_])) < seq[open_]
            low = np.where(open_ & below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        inside = np.flatnonzero(low < self.index.max_offset)
        found = np.full(len(seq), -1, dtype=np.int64)
        if len(inside):
            entries = self.index.at(low[inside])
            exact = _seq(entries) == seq[inside]
            found[inside[exact]] = _due(entries)[exact]
        return found


def _due(entries: EntryArray) -> Int64Array:
    return entries["tag"].astype(np.int64)


def _seq(entries: EntryArray) -> Int64Array:
    return entries["seq"].astype(np.int64)
