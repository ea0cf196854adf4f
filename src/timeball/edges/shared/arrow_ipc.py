"""Arrow IPC messages: a header (a flatbuffer) and a body, separate as in Flight, or in a stream. Does no I/O.

Arrow's C++ code decodes a message before it validates it, and its validation does not cover everything that a later
cast reads. So a client's bytes reach it only after these checks:

    schema    read in Python, against a list of types. Arrow never sees a client's own schema. Columns of views, lists,
              dictionaries, unions, extension types and all others are refused before a buffer is read
    rows      a header with more rows than a request may have is refused: a column without values needs no bytes
    length    a compressed body states its own decompressed length, and a dictionary gives each row a value of any
              length. Both are refused. So the bound on a message also bounds the batch: its columns are views of the
              body
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from timeball.model import flatbuffer as fb
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit

SCHEMA_BYTES_MAX = 16 * 1024  # Timeball's widest schema takes 3 KiB
HEADER_BYTES_MAX = 64 * 1024
COLUMNS_MAX = 64

# Arrow's errors for bytes that it cannot decode. Some of them are Python's own.
_DECODING = (pa.ArrowException, ValueError, TypeError, LookupError, OSError, MemoryError)
_CONTINUATION = b"\xff\xff\xff\xff"
_ALIGN = 8
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LITTLE_ENDIAN = 0

# The kinds of types, in the order of their numbers in Schema.fbs's union, under pyarrow's names.
_KINDS = (
    "none", "null", "int", "float", "binary", "string", "bool", "decimal", "date", "time", "timestamp", "interval",
    "list", "struct", "union", "fixed_size_binary", "fixed_size_list", "map", "duration", "large_binary",
    "large_string", "large_list", "run_end_encoded", "binary_view", "string_view", "list_view", "large_list_view",
)  # fmt: skip
_PLAIN = {
    "null": pa.null(),
    "binary": pa.binary(),
    "string": pa.string(),
    "large_binary": pa.large_binary(),
    "large_string": pa.large_string(),
}
_INTEGERS = {
    (8, True): pa.int8(),
    (16, True): pa.int16(),
    (32, True): pa.int32(),
    (64, True): pa.int64(),
    (8, False): pa.uint8(),
    (16, False): pa.uint16(),
    (32, False): pa.uint32(),
    (64, False): pa.uint64(),
}


def schema(header: memoryview) -> pa.Schema:
    """Return the schema that a stream begins with, without its metadata. Raises InvalidMessage, OverLimit."""
    if len(header) > SCHEMA_BYTES_MAX:
        raise OverLimit(
            f"a schema of {len(header)} bytes; at most {SCHEMA_BYTES_MAX}: leave its metadata out"
        )
    if _kind(header)[0] != _SCHEMA:
        raise InvalidMessage("the stream does not begin with an Arrow schema")
    try:
        return pa.schema(list(_fields(header)))
    except (struct.error, LookupError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"the stream does not begin with an Arrow schema: {error}") from error


def _fields(header: memoryview) -> Iterator[pa.Field]:
    """Yield the columns of a schema. Raises InvalidMessage for a type that is not accepted."""
    table = fb.target(header, fb.present_field(header, fb.target(header, 0), fb.MESSAGE_HEADER))
    endianness, fields = (fb.field(header, table, n) for n in (fb.SCHEMA_ENDIANNESS, fb.SCHEMA_FIELDS))
    if endianness is not None and struct.unpack_from("<h", header, endianness)[0] != _LITTLE_ENDIAN:
        raise InvalidMessage("an Arrow stream with big-endian numbers: write it on a little-endian machine")
    if fields is None:
        return
    for at, column in enumerate(fb.tables(header, fields)):
        if at == COLUMNS_MAX:
            raise InvalidMessage(f"an Arrow schema with more than {COLUMNS_MAX} columns")
        name_at = fb.field(header, column, fb.FIELD_NAME)
        name = "" if name_at is None else fb.text(header, name_at)
        yield pa.field(name, _type(header, column, name))


def _type(header: memoryview, column: int, name: str) -> pa.DataType:
    numbers = (fb.FIELD_TYPE_KIND, fb.FIELD_TYPE, fb.FIELD_DICTIONARY)
    kind_at, type_at, dictionary = (fb.field(header, column, number) for number in numbers)
    number = 0 if kind_at is None else header[kind_at]
    kind = _KINDS[number] if number < len(_KINDS) else f"type {number}"
    if dictionary is not None:
        kind = "dictionary"
    elif kind in _PLAIN:
        return _PLAIN[kind]
    elif type_at is not None:
        table = fb.target(header, type_at)
        if kind == "int":
            bits, signed = _int32(header, table, fb.INT_BITS), fb.field(header, table, fb.INT_IS_SIGNED)
            if found := _INTEGERS.get((bits, signed is not None and bool(header[signed]))):
                return found
        elif kind == "fixed_size_binary":
            width = _int32(header, table, fb.FIXED_WIDTH)
            if 0 < width <= limits.BODY_BYTES_MAX:
                return pa.binary(width)
    raise InvalidMessage(
        f"column {name[:80]!r} is {kind}; cast it to string, large_string, binary, large_binary, "
        "fixed_size_binary or an integer"
    )


def _int32(header: memoryview, table: int, number: int) -> int:
    at = fb.field(header, table, number)
    return 0 if at is None else int(struct.unpack_from("<i", header, at)[0])


def batch(
    header: memoryview, body: memoryview | Sequence[bytes | memoryview], of: pa.Schema
) -> pa.RecordBatch:
    """Return a batch of the stream's schema, not yet proven sound. Raises InvalidMessage, OverLimit.

    Its columns are views of a copy of `body`, or of its parts.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise OverLimit(f"a record batch with a header of {len(header)} bytes; at most {HEADER_BYTES_MAX}")
    kind, compressed, rows = _kind(header)
    if kind == _DICTIONARY:
        raise InvalidMessage("a dictionary: send plain columns, each value as it is")
    if kind != _BATCH:
        raise InvalidMessage("not a record batch")
    if compressed:
        raise InvalidMessage("a compressed record batch: send it without compression")
    if rows < 0:
        raise InvalidMessage(f"not a record batch: it has {rows} rows")
    if rows > limits.ROWS_PER_REQUEST_MAX:
        raise OverLimit(
            f"{rows} rows in one batch; at most {limits.ROWS_PER_REQUEST_MAX}: send smaller batches"
        )
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(_encapsulated(header, body)), of)
    except _DECODING as error:
        raise InvalidMessage(f"not a record batch: {error}") from error


