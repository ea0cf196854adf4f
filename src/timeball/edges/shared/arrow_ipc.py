"""Read and write Arrow IPC messages, and check the columns of the batches that a client sends. Does no I/O.

A message has a header (a flatbuffer) and a body. Flight sends the two separately. An IPC stream joins them:

    | 0xffffffff | length of the padded header 4 | header | padding to 8 bytes | body |

Arrow's C++ code decodes a message before it validates it, and its validation does not cover everything that a later
cast reads. So a client's bytes reach Arrow only after these checks:

    schema    read in Python, against a list of types. Arrow never sees a client's own schema. Columns of views, lists,
              dictionaries, unions, extension types and all others are refused before a buffer is read
    rows      a header with more rows than a request may have is refused: a column of nulls has no buffer, so a small
              message could state any number of rows
    length    a compressed body states its own decompressed length, and a dictionary gives each row a value of any
              length. Both are refused. The columns of the batch are then views of the body, so the limit on the
              message also limits the batch

`SendColumns` and `ReleaseColumns` then check the columns: names and types once per stream, and each batch in full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import flatbuffer as fb
from timeball.model import limits, rules
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.model.message import SEND_COLUMNS, TABLE_SCHEMA

# ---- messages ------------------------------------------------------------------------------------------------

SCHEMA_BYTES_MAX = 16 * 1024  # the header of a schema. Timeball's widest schema takes 3 KiB
HEADER_BYTES_MAX = 64 * 1024  # the header of a record batch
COLUMNS_MAX = 64

# The errors that pyarrow raises for bytes that it cannot decode.
_DECODING_ERRORS = (pa.ArrowException, ValueError, TypeError, LookupError, OSError, MemoryError)
_CONTINUATION = b"\xff\xff\xff\xff"
_ALIGN = 8
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # message types, from Message.fbs
_LITTLE_ENDIAN = 0

# pyarrow's names of the types, in the order of their numbers in the union `Type` of Schema.fbs.
_TYPE_NAMES = (
    "none", "null", "int", "float", "binary", "string", "bool", "decimal", "date", "time", "timestamp", "interval",
    "list", "struct", "union", "fixed_size_binary", "fixed_size_list", "map", "duration", "large_binary",
    "large_string", "large_list", "run_end_encoded", "binary_view", "string_view", "list_view", "large_list_view",
)  # fmt: skip
# The accepted types without parameters.
_PLAIN = {
    "null": pa.null(),
    "binary": pa.binary(),
    "string": pa.string(),
    "large_binary": pa.large_binary(),
    "large_string": pa.large_string(),
}
# By bit width and sign.
_INTEGER_TYPES = {
    (8, True): pa.int8(),
    (16, True): pa.int16(),
    (32, True): pa.int32(),
    (64, True): pa.int64(),
    (8, False): pa.uint8(),
    (16, False): pa.uint16(),
    (32, False): pa.uint32(),
    (64, False): pa.uint64(),
}


def read_schema(header: memoryview) -> pa.Schema:
    """Read a schema from the header of a stream's first message, without metadata. Raises InvalidMessage, OverLimit."""
    if len(header) > SCHEMA_BYTES_MAX:
        raise OverLimit(
            f"a schema of {len(header)} bytes; at most {SCHEMA_BYTES_MAX}: leave its metadata out"
        )
    if _read_header(header)[0] != _SCHEMA:
        raise InvalidMessage("the stream does not begin with an Arrow schema")
    try:
        return pa.schema(list(_read_fields(header)))
    except (struct.error, LookupError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"the stream does not begin with an Arrow schema: {error}") from error


