"""Encoding of log rows, and access to the rows of an encoded message.

A few rows are encoded from Python values. Many rows come from an edge that has already encoded them. The compiled
encoder (arrow_message.pyx) writes the Arrow message directly, and a batch is a view of that message. Without it, or for
values that it does not accept, pyarrow makes the batch and serialises it. pyarrow is the reference: both give the same
bytes.

The metadata of an Arrow message is a flatbuffer. All messages of one schema have the same metadata except for some
numbers: the rows, the nulls of each column, the position and size of each buffer, and the bytes of the body. So a
message that pyarrow wrote serves as a template, and its tables give the positions of these numbers (Arrow's
format/Message.fbs).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.model import flatbuffer as fb
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, STORED_OVERHEAD_BYTES, Int64Array, LogRow, ReadRow

# ---- the layout of a message, and its shared zeros -----------------------------------------------------------
# In the rows of a scheduled message, seven columns are nearly always null and three more are 0: sixty bytes a row
# without information. Arrow allows the buffers of a message to lie anywhere in its body. So all buffers that contain
# only zeros overlap at the beginning of the body. Every Arrow reader sees the same columns as in a message without
# overlap.

_PREFIX = struct.Struct("<iI")  # -1, then the bytes of the metadata
_NUMBER = struct.Struct("<q")
_ROOT_AT = _PREFIX.size
_WORD = 8  # buffers begin at multiples of it and are padded with zeros
# Messages of fewer rows keep their zeros: they save little, and small commits must be cheap.
SHARING_ROWS_MIN = 16
PARTS_BYTES_MIN = 1 << 20  # copying a smaller message costs less than writing its parts one by one


class MessageLayout(NamedTuple):
    """The metadata of a schema's messages, and the byte positions of the variable numbers in it."""

    head: bytes  # everything before the body
    rows_at: int
    nodes_at: int  # rows and nulls of each column
    buffers_at: int  # position and size of each buffer
    body_bytes_at: int


def derive_layout(schema: pa.Schema) -> MessageLayout:
    """Derive the layout of messages of this schema from a message that pyarrow writes."""
    no_value = {pa.string(): "", pa.binary(): b""}
    columns = [pa.array([no_value.get(field.type, 0)], field.type) for field in schema]  # of one row
    message = pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()
    _, metadata_bytes = _PREFIX.unpack_from(message)
    message_at = fb.target(message, _ROOT_AT)
    batch_at = fb.target(message, fb.present_field(message, message_at, fb.MESSAGE_HEADER))
    # A flatbuffer vector is its length (4 bytes), then its elements.
    nodes_at, buffers_at = (
        fb.target(message, fb.present_field(message, batch_at, field)) + 4
        for field in (fb.BATCH_NODES, fb.BATCH_BUFFERS)
    )
    return MessageLayout(
        message[: _PREFIX.size + metadata_bytes],
        fb.present_field(message, batch_at, fb.BATCH_ROWS),
        nodes_at,
        buffers_at,
        fb.present_field(message, message_at, fb.MESSAGE_BODY_BYTES),
    )


_LOG_LAYOUT = derive_layout(LOG_SCHEMA)
_HEAD_BYTES = len(_LOG_LAYOUT.head)
# Whether each buffer may share the zeros. The bytes of texts (the third buffer of a column) are never examined.
_MAY_SHARE = np.array([buffer < 2 for field in LOG_SCHEMA for buffer in range(field.type.num_buffers)])


Payload: TypeAlias = "Sequence[bytes | pa.Buffer]"  # the parts of an encoded message, in their order


