"""Tests of timeball.spark.jobs.replay."""

from __future__ import annotations

import dataclasses
import itertools
import math

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as f
from tests.node_fixture import RunningNode, eventually
from tests.spark.traffic import log_rows, send, send_due_now, visible

from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange
from timeball.model.message import Kind, decode_properties, encode_properties
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive, replay
from timeball.spark.jobs.campaign import Campaign
from timeball.spark.jobs.replay import (
    REPLAY_OF,
    ReplayPlan,
    ReplayReport,
    Sources,
    Window,
    sum_plans,
    sum_reports,
)
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.spark_api import spark_schema
from timeball.spark.table_store import sibling

WINDOW = Window(from_ms=1_000, until_ms=2_000, start_ms=50_000)
SOURCES = Sources(table=None, since_ms=0, mark=1, end=9, now_ms=10_000, settled_before_ms=9_000)


# ---- the window -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"until_ms": 1_000}, "the window is empty"),
        ({"stretch": -0.5}, "stretch -0.5"),
        ({"stretch": math.inf}, "stretch inf"),
        ({"stretch": math.nan}, "stretch nan"),
        ({"start_ms": -1}, "before 1970"),
    ],
)
def test_invalid_window_is_refused(changes: dict[str, float], message: str) -> None:
    WINDOW.check()
    with pytest.raises(InvalidDelay, match=message):
        msgspec.structs.replace(WINDOW, **changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"from_ms": 999},
        {"until_ms": 2_001},
        {"start_ms": 50_001},
        {"stretch": 2.0},
        {"topics": ("a",)},
        {"to_topic": "b"},
        {"by": "due"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_arguments_give_another_job_id(changes: dict[str, object]) -> None:
    assert WINDOW.job_id == Window(from_ms=1_000, until_ms=2_000, start_ms=50_000).job_id
    assert msgspec.structs.replace(WINDOW, **changes).job_id != WINDOW.job_id


@pytest.mark.parametrize(
    ("window", "sources", "message"),
    [
        (WINDOW, {"since_ms": 1_001}, "is known from 1001 on"),
        (WINDOW, {"now_ms": 1_999}, "only over when .* now up to 1999"),
        (msgspec.structs.replace(WINDOW, by="due"), {"settled_before_ms": 1_500}, "now up to 1500"),
        (msgspec.structs.replace(WINDOW, start_ms=limits.DELAY_MS_MAX + 9_001), {}, "days from now"),
    ],
)
def test_a_window_that_the_sources_do_not_cover_or_that_is_too_far_ahead_is_refused(
    window: Window, sources: dict[str, int], message: str
) -> None:
    replay.check_covered(WINDOW, dataclasses.replace(SOURCES, since_ms=1_000, now_ms=2_000))
    with pytest.raises((OutOfRange, InvalidDelay), match=message):
        replay.check_covered(window, dataclasses.replace(SOURCES, **sources))


@given(st.integers(1, 10**12))
def test_a_window_is_shown_in_at_most_bars_max_bars(span_ms: int) -> None:
    width = replay.width_ms(span_ms)
    assert -(-span_ms // width) <= replay.BARS_MAX


# ---- the new messages -------------------------------------------------------------------------------------


def replay_rows(
    spark: SparkSession, window: Window, batch: pa.RecordBatch, count: int | None = None
) -> list[Row]:
    """Convert the rows of the log that are in the window to new messages, sorted by due time and topic."""
    rows = [tuple(row.values()) for row in batch.to_pylist()]
    log = spark.createDataFrame(rows, spark_schema(batch.schema))
    result = replay.scheduled_rows(replay.select_window(log, window), window, count).collect()
    return sorted(result, key=lambda row: (row.due_ms, row.topic))


@pytest.mark.spark
def test_due_times_are_moved_stretched_and_rounded_up(spark: SparkSession) -> None:
    passed_ms = [999, 1_000, 1_001, 1_500, 1_999, 2_000]
    batch = log_rows(Kind.MESSAGE, 6, topic="t", store_ms=passed_ms, unique_key="u", body=b"x")
    due_ms_by_stretch = {
        1.0: [50_000, 50_001, 50_500, 50_999],
        2.5: [50_000, 50_003, 51_250, 52_498],
        0.3: [50_000, 50_001, 50_150, 50_300],
        0.0: [50_000] * 4,
    }
    for stretch, due_ms in due_ms_by_stretch.items():
        window = msgspec.structs.replace(WINDOW, stretch=stretch)
        assert [row.due_ms for row in replay_rows(spark, window, batch)] == due_ms
        assert due_ms[-1] <= window.end_ms


@pytest.mark.spark
def test_window_by_due_time_selects_late_messages_by_due_time(spark: SparkSession) -> None:
    batch = log_rows(
        Kind.RELEASE,
        3,
        topic=["late", "early", "at once"],
        store_ms=[2_500, 1_500, 1_600],
        due_ms=[1_100, 900, None],
    )
    by_due = msgspec.structs.replace(WINDOW, by="due")
    assert [(row.topic, row.due_ms) for row in replay_rows(spark, by_due, batch)] == [
        ("late", 50_100),
        ("at once", 50_600),
    ]
    assert [row.topic for row in replay_rows(spark, WINDOW, batch)] == ["early", "at once"]


@pytest.mark.spark
def test_messages_of_these_topics_are_selected_and_get_the_new_topic(spark: SparkSession) -> None:
    """By default, topics of retries and dead letters are left out."""
    names = ["a", "b", "%RETRY%g", "%DLQ%g"]
    batch = log_rows(Kind.MESSAGE, 4, topic=names, store_ms=[1_000, 1_001, 1_002, 1_003])

    def topics(**changes: object) -> list[str]:
        return [row.topic for row in replay_rows(spark, msgspec.structs.replace(WINDOW, **changes), batch)]

    assert topics() == ["a", "b"]
    assert topics(topics=("b", "%DLQ%g")) == ["b", "%DLQ%g"]
    assert topics(to_topic="test") == ["test", "test"]


@pytest.mark.spark
def test_replayed_message_keeps_its_fields_and_names_the_old_id(spark: SparkSession) -> None:
    """REPLAY_OF is left out if the properties would be too long. An unterminated property is terminated before it."""
    full = encode_properties({"a": "x" * (limits.PROPERTIES_BYTES_MAX - 3)})
    batch = log_rows(
        Kind.MESSAGE,
        4,
        topic="t",
        store_ms=[1_000, 1_001, 1_002, 1_003],
        body=b"packed",
        properties=[None, "a\x011", full, "a\x011\x02"],
        unique_key=["u0", "u1", "u2", None],
        tag="red",
        keys="k1 k2",
        queue_id=3,
        flag=7,
        sys_flag=1 | 0x4 | 0x8,
        reconsume_times=2,
    )
    rows = replay_rows(spark, WINDOW, batch)
    assert {(row.tag, row.keys, row.queue_id, row.flag, bytes(row.body)) for row in rows} == {
        ("red", "k1 k2", 3, 7, b"packed")
    }
    assert [row.sys_flag for row in rows] == [1] * 4, "still packed, but no transaction"
    assert "unique_key" not in rows[0].asDict() and "reconsume_times" not in rows[0].asDict()
    assert [decode_properties(rows[n].properties) for n in (0, 1, 3)] == [
        {REPLAY_OF: "u0"},
        {"a": "1", REPLAY_OF: "u1"},
        {"a": "1"},
    ]
    assert rows[2].properties == full


@pytest.mark.spark
def test_many_rows_are_written_by_several_tasks_in_due_order(spark: SparkSession) -> None:
    batch = log_rows(Kind.MESSAGE, 900, topic="t", store_ms=list(range(1_000, 1_900)))
    rows = [tuple(row.values()) for row in batch.to_pylist()]
    log = spark.createDataFrame(rows, spark_schema(batch.schema))
    frame = replay.scheduled_rows(replay.select_window(log, WINDOW), WINDOW, 3 * replay.ROWS_PER_TASK)
    by_task = frame.groupBy(f.spark_partition_id()).agg(
        f.min("due_ms").alias("low"), f.max("due_ms").alias("high")
    )
    spans = sorted((row.low, row.high) for row in by_task.collect())
    assert 1 < len(spans) <= 3
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(spans))


@pytest.mark.spark
@pytest.mark.parametrize("stretch", [1.0, 0.0])
def test_messages_with_the_same_due_time_are_in_one_task_in_the_order_of_the_log(
    spark: SparkSession, stretch: float
) -> None:
    """Even if several tasks have read them. The task then numbers them in this order."""
    bodies = [b"%d" % i for i in range(90)]
    batch = log_rows(Kind.MESSAGE, 90, topic="t", store_ms=[1_000 + i // 30 for i in range(90)], body=bodies)
    rows = [tuple(row.values()) for row in batch.to_pylist()]
    log = spark.createDataFrame(rows[::-1], spark_schema(batch.schema)).repartition(4)
    window = msgspec.structs.replace(WINDOW, stretch=stretch)
    frame = replay.scheduled_rows(replay.select_window(log, window), window, 90)
    result = frame.withColumn("task", f.spark_partition_id()).collect()
    assert len({row.task for row in result}) == 1
    assert [bytes(row.body) for row in result] == bodies


# ---- against a broker -------------------------------------------------------------------------------------


def window_of(node: RunningNode, topic: str, **changes: object) -> Window:
    """Make a window of all messages of a topic that have passed until now, to be replayed in a day."""
    with node.client() as ball:
        now_ms = ball.status()["now_ms"]
        eventually(lambda: ball.status()["now_ms"] > now_ms + 1, "a moment later")
    hour = Window(
        from_ms=now_ms - limits.HOUR_MS,
        until_ms=now_ms + 1,
        start_ms=now_ms - limits.HOUR_MS + limits.DAY_MS,
        topics=(topic,),
    )
    return msgspec.structs.replace(hour, **changes)


def scheduled(broker: Endpoint) -> list[dict[str, object]]:
    """Read all rows of the pending table, sorted by number."""
    table = DeltaTable(broker.status().table.uri).to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda row: row["seq"])


@pytest.mark.spark
def test_a_window_is_scheduled_again_once(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    """Some messages are in the archive, others only in the log. Pending and cancelled messages have not passed."""
    send(node.endpoint, 7)
    send_due_now(node.endpoint, 3)
    uri = sibling(broker.status().table.uri, "archive")
    archive.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    send_due_now(node.endpoint, 4, "news")
    with node.client() as ball:
        ball.send("orders", b"at once", tag="red")
        ball.cancel(ball.send("orders", b"never", after="1d").id)
        window = window_of(node, "orders")
        plan = replay.plan(spark, node.endpoint, window)
        assert (plan.rows, plan.topics, plan.overdue) == (4, {"orders": 4}, 0)
        assert sum(plan.curve.values()) == 4 and scheduled(broker) == []
        report = replay.run(spark, node.endpoint, window, planned=plan)
        assert (report.rows, report.repeated, report.job_id) == (4, False, window.job_id)
        rows = scheduled(broker)
        log = ball.read_log(1, broker.status().log.durable_seq).read_all().to_pylist()
        is_passed = [row["kind"] in (Kind.MESSAGE, Kind.RELEASE) and row["topic"] == "orders" for row in log]
        passed = sorted(itertools.compress(log, is_passed), key=lambda row: row["store_ms"])
        shift_ms = window.start_ms - window.from_ms
        assert [(row["due_ms"], row["body"], row["tag"]) for row in rows] == [
            (row["store_ms"] + shift_ms, row["body"], row["tag"]) for row in passed
        ]
        assert (plan.first_due_ms, plan.last_due_ms) == (rows[0]["due_ms"], rows[-1]["due_ms"])
        assert [seq for first, count in report.ranges for seq in range(first, first + count)] == [
            row["seq"] for row in rows
        ]
    repeated = replay.run(spark, node.endpoint, window)
    assert repeated == msgspec.structs.replace(report, repeated=True) and scheduled(broker) == rows
    progress = Campaign(broker, window.job_id).progress()
    assert (progress.rows, progress.waiting, progress.state) == (4, 4, "running")
    # Control: under another name it is another replay.
    assert replay.run(spark, node.endpoint, window, job_id="once-more").rows == 4
    assert len(scheduled(broker)) == 8


@pytest.mark.spark
def test_after_a_kill_behind_the_attach_the_replay_is_complete_and_after_a_cancel_it_is_refused(
    spark: SparkSession, node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_due_now(node.endpoint, 3)
    window = window_of(node, "orders")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Campaign, "read_state", interrupt)
        patch.setattr(Campaign, "find_state", lambda _: None)
        replay.run(spark, node.endpoint, window)
    assert len(scheduled(broker)) == 3
    repeated = replay.run(spark, node.endpoint, window)
    assert (repeated.rows, repeated.repeated) == (3, True) and len(scheduled(broker)) == 3
    assert Campaign(broker, window.job_id).cancel().cancelled == 3
    with pytest.raises(InvalidMessage, match="was cancelled"):
        replay.run(spark, node.endpoint, window)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.spark
def test_replayed_messages_become_visible_with_replay_of(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    send_due_now(node.endpoint, 5)
    window = window_of(node, "orders", to_topic="again", stretch=0.0)
    window = msgspec.structs.replace(window, start_ms=broker.status().now_ms + 1_500)
    report = replay.run(spark, node.endpoint, window)
    with node.client() as ball:
        eventually(lambda: visible(ball, "again") == 5, "replayed messages are visible")
        first, second = (ball.browse(topic, wait="10s") for topic in ("orders", "again"))
        assert sorted(message.body for message in second) == sorted(message.body for message in first)
        first_ids = {message.id for message in first}
        assert {message.properties[REPLAY_OF] for message in second} == first_ids
        assert not {message.id for message in second} & first_ids
        assert {message.due_ms for message in second} == {window.start_ms}
        assert all(message.store_ms >= message.due_ms for message in second)
    assert report.rows == 5


@pytest.mark.spark
def test_keys_and_tags_with_white_space_are_replayed(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    """RocketMQ's clients may send them, although a user's DataFrame may not have them."""
    sent = {"topic": ["orders"], "body": [b"b"], "keys": ["k1 k\t2"], "tag": ["red "]}
    with node.client() as ball:
        node.run(node.broker.send(pa.record_batch(sent)))
        eventually(lambda: visible(ball, "orders") == 1, "it is visible")
    assert replay.run(spark, node.endpoint, window_of(node, "orders")).rows == 1
    (row,) = scheduled(broker)
    assert (row["keys"], row["tag"]) == ("k1 k\t2", "red ")


@pytest.mark.spark
def test_empty_window_schedules_nothing(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    window = window_of(node, "nothing")
    plan = replay.plan(spark, node.endpoint, window)
    assert (plan.rows, plan.curve, plan.first_due_ms) == (0, {}, None)
    report = replay.run(spark, node.endpoint, window)
    assert (report.rows, report.repeated, report.ranges) == (0, False, [])


def test_a_missing_archive_is_an_error_only_if_its_uri_is_given(node: RunningNode, broker: Endpoint) -> None:
    with pytest.raises(NotFound, match="/nowhere"):
        replay.open_sources(node.endpoint, "/nowhere")
    assert replay.open_sources(node.endpoint).table is None


def plan(rows: int, due_ms: int | None, **topics: int) -> ReplayPlan:
    """Make a plan of one group, with all its rows due at `due_ms`."""
    return ReplayPlan(
        job_id="replay-1", rows=rows, body_bytes=10 * rows, first_due_ms=due_ms, last_due_ms=due_ms, overdue=rows,
        now_ms=rows, width_ms=1_000, curve={} if due_ms is None else {due_ms: rows}, topics=topics,
    )  # fmt: skip


def report(rows: int, *, repeated: bool) -> ReplayReport:
    """Make the report of one group."""
    return ReplayReport(job_id="replay-1", rows=rows, at_ms=5, repeated=repeated, ranges=[(1, rows)])


def test_a_plan_of_several_groups_has_the_sums_of_their_plans() -> None:
    result = sum_plans({"g1": plan(5, 2_000, a=5), "g2": plan(7, 1_000, a=1, b=6), "g3": plan(0, None)})
    assert (result.rows, result.body_bytes, result.overdue, result.now_ms) == (12, 120, 12, 0)
    assert (result.first_due_ms, result.last_due_ms) == (1_000, 2_000)
    assert list(result.curve.items()) == [(1_000, 7), (2_000, 5)]
    assert list(result.topics.items()) == [("a", 6), ("b", 6)]
    assert result.groups and [each.rows for each in result.groups.values()] == [5, 7, 0]


def test_a_replay_of_several_groups_is_repeated_if_no_group_has_scheduled_a_row_now() -> None:
    repeated, new, empty = report(5, repeated=True), report(7, repeated=False), report(0, repeated=False)
    both = sum_reports({"g1": repeated, "g2": new})
    assert (both.rows, both.repeated, both.ranges) == (12, False, [])
    assert sum_reports({"g1": repeated, "g2": empty}).repeated
    assert not sum_reports({"g1": new, "g2": empty}).repeated
