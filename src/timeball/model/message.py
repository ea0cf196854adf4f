"""The Arrow schemas of log rows, sends and the pending table, the kinds of rows, and helpers for their columns.

A batch of messages is an Arrow record batch in `LOG_SCHEMA`. Single messages exist only at the edges. The schema is the
on-disk format, and every frame header contains its `SCHEMA_VERSION`. A changed column requires a new version and a
reader for the old one (docs/formats/commit-log.md). `seq`, the sequence number of a row, is not a column of the log:
the rows of a frame have consecutive numbers, and the frame header contains the first one.

Kinds are small integers. Zero is invalid, so that zeroed bytes never decode as a message.

META rows are state of the broker: a key (`unique_key`) and a value (`body`). An empty value deletes the key. Values
under `secret/` and the snapshot must not leave the broker, so code that hands out rows first applies `without_secrets`.

A SCHEDULED row accepts a message for later. It is a message with a due time, a half message of a transaction, or a
message that a consumer gave back with a delay (broker/consuming/). All three are called *scheduled messages* here. A
scheduled message is *settled* when it is durably released or cancelled.
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

from timeball.model.values import NACK_REASON as NACK_REASON
from timeball.model.values import NACK_TIME as NACK_TIME
from timeball.model.values import PROPERTY_END as PROPERTY_END
from timeball.model.values import PROPERTY_NAME_END as PROPERTY_NAME_END
from timeball.model.values import decode_properties as decode_properties
from timeball.model.values import encode_properties as encode_properties
from timeball.model.values import lateness_ms as lateness_ms

SCHEMA_VERSION = 1
# Batches up to this size count as small: their arrays are cached, and Python code beats Arrow kernels.
SMALL_ROWS = 256
ALIKE_ROWS = 64  # for fewer rows, testing whether all values are equal costs as much as listing them

_ENDS_MAX = (1 << 31) - 1  # largest end offset of a text in a column (int32)

Int64Array = npt.NDArray[np.int64]


class Kind(IntEnum):
    """The kind of a row of the log. Values are on disk: never reuse one."""

    INVALID = 0
    MESSAGE = 1  # visible immediately
    # Accepted, due later. Without a due time it is a half message, due when its transaction is committed. With a queue
    # position (in the schedule topic) it waits for a delay level.
    SCHEDULED = 2
    # The scheduled message `source_seq`, written again: it is stored elsewhere now, or has another due time.
    MOVED = 3
    RELEASE = 4  # the message, now visible; `source_seq` is the scheduled message that it releases
    CANCEL = 5  # the scheduled message `source_seq` will not be released
    # A change of the pending table: files join or leave it, or numbers are reserved (table/attachment.py).
    TABLE = 6
    # State of the broker: `unique_key` is its key, the body its value. The last row of a key counts.
    META = 7


LOG_SCHEMA = pa.schema(
    [
        ("kind", pa.int8()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),  # -1 until a queue is chosen, when the row becomes visible
        # Position in (topic, queue) of a visible row, or of a scheduled message that waits for a delay level. Otherwise
        # null.
        ("queue_offset", pa.int64()),
        ("tag", pa.string()),
        ("keys", pa.string()),  # separated by blanks, as in RocketMQ
        ("unique_key", pa.string()),  # the message id that clients see
        ("body", pa.binary()),
        ("properties", pa.string()),  # RocketMQ's text form: name \x01 value \x02 …
        ("born_ms", pa.int64()),
        ("born_host", pa.string()),
        ("store_ms", pa.int64()),  # time of the append of this row
        ("store_host", pa.string()),
        ("flag", pa.int32()),
        ("sys_flag", pa.int32()),
        ("reconsume_times", pa.int32()),
        # Null for an ordinary message, a half message, and the rows that end a half message.
        ("due_ms", pa.int64()),
        # RELEASE, CANCEL, MOVED: when the scheduled message was appended (null: it was given back by a consumer).
        # SCHEDULED: the time from which the delay counts.
        ("accepted_ms", pa.int64()),
        # RELEASE, CANCEL, MOVED: the number of the scheduled message. SCHEDULED: the delivered row that it returns to a
        # consumer, if that is its purpose (broker/consuming/).
        ("source_seq", pa.int64()),
        # RELEASE, CANCEL, MOVED: the row that had set the scheduled message's due time, or null if the scheduled
        # message's own row did.
        ("version_seq", pa.int64()),
        # MOVED to another due time: the previous due time, or NO_DUE_TIME_MS for a half message. MOVED to another
        # storage location: null. RELEASE: the original due time, if a clock step made the delay end at another time.
        (
            "from_due_ms",
            pa.int64(),
        ),
    ]
)

# The fields that a send may set for a message. Admission fills in the other columns of its row. Each edge accepts the
# fields that its protocol has.
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
    "due_ms": pa.int64(),  # absolute: milliseconds since 1970 UTC
    "delay_ms": pa.int64(),  # relative; admission makes it absolute
    "delay_level": pa.int32(),  # RocketMQ's; at most one of these three is set
}
# The columns of a SendRow: one message of a client that sends single messages, before it becomes part of a batch.
SEND_NAMES = [name for name in SEND_COLUMNS if name != "delay_ms"]
SendRow = tuple[Any, ...]
SendBatch = pa.RecordBatch | list[SendRow]  # columns of SEND_COLUMNS, or one row per message
LogRow = tuple[Any, ...]  # a row of the log: a value for each column of LOG_SCHEMA (constructors: below)
# A row with its number: a value for each column of READ_SCHEMA.
ReadRow = tuple[Any, ...]

# A scheduled message in the pending table. Sorted by (due_ms, seq) within a file. See docs/formats/pending-table.md.
# `seq` is the row that set the due time. `number` is the row of the scheduled message itself, or null if it is `seq`.
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

# The schema of reads: the sequence number, then the log's columns.
READ_SCHEMA = pa.schema([pa.field("seq", pa.int64()), *LOG_SCHEMA])

# The value of `from_due_ms` in the row that gives a half message its first due time.
NO_DUE_TIME_MS = 0

# RocketMQ's topic of messages that wait for a delay level, with a queue per level.
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# Prefixes of a group's name: the topic of its retries, and the topic of its dead letters.
RETRY_PREFIX, DLQ_PREFIX = "%RETRY%", "%DLQ%"

# Bytes of RocketMQ's stored record without topic, body and properties (version 1, IPv4 hosts).
STORED_OVERHEAD_BYTES = 91

# Properties of a CANCEL row:
CANCEL_REASON = "REASON"  # the reason, if the caller gave one
CANCELLED_BY = "BY"  # the account that cancelled the message, if an access file is in use
# The cluster group to which the message was handed over. The row then contains the whole message, and this is its last
# property (broker/revoking/drain_rows.py).
HANDED_TO = "HANDED_TO"

# A property of the MOVED row of a wake-up: due time and version of the message's base (broker/registry/selections.py).
BASE = "TIMEBALL_BASE"

PRIORITY, LITE_TOPIC = "_SYS_MSG_PRIORITY_", "__LITE_TOPIC"  # properties of RocketMQ 5.5
# Properties of a message that returns to its group: the group, and the topic that its consumers see.
ORIGIN_GROUP, RETRY_TOPIC = "ORIGIN_GROUP", "RETRY_TOPIC"


def build_rows(count: int, **columns: object) -> pa.RecordBatch:
    """Build a batch of `count` rows in LOG_SCHEMA from arrays, scalars or None. Omitted columns are null.

    Arrays may be Arrow, numpy or sequences of length `count`. This is the only place that lists all columns. Raises
    ValueError for other names of columns.
    """
    unknown_names = columns.keys() - set(LOG_SCHEMA.names)
    if unknown_names:
        raise ValueError(f"no such column in LOG_SCHEMA: {sorted(unknown_names)}")
    return pa.RecordBatch.from_arrays(
        [_build_column(field, columns.get(field.name), count) for field in LOG_SCHEMA], schema=LOG_SCHEMA
    )


@lru_cache(maxsize=8 * 256)
def _cached_nulls(kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind)


@lru_cache(maxsize=8 * 256)
def _cached_repeat(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def repeated(value: str | bytes | int, kind: pa.DataType, count: int) -> pa.Array:
    """Make an array with the same value `count` times.

    Small arrays of texts and small integers are cached, because kinds, names and flags have few different values.
    """
    if count <= SMALL_ROWS and (isinstance(value, str) or (isinstance(value, int) and -1 <= value <= 16)):
        return _cached_repeat(value, kind, count)
    return _repeat(value, kind, count)


def _repeat(value: str | bytes | int, kind: pa.DataType, count: int) -> pa.Array:
    """Replace `pa.repeat`, which releases the interpreter lock and may then wait long to get it back."""
    scalar = pa.scalar(value, kind)  # raises an error for an invalid value
    if pa.types.is_integer(kind):
        values = np.full(count, value, kind.to_pandas_dtype())
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])
    data = value.encode() if isinstance(value, str) else value
    if kind not in (pa.string(), pa.binary()) or not isinstance(data, bytes) or len(data) * count > _ENDS_MAX:
        return pa.repeat(scalar, count)
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(data * count)])


def byte_lengths(column: pa.Array) -> Int64Array:
    """Compute the size in bytes of each value of a string or binary column. A null has 0.

    This runs for every small batch, for which a compute kernel would cost more than reading the offsets here.
    """
    if column.null_count == len(column):
        return np.zeros(len(column), dtype=np.int64)
    ends = np.frombuffer(column.buffers()[1], dtype=np.int32, offset=4 * column.offset, count=len(column) + 1)
    lengths = ends[1:] - ends[:-1]
    if column.null_count:
        lengths[np.asarray(column.is_null())] = 0  # a null may have bytes in the data buffer
    return lengths.astype(np.int64)


def _build_column(field: pa.Field, value: object, count: int) -> pa.Array:
    """Build a column of `count` rows. `value`: None for nulls, one value for all rows, or all values."""
    if value is None:
        # Cached, because most columns of most batches are null, and most batches are small.
        return _cached_nulls(field.type, count) if count <= SMALL_ROWS else pa.nulls(count, field.type)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        return value if value.type == field.type else value.cast(field.type)
    if isinstance(value, (str, bytes, int)):
        return repeated(value, field.type, count)
    return pa.array(value, field.type)


def int64(column: pa.Array) -> Int64Array:
    """View the values of a null-free int64 column as numpy, without a copy."""
    return np.asarray(column.to_numpy(zero_copy_only=True), dtype=np.int64)


def with_seq(rows: pa.RecordBatch, first_seq: int) -> pa.RecordBatch:
    """Convert LOG_SCHEMA rows to READ_SCHEMA rows: the sequence numbers become a column."""
    seq = pa.array(np.arange(first_seq, first_seq + rows.num_rows, dtype=np.int64))
    return pa.RecordBatch.from_arrays([seq, *rows.columns], schema=READ_SCHEMA)


def stored_sizes(rows: pa.RecordBatch) -> Int64Array:
    """Compute the size of each message as RocketMQ would store it (for one message: `row_encoder.stored_size`)."""
    total = np.full(rows.num_rows, STORED_OVERHEAD_BYTES, dtype=np.int64)
    for name in ("topic", "body", "properties"):
        total += byte_lengths(rows.column(name))
    return total


def codes_of(column: pa.Array) -> tuple[Int64Array, list[str]]:
    """Encode a string column as a dictionary: each row's index in the list of distinct values, and that list."""
    # Nearly all batches are for a single topic, and this test costs a fifth of the search for distinct values.
    if len(column) > ALIKE_ROWS and _is_constant(column):
        return np.zeros(len(column), dtype=np.int64), [column[0].as_py()]
    if len(column) <= SMALL_ROWS:
        # A kernel's fixed cost is that of a hundred rows in Python, and most commits have fewer rows.
        values = column.to_pylist()
        if values.count(values[0] if values else None) == len(values):
            return np.zeros(len(values), dtype=np.int64), values[:1]
        code_of: dict[str, int] = {}
        codes = [code_of.setdefault(value, len(code_of)) for value in values]
        return np.array(codes, dtype=np.int64), list(code_of)
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _is_constant(texts: pa.Array) -> bool:
    """Check whether a string column has the same value in all rows, and no null."""
    if texts.null_count or texts.type != pa.string():
        return False
    _, offset_buffer, data = texts.buffers()
    ends = np.frombuffer(offset_buffer, dtype=np.int32, offset=4 * texts.offset, count=len(texts) + 1)
    size = int(ends[1] - ends[0])
    # Lengths are compared first, because different texts mostly have different lengths.
    if int(ends[-1] - ends[0]) != size * len(texts) or not (ends[1:] - ends[:-1] == size).all():
        return False
    if size == 0:
        return True
    text_bytes = np.frombuffer(data, dtype=np.uint8, offset=int(ends[0]), count=size * len(texts))
    # All texts are equal if each text is equal to the text before it.
    return bool((text_bytes[size:] == text_bytes[:-size]).all())


