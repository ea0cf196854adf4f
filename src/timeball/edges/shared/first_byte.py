"""A listening port of a broker with a certificate: the first byte of each client shows whether it uses TLS.

    0x16         a TLS handshake record: the connection continues with TLS
    other bytes  no TLS, where that is allowed; otherwise the connection is closed, and the log names its protocol

The byte is read but left in the socket, so that the transport reads it again. Until it arrives, a connection costs only
a descriptor and an entry here, and no task.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal, TypeAlias

from timeball.edges.shared.wrong_protocols import WRONG_PROTOCOLS
from timeball.model.config import is_loopback

logger = logging.getLogger(__name__)

PlainFrom = Literal["nobody", "this machine", "all"]
TLS_RECORD = b"\x16"
BEGIN_BYTES = 64  # read to recognise another protocol
UNREAD_BYTES = 65_536  # read once before a refused connection is closed
HANDSHAKE_S = 10.0
FIRST_BYTE_S = 10.0
SILENT_MAX = 1_024  # connections that have sent nothing yet. Further ones are closed
PAUSE_S = 1.0  # when no descriptor is free, as in asyncio's own servers


class FirstByteServer:
    """Listens, and gives each connection to a protocol from `factory`. Belongs to the event loop."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        *,
        edge: str,
        plain_from: PlainFrom = "nobody",
    ) -> None:
        """Create a server that does not listen yet.

        `edge` is the name in the log. `plain_from`: the clients that may connect without TLS.
        """
        self._loop = asyncio.get_running_loop()
        self._factory, self._tls = factory, tls
        self._edge, self._plain_from = edge, plain_from
        self.sockets: list[socket.socket] = []
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Listen on every address of the host. Raises OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(backlog)
        except OSError:
            self.close()
            raise
        self.listen_on(self.sockets, backlog)

    def listen_on(self, sockets: Iterable[socket.socket], backlog: int) -> None:
        """Accept connections from listening sockets."""
        self.sockets = list(sockets)
        for listening in self.sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening.fileno(), self._accept, listening, backlog)

    def close(self) -> None:
        """Accept no more connections, and close those that have sent nothing yet."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening.fileno())
                listening.close()
        for connection in list(self._silent):
            self._drop(connection)

    async def wait_closed(self) -> None:
        """Wait for running handshakes."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, listening: socket.socket, backlog: int) -> None:
        for _ in range(backlog):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is free
                logger.warning("connection not accepted reason=%s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(PAUSE_S, self._accept_again, listening, backlog)
                return
            connection.setblocking(False)
            if len(self._silent) >= SILENT_MAX:
                connection.close()
                continue
            self._silent[connection] = self._loop.call_later(FIRST_BYTE_S, self._drop, connection)
            self._loop.add_reader(connection.fileno(), self._heard, connection)

    def _accept_again(self, listening: socket.socket, backlog: int) -> None:
        if listening.fileno() >= 0:  # not closed meanwhile
            self._loop.add_reader(listening.fileno(), self._accept, listening, backlog)

    def _forget(self, connection: socket.socket) -> None:
        self._silent.pop(connection).cancel()
        self._loop.remove_reader(connection.fileno())

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _heard(self, connection: socket.socket) -> None:
        """Hand on a connection that has received its first byte, or its end."""
        self._forget(connection)
        try:
            begin, peer = connection.recv(BEGIN_BYTES, socket.MSG_PEEK), connection.getpeername()[0]
        except OSError:
            connection.close()
            return
        is_tls = begin[:1] == TLS_RECORD
        if not begin or not (is_tls or self._may_be_plain(peer)):
            if begin:
                WRONG_PROTOCOLS.note(self._edge, begin, peer, self._loop.time(), "no TLS")
                with suppress(OSError):  # to a client, a close with unread bytes is a reset instead of an end
                    connection.recv(UNREAD_BYTES)
            connection.close()
            return
        task = self._loop.create_task(self._connect(connection, is_tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _may_be_plain(self, peer: str) -> bool:
        return self._plain_from == "all" or (self._plain_from == "this machine" and is_loopback(peer))

    async def _connect(self, connection: socket.socket, is_tls: bool) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls if is_tls else None,
                ssl_handshake_timeout=HANDSHAKE_S if is_tls else None,
            )
        except (OSError, ssl.SSLError) as error:  # the handshake failed. The client has its own error
            logger.debug("connection not made reason=%s", error)


Listening: TypeAlias = asyncio.Server | FirstByteServer


async def listen(
    factory: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    backlog: int,
    tls: ssl.SSLContext | None,
    *,
    edge: str,
    plain_from: PlainFrom = "nobody",
) -> Listening:
    """Listen, with TLS if there is a context. Raises OSError. `edge`, `plain_from`: see FirstByteServer."""
    if tls is None:
        return await asyncio.get_running_loop().create_server(factory, host, port, backlog=backlog)
    server = FirstByteServer(factory, tls, edge=edge, plain_from=plain_from)
    await server.listen(host, port, backlog)
    return server
