"""One stream of an exchange: batches in without waiting, acknowledgements out in the same order.

    reading thread    message -> decode and check -> window.enter -> taker
    broker's loop     taker -> slot.settle                                                   (sends)
    RPC thread        window.pop_answers -> acknowledgements

The reading thread never waits for the disk, so that a group commit can hold many batches of one stream. A refused
batch is answered and the stream goes on. When the client goes away, what it sent is still decided by the
broker, and no client waits for it: nothing is cancelled from here, because the commit that one batch waits for is
the commit of others too.

A stream holds one message: the one it receives, or the one it has and waits with. Streams decode one after the other
(`decoding`), so that what a message becomes in between is there once and not once a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pyarrow as pa

from timeball.access import Caller
from timeball.errors import InvalidMessage, Unavailable
from timeball.protocols import arrow_ipc as ipc
from timeball.protocols.arrow_columns import ReleaseColumns, SendColumns, check_bytes
from timeball.protocols.flight import codec
from timeball.protocols.flight.protobuf import Data
from timeball.protocols.flight.sends import STOPPING, Releases, Sends, refusal
from timeball.protocols.flight.window import Budget, Window


class Stream:
    """The two threads of one stream, and the window between them."""

    def __init__(
        self,
        taker: Sends | Releases,
        caller: Caller,
        budget: Budget,
        columns: Callable[[pa.Schema], SendColumns | ReleaseColumns],
        decoding: threading.Lock,
    ) -> None:
        """`columns` checks the schema once, and then each batch; `taker` takes what has passed."""
        self._taker, self._caller, self._columns, self._decoding = taker, caller, columns, decoding
        self.window = Window(budget)
        self._stopping = False
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Refuse further batches; those under way are still answered."""
        self._stopping = True

    def answers(self, messages: Iterator[Data]) -> Iterator[bytes]:
        """Yield the answer to each batch until the client ends or breaks the stream.

        `messages` raises TimeballError for bytes that are no message. Raises the stream's error after the last answer.
        """
        reading = threading.Thread(target=self._run, args=(messages,), name="flight-reads", daemon=True)
        reading.start()
        try:
            while answers := self.window.pop_answers():
                yield from answers
        finally:
            self.window.abort()  # also when the client does not read the rest of the answers
        if self._failure is not None:
            raise self._failure

    def _run(self, messages: Iterator[Data]) -> None:
        try:
            self._read(messages)
        except Exception as error:  # of any kind: a fault of ours must not leave the client waiting
            self._failure = error
        finally:
            self.window.finish()  # what was accepted is answered, also when the stream ended badly

    def _read(self, messages: Iterator[Data]) -> None:
        schema, columns = None, None
        for message in messages:
            if not message.header:
                continue  # a descriptor, or metadata alone: nothing to answer
            if schema is None or columns is None:
                schema = ipc.schema(message.header)
                columns = self._columns(schema)
                continue
            entry = self._decoded(message, schema, columns)
            del message  # while this thread waits, it holds what the message has become and no more
            if not self._enter(*entry):
                return
            del entry
        if schema is None and not self.window.aborted:
            raise InvalidMessage("the stream does not begin with an Arrow schema")

    def _decoded(
        self, message: Data, schema: pa.Schema, columns: SendColumns | ReleaseColumns
    ) -> tuple[pa.RecordBatch | bytes, int, str]:
        """Return a sound batch, its bytes and its key ("" for none), or the refusal that answers it."""
        try:
            if self._stopping:
                raise Unavailable(STOPPING)
            with self._decoding:
                batch = columns.adopt(ipc.batch(message.header, message.body, schema))
                check_bytes(batch.nbytes)
            key = codec.idempotency_key(message.metadata)
        except Exception as error:  # of any kind: this batch gets an answer and the next one its turn
            return refusal(error), 0, ""
        return batch, max(message.size_bytes, batch.nbytes), key

    def _enter(self, entry: pa.RecordBatch | bytes, size_bytes: int, key: str) -> bool:
        """Hand a batch over, or give the refusal its turn; False when the stream was given up."""
        slot = self.window.enter(size_bytes)
        if slot is None:
            return False
        if isinstance(entry, bytes):
            slot.settle(entry)
        else:
            self._taker.put(entry, slot, self._caller, key)
        return True
