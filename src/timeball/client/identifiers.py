"""Message ids: 32 hexadecimal characters, unique without coordination.

    96 bits of identity (random; drawn again after a fork, and when the counter has no room for further ids)
    32 bits of counter, big-endian

Like a unique key of RocketMQ, an id exists before the message is sent. So a program can cancel a message whose
acknowledgement was lost, or send it again as the same message. Ids with the same identity sort by age.
"""

from __future__ import annotations

import os
import threading

COUNTER_END = 2**32


class Identifiers:
    """Creates message ids. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self._identity = os.urandom(12).hex()
        self._next = 0

    def next_id(self) -> str:
        """Create one id."""
        identity, first = self.reserve(1)
        return f"{identity}{first:08x}"

    def reserve(self, count: int) -> tuple[str, int]:
        """Reserve `count` consecutive ids. Returns their identity in hexadecimal, and the counter of the first."""
        with self._lock:
            if self._next + count > COUNTER_END:
                self._renew()
            first = self._next
            self._next += count
            return self._identity, first

    def after_fork(self) -> None:
        """Give a forked child process a new lock, and ids that differ from its parent's."""
        self._lock = threading.Lock()
        self._renew()


IDENTIFIERS = Identifiers()
os.register_at_fork(after_in_child=IDENTIFIERS.after_fork)
