"""Rows for the log, encoded as they are made: a few from Python's values, or many by an edge that writes them itself.

The compiled encoder (arrow_message.pyx) writes the message at once, and the batch is a view of it. Without it, or for
values that it leaves alone, pyarrow makes the batch and serialises it: the reference, whose bytes are the same.

message_form.py says where the numbers of a message stand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.config import CodecChoice
from timeball.log.message_form import SHARING_ROWS_MIN, form_of, share
from timeball.message import LOG_SCHEMA, READ_SCHEMA, STORED_OVERHEAD_BYTES, Int64Array, LogRow, ReadRow

try:
    from timeball.log.arrow_message import MessageEncoder  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    MessageEncoder = None

_TEXT, _BINARY = -1, -2
JOINED_ROWS = 64  # of a part on the average: beyond it columns cost less
_ROW, _READ_ROW = pa.struct(list(LOG_SCHEMA)), pa.struct(list(READ_SCHEMA))
_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))


_DUE_MS, _LOG_DUE_MS = (schema.get_field_index("due_ms") for schema in (READ_SCHEMA, LOG_SCHEMA))
_LARGE_TEXTS = [LOG_SCHEMA.get_field_index(name) for name in ("body", "properties", "keys")]
ROW_BYTES = 256  # of a row without its large texts
# Of a message whose rows stay in it: each row that waits keeps all of it in memory.
HELD_ROWS_MAX, HELD_BYTES_MAX = 64, 65_536
BoolArray = npt.NDArray[np.bool_]
Pairs = tuple[Int64Array, Int64Array]  # of promises: their instants and numbers


class EncodedRows:
    """Rows of LOG_SCHEMA as they are appended: the message that their frame will hold, and where they are placed.

    `values` has them as Python's values, if they were made of such.
    """

    __slots__ = ("_batch", "is_visible", "message", "num_rows", "queue_ids", "queue_offsets", "values")

    def __init__(
        self,
        message: bytes | pa.Buffer,
        queue_ids: list[int],
        queue_offsets: list[int | None],
        values: list[LogRow] | None = None,
        batch: pa.RecordBatch | None = None,
    ) -> None:
        self.message, self.queue_ids, self.queue_offsets = message, queue_ids, queue_offsets
        self.values, self._batch = values, batch
        self.num_rows = len(queue_ids)
        self.is_visible = queue_offsets.count(None) < self.num_rows  # some of them

    @property
    def batch(self) -> pa.RecordBatch:
        """Return them as a batch; made when asked for, since most commits need none."""
        if self._batch is None:
            self._batch = pa.ipc.read_record_batch(self.message, LOG_SCHEMA)
        return self._batch


Rows: TypeAlias = "pa.RecordBatch | EncodedRows"
Build = Callable[[list[LogRow]], EncodedRows]


def as_batch(rows: Rows) -> pa.RecordBatch:
    """Return rows as a batch."""
    return rows.batch if isinstance(rows, EncodedRows) else rows


def message_bytes(rows: Rows) -> int:
    """Return how long the message of these rows is; of a batch at most: its columns may share zeros."""
    return len(rows.message) if isinstance(rows, EncodedRows) else int(pa.ipc.get_record_batch_size(rows))


def stored_size(topic: str, body: bytes, properties: str | None) -> int:
    """Return the bytes of a message as RocketMQ would store it; `stored_sizes` (message.py) is the same for columns.

    Raises UnicodeEncodeError for half a surrogate pair.
    """
    return STORED_OVERHEAD_BYTES + len(topic.encode()) + len(body) + len((properties or "").encode())


def rows_of(values: Sequence[LogRow]) -> pa.RecordBatch:
    """Return rows of LOG_SCHEMA from tuples with a value for each column; raises what Arrow raises of a value.

    In one conversion: column by column the same takes four times as long for one row, and up to 256 rows longer.
    """
    return pa.RecordBatch.from_struct_array(pa.array(values, _ROW))


def encode(rows: pa.RecordBatch) -> pa.Buffer:
    """Return rows of LOG_SCHEMA as an Arrow message without its schema."""
    message = rows.serialize()
    if rows.num_rows < SHARING_ROWS_MIN:
        return message
    return pa.py_buffer(share(message) if LOG_ENCODER is None else LOG_ENCODER.share(message))


def build_by_pyarrow(values: list[LogRow]) -> EncodedRows:
    """Build rows; raises what pyarrow raises of a value."""
    batch = rows_of(values)
    return _encoded(encode(batch), values, batch)


def build_compiled(values: list[LogRow]) -> EncodedRows:
    """Build rows, by pyarrow where a value is not of its column's very type."""
    message = LOG_ENCODER.encode(values)
    return build_by_pyarrow(values) if message is None else _encoded(message, values)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return rows side by side (disk thread).

    A few that were encoded from values are encoded once more: to open a message costs as much as some fifty rows.
    """
    values: list[LogRow] = []
    for part in parts:
        if not isinstance(part, EncodedRows) or part.values is None or not isinstance(part.message, bytes):
            break
        values += part.values
    else:
        if len(values) <= JOINED_ROWS * len(parts):
            return build_compiled(values)
    return pa.concat_batches([as_batch(part) for part in parts])


def _encoded(
    message: bytes | pa.Buffer, values: list[LogRow], batch: pa.RecordBatch | None = None
) -> EncodedRows:
    queue_ids, offsets = [row[_QUEUE_ID] for row in values], [row[_QUEUE_OFFSET] for row in values]
    return EncodedRows(message, queue_ids, offsets, values, batch)


class NumberedRows:
    """A few rows of READ_SCHEMA as Python's values, each of its column's type; a batch only when one is asked for.

    Rows of a message stay there, a third of the size, until their values are asked for.
    """

    __slots__ = ("_batch", "_message", "_pairs", "_seqs", "_values", "_which", "num_rows")

    def __init__(self, values: list[ReadRow], pairs: Pairs | None = None) -> None:
        self._values: list[ReadRow] | None = values
        self._message = b""
        self._seqs: list[int] = []
        self._which: list[int] = []
        self.num_rows, self._pairs = len(values), pairs
        self._batch: pa.RecordBatch | None = None

    @classmethod
    def of(cls, message: bytes, seqs: list[int], which: list[int]) -> NumberedRows:
        """Return rows, by position, of a message that the compiled encoder wrote, with these numbers."""
        rows = cls([])
        rows._values, rows._message, rows._seqs, rows._which = None, message, seqs, which
        rows.num_rows = len(which)
        return rows

    @classmethod
    def gathered(cls, entries: Sequence[Entry], pairs: Pairs) -> NumberedRows:
        """Return the rows of these entries as values; `pairs` has their instants and numbers."""
        return cls(
            [held if at < 0 else LOG_ENCODER.row(held, at, seq) for _, seq, _, held, at in entries], pairs
        )

    def entries(self) -> list[Entry]:
        """Return each row by itself."""
        if self._values is None:
            message, texts = self._message, _LARGE_TEXTS
            return [
                (
                    LOG_ENCODER.number(message, row, _LOG_DUE_MS), seq,
                    LOG_ENCODER.text_bytes(message, row, texts), message, row,
                )
                for seq, row in zip(self._seqs, self._which, strict=True)
            ]  # fmt: skip
        return [
            (row[_DUE_MS], row[0], sum([len(row[1 + text] or "") for text in _LARGE_TEXTS]), row, -1)
            for row in self._values
        ]

    @property
    def size_bytes(self) -> int:
        """Return about how much memory the rows take."""
        return sum([ROW_BYTES + size_bytes for _, _, size_bytes, _, _ in self.entries()])

    @property
    def values(self) -> list[ReadRow]:
        """Return the rows, a value for each column."""
        if self._values is not None:
            return self._values
        row_of, message = LOG_ENCODER.row, self._message
        return [row_of(message, row, seq) for seq, row in zip(self._seqs, self._which, strict=True)]

    @property
    def batch(self) -> pa.RecordBatch:
        """Return them as a batch."""
        if self._batch is None:
            values = self.values
            message = None if _read_encoder is None else _read_encoder.encode(values)
            self._batch = (
                pa.RecordBatch.from_struct_array(pa.array(values, _READ_ROW))
                if message is None
                else pa.ipc.read_record_batch(message, READ_SCHEMA)
            )
        return self._batch

    @property
    def pairs(self) -> Pairs:
        """Return the instant and the number of each row; the same arrays each time."""
        if self._pairs is None:
            if self._values is None:
                seqs = self._seqs
                instants = [LOG_ENCODER.number(self._message, row, _LOG_DUE_MS) for row in self._which]
            else:
                seqs = [row[0] for row in self._values]
                instants = [row[_DUE_MS] for row in self._values]
            self._pairs = np.array(instants, dtype=np.int64), np.array(seqs, dtype=np.int64)
        return self._pairs

    def filter(self, keep: BoolArray) -> NumberedRows:
        """Return some of the rows."""
        kept = np.flatnonzero(keep).tolist()
        if self._values is not None:
            return NumberedRows([self._values[at] for at in kept])
        return self.of(self._message, [self._seqs[at] for at in kept], [self._which[at] for at in kept])


# A row by itself: its instant and number, about how many bytes its large texts have, the message that it stands in, and
# where; or the row and -1. Of texts and numbers alone, so that the collector of garbage does not look at thousands.
Entry: TypeAlias = tuple[int, int, int, Any, int]
ReadRows: TypeAlias = "pa.RecordBatch | NumberedRows"


def read_batch(rows: ReadRows) -> pa.RecordBatch:
    """Return rows of READ_SCHEMA as a batch."""
    return rows.batch if isinstance(rows, NumberedRows) else rows


def read_bytes(rows: ReadRows) -> int:
    """Return about how much memory rows of READ_SCHEMA take."""
    return rows.size_bytes if isinstance(rows, NumberedRows) else int(rows.nbytes)


def pairs_of(rows: ReadRows) -> Pairs:
    """Return instant and number of each row; all have an instant."""
    if isinstance(rows, NumberedRows):
        return rows.pairs
    return rows.column("due_ms").to_numpy(), rows.column("seq").to_numpy()


def filtered(rows: ReadRows, keep: BoolArray) -> ReadRows:
    """Return some of these rows."""
    return rows.filter(keep if isinstance(rows, NumberedRows) else pa.array(keep))


def numbered(rows: EncodedRows, seqs: list[int], which: list[int]) -> ReadRows:
    """Return some of these rows, by position, as READ_SCHEMA rows with these numbers."""
    # Compiled: each value is of its column's type.
    is_compiled = LOG_ENCODER is not None and isinstance(rows.message, bytes)
    if is_compiled and len(which) <= HELD_ROWS_MAX and len(rows.message) <= HELD_BYTES_MAX:
        return NumberedRows.of(rows.message, seqs, which)
    batch = rows.batch if len(which) == rows.num_rows else rows.batch.take(pa.array(which))
    return pa.RecordBatch.from_arrays([pa.array(seqs, pa.int64()), *batch.columns], schema=READ_SCHEMA)


def as_message(batch: pa.RecordBatch) -> Rows | bytes:
    """Return rows as their message, in which one costs a fiftieth of a value from each column.

    Without a compiler they stay columns: nothing reads a row of a message then.
    """
    return batch if LOG_ENCODER is None else bytes(batch.serialize())


def numbered_value(rows: Rows | bytes, at: int, seq: int) -> ReadRow:
    """Return one of these rows with its number, a value for each column; `rows` may be what `as_message` returned."""
    if isinstance(rows, bytes):
        found: ReadRow = LOG_ENCODER.row(rows, at, seq)
        return found
    if isinstance(rows, EncodedRows):
        if rows.values is not None:
            return (seq, *rows.values[at])
        if LOG_ENCODER is not None and isinstance(rows.message, bytes):
            row: ReadRow = LOG_ENCODER.row(rows.message, at, seq)
            return row
    return (seq, *[column[at].as_py() for column in as_batch(rows).columns])


def builder_of(choice: CodecChoice) -> Build:
    """Return what builds rows with this setting."""
    return build_compiled if MessageEncoder is not None and choice == "auto" else build_by_pyarrow


def _width(kind: pa.DataType) -> int:
    if kind in (pa.string(), pa.binary()):
        return _TEXT if kind == pa.string() else _BINARY
    return int(kind.bit_width // 8)


def encoder_of(schema: pa.Schema, sharing_rows_min: int = sys.maxsize) -> Any:
    """Return a MessageEncoder for rows of this schema; None where there was no compiler."""
    if MessageEncoder is None:
        return None
    return MessageEncoder(*form_of(schema), [_width(field.type) for field in schema], sharing_rows_min)


LOG_ENCODER: Any
# Frames alone share their zeros: what leaves the broker is laid out as clients of any make expect it.
LOG_ENCODER, _read_encoder = encoder_of(LOG_SCHEMA, SHARING_ROWS_MIN), encoder_of(READ_SCHEMA)
