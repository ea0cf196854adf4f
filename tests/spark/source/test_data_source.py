"""Tests of timeball.spark.source.data_source: log, topics and tables as Spark reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import LongType, StructField, StructType
from tests.node_fixture import RunningNode
from tests.spark.traffic import send, send_due_now
from tests.spark.two_groups import two_groups

from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA, Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import ledger
from timeball.spark.log_events import EVENT_SCHEMA
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.data_source import TimeballDataSource, pin_to_one_group
from timeball.spark.source.log_reader import LogReader
from timeball.spark.source.options import DEFAULT_ENDPOINT, write_options
from timeball.spark.source.spark_api import spark_errors
from timeball.spark.table_store import sibling


def read(spark: SparkSession, node: RunningNode, **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.read.format("timeball").option("endpoint", node.endpoint).options(**given).load()


@pytest.mark.smoke
@pytest.mark.spark
def test_the_whole_log_in_order_and_in_parts(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 1000)
    frame = read(spark, node, rows_per_partition=300)
    assert frame.columns == READ_SCHEMA.names
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.where("kind = 2").select("seq", "topic", "body").collect()
    assert [bytes(row.body) for row in sorted(rows)] == [f"body {i}".encode() for i in range(1000)]
    assert {row.topic for row in rows} == {"orders"}


@pytest.mark.spark
def test_kinds_and_ranges_are_read_by_option_and_by_filter(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 50)
    send_due_now(node.endpoint, 5)
    assert read(spark, node, kinds="release").count() == 5
    assert read(spark, node).where(f.col("kind") == int(Kind.RELEASE)).count() == 5
    assert read(spark, node, kinds="release").where("kind = 2").count() == 0
    assert [r.seq for r in read(spark, node, from_seq=3, to_seq=6).collect()] == [3, 4, 5]
    assert sorted(r.seq for r in read(spark, node).where("seq >= 0 and seq < 4").collect()) == [1, 2, 3]
    assert read(spark, node).where("seq > 1000000").count() == 0
    assert read(spark, node, from_seq="latest").count() == 0
    assert read(spark, node).where("topic = 'orders' and due_ms is not null").count() == 60
    assert read(spark, node, topic="no.such").count() == 0


@pytest.mark.parametrize("what", ["log", "queue", "pending"])
@pytest.mark.spark
def test_a_filter_of_one_scan_takes_no_rows_from_another(
    spark: SparkSession, node: RunningNode, what: str
) -> None:
    """All scans of a DataFrame share one plan in Spark, those of one query and those of later queries."""
    send(node.endpoint, 50)
    send_due_now(node.endpoint, 10)
    node.run(node.broker.compact())
    frame = read(spark, node, read=what, **({"topic": "orders"} if what == "queue" else {})).select("seq")
    seqs = sorted(row.seq for row in frame.collect())
    low, high = frame.where(f"seq < {seqs[4]}"), frame.where(f"seq >= {seqs[4]}")
    assert low.count() == 4 and frame.count() == len(seqs)
    assert low.union(high).count() == high.union(low).count() == len(seqs)
    assert low.union(frame).count() == 4 + len(seqs)


@pytest.mark.spark
def test_ranges_divide_the_log_into_parts_of_equal_size(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 100)
    rows = read(spark, node, read="ranges", rows_per_partition=40, from_seq=1, to_seq=101).collect()
    assert sorted((r.from_seq, r.to_seq) for r in rows) == [(1, 34), (34, 67), (67, 101)]


@pytest.mark.smoke
@pytest.mark.spark
def test_topic_is_read_in_queue_order(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 30)
    frame = read(spark, node, read="queue", topic="orders")
    assert frame.columns == READ_SCHEMA.names
    rows = frame.collect()
    assert sorted(bytes(row.body).decode() for row in rows) == sorted(f"now {i}" for i in range(30))
    assert len({(row.queue_id, row.queue_offset) for row in rows}) == 30
    one = frame.where("queue_id = 1 and queue_offset >= 2")
    assert one.count() == len([r for r in rows if r.queue_id == 1 and r.queue_offset >= 2])
    assert read(spark, node, read="queue", topic="orders", columns="seq", queue_id=1).columns == ["seq"]


@pytest.mark.spark
def test_missing_rows_and_topics_are_refused(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 10)
    with pytest.raises(OutOfRange, match="the log ends at"), spark_errors():
        read(spark, node, to_seq=10**6).count()
    with pytest.raises(OutOfRange, match="start at 'first'"), spark_errors():
        read(spark, node, from_seq=0).count()
    with pytest.raises(NotFound, match=r"option topic='no\.such'"), spark_errors():
        read(spark, node, read="queue", topic="no.such").count()
    with pytest.raises(SetupError, match="option max_rows_per_batch: only for streams"), spark_errors():
        read(spark, node, max_rows_per_batch=5).count()


@pytest.mark.smoke
@pytest.mark.spark
def test_a_schema_names_the_columns_that_are_fetched(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 10)
    reader = spark.read.format("timeball").option("endpoint", node.endpoint)
    rows = reader.schema("topic string, seq bigint").load().where("seq between 6 and 10").collect()
    assert [(row.topic, row.seq) for row in rows] == [("orders", seq) for seq in range(6, 11)]
    for wrong, said in (
        ("seq string", "column seq: name some"),
        ("colour string", "column colour: name some"),
    ):
        with pytest.raises(SetupError, match=said), spark_errors():
            reader.schema(wrong).load().count()
    with pytest.raises(SetupError, match=r"leave it out: struct<body:binary>"), spark_errors():
        reader.schema("seq bigint").option("columns", "body").load().count()


def test_a_schema_without_an_option_is_refused() -> None:
    """A table of Spark's catalog is queried so, whatever its options say."""
    some = StructType([StructField("seq", LongType())])
    with pytest.raises(SetupError, match="write CREATE TEMPORARY VIEW"):
        TimeballDataSource({}).reader(some)
    assert isinstance(TimeballDataSource({"endpoint": DEFAULT_ENDPOINT}).reader(some), LogReader)
    assert isinstance(TimeballDataSource({}).reader(TimeballDataSource({}).schema()), LogReader)


