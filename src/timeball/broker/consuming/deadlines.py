"""When leases end: one heap, with an entry for each batch of positions that shares a deadline.

An acknowledgement leaves its entry in the heap; the entry is passed over when its time comes. So that fast consumers
with long leases do not fill the memory, the heap is swept when it has grown to twice the number of open positions.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from timeball.broker.consuming.queue_leases import OpenCount, QueueLeases

SWEEP_ENTRIES_MIN = 1_024

_Entry = tuple[int, int, int, list[int], QueueLeases]  # deadline_ms, serial, pop_ms, offsets, queue


class Deadlines:
    """The heap. `count`: open positions of all queues."""

    def __init__(self, count: OpenCount) -> None:
        self._heap: list[_Entry] = []
        self._serials = itertools.count()  # decides between equal deadlines, before a queue is compared
        self._count = count

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, queue: QueueLeases, offsets: list[int], pop_ms: int, deadline_ms: int) -> bool:
        """Add positions that were leased together; return whether this is now the earliest deadline."""
        entry = (deadline_ms, next(self._serials), pop_ms, offsets, queue)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > SWEEP_ENTRIES_MIN + 2 * self._count.rows:
            self._heap = [e for e in self._heap if any(True for _ in _live(e))]
            heapq.heapify(self._heap)
        return bool(self._heap) and self._heap[0] is entry

    def next_ms(self) -> int | None:
        """Return the earliest deadline; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> list[tuple[QueueLeases, list[int]]]:
        """Remove and return the positions whose leases have ended without an acknowledgement; each one once."""
        found = []
        seen: set[tuple[int, int]] = set()
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            queue = entry[4]
            # A time that was changed to the value it had has two entries, and both are live.
            offsets = [offset for offset in _live(entry) if (id(queue), offset) not in seen]
            seen.update((id(queue), offset) for offset in offsets)
            if offsets:
                found.append((queue, offsets))
        return found


def _live(entry: _Entry) -> Iterator[int]:
    """Yield the positions that this entry still decides on: a changed time has an entry of its own."""
    deadline_ms, _, pop_ms, offsets, queue = entry
    for offset in offsets:
        lease = queue.lease_of(offset, pop_ms)
        if lease is not None and lease.deadline_ms == deadline_ms:
            yield offset
