"""HTTP/2 by grpcio: the one module of this edge that knows it. Bytes of calls in, bytes of responses out.

Bounds are set here, where a hostile client meets them first: the size of a request before it is decoded, of its
headers, how many calls of one connection and of all may be under way, how often it may ping, how long a connection may
be idle and how old it may become (it is asked to come again, and has `AGE_GRACE_MS` for what it is at). A client that
does not take its responses waits for itself: each call is a task of its own, held up by its own stream's window.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import unquote

import grpc
from grpc.aio import ServicerContext

from timeball import limits
from timeball.config import Settings
from timeball.errors import SetupError
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.dispatch import METHODS, SERVICE_NAME, Dispatch, Method
from timeball.tls import Tls

MESSAGE_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
HEADERS_BYTES, HEADERS_BYTES_MAX = 8 * 1024, 16 * 1024  # where refusals begin, and where all are refused
CALLS_PER_CONNECTION_MAX = 1_024  # each long poll is one
CALLS_MAX = limits.PULLS_WAITING_MAX + 4_096
IDLE_MS_MAX = 2 * limits.MINUTE_MS  # without any call; an open Telemetry stream is one
AGE_MS_MAX, AGE_GRACE_MS = 12 * limits.HOUR_MS, 10 * limits.MINUTE_MS
PING_MS, PING_TIMEOUT_MS = limits.MINUTE_MS, 20 * limits.SECOND_MS
CLIENT_PING_MS_MIN, PING_STRIKES_MAX = 5 * limits.SECOND_MS, 2
LAST_ANSWERS_S = 0.5  # at a stop: long polls that wait then end without one

OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # a pull's bytes are bounded where they are read
    ("grpc.max_metadata_size", HEADERS_BYTES),
    ("grpc.absolute_max_metadata_size", HEADERS_BYTES_MAX),
    ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION_MAX),
    ("grpc.max_connection_idle_ms", IDLE_MS_MAX),
    ("grpc.max_connection_age_ms", AGE_MS_MAX),
    ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_MS_MIN),
    ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
    ("grpc.so_reuseport", 0),  # a port that another broker has is an error, not to be shared with it
]


class Server:
    """See the module. Belongs to the broker's event loop."""

    def __init__(self, dispatch: Dispatch, options: Sequence[tuple[str, int]] = OPTIONS) -> None:
        self._dispatch, self._options = dispatch, options
        self._server: grpc.aio.Server | None = None

    async def start(self, settings: Settings, tls: Tls | None) -> int:
        """Listen; returns the port. Raises SetupError."""
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=CALLS_MAX)
        handlers = {method.name: self._handler(method) for method in METHODS.values()}
        server.add_registered_method_handlers(SERVICE_NAME, handlers)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            port = _listen(server, f"{host}:{settings.grpc_port}", tls)
        except RuntimeError as error:
            raise SetupError(
                f"--grpc-port {settings.grpc_port}: {error}; another broker may be running, choose another port"
            ) from error
        await server.start()
        self._server = server
        return int(port)

    async def close(self) -> None:
        """Take no more calls, and end those that wait."""
        if self._server is not None:
            await self._server.stop(LAST_ANSWERS_S)

    def _handler(self, method: Method) -> Any:
        name, dispatch = method.name, self._dispatch

        async def unary(request: Any, context: ServicerContext[Any, Any]) -> Any:
            return await dispatch.unary(name, call_of(context), request)

        async def stream(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            responses = dispatch.stream(name, call_of(context), request)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()  # type: ignore[attr-defined]  # an async generator

        codec = {
            "request_deserializer": method.request.FromString,
            "response_serializer": method.response.SerializeToString,
        }
        if method.takes_stream:
            return grpc.stream_stream_rpc_method_handler(stream, **codec)
        if method.gives_stream:
            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        return grpc.unary_unary_rpc_method_handler(unary, **codec)


def _listen(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    if tls is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
    return int(server.add_secure_port(address, credentials))


def call_of(context: ServicerContext[Any, Any]) -> Call:
    """The call as the rooms know it. Headers that are bytes are none of ours."""
    metadata = context.invocation_metadata() or ()
    headers = {key: value for key, value in metadata if isinstance(value, str)}
    return Call(headers, peer_host(context.peer()), context.time_remaining())


def peer_host(peer: str) -> str:
    """The address in grpcio's name of a peer: `ipv4:127.0.0.1:50412`, `ipv6:%5B::1%5D:50412`."""
    _, _, address = unquote(peer).partition(":")
    host, _, _ = address.rpartition(":")
    return host.strip("[]")
