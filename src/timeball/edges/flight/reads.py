"""DoGet: rows of the log, of a queue, of a long poll, or leased to a group, sent in parts as the client takes them.

Rows that were read but not yet taken count towards a limit for the answers of all calls. Threads read and encode rows
of the log, one batch at a time. A client that pauses holds one batch and no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from timeball.broker.filters.compiler import FiltersKept
from timeball.edges.flight import codec, protobuf, verbs
from timeball.edges.flight.calls import FlightCall, framed, framed_apart
from timeball.edges.http2.frames import Payload
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model import wire
from timeball.model.errors import OverLimit
from timeball.model.message import READ_SCHEMA

ANSWER_PART_BYTES = 4 * 1024 * 1024  # the most of one message of an answer
ANSWERS_BYTES_MAX = (
    192 * 1024 * 1024
)  # read and not yet taken, of all calls; one address alone may hold half of it
ANSWER_WAIT_S = 1.0  # until OverLimit, for other answers to be taken
LOG_THREADS = 16  # for reads of the log
SMALL_BYTES = 16 * 1024  # up to this size, a message leaves in one frame
# the time for which the schema of a waiting read is held back, so that it can leave with the rows
HEAD_S = 0.02


class Reads:
    """Answers tickets. `check_open` raises Unavailable once the edge closes."""

    def __init__(self, served: verbs.Served, check_open: Callable[[], None]) -> None:
        self._served, self._broker, self._check_open = served, served.broker, check_open
        self._filters = FiltersKept()
        self.answers = MemoryQuota(ANSWERS_BYTES_MAX, ANSWER_PART_BYTES)
        self._threads = ThreadPoolExecutor(LOG_THREADS, "flight-log")

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._threads.shutdown(wait=False)

    async def answer(self, call: FlightCall, message: bytes) -> None:
        """Send the rows of a ticket."""
        request = codec.decode_ticket(protobuf.ticket(message))
        caller = call.call.caller
        if isinstance(request, wire.ReadLog):
            await self._send_log(call, request)
        elif isinstance(request, wire.Receive):
            head = _Head(call, _RECEIVED)
            is_sent = False
            try:
                handed_out = await verbs.receive(self._served, self._filters, request, caller, head.wait)
            finally:
                head.stop()
            try:
                await self._send(call, head.left, handed_out.rows)
                is_sent = not call.is_over
            finally:
                if not is_sent:  # the client has disconnected: other members may have the messages at once
                    self._broker.consuming.not_seen(handed_out.receipts)
        else:
            head = _Head(call, _READ)
            if isinstance(request, wire.Pull) and request.wait_ms:
                head.wait()
            try:
                batch = await verbs.rows(self._broker, request, caller)
            finally:
                head.stop()
            await self._send(call, head.left, batch)

    async def _send(self, call: FlightCall, head: bytes, rows: pa.RecordBatch | bytes) -> None:
        """Send a batch, or its encoded message, after `head`. A small one is sent together with `head`."""
        address, size_bytes = call.call.peer, _size_bytes(rows)
        await self._count(address, size_bytes)
        try:
            is_message = isinstance(rows, bytes)
            for part in [ipc.parts_of(rows)] if is_message else ipc.parts(rows, ANSWER_PART_BYTES):
                before, last = framed_apart(*protobuf.data_parts(*part))
                await _send_part(call, head + before, last)
                head = b""
        finally:
            self.answers.remove(address, size_bytes)

    async def _send_log(self, call: FlightCall, request: wire.ReadLog) -> None:
        rows = self._broker.read_log(
            request.from_seq, request.to_seq, request.kinds, request.coalesce_rows, request.columns,
            call.call.caller, placed=request.placed,
        )  # fmt: skip
        schema = pa.schema([READ_SCHEMA.field(name) for name in request.columns or READ_SCHEMA.names])
        call.send_messages(schema_message(schema))
        loop, address = asyncio.get_running_loop(), call.call.peer
        while True:
            parts = await loop.run_in_executor(self._threads, _next_parts, rows)
            if parts is None:
                return
            self._check_open()
            size_bytes = sum(len(before) + len(last) for before, last in parts)
            await self._count(address, size_bytes)
            try:
                for before, last in parts:
                    await _send_part(call, before, last)
            finally:
                self.answers.remove(address, size_bytes)
            del parts, last  # so that these bytes are freed while the next batch is read

    async def _count(self, address: str, size_bytes: int) -> None:
        """Count bytes towards the limit for answers. Raises OverLimit when they do not fit within ANSWER_WAIT_S."""
        if self.answers.fits(address, size_bytes):
            self.answers.add(address, size_bytes)
            return
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                await self.answers.room(address, size_bytes)
        except TimeoutError:
            raise OverLimit(
                f"{ANSWERS_BYTES_MAX} bytes of answers wait to be taken by those who asked; try again later"
            ) from None


class _Head:
    """The message with the schema. It is sent together with the rows, or earlier if the read waits for rows.

    A client of pyarrow can only cancel a read once it has the schema.
    """

    def __init__(self, call: FlightCall, schema: bytes) -> None:
        self.left = schema  # the message, or b"" once it was sent
        self._call = call
        self._later: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Send the schema after HEAD_S, because the read waits for rows."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(HEAD_S, self._send)

    def _send(self) -> None:
        self._call.send_messages(self.left)
        self.left = b""

    def stop(self) -> None:
        """Cancel the delayed sending."""
        if self._later is not None:
            self._later.cancel()


def _size_bytes(rows: pa.RecordBatch | bytes) -> int:
    if isinstance(rows, bytes):
        return len(rows)
    # The size of the buffers would be wrong, because columns of the log share their zeros.
    return int(pa.ipc.get_record_batch_size(rows))


async def _send_part(call: FlightCall, before: bytes, last: Payload) -> None:
    """Send a message that is in two parts: a small one joined, and a large one without copying it."""
    if len(last) <= SMALL_BYTES:
        last = before + last
    else:
        call.send_messages(before)
    if not call.send_messages(last):
        await call.sent()


def _next_parts(rows: Iterator[pa.RecordBatch]) -> list[tuple[bytes, Payload]] | None:
    """Encode the messages of the next batch, each in two parts. None after the last batch."""
    batch = next(rows, None)
    if batch is None:
        return None
    return [framed_apart(*protobuf.data_parts(*part)) for part in ipc.parts(batch, ANSWER_PART_BYTES)]


def schema_message(schema: pa.Schema) -> bytes:
    """Encode the message that begins a stream of this schema."""
    return framed(*protobuf.data_parts(ipc.schema_header(schema)))


_READ, _RECEIVED = schema_message(READ_SCHEMA), schema_message(wire.RECEIVED_SCHEMA)
