"""The bytes of the log (a segment header, then frames), and of an entry of the queue index.

A *frame* is one group commit or a part of one: a fixed header and one Arrow IPC record batch message, padded with zeros
to 64 bytes so that the columns of a mapped segment are aligned. Numbers are little-endian, as in Arrow.

    byte  0        4     6     8        12       16             24
          +--------+-----+-----+--------+--------+--------------+
          | magic  | ver |flags| length | rows   | first_seq    |
          +--------+-----+-----+--------+--------+--------------+
          24             32             40             48
          +--------------+--------------+--------------+
          | span         | append_ms    | epoch        |
          +--------------+--------------+--------------+
          48       52       56             64
          +--------+--------+--------------+---------- … --+---- … --+
          | payload| crc32c | synced_to    | Arrow IPC     | zeros   |
          +--------+--------+--------------+---------- … --+---- … --+

`crc32c` covers the whole frame, including header and padding, with the checksum field set to zero. `span` is the count
of sequence numbers that the frame uses: its rows, or more when a TABLE row reserves some. `synced_to` states that all
bytes of the segment before that position were on disk when this frame was written (with `sync` durability: the start of
the frame's commit). Recovery needs it to distinguish a torn commit, which was never acknowledged and may be cut, from
damage to an acknowledged commit, which must be refused. A magic of zero is the end of the log.

Segment header, 64 bytes:

    | magic "TIMEBALL" 8 | version 4 | zero 4 | first_seq 8 | created_ms 8 | zero 28 | crc32c 4 |

To change the format: add a version here, keep reading the old one, add files of the new version to tests/golden/, and
describe the change in docs/formats/commit-log.md. Version 1 is the first.
"""

from __future__ import annotations

import struct

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.row_encoder import EncodedRows, Payload, Rows, encode_parts
from timeball.model import limits
from timeball.model.errors import Corrupt, SetupError
from timeball.model.message import LOG_SCHEMA, SCHEMA_VERSION

ALIGN = 64
FRAME_MAGIC = 0x31464254  # "TBF1" in a hex dump
SEGMENT_MAGIC = b"TIMEBALL"
FORMAT_VERSION = 1

FRAME = struct.Struct(
    "<"
    "I"  # magic: zero means nothing was written here
    "H"  # version of LOG_SCHEMA and of this header
    "H"  # flags: zero, or SNAPSHOT
    "I"  # length of the whole frame, so that the next one is found without decoding this one
    "I"  # rows in the record batch
    "q"  # first_seq: sequence number of the first row
    "q"  # span: sequence numbers that the frame uses
    "q"  # append_ms: wall clock at the commit; for people and for retention
    "q"  # epoch: number of the writer's run; each start takes the next one (segment.py)
    "I"  # payload: bytes of the Arrow message, without padding
    "I"  # crc32c over the whole frame, with this field zero
    "Q"  # synced_to: all bytes of the segment before this position were on disk before this commit
)
assert FRAME.size == ALIGN
_CRC_OFFSET = 52
FLAGS_OFFSET = 6
SNAPSHOT = 1  # flag: the frame is a snapshot (checkpoint.py)

SEGMENT = struct.Struct("<8sIIqq28xI")
assert SEGMENT.size == ALIGN


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame header, and the frame's position in the buffer that was read. Positions and lengths are in bytes."""

    position: int
    length: int
    rows: int
    first_seq: int
    span: int
    append_ms: int
    epoch: int
    payload: int  # bytes of the Arrow message, without padding
    synced_to: int
    flags: int = 0

    @property
    def next_seq(self) -> int:
        """The first sequence number after this frame."""
        return self.first_seq + self.span

    @property
    def end(self) -> int:
        """The position after this frame."""
        return self.position + self.length


def encode_rows(rows: Rows) -> Payload:
    """Encode the rows as an Arrow message without its schema. Returns its parts."""
    # All frames have LOG_SCHEMA, so the version in the header is enough to read them.
    return [rows.message] if isinstance(rows, EncodedRows) else encode_parts(rows)


def encode_frame(
    rows: Rows,
    *,
    first_seq: int,
    span: int,
    append_ms: int,
    epoch: int,
    position: int,
    synced_to: int,
    flags: int = 0,
    payload: Payload | None = None,
) -> tuple[Frame, list[bytes | pa.Buffer]]:
    """Encode the frame for `rows` at `position`. Returns its header, and its bytes as buffers in the order of writing.

    `payload` is the result of `encode_rows` for these rows, if there is one already.
    """
    assert span >= rows.num_rows > 0
    payload = encode_rows(rows) if payload is None else payload
    payload_bytes = sum([len(part) for part in payload])
    padding = bytes(-payload_bytes % ALIGN)
    length = ALIGN + payload_bytes + len(padding)
    assert length <= limits.FRAME_BYTES_MAX

    def pack_header(crc: int) -> bytes:
        """Encode the header with this checksum."""
        return FRAME.pack(
            FRAME_MAGIC, SCHEMA_VERSION, flags, length, rows.num_rows, first_seq, span, append_ms, epoch,
            payload_bytes, crc, synced_to,
        )  # fmt: skip

    # The checksum is extended part by part: joining header and payload first would copy every body.
    crc = google_crc32c.value(pack_header(0))
    for part in [*payload, padding]:
        crc = google_crc32c.extend(crc, part)
    frame = Frame(
        position, length, rows.num_rows, first_seq, span, append_ms, epoch, payload_bytes, synced_to, flags
    )
    return frame, [pack_header(crc), *payload, padding]


