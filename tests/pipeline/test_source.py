"""Tests of timeball.pipeline.source: the log and the pending table as DataFrames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import log_rows, send, send_due_now

from timeball.errors import OutOfRange, SetupError
from timeball.message import READ_SCHEMA, TABLE_SCHEMA, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.failures import spark_errors
from timeball.pipeline.options import read_options
from timeball.pipeline.source import deal, shape, split_range


@given(st.integers(0, 1000), st.integers(-5, 1000), st.integers(1, 300))
def test_pieces_cover_the_range_once(begin: int, span: int, rows_per_partition: int) -> None:
    parts = split_range(begin, begin + span, rows_per_partition)
    covered = [seq for part in parts for seq in range(part.from_seq, part.to_seq)]
    assert covered == list(range(begin, begin + span))
    assert all(0 < part.to_seq - part.from_seq <= rows_per_partition for part in parts)


@given(st.lists(st.integers(0, 500), max_size=30), st.integers(1, 600))
def test_files_are_dealt_out_once_each(rows: list[int], rows_per_partition: int) -> None:
    files = [(f"file{i}", count) for i, count in enumerate(rows)]
    parts = deal(files, rows_per_partition)
    assert sorted(uri for part in parts for uri in part.uris) == sorted(uri for uri, _ in files)
    assert all(part.uris for part in parts)


def test_bodies_of_other_kinds_are_left_out() -> None:
    batch = log_rows(Kind.PROMISE, 2, body=[b"a", b"b"])
    assert shape(batch, read_options({"body_kinds": "attach"})).column("body").null_count == 2
    assert shape(batch, read_options({"body_kinds": "promise"})).column("body").to_pylist() == [b"a", b"b"]
    assert shape(batch, read_options({"columns": "body,seq"})).schema.names == ["body", "seq"]


def log(spark: SparkSession, node: RunningNode, **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.read.format("timeball").option("endpoint", node.endpoint).options(**given).load()


@pytest.mark.spark
def test_the_whole_log_in_order_and_in_parts(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 1000)
    frame = log(spark, node, rows_per_partition=300)
    assert frame.columns == READ_SCHEMA.names
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.where("kind = 2").select("seq", "topic", "body").collect()
    assert [bytes(row.body) for row in sorted(rows)] == [f"body {i}".encode() for i in range(1000)]
    assert {row.topic for row in rows} == {"orders"}


@pytest.mark.spark
def test_kinds_and_ranges_are_read_by_option_and_by_filter(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 50)
    send_due_now(node.endpoint, 5)
    assert log(spark, node, kinds="release").count() == 5
    assert log(spark, node).where(f.col("kind") == int(Kind.RELEASE)).count() == 5
    assert log(spark, node, kinds="release").where("kind = 2").count() == 0
    assert [r.seq for r in log(spark, node, from_seq=3, to_seq=6).collect()] == [3, 4, 5]
    assert sorted(r.seq for r in log(spark, node).where("seq >= 0 and seq < 4").collect()) == [1, 2, 3]
    assert log(spark, node).where("seq > 1000000").count() == 0
    assert log(spark, node, from_seq="latest").count() == 0


@pytest.mark.spark
def test_filters_on_seq_narrow_what_is_planned(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 1000)
    narrow = log(spark, node, rows_per_partition=100).where("seq between 101 and 200")
    assert narrow.rdd.getNumPartitions() == 1
    assert narrow.count() == 100


@pytest.mark.spark
def test_ranges(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 100)
    rows = log(spark, node, read="ranges", rows_per_partition=40, from_seq=1, to_seq=101).collect()
    assert sorted((r.from_seq, r.to_seq) for r in rows) == [(1, 34), (34, 67), (67, 101)]


@pytest.mark.spark
def test_a_range_that_is_not_there_is_refused(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 10)
    with pytest.raises(OutOfRange, match="the log ends at"), spark_errors():
        log(spark, node, to_seq=10**6).count()
    with pytest.raises(OutOfRange, match="start at 'first'"), spark_errors():
        log(spark, node, from_seq=0).count()


@pytest.mark.spark
def test_a_wrong_schema_is_refused(spark: SparkSession, node: RunningNode) -> None:
    reader = spark.read.format("timeball").option("endpoint", node.endpoint)
    with pytest.raises(SetupError, match=r"leave \.schema"), spark_errors():
        reader.schema("seq string").load().count()


@pytest.mark.spark
def test_the_pending_table_of_any_version(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 600)
    node.run(node.broker.compact())
    version = broker.status().table.version
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    now = log(spark, node, read="pending")
    assert now.columns == TABLE_SCHEMA.names
    assert now.count() == 700
    assert log(spark, node, read="pending", version=version).count() == 600
    middle = now.agg(f.percentile_approx("due_ms", 0.5)).collect()[0][0]
    assert now.where(f"due_ms < {middle}").count() + now.where(f"due_ms >= {middle}").count() == 700
    assert log(spark, node, read="pending", columns="due_ms,seq").columns == ["due_ms", "seq"]


@pytest.mark.spark
def test_an_empty_pending_table(spark: SparkSession, node: RunningNode) -> None:
    assert log(spark, node, read="pending").count() == 0
