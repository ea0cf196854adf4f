"""Vocabulary: where the metadata of an Arrow message, a flatbuffer, has a field (flatbuffers, "internals").

A table begins with the distance back to its vtable, which says by number where each field stands behind the table's
begin; 0 is one that is left out. An offset counts from its own place. Numbers are little-endian.
"""

from __future__ import annotations

import struct

Bytes = bytes | memoryview

_SIGNED, _UNSIGNED, _SHORT = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")

# Fields, by Arrow's format/Message.fbs.
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
