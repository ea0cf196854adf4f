"""What travels: one schema for every row of the log, and the kinds a row can have.

A batch of messages is an Arrow record batch in `LOG_SCHEMA`; a single message exists only at the edges.
The schema is the format: it is named by `SCHEMA_VERSION` in every frame header, so a change of a column
means a new version and a reader for the old one (docs/formats/commit-log.md). `seq`, the row's sequence
number, is not a column of the log: rows are dense within a frame, so the header's first number says it all.

Kinds are small integers and zero is invalid, so that memory nobody wrote can never be a message.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 1
SMALL_ROWS = 256

Int64Array = npt.NDArray[np.int64]


class Kind(IntEnum):
    """What a row of the log says. Values are on disk: never reuse one."""

    INVALID = 0
    MESSAGE = 1  # visible at once
    # Accepted, due later. Without an instant it is a half message, due when its transaction is committed; with a place
    # in a queue (of the schedule's topic) it waits for a delay level.
    PROMISE = 2
    MOVED = (
        3  # the promise named by `source_seq`, written again: it lies elsewhere, or is due at another instant
    )
    RELEASE = 4  # the message, now visible; `source_seq` names the promise it keeps
    CANCEL = 5  # the promise named by `source_seq` will not be kept
    TABLE = 6  # a change of the pending table: files join or leave it, or numbers are set aside (table/attachment.py)
    META = 7  # state of the broker: `unique_key` names it, the body is its value; the last row counts


LOG_SCHEMA = pa.schema(
    [
        ("kind", pa.int8()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),  # -1 until a queue is chosen, which happens when the row becomes visible
        # Position in (topic, queue) of a visible row, or of a promise that waits for a delay level; null for others.
        ("queue_offset", pa.int64()),
        ("tag", pa.string()),
        ("keys", pa.string()),  # blank-separated, as RocketMQ has them
        ("unique_key", pa.string()),  # the message id a client knows
        ("body", pa.binary()),
        ("properties", pa.string()),  # RocketMQ's own text form: name \x01 value \x02 …
        ("born_ms", pa.int64()),
        ("born_host", pa.string()),
        ("store_ms", pa.int64()),  # when this row was appended
        ("store_host", pa.string()),
        ("flag", pa.int32()),
        ("sys_flag", pa.int32()),
        ("reconsume_times", pa.int32()),
        ("due_ms", pa.int64()),  # null for an ordinary message, a half message and the rows that end one
        (
            "accepted_ms",
            pa.int64(),
        ),  # releases, cancels, moves: when the promise was appended (null: of a receipt)
        # Releases and cancels: the promise settled. Moves: the promise. Promises: the row handed out that
        # they bring back to a consumer, if they are for that (broker/consuming/), or the half message that they
        # take the place of.
        ("source_seq", pa.int64()),
        # Releases, cancels, moves: the row that gave the promise the instant it had; null when that is the promise.
        ("version_seq", pa.int64()),
        (
            "from_due_ms",
            pa.int64(),
        ),  # moves to another instant: the one before; null for those to another place
    ]
)

# A promise at rest. Sorted by (due_ms, seq) within a file; see docs/formats/pending-table.md. `seq` is the row that
# gave it its instant; `number` is the promise, null when that is the same row.
TABLE_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("due_ms", pa.int64()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("tag", pa.string()),
        ("keys", pa.string()),
        ("unique_key", pa.string()),
        ("body", pa.binary()),
        ("properties", pa.string()),
        ("born_ms", pa.int64()),
        ("born_host", pa.string()),
        ("flag", pa.int32()),
        ("sys_flag", pa.int32()),
        ("reconsume_times", pa.int32()),
        ("accepted_ms", pa.int64()),
        ("number", pa.int64()),
    ]
)

# What readers get: the log's columns behind the sequence number.
READ_SCHEMA = pa.schema([pa.field("seq", pa.int64()), *LOG_SCHEMA])

# RocketMQ's topic of those who wait for a delay level, a queue a level.
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"

# Property of a CANCEL row: on whose account, if somebody has said so.
CANCEL_REASON = "REASON"

PROPERTY_NAME_END = "\x01"
PROPERTY_END = "\x02"


def encode_properties(properties: dict[str, str]) -> str:
    """RocketMQ's text form of message properties (`MessageDecoder.messageProperties2String`)."""
    return "".join(f"{k}{PROPERTY_NAME_END}{v}{PROPERTY_END}" for k, v in properties.items())


def decode_properties(text: str) -> dict[str, str]:
    """Inverse of `encode_properties`; entries without a name separator are ignored, as RocketMQ does."""
    found = {}
    for entry in text.split(
        PROPERTY_END
    ):  # of all ways the fastest; every message of a RocketMQ client passes here
        name, is_pair, value = entry.partition(PROPERTY_NAME_END)
        if is_pair:
            found[name] = value
    return found


def build_rows(count: int, **columns: object) -> pa.RecordBatch:
    """A batch of `count` rows in LOG_SCHEMA from arrays, scalars or None; columns left out are null.

    Arrays may be Arrow, numpy or sequences of length `count`. This is the one place that knows all columns.
    """
    unknown = columns.keys() - set(LOG_SCHEMA.names)
    if unknown:
        raise ValueError(f"no such column in LOG_SCHEMA: {sorted(unknown)}")
    return pa.RecordBatch.from_arrays(
        [_column(field, columns.get(field.name), count) for field in LOG_SCHEMA], schema=LOG_SCHEMA
    )


@lru_cache(maxsize=8 * 256)
def _nulls(kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind)


@lru_cache(maxsize=8 * 256)
def _made_once(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def repeated(value: str | bytes | int, kind: pa.DataType, count: int) -> pa.Array:
    """`count` times the same value.

    Flags are 0 nearly always, the kind is one of few, and names are few too: made once for each small number of rows.
    """
    if count <= SMALL_ROWS and (isinstance(value, str) or (isinstance(value, int) and -1 <= value <= 16)):
        return _made_once(value, kind, count)
    return pa.repeat(pa.scalar(value, kind), count)


def byte_lengths(column: pa.Array) -> Int64Array:
    """Bytes of each value of a string or binary column; 0 for a null.

    From the offsets: this runs for every small batch, and a compute kernel costs more than the work.
    """
    if column.null_count == len(column):
        return np.zeros(len(column), dtype=np.int64)
    ends = np.frombuffer(column.buffers()[1], dtype=np.int32, offset=4 * column.offset, count=len(column) + 1)
    lengths = ends[1:] - ends[:-1]
    if column.null_count:
        lengths[np.asarray(column.is_null())] = 0  # a null may have bytes behind it, which nobody is to see
    return lengths.astype(np.int64)


def _column(field: pa.Field, value: object, count: int) -> pa.Array:
    if value is None:
        # Most columns of most batches are null, and most batches are small.
        return _nulls(field.type, count) if count <= SMALL_ROWS else pa.nulls(count, field.type)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        return value if value.type == field.type else value.cast(field.type)
    if isinstance(value, (str, bytes, int)):
        return repeated(value, field.type, count)
    return pa.array(value, field.type)


def int64(column: pa.Array) -> Int64Array:
    """The values of a null-free int64 column as numpy, without a copy."""
    return np.asarray(column.to_numpy(zero_copy_only=True), dtype=np.int64)
