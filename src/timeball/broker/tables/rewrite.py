"""Rewrites of the pending table, so that it consists of few files, in buckets that match how near their due times are.

Each compaction adds a file to every bucket it touches, and a bulk job adds more. There are two reasons to read some
files and write new ones without the settled scheduled messages:

    many     a bucket has at least `FILES_MIN` files of similar size: they are merged into one
    coarse   a bucket of a day or month has come near: its file is split into hours (days), as it would be written now

Files are merged only with files of at most `SIZE_RATIO` times their size, so that a row is rewritten O(log n) times in
all, and not in every run. Scheduled messages that are cancelled during a rewrite stay cancelled, because the log
records it. The schedule does not load rows again that it has already loaded.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa

from timeball.broker.tables.compact import write_files
from timeball.io.files import Files
from timeball.model import limits
from timeball.model.errors import OverLimit
from timeball.model.message import TABLE_SCHEMA, Int64Array
from timeball.schedule.outcomes import Holds
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry, Ranges, within
from timeball.table.data_file import DataFile, DataFiles

JOB_ID = "broker-rewrite"
FILES_MIN = 12
# A file may have at most this many times the rows of the smallest one it is merged with.
SIZE_RATIO = 8
# Rows read for one rewrite, which are all in memory.
ROWS_MAX = 2_000_000
# Bounds of the campaign files that are read together for a resume.
RUN_ROWS_MAX, RUN_BYTES_MAX = 500_000, 64 * 1024 * 1024
NEAR_MS = 24 * limits.HOUR_MS
HOUR_NAME_LENGTH = len("2026-11-21T13")


def choose(entries: list[FileEntry], now_ms: int) -> list[FileEntry]:
    """Choose files to rewrite together, within memory. The list is empty if no rewrite is worthwhile."""
    buckets: dict[str, list[FileEntry]] = defaultdict(list)
    for entry in entries:
        buckets[entry.bucket].append(entry)
    # The names sort by time, so the buckets that are due first come first.
    for bucket, members in sorted(buckets.items()):
        # Smallest first, because they are merged with all files of similar size.
        members.sort(key=lambda entry: entry.rows)
        if len(bucket) < HOUR_NAME_LENGTH and members[0].min_due_ms < now_ms + NEAR_MS:
            # A day ahead, so that the schedule later reads hours and not the whole file of a day or month.
            near = [entry for entry in members if entry.min_due_ms < now_ms + NEAR_MS]
            # A file that would be written with the same bucket again is left alone.
            near = [e for e in near if layout.bucket_names(np.array([e.min_due_ms]), now_ms) != [bucket]]
            if near:
                return _within(near)
        alike = [entry for entry in members if entry.rows <= SIZE_RATIO * max(1, members[0].rows)]
        # With fewer files, rows would be merged too often. With these bounds a row is written O(log n) times.
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
    """Write the pending rows of these files into new ones. The caller attaches them (background thread).

    `data`: the source for reads of the table's files.
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
    """Divide the files of a campaign into runs that fit into memory, of at least one file, by first due times.

    The rows of a run are written to one file for each bucket, so the number of files may change.
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
    """Raise OverLimit when `resume` of these runs might write more files than one attach may name.

    `low_ms`: rows that are due earlier are not written again.
    """
    fresh = 0
    for run in chosen:
        spans = [(max(low_ms, entry.min_due_ms), entry.max_due_ms) for entry in run]
        mine = [(max(now_ms, low + shift_ms), max(now_ms, high + shift_ms)) for low, high in spans]
        rows = sum(entry.rows for entry in run)
        fresh += min(rows, _bucket_count(spans, now_ms)) + min(rows, _bucket_count(mine, now_ms))
    removed = sum(len(run) for run in chosen)
    # Bounded separately: removed files are named only by their paths, so a row of the log has space for both.
    if max(fresh, removed) > limits.ATTACH_FILES_MAX:
        raise OverLimit(
            f"a resume would write up to {fresh} files in place of {removed}; at most {limits.ATTACH_FILES_MAX}"
        )


def _bucket_count(spans: list[tuple[int, int]], now_ms: int) -> int:
    """Return the maximum number of buckets for due times in these spans. No bucket is shorter than an hour."""
    hours = [np.append(np.arange(low, high, limits.HOUR_MS), high) for low, high in spans if low <= high]
    if not hours:
        return 0
    # Two more, because the borders between near and far may divide an hour and a day.
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
    """Write the pending rows of these files into new ones. Those in a campaign's ranges are postponed by `shift_ms`.

    The postponed rows go into separate files, with due times not before now. The caller attaches the files, or removes
    those in `begun` (background thread).
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
    """Read the rows of a file that are due at `settled_before_ms` or later, or held."""
    # Opened separately: the schedule's open files belong to the reader thread, and Arrow's reader fails when two
    # threads use it.
    low_ms = min(settled_before_ms, holds.from_ms)
    rows = DataFile(data, entry).rows_between((low_ms, 0), (1 << 62, 0))
    if low_ms == settled_before_ms:
        return rows
    due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
    return rows.filter(pa.array((due_ms >= settled_before_ms) | holds.contains(due_ms, seq)))


def _waiting(rows: pa.Table, settled_seq: Int64Array) -> pa.Table:
    return rows.filter(pa.array(~np.isin(rows.column("seq").to_numpy(), settled_seq)))


def _within(entries: list[FileEntry]) -> list[FileEntry]:
    """Take as many of these files as one rewrite may hold in memory, at least one."""
    total = np.cumsum([entry.rows for entry in entries])
    return entries[: max(1, int(np.searchsorted(total, ROWS_MAX, side="right")))]
