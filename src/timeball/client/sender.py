"""Sending: single messages over a stream that stays open, many messages over a separate stream per call.

A batch that was never written, or that a stopping broker refused, is sent again a few times on a new stream. A batch
whose answer was lost is sent again only with an idempotency key, by which the broker recognizes a batch that it already
has. `retry=True` gives each batch such a key, made of the topic and the id of its first message. The answer to a
repeated batch says that the batch exists, and contains the current states of its messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Literal

import msgspec
import pyarrow as pa

from timeball.client.calls import Calls, NotNow, NotSent
from timeball.client.dialing import is_inherited
from timeball.client.exchange import Lost, SendExchange
from timeball.client.outgoing import IDENTIFIERS, ONE_SCHEMA, Rows, batches
from timeball.io.clock import Clock
from timeball.model.errors import RequestError, TimeballError, Unavailable
from timeball.model.rules import past_due
from timeball.model.wire import EXISTS, SendAck, SendKey, SentState

IfSettled = Literal["keep", "send"]
SPANS_SHOWN = 10  # ranges of rows listed in an error text


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of a message, which is on the broker's disk.

    `outcome` is "created" for a message of this send, and "exists" for a message that was sent before under the
    same message id. `state` is the current state of the message (answers.SentState). `due_ms` is its current due time,
    or None if the message was not scheduled. `past_ms` is the time by which the due time had passed when the broker
    accepted the message, in milliseconds, or 0. The broker delivers a message with a past due time at once.
    """

    id: str
    seq: int
    due_ms: int | None
    store_ms: int
    outcome: str = "created"
    state: str = "waiting"
    past_ms: int = 0


class ExistingRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that were sent before, [first_row, first_row + len(states)), and their current states."""

    first_row: int
    first_seq: int
    states: list[SentState]


class AcceptedRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that the broker accepted, [first_row, first_row + rows).

    Their sequence numbers begin at `first_seq` and have no gaps.
    """

    first_row: int
    rows: int
    first_seq: int


class RefusedRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that were not acknowledged, [first_row, first_row + rows), and the error."""

    first_row: int
    rows: int
    error: TimeballError


class SendSummary(msgspec.Struct, frozen=True):
    """The result of a `send_many`. Each list has an entry per batch, in the order of the rows.

        accepted    the broker has these rows on its disk
        refused     the broker has none of these rows
        unknown     the answer was lost: the broker may or may not have these rows
        existing    accepted rows that an earlier call had sent with the same ids and `retry=True`

    `rows` is the number of rows read from the caller so far. Each of them is in accepted, refused or unknown.
    `past_rows` is the number of accepted rows whose due time had passed when the broker accepted them. The broker
    delivers these at once. `past_ms` is the largest time by which a due time had passed, in milliseconds.
    """

    rows: int
    accepted: list[AcceptedRows]
    refused: list[RefusedRows]
    ids: pa.ChunkedArray  # one string per row read, accepted or not
    existing: list[ExistingRows] = []
    unknown: list[RefusedRows] = []
    past_rows: int = 0
    past_ms: int = 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The pair (first_seq, rows) of each accepted batch, in order."""
        return [(batch.first_seq, batch.rows) for batch in self.accepted]


class Sender:
    """Sends messages for a client. Thread safe."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._open_lock = threading.Lock()  # held while the stream is replaced, but not while it is used
        self._exchange: SendExchange | None = None
        self._closed = False

    def close(self) -> None:
        """Finish the open stream. Waits a few seconds for answers that are under way."""
        if is_inherited():
            return  # the stream, and perhaps the held lock, belong to the parent process
        with self._open_lock:
            self._closed = True
            exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def send(self, batch: pa.RecordBatch, *, retry: bool, if_settled: IfSettled = "keep") -> SendAck:
        """Send a batch in ONE_SCHEMA. It is on the broker's disk on return.

        Raises the broker's refusal, or Unavailable.
        """
        key = _IdempotencyKeys(if_settled, is_used=retry).encode_for(batch)
        retry_on = Unavailable if retry else NotNow
        for may_retry in self._calls.attempts():
            exchange: SendExchange | None = None
            try:
                exchange = self._open()
                return self._wait_for_ack(exchange.submit(batch, key))
            except retry_on:
                if not may_retry:
                    raise
                self._abandon(exchange)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def send_many(
        self,
        rows: Rows,
        topic: str | None,
        batch_rows: int | None,
        window: int,
        collect: bool,
        retry: bool,
        if_settled: IfSettled = "keep",
    ) -> SendSummary:
        """Send rows in batches, pipelined. Timeball.send_many documents the arguments."""
        sending = _SendMany(self._calls, window, collect, retry, if_settled)
        try:
            for batch in batches(rows, topic, batch_rows, self._clock.wall_ms()):
                sending.put(batch)
            return sending.end()
        except TimeballError as error:
            raise sending.failed(error) from error
        finally:
            sending.close()

    def _open(self) -> SendExchange:
        with self._open_lock:
            if self._closed:
                raise RequestError("this Timeball client is closed")
            if self._exchange is None or not self._exchange.alive:
                self._exchange = SendExchange(self._calls.flight, ONE_SCHEMA, self._calls.endpoint)
            return self._exchange

    def _abandon(self, exchange: SendExchange | None) -> None:
        """Stop writing to a stream, so that the next batch opens a new stream, perhaps to another node."""
        with self._open_lock:
            if exchange is None or self._exchange is not exchange:
                return
            self._exchange = None
        exchange.finish()

    def _wait_for_ack(self, future: Future[SendAck]) -> SendAck:
        return wait_for_ack(future, self._calls.timeout_ms, self._calls.endpoint)


def wait_for_ack(future: Future[SendAck], timeout_ms: int, endpoint: str) -> SendAck:
    """Wait for the answer to a batch. Raises the broker's error, or Lost if no answer comes in time."""
    try:
        return future.result(timeout_ms / 1000)
    except TimeoutError:
        raise Lost(
            f"{endpoint} did not answer within {timeout_ms} ms; the message may or may not have been accepted"
        ) from None


