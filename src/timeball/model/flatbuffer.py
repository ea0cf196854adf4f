"""Find fields in flatbuffers, the format of the metadata of Arrow messages (flatbuffers, "internals").

A table begins with the distance back to its vtable. The vtable has an entry for each field number: the field's offset
from the table's begin, or 0 for a field that is left out. Other offsets count from their own position. All numbers are
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Bytes = bytes | memoryview

_SIGNED, _UNSIGNED, _SHORT = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")

# Field numbers, from Arrow's format/Schema.fbs.
SCHEMA_ENDIANNESS, SCHEMA_FIELDS = 0, 1
FIELD_NAME, FIELD_TYPE_KIND, FIELD_TYPE, FIELD_DICTIONARY = 0, 2, 3, 4
INT_BITS, INT_IS_SIGNED = 0, 1
FIXED_WIDTH = 0
# Field numbers, from Arrow's format/Message.fbs.
VERSION_5 = 4  # since Arrow 1.0; older versions mark a compressed body in another way
MESSAGE_VERSION, MESSAGE_HEADER_TYPE, MESSAGE_HEADER, MESSAGE_BODY_BYTES = 0, 1, 2, 3
BATCH_ROWS, BATCH_NODES, BATCH_BUFFERS, BATCH_COMPRESSION = 0, 1, 2, 3


def target(buffer: Bytes, at: int) -> int:
    """Follow the offset at position `at`. Returns the position it points to.

    Raises struct.error if the buffer ends before the offset.
    """
    return at + int(_UNSIGNED.unpack_from(buffer, at)[0])


def field(buffer: Bytes, table: int, number: int) -> int | None:
    """Find the position of a table's field, or None if the writer left it out. `table` is the table's position.

    Raises struct.error or IndexError if the buffer is cut off.
    """
    vtable = table - _SIGNED.unpack_from(buffer, table)[0]
    if vtable < 0:
        raise IndexError(vtable)
    entry = 4 + 2 * number  # after the vtable's size and the table's size
    if entry + 2 > _SHORT.unpack_from(buffer, vtable)[0]:
        return None
    offset = int(_SHORT.unpack_from(buffer, vtable + entry)[0])
    return table + offset if offset else None


def present_field(buffer: Bytes, table: int, number: int) -> int:
    """Find the position of a field that must be present, because Timeball or pyarrow wrote the message."""
    position = field(buffer, table, number)
    assert position is not None, f"field {number} is left out"
    return position


def tables(buffer: Bytes, at: int) -> Iterator[int]:
    """Yield the positions of the tables in a vector. The offset at position `at` points to the vector.

    Raises struct.error if the buffer is cut off.
    """
    vector = target(buffer, at)
    for entry in range(int(_UNSIGNED.unpack_from(buffer, vector)[0])):
        yield target(buffer, vector + 4 + 4 * entry)


def text(buffer: Bytes, at: int) -> str:
    """Read the string that the offset at position `at` points to.

    Raises struct.error or IndexError if the buffer is cut off, UnicodeDecodeError for other text than UTF-8.
    """
    begin = target(buffer, at) + 4
    end = begin + int(_UNSIGNED.unpack_from(buffer, begin - 4)[0])
    if end > len(buffer):
        raise IndexError(end)
    return str(buffer[begin:end], "utf-8")
