"""The positions that one request gets, queue after queue: within its rows, its bytes, and the bounds on leases.

It runs between two awaits, so that for all others it is one step: a position is leased before another consumer can
look. The first row is taken whatever its size, or a large message could never be received.
"""

from __future__ import annotations

import numpy as np

from timeball import limits
from timeball.broker.consuming.queue_leases import NO_RECEIPT, Lease, QueueLeases
from timeball.broker.filters import Filter
from timeball.broker.filters.filter import BoolArray
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array

SCAN_ENTRIES = 4_096  # index entries looked at in one go when a filter passes few

Found = tuple[QueueLeases, int, Lease]  # a queue, a position of it, and the position's lease


class Selection:
    """What one request has leased so far. `pop_ms` makes the receipts, NO_RECEIPT for leases kept in the log."""

    def __init__(self, rows: int, pop_ms: int, deadline_ms: int, *, in_order: bool, attempt_id: str) -> None:
        self._room = rows
        self._bytes = limits.POP_BYTES_MAX
        self.pop_ms, self.deadline_ms = pop_ms, deadline_ms
        self._in_order, self._attempt_id = in_order, attempt_id
        self.found: list[Found] = []
        self.queues: list[QueueLeases] = []  # all that were looked at
        self.unseen = False  # a queue has entries that have not been looked at
        self.rest = 0  # about how many rows the queues still hold

    @property
    def seqs(self) -> Int64Array:
        """The rows at the positions found."""
        return np.array([lease.seq for _, _, lease in self.found], dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """The bytes of the messages found."""
        return sum(lease.size_bytes for _, _, lease in self.found)

    def offsets(self) -> dict[QueueLeases, list[int]]:
        """Return the positions found of each queue."""
        found: dict[QueueLeases, list[int]] = {}
        for queue, offset, _ in self.found:
            found.setdefault(queue, []).append(offset)
        return found

    def split_unwanted(self, keep: BoolArray) -> list[Found]:
        """Remove what is not to be kept, and return it."""
        both = list(zip(self.found, keep.tolist(), strict=True))
        self.found = [one for one, is_wanted in both if is_wanted]
        return [one for one, is_wanted in both if not is_wanted]

    def lease(self, queue: QueueLeases, index: QueueIndex, wanted: Filter | None) -> list[int]:
        """Lease from this queue what it has and the bounds allow; return the positions."""
        self.queues.append(queue)
        if self._in_order and not self._may_lease_in_order(queue):
            return []
        offsets = self._lease_returned(queue)
        if not queue.returned:  # what has come back goes before what is new
            offsets += self._lease_next(queue, index, wanted)
        self.found += [(queue, offset, queue.in_flight[offset]) for offset in offsets]
        if offsets:
            queue.last_pop_ms = max(queue.last_pop_ms, self.pop_ms)
            queue.attempt_id = self._attempt_id
        return offsets

    def _may_lease_in_order(self, queue: QueueLeases) -> bool:
        """Whether no lease is open; a consumer that repeats its request since no answer came has none."""
        if not queue.in_flight:
            return True
        if (
            not self._attempt_id
            or queue.attempt_id != self._attempt_id
            or any(one.pop_ms == NO_RECEIPT or not one.in_order for one in queue.in_flight.values())
        ):
            return False
        for offset in list(queue.in_flight):
            queue.give_back(offset)
        return True

    def _lease_returned(self, queue: QueueLeases) -> list[int]:
        if not queue.returned:
            return []
        room = self._room_in(len(queue.in_flight))
        sizes = [queue.returned[offset].size_bytes for offset in sorted(queue.returned)[:room]]
        fit = self._fit(np.array(sizes, dtype=np.int64))
        return queue.lease_returned(fit, self.pop_ms, self.deadline_ms, in_order=self._in_order)

    def _lease_next(self, queue: QueueLeases, index: QueueIndex, wanted: Filter | None) -> list[int]:
        room = self._room_in(queue.open_rows)
        start = max(queue.next_offset, index.min_offset)
        if room <= 0 or start >= index.max_offset:
            return []
        if wanted is None or wanted.matches_all:
            entries = index.read(start, room + len(queue.acked_ahead))
            at = np.arange(len(entries))
        else:
            entries = index.read(start, SCAN_ENTRIES)
            at = np.flatnonzero(wanted.candidates(entries))
        if queue.acked_ahead:
            at = at[[start + i not in queue.acked_ahead for i in at.tolist()]]
        fit = self._fit(entries["size"][at[:room]].astype(np.int64))
        offsets: list[int] = (start + at[:fit]).tolist()
        queue.lease_next(offsets, entries[at[:fit]], self.pop_ms, self.deadline_ms, in_order=self._in_order)
        # All before the first candidate that was left has been looked at.
        queue.advance(start + (int(at[fit]) if fit < len(at) else len(entries)))
        self.unseen |= not offsets and queue.next_offset < index.max_offset and self._room > 0
        return offsets

    def _room_in(self, open_rows: int) -> int:
        return max(0, min(self._room, limits.POP_HELD_PER_QUEUE_MAX - open_rows))

    def _fit(self, sizes_bytes: Int64Array) -> int:
        """Return how many of these, in their order, fit into the answer."""
        fit = int(np.searchsorted(np.cumsum(sizes_bytes), self._bytes, side="right"))
        if not fit and not self.found and len(sizes_bytes):
            fit = 1
        self._bytes -= int(sizes_bytes[:fit].sum())
        self._room -= fit
        return fit
