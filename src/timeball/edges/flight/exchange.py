"""Calls of Flight, the streams of batches (DoExchange), and the window of their unanswered batches.

    FlightCall                        one call: its caller, its slot in the limit, its status
    Sends, SourcedSends, Releases     pass the batches of a stream to the broker, and its answers back (sinks)
    Upload                            one stream of batches
    Window                            the unanswered batches of one stream, in order

Batches are read without waiting for their answers, and answered in their order:

    DATA        message -> decode and check -> Window.enter -> sink (Sends, SourcedSends or Releases)
    broker      sink -> Slot.settle
    answers     Window.pop_answer -> acknowledgements, as far as the client reads them

The stream reads on while its batches wait for the disk, so that one group commit can contain many batches of a stream.
A refused batch is answered, and the stream continues. If the client disconnects, the broker still decides about the
batches that it has received. Nothing is cancelled, because a group commit contains batches of other streams, too.

A stream has in memory one message, which is being received or waits for the window, and READ_AHEAD_BYTES after it. A
message that has arrived in part counts towards the bytes of all requests, and must be complete within READ_S. After
IDLE_S without activity, a stream is ended if another stream needs its slot. A single thread decodes large messages, one
after the other, while the event loop continues. So the memory for decoding is needed once, and not once per stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.service import Broker
from timeball.edges.flight import codec
from timeball.edges.flight.codec import Data
from timeball.edges.http2.exchange import Call, CallLimits, Exchange, Method, Serve
from timeball.edges.http2.frames import PREFIX, RESPONSE, GrpcStatus, Payload, trailers
from timeball.edges.http2.streams import Streams
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.arrow_ipc import Allow, ReleaseColumns, SendColumns, size_of
from timeball.edges.shared.error_codes import log_failure
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model import answers
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import InvalidMessage, OverLimit, RequestError, TimeballError, Unavailable
from timeball.model.wire import END_OF_STREAM

logger = logging.getLogger(__name__)

# ---- one call ------------------------------------------------------------------------------------------------
# The headers identify the caller, then the call takes a slot, and then its message is received. A call that fails ends
# as with Arrow's own server: with the status UNKNOWN, and trailers with Timeball's error code and text.

# Identifies the caller of a call, or raises the TimeballError with which the call is refused.
Admit = Callable[[Call], Caller]


class FlightCall(Exchange):
    """A call that counts towards the limit of its edge. `admit` identifies the caller."""

    __slots__ = ("_admit", "_holds_slot", "_limit")

    READ_S = 20.0  # enough for 4 MiB over a slow line
    TAKEN_S = None  # no limit: a client that reads a log may pause. Pings detect that its machine is gone

    def __init__(
        self, streams: Streams, number: int, is_half_closed: bool, call: Call, call_limits: CallLimits, serve: Serve,
        now_s: float, admit: Admit, limit: SharedLimit,
    ) -> None:  # fmt: skip
        super().__init__(streams, number, is_half_closed, call, call_limits, serve, now_s)
        self._admit, self._limit, self._holds_slot = admit, limit, False

    def begin(self, method: Method) -> Exchange | None:
        """Admit the call, take its slot and start it as an Exchange does. Return None if the call is refused."""
        self.method = method
        try:
            self.call.caller = self._admit(self.call)
            self._take_slot()
        except TimeballError as error:
            self.refuse(error)
            return None
        self._holds_slot = True
        return super().begin(method)

    def _take_slot(self) -> None:
        """Take a slot in the limit. Raises OverLimit if no slot is free."""
        self._limit.admit(self.call.peer, self.call.caller.name)

    def refuse(self, error: BaseException) -> None:
        """End the call with an error. Answers that were sent before it still arrive."""
        if self._is_over:
            return
        log_failure(logger, self.method.name, error)
        self._is_over = True
        block = trailers(GrpcStatus.UNKNOWN, codec.status_text(error)) + codec.error_trailers(error)
        self.end(block if self._has_answered else RESPONSE + block)
        self._stop()

    def release(self) -> None:
        """Give back the slot in `limit`, once, and the memory and the slot that every Exchange holds."""
        if self._holds_slot:
            self._holds_slot = False
            self._limit.give_back(self.call.peer, self.call.caller.name)
        super().release()


def framed(*segments: Payload) -> bytes:
    """Join segments to a message, after gRPC's prefix of five bytes. The segments are copied once."""
    return b"".join((PREFIX.pack(0, sum(map(len, segments))), *segments))


