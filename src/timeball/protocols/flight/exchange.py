"""One stream of an exchange: batches in without waiting, acknowledgements out in the same order.

    RPC thread        read_chunk -> check -> window.enter -> inbox
    broker's loop     inbox -> slot.settle                                                   (inbox)
    answering thread  window.take -> write_metadata

The RPC thread never waits for the disk, so that a group commit can hold many batches of one stream. A refused
batch is answered and the stream goes on. When the client goes away, what it sent is still decided by the
broker, and nobody waits for it: nothing is cancelled from here, because the commit that one batch waits for is
the commit of others too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as flight

from timeball import limits
from timeball.errors import InvalidMessage, OverLimit, Unavailable
from timeball.protocols.flight.inbox import STOPPING, refusal
from timeball.protocols.flight.window import Budget, Slot, Window

log = logging.getLogger(__name__)


class Columns(Protocol):
    """What batches of one stream must look like."""

    def adopt(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in our types, proven sound; raises InvalidMessage, OverLimit."""


class Taker(Protocol):
    """Where batches go."""

    def put(self, batch: pa.RecordBatch, slot: Slot) -> None:
        """Hand over a sound batch; its slot will be settled, once, whatever happens. Does not block."""


class Stream:
    """The two threads of one stream, and the window between them."""

    def __init__(self, inbox: Taker, budget: Budget, columns: Callable[[pa.Schema], Columns]) -> None:
        """`columns` checks the schema once, and then each batch; `inbox` takes what has passed."""
        self._inbox, self._columns = inbox, columns
        self.window = Window(budget)
        self._stopping = False

    def stop(self) -> None:
        """Refuse further batches; those under way are still answered."""
        self._stopping = True

    def run(self, reader: Any, writer: Any) -> None:
        """Serve until the client ends or breaks the stream. Runs in the RPC thread; raises InvalidMessage."""
        try:
            columns = self._columns(reader.schema)
        except pa.ArrowException as error:
            raise InvalidMessage(f"the stream does not begin with an Arrow schema: {error}") from error
        answering = threading.Thread(target=self._answer, args=(writer,), name="flight-answers", daemon=True)
        answering.start()
        try:
            self._read(reader, columns)
        finally:
            # What was accepted is answered, also when the stream ended badly. Flight frees both ends when this
            # function returns: the other thread must be gone by then.
            self.window.finish()
            answering.join()

    def _read(self, reader: Any, columns: Columns) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except (StopIteration, flight.FlightError):
                return  # the client has finished, or is gone
            except pa.ArrowException as error:
                raise InvalidMessage(f"not an Arrow stream any more: {error}") from error
            batch = chunk.data
            if batch is None:
                continue  # metadata alone: nothing to answer
            size_bytes = (
                batch.get_total_buffer_size()
            )  # nbytes would trust offsets that nobody has checked yet
            slot = self.window.enter(size_bytes)
            if slot is None:
                return
            try:
                if self._stopping:
                    raise Unavailable(STOPPING)
                _check_bytes(size_bytes)
                batch = columns.adopt(batch)
            except Exception as error:  # whatever it is, this batch gets an answer and the next one its turn
                slot.settle(refusal(error))
            else:
                self._inbox.put(batch, slot)
            del batch, chunk  # while it waits for the next one, this thread holds no memory of the last

    def _answer(self, writer: Any) -> None:
        try:
            while answers := self.window.take():
                for answer in answers:
                    writer.write_metadata(answer)
        except (pa.ArrowException, flight.FlightError):
            log.debug("the client went away before all of its batches were answered")
        finally:
            self.window.abort()


def _check_bytes(size_bytes: int) -> None:
    if size_bytes > limits.FRAME_BYTES_MAX:
        raise OverLimit(
            f"a batch of {size_bytes} bytes; at most {limits.FRAME_BYTES_MAX}: send smaller batches"
        )
