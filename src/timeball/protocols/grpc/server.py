"""HTTP/2 by grpcio: the one module of this edge that knows it. Bytes of calls in, bytes of responses out.

A call goes by its name to its handler, and back with exactly one status. The definitions of the
service say what there is; a call without a handler is NOT_IMPLEMENTED, with its name in the sentence. Errors are told
in the response's own `status`, as RocketMQ's clients expect, and never as an error of gRPC: those are for what no
handler has seen. Who may do what is asked before a handler runs (needs.py).

Bounds are set here, where a hostile client meets them first: the size of a request before it is decoded, of its
headers, how many calls of one connection and of all may be under way, how often it may ping, how long a connection may
be idle and how old it may become (it is asked to come again, and has `AGE_GRACE_MS` for what it is at). A client that
does not take its responses waits for itself: each call is a task of its own, held up by its own stream's window, and
ended after a while. A request is read when there is room for it: how large it is shows only when it has been read, so
each waits for room for the largest and keeps what it has turned out to take. Meanwhile HTTP/2 holds its client back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc.aio import ServicerContext

from timeball import limits
from timeball.config import Settings
from timeball.errors import SetupError
from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.error_codes import Refused, log_failure
from timeball.protocols.grpc._generated import service_pb2
from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.calls import Call, Handlers, status_of
from timeball.security import Tls

logger = logging.getLogger(__name__)

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["MessagingService"]
SERVICE_NAME = _SERVICE.full_name

REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
RECEIVED_BYTES_MAX = (
    64 * 1024 * 1024
)  # of requests on their way: each byte is eight of them on its way to the log
HEADERS_BYTES, HEADERS_BYTES_MAX = 8 * 1024, 16 * 1024  # where refusals begin, and where all are refused
CALLS_PER_CONNECTION_MAX = 1_024  # each long poll is one
CALLS_MAX = limits.PULLS_WAITING_MAX + 4_096
IDLE_MS_MAX = 2 * limits.MINUTE_MS  # without any call; an open Telemetry stream is one
AGE_MS_MAX, AGE_GRACE_MS = 12 * limits.HOUR_MS, 10 * limits.MINUTE_MS
PING_MS, PING_TIMEOUT_MS = limits.MINUTE_MS, 20 * limits.SECOND_MS
CLIENT_PING_MS_MIN, PING_STRIKES_MAX = 5 * limits.SECOND_MS, 2
READ_S = 10.0  # from the moment there is room for a request until it has come whole
TAKEN_S = 60.0  # for a client to take a response of a stream
WINDOW_BYTES = 16 * 1024  # of a call that waits for room: what its client may send ahead
LAST_ANSWERS_S = 0.5  # at a stop: long polls that wait then end without one

OPTIONS = [
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
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
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would widen the windows of all calls, read or not
    ("grpc.so_reuseport", 0),  # a port that another broker has is an error, not to be shared with it
]


Check = Callable[[Call, str, Any], None]  # raises when this caller may not make this call


class Method(NamedTuple):
    """A call as the definitions have it."""

    name: str
    request: type[Message]
    response: type[Message]
    takes_stream: bool
    gives_stream: bool


def _method(found: MethodDescriptor) -> Method:
    return Method(
        found.name,
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
        bool(found.client_streaming),
        bool(found.server_streaming),
    )


METHODS = {method.name: _method(method) for method in _SERVICE.methods}


class Dispatch:
    """The handlers by the names of their calls. `check` is asked before each call; None: all may be made."""

    def __init__(self, rooms: Iterable[Handlers], check: Check | None) -> None:
        self._handlers: dict[str, Any] = {}
        self._check = check
        for handlers in rooms:
            unknown = (handlers.keys() - METHODS.keys()) | (handlers.keys() & self._handlers.keys())
            assert not unknown, f"no such call, or two rooms answer it: {sorted(unknown)}"
            self._handlers.update(handlers)

    async def unary(self, name: str, call: Call, request: Any) -> Any:
        """The response, of the call's own kind; never raises but when cancelled."""
        try:
            if self._check is not None:
                self._check(call, name, request)
            return await self._handler(name)(call, request)
        except Exception as error:  # of any kind: the client gets an answer
            return self._failed(name, error)

    async def stream(self, name: str, call: Call, request: Any) -> AsyncIterator[Any]:
        """The responses; a failure is the last of them. `request` is a stream itself where the call takes one."""
        responses: Any = None
        try:
            if self._check is not None:
                self._check(call, name, request)
            responses = self._handler(name)(call, request)
            async for response in responses:
                yield response
        except Exception as error:  # as above: the client gets an answer
            yield self._failed(name, error)
        finally:
            if responses is not None:
                # At once, and not when it is collected: what it holds for a client that has gone is to come back.
                await responses.aclose()

    def _handler(self, name: str) -> Any:
        handler = self._handlers.get(name)
        if handler is None:
            raise Refused(
                Code.NOT_IMPLEMENTED,
                f"{name} is not implemented by Timeball; docs/protocols/grpc.md has what is",
            )
        return handler

    def _failed(self, name: str, error: Exception) -> Any:
        log_failure(logger, name, error)
        return METHODS[name].response(status=status_of(error))


