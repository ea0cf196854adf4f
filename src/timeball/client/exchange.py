"""Send streams of Flight: the client writes batches, and the broker answers them in the same order.

Each batch has one of three outcomes, which the caller can distinguish:

    never sent   `submit` raises `NotSent`, or the future has it: the stream was dead before the batch was written.
                 Sending it again is safe. If the broker refused the stream (for example its schema), the error is
                 the refusal instead
    answered     the future has the acknowledgement, or the broker's error: then the broker keeps nothing of the batch.
                 After `NotNow` the batch may be sent again on a new stream
    lost         the stream broke before the answer: the future has `Lost`. The broker may or may not have the batch

A reading thread opens the stream and completes the futures. Any thread may submit. `submit` blocks while the network
accepts no more data: this is the broker's back-pressure.

The stream has no time limit as a whole, because it may be long. Instead, the oldest batch without an answer has a time
limit, which begins when the batch becomes the oldest. After it a watching thread cancels the stream. This also ends a
blocked `submit`, and the batches without an answer are lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.attempts import Lost, NotSent, refusal
from timeball.client.calls import FLIGHT_ERRORS, Calls, translate
from timeball.client.network import run
from timeball.io.clock import SystemClock
from timeball.model import limits, rules, wire
from timeball.model.answers import SendAck, SendAnswer
from timeball.model.errors import Conflict, InvalidMessage, TimeballError, Unavailable

_CLOSE_WAIT_S = 5.0  # longest wait for the last answers

_decoder = msgspec.json.Decoder(SendAnswer)


def _size_error(batch: pa.RecordBatch, size_bytes: int) -> InvalidMessage:
    """Build the error of a batch that is too large. It names the first value that is too large, or else the batch."""
    columns = {
        field.name: batch.column(field.name)
        for field in batch.schema
        if field.name in rules.BYTES_MAX
        and (pa.types.is_string(field.type) or pa.types.is_binary(field.type))
    }
    try:
        rules.check_columns(columns)
    except InvalidMessage as error:
        return error
    return InvalidMessage(
        f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
    )


class Answer(Future[SendAck]):
    """The answer to a batch: the broker's acknowledgement, or an error as the module's docstring describes."""

    # When the time limit of the batch began, because it became the oldest without an answer. 0 before.
    begun_ns = 0
    waited_ns = 0  # set with the result: the time since `begun_ns`


class SendExchange:
    """A send stream: writes batches and matches the answers to them.

    The constructor opens the stream within `open_s` seconds. It raises NotSent if no broker answers, or the broker's
    refusal. All batches have `schema`.
    """

    def __init__(
        self,
        client: Any,
        schema: pa.Schema,
        endpoint: str,
        path: list[bytes] = wire.SEND_PATH,
        *,
        open_s: float,
        limit_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.limit_s = limit_s  # the time limit of a batch, in seconds; may be changed
        self._clock = SystemClock()
        # Guards the fields below. Notified when a first batch waits for its answer, and at the end.
        self._state = threading.Condition()
        self._unanswered: deque[Answer] = deque()  # in the order of their batches
        self._being_written: Answer | None = (
            None  # of the batch in `submit`, which completes it if the stream ends
        )
        self._end_reason: TimeballError | None = None  # set when the stream has ended
        self._is_cancelled = False  # by this client, because a time limit was over
        self._is_finished = False  # no further batch will be written
        # Held while writing, so that batches and futures have the same order. Taken before `_state`.
        self._write_lock = threading.Lock()
        self._writer: Any = None
        self._reader: Any = None
        self._opened: Future[None] = Future()
        descriptor = flight.FlightDescriptor.for_path(*path)
        self._thread = threading.Thread(
            target=self._run, args=(client, descriptor, schema), name="timeball-acks", daemon=True
        )
        self._thread.start()
        try:
            self._opened.result(open_s)
        except TimeoutError:
            self._cancel()
            raise NotSent(f"{endpoint} opened no stream within {open_s:.3g} s") from None
        threading.Thread(target=self._watch, name="timeball-watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        """True while the stream can be written to, as far as this client knows."""
        return self._end_reason is None and not self._is_finished

    def submit(self, batch: pa.RecordBatch, key: str = "") -> Answer:
        """Write a batch in the stream's schema. Returns the future of its answer.

        `key` is sent as the metadata of the batch: the JSON of a wire.SendKey, or of a wire.SourceStep in a stream from
        a source. If the stream had ended before, raises NotSent, or the refusal that ended it. A batch that is too
        large is not written: its future has InvalidMessage.
        """
        answer = Answer()
        if (size_bytes := batch.nbytes) > limits.BATCH_BYTES_MAX:
            # The broker would end the stream, and the other batches without an answer would be lost.
            answer.set_exception(_size_error(batch, size_bytes))
            return answer
        with self._write_lock:
            with self._state:
                if self._end_reason is not None or self._is_finished:
                    raise self._not_sent(self._end_reason or NotSent("the stream is closed"))
                self._unanswered.append(answer)
                self._being_written = answer
                if len(self._unanswered) == 1:
                    self._begin_time_limit(answer)
            failure: Exception | None = None
            try:
                if key:
                    self._writer.write_with_metadata(batch, key.encode())
                else:
                    self._writer.write_batch(batch)
            except FLIGHT_ERRORS as error:
                failure = error
                # The reading thread may still receive the broker's reason.
                self._thread.join(_CLOSE_WAIT_S)
            self._end_writing(answer, failure)
            if not self._thread.is_alive():
                self._close_writer()
        return answer

    def _begin_time_limit(self, answer: Answer) -> None:
        """Begin the time limit of the oldest batch without an answer. The caller holds `_state`."""
        answer.begun_ns = self._clock.monotonic_ns()
        self._state.notify()

    def _end_writing(self, answer: Answer, failure: Exception | None) -> None:
        """Restart the time limit of a batch that was written, or complete its future if the stream has ended.

        `failure`: the error of the write, or None.
        """
        with self._state:
            self._being_written = None
            reason = self._end_reason
            if failure is None and reason is None:
                if self._unanswered and self._unanswered[0] is answer:
                    self._begin_time_limit(answer)
                return
            if answer in self._unanswered:
                self._unanswered.remove(answer)
        if answer.done():
            return
        # After a cancel by this client the batch may have been written completely, so it is lost and not "not sent".
        if failure is not None and not self._is_cancelled:
            reason = self._not_sent(reason if reason is not None else translate(failure, self.endpoint))
        self._complete(answer, reason if reason is not None else self._overdue())

    @staticmethod
    def _not_sent(reason: TimeballError) -> TimeballError:
        """Choose the error if the stream has ended for `reason` before a batch was written, or before it was open.

        Unavailable and its subclasses become NotSent: another stream may succeed. Any other error is a refusal and
        stays, because a new stream would be refused in the same way.
        """
        return NotSent(str(reason)) if isinstance(reason, Unavailable) else reason

    def finish(self) -> None:
        """Tell the broker that no more batches follow. Answers still arrive.

        This sends a message instead of half-closing the stream by `done_writing`. When the stream breaks, Arrow's
        reader half-closes it in the reading thread, and gRPC aborts a process in which two threads do so at once.
        """
        with self._write_lock:
            if not self._is_finished:
                self._is_finished = True
                try:
                    self._writer.write_metadata(wire.END_OF_STREAM)
                except FLIGHT_ERRORS:
                    pass  # the stream is broken, and the reading thread receives the reason

    def close(self) -> None:
        """Finish, wait at most 5 s for the last answers, and close the stream. Batches without an answer are lost.

        First waits for a `submit` in progress.
        """
        self.finish()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            self._reader.cancel()
            self._thread.join()
        self._close_writer()

    def _close_writer(self) -> None:
        """Close the writer of an ended stream. Arrow would print an error if it were freed without being closed.

        The caller holds the write lock, or the reading thread has ended.
        """
        try:
            self._writer.close()
        except FLIGHT_ERRORS:
            pass  # every future without an answer has already received an error

    # ---- the watching thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Cancel the stream when the time limit of the oldest batch without an answer is over."""
        with self._state:
            while self._end_reason is None:
                if not self._unanswered:
                    self._state.wait()
                    continue
                waited_s = (self._clock.monotonic_ns() - self._unanswered[0].begun_ns) / 1e9
                if waited_s >= self.limit_s:
                    break
                self._state.wait(self.limit_s - waited_s)
            else:
                return
        self._cancel()

    def _cancel(self) -> None:
        """Cancel the stream because a time limit is over. May be called before the stream is open."""
        with self._state:
            self._is_cancelled = True
            reader = self._reader
        if reader is not None:  # else the reading thread cancels the stream once it is open
            reader.cancel()

    def _overdue(self) -> Lost:
        """Build the error of a batch without an answer within its time limit."""
        return Lost(
            f"{self.endpoint} did not answer within {self.limit_s:.3g} s; the message may or may not have been accepted"
        )

    # ---- the reading thread ---------------------------------------------------------------------------------

    def _run(self, client: Any, descriptor: flight.FlightDescriptor, schema: pa.Schema) -> None:
        """Open the stream, complete the futures until it ends, and close it. `_opened` receives the first error."""
        try:
            writer, reader = client.do_exchange(descriptor)
            with self._state:
                self._writer, self._reader = writer, reader
            if self._is_cancelled:
                reader.cancel()
            writer.begin(schema)
        except FLIGHT_ERRORS as error:
            # A broker that refuses the caller, or that stops, may end the stream before the schema is written.
            self._opened.set_exception(self._not_sent(translate(error, self.endpoint)))
            return
        self._opened.set_result(None)
        self._end(self._read())
        if self._write_lock.acquire(blocking=False):  # else the thread that holds it closes the writer
            self._close_writer()
            self._write_lock.release()

    def _read(self) -> TimeballError:
        """Complete the futures until the stream ends. Returns the reason of the end, for batches without an answer."""
        try:
            while True:
                metadata = self._reader.read_chunk().app_metadata
                if metadata is not None:
                    self._complete_oldest(_decoder.decode(metadata))
        except StopIteration:
            return Lost(f"{self.endpoint} closed the stream")
        except FLIGHT_ERRORS as error:
            if self._is_cancelled:
                return self._overdue()
            reason = translate(error, self.endpoint)
            # A refusal that ends the stream comes after the answers to all accepted batches, so the other batches were
            # not accepted. Without a connection (NotSent) no batch was accepted either.
            if type(reason) is Unavailable:
                return Lost(f"{reason}; a message under way may or may not have been accepted")
            return reason
        except msgspec.MsgspecError as error:
            return Lost(f"{self.endpoint} sent an answer that cannot be read: {error}")

    def _end(self, reason: TimeballError) -> None:
        """Complete all futures with `reason`, except that of a batch in `submit`, which `submit` completes."""
        with self._state:
            self._end_reason = reason
            unanswered, self._unanswered = self._unanswered, deque()
            being_written = self._being_written
            self._state.notify()
        for answer in unanswered:
            if answer is not being_written:
                self._complete(answer, reason)

    def _complete_oldest(self, message: SendAnswer) -> None:
        """Complete the future of the oldest batch without an answer."""
        with self._state:
            answer = self._unanswered.popleft() if self._unanswered else None
            if self._unanswered:
                self._begin_time_limit(self._unanswered[0])
        if answer is None:
            return  # `submit` has completed this batch with an error and removed its future
        if message.error is not None:
            self._complete(answer, refusal(message.error, message.text))
        else:
            self._complete(
                answer,
                SendAck(message.first_seq, message.rows, message.store_ms, message.outcome, message.states),
            )

    def _complete(self, answer: Answer, result: SendAck | TimeballError) -> None:
        """Complete a future, and measure how long its batch was the oldest."""
        if answer.begun_ns:
            answer.waited_ns = self._clock.monotonic_ns() - answer.begun_ns
        if isinstance(result, SendAck):
            answer.set_result(result)
        else:
            answer.set_exception(result)


