"""One call on its stream: requests as they come in, responses as they leave, and exactly one status at its end.

    request     counts in the bytes of all requests from the moment its length is known (ByteShares). Without room it
                waits, and HTTP/2 holds its client back; a compressed one counts as the largest until it is unpacked
    responses   each is a DATA frame or some, which leave as far as the client lets them
    end         trailers with gRPC's status. A handler's errors are statuses within the responses, so another one than
                OK is of what no handler has seen: a call that is none, too large, or too slow

A call of one request begins when that has come whole, Telemetry with its headers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from google.protobuf.message import DecodeError, Message

from timeball import limits
from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.grpc.calls import Call
from timeball.protocols.grpc.codec.frames import (
    END_HEADERS,
    HEADERS,
    PREFIX,
    RESPONSE,
    TRAILERS_OK,
    Fault,
    frame,
    trailers,
)
from timeball.protocols.grpc.dispatch import Method
from timeball.protocols.grpc.streams import WINDOW_BYTES, Stream, Streams

REQUEST_BYTES_MAX = limits.BODY_BYTES_MAX + 64 * 1024
RECEIVED_BYTES_MAX = (
    64 * 1024 * 1024
)  # of requests on their way: each byte is eight of them on its way to the log
WAITING_MAX = 4_096  # calls without room; each holds what its first window has brought
CALLS_MAX = limits.PULLS_WAITING_MAX + 4_096
READ_S = 10.0  # from the headers, or from the moment there is room for a request, until it has come whole
TAKEN_S = 60.0  # for a client to take a part of a response
# zlib's word for the form: a gzip stream, or its own.
PACKINGS = {"gzip": 31, "deflate": 15}


class GrpcStatus(IntEnum):
    """gRPC's statuses, as far as they are sent."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


@dataclass
class Room:
    """What all calls of the edge share."""

    received: ByteShares
    calls: int = 0


Serve = Callable[["Exchange", Any], Coroutine[Any, Any, None]]