def framed_in_two(*segments: Payload) -> tuple[bytes, Payload]:
    """Build a message as `framed` does, but return its last segment separately, so that a large one is not copied."""
    *head_segments, last = segments
    return b"".join((PREFIX.pack(0, sum(map(len, segments))), *head_segments)), last


# ---- sinks: from a stream to the broker, and back ------------------------------------------------------------
# broker/accepting/ingress.py joins small neighbouring batches of one schema. The batches of a release stream contain
# rows of the pending table's files, sent by a dispatcher. The broker decides about them in the order in which they
# arrive.
#
# Invariant: every slot is settled once, even if the broker fails.


STOPPING = "the broker is stopping; send this batch again later or elsewhere"


class _Piece(Piece, gc=False):
    slot: Any  # the Slot that is settled with the answer


class Sends:
    """Passes the batches of send streams to the broker. An Edge of accepting/ingress.py. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass a batch with the types of SEND_SCHEMA to the broker. The slot is settled later, also for an invalid key.

        `key` is the JSON of wire.SendKey, or "" for a batch without an idempotency key.
        """
        piece = _Piece(self, batch, batch.num_rows, slot.size_bytes, 0, caller, slot)
        try:
            if key:
                send_key = codec.decode_send_key(key)
                anew = send_key.if_settled == "send"
                self._broker.keyed_sends.put(piece, send_key.idempotency_key, send_key.attempt, anew=anew)
            else:
                self._broker.sends.put(piece)
        except Exception as error:  # any error: the client waits for an answer to each batch
            self.refuse([piece], error)

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Settle the slots of batches that the broker has accepted."""
        for piece in pieces:
            first_seq = accepted.first_seq + piece.first_row
            outcome = () if accepted.sent is None else (accepted.sent.outcome, accepted.sent.states)
            ack = answers.SendAck(first_seq, piece.count, accepted.store_ms, *outcome)
            piece.slot.settle(codec.encode(ack))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Settle the slots of batches that were refused."""
        for piece in pieces:
            piece.slot.settle(refusal_answer(error))


