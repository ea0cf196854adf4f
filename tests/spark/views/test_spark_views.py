"""Tests of timeball.spark.views.spark_views: Spark and DuckDB give the same answers to the same queries."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode, running_node
from tests.spark.traffic import send, send_due_now
from tests.written_again import write_again

from timeball.model.config import MIB
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive, ledger
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.options import write_options
from timeball.spark.source.scheduled_writer import ScheduledTask, attach_all
from timeball.spark.table_store import Due, sibling
from timeball.spark.views import due_histogram, spark_views
from timeball.spark.views.duckdb_session import SqlSession, view_columns
from timeball.spark.views.due_histogram import Load, Unit, share_of_difference
from timeball.spark.views.snapshot import Snapshot

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

QUESTIONS = [
    "select seq, topic, due_ms, accepted_ms, place from pending order by seq",
    "select topic, place, count(*) as n, min(due) as first_due from pending group by topic, place order by 1, 2",
    "select seq, topic, queue_id, properties, unique_key from pending where place <> 'table' order by seq",
    "select count(*) as n, sum(due_ms - accepted_ms) as ahead, count(distinct bucket) as b"
    " from (select *, date_trunc('hour', due) as bucket from pending)",
    "select count(*) as n, min(seq) as low, max(seq) as high, min(born) as born from pending_table",
    "select event, first_seq, rows, topic, due_ms, at_ms, lateness_ms, queue_id, attempt, event_seq, happened"
    " from ledger order by event_seq, first_seq",
    "select state, count(*) as n, count(topic) as topics, max(attempts) as attempts"
    " from scheduled group by state order by state",
    "select * from scheduled order by seq",
    "select kind, count(*) as n, max(stored) as newest from log group by kind order by kind",
    "select p.topic, count(*) as n from scheduled p join pending w on p.seq = w.seq and p.due = w.due"
    " where p.state = 'waiting' group by p.topic having count(*) > 0 order by 1",
]


@pytest.fixture(scope="module")
def busy_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Messages in all places and states: compacted, bulk, tail, level, released, cancelled, written again."""
    data = tmp_path_factory.mktemp("views") / "data"
    with running_node(data, compact_rows=0, segment_bytes=MIB) as node:
        send(node.endpoint, 10)  # 2..11
        node.run(node.broker.compact())
        options = write_options({"endpoint": node.endpoint})
        due = [node.broker.status()["now_ms"] + 9 * DAY_MS] * 5  # type: ignore[operator]
        rows = pa.table({"topic": ["bulk"] * 5, "body": ["b"] * 5, "due_ms": due})
        attach_all([ScheduledTask(options).write(iter(rows.to_batches()))], options, "job", 0)
        send_due_now(node.endpoint, 3)
        level = {"topic": ["later"], "body": [b"level"], "delay_level": pa.array([18], pa.int32())}
        node.run(node.broker.send(pa.record_batch(level)))
        with node.client() as ball:
            tail = [ball.send("mail", b"tail", after="1d").seq for _ in range(3)]
            ball.cancel(ids=[ball.send("mail", b"gone", after="1d").id])
            ball.send("plain", b"at once")
        node.run(node.broker.cancel(seqs=[4]))
        write_again(node, tail[0])
        yield node


def ask_duckdb(node: RunningNode, questions: list[str]) -> list[list[tuple[Any, ...]]]:
    """The rows of the answers to `questions`, from a DuckDB session."""
    with SqlSession(node.endpoint) as session:
        result = [session.run(text).rows.read_all() for text in questions]
    return [
        list(zip(*[column.to_pylist() for column in rows.columns], strict=True)) if rows.num_rows else []
        for rows in result
    ]


