"""Answers on their way: the messages of a stream are held until its client has taken them, and clients may be slow.

A client that reads has its answer within milliseconds. One that does not is left alone until its deadline, or until
its connection ends; what it holds up meanwhile is memory, and of that each address has its share, and all have a bound.
Whoever has used up its own is told to read first, and others go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code

ALL_BYTES_MAX = 256 * 1024 * 1024


class Unread:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._shares = ByteShares(ALL_BYTES_MAX)

    @property
    def all_bytes(self) -> int:
        """Bytes of answers that are on their way."""
        return self._shares.held_bytes

    def check(self, address: str, size_bytes: int = 0) -> None:
        """Raise Refused when there is no room for an answer of this size to `address`."""
        if not self._shares.fits(address, size_bytes):
            mine = self._shares.held_by(address)
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{mine} bytes of answers to {address} are not read yet, {self.all_bytes} of all clients; read "
                "yours, then ask on",
            )

    @contextmanager
    def held(self, address: str, size_bytes: int) -> Iterator[None]:
        """An answer of this size is on its way; raises Refused when there is no room for it."""
        self.check(address, size_bytes)
        self._shares.add(address, size_bytes)
        try:
            yield
        finally:
            self._shares.remove(address, size_bytes)
