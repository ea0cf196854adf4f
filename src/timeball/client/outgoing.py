"""Prepare columns for a send stream of Flight: batches with ids, all of one schema.

The columns of a table, a batch or a reader are those of the Flight protocol, and two more for convenience:

    at      timestamp with a time zone -> due_ms
    after   duration                   -> delay_ms

Missing ids and birth times are filled in. Unknown columns of tables are passed on: the broker refuses them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.client.identifiers import IDENTIFIERS, Identifiers
from timeball.client.rows import TIME_NAMES
from timeball.client.tracing import current_context
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import encode_properties, int64
from timeball.model.rules import (
    BoolArray,
    check_key,
    check_label,
    check_no_nulls,
    key_faults,
    keys_text,
    label_faults,
)
from timeball.model.trace_context import with_contexts

# ---- conversion to record batches -----------------------------------------------------------------------------

# Up to this many rows that are all available at once, and fit into BATCH_BYTES, are sent as one batch.
ATOMIC_ROWS = limits.ROWS_PER_REQUEST_MAX // 2
BATCH_ROWS = 8_192  # rows of a batch when there are more rows, or when they come one by one
BATCH_BYTES = limits.BODY_BYTES_MAX  # a batch is halved until it is at most this large, or one row
_SECONDS_MAX = limits.INSTANT_MS_MAX  # times in seconds up to this one fit into 64 bits as milliseconds

Columns: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader


def batches(
    rows: Columns, topic: str | None, batch_rows: int | None, born_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield batches for a send stream, completed as `complete` does. Raises InvalidMessage and InvalidDelay.

    The rows of a table or a batch form one batch, if they are at most `batch_rows` rows (None: ATOMIC_ROWS) and at most
    BATCH_BYTES. The broker then accepts all of them or none. Any other rows are split into batches of at most
    `batch_rows` rows (None: BATCH_ROWS) and BATCH_BYTES.
    """
    max_rows, first_row = batch_rows or BATCH_ROWS, 0
    if isinstance(rows, (pa.Table, pa.RecordBatch)) and 0 < len(rows) <= (batch_rows or ATOMIC_ROWS):
        for whole in _to_batches(rows, len(rows)):
            _check_times(whole, 0)
            completed = complete(whole, topic, born_ms)
            if completed.nbytes <= BATCH_BYTES:
                yield completed
            else:
                yield from _split_by_size(completed, max_rows)
        return
    for batch in _to_batches(rows, max_rows):
        _check_times(batch, first_row)
        first_row += batch.num_rows
        # Columns are filled in for many rows at once, even if the batches are small.
        for begin in range(0, batch.num_rows, max(max_rows, ATOMIC_ROWS)):
            chunk = batch.slice(begin, max(max_rows, ATOMIC_ROWS))
            yield from _split_by_size(complete(chunk, topic, born_ms), max_rows)


def _check_times(batch: pa.RecordBatch, first_row: int) -> None:
    """Raise InvalidDelay for a null time. `first_row` is the number of the first row of `batch`."""
    check_no_nulls(dict(zip(batch.schema.names, batch.columns)), TIME_NAMES, first_row)


