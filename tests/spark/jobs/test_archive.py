"""Tests of timeball.spark.jobs.archive."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode
from tests.spark.traffic import send, send_due_now

from timeball.model.errors import OutOfRange, StorageError
from timeball.model.message import Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive, joining
from timeball.spark.jobs.marked import Engine
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.spark_api import Bounds
from timeball.spark.table_store import sibling


def run_once(engine: Engine, node: RunningNode, **options: str) -> None:
    """Run the job until the archive has all rows of the log."""
    archive.JOB.start(engine, node.endpoint, once=True, options=options).awaitTermination()


def opened(broker: Endpoint) -> DeltaTable:
    """Open the archive beside the pending table."""
    return DeltaTable(sibling(broker.status().table.uri, "archive"))


def archived(broker: Endpoint) -> list[dict[str, object]]:
    """Read all rows of the archive, sorted by number."""
    rows = opened(broker).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["seq"])


def passed(broker: Endpoint) -> list[dict[str, object]]:
    """Read the messages that passed from the log."""
    end = broker.status().log.durable_seq
    batches = broker.read_log(1, end, [Kind.MESSAGE, Kind.RELEASE])
    return [row for batch in batches for row in batch.to_pylist()]


def make_traffic(node: RunningNode) -> None:
    """Make 5 released, 3 immediate, 1 cancelled and 20 pending messages. The first 8 pass."""
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 5)
    with node.client() as ball:
        for n in range(3):
            ball.send("news", f"at once {n}")
        ball.cancel(ball.send("orders", b"x", after="1d").id)


@pytest.mark.spark
def test_the_archive_has_each_message_once_after_several_runs(
    engine: SparkEngine, node: RunningNode, broker: Endpoint
) -> None:
    make_traffic(node)
    run_once(engine, node, max_rows_per_batch="25", rows_per_partition="9")
    run_once(engine, node)  # nothing is left to do
    send_due_now(node.endpoint, 2, "late")
    run_once(engine, node)
    result, expected = archived(broker), passed(broker)
    assert len(expected) == 10
    assert {row.pop("day") for row in result} <= {day(row["store_ms"]) for row in expected}
    assert result == expected
    assert archive.read_range(opened(broker)) == archive.ArchiveRange(1, 0, broker.status().log.durable_seq)


def day(at_ms: object) -> datetime.date:
    assert isinstance(at_ms, int)
    return datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).date()


@pytest.mark.spark
def test_archive_at_another_uri_is_readable_by_spark(
    spark: SparkSession, node: RunningNode, broker: Endpoint, tmp_path: Path
) -> None:
    make_traffic(node)
    run_once(SparkEngine(spark), node, uri=str(tmp_path / "elsewhere"))
    table = DeltaTable(str(tmp_path / "elsewhere"))
    rows = archive.read_archive(spark, table).orderBy("seq").collect()
    result = sorted(table.to_pyarrow_table().to_pylist(), key=lambda row: row["seq"])
    assert [row.asDict() for row in rows] == result and len(result) == 8
    nothing = archive.read_archive(spark, table, [])
    assert (nothing.count(), nothing.columns) == (0, table.to_pyarrow_table().schema.names)


@pytest.mark.spark
def test_epoch_that_another_job_has_done_is_refused(
    engine: SparkEngine, node: RunningNode, broker: Endpoint
) -> None:
    """Two jobs begin at the same mark and end at different rows. The second must not add the same rows again."""
    make_traffic(node)
    end = broker.status().log.durable_seq
    uri = sibling(broker.status().table.uri, "archive")
    archive.extend(engine, node.endpoint, uri, end - 5)
    written = archive.archive_piece(node.endpoint, uri, (1, end))
    with pytest.raises(OutOfRange, match="another archive job was at work"):
        archive.commit_epoch(uri, 1, end, written)
    repeated = archive.archive_piece(node.endpoint, uri, (1, end - 5))
    archive.commit_epoch(uri, 1, end - 5, repeated)
    archive.extend(engine, node.endpoint, uri, end)
    assert [row["seq"] for row in archived(broker)] == [row["seq"] for row in passed(broker)]


def test_another_delta_table_is_not_taken_for_an_archive(tmp_path: Path) -> None:
    table = DeltaTable.create(str(tmp_path / "t"), pa.schema([("a", pa.int64())]))
    with pytest.raises(StorageError, match="is not an archive"):
        archive.read_range(table)


@pytest.mark.spark
def test_files_without_matching_rows_are_skipped(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    uri = sibling(broker.status().table.uri, "archive")
    for topic in ("a", "b", "c"):
        with node.client() as ball:
            ball.send(topic, "x")
        archive.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    table = opened(broker)
    passed_ms = {row["topic"]: row["store_ms"] for row in archived(broker)}
    assert len(archive.select_files(table, Bounds())) == 3
    assert len(archive.select_files(table, Bounds(), topics=["b"])) == 1
    assert len(archive.select_files(table, Bounds(), topics=["b", "c"])) == 2
    assert (
        archive.select_files(table, Bounds(high=passed_ms["a"] - 1))
        == archive.select_files(table, Bounds(low=passed_ms["c"] + 1))
        == []
    )
    assert len(archive.select_files(table, Bounds(passed_ms["a"], passed_ms["a"]))) >= 1

    def read(**conditions: object) -> list[str]:
        """Read the topics of the messages that meet these conditions."""
        return sorted(row.topic for row in archive.messages(spark, node.endpoint, **conditions).collect())

    assert read() == ["a", "b", "c"]
    assert read(topics=["a", "c"]) == ["a", "c"]
    assert read(from_ms=passed_ms["c"] + 1) == read(until_ms=passed_ms["a"]) == []
    assert read(until_ms=passed_ms["c"] + 1, from_ms=passed_ms["c"], topics=["c"]) == ["c"]


@pytest.mark.spark
def test_joined_files_have_the_same_rows_and_old_files_stay_readable(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    uri = sibling(broker.status().table.uri, "archive")
    for n in range(4):
        send_due_now(node.endpoint, 2, f"topic{3 - n}")
        archive.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    table, before = opened(broker), archived(broker)
    rows_of_old_version = archive.read_archive(spark, table)
    mark = archive.read_range(table)
    days = {row["day"] for row in before}
    assert joining.join_small_files(table, archive.write_joined) == 4
    assert len(archive.select_files(opened(broker), Bounds())) == len(days)
    assert archived(broker) == before and archive.read_range(opened(broker)) == mark
    assert rows_of_old_version.count() == len(before)
    assert joining.join_small_files(opened(broker), archive.write_joined) == 0, "nothing left to join"
