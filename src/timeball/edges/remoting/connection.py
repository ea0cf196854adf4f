"""One client's connection: decodes bytes to frames, encodes answers, and closes the connection of a bad client.

A client that sends half a frame, sends nothing, or reads no answers costs memory. Each of these has a deadline or a
bound (the constants below). Past it, the connection is closed. Answers may leave in any order, because clients match
them by `opaque`.

All connections of the edge share two amounts of memory, and each may use a part of them:

    received   a frame counts with its full size from the moment its length is known, so that a frame that was begun
               can end. A large request counts until it is answered. Without room the socket is not read.
    unread     answers that the client has not read. A client with many of its own is not read from until it has read
               them. When its address has used up its share, its requests are refused for now (SYSTEM_BUSY), and
               finally its connection is closed.

Small pending requests are not counted one by one. They are bounded where they are batched and written.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from timeball.edges.remoting.codec.codes import BROKER_VERSION, CommandFlag
from timeball.edges.remoting.codec.frame import (
    FRAME_BYTES_MAX,
    BadFrame,
    Command,
    Cut,
    Splitter,
    cut,
    encode,
)
from timeball.edges.remoting.codec.records import Host
from timeball.edges.shared.sessions import Session
from timeball.edges.shared.shared_limits import MemoryQuota, exceeds_share
from timeball.edges.shared.wrong_protocols import WRONG_PROTOCOLS
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import Unavailable

logger = logging.getLogger(__name__)

HALF_FRAME_S = 10.0  # seconds from the first byte of a frame to its last
UNSIGNED_S = 10.0  # seconds from the connection to its first signed request, where requests must be signed
IDLE_S = 240.0  # clients send heartbeats every 30 s. RocketMQ closes after 120 s, Timeball after twice that
OUTBOUND_BYTES_MAX = 64 * 1024 * 1024  # answers of one connection that its client has not read
CONNECTIONS_MAX = 4_096
EXPIRY_MS = 120_000  # RocketMQ's CHANNEL_EXPIRED_TIMEOUT. Clients send heartbeats every 30 s
GOODBYE_S = 5.0  # to read the answers written before a close. A client that reads nothing would never be gone
CALLS_MAX = 8_192  # pending requests of one connection. One pull per queue is usual

RECEIVED_BYTES_MAX = 128 * 1024 * 1024  # each byte has several copies on its way to the log
UNREAD_BYTES_MAX = 256 * 1024 * 1024
GATHERED_BYTES_MAX = 64 * 1024  # of answers that are written together
LARGE_BYTES = 64 * 1024  # a body of this size or more counts while its request is pending
WAITING_MAX = 1_024  # connections that wait for room. Each holds one read of its socket, up to 256 KiB
UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES = 8 * 1024 * 1024, 1024 * 1024  # of one connection: two answers to pulls
UNREAD_LEFT_BYTES = 64 * 1024  # a connection with less is not closed for others of its address

Receiver = Callable[["Connection", list[Any]], None]


@dataclass
class Room:
    """The memory bounds that all connections of an edge share."""

    received: MemoryQuota = field(
        default_factory=lambda: MemoryQuota(RECEIVED_BYTES_MAX, 2 * FRAME_BYTES_MAX)
    )
    unread: MemoryQuota = field(default_factory=lambda: MemoryQuota(UNREAD_BYTES_MAX))


class Flow:
    """The share of one connection in the memory of its edge. Belongs to the event loop."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._frame_bytes = 0  # counted for the incomplete frame
        self._asked_bytes = 0  # further bytes of that frame, for which it waits
        self.unread_bytes = 0  # answers that the client has not read yet
        self.waits = False  # for room in `received`: the socket is not read, and the client cannot help it
        self._is_slow = False  # the client has many answers to read

    def opened(self, transport: asyncio.Transport, address: str) -> None:
        """Begin to count for this transport. Shares are given per `address`."""
        self._transport, self._address = transport, address
        transport.set_write_buffer_limits(UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES)

    def lost(self) -> None:
        """Give back everything except pending requests, which are given back when they end."""
        if self.waits:
            self._room.received.withdraw(self._address, self._granted)
        self._room.received.remove(self._address, self._frame_bytes)
        self._room.unread.remove(self._address, self.unread_bytes)
        self._transport, self.waits, self._frame_bytes, self.unread_bytes = None, False, 0, 0

    # -- what has come ---------------------------------------------------------------------------------------

    def has_read(self, awaited_bytes: int) -> bool:
        """Count the incomplete frame of this size, and return False if too many connections wait for room already."""
        received, more = self._room.received, awaited_bytes - self._frame_bytes
        if more <= 0:
            if more:
                self._frame_bytes = awaited_bytes
                received.remove(self._address, -more)
            if not received.held_bytes or received.fits(self._address, 0):
                return True
            more = 0
        if received.reserve(self._address, more, self._granted):
            self._frame_bytes += more
            return True
        self._asked_bytes, self.waits = more, True
        self._read_or_not()
        return received.waiting <= WAITING_MAX

    def begins(self, size_bytes: int) -> int:
        """Count a request with a body of this size as pending, and return the argument for `ends`."""
        if size_bytes < LARGE_BYTES:
            return 0
        self._room.received.add(self._address, size_bytes)
        return size_bytes

    def ends(self, counted_bytes: int) -> None:
        """Give back the bytes of a request that has been answered."""
        self._room.received.remove(self._address, counted_bytes)

    def _granted(self) -> None:
        self._frame_bytes += self._asked_bytes
        self.waits = False
        self._read_or_not()

    # -- what is to leave --------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Return whether this client has unread answers and its address has used up its share."""
        return self.unread_bytes > 0 and not self._room.unread.fits(self._address, 0)

    def has_written(self) -> bool:
        """Count the bytes that the client has not read yet, and return False if there is no room for them."""
        if self._transport is None:
            return True
        now_bytes, unread = self._transport.get_write_buffer_size(), self._room.unread
        if now_bytes != self.unread_bytes:
            unread.remove(self._address, self.unread_bytes)
            unread.add(self._address, now_bytes)
            self.unread_bytes = now_bytes
        return now_bytes <= UNREAD_LEFT_BYTES or unread.fits(self._address, 0)

    def slow(self, is_slow: bool) -> None:
        """Note whether the client has many answers to read, and stop or resume reading its requests."""
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