def share_zeros(message: pa.Buffer) -> Payload:
    """Let all buffers of zeros in a LOG_SCHEMA message of pyarrow overlap at the beginning of its body.

    Returns the parts of the new message: its metadata with one run of zeros, then the other buffers as views of
    `message`, so that bodies are not copied. In this function, lengths and positions are in words of 8 bytes.
    """
    positions, sizes = (
        np.frombuffer(message, np.int64, 2 * len(_MAY_SHARE), _LOG_LAYOUT.buffers_at).reshape(-1, 2).T
    )
    first_words, word_counts = positions // _WORD, -(-sizes // _WORD)
    body = np.frombuffer(message, np.int64, offset=_HEAD_BYTES)
    # Cheap test first: most columns that are not all zeros have a non-zero first word.
    may_be_zeros = _MAY_SHARE & (word_counts > 0) & (body[np.minimum(first_words, len(body) - 1)] == 0)
    shared_buffers = [
        buffer
        for buffer in np.flatnonzero(may_be_zeros).tolist()
        if not body[first_words[buffer] : first_words[buffer] + word_counts[buffer]].any()
    ]
    if not shared_buffers:
        return [message]
    # The new body: zeros as long as the longest shared buffer, then the other buffers in their order.
    zero_words, copied_words = int(word_counts[shared_buffers].max()), word_counts.copy()
    copied_words[shared_buffers] = 0
    new_first_words = zero_words + np.cumsum(copied_words) - copied_words
    new_first_words[shared_buffers] = 0
    head = bytearray(memoryview(message)[:_HEAD_BYTES])
    head[_LOG_LAYOUT.buffers_at : _LOG_LAYOUT.buffers_at + 16 * len(new_first_words)] = np.column_stack(
        (_WORD * new_first_words, sizes)
    ).tobytes()
    _NUMBER.pack_into(head, _LOG_LAYOUT.body_bytes_at, _WORD * (zero_words + int(copied_words.sum())))
    # pyarrow writes the buffers one after the other, so the other buffers are the stretches between the shared ones.
    stretch_ends = [*first_words[shared_buffers].tolist(), len(body)]
    stretch_starts = [0, *(first_words[shared_buffers] + word_counts[shared_buffers]).tolist()]
    stretches = [
        message.slice(_HEAD_BYTES + _WORD * start, _WORD * (end - start))
        for start, end in zip(stretch_starts, stretch_ends, strict=True)
        if end > start
    ]
    return [bytes(head) + bytes(_WORD * zero_words), *stretches]


# ---- encoded rows --------------------------------------------------------------------------------------------

try:
    from timeball.log.arrow_message import MessageEncoder  # type: ignore[import-not-found]
except ImportError:  # built without a compiler
    MessageEncoder = None

_TEXT, _BINARY = -1, -2  # as in arrow_message.pxd
JOINED_ROWS = 64  # rows per part on average: above it, joining columns costs less than encoding again
_ROW, _READ_ROW = pa.struct(list(LOG_SCHEMA)), pa.struct(list(READ_SCHEMA))
_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))


# Column numbers differ by one: READ_SCHEMA begins with `seq`.
_DUE_MS, _LOG_DUE_MS = (schema.get_field_index("due_ms") for schema in (READ_SCHEMA, LOG_SCHEMA))
_LARGE_TEXTS = [LOG_SCHEMA.get_field_index(name) for name in ("body", "properties", "keys")]
ROW_BYTES = 256  # estimated bytes of a row without its large texts
# Rows of a larger message do not stay in it, because each pending row keeps its whole message in memory.
HELD_ROWS_MAX, HELD_BYTES_MAX = 64, 65_536
BoolArray = npt.NDArray[np.bool_]
Pairs = tuple[Int64Array, Int64Array]  # due times (ms) and numbers of scheduled messages


class EncodedRows:
    """Encoded rows of LOG_SCHEMA: the Arrow message that their frame will contain, and their queue positions.

    `values` contains the rows as Python values, if they were made from values.
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
        self.is_visible = queue_offsets.count(None) < self.num_rows  # at least one of them

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a batch, made at the first use, because most commits need none."""
        if self._batch is None:
            self._batch = pa.ipc.read_record_batch(self.message, LOG_SCHEMA)
        return self._batch


Rows: TypeAlias = "pa.RecordBatch | EncodedRows"
Build = Callable[[list[LogRow]], EncodedRows]


def as_batch(rows: Rows) -> pa.RecordBatch:
    """Convert rows to a batch."""
    return rows.batch if isinstance(rows, EncodedRows) else rows


def message_bytes(rows: Rows) -> int:
    """Compute the length of the message of these rows, or an upper bound for a batch, whose columns may share zeros."""
    return len(rows.message) if isinstance(rows, EncodedRows) else int(pa.ipc.get_record_batch_size(rows))


