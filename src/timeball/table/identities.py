"""A second copy of the identifying columns of a data file's rows, in small blocks: a look-up of a row reads one block.

A cancel by key needs ID_COLUMNS of a row. From Parquet it would have to parse a footer and decode seven columns of a
row group, which takes a millisecond per row. A block takes a twentieth. The blocks are between the last page and the
seal of a data file (layout.py), where Parquet readers never look, so they are created, moved and removed with the rows:

    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
    | block 0   |     | block b-1 | b entries       | block_bytes | rows | block_rows | crc32c | "TBIDEN1" |
    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
                                    20 bytes each     8             8      4            4        8 bytes
                                                                                        little-endian

A block is a record batch message in Arrow's IPC format, without its schema: ID_COLUMNS, then `id16`. If unique_key is
32 hexadecimal digits, `id16` contains the id in its place. Then unique_key is null for lower-case digits, as in
Timeball's ids, or empty for upper-case digits, as in RocketMQ's. The bytes of the message are sorted by their position
modulo 8, those at position 0 first, because similar numbers then give long runs. Then they are compressed with LZ4 (a
raw block). A block has `block_rows` rows in the order of the file, the last block fewer.

The entry of a block contains its begin relative to the first block (8 bytes), its compressed bytes, its decompressed
bytes, and the CRC-32C of its compressed bytes and these three fields (4 bytes each). `block_bytes` is the total of all
blocks. The last checksum covers the three fields before it.

Rows of a file without blocks are read from its row groups. This module is only a codec and does no I/O.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import flatbuffer as fb
from timeball.model.errors import Corrupt
from timeball.model.message import TABLE_SCHEMA

ID_COLUMNS = ["seq", "due_ms", "topic", "unique_key", "keys", "accepted_ms", "number"]
ID_SCHEMA = pa.schema([TABLE_SCHEMA.field(name) for name in ID_COLUMNS])
_ID16 = pa.field("id16", pa.binary(16))
_BLOCK_SCHEMA = ID_SCHEMA.append(_ID16)
# 4.5 KB on disk: one or two pages to read, 8 us to decompress.
BLOCK_ROWS = 128
_PART_ROWS = 64 * BLOCK_ROWS  # rows encoded at a time: a megabyte, held three times
MAGIC = b"TBIDEN1\x00"
TRAILER = struct.Struct("<QQII8s")
_COVERED = struct.Struct("<QQI")  # the part of the trailer that its checksum covers
_PLACE = struct.Struct("<QII")  # the first three fields of an entry
_CRC = struct.Struct("<I")
_ENTRY_BYTES = _PLACE.size + _CRC.size
_WORD = 8
# Not zstd, which makes a context for each block: 25 us to read a block, 40 us to write it.
_LZ4 = pa.Codec("lz4_raw")
_ID_DIGITS = 32
_NO_DIGIT = 255
# The layout of a block's message. A text column has three buffers, the others two.
_ID16_FORM = struct.Struct("16s")
_ENDS = struct.Struct("<ii")  # begin and end of a text
_FORMS = [
    {pa.int64(): struct.Struct("<q"), pa.string(): _ENDS}.get(f.type, _ID16_FORM) for f in _BLOCK_SCHEMA
]
_BUFFER_COUNTS = [3 if form is _ENDS else 2 for form in _FORMS]
_FIRST_BUFFERS = list(itertools.accumulate(_BUFFER_COUNTS, initial=0))[:-1]
_OF_TEXT = {at for at, form in zip(_FIRST_BUFFERS, _FORMS, strict=True) if form is _ENDS}
_PLACES = struct.Struct(f"<{2 * sum(_BUFFER_COUNTS)}q")
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_LOWER_BIT = ord("a") ^ ord("A")

Row = dict[str, Any]  # a value for each of ID_COLUMNS
ReadAt = Callable[[int, int], pa.Buffer]  # (begin, size) of a file


def encode(rows: pa.Table) -> bytes:
    """Encode the identities of these rows: blocks, entries and trailer."""
    encoder = Encoder()
    encoder.add(rows)
    return encoder.finish()


class Encoder:
    """Encodes the identities of rows that are added part by part."""

    def __init__(self) -> None:
        self._blocks, self._entries = list[bytes](), list[bytes]()
        self._block_bytes = self._rows = 0
        self._left = ID_SCHEMA.empty_table()  # fewer rows than a block

    def add(self, rows: pa.Table) -> None:
        """Add the next rows."""
        whole = pa.concat_tables([self._left, rows.select(ID_COLUMNS).cast(ID_SCHEMA)])
        self._left = whole.slice(whole.num_rows // BLOCK_ROWS * BLOCK_ROWS)
        self._encode(whole.slice(0, whole.num_rows - self._left.num_rows))

    def finish(self) -> bytes:
        """Encode the last block. Returns the blocks, entries and trailer."""
        self._encode(self._left)
        counts = self._block_bytes, self._rows, BLOCK_ROWS
        trailer = TRAILER.pack(*counts, google_crc32c.value(_COVERED.pack(*counts)), MAGIC)
        return b"".join([*self._blocks, *self._entries, trailer])

    def _encode(self, rows: pa.Table) -> None:
        for begin in range(0, rows.num_rows, BLOCK_ROWS):
            if begin % _PART_ROWS == 0:
                part = _with_id16(rows.slice(begin, _PART_ROWS))
            raw = part.slice(begin % _PART_ROWS, BLOCK_ROWS).serialize()  # a multiple of 8 bytes
            block = _LZ4.compress(np.frombuffer(raw, np.uint8).reshape(-1, _WORD).T.tobytes(), asbytes=True)
            place = _PLACE.pack(self._block_bytes, len(block), raw.size)
            crc = google_crc32c.extend(google_crc32c.value(block), place)
            self._entries.append(place + _CRC.pack(crc))
            self._blocks.append(block)
            self._block_bytes += len(block)
        self._rows += rows.num_rows


def _with_id16(rows: pa.Table) -> pa.RecordBatch:
    """Convert rows of ID_SCHEMA to the schema of a block."""
    columns = {name: pa.concat_arrays(rows.column(name).chunks) for name in ID_COLUMNS}
    ids, count = columns["unique_key"], rows.num_rows
    may_be = pc.fill_null(pc.equal(pc.binary_length(ids), _ID_DIGITS), False)
    texts = ids.filter(may_be)
    _, offsets, data = texts.buffers()
    packed = np.zeros((count, _ID_DIGITS // 2), np.uint8)
    is_packed, is_upper = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    if len(texts):
        begin = int(np.frombuffer(offsets, np.int32, 1, 4 * texts.offset)[0])
        size_bytes = _ID_DIGITS * len(texts)
        characters = np.frombuffer(data, np.uint8, size_bytes, begin).reshape(-1, _ID_DIGITS)
        digits = _DIGITS[characters]
        # The bit that distinguishes lower case is also set in the digits 0 to 9.
        are_upper = ((characters & _LOWER_BIT == 0) | (digits < 10)).all(axis=1)
        are_lower = (characters & _LOWER_BIT != 0).all(axis=1)
        fit = (digits != _NO_DIGIT).all(axis=1) & (are_upper | are_lower)
        places = np.flatnonzero(np.asarray(may_be))[fit]
        packed[places] = (digits[:, ::2] << 4 | digits[:, 1::2])[fit]
        is_packed[places], is_upper[places] = True, ~are_lower[fit]
    # Not `if_else`, which keeps the text of a null. `take` gives a null for a masked index, and an empty text for the
    # index after all ids.
    empty = pa.concat_arrays([ids, pa.array([""], ids.type)])
    columns["unique_key"] = empty.take(
        pa.array(np.where(is_upper, count, np.arange(count)), mask=is_packed & ~is_upper)
    )
    bitmap = pa.array(is_packed).buffers()[1]
    id16 = pa.Array.from_buffers(_ID16.type, count, [bitmap, pa.py_buffer(packed)])
    return pa.RecordBatch.from_arrays([*columns.values(), id16], schema=_BLOCK_SCHEMA)


class Identities:
    """Reads the identities of one file, block by block."""

    __slots__ = ("_begin", "_block_rows", "_entries", "_read_at", "rows")  # thousands of these are kept

    def __init__(self, read_at: ReadAt, end: int) -> None:
        """`end`: the position of their end in the file. Reads the trailer. Raises Corrupt."""
        self._read_at = read_at
        trailer = bytes(read_at(end - TRAILER.size, TRAILER.size))
        block_bytes, self.rows, self._block_rows, crc, _ = TRAILER.unpack(trailer)
        if google_crc32c.value(trailer[: _COVERED.size]) != crc:
            raise Corrupt("what stands behind its identities does not match its checksum")
        self._entries = end - TRAILER.size - _ENTRY_BYTES * -(-self.rows // self._block_rows)
        self._begin = self._entries - block_bytes
        if self._begin < 0:
            raise Corrupt("it is shorter than its identities")

    def rows_at(self, places: Iterable[int]) -> list[Row]:
        """Read the rows at these indexes of the file, in this order. Raises Corrupt."""
        blocks: dict[int, _Block] = {}
        found = []
        for place in places:
            if place >= self.rows:
                raise Corrupt(f"it has {self.rows} identities, and row {place} was asked for")
            block, row = divmod(place, self._block_rows)
            if block not in blocks:
                blocks[block] = _Block(self._block(block))
            found.append(blocks[block].row(row))
        return found

    def check(self) -> None:
        """Raise Corrupt unless every block matches its checksum."""
        for block in range(-(-self.rows // self._block_rows)):
            self._block(block)

    def _block(self, block: int) -> bytes:
        """Read the message of a block and compare it with its checksum."""
        entry = bytes(self._read_at(self._entries + _ENTRY_BYTES * block, _ENTRY_BYTES))
        begin, stored_bytes, raw_bytes = _PLACE.unpack_from(entry)
        if self._begin + begin + stored_bytes > self._entries:
            raise Corrupt(f"block {block} of its identities lies behind their end")
        data = self._read_at(self._begin + begin, stored_bytes)
        crc = google_crc32c.extend(google_crc32c.value(data), entry[: _PLACE.size])
        if entry[_PLACE.size :] != _CRC.pack(crc):
            raise Corrupt(f"block {block} of its identities does not match its checksum")
        return np.frombuffer(_LZ4.decompress(data, raw_bytes), np.uint8).reshape(_WORD, -1).T.tobytes()


class _Block:
    """The message of a block, for reading one or two rows: opening it with Arrow takes longer than reading ten rows.

    Its metadata, a flatbuffer, contains the positions of its buffers (Arrow's format/Message.fbs).
    """

    def __init__(self, message: bytes) -> None:
        self._message = message
        body_at = 4 + fb.target(message, 4)
        batch_at = fb.target(message, fb.present_field(message, fb.target(message, 8), fb.MESSAGE_HEADER))
        buffers_at = fb.target(message, fb.present_field(message, batch_at, fb.BATCH_BUFFERS)) + 4
        places = _PLACES.unpack_from(message, buffers_at)
        # Pairs of position and size. The first buffer of each column is its bitmap, which is empty if it has no nulls.
        self._bitmaps = [body_at + places[2 * at] if places[2 * at + 1] else -1 for at in _FIRST_BUFFERS]
        self._values = [body_at + places[2 * at + 2] for at in _FIRST_BUFFERS]
        self._texts = [body_at + places[2 * at + 4] if at in _OF_TEXT else -1 for at in _FIRST_BUFFERS]

    def row(self, row: int) -> Row:
        """Read one row."""
        message, values = self._message, list[Any]()
        for form, bitmap, at, text in zip(_FORMS, self._bitmaps, self._values, self._texts, strict=True):
            if bitmap >= 0 and not message[bitmap + (row >> 3)] >> (row & 7) & 1:
                values.append(None)
            elif text < 0:
                values.append(form.unpack_from(message, at + form.size * row)[0])
            else:
                begin, end = _ENDS.unpack_from(message, at + 4 * row)
                values.append(message[text + begin : text + end].decode())
        *values, id16 = values
        identity = dict(zip(ID_COLUMNS, values, strict=True))
        if id16 is not None:
            # If unique_key is empty, the id is in upper case.
            identity["unique_key"] = id16.hex() if identity["unique_key"] is None else id16.hex().upper()
        return identity


def is_there(read_at: ReadAt, end: int) -> bool:
    """Check whether a file has identities that end at `end`."""
    return end >= TRAILER.size and bytes(read_at(end - len(MAGIC), len(MAGIC))) == MAGIC
