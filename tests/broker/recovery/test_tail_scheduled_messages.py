"""Scheduled messages of the tail, added in any batches and merged at any time, equal those of a plain model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.log.small_log import opened

from timeball.broker import recovery
from timeball.broker.recovery import TailScheduled
from timeball.model.message import Kind, build_rows, with_seq
from timeball.schedule.outcomes import Settled

# due_ms, and how many rows before this one the scheduled message came whose row this is (0: a new one).
SCHEDULED_ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=40)
SEQS = st.lists(st.integers(1, 40), unique=True, max_size=20)


def log_rows(scheduled_rows: list[tuple[int, int]]) -> pa.RecordBatch:
    """Rows from number 1 on. Some of them repeat an older scheduled message."""
    columns: dict[str, list[Any]] = {"kind": [], "due_ms": [], "source_seq": []}
    for at, (due_ms, before) in enumerate(scheduled_rows):
        is_new = not 0 < before <= at
        columns["kind"].append(int(Kind.SCHEDULED if is_new else Kind.MOVED))
        columns["due_ms"].append(due_ms)
        columns["source_seq"].append(None if is_new else at + 1 - before)
    return build_rows(len(scheduled_rows), topic="t", **columns)


def model(rows: pa.RecordBatch, settled: Settled, from_seq: int) -> list[tuple[int, int, int]]:
    held: dict[int, tuple[int, int]] = {}
    for at, (due_ms, number) in enumerate(
        zip(rows.column("due_ms").to_pylist(), rows.column("source_seq").to_pylist(), strict=True)
    ):
        if at + 1 >= from_seq:
            held[number or at + 1] = due_ms, at + 1
    gone = set(settled.seq.tolist())
    return [
        (due_ms, seq, row_seq)
        for seq, (due_ms, row_seq) in sorted(held.items())
        if seq not in gone and (due_ms >= settled.before_ms or seq >= settled.before_seq)
    ]


def list_pending(tail: TailScheduled, settled: Settled, from_seq: int) -> list[tuple[int, int, int]]:
    found = tail.waiting(settled, from_seq)
    return list(zip(found.due_ms.tolist(), found.seq.tolist(), found.row_seq.tolist(), strict=True))


@given(
    scheduled_rows=SCHEDULED_ROWS, batch_rows=st.integers(1, 9), folds=st.sets(st.integers(0, 9)), gone=SEQS,
    released=st.integers(0, 20), before_ms=st.integers(0, 20), before_seq=st.integers(1, 40),
    from_seq=st.integers(1, 40),
)  # fmt: skip
def test_pending_messages_agree_with_a_model(
    scheduled_rows: list[tuple[int, int]], batch_rows: int, folds: set[int], gone: list[int], released: int,
    before_ms: int, before_seq: int, from_seq: int,
) -> None:  # fmt: skip
    cut = max(0, len(gone) - released)
    seq = np.array(sorted(gone[:cut]) + sorted(gone[cut:]), np.int64)
    settled = Settled(before_ms, ((seq, seq),), before_seq, released=len(gone) - cut)
    rows = log_rows(scheduled_rows)
    read, tail = with_seq(rows, 1), TailScheduled(1)
    for number, begin in enumerate(range(0, read.num_rows, batch_rows)):
        tail.add(read.slice(begin, batch_rows))
        if number in folds:
            tail.fold(settled, from_seq)
            assert tail.unfolded_rows == 0
    expected = model(rows, settled, from_seq)
    assert list_pending(tail, settled, from_seq) == expected
    tail.fold(settled, from_seq)
    assert len(tail) == len(expected), "what is settled is not kept"
    assert list_pending(tail, settled, from_seq) == expected


def test_earlier_rows_are_read_later_and_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(recovery, "COUNT_BLOCK", 4)
    nothing = Settled(-(1 << 62))
    scheduled_rows = [(at, 0) for at in range(20)] + [(7, 3), (8, 0)]

    async def main() -> None:
        async with opened(CrashFiles()) as log:
            rows = log_rows(scheduled_rows)
            for begin in range(0, rows.num_rows, 3):
                await log.append(rows.slice(begin, 3))
            whole, late = TailScheduled(1), TailScheduled(12)
            whole.add(with_seq(rows, 1))
            late.add(with_seq(rows, 1).slice(11))
            assert late.count(log.reader, 1) == 22 - 12
            late.extend_down(log.reader, 1)
            late.extend_down(log.reader, 1)
            assert list_pending(late, nothing, 1) == list_pending(whole, nothing, 1)
            for from_seq in range(1, 23):
                # The row that holds an older scheduled message again, number 21, is no scheduled message that came.
                came = 22 - from_seq + (from_seq > 21)
                assert late.count(log.reader, from_seq) == whole.count(log.reader, from_seq) == came
            whole.fold(nothing, 10)
            assert whole.count(log.reader, 13) == 9

    asyncio.run(main())