def alike(values: Int64Array) -> list[Int64Array]:
    """Group the row numbers of equal values. Returns an ascending array per distinct value, by ascending value."""
    if len(values) == 1:
        return [np.zeros(1, dtype=np.int64)]
    keys: npt.NDArray[np.int64 | np.int16] = values
    if len(values) > SMALL_ROWS and values.min() >= 0 and values.max() < 1 << 15:
        keys = values.astype(np.int16)  # numpy sorts these by radix, three to ten times as fast
    # The sort is stable, because the order of a queue's rows becomes the order of their offsets.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(values)]
    return [order[begin:end] for begin, end in zip(begins, ends, strict=True)]


def filled(column: pa.Array, value: str | int) -> pa.Array:
    """Replace nulls by this value. A column without nulls is returned as it is, which saves the call of a kernel."""
    return column.fill_null(value) if column.null_count else column


# ---- META rows ------------------------------------------------------------------------------------------------

SECRET_PREFIX = "secret/"
SNAPSHOT_KEY = "snapshot"  # all other values at once, including the secret ones (log/checkpoint.py)


def meta_rows(pairs: list[tuple[str, bytes]], now_ms: int) -> pa.RecordBatch:
    """Build META rows (LOG_SCHEMA) of these keys and values."""
    keys, values = ([pair[index] for pair in pairs] for index in (0, 1))
    return build_rows(len(pairs), kind=int(Kind.META), unique_key=keys, body=values, store_ms=now_ms)


