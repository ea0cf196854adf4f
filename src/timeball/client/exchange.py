"""One open send stream: batches out, acknowledgements in, in the same order.

A batch is in one of three states, and the caller always learns which:

    never sent   `NotSent`: the stream was dead before the batch was on it; sending it again is safe. If the broker
                 ended the stream for a reason of its own (a refused schema), that reason instead
    answered     the future has the acknowledgement, or the broker's error: nothing of it was kept. After `NotNow` it
                 may be sent again, on a new stream
    lost         the stream broke in between: the future has `Lost`; the broker may or may not have it

A reading thread settles the futures; any thread may submit. A full network makes `submit` wait: that is the
broker's back-pressure.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball import limits, rules
from timeball.client.calls import NotSent, refusal, translate
from timeball.errors import InvalidMessage, TimeballError, Unavailable
from timeball.wire import END_OF_STREAM, SEND_PATH, SendAck, SendAnswer

_CLOSE_WAIT_S = 5.0


class Lost(Unavailable):
    """The stream broke before the answer came."""

    code = "answer_lost"


_decoder = msgspec.json.Decoder(SendAnswer)


def _too_large(batch: pa.RecordBatch, size_bytes: int) -> InvalidMessage:
    """Return the rule that one of its rows breaks; all of it together is too large when none does."""
    texts = (pa.types.is_string, pa.types.is_binary)
    columns = {
        field.name: batch.column(field.name)
        for field in batch.schema
        if field.name in rules.BYTES_MAX and any(is_text(field.type) for is_text in texts)
    }
    try:
        rules.check_columns(columns)
    except InvalidMessage as error:
        return error
    return InvalidMessage(
        f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
    )


class SendExchange:
    """Writes batches and matches answers to them.

    Opens when built; raises NotSent when no broker answers, or its refusal.
    """

    def __init__(self, client: Any, schema: pa.Schema, endpoint: str, path: list[bytes] = SEND_PATH) -> None:
        self._endpoint = endpoint
        self._waiting: deque[Future[SendAck]] = deque()
        self._state = threading.Lock()
        self._write = threading.Lock()
        self._end: TimeballError | None = None
        self._finished = False
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
        """Return whether it can still be written to, as far as known."""
        return self._end is None and not self._finished

    def submit(self, batch: pa.RecordBatch, key: str = "") -> Future[SendAck]:
        """Write a batch of the stream's schema, with the text beside it; the future gets its answer.

        `key`: JSON of wire.SendKey; of a stream from a source, of wire.SourceStep.

        Raises NotSent, or the refusal that ended the stream.
        """
        future: Future[SendAck] = Future()
        if (size_bytes := batch.nbytes) > limits.BATCH_BYTES_MAX:
            # Written, it would end the stream, and with it what is under way.
            future.set_exception(_too_large(batch, size_bytes))
            return future
        with self._write:
            with self._state:
                if self._end is not None or self._finished:
                    raise self._not_sent(self._end or NotSent("the stream is closed"))
                self._waiting.append(future)
            try:
                if key:
                    self._writer.write_with_metadata(batch, key.encode())
                else:
                    self._writer.write_batch(batch)
            except (pa.ArrowException, flight.FlightError) as error:
                with self._state:
                    if future in self._waiting:
                        self._waiting.remove(future)
                # The broker may have said why, in the answers.
                self._thread.join(_CLOSE_WAIT_S)
                reason = self._end if self._end is not None else translate(error, self._endpoint)
                raise self._not_sent(reason) from error
        return future

    @staticmethod
    def _not_sent(reason: TimeballError) -> TimeballError:
        """Return the error of a batch that was not written: a refusal as it stands, as a new stream meets it again."""
        return NotSent(str(reason)) if isinstance(reason, Unavailable) else reason

    def finish(self) -> None:
        """Say that nothing more comes; the answers still do.

        By a message, and not by `done_writing`: when the stream breaks, Arrow's reader half-closes it in the reading
        thread, and gRPC aborts a process in which two threads do so at one moment.
        """
        with self._write:
            if not self._finished:
                self._finished = True
                try:
                    self._writer.write_metadata(END_OF_STREAM)
                except (pa.ArrowException, flight.FlightError):
                    pass  # it is broken: the reading thread knows why

    def close(self) -> None:
        """Finish, wait a little for the last answers, and let go."""
        self.finish()
        self._thread.join(_CLOSE_WAIT_S)
        if self._thread.is_alive():
            self._reader.cancel()
            self._thread.join()
        try:
            self._writer.close()
        except (pa.ArrowException, flight.FlightError):
            pass  # all that waited for an answer have been told

    def _read(self) -> None:
        end: TimeballError = Lost(f"{self._endpoint} closed the stream")
        try:
            while True:
                metadata = self._reader.read_chunk().app_metadata
                if metadata is not None:
                    self._settle(_decoder.decode(metadata))
        except StopIteration:
            pass
        except (pa.ArrowException, flight.FlightError) as error:
            end = translate(error, self._endpoint)
            # A refusal that ends the stream comes behind the answers to all that was taken: the rest was not. Nor was
            # any of a stream that no connection has carried.
            if type(end) is Unavailable:
                end = Lost(f"{end}; a message under way may or may not have been accepted")
        except msgspec.MsgspecError as error:
            end = Lost(f"{self._endpoint} sent an answer that cannot be read: {error}")
        with self._state:
            self._end = end
            lost, self._waiting = self._waiting, deque()
        for future in lost:
            future.set_exception(end)

    def _settle(self, answer: SendAnswer) -> None:
        with self._state:
            future = self._waiting.popleft() if self._waiting else None
        if future is None:
            return  # its writer failed and has been told that nothing was sent
        if answer.error is not None:
            future.set_exception(refusal(answer.error, answer.text))
        else:
            future.set_result(
                SendAck(answer.first_seq, answer.rows, answer.store_ms, answer.outcome, answer.states)
            )
