"""What travels: one schema for every row of the log, and the kinds a row can have.

A batch of messages is an Arrow record batch in `LOG_SCHEMA`; a single message exists only at the edges.
The schema is the format: it is named by `SCHEMA_VERSION` in every frame header, so a change of a column
means a new version and a reader for the old one (docs/formats/commit-log.md). `seq`, the row's sequence
number, is not a column of the log: rows are dense within a frame, so the header's first number says it all.

Kinds are small integers and zero is invalid, so that memory that was never written can never be a message.

META rows are state of the broker as a key (`unique_key`) and a value (`body`). An empty value deletes the key. Values
under `secret/`, and a snapshot, stay inside the broker: what hands rows to the outside passes them through
`without_secrets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 1
SMALL_ROWS = 256
ALIKE_ROWS = 64  # of fewer it costs as much to see that they are alike as to list them

_ENDS_MAX = (1 << 31) - 1  # where a text of a column may end

Int64Array = npt.NDArray[np.int64]


class Kind(IntEnum):
    """The kind of a row of the log. Values are on disk: never reuse one."""

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
        # Releases, cancels, moves: when the promise was appended (null: of a receipt).
        # Promises: since when a delay counts.
        ("accepted_ms", pa.int64()),
        # Releases and cancels: the promise settled. Moves: the promise. Promises: the row handed out that
        # they bring back to a consumer, if they are for that (broker/consuming/).
        ("source_seq", pa.int64()),
        # Releases, cancels, moves: the row that gave the promise the instant it had; null when that is the promise.
        ("version_seq", pa.int64()),
        (
            "from_due_ms",
            pa.int64(),
        ),  # moves to another instant: the one before, NO_INSTANT_MS of a half; null for those to another place
        # Releases: the instant promised, if a step of the clock has made a duration end at another.
    ]
)

# What a send may say of a message; admission fills in the rest of its row. Each edge takes those its protocol has.
SEND_COLUMNS: dict[str, pa.DataType] = {
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
    "due_ms": pa.int64(),  # absolute, milliseconds since 1970 UTC
    "delay_ms": pa.int64(),  # relative; becomes absolute at admission
    "delay_level": pa.int32(),  # RocketMQ's; at most one of these three
}
# One message of a client that sends one at a time, before it is a row of a batch: a value for each of these.
SEND_NAMES = [name for name in SEND_COLUMNS if name != "delay_ms"]
SendRow = tuple[Any, ...]
SendBatch = pa.RecordBatch | list[SendRow]  # columns of SEND_COLUMNS, or a row for each message
LogRow = tuple[Any, ...]  # the same as a row of the log: a value for each column of LOG_SCHEMA
ReadRow = tuple[Any, ...]  # and with its number before them: a value for each column of READ_SCHEMA

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

# `from_due_ms` of the row that gives a half message its first instant: a move from an instant that has long passed.
NO_INSTANT_MS = 0

# RocketMQ's topic of those who wait for a delay level, a queue a level.
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# Before a group's name: the topics of its second tries, and of its dead letters.
RETRY_PREFIX, DLQ_PREFIX = "%RETRY%", "%DLQ%"

# RocketMQ's stored record without topic, body and properties (version 1, IPv4 hosts).
STORED_OVERHEAD_BYTES = 91

# Property of a CANCEL row: its reason, if the caller gave one.
CANCEL_REASON = "REASON"
# Another: the account that has cancelled it, under an access file.
CANCELLED_BY = "BY"
# Another: the group of the cluster that the message was handed over to. Such a row holds the whole message, and this
# is the last of its properties (broker/handed_rows.py).
HANDED_TO = "HANDED_TO"

# Properties of a message that goes back to its group: which that is, and the topic that its consumers see.
PRIORITY, LITE_TOPIC = "_SYS_MSG_PRIORITY_", "__LITE_TOPIC"  # of RocketMQ 5.5
ORIGIN_GROUP, RETRY_TOPIC = "ORIGIN_GROUP", "RETRY_TOPIC"
# When a member gave it back in its last delivery (ms since 1970); gone with the next delivery. And why a member last
# gave it back, or up; that stays until another reason takes its place.
NACK_TIME, NACK_REASON = "NACK_TIME", "NACK_REASON"

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
    return _filled_with(value, kind, count)


def _filled_with(value: str | bytes | int, kind: pa.DataType, count: int) -> pa.Array:
    """`pa.repeat`, which lets another thread have the interpreter, and gets it back when that one likes."""
    scalar = pa.scalar(value, kind)  # raises what is wrong with the value
    if pa.types.is_integer(kind):
        values = np.full(count, value, kind.to_pandas_dtype())
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])
    data = value.encode() if isinstance(value, str) else value
    if kind not in (pa.string(), pa.binary()) or not isinstance(data, bytes) or len(data) * count > _ENDS_MAX:
        return pa.repeat(scalar, count)
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(data * count)])


def byte_lengths(column: pa.Array) -> Int64Array:
    """Bytes of each value of a string or binary column; 0 for a null.

    From the offsets: this runs for every small batch, and a compute kernel costs more than the work.
    """
    if column.null_count == len(column):
        return np.zeros(len(column), dtype=np.int64)
    ends = np.frombuffer(column.buffers()[1], dtype=np.int32, offset=4 * column.offset, count=len(column) + 1)
    lengths = ends[1:] - ends[:-1]
    if column.null_count:
        lengths[np.asarray(column.is_null())] = 0  # a null may have bytes behind it, which do not count
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


def lateness_ms(due_ms: int, accepted_ms: int | None, store_ms: int) -> int:
    """Return how late a message was that became visible at `store_ms`; what was due before it was accepted is on time.

    >>> lateness_ms(1_000, 500, 1_007), lateness_ms(1_000, 5_000, 5_002)
    (7, 2)
    """
    return max(0, store_ms - max(due_ms, accepted_ms or 0))


def with_seq(rows: pa.RecordBatch, first_seq: int) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows as READ_SCHEMA rows: the sequence numbers become a column."""
    seq = pa.array(np.arange(first_seq, first_seq + rows.num_rows, dtype=np.int64))
    return pa.RecordBatch.from_arrays([seq, *rows.columns], schema=READ_SCHEMA)