class SourcedSends(Sends):
    """Passes on the batches of source streams.

    The metadata of each batch has the source's positions before and after it.
    """

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass a batch to the broker. The slot is settled later. `key` is the JSON of wire.SourceStep."""
        piece = _Piece(self, batch, batch.num_rows, slot.size_bytes, 0, caller, slot)
        try:
            self._broker.sourced_sends.put(piece, codec.decode_source_step(key))
        except Exception as error:  # any error: the client waits for an answer to each batch
            self.refuse([piece], error)


class Releases:
    """Passes the batches of release streams to the broker. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tasks: set[asyncio.Task[bytes]] = set()

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass on a batch. `key` is ignored: a release names its scheduled messages, so repeating it is safe."""
        task = asyncio.get_running_loop().create_task(self._release(batch, caller))
        self._tasks.add(task)  # the loop itself only has a weak reference to the task
        task.add_done_callback(partial(self._answer, slot))

    async def _release(self, batch: pa.RecordBatch, caller: Caller) -> bytes:
        """Release the messages of a batch, and encode the answer."""
        result = await self._broker.release(batch, caller)
        return codec.encode(answers.ReleaseAck(result.released, result.left))

    def _answer(self, slot: Slot, task: asyncio.Task[bytes]) -> None:
        """Settle the slot of a batch with the result of its release."""
        self._tasks.discard(task)
        error = Unavailable(STOPPING) if task.cancelled() else task.exception()
        slot.settle(task.result() if error is None else refusal_answer(error))


def refusal_answer(error: BaseException) -> bytes:
    """Log an error, and encode it as the answer to a refused batch.

    The text of an internal fault is only in the log.
    """
    log_failure(logger, "send", error)
    return codec.encode_refusal(error)


# ---- one stream of batches -----------------------------------------------------------------------------------

READ_AHEAD_BYTES = 1024 * 1024  # bytes that a client may send after the message being received
# Up to this size the event loop decodes a message itself: in some 30 us, as long as a switch to a thread takes.
INLINE_DECODE_BYTES_MAX = 256 * 1024

# Time without a batch or an answer, after which a stream may be ended in favour of another stream.
IDLE_S = 60.0
IDLE_TEXT = "this stream was idle, and another stream needed its slot; open a new one"
MESSAGES_PER_TURN = 64  # of one stream in a turn of the event loop (about 2 ms), then other tasks run

ColumnsOf = Callable[[pa.Schema], SendColumns | ReleaseColumns]
# Chooses by the caller, and by the path of the descriptor (None without one). Raises TimeballError.
ChooseSink = Callable[[Caller, list[bytes] | None], tuple[Sends | Releases, ColumnsOf]]


class UploadContext(NamedTuple):
    """The objects of the edge that all its streams share."""

    choose_sink: ChooseSink  # chooses where the batches go, and the check of their schema
    allow: Allow  # checks the permissions of a caller
    budget: MemoryQuota  # limits the unanswered bytes of all streams
    decoding: Executor  # the thread that decodes large messages
    limit: SharedLimit  # limits the number of streams
    streams: set[Upload]  # the open streams


class _DecodedBatch(NamedTuple):
    """A checked batch, or the encoded answer to a batch that is refused."""

    batch: pa.RecordBatch | bytes
    size_bytes: int  # 0 for a refused batch
    key: str  # the metadata of the batch, "" for none


class Upload(FlightCall):
    """One stream of batches, and the window of its unanswered batches."""

    __slots__ = (
        "_columns", "_columns_of", "_context", "_final_error", "_is_decoding", "_is_next_turn_scheduled",
        "_is_stopping", "_last_active_s", "_schema", "_sink", "_waiting_batch", "window",
    )  # fmt: skip

    def __init__(
        self, streams: Streams, number: int, is_half_closed: bool, call: Call, call_limits: CallLimits, serve: Serve,
        now_s: float, admit: Admit, context: UploadContext,
    ) -> None:  # fmt: skip
        super().__init__(
            streams, number, is_half_closed, call, call_limits, serve, now_s, admit, context.limit
        )
        self._context = context
        self._last_active_s = now_s
        self.window = Window(context.budget, call.peer, self._resume, self._send_answers)
        # Where the batches go. Chosen by the descriptor in the first message.
        self._sink: Sends | Releases | None = None
        self._columns_of: ColumnsOf
        self._schema: pa.Schema | None = None  # None until the schema's message has arrived
        self._columns: SendColumns | ReleaseColumns
        self._waiting_batch: _DecodedBatch | None = None  # the batch that waits for capacity in the window
        self._is_decoding = self._is_stopping = self._is_next_turn_scheduled = False
        self._final_error: BaseException | None = None  # the error that ends the stream after its last answer

    def _take_slot(self) -> None:
        """Take a slot in the limit.

        If no slot is free, end the stream that has been idle for longest and take its slot. Raises OverLimit if no
        stream may be ended.
        """
        try:
            super()._take_slot()
        except OverLimit:
            idle_uploads = [upload for upload in self._context.streams if upload.is_evictable_for(self)]
            if not idle_uploads:
                raise
            min(idle_uploads, key=lambda upload: upload._last_active_s).fail_after_answers(
                Unavailable(IDLE_TEXT)
            )
            super()._take_slot()

    def is_evictable_for(self, other: Upload) -> bool:
        """Check whether this stream is idle, and may be ended in favour of another stream.

        It may be ended if both streams have the same address or account, or if all slots are taken.
        """
        if self.window or self._waiting_batch or self._is_decoding or self._held_bytes or self.has_unsent:
            return False
        calls = (self.call, other.call)
        own_peers, other_peers = ({call.peer, call.caller.name} - {""} for call in calls)
        is_full = self._limit.taken >= self._limit.limit
        return other._last_active_s - self._last_active_s > IDLE_S and bool(
            is_full or own_peers & other_peers
        )

    def stop(self) -> None:
        """Refuse further batches. Earlier batches are still answered."""
        self._is_stopping = True

    # -- batches from the client -----------------------------------------------------------------------------

    def received(self, payload: Payload) -> None:
        """Keep the bytes of DATA from the client, and handle the messages that are complete.

        Bytes that arrive after the end of the stream are dropped.
        """
        if self._is_over or self.window.is_finished:
            return
        self._keep(payload)
        self._last_active_s = asyncio.get_running_loop().time()
        self._read()

    def _start_stream(self) -> None:
        """Register the stream, and begin to read its messages."""
        self._context.streams.add(self)
        self._read()  # the first message must be complete within READ_S, like a request

    def _read(self) -> None:
        """Handle the received messages one by one, until the stream must pause or more bytes are needed.

        Then allow the client to send more. After MESSAGES_PER_TURN messages, go on in the next turn of the loop. An
        error ends the stream after the answers to its earlier batches.
        """
        if self._is_next_turn_scheduled:
            return
        try:
            for _ in range(MESSAGES_PER_TURN):
                if self._is_reading_paused:
                    break
                if not self._message_bytes and not self._read_prefix():
                    break
                if self._held_bytes < self._message_bytes:
                    if self.is_half_closed:
                        raise InvalidMessage("the stream ends within a message")
                    break
                self._handle_message(*self._cut())
            else:
                self._is_next_turn_scheduled = True
                asyncio.get_running_loop().call_soon(self._next_turn)
                return
        except Exception as error:  # any error: after an internal fault, too, the client waits for the end
            self.fail_after_answers(error)
            return
        wanted_bytes = READ_AHEAD_BYTES + max(0, self._message_bytes - self._held_bytes)
        # The window grows in large steps, because each step is a frame for the client to read.
        if not self._is_reading_paused and self.receive_window < wanted_bytes - READ_AHEAD_BYTES // 2:
            self.allow(wanted_bytes)
        if self._held_bytes and self._since_s is None and not self._is_reading_paused:
            self._since_s = asyncio.get_running_loop().time()

    def _next_turn(self) -> None:
        self._is_next_turn_scheduled = False
        self._read()

    @property
    def _is_reading_paused(self) -> bool:
        """True while a batch is decoded or capacity (window, memory) is missing, and after the end of the stream."""
        is_full = self._is_decoding or self._waiting_batch or self._asked_bytes
        return bool(self._is_over or is_full or self.window.is_finished)

    def _reserve(self, size_bytes: int) -> bool:
        """Reserve memory for the rest of a message. Returns False if it must wait, or if the call has failed."""
        # A message that has arrived completely is decoded at once, and needs no reservation.
        return self._held_bytes >= self._message_bytes or super()._reserve(size_bytes)

    def check(self, now_s: float) -> None:
        """End the stream, after the answers to earlier batches, if a message has not come whole within READ_S.

        Otherwise check the time limits of every call.
        """
        if self._since_s is not None and now_s - self._since_s > self.READ_S and not self.window.is_finished:
            self._since_s = None
            self.fail_after_answers(RequestError(f"a message has not come whole within {self.READ_S:.0f} s"))
        else:
            super().check(now_s)

    def _ended(self) -> None:
        """Handle the end of the client's side: answer the batches so far, then end the stream. Raises TimeballError."""
        if self._held_bytes:
            raise InvalidMessage("the stream ends within a message")
        if self._sink is None:
            self._context.choose_sink(self.call.caller, None)  # raises: the stream has no descriptor
        if self._schema is None:
            raise InvalidMessage("the stream does not begin with an Arrow schema")
        self.window.finish()
        self._send_answers()

    def _handle_message(self, is_compressed: bool, chunks: list[Payload]) -> None:
        """Handle one complete message: a descriptor, the schema, a batch, or the message that ends the stream.

        `chunks`: the message in pieces. Raises TimeballError for a message that ends the stream with an error.
        """
        self._message_bytes, self._since_s = 0, None
        if is_compressed:
            unpacked = self._decompress(b"".join(chunks))
            if unpacked is None:
                return
            chunks = [unpacked]
        message = codec.parse_data(chunks)
        if self._sink is None:
            self._sink, self._columns_of = self._context.choose_sink(self.call.caller, message.path)
        if not message.header:
            self._free_memory()
            if message.metadata == END_OF_STREAM:
                self._ended()
            return  # a descriptor, or metadata alone: there is nothing to answer
        if self._schema is None:
            schema = ipc.read_schema(message.header)
            self._columns = self._columns_of(schema)
            self._schema = schema
            self._free_memory()
        elif message.size_bytes <= INLINE_DECODE_BYTES_MAX:
            self._pass_on(self._decode(message))
        else:
            self._is_decoding = True
            loop = asyncio.get_running_loop()
            decoding = loop.run_in_executor(self._context.decoding, self._decode, message)
            decoding.add_done_callback(self._handle_decoded)

    def _handle_decoded(self, decoding: asyncio.Future[_DecodedBatch]) -> None:
        """Continue after a batch was decoded in the other thread."""
        self._is_decoding = False
        if not self._is_over:
            self._pass_on(decoding.result())
            self._read()

    def _decode(self, message: Data) -> _DecodedBatch:
        """Decode and check a batch. An error becomes the answer to the batch. Runs in any thread."""
        try:
            if self._is_stopping:
                raise Unavailable(STOPPING)
            caller = self.call.caller
            allow = None if caller is ANONYMOUS else partial(self._context.allow, caller)
            batch = self._columns.check_and_convert(
                ipc.read_batch(message.header, message.body, self._schema), allow
            )
            size_bytes = size_of(batch)
            key = codec.decode_metadata(message.metadata)
        except Exception as error:  # any error: this batch is refused, and the stream continues
            return _DecodedBatch(refusal_answer(error), 0, "")
        return _DecodedBatch(batch, max(message.size_bytes, size_bytes), key)

    def _pass_on(self, decoded: _DecodedBatch) -> None:
        """Pass a decoded batch to the sink, or settle its slot with the refusal.

        If the window has no capacity, the batch and the stream wait for `_resume`.
        """
        slot = self.window.enter(decoded.size_bytes)
        if slot is None:
            self._waiting_batch = decoded
            return
        self._waiting_batch = None
        self._free_memory()
        if isinstance(decoded.batch, bytes):
            slot.settle(decoded.batch)
        else:
            assert self._sink is not None
            self._sink.put(decoded.batch, slot, self.call.caller, decoded.key)

    def _resume(self) -> None:
        """Continue to read, because the window has capacity again."""
        if self._waiting_batch is not None:
            self._pass_on(self._waiting_batch)
            self._read()

    # -- answers to the client -------------------------------------------------------------------------------

    def _send_answers(self) -> None:
        """Send the settled answers in order, as long as the client reads. End the stream after its last answer."""
        window = self.window
        while not (self._is_over or self.has_unsent):
            if self.streams.is_full:
                self.streams.waiting[self.number] = self
                return
            answer = window.pop_answer()
            if answer is None:
                break
            self.send_messages(framed(*codec.encode_data(metadata=answer)))
        if window.is_finished and not window:
            self._end_stream()

    def move(self) -> None:
        """Send as much unsent DATA as windows and socket allow, then the answers that were settled meanwhile."""
        super().move()
        self._send_answers()

    def fail_after_answers(self, error: BaseException) -> None:
        """End the stream with this error, after the answers to the batches before it."""
        self._final_error = error
        self._parts.clear()
        self._held_bytes = 0
        self.window.finish()
        self._send_answers()

    def _end_stream(self) -> None:
        """End the stream with its error, or with success."""
        if self._final_error is not None:
            self.refuse(self._final_error)
        else:
            self.finish()

    def release(self) -> None:
        """Abort the window, and give back all that a FlightCall holds."""
        self._context.streams.discard(self)
        self.window.abort()
        super().release()


