"""Check the Arrow columns that a client sends: the schema once per stream, and each batch in full. Does no I/O.

The columns of a send may come in any order. Only `topic` and `body` are required. An unknown column is refused: a
producer that writes `delay` for `delay_ms` must not see its messages delivered at once. ACCEPTED lists the types that
each column may have. Types with the same meaning (large strings, wider or narrower integers) are converted,
and a value that does not fit refuses its batch. A batch is also refused if its values take more bytes than a request
may have: with shared buffers, a few kilobytes can contain one value a hundred times.

The rows of a release have all columns of TABLE_SCHEMA, in any order, because the client has read them from the table.

A batch from a socket is not trusted. Arrow's `validate(full=True)` checks all offsets, lengths and UTF-8 before any
code follows them. This check is sufficient for the types in ACCEPTED, but not for all Arrow types: a view column passes
it and then breaks a cast. The topics are validated first, and the caller's right to send to them is checked before any
other column is read or converted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.row_encoder import encoder_of
from timeball.model import limits, rules
from timeball.model.access import Verb
from timeball.model.config import CodecChoice
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.model.message import SEND_COLUMNS, SEND_NAMES, TABLE_SCHEMA, SendRow

# Without RocketMQ's delay levels, and without the born host, which admission sets.
SEND_SCHEMA = pa.schema(
    [(name, kind) for name, kind in SEND_COLUMNS.items() if name not in ("born_host", "delay_level")]
)
REQUIRED = ("topic", "body")
# Checks the permissions of one caller: `allow(verb, topic=...)` raises Forbidden or Unauthorized.
Allow = Callable[..., None]
_TEXTS = (pa.string(), pa.large_string())
_INTEGERS = (
    pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()
)  # fmt: skip
# The accepted types of a column, by the type that it is converted to. The list is explicit, so that a type that a later
# Arrow adds is refused. A body may also be fixed_size_binary of any width, and a column without any value may be null.
ACCEPTED: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.string(): (*_TEXTS, pa.null()),
    pa.binary(): (pa.binary(), pa.large_binary(), *_TEXTS, pa.null()),
    pa.int32(): (*_INTEGERS, pa.null()),
    pa.int64(): (*_INTEGERS, pa.null()),
}
_DUE_MS = SEND_NAMES.index("due_ms")
FEW_BYTES_MAX = 64 * 1024  # a larger IPC message is read as columns, not as rows
RELEASE_REQUIRED = ("seq", "due_ms", "topic", "body", "accepted_ms")


class SendColumns:
    """The columns of one send stream, and the conversions that they need."""

    rows_min = 1

    def __init__(self, schema: pa.Schema, codec: CodecChoice = "python") -> None:
        """Check names and types. Raises InvalidMessage naming the column. `codec` selects the reader for `rows`."""
        names = list(schema.names)
        unknown = sorted({repr(name[:80]) for name in names if name not in SEND_SCHEMA.names})
        if unknown:
            raise InvalidMessage(
                f"unknown column {', '.join(unknown[:8])}; a send has {', '.join(SEND_SCHEMA.names)}"
            )
        for name in SEND_SCHEMA.names:
            if names.count(name) > 1:
                raise InvalidMessage(f"column {name!r} appears {names.count(name)} times")
        for name in REQUIRED:
            if name not in names:
                raise InvalidMessage(f"column {name!r} is missing; a send needs topic and body")
        for field in schema:
            _check_type(field)
        self._target = pa.schema([SEND_SCHEMA.field(name) for name in names])
        self._has_exact_types = all(field.type == SEND_SCHEMA.field(field.name).type for field in schema)
        self._required_indices = [names.index(name) for name in REQUIRED]
        # A SendRow has no field for a relative delay, so a stream with `delay_ms` is read as columns.
        can_read_rows = self._has_exact_types and codec == "auto" and "delay_ms" not in names
        self._row_reader = _row_reader(tuple(names)) if can_read_rows else None
        self._has_due = "due_ms" in names
        # For each field of a SendRow, the index of its column in the stream, or -1.
        self._column_indices = [names.index(name) if name in names else -1 for name in SEND_NAMES]

    def rows(self, header: memoryview, body: Sequence[bytes | memoryview]) -> list[SendRow] | None:
        """Read a small batch as rows (event loop's thread). Returns None for a batch that `adopt` must check.

        `header` and `body` are those of one IPC message.
        """
        if self._row_reader is None or len(header) + sum(map(len, body)) > FEW_BYTES_MAX:
            return None
        rows: list[SendRow] | None = self._row_reader.sent_rows(
            bytes(header), b"".join(body), self._column_indices, self._required_indices
        )
        if (
            rows is None
            or not self._has_due
            or all(row[_DUE_MS] is None or row[_DUE_MS] >= limits.DUE_MS_MIN for row in rows)
        ):
            return rows
        return None  # `adopt` raises the error that names the row

    def adopt(self, batch: pa.RecordBatch, allow: Allow | None) -> pa.RecordBatch:
        """Check a batch and convert it to the types of SEND_SCHEMA. Raises InvalidMessage, OverLimit, Forbidden.

        `allow` checks the topics before other columns are read. None: the caller has checked them already.
        """
        if not self.rows_min <= batch.num_rows <= limits.ROWS_PER_REQUEST_MAX:
            _refuse_rows(batch.num_rows)
        try:
            if allow is not None:
                self._check_topics(batch, allow)
            batch.validate(full=True)
            if not (self._has_exact_types and _is_small(batch)):
                check_bytes(sum(column.nbytes for column in batch.columns))
            if not self._has_exact_types:
                columns = [_convert(batch.column(i), field.type) for i, field in enumerate(self._target)]
                batch = pa.RecordBatch.from_arrays(columns, schema=self._target)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InvalidMessage(f"not a sound record batch: {error}") from error
        for index in self._required_indices:
            if batch.column(index).null_count:
                raise InvalidMessage(f"column {self._target.names[index]!r} has rows without a value")
        if self._has_due:
            rules.check_due_times(batch.column("due_ms"))
        return batch

    def _check_topics(self, batch: pa.RecordBatch, allow: Allow) -> None:
        """Validate the topics of a batch, and check the permission to send to each."""
        topic_column = batch.column(self._required_indices[REQUIRED.index("topic")])
        topic_column.validate(full=True)
        for topic in topic_column.drop_null().unique():
            allow(Verb.SEND, topic=topic.as_py())


class SourceColumns(SendColumns):
    """The columns of one stream from a source. A batch may be empty: not every record of a source becomes a message."""

    rows_min = 0


class ReleaseColumns:
    """The columns of one release stream."""

    def __init__(self, schema: pa.Schema) -> None:
        """Check names and types. Raises InvalidMessage naming the column."""
        for field in TABLE_SCHEMA:
            if schema.names.count(field.name) != 1 or schema.field(field.name).type != field.type:
                raise InvalidMessage(
                    f"column {field.name!r} must be there once, as {field.type}: bring rows as they are in the table"
                )
        unknown = [name for name in schema.names if name not in TABLE_SCHEMA.names]
        if unknown:
            raise InvalidMessage(f"unknown column {unknown[0][:80]!r}; the table has {TABLE_SCHEMA.names}")

    def adopt(self, batch: pa.RecordBatch, allow: Allow | None) -> pa.RecordBatch:
        """Check a batch and bring its columns into the order of TABLE_SCHEMA.

        Raises InvalidMessage, OverLimit, and Forbidden if `allow` does not permit ADMIN.
        """
        if allow is not None:
            allow(Verb.ADMIN)
        if not 0 < batch.num_rows <= limits.ROWS_PER_REQUEST_MAX:
            raise OverLimit(
                f"{batch.num_rows} rows: between 1 and {limits.ROWS_PER_REQUEST_MAX} in one batch"
            )
        try:
            batch.validate(full=True)
            check_bytes(batch.nbytes)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidMessage(f"not a sound record batch: {error}") from error
        batch = batch.select(TABLE_SCHEMA.names)
        for name in RELEASE_REQUIRED:
            if batch.column(name).null_count:
                raise InvalidMessage(f"column {name!r} has rows without a value")
        rules.check_columns({"body": batch.column("body")})
        return pa.RecordBatch.from_arrays(batch.columns, schema=TABLE_SCHEMA)


@lru_cache(maxsize=64)
def _row_reader(names: tuple[str, ...]) -> Any:
    """Return the compiled reader for rows with these columns, or None if the extension was not compiled."""
    return encoder_of(pa.schema([SEND_SCHEMA.field(name) for name in names]))


def _refuse_rows(rows: int) -> None:
    if rows == 0:
        raise InvalidMessage("an empty batch: send at least one row")
    raise OverLimit(f"{rows} rows in one batch; at most {limits.ROWS_PER_REQUEST_MAX}: send smaller batches")


def _check_type(field: pa.Field) -> None:
    """Raise InvalidMessage if a column's type is not in ACCEPTED.

    A fixed-size binary is accepted for a binary column. It has any width, so ACCEPTED cannot list it.
    """
    target_type = SEND_SCHEMA.field(field.name).type
    is_fixed_body = pa.types.is_binary(target_type) and pa.types.is_fixed_size_binary(field.type)
    if field.type not in ACCEPTED[target_type] and not is_fixed_body:
        raise InvalidMessage(f"column {field.name!r} is {field.type}; it must be {target_type}")


def _convert(column: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert a column. An integer that does not fit, or an offset beyond 32 bits, raises an error of Arrow."""
    return column if column.type == target_type else pc.cast(column, target_type)


def check_bytes(size_bytes: int) -> None:
    """Raise OverLimit for a batch whose values take more bytes than a message may have."""
    if size_bytes > limits.BATCH_BYTES_MAX:
        raise OverLimit(
            f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
        )


def size_of(batch: pa.RecordBatch) -> int:
    """Return the size of a checked batch in bytes. Raises OverLimit if it is too large to be sent."""
    size_bytes: int = batch.get_total_buffer_size()
    if size_bytes > limits.BATCH_BYTES_MAX:  # includes padding, and values outside a slice
        check_bytes(size_bytes := batch.nbytes)
    return size_bytes


def _is_small(batch: pa.RecordBatch) -> bool:
    """Return whether the values stay below BATCH_BYTES_MAX even if every column refers to all buffers."""
    size_bytes: int = batch.get_total_buffer_size()
    return bool(size_bytes * batch.num_columns <= limits.BATCH_BYTES_MAX)
