"""Sending: single messages over a stream that stays open, many messages over a separate stream per call.

A batch that was never written, or that a stopping broker refused, is tried again a few times on a new stream. A batch
whose answer was lost is tried again only with an idempotency key, by which the broker recognizes a batch that it
already has. `retry=True` gives each batch a key, made of its first topic and message id. The receipt of a batch that
was sent before states this, and contains the current states of its messages.
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
SPANS_SHOWN = 10  # in the text of an error


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of one message, which is on the broker's disk. `due_ms` is None for a message that was not scheduled.

    `outcome` is "created" for a message of this send, and "exists" for one that was sent before under the same message
    id. `state` is the current state of the message (answers.SentState), and `due_ms` its current due time. `past_ms` is
    the time by which the due time had passed when the broker accepted the message, in milliseconds. The broker delivers
    such a message at once. For all others it is 0.
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
    """Rows of a `send_many` without an acknowledgement, [first_row, first_row + rows), and the error."""

    first_row: int
    rows: int
    error: TimeballError


class SendSummary(msgspec.Struct, frozen=True):
    """The result of a `send_many`, by batches in the order of the rows.

        accepted    the broker has these rows on its disk
        refused     the broker has none of these rows
        unknown     their answer was lost: the broker may or may not have them
        existing    the part of the accepted rows that an earlier call sent with the same ids and `retry=True`

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
        return [(each.first_seq, each.rows) for each in self.accepted]


class Sender:
    """The sending half of a client. Thread safe."""

    def __init__(self, calls: Calls, clock: Clock) -> None:
        self._calls = calls
        self._clock = clock
        self._opening = threading.Lock()  # held while the stream is replaced, and not while it is used
        self._exchange: SendExchange | None = None
        self._closed = False

    def close(self) -> None:
        """Finish the open stream. Waits a few seconds for answers that are under way."""
        if is_inherited():
            return  # the stream, and perhaps the held lock, belong to the parent process
        with self._opening:
            self._closed = True
            exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def send(self, batch: pa.RecordBatch, *, retry: bool, if_settled: IfSettled = "keep") -> SendAck:
        """Send a batch in ONE_SCHEMA. It is on the broker's disk on return.

        Raises the broker's refusal, or Unavailable.
        """
        key = _Keys(if_settled, is_used=retry).of(batch)
        again = Unavailable if retry else NotNow
        for more in self._calls.attempts():
            exchange: SendExchange | None = None
            try:
                exchange = self._open()
                return self._outcome(exchange.submit(batch, key))
            except again:
                if not more:
                    raise
                self._leave(exchange)
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
        run = _Run(self._calls, window, collect, retry, if_settled)
        try:
            for batch in batches(rows, topic, batch_rows, self._clock.wall_ms()):
                run.put(batch)
            return run.end()
        except TimeballError as error:
            raise run.failed(error) from error
        finally:
            run.close()

    def _open(self) -> SendExchange:
        with self._opening:
            if self._closed:
                raise RequestError("this Timeball client is closed")
            if self._exchange is None or not self._exchange.alive:
                self._exchange = SendExchange(self._calls.flight, ONE_SCHEMA, self._calls.endpoint)
            return self._exchange

    def _leave(self, exchange: SendExchange | None) -> None:
        """Stop using a stream for batches: the next batch opens a new one, perhaps to another node."""
        with self._opening:
            if exchange is None or self._exchange is not exchange:
                return
            self._exchange = None
        exchange.finish()

    def _outcome(self, future: Future[SendAck]) -> SendAck:
        return outcome(future, self._calls.timeout_ms, self._calls.endpoint)


def outcome(future: Future[SendAck], timeout_ms: int, endpoint: str) -> SendAck:
    """Wait for the answer to a batch. Raises Lost when it does not come in time."""
    try:
        return future.result(timeout_ms / 1000)
    except TimeoutError:
        raise Lost(
            f"{endpoint} did not answer within {timeout_ms} ms; the message may or may not have been accepted"
        ) from None


class _Keys:
    """The idempotency keys of one call. All of them carry the same id of the attempt.

    Without `is_used` there are none.
    """

    def __init__(self, if_settled: IfSettled, *, is_used: bool) -> None:
        if if_settled not in ("keep", "send"):
            raise RequestError(f"if_settled={if_settled!r}: 'keep' or 'send'")
        if if_settled == "send" and not is_used:
            raise RequestError(
                "if_settled='send' goes with retry=True, by which the broker knows the earlier send"
            )
        self._if_settled, self._attempt = if_settled, IDENTIFIERS.next_id() if is_used else ""

    def of(self, batch: pa.RecordBatch) -> str:
        """Make the text that accompanies a batch with ids.

        The same messages get the same key when they are sent again.
        """
        if not self._attempt:
            return ""
        key = f"{batch.column('topic')[0]}/{batch.column('unique_key')[0]}"
        said = SendKey(idempotency_key=key, attempt=self._attempt, if_settled=self._if_settled)
        return msgspec.json.encode(said).decode()