def _read_fields(header: memoryview) -> Iterator[pa.Field]:
    """Yield the columns of a schema. Raises InvalidMessage for a type that is not accepted."""
    table = fb.target(header, fb.present_field(header, fb.target(header, 0), fb.MESSAGE_HEADER))
    endianness, fields = (
        fb.field(header, table, number) for number in (fb.SCHEMA_ENDIANNESS, fb.SCHEMA_FIELDS)
    )
    if endianness is not None and struct.unpack_from("<h", header, endianness)[0] != _LITTLE_ENDIAN:
        raise InvalidMessage("an Arrow stream with big-endian numbers: write it on a little-endian machine")
    if fields is None:
        return
    for index, column in enumerate(fb.tables(header, fields)):
        if index == COLUMNS_MAX:
            raise InvalidMessage(f"an Arrow schema with more than {COLUMNS_MAX} columns")
        name_offset = fb.field(header, column, fb.FIELD_NAME)
        name = "" if name_offset is None else fb.text(header, name_offset)
        yield pa.field(name, _read_type(header, column, name))


def _read_type(header: memoryview, column: int, name: str) -> pa.DataType:
    """Decode the type of a column. Raises InvalidMessage for a type that is not accepted.

    `column`: the position of the column's flatbuffer table. `name`: of the column, for the error.
    """
    numbers = (fb.FIELD_TYPE_KIND, fb.FIELD_TYPE, fb.FIELD_DICTIONARY)
    type_number_offset, type_offset, dictionary_offset = (
        fb.field(header, column, number) for number in numbers
    )
    number = 0 if type_number_offset is None else header[type_number_offset]
    type_name = _TYPE_NAMES[number] if number < len(_TYPE_NAMES) else f"type {number}"
    if dictionary_offset is not None:
        type_name = "dictionary"
    elif type_name in _PLAIN:
        return _PLAIN[type_name]
    elif type_offset is not None:
        parameters = fb.target(header, type_offset)
        if type_name == "int":
            bits, signed_offset = (
                _int32(header, parameters, fb.INT_BITS),
                fb.field(header, parameters, fb.INT_IS_SIGNED),
            )
            if integer_type := _INTEGER_TYPES.get(
                (bits, signed_offset is not None and bool(header[signed_offset]))
            ):
                return integer_type
        elif type_name == "fixed_size_binary":
            width = _int32(header, parameters, fb.FIXED_WIDTH)
            if 0 < width <= limits.BODY_BYTES_MAX:
                return pa.binary(width)
    raise InvalidMessage(
        f"column {name[:80]!r} is {type_name}; cast it to string, large_string, binary, large_binary, "
        "fixed_size_binary or an integer"
    )


def _int32(header: memoryview, table: int, field_number: int) -> int:
    """Read a field of a flatbuffer table. An absent field has the default 0."""
    offset = fb.field(header, table, field_number)
    return 0 if offset is None else int(struct.unpack_from("<i", header, offset)[0])


def read_batch(
    header: memoryview, body: memoryview | Sequence[bytes | memoryview], of: pa.Schema
) -> pa.RecordBatch:
    """Decode a batch of a stream with the schema `of`. Raises InvalidMessage, OverLimit.

    The values are not validated yet (see `SendColumns.check_and_convert`). The columns are views of one copy of `body`.
    If `body` is a sequence, its parts are joined.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise OverLimit(f"a record batch with a header of {len(header)} bytes; at most {HEADER_BYTES_MAX}")
    message_type, is_compressed, row_count = _read_header(header)
    if message_type == _DICTIONARY:
        raise InvalidMessage("a dictionary: send plain columns, each value as it is")
    if message_type != _BATCH:
        raise InvalidMessage("not a record batch")
    if is_compressed:
        raise InvalidMessage("a compressed record batch: send it without compression")
    if row_count < 0:
        raise InvalidMessage(f"not a record batch: it has {row_count} rows")
    if row_count > limits.ROWS_PER_REQUEST_MAX:
        raise OverLimit(
            f"{row_count} rows in one batch; at most {limits.ROWS_PER_REQUEST_MAX}: send smaller batches"
        )
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(_encapsulate(header, body)), of)
    except _DECODING_ERRORS as error:
        raise InvalidMessage(f"not a record batch: {error}") from error


def read_messages(stream: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield header and body of each message of a stream, as views. Raises InvalidMessage."""
    data, offset = memoryview(stream), 0
    while offset < len(data):
        try:
            marker, length = struct.unpack_from("<4si", data, offset)
            if marker != _CONTINUATION or length < 0:
                raise InvalidMessage("not an Arrow stream; write it with Arrow 1.0 or later")
            if length == 0:  # the end-of-stream marker
                return
            header = data[offset + 8 : offset + 8 + length]
            body_bytes_offset = fb.field(header, fb.target(header, 0), fb.MESSAGE_BODY_BYTES)
            body_bytes = (
                0 if body_bytes_offset is None else struct.unpack_from("<q", header, body_bytes_offset)[0]
            )
        except (struct.error, IndexError) as error:
            raise InvalidMessage("not an Arrow stream: it is cut off") from error
        offset += 8 + length
        if not 0 <= body_bytes <= len(data) - offset:
            raise InvalidMessage("not an Arrow stream: it is cut off")
        yield header, data[offset : offset + body_bytes]
        offset += body_bytes


