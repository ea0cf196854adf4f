"""A client whose broker breaks each send stream at the moment when the client ends it. Prints "done" at the end.

With `half-close` it ends the streams with gRPC's own call, as clients did before END_OF_STREAM.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.exchange import SendExchange
from timeball.model.errors import TimeballError

STREAMS = 1_000
ANSWER_S = 0.0008  # the broker breaks a stream about this long after its begin, and the client ends it within this time
SCHEMA = pa.schema([("topic", pa.string())])


class Breaking(flight.FlightServerBase):
    """A broker that breaks each stream as soon as its schema has arrived."""

    def do_exchange(
        self, _context: object, _descriptor: object, reader: flight.MetadataRecordBatchReader, _writer: object
    ) -> None:
        """Wait for the schema, and break the stream."""
        with suppress(StopIteration):
            reader.read_chunk()
        raise flight.FlightUnavailableError("it breaks")


class HalfClosing(SendExchange):
    """Ends a stream with gRPC's half-close, and without waiting for the broker."""

    def finish(self) -> None:
        with suppress(pa.ArrowException, flight.FlightError):
            self._writer.done_writing()


def main(kind: type[SendExchange]) -> None:
    """Open, use and end many streams with this class of exchange. An error of a broken stream is expected."""
    batch = pa.record_batch([["a"]], schema=SCHEMA)
    with (
        Breaking("grpc://127.0.0.1:0") as server,
        flight.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        for _ in range(STREAMS):
            with suppress(TimeballError):
                exchange = kind(client, SCHEMA, "the broker", open_s=10, limit_s=10)
                exchange.submit(batch)
                time.sleep(random.random() * ANSWER_S)
                exchange.close()
    print("done")


if __name__ == "__main__":
    main(HalfClosing if "half-close" in sys.argv else SendExchange)
