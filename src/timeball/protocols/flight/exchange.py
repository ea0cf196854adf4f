"""One stream of an exchange: batches in without waiting, acknowledgements out in the same order.

    DATA        message -> decode and check -> window.enter -> taker
    broker      taker -> slot.settle                                       (sends)
    answers     window.pop_answer -> acknowledgements, as far as the client takes them

The stream reads on while its batches wait for the disk, so that a group commit can hold many batches of one stream. A
refused batch is answered and the stream goes on. When the client goes away, what it sent is still decided by the
broker, and no client waits for it: nothing is cancelled from here, because the commit that one batch waits for is
the commit of others too.

A stream holds one message: the one it receives, or the one it has and waits with; and READ_AHEAD_BYTES behind it. A
message that has come in part counts among the bytes of all requests, and must have come whole within READ_S. A stream
without a message is cheap; still, one that has been silent for IDLE_S is ended when another needs its place. Large
messages are decoded by one thread, one after the other, so that what a message becomes in between is there once and not
once a stream; the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from timeball.access import ANONYMOUS, Caller
from timeball.errors import InvalidMessage, OverLimit, RequestError, Unavailable
from timeball.message import SendBatch
from timeball.protocols import arrow_ipc as ipc
from timeball.protocols.arrow_columns import Allow, ReleaseColumns, SendColumns, size_of
from timeball.protocols.flight import codec, protobuf
from timeball.protocols.flight.calls import Admit, FlightCall, framed
from timeball.protocols.flight.protobuf import Data
from timeball.protocols.flight.sends import STOPPING, Releases, Sends, refusal
from timeball.protocols.flight.window import Window
from timeball.protocols.http2.calls import Call, Room
from timeball.protocols.http2.exchange import Serve
from timeball.protocols.http2.frames import Payload
from timeball.protocols.http2.streams import Streams
from timeball.protocols.shared_limits import ByteShares, SharedLimit
from timeball.wire import END_OF_STREAM

READ_AHEAD_BYTES = 1024 * 1024  # that a client may send behind the message that is received
AT_ONCE_BYTES_MAX = (
    256 * 1024
)  # of a message that the event loop decodes itself: some 30 us, as a hand-over takes

IDLE_S = 60.0  # without a batch or an answer: then a stream gives its place to another
IDLE = "this stream was idle, and another one needed its place; open a new one"
MESSAGES_PER_TURN = 64  # of one stream, in a turn of the event loop: some 2 ms, and then others have theirs

Columns = Callable[[pa.Schema], SendColumns | ReleaseColumns]
Choose = Callable[
    [Caller, list[bytes] | None], tuple[Sends | Releases, Columns]
]  # by the path; raises TimeballError


class Shared(NamedTuple):
    """Parts of the edge that all its streams share.

    `choose`: who takes the batches, and how a schema is checked. `allow`: the policy's decision about a caller.
    """

    choose: Choose
    allow: Allow
    budget: ByteShares
    decoding: Executor
    limit: SharedLimit
    streams: set[Upload]


class _Entry(NamedTuple):
    """A sound batch, as columns or a few rows, or the refusal that answers it; its bytes, and its key ("" for none)."""

    batch: SendBatch | bytes
    size_bytes: int
    key: str


class Upload(FlightCall):
    """One stream of batches, and the window of those that wait for an answer."""

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
        self._taker: Sends | Releases | None = None
        self._columns_of: Columns
        self._schema: pa.Schema | None = None
        self._columns: SendColumns | ReleaseColumns
        self._entry: _Entry | None = None  # that waits for room
        self._is_decoding = self._is_stopping = self._is_turn_over = False
        self._failure: BaseException | None = None  # that ends the stream behind its last answer

    def _take_place(self) -> None:
        """See FlightCall: without a place, the stream that has been idle for longest gives up its own."""
        try:
            super()._take_place()
        except OverLimit:
            idle = [each for each in self._shared.streams if each.gives_way_to(self)]
            if not idle:
                raise
            min(idle, key=lambda each: each._active_s)._break(Unavailable(IDLE))
            super()._take_place()

    def gives_way_to(self, other: Upload) -> bool:
        """Return whether this stream is idle, and of the other one's address or account, or all places are taken."""
        if self.window or self._entry or self._is_decoding or self._held_bytes or self.has_unsent:
            return False
        calls = (self.call, other.call)
        mine, yours = ({call.peer, call.caller.name} - {""} for call in calls)
        is_full = self._limit.taken >= self._limit.limit
        return other._active_s - self._active_s > IDLE_S and bool(is_full or mine & yours)

    def stop(self) -> None:
        """Refuse further batches; those under way are still answered."""
        self._is_stopping = True

    # -- batches that come in --------------------------------------------------------------------------------

    def received(self, payload: Payload) -> None:
        """See Stream."""
        if self._is_over or self.window.is_finished:
            return
        self._parts.append(payload)
        self._held_bytes += len(payload)
        self._active_s = asyncio.get_running_loop().time()
        self._read()

    def _begin_stream(self) -> None:
        self._shared.streams.add(self)
        self._read()  # the first message has to come within READ_S, as a request has

    def _read(self) -> None:
        """Take message by message, for as long as the window has room."""
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
        except Exception as error:  # of any kind: a fault of ours must not leave the client waiting
            self._break(error)
            return
        wanted_bytes = READ_AHEAD_BYTES + max(0, self._awaited_bytes - self._held_bytes)
        # In large steps: each is a frame for the client to read.
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
        # A message that is there as a whole is taken at once.
        return self._held_bytes >= self._awaited_bytes or super()._reserve(size_bytes)

    def check(self, now_s: float) -> None:
        """See Stream: behind the answers to what has come."""
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
        """Take one message."""
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
            return  # a descriptor, or metadata alone: nothing to answer
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
        """Decode and check a batch; any thread."""
        try:
            if self._is_stopping:
                raise Unavailable(STOPPING)
            # Most messages of producers hold a row: columns would cost as much as all the rest. On the loop's thread
            # alone, as what reads rows is no other's.
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
        except Exception as error:  # of any kind: this batch gets an answer and the next one its turn
            return _Entry(refusal(error), 0, "")
        return _Entry(batch, max(message.size_bytes, size_bytes), key)

    def _enter(self, entry: _Entry) -> None:
        """Hand a batch over, or give the refusal its turn; without room it waits, and the stream with it."""
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
        """Read on: the window has room."""
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
        """See Stream: behind what waited come the answers that were settled meanwhile."""
        super().move()
        self._answer()

    def _break(self, error: BaseException) -> None:
        """End the stream with this error, behind the answers to what came before it."""
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
        """See Exchange."""
        self._shared.streams.discard(self)
        self.window.abort()
        super().release()
