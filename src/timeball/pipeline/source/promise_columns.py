"""A DataFrame's rows as promises: check whole columns, then give them the shape of the pending table.

    topic     string             required
    body      binary or string   required
    due_ms    bigint             or  due  timestamp; a row without either is due at once
    tag keys unique_key          string; a row without unique_key is given 32 hexadecimal characters
    properties                   string in RocketMQ's form, or map<string,string>
    queue_id                     int; a queue is chosen at release when it is left out
    flag sys_flag                int, as RocketMQ's clients set them; 0

The rules are the broker's own for `send`. A row that breaks one is counted under the first rule it breaks. Timestamps
finer than a millisecond are rounded up, because a promise may never be early. Pure functions on columns; nothing of
Spark is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.errors import InvalidMessage
from timeball.message import PROPERTY_END, PROPERTY_NAME_END, TABLE_SCHEMA, Int64Array, int64

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BoolArray = npt.NDArray[np.bool_]

_SPARK_TYPES: dict[str, tuple[str, ...]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("string",),
    "unique_key": ("string",),
    "properties": ("string", "map<string,string>"),
    "queue_id": ("int", "smallint", "tinyint", "bigint"),
    "flag": ("int",),
    "sys_flag": ("int",),
    "due_ms": ("bigint", "int"),
    "due": ("timestamp",),
}
_NO_QUEUE = -1
_SUMMED = ("topic", "tag", "keys", "unique_key", "properties", "queue_id", "flag", "sys_flag")
_BETWEEN = pa.scalar(b"\x1f", pa.large_binary())
CHECKSUM_ROWS = 65_536  # joined at a time, so that a run's bodies are not copied whole
_TEXT_COLUMNS = ("topic", "tag", "keys", "unique_key")


def check_columns(schema: StructType) -> None:
    """Refuse a DataFrame whose columns cannot be promises; InvalidMessage names the column."""
    names = schema.fieldNames()
    for field in schema.fields:
        types = _SPARK_TYPES.get(field.name)
        if types is None:
            raise InvalidMessage(f"column {field.name}: unknown; there are {', '.join(_SPARK_TYPES)}")
        if field.dataType.simpleString() not in types:
            hint = "; a timestamp without time zone names no instant" if field.name == "due" else ""
            raise InvalidMessage(
                f"column {field.name}: {field.dataType.simpleString()}, wanted {' or '.join(types)}{hint}"
            )
    for name in ("topic", "body"):
        if name not in names:
            raise InvalidMessage(f"column {name} is missing; a message has a topic and a body")
    if "due_ms" in names and "due" in names:
        raise InvalidMessage("columns due_ms and due: give one of them")


def normalise(rows: pa.Table, now_ms: int) -> pa.Table:
    """The input's columns in TABLE_SCHEMA's types and order, `seq` still null; nothing is checked yet."""
    count = rows.num_rows
    given = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    columns: dict[str, pa.Array] = {name: given[name] for name in _TEXT_COLUMNS if name in given}
    columns["body"] = given["body"].cast(pa.binary())
    columns["due_ms"] = _due_ms(given, count, now_ms)
    if "properties" in given:
        columns["properties"] = _properties(given["properties"])
    queue = given.get("queue_id", pa.nulls(count, pa.int32()))
    columns["queue_id"] = queue.cast(pa.int32()).fill_null(_NO_QUEUE)
    for name in ("born_ms", "accepted_ms"):
        columns[name] = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
    for name in ("flag", "sys_flag", "reconsume_times"):
        zeros = pa.repeat(pa.scalar(0, pa.int32()), count)
        columns[name] = given[name].fill_null(0) if name in given else zeros
    arrays = [columns.get(field.name) for field in TABLE_SCHEMA]
    return pa.Table.from_arrays(
        [
            pa.nulls(count, f.type) if a is None else a.cast(f.type)
            for f, a in zip(TABLE_SCHEMA, arrays, strict=True)
        ],
        schema=TABLE_SCHEMA,
    )


def _due_ms(given: dict[str, pa.Array], count: int, now_ms: int) -> pa.Array:
    if "due_ms" in given:
        due = given["due_ms"].cast(pa.int64())
    elif "due" in given:
        # Spark's timestamps count microseconds; up to the next millisecond, never down.
        due_us = given["due"].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).fill_null(now_ms * 1000)
        due = pa.array(-(-int64(due_us) // 1000))
    else:
        due = pa.nulls(count, pa.int64())
    return due.fill_null(now_ms)


def _properties(column: pa.Array) -> pa.Array:
    if not pa.types.is_map(column.type):
        return column
    entries = pc.binary_join_element_wise(
        column.keys.cast(pa.string()), column.items.cast(pa.string()).fill_null(""), PROPERTY_NAME_END
    )
    ended = pc.binary_join_element_wise(entries, "", PROPERTY_END)
    lists = pa.ListArray.from_arrays(column.offsets, ended)
    return pc.if_else(column.is_valid(), pc.binary_join(lists, ""), pa.scalar(None, pa.string()))


# ---- the rules --------------------------------------------------------------------------------------------

Rule = tuple[str, Callable[[pa.Table, int], BoolArray]]


def _long(name: str, most: int) -> Callable[[pa.Table, int], BoolArray]:
    def breaks(rows: pa.Table, _: int) -> BoolArray:
        return _true(pc.greater(pc.binary_length(rows.column(name)), most))

    return breaks


def _bad_topic(rows: pa.Table, _: int) -> BoolArray:
    # Checked once a name: a million rows have a handful of topics.
    topics = rows.column("topic").combine_chunks().fill_null("").dictionary_encode()
    good = pc.match_substring_regex(topics.dictionary, limits.NAME.pattern)
    short = pc.less_equal(pc.binary_length(topics.dictionary), limits.TOPIC_BYTES_MAX)
    return ~_true(pc.and_(good, short).take(topics.indices))


def _many_keys(rows: pa.Table, _: int) -> BoolArray:
    return _true(pc.greater_equal(pc.count_substring(rows.column("keys"), " "), limits.KEYS_PER_MESSAGE_MAX))


RULES: list[Rule] = [
    ("topic: missing, too long, or with other characters than letters, digits, % | _ -", _bad_topic),
    ("body: missing", lambda rows, _: _true(rows.column("body").is_null())),
    (f"body: more than {limits.BODY_BYTES_MAX} bytes", _long("body", limits.BODY_BYTES_MAX)),
    (f"tag: more than {limits.TAG_BYTES_MAX} bytes", _long("tag", limits.TAG_BYTES_MAX)),
    (f"keys: more than {limits.KEYS_BYTES_MAX} bytes", _long("keys", limits.KEYS_BYTES_MAX)),
    (f"keys: more than {limits.KEYS_PER_MESSAGE_MAX} of them", _many_keys),
    (
        f"unique_key: more than {limits.UNIQUE_KEY_BYTES_MAX} bytes",
        _long("unique_key", limits.UNIQUE_KEY_BYTES_MAX),
    ),
    (
        f"properties: more than {limits.PROPERTIES_BYTES_MAX} bytes",
        _long("properties", limits.PROPERTIES_BYTES_MAX),
    ),
    (
        f"queue_id: not between 0 and {limits.QUEUES_PER_TOPIC_MAX - 1}",
        lambda rows, _: _outside(rows, "queue_id", _NO_QUEUE, limits.QUEUES_PER_TOPIC_MAX - 1),
    ),
    ("due: before 1970", lambda rows, _: _outside(rows, "due_ms", 0, limits.INSTANT_MS_MAX)),
    (
        f"due: more than {limits.DELAY_MS_MAX // limits.DAY_MS} days ahead",
        lambda rows, now_ms: _outside(rows, "due_ms", 0, now_ms + limits.DELAY_MS_MAX),
    ),
]


def broken_rules(rows: pa.Table, now_ms: int) -> npt.NDArray[np.int8]:
    """For each row of `normalise`d columns the index in RULES of the first rule it breaks, or -1."""
    first = np.full(rows.num_rows, -1, np.int8)
    for index, (_, breaks) in enumerate(RULES):
        first[(first < 0) & breaks(rows, now_ms)] = index
    return first


def _true(column: pa.ChunkedArray | pa.Array) -> BoolArray:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _outside(rows: pa.Table, name: str, low: int, high: int) -> BoolArray:
    column = rows.column(name)
    return _true(pc.or_(pc.less(column, low), pc.greater(column, high)))


# ---- what a valid row still lacks -------------------------------------------------------------------------


def with_unique_keys(rows: pa.Table) -> pa.Table:
    """Rows whose unique_key is null or empty are given a random one."""
    column = rows.column("unique_key").combine_chunks()
    if column.null_count == 0 and not _true(pc.equal(column, "")).any():
        return rows
    lacking = pc.or_(column.is_null(), pc.fill_null(pc.equal(column, ""), True))
    filled = pc.if_else(lacking, random_keys(len(column)), column)
    return rows.set_column(
        rows.schema.get_field_index("unique_key"), TABLE_SCHEMA.field("unique_key"), filled
    )


def random_keys(count: int) -> pa.Array:
    """`count` strings of 32 hexadecimal characters from the system's random source."""
    text = os.urandom(16 * count).hex().encode("ascii")
    offsets = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def checksum(rows: pa.Table) -> int:
    """A number that stands for these `normalise`d rows, in whatever order and however they are cut into tasks.

    The due instant is left out: `now() + interval 1 hour` is another one when the same write is run again.
    """
    total = 0
    for batch in rows.to_batches(CHECKSUM_ROWS):
        columns = [batch.column(name).cast(pa.large_string()).cast(pa.large_binary()) for name in _SUMMED]
        columns.append(batch.column("body").cast(pa.large_binary()))
        joined = pc.binary_join_element_wise(
            *columns, _BETWEEN, null_handling="replace", null_replacement=b"\x00"
        )
        total += sum(map(google_crc32c.value, joined.to_pylist()))
    return total & (1 << 64) - 1


def due_order(rows: pa.Table) -> Int64Array:
    """Positions of the rows by due instant; equal ones keep their order."""
    return np.argsort(int64(rows.column("due_ms").combine_chunks()), kind="stable").astype(np.int64)


def numbered(rows: pa.Table, first_seq: int) -> pa.Table:
    """`rows` with dense sequence numbers from `first_seq` on, in the order they are in."""
    seqs = pa.array(np.arange(first_seq, first_seq + rows.num_rows, dtype=np.int64))
    return rows.set_column(0, TABLE_SCHEMA.field("seq"), seqs)
