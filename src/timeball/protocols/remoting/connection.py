"""One client's connection: bytes to frames, answers to bytes, and an end for whoever does not keep the rules.

A client that sends half a frame, nothing at all, or takes no answers costs memory: each has a deadline or a
bound (`limits` below, after reliability's table of attacks), and past it the connection is closed. Answers
may leave in any order; clients match them by `opaque`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from timeball.access import ANONYMOUS, Caller
from timeball.errors import Unavailable
from timeball.protocols.remoting.codec.codes import CommandFlag
from timeball.protocols.remoting.codec.frame import BadFrame, Command, Frame, Splitter, encode
from timeball.protocols.remoting.flow import Flow, Room

logger = logging.getLogger(__name__)

HALF_FRAME_S = 10.0  # from the first byte of a frame to its last
UNSIGNED_S = 10.0  # where requests are signed: from the connection to the first that is
IDLE_S = 240.0  # clients beat every 30 s; RocketMQ closes after 120 s, we after two of those
OUTBOUND_BYTES_MAX = 64 * 1024 * 1024  # answers a client has not taken
CONNECTIONS_MAX = 4_096
GOODBYE_S = 5.0  # to take the answers written before a close; who takes nothing would never be gone
CALLS_MAX = 8_192  # requests of one connection that wait for their answer; a pull per queue is usual

Receiver = Callable[["Connection", list[Frame]], None]


class Connection(asyncio.Protocol):
    """See the module. `receiver` gets whatever frames one read of the socket has completed."""

    def __init__(
        self,
        receiver: Receiver,
        opened: set[Connection],
        loop: asyncio.AbstractEventLoop,
        room: Room | None = None,
    ) -> None:
        """`room`: the memory that it shares with the other connections of its edge."""
        self._receiver, self._opened, self._loop = receiver, opened, loop
        self.flow = Flow(room or Room())
        self._splitter = Splitter()
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
        self.caller: Caller = ANONYMOUS  # who has signed the last request
        self.peer = self.local = ("", 0)
        self.name = ":0"  # the far side, for people and as a message's born host

    # -- asyncio's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = tuple((transport.get_extra_info("peername") or ("", 0))[:2])
        self.local = tuple((transport.get_extra_info("sockname") or ("", 0))[:2])
        self.name = f"{self.peer[0]}:{self.peer[1]}"
        if len(self._opened) >= CONNECTIONS_MAX:
            logger.warning("connection refused peer=%s connections_max=%d", self.name, CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._opened.add(self)
        self.flow.opened(self._transport, self.peer[0])

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
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
        """See asyncio.Protocol."""
        self.heard_s = self._loop.time()
        try:
            frames = self._splitter.feed(data)
            if frames:
                self._receiver(self, frames)
        except BadFrame as error:
            logger.warning("connection closed peer=%s reason=%s", self.name, error)
            self.close()
            return
        if not self.flow.has_read(self._splitter.awaited_bytes):
            logger.warning("connection closed, too many bytes of requests are under way peer=%s", self.name)
            self.abort()
            return
        if not self._splitter.held_bytes:
            self._frame_since_s = None
        elif frames or self._frame_since_s is None:
            self._frame_since_s = self.heard_s

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client has many answers to take."""
        self.flow.slow(True)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.flow.slow(False)

    # -- our side --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether an answer could still arrive."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes; a client that takes nothing any more loses its connection instead of our memory."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # one dead client must not cost the others of a commit their acknowledgements
        transport.write(data)
        waiting_bytes = transport.get_write_buffer_size()
        if not self.flow.has_written() or waiting_bytes > OUTBOUND_BYTES_MAX:
            logger.warning(
                "connection closed, its answers are not read peer=%s waiting_bytes=%d",
                self.name,
                waiting_bytes,
            )
            transport.abort()
            self.flow.has_written()  # nothing any more

    def send(self, command: Command) -> None:
        """Send an answer, or a request nobody needs an answer to."""
        self.write(encode(command))

    def push(self, command: Command) -> None:
        """Send a request of ours, one-way."""
        command.opaque = next(self._opaques)
        command.flag |= CommandFlag.ONE_WAY
        self.send(command)

    async def request(self, command: Command, timeout_s: float) -> Command:
        """Send a request of ours and wait for its answer; raises Unavailable."""
        command.opaque = next(self._opaques)
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
        """Around a wait that ends when the client goes. Never around work that others are part of, such as a commit."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def answered(self, command: Command) -> None:
        """An answer to a request of ours has come; one that nobody waits for is ignored."""
        future = self._asked.get(command.opaque)
        if future is not None and not future.done():
            future.set_result(command)

    def check_deadlines(self, now_s: float, *, must_sign: bool = False) -> None:
        """Close when a frame takes too long or the client has fallen silent; called about once a second.

        `must_sign`: also when it has not shown who it is, or strangers could take all the connections there are.
        """
        self.flow.has_written()
        if self.flow.waits:  # it is us who do not read
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
        """End the connection; answers already written still leave, if they are taken."""
        if self._transport is not None and self._closed_s is None:
            self._closed_s = self._loop.time()
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, whatever has not left."""
        if self._transport is not None:
            self._transport.abort()
