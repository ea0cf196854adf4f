"""Ranges of sequence numbers: what a bulk write was given, and the rows of the pending table that carry them.

A range is (first_seq, rows). A campaign has a handful, one a task of its write; what a pause holds may have more,
because single promises of it were settled before. All functions are pure but the last, which reads the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.message import Int64Array, int64
from timeball.pipeline.table_store import TableFile, read_files, table_files
from timeball.table.attachment import Ranges, within


def as_ranges(seq: Int64Array) -> list[tuple[int, int]]:
    """Turn sorted, unique numbers into ranges, as few as possible."""
    if not len(seq):
        return []
    starts = np.flatnonzero(np.diff(seq, prepend=seq[0] - 2) != 1)
    counts = np.diff(starts, append=len(seq))
    return list(zip(seq[starts].tolist(), counts.tolist(), strict=True))


def ordered(parts: Sequence[Int64Array]) -> Int64Array:
    """Sort all numbers of the parts, each once. numpy's own `unique` builds a hash table first, which takes longer."""
    joined = np.concatenate([np.empty(0, np.int64), *parts])
    joined.sort()
    kept: Int64Array = joined[np.diff(joined, prepend=-1) != 0]
    return kept


def count(ranges: Ranges) -> int:
    """Return how many numbers these are."""
    return sum(rows for _, rows in ranges)


def is_in(seq: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which of `seq` are among the sorted `numbers`."""
    if not len(numbers):
        return np.zeros(len(seq), dtype=np.bool_)
    at = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
    return np.asarray(numbers[at] == seq)


def table_rows(
    uri: str, version: int, ranges: Ranges, columns: Sequence[str], due_from_ms: int
) -> Iterator[pa.RecordBatch]:
    """Read rows of one version of the pending table numbered in `ranges` and due at `due_from_ms` or later.

    In `columns`, which have seq; the files by their first instant.
    """
    if not ranges:
        return
    low, high = min(first for first, _ in ranges), max(first + rows for first, rows in ranges)
    paths = [
        file.path
        for file in sorted(table_files(uri, version), key=lambda file: file.min_due_ms or 0)
        if file.may_hold((due_from_ms, None)) and _may_hold(file, ranges)
    ]
    wanted = (ds.field("seq") >= low) & (ds.field("seq") < high) & (ds.field("due_ms") >= due_from_ms)
    for batch in read_files(uri, paths, columns, wanted):
        inside = within(int64(batch.column("seq")), ranges)
        rows = batch if inside.all() else batch.filter(pa.array(inside))
        if rows.num_rows:
            yield rows


def _may_hold(file: TableFile, ranges: Ranges) -> bool:
    if file.min_seq is None or file.max_seq is None:
        return True
    return any(first <= file.max_seq and file.min_seq < first + rows for first, rows in ranges)
