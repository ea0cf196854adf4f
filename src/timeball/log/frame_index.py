"""Where the frames of a sealed segment begin, as a file beside it: `log/0000000001.frames`.

    byte  0          8   16       24          32         40    48               56            56 + 8n
          +----------+---+--------+-----------+----------+-----+----------------+-- … --------+-- … -------+
          | "TBFRAME1"| n | crc32c | first_seq | next_seq | end | last_append_ms | n positions | n seqs     |
          +----------+---+--------+-----------+----------+-----+----------------+-- … --------+-- … -------+

Little-endian, 8 bytes each; the checksum is that of all behind it. Written once, when the segment is sealed, and
mapped: a start then need not read days of log, and a frame of it costs no memory. It is a cache. One that is
missing, damaged or says something else than the segments around it is ignored, and the segment is read from end
to end instead. The frames themselves are checked whenever they are decoded, here as anywhere.
"""

from __future__ import annotations

import logging
import struct

import google_crc32c
import numpy as np

from timeball.errors import TimeballError
from timeball.files import Files
from timeball.log.segment import FOLDER, Segment, Segments

logger = logging.getLogger(__name__)

MAGIC = b"TBFRAME1"
HEADER = struct.Struct("<8sQQ")
FACTS = struct.Struct("<QQQq")  # first_seq, next_seq, end, last_append_ms
ARRAYS_AT = HEADER.size + FACTS.size
assert ARRAYS_AT == 56


def index_name(segment: Segment) -> str:
    """Return the file name of a segment's frame index."""
    return f"{FOLDER}/{segment.ordinal:010d}.frames"


def save_sealed(files: Files, segments: Segments) -> int:
    """Write the frame index of every sealed segment that has none, and use it; return how many. Blocking."""
    todo = [segment for segment in segments.all[:-1] if not segment.is_indexed]
    for segment in todo:
        files.replace(index_name(segment), encode(segment))
        # Read back, so that the arrays in memory are given up for the mapped ones; that is what the file is for.
        load(files, segment, segment.next_seq)
    return len(todo)


def encode(segment: Segment) -> bytes:
    """Return the bytes of the index of a sealed segment."""
    payload = b"".join(
        [
            FACTS.pack(segment.first_seq, segment.next_seq, segment.end, segment.last_append_ms),
            np.asarray(segment.frame_positions, "<i8").tobytes(),
            np.asarray(segment.frame_seqs, "<i8").tobytes(),
        ]
    )
    return HEADER.pack(MAGIC, len(segment.frame_seqs), google_crc32c.value(payload)) + payload


def load(files: Files, segment: Segment, next_seq: int) -> bool:
    """Give `segment` its frames from its index; false when there is none that fits a segment up to `next_seq`."""
    name = index_name(segment)
    if not files.exists(name):
        return False
    data = files.map_readonly(name)
    try:
        magic, count, crc = HEADER.unpack_from(data)
        if magic != MAGIC or data.size != ARRAYS_AT + 16 * count:
            raise ValueError("not a frame index: bad magic or length")
        # Positions are used unchecked from here on, to slice the mapping; so all of the file is checked once, at the
        # start.
        if google_crc32c.value(data.slice(HEADER.size)) != crc:
            raise ValueError("wrong checksum")
        first_seq, found_next_seq, end, last_append_ms = FACTS.unpack_from(data, HEADER.size)
        if (first_seq, found_next_seq) != (segment.first_seq, next_seq) or end > segment.buffer.size:
            raise ValueError("index of other rows: the segment was replaced")
    except (ValueError, struct.error, TimeballError) as error:
        logger.warning("frame index not used, the segment is read instead file=%s reason=%s", name, error)
        return False
    segment.use_index(
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT),
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT + 8 * count),
        next_seq=next_seq,
        end=end,
        last_append_ms=last_append_ms,
    )
    return True
