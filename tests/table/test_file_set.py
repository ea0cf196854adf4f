"""Tests of FileSet: searching the columns of bounds gives the same files as checking each entry."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.table.small_table import NOW_MS

from timeball.table.attachment import FileEntry
from timeball.table.file_keys import FileSet

Span = tuple[int, int]
spans = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def entry(number: int, seqs: Span, dues: Span) -> FileEntry:
    return FileEntry(
        path=f"bucket=2026-11/{number:032x}.parquet", bucket="2026-11", rows=1, size_bytes=1,
        min_seq=seqs[0], max_seq=seqs[1], min_due_ms=NOW_MS + dues[0], max_due_ms=NOW_MS + dues[1],
    )  # fmt: skip


@given(
    st.lists(st.tuples(spans, spans), max_size=6), st.lists(st.tuples(st.integers(0, 32), st.integers(0, 32)))
)
def test_file_set_finds_the_files_whose_entries_admit_a_pair(
    bounds: list[tuple[Span, Span]], asked: list[tuple[int, int]]
) -> None:
    entries = [entry(number, *both) for number, both in enumerate(bounds)]
    live = FileSet(entries)
    seq = np.array([number for number, _ in asked], np.int64)
    due = np.array([NOW_MS + instant for _, instant in asked], np.int64)
    assert live.with_seqs(seq) == [
        e for e in entries if any(e.min_seq <= n <= e.max_seq for n in seq.tolist())
    ]
    for one in entries:
        places = [
            at
            for at, (instant, number) in enumerate(zip(due.tolist(), seq.tolist(), strict=True))
            if one.min_seq <= number <= one.max_seq and one.min_due_ms <= instant <= one.max_due_ms
        ]
        result = [there.tolist() for that, there in live.with_pairs(due, seq) if that is one]
        assert result == ([places] if places else [])
        assert live.get(one.path) is one
    assert len(live) == len(entries) and live.get("bucket=2026-11/x.parquet") is None