@pytest.mark.spark
def test_sql_reads_the_log_and_a_topic_as_temporary_views(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 10)
    send_due_now(node.endpoint, 5)
    options = f"USING timeball OPTIONS (endpoint '{node.endpoint}', read 'queue', topic 'orders')"
    some = f"USING timeball OPTIONS (endpoint '{node.endpoint}', columns 'seq,topic', startingOffsets 'earliest')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders_now {options}")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW promised {some}")
    assert [row[0] for row in spark.sql("SELECT count(*) FROM orders_now").collect()] == [5]
    assert spark.table("promised").columns == ["seq", "topic"]
    rows = spark.sql("SELECT count(*) FROM promised WHERE seq BETWEEN 1 AND 10").collect()
    assert [row[0] for row in rows] == [10]
    with pytest.raises(SetupError, match="write CREATE TEMPORARY VIEW"), spark_errors():
        spark.sql(f"CREATE TABLE orders_table {options}")


@pytest.mark.smoke
@pytest.mark.spark
def test_the_pending_table_of_any_version(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    assert read(spark, node, read="pending").count() == 0
    send(node.endpoint, 600)
    node.run(node.broker.compact())
    version = broker.status().table.version
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    newest, before = DeltaTable(broker.status().table.uri).history(2)
    between_ms = (newest["timestamp"] + before["timestamp"]) // 2
    now = read(spark, node, read="pending")
    assert now.columns == TABLE_SCHEMA.names
    assert now.count() == 700
    assert read(spark, node, read="pending", version=version).count() == 600
    assert read(spark, node, read="pending", timestamp=between_ms).count() == 600
    history = read(spark, node, read="history", columns="version,at_ms,job").orderBy("version").collect()
    assert [(row.version, row.job) for row in history[-2:]] == [
        (version, "compact"),
        (version + 1, "compact"),
    ]
    assert [row.at_ms for row in history[-2:]] == [before["timestamp"], newest["timestamp"]]
    middle = now.agg(f.percentile_approx("due_ms", 0.5)).collect()[0][0]
    assert now.where(f"due_ms < {middle}").count() + now.where(f"due_ms >= {middle}").count() == 700
    assert read(spark, node, read="pending", columns="due_ms,seq").columns == ["due_ms", "seq"]
    orders = read(spark, node, read="pending", topic="orders")
    hundredth = sorted(row.seq for row in orders.select("seq").collect())[99]
    assert orders.where(f"seq < {hundredth}").count() == 99


@pytest.mark.smoke
@pytest.mark.spark
def test_the_ledger(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    send_due_now(node.endpoint, 5)
    with pytest.raises(NotFound, match=r"no Delta table at .*ledger"), spark_errors():
        read(spark, node, read="ledger").count()
    status = broker.status()
    ledger.extend(
        SparkEngine(spark), node.endpoint, sibling(status.table.uri, "ledger"), status.log.durable_seq
    )
    events = read(spark, node, read="ledger")
    assert events.columns == EVENT_SCHEMA.names
    counts = {
        row.event: row["count"] for row in events.where("topic = 'orders'").groupBy("event").count().collect()
    }
    assert counts == {"accepted": 5, "released": 5}
    assert read(spark, node, read="ledger", version=0).count() == 0
    with (
        pytest.raises(SetupError, match="option columns: no column 'colour' when read=ledger"),
        spark_errors(),
    ):
        read(spark, node, read="ledger", columns="colour").count()


def test_a_write_stays_in_one_group(tmp_path: Path) -> None:
    """Numbers that a task reserves are of the group where the driver attaches, whatever node answers next."""
    with two_groups(tmp_path) as groups:
        one, g2 = groups.one.settings.port, f"grpc://127.0.0.1:{groups.other.settings.port}#g2"

        def endpoint(**options: str) -> str:
            return pin_to_one_group(write_options({"endpoint": groups.endpoint, **options})).endpoint

        assert endpoint() == groups.endpoint, "of one group as it was named"
        groups.add()
        assert endpoint() == f"grpc://127.0.0.1:{one}#g1"
        assert endpoint(group="g2") == f"{groups.endpoint}#g2"
        assert endpoint(endpoint=g2) == g2
        with pytest.raises(SetupError, match="option group='g1': the endpoint is confined to the group 'g2'"):
            endpoint(endpoint=g2, group="g1")