def schema_header(of: pa.Schema) -> memoryview:
    """Encode the header of the message that begins a stream of this schema."""
    return split_message(of.serialize())[0]


def split_batch(batch: pa.RecordBatch, size_bytes_max: int) -> Iterator[tuple[memoryview, memoryview]]:
    """Split a batch into messages, each as header and body. A message has about `size_bytes_max` bytes, or one row."""
    # `get_total_buffer_size` would be too small: columns from the log share a buffer of zeros, and a message contains
    # that buffer once per column.
    if pa.ipc.get_record_batch_size(batch) <= size_bytes_max:
        yield split_message(batch.serialize())
        return
    rows = max(1, batch.num_rows * size_bytes_max // max(batch.nbytes, 1))
    for start in range(0, max(batch.num_rows, 1), rows):
        yield split_message(batch.slice(start, rows).serialize())


def _encapsulate(header: memoryview, body: memoryview | Sequence[bytes | memoryview]) -> bytes:
    """Join header and body to a message of an IPC stream."""
    padding = -len(header) % _ALIGN
    length = struct.pack("<i", len(header) + padding)
    pieces = (body,) if isinstance(body, memoryview) else body
    return b"".join((_CONTINUATION, length, header, bytes(padding), *pieces))


def split_message(message: pa.Buffer | bytes) -> tuple[memoryview, memoryview]:
    """Split a message of an IPC stream into header and body."""
    view = memoryview(message).cast("B")
    begin = 2 * len(_CONTINUATION)
    end = begin + struct.unpack_from("<i", view, len(_CONTINUATION))[0]
    return view[begin:end], view[end:]


def _read_header(header: memoryview) -> tuple[int, bool, int]:
    """Read the message type, whether the body is compressed, and the number of rows. Raises InvalidMessage.

    The last two are False and 0 for a message that is not a record batch. The number of rows is not checked: it may be
    negative.
    """
    try:
        root = fb.target(header, 0)
        fields = (fb.MESSAGE_VERSION, fb.MESSAGE_HEADER_TYPE, fb.MESSAGE_HEADER)
        version_offset, type_offset, content_offset = (fb.field(header, root, number) for number in fields)
        if version_offset is None or type_offset is None or content_offset is None:
            raise InvalidMessage("not an Arrow message: it has no version, type or header")
        if struct.unpack_from("<h", header, version_offset)[0] < fb.VERSION_5:
            # Version 4 marks a compressed body in another field. Arrow still reads it, but this check would miss it.
            raise InvalidMessage("an Arrow message of a version before 1.0; write it with a later one")
        if header[type_offset] != _BATCH:
            return header[type_offset], False, 0
        table = fb.target(header, content_offset)
        rows_offset, compression_offset = (
            fb.field(header, table, number) for number in (fb.BATCH_ROWS, fb.BATCH_COMPRESSION)
        )
        rows = 0 if rows_offset is None else struct.unpack_from("<q", header, rows_offset)[0]
        return _BATCH, compression_offset is not None, rows
    except (struct.error, IndexError) as error:
        raise InvalidMessage("not an Arrow message: its header is cut off") from error


# ---- columns of sends and releases ---------------------------------------------------------------------------
# A batch from a socket is not trusted. Arrow's `validate(full=True)` checks all offsets, lengths and UTF-8 before any
# code uses them. This check is sufficient for the types in ACCEPTED, but not for all Arrow types: a view column passes
# it and then breaks a cast. The topics are validated first, and the caller's permission to send to them is checked
# before any other column is read or converted.

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
RELEASE_REQUIRED = ("seq", "due_ms", "topic", "body", "accepted_ms")


class SendColumns:
    """The columns of one send stream, and the conversions that they need.

    The columns may come in any order. Only `topic` and `body` are required. An unknown column is refused: the messages
    of a producer that writes `delay` for `delay_ms` would be delivered at once. ACCEPTED lists the types that each
    column may have. Types with the same meaning (large strings, wider or narrower integers) are converted. A batch with
    a value that does not fit is refused, and so is one whose values take more bytes than a request may have: with
    shared buffers, a few kilobytes can contain one value a hundred times.
    """

    rows_min = 1  # of a batch

    def __init__(self, schema: pa.Schema) -> None:
        """Check names and types. Raises InvalidMessage naming the column."""
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
        self._has_due = "due_ms" in names

    def check_and_convert(self, batch: pa.RecordBatch, allow: Allow | None) -> pa.RecordBatch:
        """Check a batch, and convert its columns to the types of SEND_SCHEMA. Their order stays.

        `allow` checks the topics before other columns are read. None: they are checked already. Raises
        InvalidMessage, InvalidDelay, OverLimit, and the errors of `allow`.
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
        # The values are checked later, at the admission of the messages.
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
    """The columns of one stream from a source.

    A batch may be empty, because some records of a source are no messages.
    """

    rows_min = 0


class ReleaseColumns:
    """The columns of one release stream.

    The rows have all columns of TABLE_SCHEMA, in any order, because the client has read them from the table.
    """

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

    def check_and_convert(self, batch: pa.RecordBatch, allow: Allow | None) -> pa.RecordBatch:
        """Check a batch, and bring its columns into the order of TABLE_SCHEMA.

        `allow` checks that the client may ADMIN. None: that is checked already. Raises InvalidMessage (also
        if a column of RELEASE_REQUIRED has nulls), OverLimit, and the errors of `allow`.
        """
        if allow is not None:
            allow(Verb.ADMIN)
        if not 0 < batch.num_rows <= limits.ROWS_PER_REQUEST_MAX:
            _refuse_rows(batch.num_rows)
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


def _refuse_rows(rows: int) -> NoReturn:
    """Raise InvalidMessage for an empty batch, OverLimit for one with too many rows."""
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
    """Raise OverLimit if the values of a batch exceed BATCH_BYTES_MAX."""
    if size_bytes > limits.BATCH_BYTES_MAX:
        raise OverLimit(
            f"a batch of {size_bytes} bytes; at most {limits.BATCH_BYTES_MAX}: send smaller batches"
        )


def size_of(batch: pa.RecordBatch) -> int:
    """Compute the size of a checked batch in bytes. Raises OverLimit if it is above BATCH_BYTES_MAX."""
    size_bytes: int = batch.get_total_buffer_size()
    # This size includes padding, and values outside a slice. The exact one takes longer to compute.
    if size_bytes > limits.BATCH_BYTES_MAX:
        check_bytes(size_bytes := batch.nbytes)
    return size_bytes


def _is_small(batch: pa.RecordBatch) -> bool:
    """Check whether the values have at most BATCH_BYTES_MAX even if every column refers to all buffers."""
    size_bytes: int = batch.get_total_buffer_size()
    return bool(size_bytes * batch.num_columns <= limits.BATCH_BYTES_MAX)
