"""Tests of FileSet: searching the columns of bounds gives the same files as checking each entry."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.table.small_table import NOW_MS

from timeball.table.attachment import FileEntry
from timeball.table.file_keys import FileSet

Bounds = tuple[int, int]  # smallest and largest value
BOUNDS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def entry(number: int, seqs: Bounds, dues: Bounds) -> FileEntry:
    """Make an entry with these bounds of sequence numbers, and of due times in ms after NOW_MS."""
    return FileEntry(
        path=f"bucket=2026-11/{number:032x}.parquet", bucket="2026-11", rows=1, size_bytes=1,
        min_seq=seqs[0], max_seq=seqs[1], min_due_ms=NOW_MS + dues[0], max_due_ms=NOW_MS + dues[1],
    )  # fmt: skip


@given(
    st.lists(st.tuples(BOUNDS, BOUNDS), max_size=6),
    st.lists(st.tuples(st.integers(0, 32), st.integers(0, 32))),
)
def test_file_set_finds_the_files_whose_bounds_contain_a_number_or_a_pair(
    bounds: list[tuple[Bounds, Bounds]], pairs: list[tuple[int, int]]
) -> None:
    """`bounds`: (bounds of seq, bounds of due times) of each file. `pairs`: (seq, due time) to search."""
    entries = [entry(number, seqs, dues) for number, (seqs, dues) in enumerate(bounds)]
    live = FileSet(entries)
    seqs = [seq for seq, _ in pairs]
    dues_ms = [NOW_MS + due for _, due in pairs]
    expected = [file for file in entries if any(file.min_seq <= seq <= file.max_seq for seq in seqs)]
    assert live.with_seqs(np.array(seqs, np.int64)) == expected
    indexes_by_path = {
        file.path: indexes.tolist()
        for file, indexes in live.with_pairs(np.array(dues_ms, np.int64), np.array(seqs, np.int64))
    }
    for file in entries:
        expected_indexes = [
            index
            for index, (due_ms, seq) in enumerate(zip(dues_ms, seqs, strict=True))
            if file.min_seq <= seq <= file.max_seq and file.min_due_ms <= due_ms <= file.max_due_ms
        ]
        assert indexes_by_path.get(file.path, []) == expected_indexes
        assert live.get(file.path) is file
    assert len(live) == len(entries) and live.get("bucket=2026-11/x.parquet") is None


def test_with_pairs_lists_each_file_once() -> None:
    live = FileSet([entry(1, (0, 9), (0, 9))])
    result = live.with_pairs(np.array([NOW_MS + 3, NOW_MS + 4], np.int64), np.array([5, 6], np.int64))
    assert [(file, indexes.tolist()) for file, indexes in result] == [(live.entries[0], [0, 1])]