# ---- the unanswered batches of a stream ----------------------------------------------------------------------
# A slot counts towards the number of batches until its answer is taken. So a client that does not read its answers
# cannot send further batches. The bytes of a slot count only until it is settled, so that such a client does not hold
# bytes that all streams share.

BATCHES_MAX = 1_024  # of one stream
BYTES_MAX = 16 * 1024 * 1024  # of one stream
BYTES_ALL_STREAMS_MAX = 64 * 1024 * 1024  # one address alone may hold half of it


class Slot:
    """The slot of one batch in its window. `answer` is None until the slot is settled."""

    __slots__ = ("_window", "answer", "size_bytes")

    def __init__(self, window: Window, size_bytes: int) -> None:
        self._window = window
        self.size_bytes = size_bytes
        self.answer: bytes | None = None

    def settle(self, answer: bytes) -> None:
        """Store the answer to the batch."""
        self._window._settle(self, answer)


class Window:
    """The slots of one stream, in the order of their batches. Belongs to the event loop.

        the stream reads     enter(bytes): None while the window is full. Then the stream stops reading, and HTTP/2
                             stops the client: this is the back-pressure
        the broker answers   slot.settle(answer), in any order
        the stream answers   pop_answer(): the answer of the slot at the front, once it is settled

    Invariant: each entered slot is settled at most once, and its answer is taken at most once. After `abort` neither
    callback is called again.
    """

    def __init__(
        self,
        budget: MemoryQuota,
        address: str,
        on_capacity: Callable[[], None],
        on_answer: Callable[[], None],
        batches_max: int = BATCHES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """Create an empty window.

        `budget` limits the bytes of all streams. `address`: of the client. `on_capacity` is called when `enter` may
        succeed again, `on_answer` when the slot at the front is settled. `batches_max`, `bytes_max`: of this stream.
        """
        self._budget, self._address = budget, address
        self._on_capacity, self._on_answer = on_capacity, on_answer
        self._batches_max, self._bytes_max = batches_max, bytes_max
        self._slots: deque[Slot] = deque()  # in the order in which the batches entered
        self._unsettled_bytes = 0
        self._requested_bytes: int | None = None  # bytes for which the budget had no capacity yet
        self._granted_bytes: int | None = None  # bytes that the budget has reserved for the next slot
        self._waits_for_capacity = False
        self._emptied_future: asyncio.Future[None] | None = None
        self.is_finished = False  # no further batch will enter
        self.is_aborted = False

    def __len__(self) -> int:
        """The number of batches whose answers were not taken yet."""
        return len(self._slots)

    def enter(self, size_bytes: int) -> Slot | None:
        """Add a slot for a batch of this size. None if there is no capacity yet, or the stream was aborted.

        After None, `on_capacity` is called when another call may succeed, unless the stream was aborted.
        """
        if self.is_aborted or self._requested_bytes is not None:
            return None
        if not self._fits(size_bytes):
            self._waits_for_capacity = True
            return None
        is_counted = self._granted_bytes is not None or not size_bytes
        if not (is_counted or self._budget.reserve(self._address, size_bytes, self._grant)):
            self._requested_bytes = size_bytes
            return None
        self._granted_bytes = None
        slot = Slot(self, size_bytes)
        self._slots.append(slot)
        self._unsettled_bytes += size_bytes
        return slot

    def pop_answer(self) -> bytes | None:
        """Remove the slot at the front, and return its answer. None if it is not settled, or if there is no slot."""
        if self.is_aborted or not self._slots or self._slots[0].answer is None:
            return None
        answer = self._slots.popleft().answer
        self._notify_capacity()
        if not self._slots:
            self._notify_emptied()
        return answer

    def finish(self) -> None:
        """Mark the window as complete: no further batch will enter."""
        self.is_finished = True

    def abort(self) -> None:
        """Abort the stream: no further batch enters, and no answer is taken. Entered batches are still settled."""
        if self.is_aborted:
            return
        self.is_aborted = True
        if self._requested_bytes is not None:
            self._budget.withdraw(self._address, self._grant)
        if self._granted_bytes is not None:
            self._budget.remove(self._address, self._granted_bytes)
        self._requested_bytes = self._granted_bytes = None
        self._notify_emptied()

    async def emptied(self) -> None:
        """Wait until every answer was taken, or the stream was aborted."""
        if self._slots and not self.is_aborted:
            self._emptied_future = self._emptied_future or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._emptied_future)

    def _settle(self, slot: Slot, answer: bytes) -> None:
        """Store the answer of a slot, and free its bytes."""
        assert slot.answer is None, "a batch is answered once"
        slot.answer = answer
        self._unsettled_bytes -= slot.size_bytes
        if slot.size_bytes:
            self._budget.remove(self._address, slot.size_bytes)
        self._notify_capacity()
        if not self.is_aborted and self._slots and self._slots[0] is slot:
            self._on_answer()

    def _grant(self) -> None:
        """Handle the budget's callback: it has reserved the requested bytes."""
        self._granted_bytes, self._requested_bytes = self._requested_bytes, None
        self._waits_for_capacity = True
        self._notify_capacity()

    def _notify_capacity(self) -> None:
        """Schedule the callback `on_capacity`, if the stream waits for capacity."""
        if self._waits_for_capacity:
            self._waits_for_capacity = False
            # Called later, because the caller is about to send an answer, which must be sent before later answers.
            asyncio.get_running_loop().call_soon(self._call_on_capacity)

    def _call_on_capacity(self) -> None:
        if not self.is_aborted:
            self._on_capacity()

    def _notify_emptied(self) -> None:
        if self._emptied_future is not None and not self._emptied_future.done():
            self._emptied_future.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        """True if the limits of this stream allow the batch. A batch larger than the limit may enter alone."""
        if len(self._slots) >= self._batches_max:
            return False
        return self._unsettled_bytes == 0 or self._unsettled_bytes + size_bytes <= self._bytes_max
