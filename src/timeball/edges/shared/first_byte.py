"""Serve TLS and plain text on one port by the first byte of a client, and log clients of another protocol.

    0x16         a TLS handshake record: the connection continues with TLS
    other bytes  plain text, if allowed for this client. Otherwise the connection is closed and its protocol logged

The first byte is only peeked at, so that the transport reads it again. Until it arrives, a connection has no task and
costs only a descriptor and an entry in `FirstByteServer._silent`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Literal, TypeAlias

from timeball.model.config import is_loopback

logger = logging.getLogger(__name__)

# ---- clients of another protocol -----------------------------------------------------------------------------
# Such a client connects to the wrong port, or sends broken frames. It usually retries forever, and a line per attempt
# would fill the log. So there is one line a minute per edge and protocol. The line names the client's protocol and the
# ports of this broker for that protocol. `protocol_of` does no I/O.

PAUSE_S = 60.0  # between two log lines about one protocol at one edge
_HTTP = re.compile(rb"[A-Z]{3,7} [ -~]* HTTP/1\.|(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS|CONNECT) ")
_RESP = re.compile(rb"\*[0-9]{1,9}\r\n\$")
_KAFKA_KEY_MAX, _KAFKA_VERSION_MAX = 100, 30  # api_key and api_version of a request


def protocol_of(data: bytes) -> str:
    """Recognise the protocol of a connection by its first bytes. Returns "" for an unknown protocol."""
    if data[:2] == b"\x16\x03":  # a handshake record of TLS, or of SSL 3
        return "TLS"
    if data[:4] == b"PRI ":
        return "HTTP/2"
    if _HTTP.match(data):
        return "HTTP/1"
    if _RESP.match(data):
        return "RESP"
    if len(data) >= 9 and not data[0]:
        size_bytes, header_bytes = (
            int.from_bytes(data[:4], "big"),
            int.from_bytes(data[5:8], "big"),
        )
        # Remoting: the size of the frame, the serialisation (0: JSON, 1: binary), and the size of the header.
        if data[4] in (0, 1) and 0 < header_bytes <= size_bytes - 4 and (data[4] or data[8:9] == b"{"):
            return "remoting"
        api_key, api_version = (
            int.from_bytes(data[4:6], "big"),
            int.from_bytes(data[6:8], "big"),
        )
        if api_key <= _KAFKA_KEY_MAX and api_version <= _KAFKA_VERSION_MAX:
            return "Kafka"
    return ""


# The edges of each protocol, and the settings of their ports.
_PORTS = {
    "HTTP/1": (("http", "http_port"),),
    "HTTP/2": (("flight", "port"), ("grpc", "grpc_port")),
    "remoting": (("remoting", "remoting_port"), ("name_server", "name_server_port")),
}


class WrongProtocols:
    """Logs clients of another protocol, once per PAUSE_S for each edge and protocol. Belongs to the event loop."""

    def __init__(self) -> None:
        # By edge and protocol: the time of the last line in s, and the number of refused connections since then.
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}
        self._ports: Mapping[str, int] = {}
        self._has_tls = False

    def listens(self, ports: Mapping[str, int], *, has_tls: bool) -> None:
        """Set the ports on which the broker listens, by edge. Later log lines name them."""
        self._ports, self._has_tls = ports, has_tls

    def note(self, edge: str, begin: bytes, peer: str, now_s: float, reason: str = "") -> None:
        """Log a refused connection, unless the last line about this edge and protocol is less than PAUSE_S old.

        `begin`: the first bytes of the connection. `reason` is logged for an unknown protocol. A connection of an
        unknown protocol without a reason is not logged.
        """
        protocol = protocol_of(begin)
        if not (protocol or reason):
            return
        logged_s, not_logged = self._logged.get((edge, protocol), (now_s - PAUSE_S, 0))
        if now_s - logged_s < PAUSE_S:
            self._logged[edge, protocol] = logged_s, not_logged + 1
            return
        self._logged[edge, protocol] = now_s, 0
        if not protocol:
            logger.warning(
                "connection closed edge=%s peer=%s reason=%s not_logged=%d", edge, peer, reason, not_logged
            )
            return
        logger.warning(
            "client of another protocol edge=%s tls=%s speaks=%s peer=%s not_logged=%d right_port=%s",
            edge, "on" if self._has_tls else "off", protocol, peer, not_logged, self._hint(protocol),
        )  # fmt: skip

    def _hint(self, protocol: str) -> str:
        """List the settings and numbers of this broker's ports for a protocol."""
        ports = [(name, self._ports.get(edge, -1)) for edge, name in _PORTS.get(protocol, ())]
        return ",".join(f"{name}:{port}" for name, port in ports if port > 0) or "none"


