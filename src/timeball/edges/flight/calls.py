"""One call of Flight: its caller is checked from the headers, then it takes a slot, and then its message is received.

Each call ends with a status as Arrow's own server writes it: UNKNOWN, and trailers with Timeball's code and sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from timeball.edges.flight import codec
from timeball.edges.http2.calls import Call, Method, Room
from timeball.edges.http2.exchange import Exchange, Serve
from timeball.edges.http2.frames import PREFIX, RESPONSE, GrpcStatus, Payload, trailers
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.error_codes import log_failure
from timeball.edges.shared.shared_limits import SharedLimit
from timeball.model.access import Caller
from timeball.model.errors import TimeballError

logger = logging.getLogger(__name__)

Admit = Callable[[Call], Caller]  # raises TimeballError


class FlightCall(Exchange):
    """A call within the limit of its edge. `admit` returns the caller, or raises the refusal."""

    __slots__ = ("_admit", "_is_inside", "_limit")

    READ_S = 20.0  # enough for 4 MiB over a slow line
    TAKEN_S = None  # a client that reads a log may pause; pings detect that its machine is gone

    def __init__(
        self, streams: Streams, number: int, is_heard: bool, call: Call, room: Room, serve: Serve, now_s: float,
        admit: Admit, limit: SharedLimit,
    ) -> None:  # fmt: skip
        super().__init__(streams, number, is_heard, call, room, serve, now_s)
        self._admit, self._limit, self._is_inside = admit, limit, False

    def begin(self, method: Method) -> Exchange | None:
        """Admit the call and take its slot, or refuse it (see Exchange)."""
        self.method = method
        try:
            self.call.caller = self._admit(self.call)
            self._take_place()
        except TimeballError as error:
            self.refuse(error)
            return None
        self._is_inside = True
        return super().begin(method)

    def _take_place(self) -> None:
        """Take a slot in the limit. Raises OverLimit if none is free."""
        self._limit.admit(self.call.peer, self.call.caller.name)

    def refuse(self, error: BaseException) -> None:
        """End the call with an error, after its answers."""
        if self._is_over:
            return
        log_failure(logger, self.method.name, error)
        self._is_over = True
        block = trailers(GrpcStatus.UNKNOWN, codec.details(error)) + codec.trailers(error)
        self.end(block if self._has_answered else RESPONSE + block)
        self._stop()

    def release(self) -> None:
        """Give the slot back (see Exchange)."""
        if self._is_inside:
            self._is_inside = False
            self._limit.give_back(self.call.peer, self.call.caller.name)
        super().release()


def framed(*parts: Payload) -> bytes:
    """Join parts to a message with gRPC's prefix. They are copied once."""
    return b"".join((PREFIX.pack(0, sum(map(len, parts))), *parts))


def framed_apart(*parts: Payload) -> tuple[bytes, Payload]:
    """Prefix a message like `framed`, but keep its last part separate: it may be large, and is not copied."""
    *before, last = parts
    return b"".join((PREFIX.pack(0, sum(map(len, parts))), *before)), last
