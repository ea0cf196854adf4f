"""One queue of one group: which positions are leased, which have come back, and where the next one stands.

    done … done | in_flight, returned, done, in_flight … | next …
                ^ first_open                             ^ next_offset

Positions are handed out from `returned` first, then from `next_offset` on. The group's stored offset may be
`first_open`, the first position that is not done. Memory is kept for open positions alone: a position before
`next_offset` that is neither in `in_flight` nor in `returned` is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timeball.log.queue_file import EntryArray

NO_RECEIPT = -1
SWEEP_POSITIONS_MIN = 1_024


@dataclass(slots=True)
class Lease:
    """One position that a consumer has, or that is being written to the log for it."""

    seq: int
    size_bytes: int
    pop_ms: int  # makes the receipt; NO_RECEIPT while no receipt is valid for the position
    deadline_ms: int
    in_order: bool = False
    times: int = 0  # in order: how many leases of this position ended without an acknowledgement


@dataclass(slots=True)
class OpenCount:
    """Open positions of all queues together, which is what memory is needed for."""

    rows: int = 0


@dataclass(slots=True, eq=False)
class QueueLeases:
    """The leases of one group in one queue. Belongs to the event loop."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int  # what was stored from here; another value there was stored by somebody else
    count: OpenCount
    in_flight: dict[int, Lease] = field(default_factory=dict)
    returned: dict[int, Lease] = field(default_factory=dict)
    acked_ahead: set[int] = field(default_factory=set)  # at or behind `next_offset`, and done already
    last_pop_ms: int = 0
    attempt_id: str = ""
    in_log: bool = False  # promises in the log stand for positions of it that are done (log_leases.py)
    _order: list[int] = field(default_factory=list)  # heap of open positions; done ones are removed late

    @property
    def first_open(self) -> int:
        """The first position that is not done."""
        order = self._order
        while order and order[0] not in self.in_flight and order[0] not in self.returned:
            heapq.heappop(order)
        return min(order[0], self.next_offset) if order else self.next_offset

    @property
    def open_rows(self) -> int:
        """The number of positions that are leased or have come back."""
        return len(self.in_flight) + len(self.returned)

    @property
    def idle(self) -> bool:
        """Whether the queue's place, which is stored, is all that is known of it."""
        return not (self.in_flight or self.returned or self.acked_ahead)

    def ahead(self) -> list[tuple[int, int]]:
        """Return the stretches [begin, end) at or behind the first open position that are done."""
        begin = self.first_open
        found = []
        for offset in sorted([*self.in_flight, *self.returned]):
            found += [(begin, offset)] if begin < offset else []
            begin = offset + 1
        found += [(begin, self.next_offset)] if begin < self.next_offset else []
        for offset in sorted(self.acked_ahead):
            if found and found[-1][1] == offset:
                found[-1] = (found[-1][0], offset + 1)
            else:
                found.append((offset, offset + 1))
        return found

    def skip_done(self, offsets: Iterable[int]) -> None:
        """Count positions as done that were handed out before a restart, and go on behind those that come next."""
        for offset in offsets:
            if offset >= self.next_offset:
                self.ack_ahead(offset)
        next_offset = self.next_offset
        while next_offset in self.acked_ahead:
            next_offset += 1
        self.advance(next_offset)

    def lease_returned(self, rows: int, pop_ms: int, deadline_ms: int, *, in_order: bool) -> list[int]:
        """Lease the lowest `rows` positions that have come back; return them."""
        offsets = sorted(self.returned)[:rows]
        for offset in offsets:
            lease = self.in_flight[offset] = self.returned.pop(offset)
            lease.pop_ms, lease.deadline_ms, lease.in_order = pop_ms, deadline_ms, in_order
        return offsets

    def lease_next(
        self, offsets: Sequence[int], entries: EntryArray, pop_ms: int, deadline_ms: int, *, in_order: bool
    ) -> None:
        """Lease positions at or behind `next_offset`; `entries` are theirs in the queue's index."""
        for offset, seq, size in zip(offsets, entries["seq"].tolist(), entries["size"].tolist(), strict=True):
            self.in_flight[offset] = Lease(seq, size, pop_ms, deadline_ms, in_order)
            heapq.heappush(self._order, offset)
            self.count.rows += 1
        if len(self._order) > SWEEP_POSITIONS_MIN + 2 * self.open_rows:
            # One position that stays open must not keep the entries of all done positions behind it.
            self._order = sorted([*self.in_flight, *self.returned])

    def ack_ahead(self, offset: int) -> None:
        """Count a position at or behind `next_offset` as done: it was handed out before a restart."""
        self.count.rows += offset not in self.acked_ahead
        self.acked_ahead.add(offset)

    def advance(self, next_offset: int) -> None:
        """Move `next_offset`: all before it has been looked at."""
        self.next_offset = next_offset
        if self.acked_ahead:
            passed = {offset for offset in self.acked_ahead if offset < next_offset}
            self.acked_ahead -= passed
            self.count.rows -= len(passed)

    def lease_of(self, offset: int, pop_ms: int) -> Lease | None:
        """Return the lease that a receipt names, while the receipt is valid."""
        lease = self.in_flight.get(offset)
        return lease if lease is not None and lease.pop_ms == pop_ms else None

    def done(self, offset: int) -> None:
        """End a lease: the group does not need this position any more."""
        if self.in_flight.pop(offset, None) is not None:
            self.count.rows -= 1

    def give_back(self, offset: int) -> None:
        """End a lease: the position waits to be handed out again, before all later ones."""
        lease = self.returned[offset] = self.in_flight.pop(offset)
        lease.pop_ms = NO_RECEIPT

    def drop_before(self, first_seq: int) -> None:
        """Forget returned positions whose rows retention has removed (before `first_seq`)."""
        gone = [offset for offset, lease in self.returned.items() if lease.seq < first_seq]
        for offset in gone:
            del self.returned[offset]
        self.count.rows -= len(gone)

    def restore(self, in_flight: dict[int, Lease], returned: dict[int, Lease], acked_ahead: set[int]) -> None:
        """Take over the leases that the last orderly stop has saved."""
        self.in_flight, self.returned, self.acked_ahead = in_flight, returned, acked_ahead
        self._order = sorted([*in_flight, *returned])
        self.count.rows += self.open_rows + len(acked_ahead)

    def forget(self) -> None:
        """Void all receipts; no position comes back."""
        self.count.rows -= self.open_rows + len(self.acked_ahead)
        self.in_flight.clear()
        self.returned.clear()
        self.acked_ahead.clear()
