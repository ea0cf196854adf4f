"""One client's connection: splits received bytes into frames, writes answers, and closes connections that misbehave.

A client that sends half a frame, sends nothing, or does not read its answers costs memory. Each case has a deadline or
a limit (the constants below), after which the connection is closed. Answers may be sent in any order, because clients
match them by `opaque`.

All connections of the edge share two memory limits. Each address has a share of them (MemoryQuota):

    received   a frame counts with its full size as soon as its length is known, so that every frame that is begun can
               be completed. A large request counts until it is answered. While a frame does not fit, its socket is
               not read.
    unread     answers that the client has not read. The requests of a client with many unread answers are not read.
               When its address has used up its share, its requests are refused (SYSTEM_BUSY). Finally its connection
               is closed.

Small pending requests are not counted here. Other limits apply where they are batched and written.
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
from timeball.edges.shared.first_byte import WRONG_PROTOCOLS
from timeball.edges.shared.sessions import Session
from timeball.edges.shared.shared_limits import MemoryQuota, exceeds_share
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import Unavailable

logger = logging.getLogger(__name__)

HALF_FRAME_S = 10.0  # from the first byte of a frame to its last
UNSIGNED_S = 10.0  # from connecting to the first signed request, where requests must be signed
IDLE_S = 240.0  # clients send heartbeats every 30 s. RocketMQ closes after 120 s, Timeball after twice that
OUTBOUND_BYTES_MAX = 64 * 1024 * 1024  # answers of one connection that its client has not read
CONNECTIONS_MAX = 4_096
EXPIRY_MS = 120_000  # RocketMQ's CHANNEL_EXPIRED_TIMEOUT. Clients send heartbeats every 30 s
GOODBYE_S = 5.0  # for a client to read its last answers after `close`. Then the connection is aborted
CALLS_MAX = 8_192  # pending requests of one connection. Usual: one long-polling pull per queue

RECEIVED_BYTES_MAX = 128 * 1024 * 1024  # not more, since each byte has several copies on its way to the log
UNREAD_BYTES_MAX = 256 * 1024 * 1024
BUFFERED_BYTES_MAX = 64 * 1024  # of answers that are written together
LARGE_BYTES = 64 * 1024  # a body of at least this size counts as `received` while its request is pending
# Connections whose frame does not fit yet. Each holds one read of its socket, up to 256 KiB.
WAITING_MAX = 1_024
# Unread answers of one connection at which the edge stops (high) and resumes (low) reading its requests. High: two
# answers to pulls.
UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES = 8 * 1024 * 1024, 1024 * 1024
# A connection with at most so many unread bytes is not closed because of other connections of its address.
UNREAD_SMALL_BYTES = 64 * 1024

# Gets the frames that one read of the socket has completed.
Receiver = Callable[["Connection", list[Any]], None]


@dataclass
class MemoryLimits:
    """The memory limits that all connections of an edge share."""

    received: MemoryQuota = field(
        default_factory=lambda: MemoryQuota(RECEIVED_BYTES_MAX, 2 * FRAME_BYTES_MAX)
    )
    unread: MemoryQuota = field(default_factory=lambda: MemoryQuota(UNREAD_BYTES_MAX))


class Flow:
    """Counts the memory of one connection, and pauses reading from its socket at a limit. Belongs to the event loop."""

    def __init__(self, memory_limits: MemoryLimits) -> None:
        self._memory_limits = memory_limits
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._frame_bytes = 0  # of the incomplete frame, counted in `received`
        self._requested_bytes = 0  # further bytes of that frame that do not fit yet
        self.unread_bytes = 0  # answers that the client has not read yet, counted in `unread`
        self.is_waiting = False  # the frame does not fit into `received`: the socket is not read
        self._is_slow = False  # the client has more than UNREAD_HIGH_BYTES to read

    def start(self, transport: asyncio.Transport, address: str) -> None:
        """Start to count for this transport. All connections of `address` have a common share."""
        self._transport, self._address = transport, address
        transport.set_write_buffer_limits(UNREAD_HIGH_BYTES, UNREAD_LOW_BYTES)

    def stop(self) -> None:
        """Release all bytes except those of pending requests, which `release_request` releases."""
        if self.is_waiting:
            self._memory_limits.received.withdraw(self._address, self._on_granted)
        self._memory_limits.received.remove(self._address, self._frame_bytes)
        self._memory_limits.unread.remove(self._address, self.unread_bytes)
        self._transport, self.is_waiting, self._frame_bytes, self.unread_bytes = None, False, 0, 0

    # -- received bytes --------------------------------------------------------------------------------------

    def count_frame(self, awaited_bytes: int) -> bool:
        """Count the incomplete frame with its full size, `awaited_bytes` (0: there is no incomplete frame).

        While the frame does not fit, the socket is not read. Returns False if too many connections wait already: the
        caller closes the connection.
        """
        received, more_bytes = self._memory_limits.received, awaited_bytes - self._frame_bytes
        if more_bytes <= 0:
            if more_bytes:  # the frame that was counted is complete, and the next one is smaller
                self._frame_bytes = awaited_bytes
                received.remove(self._address, -more_bytes)
            if not received.held_bytes or received.fits(self._address, 0):
                return True
            # There are no more bytes to count, but the address has used up its share: the connection waits.
            more_bytes = 0
        if received.reserve(self._address, more_bytes, self._on_granted):
            self._frame_bytes += more_bytes
            return True
        self._requested_bytes, self.is_waiting = more_bytes, True
        self._pause_or_resume_reading()
        return received.waiting <= WAITING_MAX

    def count_request(self, size_bytes: int) -> int:
        """Count a pending request with a body of this size, and return the argument for `release_request`.

        A small body is not counted.
        """
        if size_bytes < LARGE_BYTES:
            return 0
        self._memory_limits.received.add(self._address, size_bytes)
        return size_bytes

    def release_request(self, counted_bytes: int) -> None:
        """Release the bytes of a request that has been answered."""
        self._memory_limits.received.remove(self._address, counted_bytes)

    def _on_granted(self) -> None:
        """Resume reading: the bytes that `count_frame` has requested fit now."""
        self._frame_bytes += self._requested_bytes
        self.is_waiting = False
        self._pause_or_resume_reading()

    # -- unread answers --------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if this client has unread answers and its address has used up its share."""
        return self.unread_bytes > 0 and not self._memory_limits.unread.fits(self._address, 0)

    def count_unread(self) -> bool:
        """Count the bytes that the client has not read yet. Returns False if they do not fit."""
        if self._transport is None:
            return True
        unread_bytes, quota = self._transport.get_write_buffer_size(), self._memory_limits.unread
        if unread_bytes != self.unread_bytes:
            quota.remove(self._address, self.unread_bytes)
            quota.add(self._address, unread_bytes)
            self.unread_bytes = unread_bytes
        return unread_bytes <= UNREAD_SMALL_BYTES or quota.fits(self._address, 0)

    def set_slow(self, is_slow: bool) -> None:
        """Set whether the client has many answers to read, and stop or resume reading its requests."""
        self._is_slow = is_slow
        self.count_unread()
        self._pause_or_resume_reading()

    def _pause_or_resume_reading(self) -> None:
        """Pause reading from the socket while the frame waits for memory or the client is slow. Else resume it."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.is_waiting or self._is_slow:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class Connection(asyncio.Protocol):
    """The asyncio protocol of one client. `receiver` gets the frames that one read of the socket has completed."""

    def __init__(
        self,
        receiver: Receiver,
        open_connections: set[Connection],
        loop: asyncio.AbstractEventLoop,
        memory_limits: MemoryLimits | None = None,
        cut: Cut = cut,
        edge: str = "remoting",
    ) -> None:
        """Prepare for a transport.

        `open_connections` contains this connection while it is open. `memory_limits` are shared with the edge's other
        connections. `cut` splits received bytes into the frames or runs that `receiver` gets. `edge` is the name of
        the edge in log lines.
        """
        self._edge = edge
        self._receiver, self._open_connections, self._loop = receiver, open_connections, loop
        self.flow = Flow(memory_limits or MemoryLimits())
        self._splitter = Splitter(cut=cut)
        # True while the requests of one read are handled: their answers are written together.
        self._is_buffering = False
        self._buffered: list[bytes | bytearray] = []
        self._buffered_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._opaques = itertools.count(1)
        # Requests from the broker to the client, by opaque.
        self._pending_requests: dict[int, asyncio.Future[Command]] = {}
        self._frame_begun_s: float | None = None  # when the first byte of the incomplete frame arrived
        self._connected_s = self.heard_s = loop.time()
        self._closing_s: float | None = None  # when `close` was called
        self.on_close: list[Callable[[], None]] = []
        self.closed: asyncio.Future[None] = loop.create_future()
        self._cancelled_on_close: set[asyncio.Task[None]] = set()
        self.calls = 0  # pending requests of the client
        self.caller: Caller = ANONYMOUS  # the signer of the last request
        self.peer = self.local = ("", 0)
        self.name = ":0"  # the client's address, for log lines and as a message's born host
        # The broker's address as this client sees it. Computed at first use.
        self.store_host: Host | None = None
        self.id_prefix = ""  # the first part of message ids, from `store_host`. Computed for the first answer

    # -- called by asyncio -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, or abort it if there are too many. See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self.local = tuple((transport.get_extra_info("sockname") or ("", 0))[:2])
        self.name = f"{self.peer[0]}:{self.peer[1]}"
        if self._exceeds_limit():
            logger.warning("connection refused peer=%s connections_max=%d", self.name, CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._open_connections.add(self)
        self.flow.start(self._transport, self.peer[0])

    def _exceeds_limit(self) -> bool:
        """Return whether the client's address has used up its share of CONNECTIONS_MAX."""
        # A shortcut: below half of CONNECTIONS_MAX, `exceeds_share` is false for every address.
        if len(self._open_connections) < CONNECTIONS_MAX // 2:
            return False
        return exceeds_share(self.peer[0], (each.peer[0] for each in self._open_connections), CONNECTIONS_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the broker's requests to this client, cancel tasks (`cancelled_on_close`), and call `on_close`."""
        self._open_connections.discard(self)
        self.flow.stop()
        if not self.closed.done():
            self.closed.set_result(None)
        for future in self._pending_requests.values():
            if not future.done():
                future.set_exception(Unavailable(f"{self.name} has disconnected"))
        self._pending_requests.clear()
        for task in self._cancelled_on_close:
            task.cancel()
        for callback in self.on_close:
            callback()
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
        if not self.flow.count_frame(awaited_bytes):
            logger.warning("connection closed, too many bytes of requests are under way peer=%s", self.name)
            self.abort()
            return
        if not held_bytes:
            self._frame_begun_s = None
        elif frames or self._frame_begun_s is None:
            self._frame_begun_s = self.heard_s

    def _receive(self, frames: list[Any]) -> None:
        """Handle the frames of one read, and write the answers that are ready at once together."""
        if len(frames) == 1:
            self._receiver(self, frames)
            return
        self._is_buffering = True
        try:
            self._receiver(self, frames)
        finally:
            self._is_buffering = False
            self._flush()

    def pause_writing(self) -> None:
        """Stop reading requests: the client has many answers to read. See asyncio.Protocol."""
        self.flow.set_slow(True)

    def resume_writing(self) -> None:
        """Resume reading requests: the client has read most of its answers. See asyncio.Protocol."""
        self.flow.set_slow(False)

    # -- called by the edge ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if an answer could still reach the client."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes. A client with too many unread bytes loses its connection, so that memory stays bounded.

        Answers to several frames of one read are buffered, and written together (`_receive`).
        """
        if not self._is_buffering:
            self._write(data)
            return
        self._buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes >= BUFFERED_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        answers, self._buffered, self._buffered_bytes = self._buffered, [], 0
        if answers:
            self._write(b"".join(answers))

    def _write(self, data: bytes | bytearray) -> None:
        """Write to the transport, and abort the connection if the client has too many unread bytes."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # no error: the caller may be a commit that still has to acknowledge sends of other connections
        transport.write(data)
        unsent_bytes = transport.get_write_buffer_size()
        if not (unsent_bytes or self.flow.unread_bytes):
            return  # the usual case: the socket took all bytes
        if not self.flow.count_unread() or unsent_bytes > OUTBOUND_BYTES_MAX:
            logger.warning(
                "connection closed, answers are not read peer=%s waiting_bytes=%d", self.name, unsent_bytes
            )
            transport.abort()
            self.flow.stop()  # at once, so that other connections of the address can use the bytes

    def send(self, command: Command) -> None:
        """Send a command that needs no answer: an answer, or a one-way request."""
        self.write(encode(command))

    def push(self, command: Command) -> None:
        """Send a one-way request from the broker."""
        command.opaque, command.version = next(self._opaques), BROKER_VERSION
        command.flag |= CommandFlag.ONE_WAY
        self.send(command)

    async def request(self, command: Command, timeout_s: float) -> Command:
        """Send a request from the broker and wait for its answer. Raises Unavailable."""
        if not self.is_open:
            raise Unavailable(f"{self.name} has disconnected")
        command.opaque, command.version = next(self._opaques), BROKER_VERSION
        future: asyncio.Future[Command] = self._loop.create_future()
        self._pending_requests[command.opaque] = future
        try:
            self.send(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise Unavailable(f"{self.name} did not answer within {timeout_s} s") from error
        finally:
            self._pending_requests.pop(command.opaque, None)

    @contextmanager
    def cancelled_on_close(self) -> Iterator[None]:
        """Cancel the current task if the client disconnects within this block. Not for shared work such as a commit."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._cancelled_on_close.add(task)
        try:
            yield
        finally:
            self._cancelled_on_close.discard(task)

    def receive_answer(self, command: Command) -> None:
        """Pass a client's answer to the `request` that waits for it. An answer without a request is ignored."""
        future = self._pending_requests.get(command.opaque)
        if future is not None and not future.done():
            future.set_result(command)

    def check_deadlines(self, now_s: float, *, must_sign: bool = False) -> None:
        """Close the connection if a frame takes too long or the client is silent. Called about once a second.

        `must_sign`: also close it if the client has not signed a request in time. Otherwise clients without an account
        could use up all connections.
        """
        self.flow.count_unread()
        if self.flow.is_waiting:  # the broker does not read the socket, so the deadlines do not apply
            self.heard_s = now_s
            self._frame_begun_s = None if self._frame_begun_s is None else now_s
        if self._closing_s is not None:
            if now_s - self._closing_s > GOODBYE_S and self._transport is not None:
                self._transport.abort()
        elif self._frame_begun_s is not None and now_s - self._frame_begun_s > HALF_FRAME_S:
            logger.warning(
                "connection closed, its frame does not end peer=%s waited_s=%s", self.name, HALF_FRAME_S
            )
            self.close()
        elif must_sign and self.caller is ANONYMOUS and now_s - self._connected_s > UNSIGNED_S:
            logger.warning("connection closed, nothing was signed peer=%s waited_s=%s", self.name, UNSIGNED_S)
            self.close()
        elif now_s - self.heard_s > IDLE_S and not self.calls:
            logger.info("connection closed, it was idle peer=%s idle_s=%s", self.name, IDLE_S)
            self.close()

    def close(self) -> None:
        """Close the connection after the answers already written are sent. The client has GOODBYE_S to read them."""
        if self._transport is not None and self._closing_s is None:
            self._flush()
            self._closing_s = self._loop.time()
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once. Unsent bytes are lost."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(eq=False)
class Member(Session[Connection]):
    """The client of a connection, as described by its last heartbeat."""

    language: int = 0
    version: int = 0

    @property
    def connection(self) -> Connection:
        """The connection on which the client sends its heartbeats."""
        return self.key