def stored_sizes(rows: pa.RecordBatch) -> Int64Array:
    """Return the bytes of each message as RocketMQ would store it; `few_rows.stored_size` does for values."""
    total = np.full(rows.num_rows, STORED_OVERHEAD_BYTES, dtype=np.int64)
    for name in ("topic", "body", "properties"):
        total += byte_lengths(rows.column(name))
    return total


def codes_of(column: pa.Array) -> tuple[Int64Array, list[str]]:
    """Return each row's number in the list of distinct values, and that list."""
    # Nearly all batches are for one topic, and to see that costs a fifth of finding the values of many.
    if len(column) > ALIKE_ROWS and _are_alike(column):
        return np.zeros(len(column), dtype=np.int64), [column[0].as_py()]
    if len(column) <= SMALL_ROWS:
        # A kernel's fixed cost is that of a hundred rows in Python, and most commits have fewer.
        values = column.to_pylist()
        if values.count(values[0] if values else None) == len(values):
            return np.zeros(len(values), dtype=np.int64), values[:1]
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(value, len(numbers)) for value in values]
        return np.array(codes, dtype=np.int64), list(numbers)
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _are_alike(texts: pa.Array) -> bool:
    """Return whether a string column holds one value in all its rows, and no null."""
    if texts.null_count or texts.type != pa.string():
        return False
    _, places, data = texts.buffers()
    ends = np.frombuffer(places, dtype=np.int32, offset=4 * texts.offset, count=len(texts) + 1)
    size = int(ends[1] - ends[0])
    # Their sum first: texts that differ mostly differ in length.
    if int(ends[-1] - ends[0]) != size * len(texts) or not (ends[1:] - ends[:-1] == size).all():
        return False
    if size == 0:
        return True
    held = np.frombuffer(data, dtype=np.uint8, offset=int(ends[0]), count=size * len(texts))
    # All are the first one when each is the one before it.
    return bool((held[size:] == held[:-size]).all())


def alike(values: Int64Array) -> list[Int64Array]:
    """Return the positions of each distinct value, in order."""
    if len(values) == 1:
        return [np.zeros(1, dtype=np.int64)]
    # Stable: rows of one queue keep their order, which becomes the order of their offsets.
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(values)]
    return [order[begin:end] for begin, end in zip(begins, ends, strict=True)]


def filled(column: pa.Array, value: str | int) -> pa.Array:
    """Return the column with this value for nulls; itself when it has none: a kernel costs most then."""
    return column.fill_null(value) if column.null_count else column


# ---- META rows ------------------------------------------------------------------------------------------------

SECRET_PREFIX = "secret/"
SNAPSHOT_KEY = "snapshot"  # all other values at once, the secret ones too (log/checkpoint.py)


def meta_rows(pairs: list[tuple[str, bytes]], now_ms: int) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows of these keys and values."""
    keys, values = ([pair[at] for pair in pairs] for at in (0, 1))
    return build_rows(len(pairs), kind=int(Kind.META), unique_key=keys, body=values, store_ms=now_ms)


def without_secrets(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with null for each value that must not leave the broker; needs kind, key and body."""
    is_meta = rows.column("kind").to_numpy() == Kind.META
    # Most batches have no META row, and every read of the log from outside comes by here.
    if not is_meta.any():
        return rows
    keys = pc.fill_null(rows.column("unique_key"), "")
    is_secret = pc.or_(pc.starts_with(keys, SECRET_PREFIX), pc.equal(keys, SNAPSHOT_KEY))
    is_secret = pc.and_(pa.array(is_meta), is_secret)
    at = rows.schema.get_field_index("body")
    body = pc.if_else(is_secret, pa.scalar(None, pa.binary()), rows.column(at))
    return rows.set_column(at, rows.schema.field(at), body)


def pairs_of(rows: pa.RecordBatch) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values of META rows."""
    return zip(rows.column("unique_key").to_pylist(), rows.column("body").to_pylist(), strict=True)
