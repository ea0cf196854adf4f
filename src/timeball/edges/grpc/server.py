"""The service of this edge for http2/server.py: the methods by their paths, and the tasks that answer calls.

A call with a direct handler has no task. Most calls are sends, and a task costs as much as the rest of a send.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from google.protobuf.message import DecodeError

from timeball.edges.grpc.calls import Call
from timeball.edges.grpc.dispatch import METHODS, SERVICE_NAME, Dispatch
from timeball.edges.http2.calls import Method, Room
from timeball.edges.http2.exchange import Exchange
from timeball.edges.http2.frames import GrpcStatus
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.shared_limits import ByteShares, SharedLimit
from timeball.model import limits
from timeball.model.errors import OverLimit, TimeballError

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # of pending requests: each byte has eight copies on its way to the log
CALLS_MAX = limits.PULLS_WAITING_MAX + 4_096


class GrpcExchange(Exchange):
    """A call of this edge, and the Reply of a direct handler."""

    __slots__ = ("dispatch",)

    dispatch: Dispatch

    def refuse(self, error: BaseException) -> None:
        """Answer with the status for `error`. See Reply."""
        self.answer(self.method.encode(self.dispatch.failed(self.method.name, error)))


class AdmittedExchange(GrpcExchange):
    """A call on an edge with accounts: the caller is checked with the headers, before any byte of a request."""

    __slots__ = ()

    def begin(self, method: Method) -> Exchange | None:
        """Check the caller and its share of the calls, and begin. See Exchange."""
        self.method = method
        assert self.dispatch.admit is not None
        try:
            self.dispatch.admit(self.call)
            calls, self._account = self._room.calls, self.call.caller.name
            if self._account:
                calls.name(self._account)
            # Below half of the limit every caller gets a place, so the shares need no check.
            if calls.taken > calls.limit // 2 and (text := calls.excess(self.call.peer, self._account)):
                raise OverLimit(text)
        except TimeballError as error:
            self.refuse(error)
            return None
        return super().begin(method)


class GrpcService:
    """The calls of this edge, and their shared bounds."""

    call = Call

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._exchange = GrpcExchange if dispatch.admit is None else AdmittedExchange
        self.room = Room(
            ByteShares(RECEIVED_BYTES_MAX, REQUEST_BYTES_MAX),
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
        is_heard: bool,
        call: Call,
        now_s: float,
    ) -> Exchange:
        """Create the exchange of a new call. See http2.server.Service."""
        exchange = self._exchange(streams, number, is_heard, call, self.room, self._serve, now_s)
        exchange.dispatch = self._dispatch
        return exchange

    def _serve(self, exchange: Any, request: Any) -> Coroutine[Any, Any, None] | None:
        """Begin a call, and return the coroutine that answers it if it needs a task."""
        if self._dispatch.begin(exchange.method.name, exchange.call, request, exchange):
            return None
        return self._run(exchange, request)

    async def _run(self, exchange: Exchange, request: Any) -> None:
        """Answer a call."""
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
        except Exception as error:  # of any kind: the client waits for an end
            logger.exception("call not answered call=%s reason=%s", method.name, error)
            exchange.fail(GrpcStatus.INTERNAL, "internal error; the broker's log says more")
