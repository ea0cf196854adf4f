"""Tests of timeball.pipeline.jobs.compact."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode, eventually, running_node
from tests.pipeline.traffic import attached_seqs, send

from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import compact


def drain(spark: SparkSession, node: RunningNode, folder: Path, **options: str) -> None:
    query = compact.start(spark, node.endpoint, str(folder), once=True, options=options)
    query.awaitTermination()


@pytest.mark.smoke
@pytest.mark.spark
def test_the_tail_moves_to_the_table(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    send(node.endpoint, 1000)
    drain(spark, node, tmp_path / "c", max_rows_per_batch="400", rows_per_partition="150")
    assert attached_seqs(broker) == list(range(2, 1002))
    assert broker.status().watermark == 1002
    send(node.endpoint, 100)
    drain(spark, node, tmp_path / "c")
    assert len(set(attached_seqs(broker))) == len(attached_seqs(broker)) == 1100


@pytest.mark.spark
def test_a_lost_or_foreign_checkpoint_does_no_harm(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    send(node.endpoint, 300)
    drain(spark, node, tmp_path / "first")
    send(node.endpoint, 100)
    drain(spark, node, tmp_path / "second")  # knows nothing of the first
    send(node.endpoint, 100)
    drain(spark, node, tmp_path / "first")  # believes to be at row 300
    assert len(set(attached_seqs(broker))) == len(attached_seqs(broker)) == 500
    send(node.endpoint, 100)
    node.run(node.broker.compact())  # somebody else was faster
    send(node.endpoint, 100)
    drain(spark, node, tmp_path / "first")
    assert len(set(attached_seqs(broker))) == len(attached_seqs(broker)) == 700


@pytest.mark.parametrize("schedule", ["hour_log", "timer_wheel", "level_cascade"])
def test_only_what_an_hour_log_keeps_is_compacted(tmp_path: Path, schedule: str) -> None:
    with running_node(tmp_path / "data", strategy=schedule) as node:
        reason = compact.superfluous(node.endpoint)
    assert reason is None if schedule == "hour_log" else schedule in str(reason)


def test_the_lease_keeps_the_broker_from_compacting(tmp_path: Path) -> None:
    with running_node(
        tmp_path / "data", compact_rows=10, compact_rows_min=1, compact_interval_ms=100
    ) as node:
        needed = threading.Event()
        needed.set()
        with Endpoint(node.endpoint) as broker, compact.lease(node.endpoint, needed.is_set):
            eventually(lambda: node.broker.mover.outside_compactor_until_ms > 0, "the lease is known")
            assert broker.status().watermark == 1


def test_an_unreachable_broker_does_not_end_the_lease(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop()
    try:
        with compact.lease(node.endpoint, lambda: True):
            eventually(lambda: "lease not renewed" in caplog.text, "the failure is told")
    finally:
        node.start()
