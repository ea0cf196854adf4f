"""The one message of a request: so many are received at once, each within a time.

A message is received whole before it can be refused for what it says. So only a few are received at the same time,
and a client that begins one and does not go on loses its call and not the place of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from timeball.clock import Clock
from timeball.errors import InvalidMessage, OverLimit

READS_MAX = 16
READ_MS_MAX = 20_000  # 4 MiB over a slow line
WAIT_S = 5.0
LOOK_S = 1.0

T = TypeVar("T")


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
