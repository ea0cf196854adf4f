"""Tests of timeball.pipeline.source.chunks."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from timeball.pipeline.source import chunks as module
from timeball.pipeline.source.chunks import chunks


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 20), st.integers(1, 500))
def test_runs_lose_nothing_and_stay_bounded(counts: list[int], most_rows: int, most_bytes: int) -> None:
    before = module.CHUNK_ROWS, module.CHUNK_BYTES
    module.CHUNK_ROWS, module.CHUNK_BYTES = most_rows, most_bytes
    try:
        batches = [
            pa.record_batch({"a": pa.array([i] * count, pa.int64())}) for i, count in enumerate(counts)
        ]
        tables = list(chunks(iter(batches)))
    finally:
        module.CHUNK_ROWS, module.CHUNK_BYTES = before
    assert [v for t in tables for v in t.column("a").to_pylist()] == [
        i for i, n in enumerate(counts) for _ in range(n)
    ]
    assert all(0 < table.num_rows <= most_rows for table in tables)
    assert all(table.nbytes <= most_bytes or len(table.column("a").chunks) == 1 for table in tables)
