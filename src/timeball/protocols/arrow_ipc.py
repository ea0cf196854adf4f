"""Arrow IPC messages: a header (a flatbuffer) and a body, apart as Flight carries them, or in a stream. Does no I/O.

A header of a few bytes may ask for gigabytes: a compressed body says itself how long it becomes, a dictionary gives
each row a value of any length. Both are refused by what the header says, before Arrow decodes anything. What is left
decodes to views of the body that came, so the bound on a message is a bound on the batch. A schema may name one field
a thousand times, and is therefore bounded far below a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import pyarrow as pa

from timeball import flatbuffer as fb
from timeball.errors import InvalidMessage, OverLimit

SCHEMA_BYTES_MAX = 16 * 1024  # the widest schema of ours takes 3 KiB
HEADER_BYTES_MAX = 64 * 1024

# What Arrow raises for bytes that it cannot decode: some of its errors are Python's own.
_DECODING = (pa.ArrowException, ValueError, TypeError, LookupError, OSError, MemoryError)
_CONTINUATION = b"\xff\xff\xff\xff"
_ALIGN = 8
_VERSION_5 = 4
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


def schema(header: memoryview) -> pa.Schema:
    """Return the schema that a stream begins with; raises InvalidMessage, OverLimit."""
    if len(header) > SCHEMA_BYTES_MAX:
        raise OverLimit(
            f"a schema of {len(header)} bytes; at most {SCHEMA_BYTES_MAX}: leave its metadata out"
        )
    if _kind(header)[0] != _SCHEMA:
        raise InvalidMessage("the stream does not begin with an Arrow schema")
    try:
        found = pa.ipc.read_schema(pa.py_buffer(_encapsulated(header, ())))
        found.names  # raises here what a name that is no UTF-8 would raise later  # noqa: B018
        return found
    except _DECODING as error:
        raise InvalidMessage(f"the stream does not begin with an Arrow schema: {error}") from error


def batch(
    header: memoryview, body: memoryview | Sequence[bytes | memoryview], of: pa.Schema
) -> pa.RecordBatch:
    """Return a batch of the stream's schema, not yet proven sound; raises InvalidMessage, OverLimit.

    Its columns are views of a copy of `body`, or of its parts.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise OverLimit(f"a record batch with a header of {len(header)} bytes; at most {HEADER_BYTES_MAX}")
    kind, compressed = _kind(header)
    if kind == _DICTIONARY:
        raise InvalidMessage("a dictionary: send plain columns, each value as it is")
    if kind != _BATCH:
        raise InvalidMessage("not a record batch")
    if compressed:
        raise InvalidMessage("a compressed record batch: send it without compression")
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(_encapsulated(header, body)), of)
    except _DECODING as error:
        raise InvalidMessage(f"not a record batch: {error}") from error


def messages(stream: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield header and body of each message of a stream, as views; raises InvalidMessage."""
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
    """Yield header and body of each part of a batch, so that a part has at most about so many bytes, or one row."""
    # Not of its buffers: columns of the log share their zeros, and a message has them once more for each.
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
    """Return header and body of a whole message."""
    view = memoryview(message).cast("B")
    begin = 2 * len(_CONTINUATION)
    end = begin + struct.unpack_from("<i", view, len(_CONTINUATION))[0]
    return view[begin:end], view[end:]


def _kind(header: memoryview) -> tuple[int, bool]:
    """Return which kind of message this is, and whether its body is compressed; raises InvalidMessage."""
    try:
        root = fb.target(header, 0)
        fields = (fb.MESSAGE_VERSION, fb.MESSAGE_HEADER_TYPE, fb.MESSAGE_HEADER)
        version, kind, inner = (fb.field(header, root, number) for number in fields)
        if version is None or kind is None or inner is None:
            raise InvalidMessage("not an Arrow message: it has no header")
        if struct.unpack_from("<h", header, version)[0] < _VERSION_5:
            # Version 4 has another way to say that a body is compressed, which Arrow still reads.
            raise InvalidMessage("an Arrow message of a version before 1.0; write it with a later one")
        compression = fb.field(header, fb.target(header, inner), fb.BATCH_COMPRESSION)
        return header[kind], header[kind] == _BATCH and compression is not None
    except (struct.error, IndexError) as error:
        raise InvalidMessage("not an Arrow message: its header is cut off") from error