def _split_by_size(batch: pa.RecordBatch, max_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the parts of a batch, in order, each of at most `max_rows` rows and BATCH_BYTES or a single row."""
    for begin in range(0, batch.num_rows, max_rows):
        yield from halves(batch.slice(begin, max_rows))


def _to_batches(rows: Columns, max_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows as record batches, of a table in batches of at least `max_rows` rows."""
    if isinstance(rows, pa.RecordBatch):
        yield rows
    elif isinstance(rows, pa.Table):
        # `combine_chunks`, so that the chunks of the table do not become small batches.
        for begin in range(0, rows.num_rows, max(max_rows, ATOMIC_ROWS)):
            yield from rows.slice(begin, max(max_rows, ATOMIC_ROWS)).combine_chunks().to_batches()
    else:
        yield from rows


def complete(batch: pa.RecordBatch, topic: str | None, born_ms: int) -> pa.RecordBatch:
    """Complete a batch to the columns of the Flight protocol.

    Converts `at` and `after` to due_ms and delay_ms, joins the keys of a row to one text, and fills in the topic, ids,
    birth times (`born_ms`) and the trace context where they are missing. Raises InvalidMessage and InvalidDelay.
    """
    columns = dict(zip(batch.schema.names, batch.columns))
    if len(columns) != batch.num_columns:
        raise InvalidMessage(f"two columns have one name: {', '.join(batch.schema.names)}")
    for name, column in columns.items():
        # The broker accepts neither dictionaries nor views from a client: it could not bound the size of a decoded
        # dictionary, or verify a view.
        if pa.types.is_dictionary(column.type):
            columns[name] = column = pc.cast(column, column.type.value_type)
        if pa.types.is_string_view(column.type):
            columns[name] = pc.cast(column, pa.large_string())
        elif pa.types.is_binary_view(column.type):
            columns[name] = pc.cast(column, pa.large_binary())
    _check_texts(columns)
    for name, target, convert in (("at", "due_ms", due_column), ("after", "delay_ms", delay_column)):
        if name in columns:
            if target in columns:
                raise InvalidDelay(f"columns {name!r} and {target!r} name two due times; give one of them")
            columns[target] = convert(columns.pop(name))
    if topic is not None and "topic" not in columns:
        columns["topic"] = pa.repeat(topic, batch.num_rows)
    if "born_ms" not in columns:
        columns["born_ms"] = pa.repeat(pa.scalar(born_ms, pa.int64()), batch.num_rows)
    elif columns["born_ms"].null_count:
        columns["born_ms"] = pc.cast(columns["born_ms"], pa.int64()).fill_null(born_ms)
    ids = columns.get("unique_key")
    if ids is None or ids.null_count:
        new_ids = next_ids(IDENTIFIERS, batch.num_rows)
        columns["unique_key"] = new_ids if ids is None else pc.coalesce(pc.cast(ids, pa.string()), new_ids)
    completed = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    context = encode_properties(current_context())
    return with_contexts(completed, [context] * completed.num_rows) if context else completed


def _check_texts(columns: dict[str, pa.Array]) -> None:
    """Check tags, ids and keys, and replace a column of lists of keys by texts. Raises InvalidMessage.

    In a column of texts, each text is one key. In a column of lists, each row may have several keys.
    """
    for name in ("tag", "unique_key"):
        if name in columns and _is_text(columns[name]):
            _raise_first(name, columns[name], label_faults(columns[name]), check_label)
    keys = columns.get("keys")
    if keys is None:
        return
    if pa.types.is_list(keys.type) or pa.types.is_large_list(keys.type):
        columns["keys"] = pa.array([keys_text(row_keys) for row_keys in keys.to_pylist()], pa.string())
    elif _is_text(keys):
        _raise_first("keys", keys, key_faults(keys), lambda _, key: check_key(key))


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _raise_first(
    name: str, column: pa.Array, is_wrong: BoolArray, check: Callable[[str, Any], object]
) -> None:
    """Raise the error of `check` for the first value marked in `is_wrong`, if any. The text also names the row."""
    if is_wrong.any():
        row = int(is_wrong.argmax())
        try:
            check(name, column[row].as_py())
        except InvalidMessage as error:
            advice = "; for several keys use a column of lists" if name == "keys" else ""
            raise InvalidMessage(f"column {name!r}, row {row}: {error}{advice}") from error


def due_column(column: pa.Array) -> pa.Array:
    """Convert a timestamp column with a time zone to epoch milliseconds, rounded up. Raises InvalidDelay."""
    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        raise InvalidDelay(
            f"column 'at' is {column.type}; it must be a timestamp with a time zone (else: whose noon?), "
            "or give due_ms, milliseconds since 1970"
        )
    return _milliseconds(column, "at")


def delay_column(column: pa.Array) -> pa.Array:
    """Convert a column of durations to milliseconds, rounded up. Raises InvalidDelay."""
    if pa.types.is_duration(column.type):
        return _milliseconds(column, "after")
    raise InvalidDelay(
        f"column 'after' is {column.type}; it must be a duration, or give delay_ms, a number of milliseconds"
    )


def _milliseconds(column: pa.Array, name: str) -> pa.Array:
    """Convert timestamps or durations of any unit to whole milliseconds, rounded up. Nulls stay null.

    Arrow's casts are not used, because they overflow. Raises InvalidDelay, with the column's `name`, for seconds that
    do not fit into 64 bits as milliseconds.
    """
    values = int64(pc.cast(column, pa.int64()).fill_null(0))
    if column.type.unit == "s":
        is_too_far = np.abs(values) > _SECONDS_MAX
        if is_too_far.any():
            raise InvalidDelay(f"{name} of row {int(is_too_far.argmax())} is beyond what any broker takes")
        return pa.array(values * 1_000, mask=np.asarray(column.is_null()))
    per_ms = {"ms": 1, "us": 1_000, "ns": 1_000_000}[column.type.unit]
    # Rounds up. The shorter -(-values // per_ms) would overflow for the smallest number.
    milliseconds = values // per_ms + (values % per_ms > 0)
    return pa.array(milliseconds, mask=np.asarray(column.is_null()))


def halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each part has at most BATCH_BYTES, or a single row. Yields the parts in order."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows <= 1:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from halves(batch.slice(0, middle))
    yield from halves(batch.slice(middle))


# ---- ids ------------------------------------------------------------------------------------------------------

ID_CHARACTERS = 32
IDENTITY_CHARACTERS = 24  # of an id (identifiers.py); the counter has the other eight
ROWS_MAX = 2**26 - 1  # each id has 32 characters, and Arrow's offsets have 31 bits

# The two hexadecimal characters of each byte value, as one 16-bit unit.
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)


def next_ids(identifiers: Identifiers, count: int) -> pa.StringArray:
    """Create `count` consecutive ids, in one vectorized pass. Raises ValueError for more than ROWS_MAX.

    The bytes of all ids are a matrix with a row for each id: the identity, and the hexadecimal digits of its counter.
    """
    if not 0 <= count <= ROWS_MAX:
        raise ValueError(f"{count} ids at once; at most {ROWS_MAX}")
    identity, first = identifiers.reserve(count)
    characters = np.empty((count, ID_CHARACTERS), dtype=np.uint8)
    characters[:, :IDENTITY_CHARACTERS] = np.frombuffer(identity.encode(), dtype=np.uint8)
    counters = np.arange(first, first + count, dtype=np.int64).astype(">u4")  # big-endian
    octets = counters.view(np.uint8).reshape(count, 4)
    characters[:, IDENTITY_CHARACTERS:] = _HEX_PAIRS[octets].view(np.uint8).reshape(count, 8)
    offsets = np.arange(count + 1, dtype=np.int32) * ID_CHARACTERS
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(characters))
