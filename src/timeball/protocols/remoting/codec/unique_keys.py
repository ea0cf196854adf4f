"""Message ids for clients that send none (ali-ons): RocketMQ's 32 hexadecimal digits.

    | address 4 | process 2 | of this run 4 | ms since the month began 4 | counter 2 |      bytes, as hexadecimal

The counter goes on where the millisecond does not, so ids repeat only when one process gives out 65,536 in a
millisecond.
"""

from __future__ import annotations

import itertools
import struct

_PREFIX = struct.Struct(">4sHI")
_REST = struct.Struct(">IH")


class UniqueKeys:
    """Gives out ids."""

    def __init__(self, address: bytes, process_id: int, run: int) -> None:
        self._prefix = _PREFIX.pack(address[-4:].rjust(4, b"\0"), process_id & 0xFFFF, run & 0xFFFFFFFF)
        self._counter = itertools.count()

    def next(self, now_ms: int) -> str:
        """A new id. RocketMQ counts from the month's beginning because 32 bits hold no more; the rest says the same."""
        return (self._prefix + _REST.pack(now_ms & 0xFFFFFFFF, next(self._counter) & 0xFFFF)).hex().upper()
