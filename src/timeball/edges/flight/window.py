"""The unanswered batches of one send stream, in order, with limits for their number and bytes.

    the stream reads     enter(bytes) … None while the window is full. Then the stream stops reading, and HTTP/2 stops
                         the client: this is the back-pressure
    the broker answers   slot.settle(answer) … in any order
    the stream answers   pop_answer() … the settled answers at the front, in the order of their batches

A slot counts towards the number of batches until its answer is taken. So a client that never reads its answers stops
itself. The bytes of a slot only count until it is settled. So such a client cannot hold the bytes that all streams
share.

Invariant: each entered slot is settled at most once, and its answer is taken at most once. After `abort` neither
callback is called again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from timeball.edges.shared.shared_limits import MemoryQuota

BATCHES_MAX = 1_024  # of one stream
BYTES_MAX = 16 * 1024 * 1024  # of one stream
BYTES_ALL_STREAMS_MAX = 64 * 1024 * 1024  # one address alone may hold half of it


class Slot:
    """The slot of one batch in its window."""

    __slots__ = ("_window", "answer", "size_bytes")

    def __init__(self, window: Window, size_bytes: int) -> None:
        self._window = window
        self.size_bytes = size_bytes
        self.answer: bytes | None = None

    def settle(self, answer: bytes) -> None:
        """Store the answer to the batch."""
        self._window._settle(self, answer)


class Window:
    """The slots of one stream. Belongs to the event loop."""

    def __init__(
        self,
        budget: MemoryQuota,
        address: str,
        on_room: Callable[[], None],
        on_answer: Callable[[], None],
        batches_max: int = BATCHES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """Make an empty window. `budget` limits the bytes of all streams, and `address` is the client's.

        `on_room` is called when `enter` may succeed again. `on_answer` is called when the slot at the front is settled.
        """
        self._budget, self._address = budget, address
        self._on_room, self._on_answer = on_room, on_answer
        self._batches_max, self._bytes_max = batches_max, bytes_max
        self._slots: deque[Slot] = deque()  # in the order in which the batches entered
        self._bytes = 0
        self._asked_bytes: int | None = None  # bytes that wait to be counted in the budget
        self._granted_bytes: int | None = None  # bytes that the budget has counted for the next slot
        self._wants_room = False
        self._emptied: asyncio.Future[None] | None = None
        self.is_finished = False  # no batch will enter any more
        self.is_aborted = False

    def __len__(self) -> int:
        """The number of batches whose answers were not taken yet."""
        return len(self._slots)

    def enter(self, size_bytes: int) -> Slot | None:
        """Enter a batch of this size. None when there is no room yet, or the stream was aborted."""
        if self.is_aborted or self._asked_bytes is not None:
            return None
        if not self._fits(size_bytes):
            self._wants_room = True
            return None
        is_counted = self._granted_bytes is not None or not size_bytes
        if not (is_counted or self._budget.reserve(self._address, size_bytes, self._grant)):
            self._asked_bytes = size_bytes
            return None
        self._granted_bytes = None
        slot = Slot(self, size_bytes)
        self._slots.append(slot)
        self._bytes += size_bytes
        return slot

    def pop_answer(self) -> bytes | None:
        """Take the answer at the front. None when that batch is not settled yet."""
        if self.is_aborted or not self._slots or self._slots[0].answer is None:
            return None
        answer = self._slots.popleft().answer
        self._tell_room()
        if not self._slots:
            self._tell_emptied()
        return answer

    def finish(self) -> None:
        """Mark the window as complete: no batch will enter any more."""
        self.is_finished = True

    def abort(self) -> None:
        """Abort the stream: no batch enters, and no answer is taken. Batches under way are still settled."""
        if self.is_aborted:
            return
        self.is_aborted = True
        if self._asked_bytes is not None:
            self._budget.withdraw(self._address, self._grant)
        if self._granted_bytes is not None:
            self._budget.remove(self._address, self._granted_bytes)
        self._asked_bytes = self._granted_bytes = None
        self._tell_emptied()

    async def emptied(self) -> None:
        """Wait until every answer was taken, or the stream was aborted."""
        if self._slots and not self.is_aborted:
            self._emptied = self._emptied or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._emptied)

    def _settle(self, slot: Slot, answer: bytes) -> None:
        assert slot.answer is None, "a batch is answered once"
        slot.answer = answer
        self._bytes -= slot.size_bytes
        if slot.size_bytes:
            self._budget.remove(self._address, slot.size_bytes)
        self._tell_room()
        if not self.is_aborted and self._slots and self._slots[0] is slot:
            self._on_answer()

    def _grant(self) -> None:
        """Handle the budget's callback: it has counted the bytes that were waiting."""
        self._granted_bytes, self._asked_bytes = self._asked_bytes, None
        self._wants_room = True
        self._tell_room()

    def _tell_room(self) -> None:
        if self._wants_room:
            self._wants_room = False
            # Called later, because the caller is about to send an answer, which must leave before the next ones.
            asyncio.get_running_loop().call_soon(self._call_on_room)

    def _call_on_room(self) -> None:
        if not self.is_aborted:
            self._on_room()

    def _tell_emptied(self) -> None:
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        if len(self._slots) >= self._batches_max:
            return False
        return self._bytes == 0 or self._bytes + size_bytes <= self._bytes_max
