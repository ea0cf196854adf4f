"""When what is in hand comes back: one heap, an entry for each batch that shares a deadline.

An entry is not taken out when its receipts come back, but passed over when its time comes; so that fast consumers
with long times do not fill the memory, the heap is swept when it has grown to twice what is in hand.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from timeball.broker.popping.window import Count, Window

SWEEP_ENTRIES_MIN = 1_024

_Entry = tuple[int, int, int, list[int], Window]  # deadline_ms, serial, pop_ms, offsets, window


class Deadlines:
    """See the module. `count`: open positions."""

    def __init__(self, count: Count) -> None:
        self._heap: list[_Entry] = []
        self._serials = itertools.count()  # decides between equal deadlines, before a Window is compared
        self._count = count

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, window: Window, offsets: list[int], pop_ms: int, deadline_ms: int) -> bool:
        """Positions of one pop; true when this is now the earliest deadline."""
        entry = (deadline_ms, next(self._serials), pop_ms, offsets, window)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > SWEEP_ENTRIES_MIN + 2 * self._count.rows:
            self._heap = [e for e in self._heap if any(True for _ in _live(e))]
            heapq.heapify(self._heap)
        return bool(self._heap) and self._heap[0] is entry

    def next_ms(self) -> int | None:
        """The earliest deadline; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[tuple[Window, list[int]]]:
        """Positions whose time is over and whose receipts have not come back; each is told once."""
        found = []
        told: set[tuple[int, int]] = set()
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            window = entry[4]
            # A time that was changed to what it had been has two entries, and both are right about it.
            offsets = [offset for offset in _live(entry) if (id(window), offset) not in told]
            told.update((id(window), offset) for offset in offsets)
            if offsets:
                found.append((window, offsets))
        return found


def _live(entry: _Entry) -> Iterator[int]:
    """What this entry still decides on: changing a time makes another entry."""
    deadline_ms, _, pop_ms, offsets, window = entry
    for offset in offsets:
        held = window.find(offset, pop_ms)
        if held is not None and held.deadline_ms == deadline_ms:
            yield offset