def stored_size(topic: str, body: bytes, properties: str | None) -> int:
    """Compute the bytes of a message as RocketMQ would store it. `stored_sizes` (message.py) does so for columns.

    Raises UnicodeEncodeError for half a surrogate pair.
    """
    return STORED_OVERHEAD_BYTES + len(topic.encode()) + len(body) + len((properties or "").encode())


def rows_of(values: Sequence[LogRow]) -> pa.RecordBatch:
    """Build a LOG_SCHEMA batch from tuples with a value for each column. Raises Arrow's error for a bad value.

    All columns are converted at once: one by one takes four times as long for one row, and is slower up to 256 rows.
    """
    return pa.RecordBatch.from_struct_array(pa.array(values, _ROW))


def encode(rows: pa.RecordBatch) -> pa.Buffer:
    """Encode rows of LOG_SCHEMA as an Arrow message without its schema."""
    parts = encode_parts(rows)
    return pa.py_buffer(parts[0] if len(parts) == 1 else b"".join(parts))


def encode_parts(rows: pa.RecordBatch) -> Payload:
    """Encode rows as `encode` does. The parts of a large message are not joined, which would copy all bodies again."""
    message = rows.serialize()
    if rows.num_rows < SHARING_ROWS_MIN:
        return [message]
    if LOG_ENCODER is None or len(message) >= PARTS_BYTES_MIN:
        return share_zeros(message)
    return [LOG_ENCODER.share(message)]


def build_by_pyarrow(values: list[LogRow]) -> EncodedRows:
    """Build rows with pyarrow. Raises the error that pyarrow raises for a value."""
    batch = rows_of(values)
    return _as_encoded_rows(encode(batch), values, batch)


def build_compiled(values: list[LogRow]) -> EncodedRows:
    """Build rows with the compiled encoder, or with pyarrow if a value does not have exactly its column's type."""
    message = LOG_ENCODER.encode(values)
    return build_by_pyarrow(values) if message is None else _as_encoded_rows(message, values)


