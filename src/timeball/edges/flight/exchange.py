"""One stream of an exchange: batches are read without waiting, and acknowledged in the same order.

    DATA        message -> decode and check -> window.enter -> taker
    broker      taker -> slot.settle                                       (sends)
    answers     window.pop_answer -> acknowledgements, as far as the client takes them

The stream reads on while its batches wait for the disk, so that one group commit can contain many batches of a stream.
A refused batch is answered, and the stream goes on. When the client disconnects, the broker still decides the batches
that it sent. Nothing is cancelled, because the commit of one batch is also the commit of other batches.

A stream holds one message, which it receives or which waits for room, and READ_AHEAD_BYTES after it. A message that has
arrived in part counts towards the bytes of all requests, and must be complete within READ_S. A stream without a message
is cheap. A stream that was silent for IDLE_S is still ended when another one needs its slot. One thread decodes large
messages, one after the other, while the event loop goes on. So the memory for decoding is needed once, and not once per
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from timeball.edges.flight import codec, protobuf
from timeball.edges.flight.calls import Admit, FlightCall, framed
from timeball.edges.flight.protobuf import Data
from timeball.edges.flight.sends import STOPPING, Releases, Sends, refusal
from timeball.edges.flight.window import Window
from timeball.edges.http2.calls import Call, Room
from timeball.edges.http2.exchange import Serve
from timeball.edges.http2.frames import Payload
from timeball.edges.http2.streams import Streams
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.arrow_columns import Allow, ReleaseColumns, SendColumns, size_of
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import InvalidMessage, OverLimit, RequestError, Unavailable
from timeball.model.message import SendBatch
from timeball.model.wire import END_OF_STREAM

READ_AHEAD_BYTES = 1024 * 1024  # that a client may send after the message being received
AT_ONCE_BYTES_MAX = (
    256 * 1024
)  # up to this size the event loop decodes a message itself: some 30 us, as long as a hand-over to a thread takes

IDLE_S = 60.0  # time without a batch or an answer, after which a stream gives way to another one
IDLE = "this stream was idle, and another one needed its place; open a new one"
MESSAGES_PER_TURN = 64  # of one stream in a turn of the event loop: some 2 ms, then others have their turn

Columns = Callable[[pa.Schema], SendColumns | ReleaseColumns]
Choose = Callable[
    [Caller, list[bytes] | None], tuple[Sends | Releases, Columns]
]  # chooses by the path; raises TimeballError


class Shared(NamedTuple):
    """The parts of the edge that all its streams share.

    `choose` finds the taker of the batches, and the checker of the schema. `allow` is the policy's check of a caller.
    """

    choose: Choose
    allow: Allow
    budget: MemoryQuota
    decoding: Executor
    limit: SharedLimit
    streams: set[Upload]


class _Entry(NamedTuple):
    """A valid batch, as columns or a few rows, or the encoded refusal. Its size in bytes, and its key ("" for none)."""

    batch: SendBatch | bytes
    size_bytes: int
    key: str


class Upload(FlightCall):
    """One stream of batches, and the window of its unanswered batches."""

    __slots__ = (
        "_active_s", "_columns", "_columns_of", "_entry", "_failure", "_is_decoding", "_is_stopping", "_is_turn_over",
        "_schema", "_shared", "_taker",
        "window",
    )  # fmt: skip

    def __init__(
        self, streams: Streams, number: int, is_heard: bool, call: Call, room: Room, serve: Serve, now_s: float,
        admit: Admit, shared: Shared,
    ) -> None:  # fmt: skip
        super().__init__(streams, number, is_heard, call, room, serve, now_s, admit, shared.limit)
        self._shared = shared
        self._active_s = now_s
        self.window = Window(shared.budget, call.peer, self._go_on, self._answer)
        self._taker: Sends | Releases | None = None  # chosen by the descriptor in the first message
        self._columns_of: Columns
        self._schema: pa.Schema | None = None  # None until the schema's message has arrived
        self._columns: SendColumns | ReleaseColumns
        self._entry: _Entry | None = None  # the batch that waits for room in the window
        self._is_decoding = self._is_stopping = self._is_turn_over = False
        self._failure: BaseException | None = None  # the error that ends the stream after its last answer

    def _take_place(self) -> None:
        """Take a slot in the limit.

        If none is free, end the stream that has been idle for longest and take its slot.
        """
        try:
            super()._take_place()
        except OverLimit:
            idle = [each for each in self._shared.streams if each.gives_way_to(self)]
            if not idle:
                raise
            min(idle, key=lambda each: each._active_s)._break(Unavailable(IDLE))
            super()._take_place()

    def gives_way_to(self, other: Upload) -> bool:
        """True if this stream is idle, and shares the other one's address or account, or if all slots are taken."""
        if self.window or self._entry or self._is_decoding or self._held_bytes or self.has_unsent:
            return False
        calls = (self.call, other.call)
        mine, yours = ({call.peer, call.caller.name} - {""} for call in calls)
        is_full = self._limit.taken >= self._limit.limit
        return other._active_s - self._active_s > IDLE_S and bool(is_full or mine & yours)

    def stop(self) -> None:
        """Refuse further batches. Those under way are still answered."""
        self._is_stopping = True

    # -- batches that come in --------------------------------------------------------------------------------

    def received(self, payload: Payload) -> None:
        """Handle DATA from the client (see Stream)."""
        if self._is_over or self.window.is_finished:
            return
        self._parts.append(payload)
        self._held_bytes += len(payload)
        self._active_s = asyncio.get_running_loop().time()
        self._read()

    def _begin_stream(self) -> None:
        self._shared.streams.add(self)
        self._read()  # the first message must be complete within READ_S, like a request

    def _read(self) -> None:
        """Read message by message while the window has room."""
        if self._is_turn_over:
            return
        try:
            for _ in range(MESSAGES_PER_TURN):
                if self._is_held_up:
                    break
                if not self._awaited_bytes and not self._read_prefix():
                    break
                if self._held_bytes < self._awaited_bytes:
                    if self.is_heard:
                        raise InvalidMessage("the stream ends within a message")
                    break
                self._take(*self._cut())
            else:
                self._is_turn_over = True
                asyncio.get_running_loop().call_soon(self._next_turn)
                return
        except Exception as error:  # of any kind: an internal fault must not leave the client waiting
            self._break(error)
            return
        wanted_bytes = READ_AHEAD_BYTES + max(0, self._awaited_bytes - self._held_bytes)
        # The window grows in large steps, because each step is a frame for the client to read.
        if not self._is_held_up and self.receive_window < wanted_bytes - READ_AHEAD_BYTES // 2:
            self.allow(wanted_bytes)
        if self._held_bytes and self._since_s is None and not self._is_held_up:
            self._since_s = asyncio.get_running_loop().time()

    def _next_turn(self) -> None:
        self._is_turn_over = False
        self._read()

    @property
    def _is_held_up(self) -> bool:
        is_full = self._is_decoding or self._entry or self._asked_bytes
        return bool(self._is_over or is_full or self.window.is_finished)

    def _reserve(self, size_bytes: int) -> bool:
        # A message that has arrived completely is decoded at once, so it needs no reservation.
        return self._held_bytes >= self._awaited_bytes or super()._reserve(size_bytes)

    def check(self, now_s: float) -> None:
        """Check the time limits (see Stream). A late message ends the stream after the answers to earlier batches."""
        if self._since_s is not None and now_s - self._since_s > self.READ_S and not self.window.is_finished:
            self._since_s = None
            self._break(RequestError(f"a message has not come whole within {self.READ_S:.0f} s"))
        else:
            super().check(now_s)

    def _ended(self) -> None:
        if self._held_bytes:
            raise InvalidMessage("the stream ends within a message")
        if self._taker is None:
            self._shared.choose(self.call.caller, None)
        if self._schema is None:
            raise InvalidMessage("the stream does not begin with an Arrow schema")
        self.window.finish()
        self._answer()

    def _take(self, is_packed: bool, parts: list[Payload]) -> None:
        """Handle one complete message."""
        self._awaited_bytes, self._since_s = 0, None
        if is_packed:
            unpacked = self._unpacked(b"".join(parts))
            if unpacked is None:
                return
            parts = [unpacked]
        message = protobuf.data(parts)
        if self._taker is None:
            self._taker, self._columns_of = self._shared.choose(self.call.caller, message.path)
        if not message.header:
            self._give_back()
            if message.metadata == END_OF_STREAM:
                self._ended()
            return  # a descriptor, or metadata alone: there is nothing to answer
        if self._schema is None:
            schema = ipc.schema(message.header)
            self._columns = self._columns_of(schema)
            self._schema = schema
            self._give_back()
        elif message.size_bytes <= AT_ONCE_BYTES_MAX:
            self._enter(self._decode(message))
        else:
            self._is_decoding = True
            loop = asyncio.get_running_loop()
            decoded = loop.run_in_executor(self._shared.decoding, self._decode, message)
            decoded.add_done_callback(self._take_decoded)

    def _take_decoded(self, decoded: asyncio.Future[_Entry]) -> None:
        self._is_decoding = False
        if not self._is_over:
            self._enter(decoded.result())
            self._read()

    def _decode(self, message: Data) -> _Entry:
        """Decode and check a batch. Runs in any thread."""
        try:
            if self._is_stopping:
                raise Unavailable(STOPPING)
            # Most messages of producers contain one row, for which converting to columns would cost as much as
            # everything else. This only happens on the loop's thread, because the reader of rows is not thread safe.
            is_small = message.size_bytes <= AT_ONCE_BYTES_MAX and not message.metadata
            if is_small and isinstance(self._columns, SendColumns):
                rows = self._columns.rows(message.header, message.body)
                if rows is not None:
                    return _Entry(rows, message.size_bytes, "")
            caller = self.call.caller
            allow = None if caller is ANONYMOUS else partial(self._shared.allow, caller)
            batch = self._columns.adopt(ipc.batch(message.header, message.body, self._schema), allow)
            size_bytes = size_of(batch)
            key = codec.metadata_text(message.metadata)
        except Exception as error:  # of any kind: this batch gets an answer, and the next one its turn
            return _Entry(refusal(error), 0, "")
        return _Entry(batch, max(message.size_bytes, size_bytes), key)

    def _enter(self, entry: _Entry) -> None:
        """Hand a batch over, or put its refusal in line. If the window has no room, the batch and the stream wait."""
        slot = self.window.enter(entry.size_bytes)
        if slot is None:
            self._entry = entry
            return
        self._entry = None
        self._give_back()
        if isinstance(entry.batch, bytes):
            slot.settle(entry.batch)
        else:
            assert self._taker is not None
            self._taker.put(entry.batch, slot, self.call.caller, entry.key)

    def _go_on(self) -> None:
        """Go on reading: the window has room again."""
        if self._entry is not None:
            self._enter(self._entry)
            self._read()

    # -- answers that leave ----------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Send the answers at the front, for as long as the client takes them."""
        window = self.window
        while not (self._is_over or self.has_unsent):
            if self.streams.is_full:
                self.streams.waiting[self.number] = self
                return
            answer = window.pop_answer()
            if answer is None:
                break
            self.send_messages(framed(*protobuf.data_parts(metadata=answer)))
        if window.is_finished and not window:
            self._conclude()

    def move(self) -> None:
        """Send the waiting messages, then the answers that were settled meanwhile (see Stream)."""
        super().move()
        self._answer()

    def _break(self, error: BaseException) -> None:
        """End the stream with this error, after the answers to the batches before it."""
        self._failure = error
        self._parts.clear()
        self._held_bytes = 0
        self.window.finish()
        self._answer()

    def _conclude(self) -> None:
        if self._failure is not None:
            self.refuse(self._failure)
        else:
            self.finish()

    def release(self) -> None:
        """Release the window and the slot of this stream (see Exchange)."""
        self._shared.streams.discard(self)
        self.window.abort()
        super().release()
