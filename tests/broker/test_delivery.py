"""A promise that is due becomes a release record; many large ones become several frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import eventually, running_node

from timeball import limits
from timeball.broker.delivery import Lateness, in_frames, moved_rows, release_rows
from timeball.clock import ManualClock
from timeball.errors import OverLimit
from timeball.log.format import with_seq
from timeball.message import Kind, build_rows
from timeball.schedule.locations import as_promises


def promises(sizes: list[int]) -> pa.RecordBatch:
    rows = build_rows(
        len(sizes),
        kind=int(Kind.PROMISE),
        topic="orders",
        body=[bytes(size) for size in sizes],
        due_ms=list(range(len(sizes))),
        store_ms=[5] * len(sizes),
    )
    return with_seq(rows, 17)


def released(rows: pa.RecordBatch, now_ms: int = 1_000) -> pa.RecordBatch:
    queue = np.arange(rows.num_rows, dtype=np.int64)
    return release_rows(rows, now_ms=now_ms, queue_id=queue, queue_offset=queue + 40)


def test_a_release_is_the_message_and_names_its_promise() -> None:
    rows = released(promises([1, 2, 3]))
    assert set(rows.column("kind").to_pylist()) == {int(Kind.RELEASE)}
    assert rows.column("source_seq").to_pylist() == [17, 18, 19]
    assert rows.column("queue_offset").to_pylist() == [40, 41, 42]
    assert rows.column("accepted_ms").to_pylist() == [5, 5, 5]
    assert rows.column("store_ms").to_pylist() == [1_000] * 3
    assert rows.column("body").equals(promises([1, 2, 3]).column("body"))


def test_a_promise_written_again_names_itself_and_keeps_its_age() -> None:
    rows = moved_rows(promises([1, 2, 3]), now_ms=1_000)
    assert set(rows.column("kind").to_pylist()) == {int(Kind.MOVED)}
    assert rows.column("source_seq").to_pylist() == [17, 18, 19]
    assert rows.column("accepted_ms").to_pylist() == [5, 5, 5]
    assert rows.column("store_ms").to_pylist() == [1_000] * 3
    assert rows.column("queue_offset").null_count == 3
    assert as_promises(with_seq(rows, 90)).equals(promises([1, 2, 3]))


def test_never_early_is_asserted_here_once_more() -> None:
    released(promises([1, 1]), now_ms=1)
    with pytest.raises(AssertionError, match="before its instant"):
        released(promises([1, 1]), now_ms=0)


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=40))
def test_parts_fit_into_frames_and_are_the_whole_in_its_order(sizes: list[int]) -> None:
    whole = promises(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "REQUEST_BYTES_MAX", 8_192)
        parts = list(in_frames(whole))
    assert pa.Table.from_batches(parts).combine_chunks().to_batches()[0].equals(whole)
    assert all(part.nbytes <= 8_192 or part.num_rows == 1 for part in parts)


def test_what_fits_is_not_cut() -> None:
    assert len(list(in_frames(promises([100] * 100)))) == 1


def test_lateness_counts_every_release_once() -> None:
    lateness = Lateness()
    lateness.add(np.array([0, 1, 3, 70_000], dtype=np.int64))
    summary = lateness.summary()
    assert (summary["released"], summary["max_ms"]) == (4, 70_000)
    assert summary["buckets"] == {"<=0ms": 1, "<=1ms": 1, "<=5ms": 1, ">60000ms": 1}


def test_more_bytes_due_at_once_than_a_frame_holds_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAME_BYTES_MAX", 1 << 18)
    monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", 1 << 17)

    clock = ManualClock()
    due_ms = clock.wall + 5_000

    def sent(count: int) -> pa.RecordBatch:
        columns = {"topic": ["large"] * count, "body": [bytes(10_000)] * count}
        return pa.RecordBatch.from_pydict({**columns, "due_ms": pa.array([due_ms] * count)})

    with running_node(tmp_path, clock) as node:
        for _ in range(10):
            node.run(node.broker.send(sent(10)))
        clock.advance(5_000)
        eventually(lambda: node.broker.lateness.released == 100, "all are released")
        assert sum(high - low for low, high in node.broker.queues("large").values()) == 100
        with pytest.raises(OverLimit, match="split it"):
            node.run(node.broker.send(sent(14)))