def joined(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows, given as batches or encoded rows (disk thread).

    A few rows that were made from values are encoded again: opening a message costs as much as encoding some fifty
    rows.
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


def _as_encoded_rows(
    message: bytes | pa.Buffer, values: list[LogRow], batch: pa.RecordBatch | None = None
) -> EncodedRows:
    """Build EncodedRows from a message and the values from which it was made."""
    queue_ids, offsets = [row[_QUEUE_ID] for row in values], [row[_QUEUE_OFFSET] for row in values]
    return EncodedRows(message, queue_ids, offsets, values, batch)


# ---- a few rows as values, read from their message on demand -------------------------------------------------


class NumberedRows:
    """A few rows of READ_SCHEMA as Python values, each of its column's type. A batch is made on demand.

    Rows of an encoded message stay there until their values are needed: they take a third of the memory.
    """

    __slots__ = ("_batch", "_message", "_pairs", "_row_indexes", "_seqs", "_values", "num_rows")

    def __init__(self, values: list[ReadRow], pairs: Pairs | None = None) -> None:
        self._values: list[ReadRow] | None = values
        self._message = b""
        self._seqs: list[int] = []
        self._row_indexes: list[int] = []
        self.num_rows, self._pairs = len(values), pairs
        self._batch: pa.RecordBatch | None = None

    @classmethod
    def of(cls, message: bytes, seqs: list[int], row_indexes: list[int]) -> NumberedRows:
        """Make the rows at `row_indexes` of a LOG_SCHEMA message that the compiled encoder has written.

        `seqs` are their sequence numbers, in the same order.
        """
        rows = cls([])
        rows._values, rows._message, rows._seqs, rows._row_indexes = None, message, seqs, row_indexes
        rows.num_rows = len(row_indexes)
        return rows

    @classmethod
    def gathered(cls, entries: Sequence[Entry], pairs: Pairs) -> NumberedRows:
        """Collect the rows of these entries (see Entry) as values. `pairs` contains their due times and numbers."""
        return cls(
            [held if index < 0 else LOG_ENCODER.row(held, index, seq) for _, seq, _, held, index in entries],
            pairs,
        )

    def entries(self) -> list[Entry]:
        """Describe each row as an Entry, in their order."""
        if self._values is None:
            message, texts = self._message, _LARGE_TEXTS
            return [
                (
                    LOG_ENCODER.number(message, index, _LOG_DUE_MS), seq,
                    LOG_ENCODER.text_bytes(message, index, texts), message, index,
                )
                for seq, index in zip(self._seqs, self._row_indexes, strict=True)
            ]  # fmt: skip
        # row[0] is the sequence number, so the columns of LOG_SCHEMA begin at row[1].
        return [
            (row[_DUE_MS], row[0], sum([len(row[1 + text] or "") for text in _LARGE_TEXTS]), row, -1)
            for row in self._values
        ]

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the rows, in bytes."""
        return sum([ROW_BYTES + size_bytes for _, _, size_bytes, _, _ in self.entries()])

    @property
    def values(self) -> list[ReadRow]:
        """The rows as tuples, with a value for each column."""
        if self._values is not None:
            return self._values
        read_row, message = LOG_ENCODER.row, self._message
        return [
            read_row(message, index, seq) for seq, index in zip(self._seqs, self._row_indexes, strict=True)
        ]

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows as a batch."""
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
        """The due time and number of each row. Each call returns the same arrays."""
        if self._pairs is None:
            if self._values is None:
                seqs = self._seqs
                due_ms = [
                    LOG_ENCODER.number(self._message, index, _LOG_DUE_MS) for index in self._row_indexes
                ]
            else:
                seqs = [row[0] for row in self._values]
                due_ms = [row[_DUE_MS] for row in self._values]
            self._pairs = np.array(due_ms, dtype=np.int64), np.array(seqs, dtype=np.int64)
        return self._pairs

    def filter(self, keep: BoolArray) -> NumberedRows:
        """Select the rows for which `keep` is true."""
        kept_indexes = np.flatnonzero(keep).tolist()
        if self._values is not None:
            return NumberedRows([self._values[index] for index in kept_indexes])
        return self.of(
            self._message,
            [self._seqs[index] for index in kept_indexes],
            [self._row_indexes[index] for index in kept_indexes],
        )


# One row: (due_ms, seq, approximate bytes of its large texts, encoded message, index of the row in the message). For a
# row of Python values the last two are the values and -1. The tuple contains only texts and numbers, so that the
# garbage collector does not visit thousands of objects.
Entry: TypeAlias = tuple[int, int, int, Any, int]
ReadRows: TypeAlias = "pa.RecordBatch | NumberedRows"


def read_batch(rows: ReadRows) -> pa.RecordBatch:
    """Convert rows of READ_SCHEMA to a batch."""
    return rows.batch if isinstance(rows, NumberedRows) else rows


def read_bytes(rows: ReadRows) -> int:
    """Estimate the memory of rows of READ_SCHEMA, in bytes."""
    return rows.size_bytes if isinstance(rows, NumberedRows) else int(rows.nbytes)


def pairs_of(rows: ReadRows) -> Pairs:
    """Extract the due time and number of each row. Every row must have a due time."""
    if isinstance(rows, NumberedRows):
        return rows.pairs
    return rows.column("due_ms").to_numpy(), rows.column("seq").to_numpy()


def filtered(rows: ReadRows, keep: BoolArray) -> ReadRows:
    """Select the rows for which the mask `keep` is true."""
    return rows.filter(keep if isinstance(rows, NumberedRows) else pa.array(keep))


def numbered(rows: EncodedRows, seqs: list[int], row_indexes: list[int]) -> ReadRows:
    """Select the rows at `row_indexes`, with `seqs` as their sequence numbers, as READ_SCHEMA rows.

    A few rows of a small message stay in it (NumberedRows). Many rows become a batch.
    """
    # The compiled encoder accepted the rows, so each value has its column's type.
    is_compiled = LOG_ENCODER is not None and isinstance(rows.message, bytes)
    if is_compiled and len(row_indexes) <= HELD_ROWS_MAX and len(rows.message) <= HELD_BYTES_MAX:
        return NumberedRows.of(rows.message, seqs, row_indexes)
    batch = rows.batch if len(row_indexes) == rows.num_rows else rows.batch.take(pa.array(row_indexes))
    return pa.RecordBatch.from_arrays([pa.array(seqs, pa.int64()), *batch.columns], schema=READ_SCHEMA)


def as_message(batch: pa.RecordBatch) -> Rows | bytes:
    """Encode rows as one message, from which single rows can be read at a fiftieth of the cost of reading each column.

    Without the compiled encoder the rows stay columns, because only that encoder can read a row of a message.
    """
    return batch if LOG_ENCODER is None else bytes(batch.serialize())


def read_numbered_row(rows: Rows | bytes, index: int, seq: int) -> ReadRow:
    """Read the row at `index` as a tuple: its sequence number `seq`, then a value for each column of LOG_SCHEMA.

    `rows` may be the result of `as_message` or `readable`.
    """
    if isinstance(rows, bytes):
        row_values: ReadRow = LOG_ENCODER.row(rows, index, seq)
        return row_values
    if isinstance(rows, EncodedRows):
        if rows.values is not None:
            return (seq, *rows.values[index])
        if LOG_ENCODER is not None and isinstance(rows.message, bytes):
            values: ReadRow = LOG_ENCODER.row(rows.message, index, seq)
            return values
    return (seq, *[column[index].as_py() for column in as_batch(rows).columns])


READABLE_BYTES_MAX = 256 * 1024  # copying a larger message costs more than reading its columns
# (position, length) in bytes of the numbers in the metadata that differ between messages of one layout.
_HEAD_NUMBERS = sorted(
    [
        (_LOG_LAYOUT.rows_at, 8),
        (_LOG_LAYOUT.nodes_at, 16 * len(LOG_SCHEMA)),
        (_LOG_LAYOUT.buffers_at, 16 * sum(field.type.num_buffers for field in LOG_SCHEMA)),
        (_LOG_LAYOUT.body_bytes_at, 8),
    ]
)


def _fixed_head(message: bytes) -> bytes:
    """Extract the metadata of a message without its numbers: the same for all messages of the layout."""
    begins = [0, *(position + size for position, size in _HEAD_NUMBERS)]
    ends = [*(position for position, _ in _HEAD_NUMBERS), _HEAD_BYTES]
    return b"".join([message[begin:end] for begin, end in zip(begins, ends, strict=True)])


_FIXED_HEAD = _fixed_head(_LOG_LAYOUT.head)


def readable(message: pa.Buffer) -> bytes | None:
    """Copy a LOG_SCHEMA message for `read_numbered_row`, or return None if its columns must be read.

    They must be read without the compiled encoder, for a message of more than READABLE_BYTES_MAX, and for a message
    with another layout, which another version of pyarrow has written.
    """
    if LOG_ENCODER is None or message.size > READABLE_BYTES_MAX:
        return None
    data: bytes = message.to_pybytes()
    return data if _fixed_head(data) == _FIXED_HEAD else None


# ---- the choice of an encoder --------------------------------------------------------------------------------


build: Build = build_by_pyarrow if MessageEncoder is None else build_compiled


def _width(arrow_type: pa.DataType) -> int:
    """Compute the bytes of a number of this type, or _TEXT or _BINARY."""
    if arrow_type in (pa.string(), pa.binary()):
        return _TEXT if arrow_type == pa.string() else _BINARY
    return int(arrow_type.bit_width // 8)


def encoder_of(schema: pa.Schema, sharing_rows_min: int = sys.maxsize) -> Any:
    """Make a MessageEncoder for rows of this schema, or None where the compiled module is missing.

    In messages of at least `sharing_rows_min` rows, buffers of zeros overlap.
    """
    if MessageEncoder is None:
        return None
    return MessageEncoder(*derive_layout(schema), [_width(field.type) for field in schema], sharing_rows_min)


LOG_ENCODER: Any
# Only frames of the log share their zeros. Batches that leave the broker have the layout that clients of any kind
# expect.
LOG_ENCODER, _read_encoder = encoder_of(LOG_SCHEMA, SHARING_ROWS_MIN), encoder_of(READ_SCHEMA)
