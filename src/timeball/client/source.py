"""Sending the records of a source: a queue outside, in partitions with positions, as Kafka's topics are.

Each batch says where in its source it begins and ends, and the broker keeps that beside the messages. So a batch whose
answer was lost is sent again without harm, also by another process: the broker refuses what it has taken before.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pyarrow as pa

from timeball import wire
from timeball.client.calls import Calls
from timeball.client.exchange import SendExchange
from timeball.client.sender import outcome
from timeball.errors import Conflict, Unavailable


class Source:
    """The sending side of one source. Belongs to one thread."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.name = name
        self._calls = calls
        self._exchange: SendExchange | None = None

    def positions(self) -> dict[int, int]:
        """Return where the source goes on in each partition; empty when nothing was sent of it."""
        body = wire.SourcePositions(source=self.name)
        return self._calls.action("source_positions", body, dict[str, dict[int, int]])["positions"]

    def send(self, batch: pa.RecordBatch, begin: Mapping[int, int], end: Mapping[int, int]) -> None:
        """Send what the records from `begin` to `end` of each partition became; it is on disk when this returns.

        All batches have one schema, and may be empty. Raises Conflict when the source stands elsewhere: ask for the
        positions and go on from there.
        """
        step = wire.SourceStep(source=self.name, begin=dict(begin), end=dict(end))
        beside = msgspec.json.encode(step).decode()
        for more in self._calls.attempts():
            try:
                exchange = self._open(batch.schema)
                outcome(exchange.submit(batch, beside), self._calls.timeout_ms, self._calls.endpoint)
                return
            except Conflict:
                # Of a batch whose answer was lost the broker says that it has been sent before.
                stands = self.positions()
                if any(stands.get(partition) != at for partition, at in end.items()):
                    raise
                return
            except Unavailable:
                self.close()
                if not more:
                    raise

    def close(self) -> None:
        """Let go of the stream."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _open(self, schema: pa.Schema) -> SendExchange:
        if self._exchange is None or not self._exchange.alive:
            self._exchange = SendExchange(
                self._calls.flight, schema, self._calls.endpoint, path=wire.SOURCE_PATH
            )
        return self._exchange
