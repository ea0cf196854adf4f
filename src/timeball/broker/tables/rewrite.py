"""Keep the pending table in few files, in buckets that suit how near they are.

Each compaction adds a file to every bucket it touches, and a bulk job adds its own. Two reasons to read some
files and write them anew, less what is settled:

    many     a bucket holds at least `FILES_MIN` files of the same order of size: they become one
    coarse   a day or month has come near: it is split into the hours (days) it would be written to now

Files are merged with files at most `SIZE_RATIO` times their size, so that a row is rewritten O(log n) times in
its life, not once a run. Promises cancelled meanwhile stay cancelled by the log; rows that the schedule has opened
are not opened again.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.tables.compact import write_files
from timeball.files import Files
from timeball.message import Int64Array
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile

JOB_ID = "broker-rewrite"
FILES_MIN = 12
SIZE_RATIO = 8
ROWS_MAX = 2_000_000
NEAR_MS = 24 * limits.HOUR_MS
HOUR_NAME_LENGTH = len("2026-11-21T13")


def choose(entries: list[FileEntry], now_ms: int) -> list[FileEntry]:
    """Return files worth rewriting together, within memory; empty when there are none."""
    buckets: dict[str, list[FileEntry]] = defaultdict(list)
    for entry in entries:
        buckets[entry.bucket].append(entry)
    for bucket, members in sorted(buckets.items()):
        members.sort(key=lambda entry: entry.rows)
        if len(bucket) < HOUR_NAME_LENGTH and members[0].min_due_ms < now_ms + NEAR_MS:
            near = [entry for entry in members if entry.min_due_ms < now_ms + NEAR_MS]
            # A file that would come out as it went in is left alone.
            near = [e for e in near if layout.bucket_names(np.array([e.min_due_ms]), now_ms) != [bucket]]
            if near:
                return _within(near)
        alike = [entry for entry in members if entry.rows <= SIZE_RATIO * max(1, members[0].rows)]
        if len(alike) >= FILES_MIN:
            return _within(alike)
    return []


def rewrite(
    files: Files,
    chosen: list[FileEntry],
    settled_seq: Int64Array,
    *,
    settled_before_ms: int,
    now_ms: int,
    epoch: int,
) -> Attachment:
    """Write the rows of these files that still wait into new ones; the caller attaches them (background thread)."""
    everything = ((settled_before_ms, 0), (1 << 62, 0))
    # Files of our own: those that the schedule gathers from belong to the reader thread, and Arrow's reader
    # fails when two threads use it.
    rows = pa.concat_tables([DataFile(files, entry).rows_between(*everything) for entry in chosen])
    rows = rows.filter(pa.array(~np.isin(rows.column("seq").to_numpy(), settled_seq)))
    return Attachment(
        job="rewrite",
        job_id=JOB_ID,
        epoch=epoch,
        files=write_files(files, rows, now_ms),
        removes=[entry.path for entry in chosen],
    )


def _within(entries: list[FileEntry]) -> list[FileEntry]:
    """Return as many of these as one run may hold in memory, at least one."""
    total = np.cumsum([entry.rows for entry in entries])
    return entries[: max(1, int(np.searchsorted(total, ROWS_MAX, side="right")))]
