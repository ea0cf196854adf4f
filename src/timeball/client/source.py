"""Sending the records of a source: an outside queue with partitions and positions, such as a Kafka topic.

Each batch states where it begins and ends in its source, and the broker stores these positions with the messages. So a
batch whose answer was lost can be sent again, also by another process: the broker refuses records that it already has.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.exchange import SendExchange
from timeball.client.sender import outcome
from timeball.model import wire
from timeball.model.errors import Conflict, Unavailable


class Source:
    """The sender for one source. Belongs to one thread."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self._calls = calls
        self._exchange: SendExchange | None = None

    def positions(self) -> dict[int, int]:
        """Read the next position of each partition from the broker. Empty if nothing was sent for the source."""
        body = wire.SourcePositions(source=self.name)
        return self._calls.action("source_positions", body, dict[str, dict[int, int]])["positions"]

    def send(self, batch: pa.RecordBatch, begin: Mapping[int, int], end: Mapping[int, int]) -> None:
        """Send the messages made of the records from `begin` up to `end` of each partition. They are on disk on return.

        All batches have one schema, and a batch may be empty. Raises Conflict when the broker's positions of the source
        are not `begin`. Then read the positions and go on from there.
        """
        step = wire.SourceStep(source=self.name, begin=dict(begin), end=dict(end))
        beside = msgspec.json.encode(step).decode()
        for more in self._calls.attempts():
            try:
                exchange = self._open(batch.schema)
                outcome(exchange.submit(batch, beside), self._calls.timeout_ms, self._calls.endpoint)
                return
            except Conflict:
                # For a batch whose answer was lost, the broker answers that it was sent before.
                stands = self.positions()
                if any(stands.get(partition) != at for partition, at in end.items()):
                    raise
                return
            except Unavailable:
                self.close()
                if not more:
                    raise

    def close(self) -> None:
        """Close the stream."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _open(self, schema: pa.Schema) -> SendExchange:
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(
                self._calls.flight, schema, self._calls.endpoint, path=wire.SOURCE_PATH
            )
        return self._exchange
