"""Sends columns over Flight: each call opens a stream for its batches.

A batch that was never written, or that a stopping broker refused, is sent again a few times on a new stream. A batch
whose answer was lost is sent again only with an idempotency key, by which the broker recognizes a batch that it already
has. `retry=True` gives each batch such a key, made of the topic and the id of its first message. The answer to a
repeated batch says that the batch exists, and contains the current states of its messages.

A batch has the time limit of a call from the moment at which it is the oldest one without an answer, and its attempts
share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from timeball.client.attempts import Lost
from timeball.client.calls import Calls
from timeball.client.exchange import Answer, SendExchange
from timeball.client.network import run
from timeball.client.outgoing import Columns, batches
from timeball.client.receipts import IfSettled, Outcomes, SendKeys, SendSummary
from timeball.io.clock import Clock
from timeball.model.answers import SendAck
from timeball.model.errors import TimeballError
from timeball.model.rules import past_due

T = TypeVar("T")


def send_columns(
    calls: Calls,
    clock: Clock,
    rows: Columns,
    topic: str | None,
    batch_rows: int | None,
    window: int,
    collect: bool,
    retry: bool,
    if_settled: IfSettled,
) -> SendSummary:
    """Send rows in batches, of which up to `window` wait for their answers at a time.

    `collect`: a refused batch does not end the call. Timeball.send_many documents the other arguments and the errors.
    """
    calls.check()
    sending = _SendMany(calls, window, collect, retry, if_settled)
    try:
        for batch in batches(rows, topic, batch_rows, clock.wall_ms()):
            sending.put(batch)
        return sending.end()
    except TimeballError as error:
        raise sending.failed(error) from error
    finally:
        sending.close()


def _encode_key(keys: SendKeys, batch: pa.RecordBatch) -> str:
    """Encode the idempotency key of a batch as the JSON of a wire.SendKey. Returns "" if keys are not used."""
    key = keys.key_for(batch.column("topic")[0], batch.column("unique_key")[0])
    return "" if key is None else msgspec.json.encode(key).decode()


class _Unanswered(NamedTuple):
    """A batch without an answer. `first_row` is the number of its first row in the call."""

    first_row: int
    batch: pa.RecordBatch
    answer: Answer
    exchange: SendExchange  # the stream to which it was written


class _SendMany:
    """The state of a send_many: its stream, the batches without an answer, and the outcomes so far.

    The first batch opens the stream.
    """

    def __init__(self, calls: Calls, window: int, collect: bool, retry: bool, if_settled: IfSettled) -> None:
        self._calls = calls
        self._window = window  # the largest number of batches without an answer
        # An error ends the call, and only the outcomes of batches without an answer are still recorded.
        self._has_failed = False
        self._keys = SendKeys(if_settled, is_used=retry)
        self._is_repeatable = retry
        self._exchange: SendExchange | None = None
        self._schema: pa.Schema | None = None  # of the open stream
        # The time limit of a batch in its first attempt.
        self._limit_s = calls.attempt_limit_s(calls.timeout_ms / 1000, is_repeatable=retry)
        self._unanswered: deque[_Unanswered] = deque()  # in the order of their rows
        self._outcomes = Outcomes(collect=collect)
        self._ids: list[pa.Array] = []

    def put(self, batch: pa.RecordBatch) -> None:
        """Send a batch, after waiting for answers while the window is full. Raises the error that ends the call."""
        while len(self._unanswered) >= self._window:
            self._handle_oldest()
        first_row = self._outcomes.add_rows(batch.num_rows)
        self._ids.append(batch.column("unique_key"))
        try:
            self._unanswered.append(_Unanswered(first_row, batch, *self._submit(batch)))
        except TimeballError as error:
            # The batch was not written to the stream, or the broker refused it together with the stream.
            self._outcomes.refuse(first_row, batch.num_rows, error)
            raise

    def end(self) -> SendSummary:
        """Wait for the last answers, and build the summary. Raises the error that ends the call."""
        self._handle_all()
        return self._outcomes.summary(self._all_ids())

    def failed(self, error: TimeballError) -> TimeballError:
        """Build the error of a call that `error` ends, when the batches without an answer have their outcomes.

        The text of the result names the accepted rows, and its `summary` lists the outcomes.
        """
        self._has_failed = True
        while self._unanswered:
            oldest = self._unanswered[0]
            if oldest.answer.done() or not self._outcomes.unknown:
                self._handle_oldest()
            else:
                # An answer was lost or late already. Waiting for each of the others could take as long again.
                self._unanswered.popleft()
                lost = Lost("the answer was not waited for")
                self._outcomes.fail(oldest.first_row, oldest.batch.num_rows, lost, is_last=True)
        return self._outcomes.error(error, self._all_ids())

    def _all_ids(self) -> pa.ChunkedArray:
        """Join the ids of all rows so far to one column of strings."""
        return pa.chunked_array([ids.cast(pa.string(), safe=False) for ids in self._ids], pa.string())

    def close(self) -> None:
        """Close the stream."""
        if self._exchange is not None:
            self._exchange.close()

    def _submit(self, batch: pa.RecordBatch) -> tuple[Answer, SendExchange]:
        """Write a batch to the stream, or to a new one if it has ended or has another schema.

        Returns the future of the answer, and the stream. Raises TimeballError if the batch was not written, or if an
        earlier batch ends the call.
        """
        if self._schema is not None and batch.schema != self._schema:
            # A stream has only one schema, so a batch with another schema needs another stream.
            self._handle_all()
            self.close()
            self._exchange = None
        self._schema = batch.schema

        async def attempt(limit_s: float) -> tuple[Answer, SendExchange] | TimeballError:
            """Submit the batch once. Returns its answer and the stream, or an error of an earlier batch."""
            if self._exchange is None or not self._exchange.alive:
                # Earlier batches on the broken stream may have no answer. Their outcomes come first. An error of theirs
                # ends the call, and must not cause another attempt for this batch, so it is returned.
                try:
                    self._handle_all()
                except TimeballError as error:
                    return error
            exchange = self._open(batch.schema, limit_s)
            return exchange.submit(batch, _encode_key(self._keys, batch)), exchange

        submitted = self._with_retries(attempt, self._calls.timeout_ms)
        if isinstance(submitted, TimeballError):
            raise submitted
        return submitted

    def _with_retries(self, attempt: Callable[[float], Awaitable[T]], timeout_ms: int) -> T:
        """Make attempts as `Attempts.with_retries` does. They are repeatable if batches have keys."""
        return run(self._calls.with_retries(attempt, timeout_ms, is_repeatable=self._is_repeatable))

    def _may_repeat(self, error: TimeballError) -> bool:
        return self._calls.may_repeat(error, is_repeatable=self._is_repeatable)

    def _send_again(self, batch: pa.RecordBatch, timeout_ms: int) -> SendAck:
        """Send a batch again until it has a final answer. Raises the error of the last attempt."""

        async def attempt(limit_s: float) -> SendAck:
            """Send the batch once, and wait for its answer within `limit_s` seconds."""
            exchange: SendExchange | None = None
            try:
                exchange = self._open(batch.schema, limit_s)
                exchange.limit_s = limit_s
                ack = exchange.submit(batch, _encode_key(self._keys, batch)).result()
                exchange.limit_s = self._limit_s
                return ack
            except TimeballError:
                self._abandon(exchange)
                raise

        return self._with_retries(attempt, timeout_ms)

    def _open(self, schema: pa.Schema, limit_s: float) -> SendExchange:
        """Return the open stream, or open one within the time limit of an attempt. Raises as SendExchange."""
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(
                self._calls.flight,
                schema,
                self._calls.endpoint,
                open_s=self._calls.connect_limit_s(limit_s),
                limit_s=self._limit_s,
            )
        return self._exchange

    def _abandon(self, exchange: SendExchange | None) -> None:
        """Stop writing to a stream. Its answers still arrive."""
        if exchange is not None and self._exchange is exchange:
            self._exchange = None
            exchange.finish()

    def _handle_all(self) -> None:
        """Wait for all answers, and record the outcomes. Raises the error that ends the call."""
        while self._unanswered:
            self._handle_oldest()

    def _handle_oldest(self) -> None:
        """Wait for the answer to the oldest batch, and record its outcome. Sends the batch again if that is safe.

        Raises the error if it ends the call.
        """
        first_row, batch, answer, exchange = self._unanswered.popleft()
        try:
            try:
                ack = answer.result()
            except TimeballError as error:
                self._calls.leave_after(error, exchange.endpoint)
                remaining_ms = self._calls.timeout_ms - answer.waited_ns // 1_000_000
                if self._has_failed or remaining_ms <= 0 or not self._may_repeat(error):
                    raise
                self._abandon(exchange)
                ack = self._send_again(batch, remaining_ms)
        except TimeballError as error:
            self._outcomes.fail(first_row, batch.num_rows, error, is_last=self._has_failed)
        else:
            past_rows = past_ms = 0
            if "due_ms" in batch.schema.names and not ack.states:
                past_rows, past_ms = past_due(batch.column("due_ms"), ack.store_ms)
            self._outcomes.accept(first_row, ack, past_rows, past_ms)
