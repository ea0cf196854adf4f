"""A second copy of the identifying columns of a data file's rows, in small blocks: a look-up of a row reads one block.

A cancel by key needs ID_COLUMNS of a row. With Parquet, it would parse the footer and decode seven columns of a row
group, which takes 1 ms per row. Reading a block takes a twentieth of that. The blocks are between the last page and the
seal of a data file (layout.py), where Parquet readers never read, so they are created, moved and removed with the rows:

    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
    | block 0   |     | block b-1 | b entries       | block_bytes | rows | block_rows | crc32c | "TBIDEN1" |
    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
                                    20 bytes each     8             8      4            4        8 bytes
                                                                                        little-endian

A block is a record batch message in Arrow's IPC format, without its schema: ID_COLUMNS, then `id16`. An id of 32
hexadecimal digits is stored as 16 bytes in `id16` instead of as text in unique_key. unique_key is then null for
lower-case digits (Timeball's ids), or empty for upper-case digits (RocketMQ's ids). The bytes of the message are sorted
by their position modulo 8, those at position 0 first, because similar numbers then give long runs. Then they are
compressed with LZ4 (a raw block). A block has `block_rows` rows in the order of the file, the last block fewer.

The entry of a block contains its offset from the first block (8 bytes), its compressed size, its decompressed size, and
the CRC-32C of its compressed bytes and of these three fields (4 bytes each). `block_bytes` is the total size of all
blocks. The checksum of the trailer covers the three fields before it.

Rows of a file without blocks are read from its row groups. This module is only a codec and does no I/O.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
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
MANY_ROWS = 32  # from this many rows of a block on, Arrow decodes the whole block
_CHUNK_ROWS = 64 * BLOCK_ROWS  # rows encoded at a time: 1 MB, in memory three times
MAGIC = b"TBIDEN1\x00"
TRAILER = struct.Struct("<QQII8s")
_COVERED = struct.Struct("<QQI")  # the part of the trailer that its checksum covers
# First three fields of a block's entry: offset, compressed and decompressed size.
_BLOCK_BOUNDS = struct.Struct("<QII")
_CRC = struct.Struct("<I")
_ENTRY_BYTES = _BLOCK_BOUNDS.size + _CRC.size
_WORD = 8
# Not zstd, which makes a context for each block: that costs 25 us to read a block and 40 us to write it.
_LZ4 = pa.Codec("lz4_raw")
_ID_DIGITS = 32
_NOT_A_DIGIT = 255
# The layout of a block's message. A text column has three buffers (bitmap, bounds, text), other columns have two.
_ID16_STRUCT = struct.Struct("16s")
_TEXT_BOUNDS = struct.Struct("<ii")  # begin and end of a text value
_COLUMN_STRUCTS = [
    {pa.int64(): struct.Struct("<q"), pa.string(): _TEXT_BOUNDS}.get(field.type, _ID16_STRUCT)
    for field in _BLOCK_SCHEMA
]
_BUFFER_COUNTS = [3 if values is _TEXT_BOUNDS else 2 for values in _COLUMN_STRUCTS]
_FIRST_BUFFERS = list(itertools.accumulate(_BUFFER_COUNTS, initial=0))[
    :-1
]  # index of each column's first buffer
_TEXT_BUFFERS = {
    first for first, values in zip(_FIRST_BUFFERS, _COLUMN_STRUCTS, strict=True) if values is _TEXT_BOUNDS
}
_BUFFER_BOUNDS = struct.Struct(f"<{2 * sum(_BUFFER_COUNTS)}q")
_DIGITS = np.full(256, _NOT_A_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_LOWER_BIT = ord("a") ^ ord("A")

Row = dict[str, Any]  # a value for each of ID_COLUMNS
ReadAt = Callable[[int, int], pa.Buffer]  # (begin, size) of a file


def encode(rows: pa.Table) -> bytes:
    """Encode the identities of these rows as blocks, entries and trailer."""
    encoder = Encoder()
    encoder.add(rows)
    return encoder.finish()


class Encoder:
    """Encodes the identities of rows that are added chunk by chunk."""

    def __init__(self) -> None:
        self._blocks, self._entries = list[bytes](), list[bytes]()
        self._block_bytes = self._rows = 0
        self._incomplete_block = ID_SCHEMA.empty_table()  # the last rows added, fewer than a block

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of the file, which have the columns ID_COLUMNS and perhaps others."""
        rows_to_encode = pa.concat_tables([self._incomplete_block, rows.select(ID_COLUMNS).cast(ID_SCHEMA)])
        self._incomplete_block = rows_to_encode.slice(rows_to_encode.num_rows // BLOCK_ROWS * BLOCK_ROWS)
        self._encode(rows_to_encode.slice(0, rows_to_encode.num_rows - self._incomplete_block.num_rows))

    def finish(self) -> bytes:
        """Encode the last block. Returns the blocks, entries and trailer."""
        self._encode(self._incomplete_block)
        counts = self._block_bytes, self._rows, BLOCK_ROWS
        trailer = TRAILER.pack(*counts, google_crc32c.value(_COVERED.pack(*counts)), MAGIC)
        return b"".join([*self._blocks, *self._entries, trailer])

    def _encode(self, rows: pa.Table) -> None:
        """Encode rows as blocks of BLOCK_ROWS rows. Only the last call may have an incomplete block at its end."""
        for begin in range(0, rows.num_rows, BLOCK_ROWS):
            if begin % _CHUNK_ROWS == 0:
                chunk = _with_id16(rows.slice(begin, _CHUNK_ROWS))
            raw = chunk.slice(begin % _CHUNK_ROWS, BLOCK_ROWS).serialize()  # a multiple of 8 bytes
            block = _LZ4.compress(np.frombuffer(raw, np.uint8).reshape(-1, _WORD).T.tobytes(), asbytes=True)
            bounds = _BLOCK_BOUNDS.pack(self._block_bytes, len(block), raw.size)
            crc = google_crc32c.extend(google_crc32c.value(block), bounds)
            self._entries.append(bounds + _CRC.pack(crc))
            self._blocks.append(block)
            self._block_bytes += len(block)
        self._rows += rows.num_rows


def _with_id16(rows: pa.Table) -> pa.RecordBatch:
    """Convert rows of ID_SCHEMA to _BLOCK_SCHEMA: move ids of 32 hexadecimal digits of one case to `id16`.

    The `unique_key` of a moved id becomes null for lower case, and empty for upper case.
    """
    columns = {name: pa.concat_arrays(rows.column(name).chunks) for name in ID_COLUMNS}
    ids, count = columns["unique_key"], rows.num_rows
    has_id_length = pc.fill_null(pc.equal(pc.binary_length(ids), _ID_DIGITS), False)
    candidates = ids.filter(has_id_length)
    _, offsets, data = candidates.buffers()
    packed = np.zeros((count, _ID_DIGITS // 2), np.uint8)
    is_packed, is_upper = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    if len(candidates):
        begin = int(np.frombuffer(offsets, np.int32, 1, 4 * candidates.offset)[0])
        size_bytes = _ID_DIGITS * len(candidates)
        characters = np.frombuffer(data, np.uint8, size_bytes, begin).reshape(-1, _ID_DIGITS)
        digits = _DIGITS[characters]
        # The digits 0 to 9 have the lower-case bit too, so they count as both cases.
        are_upper = ((characters & _LOWER_BIT == 0) | (digits < 10)).all(axis=1)
        are_lower = (characters & _LOWER_BIT != 0).all(axis=1)
        is_id16 = (digits != _NOT_A_DIGIT).all(axis=1) & (are_upper | are_lower)
        row_indexes = np.flatnonzero(np.asarray(has_id_length))[is_id16]
        packed[row_indexes] = (digits[:, ::2] << 4 | digits[:, 1::2])[is_id16]
        is_packed[row_indexes], is_upper[row_indexes] = True, ~are_lower[is_id16]
    # Not `if_else`, which would keep the bytes of texts that become null. `take` makes a null of each masked index. The
    # index `count` is that of the empty text at the end.
    ids_and_empty = pa.concat_arrays([ids, pa.array([""], ids.type)])
    columns["unique_key"] = ids_and_empty.take(
        pa.array(np.where(is_upper, count, np.arange(count)), mask=is_packed & ~is_upper)
    )
    bitmap = pa.array(is_packed).buffers()[1]
    id16 = pa.Array.from_buffers(_ID16.type, count, [bitmap, pa.py_buffer(packed)])
    return pa.RecordBatch.from_arrays([*columns.values(), id16], schema=_BLOCK_SCHEMA)


class Identities:
    """Reads the identities of one file, block by block."""

    __slots__ = ("_begin", "_block_rows", "_entries", "_read_at", "rows")  # thousands of these objects exist

    def __init__(self, read_at: ReadAt, end: int) -> None:
        """Read and check the trailer. `end`: the position in the file where the identities end. Raises Corrupt."""
        self._read_at = read_at
        trailer = bytes(read_at(end - TRAILER.size, TRAILER.size))
        block_bytes, self.rows, self._block_rows, crc, _ = TRAILER.unpack(trailer)
        if google_crc32c.value(trailer[: _COVERED.size]) != crc:
            raise Corrupt("the trailer of its identities does not match its checksum")
        self._entries = end - TRAILER.size - _ENTRY_BYTES * -(-self.rows // self._block_rows)
        self._begin = self._entries - block_bytes
        if self._begin < 0:
            raise Corrupt("it is shorter than its identities")

    def rows_at(self, row_numbers: Iterable[int]) -> list[Row]:
        """Read the identities of these rows of the file, in the order of `row_numbers`. Raises Corrupt."""
        messages: dict[int, bytes] = {}
        rows = list[Row]()
        for block, numbers in itertools.groupby(row_numbers, key=lambda number: number // self._block_rows):
            rows_in_block = [number - block * self._block_rows for number in numbers]
            last_number = block * self._block_rows + max(rows_in_block)
            if last_number >= self.rows:
                raise Corrupt(f"it has {self.rows} identities, but row {last_number} is needed")
            if block not in messages:
                messages[block] = self._block(block)
            if len(rows_in_block) >= MANY_ROWS:
                all_rows = _decode_block(messages[block])
                rows += [all_rows[row] for row in rows_in_block]
            else:
                decoder = _Block(messages[block])
                rows += [decoder.row(row) for row in rows_in_block]
        return rows

    def check(self) -> None:
        """Check the checksums of all blocks. Raises Corrupt."""
        for block in range(-(-self.rows // self._block_rows)):
            self._block(block)

    def _block(self, block: int) -> bytes:
        """Read a block, compare it with its checksum, and decompress its message. Raises Corrupt."""
        entry = bytes(self._read_at(self._entries + _ENTRY_BYTES * block, _ENTRY_BYTES))
        begin, stored_bytes, raw_bytes = _BLOCK_BOUNDS.unpack_from(entry)
        if self._begin + begin + stored_bytes > self._entries:
            raise Corrupt(f"block {block} of its identities extends beyond their end")
        data = self._read_at(self._begin + begin, stored_bytes)
        crc = google_crc32c.extend(google_crc32c.value(data), entry[: _BLOCK_BOUNDS.size])
        if entry[_BLOCK_BOUNDS.size :] != _CRC.pack(crc):
            raise Corrupt(f"block {block} of its identities does not match its checksum")
        return np.frombuffer(_LZ4.decompress(data, raw_bytes), np.uint8).reshape(_WORD, -1).T.tobytes()


class _Block:
    """Reads single rows of a block's message. For one or two rows this is faster than opening the message with Arrow.

    The message's metadata, a flatbuffer, contains the positions of its buffers (Arrow's format/Message.fbs).
    """

    def __init__(self, message: bytes) -> None:
        """Find the buffers. `message`: marker and length of the metadata (4 bytes each), the metadata, and the body."""
        self._message = message
        # `target` adds the length to its own position, so 4 bytes more lead to the body.
        body_at = 4 + fb.target(message, 4)
        batch_at = fb.target(message, fb.present_field(message, fb.target(message, 8), fb.MESSAGE_HEADER))
        buffers_at = fb.target(message, fb.present_field(message, batch_at, fb.BATCH_BUFFERS)) + 4
        bounds = _BUFFER_BOUNDS.unpack_from(message, buffers_at)
        # (position, size) of each buffer. The first buffer of a column is its validity bitmap. It is empty without
        # nulls.
        self._bitmaps = [
            body_at + bounds[2 * buffer] if bounds[2 * buffer + 1] else -1 for buffer in _FIRST_BUFFERS
        ]
        self._values = [body_at + bounds[2 * buffer + 2] for buffer in _FIRST_BUFFERS]
        self._texts = [
            body_at + bounds[2 * buffer + 4] if buffer in _TEXT_BUFFERS else -1 for buffer in _FIRST_BUFFERS
        ]

    def row(self, row: int) -> Row:
        """Decode one row, by its index in the block."""
        message, values = self._message, list[Any]()
        for column_struct, bitmap, values_at, text_at in zip(
            _COLUMN_STRUCTS, self._bitmaps, self._values, self._texts, strict=True
        ):
            # The bitmap has one bit per row. A zero bit is a null.
            if bitmap >= 0 and not message[bitmap + (row >> 3)] >> (row & 7) & 1:
                values.append(None)
            elif text_at < 0:
                values.append(column_struct.unpack_from(message, values_at + column_struct.size * row)[0])
            else:
                begin, end = _TEXT_BOUNDS.unpack_from(message, values_at + 4 * row)
                values.append(message[text_at + begin : text_at + end].decode())
        return _identity(values)


def _decode_block(message: bytes) -> list[Row]:
    """Decode all rows of a block with Arrow, at the cost of MANY_ROWS single rows."""
    columns = pa.ipc.read_record_batch(pa.py_buffer(message), _BLOCK_SCHEMA).columns
    return [_identity(values) for values in zip(*(column.to_pylist() for column in columns), strict=True)]


def _identity(values: Sequence[Any]) -> Row:
    """Build a row from the values of the columns of _BLOCK_SCHEMA."""
    *values, id16 = values
    identity = dict(zip(ID_COLUMNS, values, strict=True))
    if id16 is not None:
        # unique_key is null for an id in lower case, and empty for one in upper case.
        identity["unique_key"] = id16.hex() if identity["unique_key"] is None else id16.hex().upper()
    return identity


def has_identities(read_at: ReadAt, end: int) -> bool:
    """Check whether a file has identities that end at the position `end`."""
    return end >= TRAILER.size and bytes(read_at(end - len(MAGIC), len(MAGIC))) == MAGIC