def without_secrets(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Replace the bodies of secret META rows by null. The rows need the columns kind, unique_key and body."""
    is_meta = rows.column("kind").to_numpy() == Kind.META
    # Fast path: most batches have no META row, and this runs for every read of the log by a client.
    if not is_meta.any():
        return rows
    keys = pc.fill_null(rows.column("unique_key"), "")
    is_secret = pc.or_(pc.starts_with(keys, SECRET_PREFIX), pc.equal(keys, SNAPSHOT_KEY))
    is_secret = pc.and_(pa.array(is_meta), is_secret)
    body_index = rows.schema.get_field_index("body")
    body = pc.if_else(is_secret, pa.scalar(None, pa.binary()), rows.column(body_index))
    return rows.set_column(body_index, rows.schema.field(body_index), body)


def pairs_of(rows: pa.RecordBatch) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values of META rows."""
    return zip(rows.column("unique_key").to_pylist(), rows.column("body").to_pylist(), strict=True)


# ---- rows as tuples, built by name ----------------------------------------------------------------------------


_MESSAGE, _SCHEDULED = int(Kind.MESSAGE), int(Kind.SCHEDULED)
_RELEASE, _CANCEL, _META = int(Kind.RELEASE), int(Kind.CANCEL), int(Kind.META)


def send_row(
    *,
    topic: str,
    body: bytes,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    properties: str | None,
    queue_id: int | None = None,
    born_ms: int | None = None,
    born_host: str | None = None,
    flag: int | None = None,
    sys_flag: int | None = None,
    reconsume_times: int | None = None,
    due_ms: int | None = None,
) -> SendRow:
    """Build the row of a message that a client sends. Admission fills in the values that are None."""
    return (
        topic, body, tag, keys, unique_key, properties, queue_id, born_ms, born_host, flag, sys_flag, reconsume_times,
        due_ms, None,
    )  # fmt: skip


def cancel_row(
    *,
    topic: str,
    source_seq: int,
    due_seq: int,
    due_ms: int | None,
    store_ms: int,
    keys: str | None = None,
    unique_key: str | None = None,
    properties: str | None = None,
    accepted_ms: int | None = None,
) -> LogRow:
    """Build the CANCEL row of a scheduled message.

    `source_seq` is its own row. `due_seq` is the row that had set its due time: the same one if it was never moved.
    """
    # Not visible, so the row has no queue. `version_seq` is null where `source_seq` names the row already.
    version_seq = None if due_seq == source_seq else due_seq
    return (
        _CANCEL, topic, -1, None, None, keys, unique_key, None, properties, None, None, store_ms,
        None, None, None, None, due_ms, accepted_ms, source_seq, version_seq, None,
    )  # fmt: skip


def meta_row(key: str, value: bytes, store_ms: int) -> LogRow:
    """Build the META row of a value of the broker's state. `meta_rows` builds the same rows as columns."""
    return (
        _META, None, None, None, None, None, key, value, None, None, None, store_ms,
        None, None, None, None, None, None, None, None, None,
    )  # fmt: skip


def message_row(
    *,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
) -> LogRow:
    """Build the MESSAGE row of a message that is visible at once, at an offset of its queue."""
    return (
        _MESSAGE, topic, queue_id, queue_offset, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, None, None, None, None, None,
    )  # fmt: skip


def scheduled_row(
    *,
    topic: str,
    queue_id: int,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
    due_ms: int,
    source_seq: int | None = None,
) -> LogRow:
    """Build the SCHEDULED row of a message that is due at `due_ms`.

    It has no queue offset before its release. `source_seq` is the row that was handed out, if this row redelivers it.
    """
    return (
        _SCHEDULED, topic, queue_id, None, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, due_ms, None, source_seq, None, None,
    )  # fmt: skip


def release_row(
    *,
    topic: str,
    queue_id: int,
    queue_offset: int | None,
    tag: str | None,
    keys: str | None,
    unique_key: str | None,
    body: bytes | None,
    properties: str | None,
    born_ms: int | None,
    born_host: str | None,
    store_ms: int,
    store_host: str | None,
    flag: int | None,
    sys_flag: int | None,
    reconsume_times: int | None,
    due_ms: int,
    accepted_ms: int,
    source_seq: int,
    version_seq: int | None,
    from_due_ms: int | None,
) -> LogRow:
    """Build the RELEASE row that puts the scheduled message `source_seq` into its queue.

    `version_seq` is the row that had set its due time, or None if it was never moved.
    """
    return (
        _RELEASE, topic, queue_id, queue_offset, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
        store_host, flag, sys_flag, reconsume_times, due_ms, accepted_ms, source_seq, version_seq, from_due_ms,
    )  # fmt: skip
