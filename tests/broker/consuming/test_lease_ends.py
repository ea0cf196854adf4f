"""The rows that end leases: a few as values are those made by columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming.log_leases import cancel_rows, few_cancel_rows
from timeball.broker.consuming.requests import Receipt
from timeball.log.row_encoder import rows_of
from timeball.model.message import Kind

SEQS = st.integers(1, 2**40)


@given(st.lists(st.tuples(SEQS, st.none() | SEQS, st.integers(0, 2**40)), min_size=1, max_size=5))
def test_cancel_rows_as_values_equal_those_as_columns(leases: list[tuple[int, int | None, int]]) -> None:
    receipts = [Receipt("g", "orders", seq, 5) for seq, _, _ in leases]
    version = np.array([seq if moved is None else moved for seq, moved, _ in leases], dtype=np.int64)
    due_ms = np.array([due for _, _, due in leases], dtype=np.int64)
    few = rows_of(few_cancel_rows(receipts, due_ms, version, "why", 77)).to_pylist()
    assert few == cancel_rows(receipts, due_ms, version, "why", 77).to_pylist()
    for row, (seq, moved, due) in zip(few, leases, strict=True):
        assert (row["kind"], row["topic"], row["source_seq"]) == (Kind.CANCEL, "%RETRY%g_orders", seq)
        assert (row["due_ms"], row["version_seq"]) == (due, None if moved in (None, seq) else moved)
