"""DoGet: rows of the log, of a queue, of a long poll, or leased to a group. They are sent as fast as the client reads.

Rows that the client has not read yet count towards a limit for the answers of all calls. Threads read and encode the
rows of the log, one batch at a time. A client that stops reading occupies one batch in memory and no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from timeball.broker.filters.compiler import FilterCache
from timeball.edges.flight import codec, protobuf, verbs
from timeball.edges.flight.calls import FlightCall, framed, framed_in_two
from timeball.edges.http2.frames import Payload
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model import wire
from timeball.model.errors import OverLimit
from timeball.model.message import READ_SCHEMA

ANSWER_PART_BYTES = 4 * 1024 * 1024  # the largest message of an answer; larger batches are split
# read and not yet taken, of all calls; one address alone may hold half of it
ANSWERS_BYTES_MAX = 192 * 1024 * 1024
ANSWER_WAIT_S = 1.0  # the longest wait for capacity in the limit for answers, before OverLimit
LOG_THREADS = 16  # for reads of the log
SMALL_BYTES = 16 * 1024  # up to this size, a message is joined and sent in one frame
# for so long the schema of a waiting read is held back, so that it can be sent together with the rows
SCHEMA_DELAY_S = 0.02


class Reads:
    """Answers DoGet calls. `check_open` raises Unavailable once the edge closes."""

    def __init__(self, served: verbs.ServedBroker, check_open: Callable[[], None]) -> None:
        self._served, self._broker, self._check_open = served, served.broker, check_open
        self._filters = FilterCache()
        self.answers = MemoryQuota(ANSWERS_BYTES_MAX, ANSWER_PART_BYTES)
        self._threads = ThreadPoolExecutor(LOG_THREADS, "flight-log")

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._threads.shutdown(wait=False)

    async def answer(self, call: FlightCall, message: bytes) -> None:
        """Send the rows that the ticket in `message` asks for. Leased rows that could not be sent are given back."""
        request = codec.decode_ticket(protobuf.parse_ticket(message))
        caller = call.call.caller
        if isinstance(request, wire.ReadLog):
            await self._send_log(call, request)
        elif isinstance(request, wire.Receive):
            schema = _DelayedSchema(call, _RECEIVED)
            is_delivered = False
            try:
                leased = await verbs.receive(self._served, self._filters, request, caller, schema.send_later)
            finally:
                schema.cancel()
            try:
                await self._send(call, schema.unsent, leased.rows)
                is_delivered = not call.is_over
            finally:
                # If the client has disconnected, other members may receive the messages at once.
                if not is_delivered:
                    self._broker.consuming.not_seen(leased.receipts)
        else:
            schema = _DelayedSchema(call, _READ)
            if isinstance(request, wire.Pull) and request.wait_ms:
                schema.send_later()
            try:
                batch = await verbs.rows(self._broker, request, caller)
            finally:
                schema.cancel()
            await self._send(call, schema.unsent, batch)

    async def _send(self, call: FlightCall, head: bytes, rows: pa.RecordBatch | bytes) -> None:
        """Send a batch, or its encoded Arrow message, after the bytes `head`.

        A large batch is split into several messages.
        """
        address, size_bytes = call.call.peer, _size_bytes(rows)
        await self._reserve(address, size_bytes)
        try:
            is_encoded = isinstance(rows, bytes)
            for segments in [ipc.split_message(rows)] if is_encoded else ipc.parts(rows, ANSWER_PART_BYTES):
                first, last = framed_in_two(*protobuf.encode_data(*segments))
                await _send_message(call, head + first, last)
                head = b""
        finally:
            self.answers.remove(address, size_bytes)

    async def _send_log(self, call: FlightCall, request: wire.ReadLog) -> None:
        """Send rows of the log, one batch at a time, as fast as the client reads."""
        rows = self._broker.read_log(
            request.from_seq, request.to_seq, request.kinds, request.coalesce_rows, request.columns,
            call.call.caller, placed=request.placed,
        )  # fmt: skip
        schema = pa.schema([READ_SCHEMA.field(name) for name in request.columns or READ_SCHEMA.names])
        call.send_messages(schema_message(schema))
        loop, address = asyncio.get_running_loop(), call.call.peer
        while True:
            messages = await loop.run_in_executor(self._threads, _encode_next_batch, rows)
            if messages is None:
                return
            self._check_open()
            size_bytes = sum(len(first) + len(last) for first, last in messages)
            await self._reserve(address, size_bytes)
            try:
                for first, last in messages:
                    await _send_message(call, first, last)
            finally:
                self.answers.remove(address, size_bytes)
            del messages, last  # so that these bytes are freed while the next batch is read

    async def _reserve(self, address: str, size_bytes: int) -> None:
        """Reserve bytes in the limit for answers. Raises OverLimit if they do not fit within ANSWER_WAIT_S."""
        if self.answers.fits(address, size_bytes):
            self.answers.add(address, size_bytes)
            return
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                await self.answers.room(address, size_bytes)
        except TimeoutError:
            raise OverLimit(
                f"{ANSWERS_BYTES_MAX} bytes of answers wait to be read by their clients; try again later"
            ) from None


class _DelayedSchema:
    """The message with the schema. It is sent together with the rows, or earlier if the read waits for rows.

    It must not wait for the rows, because a client with pyarrow can only cancel a read after it has the schema.
    """

    def __init__(self, call: FlightCall, schema: bytes) -> None:
        self.unsent = schema  # the message, or b"" after it was sent
        self._call = call
        self._later: asyncio.TimerHandle | None = None

    def send_later(self) -> None:
        """Send the schema after SCHEMA_DELAY_S, unless the rows arrive earlier."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(SCHEMA_DELAY_S, self._send)

    def _send(self) -> None:
        self._call.send_messages(self.unsent)
        self.unsent = b""

    def cancel(self) -> None:
        """Cancel the delayed sending."""
        if self._later is not None:
            self._later.cancel()


def _size_bytes(rows: pa.RecordBatch | bytes) -> int:
    """Compute the size of a batch in its encoded form."""
    if isinstance(rows, bytes):
        return len(rows)
    # The sum of the buffers would be too large, because columns of the log share buffers of zeros.
    return int(pa.ipc.get_record_batch_size(rows))


async def _send_message(call: FlightCall, first: bytes, last: Payload) -> None:
    """Send a message in two segments, and wait while the client does not read. A large `last` is not copied."""
    if len(last) <= SMALL_BYTES:
        last = first + last
    else:
        call.send_messages(first)
    if not call.send_messages(last):
        await call.sent()


def _encode_next_batch(rows: Iterator[pa.RecordBatch]) -> list[tuple[bytes, Payload]] | None:
    """Read the next batch and encode its messages, each in two segments.

    None after the last batch. Runs in a thread.
    """
    batch = next(rows, None)
    if batch is None:
        return None
    return [
        framed_in_two(*protobuf.encode_data(*segments)) for segments in ipc.parts(batch, ANSWER_PART_BYTES)
    ]


def schema_message(schema: pa.Schema) -> bytes:
    """Encode the message with the schema, which is the first of a stream."""
    return framed(*protobuf.encode_data(ipc.schema_header(schema)))


_READ, _RECEIVED = schema_message(READ_SCHEMA), schema_message(wire.RECEIVED_SCHEMA)
