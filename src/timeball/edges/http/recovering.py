"""Answers requests on the HTTP port while the broker recovers: the process is alive, but accepts no messages yet.

The recovery of a large log takes minutes. Without these answers a probe or an operator would see a closed port. After
the recovery the listening socket is handed to the HTTP edge, so that clients waiting in its backlog are served there.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from timeball.edges.http.answers_codec import Health
from timeball.edges.http.codec import JSON, PROBLEM, encode, problem
from timeball.io.security import Security
from timeball.model.config import Settings
from timeball.model.errors import SetupError

logger = logging.getLogger(__name__)

BACKLOG = 1_024
HEAD_BYTES_MAX = 32 * 1024  # of a request
REQUEST_S = 5.0  # for a request and its answer
CONNECTIONS_MAX = 1_000  # further ones are closed without an answer
LIVE = b"/health/live"


def listen(settings: Settings) -> socket.socket:
    """Open a socket that listens on the HTTP port. Raises SetupError if the port is taken or the host is unknown."""
    host, port = settings.host, settings.http_port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address, family=family, backlog=BACKLOG)
        # Connections inherit this option, which asyncio sets only on sockets made with a protocol number. Without it,
        # the second write of an answer waits 40 ms for the client's delayed acknowledgement of the first one.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise SetupError(
            f"--http-port {port}: {error.strerror or error}; another broker may be running, choose another port"
        ) from error


class RecoveryResponder:
    """Listens and answers until the HTTP edge takes over the socket. Belongs to the event loop."""

    def __init__(self, settings: Settings, security: Security) -> None:
        self._settings, self._security = settings, security
        self._listening: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._open_count = 0  # connections

    async def start(self) -> None:
        """Begin to answer, unless there is no HTTP port. Raises SetupError when the port is taken."""
        if self._settings.http_port < 0:
            return
        self._listening = listen(self._settings)
        tls = self._security.tls
        # The server closes this copy of the descriptor, and the backlog of the original socket stays.
        self._server = await asyncio.start_server(
            self._serve, sock=self._listening.dup(), limit=HEAD_BYTES_MAX, backlog=BACKLOG,
            ssl=None if tls is None else tls.http,
        )  # fmt: skip

    def hand_over(self) -> socket.socket | None:
        """Stop answering, and return the socket, which still listens. None if there is no HTTP port."""
        if self._server is not None:
            self._server.close()
        listening, self._server, self._listening = self._listening, None, None
        return listening

    def close(self) -> None:
        """Stop answering, and free the port."""
        listening = self.hand_over()
        if listening is not None:
            listening.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close its connection."""
        self._open_count += 1
        try:
            if self._open_count <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(encode_answer(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            logger.info("not answered while recovering reason=%s", type(error).__name__)
        finally:
            self._open_count -= 1
            writer.close()


def encode_answer(head: bytes) -> bytes:
    """Encode the answer to a request: 200 for /health/live, and 503 for all other paths. The connection is then closed.

    `head` is the request line with the headers.
    """
    method, _, target_and_rest = head.partition(b" ")
    if target_and_rest.partition(b" ")[0].partition(b"?")[0] == LIVE:
        status_line, content_type, content, extra_headers = b"200 OK", JSON, encode(Health("live")), b""
    else:
        answer = problem(
            503, "unavailable", "the broker recovers: it reads its log, and takes messages when it is done"
        )
        status_line, content_type = b"503 Service Unavailable", PROBLEM
        content, extra_headers = encode(answer.value), b"retry-after: 1\r\n"
    fields = b"content-type: %s\r\ncontent-length: %d\r\ncache-control: no-store\r\nconnection: close\r\n"
    body = b"" if method == b"HEAD" else content
    return (
        b"HTTP/1.1 "
        + status_line
        + b"\r\n"
        + fields % (content_type.encode(), len(content))
        + extra_headers
        + b"\r\n"
        + body
    )
