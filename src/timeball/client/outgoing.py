"""Conversion of a program's messages to the record batches of a send stream.

One message becomes a batch of one row in `ONE_SCHEMA`. Many messages come as a table, a batch, a reader or a list of
dicts. Their columns are those of the Flight protocol, and two more for convenience:

    at      timestamp with a time zone -> due_ms      (dicts: as in `send(at=…)`)
    after   duration                   -> delay_ms    (dicts: as in `send(after=…)`)

Missing ids and birth times are filled in. Unknown columns are passed on, and the broker refuses them by name, so that
this rule is implemented only once.

An id is 32 hexadecimal characters, and unique without coordination:

    96 bits of identity (random, drawn once per process and again after 2^32 ids or a fork)
    32 bits of counter, big-endian

Like a unique key of RocketMQ, an id exists before the message is sent. So a message whose acknowledgement was lost can
still be named, cancelled, or sent again as the same message. The ids of one process sort by age. A million ids take one
vectorized pass.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.client.tracing import current_context
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.message import SEND_COLUMNS, int64
from timeball.model.rules import (
    BoolArray,
    Keys,
    check_key,
    check_label,
    check_no_nulls,
    key_faults,
    keys_text,
    label_faults,
    properties_text,
    valid,
)
from timeball.model.time_parsing import when
from timeball.model.trace_context import with_contexts

ONE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("body", pa.binary()),
        ("tag", pa.string()),
        ("keys", pa.string()),
        ("unique_key", pa.string()),
        ("properties", pa.string()),
        ("born_ms", pa.int64()),
        ("due_ms", pa.int64()),
        ("delay_ms", pa.int64()),
    ]
)
ATOMIC_ROWS = (
    limits.ROWS_PER_REQUEST_MAX // 2
)  # rows that are all available at once, and fit BATCH_BYTES, are one batch
BATCH_ROWS = 8_192  # rows of a batch when there are more rows, or when they come one by one
_SECONDS_MAX = limits.INSTANT_MS_MAX  # a limit for seconds, whose milliseconds fit into 64 bits
_TIMES = ("after", "at", "delay_ms", "due_ms")
# The names that a dict may have: the arguments of `send` and the columns of the Flight protocol.
_ROW_NAMES = (
    "after", "at", "message_id",
    *(name for name in SEND_COLUMNS if name not in ("born_host", "delay_level")),
)  # fmt: skip
BATCH_BYTES = limits.BODY_BYTES_MAX  # a batch is halved until it is at most this large, or one row

Rows: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[Mapping[str, Any]]
Body: TypeAlias = bytes | bytearray | memoryview | str


def one(
    topic: str,
    body: Body,
    tag: str | None,
    keys: Keys | None,
    properties: Mapping[str, str] | None,
    message_id: str,
    born_ms: int,
    delay_ms: int | None,
    due_ms: int | None,
) -> pa.RecordBatch:
    """Build a batch of one message. Raises InvalidMessage."""
    row = (
        topic,
        _bytes(body),
        check_label("tag", tag),
        keys_text(keys),
        check_label("message_id", message_id),
        properties_text(properties),
        born_ms,
        due_ms,
        delay_ms,
    )
    try:
        columns = [pa.array([value], field.type) for value, field in zip(row, ONE_SCHEMA)]
    except (pa.ArrowException, TypeError, UnicodeError) as error:
        raise InvalidMessage(f"topic, tag and message_id are text: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=ONE_SCHEMA)


def batches(rows: Rows, topic: str | None, batch_rows: int | None, born_ms: int) -> Iterator[pa.RecordBatch]:
    """Yield batches with ids, all of one schema. Raises InvalidMessage and InvalidDelay.

    Rows that are all available at once form one batch, if they are at most `batch_rows` rows and BATCH_BYTES bytes. The
    broker accepts a batch as a whole or not at all. With `batch_rows` None the limit is ATOMIC_ROWS, and more rows are
    split into batches of BATCH_ROWS.
    """
    step, first_row = batch_rows or BATCH_ROWS, 0
    are_dicts = not isinstance(rows, (pa.Table, pa.RecordBatch, pa.RecordBatchReader))
    if isinstance(rows, (pa.Table, pa.RecordBatch, list, tuple)) and 0 < len(rows) <= (
        batch_rows or ATOMIC_ROWS
    ):
        for whole in _record_batches(rows, len(rows)):
            _check_times(rows, whole, 0)
            completed = complete(whole, topic, born_ms, are_keys_joined=are_dicts)
            if completed.nbytes <= BATCH_BYTES:
                yield completed
            else:
                yield from _parts(completed, step)
        return
    for batch in _record_batches(rows, step):
        _check_times(rows, batch, first_row)
        first_row += batch.num_rows
        # Columns are filled in for many rows at once, even if the batches are small.
        for start in range(0, batch.num_rows, max(step, ATOMIC_ROWS)):
            part = batch.slice(start, max(step, ATOMIC_ROWS))
            yield from _parts(complete(part, topic, born_ms, are_keys_joined=are_dicts), step)


def _check_times(rows: Rows, batch: pa.RecordBatch, first_row: int) -> None:
    """Raise InvalidDelay for a null due time in a table.

    In a batch made of dicts, a null means that the dict does not have this name.
    """
    if isinstance(rows, pa.RecordBatch | pa.Table | pa.RecordBatchReader):
        check_no_nulls(dict(zip(batch.schema.names, batch.columns)), _TIMES, first_row)


def _parts(batch: pa.RecordBatch, step: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, batch.num_rows, step):
        yield from halves(batch.slice(first, step))


def _record_batches(rows: Rows, step: int) -> Iterator[pa.RecordBatch]:
    if isinstance(rows, pa.RecordBatch):
        yield rows
    elif isinstance(rows, pa.Table):
        # The table's chunks do not matter: rows that fit into one batch become one.
        for start in range(0, rows.num_rows, max(step, ATOMIC_ROWS)):
            yield from rows.slice(start, max(step, ATOMIC_ROWS)).combine_chunks().to_batches()
    elif isinstance(rows, pa.RecordBatchReader):
        yield from rows
    elif isinstance(rows, (str, bytes, Mapping)):
        raise InvalidMessage("send_many takes a table, a record batch or a list of dicts")
    else:  # perhaps a slow generator: its rows are sent as soon as they fill a batch
        given, first_row = iter(rows), 0
        while part := list(islice(given, step)):
            yield from_dicts(part, first_row)
            first_row += len(part)


def complete(
    batch: pa.RecordBatch, topic: str | None, born_ms: int, *, are_keys_joined: bool = False
) -> pa.RecordBatch:
    """Complete a batch: `at` and `after` become due_ms and delay_ms; the topic, ids and birth times are filled in."""
    columns = dict(zip(batch.schema.names, batch.columns))
    if len(columns) != batch.num_columns:
        raise InvalidMessage(f"two columns have one name: {', '.join(batch.schema.names)}")
    for name, column in columns.items():
        # The broker accepts neither type from a client: it could not bound the size of a decoded dictionary, nor verify
        # a view.
        if pa.types.is_dictionary(column.type):
            columns[name] = column = pc.cast(column, column.type.value_type)
        if pa.types.is_string_view(column.type):
            columns[name] = pc.cast(column, pa.large_string())
        elif pa.types.is_binary_view(column.type):
            columns[name] = pc.cast(column, pa.large_binary())
    _check_texts(columns, are_keys_joined=are_keys_joined)
    for name, target, convert in (("at", "due_ms", due_column), ("after", "delay_ms", delay_column)):
        if name in columns:
            if target in columns:
                raise InvalidDelay(f"columns {name!r} and {target!r} name two instants; give one of them")
            columns[target] = convert(columns.pop(name))
    if topic is not None and "topic" not in columns:
        columns["topic"] = pa.repeat(topic, batch.num_rows)
    if "born_ms" not in columns:
        columns["born_ms"] = pa.repeat(pa.scalar(born_ms, pa.int64()), batch.num_rows)
    elif columns["born_ms"].null_count:
        columns["born_ms"] = pc.cast(columns["born_ms"], pa.int64()).fill_null(born_ms)
    given = columns.get("unique_key")
    if given is None or given.null_count:
        made = IDENTIFIERS.take_many(batch.num_rows)
        columns["unique_key"] = made if given is None else pc.coalesce(pc.cast(given, pa.string()), made)
    completed = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    context = current_context()
    return with_contexts(completed, [context] * completed.num_rows) if context else completed


def _check_texts(columns: dict[str, pa.Array], *, are_keys_joined: bool) -> None:
    """Check tags and ids, and join keys to one text.

    In a column of texts, each text is one key. In a column of lists, each row may have several keys.
    """
    for name in ("tag", "unique_key"):
        if name in columns and _is_text(columns[name]):
            _check_each(name, columns[name], label_faults(columns[name]), check_label)
    keys = columns.get("keys")
    if keys is None or are_keys_joined:
        return
    if pa.types.is_list(keys.type) or pa.types.is_large_list(keys.type):
        columns["keys"] = pa.array([keys_text(each) for each in keys.to_pylist()], pa.string())
    elif _is_text(keys):
        _check_each("keys", keys, key_faults(keys), lambda _, key: check_key(key))


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _check_each(name: str, column: pa.Array, wrong: BoolArray, check: Callable[[str, Any], object]) -> None:
    """Raise the error of `check` for the first value marked in `wrong`, and add its row to the text."""
    if wrong.any():
        row = int(wrong.argmax())
        try:
            check(name, column[row].as_py())
        except InvalidMessage as error:
            several = "; for several keys use a column of lists" if name == "keys" else ""
            raise InvalidMessage(f"column {name!r}, row {row}: {error}{several}") from error


def due_column(column: pa.Array) -> pa.Array:
    """Convert a timestamp column with a time zone to epoch milliseconds. Fractions are rounded up."""
    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        raise InvalidDelay(
            f"column 'at' is {column.type}; it must be a timestamp with a time zone (else: whose noon?), "
            "or give due_ms, milliseconds since 1970"
        )
    return _milliseconds(column, "at")


def delay_column(column: pa.Array) -> pa.Array:
    """Convert a column of durations to milliseconds. Fractions are rounded up."""
    if pa.types.is_duration(column.type):
        return _milliseconds(column, "after")
    raise InvalidDelay(
        f"column 'after' is {column.type}; it must be a duration, or give delay_ms, a number of milliseconds"
    )


def _milliseconds(column: pa.Array, name: str) -> pa.Array:
    """Convert timestamps or durations of any unit to whole milliseconds, rounded up.

    Arrow's casts are not used for this, because they overflow.
    """
    values = int64(pc.cast(column, pa.int64()).fill_null(0))
    if column.type.unit == "s":
        wrong = np.abs(values) > _SECONDS_MAX
        if wrong.any():
            raise InvalidDelay(f"{name} of row {int(wrong.argmax())} is beyond what any broker takes")
        return pa.array(values * 1_000, mask=np.asarray(column.is_null()))
    per_ms = {"ms": 1, "us": 1_000, "ns": 1_000_000}[column.type.unit]
    # -(-values // per_ms) would overflow for the smallest number
    whole = values // per_ms + (values % per_ms > 0)
    return pa.array(whole, mask=np.asarray(column.is_null()))


def from_dicts(rows: Sequence[Mapping[str, Any]], first_row: int = 0) -> pa.RecordBatch:
    """Build a batch of dicts with the arguments of `send` or the protocol's columns. Every column is nullable.

    `first_row`: the number of the first dict among all rows of the call, for the texts of errors.
    """
    names: dict[str, None] = {}
    columns: dict[str, list[Any]] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    for name in names:
        if name not in _ROW_NAMES:
            raise InvalidMessage(f"unknown column {name!r} of a row; {valid(str(name), _ROW_NAMES)}")
    if "message_id" in names:
        names = dict.fromkeys("unique_key" if name == "message_id" else name for name in names)
    for at, row in enumerate(rows, first_row):
        for name in _TIMES:
            if name in row and row[name] is None:
                raise InvalidDelay(f"{name} of row {at} is None; leave it out to deliver at once")
    delayed = [when(row.get("after"), row.get("at")) for row in rows]
    for name in names:
        if name == "after":
            columns["delay_ms"] = [_only(row, "delay_ms", ms[0]) for row, ms in zip(rows, delayed)]
        elif name == "at":
            columns["due_ms"] = [_only(row, "due_ms", ms[1]) for row, ms in zip(rows, delayed)]
        elif name not in columns:
            columns[name] = [_cell(row, name) for row in rows]
    # All batches of a stream have one schema, even if their dicts have different keys.
    typed: dict[str, pa.Array] = {}
    try:
        for name in dict.fromkeys([*ONE_SCHEMA.names, *columns]):
            if name in ("topic", "unique_key") and name not in columns:
                continue  # `complete` fills these in
            values = columns.get(name, [None] * len(rows))
            wanted = ONE_SCHEMA.field(name).type if name in ONE_SCHEMA.names else None
            typed[name] = pa.array(values, wanted)
    except (pa.ArrowException, TypeError, UnicodeError, OverflowError) as error:
        raise InvalidMessage(f"column {name!r}: {error}") from error
    return pa.RecordBatch.from_arrays(list(typed.values()), names=list(typed))


def _only(row: Mapping[str, Any], name: str, value: int | None) -> int | None:
    """Choose between two ways to give one time: `after` and `delay_ms`, or `at` and `due_ms`.

    Giving both raises InvalidDelay.
    """
    given: int | None = row.get(name)
    if given is not None and value is not None:
        raise InvalidDelay(f"a message with two instants: {name}={given} and {value}")
    return value if given is None else given


def _cell(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    if name == "unique_key" and value is None:
        return row.get("message_id")
    if value is None:
        return None
    if name == "body":
        return _bytes(value)
    if name == "keys":
        return keys_text(value)
    if name in ("tag", "unique_key"):
        return check_label(name, value)
    if name == "properties" and not isinstance(value, str):
        return properties_text(value)
    return value


def _bytes(body: Body) -> bytes:
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    raise InvalidMessage(f"a body is bytes or str, not {type(body).__name__}; encode it first")


def halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch in parts that the broker accepts: each is at most BATCH_BYTES, or one row."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows <= 1:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from halves(batch.slice(0, middle))
    yield from halves(batch.slice(middle))


# ---- ids --------------------------------------------------------------------------------------------------

ID_CHARACTERS = 32
COUNTER_END = 2**32
ROWS_MAX = 2**26 - 1  # each has 32 characters, and Arrow's offsets have 31 bits

# The two hexadecimal characters of each byte value, as one 16-bit unit.
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype=np.uint16)


class Identifiers:
    """A source of ids. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self._identity = os.urandom(12).hex()
        self._next = 0

    def next_id(self) -> str:
        """Make one id."""
        identity, first = self._reserve(1)
        return f"{identity}{first:08x}"

    def take_many(self, count: int) -> pa.StringArray:
        """Make `count` consecutive ids. Raises ValueError if there are more than ROWS_MAX."""
        if not 0 <= count <= ROWS_MAX:
            raise ValueError(f"{count} ids at once; at most {ROWS_MAX}")
        identity, first = self._reserve(count)
        characters = np.empty((count, ID_CHARACTERS), dtype=np.uint8)
        characters[:, :24] = np.frombuffer(identity.encode(), dtype=np.uint8)
        counters = np.arange(first, first + count, dtype=np.int64).astype(">u4")
        octets = counters.view(np.uint8).reshape(count, 4)
        characters[:, 24:] = _HEX_PAIRS[octets].view(np.uint8).reshape(count, 8)
        offsets = np.arange(count + 1, dtype=np.int32) * ID_CHARACTERS
        return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(characters))

    def _reserve(self, count: int) -> tuple[str, int]:
        with self._lock:
            if self._next + count > COUNTER_END:
                self._renew()
            first = self._next
            self._next += count
            return self._identity, first

    def after_fork(self) -> None:
        """Reset a child process after a fork: it gets a new lock, and ids that differ from its parent's."""
        self._lock = threading.Lock()
        self._renew()


IDENTIFIERS = Identifiers()
os.register_at_fork(after_in_child=IDENTIFIERS.after_fork)
