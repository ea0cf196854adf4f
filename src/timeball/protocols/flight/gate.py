"""How many calls may be inside at once, and how many of their requests may be on their way.

Each call holds a thread of gRPC's; without a limit, a client that opens long polls in a loop would take all the memory
there is. A gate never waits: beyond its limit a caller is told so at once.

A request's one message is received whole before it can be refused for what it says. So only a few are received at the
same time, and a client that begins one and does not go on loses its call and not the place of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from timeball.clock import Clock
from timeball.errors import InvalidMessage, OverLimit

CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 48  # each has two threads, a window, and one message of BATCH_BYTES_MAX half received

READS_MAX = 16
READ_MS_MAX = 20_000  # 4 MiB over a slow line
WAIT_S = 5.0
LOOK_S = 1.0

T = TypeVar("T")


class Gate:
    """Counts who is inside."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self._lock = threading.Lock()
        self.inside = 0  # how many are inside now

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside within; raises OverLimit when there is no room."""
        with self._lock:
            if self.inside >= self._limit:
                raise OverLimit(f"{self._limit} {self._what} are open; close some, or try again later")
            self.inside += 1
        try:
            yield
        finally:
            with self._lock:
                self.inside -= 1


class RequestReads:
    """Receives requests; a thread of its own ends the calls that take too long."""

    def __init__(self, clock: Clock, closing: threading.Event, reads_max: int = READS_MAX) -> None:
        """The thread ends when `closing` is set."""
        self._clock, self._closing = clock, closing
        self._places = threading.BoundedSemaphore(reads_max)
        self._under_way: dict[Any, int] = {}  # since when, in monotonic ms
        threading.Thread(target=self._watch, name="flight-slow", daemon=True).start()

    def read(self, requests: Iterator[bytes], context: Any, decode: Callable[[bytes], T]) -> T:
        """Return the first of `requests`, decoded. Raises OverLimit, InvalidMessage and what `decode` raises."""
        if not self._places.acquire(timeout=WAIT_S):
            raise OverLimit("too many requests are on their way; try again later")
        try:
            self._under_way[context] = self._now_ms()
            message = next(requests, None)
            if message is None:
                raise InvalidMessage("a call without a message, or one that took too long to come")
            return decode(message)
        finally:
            self._under_way.pop(context, None)
            self._places.release()

    def cut_slow(self) -> int:
        """End the calls whose message has been on its way for too long; returns how many."""
        slow = [
            context
            for context, since in list(self._under_way.items())
            if self._now_ms() - since > READ_MS_MAX
        ]
        for context in slow:
            context.cancel()
        return len(slow)

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.cut_slow()

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
