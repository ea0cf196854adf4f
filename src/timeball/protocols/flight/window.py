"""The unanswered batches of one send stream, in order, and never more than fit.

    reading thread   enter(bytes) … waits while the window is full: that is the back-pressure, because gRPC
                     stops the sender when no thread reads
    broker's loop    slot.settle(answer) … in any order, never blocks
    answering thread take() … the settled answers at the front, in the order in which their batches came

A slot counts against the number of batches until its answer is taken, so that a client that never reads its
answers stops itself; its bytes count only until it is settled, so that such a client cannot hold what all
streams share (`Budget`).

Invariant: each entered slot is settled at most once and its answer taken at most once; after `abort` nothing
blocks any more.
"""

from __future__ import annotations

import threading
from collections import deque

BATCHES_MAX = 1_024
BYTES_MAX = 16 * 1024 * 1024
BYTES_ALL_STREAMS_MAX = 32 * 1024 * 1024
_LOOK_AGAIN_S = 0.5  # how often a thread that waits for other streams looks whether its own was given up


class Budget:
    """Bytes that all streams together may have on their way. A lone batch of any size fits."""

    def __init__(self, bytes_max: int = BYTES_ALL_STREAMS_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._room = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes taken now."""
        return self._bytes

    def reserve(self, size_bytes: int, wait_s: float) -> bool:
        """Reserve this much, waiting a while for room; return False if there was none."""
        with self._room:
            if not self._room.wait_for(lambda: self._fits(size_bytes), wait_s):
                return False
            self._bytes += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        """Give it back."""
        with self._room:
            self._bytes -= size_bytes
            assert self._bytes >= 0
            self._room.notify_all()

    def _fits(self, size_bytes: int) -> bool:
        return self._bytes == 0 or self._bytes + size_bytes <= self._bytes_max


class Slot:
    """One batch's place in its window."""

    __slots__ = ("_window", "answer", "size_bytes")

    def __init__(self, window: Window, size_bytes: int) -> None:
        self._window = window
        self.size_bytes = size_bytes
        self.answer: bytes | None = None

    def settle(self, answer: bytes) -> None:
        """Say what became of the batch. Callable from any thread; does not block."""
        self._window._settle(self, answer)


class Window:
    """Holds the slots of one stream, for one reading thread, one answering thread, any number of settling ones."""

    def __init__(self, budget: Budget, batches_max: int = BATCHES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._budget = budget
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._slots: deque[Slot] = deque()
        self._bytes = 0
        self._finished = False
        self._aborted = False
        lock = threading.Lock()
        self._room = threading.Condition(lock)
        self._front = threading.Condition(lock)
        self._empty = threading.Condition(lock)

    def __len__(self) -> int:
        """Batches without an answer taken."""
        return len(self._slots)

    @property
    def aborted(self) -> bool:
        """Return whether the stream was given up."""
        return self._aborted

    def enter(self, size_bytes: int) -> Slot | None:
        """A place for a batch of this size, waiting for room; None when the stream was given up."""
        while not self._budget.reserve(size_bytes, _LOOK_AGAIN_S):
            if self._aborted:
                return None
        slot = Slot(self, size_bytes)
        with self._room:
            self._room.wait_for(lambda: self._aborted or self._fits(size_bytes))
            if not self._aborted:
                self._slots.append(slot)
                self._bytes += size_bytes
                return slot
        self._budget.give(size_bytes)
        return None

    def pop_answers(self) -> list[bytes]:
        """Return the answers at the front, waiting for the first; none when there will be no more."""
        with self._front:
            self._front.wait_for(self._can_pop)
            answers: list[bytes] = []
            if self._aborted:
                return answers
            while self._slots and self._slots[0].answer is not None:
                answers.append(self._slots.popleft().answer or b"")
            self._room.notify()
            if not self._slots:
                self._empty.notify_all()
            return answers

    def finish(self) -> None:
        """Nothing will enter any more; `pop_answers` ends after the last answer."""
        with self._front:
            self._finished = True
            self._front.notify_all()

    def abort(self) -> None:
        """The stream is given up: wake everyone, take and let in nothing."""
        with self._front:
            self._aborted = True
            self._front.notify_all()
            self._room.notify_all()
            self._empty.notify_all()

    def wait_empty(self, wait_s: float) -> bool:
        """Wait until every answer was taken, or the stream given up; False if that took longer."""
        with self._empty:
            return self._empty.wait_for(lambda: self._aborted or not self._slots, wait_s)

    def _settle(self, slot: Slot, answer: bytes) -> None:
        with self._front:
            assert slot.answer is None, "a batch is answered once"
            slot.answer = answer
            self._bytes -= slot.size_bytes
            self._room.notify()
            if self._slots and self._slots[0] is slot:
                self._front.notify()
        self._budget.give(slot.size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        if len(self._slots) >= self._batches_max:
            return False
        return self._bytes == 0 or self._bytes + size_bytes <= self._bytes_max

    def _can_pop(self) -> bool:
        if self._aborted or (self._slots and self._slots[0].answer is not None):
            return True
        return self._finished and not self._slots
