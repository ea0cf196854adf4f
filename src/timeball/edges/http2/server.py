"""The server of a gRPC edge: listens, creates a call for each new stream, and checks all deadlines.

connection.py has the bounds for a client, exchange.py those for a call. The edge provides the methods (`Service`).
Decision 0041 explains why Timeball has its own HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from timeball.edges.http2.connection import HEADERS_BYTES_MAX, Bounds, Connection
from timeball.edges.http2.exchange import Call, CallLimits, Exchange, Method
from timeball.edges.http2.frames import (
    END_HEADERS,
    HEADERS,
    Fault,
    GrpcStatus,
    Payload,
    frame,
    literal,
)
from timeball.edges.http2.hpack_decoder import Headers
from timeball.edges.http2.streams import WINDOW_BYTES, Flushes, Stream, Streams
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import Listening, PlainFrom
from timeball.io.security import Tls
from timeball.model.errors import SetupError

logger = logging.getLogger(__name__)

BACKLOG = 1_024
CHECK_INTERVAL_S = 0.25  # between two checks of all deadlines
LAST_ANSWERS_S = 0.5  # how long a stop waits for open calls. Those still open then get no answer

TIMEOUT_DIGITS_MAX = 8
_UNIT_S = {"H": 3_600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# The answer to an HTTP/2 request that is no gRPC call: headers, text, trailers.
_NOT_GRPC = literal(":status", "415") + literal("content-type", "text/plain")
_NOT_GRPC_TEXT = b"only gRPC calls\n"
_NOT_GRPC_TRAILERS = literal("grpc-status", str(int(GrpcStatus.UNIMPLEMENTED)))
REFUSAL_S = 10.0  # for a client to complete a request that is no gRPC call, and then to read the answer


class Service(Protocol):
    """The interface of an edge that the server uses: its methods, its limits, and the creation of its calls."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods by their paths."""

    @property
    def call_limits(self) -> CallLimits:
        """The limits that all calls of the edge share."""

    @property
    def call(self) -> type[Call]:
        """The class of the `call` argument of `open`."""

    def open(
        self,
        method: Method | None,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Any,
        now_s: float,
    ) -> Exchange:
        """Create the exchange of a new call. `method` is None if the edge has no such method."""


class Server:
    """Accepts the connections of one edge and serves their calls. Belongs to the broker's event loop."""

    def __init__(
        self,
        service: Service,
        bounds: Bounds = Bounds(),  # noqa: B008  # frozen, so it can be shared
    ) -> None:
        self._service, self._bounds = service, bounds
        self._connections: set[Connection] = set()
        self._server: Listening | None = None

    async def start(
        self, host: str, port: int, tls: Tls | None, option: str, *, plain_from: PlainFrom = "nobody"
    ) -> int:
        """Listen, and return the port (port 0 chooses a free one).

        `option` is the command-line option of the port. The SetupError for a port that cannot be used names it.
        `plain_from`: the clients that may connect without TLS although there is a certificate.
        """
        loop = asyncio.get_running_loop()
        flushes = Flushes(loop)

        def create_connection() -> Connection:
            return Connection(self._begin, self._connections, loop, self._bounds, flushes)

        try:
            self._server = await first_byte.listen(
                create_connection, host, port, BACKLOG, tls.context if tls else None,
                edge=self._bounds.edge, plain_from=plain_from,
            )  # fmt: skip
        except OSError as error:
            raise SetupError(
                f"{option} {port}: {error.strerror or error}; another broker may be running, choose another port"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def watch(self) -> None:
        """Check the deadlines of all connections and calls every CHECK_INTERVAL_S, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for connection in list(self._connections):
                connection.check(loop.time())

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    def open_streams(self) -> list[Stream]:
        """Return the open streams of all connections."""
        return [stream for each in self._connections for stream in each.streams.open.values()]

    async def close(self) -> None:
        """Accept no more connections, wait up to LAST_ANSWERS_S for open calls, and close the connections."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.leave()
        completions = [stream.completion() for stream in self.open_streams()]
        if running := [completion for completion in completions if completion is not None]:
            await asyncio.wait(running, timeout=LAST_ANSWERS_S)
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections], timeout=LAST_ANSWERS_S)
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None

    def _begin(
        self,
        streams: Streams,
        number: int,
        headers: Headers,
        size_bytes: int,
        now_s: float,
        is_half_closed: bool,
    ) -> Stream | None:
        """Create and begin the call of a new stream. Returns None if the call has ended already, with an answer.

        `size_bytes` is the size of the headers. A request that is no gRPC call becomes a `NotGrpc`.
        """
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith(
            "application/grpc"
        ):
            return NotGrpc(streams, number, is_half_closed, headers, now_s).begin()
        timeout = headers.get("grpc-timeout")
        remaining_s = None if timeout is None else parse_timeout(timeout)
        service, path = self._service, headers.get(":path", "")
        method = service.methods.get(path)
        call, calls = service.call(headers, streams.peer, remaining_s), service.call_limits.calls
        exchange = service.open(method, streams, number, is_half_closed, call, now_s)
        if method is None:
            exchange.fail(GrpcStatus.UNIMPLEMENTED, f"no call {path[:200]!r}")
        elif timeout is not None and remaining_s is None:
            exchange.fail(GrpcStatus.INTERNAL, f"grpc-timeout {timeout[:20]!r}: digits and one of HMSmun")
        elif size_bytes > HEADERS_BYTES_MAX:
            exchange.fail(GrpcStatus.RESOURCE_EXHAUSTED, f"headers of more than {HEADERS_BYTES_MAX} bytes")
        # Up to half of the limit, `excess` never refuses a call.
        elif calls.taken > calls.limit // 2 and (text := calls.excess(call.peer)):
            exchange.fail(GrpcStatus.RESOURCE_EXHAUSTED, text)
        else:
            return exchange.begin(method)
        return None


