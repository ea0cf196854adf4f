"""How many calls, and how many send streams, may be inside at once.

A gate never waits: beyond its limit a caller is told so at once, and before a byte of its request is taken. What a
request may hold while it comes in is bounded by http2/exchange.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timeball.errors import OverLimit

CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 48  # each has a window, and one message of BATCH_BYTES_MAX half received


class Gate:
    """Counts the calls of one sort. Belongs to the event loop."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self.limit = what, limit
        self.inside = 0  # how many are inside now

    def admit(self) -> None:
        """Let one more in, until its `leave`; raise OverLimit when there is no room."""
        if self.inside >= self.limit:
            raise OverLimit(f"{self.limit} {self._what} are open; close some, or try again later")
        self.inside += 1

    def leave(self) -> None:
        """Give one place back."""
        self.inside -= 1

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside within; raise OverLimit when there is no room."""
        self.admit()
        try:
            yield
        finally:
            self.leave()
