"""The server of this edge: listens, makes a call of each new stream, runs it, and looks at all that has a time.

Nothing is decided here: the connection says what a client may do (connection.py), the exchange what a call may take
(exchange.py), and the dispatch which handler answers (dispatch.py). Decision 0041 says why HTTP/2 is our own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from timeball.config import Settings
from timeball.errors import SetupError
from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.codec.frames import END_HEADERS, END_STREAM, HEADERS, Fields, frame, literal
from timeball.protocols.grpc.connection import HEADERS_BYTES_MAX, Connection
from timeball.protocols.grpc.dispatch import METHODS, SERVICE_NAME, Dispatch
from timeball.protocols.grpc.exchange import (
    CALLS_MAX,
    RECEIVED_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Exchange,
    GrpcStatus,
    Room,
)
from timeball.protocols.grpc.streams import Stream, Streams
from timeball.security import Tls

logger = logging.getLogger(__name__)

BACKLOG = 1_024
HANDSHAKE_S = 10.0
LOOK_S = 0.25
LAST_ANSWERS_S = 0.5  # at a stop: long polls that wait then end without one
FIELD_BYTES = 32  # of each header beside its name and value, as HTTP/2 counts them

_METHODS = {f"/{SERVICE_NAME}/{name}": method for name, method in METHODS.items()}
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])", re.ASCII)
_UNIT_S = {"H": 3_600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NOT_GRPC = literal(":status", "415")  # to what is HTTP/2, and no call of gRPC


class Server:
    """Carries the calls of this edge. Belongs to the broker's event loop."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._room = Room(ByteShares(RECEIVED_BYTES_MAX, REQUEST_BYTES_MAX))
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def received(self) -> ByteShares:
        """Return the bytes of requests that are under way."""
        return self._room.received

    async def start(self, settings: Settings, tls: Tls | None) -> int:
        """Listen; return the port. Raise SetupError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Connection(self._begin, self._connections, loop),
                settings.host,
                settings.grpc_port,
                backlog=BACKLOG,
                ssl=tls.context if tls else None,
                ssl_handshake_timeout=HANDSHAKE_S if tls else None,
            )
        except OSError as error:
            raise SetupError(
                f"--grpc-port {settings.grpc_port}: {error.strerror or error}; another broker may be running, "
                "choose another port"
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def watch(self) -> None:
        """Look at all that has a time, over and over."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in list(self._connections):
                connection.check(loop.time())

    @property
    def connections(self) -> int:
        """Return how many clients are connected."""
        return len(self._connections)

    async def close(self) -> None:
        """Take no more connections, end the calls that wait, and let the connections go."""
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.leave()
        open_streams = [stream for each in self._connections for stream in each.streams.open.values()]
        if tasks := [stream.task for stream in open_streams if stream.task is not None]:
            await asyncio.wait(tasks, timeout=LAST_ANSWERS_S)
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections], timeout=LAST_ANSWERS_S)
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None

    def _begin(
        self, streams: Streams, number: int, fields: Fields, now_s: float, is_heard: bool
    ) -> Stream | None:
        """Return the call of a new stream; None when it has been refused."""
        headers = {field[0]: field[1] for field in fields}
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith(
            "application/grpc"
        ):
            streams.write(frame(HEADERS, END_HEADERS | END_STREAM, number, _NOT_GRPC))
            return None
        timeout = headers.get("grpc-timeout")
        found = _TIMEOUT.fullmatch(timeout) if timeout is not None else None
        remaining_s = int(found[1]) * _UNIT_S[found[2]] if found else None
        call = Call(headers, streams.peer, remaining_s)
        exchange = Exchange(streams, number, is_heard, call, self._room, self._serve, now_s)
        method = _METHODS.get(headers.get(":path", ""))
        if method is None:
            exchange.fail(GrpcStatus.UNIMPLEMENTED, f"no call {headers.get(':path', '')[:200]!r}")
        elif timeout is not None and found is None:
            exchange.fail(GrpcStatus.INTERNAL, f"grpc-timeout {timeout[:20]!r}: digits and one of HMSmun")
        elif sum([len(each[0]) + len(each[1]) + FIELD_BYTES for each in fields]) > HEADERS_BYTES_MAX:
            exchange.fail(GrpcStatus.RESOURCE_EXHAUSTED, f"headers of more than {HEADERS_BYTES_MAX} bytes")
        elif self._room.calls > CALLS_MAX:
            exchange.fail(GrpcStatus.RESOURCE_EXHAUSTED, f"{CALLS_MAX} calls are under way; try again later")
        else:
            return exchange.begin(method)
        return None

    async def _serve(self, exchange: Exchange, request: Any) -> None:
        """Answer a call."""
        method, dispatch = exchange.method, self._dispatch
        try:
            if method.gives_stream:
                responses = dispatch.stream(method.name, exchange.call, request)
                try:
                    async for response in responses:
                        if not exchange.respond(response):
                            await exchange.sent()
                finally:
                    await responses.aclose()  # type: ignore[attr-defined]  # an async generator
            else:
                exchange.respond(await dispatch.unary(method.name, exchange.call, request))
            exchange.finish()
        except Exception as error:  # of any kind: its client waits for an end
            logger.exception("call not answered call=%s reason=%s", method.name, error)
            exchange.fail(GrpcStatus.INTERNAL, "internal error; the broker's log says more")
