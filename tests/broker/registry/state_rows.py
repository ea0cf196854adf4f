"""A log that has only META rows, for tests of one table."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from timeball.broker.registry.meta import MetaLog
from timeball.broker.service import Broker
from timeball.model.message import Kind, pairs_of

T = TypeVar("T")


class StateRows:
    """The rows that a table has appended. `opened` starts a table with them."""

    def __init__(self) -> None:
        self.appended: list[pa.RecordBatch] = []

    def opened(self, make: Callable[[MetaLog], T]) -> T:
        """Make a table, restore it from all appended rows, and let it append its changes here."""
        self.meta = meta = MetaLog()
        table = make(meta)
        for rows in self.appended:
            meta.restore(pairs_of(rows))
        meta.open(self.appended.append, lambda: 0)
        return table

    @property
    def count(self) -> int:
        """The number of frames."""
        return len(self.appended)


def rows_of(broker: Broker, prefix: str) -> dict[str, Any]:
    """The durable values of the META rows with a prefix, by name."""
    values: dict[str, Any] = {}
    reader = broker.log.reader
    for rows in reader.rows(reader.first_seq, reader.next_seq, [Kind.META]):
        for key, value in pairs_of(rows):
            if key.startswith(prefix):
                values[key.removeprefix(prefix)] = json.loads(value)
    return values
