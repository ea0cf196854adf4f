"""What one pop takes, queue after queue: within its number of rows, its bytes, and what may be in hand.

It runs between two awaits, so that for everybody else it is one step: a position is in hand before anybody else
can look. The first row is taken whatever its size, or a large message would never be had.
"""

from __future__ import annotations

import numpy as np

from timeball import limits
from timeball.broker.filters import Filter
from timeball.broker.popping.window import NO_RECEIPT, Held, Window
from timeball.log.queue_index import QueueIndex
from timeball.message import Int64Array

SCAN_ENTRIES = 4_096  # index entries looked at in one go when a filter passes few


class Taking:
    """See the module. `pop_ms` makes the receipts."""

    def __init__(self, rows: int, pop_ms: int, deadline_ms: int, *, in_order: bool, attempt_id: str) -> None:
        self._room = rows
        self._bytes = limits.POP_BYTES_MAX
        self.pop_ms, self.deadline_ms = pop_ms, deadline_ms
        self._in_order, self._attempt_id = in_order, attempt_id
        self.found: list[tuple[Window, int, Held]] = []
        self.unseen = False  # a queue has more that nobody has looked at yet

    @property
    def seqs(self) -> Int64Array:
        """The rows at the positions taken."""
        return np.array([held.seq for _, _, held in self.found], dtype=np.int64)

    def offsets(self) -> dict[Window, list[int]]:
        """The positions taken of each window."""
        taken: dict[Window, list[int]] = {}
        for window, offset, _ in self.found:
            taken.setdefault(window, []).append(offset)
        return taken

    def take(self, window: Window, index: QueueIndex, wanted: Filter | None) -> list[int]:
        """Take from this window what it gives and the bounds allow; the offsets taken."""
        if self._in_order and not self._may_take_in_order(window):
            return []
        offsets = self._take_again(window)
        if not window.again:  # what has come back goes before what is new
            offsets += self._take_next(window, index, wanted)
        self.found += [(window, offset, window.held[offset]) for offset in offsets]
        if offsets:
            window.last_pop_ms = self.pop_ms
            window.attempt_id = self._attempt_id
        return offsets

    def _may_take_in_order(self, window: Window) -> bool:
        """Whether nothing is in hand; a consumer that asks again since no answer reached it has nothing in hand."""
        if not window.held:
            return True
        held = window.held.values()
        if (
            not self._attempt_id
            or window.attempt_id != self._attempt_id
            or any(one.pop_ms == NO_RECEIPT or not one.in_order for one in held)
        ):
            return False
        for offset in list(window.held):
            window.give_back(offset)
        return True

    def _take_again(self, window: Window) -> list[int]:
        if not window.again:
            return []
        room = self._room_in(window, len(window.held))
        sizes = [window.again[offset].size_bytes for offset in sorted(window.again)[:room]]
        fit = self._fit(np.array(sizes, dtype=np.int64))
        return window.take_again(fit, self.pop_ms, self.deadline_ms, in_order=self._in_order)

    def _take_next(self, window: Window, index: QueueIndex, wanted: Filter | None) -> list[int]:
        room = self._room_in(window, window.open_rows)
        start = max(window.next_offset, index.min_offset)
        if room <= 0 or start >= index.max_offset:
            return []
        if wanted is None or wanted.matches_all:
            entries = index.read(start, room + len(window.done_ahead))
            at = np.arange(len(entries))
        else:
            entries = index.read(start, SCAN_ENTRIES)
            at = np.flatnonzero(wanted.candidates(entries))
        if window.done_ahead:
            at = at[[start + i not in window.done_ahead for i in at.tolist()]]
        fit = self._fit(entries["size"][at[:room]].astype(np.int64))
        offsets: list[int] = (start + at[:fit]).tolist()
        window.take_next(offsets, entries[at[:fit]], self.pop_ms, self.deadline_ms, in_order=self._in_order)
        # All before the first candidate that was left has been looked at.
        window.advance(start + (int(at[fit]) if fit < len(at) else len(entries)))
        self.unseen |= not offsets and window.next_offset < index.max_offset and self._room > 0
        return offsets

    def _room_in(self, window: Window, open_rows: int) -> int:
        return max(0, min(self._room, limits.POP_HELD_PER_QUEUE_MAX - open_rows))

    def _fit(self, sizes_bytes: Int64Array) -> int:
        """How many of these, in their order, fit into the answer."""
        fit = int(np.searchsorted(np.cumsum(sizes_bytes), self._bytes, side="right"))
        if not fit and not self.found and len(sizes_bytes):
            fit = 1
        self._bytes -= int(sizes_bytes[:fit].sum())
        self._room -= fit
        return fit
