"""An open send stream: the client writes batches, and the broker answers them in the same order.

Each batch has one of three outcomes, which the caller can distinguish:

    never sent   `submit` raises `NotSent`: the stream was dead before the batch was written. Sending it again is safe.
                 If the broker refused the stream (for example its schema), `submit` raises that refusal
    answered     the future has the acknowledgement, or the broker's error: then the broker keeps nothing of the batch.
                 After `NotNow` the batch may be sent again on a new stream
    lost         the stream broke before the answer: the future has `Lost`. The broker may or may not have the batch

A reading thread completes the futures. Any thread may submit. `submit` blocks while the network accepts no more data:
this is the broker's back-pressure.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.attempts import Lost, NotSent, refusal
from timeball.client.calls import translate
from timeball.model import limits, rules
from timeball.model.answers import SendAck, SendAnswer
from timeball.model.errors import InvalidMessage, TimeballError, Unavailable
from timeball.model.wire import END_OF_STREAM, SEND_PATH

_CLOSE_WAIT_S = 5.0  # for the last answers


_decoder = msgspec.json.Decoder(SendAnswer)


def _size_error(batch: pa.RecordBatch, size_bytes: int) -> InvalidMessage:
    """Build the error of a batch that is too large: the rule that a row breaks, or else the size of the batch."""
    text_tests = (pa.types.is_string, pa.types.is_binary)
    columns = {
        field.name: batch.column(field.name)
        for field in batch.schema
        if field.name in rules.BYTES_MAX and any(is_text(field.type) for is_text in text_tests)
    }
    try:
        rules.check_columns(columns)
    except InvalidMessage as error:
        return error
    return InvalidMessage(
        f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
    )


class SendExchange:
    """A send stream: writes batches and matches the answers to them.

    The constructor opens the stream. It raises NotSent if no broker answers, or the broker's refusal.
    """

    def __init__(self, client: Any, schema: pa.Schema, endpoint: str, path: list[bytes] = SEND_PATH) -> None:
        self._endpoint = endpoint
        # Futures without an answer, in the order of their batches.
        self._unanswered: deque[Future[SendAck]] = deque()
        self._state_lock = threading.Lock()  # guards `_unanswered` and `_end_reason`
        self._write_lock = (
            threading.Lock()
        )  # held while writing, so that batches and futures have the same order
        self._end_reason: TimeballError | None = None  # set when the stream has ended
        self._is_finished = False  # no further batch will be written
        try:
            descriptor = flight.FlightDescriptor.for_path(*path)
            self._writer, self._reader = client.do_exchange(descriptor)
            self._writer.begin(schema)
        except (pa.ArrowException, flight.FlightError) as error:
            # A broker that refuses the caller may end the stream before the schema is written.
            raise self._not_sent(translate(error, endpoint)) from error
        self._thread = threading.Thread(target=self._read, name="timeball-acks", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the stream can be written to, as far as this client knows."""
        return self._end_reason is None and not self._is_finished

    def submit(self, batch: pa.RecordBatch, key: str = "") -> Future[SendAck]:
        """Write a batch in the stream's schema. The future receives the answer.

        `key` is sent as the metadata of the batch: the JSON of a wire.SendKey, or of a wire.SourceStep in a stream from
        a source. Raises NotSent, or the refusal that ended the stream.
        """
        future: Future[SendAck] = Future()
        if (size_bytes := batch.nbytes) > limits.BATCH_BYTES_MAX:
            # If it were written, the broker would end the stream, and the batches under way would be lost.
            future.set_exception(_size_error(batch, size_bytes))
            return future
        with self._write_lock:
            with self._state_lock:
                if self._end_reason is not None or self._is_finished:
                    raise self._not_sent(self._end_reason or NotSent("the stream is closed"))
                self._unanswered.append(future)
            try:
                if key:
                    self._writer.write_with_metadata(batch, key.encode())
                else:
                    self._writer.write_batch(batch)
            except (pa.ArrowException, flight.FlightError) as error:
                with self._state_lock:
                    if future in self._unanswered:
                        self._unanswered.remove(future)
                # The reading thread may still receive the broker's reason.
                self._thread.join(_CLOSE_WAIT_S)
                reason = (
                    self._end_reason if self._end_reason is not None else translate(error, self._endpoint)
                )
                raise self._not_sent(reason) from error
        return future

    @staticmethod
    def _not_sent(reason: TimeballError) -> TimeballError:
        """Choose the error for a batch that was not written.

        A refusal stays as it is, because a new stream would be refused in the same way. Other reasons become NotSent.
        """
        return NotSent(str(reason)) if isinstance(reason, Unavailable) else reason

    def finish(self) -> None:
        """Announce the end of the batches. Answers still arrive.

        This sends a message, instead of calling `done_writing`. When the stream breaks, Arrow's reader half-closes it
        in the reading thread, and gRPC aborts a process in which two threads do so at the same moment.
        """
        with self._write_lock:
            if not self._is_finished:
                self._is_finished = True
                try:
                    self._writer.write_metadata(END_OF_STREAM)
                except (pa.ArrowException, flight.FlightError):
                    pass  # the stream is broken, and the reading thread receives the reason

    def close(self) -> None:
        """Finish, wait at most 5 s for the last answers, and close the stream."""
        self.finish()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            self._reader.cancel()
            self._thread.join()
        try:
            self._writer.close()
        except (pa.ArrowException, flight.FlightError):
            pass  # every future without an answer has already received an error

    def _read(self) -> None:
        end_reason: TimeballError = Lost(f"{self._endpoint} closed the stream")
        try:
            while True:
                metadata = self._reader.read_chunk().app_metadata
                if metadata is not None:
                    self._complete_oldest(_decoder.decode(metadata))
        except StopIteration:
            pass
        except (pa.ArrowException, flight.FlightError) as error:
            end_reason = translate(error, self._endpoint)
            # A refusal that ends the stream comes after the answers to all accepted batches, so the other batches were
            # not accepted. Without a connection (NotSent) no batch was accepted either.
            if type(end_reason) is Unavailable:
                end_reason = Lost(f"{end_reason}; a message under way may or may not have been accepted")
        except msgspec.MsgspecError as error:
            end_reason = Lost(f"{self._endpoint} sent an answer that cannot be read: {error}")
        with self._state_lock:
            self._end_reason = end_reason
            unanswered, self._unanswered = self._unanswered, deque()
        for future in unanswered:
            future.set_exception(end_reason)

    def _complete_oldest(self, answer: SendAnswer) -> None:
        """Complete the future of the oldest batch without an answer."""
        with self._state_lock:
            future = self._unanswered.popleft() if self._unanswered else None
        if future is None:
            return  # `submit` raised an error for this batch and removed its future
        if answer.error is not None:
            future.set_exception(refusal(answer.error, answer.text))
        else:
            future.set_result(
                SendAck(answer.first_seq, answer.rows, answer.store_ms, answer.outcome, answer.states)
            )
