"""A receiver of webhooks: a real HTTP server in separate threads, whose answers the test chooses."""

from __future__ import annotations

import contextlib
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A received request. Names of headers are in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes


class Reply(NamedTuple):
    """A status with headers and a body, or the way in which the connection ends."""

    status: int = 200
    headers: dict[str, str] = {}
    body: bytes = b""
    # In place of an answer: "hang" until the receiver stops, "reset" or "close" the connection, send "noise", or send
    # an "endless" or a "stuck" (incomplete) body.
    instead: str = ""


Script = Callable[[Request], Reply]


class Receiver:
    """Stores the requests, and answers each with the result of `script`, which may be replaced at any time.

    `most`: the largest number of requests at the same time.
    """

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.requests: list[Request] = []
        self.script: Script = script or (lambda request: Reply())
        self.stopped = threading.Event()
        self.now, self.most, self._lock = 0, 0, threading.Lock()
        self._server = _Server(("127.0.0.1", port), self)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="receiver", daemon=True
        )
        self._thread.start()

    def bodies(self) -> list[bytes]:
        """Return the bodies of all requests so far."""
        return [request.body for request in self.requests]

    def stop(self) -> None:
        """Stop the server, and cut its connections."""
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()

    def handle(self, request: Request) -> Reply:
        """Note a request, and return the reply of the script. `most` is the highest number of requests at once."""
        with self._lock:
            self.requests.append(request)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            return self.script(request)
        finally:
            with self._lock:
                self.now -= 1


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1_024

    def __init__(self, address: tuple[str, int], receiver: Receiver) -> None:
        self.receiver = receiver
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have gone away, which some tests do on purpose."""

    def cut(self) -> None:
        """Shut down all open connections."""
        for item in list(self._open):
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        receiver = self.server.receiver
        reply = receiver.handle(Request(self.path, headers, body))
        if reply.instead:
            self._end(reply.instead)
            return
        self.send_response(reply.status)
        for name, value in {"content-length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def _end(self, how: str) -> None:
        """Give no complete answer, in the way `how`: "hang", "reset", "noise", "endless" or "stuck"."""
        self.close_connection = True
        if how == "hang":
            self.server.receiver.stopped.wait()
        elif how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif how == "noise":
            self.wfile.write(b"\x00\xffno http at all\r\n\r\n")
        elif how == "endless":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not self.server.receiver.stopped.is_set():
                self.wfile.write(b"x" * 65_536)
        elif how == "stuck":
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n12345")
            self.server.receiver.stopped.wait()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def receiver_of(script: Script | None = None) -> Iterator[Receiver]:
    receiver = Receiver(script)
    try:
        yield receiver
    finally:
        receiver.stop()
