"""Memory that clients hold: requests on their way in, and answers on their way out.

None is read or written before there is room for it, and it counts until it is answered or taken. All have a bound and
each address its share, so that one that sends much, or reads nothing, holds up itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from timeball import limits
from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code

REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # each byte is eight of them on its way to the log
UNREAD_BYTES_MAX = 256 * 1024 * 1024


class Received:
    """Requests on their way. Belongs to the event loop.

    How large a request is shows only when it has been read, so each waits for room for the largest and keeps what it
    has turned out to take. While a request waits, HTTP/2 holds its client back.
    """

    def __init__(self) -> None:
        self.shares = ByteShares(RECEIVED_BYTES_MAX, REQUEST_BYTES_MAX)

    async def room(self, address: str) -> None:
        """Return when there is room for the largest request; `shrink` says how large it is, `gone` that it is over."""
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            granted.set_result(None)

        if self.shares.reserve(address, REQUEST_BYTES_MAX, grant):
            return
        try:
            await granted
        except asyncio.CancelledError:
            if not self.shares.withdraw(address, grant):
                self.shares.remove(address, REQUEST_BYTES_MAX)
            raise

    def shrink(self, address: str, size_bytes: int) -> int:
        """The request takes so much, and no more; returns it."""
        self.shares.remove(address, REQUEST_BYTES_MAX - size_bytes)
        return size_bytes

    def gone(self, address: str, size_bytes: int) -> None:
        """It is answered, or its client has gone."""
        self.shares.remove(address, size_bytes)


class Unread:
    """Answers on their way: the messages of a stream are held until its client has taken them. Belongs to the loop.

    A client that does not read is left alone until its deadline, or until its connection ends; of the memory that it
    holds up meanwhile each address has its share, and all have a bound. A client that has used up its own is told to
    read first, and others go on.
    """

    def __init__(self) -> None:
        self._shares = ByteShares(UNREAD_BYTES_MAX)

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
