"""One client's HTTP/2 connection: decodes frames and headers, opens streams, disconnects a client that breaks a rule.

A stream is one call. streams.py contains its sending side, exchange.py its gRPC part.

Any client that reaches the port can cost memory and time, so its actions are bounded:

    streams     at most CALLS_PER_CONNECTION_MAX are open. The server refuses more
    headers     a call with headers of more than HEADERS_BYTES_MAX fails, and its connection continues. The header
                block is decoded anyway, because later blocks refer to its fields (HPACK). A block of more than
                BLOCK_BYTES_MAX, or one that decodes to more than UNPACKED_BYTES_MAX, ends the connection
    strain      a counter of frames that cost time without progress of a call: resets, settings, pings, empty
                frames, priorities, window updates, and headers of refused calls. Each DATA frame that the server
                sends reduces the strain, and so does time. More than STRAIN_MAX ends the connection
    unread      the server reads nothing from a client that leaves too many answers unread (streams.py)
    pings       a client's ping less than CLIENT_PING_S after its previous ping, without DATA sent to it in between,
                is a strike. More than PING_STRIKES_MAX strikes end the connection
    silence     the server pings a client that has sent nothing for PING_S. The client must answer within
                PING_TIMEOUT_S
    idleness    after IDLE_S without a call, GOAWAY asks the client to connect again
    age         after AGE_S, too, except on an edge whose calls may last for ever
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
    frame,
    goaway,
    read_31_bits,
    read_settings,
    rst_stream,
    settings,
    stream_dependency,
    strip_padding,
    window_update,
)
from timeball.edges.http2.hpack_decoder import Headers, HpackDecoder
from timeball.edges.http2.streams import WINDOW_BYTES, Flushes, Stream, Streams
from timeball.edges.shared.first_byte import WRONG_PROTOCOLS
from timeball.edges.shared.shared_limits import exceeds_share

logger = logging.getLogger(__name__)

# ---- the connection ------------------------------------------------------------------------------------------


CONNECTIONS_MAX = 4_096
CALLS_PER_CONNECTION_MAX = 1_024  # a long poll counts as a call
HEADERS_BYTES_MAX = 16 * 1024  # of one call. Sent to clients as SETTINGS_MAX_HEADER_LIST_SIZE
UNPACKED_BYTES_MAX = 16 * HEADERS_BYTES_MAX  # of one decoded header block
BLOCK_BYTES_MAX = 16 * HEADERS_BYTES_MAX  # of one encoded header block
SETTINGS_PER_STRAIN = 64  # a frame adds 1 to the strain for each group of this many settings
# The receive window that all calls of a connection share. It grows again as soon as bytes are read, so it never blocks
# a call.
CONNECTION_WINDOW_BYTES = 4 * 1024 * 1024
STRAIN_MAX = 4 * CALLS_PER_CONNECTION_MAX  # a client may end all its calls at once, several times
STRAIN_RELIEF_PER_DATA, STRAIN_DECAY_PER_S = 8, 100
# The strain of a call that is refused because of its headers. Such a call costs the event loop about 20 us. 128 of them
# at once end the connection. That is as many calls as clients usually have open, and takes less than 5 ms of the loop.
# The bound matters to other clients: uvloop accepts one new connection per turn of the loop, so each new connection
# waits for one such turn of every connection before it.
STRAIN_PER_REFUSED_CALL = 32
PREFACE_S = 10.0  # from the connection to the client's HTTP/2 preface
CLIENT_PING_S, PING_STRIKES_MAX = 5.0, 2
PING_S, PING_TIMEOUT_S = 60.0, 20.0
IDLE_S = 120.0  # without any call. An open Telemetry stream is a call
AGE_S = 12 * 3_600.0
AGE_GRACE_S = 600.0  # between GOAWAY and the close, for calls that are still open
LEAVE_S = 1.0  # between GOAWAY and the close, for calls that the client had sent before it read the GOAWAY
# How long frames are still read, and discarded, after GOAWAY for a broken rule. A socket that is closed with unread
# bytes sends RST instead of FIN, and RST discards the GOAWAY that the client has not read yet.
LINGER_S = 1.0
GOODBYE_S = 5.0  # for the client to read the last bytes before the connection is aborted


@dataclass(frozen=True)
class Bounds:
    """The bounds for the connections of one edge.

    `ages`: its connections have a maximum age, even if a call lasts longer.
    """

    # Of unpadded DATA and headers. All other frames are bounded by FRAME_BYTES_MAX.
    frame_bytes_max: int = FRAME_BYTES_MAX
    ages: bool = True
    edge: str = "grpc"  # the edge's name in the log

    def server_preface(self) -> bytes:
        """Encode the frames that the server sends first on a connection (RFC 9113, 3.4)."""
        values = {
            MAX_STREAMS: CALLS_PER_CONNECTION_MAX,
            INITIAL_WINDOW: WINDOW_BYTES,
            MAX_FRAME: self.frame_bytes_max,
            MAX_HEADERS: HEADERS_BYTES_MAX,
        }
        return settings(values) + window_update(0, CONNECTION_WINDOW_BYTES - WINDOW_BYTES_DEFAULT)


# HTTP/2 forbids the connection headers of HTTP/1.1.
_FORBIDDEN_HEADERS = frozenset(
    {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}
)

# (streams, stream number, headers, size of the headers in bytes, now_s, is_half_closed) -> the stream, or None if
# it has ended with a refusal
Begin = Callable[[Streams, int, Headers, int, float, bool], Stream | None]


class Connection(asyncio.Protocol):
    """The asyncio protocol of one client.

    `begin` creates the call of a new stream, or refuses it with an answer and returns None. `connections` is the edge's
    set of open connections, to which this connection adds itself.
    """

    def __init__(
        self,
        begin: Begin,
        connections: set[Connection],
        loop: asyncio.AbstractEventLoop,
        bounds: Bounds = Bounds(),  # frozen, so it can be shared
        flushes: Flushes | None = None,  # shared by the connections of the edge. None: a new one
    ) -> None:
        self._begin, self._connections, self._loop, self._bounds = begin, connections, loop, bounds
        self._transport: asyncio.Transport | None = None
        self._decoder = HpackDecoder(UNPACKED_BYTES_MAX)
        self._reader = FrameReader(bounds.frame_bytes_max)
        # An incomplete header block: its stream, the flags of its HEADERS frame, and the bytes that have arrived.
        self._open_block: tuple[int, int, bytearray] | None = None
        self.streams = Streams(flushes or Flushes(loop))
        self._last_stream = 0  # the highest number of a stream that the client has opened
        self._receive_window = CONNECTION_WINDOW_BYTES
        self._strain = 0
        self._credited_frames = 0  # the DATA frames that have reduced the strain already
        self._ping_strikes, self._client_ping_s, self._frames_at_client_ping = 0, -CLIENT_PING_S, 0
        self.connected_s = self.last_received_s = self.last_call_s = self._checked_s = loop.time()
        self._ping_sent_s: float | None = None  # None: no ping is unanswered
        self._goaway_sent_s: float | None = None
        self._closed_s: float | None = None
        self.closed: asyncio.Future[None] = loop.create_future()  # done when the connection is lost

    # -- methods of asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and send the server's preface, or abort it if too many are open.

        See asyncio.Protocol.
        """
        self._transport = cast(asyncio.Transport, transport)
        peer = (transport.get_extra_info("peername") or ("",))[0]
        self.streams.attach(self._transport, peer)
        if self._exceeds_connection_limit(peer):
            logger.warning("connection refused peer=%s connections_max=%d", peer, CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._connections.add(self)
        self.streams.write(self._bounds.server_preface())

    def _exceeds_connection_limit(self, peer: str) -> bool:
        """True if the edge has CONNECTIONS_MAX connections, or this address has more than its share of them."""
        # Below half of CONNECTIONS_MAX no address exceeds its share, so it need not be counted.
        if len(self._connections) < CONNECTIONS_MAX // 2:
            return False
        return exceeds_share(
            peer, (connection.streams.peer for connection in self._connections), CONNECTIONS_MAX
        )

    def eof_received(self) -> None:
        """Write the answers of this turn, and end all other calls. See asyncio.Protocol.

        The transport closes afterwards and discards later answers. A call that ends here gives back its messages.
        """
        self.streams.flush()
        self.streams.end_all()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the calls of all streams. See asyncio.Protocol."""
        self._connections.discard(self)
        self._transport = None
        self.streams.detach()
        self.streams.end_all()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that `data` completes. See asyncio.Protocol."""
        self.last_received_s = self._loop.time()
        if self._closed_s is not None:
            return
        try:
            for kind, flags, number, payload in self._reader.read(data):
                self._receive(kind, flags, number, payload)
            if self._reader.broken is not None:
                raise self._reader.broken
        except BrokenRule as error:
            # Without a preface the client may speak another protocol. Its first bytes show which.
            first_bytes = b"" if self._reader.has_preface else data
            WRONG_PROTOCOLS.note(
                self._bounds.edge, first_bytes, self.streams.peer, self.last_received_s, str(error)
            )
            self.close(error.fault, str(error))

    def pause_writing(self) -> None:
        """Stop sending DATA, because the client does not read fast enough. See asyncio.Protocol."""
        self.streams.set_paused(True)

    def resume_writing(self) -> None:
        """Continue to send DATA. See asyncio.Protocol."""
        self.streams.set_paused(False)

    # -- frames of the client --------------------------------------------------------------------------------

    def _receive(self, kind: int, flags: int, number: int, payload: Payload) -> None:
        """Handle one frame of stream `number`, or of the connection (0). Raises BrokenRule."""
        if self._closed_s is not None:
            return
        if self._open_block is not None and (kind != CONTINUATION or number != self._open_block[0]):
            raise BrokenRule(Fault.PROTOCOL_ERROR, "another frame within a header block")
        if kind == DATA:
            self._receive_data(flags, number, payload)
            return
        payload = bytes(payload)  # the reader may have returned a view of large headers
        if kind == HEADERS:
            if number and flags & PRIORITISED and stream_dependency(flags, payload) == number:
                raise BrokenRule(Fault.PROTOCOL_ERROR, f"stream {number} depends on itself")
            fragment = strip_padding(flags, payload)
            if flags & END_HEADERS:
                self._receive_headers(flags, number, fragment)
            else:
                self._open_block = (number, flags, bytearray(fragment))
        elif kind == CONTINUATION:
            self._receive_continuation(flags, payload)
        elif kind < CONTINUATION:
            self._count_strain()
            _RECEIVERS[kind](self, flags, number, payload)
        else:
            self._count_strain()  # a frame of an unknown extension has no effect

    def _receive_data(self, flags: int, number: int, payload: Payload) -> None:
        """Count DATA in the windows of connection and stream, and pass it on to its stream without the padding.

        DATA of a stream that has ended is discarded. Unless the server ended it first, the stream is reset. Raises
        BrokenRule.
        """
        size_bytes = len(payload)
        self._receive_window -= size_bytes
        if self._receive_window < CONNECTION_WINDOW_BYTES // 2:
            if self._receive_window < 0:
                raise BrokenRule(Fault.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
            self.streams.write(window_update(0, CONNECTION_WINDOW_BYTES - self._receive_window))
            self._receive_window = CONNECTION_WINDOW_BYTES
        # Checked also for a stream that has ended: invalid padding breaks a rule of the connection.
        content = strip_padding(PADDED, bytes(payload)) if flags & PADDED else payload
        stream = self.streams.open.get(number)
        if stream is None or stream.is_half_closed:
            self._require_opened(number, "DATA")
            self._count_strain()
            if stream is not None or not self.streams.accepts_late_frame(
                number, is_last=bool(flags & END_STREAM)
            ):
                self._reset_stream(number, Fault.STREAM_CLOSED)
            return
        stream.receive_window -= size_bytes
        if stream.receive_window < 0:
            raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"more DATA than the window of stream {number}")
        if flags & PADDED:
            payload = content
            # The padding has used up the window, too, and is never read.
            stream.allow(stream.receive_window + size_bytes - len(payload))
        if flags & END_STREAM:
            stream.is_half_closed = True
        elif not payload:
            self._count_strain()
        stream.received(payload)

    def _receive_headers(self, flags: int, number: int, block: bytes) -> None:
        """Handle a complete header block: the trailers of an open stream, or the headers of a new call.

        `flags` are those of the HEADERS frame. Raises BrokenRule.
        """
        if len(block) > BLOCK_BYTES_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, f"a header block of more than {BLOCK_BYTES_MAX} bytes")
        # Decoded also for a stream that is refused below, because later blocks refer to the fields of earlier ones.
        headers, size_bytes = self._decoder.decode(block)
        stream = self.streams.open.get(number)
        if stream is not None:
            if stream.is_half_closed or not flags & END_STREAM:
                raise BrokenRule(
                    Fault.PROTOCOL_ERROR, f"headers of open stream {number}, which are no trailers"
                )
            if self._decoder.is_malformed:
                self._reset_stream(number, Fault.PROTOCOL_ERROR)
                return
            stream.is_half_closed = True
            stream.received(b"")
        elif not number & 1:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"stream {number} of a client has an even number")
        elif number <= self._last_stream:
            self._count_strain()
            if not (flags & END_STREAM and self.streams.accepts_late_frame(number, is_last=True)):
                raise BrokenRule(Fault.STREAM_CLOSED, f"headers of stream {number}, which has ended")
        else:
            self._last_stream = number
            if len(self.streams.open) >= CALLS_PER_CONNECTION_MAX:
                self._count_strain()
                self.streams.write(rst_stream(number, Fault.REFUSED_STREAM))
                if not flags & END_STREAM:
                    self.streams.remember_closed(number)
                return
            if self._decoder.is_malformed or not _is_request(headers):
                self._count_strain()
                self.streams.write(rst_stream(number, Fault.PROTOCOL_ERROR))
                if not flags & END_STREAM:
                    self.streams.remember_closed(number)
                return
            self.last_call_s = self.last_received_s
            is_half_closed, frames_before = bool(flags & END_STREAM), self.streams.data_frames
            call = self._begin(
                self.streams, number, headers, size_bytes, self.last_received_s, is_half_closed
            )
            if call is not None:
                self.streams.open[number] = call
            if call is None or call.is_refusal:
                # The DATA frame of a refusal must not reduce the strain.
                self._credited_frames += self.streams.data_frames - frames_before
                self._count_strain(STRAIN_PER_REFUSED_CALL)

    def _require_opened(self, number: int, frame_name: str) -> None:
        """Raise BrokenRule if the client has never opened this stream."""
        if number > self._last_stream or not number & 1:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"{frame_name} of stream {number}, which is not open")

    def _reset_stream(self, number: int, fault: Fault) -> None:
        """Reset a stream whose client has broken a rule of this stream only. The other streams continue."""
        self.streams.write(rst_stream(number, fault))
        stream = self.streams.open.get(number)
        if stream is not None:
            if not stream.is_half_closed:
                self.streams.remember_closed(number)
            self.streams.forget(number)
            stream.abandon()

    def _receive_continuation(self, flags: int, payload: bytes) -> None:
        """Add to the incomplete header block, and handle it at its end. Raises BrokenRule."""
        if self._open_block is None:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        number, first_flags, block = self._open_block
        block += payload
        self._count_strain()
        if len(block) > BLOCK_BYTES_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, f"a header block of more than {BLOCK_BYTES_MAX} bytes")
        if flags & END_HEADERS:
            self._open_block = None
            self._receive_headers(first_flags, number, bytes(block))

    def _receive_reset(self, flags: int, number: int, payload: bytes) -> None:
        """End the call of a stream that the client resets. Raises BrokenRule."""
        read_31_bits(payload)
        self._require_opened(number, "RST_STREAM")
        stream = self.streams.open.get(number)
        if stream is not None:
            self.streams.forget(number)
            stream.abandon()
        else:
            self.streams.accepts_late_frame(number, is_last=True)

    def _receive_settings(self, flags: int, number: int, payload: bytes) -> None:
        """Apply the client's settings in their order, and acknowledge them. Raises BrokenRule."""
        if number or (flags & ACK and payload):
            raise BrokenRule(
                Fault.PROTOCOL_ERROR, "SETTINGS of a stream, or an acknowledgement with settings"
            )
        if flags & ACK:
            return
        streams, earlier_window = self.streams, self.streams.initial_window
        for count, (name, value) in enumerate(read_settings(payload), 1):
            if count % SETTINGS_PER_STRAIN == 0:
                self._count_strain()
            if name == INITIAL_WINDOW:
                if value > WINDOW_BYTES_MAX:
                    raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                streams.initial_window = value
            elif name == MAX_FRAME:
                streams.set_frame_bytes(value)
            elif name == ENABLE_PUSH and value > 1:
                raise BrokenRule(Fault.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        streams.write(frame(SETTINGS, ACK, 0))
        if streams.initial_window > earlier_window and streams.blocked_by_stream:
            # Each of these streams is visited, so a client that raises and lowers its setting in turn adds strain.
            self._count_strain(len(streams.blocked_by_stream) // SETTINGS_PER_STRAIN)
            streams.resume(streams.blocked_by_stream)

    def _receive_ping(self, flags: int, number: int, payload: bytes) -> None:
        """Answer a ping, or note the answer to the server's ping. Raises BrokenRule, also for too many pings."""
        if number or len(payload) != PING_BYTES:
            raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"PING of a stream, or of other than {PING_BYTES} bytes")
        if flags & ACK:
            self._ping_sent_s = None
            return
        data_frames = self.streams.data_frames
        if data_frames != self._frames_at_client_ping:
            self._ping_strikes, self._frames_at_client_ping = 0, data_frames
        elif self.last_received_s - self._client_ping_s < CLIENT_PING_S:
            self._ping_strikes += 1
            if self._ping_strikes > PING_STRIKES_MAX:
                raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "too_many_pings")
        self._client_ping_s = self.last_received_s
        self.streams.write(frame(PING, ACK, 0, payload))

    def _receive_window_update(self, flags: int, number: int, payload: bytes) -> None:
        """Raise the window for DATA that is sent, and let the streams that it blocked send. Raises BrokenRule."""
        more_bytes = read_31_bits(payload)
        if not more_bytes:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0 bytes")
        stream = self.streams.open.get(number)
        if not number:
            self.streams.send_window += more_bytes
            if self.streams.send_window > WINDOW_BYTES_MAX:
                raise BrokenRule(Fault.FLOW_CONTROL_ERROR, f"a window of more than {WINDOW_BYTES_MAX} bytes")
            self.streams.resume_blocked()
        elif stream is not None:
            stream.window_delta += more_bytes
            if stream.send_window > WINDOW_BYTES_MAX:
                self._reset_stream(number, Fault.FLOW_CONTROL_ERROR)
            elif self.streams.blocked_by_stream.pop(number, None) is not None:
                stream.move()
        else:
            self._require_opened(number, "WINDOW_UPDATE")

    def _receive_priority(self, flags: int, number: int, payload: bytes) -> None:
        """Check the frame only: Timeball does not prioritise streams. Raises BrokenRule."""
        if not number:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "PRIORITY of stream 0")
        if len(payload) != PRIORITY_BYTES:
            self._reset_stream(number, Fault.FRAME_SIZE_ERROR)
        elif stream_dependency(0, payload) == number:
            self._reset_stream(number, Fault.PROTOCOL_ERROR)

    def _receive_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """Check the frame only: a client that opens no more streams closes the connection. Raises BrokenRule."""
        if number:
            raise BrokenRule(Fault.PROTOCOL_ERROR, "GOAWAY of a stream")

    def _refuse_push(self, flags: int, number: int, payload: bytes) -> None:
        raise BrokenRule(Fault.PROTOCOL_ERROR, "a client's PUSH_PROMISE")

    def _count_strain(self, count: int = 1) -> None:
        """Reduce the strain by the relief for DATA frames since the last call, then add `count`.

        Raises BrokenRule beyond STRAIN_MAX.
        """
        data_frames = self.streams.data_frames
        relief = STRAIN_RELIEF_PER_DATA * (data_frames - self._credited_frames)
        self._strain = max(0, self._strain - relief) + count
        self._credited_frames = data_frames
        if self._strain > STRAIN_MAX:
            raise BrokenRule(Fault.ENHANCE_YOUR_CALM, "too many frames without progress of a call")

    # -- the end of the connection ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the client by GOAWAY to send its next calls over another connection. Open calls continue."""
        if self._goaway_sent_s is None and self._transport is not None and self._closed_s is None:
            self._goaway_sent_s = self._loop.time()
            self.streams.write(goaway(LAST_STREAM, Fault.NO_ERROR))

    def close(self, fault: Fault = Fault.NO_ERROR, reason: str = "") -> None:
        """End the calls and close the connection with a GOAWAY. Does nothing if it is closed already.

        Bytes already written are still sent, within GOODBYE_S (`check`).
        """
        if self._transport is not None and self._closed_s is None:
            self.streams.write(goaway(self._last_stream, fault, reason))
            self.streams.flush()
            self._closed_s = self._loop.time()
            self.streams.end_all()
            if fault != Fault.NO_ERROR and self._transport.can_write_eof():
                # Close only this side: with unread frames of the client, a full close would send RST, which discards
                # the GOAWAY. The transport closes when the client closes its side, or after LINGER_S (`check`).
                self._transport.write_eof()
            else:
                self._transport.close()

    def abort(self) -> None:
        """End the connection at once, and discard the bytes that have not left."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, now_s: float) -> None:
        """Check all deadlines of the connection and its streams. Called several times a second."""
        self._strain = max(0, self._strain - int(STRAIN_DECAY_PER_S * (now_s - self._checked_s)))
        self._checked_s = now_s
        for stream in list(self.streams.open.values()):
            stream.check(now_s)
        if self.streams.open:
            self.last_call_s = now_s
        if self._closed_s is not None:
            if now_s - self._closed_s > GOODBYE_S:
                self.abort()
            elif now_s - self._closed_s > LINGER_S and self._transport is not None:
                self._transport.close()
        elif not self._reader.has_preface:
            if now_s - self.connected_s > PREFACE_S:
                self.close(reason="no preface of HTTP/2")
        elif self._goaway_sent_s is not None:
            if now_s - self._goaway_sent_s > (AGE_GRACE_S if self.streams.open else LEAVE_S):
                self.close()
        elif now_s - self.last_call_s > IDLE_S or (self._bounds.ages and now_s - self.connected_s > AGE_S):
            self.leave()
        self._check_silence(now_s)

    def _check_silence(self, now_s: float) -> None:
        """Ping a client that has been silent for PING_S. Abort if it stays silent for PING_TIMEOUT_S after the ping."""
        if self._ping_sent_s is not None and self.last_received_s >= self._ping_sent_s:
            self._ping_sent_s = None
        if self._ping_sent_s is None:
            if now_s - self.last_received_s > PING_S:
                self._ping_sent_s = now_s
                self.streams.write(frame(PING, 0, 0, bytes(PING_BYTES)))
        elif now_s - self._ping_sent_s > PING_TIMEOUT_S:
            logger.warning("connection closed, it answers no ping peer=%s", self.streams.peer)
            self.abort()


def _is_request(headers: Headers) -> bool:
    """True if these are valid headers of an HTTP/2 request (RFC 9113, 8.2 and 8.3)."""
    return (
        ":method" in headers
        and ":scheme" in headers
        and bool(headers.get(":path"))
        and headers.get("te", "trailers") == "trailers"
        and _FORBIDDEN_HEADERS.isdisjoint(headers)
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
