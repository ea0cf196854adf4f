"""A listening port whose clients speak TLS or not, told apart by the first byte that each sends.

    0x16         a TLS handshake record: the connection goes on with TLS
    other bytes  HTTP/2 without TLS ("PRI * …"), where that is allowed; else the connection is closed

The byte is looked at and left in the socket, so that the transport reads it again. Until it has come, a connection
costs a descriptor and an entry here, and no task.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from timeball.config import is_loopback

logger = logging.getLogger(__name__)

TLS_RECORD = b"\x16"
FIRST_BYTE_S = 10.0  # as long as a handshake may take
SILENT_MAX = 1_024  # connections that have sent nothing yet; the next ones are closed
PAUSE_S = 1.0  # when no descriptor is free, as asyncio's own servers pause


class FirstByteServer:
    """Listens, and hands each connection to a protocol of `factory`. Belongs to the event loop."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        handshake_s: float,
        *,
        plain_from_others: bool,
    ) -> None:
        """`plain_from_others`: take connections without TLS from other machines too, not from this one alone."""
        self._loop = asyncio.get_running_loop()
        self._factory, self._tls, self._handshake_s = factory, tls, handshake_s
        self._plain_from_others = plain_from_others
        self.sockets: list[socket.socket] = []
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Listen on every address of the host; raises OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self.sockets.append(listening)
                listening.setblocking(False)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(backlog)
                self._loop.add_reader(listening.fileno(), self._accept, listening, backlog)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Take no more connections, and let those go that have sent nothing yet."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening.fileno())
                listening.close()
        for connection in list(self._silent):
            self._drop(connection)

    async def wait_closed(self) -> None:
        """Wait for handshakes that have begun."""
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
        """Hand on a connection by which something has come, or its end."""
        self._forget(connection)
        try:
            first, peer = connection.recv(1, socket.MSG_PEEK), connection.getpeername()[0]
        except OSError:
            connection.close()
            return
        is_tls = first == TLS_RECORD
        if not first or not (is_tls or self._plain_from_others or is_loopback(peer)):
            connection.close()
            return
        task = self._loop.create_task(self._connect(connection, is_tls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, is_tls: bool) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls if is_tls else None,
                ssl_handshake_timeout=self._handshake_s if is_tls else None,
            )
        except (OSError, ssl.SSLError) as error:  # a handshake that failed: its client knows why
            logger.debug("connection not made reason=%s", error)
