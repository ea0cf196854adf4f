"""What leaves on one HTTP/2 connection: its streams, their windows, and the frames of one turn of the event loop.

Frames that are written within one turn leave in one write. DATA leaves as far as the client's windows and its socket
let it; the rest waits in its stream, and holds up that stream alone:

    waiting    the socket takes no more: they go on in turn when it does
    blocked    a window of the client's is used up: they go on when it grows

What the socket does not take is OUT_BYTES_MAX, and some small frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from timeball.protocols.http2.frames import (
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
WINDOW_BYTES = 16 * 1024  # of a call: what its client may send before there is room for its request
LARGE_FRAME_BYTES_MAX = (
    128 * 1024
)  # that is sent to a client that takes as much: the streams have their turns
_SMALL_BYTES = 4_096  # to copy so much costs less than another part of a write
# Of a stream whose DATA has never waited, as most: a queue of its own costs more than to open the stream.
_NOTHING: deque[Payload] = deque(maxlen=0)
_FRAME_BYTES_LIMIT = 2**24 - 1  # HTTP/2's own


class Flushes:
    """Connections with frames to send: all of them hand theirs to their sockets at the end of this turn of the loop.

    A commit answers clients of many connections, and a turn's end of its own for each would cost as much as an answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Streams] = []

    def add(self, streams: Streams) -> None:
        """Flush these too."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(streams)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for streams in waiting:
            try:
                streams.flush()
            except Exception as error:  # of any kind, and of this connection alone
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
        self.first_window = self.send_window = WINDOW_BYTES_DEFAULT
        self.data_frames = 0  # that were sent
        self.frame_bytes = FRAME_BYTES_MAX  # of DATA, at most
        self._out: list[Payload] = []
        self._out_bytes, self._is_flushing, self._is_paused = 0, False, False

    def opened(self, transport: asyncio.Transport, peer: str) -> None:
        """Begin to send."""
        self._transport, self.peer = transport, peer
        transport.set_write_buffer_limits(OUT_BYTES_MAX)

    def allow_frames(self, size_bytes: int) -> None:
        """Send frames of DATA of this size from now on, or smaller ones; raise BrokenRule."""
        if not FRAME_BYTES_MAX <= size_bytes <= _FRAME_BYTES_LIMIT:
            raise BrokenRule(Fault.PROTOCOL_ERROR, f"frames of {size_bytes} bytes")
        self.frame_bytes = min(size_bytes, LARGE_FRAME_BYTES_MAX)

    def lost(self) -> None:
        """Send nothing more."""
        self._transport = None
        self._out.clear()

    @property
    def is_full(self) -> bool:
        """Return whether the socket takes no more for now."""
        return self._is_paused or self._out_bytes > OUT_BYTES_MAX

    def pause(self, is_paused: bool) -> None:
        """Stop or go on sending DATA: the client has many answers to take, or has taken them."""
        self._is_paused = is_paused
        if not is_paused:
            self.move(self.waiting)

    def write(self, data: Payload) -> None:
        """Send frames at the end of this turn of the loop, with all others that leave by then."""
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
        stream.send_window -= size_bytes
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
        self.send_window -= len(message) + PREFIX.size
        self.data_frames += 1
        self.write(answer(stream.number, message))
        self._ended(stream)

    def write_end(self, stream: Stream, block: bytes) -> None:
        """Send trailers, and forget the stream. A client that is not done with its side is told to stop."""
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.number, block))
        self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        if not stream.is_heard:
            self.write(rst_stream(stream.number, Fault.NO_ERROR))
        self.forget(stream.number)

    def reset(self, stream: Stream, fault: Fault) -> None:
        """End a stream whose client does not take what there is for it."""
        self.write(rst_stream(stream.number, fault))
        self.forget(stream.number)

    def forget(self, number: int) -> None:
        """Remove a stream that has ended."""
        self.open.pop(number, None)
        if self.waiting or self.blocked:
            self.waiting.pop(number, None)
            self.blocked.pop(number, None)

    def flush(self) -> None:
        """Hand the frames of this turn to the socket."""
        self._is_flushing = False
        if self._transport is not None and self._out:
            out = self._out
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        self._out.clear()
        self._out_bytes = 0
        if self.waiting and not self._is_paused:
            self.move(self.waiting)

    def move(self, streams: dict[int, Stream]) -> None:
        """Give each of these its turn; those that go on waiting stand behind the others afterwards."""
        for number in list(streams):
            stream = streams.pop(number, None)
            if stream is not None:
                stream.move()

    def end_all(self) -> None:
        """End the calls of all streams: their client takes no answers any more."""
        streams, self.open = self.open, {}
        self.waiting.clear()
        self.blocked.clear()
        for stream in streams.values():
            stream.gone()


class Stream:
    """One stream: its two windows, and what waits to leave. A call derives from it (exchange.py)."""

    __slots__ = (
        "_end",
        "_sent",
        "_unsent",
        "is_heard",
        "number",
        "receive_window",
        "send_window",
        "streams",
        "stuck_s",
        "task",
    )

    def __init__(self, streams: Streams, number: int, is_heard: bool) -> None:
        """`is_heard`: the client has ended its side."""
        self.streams, self.number, self.is_heard = streams, number, is_heard
        self.receive_window, self.send_window = WINDOW_BYTES, streams.first_window
        self._unsent = _NOTHING  # of DATA
        self._end = b""  # the block of trailers that waits behind it
        self._sent: asyncio.Future[None] | None = None
        self.stuck_s: float | None = None  # since when nothing of it leaves, once it has been seen to
        self.task: asyncio.Task[None] | None = None

    def received(self, payload: Payload) -> None:
        """Read on in what the client sends; called when it ends its side, too."""
        raise NotImplementedError

    def gone(self) -> None:
        """End the call: its client takes no answer any more."""
        raise NotImplementedError

    def check(self, now_s: float) -> None:
        """End the call when its client, or its deadline, has been waited for long enough."""
        raise NotImplementedError

    def allow(self, size_bytes: int) -> None:
        """Let the client send so much from now on, if it may not yet."""
        more_bytes = size_bytes - self.receive_window
        if more_bytes > 0:
            self.receive_window = size_bytes
            self.streams.write(window_update(self.number, more_bytes))

    def send(self, data: Payload) -> bool:
        """Send DATA; return False when it waits, or when others should have their turn: then await `sent`."""
        streams, size_bytes = self.streams, len(data)
        if not (self._unsent or streams.is_full) and size_bytes <= min(
            self.send_window, streams.send_window, streams.frame_bytes
        ):
            streams.write_data(self, data)
        elif size_bytes:
            if self._unsent is _NOTHING:
                self._unsent = deque()
            self._unsent.append(memoryview(data))  # cut without copies as it leaves
            self.move()
        return not (self._unsent or streams.is_full)

    def send_whole(self, message: bytes) -> bool:
        """Send the headers, the one message and the trailers of an answer; return False when they have to wait."""
        streams, size_bytes = self.streams, len(message) + PREFIX.size
        if streams.is_full or size_bytes > min(self.send_window, streams.send_window, streams.frame_bytes):
            return False
        streams.write_whole(self, message)
        return True

    def under_way(self) -> asyncio.Future[None] | None:
        """Return a future of the end of a call that has begun; None: it has not, or it is over."""
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
        """Forget the DATA that has not left."""
        self._unsent.clear()

    async def sent(self) -> None:
        """Return when all DATA of this stream has left and the socket takes more."""
        self._sent = asyncio.get_running_loop().create_future()
        if not self._unsent:
            self.streams.waiting[self.number] = self
        await self._sent

    def move(self) -> None:
        """Send what windows and socket let leave."""
        streams, unsent = self.streams, self._unsent
        while unsent:
            data = unsent[0]
            windows = min(self.send_window, streams.send_window, streams.frame_bytes)
            size_bytes = 0 if streams.is_full else min(len(data), windows)
            if size_bytes <= 0:
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