def messages(stream: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield header and body of each message of a stream, as views. Raises InvalidMessage."""
    data, at = memoryview(stream), 0
    while at < len(data):
        try:
            mark, length = struct.unpack_from("<4si", data, at)
            if mark != _CONTINUATION or length < 0:
                raise InvalidMessage("not an Arrow stream; write it with Arrow 1.0 or later")
            if length == 0:  # the end of the stream
                return
            header = data[at + 8 : at + 8 + length]
            place = fb.field(header, fb.target(header, 0), fb.MESSAGE_BODY_BYTES)
            size_bytes = 0 if place is None else struct.unpack_from("<q", header, place)[0]
        except (struct.error, IndexError) as error:
            raise InvalidMessage("not an Arrow stream: it is cut off") from error
        at += 8 + length
        if not 0 <= size_bytes <= len(data) - at:
            raise InvalidMessage("not an Arrow stream: it is cut off")
        yield header, data[at : at + size_bytes]
        at += size_bytes


def schema_header(of: pa.Schema) -> memoryview:
    """Return the header that begins a stream of this schema."""
    return parts_of(of.serialize())[0]


def parts(batch: pa.RecordBatch, size_bytes_max: int) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield header and body of each part of a batch. A part has about `size_bytes_max` bytes at most, or one row."""
    # Not the size of its buffers: columns of the log share their zeros, and a message contains them once per column.
    if pa.ipc.get_record_batch_size(batch) <= size_bytes_max:
        yield parts_of(batch.serialize())
        return
    rows = max(1, batch.num_rows * size_bytes_max // max(batch.nbytes, 1))
    for start in range(0, max(batch.num_rows, 1), rows):
        yield parts_of(batch.slice(start, rows).serialize())


def _encapsulated(header: memoryview, body: memoryview | Sequence[bytes | memoryview]) -> bytes:
    padding = -len(header) % _ALIGN
    length = struct.pack("<i", len(header) + padding)
    parts = (body,) if isinstance(body, memoryview) else body
    return b"".join((_CONTINUATION, length, header, bytes(padding), *parts))


def parts_of(message: pa.Buffer | bytes) -> tuple[memoryview, memoryview]:
    """Split a whole message into header and body."""
    view = memoryview(message).cast("B")
    begin = 2 * len(_CONTINUATION)
    end = begin + struct.unpack_from("<i", view, len(_CONTINUATION))[0]
    return view[begin:end], view[end:]


def _kind(header: memoryview) -> tuple[int, bool, int]:
    """Return the kind of a message, and for a batch whether it is compressed and its rows. Raises InvalidMessage."""
    try:
        root = fb.target(header, 0)
        fields = (fb.MESSAGE_VERSION, fb.MESSAGE_HEADER_TYPE, fb.MESSAGE_HEADER)
        version, kind, inner = (fb.field(header, root, number) for number in fields)
        if version is None or kind is None or inner is None:
            raise InvalidMessage("not an Arrow message: it has no header")
        if struct.unpack_from("<h", header, version)[0] < fb.VERSION_5:
            # Version 4 has another field for a compressed body, which Arrow still reads.
            raise InvalidMessage("an Arrow message of a version before 1.0; write it with a later one")
        if header[kind] != _BATCH:
            return header[kind], False, 0
        table = fb.target(header, inner)
        rows, compression = (fb.field(header, table, n) for n in (fb.BATCH_ROWS, fb.BATCH_COMPRESSION))
        count = 0 if rows is None else struct.unpack_from("<q", header, rows)[0]
        return _BATCH, compression is not None, count
    except (struct.error, IndexError) as error:
        raise InvalidMessage("not an Arrow message: its header is cut off") from error
