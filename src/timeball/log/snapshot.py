"""Snapshots: all that the rows before them said and that still counts, as one row of the log.

A start reads the last one and what follows it, so retention may let go what stands before. It is a META row of the key
`snapshot`, in a frame of its own that carries a flag: the last one is found from frame headers alone, backwards, and
nothing else is decoded. Its value is what the checkpoint file holds (checkpoint.py), without what only files know. It
holds the secrets too, so no reader outside the broker is given the value.

One row, not a row for each fact: half a snapshot would be worth nothing, and a row is either whole or not there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.meta_rows import SNAPSHOT_KEY, meta_rows
from timeball.log.segment import Segment, Segments

EVERY_BYTES = 256 * 1024 * 1024  # of log: what a start reads at most that has no checkpoint


def snapshot_row(state: cp.Checkpoint, now_ms: int) -> pa.RecordBatch:
    """Return the row to be appended, with `flags=fmt.SNAPSHOT`."""
    return meta_rows([(SNAPSHOT_KEY, cp.encode(state))], now_ms)


def last_snapshot(segments: Segments) -> cp.Checkpoint | None:
    """Return what the newest snapshot of the log says; None when there is none. Raises Corrupt."""
    for segment in reversed(segments.all):
        at = _last_flagged(segment)
        if at is not None:
            try:
                return _decode(segment, int(segment.frame_positions[at]))
            except Corrupt as error:
                raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error
    return None


def bytes_behind(segments: Segments, seq: int) -> int:
    """Return how much log stands at and behind a row."""
    found = 0
    for segment in reversed(segments.all):
        if segment.next_seq <= seq:
            break
        at = max(0, segment.frame_at(seq)) if len(segment.frame_seqs) else -1
        found += segment.end - (int(segment.frame_positions[at]) if at >= 0 else fmt.ALIGN)
    return found


def _last_flagged(segment: Segment) -> int | None:
    """Return the number of the segment's last frame with the flag, by their headers alone."""
    positions = np.asarray(segment.frame_positions, dtype=np.int64)
    flags = np.frombuffer(segment.buffer, dtype="<u2", count=segment.buffer.size // 2)
    flagged = np.flatnonzero(flags[(positions + fmt.FLAGS_OFFSET) // 2] & fmt.SNAPSHOT)
    return int(flagged[-1]) if len(flagged) else None


def _decode(segment: Segment, position: int) -> cp.Checkpoint:
    frame = fmt.read_frame(segment.buffer, position)
    assert frame is not None, "a frame with a flag has a magic"
    return cp.decode(fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py())
