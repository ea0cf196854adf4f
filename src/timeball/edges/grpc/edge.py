"""The edge for RocketMQ 5's clients: builds the handlers, and serves their calls by the HTTP/2 server of http2/."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from google.protobuf.message import DecodeError

from timeball.broker.service import Broker
from timeball.edges.grpc import dispatch
from timeball.edges.grpc.calls import EXPIRY_MS, Call, Client, LongPolls
from timeball.edges.grpc.dispatch import METHODS, SERVICE_NAME, Dispatch
from timeball.edges.grpc.handlers.receipts import Receipts, Renewals
from timeball.edges.grpc.handlers.receives import Pulls, Receives
from timeball.edges.grpc.handlers.sends import Sends, Transactions
from timeball.edges.grpc.handlers.telemetry import Routes, Telemetry
from timeball.edges.http2.exchange import CallLimits, Exchange, Method
from timeball.edges.http2.frames import GrpcStatus
from timeball.edges.http2.server import Server
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.io.security import OPEN, Security
from timeball.model import limits
from timeball.model.errors import OverLimit, TimeballError

logger = logging.getLogger(__name__)

# ---- the edge ------------------------------------------------------------------------------------------------

EXPIRY_CHECK_S = 5.0  # between two searches for expired sessions
UNREAD_BYTES_MAX = 256 * 1024 * 1024  # of messages in responses that clients have not read yet


class GrpcEdge:
    """Builds the handlers, and starts and stops the server. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, security: Security = OPEN) -> None:
        self._settings, self._tls = broker.settings, security.tls
        sessions: Sessions[str, Client] = Sessions(EXPIRY_MS)
        self.context = context = EdgeContext(broker.settings, broker, sessions)
        long_polls, response_buffer = LongPolls(), MemoryQuota(UNREAD_BYTES_MAX)
        receipt_handles = ReceiptHandles(broker.tables.receipt_secret.get)
        self._renewals = Renewals(broker.consuming, context.sessions, broker.clock.elapsed_ms)
        handler_tables = [
            Routes(context).handlers,
            Sends(context).handlers,
            Transactions(context).handlers,
            Telemetry(context).handlers,
            Receives(context, long_polls, receipt_handles, self._renewals, response_buffer).handlers,
            Receipts(context, receipt_handles, self._renewals).handlers,
            Pulls(context, long_polls, response_buffer).handlers,
        ]
        clock, policy = broker.clock.clock, broker.policy

        def admit(call: Call) -> None:
            call.caller = security.caller(call.headers, clock.wall_ms())

        def check(call: Call, name: str, request: Any) -> None:
            dispatch.check(policy, call, name, request)

        has_accounts = security.access is not None
        self.dispatch = Dispatch(
            handler_tables, check if has_accounts else None, admit if has_accounts else None
        )
        self.service = GrpcService(self.dispatch)
        self._server = Server(self.service)
        self._background_tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The port on which the edge listens, -1 if it does not listen."""
        return self.context.port

    async def start(self) -> None:
        """Listen, unless the port is negative. Raises SetupError if the port is taken."""
        self.context.port = self._settings.grpc_port
        if self.context.port >= 0:
            # By default, clients in Java and Go connect with TLS, those in Python and Node do not.
            self.context.port = await self._server.start(
                self._settings.host, self.context.port, self._tls, "--grpc-port",
                plain_from="all" if self._settings.allow_plaintext else "this machine",
            )  # fmt: skip
        coroutines = (self._end_expired_sessions(), self._server.watch())
        self._background_tasks = [self.context.start_watch(coroutine) for coroutine in coroutines]

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._server.connections

    async def close(self) -> None:
        """End Telemetry streams, and close the server, which waits up to LAST_ANSWERS_S for open calls.

        Afterwards leases are renewed no longer.
        """
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        for client in self.context.sessions.all():
            for stream in client.streams:
                stream.end()
        await self._server.close()
        await self._renewals.close()

    async def _end_expired_sessions(self) -> None:
        """End the sessions of clients without an open stream that have been silent for EXPIRY_MS. Never returns."""
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            for client in self.context.sessions.expired(self.context.monotonic_ms()):
                if not client.streams:
                    self.context.sessions.remove(client.key)


# ---- the service for http2/server.py -------------------------------------------------------------------------
# The methods by their paths, and the tasks that answer calls. A call with a direct handler has no task. Most calls are
# sends, and a task costs as much as all other work for a send.


REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
# Of pending requests. On its way to the log, each of their bytes is in memory eight times.
RECEIVED_BYTES_MAX = 64 * 1024 * 1024
CALLS_MAX = limits.PULLS_WAITING_MAX + 4_096


class GrpcExchange(Exchange):
    """A call of this edge. It is also the Reply that a direct handler gets (calls.py)."""

    __slots__ = ("dispatch",)

    dispatch: Dispatch

    def refuse(self, error: BaseException) -> None:
        """Answer with the status for this error."""
        self.answer(self.method.encode(self.dispatch.failure_response(self.method.name, error)))


class AdmittedExchange(GrpcExchange):
    """A call on an edge with accounts. The caller is checked as soon as the headers arrive, before the request."""

    __slots__ = ()

    def begin(self, method: Method) -> Exchange | None:
        """Check the caller and the account's share of the open calls, then begin. None if the call has failed."""
        self.method = method
        assert self.dispatch.admit is not None
        try:
            self.dispatch.admit(self.call)
            calls, self._account = self._limits.calls, self.call.caller.name
            if self._account:
                calls.count_account(self._account)
            # Below half of the limit no caller exceeds its share, so the shares are not computed.
            if calls.taken > calls.limit // 2 and (text := calls.excess(self.call.peer, self._account)):
                raise OverLimit(text)
        except TimeballError as error:
            self.refuse(error)
            return None
        return super().begin(method)


