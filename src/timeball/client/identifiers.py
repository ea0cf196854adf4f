"""Message ids made by the client: 32 hexadecimal characters, unique without asking anyone.

    96 bits of identity (random, drawn once per process and again after 2^32 ids or a fork)
    32 bits of counter, big-endian

As with RocketMQ's unique keys, an id exists before the message is sent, so that a message whose
acknowledgement was lost can still be named, cancelled, or sent again as the same one. Ids of one process sort
by age. A million of them is one vectorised pass.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pyarrow as pa

ID_CHARACTERS = 32
COUNTER_END = 2**32
ROWS_MAX = 2**26 - 1  # 32 characters each, 31-bit offsets

# The two characters of each byte value, as one 16-bit unit.
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)


class Identifiers:
    """A source of ids. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self._identity = os.urandom(12).hex()
        self._next = 0

    def take(self) -> str:
        """One id."""
        identity, first = self._reserve(1)
        return f"{identity}{first:08x}"

    def take_many(self, count: int) -> pa.StringArray:
        """`count` consecutive ids; ValueError beyond ROWS_MAX."""
        if not 0 <= count <= ROWS_MAX:
            raise ValueError(f"{count} ids at once; at most {ROWS_MAX}")
        identity, first = self._reserve(count)
        characters = np.empty((count, ID_CHARACTERS), dtype=np.uint8)
        characters[:, :24] = np.frombuffer(identity.encode(), dtype=np.uint8)
        counters = np.arange(first, first + count, dtype=np.int64).astype(">u4")
        octets = counters.view(np.uint8).reshape(count, 4)
        characters[:, 24:] = _HEX_PAIRS[octets].view(np.uint8).reshape(count, 8)
        offsets = np.arange(count + 1, dtype=np.int32) * ID_CHARACTERS
        return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(characters))

    def _reserve(self, count: int) -> tuple[str, int]:
        with self._lock:
            if self._next + count > COUNTER_END:
                self._renew()
            first = self._next
            self._next += count
            return self._identity, first

    def after_fork(self) -> None:
        """In a child process: a lock of its own, and other ids than its parent's."""
        self._lock = threading.Lock()
        self._renew()


IDENTIFIERS = Identifiers()
os.register_at_fork(after_in_child=IDENTIFIERS.after_fork)
