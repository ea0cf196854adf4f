"""Browsed messages: views of the rows of a record batch.

The fields of a row are copied and decoded only when they are read.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from timeball.client.messages import Message
from timeball.model.bodies import readable_body
from timeball.model.message import decode_properties, lateness_ms


class BatchRow:
    """One row of a batch in READ_SCHEMA. A ReceivedRow."""

    __slots__ = ("_batch", "_row")

    receipt = ""  # a browsed message has no lease

    def __init__(self, batch: pa.RecordBatch, row: int) -> None:
        self._batch, self._row = batch, row

    def _value(self, column: str) -> Any:
        return self._batch.column(column)[self._row].as_py()

    @property
    def topic(self) -> str:
        return str(self._value("topic"))

    @property
    def body(self) -> bytes:
        return readable_body(self._value("body") or b"", self._value("sys_flag"))

    @property
    def tag(self) -> str | None:
        tag: str | None = self._value("tag")
        return tag

    @property
    def keys(self) -> list[str]:
        return (self._value("keys") or "").split()

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self._value("properties") or "")

    @property
    def id(self) -> str | None:
        key: str | None = self._value("unique_key")
        return key

    @property
    def seq(self) -> int:
        return int(self._value("seq"))

    @property
    def scheduled_seq(self) -> int | None:
        seq: int | None = self._value("source_seq")
        return seq

    @property
    def queue_id(self) -> int:
        return int(self._value("queue_id"))

    @property
    def queue_offset(self) -> int:
        return int(self._value("queue_offset"))

    @property
    def born_ms(self) -> int | None:
        born_ms: int | None = self._value("born_ms")
        return born_ms

    @property
    def store_ms(self) -> int:
        return int(self._value("store_ms"))

    @property
    def due_ms(self) -> int | None:
        due_ms: int | None = self._value("due_ms")
        return due_ms

    @property
    def lateness_ms(self) -> int | None:
        due_ms = self.due_ms
        return None if due_ms is None else lateness_ms(due_ms, self._value("accepted_ms"), self.store_ms)

    @property
    def attempts(self) -> int:
        return int(self._value("reconsume_times") or 0)


def view(batch: pa.RecordBatch, received_ms: int) -> list[Message]:
    """Wrap each row of a batch in READ_SCHEMA as a message without a lease."""
    return [Message(BatchRow(batch, row), received_ms) for row in range(batch.num_rows)]
