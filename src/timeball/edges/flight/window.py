"""The unanswered batches of one send stream, in order, with limits for their number and bytes.

    the stream reads     enter(bytes) … None while the window is full. Then the stream stops reading, and HTTP/2 stops
                         the client: this is the back-pressure
    the broker answers   slot.settle(answer) … in any order
    the stream answers   pop_answer() … the settled answers at the front, in the order of their batches

To settle a slot means to give it the answer to its batch. A slot counts towards the number of batches until its answer
is taken. So a client that does not read its answers cannot send further batches. The bytes of a slot only count until
it is settled. So such a client does not occupy the bytes that all streams share.

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
    """The slot of one batch in its window. `answer` is None until the slot is settled."""

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
        on_capacity: Callable[[], None],
        on_answer: Callable[[], None],
        batches_max: int = BATCHES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """Make an empty window. `budget` limits the bytes of all streams, and `address` is the client's.

        `on_capacity` is called when `enter` may succeed again. `on_answer` is called when the slot at the front is
        settled.
        """
        self._budget, self._address = budget, address
        self._on_capacity, self._on_answer = on_capacity, on_answer
        self._batches_max, self._bytes_max = batches_max, bytes_max
        self._slots: deque[Slot] = deque()  # in the order in which the batches entered
        self._unsettled_bytes = 0
        self._requested_bytes: int | None = None  # bytes for which the budget had no capacity yet
        self._granted_bytes: int | None = None  # bytes that the budget has reserved for the next slot
        self._waits_for_capacity = False
        self._emptied_future: asyncio.Future[None] | None = None
        self.is_finished = False  # no further batch will enter
        self.is_aborted = False

    def __len__(self) -> int:
        """The number of batches whose answers were not taken yet."""
        return len(self._slots)

    def enter(self, size_bytes: int) -> Slot | None:
        """Add a slot for a batch of this size. None if there is no capacity yet, or the stream was aborted.

        After None, `on_capacity` is called when it may succeed.
        """
        if self.is_aborted or self._requested_bytes is not None:
            return None
        if not self._fits(size_bytes):
            self._waits_for_capacity = True
            return None
        is_counted = self._granted_bytes is not None or not size_bytes
        if not (is_counted or self._budget.reserve(self._address, size_bytes, self._grant)):
            self._requested_bytes = size_bytes
            return None
        self._granted_bytes = None
        slot = Slot(self, size_bytes)
        self._slots.append(slot)
        self._unsettled_bytes += size_bytes
        return slot

    def pop_answer(self) -> bytes | None:
        """Remove the slot at the front and take its answer. None if that slot is not settled yet."""
        if self.is_aborted or not self._slots or self._slots[0].answer is None:
            return None
        answer = self._slots.popleft().answer
        self._notify_capacity()
        if not self._slots:
            self._notify_emptied()
        return answer

    def finish(self) -> None:
        """Mark the window as complete: no further batch will enter."""
        self.is_finished = True

    def abort(self) -> None:
        """Abort the stream: no further batch enters, and no answer is taken. Entered batches are still settled."""
        if self.is_aborted:
            return
        self.is_aborted = True
        if self._requested_bytes is not None:
            self._budget.withdraw(self._address, self._grant)
        if self._granted_bytes is not None:
            self._budget.remove(self._address, self._granted_bytes)
        self._requested_bytes = self._granted_bytes = None
        self._notify_emptied()

    async def emptied(self) -> None:
        """Wait until every answer was taken, or the stream was aborted."""
        if self._slots and not self.is_aborted:
            self._emptied_future = self._emptied_future or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._emptied_future)

    def _settle(self, slot: Slot, answer: bytes) -> None:
        """Store the answer of a slot, and free its bytes."""
        assert slot.answer is None, "a batch is answered once"
        slot.answer = answer
        self._unsettled_bytes -= slot.size_bytes
        if slot.size_bytes:
            self._budget.remove(self._address, slot.size_bytes)
        self._notify_capacity()
        if not self.is_aborted and self._slots and self._slots[0] is slot:
            self._on_answer()

    def _grant(self) -> None:
        """Handle the budget's callback: it has reserved the requested bytes."""
        self._granted_bytes, self._requested_bytes = self._requested_bytes, None
        self._waits_for_capacity = True
        self._notify_capacity()

    def _notify_capacity(self) -> None:
        """Schedule the callback `on_capacity`, if the stream waits for capacity."""
        if self._waits_for_capacity:
            self._waits_for_capacity = False
            # Called later, because the caller is about to send an answer, which must be sent before later answers.
            asyncio.get_running_loop().call_soon(self._call_on_capacity)

    def _call_on_capacity(self) -> None:
        if not self.is_aborted:
            self._on_capacity()

    def _notify_emptied(self) -> None:
        if self._emptied_future is not None and not self._emptied_future.done():
            self._emptied_future.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        """True if the limits of this stream allow the batch. A batch larger than the limit may enter alone."""
        if len(self._slots) >= self._batches_max:
            return False
        return self._unsettled_bytes == 0 or self._unsettled_bytes + size_bytes <= self._bytes_max
