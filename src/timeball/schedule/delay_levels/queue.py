"""One level's queue: what waits in it, as stretches of the consume queue; no memory for what waits.

An entry of the consume queue holds the sequence number and, in its tag field, the due time, so that the scan
opens no message. All messages of a level wait equally long: the queue is sorted by due time, and what is due is
found by a search. A clock that is set back breaks that, once a step; so does a level that got shorter. Then the
queue is several *stretches*, each sorted by itself, and none blocks another.

    … settled … | low … in the wheel, or settled out of turn … | stretch: next … end | stretch: next … end |

`low` is the level's offset, the first entry not known to be settled: that is what a checkpoint saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball.log.queue_file import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array

CHUNK = 65_536  # entries looked at in one go
PROBE = 4_096

Position = tuple[int, int]  # (due_ms, seq)


@dataclass(slots=True)
class Stretch:
    """Entries [next, end) that wait with their bodies on disk, sorted by due time."""

    next: int
    end: int
    head: Position  # of entry `next`
    last_ms: int  # due time of entry `end - 1`
    at_once: bool = False  # the clock was set back: they count as due, whatever stands in the entry


@dataclass(frozen=True, slots=True)
class Picked:
    """The first entries of a stretch. `due` is when they count as due, `size` the bytes of each message."""

    queue: LevelQueue
    stretch: Stretch
    due: Int64Array
    seq: Int64Array
    size: Int64Array


class LevelQueue:
    """See the module. `number` is the queue in the schedule topic, level - 1."""

    def __init__(self, number: int, index: QueueIndex, duration_ms: int | None) -> None:
        """`duration_ms` None: the table has no such level any more; what waits is still kept to the instant."""
        self.number, self.index = number, index
        self._duration_ms = duration_ms
        self.low = index.min_offset
        self.stretches: list[Stretch] = []

    @property
    def waiting_rows(self) -> int:
        """Entries at or above `low`, some of which may be settled out of turn."""
        return self.index.max_offset - self.low

    @property
    def first_waiting_seq(self) -> int | None:
        """The oldest row of the log that somebody still waits for."""
        return int(self.index.read(self.low, 1)["seq"][0]) if self.waiting_rows else None

    def longest_wait(self, wait_ms: int) -> None:
        """A message here was accepted for this long: no shorter table makes it wait less (never early)."""
        if self._duration_ms is not None:
            self._duration_ms = max(self._duration_ms, wait_ms)

    def extend(self, offset: int, due: Int64Array, seq: Int64Array) -> None:
        """Entries from `offset` on wait with their bodies on disk."""
        begins = np.concatenate(([0], np.flatnonzero(np.diff(due) < 0) + 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(due)], strict=True):
            last = self.stretches[-1] if self.stretches else None
            head = (int(due[begin]), int(seq[begin]))
            if last and not last.at_once and last.end == offset + begin and last.last_ms <= head[0]:
                last.end, last.last_ms = offset + end, int(due[end - 1])
            else:
                self.stretches.append(Stretch(offset + begin, offset + end, head, int(due[end - 1])))

    def rebuild(self) -> None:
        """All entries from `low` on wait with their bodies on disk; those that are settled are left out later."""
        self.stretches = []
        offset = self.low
        while offset < self.index.max_offset:
            entries = self.index.read(offset, CHUNK)
            self.extend(offset, _due(entries), _seq(entries))
            offset += len(entries)

    def notice_set_back(self, now_ms: int) -> None:
        """What is due further away than the level is long was accepted by a clock that has been set back since."""
        if self._duration_ms is None:
            return
        far_ms = now_ms + self._duration_ms
        if any(s.last_ms > far_ms and not s.at_once for s in self.stretches):
            self.stretches = [part for s in self.stretches for part in self._split(s, far_ms)]

    def head(self, now_ms: int) -> Position | None:
        """(due_ms, seq) of the earliest entry of a stretch."""
        return min(
            ((min(s.head[0], now_ms) if s.at_once else s.head[0], s.head[1]) for s in self.stretches),
            default=None,
        )

    def pick(self, until_ms: int, now_ms: int, rows_max: int) -> list[Picked]:
        """Up to `rows_max` entries of each stretch that are due up to `until_ms`; they stay where they are."""
        found = []
        for stretch in self.stretches:
            if stretch.at_once or stretch.head[0] <= until_ms:
                entries = self._first(stretch, until_ms, rows_max)
                due = _due(entries)
                if stretch.at_once:
                    due = np.minimum(due, now_ms)
                size = entries["size"].astype(np.int64)
                found.append(Picked(self, stretch, due, _seq(entries), size))
        return found

    def take(self, stretch: Stretch, count: int) -> int:
        """The first `count` entries leave the stretch; returns the offset of the first."""
        offset = stretch.next
        stretch.next += count
        if stretch.next == stretch.end:
            self.stretches.remove(stretch)
        else:
            entry = self.index.read(stretch.next, 1)
            stretch.head = (int(_due(entry)[0]), int(_seq(entry)[0]))
        return offset

    def find(self, seq: Int64Array) -> Int64Array:
        """Offsets of rows with these sequence numbers among those from `low` on; -1 for others."""
        low, high = np.full(len(seq), self.low), np.full(len(seq), self.index.max_offset)
        while True:
            open_ = low < high
            if not open_.any():
                break
            middle = (low + high) // 2
            below = np.zeros(len(seq), dtype=np.bool_)
            below[open_] = _seq(self.index.at(middle[open_])) < seq[open_]
            low = np.where(open_ & below, middle + 1, low)
            high = np.where(open_ & ~below, middle, high)
        inside = low < self.index.max_offset
        found = np.full(len(seq), -1, dtype=np.int64)
        if inside.any():
            exact = _seq(self.index.at(low[inside])) == seq[inside]
            found[np.flatnonzero(inside)[exact]] = low[inside][exact]
        return found

    def _first(self, stretch: Stretch, until_ms: int, rows_max: int) -> EntryArray:
        parts, offset, left = [], stretch.next, min(rows_max, stretch.end - stretch.next)
        step = PROBE
        while left:
            entries = self.index.read(offset, min(left, step))
            cut = len(entries)
            if not stretch.at_once:
                cut = int(np.searchsorted(_due(entries), until_ms, side="right"))
            parts.append(entries[:cut])
            if cut < len(entries):
                break
            offset, left, step = offset + cut, left - cut, CHUNK
        return np.concatenate(parts)

    def _split(self, stretch: Stretch, far_ms: int) -> list[Stretch]:
        if stretch.at_once or stretch.last_ms <= far_ms:
            return [stretch]
        low, high = stretch.next, stretch.end
        while low < high:
            middle = (low + high) // 2
            if int(_due(self.index.read(middle, 1))[0]) <= far_ms:
                low = middle + 1
            else:
                high = middle
        entry = self.index.read(low, 1)
        head = (int(_due(entry)[0]), int(_seq(entry)[0]))
        parts = [Stretch(low, stretch.end, head, stretch.last_ms, at_once=True)]
        if low > stretch.next:
            before_ms = int(_due(self.index.read(low - 1, 1))[0])
            parts.insert(0, Stretch(stretch.next, low, stretch.head, before_ms))
        return parts


def _due(entries: EntryArray) -> Int64Array:
    return entries["tag"].astype(np.int64)


def _seq(entries: EntryArray) -> Int64Array:
    return entries["seq"].astype(np.int64)
