"""Keep the pending table in few files, in buckets that suit how near their instants are.

Each compaction adds a file to every bucket it touches, and a bulk job adds its own. Two reasons to read some
files and write them anew, without settled promises:

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
from timeball.errors import OverLimit
from timeball.files import Files
from timeball.message import TABLE_SCHEMA, Int64Array
from timeball.schedule.holds import Holds
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry, Ranges, within
from timeball.table.data_file import DataFile, DataFiles

JOB_ID = "broker-rewrite"
FILES_MIN = 12
SIZE_RATIO = 8
ROWS_MAX = 2_000_000
# Of the files of a campaign that are read together to be resumed.
RUN_ROWS_MAX, RUN_BYTES_MAX = 500_000, 64 * 1024 * 1024
NEAR_MS = 24 * limits.HOUR_MS
HOUR_NAME_LENGTH = len("2026-11-21T13")


def choose(entries: list[FileEntry], now_ms: int) -> list[FileEntry]:
    """Return files worth rewriting together, within memory; empty when there are none."""
    buckets: dict[str, list[FileEntry]] = defaultdict(list)
    for entry in entries:
        buckets[entry.bucket].append(entry)
    # By name, hence by time: the buckets that are due first are seen to first.
    for bucket, members in sorted(buckets.items()):
        # Smallest first: they are merged with those of like size, as many as there are.
        members.sort(key=lambda entry: entry.rows)
        if len(bucket) < HOUR_NAME_LENGTH and members[0].min_due_ms < now_ms + NEAR_MS:
            # A day ahead: gathers then read hours, and not the whole day's or month's file.
            near = [entry for entry in members if entry.min_due_ms < now_ms + NEAR_MS]
            # A file that would come out as it went in is left alone.
            near = [e for e in near if layout.bucket_names(np.array([e.min_due_ms]), now_ms) != [bucket]]
            if near:
                return _within(near)
        alike = [entry for entry in members if entry.rows <= SIZE_RATIO * max(1, members[0].rows)]
        # Fewer would be merged over and over: with these bounds a row is written O(log n) times, and not once a run.
        if len(alike) >= FILES_MIN:
            return _within(alike)
    return []


def rewrite(
    files: Files,
    data: DataFiles,
    chosen: list[FileEntry],
    settled_seq: Int64Array,
    *,
    settled_before_ms: int,
    holds: Holds,
    now_ms: int,
    epoch: int,
) -> Attachment:
    """Write the rows of these files that still wait into new ones; the caller attaches them (background thread).

    `data`: where files of the table are read from.
    """
    rows = pa.concat_tables([_rows(data, entry, settled_before_ms, holds) for entry in chosen])
    rows = _waiting(rows, settled_seq)
    return Attachment(
        job="rewrite",
        job_id=JOB_ID,
        epoch=epoch,
        files=write_files(files, rows, now_ms),
        removes=[entry.path for entry in chosen],
    )


def runs(entries: list[FileEntry]) -> list[list[FileEntry]]:
    """Return the files of a campaign, by their first instants, in runs that memory may hold, of one file at least.

    Their rows come into a file a bucket and run, however many files they were in.
    """
    found: list[list[FileEntry]] = []
    rows = size_bytes = 0
    for entry in sorted(entries, key=lambda entry: entry.min_due_ms):
        rows, size_bytes = rows + entry.rows, size_bytes + entry.size_bytes
        if not found or rows > RUN_ROWS_MAX or size_bytes > RUN_BYTES_MAX:
            found.append([])
            rows, size_bytes = entry.rows, entry.size_bytes
        found[-1].append(entry)
    return found


def check_resume(chosen: list[list[FileEntry]], *, low_ms: int, shift_ms: int, now_ms: int) -> None:
    """Raise OverLimit when `resume` of these runs may write more files than one attach may name.

    `low_ms`: no row before it is written again.
    """
    fresh = 0
    for run in chosen:
        spans = [(max(low_ms, entry.min_due_ms), entry.max_due_ms) for entry in run]
        mine = [(max(now_ms, low + shift_ms), max(now_ms, high + shift_ms)) for low, high in spans]
        rows = sum(entry.rows for entry in run)
        fresh += min(rows, _bucket_count(spans, now_ms)) + min(rows, _bucket_count(mine, now_ms))
    removed = sum(len(run) for run in chosen)
    # Each by itself: what is removed is named by its path alone, and a row of the log holds both.
    if max(fresh, removed) > limits.ATTACH_FILES_MAX:
        raise OverLimit(
            f"a resume would write up to {fresh} files in place of {removed}; at most {limits.ATTACH_FILES_MAX}"
        )


def _bucket_count(spans: list[tuple[int, int]], now_ms: int) -> int:
    """Return how many buckets instants in these spans may fall in; no bucket is shorter than an hour."""
    hours = [np.append(np.arange(low, high, limits.HOUR_MS), high) for low, high in spans if low <= high]
    if not hours:
        return 0
    # And two, as the borders of near and far may cut an hour and a day.
    return len(np.unique(layout.bucket_starts(np.concatenate(hours), now_ms))) + 2


def resume(
    files: Files,
    data: DataFiles,
    run: list[FileEntry],
    settled_seq: Int64Array,
    *,
    ranges: Ranges,
    settled_before_ms: int,
    holds: Holds,
    shift_ms: int,
    now_ms: int,
    begun: list[FileEntry],
) -> list[FileEntry]:
    """Write the rows of these files that still wait into new ones, those of a campaign's ranges apart and due later.

    Later by `shift_ms`, and none before now. The caller attaches them, or removes those `begun` (background thread).
    """
    rows = pa.concat_tables([_rows(data, entry, settled_before_ms, holds) for entry in run])
    rows = _waiting(rows, settled_seq)
    mine = within(rows.column("seq").to_numpy(), ranges)
    resumed = rows.filter(pa.array(mine))
    due_ms = np.maximum(resumed.column("due_ms").to_numpy() + shift_ms, now_ms)
    at = TABLE_SCHEMA.get_field_index("due_ms")
    resumed = resumed.set_column(at, TABLE_SCHEMA.field(at), pa.array(due_ms))
    return [
        *write_files(files, rows.filter(pa.array(~mine)), now_ms, begun),
        *write_files(files, resumed, now_ms, begun),
    ]


def _rows(data: DataFiles, entry: FileEntry, settled_before_ms: int, holds: Holds) -> pa.Table:
    """Return the rows of a file that are due at `settled_before_ms` or later, or held."""
    # A file of our own: those that the schedule gathers from belong to the reader thread, and Arrow's reader
    # fails when two threads use it.
    low_ms = min(settled_before_ms, holds.from_ms)
    rows = DataFile(data, entry).rows_between((low_ms, 0), (1 << 62, 0))
    if low_ms == settled_before_ms:
        return rows
    due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
    return rows.filter(pa.array((due_ms >= settled_before_ms) | holds.contains(due_ms, seq)))


def _waiting(rows: pa.Table, settled_seq: Int64Array) -> pa.Table:
    return rows.filter(pa.array(~np.isin(rows.column("seq").to_numpy(), settled_seq)))


def _within(entries: list[FileEntry]) -> list[FileEntry]:
    """Return as many of these as one run may hold in memory, at least one."""
    total = np.cumsum([entry.rows for entry in entries])
    return entries[: max(1, int(np.searchsorted(total, ROWS_MAX, side="right")))]
