"""Convert a DataFrame's columns to those of the pending table, and check each row.

    topic     string             required
    body      binary or string   required
    due_ms    bigint             or  due  timestamp; without either column all rows are due at once
    tag unique_key               string; a row without unique_key gets 32 random hexadecimal characters
    keys                         string for one key a row, array<string> for several
    properties                   string in RocketMQ's form, or map<string,string>
    queue_id                     int; a queue is chosen at release when it is left out
    flag sys_flag                int, as RocketMQ's clients set them; 0

The rules are those of `send` (rules.py). A row that breaks several rules is reported under the first of them.
Timestamps finer than a millisecond are rounded up, because a message must never be early.

All functions are pure functions on columns. This module does not import Spark.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import rules
from timeball.model.errors import InvalidMessage
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, TABLE_SCHEMA, Int64Array, int64

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_SPARK_TYPES: dict[str, tuple[str, ...]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("string", "array<string>"),
    "unique_key": ("string",),
    "properties": ("string", "map<string,string>"),
    "queue_id": ("int", "smallint", "tinyint", "bigint"),
    "flag": ("int",),
    "sys_flag": ("int",),
    "due_ms": ("bigint", "int"),
    "due": ("timestamp",),
}
_CHECKSUM_COLUMNS = ("topic", "tag", "keys", "unique_key", "properties", "queue_id", "flag", "sys_flag")
_COLUMN_SEPARATOR = pa.scalar(b"\x1f", pa.large_binary())  # separates the columns of a row in its checksum
CHECKSUM_ROWS = 65_536  # rows whose columns are joined at a time, because joining copies their bodies
# A queue number above the queues of every topic, so it is invalid. It fits into each type of queue_id except tinyint.
_QUEUES_END = 32_767
_TEXT_COLUMNS = ("topic", "tag", "unique_key")


def check_columns(schema: StructType) -> None:
    """Check names and types of a DataFrame's columns. Raises InvalidMessage, which names the column."""
    names = schema.fieldNames()
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidMessage(f"column {', '.join(repeated)}: there twice; drop or rename one of them")
    for column in schema.fields:
        types = _SPARK_TYPES.get(column.name)
        if types is None:
            raise InvalidMessage(f"column {column.name}: unknown; there are {', '.join(_SPARK_TYPES)}")
        if column.dataType.simpleString() not in types:
            hint = "; a timestamp without time zone names no instant" if column.name == "due" else ""
            raise InvalidMessage(
                f"column {column.name}: {column.dataType.simpleString()}, wanted {' or '.join(types)}{hint}"
            )
    for name in ("topic", "body"):
        if name not in names:
            raise InvalidMessage(f"column {name} is missing; a message has a topic and a body")
    if "due_ms" in names and "due" in names:
        raise InvalidMessage("columns due_ms and due: give one of them")


def to_table_columns(rows: pa.Table, now_ms: int) -> pa.Table:
    """Convert the input to TABLE_SCHEMA, with `seq` null. Does not check the values.

    `now_ms` becomes `born_ms` and `accepted_ms` of all rows. It is also `due_ms` if the input has neither `due_ms`
    nor `due`.
    """
    count = rows.num_rows
    columns_given = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    columns: dict[str, pa.Array] = {
        name: columns_given[name] for name in _TEXT_COLUMNS if name in columns_given
    }
    columns["body"] = columns_given["body"].cast(pa.binary())
    columns["due_ms"] = _due_ms(columns_given, count, now_ms)
    if "properties" in columns_given:
        columns["properties"] = _properties(columns_given["properties"])
    if "keys" in columns_given:
        columns["keys"] = _keys(columns_given["keys"])
    queue = columns_given.get("queue_id", pa.nulls(count, pa.int32())).fill_null(rules.ANY_QUEUE)
    # The column may be bigint. Clamp it to -2..32,767, so that the cast cannot overflow. Both ends are invalid
    # queues, which the check finds later.
    columns["queue_id"] = pc.min_element_wise(pc.max_element_wise(queue, -2), _QUEUES_END).cast(pa.int32())
    for name in ("born_ms", "accepted_ms"):
        columns[name] = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
    for name in ("flag", "sys_flag", "reconsume_times"):
        zeros = pa.repeat(pa.scalar(0, pa.int32()), count)
        columns[name] = columns_given[name].fill_null(0) if name in columns_given else zeros
    arrays = [columns.get(field.name) for field in TABLE_SCHEMA]
    return pa.Table.from_arrays(
        [
            pa.nulls(count, f.type) if a is None else a.cast(f.type)
            for f, a in zip(TABLE_SCHEMA, arrays, strict=True)
        ],
        schema=TABLE_SCHEMA,
    )


