"""The choice of the pending table's files that a rewrite merges or splits. Functions of the files' entries and sizes.

Each compaction and each bulk job adds files. The schedule reads all files that contain a due time, so these must stay
few. `choose` finds the most urgent rewrite:

    split     a large file of a day or month has rows that are due soon: it is split into shorter buckets
    small     a month has at least FILES_MIN small files of similar size
    overlap   at least FILES_MIN files of similar size contain the same due time

A rewrite sorts the rows of its files together and cuts them by layout.py. Its new files do not overlap. Their number
is below that of the small files, because adjacent files of a month together exceed the size of one file. Files are
merged only with files of at most SIZE_RATIO times their size, so that a row is rewritten O(log n) times in all.
Rewrites end: one of small files leaves fewer files, one of overlapping files leaves fewer files for their common due
time and no more for any other, and a split leaves shorter buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import Literal, NamedTuple

import numpy as np

from timeball.model import limits
from timeball.table import layout
from timeball.table.attachment import FileEntry

FILES_MIN = 12
# A file may have at most this many times the rows of the smallest file that it is merged with.
SIZE_RATIO = 8
# Files below this part of a full file (layout.py) are small. FILES_MIN of them make 3 full files, which are cut into at
# most 7.
SMALL_PART = 4
# The files of one rewrite: their rows, their bytes on disk, and their bytes without compression. The rows are in memory
# twice while they are sorted, and rows that compress well take a hundred times their bytes on disk.
ROWS_MAX, BYTES_MAX, RAW_BYTES_MAX = 2_000_000, 128 * 1024 * 1024, 256 * 1024 * 1024
NEAR_MS = 24 * limits.HOUR_MS
# The broker reads and writes this many bytes of merged files in a minute on average: 9 MB/s, 4 % of the time of a disk
# with 200 MB/s. 10,000 messages of 100 bytes on disk a second need half of it.
BYTES_PER_MINUTE = 512 * 1024 * 1024
HOUR_NAME_LENGTH = len("2026-11-21T13")

# The bytes of a file's rows without compression, which only its footer has. Called for files within the other limits.
RawBytes = Callable[[FileEntry], int]
Reason = Literal["split", "small", "overlap", ""]


class Merge(NamedTuple):
    """The files that one rewrite replaces, and the reason. Without files, no rewrite is worth its cost."""

    reason: Reason
    files: list[FileEntry]

    @property
    def files_after(self) -> int:
        """An estimate of the number of new files: the settled rows and the borders of buckets are not known."""
        rows, size_bytes = sum(entry.rows for entry in self.files), self.size_bytes
        return max(1, -(-rows // layout.FILE_ROWS), -(-size_bytes // layout.FILE_BYTES)) if self.files else 0

    @property
    def size_bytes(self) -> int:
        """The bytes of the replaced files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def cost_ms(self) -> int:
        """The time (ms) for which this rewrite uses the budget of BYTES_PER_MINUTE, for its reads and writes."""
        return 2 * self.size_bytes * limits.MINUTE_MS // BYTES_PER_MINUTE


def choose(entries: list[FileEntry], now_ms: int, raw_bytes: RawBytes) -> Merge:
    """Choose the files of the next rewrite, within the limits of a rewrite, or one larger file to split."""
    # The names of buckets sort by time, so the earliest comes first.
    if near_files := _near_large_files(sorted(entries, key=lambda entry: entry.bucket), now_ms):
        return Merge("split", _within_limits(near_files, raw_bytes))
    small_files, large_files = defaultdict[str, list[FileEntry]](list), list[FileEntry]()
    for entry in entries:
        if _is_small(entry):
            small_files[entry.bucket[: layout.MONTH_NAME_LENGTH]].append(entry)
        else:
            large_files.append(entry)
    for _, files in sorted(small_files.items()):
        if similar_files := _choose_similar(files, raw_bytes):
            return Merge("small", similar_files)
    if similar_files := _overlapping(large_files, raw_bytes):
        return Merge("overlap", similar_files)
    return Merge("", [])


