"""The rows of the positions that a request has leased: from memory while they are new, otherwise from the log."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.components import Components
from timeball.broker.consuming.redelivery_rows import FEW_ROWS, is_of
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.filters.tags import BoolArray
from timeball.log.few_rows import NumberedRows, ReadRows
from timeball.log.reader import LogReader
from timeball.model.message import READ_SCHEMA, Int64Array

_TOPIC = READ_SCHEMA.get_field_index("topic")


async def selected_rows(
    parts: Components, request: ReceiveRequest, seqs: list[int]
) -> tuple[ReadRows, BoolArray | None]:
    """Read those of these rows that are for this consumer. Also return a mask of them, or None for all."""
    # Rows that have just become visible are still in memory, and a read of the log would be the largest cost.
    values = parts.writer.newest.values_of(seqs) if len(seqs) <= FEW_ROWS else None
    if (
        values is not None
        and request.wanted.matches_all
        and {row[_TOPIC] for row in values} == {request.topic}
    ):
        return NumberedRows(values), None
    # A filter needs whole rows, and rows of a shared retry topic may be for another group.
    rows, keep = await asyncio.get_running_loop().run_in_executor(
        parts.reader_thread, _read, parts.reader, request, np.array(seqs, dtype=np.int64)
    )
    return (rows, None) if keep.all() else (rows.filter(pa.array(keep)), keep)


def _read(reader: LogReader, request: ReceiveRequest, seqs: Int64Array) -> tuple[pa.RecordBatch, BoolArray]:
    """Read the rows. Also return a mask of those that are for this consumer (reader thread)."""
    rows = reader.read_rows(seqs)
    keep = np.ones(len(seqs), dtype=np.bool_)
    main = np.array([name == request.topic for name in rows.column("topic").to_pylist()])
    if not request.wanted.matches_all:
        # Rows of the retry topic passed the filter at their first delivery.
        keep &= ~main | request.wanted.exact(rows)
    texts = rows.column("properties")
    for at in np.flatnonzero(~main).tolist():
        # `%RETRY%a_b_c` is the retry topic of group a for topic b_c, and also of group a_b for topic c.
        keep[at] = is_of(request.group, texts[at].as_py())
    return rows, keep