class GrpcService:
    """The methods of this edge and the limits of its calls, for the server (see http2.server.Service)."""

    call = Call

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._exchange = GrpcExchange if dispatch.admit is None else AdmittedExchange
        self.call_limits = CallLimits(
            MemoryQuota(RECEIVED_BYTES_MAX, REQUEST_BYTES_MAX),
            REQUEST_BYTES_MAX,
            SharedLimit("calls", CALLS_MAX),
        )
        self.methods = {
            f"/{SERVICE_NAME}/{name}": Method(
                name,
                method.takes_stream,
                method.gives_stream,
                dispatch.decoder(name),
                method.response.SerializeToString,
                (DecodeError,),
            )
            for name, method in METHODS.items()
        }

    def open(
        self,
        method: Method | None,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Call,
        now_s: float,
    ) -> Exchange:
        """Create the exchange of a new call. See http2.server.Service."""
        exchange = self._exchange(streams, number, is_half_closed, call, self.call_limits, self._serve, now_s)
        exchange.dispatch = self._dispatch
        return exchange

    def _serve(self, exchange: Any, request: Any) -> Coroutine[Any, Any, None] | None:
        """Run a direct handler and return None, or return the coroutine that runs any other handler."""
        if self._dispatch.begin(exchange.method.name, exchange.call, request, exchange):
            return None
        return self._run(exchange, request)

    async def _run(self, exchange: Exchange, request: Any) -> None:
        """Run a handler in a task, and send its responses. An internal error ends the call with a gRPC status."""
        method, dispatch = exchange.method, self._dispatch
        call: Any = exchange.call
        try:
            if method.gives_stream:
                responses = dispatch.stream(method.name, call, request)
                try:
                    async for response in responses:
                        if not exchange.respond(response):
                            await exchange.sent()
                finally:
                    await responses.aclose()  # type: ignore[attr-defined]  # an async generator
            else:
                exchange.answer(method.encode(await dispatch.unary(method.name, call, request)))
            exchange.finish()
        except Exception as error:  # of any kind: the client must get a status
            logger.exception("call not answered call=%s reason=%s", method.name, error)
            exchange.fail(GrpcStatus.INTERNAL, "internal error; the broker's log says more")
