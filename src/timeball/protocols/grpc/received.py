"""Requests on their way: none is read before there is room for it, and it counts until it is answered.

How large a request is shows only when it has been read, so each waits for room for the largest and keeps what it has
turned out to take. All have a bound and each address its share, so that one that sends much, or nothing of what it has
begun, holds up itself. While a request waits, HTTP/2 holds its client back.
"""

from __future__ import annotations

import asyncio

from timeball import limits
from timeball.protocols.byte_shares import ByteShares

REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
ALL_BYTES_MAX = 64 * 1024 * 1024  # each byte is eight of them on its way to the log


class Received:
    """Room for requests. Belongs to the event loop."""

    def __init__(self) -> None:
        self.shares = ByteShares(ALL_BYTES_MAX, REQUEST_BYTES_MAX)

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
