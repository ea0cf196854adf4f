"""The sending side of one HTTP/2 connection: its streams, their windows, and the frames of one turn of the event loop.

All frames of one turn leave in one write. DATA leaves as far as the client's windows and its socket allow. The rest
waits in its stream and blocks only that stream, in one of three lists:

    waiting    the socket accepts no more: they continue in turn when it does
    blocked    the connection's window is used up: they continue in turn when it grows
    narrow     the stream's own window is used up: each continues when its window grows

At most OUT_BYTES_MAX of DATA wait for the socket, and any number of small frames. A client that sends and does not read
would make these grow without bound. So nothing is read from it while more than UNTAKEN_BYTES_MAX wait.

The client's setting for the initial window changes the windows of all open streams. Each stream therefore stores only
the difference between its window and that setting. A change then costs the same for one stream as for a thousand.
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
    answer,
    frame,
    rst_stream,
    window_update,
)

logger = logging.getLogger(__name__)

OUT_BYTES_MAX = 256 * 1024
UNTAKEN_BYTES_MAX = 4 * OUT_BYTES_MAX
CUT_MAX = 4_096  # streams of a connection that are remembered as ended by the server first
WINDOW_BYTES = 16 * 1024  # of a call: its client may send this much before there is room for its request
LARGE_FRAME_BYTES_MAX = 128 * 1024  # sent to a client that accepts this size, not larger: streams take turns
_SMALL_BYTES = 4_096  # a copy of this size costs less than a further part of a write
# The queue of a stream whose DATA has never waited, as for most: a queue per stream would cost more than its opening.
_NOTHING: deque[Payload] = deque(maxlen=0)
_FRAME_BYTES_LIMIT = 2**24 - 1  # HTTP/2's own limit


class Flushes:
    """Connections with frames to send, which are handed to their sockets at the end of this turn of the loop.

    A commit answers clients of many connections. A callback per connection at the end of the turn would cost as much as
    an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Streams] = []

    def add(self, streams: Streams) -> None:
        """Flush these streams at the end of this turn."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(streams)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for streams in waiting:
            try:
                streams.flush()
            except Exception as error:  # of any kind. It concerns this connection only
                logger.exception("answers not sent peer=%s reason=%s", streams.peer, error)


class Streams:
    """The open streams of one connection, and the bytes that they send. Belongs to the event loop."""

    def __init__(self, flushes: Flushes) -> None:
        self._flushes = flushes
        self._transport: asyncio.Transport | None = None
        self.peer = ""  # the client's address, without its port
        self.open: dict[int, Stream] = {}
        self.waiting: dict[int, Stream] = {}
        self.blocked: dict[int, Stream] = {}
        self.narrow: dict[int, Stream] = {}
        self._cut: dict[int, None] = {}  # streams that the server ended first: frames may still arrive
        self.first_window = self.send_window = WINDOW_BYTES_DEFAULT
        self.data_frames = 0  # sent so far
        self.frame_bytes = FRAME_BYTES_MAX  # maximum size of DATA frames
        self._out: list[Payload] = []
        self._out_bytes, self._is_flushing, self._is_paused = 0, False, False
        self._is_reading = True

    def opened(self, transport: asyncio.Transport, peer: str) -> None:
        """Begin to send."""
        self._transport, self.peer = transport, peer
        transport.set_write_buffer_limits(OUT_BYTES_MAX)

    def allow_frames(self, size_bytes: int) -> None:
        """Send DATA frames of at most this size from now on. Raises BrokenRule."""
        if not FRAME_BYTES_MAX <= size_bytes <= _FRAME_BYTES_LIMIT:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"frames of {size_bytes} bytes")
        self.frame_bytes = min(size_bytes, LARGE_FRAME_BYTES_MAX)

    def lost(self) -> None:
        """Send nothing more."""
        self._transport = None
        self._out.clear()

    @property
    def is_full(self) -> bool:
        """Return whether the socket accepts no more at the moment."""
        return self._is_paused or self._out_bytes > OUT_BYTES_MAX

    def pause(self, is_paused: bool) -> None:
        """Stop sending DATA, or continue: the client has many answers to read, or has read most of them."""
        self._is_paused = is_paused
        if not is_paused:
            if not self._is_reading and self._transport is not None and not self._transport.is_closing():
                self._is_reading = True
                self._transport.resume_reading()
            self.move(self.waiting)

    def write(self, data: Payload) -> None:
        """Send frames at the end of this turn of the loop, together with all other frames of the turn."""
        if self._transport is None:
            return
        self._out.append(data)
        self._out_bytes += len(data)
        if not self._is_flushing:
            self._is_flushing = True
            self._flushes.add(self)

    def write_data(self, stream: Stream, data: Payload) -> None:
        """Send a DATA frame for which there is room in both windows."""
        size_bytes = len(data)
        stream.window_change -= size_bytes
        self.send_window -= size_bytes
        self.data_frames += 1
        head = HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, DATA, 0, stream.number)
        if size_bytes <= _SMALL_BYTES:
            self.write(head + data)
        else:
            self.write(head)
            self.write(data)

    def write_whole(self, stream: Stream, message: bytes) -> None:
        """Send an answer of one message, from its headers to its trailers, and forget the stream."""
        # Only the connection's window shrinks: the stream ends with this answer and needs its own no more.
        self.send_window -= len(message) + PREFIX.size
        self.data_frames += 1
        self.write(answer(stream.number, message))
        self._ended(stream)

    def write_end(self, stream: Stream, block: bytes) -> None:
        """Send trailers, and forget the stream. A client that has not ended its side is told to stop."""
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block))
        self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        if not stream.is_heard:
            self.write(rst_stream(stream.number, Fault.NO_ERROR))
            self.cut(stream.number)
        self.forget(stream.number)

    def reset(self, stream: Stream, fault: Fault) -> None:
        """End a stream whose client does not read its DATA."""
        self.write(rst_stream(stream.number, fault))
        if not stream.is_heard:
            self.cut(stream.number)
        self.forget(stream.number)

    def cut(self, number: int) -> None:
        """Remember a stream that the server ended before its client did."""
        self._cut[number] = None
        if len(self._cut) > CUT_MAX:
            del self._cut[next(iter(self._cut))]

    def is_cut(self, number: int, *, ends: bool) -> bool:
        """Return whether a frame may still arrive for this ended stream. `ends`: this frame is the last one."""
        if number not in self._cut:
            return False
        if ends:
            del self._cut[number]
        return True

    def forget(self, number: int) -> None:
        """Remove a stream that has ended."""
        self.open.pop(number, None)
        if self.waiting or self.blocked or self.narrow:
            for held_up in (self.waiting, self.blocked, self.narrow):
                held_up.pop(number, None)

    def flush(self) -> None:
        """Hand the frames of this turn to the socket."""
        self._is_flushing = False
        if self._transport is not None and self._out:
            out = self._out
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        self._out.clear()
        self._out_bytes = 0
        if self._is_paused:
            self._stop_reading()
        elif self.waiting:
            self.move(self.waiting)

    def _stop_reading(self) -> None:
        """Stop reading from a client with too much unread. If it never reads, it misses a ping and is closed."""
        transport = self._transport
        if transport is None or not self._is_reading or transport.is_closing():
            return
        if transport.get_write_buffer_size() > UNTAKEN_BYTES_MAX:
            self._is_reading = False
            transport.pause_reading()

    def move(self, streams: dict[int, Stream]) -> None:
        """Give each of these streams a turn. Those that still wait are behind the others afterwards."""
        for number in list(streams):
            stream = streams.pop(number, None)
            if stream is not None:
                stream.move()

    def move_blocked(self) -> None:
        """Let blocked streams continue in turn while the connection's window lasts."""
        while self.blocked and self.send_window > 0:
            self.blocked.pop(next(iter(self.blocked))).move()

    def end_all(self) -> None:
        """End the calls of all streams: their client reads no more answers."""
        streams, self.open = self.open, {}
        self.waiting.clear()
        self.blocked.clear()
        self.narrow.clear()
        for stream in streams.values():
            stream.gone()


