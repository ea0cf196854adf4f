"""Tests of timeball.spark.jobs.compact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import attached_seqs, log_rows, send

from timeball.model.errors import OutOfRange, StorageError
from timeball.model.message import TABLE_SCHEMA, Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import compact
from timeball.spark.jobs.marked import Engine, InProcessEngine, Piece, Result
from timeball.spark.run.session import SparkEngine
from timeball.table import layout


def run_once(engine: Engine, node: RunningNode, **options: str) -> None:
    """Run the job until the watermark is at the end of the log."""
    compact.JOB.start(engine, node.endpoint, once=True, options=options).awaitTermination()


def test_messages_due_before_settled_before_ms_are_left_out() -> None:
    batch = log_rows(Kind.SCHEDULED, 4, due_ms=[5, 9, 10, 11], store_ms=[1, 2, 3, 4])
    rows = compact.select_pending(batch, settled_before_ms=10)
    assert rows.schema == TABLE_SCHEMA
    assert rows.column("due_ms").to_pylist() == [10, 11]
    assert compact.select_pending(batch, settled_before_ms=0).num_rows == 4


def test_a_row_was_accepted_when_it_was_stored_and_a_moved_row_when_its_message_was() -> None:
    scheduled = log_rows(Kind.SCHEDULED, 1, due_ms=10, store_ms=3)
    moved = log_rows(Kind.MOVED, 1, due_ms=10, store_ms=3, accepted_ms=2, source_seq=7, from_due_ms=9)
    rows = [compact.select_pending(batch, 0).to_pylist()[0] for batch in (scheduled, moved)]
    assert [(row["accepted_ms"], row["number"]) for row in rows] == [(3, None), (2, 7)]


@pytest.mark.smoke
@pytest.mark.spark
def test_pending_messages_move_from_the_tail_to_the_table(
    engine: SparkEngine, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 1000)
    version = broker.status().table.version
    run_once(engine, node, max_rows_per_batch="400", rows_per_partition="150")
    assert attached_seqs(broker) == list(range(2, 1002))
    assert broker.status().watermark == 1002
    assert broker.status().table.version == version + 3, "an epoch of several tasks is one attach"
    send(node.endpoint, 100)
    run_once(engine, node)
    assert len(set(attached_seqs(broker))) == len(attached_seqs(broker)) == 1100


def test_the_job_continues_at_the_watermark_that_the_broker_has_moved(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 100)
    run_once(InProcessEngine(), node)
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    send(node.endpoint, 100)
    run_once(InProcessEngine(), node)
    assert len(set(attached_seqs(broker))) == len(attached_seqs(broker)) == 300


class OvertakenEngine(InProcessEngine):
    """Runs tasks. Before their files are attached, another compactor moves the watermark to `to_seq`."""

    def __init__(self, node: RunningNode, uri: str, to_seq: int) -> None:
        self.node, self.uri, self.to_seq = node, uri, to_seq

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        results = super().run(job, work, task, pieces)
        compact.extend(InProcessEngine(), self.node.endpoint, self.uri, self.to_seq, 1_000)
        return results


def test_attach_that_would_repeat_rows_is_refused(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 100)
    uri, end = broker.status().table.uri, broker.status().log.durable_seq
    with pytest.raises(OutOfRange):
        compact.extend(OvertakenEngine(node, uri, 51), node.endpoint, uri, end, 40)
    assert broker.status().watermark == 51
    assert attached_seqs(broker) == list(range(2, 51))
    compact.extend(OvertakenEngine(node, uri, end), node.endpoint, uri, end, 40)
    assert attached_seqs(broker) == list(range(2, 102)), "a repeat of the other compactor's attach is ignored"
    assert compact.extend(InProcessEngine(), node.endpoint, uri, end, 50) == 0


def test_an_epoch_without_scheduled_messages_moves_the_watermark(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 10)
    run_once(InProcessEngine(), node)
    begin, end = broker.status().watermark, broker.status().log.durable_seq
    assert begin < end  # the TABLE row itself
    run_once(InProcessEngine(), node)
    assert broker.status().watermark == end
    assert len(attached_seqs(broker)) == 10


def test_a_failed_task_leaves_no_files(
    node: RunningNode, broker: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "FILE_ROWS", 1)
    send(node.endpoint, 50)  # their due times are in three buckets or more
    whole = compact.compact_piece(node.endpoint, str(tmp_path / "whole"), (1, 51))
    buckets = [entry.bucket for entry in whole]
    assert len(buckets) >= 3
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"bucket={buckets[-1]}").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        compact.compact_piece(node.endpoint, str(tmp_path / "broken"), (1, 51))
    assert list((tmp_path / "broken").glob("*/*.parquet")) == []


@pytest.mark.parametrize("schedule", ["hour_log", "timer_wheel", "level_cascade"])
def test_only_messages_of_hour_log_are_compacted(tmp_path: Path, schedule: str) -> None:
    with running_node(tmp_path / "data", strategy=schedule) as node:
        reason = compact.no_work_reason(node.endpoint)
    assert reason is None if schedule == "hour_log" else schedule in str(reason)


def test_the_lease_keeps_the_broker_from_compacting(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_rows=10, compact_interval_ms=100) as node:
        needed = threading.Event()
        needed.set()
        with Endpoint(node.endpoint) as broker, compact.lease(node.endpoint, needed.is_set):
            eventually(lambda: node.broker.mover.external_compactor_until_ms > 0, "the broker has the lease")
            assert broker.status().watermark == 1


def test_an_unreachable_broker_does_not_end_the_lease(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop()
    try:
        with compact.lease(node.endpoint, lambda: True):
            eventually(lambda: "lease not renewed" in caplog.text, "the failure is logged")
    finally:
        node.start()