class _IdempotencyKeys:
    """Creates the idempotency keys of a call. All of them name the same attempt, which is unique to the call.

    Without `is_used` (that is, without `retry=True`) batches get no keys.
    """

    def __init__(self, if_settled: IfSettled, *, is_used: bool) -> None:
        if if_settled not in ("keep", "send"):
            raise RequestError(f"if_settled={if_settled!r}: 'keep' or 'send'")
        if if_settled == "send" and not is_used:
            raise RequestError(
                "if_settled='send' goes with retry=True, by which the broker knows the earlier send"
            )
        self._if_settled, self._attempt = if_settled, IDENTIFIERS.next_id() if is_used else ""

    def encode_for(self, batch: pa.RecordBatch) -> str:
        """Encode the key of a batch as the JSON of a wire.SendKey. Returns "" if keys are not used.

        The same messages get the same key if they are sent again.
        """
        if not self._attempt:
            return ""
        key = f"{batch.column('topic')[0]}/{batch.column('unique_key')[0]}"
        send_key = SendKey(idempotency_key=key, attempt=self._attempt, if_settled=self._if_settled)
        return msgspec.json.encode(send_key).decode()


class _SendMany:
    """The state of a send_many: its stream, the batches without an answer, and the outcomes so far.

    The first batch opens the stream.
    """

    def __init__(self, calls: Calls, window: int, collect: bool, retry: bool, if_settled: IfSettled) -> None:
        self._calls = calls
        self._window = window  # the largest number of batches without an answer
        self._collect = collect  # whether to continue after a refused batch
        self._has_failed = False  # an error ends the call: only collect the outcomes of batches under way
        self._keys = _IdempotencyKeys(if_settled, is_used=retry)
        self._retry_on = Unavailable if retry else NotNow
        self._exchange: SendExchange | None = None
        self._schema: pa.Schema | None = None  # of the open stream
        # (first row, batch, answer, its stream), in the order of the rows
        self._unanswered: deque[tuple[int, pa.RecordBatch, Future[SendAck], SendExchange]] = deque()
        self._rows = 0  # number of rows read from the caller
        self._accepted: list[AcceptedRows] = []
        self._refused: list[RefusedRows] = []
        self._unknown: list[RefusedRows] = []
        self._ids: list[pa.Array] = []
        self._existing: list[ExistingRows] = []
        self._past_rows = self._past_ms = 0

    def put(self, batch: pa.RecordBatch) -> None:
        """Send a batch, after waiting until the window has a free slot."""
        while len(self._unanswered) >= self._window:
            self._handle_oldest()
        first_row = self._rows
        self._rows += batch.num_rows
        self._ids.append(batch.column("unique_key"))
        try:
            self._unanswered.append((first_row, batch, *self._submit(batch)))
        except TimeballError as error:
            # The batch was not written to the stream, or the broker refused it together with the stream.
            self._refused.append(RefusedRows(first_row, batch.num_rows, error))
            raise

    def end(self) -> SendSummary:
        """Wait for the last answers, and build the summary."""
        self._handle_all()
        return self._summary()

    def failed(self, error: TimeballError) -> TimeballError:
        """Build the error of a call that ends early, after the outcomes of the batches under way.

        The text of the error names the accepted rows, and its `summary` lists them.
        """
        self._has_failed = True
        while self._unanswered:
            first_row, batch, future, _ = self._unanswered[0]
            if future.done() or not self._unknown:
                self._handle_oldest()
            else:
                # An answer was lost or late already. Waiting for each of the others could take as long again.
                self._unanswered.popleft()
                self._unknown.append(
                    RefusedRows(first_row, batch.num_rows, Lost("the answer was not waited for"))
                )
        extended = type(error)(f"{error} ({self._describe_progress()})")
        extended.summary = self._summary()
        return extended

    def _summary(self) -> SendSummary:
        ids = pa.chunked_array(self._ids, pa.string()) if self._ids else pa.chunked_array([], pa.string())
        return SendSummary(
            self._rows,
            self._accepted,
            self._refused,
            ids,
            self._existing,
            self._unknown,
            self._past_rows,
            self._past_ms,
        )

    def _describe_progress(self) -> str:
        """Describe in an error text which rows were accepted."""
        if not self._accepted and not self._unknown:
            return "no row of this call was accepted"
        accepted, unknown = spans(self._accepted), spans(self._unknown)
        text = f"accepted: {accepted}" if accepted else "no row is known to be accepted"
        if unknown:
            text += f"; may or may not be accepted: {unknown}"
        return f"{text}; no other row was accepted, so send only those again"

    def close(self) -> None:
        """Close the stream."""
        if self._exchange is not None:
            self._exchange.close()

    def _submit(self, batch: pa.RecordBatch) -> tuple[Future[SendAck], SendExchange]:
        """Write a batch to the stream, or to a new stream if needed. Returns its future and the stream."""
        if self._schema is not None and batch.schema != self._schema:
            # A stream has only one schema, so a batch with another schema needs another stream.
            self._handle_all()
            self.close()
            self._exchange = None
        self._schema = batch.schema
        for may_retry in self._calls.attempts():
            try:
                if self._exchange is None or not self._exchange.alive:
                    # Batches on the broken stream may have no answer. `_handle_oldest` records or retries them.
                    self._handle_all()
                exchange = self._open(batch.schema)
                return exchange.submit(batch, self._keys.encode_for(batch)), exchange
            except NotSent:
                if not may_retry:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _send_again(self, batch: pa.RecordBatch) -> SendAck:
        """Send a batch again until it has a final answer. Raises the error of the last attempt."""
        for may_retry in self._calls.attempts():
            exchange: SendExchange | None = None
            try:
                exchange = self._open(batch.schema)
                future = exchange.submit(batch, self._keys.encode_for(batch))
                return wait_for_ack(future, self._calls.timeout_ms, self._calls.endpoint)
            except self._retry_on:
                if not may_retry:
                    raise
                self._abandon(exchange)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _open(self, schema: pa.Schema) -> SendExchange:
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(self._calls.flight, schema, self._calls.endpoint)
        return self._exchange

    def _abandon(self, exchange: SendExchange | None) -> None:
        """Stop writing to a stream. Its answers still arrive."""
        if exchange is not None and self._exchange is exchange:
            self._exchange = None
            exchange.finish()

    def _handle_all(self) -> None:
        while self._unanswered:
            self._handle_oldest()

    def _handle_oldest(self) -> None:
        """Wait for the answer to the oldest batch and record its outcome. Raises the error if it ends the call."""
        first_row, batch, future, exchange = self._unanswered.popleft()
        try:
            try:
                ack = wait_for_ack(future, self._calls.timeout_ms, self._calls.endpoint)
            except self._retry_on:
                self._abandon(exchange)
                ack = self._send_again(batch)
        except TimeballError as error:
            is_unknown = isinstance(error, Lost)
            (self._unknown if is_unknown else self._refused).append(
                RefusedRows(first_row, batch.num_rows, error)
            )
            if self._has_failed or (self._collect and not isinstance(error, Unavailable)):
                return
            last_row = first_row + batch.num_rows - 1
            raise type(error)(f"rows {first_row} to {last_row}: {error}") from error
        else:
            self._accepted.append(AcceptedRows(first_row, ack.rows, ack.first_seq))
            if ack.outcome == EXISTS:
                self._existing.append(ExistingRows(first_row, ack.first_seq, ack.states))
            if "due_ms" in batch.schema.names and not ack.states:
                past_rows, past_ms = past_due(batch.column("due_ms"), ack.store_ms)
                self._past_rows += past_rows
                self._past_ms = max(self._past_ms, past_ms)


def spans(row_ranges: Iterable[AcceptedRows | RefusedRows]) -> str:
    """List row numbers in an error text, with adjacent ranges joined: "rows 0 to 8191, 9000 to 9009"."""
    joined: list[tuple[int, int]] = []
    for row_range in sorted(row_ranges, key=lambda row_range: row_range.first_row):
        if joined and joined[-1][1] == row_range.first_row:
            joined[-1] = joined[-1][0], row_range.first_row + row_range.rows
        else:
            joined.append((row_range.first_row, row_range.first_row + row_range.rows))
    texts = [
        f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in joined[:SPANS_SHOWN]
    ]
    if len(joined) > SPANS_SHOWN:
        texts.append(f"{len(joined) - SPANS_SHOWN} more spans, which the error's summary lists")
    return "rows " + ", ".join(texts) if texts else ""
