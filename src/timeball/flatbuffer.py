"""Vocabulary: where the metadata of an Arrow message, a flatbuffer, has a field (flatbuffers, "internals").

A table begins with the distance back to its vtable, which says by number where each field stands behind the table's
begin; 0 is one that is left out. An offset counts from its own place. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Bytes = bytes | memoryview

_SIGNED, _UNSIGNED, _SHORT = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")

# Fields, by Arrow's format/Schema.fbs.
SCHEMA_ENDIANNESS, SCHEMA_FIELDS = 0, 1
FIELD_NAME, FIELD_TYPE_KIND, FIELD_TYPE, FIELD_DICTIONARY = 0, 2, 3, 4
INT_BITS, INT_IS_SIGNED = 0, 1
FIXED_WIDTH = 0
# Fields, by Arrow's format/Message.fbs.
VERSION_5 = 4  # of Arrow 1.0; an older one has another way to say that a body is compressed
MESSAGE_VERSION, MESSAGE_HEADER_TYPE, MESSAGE_HEADER, MESSAGE_BODY_BYTES = 0, 1, 2, 3
BATCH_ROWS, BATCH_NODES, BATCH_BUFFERS, BATCH_COMPRESSION = 0, 1, 2, 3


def target(buffer: Bytes, at: int) -> int:
    """Return what the offset at `at` points to; raise struct.error where the buffer ends before."""
    return at + int(_UNSIGNED.unpack_from(buffer, at)[0])


def field(buffer: Bytes, table: int, number: int) -> int | None:
    """Return where a table has a field, None for one that is left out; raise struct.error, IndexError if cut off."""
    vtable = table - _SIGNED.unpack_from(buffer, table)[0]
    if vtable < 0:
        raise IndexError(vtable)
    entry = 4 + 2 * number
    if entry + 2 > _SHORT.unpack_from(buffer, vtable)[0]:
        return None
    offset = int(_SHORT.unpack_from(buffer, vtable + entry)[0])
    return table + offset if offset else None


def present_field(buffer: Bytes, table: int, number: int) -> int:
    """Return the same of a message that we or pyarrow wrote, which has this field."""
    at = field(buffer, table, number)
    assert at is not None, f"field {number} is left out"
    return at


def tables(buffer: Bytes, at: int) -> Iterator[int]:
    """Yield where each table of a vector begins, to which the offset at `at` points; raise struct.error if cut off."""
    vector = target(buffer, at)
    for entry in range(int(_UNSIGNED.unpack_from(buffer, vector)[0])):
        yield target(buffer, vector + 4 + 4 * entry)


def text(buffer: Bytes, at: int) -> str:
    """Return the text to which the offset at `at` points; raise struct.error, IndexError, UnicodeDecodeError."""
    begin = target(buffer, at) + 4
    end = begin + int(_UNSIGNED.unpack_from(buffer, begin - 4)[0])
    if end > len(buffer):
        raise IndexError(end)
    return str(buffer[begin:end], "utf-8")
