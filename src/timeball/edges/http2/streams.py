"""The sending side of one HTTP/2 connection: its streams, their flow-control windows, and the frames to send.

All frames of one turn of the event loop leave in one write. DATA leaves as far as the client's windows and its socket
allow. The rest of the DATA stays in its stream and blocks only that stream. `Streams` has one dict for each reason why
a stream is blocked:

    waiting                  the socket accepts no more bytes. The streams continue in turn when it does
    blocked_by_connection    the connection's window is used up. The streams continue in turn when it grows
    blocked_by_stream        the stream's own window is used up. Each stream continues when its own window grows

At most OUT_BYTES_MAX of DATA are buffered for the socket. Other frames are not limited, because they are small. But a
client that sends requests and reads no answers would make them grow without bound. So the connection reads nothing from
a client while more than WRITE_BUFFER_BYTES_MAX are buffered for it.

A change of the client's SETTINGS_INITIAL_WINDOW_SIZE changes the windows of all open streams. Each stream therefore
stores only the difference between its window and that setting (`window_delta`). So a change costs the same for one open
stream as for a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from timeball.edges.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEAD,
    HEADERS,
    PREFIX,
    WINDOW_BYTES_DEFAULT,
    BrokenRule,
    Fault,
    Payload,
    answer_frames,
    frame,
    rst_stream,
    window_update,
)

logger = logging.getLogger(__name__)

OUT_BYTES_MAX = 256 * 1024
WRITE_BUFFER_BYTES_MAX = 4 * OUT_BYTES_MAX
CLOSED_EARLY_MAX = 4_096  # streams of a connection that are remembered after the server has ended them
WINDOW_BYTES = 16 * 1024  # receive window of a call before memory for its request is reserved
# The maximum DATA frame, even if the client accepts larger ones: streams take turns frame by frame.
LARGE_FRAME_BYTES_MAX = 128 * 1024
_SMALL_BYTES = 4_096  # to copy this many bytes costs less than a separate entry in the list of writes
# Shared by all streams whose DATA never had to wait (most streams). A deque per stream would cost more than opening it.
_NO_DATA: deque[Payload] = deque(maxlen=0)
_FRAME_BYTES_LIMIT = 2**24 - 1  # HTTP/2's own limit


class Flushes:
    """Collects the connections that have frames to send, and flushes them at the end of this turn of the event loop.

    One commit of the log answers clients of many connections. A separate loop callback for each connection would cost
    as much as an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[Streams] = []

    def add(self, streams: Streams) -> None:
        """Flush this connection at the end of this turn of the event loop."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(streams)

    def _flush(self) -> None:
        """Flush the collected connections. A failure of one is logged."""
        pending, self._pending = self._pending, []
        for streams in pending:
            try:
                streams.flush()
            except Exception as error:  # of any kind: the other connections must be flushed, too
                logger.exception("answers not sent peer=%s reason=%s", streams.peer, error)


class Streams:
    """The open streams of one connection, and the frames that it sends. Belongs to the event loop.

    `open` has every open stream by its number. A stream with DATA that cannot leave is also in one of the three dicts
    that the module's docstring explains.
    """

    def __init__(self, flushes: Flushes) -> None:
        self._flushes = flushes
        self._transport: asyncio.Transport | None = None
        self.peer = ""  # the client's address, without its port
        self.open: dict[int, Stream] = {}
        self.waiting: dict[int, Stream] = {}
        self.blocked_by_connection: dict[int, Stream] = {}
        self.blocked_by_stream: dict[int, Stream] = {}
        # Streams that the server ended before the client: frames for them may still arrive. The oldest is the first.
        self._closed_early: dict[int, None] = {}
        self.initial_window = self.send_window = WINDOW_BYTES_DEFAULT
        self.data_frames = 0  # the number of DATA frames sent so far
        self.frame_bytes = FRAME_BYTES_MAX  # the maximum payload of a DATA frame that is sent
        self._out: list[Payload] = []  # frames of this turn that the socket has not got yet
        self._out_bytes, self._is_flushing, self._is_paused = 0, False, False
        self._is_reading = True

    def attach(self, transport: asyncio.Transport, peer: str) -> None:
        """Send to this transport from now on. `peer` is the client's address."""
        self._transport, self.peer = transport, peer
        transport.set_write_buffer_limits(OUT_BYTES_MAX)

    def set_frame_bytes(self, size_bytes: int) -> None:
        """Set the maximum DATA frame to the client's setting. Raises BrokenRule if HTTP/2 does not allow that size."""
        if not FRAME_BYTES_MAX <= size_bytes <= _FRAME_BYTES_LIMIT:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"frames of {size_bytes} bytes")
        self.frame_bytes = min(size_bytes, LARGE_FRAME_BYTES_MAX)

    def detach(self) -> None:
        """Send nothing more: the connection is lost."""
        self._transport = None
        self._out.clear()

    @property
    def is_full(self) -> bool:
        """Whether no more DATA may be buffered for the socket at the moment."""
        return self._is_paused or self._out_bytes > OUT_BYTES_MAX

    def set_paused(self, is_paused: bool) -> None:
        """Stop sending DATA because the transport's buffer is full, or continue because it has drained."""
        self._is_paused = is_paused
        if not is_paused:
            if not self._is_reading and self._transport is not None and not self._transport.is_closing():
                self._is_reading = True
                self._transport.resume_reading()
            self.resume(self.waiting)

    def write(self, data: Payload) -> None:
        """Send encoded frames at the end of this turn of the loop, in one write with all other frames of the turn."""
        if self._transport is None:
            return
        self._out.append(data)
        self._out_bytes += len(data)
        if not self._is_flushing:
            self._is_flushing = True
            self._flushes.add(self)

    def write_data(self, stream: Stream, data: Payload) -> None:
        """Send one DATA frame. The caller has checked that it fits into the stream's and the connection's window."""
        size_bytes = len(data)
        stream.window_delta -= size_bytes
        self.send_window -= size_bytes
        self.data_frames += 1
        head = HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, DATA, 0, stream.number)
        if size_bytes <= _SMALL_BYTES:
            self.write(head + data)
        else:
            self.write(head)
            self.write(data)

    def write_answer(self, stream: Stream, message: bytes) -> None:
        """Send a complete answer with one message (headers, DATA, trailers), and forget the stream."""
        # The stream's own window needs no update, because the stream ends with this answer.
        self.send_window -= len(message) + PREFIX.size
        self.data_frames += 1
        self.write(answer_frames(stream.number, message))
        self._close_stream(stream)

    def write_trailers(self, stream: Stream, block: bytes) -> None:
        """Send trailers, and forget the stream. A client that has not ended its side gets RST_STREAM, too."""
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block))
        self._close_stream(stream)

    def _close_stream(self, stream: Stream) -> None:
        """Forget a stream whose last frame is written. A client that has not ended its side gets RST_STREAM."""
        if not stream.is_half_closed:
            self.write(rst_stream(stream.number, Fault.NO_ERROR))
            self.remember_closed(stream.number)
        self.forget(stream.number)

    def reset(self, stream: Stream, fault: Fault) -> None:
        """End a stream with RST_STREAM and this error code, and forget it."""
        self.write(rst_stream(stream.number, fault))
        if not stream.is_half_closed:
            self.remember_closed(stream.number)
        self.forget(stream.number)

    def remember_closed(self, number: int) -> None:
        """Remember a stream that the server ended before the client: frames on their way for it are no error."""
        self._closed_early[number] = None
        if len(self._closed_early) > CLOSED_EARLY_MAX:
            del self._closed_early[next(iter(self._closed_early))]

    def accepts_late_frame(self, number: int, *, is_last: bool) -> bool:
        """True if a frame for this closed stream is legal, because the server ended the stream first.

        If the frame ends the client's side (`is_last`), the stream is forgotten, and a further frame is illegal.
        """
        if number not in self._closed_early:
            return False
        if is_last:
            del self._closed_early[number]
        return True

    def forget(self, number: int) -> None:
        """Remove a stream that has ended."""
        self.open.pop(number, None)
        if self.waiting or self.blocked_by_connection or self.blocked_by_stream:
            for blocked in (self.waiting, self.blocked_by_connection, self.blocked_by_stream):
                blocked.pop(number, None)

    def flush(self) -> None:
        """Write the frames of this turn to the socket, and let waiting streams send if it accepts more."""
        self._is_flushing = False
        if self._transport is not None and self._out:
            out = self._out
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        self._out.clear()
        self._out_bytes = 0
        if self._is_paused:
            self._stop_reading()
        elif self.waiting:
            self.resume(self.waiting)

    def _stop_reading(self) -> None:
        """Read nothing from a client that does not read its answers, until the write buffer has drained.

        The broker then sees no answers to its pings either. So a client that never reads is disconnected.
        """
        transport = self._transport
        if transport is None or not self._is_reading or transport.is_closing():
            return
        if transport.get_write_buffer_size() > WRITE_BUFFER_BYTES_MAX:
            self._is_reading = False
            transport.pause_reading()

    def resume(self, streams: dict[int, Stream]) -> None:
        """Let each of these blocked streams send. `streams` is one of the three dicts.

        A stream that is blocked again goes to the end of the dict of its reason.
        """
        for number in list(streams):
            stream = streams.pop(number, None)
            if stream is not None:
                stream.move()

    def resume_blocked(self) -> None:
        """Let the streams blocked by the connection's window send in turn, until the window is used up."""
        while self.blocked_by_connection and self.send_window > 0:
            self.blocked_by_connection.pop(next(iter(self.blocked_by_connection))).move()

    def end_all(self) -> None:
        """End the calls of all streams without an answer, because the connection ends."""
        streams, self.open = self.open, {}
        self.waiting.clear()
        self.blocked_by_connection.clear()
        self.blocked_by_stream.clear()
        for stream in streams.values():
            stream.abandon()