class _Run:
    """One send_many: a stream that the first batch opens, and the batches that have no answer yet."""

    def __init__(self, calls: Calls, window: int, collect: bool, retry: bool, if_settled: IfSettled) -> None:
        self._calls = calls
        self._window = window  # the most batches without an answer
        self._collect = collect  # go on after a refused batch
        self._has_failed = False  # an error ends the call, and the batches under way only get their outcomes
        self._keys = _Keys(if_settled, is_used=retry)
        self._again_when = Unavailable if retry else NotNow
        self._exchange: SendExchange | None = None
        self._schema: pa.Schema | None = None  # of the open stream
        # (first row, batch, answer, its stream), in the order of the rows
        self._waiting: deque[tuple[int, pa.RecordBatch, Future[SendAck], SendExchange]] = deque()
        self._rows = 0  # read from the caller so far
        self._accepted: list[AcceptedRows] = []
        self._refused: list[RefusedRows] = []
        self._unknown: list[RefusedRows] = []
        self._ids: list[pa.Array] = []
        self._existing: list[ExistingRows] = []
        self._past_rows = self._past_ms = 0

    def put(self, batch: pa.RecordBatch) -> None:
        """Send a batch, after waiting until the window has a free slot."""
        while len(self._waiting) >= self._window:
            self._settle()
        first_row = self._rows
        self._rows += batch.num_rows
        self._ids.append(batch.column("unique_key"))
        try:
            self._waiting.append((first_row, batch, *self._submit(batch)))
        except TimeballError as error:
            # The batch was not written to the stream, or the broker refused it together with the stream.
            self._refused.append(RefusedRows(first_row, batch.num_rows, error))
            raise

    def end(self) -> SendSummary:
        """Wait for the last answers, and build the summary."""
        self._settle_all()
        return self._summary()

    def failed(self, error: TimeballError) -> TimeballError:
        """Make the error of a call that ends early: its text states the accepted rows, and its `summary` lists them."""
        self._has_failed = True
        while self._waiting:
            first_row, batch, future, _ = self._waiting[0]
            if future.done() or not self._unknown:
                self._settle()
            else:
                # One answer was lost or late, so do not wait that long again for each of the others.
                self._waiting.popleft()
                self._unknown.append(
                    RefusedRows(first_row, batch.num_rows, Lost("the answer was not waited for"))
                )
        told = type(error)(f"{error} ({self._progress()})")
        told.summary = self._summary()
        return told

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

    def _progress(self) -> str:
        """Describe for people which rows are accepted."""
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
        if self._schema is not None and batch.schema != self._schema:
            # A stream has one schema. Leaving out a column that is new in this batch would lose data without notice.
            self._settle_all()
            self.close()
            self._exchange = None
        self._schema = batch.schema
        for more in self._calls.attempts():
            try:
                if self._exchange is None or not self._exchange.alive:
                    # The outcomes of the batches on a broken stream may be unknown; `_settle` reports them.
                    self._settle_all()
                exchange = self._open(batch.schema)
                return exchange.submit(batch, self._keys.of(batch)), exchange
            except NotSent:
                if not more:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _again(self, batch: pa.RecordBatch) -> SendAck:
        """Send a batch until there is a final answer. Raises the error of the last attempt."""
        for more in self._calls.attempts():
            exchange: SendExchange | None = None
            try:
                exchange = self._open(batch.schema)
                future = exchange.submit(batch, self._keys.of(batch))
                return outcome(future, self._calls.timeout_ms, self._calls.endpoint)
            except self._again_when:
                if not more:
                    raise
                self._leave(exchange)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _open(self, schema: pa.Schema) -> SendExchange:
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(self._calls.flight, schema, self._calls.endpoint)
        return self._exchange

    def _leave(self, exchange: SendExchange | None) -> None:
        """Stop using a stream for batches. Its answers still arrive."""
        if exchange is not None and self._exchange is exchange:
            self._exchange = None
            exchange.finish()

    def _settle_all(self) -> None:
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        first_row, batch, future, exchange = self._waiting.popleft()
        try:
            try:
                ack = outcome(future, self._calls.timeout_ms, self._calls.endpoint)
            except self._again_when:
                self._leave(exchange)
                ack = self._again(batch)
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


def spans(parts: Iterable[AcceptedRows | RefusedRows]) -> str:
    """List the rows of these parts for people, with neighbours joined: "rows 0 to 8191 and 9000 to 9009"."""
    joined: list[tuple[int, int]] = []
    for each in sorted(parts, key=lambda part: part.first_row):
        if joined and joined[-1][1] == each.first_row:
            joined[-1] = joined[-1][0], each.first_row + each.rows
        else:
            joined.append((each.first_row, each.first_row + each.rows))
    texts = [
        f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in joined[:SPANS_SHOWN]
    ]
    if len(joined) > SPANS_SHOWN:
        texts.append(f"{len(joined) - SPANS_SHOWN} more spans, which the error's summary lists")
    return "rows " + ", ".join(texts) if texts else ""