class Stream:
    """One stream: its two windows, and its DATA that waits to leave. A call derives from it (exchange.py)."""

    __slots__ = (
        "_end",
        "_sent",
        "_unsent",
        "is_heard",
        "number",
        "receive_window",
        "streams",
        "stuck_s",
        "task",
        "window_change",
    )

    def __init__(self, streams: Streams, number: int, is_heard: bool) -> None:
        """Open a stream. `is_heard`: the client has ended its side."""
        self.streams, self.number, self.is_heard = streams, number, is_heard
        self.receive_window = WINDOW_BYTES
        self.window_change = 0  # the client's window for this stream, minus the setting `first_window`
        self._unsent = _NOTHING  # DATA that waits to leave
        self._end = b""  # the block of trailers that waits behind it
        self._sent: asyncio.Future[None] | None = None
        self.stuck_s: float | None = None  # when DATA was first seen waiting, None after any of it leaves
        self.task: asyncio.Task[None] | None = None

    @property
    def send_window(self) -> int:
        """Return how many bytes may be sent, negative after the client has lowered its setting."""
        return self.streams.first_window + self.window_change

    def received(self, payload: Payload) -> None:
        """Handle DATA from the client. Also called when it ends its side."""
        raise NotImplementedError

    def gone(self) -> None:
        """End the call: its client reads no answer any more."""
        raise NotImplementedError

    def check(self, now_s: float) -> None:
        """End the call if its client is too slow or its deadline has passed."""
        raise NotImplementedError

    def allow(self, size_bytes: int) -> None:
        """Let the client send this many bytes from now on, if it may not yet."""
        more_bytes = size_bytes - self.receive_window
        if more_bytes > 0:
            self.receive_window = size_bytes
            self.streams.write(window_update(self.number, more_bytes))

    def send(self, data: Payload) -> bool:
        """Send DATA. If it waits or other streams should have a turn, return False: then await `sent`."""
        streams, size_bytes = self.streams, len(data)
        if not (self._unsent or streams.is_full) and size_bytes <= min(
            streams.first_window + self.window_change, streams.send_window, streams.frame_bytes
        ):
            streams.write_data(self, data)
        elif size_bytes:
            if self._unsent is _NOTHING:
                self._unsent = deque()
            self._unsent.append(memoryview(data))  # a view, so that no copy is made when parts of it leave
            self.move()
        return not (self._unsent or streams.is_full)

    def send_whole(self, message: bytes) -> bool:
        """Send headers, message and trailers of an answer with one message, or return False if they have to wait."""
        streams, size_bytes = self.streams, len(message) + PREFIX.size
        if streams.is_full or size_bytes > min(
            streams.first_window + self.window_change, streams.send_window, streams.frame_bytes
        ):
            return False
        streams.write_whole(self, message)
        return True

    def under_way(self) -> asyncio.Future[None] | None:
        """Return a future for the end of a call that has begun, or None if it has not begun or is over."""
        return self.task

    def end(self, block: bytes) -> None:
        """Send trailers behind all DATA, and forget the stream."""
        self._end = block
        if not self._unsent:
            self.streams.write_end(self, block)

    @property
    def has_unsent(self) -> bool:
        """Return whether DATA waits to leave."""
        return bool(self._unsent)

    def drop_unsent(self) -> None:
        """Drop the DATA that has not left."""
        self._unsent.clear()

    async def sent(self) -> None:
        """Wait until all DATA of this stream has left and the socket accepts more."""
        self._sent = asyncio.get_running_loop().create_future()
        if not self._unsent:
            self.streams.waiting[self.number] = self
        await self._sent

    def move(self) -> None:
        """Send as much as windows and socket allow."""
        streams, unsent = self.streams, self._unsent
        while unsent:
            data = unsent[0]
            own_window = streams.first_window + self.window_change
            windows = min(own_window, streams.send_window, streams.frame_bytes)
            size_bytes = 0 if streams.is_full else min(len(data), windows)
            if size_bytes <= 0:
                if own_window <= 0:
                    streams.narrow[self.number] = self
                else:
                    held_up = streams.waiting if streams.is_full else streams.blocked
                    held_up[self.number] = self
                return
            self.stuck_s = None
            streams.write_data(self, data[:size_bytes])
            if size_bytes < len(data):
                unsent[0] = data[size_bytes:]
            else:
                unsent.popleft()
        if self._end:
            streams.write_end(self, self._end)
        elif self._sent is not None and not self._sent.done():
            self._sent.set_result(None)
