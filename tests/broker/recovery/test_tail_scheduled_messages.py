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

# (due_ms, distance): the row repeats the message of the row that many rows before. 0: the row is a new message.
SCHEDULED_ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=40)
SEQS = st.lists(st.integers(1, 40), unique=True, max_size=20)


def log_rows(scheduled_rows: list[tuple[int, int]]) -> pa.RecordBatch:
    """Rows from number 1 on. Some of them repeat an older scheduled message."""
    columns: dict[str, list[Any]] = {"kind": [], "due_ms": [], "source_seq": []}
    for row_seq, (due_ms, distance) in enumerate(scheduled_rows, 1):
        is_new = not 0 < distance < row_seq
        columns["kind"].append(int(Kind.SCHEDULED if is_new else Kind.MOVED))
        columns["due_ms"].append(due_ms)
        columns["source_seq"].append(None if is_new else row_seq - distance)
    return build_rows(len(scheduled_rows), topic="t", **columns)


def expected_pending(rows: pa.RecordBatch, settled: Settled, from_seq: int) -> list[tuple[int, int, int]]:
    """The model: (due_ms, number, row) of the pending messages in rows from `from_seq` on, each at its last row."""
    last_rows: dict[int, tuple[int, int]] = {}
    due_times, sources = rows.column("due_ms").to_pylist(), rows.column("source_seq").to_pylist()
    for row_seq, (due_ms, number) in enumerate(zip(due_times, sources, strict=True), 1):
        if row_seq >= from_seq:
            last_rows[number or row_seq] = due_ms, row_seq
    settled_seqs = set(settled.seq.tolist())
    return [
        (due_ms, seq, row_seq)
        for seq, (due_ms, row_seq) in sorted(last_rows.items())
        if seq not in settled_seqs and (due_ms >= settled.before_ms or seq >= settled.before_seq)
    ]


def pending_of(tail: TailScheduled, settled: Settled, from_seq: int) -> list[tuple[int, int, int]]:
    """The pending messages that the tail knows, as `expected_pending` lists them."""
    waiting = tail.waiting(settled, from_seq)
    return list(zip(waiting.due_ms.tolist(), waiting.seq.tolist(), waiting.row_seq.tolist(), strict=True))


@given(
    scheduled_rows=SCHEDULED_ROWS, batch_rows=st.integers(1, 9), folds=st.sets(st.integers(0, 9)),
    settled_seqs=SEQS, released=st.integers(0, 20), before_ms=st.integers(0, 20), before_seq=st.integers(1, 40),
    from_seq=st.integers(1, 40),
)  # fmt: skip
def test_pending_messages_agree_with_a_model(
    scheduled_rows: list[tuple[int, int]], batch_rows: int, folds: set[int], settled_seqs: list[int],
    released: int, before_ms: int, before_seq: int, from_seq: int,
) -> None:  # fmt: skip
    """`folds`: the batches after which the tail is folded. `released`: how many settled messages are released."""
    # The released messages come last, as in a checkpoint.
    first_released = max(0, len(settled_seqs) - released)
    seq = np.array(sorted(settled_seqs[:first_released]) + sorted(settled_seqs[first_released:]), np.int64)
    settled = Settled(before_ms, ((seq, seq),), before_seq, released=len(settled_seqs) - first_released)
    rows = log_rows(scheduled_rows)
    numbered_rows, tail = with_seq(rows, 1), TailScheduled(1)
    for number, begin in enumerate(range(0, numbered_rows.num_rows, batch_rows)):
        tail.add(numbered_rows.slice(begin, batch_rows))
        if number in folds:
            tail.fold(settled, from_seq)
            assert tail.unfolded_rows == 0
    expected = expected_pending(rows, settled, from_seq)
    assert pending_of(tail, settled, from_seq) == expected
    tail.fold(settled, from_seq)
    assert len(tail) == len(expected), "settled messages take no memory after a fold"
    assert pending_of(tail, settled, from_seq) == expected


def test_rows_read_down_to_an_earlier_one_give_the_same_messages_and_counts(monkeypatch: Any) -> None:
    monkeypatch.setattr(recovery, "COUNT_BLOCK", 4)
    nothing_settled = Settled(-(1 << 62))
    # 22 rows, of which number 21 repeats an earlier message.
    scheduled_rows = [(due_ms, 0) for due_ms in range(20)] + [(7, 3), (8, 0)]

    async def main() -> None:
        async with opened(CrashFiles()) as log:
            rows = log_rows(scheduled_rows)
            for begin in range(0, rows.num_rows, 3):
                await log.append(rows.slice(begin, 3))
            whole, extended = TailScheduled(1), TailScheduled(12)
            whole.add(with_seq(rows, 1))
            extended.add(with_seq(rows, 1).slice(11))
            assert extended.count(log.reader, 1) == 10, "rows 12 to 22 without row 21"
            for _ in range(2):  # the second time changes nothing
                extended.extend_down(log.reader, 1)
            assert pending_of(extended, nothing_settled, 1) == pending_of(whole, nothing_settled, 1)
            for from_seq in range(1, 23):
                new_messages = sum(row_seq != 21 for row_seq in range(from_seq, 23))
                assert extended.count(log.reader, from_seq) == new_messages
                assert whole.count(log.reader, from_seq) == new_messages
            whole.fold(nothing_settled, 10)
            assert whole.count(log.reader, 13) == 9

    asyncio.run(main())
