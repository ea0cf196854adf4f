"""The bytes of the log: a segment header, then frames.

A *frame* is what one group commit (or a part of it) wrote: a fixed header and one Arrow IPC record batch
message, padded with zeros to 64 bytes so that the columns of a mapped segment are aligned. Little-endian,
as Arrow is.

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

`crc32c` covers the whole frame, header and padding included, with its own field zero. `span` is how many
sequence numbers the frame uses up: its rows, or more when a TABLE row sets some aside. `synced_to` says that
all bytes of the segment before that position were on disk when this frame was written (with `sync` durability:
the start of its own commit). Recovery needs it to tell a torn commit (never acknowledged, may be cut) from
damage to an acknowledged one (must be refused). A magic of zero is the end of the log.

Segment header, 64 bytes:

    | magic "TIMEBALL" 8 | version 4 | zero 4 | first_seq 8 | created_ms 8 | zero 28 | crc32c 4 |

To change the format: add a version here, keep reading the old one, add files of it to tests/golden/, and
describe the change in docs/formats/commit-log.md. Version 1 is the first.
"""

from __future__ import annotations

import struct

import google_crc32c
import msgspec
import pyarrow as pa

from timeball import limits
from timeball.errors import Corrupt, SetupError
from timeball.log.few_rows import EncodedRows, Rows, encode
from timeball.message import LOG_SCHEMA, SCHEMA_VERSION

ALIGN = 64
FRAME_MAGIC = 0x31464254  # "TBF1" in a hex dump
SEGMENT_MAGIC = b"TIMEBALL"
FORMAT_VERSION = 1

FRAME = struct.Struct(
    "<"
    "I"  # magic: zero means nothing was written here
    "H"  # version of LOG_SCHEMA and of this header
    "H"  # flags: zero, or SNAPSHOT
    "I"  # length: the whole frame, so that the next one is found without decoding this one
    "I"  # rows in the record batch
    "q"  # first_seq: sequence number of the first row
    "q"  # span: sequence numbers used up
    "q"  # append_ms: wall clock at the commit; for people and for retention
    "q"  # epoch: number of the writer's life; each start counts one more (segment.py)
    "I"  # payload: bytes of the Arrow message, without padding
    "I"  # crc32c over the whole frame
    "Q"  # synced_to: position in the segment up to which all was on disk before this commit
)
assert FRAME.size == ALIGN
_CRC_OFFSET = 52
FLAGS_OFFSET = 6
SNAPSHOT = 1  # flag: the frame is a snapshot (checkpoint.py)