def to_plain(value: Any) -> Any:
    """Convert values that the two engines return in different types."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, Decimal):
        return int(value)
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def test_the_same_questions_have_the_same_answers(spark: SparkSession, busy_node: RunningNode) -> None:
    version = spark_views.register(spark, busy_node.endpoint, keep=True)
    with SqlSession(busy_node.endpoint) as session:
        assert msgspec.structs.replace(version, now_ms=0) == msgspec.structs.replace(
            session.version, now_ms=0
        )
    for text, expected in zip(QUESTIONS, ask_duckdb(busy_node, QUESTIONS), strict=True):
        result = [tuple(to_plain(value) for value in row) for row in spark.sql(text).collect()]
        assert result == [tuple(to_plain(value) for value in row) for row in expected], text
        assert result, f"a question without an answer says nothing: {text}"
    spark.catalog.clearCache()


def test_older_version_is_registered_under_a_prefix(spark: SparkSession, busy_node: RunningNode) -> None:
    spark_views.register(spark, busy_node.endpoint)
    then = spark_views.register(spark, busy_node.endpoint, version=1, prefix="then_")
    assert then.table == 1
    count = "select count(*) as n from {}pending"
    with SqlSession(busy_node.endpoint, version=1) as session:
        before = session.run(count.format("")).rows.read_all().to_pylist()
    assert [row.asDict() for row in spark.sql(count.format("then_")).collect()] == before
    # The control: the views of now are others, and were not replaced.
    assert [row.asDict() for row in spark.sql(count.format("")).collect()] != before


def test_bodies_are_left_out_where_none_are_wanted(spark: SparkSession, busy_node: RunningNode) -> None:
    assert "body" not in spark_views.waiting_frame(spark, busy_node.endpoint, bodies=False).columns


def ask_spark(spark: SparkSession, questions: list[str]) -> list[list[tuple[Any, ...]]]:
    """The rows of the answers to `questions`, from the views that are registered in Spark."""
    return [[tuple(map(to_plain, row)) for row in spark.sql(text).collect()] for text in questions]


@pytest.mark.slow
def test_views_with_lagging_ledger_have_each_row_once_and_the_archive(
    spark: SparkSession, busy_node: RunningNode
) -> None:
    about_events = [text for text in QUESTIONS if "from ledger" in text or "select * from scheduled" in text]
    passed = ["select seq, topic, kind, body, stored, day from archive order by seq"]
    before = ask_duckdb(busy_node, about_events)
    with Endpoint(busy_node.endpoint) as broker:
        status = broker.status()
    places = sibling(status.table.uri, "ledger"), sibling(status.table.uri, "archive")
    try:
        ledger.extend(SparkEngine(spark), busy_node.endpoint, places[0], status.log.durable_seq - 4)
        archive.extend(SparkEngine(spark), busy_node.endpoint, places[1], status.log.durable_seq)
        version = spark_views.register(spark, busy_node.endpoint)
        assert version.ledger is not None and version.archive is not None
        assert ask_duckdb(busy_node, about_events) == before
        assert ask_spark(spark, about_events) == [
            [tuple(map(to_plain, row)) for row in rows] for rows in before
        ]
        (kept,) = ask_duckdb(busy_node, passed)
        assert ask_spark(spark, passed) == [kept]
        assert [row[1] for row in kept] == ["orders"] * 3 + ["plain"]
        assert view_columns()["archive"] == spark.table("archive").columns
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


# ---- a due load ---------------------------------------------------------------------------------------------


def cells(load: Load) -> Counter[tuple[str, int]]:
    """The rows of each topic and second."""
    names = [load.topics[code] for code in load.topic.tolist()]
    return Counter(dict(zip(zip(names, load.second.tolist()), load.rows.tolist(), strict=True)))


@pytest.mark.parametrize("by_topic", [False, True])
def test_spark_and_duckdb_count_the_same_load(
    spark: SparkSession, node: RunningNode, broker: Endpoint, by_topic: bool
) -> None:
    """Messages are in the table, in the tail, cancelled in either, and written again. Due times may be bounded."""
    send(node.endpoint, 400)
    write_again(node, 7, 8)
    node.run(node.broker.compact())
    send(node.endpoint, 50, topic="mail")
    with SqlSession(node.endpoint) as session:
        (last,) = session.run("select max(seq) as seq from pending").rows.read_all().to_pylist()
    node.run(node.broker.cancel(seqs=[2, 3, 4, last["seq"]]))
    write_again(node, 9)
    shot = Snapshot.pin(broker, upcoming=True)
    begin_ms = shot.now_ms + 30 * DAY_MS
    bounds: list[Due] = [(None, None), (begin_ms + 10 * HOUR_MS, begin_ms + 20 * HOUR_MS)]
    for due in bounds:
        with SqlSession(node.endpoint, snapshot=shot, bodies=False, due=due) as session:
            by_duckdb = session.due_load(by_topic=by_topic)
        by_spark = spark_views.due_load(spark, node.endpoint, shot, by_topic=by_topic, due=due)
        assert cells(by_spark) == cells(by_duckdb) and by_duckdb.total
    whole = spark_views.due_load(spark, node.endpoint, shot)
    assert whole.total == 446
    # The control: with one more gone, the two differ.
    node.run(node.broker.cancel(seqs=[100]))
    after = spark_views.due_load(spark, node.endpoint, Snapshot.pin(broker, upcoming=True))
    assert share_of_difference(whole, after, Unit.SECOND) > 0


@pytest.mark.smoke
def test_too_many_seconds_are_counted_by_the_minute(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_histogram, "CELLS_MAX", 20)
    load = spark_views.count_on_spark(spark.range(600).selectExpr("id * 1000 + 5 as due_ms"))
    result = load.width_s, load.second.tolist(), load.rows.tolist()
    assert result == (60, list(range(0, 600, 60)), [60] * 10)
    rows = spark.range(15).selectExpr("id * 1000 as due_ms", "'t' as topic")
    fine = spark_views.count_on_spark(rows, by_topic=True)
    assert (fine.width_s, fine.topics, fine.total) == (1, ("t",), 15)
    assert fine.second.tolist() == list(range(15))