def _due_ms(columns: dict[str, pa.Array], count: int, now_ms: int) -> pa.Array:
    """Convert the column `due_ms` or `due` to ms since 1970. Without either, all rows are due at `now_ms`."""
    if "due_ms" in columns:
        due = columns["due_ms"].cast(pa.int64())
    elif "due" in columns:
        # Spark's timestamps count microseconds. Round up to the next millisecond, so that no message is early.
        due_us = columns["due"].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        numbers = int64(due_us.fill_null(0))
        due = pa.array(numbers // 1000 + (numbers % 1000 > 0), mask=np.asarray(due_us.is_null()))
    else:
        due = pa.repeat(pa.scalar(now_ms, pa.int64()), count)
    return due


def _keys(column: pa.Array) -> pa.Array:
    """Join a list of keys with blanks, as in the log."""
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    # Arrow joins only lists whose entries may be null, but Spark declares the entries of `array(…)` as not null.
    return pc.binary_join(column.cast(pa.list_(pa.string())), " ") if is_list else column


def _properties(column: pa.Array) -> pa.Array:
    """Convert a map of properties to one text, as in the log."""
    if not pa.types.is_map(column.type):
        return column
    entries = pc.binary_join_element_wise(
        column.keys.cast(pa.string()), column.items.cast(pa.string()).fill_null(""), PROPERTY_NAME_END
    )
    terminated = pc.binary_join_element_wise(entries, "", PROPERTY_END)
    lists = pa.ListArray.from_arrays(column.offsets, terminated)
    return pc.if_else(column.is_valid(), pc.binary_join(lists, ""), pa.scalar(None, pa.string()))


# ---- completing valid rows --------------------------------------------------------------------------------


def with_unique_keys(rows: pa.Table) -> pa.Table:
    """Replace each unique_key that is null or empty by a random one."""
    column = rows.column("unique_key").combine_chunks()
    if column.null_count == 0 and not pc.any(pc.equal(column, "")).as_py():
        return rows
    is_missing = pc.or_(column.is_null(), pc.fill_null(pc.equal(column, ""), True))
    filled = pc.if_else(is_missing, random_unique_keys(len(column)), column)
    return rows.set_column(
        rows.schema.get_field_index("unique_key"), TABLE_SCHEMA.field("unique_key"), filled
    )


def random_unique_keys(count: int) -> pa.Array:
    """Generate `count` strings of 32 hexadecimal characters from the system's random source."""
    text = os.urandom(16 * count).hex().encode("ascii")
    offsets = np.arange(0, 32 * (count + 1), 32, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def checksum(rows: pa.Table) -> int:
    """Compute the checksum of `to_table_columns`d rows: the sum of the rows' CRC-32C values, modulo 2**64.

    A sum depends neither on the order of the rows nor on their division among tasks. It does not include the due time,
    because `now() + interval 1 hour` has another value when the same write runs again.
    """
    total = 0
    for batch in rows.to_batches(CHECKSUM_ROWS):
        columns = [
            batch.column(name).cast(pa.large_string()).cast(pa.large_binary()) for name in _CHECKSUM_COLUMNS
        ]
        columns.append(batch.column("body").cast(pa.large_binary()))
        row_texts = pc.binary_join_element_wise(
            *columns, _COLUMN_SEPARATOR, null_handling="replace", null_replacement=b"\x00"
        )
        total += sum(map(google_crc32c.value, row_texts.to_pylist()))
    return total & (1 << 64) - 1


def first_broken(
    raw_rows: pa.Table, rows: pa.Table, now_ms: int, *, as_stored: bool = False
) -> npt.NDArray[np.int8]:
    """Find for each row the index in rules.RULES of the first rule that it breaks, or -1.

    `raw_rows`: the columns of the DataFrame. `rows`: the same rows `to_table_columns`d, with keys and properties as one
    text each. `as_stored`: texts in `raw_rows` have the form of the log (keys separated by blanks), so their form is
    not checked.
    """
    columns = {name: rows.column(name).combine_chunks() for name in rows.column_names}
    broken = rules.first_broken(columns, rows.num_rows, now_ms)
    for name, index in rules.FORM_RULES.items():
        if name in raw_rows.column_names and not (as_stored and _is_text(raw_rows.schema.field(name).type)):
            is_bad = rules.form_faults(name, raw_rows.column(name).combine_chunks())
            broken[is_bad & ((broken < 0) | (broken > index))] = index
    return broken


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def due_order(rows: pa.Table) -> Int64Array:
    """Compute the indexes of the rows in the order of their due times. The sort is stable."""
    return np.argsort(int64(rows.column("due_ms").combine_chunks()), kind="stable").astype(np.int64)


def numbered(rows: pa.Table, first_seq: int) -> pa.Table:
    """Fill the column `seq` with consecutive numbers from `first_seq` on."""
    seqs = pa.array(np.arange(first_seq, first_seq + rows.num_rows, dtype=np.int64))
    return rows.set_column(0, TABLE_SCHEMA.field("seq"), seqs)
