"""The unanswered batches of one send stream, in order, and never more than fit.

    the stream reads     enter(bytes) … None while the window is full: then it reads no further, which is the
                         back-pressure, because HTTP/2 stops the client
    the broker answers   slot.settle(answer) … in any order
    the stream answers   pop_answer() … the settled answers at the front, in the order in which their batches came

A slot counts against the number of batches until its answer is taken, so that a client that never reads its answers
stops itself; its bytes count only until it is settled, so that such a client cannot hold what all streams share.

Invariant: each entered slot is settled at most once and its answer taken at most once; after `abort` neither callback
is called any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from timeball.protocols.shared_limits import ByteShares

BATCHES_MAX = 1_024
BYTES_MAX = 16 * 1024 * 1024
BYTES_ALL_STREAMS_MAX = 64 * 1024 * 1024  # half of it for one address alone


class Slot:
    """One batch's place in its window."""

    __slots__ = ("_window", "answer", "size_bytes")

    def __init__(self, window: Window, size_bytes: int) -> None:
        self._window = window
        self.size_bytes = size_bytes
        self.answer: bytes | None = None

    def settle(self, answer: bytes) -> None:
        """Say what became of the batch."""
        self._window._settle(self, answer)


class Window:
    """Holds the slots of one stream. Belongs to the event loop."""

    def __init__(
        self,
        budget: ByteShares,
        address: str,
        on_room: Callable[[], None],
        on_answer: Callable[[], None],
        batches_max: int = BATCHES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """`on_room`: called when `enter` may have a place again; `on_answer`: when the one at the front is settled."""
        self._budget, self._address = budget, address
        self._on_room, self._on_answer = on_room, on_answer
        self._batches_max, self._bytes_max = batches_max, bytes_max
        self._slots: deque[Slot] = deque()
        self._bytes = 0
        self._asked_bytes: int | None = None  # that are waited for in the budget
        self._granted_bytes: int | None = None  # that the budget has counted for the next slot
        self._wants_room = False
        self._emptied: asyncio.Future[None] | None = None
        self.is_finished = False  # nothing will enter any more
        self.is_aborted = False

    def __len__(self) -> int:
        """Batches without an answer taken."""
        return len(self._slots)

    def enter(self, size_bytes: int) -> Slot | None:
        """Return a place for a batch of this size; None when there is no room yet, or the stream was given up."""
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
        """Return the answer at the front; None when it is not settled."""
        if self.is_aborted or not self._slots or self._slots[0].answer is None:
            return None
        answer = self._slots.popleft().answer
        self._tell_room()
        if not self._slots:
            self._tell_emptied()
        return answer

    def finish(self) -> None:
        """Say that nothing will enter any more."""
        self.is_finished = True

    def abort(self) -> None:
        """Give the stream up: take and let in nothing. Batches under way are settled all the same."""
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
        """Return when every answer was taken, or the stream given up."""
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
        """Note that the budget has counted what was asked for."""
        self._granted_bytes, self._asked_bytes = self._asked_bytes, None
        self._wants_room = True
        self._tell_room()

    def _tell_room(self) -> None:
        if self._wants_room:
            self._wants_room = False
            # Not at once: the caller is taking an answer, which must leave before the next ones.
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
