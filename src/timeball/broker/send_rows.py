"""Messages of many sends, as rows of texts and numbers, on their way to one batch for the broker.

RocketMQ's clients send one message at a time, so an edge has each of them in its hands for a moment; from here on they
are columns. It may be imported by codecs: nothing here waits, or reads a clock or a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from timeball.message import repeated

# Those of the broker's admission that a RocketMQ client fills. Admission is of the event loop, which a codec may not
# import, so a test holds the two together.
COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tag": pa.string(),
    "keys": pa.string(),
    "unique_key": pa.string(),
    "properties": pa.string(),
    "queue_id": pa.int32(),
    "born_ms": pa.int64(),
    "born_host": pa.string(),
    "flag": pa.int32(),
    "sys_flag": pa.int32(),
    "reconsume_times": pa.int32(),
    "due_ms": pa.int64(),
    "delay_level": pa.int32(),
}
NAMES = list(COLUMNS)

Row = tuple[Any, ...]  # a value for each of COLUMNS


class Piece(msgspec.Struct, gc=False):
    """The messages of one request: they stand side by side in one batch, so all of them are in the log or none is.

    `rows` is a list of send_rows.Row whose topics the policy has decided about, or a batch of admission.SEND_COLUMNS
    that it still has to decide about for `caller`.
    """

    edge: Any  # an Edge
    rows: Any
    count: int
    size_bytes: int
    first_row: int  # within the batch that it shares; set when that begins
    caller: Any


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """At least one row, as a batch without its empty columns. Raises pa.ArrowInvalid for a number out of range."""
    filled = {}
    for (name, kind), values in zip(COLUMNS.items(), zip(*rows, strict=True), strict=True):
        first = values[0]
        # Two thirds of the columns mostly say one thing; to count is several times cheaper than to convert.
        if values.count(first) < len(values) or (len(values) == 1 and first is not None):
            filled[name] = pa.array(values, kind)
        elif first is not None:
            filled[name] = repeated(first, kind, len(values))
    return pa.RecordBatch.from_arrays(list(filled.values()), names=list(filled))