class NotGrpc(Stream):
    """A request that is no gRPC call. It is answered with status 415 when it is complete.

    So a request that breaks a rule of HTTP/2 is still open when its frames arrive.
    """

    __slots__ = ("_is_answered", "_rest_bytes", "_since_s")
    is_refusal = True

    def __init__(
        self, streams: Streams, number: int, is_half_closed: bool, headers: Headers, now_s: float
    ) -> None:
        super().__init__(streams, number, is_half_closed)
        length = headers.get("content-length", "")
        # How many bytes are missing according to the header content-length. None: it is missing, or no number.
        self._rest_bytes = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        self._is_answered, self._since_s = False, now_s

    def begin(self) -> Stream | None:
        """Answer now if the request has no body. Returns None if the stream has ended by that."""
        if self.is_half_closed:
            self.received(b"")
        return self if not self._is_answered or self.has_unsent else None

    def received(self, payload: Payload) -> None:
        """Count DATA, and answer at its end, or when the window is half used up.

        A body that does not have its stated length resets the stream (RFC 9113, 8.1.1).
        """
        if self._is_answered:
            return
        if self._rest_bytes is not None:
            self._rest_bytes -= len(payload)
        if self.is_half_closed and self._rest_bytes:
            self._is_answered = True
            self.streams.reset(self, Fault.PROTOCOL_ERROR)
        elif self.is_half_closed or self.receive_window < WINDOW_BYTES // 2:
            self._answer()

    def _answer(self) -> None:
        """Answer with status 415: headers, text, trailers."""
        self._is_answered = True
        self.streams.write(frame(HEADERS, END_HEADERS, self.number, _NOT_GRPC))
        self.send(_NOT_GRPC_TEXT)
        self.end(_NOT_GRPC_TRAILERS)

    def abandon(self) -> None:
        """Do nothing: there is no task to end."""

    def check(self, now_s: float) -> None:
        """Answer after REFUSAL_S, and end the stream if the answer is not read within REFUSAL_S."""
        if now_s - self._since_s > REFUSAL_S:
            if self._is_answered:
                self.streams.reset(self, Fault.NO_ERROR)
            else:
                self._since_s = now_s
                self._answer()


def parse_timeout(timeout: str) -> float | None:
    """Parse the header grpc-timeout (digits and a unit) to seconds. Returns None if it has another form."""
    digits, unit_s = timeout[:-1], _UNIT_S.get(timeout[-1:])
    if unit_s is None or len(digits) > TIMEOUT_DIGITS_MAX or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits) * unit_s
