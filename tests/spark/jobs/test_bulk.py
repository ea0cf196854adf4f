"""Tests of timeball.spark.jobs.bulk: all rows of a DataFrame are scheduled once, or none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from tests.node_fixture import RunningNode
from tests.spark.traffic import attached_seqs

from timeball.model import rules
from timeball.model.errors import InvalidMessage
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import bulk
from timeball.spark.jobs.bulk import Columns, Survey, plan_tasks
from timeball.spark.jobs.campaign import Campaign

COLUMNS = Columns(due="at", topic="to", body="text", keys="id")
ROWS = 1_000
BYTES = bulk.TASK_BYTES
INVALID = {0: "no topic", 500: "no due time"}  # row of each thousand -> its fault


def make_rows(spark: SparkSession, now_ms: int, rows: int = ROWS) -> DataFrame:
    """Make rows due within three days. The rows INVALID of each thousand are invalid."""
    due = f"timestamp_millis({now_ms + HOUR_MS} + (id * 7919) % {3 * DAY_MS})"
    return spark.range(0, rows, numPartitions=3).selectExpr(
        "if(id % 1000 = 0, 'not good', 'mail') as to",
        f"if(id % 1000 = 500, null, {due}) as at",
        "concat('dear ', id) as text",
        "concat('k', id) as id",
    )


def run(spark: SparkSession, node: RunningNode, frame: DataFrame, **options: object) -> bulk.BulkReport:
    """Run the job, by default as the campaign `spring`."""
    return bulk.run(spark, frame, node.endpoint, **{"columns": COLUMNS, "campaign": "spring", **options})


# ---- dividing rows among tasks ----------------------------------------------------------------------------


def survey(rows: list[int], row_bytes: int = 10) -> Survey:
    """Make a survey with these numbers of rows, in every third minute."""
    counts = np.array(rows, np.int64)
    return Survey(np.arange(len(rows), dtype=np.int64) * 3, counts, counts * row_bytes, {})


@given(st.lists(st.integers(1, 5_000), max_size=60), st.integers(50, 2_000))
def test_tasks_are_even_and_spans_are_contiguous(rows: list[int], task_rows: int) -> None:
    counts = survey(rows)
    plan = plan_tasks(counts, task_rows, BYTES)
    assert list(plan.first) == [0, *np.cumsum(plan.tasks)[:-1]][: len(plan.first)]
    assert set(plan.minute) <= set(counts.minute) and list(plan.minute) == sorted(set(plan.minute))
    if rows:
        assert plan.minute[0] == counts.minute[0]
        span_of_minute = np.searchsorted(plan.minute, counts.minute, side="right") - 1
        rows_per_task = np.bincount(span_of_minute, counts.rows) / plan.tasks
        assert rows_per_task.max() <= max(2 * task_rows, 1)
        large_minutes = (counts.rows > task_rows).sum()
        assert plan.total <= 2 * sum(rows) / task_rows + 2 * large_minutes + 1


def test_a_large_minute_is_a_span_with_several_tasks() -> None:
    plan = plan_tasks(survey([10, 1_000, 10, 10]), 100, BYTES)
    assert plan.minute.tolist() == [0, 3, 6] and plan.tasks.tolist() == [1, 10, 1]


def test_the_bytes_of_rows_limit_a_task_too() -> None:
    assert plan_tasks(survey([10] * 10, row_bytes=100), 1_000, 1_000).total == 10
    assert plan_tasks(survey([10] * 10), 1_000, BYTES).total == 1


def test_there_are_at_most_twice_tasks_max_tasks() -> None:
    assert plan_tasks(survey([10_000] * 3_000), 10, BYTES).total <= 2 * bulk.TASKS_MAX


# ---- with Spark -------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_dry_run_reports_all_counts_and_writes_nothing(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    before = broker.status()
    folder = Path(before.table.uri).parent
    report = run(spark, node, make_rows(spark, before.now_ms), dry_run=True)
    assert (report.dry_run, report.rows, report.rejected) == (True, 998, 2)
    assert report.reasons == {bulk.NO_DUE_TIME: 1, rules.RULES[0].text: 1}
    assert report.load.total == 998 and report.load.width_s == 60
    assert report.payload_bytes == sum(len(f"dear {i}k{i}") for i in range(ROWS) if i not in INVALID)
    assert broker.status().log.next_seq == before.log.next_seq
    assert broker.campaigns() == [] and not (folder / "rejects").exists()
    assert not list(folder.rglob("*.parquet"))


@pytest.mark.spark
def test_a_key_with_a_blank_is_rejected_and_a_list_of_keys_is_joined_with_blanks(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    frame = make_rows(spark, broker.status().now_ms).where("id in ('k7', 'k8')")
    texts = frame.withColumn("id", f.when(f.col("id") == "k7", f.lit("customer 4")).otherwise(f.col("id")))
    report = run(spark, node, texts, campaign="texts")
    assert (report.rows, report.rejected) == (1, 1)
    report = run(spark, node, frame.withColumn("id", f.array(f.lit("all"), "id")), campaign="lists")
    assert (report.rows, report.rejected) == (2, 0)
    table = DeltaTable(broker.status().table.uri).to_pyarrow_table(columns=["keys"])
    assert sorted(table.column("keys").to_pylist()) == ["all k7", "all k8", "k8"]


@pytest.mark.smoke
@pytest.mark.spark
def test_valid_rows_are_scheduled_in_one_attach_and_invalid_rows_go_to_the_rejects(
    spark: SparkSession, node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several tasks. A second call under the same id changes nothing. Another id schedules all rows again."""
    monkeypatch.setattr(bulk, "TASK_ROWS", 300)
    before = broker.status()
    frame = make_rows(spark, before.now_ms)
    report = run(spark, node, frame)
    assert (report.rows, report.rejected, report.repeated) == (998, 2, False)
    assert report.written_bytes > 0 and report.amplification is not None and report.rows_per_s > 0
    assert broker.status().table.version == before.table.version + 1
    assert len(set(attached_seqs(broker))) == 998
    table = DeltaTable(before.table.uri).to_pyarrow_table(columns=["keys", "body", "due_ms", "topic"])
    rows = {row["keys"]: row for row in table.to_pylist()}
    assert set(rows) == {f"k{i}" for i in range(ROWS) if i not in INVALID}
    assert rows["k7"] == {
        "keys": "k7",
        "body": b"dear 7",
        "topic": "mail",
        "due_ms": before.now_ms + HOUR_MS + 7 * 7919,
    }
    assert report.rejects_uri is not None
    rejects = DeltaTable(report.rejects_uri).to_pyarrow_table().to_pylist()
    assert {(row["campaign"], row["reason"], json.loads(row["row"])["id"]) for row in rejects} == {
        ("spring", rules.RULES[0].text, "k0"),
        ("spring", bulk.NO_DUE_TIME, "k500"),
    }
    repeated = run(spark, node, frame)
    assert (repeated.repeated, repeated.rows, repeated.files) == (True, 998, report.files)
    assert len(attached_seqs(broker)) == 998
    attached = Campaign(broker, "spring").read_state()
    assert (attached.state, attached.rows) == ("running", 998) and len(attached.ranges) > 2
    run(spark, node, frame, campaign="summer", rejects_uri=str(Path(before.table.uri).parent / "bad"))
    assert len(set(attached_seqs(broker))) == 2 * 998
    assert len(DeltaTable(report.rejects_uri).to_pyarrow_table()) == 2