WRONG_PROTOCOLS = WrongProtocols()  # of this process


# ---- the server ----------------------------------------------------------------------------------------------


# The clients that may connect without TLS.
PlainFrom = Literal["nobody", "this machine", "all"]
TLS_RECORD = b"\x16"
PEEK_BYTES = 64  # peeked at, to recognise another protocol for the log
DISCARD_BYTES = 65_536  # read and ignored before a refused connection is closed
HANDSHAKE_S = 10.0
FIRST_BYTE_S = 10.0
SILENT_MAX = 1_024  # connections that have sent nothing yet. Further connections are closed
ACCEPT_PAUSE_S = 1.0  # without accepting, after no descriptor was free. asyncio's own servers do the same


class FirstByteServer:
    """A server that creates a protocol from `factory` for each connection. Belongs to the event loop."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        *,
        edge: str,
        plain_from: PlainFrom = "nobody",
    ) -> None:
        """Create a server that does not listen yet.

        `edge` is its name in log lines. `plain_from`: the clients that may connect without TLS.
        """
        self._loop = asyncio.get_running_loop()
        self._factory, self._tls = factory, tls
        self._edge, self._plain_from = edge, plain_from
        self.sockets: list[socket.socket] = []
        # Connections that have sent nothing yet, and the timers that close them.
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int, backlog: int) -> None:
        """Bind to every address of the host, and accept connections. Raises OSError; no socket is open then."""
        addresses = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, protocol, _, address in dict.fromkeys(addresses):
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
        """Accept connections on sockets that are bound and listen already. The server closes them in `close`."""
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
            self._close_silent(connection)

    async def wait_closed(self) -> None:
        """Wait for running handshakes."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept(self, listening: socket.socket, backlog: int) -> None:
        """Accept the connections that wait at a socket, and wait for the first byte of each.

        If no descriptor is free, stop for ACCEPT_PAUSE_S.
        """
        for _ in range(backlog):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is free
                logger.warning("connection not accepted reason=%s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting, listening, backlog)
                return
            connection.setblocking(False)
            if len(self._silent) >= SILENT_MAX:
                connection.close()
                continue
            self._silent[connection] = self._loop.call_later(FIRST_BYTE_S, self._close_silent, connection)
            self._loop.add_reader(connection.fileno(), self._on_first_byte, connection)

    def _resume_accepting(self, listening: socket.socket, backlog: int) -> None:
        if listening.fileno() >= 0:  # not closed meanwhile
            self._loop.add_reader(listening.fileno(), self._accept, listening, backlog)

    def _stop_waiting(self, connection: socket.socket) -> None:
        """Stop waiting for the first byte of a connection."""
        self._silent.pop(connection).cancel()
        self._loop.remove_reader(connection.fileno())

    def _close_silent(self, connection: socket.socket) -> None:
        self._stop_waiting(connection)
        connection.close()

    def _on_first_byte(self, connection: socket.socket) -> None:
        """Create the protocol of a connection, on which bytes or the end of the stream have arrived.

        A connection that has ended, or that may not be plain text, is closed.
        """
        self._stop_waiting(connection)
        try:
            first_bytes, peer = connection.recv(PEEK_BYTES, socket.MSG_PEEK), connection.getpeername()[0]
        except OSError:
            connection.close()
            return
        is_tls = first_bytes[:1] == TLS_RECORD
        if not first_bytes or not (is_tls or self._may_be_plain(peer)):
            if first_bytes:
                WRONG_PROTOCOLS.note(self._edge, first_bytes, peer, self._loop.time(), "no TLS")
                # Closing a socket with unread bytes sends a reset to the client, not an ordinary end.
                with suppress(OSError):
                    connection.recv(DISCARD_BYTES)
            connection.close()
            return
        task = self._loop.create_task(self._connect(connection, is_tls))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def _may_be_plain(self, peer: str) -> bool:
        return self._plain_from == "all" or (self._plain_from == "this machine" and is_loopback(peer))

    async def _connect(self, connection: socket.socket, is_tls: bool) -> None:
        """Create the protocol of a connection, after a TLS handshake if the client uses TLS."""
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls if is_tls else None,
                ssl_handshake_timeout=HANDSHAKE_S if is_tls else None,
            )
        except (OSError, ssl.SSLError) as error:  # the TLS handshake failed, or the client has gone
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
    """Listen with asyncio's own server, or with a FirstByteServer if `tls` is given. Raises OSError."""
    if tls is None:
        return await asyncio.get_running_loop().create_server(factory, host, port, backlog=backlog)
    server = FirstByteServer(factory, tls, edge=edge, plain_from=plain_from)
    await server.listen(host, port, backlog)
    return server