def plan(entries: list[FileEntry], now_ms: int, raw_bytes: RawBytes) -> list[Merge]:
    """List the rewrites of these files, the most urgent first. Later rewrites of the new files are not included."""
    merges = list[Merge]()
    while (merge := choose(entries, now_ms, raw_bytes)).files:
        merges.append(merge)
        chosen_paths = {entry.path for entry in merge.files}
        entries = [entry for entry in entries if entry.path not in chosen_paths]
    return merges


def _is_small(entry: FileEntry) -> bool:
    return SMALL_PART * entry.rows <= layout.FILE_ROWS and SMALL_PART * entry.size_bytes <= layout.FILE_BYTES


def _near_large_files(entries: list[FileEntry], now_ms: int) -> list[FileEntry]:
    """Find the first bucket with large files that should be split, a day ahead, and return these files.

    The schedule then reads a file of an hour and not that of a day or month.
    """
    near_files = list[FileEntry]()
    for entry in entries:
        if near_files and entry.bucket != near_files[0].bucket:
            break
        # Twice the size: a writer estimates the size of a file, and must not make one that is split again.
        is_large = entry.rows > layout.FILE_ROWS or entry.size_bytes > 2 * layout.FILE_BYTES
        if (
            is_large
            and len(entry.bucket) < HOUR_NAME_LENGTH
            and entry.min_due_ms < now_ms + NEAR_MS
            # Skip files whose rows would get the same bucket again.
            and layout.bucket_names(np.array([entry.min_due_ms]), now_ms) != [entry.bucket]
        ):
            near_files.append(entry)
    return near_files


def _overlapping(files: list[FileEntry], raw_bytes: RawBytes) -> list[FileEntry]:
    """Choose files of similar size that contain the same due time, for the earliest due time that has enough files."""
    begins = np.array([entry.min_due_ms for entry in files], np.int64)
    ends = np.array([entry.max_due_ms for entry in files], np.int64)
    # The number of overlapping files is largest where one of them begins.
    times = np.unique(begins)
    depths = np.searchsorted(np.sort(begins), times, side="right") - np.searchsorted(np.sort(ends), times)
    for time_ms in times[depths >= FILES_MIN].tolist():
        indexes = np.flatnonzero((begins <= time_ms) & (time_ms <= ends)).tolist()
        if similar_files := _choose_similar([files[index] for index in indexes], raw_bytes):
            return similar_files
    return []


def _choose_similar(files: list[FileEntry], raw_bytes: RawBytes) -> list[FileEntry]:
    """Find the smallest files of which at least FILES_MIN have a similar size (SIZE_RATIO).

    Returns as many of these files as one rewrite may take, the smallest first. Empty if there are too few.
    """
    by_rows = sorted(files, key=lambda entry: entry.rows)
    rows = np.array([entry.rows for entry in by_rows], np.int64)
    # For each file: the end of the run of files with at most SIZE_RATIO times its rows.
    ends = np.searchsorted(rows, SIZE_RATIO * np.maximum(rows, 1), side="right")
    for begin in np.flatnonzero(ends - np.arange(len(rows)) >= FILES_MIN).tolist():
        similar_files = _within_limits(by_rows[begin : ends[begin]], raw_bytes)
        # A file that reaches the limits alone would be rewritten for ever. (Tests set FILES_MIN to 1.)
        if len(similar_files) >= min(2, FILES_MIN):
            return similar_files
    return []


def _within_limits(entries: list[FileEntry], raw_bytes: RawBytes) -> list[FileEntry]:
    """Take the first files within ROWS_MAX, BYTES_MAX and RAW_BYTES_MAX, at least one file."""
    rows = np.cumsum([entry.rows for entry in entries])
    size_bytes = np.cumsum([entry.size_bytes for entry in entries])
    count = min(
        np.searchsorted(rows, ROWS_MAX, side="right"), np.searchsorted(size_bytes, BYTES_MAX, side="right")
    )
    first_entries = entries[: max(1, int(count))]
    if len(first_entries) == 1:
        return first_entries
    sizes = accumulate(map(raw_bytes, first_entries))
    return first_entries[: max(1, sum(1 for _ in takewhile(lambda size: size <= RAW_BYTES_MAX, sizes)))]
