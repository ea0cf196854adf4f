"""One client's HTTP/2 connection: decodes bytes to streams and closes the connection of a client that breaks a rule.

A stream is one call. streams.py contains its sending side, exchange.py its gRPC part.

An unknown client costs memory and time, so its actions are bounded:

    streams     CALLS_PER_CONNECTION_MAX at once; more are refused
    headers     a call with more than HEADERS_BYTES_MAX ends, and its connection continues. Its block is read anyway,
                because later blocks refer to its fields. A block of more than BLOCK_BYTES_MAX, or one that
                unpacks to more than UNPACKED_BYTES_MAX, ends the connection
    strain      counts frames that cost time without progress of a call: resets, settings, pings, empty frames,
                priorities, windows, and headers of calls that are refused. Each DATA frame that is sent reduces the
                strain, and so does time. More than STRAIN_MAX ends the connection
    unread      nothing is read from a client that leaves too many answers unread (streams.py)
    pings       a ping less than CLIENT_PING_S after the one before, without DATA sent in between, is a strike. More
                than PING_STRIKES_MAX strikes end the connection
    silence     after PING_S the client is pinged, and it must answer within PING_TIMEOUT_S
    idleness    after IDLE_S without a call the client is asked to connect again
    age         after AGE_S too, except on an edge whose calls may last for ever
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from timeball.edges.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LAST_STREAM,
    MAX_FRAME,
    MAX_HEADERS,
    MAX_STREAMS,
    PADDED,
    PING,
    PING_BYTES,
    PRIORITISED,
    PRIORITY,
    PRIORITY_BYTES,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES_DEFAULT,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    BrokenRule,
    Fault,
    FrameReader,
    Payload,
    depends_on,
    frame,
    goaway,
    number_of,
    read_settings,
    rst_stream,
    settings,
    unpadded,
    window_update,
)
from timeball.edges.http2.header_blocks import HeaderDecoder, Headers, Jh2Decoder
from timeball.edges.http2.streams import WINDOW_BYTES, Flushes, Stream, Streams
from timeball.edges.shared.shared_limits import exceeds_share
from timeball.edges.shared.wrong_protocols import WRONG_PROTOCOLS

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 4_096
CALLS_PER_CONNECTION_MAX = 1_024  # each long poll is one
HEADERS_BYTES_MAX = 16 * 1024  # of one call, as HTTP/2 counts them. Sent to clients as a setting
UNPACKED_BYTES_MAX = 16 * HEADERS_BYTES_MAX  # beyond this, not only the call ends but the connection
BLOCK_BYTES_MAX = 16 * HEADERS_BYTES_MAX
SETTINGS_PER_STRAIN = 64  # so many settings in one frame count as one more frame
# The window of all calls of a connection. Its bytes are given back as soon as they are read, so it never blocks a call.
CONNECTION_WINDOW_BYTES = 4 * 1024 * 1024
STRAIN_MAX = 4 * CALLS_PER_CONNECTION_MAX  # a client may end all its calls at once, several times
STRAIN_PAID, STRAIN_FORGOTTEN_PER_S = 8, 100
# A call that is refused by its headers costs the event loop about 20 us. 128 of them at once end the connection. That
# is as many as clients usually have open, and takes less than 5 ms of the loop. uvloop accepts one new connection per
# turn of the loop. So each new connection waits for one such turn of every connection before it.
STRAIN_REFUSED = 32
PREFACE_S = 10.0  # from the connection to the first bytes of HTTP/2
CLIENT_PING_S, PING_STRIKES_MAX = 5.0, 2
PING_S, PING_TIMEOUT_S = 60.0, 20.0
IDLE_S = 120.0  # without any call. An open Telemetry stream is one
AGE_S, AGE_GRACE_S = 12 * 3_600.0, 600.0
LEAVE_S = 1.0  # time for calls already sent when the client was asked to connect again
GOODBYE_S = 5.0  # to read the bytes written before a close


@dataclass(frozen=True)
class Bounds:
    """Bounds of one edge. `ages`: whether its connections have a maximum age, even if a call lasts longer."""

    frame_bytes_max: int = (
        FRAME_BYTES_MAX  # of DATA and headers. Other frames, and padded ones, have FRAME_BYTES_MAX
    )
    ages: bool = True
    edge: str = "grpc"  # the edge's name in the log

    def greeting(self) -> bytes:
        """Return the frames that a connection begins with."""
        values = {
            MAX_STREAMS: CALLS_PER_CONNECTION_MAX,
            INITIAL_WINDOW: WINDOW_BYTES,
            MAX_FRAME: self.frame_bytes_max,
            MAX_HEADERS: HEADERS_BYTES_MAX,
        }
        return settings(values) + window_update(0, CONNECTION_WINDOW_BYTES - WINDOW_BYTES_DEFAULT)


# Headers of a connection of HTTP/1, and of an answer.
_OF_HTTP_1 = frozenset(
    {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade", ":status"}
)

Begin = Callable[[Streams, int, Headers, int, float, bool], Stream | None]


class Connection(asyncio.Protocol):
    """The asyncio protocol of one client. `begin` creates the call of a new stream, or answers it itself."""

    def __init__(
        self,
        begin: Begin,
        opened: set[Connection],
        loop: asyncio.AbstractEventLoop,
        bounds: Bounds = Bounds(),  # it is frozen
        decoder: Callable[[int], HeaderDecoder] = Jh2Decoder,
        flushes: Flushes | None = None,  # shared by the edge; None: not shared
    ) -> None:
        self._begin, self._opened, self._loop, self._bounds = begin, opened, loop, bounds
        self._transport: asyncio.Transport | None = None
        self._decoder = decoder(UNPACKED_BYTES_MAX)
        self._reader = FrameReader(bounds.frame_bytes_max)
        self._block: tuple[int, int, bytearray] | None = (
            None  # stream, flags and beginning of an incomplete header block
        )
        self.streams = Streams(flushes or Flushes(loop))
        self._last_stream = 0
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._strain = self._paid_frames = 0  # and the DATA frames that have reduced the strain already
        self._strikes, self._client_ping_s, self._client_ping_frames = 0, -CLIENT_PING_S, 0
        self.since_s = self.heard_s = self.busy_s = self._looked_s = loop.time()
        self._pinged_s: float | None = None
        self._leaving_s: float | None = None
        self._closed_s: float | None = None
        self.closed: asyncio.Future[None] = loop.create_future()

    # -- asyncio's side --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and send the greeting, or abort it if there are too many. See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        peer = (transport.get_extra_info("peername") or ("",))[0]
        self.streams.opened(self._transport, peer)
        if self._is_one_too_many(peer):
            logger.warning("connection refused peer=%s connections_max=%d", peer, CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._opened.add(self)
        self.streams.write(self._bounds.greeting())

    def _is_one_too_many(self, peer: str) -> bool:
        # The shares of the addresses count only from half of CONNECTIONS_MAX on.
        if len(self._opened) < CONNECTIONS_MAX // 2:
            return False
        return exceeds_share(peer, (each.streams.peer for each in self._opened), CONNECTIONS_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams. See asyncio.Protocol."""
        self._opened.discard(self)
        self._transport = None
        self.streams.lost()
        self.streams.end_all()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that `data` completes. See asyncio.Protocol."""
        self.heard_s = self._loop.time()
        if self._closed_s is not None:
            return
        try:
            for kind, flags, number, payload in self._reader.read(data):
                self._receive(kind, flags, number, payload)
            if self._reader.broken is not None:
                raise self._reader.broken
        except BrokenRule as error:
            begin = b"" if self._reader.is_greeted else data
            WRONG_PROTOCOLS.note(self._bounds.edge, begin, self.streams.peer, self.heard_s, str(error))
            self.close(error.fault, str(error))

    def pause_writing(self) -> None:
        """Stop sending DATA, because the client has many answers to read. See asyncio.Protocol."""
        self.streams.pause(True)

    def resume_writing(self) -> None:
        """Continue to send DATA. See asyncio.Protocol."""
        self.streams.pause(False)

    # -- frames that come ------------------------------------------------------------------------------------

    def _receive(self, kind: int, flags: int, number: int, payload: Payload) -> None:
        """Handle one frame. Raises BrokenRule."""
        if self._closed_s is not None:
            return
        if self._block is not None and (kind != CONTINUATION or number != self._block[0]):
            raise BrokenRule(Fault.PROTOCOL_ERROR, "headers that do not end")
        if kind == DATA:
            self._receive_data(flags, number, payload)
            return
        payload = bytes(payload)  # a large part of headers is a view
        if kind == HEADERS:
            if number and flags & PRIORITISED and depends_on(flags, payload) == number:
                raise BrokenRule(Fault.PROTOCOL_ERROR, f"stream {number} depends on itself")
            part = unpadded(flags, payload)
            if flags & END_HEADERS:
                self._receive_headers(flags, number, part)
            else:
                self._block = (number, flags, bytearray(part))
        elif kind == CONTINUATION:
            self._continue(flags, payload)
        elif kind < CONTINUATION:
            self._count_strain()
            _RECEIVERS[kind](self, flags, number, payload)
        else:
            self._count_strain()  # an unknown extension

    def _receive_data(self, flags: int, number: int, payload: Payload) -> None:
        size_bytes = len(payload)
        self._receive_window -= size_bytes
        if self._receive_window < CONNECTION_WINDOW_BYTES // 2:
            if self._receive_window < 0:
                raise BrokenRule(Fault.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
            self.streams.write(window_update(0, CONNECTION_WINDOW_BYTES - self._receive_window))
            self._receive_window = CONNECTION_WINDOW_BYTES
        unpacked = unpadded(PADDED, bytes(payload)) if flags & PADDED else payload
        stream = self.streams.open.get(number)
        if stream is None or stream.is_heard:
            self._check_begun(number, "DATA")
            self._count_strain()
            if stream is not None or not self.streams.is_cut(number, ends=bool(flags & END_STREAM)):
                self._end_stream(number, Fault.STREAM_CLOSED)
            return
        stream.receive_window -= size_bytes
        if stream.receive_window < 0:
            raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"more DATA than the window of stream {number}")
        if flags & PADDED:
            payload = unpacked
            stream.allow(stream.receive_window + size_bytes - len(payload))
        if flags & END_STREAM:
            stream.is_heard = True
        elif not payload:
            self._count_strain()
        stream.received(payload)

    def _receive_headers(self, flags: int, number: int, block: bytes) -> None:
        if len(block) > BLOCK_BYTES_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, f"a header block of more than {BLOCK_BYTES_MAX} bytes")
        # Also for a stream that is refused below: later blocks refer to the fields of earlier ones.
        headers, size_bytes = self._decoder.decode(block)
        stream = self.streams.open.get(number)
        if stream is not None:
            if stream.is_heard or not flags & END_STREAM:
                raise BrokenRule(Fault.PROTOCOL_ERROR, f"headers within stream {number}")
            stream.is_heard = True
            stream.received(b"")
        elif not number & 1:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"a client's stream {number}")
        elif number <= self._last_stream:
            self._count_strain()
            if not (flags & END_STREAM and self.streams.is_cut(number, ends=True)):
                raise BrokenRule(Fault.STREAM_CLOSED, f"headers of stream {number}, which has ended")
        else:
            self._last_stream = number
            if len(self.streams.open) >= CALLS_PER_CONNECTION_MAX:
                self._count_strain()
                self.streams.write(rst_stream(number, Fault.REFUSED_STREAM))
                if not flags & END_STREAM:
                    self.streams.cut(number)
                return
            if not _is_request(headers):
                self._count_strain()
                self.streams.write(rst_stream(number, Fault.PROTOCOL_ERROR))
                if not flags & END_STREAM:
                    self.streams.cut(number)
                return
            self.busy_s = self.heard_s
            is_heard, frames = bool(flags & END_STREAM), self.streams.data_frames
            if begun := self._begin(self.streams, number, headers, size_bytes, self.heard_s, is_heard):
                self.streams.open[number] = begun
            else:
                self._paid_frames += self.streams.data_frames - frames  # a refusal reduces no strain
                self._count_strain(STRAIN_REFUSED)

    def _check_begun(self, number: int, frame_name: str) -> None:
        if number > self._last_stream or not number & 1:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"{frame_name} of stream {number}, which is not open")

    def _end_stream(self, number: int, fault: Fault) -> None:
        """End a stream that has broken a rule. The other streams continue."""
        self.streams.write(rst_stream(number, fault))
        stream = self.streams.open.get(number)
        if stream is not None:
            if not stream.is_heard:
                self.streams.cut(number)
            self.streams.forget(number)
            stream.gone()

    def _continue(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "CONTINUATION of nothing")
        number, first_flags, block = self._block
        block += payload
        self._count_strain()
        if len(block) > BLOCK_BYTES_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "a header block that does not end")
        if flags & END_HEADERS:
            self._block = None
            self._receive_headers(first_flags, number, bytes(block))

    def _receive_reset(self, flags: int, number: int, payload: bytes) -> None:
        number_of(payload)
        self._check_begun(number, "RST_STREAM")
        stream = self.streams.open.get(number)
        if stream is not None:
            self.streams.forget(number)
            stream.gone()
        else:
            self.streams.is_cut(number, ends=True)

    def _receive_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or (flags & ACK and payload):
            raise BrokenRule(Fault.PROTOCOL_ERROR, "SETTINGS of a stream, or an answer with settings")
        if flags & ACK:
            return
        streams, earlier_window = self.streams, self.streams.first_window
        for at, (name, value) in enumerate(read_settings(payload), 1):
            if at % SETTINGS_PER_STRAIN == 0:
                self._count_strain()
            if name == INITIAL_WINDOW:
                if value > WINDOW_BYTES_MAX:
                    raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                streams.first_window = value
            elif name == MAX_FRAME:
                streams.allow_frames(value)
            elif name == ENABLE_PUSH and value > 1:
                raise BrokenRule(Fault.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        streams.write(frame(SETTINGS, ACK, 0))
        if streams.first_window > earlier_window and streams.narrow:
            # Each of these streams costs a look, so a client that widens and narrows many windows in turn adds strain.
            self._count_strain(len(streams.narrow) // SETTINGS_PER_STRAIN)
            streams.move(streams.narrow)

    def _receive_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != PING_BYTES:
            raise BrokenRule(Fault.FRAME_SIZE_ERROR, "no PING")
        if flags & ACK:
            self._pinged_s = None
            return
        frames = self.streams.data_frames
        if frames != self._client_ping_frames:
            self._strikes, self._client_ping_frames = 0, frames
        elif self.heard_s - self._client_ping_s < CLIENT_PING_S:
            self._strikes += 1
            if self._strikes > PING_STRIKES_MAX:
                raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "too_many_pings")
        self._client_ping_s = self.heard_s
        self.streams.write(frame(PING, ACK, 0, payload))

    def _receive_window_update(self, flags: int, number: int, payload: bytes) -> None:
        more_bytes = number_of(payload)
        if not more_bytes:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "a window that grows by nothing")
        stream = self.streams.open.get(number)
        if not number:
            self.streams.send_window += more_bytes
            if self.streams.send_window > WINDOW_BYTES_MAX:
                raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"a window of more than {WINDOW_BYTES_MAX} bytes")
            self.streams.move_blocked()
        elif stream is not None:
            stream.window_change += more_bytes
            if stream.send_window > WINDOW_BYTES_MAX:
                self._end_stream(number, Fault.FLOW_CONTROL_ERROR)
            elif self.streams.narrow.pop(number, None) is not None:
                stream.move()
        else:
            self._check_begun(number, "WINDOW_UPDATE")

    def _receive_priority(self, flags: int, number: int, payload: bytes) -> None:
        """Check a frame that has no other effect here."""
        if not number:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "PRIORITY of no stream")
        if len(payload) != PRIORITY_BYTES:
            self._end_stream(number, Fault.FRAME_SIZE_ERROR)
        elif depends_on(0, payload) == number:
            self._end_stream(number, Fault.PROTOCOL_ERROR)

    def _receive_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """Check the frame only: a client that opens no more streams closes the connection itself."""
        if number:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "GOAWAY of a stream")

    def _refuse_push(self, flags: int, number: int, payload: bytes) -> None:
        raise BrokenRule(Fault.PROTOCOL_ERROR, "a client's PUSH_PROMISE")

    def _count_strain(self, count: int = 1) -> None:
        frames = self.streams.data_frames
        self._strain = max(0, self._strain - STRAIN_PAID * (frames - self._paid_frames)) + count
        self._paid_frames = frames
        if self._strain > STRAIN_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "too many frames that are no calls")

    # -- its end ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the client to send its next calls over another connection. Pending calls continue."""
        if self._leaving_s is None and self._transport is not None and self._closed_s is None:
            self._leaving_s = self._loop.time()
            self.streams.write(goaway(LAST_STREAM, Fault.NO_ERROR))

    def close(self, fault: Fault = Fault.NO_ERROR, reason: str = "") -> None:
        """End the connection and its calls. Answers already written still leave, if the client reads them."""
        if self._transport is not None and self._closed_s is None:
            self.streams.write(goaway(self._last_stream, fault, reason))
            self.streams.flush()
            self._closed_s = self._loop.time()
            self.streams.end_all()
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once. Bytes that have not left are lost."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, now_s: float) -> None:
        """Check all deadlines of the connection and its streams. Called several times a second."""
        self._strain = max(0, self._strain - int(STRAIN_FORGOTTEN_PER_S * (now_s - self._looked_s)))
        self._looked_s = now_s
        for stream in list(self.streams.open.values()):
            stream.check(now_s)
        if self.streams.open:
            self.busy_s = now_s
        if self._closed_s is not None:
            if now_s - self._closed_s > GOODBYE_S:
                self.abort()
        elif not self._reader.is_greeted:
            if now_s - self.since_s > PREFACE_S:
                self.close(reason="no preface of HTTP/2")
        elif self._leaving_s is not None:
            if now_s - self._leaving_s > (AGE_GRACE_S if self.streams.open else LEAVE_S):
                self.close()
        elif now_s - self.busy_s > IDLE_S or (self._bounds.ages and now_s - self.since_s > AGE_S):
            self.leave()
        self._check_silence(now_s)

    def _check_silence(self, now_s: float) -> None:
        if self._pinged_s is not None and self.heard_s >= self._pinged_s:
            self._pinged_s = None
        if self._pinged_s is None:
            if now_s - self.heard_s > PING_S:
                self._pinged_s = now_s
                self.streams.write(frame(PING, 0, 0, bytes(PING_BYTES)))
        elif now_s - self._pinged_s > PING_TIMEOUT_S:
            logger.warning("connection closed, it answers no ping peer=%s", self.streams.peer)
            self.abort()


def _is_request(headers: Headers) -> bool:
    """Return whether these are the headers of a request, as HTTP/2 defines them (RFC 9113, 8.2 and 8.3)."""
    return (
        ":method" in headers
        and ":scheme" in headers
        and bool(headers.get(":path"))
        and headers.get("te", "trailers") == "trailers"
        and _OF_HTTP_1.isdisjoint(headers)
    )


_RECEIVERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    PRIORITY: Connection._receive_priority,
    RST_STREAM: Connection._receive_reset,
    SETTINGS: Connection._receive_settings,
    PUSH_PROMISE: Connection._refuse_push,
    PING: Connection._receive_ping,
    GOAWAY: Connection._receive_goaway,
    WINDOW_UPDATE: Connection._receive_window_update,
}