# ---- records of a source -----------------------------------------------------------------------------------


class Source:
    """Sends the records of one source: an external queue with partitions and positions, such as a Kafka topic.

    Each batch contains the positions at which it begins and ends in the source. The broker stores them with the
    messages, and refuses records that it already has. So a batch whose answer was lost can be sent again, also by
    another process. A Source belongs to one thread.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self._calls = calls
        self._exchange: SendExchange | None = None

    def positions(self) -> dict[int, int]:
        """Read the next position of each partition from the broker. Empty if nothing was sent from the source."""
        body = wire.SourcePositions(source=self.name)
        return self._calls.action("source_positions", body, dict[str, dict[int, int]])["positions"]

    def send(self, batch: pa.RecordBatch, begin: Mapping[int, int], end: Mapping[int, int]) -> None:
        """Send the messages of the records with begin <= position < end in each partition. Durable on return.

        All batches have the same schema. A batch is empty if none of the records became a message. Raises Conflict if
        the broker's positions of the source are not `begin`: read the positions, and continue from there. Raises also
        the broker's refusals, and Unavailable.
        """
        step = wire.SourceStep(source=self.name, begin=dict(begin), end=dict(end))
        metadata = msgspec.json.encode(step).decode()

        async def attempt(limit_s: float) -> None:
            try:
                exchange = self._open(batch.schema, limit_s)
                exchange.submit(batch, metadata).result()
            except Conflict:
                # A repetition after a lost answer is a conflict, too. The batch was stored if the positions are `end`.
                stored_positions = self.positions()
                if any(stored_positions.get(partition) != position for partition, position in end.items()):
                    raise
            except TimeballError:
                self.close()
                raise

        run(self._calls.with_retries(attempt, self._calls.timeout_ms))

    def close(self) -> None:
        """Close the stream."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _open(self, schema: pa.Schema, limit_s: float) -> SendExchange:
        """Return the open stream, or open one. `limit_s`: the time limit of the next batch."""
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(
                self._calls.flight,
                schema,
                self._calls.endpoint,
                wire.SOURCE_PATH,
                open_s=self._calls.connect_limit_s(limit_s),
                limit_s=limit_s,
            )
        self._exchange.limit_s = limit_s
        return self._exchange
