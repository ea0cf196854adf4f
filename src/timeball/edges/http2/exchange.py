"""One gRPC call: its method and limits, and its exchange on an HTTP/2 stream, with exactly one status at its end.

    request     its memory is reserved in the edge's MemoryQuota as soon as its length is known. If the quota is used
                up, the request waits, and HTTP/2's flow control holds its client back. For a compressed request the
                maximum size is reserved until it is decompressed
    responses   one or more DATA frames each, which leave as far as the client's windows allow
    end         trailers with gRPC's status. It is `OK` unless the call fails

A call with one request starts when the request is complete. A call with a stream of requests starts with its headers.
To start a call means to run the edge's `serve`. If that returns a coroutine, the coroutine becomes the call's task.
Otherwise the edge answers the call later, without a task.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.access import ANONYMOUS, Caller

# ---- the exchange of requests and responses ------------------------------------------------------------------

SMALL_PART_BYTES = 1_024  # smaller payloads are joined to parts of up to twice this size
WAITING_MAX = 4_096  # calls that wait for memory. Each holds the bytes of its first window


# (call, request or stream of requests) -> the coroutine that answers the call, or None if it is answered without a task
Serve = Callable[["Exchange", Any], Coroutine[Any, Any, None] | None]


class Exchange(Stream):
    """A gRPC call. `serve` is run with its request, or with the stream of its requests.

    Incoming bytes wait in `_parts` until the next message is complete. For that message, `_message_bytes` is the size,
    `_asked_bytes` the memory that the call waits for, and `_reserved_bytes` the memory that it has reserved.
    """

    __slots__ = (
        "_account",
        "_asked_bytes",
        "_completion",
        "_compression",
        "_has_answered",
        "_has_begun",
        "_held_bytes",
        "_is_over",
        "_is_released",
        "_limits",
        "_message_bytes",
        "_parts",
        "_request",
        "_request_arrived",
        "_reserved_bytes",
        "_serve",
        "_since_s",
        "call",
        "deadline_s",
        "method",
    )

    # The time for a client to complete a request, from the headers or from the reservation of its memory.
    READ_S: float = 10.0
    # The time for a client to read a part of a response. None: without limit.
    TAKEN_S: float | None = 60.0

    def __init__(
        self,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Call,
        call_limits: CallLimits,
        serve: Serve,
        now_s: float,
    ) -> None:
        """Open a call at the loop's time `now_s`, and count it in `call_limits`. `is_half_closed`: see Stream."""
        super().__init__(streams, number, is_half_closed)
        self.call, self._limits, self._serve = call, call_limits, serve
        self.method: Method
        self._compression = call.headers.get("grpc-encoding", "identity")
        self._parts: list[Payload] = []  # bytes that have arrived and are not decoded yet
        self._held_bytes = 0  # the total size of `_parts`
        self._message_bytes = 0  # the size of the next message with its prefix. 0: its prefix has not arrived
        self._asked_bytes = self._reserved_bytes = 0
        self._request: Any = None  # in a stream of requests: the request that its handler has not finished
        self._request_arrived: asyncio.Future[None] | None = None  # `_requests` waits for it
        self._has_begun = self._has_answered = self._is_over = self._is_released = False
        self._completion: asyncio.Future[None] | None = None  # only of a call without a task
        self._account = ""  # the account that the call counts for, in addition to its address
        # The time since which the client owes the rest of a request (see READ_S). None: it owes nothing.
        self._since_s: float | None = now_s
        self.deadline_s = None if call.remaining_s is None else now_s + call.remaining_s
        # SharedLimit.take without an account, inlined because each call passes here.
        call_limits.calls.taken += 1
        call_limits.calls.by_address[call.peer] += 1

    def begin(self, method: Method) -> Exchange | None:
        """Set the method, and start a call with a stream of requests. Any other call starts with its complete request.

        Returns None if the call has failed.
        """
        self.method = method
        if method.takes_stream:
            self._start_stream()
        elif self.is_half_closed:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
        return None if self._is_over else self

    def _start_stream(self) -> None:
        """Start a call with a stream of requests, which has no deadline for its first request."""
        self._since_s = None
        self._start(self._requests())

    @property
    def is_over(self) -> bool:
        """Whether the call has its final status, or its client has abandoned it."""
        return self._is_over

    # -- requests --------------------------------------------------------------------------------------------

    def received(self, payload: Payload) -> None:
        """Keep the bytes of DATA, and read the requests that are complete.

        Bytes that follow the only request of a call are dropped.
        """
        if self._is_over or (self._has_begun and not self.method.takes_stream):
            return  # the call's only request is complete
        if not self._parts and self._try_single_frame(payload):
            return
        self._keep(payload)
        if self._request is None and not self._asked_bytes:
            self._read()

    def _keep(self, payload: Payload) -> None:
        """Add a payload to `_parts`. A small one joins the last part, because an object of its own takes 50 bytes more.

        These bytes would not count in the quota. A client may send a request in frames of one byte.
        """
        self._held_bytes += len(payload)
        if len(payload) < SMALL_PART_BYTES and self._parts:
            last = self._parts[-1]
            if len(last) < SMALL_PART_BYTES:
                joined = last if isinstance(last, bytearray) else bytearray(last)
                joined += payload
                self._parts[-1] = joined
                return
        self._parts.append(payload)

    def _try_single_frame(self, payload: Payload) -> bool:
        """Start the call if its request is exactly this DATA frame, the usual case.

        Returns False if the request must be read in parts, or must wait for memory.
        """
        size_bytes = len(payload) - PREFIX.size
        if size_bytes < 0 or self.method.takes_stream or size_bytes > self._limits.request_bytes_max:
            return False
        if PREFIX.unpack_from(payload) != (0, size_bytes):
            return False
        if not self._limits.received.add_if_fits(self.call.peer, size_bytes):
            return False
        self._reserved_bytes, self._since_s = size_bytes, None
        request = self._decode_request(False, [payload[PREFIX.size :]])
        if request is not None:
            self._start(request)
        return True

    def _read(self) -> None:
        """Decode the next message if it has arrived completely, and start the call or pass the request to its handler.

        Otherwise let the client send the missing bytes of the message. Fails the call if its client has ended its side
        within the message.
        """
        if not self._message_bytes and not self._read_prefix():
            return
        if self._held_bytes < self._message_bytes:
            if self.is_half_closed:
                self.fail(GrpcStatus.INTERNAL, "the call ends within a request")
            elif self._message_bytes > WINDOW_BYTES:
                self.allow(self._message_bytes - self._held_bytes)
            return
        self._since_s = None
        request = self._decode_request(*self._cut())
        if request is None:
            return
        if self.method.takes_stream:
            self._request = request
            self._wake()
        else:
            self._parts.clear()
            self._start(request)

    def _read_prefix(self) -> bool:
        """Read the next message's length and reserve memory for it. Returns False if it must wait or has failed."""
        if self._held_bytes < PREFIX.size:
            if self.is_half_closed:
                self._ended()
            return False
        if len(self._parts[0]) < PREFIX.size:
            self._parts = [b"".join(self._parts)]
        is_compressed, size_bytes = PREFIX.unpack_from(self._parts[0])
        bytes_max = self._limits.request_bytes_max
        if size_bytes > bytes_max:
            # Clients recognise this text, because gRPC's own servers send it.
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size_bytes} vs. {bytes_max})",
            )
            return False
        self._message_bytes = PREFIX.size + size_bytes
        return self._reserve(bytes_max if is_compressed else size_bytes)

    def _ended(self) -> None:
        """Handle the end of the client's side. The prefix of a further message has not arrived completely.

        In a stream of requests that ends between two messages, wake the handler. Otherwise fail the call.
        """
        if self._held_bytes or not self.method.takes_stream:
            self.fail(GrpcStatus.INVALID_ARGUMENT, "a call without a request")
        else:
            self._wake()

    def _reserve(self, size_bytes: int) -> bool:
        """Reserve memory for a request. Returns False if it must wait for memory, or if the call has failed.

        After a wait, `_on_granted` is called. The call fails if WAITING_MAX calls wait already.
        """
        received = self._limits.received
        if received.reserve(self.call.peer, size_bytes, self._on_granted):
            self._reserved_bytes = size_bytes
            if self._held_bytes < self._message_bytes:
                self._since_s = asyncio.get_running_loop().time()
            return True
        self._asked_bytes, self._since_s = size_bytes, None
        if received.waiting > WAITING_MAX:
            self.fail(
                GrpcStatus.RESOURCE_EXHAUSTED, f"{WAITING_MAX} requests wait for memory; send it again later"
            )
        return False

    def _on_granted(self) -> None:
        """Note that the memory that this call waited for is reserved, and read on."""
        self._reserved_bytes, self._asked_bytes = self._asked_bytes, 0
        self._since_s = (loop := asyncio.get_running_loop()).time()
        # Deferred to limit the depth of the stack: a call that is read may end, and so grant memory to the next call.
        loop.call_soon(self._read_granted)

    def _read_granted(self) -> None:
        """Read on after a grant, unless the call has ended or has got its request meanwhile."""
        has_request = self._request is not None or (self._has_begun and not self.method.takes_stream)
        if not (self._is_over or has_request or self._asked_bytes):
            self._read()

    def _cut(self) -> tuple[bool, list[Payload]]:
        """Remove the first message, which is complete, from `_parts`.

        Returns whether it is compressed, and its parts without the prefix.
        """
        parts, remaining_bytes = self._parts, self._message_bytes
        self._held_bytes -= remaining_bytes
        is_compressed = bool(parts[0][0])
        if len(parts[0]) == remaining_bytes:  # the usual case
            self._parts = parts[1:]
            return is_compressed, [parts[0][PREFIX.size :]]
        message: list[Payload] = []
        for index, part in enumerate(parts):
            if len(part) >= remaining_bytes:
                # A view instead of a copy, because one part may contain a thousand small messages.
                rest = memoryview(part)[remaining_bytes:]
                self._parts = [rest, *parts[index + 1 :]] if len(rest) else parts[index + 1 :]
                message.append(part[:remaining_bytes])
                break
            message.append(part)
            remaining_bytes -= len(part)
        message[0] = memoryview(message[0])[PREFIX.size :]
        return is_compressed, message

    def _decode_request(self, is_compressed: bool, parts: list[Payload]) -> Any:
        """Decompress and decode a request. Returns None if that was not possible and the call has failed."""
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        if is_compressed:
            decompressed = self._decompress(data)
            if decompressed is None:
                return None
            data = decompressed
            self._limits.received.remove(self.call.peer, self._reserved_bytes - len(data))
            self._reserved_bytes = len(data)
        try:
            return self.method.decode(data)
        except self.method.decode_errors:
            self.fail(GrpcStatus.INTERNAL, f"the message is no request of {self.method.name}")
            return None

    def _decompress(self, data: bytes) -> bytes | None:
        """Decompress a message. Returns None if that was not possible and the call has failed."""
        try:
            return decompress(data, self._compression, self._limits.request_bytes_max)
        except DecompressionError as error:
            self.fail(error.status, error.text)
            return None

    async def _requests(self) -> AsyncIterator[Any]:
        """Yield the requests of a stream. While the handler works on a request, no further request is decoded.

        Raises CancelledError if the next message is no request.
        """
        while True:
            if self._request is not None:
                yield self._request
                self._request = None
                self._free_memory()
                self._message_bytes = 0
                if self.receive_window < WINDOW_BYTES // 2:
                    self.allow(WINDOW_BYTES)
                self._read()
                if self._is_over:
                    # The next message is no request, so the call has failed. `_stop` has not cancelled its own task,
                    # which would wait for ever.
                    raise asyncio.CancelledError
            elif self.is_half_closed and not self._held_bytes:
                return
            else:
                self._request_arrived = asyncio.get_running_loop().create_future()
                await self._request_arrived

    def _wake(self) -> None:
        """Let `_requests` continue: a request has arrived, or the client has ended its side."""
        if self._request_arrived is not None and not self._request_arrived.done():
            self._request_arrived.set_result(None)

    def _start(self, request: Any) -> None:
        """Run `serve` with the request or the stream of requests, and its coroutine as a task."""
        self._has_begun = True
        coroutine = self._serve(self, request)
        if coroutine is not None:
            self.task = asyncio.get_running_loop().create_task(coroutine)

    def completion(self) -> asyncio.Future[None] | None:
        """Return a future that is done when the call ends, None if there is nothing to wait for."""
        if self.task is None and self._has_begun and not self._is_over:
            self._completion = self._completion or asyncio.get_running_loop().create_future()
        return self.task or self._completion

    # -- responses -------------------------------------------------------------------------------------------

    def respond(self, response: Any) -> bool:
        """Encode and send a response. If it returns False, await `sent` before the next response (see Stream.send)."""
        data = self.method.encode(response)
        return self.send_messages(PREFIX.pack(0, len(data)) + data)

    def send_messages(self, data: Payload) -> bool:
        """Send encoded responses, each with its prefix. Returns like `respond`.

        If the call has ended, nothing is sent.
        """
        if self._is_over:
            return True
        if not self._has_answered:
            self._has_answered = True
            self.streams.write(frame(HEADERS, END_HEADERS, self.number, RESPONSE))
        return self.send(data)

    def answer(self, message: bytes) -> None:
        """Send the encoded response of a call with one response, and end the call with status OK."""
        if not (self._has_answered or self._is_over) and self.try_send_answer(message):
            self._is_over = self._has_answered = True
            self.release()
        else:
            self.send_messages(PREFIX.pack(0, len(message)) + message)
            self.finish()

    def finish(self) -> None:
        """End the call with status OK after its responses. Does nothing if the call has ended."""
        if not self._is_over:
            self._is_over = True
            self.release()
            self.end(TRAILERS_OK if self._has_answered else RESPONSE + TRAILERS_OK)

    def fail(self, status: GrpcStatus, text: str, more: bytes = b"") -> None:
        """End the call with a gRPC status, and discard responses that have not left. `more`: further trailers, encoded.

        If the call already has its status, the stream is reset.
        """
        self.drop_unsent()
        if self._is_over:
            self.streams.reset(self, Fault.NO_ERROR)
            return
        self._is_over = True
        block = trailers(status, text) + more
        self.streams.write_trailers(self, block if self._has_answered else RESPONSE + block)
        self._stop()

    def abandon(self) -> None:
        """End the call without an answer, because its client has gone."""
        self._is_over = True
        self._stop()

    def check(self, now_s: float) -> None:
        """Fail the call if the client's deadline, READ_S or TAKEN_S has passed."""
        if self.deadline_s is not None and now_s > self.deadline_s:
            self.fail(GrpcStatus.DEADLINE_EXCEEDED, "the call's deadline has passed")
        elif self._since_s is not None and now_s - self._since_s > self.READ_S:
            self.fail(
                GrpcStatus.DEADLINE_EXCEEDED,
                f"the client did not send its request within {self.READ_S:.0f} s",
            )
        elif self.has_unsent and self.TAKEN_S is not None:
            if self.stalled_s is None:
                self.stalled_s = now_s
            elif now_s - self.stalled_s > self.TAKEN_S:
                self.fail(
                    GrpcStatus.DEADLINE_EXCEEDED,
                    f"the client did not take a response within {self.TAKEN_S:.0f} s",
                )

    # -- the end of the call ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Give back the call's memory and its slot in the limit of calls. A second time it does nothing."""
        if not self._is_released:
            self._is_released = True
            self._free_memory()
            self._limits.calls.give_back(self.call.peer, self._account)
            if self._completion is not None:
                self._completion.set_result(None)

    def _stop(self) -> None:
        """Release the call, and cancel its task unless the method `outlives_client`."""
        self._parts.clear()
        self.release()
        task = self.task
        if task is None or task.done() or self.method.outlives_client or task is asyncio.current_task():
            return
        task.cancel()

    def _free_memory(self) -> None:
        """Give back the memory of a request, and stop waiting for memory."""
        if self._asked_bytes:
            self._limits.received.withdraw(self.call.peer, self._on_granted)
        self._limits.received.remove(self.call.peer, self._reserved_bytes)
        self._asked_bytes = self._reserved_bytes = 0