class Exchange(Stream):
    """A call of gRPC. `serve` is run with its request, or with the stream of them."""

    __slots__ = (
        "_asked_bytes",
        "_awaited_bytes",
        "_counted_bytes",
        "_has_answered",
        "_held_bytes",
        "_is_over",
        "_is_released",
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
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._awaited_bytes = 0  # of the message that has begun, with its prefix
        self._asked_bytes = self._counted_bytes = 0  # room that is waited for, or held
        self._request: Message | None = None  # of a stream of them: the one that its handler has not read
        self._wanted: asyncio.Future[None] | None = None
        self._has_answered = self._is_over = self._is_released = False
        self._since_s: float | None = now_s  # since when its client owes the rest of a request
        self.deadline_s = None if call.remaining_s is None else now_s + call.remaining_s
        room.calls += 1

    def begin(self, method: Method) -> Exchange | None:
        """Await the request, or begin with the stream of them; return None when the call has ended already."""
        self.method = method
        if method.takes_stream:
            self._since_s = None
            self._start(self._requests())
        elif self.is_heard:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
        return None if self._is_over else self

    # -- requests --------------------------------------------------------------------------------------------

    def received(self, payload: bytes) -> None:
        """See Stream."""
        if self._is_over or (self.task is not None and not self.method.takes_stream):
            return  # there is one request, and it has come
        self._parts.append(payload)
        self._held_bytes += len(payload)
        if self._request is None and not self._asked_bytes:
            self._read()

    def _read(self) -> None:
        """Read on in what has come."""
        if not self._awaited_bytes and not self._read_prefix():
            return
        if self._held_bytes < self._awaited_bytes:
            if self.is_heard:
                self.fail(GrpcStatus.INTERNAL, "the call ends within a request")
            elif self._awaited_bytes > WINDOW_BYTES:
                self.allow(self._awaited_bytes - self._held_bytes)
            return
        data = b"".join(self._parts)
        end, self._since_s = self._awaited_bytes, None
        self._parts, self._held_bytes = [data[end:]], len(data) - end
        request = self._decoded(data[PREFIX.size : end], is_packed=bool(data[0]))
        if request is None:
            return
        if self.method.takes_stream:
            self._request = request
            self._wake()
        else:
            self._parts.clear()
            self._start(request)

    def _read_prefix(self) -> bool:
        """Read a message's length and have room for it; false when it has to be waited for, or is refused."""
        if self._held_bytes < PREFIX.size:
            if self.is_heard and (self._held_bytes or not self.method.takes_stream):
                self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
            elif self.is_heard:
                self._wake()
            return False
        if len(self._parts[0]) < PREFIX.size:
            self._parts = [b"".join(self._parts)]
        is_packed, size_bytes = PREFIX.unpack_from(self._parts[0])
        if size_bytes > REQUEST_BYTES_MAX:
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED, f"a request of {size_bytes} bytes, at most {REQUEST_BYTES_MAX}"
            )
            return False
        self._awaited_bytes = PREFIX.size + size_bytes
        asked_bytes = REQUEST_BYTES_MAX if is_packed else size_bytes
        received = self._room.received
        if received.reserve(self.call.peer, asked_bytes, self._granted):
            self._counted_bytes = asked_bytes
            self._since_s = asyncio.get_running_loop().time()
            return True
        self._asked_bytes, self._since_s = asked_bytes, None
        if received.waiting > WAITING_MAX:
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED, f"{WAITING_MAX} requests wait for room; send it again later"
            )
        return False

    def _granted(self) -> None:
        self._counted_bytes, self._asked_bytes = self._asked_bytes, 0
        self._since_s = asyncio.get_running_loop().time()
        self._read()

    def _decoded(self, data: bytes, *, is_packed: bool) -> Message | None:
        """The request; None when the call has been ended for it."""
        if is_packed:
            unpacked = self._unpacked(data)
            if unpacked is None:
                return None
            data = unpacked
            self._room.received.remove(self.call.peer, self._counted_bytes - len(data))
            self._counted_bytes = len(data)
        try:
            return self.method.request.FromString(data)
        except DecodeError:
            self.fail(GrpcStatus.INTERNAL, f"what was sent is no {self.method.request.__name__}")
            return None

    def _unpacked(self, data: bytes) -> bytes | None:
        form = PACKINGS.get(self._packing)
        if form is None:
            known = ", ".join(PACKINGS)
            self.fail(GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {self._packing[:40]!r}: {known} or identity")
            return None
        unpacking = zlib.decompressobj(form)
        try:
            found = unpacking.decompress(data, REQUEST_BYTES_MAX + 1)
        except zlib.error as error:
            self.fail(GrpcStatus.INTERNAL, f"the request is not compressed with {self._packing}: {error}")
            return None
        if len(found) > REQUEST_BYTES_MAX:
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED, f"a request unpacks to more than {REQUEST_BYTES_MAX} bytes"
            )
        elif not unpacking.eof:
            self.fail(GrpcStatus.INTERNAL, f"the request ends within its {self._packing} stream")
        else:
            return found
        return None

    async def _requests(self) -> AsyncIterator[Any]:
        """The requests of a stream: while one is handled the next is not read, and its client is held back."""
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
        self.task = asyncio.get_running_loop().create_task(self._serve(self, request))

    # -- responses -------------------------------------------------------------------------------------------

    def respond(self, response: Message) -> bool:
        """Send a response; false when it waits, or when others should have their turn: then await `sent`."""
        if not self._has_answered:
            self._has_answered = True
            self.streams.write(frame(HEADERS, END_HEADERS, self.number, RESPONSE))
        data: bytes = response.SerializeToString()
        return self.send(PREFIX.pack(0, len(data)) + data)

    def finish(self) -> None:
        """End the call behind its responses."""
        if not self._is_over:
            self._is_over = True
            self.release()
            self.end(TRAILERS_OK if self._has_answered else RESPONSE + TRAILERS_OK)

    def fail(self, status: GrpcStatus, text: str) -> None:
        """End the call with a status of gRPC's, also one that has begun to answer."""
        self.drop_unsent()
        if self._is_over:
            self.streams.reset(self, Fault.NO_ERROR)
            return
        self._is_over = True
        block = trailers(status, text)
        self.streams.write_end(self, block if self._has_answered else RESPONSE + block)
        self._stop()

    def gone(self) -> None:
        """See Stream."""
        self._is_over = True
        self._stop()

    def check(self, now_s: float) -> None:
        """See Stream."""
        if self.deadline_s is not None and now_s > self.deadline_s:
            self.fail(GrpcStatus.DEADLINE_EXCEEDED, "the call's deadline has passed")
        elif self._since_s is not None and now_s - self._since_s > READ_S:
            self.fail(
                GrpcStatus.DEADLINE_EXCEEDED, f"the client did not send its request within {READ_S:.0f} s"
            )
        elif self.has_unsent:
            if self.stuck_s is None:
                self.stuck_s = now_s
            elif now_s - self.stuck_s > TAKEN_S:
                self.fail(
                    GrpcStatus.DEADLINE_EXCEEDED, f"the client did not take a response within {TAKEN_S:.0f} s"
                )

    # -- its end ---------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back what the call holds of what all share."""
        if not self._is_released:
            self._is_released = True
            self._room.calls -= 1
            self._give_back()

    def _stop(self) -> None:
        self._parts.clear()
        self.release()
        task = self.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()

    def _give_back(self) -> None:
        """Give back the room of a request, or wait for it no longer."""
        if self._asked_bytes:
            self._room.received.withdraw(self.call.peer, self._granted)
        self._room.received.remove(self.call.peer, self._counted_bytes)
        self._asked_bytes = self._counted_bytes = 0
