"""One call on its stream: incoming requests, outgoing responses, and exactly one status at its end.

    request     counts in the bytes of all requests from the moment its length is known (MemoryQuota). Without room it
                waits, and HTTP/2 holds its client back. A compressed request counts with the maximum size until it is
                unpacked
    responses   one or more DATA frames each, which leave as far as the client allows
    end         trailers with gRPC's status: `OK`, unless the edge ends with another or has not seen the call

A call with one request begins when the request is complete. A call with a stream of requests begins with its headers.
It runs as a task if its edge returns a coroutine.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from timeball.edges.http2.calls import Call, Method, Room
from timeball.edges.http2.frames import (
    END_HEADERS,
    HEADERS,
    PREFIX,
    RESPONSE,
    TRAILERS_OK,
    Fault,
    GrpcStatus,
    Payload,
    frame,
    trailers,
)
from timeball.edges.http2.streams import WINDOW_BYTES, Stream, Streams

WAITING_MAX = 4_096  # calls that wait for room. Each holds the bytes of its first window


Serve = Callable[["Exchange", Any], Coroutine[Any, Any, None] | None]  # None: answered later, without a task


class Exchange(Stream):
    """A gRPC call. `serve` is run with its request, or with the stream of requests."""

    __slots__ = (
        "_account",
        "_asked_bytes",
        "_awaited_bytes",
        "_counted_bytes",
        "_has_answered",
        "_has_begun",
        "_held_bytes",
        "_is_over",
        "_is_released",
        "_over",
        "_packing",
        "_parts",
        "_request",
        "_room",
        "_serve",
        "_since_s",
        "_wanted",
        "call",
        "deadline_s",
        "method",
    )

    READ_S: float = (
        10.0  # from the headers, or from the moment there is room for a request, until it is complete
    )
    TAKEN_S: float | None = 60.0  # for a client to read a part of a response; None: forever

    def __init__(
        self,
        streams: Streams,
        number: int,
        is_heard: bool,
        call: Call,
        room: Room,
        serve: Serve,
        now_s: float,
    ) -> None:
        super().__init__(streams, number, is_heard)
        self.call, self._room, self._serve = call, room, serve
        self.method: Method
        self._packing = call.headers.get("grpc-encoding", "identity")
        self._parts: list[Payload] = []
        self._held_bytes = 0
        self._awaited_bytes = 0  # of the begun message, with its prefix
        self._asked_bytes = self._counted_bytes = 0  # room that it waits for, or holds
        self._request: Any = None  # of a stream of requests: the one that its handler has not read
        self._wanted: asyncio.Future[None] | None = None
        self._has_begun = self._has_answered = self._is_over = self._is_released = False
        self._over: asyncio.Future[None] | None = None  # for `under_way`
        self._account = ""  # the account that the call counts for, in addition to its address
        self._since_s: float | None = now_s  # time from which its client is late with the rest of a request
        self.deadline_s = None if call.remaining_s is None else now_s + call.remaining_s
        room.calls.taken += 1
        room.calls.by_address[call.peer] += 1

    def begin(self, method: Method) -> Exchange | None:
        """Wait for the request, or begin with the stream of requests, or return None if the call has ended already."""
        self.method = method
        if method.takes_stream:
            self._begin_stream()
        elif self.is_heard:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
        return None if self._is_over else self

    def _begin_stream(self) -> None:
        self._since_s = None
        self._start(self._requests())

    @property
    def is_over(self) -> bool:
        """Return whether the call has its status, or its client has gone."""
        return self._is_over

    # -- requests --------------------------------------------------------------------------------------------

    def received(self, payload: Payload) -> None:
        """Handle DATA from the client. See Stream."""
        if self._is_over or (self._has_begun and not self.method.takes_stream):
            return  # the one request is complete
        if not self._parts and self._took_whole(payload):
            return
        self._parts.append(payload)
        self._held_bytes += len(payload)
        if self._request is None and not self._asked_bytes:
            self._read()

    def _took_whole(self, payload: Payload) -> bool:
        """Begin a call whose request is exactly one frame, as usual, or return False if it must be read in parts."""
        size_bytes = len(payload) - PREFIX.size
        if size_bytes < 0 or self.method.takes_stream or size_bytes > self._room.request_bytes_max:
            return False
        if PREFIX.unpack_from(payload) != (0, size_bytes):
            return False
        if not self._room.received.add_if_room(self.call.peer, size_bytes):
            return False
        self._counted_bytes, self._since_s = size_bytes, None
        request = self._decoded(False, [payload[PREFIX.size :]])
        if request is not None:
            self._start(request)
        return True

    def _read(self) -> None:
        """Read further in the bytes that have arrived."""
        if not self._awaited_bytes and not self._read_prefix():
            return
        if self._held_bytes < self._awaited_bytes:
            if self.is_heard:
                self.fail(GrpcStatus.INTERNAL, "the call ends within a request")
            elif self._awaited_bytes > WINDOW_BYTES:
                self.allow(self._awaited_bytes - self._held_bytes)
            return
        self._since_s = None
        request = self._decoded(*self._cut())
        if request is None:
            return
        if self.method.takes_stream:
            self._request = request
            self._wake()
        else:
            self._parts.clear()
            self._start(request)

    def _read_prefix(self) -> bool:
        """Read a message's length and reserve room for it, or return False if it must wait or is refused."""
        if self._held_bytes < PREFIX.size:
            if self.is_heard:
                self._ended()
            return False
        if len(self._parts[0]) < PREFIX.size:
            self._parts = [b"".join(self._parts)]
        is_packed, size_bytes = PREFIX.unpack_from(self._parts[0])
        bytes_max = self._room.request_bytes_max
        if size_bytes > bytes_max:
            # The text of gRPC's own servers, by which clients recognise it.
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size_bytes} vs. {bytes_max})",
            )
            return False
        self._awaited_bytes = PREFIX.size + size_bytes
        return self._reserve(bytes_max if is_packed else size_bytes)

    def _ended(self) -> None:
        """End the call, or wake its handler: the client has ended its side, and no message has begun."""
        if self._held_bytes or not self.method.takes_stream:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
        else:
            self._wake()

    def _reserve(self, size_bytes: int) -> bool:
        """Count a request, or return False if it must wait for room or is refused."""
        received = self._room.received
        if received.reserve(self.call.peer, size_bytes, self._granted):
            self._counted_bytes = size_bytes
            if self._held_bytes < self._awaited_bytes:
                self._since_s = asyncio.get_running_loop().time()
            return True
        self._asked_bytes, self._since_s = size_bytes, None
        if received.waiting > WAITING_MAX:
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED, f"{WAITING_MAX} requests wait for room; send it again later"
            )
        return False

    def _granted(self) -> None:
        self._counted_bytes, self._asked_bytes = self._asked_bytes, 0
        self._since_s = (loop := asyncio.get_running_loop()).time()
        # Deferred: this may run inside one of thousands of calls that each make room for the next.
        loop.call_soon(self._read_granted)

    def _read_granted(self) -> None:
        is_read = self._request is not None or (self._has_begun and not self.method.takes_stream)
        if not (self._is_over or is_read or self._asked_bytes):
            self._read()

    def _cut(self) -> tuple[bool, list[Payload]]:
        """Cut off the complete message, and return whether it is compressed, and its parts."""
        parts, left_bytes = self._parts, self._awaited_bytes
        self._held_bytes -= left_bytes
        is_packed = bool(parts[0][0])
        if len(parts[0]) == left_bytes:  # the usual case
            self._parts = parts[1:]
            return is_packed, [parts[0][PREFIX.size :]]
        message: list[Payload] = []
        for at, part in enumerate(parts):
            if len(part) >= left_bytes:
                # The rest is a view, because one part may contain a thousand small messages.
                rest = memoryview(part)[left_bytes:]
                self._parts = [rest, *parts[at + 1 :]] if len(rest) else parts[at + 1 :]
                message.append(part[:left_bytes])
                break
            message.append(part)
            left_bytes -= len(part)
        message[0] = memoryview(message[0])[PREFIX.size :]
        return is_packed, message

    def _decoded(self, is_packed: bool, parts: list[Payload]) -> Any:
        """Decode the request, or return None if the call was ended because of an error."""
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        if is_packed:
            unpacked = self._unpacked(data)
            if unpacked is None:
                return None
            data = unpacked
            self._room.received.remove(self.call.peer, self._counted_bytes - len(data))
            self._counted_bytes = len(data)
        try:
            return self.method.decode(data)
        except self.method.decode_errors:
            self.fail(GrpcStatus.INTERNAL, f"what was sent is no request of {self.method.name}")
            return None

    def _unpacked(self, data: bytes) -> bytes | None:
        """Unpack a message, or return None if the call was ended because of an error."""
        try:
            return unpack(data, self._packing, self._room.request_bytes_max)
        except Unpackable as error:
            self.fail(error.status, error.text)
            return None

    async def _requests(self) -> AsyncIterator[Any]:
        """Yield the requests of a stream. While one is handled, the next is not read, and its client is held back."""
        while True:
            if self._request is not None:
                yield self._request
                self._request = None
                self._give_back()
                self._awaited_bytes = 0
                if self.receive_window < WINDOW_BYTES // 2:
                    self.allow(WINDOW_BYTES)
                self._read()
            elif self.is_heard and not self._held_bytes:
                return
            else:
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _start(self, request: Any) -> None:
        self._has_begun = True
        serving = self._serve(self, request)
        if serving is not None:
            self.task = asyncio.get_running_loop().create_task(serving)

    def under_way(self) -> asyncio.Future[None] | None:
        """Return a future for the end of the call. See Stream."""
        if self.task is None and self._has_begun and not self._is_over:
            self._over = self._over or asyncio.get_running_loop().create_future()
        return self.task or self._over

    # -- responses -------------------------------------------------------------------------------------------

    def respond(self, response: Any) -> bool:
        """Send a response. If it waits or other streams should have a turn, return False: then await `sent`."""
        data = self.method.encode(response)
        return self.send_messages(PREFIX.pack(0, len(data)) + data)

    def send_messages(self, data: Payload) -> bool:
        """Send encoded responses, each with its prefix; return as `respond`. Send nothing if the client has gone."""
        if self._is_over:
            return True
        if not self._has_answered:
            self._has_answered = True
            self.streams.write(frame(HEADERS, END_HEADERS, self.number, RESPONSE))
        return self.send(data)

    def answer(self, message: bytes) -> None:
        """Send the encoded response of a call with one response, and end the call behind it."""
        if not (self._has_answered or self._is_over) and self.send_whole(message):
            self._is_over = self._has_answered = True
            self.release()
        else:
            self.send_messages(PREFIX.pack(0, len(message)) + message)
            self.finish()

    def finish(self) -> None:
        """End the call behind its responses."""
        if not self._is_over:
            self._is_over = True
            self.release()
            self.end(TRAILERS_OK if self._has_answered else RESPONSE + TRAILERS_OK)

    def fail(self, status: GrpcStatus, text: str, more: bytes = b"") -> None:
        """End the call with a gRPC status, even after it has begun to answer. `more`: further trailers."""
        self.drop_unsent()
        if self._is_over:
            self.streams.reset(self, Fault.NO_ERROR)
            return
        self._is_over = True
        block = trailers(status, text) + more
        self.streams.write_end(self, block if self._has_answered else RESPONSE + block)
        self._stop()

    def gone(self) -> None:
        """End the call without an answer. See Stream."""
        self._is_over = True
        self._stop()

    def check(self, now_s: float) -> None:
        """End the call if a deadline has passed. See Stream."""
        if self.deadline_s is not None and now_s > self.deadline_s:
            self.fail(GrpcStatus.DEADLINE_EXCEEDED, "the call's deadline has passed")
        elif self._since_s is not None and now_s - self._since_s > self.READ_S:
            self.fail(
                GrpcStatus.DEADLINE_EXCEEDED,
                f"the client did not send its request within {self.READ_S:.0f} s",
            )
        elif self.has_unsent and self.TAKEN_S is not None:
            if self.stuck_s is None:
                self.stuck_s = now_s
            elif now_s - self.stuck_s > self.TAKEN_S:
                self.fail(
                    GrpcStatus.DEADLINE_EXCEEDED,
                    f"the client did not take a response within {self.TAKEN_S:.0f} s",
                )

    # -- its end ---------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back the call's part of the shared bounds."""
        if not self._is_released:
            self._is_released = True
            self._give_back()
            self._room.calls.give_back(self.call.peer, self._account)
            if self._over is not None:
                self._over.set_result(None)

    def _stop(self) -> None:
        self._parts.clear()
        self.release()
        task = self.task
        if task is None or task.done() or self.method.outlives_client or task is asyncio.current_task():
            return
        task.cancel()

    def _give_back(self) -> None:
        """Give back the room of a request, or stop waiting for it."""
        if self._asked_bytes:
            self._room.received.withdraw(self.call.peer, self._granted)
        self._room.received.remove(self.call.peer, self._counted_bytes)
        self._asked_bytes = self._counted_bytes = 0


# Unpack gRPC's compressed messages, each as a whole and within the maximum size of a request.
#
# A message that cannot be unpacked breaks no rule of HTTP/2. Its call ends with a status that contains the reason.

# The `wbits` argument of zlib: for a gzip stream, and for zlib's own format.
PACKINGS = {"gzip": 31, "deflate": 15}


class Unpackable(Exception):
    """The message cannot be unpacked. The call ends with this status."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def unpack(data: bytes, packing: str, bytes_max: int) -> bytes:
    """Unpack a message that was compressed with `packing`. Raises Unpackable."""
    form = PACKINGS.get(packing)
    if form is None:
        known = ", ".join(PACKINGS)
        raise Unpackable(GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {packing[:40]!r}: {known} or identity")
    unpacking = zlib.decompressobj(form)
    try:
        found = unpacking.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise Unpackable(
            GrpcStatus.INTERNAL, f"the request is not compressed with {packing}: {error}"
        ) from error
    if len(found) > bytes_max:
        raise Unpackable(GrpcStatus.RESOURCE_EXHAUSTED, f"a request unpacks to more than {bytes_max} bytes")
    if not unpacking.eof:
        raise Unpackable(GrpcStatus.INTERNAL, f"the request ends within its {packing} stream")
    return found
