"""The frame index: a file beside a sealed segment with the positions of its frames, such as `log/0000000001.frames`.

    byte  0          8   16       24          32         40    48               56              56 + 8n
          +----------+---+--------+-----------+----------+-----+------------------+-- … --------+-- … -------+
          | "TBFRAME1"| n | crc32c | first_seq | next_seq | end | newest_append_ms | n positions | n seqs     |
          +----------+---+--------+-----------+----------+-----+------------------+-- … --------+-- … -------+

Numbers are little-endian, 8 bytes each. The checksum covers all bytes after it. The file is written once, when the
segment is sealed, and then mapped: a start need not read days of log, and a sealed frame takes no heap memory.

It is a cache. If the file is missing, damaged or contradicts the neighbouring segments, it is ignored and the segment
is read from end to end instead. The frames themselves are still checked each time they are decoded.
"""

from __future__ import annotations

import logging
import struct

import google_crc32c
import numpy as np

from timeball.io.files import Files
from timeball.log.segment import FOLDER, Segment, Segments
from timeball.model.errors import TimeballError

logger = logging.getLogger(__name__)

MAGIC = b"TBFRAME1"
HEADER = struct.Struct("<8sQQ")  # magic, number of frames, crc32c of all bytes after it
FACTS = struct.Struct("<QQQq")  # first_seq, next_seq, end, newest_append_ms
ARRAYS_AT = HEADER.size + FACTS.size
assert ARRAYS_AT == 56


def index_name(segment: Segment) -> str:
    """Build the file name of a segment's frame index."""
    return f"{FOLDER}/{segment.ordinal:010d}.frames"


def save_sealed(files: Files, segments: Segments) -> int:
    """Write and load the index of every sealed segment without a loaded one. Returns their number. Blocking."""
    unindexed = [segment for segment in segments.all[:-1] if not segment.is_indexed]
    for segment in unindexed:
        files.replace(index_name(segment), encode(segment))
        # Loaded at once: the mapped arrays replace those in memory, which is the purpose of the file.
        load(files, segment, segment.next_seq)
    return len(unindexed)


def encode(segment: Segment) -> bytes:
    """Encode the frame index of a sealed segment."""
    payload = b"".join(
        [
            FACTS.pack(segment.first_seq, segment.next_seq, segment.end, segment.newest_append_ms),
            np.asarray(segment.frame_positions, "<i8").tobytes(),
            np.asarray(segment.frame_seqs, "<i8").tobytes(),
        ]
    )
    return HEADER.pack(MAGIC, len(segment.frame_seqs), google_crc32c.value(payload)) + payload


def load(files: Files, segment: Segment, next_seq: int) -> bool:
    """Load the frame index of `segment`, which must end at `next_seq`. Returns false if there is no valid index."""
    name = index_name(segment)
    if not files.exists(name):
        return False
    data = files.map_readonly(name)
    try:
        magic, count, crc = HEADER.unpack_from(data)
        if magic != MAGIC or data.size != ARRAYS_AT + 16 * count:
            raise ValueError("not a frame index: bad magic or length")
        # Positions are used unchecked afterwards to slice the mapping, so the whole file is checked once, here.
        if google_crc32c.value(data.slice(HEADER.size)) != crc:
            raise ValueError("wrong checksum")
        first_seq, stored_next_seq, end, newest_append_ms = FACTS.unpack_from(data, HEADER.size)
        if (first_seq, stored_next_seq) != (segment.first_seq, next_seq) or end > segment.buffer.size:
            raise ValueError("index of other rows: the segment was replaced")
    except (ValueError, struct.error, TimeballError) as error:
        logger.warning("frame index not used, the segment is read instead file=%s reason=%s", name, error)
        return False
    segment.use_index(
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT),
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT + 8 * count),
        next_seq=next_seq,
        end=end,
        newest_append_ms=newest_append_ms,
    )
    return True
