"""One queue of one group: which positions are in hand, which have come back, and where the next one stands.

    done … done | held, again, done, held … | next …
                ^ first_open                ^ next_offset

Positions are handed out from `again` first, then from `next_offset` on. `first_open`, the first position nobody
has done with, is what the group's stored offset may say. Memory is kept for open positions alone: whatever lies
before `next_offset` and is neither held nor in `again` is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from timeball.log.queue_file import EntryArray

NO_RECEIPT = -1
SWEEP_POSITIONS_MIN = 1_024


@dataclass(slots=True)
class Held:
    """One position in hand. `pop_ms` is what makes its receipt valid, NO_RECEIPT while it is on its way back."""

    seq: int
    size_bytes: int
    pop_ms: int
    deadline_ms: int
    in_order: bool = False
    times: int = 0  # in order: how often it has been in hand before


@dataclass(slots=True)
class Count:
    """Open positions of all windows together, which is what memory is needed for."""

    rows: int = 0


@dataclass(slots=True, eq=False)
class Window:
    """See the module. `stored_offset`: what we stored last; anything else there was stored by somebody else."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int
    count: Count
    held: dict[int, Held] = field(default_factory=dict)
    again: dict[int, Held] = field(default_factory=dict)
    done_ahead: set[int] = field(default_factory=set)  # at or behind `next_offset`, and yet done
    last_pop_ms: int = 0
    attempt_id: str = ""
    promised: bool = False  # promises in the log stand for positions of it that are done (../receiving/)
    _order: list[int] = field(default_factory=list)  # heap; positions that are done are taken off late

    @property
    def first_open(self) -> int:
        """The first position nobody has done with."""
        order = self._order
        while order and order[0] not in self.held and order[0] not in self.again:
            heapq.heappop(order)
        return min(order[0], self.next_offset) if order else self.next_offset

    @property
    def open_rows(self) -> int:
        """Positions in hand or come back."""
        return len(self.held) + len(self.again)

    @property
    def idle(self) -> bool:
        """Whether forgetting this window forgets nothing but its place, which is stored."""
        return not (self.held or self.again or self.done_ahead)

    def ahead(self) -> list[tuple[int, int]]:
        """Stretches [begin, end) at or behind the first open position that are done."""
        begin = self.first_open
        found = []
        for offset in sorted([*self.held, *self.again]):
            found += [(begin, offset)] if begin < offset else []
            begin = offset + 1
        found += [(begin, self.next_offset)] if begin < self.next_offset else []
        for offset in sorted(self.done_ahead):
            if found and found[-1][1] == offset:
                found[-1] = (found[-1][0], offset + 1)
            else:
                found.append((offset, offset + 1))
        return found

    def done_already(self, offsets: Iterable[int]) -> None:
        """These have been handed out and are done, before a restart; go on behind those that come next."""
        for offset in offsets:
            if offset >= self.next_offset:
                self.finish_ahead(offset)
        next_offset = self.next_offset
        while next_offset in self.done_ahead:
            next_offset += 1
        self.advance(next_offset)

    def take_again(self, rows: int, pop_ms: int, deadline_ms: int, *, in_order: bool) -> list[int]:
        """Hand out the lowest `rows` positions that have come back."""
        taken = sorted(self.again)[:rows]
        for offset in taken:
            held = self.held[offset] = self.again.pop(offset)
            held.pop_ms, held.deadline_ms, held.in_order = pop_ms, deadline_ms, in_order
        return taken

    def take_next(
        self, offsets: Sequence[int], entries: EntryArray, pop_ms: int, deadline_ms: int, *, in_order: bool
    ) -> None:
        """Hand out positions at or behind `next_offset`; `entries` are theirs in the queue's index."""
        for offset, seq, size in zip(offsets, entries["seq"].tolist(), entries["size"].tolist(), strict=True):
            self.held[offset] = Held(seq, size, pop_ms, deadline_ms, in_order)
            heapq.heappush(self._order, offset)
            self.count.rows += 1
        if len(self._order) > SWEEP_POSITIONS_MIN + 2 * self.open_rows:
            # One position that is never given back must not keep the places of all behind it.
            self._order = sorted([*self.held, *self.again])

    def finish_ahead(self, offset: int) -> None:
        """A position at or behind `next_offset` is done: it was handed out before a restart."""
        self.count.rows += offset not in self.done_ahead
        self.done_ahead.add(offset)

    def advance(self, next_offset: int) -> None:
        """All before `next_offset` has been looked at."""
        self.next_offset = next_offset
        if self.done_ahead:
            passed = {offset for offset in self.done_ahead if offset < next_offset}
            self.done_ahead -= passed
            self.count.rows -= len(passed)

    def find(self, offset: int, pop_ms: int) -> Held | None:
        """What this receipt is for, while it is valid."""
        held = self.held.get(offset)
        return held if held is not None and held.pop_ms == pop_ms else None

    def done(self, offset: int) -> None:
        """Nobody needs this position any more."""
        if self.held.pop(offset, None) is not None:
            self.count.rows -= 1

    def give_back(self, offset: int) -> None:
        """The position waits to be handed out again, before all later ones; its receipt is void."""
        held = self.again[offset] = self.held.pop(offset)
        held.pop_ms = NO_RECEIPT

    def let_go(self, first_seq: int) -> None:
        """Rows before `first_seq` are gone: what has come back of them cannot be handed out again."""
        gone = [offset for offset, held in self.again.items() if held.seq < first_seq]
        for offset in gone:
            del self.again[offset]
        self.count.rows -= len(gone)

    def restore(self, held: dict[int, Held], again: dict[int, Held], done_ahead: set[int]) -> None:
        """Go on where a window of the same queue has ended (in_flight.py)."""
        self.held, self.again, self.done_ahead = held, again, done_ahead
        self._order = sorted([*held, *again])
        self.count.rows += self.open_rows + len(done_ahead)

    def forget(self) -> None:
        """All receipts are void, and nothing comes back."""
        self.count.rows -= self.open_rows + len(self.done_ahead)
        self.held.clear()
        self.again.clear()
        self.done_ahead.clear()
