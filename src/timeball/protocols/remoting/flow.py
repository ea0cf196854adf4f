"""What one connection may hold of the memory that all connections of the edge share, and how it is held back.

    received   a frame that has begun counts whole from the moment its length is known, so that what was begun can
               end; a large request counts until it is answered. Without room the socket is not read.
    unread     answers that the client has not taken. With many of its own it is not read from until it has taken
               them; when its address has used up its share, it is told to come later, and at last cut off.

Small requests under way are not counted one by one: they are bounded where they are gathered and written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.remoting.codec.frame import FRAME_BYTES_MAX

RECEIVED_BYTES_MAX = 128 * 1024 * 1024  # each byte is several while it is on its way to the log
UNREAD_BYTES_MAX = 256 * 1024 * 1024
LARGE_BYTES = 64 * 1024  # a body from this size on counts while its request is under way
WAITING_MAX = 1_024  # connections without room; each holds what one read of its socket has brought, 256 KiB
UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES = 8 * 1024 * 1024, 1024 * 1024  # of one connection: two answers of a pull
UNREAD_LEFT_BYTES = (
    64 * 1024
)  # a connection with less than this of its own is not cut off for others of its address


@dataclass
class Room:
    """What all connections of an edge share."""

    received: ByteShares = field(default_factory=lambda: ByteShares(RECEIVED_BYTES_MAX, 2 * FRAME_BYTES_MAX))
    unread: ByteShares = field(default_factory=lambda: ByteShares(UNREAD_BYTES_MAX))


class Flow:
    """One connection's part. Belongs to the event loop."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._frame_bytes = 0  # counted for the frame that has begun
        self._asked_bytes = 0  # more of it, that is waited for
        self._unread_bytes = 0
        self.waits = False  # for room, through no fault of the client's
        self._is_slow = False  # the client has many answers to take

    def opened(self, transport: asyncio.Transport, address: str) -> None:
        """Begin; `address` is what has a share."""
        self._transport, self._address = transport, address
        transport.set_write_buffer_limits(UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES)

    def lost(self) -> None:
        """Give everything back but what is under way, which is given back when it ends."""
        if self.waits:
            self._room.received.withdraw(self._address, self._granted)
        self._room.received.remove(self._address, self._frame_bytes)
        self._room.unread.remove(self._address, self._unread_bytes)
        self._transport, self.waits, self._frame_bytes, self._unread_bytes = None, False, 0, 0

    # -- what has come ---------------------------------------------------------------------------------------

    def has_read(self, awaited_bytes: int) -> bool:
        """Count the frame that has begun, of this size; false when the connection is one too many without room."""
        received, more = self._room.received, awaited_bytes - self._frame_bytes
        if more <= 0:
            if more:
                self._frame_bytes = awaited_bytes
                received.remove(self._address, -more)
            if received.fits(self._address, 0):
                return True
            more = 0
        if received.reserve(self._address, more, self._granted):
            self._frame_bytes += more
            return True
        self._asked_bytes, self.waits = more, True
        self._read_or_not()
        return received.waiting <= WAITING_MAX

    def begins(self, size_bytes: int) -> int:
        """A request with a body of this size is under way; what is to be given to `ends`."""
        if size_bytes < LARGE_BYTES:
            return 0
        self._room.received.add(self._address, size_bytes)
        return size_bytes

    def ends(self, counted_bytes: int) -> None:
        """It has been answered."""
        self._room.received.remove(self._address, counted_bytes)

    def _granted(self) -> None:
        self._frame_bytes += self._asked_bytes
        self.waits = False
        self._read_or_not()

    # -- what is to leave --------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the client, or others at its address, have too many answers to take."""
        return self._unread_bytes > 0 and not self._room.unread.fits(self._address, 0)

    def has_written(self) -> bool:
        """Count what is not taken yet; false when there is no room for it."""
        if self._transport is None:
            return True
        now_bytes, unread = self._transport.get_write_buffer_size(), self._room.unread
        if now_bytes != self._unread_bytes:
            unread.remove(self._address, self._unread_bytes)
            unread.add(self._address, now_bytes)
            self._unread_bytes = now_bytes
        return now_bytes <= UNREAD_LEFT_BYTES or unread.fits(self._address, 0)

    def slow(self, is_slow: bool) -> None:
        """The client has many answers to take, or has taken them."""
        self._is_slow = is_slow
        self.has_written()
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self.waits or self._is_slow:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