@pytest.mark.spark
def test_a_job_that_was_killed_after_its_rejects_or_its_attach_continues(
    spark: SparkSession, node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third call, all rejects and all messages are there once."""
    frame = make_rows(spark, broker.status().now_ms)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "partition_by_task", die)
        with pytest.raises(KeyboardInterrupt):
            run(spark, node, frame)
    assert attached_seqs(broker) == []
    with monkeypatch.context() as patch:
        patch.setattr(Campaign, "read_state", die)
        patch.setattr(Campaign, "find_state", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            run(spark, node, frame)
    report = run(spark, node, frame)
    assert (report.repeated, report.rows) == (True, 998)
    assert len(attached_seqs(broker)) == 998
    assert len(DeltaTable(str(Path(broker.status().table.uri).parent / "rejects")).to_pyarrow_table()) == 2


@pytest.mark.spark
def test_an_input_without_valid_rows_makes_an_empty_campaign(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    frame = make_rows(spark, broker.status().now_ms, rows=1)
    report = run(spark, node, frame)
    assert (report.rows, report.rejected, report.files) == (0, 1, 0)
    assert run(spark, node, frame).repeated
    assert attached_seqs(broker) == []


@pytest.mark.spark
def test_unusable_input_is_refused_before_anything_is_written(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    frame = make_rows(spark, broker.status().now_ms)
    with pytest.raises(InvalidMessage, match="column when: there is none"):
        run(spark, node, frame, columns=Columns(due="when", topic_name="t"))
    with pytest.raises(InvalidMessage, match="campaign 'a b'"):
        run(spark, node, frame, campaign="a b")
    assert broker.campaigns() == []