class Stream:
    """One stream: its two windows, and its DATA that could not be sent yet. Exchange (exchange.py) derives from it.

    `is_half_closed` is true once the client has ended its side of the stream ("half-closed (remote)" in RFC 9113).
    """

    __slots__ = (
        "_drained",
        "_trailers",
        "_unsent",
        "is_half_closed",
        "number",
        "receive_window",
        "stalled_s",
        "streams",
        "task",
        "window_delta",
    )
    is_refusal = False  # whether the request was refused by its headers, so that it counts as strain

    def __init__(self, streams: Streams, number: int, is_half_closed: bool) -> None:
        """Open a stream. `is_half_closed`: the client has ended its side with the headers already."""
        self.streams, self.number, self.is_half_closed = streams, number, is_half_closed
        self.receive_window = WINDOW_BYTES  # bytes that the client may still send
        self.window_delta = 0  # `send_window` minus the connection's `initial_window`
        self._unsent = _NO_DATA  # DATA that could not be sent yet
        self._trailers = b""  # the header block that is sent behind `_unsent`. Empty until `end`
        self._drained: asyncio.Future[None] | None = None  # `sent` waits for it
        # The time when `check` first saw unsent DATA. None again as soon as some of it leaves.
        self.stalled_s: float | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def send_window(self) -> int:
        """How many bytes of DATA the client allows on this stream. Negative after it has lowered its initial window."""
        return self.streams.initial_window + self.window_delta

    def received(self, payload: Payload) -> None:
        """Handle DATA from the client. Also called, with an empty payload, if trailers end the client's side."""
        raise NotImplementedError

    def abandon(self) -> None:
        """End the call without an answer, because the client has reset the stream or disconnected."""
        raise NotImplementedError

    def check(self, now_s: float) -> None:
        """End the call if its client is too slow or its deadline has passed. Called several times a second."""
        raise NotImplementedError

    def allow(self, size_bytes: int) -> None:
        """Raise the receive window to this many bytes. A larger window stays as it is."""
        more_bytes = size_bytes - self.receive_window
        if more_bytes > 0:
            self.receive_window = size_bytes
            self.streams.write(window_update(self.number, more_bytes))

    def send(self, data: Payload) -> bool:
        """Send DATA, or queue it in this stream.

        Returns False if some DATA could not leave or the socket is full. The caller then awaits `sent` before it sends
        more.
        """
        streams, size_bytes = self.streams, len(data)
        if not (self._unsent or streams.is_full) and size_bytes <= min(
            streams.initial_window + self.window_delta, streams.send_window, streams.frame_bytes
        ):
            streams.write_data(self, data)
        elif size_bytes:
            if self._unsent is _NO_DATA:
                self._unsent = deque()
            self._unsent.append(memoryview(data))  # a view: `move` then cuts off parts without copying
            self.move()
        return not (self._unsent or streams.is_full)

    def try_send_answer(self, message: bytes) -> bool:
        """Send a complete answer with one message at once, or return False if windows or socket do not allow it."""
        streams, size_bytes = self.streams, len(message) + PREFIX.size
        if streams.is_full or size_bytes > min(
            streams.initial_window + self.window_delta, streams.send_window, streams.frame_bytes
        ):
            return False
        streams.write_answer(self, message)
        return True

    def completion(self) -> asyncio.Future[None] | None:
        """Return a future that is done when the running call ends, or None if the call has not begun or is over."""
        return self.task

    def end(self, block: bytes) -> None:
        """Send trailers as soon as all DATA has left, and then forget the stream."""
        self._trailers = block
        if not self._unsent:
            self.streams.write_trailers(self, block)

    @property
    def has_unsent(self) -> bool:
        """Whether some DATA could not be sent yet."""
        return bool(self._unsent)

    def drop_unsent(self) -> None:
        """Discard the DATA that could not be sent yet."""
        self._unsent.clear()

    async def sent(self) -> None:
        """Wait until all DATA of this stream has left and the socket accepts more."""
        self._drained = asyncio.get_running_loop().create_future()
        if not self._unsent:
            self.streams.waiting[self.number] = self
        await self._drained

    def move(self) -> None:
        """Send as much unsent DATA as windows and socket allow.

        If some is left, add the stream to the dict of `Streams` for the reason. After the last DATA, send the trailers
        or wake the coroutine in `sent`.
        """
        streams, unsent = self.streams, self._unsent
        while unsent:
            data = unsent[0]
            own_window = streams.initial_window + self.window_delta
            allowed_bytes = min(own_window, streams.send_window, streams.frame_bytes)
            size_bytes = 0 if streams.is_full else min(len(data), allowed_bytes)
            if size_bytes <= 0:
                if own_window <= 0:
                    streams.blocked_by_stream[self.number] = self
                else:
                    blocked = streams.waiting if streams.is_full else streams.blocked_by_connection
                    blocked[self.number] = self
                return
            self.stalled_s = None
            streams.write_data(self, data[:size_bytes])
            if size_bytes < len(data):
                unsent[0] = data[size_bytes:]
            else:
                unsent.popleft()
        if self._trailers:
            streams.write_trailers(self, self._trailers)
        elif self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
