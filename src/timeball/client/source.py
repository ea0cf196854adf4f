"""Sending the records of a source: an external queue with partitions and positions, such as a Kafka topic.

Each batch carries the positions at which it begins and ends in its source. The broker stores them with the messages,
and refuses records that it already has. So a batch whose answer was lost can be sent again, also by another process.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pyarrow as pa

from timeball.client.calls import Calls
from timeball.client.exchange import SendExchange
from timeball.client.network import run
from timeball.model import wire
from timeball.model.errors import Conflict, TimeballError


class Source:
    """Sends the records of one source. Belongs to one thread."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self._calls = calls
        self._exchange: SendExchange | None = None

    def positions(self) -> dict[int, int]:
        """Read the next position of each partition from the broker. Empty if nothing was sent for the source."""
        body = wire.SourcePositions(source=self.name)
        return self._calls.action("source_positions", body, dict[str, dict[int, int]])["positions"]

    def send(self, batch: pa.RecordBatch, begin: Mapping[int, int], end: Mapping[int, int]) -> None:
        """Send the messages of the records with begin <= position < end in each partition. Durable on return.

        All batches have the same schema, and a batch may be empty. Raises Conflict if the broker's positions of the
        source are not `begin`. Then read the positions and continue from there.
        """
        step = wire.SourceStep(source=self.name, begin=dict(begin), end=dict(end))
        metadata = msgspec.json.encode(step).decode()

        async def attempt(limit_s: float) -> None:
            try:
                exchange = self._open(batch.schema, limit_s)
                exchange.submit(batch, metadata).result()
            except Conflict:
                # After a lost answer the repeated batch is a conflict, too. Then the broker's positions are `end`.
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