SEGMENT = struct.Struct("<8sIIqq28xI")
assert SEGMENT.size == ALIGN


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame header, and where the frame lies in its segment."""

    position: int
    length: int
    rows: int
    first_seq: int
    span: int
    append_ms: int
    epoch: int
    payload: int
    synced_to: int
    flags: int = 0

    @property
    def next_seq(self) -> int:
        """Sequence number after this frame."""
        return self.first_seq + self.span

    @property
    def end(self) -> int:
        """Position after this frame."""
        return self.position + self.length


def encode_rows(rows: Rows) -> bytes | pa.Buffer:
    """Return the rows as an Arrow message without its schema."""
    # Every frame has LOG_SCHEMA, so a reader needs only the version in the header.
    return rows.message if isinstance(rows, EncodedRows) else encode(rows)


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
    payload: bytes | pa.Buffer | None = None,
) -> tuple[Frame, list[bytes | pa.Buffer]]:
    """Return the frame for `rows` at `position`, and its bytes as buffers to be written one after the other.

    `payload`: what `encode_rows` gave for these rows.
    """
    assert span >= rows.num_rows > 0
    payload = encode_rows(rows) if payload is None else payload
    padding = bytes(-len(payload) % ALIGN)
    length = ALIGN + len(payload) + len(padding)
    assert length <= limits.FRAME_BYTES_MAX

    def header(crc: int) -> bytes:
        return FRAME.pack(
            FRAME_MAGIC, SCHEMA_VERSION, flags, length, rows.num_rows, first_seq, span, append_ms, epoch,
            len(payload), crc, synced_to,
        )  # fmt: skip

    # Extended part by part: to join header and payload first would copy every body.
    crc = google_crc32c.extend(google_crc32c.value(header(0)), payload)
    crc = google_crc32c.extend(crc, padding)
    frame = Frame(
        position, length, rows.num_rows, first_seq, span, append_ms, epoch, len(payload), synced_to, flags
    )
    return frame, [header(crc), payload, padding]


def read_frame(segment: pa.Buffer, position: int, *, origin: int = 0) -> Frame | None:
    """Return the checked frame at `position`, None where the log ends; raises Corrupt on a wrong checksum.

    `origin`: where in its segment the buffer begins, when it is a part of one.
    """
    frame = read_frame_header(segment, position, origin=origin)
    if frame is None:
        return None
    # Only the header is copied, to blank its checksum; the payload is checked where it is mapped.
    stored = FRAME.unpack_from(segment, position)
    header = bytearray(segment.slice(position, ALIGN))
    header[_CRC_OFFSET : _CRC_OFFSET + 4] = bytes(4)
    crc = google_crc32c.value(bytes(header))
    crc = google_crc32c.extend(crc, segment.slice(position + ALIGN, frame.length - ALIGN))
    if crc != stored[10]:
        raise Corrupt(f"frame at byte {position} (seq {frame.first_seq}) does not match its checksum")
    return frame


def read_frame_header(segment: pa.Buffer, position: int, *, origin: int = 0) -> Frame | None:
    """Return the frame at `position` as `read_frame` does, with only its header checked."""
    if position + ALIGN > segment.size:
        return None
    magic, version, flags, length, rows, first_seq, span, append_ms, epoch, payload, _, synced_to = (
        FRAME.unpack_from(segment, position)
    )
    if magic == 0:
        # A torn header may have lost its first sector and kept later ones (512 bytes, any order).
        if any(memoryview(segment.slice(position, ALIGN))):
            raise Corrupt(f"frame header at byte {position} is half written")
        return None
    if magic != FRAME_MAGIC or flags & ~SNAPSHOT:
        raise Corrupt(f"no frame at byte {position}")
    # The length decides where the next frame is looked for and how much is read, so it is checked before the checksum.
    sane = (
        ALIGN <= length <= limits.FRAME_BYTES_MAX
        and length % ALIGN == 0
        and position + length <= segment.size
        and payload <= length - ALIGN
        and 0 < rows <= span
        and synced_to <= origin + position
    )
    if not sane:
        raise Corrupt(f"frame header at byte {position} contradicts itself")
    # After the checks above: damage must not be reported as a newer version.
    if version != SCHEMA_VERSION:
        raise SetupError(
            f"frame of version {version}; this Timeball reads version {SCHEMA_VERSION}: use a newer one"
        )
    return Frame(position, length, rows, first_seq, span, append_ms, epoch, payload, synced_to, flags)


def decode_rows(segment: pa.Buffer, frame: Frame) -> pa.RecordBatch:
    """Return the rows of a checked frame in LOG_SCHEMA; columns are views of the mapped segment."""
    message = segment.slice(frame.position + ALIGN, frame.payload)
    rows = pa.ipc.read_record_batch(message, LOG_SCHEMA)
    if rows.num_rows != frame.rows:
        raise Corrupt(
            f"frame at byte {frame.position} holds {rows.num_rows} rows, its header says {frame.rows}"
        )
    return rows


def encode_segment_header(first_seq: int, created_ms: int) -> bytes:
    """Return the 64 bytes at the start of a segment."""
    blank = SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, 0, first_seq, created_ms, 0)
    return SEGMENT.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, 0, first_seq, created_ms, google_crc32c.value(blank[:-4])
    )


def read_segment_header(segment: pa.Buffer) -> int | None:
    """Return a segment's first sequence number; None when it was prepared but never begun; raises Corrupt."""
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