# ---- decompression -------------------------------------------------------------------------------------------
# A message is decompressed as a whole, within the maximum size of a request. A message that cannot be decompressed
# breaks no rule of HTTP/2. So its call ends with a status that states the reason, and the connection continues.

# By grpc-encoding, the `wbits` argument of zlib: for a gzip stream, and for zlib's own format.
WBITS_BY_ENCODING = {"gzip": 31, "deflate": 15}


class DecompressionError(Exception):
    """The message cannot be decompressed. The call ends with this status."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def decompress(data: bytes, encoding: str, bytes_max: int) -> bytes:
    """Decompress a message with this grpc-encoding to at most `bytes_max`. Raises DecompressionError."""
    wbits = WBITS_BY_ENCODING.get(encoding)
    if wbits is None:
        known_encodings = ", ".join(WBITS_BY_ENCODING)
        raise DecompressionError(
            GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {encoding[:40]!r}: {known_encodings} or identity"
        )
    decompressor = zlib.decompressobj(wbits)
    try:
        result = decompressor.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise DecompressionError(
            GrpcStatus.INTERNAL, f"the request is not compressed with {encoding}: {error}"
        ) from error
    if len(result) > bytes_max:
        raise DecompressionError(
            GrpcStatus.RESOURCE_EXHAUSTED, f"the request decompresses to more than {bytes_max} bytes"
        )
    if not decompressor.eof:
        raise DecompressionError(GrpcStatus.INTERNAL, f"the request ends within its {encoding} stream")
    return result


# ---- method, call and limits: the parts that do not depend on HTTP/2 -----------------------------------------


class Method(NamedTuple):
    """A gRPC method of an edge.

    `takes_stream` and `gives_stream` state whether it is client streaming or server streaming. `decode` converts bytes
    to a request, and raises one of `decode_errors` for bytes that are no request. `encode` converts a response to
    bytes.
    """

    name: str
    takes_stream: bool
    gives_stream: bool
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    decode_errors: tuple[type[Exception], ...] = ()
    outlives_client: bool = False  # the handler continues after its client has disconnected


@dataclass(slots=True)
class Call:
    """The facts of a call for its handler: the headers, the client, and the client's deadline."""

    headers: Mapping[str, str]  # by lower-case name
    peer: str = ""  # the client's address without its port
    remaining_s: float | None = None  # from the begin of the call to the client's deadline, if it has one
    caller: Caller = ANONYMOUS  # the account, once it has been checked


@dataclass
class CallLimits:
    """The limits that all calls of one edge share, with their counters."""

    received: MemoryQuota  # the bytes of requests that have arrived, or are allowed to arrive
    request_bytes_max: int  # of one request, decompressed
    calls: SharedLimit  # the number of open calls
