"""One level's queue: what waits in it, as stretches of the consume queue; no memory for what waits.

An entry of the consume queue holds the sequence number and, in its tag field, the due time, so that the scan
opens no message. All messages of a level wait equally long: the queue is sorted by due time, and due entries are found
by a search. A clock that is set back breaks that, once a step; so does a level that got shorter. Then the queue is
several *stretches*, each sorted by itself, and none blocks another.

    … settled … | low … opened, or settled out of turn … | stretch: next … end | stretch: next … end |

`low` is the level's offset, the first entry not known to be settled: that is what a checkpoint saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball.log.queue_entry import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array
from timeball.schedule.columns import CHUNK, leading
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.outcomes import Outcomes

Columns = tuple[Int64Array, Int64Array, Int64Array]  # when to release, when it was promised for, number


@dataclass(slots=True)
class Stretch:
    """Entries [next, end) that have not been opened, sorted by due time."""

    next: int
    end: int
    head_ms: int  # due time of entry `next`
    last_ms: int  # and of entry `end - 1`
    at_once_ms: int | None = None  # the clock was set back to here: they count as due then, if not before

    @property
    def first_due_ms(self) -> int:
        """Return when the first entry counts as due."""
        return self.head_ms if self.at_once_ms is None else min(self.head_ms, self.at_once_ms)


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

    def rebuild(self) -> None:
        """Count all entries from `low` on as not opened; those that are settled are left out later."""
        self.stretches, offset, self.known = [], self.low, self.index.max_offset
        while offset < self.known:
            entries = self.index.read(offset, min(CHUNK, self.known - offset))
            self._extend(offset, _due(entries))
            offset += len(entries)

    def _extend(self, offset: int, due: Int64Array) -> None:
        if not len(due):
            return
        # Wherever the instants go back, another stretch begins.
        begins = np.concatenate(([0], np.flatnonzero(np.diff(due) < 0) + 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(due)], strict=True):
            last, head_ms = self.stretches[-1] if self.stretches else None, int(due[begin])
            # The usual case: the new entries go on where the last stretch ends, and no stretch is added.
            if last and last.at_once_ms is None and last.end == offset + begin and last.last_ms <= head_ms:
                last.end, last.last_ms = offset + end, int(due[end - 1])
            else:
                self.stretches.append(Stretch(offset + begin, offset + end, head_ms, int(due[end - 1])))

    # -- going -----------------------------------------------------------------------------------------------

    def first_due_ms(self) -> int | None:
        """Return when the first entry of a stretch counts as due."""
        return min((stretch.first_due_ms for stretch in self.stretches), default=None)

    def open(self, until_ms: int, rows_max: int) -> list[Columns]:
        """Take up to `rows_max` entries of each stretch that count as due before `until_ms`."""
        found = []
        for stretch in [stretch for stretch in self.stretches if stretch.first_due_ms < until_ms]:
            end = min(stretch.end, stretch.next + rows_max)
            # All of a stretch that counts as due at once is.
            before_ms = until_ms if stretch.at_once_ms is None else FAR_MS
            entries = leading(self._read, "tag", stretch.next, end, before_ms)
            stretch.next += len(entries)
            if stretch.next == stretch.end:
                self.stretches.remove(stretch)
            else:
                stretch.head_ms = int(_due(self.index.read(stretch.next, 1))[0])
            due = _due(entries)
            # `due` goes along: outcomes know a promise by the instant that it was accepted for.
            released = due if stretch.at_once_ms is None else np.minimum(due, stretch.at_once_ms)
            found.append((released, due, _seq(entries)))
        return found

    def _read(self, begin: int, end: int) -> EntryArray:
        return self.index.read(begin, end - begin)

    # -- clocks ----------------------------------------------------------------------------------------------

    def notice_set_back(self, now_ms: int) -> None:
        """Count entries due further away than the level is long as due now: their clock was set back since."""
        if self._duration_ms is None:
            return
        far_ms = now_ms + self._duration_ms
        if any(stretch.last_ms > far_ms for stretch in self.stretches):
            self.stretches = [part for s in self.stretches for part in self._split(s, far_ms, now_ms)]

    def _split(self, stretch: Stretch, far_ms: int, now_ms: int) -> list[Stretch]:
        if stretch.at_once_ms is not None or stretch.last_ms <= far_ms:
            return [stretch]
        low, high = stretch.next, stretch.end
        while low < high:
            middle = (low + high) // 2
            if int(_due(self.index.read(middle, 1))[0]) <= far_ms:
                low = middle + 1
            else:
                high = middle
        head_ms = int(_due(self.index.read(low, 1))[0])
        parts = [Stretch(low, stretch.end, head_ms, stretch.last_ms, at_once_ms=now_ms)]
        if low > stretch.next:
            before_ms = int(_due(self.index.read(low - 1, 1))[0])
            parts.insert(0, Stretch(stretch.next, low, stretch.head_ms, before_ms))
        return parts

    # -- what is settled -------------------------------------------------------------------------------------

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