class Connection(asyncio.Protocol):
    """The asyncio protocol of one client. `receiver` gets the frames that one read of the socket has completed."""

    def __init__(
        self,
        receiver: Receiver,
        opened: set[Connection],
        loop: asyncio.AbstractEventLoop,
        room: Room | None = None,
        cut: Cut = cut,
        edge: str = "remoting",
    ) -> None:
        """Prepare for a transport.

        `room` is the memory shared with the other connections of the edge. `cut` creates the frames or runs that
        `receiver` gets. `edge` is the name of the edge in the log.
        """
        self._edge = edge
        self._receiver, self._opened, self._loop = receiver, opened, loop
        self.flow = Flow(room or Room())
        self._splitter = Splitter(cut=cut)
        self._gathers = False  # the requests of one read are handled: their answers go together
        self._gathered: list[bytes | bytearray] = []
        self._gathered_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._opaques = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Command]] = {}
        self._frame_since_s: float | None = None
        self._since_s = self.heard_s = loop.time()
        self._closed_s: float | None = None
        self.on_close: list[Callable[[], None]] = []
        self.closed: asyncio.Future[None] = loop.create_future()
        self._waiting: set[asyncio.Task[None]] = set()
        self.calls = 0
        self.caller: Caller = ANONYMOUS  # the signer of the last request
        self.peer = self.local = ("", 0)
        self.name = ":0"  # the client's address, for log lines and as a message's born host
        self.store_host: Host | None = None  # the broker's address for this client. Computed at first use
        self.id_prefix = ""  # the same, as the beginning of message ids. Computed for the first answer

    # -- asyncio's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or abort it if there are too many. See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self.local = tuple((transport.get_extra_info("sockname") or ("", 0))[:2])
        self.name = f"{self.peer[0]}:{self.peer[1]}"
        if self._is_one_too_many():
            logger.warning("connection refused peer=%s connections_max=%d", self.name, CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._opened.add(self)
        self.flow.opened(self._transport, self.peer[0])

    def _is_one_too_many(self) -> bool:
        # The shares of the addresses count only from half of CONNECTIONS_MAX on.
        if len(self._opened) < CONNECTIONS_MAX // 2:
            return False
        return exceeds_share(self.peer[0], (each.peer[0] for each in self._opened), CONNECTIONS_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the broker's own requests to this client and call `on_close`. See asyncio.Protocol."""
        self._opened.discard(self)
        self.flow.lost()
        if not self.closed.done():
            self.closed.set_result(None)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Unavailable(f"{self.name} has gone away"))
        self._asked.clear()
        for task in self._waiting:
            task.cancel()
        for tell in self.on_close:
            tell()
        self.on_close.clear()

    def data_received(self, data: bytes) -> None:
        """Handle the frames that `data` completes. See asyncio.Protocol."""
        self.heard_s = self._loop.time()
        try:
            frames = self._splitter.feed(data)
            if frames:
                self._receive(frames)
        except BadFrame as error:
            WRONG_PROTOCOLS.note(self._edge, data, self.name, self.heard_s, str(error))
            self.close()
            return
        awaited_bytes, held_bytes = self._splitter.awaited_bytes, self._splitter.held_bytes
        if not self.flow.has_read(awaited_bytes):
            logger.warning("connection closed, too many bytes of requests are under way peer=%s", self.name)
            self.abort()
            return
        if not held_bytes:
            self._frame_since_s = None
        elif frames or self._frame_since_s is None:
            self._frame_since_s = self.heard_s

    def _receive(self, frames: list[Any]) -> None:
        """Handle the frames of one read, and write the answers that are ready at once together."""
        if len(frames) == 1:
            self._receiver(self, frames)
            return
        self._gathers = True
        try:
            self._receiver(self, frames)
        finally:
            self._gathers = False
            self._write_gathered()

    def pause_writing(self) -> None:
        """Note that the client has many answers to read. See asyncio.Protocol."""
        self.flow.slow(True)

    def resume_writing(self) -> None:
        """Note that the client has read most of its answers. See asyncio.Protocol."""
        self.flow.slow(False)

    # -- our side --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return whether an answer could still arrive."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes. A client that reads too little loses its connection, so that memory stays bounded."""
        if not self._gathers:
            self._write(data)
            return
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= GATHERED_BYTES_MAX:
            self._write_gathered()

    def _write_gathered(self) -> None:
        parts, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if parts:
            self._write(b"".join(parts))

    def _write(self, data: bytes | bytearray) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # no error: it would cost the other sends of the commit their acknowledgements
        transport.write(data)
        waiting_bytes = transport.get_write_buffer_size()
        if not (waiting_bytes or self.flow.unread_bytes):
            return  # a client mostly reads at once what it has asked for
        if not self.flow.has_written() or waiting_bytes > OUTBOUND_BYTES_MAX:
            logger.warning(
                "connection closed, answers are not read peer=%s waiting_bytes=%d", self.name, waiting_bytes
            )
            transport.abort()
            self.flow.lost()  # now: until the transport is closed, the address could not use its share

    def send(self, command: Command) -> None:
        """Send an answer, or a request that needs no answer."""
        self.write(encode(command))

    def push(self, command: Command) -> None:
        """Send a one-way request of the broker."""
        command.opaque, command.version = next(self._opaques), BROKER_VERSION
        command.flag |= CommandFlag.ONE_WAY
        self.send(command)

    async def request(self, command: Command, timeout_s: float) -> Command:
        """Send a request of the broker and wait for its answer. Raises Unavailable."""
        if not self.is_open:
            raise Unavailable(f"{self.name} has gone away")
        command.opaque, command.version = next(self._opaques), BROKER_VERSION
        future: asyncio.Future[Command] = self._loop.create_future()
        self._asked[command.opaque] = future
        try:
            self.send(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise Unavailable(f"{self.name} did not answer within {timeout_s} s") from error
        finally:
            self._asked.pop(command.opaque, None)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Surround a wait that is cancelled when the client goes. Never use it for shared work such as a commit."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def answered(self, command: Command) -> None:
        """Pass an answer to the broker's request that waits for it. Ignore an answer without a request."""
        future = self._asked.get(command.opaque)
        if future is not None and not future.done():
            future.set_result(command)

    def check_deadlines(self, now_s: float, *, must_sign: bool = False) -> None:
        """Close the connection if a frame takes too long or the client is silent. Called about once a second.

        `must_sign`: also close it if the client has signed no request in time. Otherwise unknown clients could take all
        connections.
        """
        self.flow.has_written()
        if self.flow.waits:  # the client must not pay for a broker that does not read
            self.heard_s = now_s
            self._frame_since_s = None if self._frame_since_s is None else now_s
        if self._closed_s is not None:
            if now_s - self._closed_s > GOODBYE_S and self._transport is not None:
                self._transport.abort()
        elif self._frame_since_s is not None and now_s - self._frame_since_s > HALF_FRAME_S:
            logger.warning(
                "connection closed, its frame does not end peer=%s waited_s=%s", self.name, HALF_FRAME_S
            )
            self.close()
        elif must_sign and self.caller is ANONYMOUS and now_s - self._since_s > UNSIGNED_S:
            logger.warning("connection closed, nothing was signed peer=%s waited_s=%s", self.name, UNSIGNED_S)
            self.close()
        elif now_s - self.heard_s > IDLE_S and not self.calls:
            logger.info("connection closed, it was idle peer=%s idle_s=%s", self.name, IDLE_S)
            self.close()

    def close(self) -> None:
        """End the connection. Answers already written still leave, if the client reads them."""
        if self._transport is not None and self._closed_s is None:
            self._write_gathered()
            self._closed_s = self._loop.time()
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once. Bytes that have not left are lost."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(eq=False)
class Member(Session[Connection]):
    """The client of a connection, as described by its last heartbeat."""

    language: int = 0
    version: int = 0

    @property
    def connection(self) -> Connection:
        """Return the connection on which the client sends its heartbeats."""
        return self.key
