"""The identities of a data file's rows once more, in small blocks: a look-up of one row reads one of them.

A cancel by key wants ID_COLUMNS of a row. In Parquet that is a footer to parse and seven columns of a row
group to decode, a millisecond a row; a block costs a twentieth. The blocks stand between the last page and the seal of
a data file (layout.py), where readers of Parquet never look, so they come, move and go with the rows:

    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
    | block 0   |     | block b-1 | b entries       | block_bytes | rows | block_rows | crc32c | "TBIDEN1" |
    +---- … ----+- … -+---- … ----+------- … -------+-------------+------+------------+--------+-----------+
                                    20 bytes each     8             8      4            4        8 bytes
                                                                                        little-endian

A block is the message of a record batch in Arrow's IPC format, without its schema: ID_COLUMNS, then `id16`, which holds
the id in place of unique_key where that is 32 hexadecimal digits: in lower case, as ours are, where unique_key is null;
in upper case, as RocketMQ's are, where it is empty. Its bytes are sorted by
their place modulo 8, all those at place 0 first, since numbers that are alike then give long runs; and compressed with
LZ4 (a raw block). It has `block_rows` rows, the last one fewer, in the order of the file. Its entry says where
it begins behind the first one (8 bytes), its bytes here, its bytes decompressed, and the CRC-32C of its bytes here and
of these three fields (4 each). All blocks together have `block_bytes`. The last checksum is of the three fields before
it.

A file without them is read by its row groups. Codec only: no I/O here.
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

from timeball import flatbuffer as fb
from timeball.errors import Corrupt
from timeball.message import TABLE_SCHEMA

ID_COLUMNS = ["seq", "due_ms", "topic", "unique_key", "keys", "accepted_ms", "number"]
ID_SCHEMA = pa.schema([TABLE_SCHEMA.field(name) for name in ID_COLUMNS])
_ID16 = pa.field("id16", pa.binary(16))
_BLOCK_SCHEMA = ID_SCHEMA.append(_ID16)
# 4.5 KB on the disk: a page or two to read, 8 us to decompress.
BLOCK_ROWS = 128
_PART_ROWS = 64 * BLOCK_ROWS  # shaped at a time: a megabyte, three times
MAGIC = b"TBIDEN1\x00"
TRAILER = struct.Struct("<QQII8s")
_COVERED = struct.Struct("<QQI")  # of the trailer, by its checksum
_PLACE = struct.Struct("<QII")  # of an entry
_CRC = struct.Struct("<I")
_ENTRY_BYTES = _PLACE.size + _CRC.size
_WORD = 8
# Not zstd, which makes a context for each block: 25 us to read it, 40 to write it.
_LZ4 = pa.Codec("lz4_raw")
_ID_DIGITS = 32
_NO_DIGIT = 255
# Of a block's message, whose buffers are three for a text.
_ID16_FORM = struct.Struct("16s")
_ENDS = struct.Struct("<ii")  # where a text begins and ends
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

Row = dict[str, Any]  # by ID_COLUMNS
ReadAt = Callable[[int, int], pa.Buffer]  # (begin, size) of a file


def encode(rows: pa.Table) -> bytes:
    """Return the blocks of these rows, and what stands behind them."""
    encoder = Encoder()
    encoder.add(rows)
    return encoder.finish()


class Encoder:
    """Makes the blocks of rows that come part by part."""

    def __init__(self) -> None:
        self._blocks, self._entries = list[bytes](), list[bytes]()
        self._block_bytes = self._rows = 0
        self._left = ID_SCHEMA.empty_table()  # less than a block

    def add(self, rows: pa.Table) -> None:
        """Add the next rows."""
        whole = pa.concat_tables([self._left, rows.select(ID_COLUMNS).cast(ID_SCHEMA)])
        self._left = whole.slice(whole.num_rows // BLOCK_ROWS * BLOCK_ROWS)
        self._encode(whole.slice(0, whole.num_rows - self._left.num_rows))

    def finish(self) -> bytes:
        """Return the blocks, and what stands behind them."""
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
    """Return rows of ID_SCHEMA in that of a block."""
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
        # Digits 0 to 9 have the bit of lower case, too.
        are_upper = ((characters & _LOWER_BIT == 0) | (digits < 10)).all(axis=1)
        are_lower = (characters & _LOWER_BIT != 0).all(axis=1)
        fit = (digits != _NO_DIGIT).all(axis=1) & (are_upper | are_lower)
        places = np.flatnonzero(np.asarray(may_be))[fit]
        packed[places] = (digits[:, ::2] << 4 | digits[:, 1::2])[fit]
        is_packed[places], is_upper[places] = True, ~are_lower[fit]
    # Not `if_else`, which keeps the text of a null: a null is taken, and behind all texts an empty one.
    empty = pa.concat_arrays([ids, pa.array([""], ids.type)])
    columns["unique_key"] = empty.take(
        pa.array(np.where(is_upper, count, np.arange(count)), mask=is_packed & ~is_upper)
    )
    bitmap = pa.array(is_packed).buffers()[1]
    id16 = pa.Array.from_buffers(_ID16.type, count, [bitmap, pa.py_buffer(packed)])
    return pa.RecordBatch.from_arrays([*columns.values(), id16], schema=_BLOCK_SCHEMA)


class Identities:
    """Reads the identities of one file, block by block."""

    __slots__ = ("_begin", "_block_rows", "_entries", "_read_at", "rows")  # thousands are kept

    def __init__(self, read_at: ReadAt, end: int) -> None:
        """`end`: where they end in the file. Reads what stands behind the blocks; raises Corrupt."""
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
        """Return the rows at these places of the file, in this order; raise Corrupt."""
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
        """Return the message of a block, compared with its checksum."""
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
    """The message of a block, for a row or two of it: to have Arrow open it takes longer than to read ten.

    Its metadata, a flatbuffer, says where its buffers stand (Arrow's format/Message.fbs).
    """

    def __init__(self, message: bytes) -> None:
        self._message = message
        body_at = 4 + fb.target(message, 4)
        batch_at = fb.target(message, fb.present_field(message, fb.target(message, 8), fb.MESSAGE_HEADER))
        buffers_at = fb.target(message, fb.present_field(message, batch_at, fb.BATCH_BUFFERS)) + 4
        places = _PLACES.unpack_from(message, buffers_at)
        # In pairs of place and size; of each column its bitmap, which is empty without nulls, comes first.
        self._bitmaps = [body_at + places[2 * at] if places[2 * at + 1] else -1 for at in _FIRST_BUFFERS]
        self._values = [body_at + places[2 * at + 2] for at in _FIRST_BUFFERS]
        self._texts = [body_at + places[2 * at + 4] if at in _OF_TEXT else -1 for at in _FIRST_BUFFERS]

    def row(self, row: int) -> Row:
        """Return one row."""
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
            # An empty text: the id is in upper case.
            identity["unique_key"] = id16.hex() if identity["unique_key"] is None else id16.hex().upper()
        return identity


def is_there(read_at: ReadAt, end: int) -> bool:
    """Return whether identities end there."""
    return end >= TRAILER.size and bytes(read_at(end - len(MAGIC), len(MAGIC))) == MAGIC
