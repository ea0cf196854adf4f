"""One call of Flight. Its headers identify the caller, then the call takes a slot, and then its message is received.

A call that fails ends as with Arrow's own server: with the status UNKNOWN, and trailers with Timeball's error code and
text.
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

# identifies the caller of a call, or raises the TimeballError that refuses the call
Admit = Callable[[Call], Caller]


class FlightCall(Exchange):
    """A call that counts towards the limit of its edge. `admit` identifies the caller."""

    __slots__ = ("_admit", "_holds_slot", "_limit")

    READ_S = 20.0  # enough for 4 MiB over a slow line
    TAKEN_S = None  # a client that reads a log may pause; pings detect that its machine is gone

    def __init__(
        self, streams: Streams, number: int, is_half_closed: bool, call: Call, room: Room, serve: Serve, now_s: float,
        admit: Admit, limit: SharedLimit,
    ) -> None:  # fmt: skip
        super().__init__(streams, number, is_half_closed, call, room, serve, now_s)
        self._admit, self._limit, self._holds_slot = admit, limit, False

    def begin(self, method: Method) -> Exchange | None:
        """Admit the call and take its slot, or refuse the call (see Exchange)."""
        self.method = method
        try:
            self.call.caller = self._admit(self.call)
            self._take_slot()
        except TimeballError as error:
            self.refuse(error)
            return None
        self._holds_slot = True
        return super().begin(method)

    def _take_slot(self) -> None:
        """Take a slot in the limit. Raises OverLimit if no slot is free."""
        self._limit.admit(self.call.peer, self.call.caller.name)

    def refuse(self, error: BaseException) -> None:
        """End the call with an error. Answers that were sent before it still arrive."""
        if self._is_over:
            return
        log_failure(logger, self.method.name, error)
        self._is_over = True
        block = trailers(GrpcStatus.UNKNOWN, codec.status_text(error)) + codec.error_trailers(error)
        self.end(block if self._has_answered else RESPONSE + block)
        self._stop()

    def release(self) -> None:
        """Give the slot back (see Exchange)."""
        if self._holds_slot:
            self._holds_slot = False
            self._limit.give_back(self.call.peer, self.call.caller.name)
        super().release()


def framed(*segments: Payload) -> bytes:
    """Join segments to a message, after gRPC's prefix of five bytes. The segments are copied once."""
    return b"".join((PREFIX.pack(0, sum(map(len, segments))), *segments))


def framed_in_two(*segments: Payload) -> tuple[bytes, Payload]:
    """Build a message like `framed`, but leave its last segment separate, so that a large segment is not copied."""
    *head_segments, last = segments
    return b"".join((PREFIX.pack(0, sum(map(len, segments))), *head_segments)), last