class Server:
    """The grpcio server of this edge. Belongs to the broker's event loop."""

    def __init__(self, dispatch: Dispatch, options: Sequence[tuple[str, int]] = OPTIONS) -> None:
        self._dispatch, self._options = dispatch, options
        self._received = ByteShares(RECEIVED_BYTES_MAX, REQUEST_BYTES_MAX)
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
        """A call of one request is a stream to grpcio: so that it is read by us, when there is room for it."""
        name, dispatch = method.name, self._dispatch

        async def unary(_: Any, context: ServicerContext[Any, Any]) -> Any:
            call = call_of(context)
            async with self._request(method, call, context) as request:
                return await dispatch.unary(name, call, request)

        async def stream(_: Any, context: ServicerContext[Any, Any]) -> None:
            call = call_of(context)
            async with self._request(method, call, context) as request:
                responses = dispatch.stream(name, call, request)
                try:
                    async for response in responses:
                        await _in_time(TAKEN_S, "take a response", context, context.write(response))
                finally:
                    await responses.aclose()  # type: ignore[attr-defined]  # an async generator

        async def both(requests: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            responses = dispatch.stream(name, call_of(context), requests)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()  # type: ignore[attr-defined]  # an async generator

        serializer = method.response.SerializeToString
        if method.takes_stream:
            return grpc.stream_stream_rpc_method_handler(both, method.request.FromString, serializer)
        if method.gives_stream:
            return grpc.stream_stream_rpc_method_handler(stream, None, serializer)
        return grpc.stream_unary_rpc_method_handler(unary, None, serializer)

    @asynccontextmanager
    async def _request(
        self, method: Method, call: Call, context: ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The request of a call, which counts while it is handled."""
        address = call.peer
        await self._received.room(address, REQUEST_BYTES_MAX)
        size_bytes = REQUEST_BYTES_MAX
        try:
            data = await _in_time(READ_S, "send its request", context, context.read())
            if data is grpc.aio.EOF:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
            size_bytes = len(data)
            self._received.remove(address, REQUEST_BYTES_MAX - size_bytes)
            try:
                request = method.request.FromString(data)
            except DecodeError:
                await context.abort(
                    grpc.StatusCode.INTERNAL, f"what was sent is no {method.request.__name__}"
                )
            del data
            yield request
        finally:
            self._received.remove(address, size_bytes)


async def _in_time(
    bound_s: float, what: str, context: ServicerContext[Any, Any], step: Awaitable[Any]
) -> Any:
    """The outcome of a step that the client has to do its part in; the call ends when it does not."""
    try:
        async with asyncio.timeout(bound_s):
            return await step
    except TimeoutError:
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"the client did not {what} within {bound_s:.0f} s"
        )


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
