"""FlightEdge: the broker's operations over Arrow Flight, on the HTTP/2 of http2/ and the broker's event loop.

    FlightEdge    the server, and the methods of Flight
    Reads         DoGet: the rows of a ticket, as fast as the client reads them

pyarrow's own server reads a request of any length into memory, decompresses it and resolves its dictionaries before it
checks the caller. This server first checks the caller, then the number of calls, then receives one message of limited
length, and then decodes it (decision 0050). codec.py reads Flight's few messages, and arrow_ipc.py the batches.

An action or a read is a task. If its client disconnects, a read ends, but an action goes on to its end, because it may
wait for a group commit for which other requests wait, too. A send stream has no task: it goes on when a batch or an
answer arrives (exchange.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from timeball.broker.service import Broker
from timeball.edges.flight import codec, verbs
from timeball.edges.flight.exchange import (
    BYTES_ALL_STREAMS_MAX,
    STOPPING,
    ColumnsOf,
    FlightCall,
    Releases,
    Sends,
    SourcedSends,
    Upload,
    UploadContext,
    framed,
    framed_in_two,
)
from timeball.edges.http2.connection import Bounds
from timeball.edges.http2.exchange import Call, CallLimits, Exchange, Method
from timeball.edges.http2.frames import Payload
from timeball.edges.http2.server import Server
from timeball.edges.http2.streams import Streams
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.arrow_ipc import ReleaseColumns, SendColumns, SourceColumns
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.io.security import OPEN, Security
from timeball.model import limits, wire
from timeball.model.access import Caller, Verb
from timeball.model.errors import NotFound, OverLimit, RequestError, Unavailable
from timeball.model.message import READ_SCHEMA
from timeball.model.wire import RELEASE_PATH, SEND_PATH, SOURCE_PATH

logger = logging.getLogger(__name__)

# ---- the server, and Flight's methods ------------------------------------------------------------------------

SERVICE = "/arrow.flight.protocol.FlightService/"
MESSAGE_BYTES_MAX = limits.BATCH_BYTES_MAX + 64 * 1024  # a batch and its header
RECEIVED_BYTES_MAX = 64 * 1024 * 1024  # for incomplete requests of actions and reads
FRAME_BYTES_MAX = 1024 * 1024  # of DATA: a batch arrives in a few frames
CALLS_MAX = 1_024  # actions, reads and long polls
STREAMS_MAX = 256  # each has a window and READ_AHEAD_BYTES
DRAIN_S = 5.0  # for the last answers of the streams when the broker stops

Handler = Callable[[FlightCall, bytes], Awaitable[None]]


class FlightEdge:
    """Builds the calls of this edge, and starts and stops the server. Belongs to the broker's event loop."""

    call = Call

    def __init__(self, broker: Broker, status: verbs.Status | None = None, security: Security = OPEN) -> None:
        """Build the edge, which does not listen yet.

        `status` answers the action `status`. By default it is the broker's own status, without figures of the process.
        `security`: the accounts and the TLS certificate.
        """
        self._broker, self._status = broker, status or broker.status
        self._security, self._clock = security, broker.clock.clock
        self._sends, self._source_sends, self._releases = (
            Sends(broker),
            SourcedSends(broker),
            Releases(broker),
        )
        self._budget = MemoryQuota(BYTES_ALL_STREAMS_MAX, MESSAGE_BYTES_MAX)
        self._reads = Reads(broker, self._check_open)
        self._calls = SharedLimit("calls", CALLS_MAX)
        self._send_streams = SharedLimit("send streams", STREAMS_MAX)
        self._decode_thread = ThreadPoolExecutor(1, "flight-decodes")
        self._uploads: set[Upload] = set()  # the open streams of batches
        self._context = UploadContext(
            self._choose_sink,
            broker.policy.allow,
            self._budget,
            self._decode_thread,
            self._send_streams,
            self._uploads,
        )
        self._is_closing = False
        self._handlers: dict[str, Handler] = {
            "DoAction": self._do_action,
            "DoGet": self._reads.answer,
            "ListActions": self._list_actions,
            "GetSchema": self._get_schema,
        }
        self.call_limits = CallLimits(
            MemoryQuota(RECEIVED_BYTES_MAX, MESSAGE_BYTES_MAX),
            MESSAGE_BYTES_MAX,
            # About as many as the other two limits admit. A call that waits for them only has its headers in memory.
            SharedLimit("calls and streams", 2 * (CALLS_MAX + STREAMS_MAX)),
        )
        self.methods = {f"{SERVICE}{name}": _method(name) for name in METHODS}
        self._server = Server(self, Bounds(FRAME_BYTES_MAX, ages=False, edge="flight"))
        self._watch_task: asyncio.Task[None] | None = None
        self.port = -1

    async def start(self) -> None:
        """Listen. Raises SetupError when the address cannot be used."""
        settings = self._broker.settings
        self.port = await self._server.start(settings.host, settings.port, self._security.tls, "--port")
        self._watch_task = asyncio.create_task(self._server.watch())

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return self._server.connections

    def open(
        self,
        method: Method | None,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Call,
        now_s: float,
    ) -> Exchange:
        """Create the exchange of a new call: an Upload for a stream of requests, otherwise a FlightCall."""
        shared = streams, number, is_half_closed, call, self.call_limits, self._serve, now_s
        if method is not None and method.takes_stream:
            return Upload(*shared, self._admit_sender, self._context)
        return FlightCall(*shared, self._admit, self._calls)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Identify the caller by the headers of a call. Raises Unauthorized."""
        return self._security.caller(headers, self._clock.wall_ms())

    async def close(self) -> None:
        """Refuse new calls, end reads, and answer received batches. Then stop the server.

        After DRAIN_S, streams with unanswered batches end without these answers.
        """
        if self._is_closing:
            return
        self._is_closing = True
        uploads = list(self._uploads)
        for upload in uploads:
            upload.stop()
        for call in self._server.open_streams():
            if isinstance(call, FlightCall) and call.task and not call.method.outlives_client:
                call.task.cancel()  # long polls, and reads of the log
        if uploads:
            await asyncio.wait(
                [asyncio.ensure_future(upload.window.emptied()) for upload in uploads], timeout=DRAIN_S
            )
        for upload in uploads:
            if upload.window and not upload.window.is_aborted:
                logger.warning("stream cut unanswered_batches=%d", len(upload.window))
        for upload in list(self._uploads):
            # Batches that arrive from now on are discarded. The error tells their clients to send them again.
            upload.fail_after_answers(Unavailable(STOPPING))
        await self._server.close()
        if self._watch_task is not None:
            self._watch_task.cancel()
        self._decode_thread.shutdown(wait=False)
        self._reads.close()

    # ---- Flight's methods -------------------------------------------------------------------------------

    async def _serve(self, call: Any, message: bytes) -> None:
        """Answer a call that is not a stream of batches. An error ends the call with its status."""
        try:
            await self._handlers.get(call.method.name, _refuse_method)(call, message)
            call.finish()
        except asyncio.CancelledError:
            call.refuse(Unavailable(STOPPING))  # has no effect if the client has disconnected
            raise
        except Exception as error:  # any error: the client waits for an answer
            call.refuse(error)

    async def _do_action(self, call: FlightCall, message: bytes) -> None:
        """Answer an action. The body of the request and the answer are JSON. Raises the errors of codec and broker."""
        verb, body = codec.parse_action(message)
        codec.check_size(f"the body of action {verb[:40]}", len(body), codec.body_bytes_max(verb))
        if verb in codec.LARGE_ADMIN_ACTIONS:  # checked before the body is decoded, and again by the broker
            self._broker.policy.allow(call.call.caller, Verb.ADMIN)
        request = codec.decode_action(verb, bytes(body))
        answer = await verbs.perform(self._broker, self._status, verb, request, call.call.caller)
        call.answer(codec.encode_result(codec.encode(answer)))

    async def _list_actions(self, call: FlightCall, message: bytes) -> None:
        """List the verbs of DoAction."""
        for verb, (_, _, text) in codec.ACTIONS.items():
            call.send_messages(framed(codec.encode_action_type(verb, text)))

    async def _get_schema(self, call: FlightCall, message: bytes) -> None:
        """Send message.READ_SCHEMA, which is the schema of every DoGet."""
        call.send_messages(framed(codec.encode_result(READ_SCHEMA.serialize().to_pybytes())))

    def _choose_sink(self, caller: Caller, path: list[bytes] | None) -> tuple[Sends | Releases, ColumnsOf]:
        """Choose where the batches of a DoExchange go, and the check of their columns, by the path of its descriptor.

        Raises NotFound for an unknown path, and Forbidden for a release without the permission.
        """
        if path == SEND_PATH:
            return self._sends, SendColumns
        if path == SOURCE_PATH:
            return self._source_sends, SourceColumns
        if path == RELEASE_PATH:
            # Checked here before a batch is received, and by `Broker.release` for each batch.
            self._broker.policy.allow(caller, Verb.ADMIN)
            return self._releases, ReleaseColumns
        raise NotFound("no such exchange; descriptor paths are ['send'], ['source'] and ['release']")

    # ---- admission --------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> Caller:
        """Identify the caller of a call. Raises Unauthorized, and Unavailable once the edge closes."""
        caller = self.caller(call.headers)
        self._check_open()
        return caller

    def _admit_sender(self, call: Call) -> Caller:
        """Identify the caller of a stream of batches. Raises Unauthorized, Unavailable, and Forbidden.

        Forbidden is for an account that may not send to any topic.
        """
        caller = self._admit(call)
        self._broker.policy.allow_somewhere(caller, Verb.SEND)
        return caller

    def _check_open(self) -> None:
        if self._is_closing:
            raise Unavailable(STOPPING)


METHODS = (
    "DoExchange", "DoAction", "DoGet", "ListActions", "GetSchema",
    "DoPut", "ListFlights", "GetFlightInfo", "PollFlightInfo", "Handshake",
)  # fmt: skip


def _method(name: str) -> Method:
    return Method(name, name == "DoExchange", True, bytes, bytes, outlives_client=name == "DoAction")


async def _refuse_method(call: FlightCall, message: bytes) -> None:
    raise RequestError("this method is not offered; use DoExchange, DoAction or DoGet")


# ---- DoGet: the rows of a ticket -----------------------------------------------------------------------------
# Rows come from the log, a queue, or a long poll. Rows that the client has not read yet count towards a limit for the
# answers of all calls. Threads read and encode the rows of the log, one batch at a time. A client that stops reading
# occupies one batch in memory and no thread.

ANSWER_PART_BYTES = 4 * 1024 * 1024  # the largest message of an answer; larger batches are split
# Rows in memory that clients have not read yet, of all calls. One address alone may have half of it.
ANSWERS_BYTES_MAX = 192 * 1024 * 1024
ANSWER_WAIT_S = 1.0  # the longest wait for capacity in the limit for answers, before OverLimit
LOG_THREADS = 16  # for reads of the log
SMALL_BYTES = 16 * 1024  # up to this size, a message is joined and sent in one frame
# Delay of the schema of a waiting read. If rows arrive earlier, they are sent together with it.
SCHEMA_DELAY_S = 0.02


class Reads:
    """Answers DoGet calls. `check_open` raises Unavailable once the edge closes."""

    def __init__(self, broker: Broker, check_open: Callable[[], None]) -> None:
        self._broker, self._check_open = broker, check_open
        self.answers = MemoryQuota(ANSWERS_BYTES_MAX, ANSWER_PART_BYTES)
        self._threads = ThreadPoolExecutor(LOG_THREADS, "flight-log")

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._threads.shutdown(wait=False)

    async def answer(self, call: FlightCall, message: bytes) -> None:
        """Send the rows that the ticket in `message` asks for. Raises the errors of the ticket and of the broker."""
        request = codec.decode_ticket(codec.parse_ticket(message))
        if isinstance(request, wire.ReadLog):
            await self._send_log(call, request)
            return
        schema = _DelayedSchema(call)
        if isinstance(request, wire.Pull) and request.wait_ms:
            schema.send_later()
        try:
            batch = await verbs.rows(self._broker, request, call.call.caller)
        finally:
            schema.cancel()
        await self._send(call, schema.unsent, batch)

    async def _send(self, call: FlightCall, head: bytes, rows: pa.RecordBatch) -> None:
        """Send a batch after the bytes `head`. A batch above ANSWER_PART_BYTES is split into several messages."""
        address, size_bytes = call.call.peer, _size_bytes(rows)
        await self._reserve(address, size_bytes)
        try:
            for segments in ipc.split_batch(rows, ANSWER_PART_BYTES):
                first, last = framed_in_two(*codec.encode_data(*segments))
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
                await self.answers.add_when_fits(address, size_bytes)
        except TimeoutError:
            raise OverLimit(
                f"{ANSWERS_BYTES_MAX} bytes of answers wait to be read by their clients; try again later"
            ) from None


class _DelayedSchema:
    """The message with the schema: sent together with the rows, or after SCHEMA_DELAY_S if the read waits for rows.

    It is not delayed longer, because a client with pyarrow can only cancel a read after it has the schema.
    """

    def __init__(self, call: FlightCall) -> None:
        self.unsent = _READ  # the message, or b"" after it was sent
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


def _size_bytes(rows: pa.RecordBatch) -> int:
    """Compute the size of a batch in its encoded form."""
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
    """Read the next batch, and encode its messages, each in two segments (`framed_in_two`). None after the last batch.

    Runs in a thread.
    """
    batch = next(rows, None)
    if batch is None:
        return None
    return [
        framed_in_two(*codec.encode_data(*segments)) for segments in ipc.split_batch(batch, ANSWER_PART_BYTES)
    ]


def schema_message(schema: pa.Schema) -> bytes:
    """Encode the message with the schema, which is the first of a stream."""
    return framed(*codec.encode_data(ipc.schema_header(schema)))


_READ = schema_message(READ_SCHEMA)
