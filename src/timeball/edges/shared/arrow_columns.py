"""The columns of a stream: its Arrow schema is checked once, and each batch in full. Does no I/O.

The columns of a send are found by name, in any order. Only `topic` and `body` are required. An unknown column is
refused by its name: a producer that writes `delay` for `delay_ms` must not see its messages delivered at once. ACCEPTED
lists the types of each column. Types with the same meaning (large strings, wider or narrower integers) are converted,
and a value that does not fit refuses its batch. A batch is also refused if its values take more bytes than a request
may have: with shared buffers, a few kilobytes can contain one value a hundred times.

The rows of a release have all columns of TABLE_SCHEMA, in any order, because the client has read them from the table.

A batch from a socket is only a claim about buffers. `validate(full=True)` proves offsets, lengths and UTF-8 before any
code reads through them. The proof covers the types of ACCEPTED, but not all types of Arrow: a view column passes it and
then breaks a cast. Before another column is read or converted, the topics are validated and the caller's right to send
to them is checked.
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
# The policy's decision about one caller: `allow(verb, topic=...)` raises Forbidden or Unauthorized.
Allow = Callable[..., None]
_TEXTS = (pa.string(), pa.large_string())
_INTEGERS = (
    pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()
)  # fmt: skip
# The accepted types of a column, by the type that it is converted to. The list is exact, so that a new type of Arrow is
# refused. A body may also be fixed_size_binary of any width, and a column without any value may be null.
ACCEPTED: dict[pa.DataType, tuple[pa.DataType, ...]] = {
    pa.string(): (*_TEXTS, pa.null()),
    pa.binary(): (pa.binary(), pa.large_binary(), *_TEXTS, pa.null()),
    pa.int32(): (*_INTEGERS, pa.null()),
    pa.int64(): (*_INTEGERS, pa.null()),
}
_DUE_MS = SEND_NAMES.index("due_ms")
FEW_BYTES_MAX = 64 * 1024  # of a message that is read as rows
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
                raise InvalidMessage(f"column {name!r} is there {names.count(name)} times")
        for name in REQUIRED:
            if name not in names:
                raise InvalidMessage(f"column {name!r} is missing; a send needs topic and body")
        for field in schema:
            _check_type(field)
        self._target = pa.schema([SEND_SCHEMA.field(name) for name in names])
        self._exact = all(field.type == SEND_SCHEMA.field(field.name).type for field in schema)
        self._required = [names.index(name) for name in REQUIRED]
        # A row has no relative delay, so a stream with delays is sent as columns.
        is_of_rows = self._exact and codec == "auto" and "delay_ms" not in names
        self._reader = _reader_of(tuple(names)) if is_of_rows else None
        self._has_due = "due_ms" in names
        self._order = [names.index(name) if name in names else -1 for name in SEND_NAMES]

    def rows(self, header: memoryview, body: Sequence[bytes | memoryview]) -> list[SendRow] | None:
        """Return the rows of a small sound batch (event loop's thread), or None for a batch that `adopt` must check."""
        if self._reader is None or len(header) + sum(map(len, body)) > FEW_BYTES_MAX:
            return None
        found: list[SendRow] | None = self._reader.sent_rows(
            bytes(header), b"".join(body), self._order, self._required
        )
        if (
            found is None
            or not self._has_due
            or all(row[_DUE_MS] is None or row[_DUE_MS] >= limits.DUE_MS_MIN for row in found)
        ):
            return found
        return None  # `adopt` raises the error that names the row

    def adopt(self, batch: pa.RecordBatch, allow: Allow | None) -> pa.RecordBatch:
        """Return the batch with the types of SEND_SCHEMA, proven sound. Raises InvalidMessage, OverLimit, Forbidden.

        `allow` decides about the topics before other columns are read. None: that is decided already.
        """
        if not self.rows_min <= batch.num_rows <= limits.ROWS_PER_REQUEST_MAX:
            _refuse_rows(batch.num_rows)
        try:
            if allow is not None:
                self._check_topics(batch, allow)
            batch.validate(full=True)
            if not (self._exact and _is_small(batch)):
                check_bytes(sum(column.nbytes for column in batch.columns))
            if not self._exact:
                columns = [_convert(batch.column(i), field.type) for i, field in enumerate(self._target)]
                batch = pa.RecordBatch.from_arrays(columns, schema=self._target)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InvalidMessage(f"not a sound record batch: {error}") from error
        for index in self._required:
            if batch.column(index).null_count:
                raise InvalidMessage(f"column {self._target.names[index]!r} has rows without a value")
        if self._has_due:
            rules.check_due_times(batch.column("due_ms"))
        return batch

    def _check_topics(self, batch: pa.RecordBatch, allow: Allow) -> None:
        topics = batch.column(self._required[REQUIRED.index("topic")])
        topics.validate(full=True)
        for topic in topics.drop_null().unique():
            allow(Verb.SEND, topic=topic.as_py())


class SourceColumns(SendColumns):
    """The columns of one stream from a source. Its records need not become messages, so a batch may be empty."""

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
        """Return the batch in TABLE_SCHEMA, proven sound. Raises InvalidMessage, OverLimit, Forbidden."""
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
def _reader_of(names: tuple[str, ...]) -> Any:
    """Return the compiled reader of rows with these columns, or None without a compiler at the build."""
    return encoder_of(pa.schema([SEND_SCHEMA.field(name) for name in names]))


def _refuse_rows(rows: int) -> None:
    if rows == 0:
        raise InvalidMessage("an empty batch: send at least one row")
    raise OverLimit(f"{rows} rows in one batch; at most {limits.ROWS_PER_REQUEST_MAX}: send smaller batches")


def _check_type(field: pa.Field) -> None:
    wanted = SEND_SCHEMA.field(field.name).type
    is_fixed_body = pa.types.is_binary(wanted) and pa.types.is_fixed_size_binary(field.type)
    if field.type not in ACCEPTED[wanted] and not is_fixed_body:
        raise InvalidMessage(f"column {field.name!r} is {field.type}; it must be {wanted}")


def _convert(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert safely: an integer that does not fit, or an offset beyond 32 bits, raises."""
    return column if column.type == wanted else pc.cast(column, wanted)


def check_bytes(size_bytes: int) -> None:
    """Raise OverLimit for a batch whose values take more bytes than a message may have."""
    if size_bytes > limits.BATCH_BYTES_MAX:
        raise OverLimit(
            f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
        )


def size_of(batch: pa.RecordBatch) -> int:
    """Return the number of bytes of a sound batch. Raises OverLimit if it may not be sent."""
    size_bytes: int = batch.get_total_buffer_size()
    if size_bytes > limits.BATCH_BYTES_MAX:  # includes padding, and values outside a slice
        check_bytes(size_bytes := batch.nbytes)
    return size_bytes


def _is_small(batch: pa.RecordBatch) -> bool:
    """Return whether the values of the columns cannot exceed the bound, even if columns share a buffer."""
    size_bytes: int = batch.get_total_buffer_size()
    return bool(size_bytes * batch.num_columns <= limits.BATCH_BYTES_MAX)