def read_frame(segment: pa.Buffer, position: int, *, origin: int = 0) -> Frame | None:
    """Read and check the frame at `position`. Returns None at the end of the log.

    `segment` holds the bytes of a segment, or the part of them from `origin` on. `position` and the result's positions
    count from the buffer's begin, the positions in error texts from the segment's. `synced_to` is a position in the
    segment. Raises Corrupt for damage, and SetupError for a frame of another version.
    """
    frame = read_frame_header(segment, position, origin=origin)
    if frame is None:
        return None
    if not _matches_checksum(segment, position, frame.length):
        raise Corrupt(
            f"frame at byte {origin + position} (seq {frame.first_seq}) does not match its checksum"
        )
    return frame


def _matches_checksum(segment: pa.Buffer, position: int, length: int) -> bool:
    """Check the frame of `length` bytes at `position` against the checksum in its header."""
    # Only the header is copied, to set its checksum to zero. The payload is checked in the mapping.
    header = bytearray(segment.slice(position, ALIGN))
    header[_CRC_OFFSET : _CRC_OFFSET + 4] = bytes(4)
    crc = google_crc32c.value(bytes(header))
    crc = google_crc32c.extend(crc, segment.slice(position + ALIGN, length - ALIGN))
    (stored_crc,) = struct.unpack_from("<I", segment, position + _CRC_OFFSET)
    return bool(crc == stored_crc)


def read_frame_header(segment: pa.Buffer, position: int, *, origin: int = 0) -> Frame | None:
    """Read and check the header of the frame at `position`. Returns None at the end of the log.

    The log also ends where less than a header is left. The checksum is checked only for another version than
    SCHEMA_VERSION. Arguments, positions and errors are as in `read_frame`.
    """
    if position + ALIGN > segment.size:
        return None
    magic, version, flags, length, rows, first_seq, span, append_ms, epoch, payload_bytes, _, synced_to = (
        FRAME.unpack_from(segment, position)
    )
    if magic == 0:
        # A torn header may have lost its first sector of 512 bytes and kept later ones, since sectors are written in
        # any order.
        if any(memoryview(segment.slice(position, ALIGN))):
            raise Corrupt(f"frame header at byte {origin + position} is half written")
        return None
    if magic != FRAME_MAGIC or flags & ~SNAPSHOT:
        raise Corrupt(f"no frame at byte {origin + position}")
    # These values are checked before the checksum, because the length decides how much is read and where the next
    # frame is looked for.
    is_consistent = (
        ALIGN <= length <= limits.FRAME_BYTES_MAX
        and length % ALIGN == 0
        and position + length <= segment.size
        and payload_bytes <= length - ALIGN
        and 0 < rows <= span
        and synced_to <= origin + position
    )
    if not is_consistent:
        raise Corrupt(f"frame header at byte {origin + position} contradicts itself")
    # Another version counts only if the checksum is right: otherwise the header is damaged.
    if version != SCHEMA_VERSION:
        if not _matches_checksum(segment, position, length):
            raise Corrupt(
                f"frame at byte {origin + position} (version {version}) does not match its checksum"
            )
        raise SetupError(
            f"frame of version {version}; this Timeball reads version {SCHEMA_VERSION}: use a newer one"
        )
    return Frame(position, length, rows, first_seq, span, append_ms, epoch, payload_bytes, synced_to, flags)


def decode_rows(segment: pa.Buffer, frame: Frame) -> pa.RecordBatch:
    """Decode the rows of a checked frame in LOG_SCHEMA. The columns are views of the mapped segment. Raises Corrupt."""
    message = segment.slice(frame.position + ALIGN, frame.payload)
    try:
        rows = pa.ipc.read_record_batch(message, LOG_SCHEMA)
    except (pa.ArrowInvalid, OSError) as error:  # the checksum is right, so the writer was wrong
        raise Corrupt(f"frame at byte {frame.position} holds no rows: {error}") from error
    if rows.num_rows != frame.rows:
        raise Corrupt(
            f"frame at byte {frame.position} holds {rows.num_rows} rows, its header says {frame.rows}"
        )
    return rows


def encode_segment_header(first_seq: int, created_ms: int) -> bytes:
    """Encode the 64 bytes at the start of a segment."""
    without_crc = SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, first_seq, created_ms, 0)
    return SEGMENT.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, 0, first_seq, created_ms, google_crc32c.value(without_crc[:-4])
    )


def read_segment_header(segment: pa.Buffer) -> int | None:
    """Read a segment's first sequence number, or None for a spare: a blank header, or less than a header.

    Raises Corrupt, and SetupError for another format.
    """
    if segment.size < ALIGN:
        return None
    raw = bytes(segment.slice(0, ALIGN))
    if not any(raw):
        return None
    magic, version, _, first_seq, _, crc = SEGMENT.unpack(raw)
    if magic != SEGMENT_MAGIC or crc != google_crc32c.value(raw[:-4]):
        raise Corrupt("segment header does not match its checksum")
    if version != FORMAT_VERSION:
        raise SetupError(
            f"segment of format {version}; this Timeball reads format {FORMAT_VERSION}: use a newer one"
        )
    return int(first_seq)


# ---- entries of the queue index ------------------------------------------------------------------------------
# An entry is the location of one message, in RocketMQ's width, with its size and tag.

ENTRY = np.dtype(
    [
        ("seq", ">i8"),  # sequence number in the log
        ("size", ">i4"),  # bytes of the message as RocketMQ stores it
        ("tag", ">i8"),  # tag hash or bits, or due time (ms) in a delay-level queue
    ]
)
assert ENTRY.itemsize == 20  # the same as RocketMQ's
EntryArray = npt.NDArray[np.void]
