"""The jobs over two groups of a cluster, on Spark: both groups together give the results of one broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import send, send_due_now
from tests.spark.two_groups import TwoGroups, two_groups

from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.spark.endpoint import Endpoint, group_statuses
from timeball.spark.jobs import archive, audit, bulk, ledger, replay
from timeball.spark.jobs.bulk import Columns
from timeball.spark.jobs.campaign import CampaignParts, open_parts
from timeball.spark.jobs.replay import Window
from timeball.spark.run import runner
from timeball.spark.views import spark_views

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[TwoGroups]:
    with two_groups(tmp_path) as result:
        yield result


def run(spark: SparkSession, groups: TwoGroups, folder: Path, *jobs: str) -> None:
    runner.run(jobs, endpoint=groups.endpoint, once=True, checkpoint=str(folder / "checkpoints"), spark=spark)


def test_jobs_and_audit_have_the_messages_of_both_groups(
    spark: SparkSession, groups: TwoGroups, tmp_path: Path
) -> None:
    send(groups.one.endpoint, 50)
    send_due_now(groups.one.endpoint, 10)
    run(spark, groups, tmp_path, "compact", "ledger", "archive")
    assert "group" not in ledger.scheduled_rows(spark, groups.endpoint).columns, (
        "with one group nothing changes"
    )
    assert "group" not in archive.messages(spark, groups.endpoint).columns

    # The second group is added when the jobs' checkpoints have only the first one.
    groups.add()
    send(groups.other.endpoint, 30)
    send_due_now(groups.other.endpoint, 7)
    with groups.other.client() as ball:
        ball.send("orders", "unwanted", after="1h", keys="k")
        ball.cancel(key="k")
    send(groups.one.endpoint, 5)
    run(spark, groups, tmp_path, "compact", "ledger", "archive")

    reported = ledger.scheduled_rows(spark, groups.endpoint).groupBy("group").count().collect()
    assert {row["group"]: row["count"] for row in reported} == {"g1": 65, "g2": 38}
    passed = archive.messages(spark, groups.endpoint).groupBy("group").count().collect()
    assert {row["group"]: row["count"] for row in passed} == {"g1": 10, "g2": 7}
    for node in (groups.one, groups.other):
        with Endpoint(node.endpoint) as broker:
            status = broker.status()
            assert status.table.version > 0 and status.watermark > 30, "each group was compacted"

    report = audit.run(spark, groups.endpoint)
    assert report.ok and report.scope is None
    counts = {
        name: (each.accepted, each.released, each.cancelled, each.pending)
        for name, each in report.groups.items()
    }
    assert counts == {"g1": (65, 10, 0, 55), "g2": (38, 7, 1, 30)}
    assert (report.accepted, report.released, report.cancelled, report.pending) == (103, 17, 1, 85)
    one = audit.run(spark, f"{groups.endpoint}#g2")
    assert (one.accepted, one.groups) == (38, {}) and one.scope is not None

    # Ledgers at a given place, from the kept log. The jobs find both groups from any node.
    elsewhere = f"{tmp_path}/shared/{{group}}/ledger"
    runner.run(
        ["ledger"], endpoint=groups.other.endpoint, once=True, checkpoint=str(tmp_path / "second"), spark=spark,
        options={"ledger": {"uri": elsewhere}},
    )  # fmt: skip
    repeated = audit.run(spark, groups.endpoint, ledger_uri=elsewhere)
    assert repeated.ok and repeated.accepted == 103
    assert [each.scope.ledger_end > 1 for each in repeated.groups.values() if each.scope] == [True, True]

    # A second run adds no event.
    before = events(groups)
    run(spark, groups, tmp_path / "third", "ledger")
    assert events(groups) == before


def events(groups: TwoGroups) -> list[int]:
    """Count the events in the ledger of each group."""
    uris = [sink.uri for sink in ledger.JOB.sinks_by_group(group_statuses(groups.endpoint), None).values()]
    return [DeltaTable(uri).to_pyarrow_table().num_rows for uri in uris]


def people(spark: SparkSession, now_ms: int, rows: int) -> DataFrame:
    """Make rows due within a day, one of which has no topic."""
    due = f"timestamp_millis({now_ms + HOUR_MS} + (id * 7919) % {DAY_MS})"
    return spark.range(0, rows).selectExpr(
        "if(id = 7, 'not good', 'mail') as to", f"{due} as due", "concat('dear ', id) as body"
    )


def test_bulk_divides_rows_among_groups_and_continues_after_a_kill(
    spark: SparkSession, groups: TwoGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.add()
    with Endpoint(groups.endpoint) as broker:
        frame = people(spark, broker.status().now_ms, 400)
    columns = Columns(topic="to")

    def schedule(endpoint: str = groups.endpoint, **more: object) -> bulk.BulkReport:
        return bulk.run(spark, frame, endpoint, columns=columns, campaign="spring", **more)

    planned = schedule(dry_run=True)
    assert (planned.rows, planned.rejected) == (399, 1) and min(planned.groups.values()) > 150

    def die(job: bulk.Job, *args: object) -> None:
        monkeypatch.setattr(bulk.Job, "_write_part", die_now)
        write_part(job, *args)

    def die_now(*_: object) -> None:
        raise KeyboardInterrupt

    write_part = bulk.Job._write_part
    monkeypatch.setattr(bulk.Job, "_write_part", die)
    with pytest.raises(KeyboardInterrupt):
        schedule()
    monkeypatch.setattr(bulk.Job, "_write_part", write_part)
    with open_parts(groups.endpoint, "spring") as parts:
        states = {name: part.read_state().state for name, part in parts.items()}
        assert states == {"g1": "running", "g2": "planned"}, "one part is attached, the other is not"
        assert CampaignParts(parts).progress().state == "planned"

    # A group that is added meanwhile gets no part of the campaign. The endpoint may be any node of the cluster.
    with running_node(tmp_path / "g0", group="g0", compact_rows=0, grpc_port=-1) as third:
        groups.set_groups(third, groups.one, groups.other)
        done = schedule(groups.other.endpoint)
        assert (done.rows, done.rejected, done.repeated) == (399, 1, False)
        assert done.groups == planned.groups and set(done.groups) == {"g1", "g2"}
        repeated = schedule()
        assert repeated.repeated and (repeated.rows, repeated.groups) == (399, done.groups)
    groups.add()
    assert DeltaTable(done.rejects_uri).to_pyarrow_table().num_rows == 1, "the rejected row is stored once"
    waiting = spark.read.format("timeball").option("endpoint", groups.endpoint).option("read", "pending")
    rows = waiting.option("columns", "body,group").load().collect()
    assert sorted(bytes(row["body"]).decode() for row in rows) == sorted(
        f"dear {i}" for i in range(400) if i != 7
    )
    assert {name: sum(row["group"] == name for row in rows) for name in ("g1", "g2")} == done.groups
    with open_parts(groups.endpoint, "spring") as parts:
        whole = CampaignParts(parts)
        assert (whole.progress().state, whole.progress().waiting) == ("running", 399)
        assert whole.cancel().newly == 399


def test_views_and_a_replay_have_the_messages_of_both_groups(spark: SparkSession, groups: TwoGroups) -> None:
    groups.add()
    for node, rows in ((groups.one, 5), (groups.other, 3)):
        send(node.endpoint, rows)
        send_due_now(node.endpoint, 2 * rows)
    version = spark_views.register(spark, groups.endpoint, prefix="tb_", keep=True)
    assert isinstance(version.groups, dict) and set(version.groups) == {"g1", "g2"}

    def ask(query: str) -> list[tuple[object, ...]]:
        return sorted(tuple(row) for row in spark.sql(query).collect())

    assert ask("select `group`, count(*) from tb_pending group by all") == [("g1", 5), ("g2", 3)]
    assert ask("select `group`, state, count(*) from tb_scheduled group by all") == [
        ("g1", "released", 10), ("g1", "waiting", 5), ("g2", "released", 6), ("g2", "waiting", 3),
    ]  # fmt: skip
    assert spark_views.waiting_frame(spark, groups.endpoint).count() == 8
    spark.catalog.clearCache()

    with Endpoint(groups.endpoint) as broker:
        now_ms = broker.status().now_ms
    eventually(lambda: all(settled_ms(node) > now_ms for node in (groups.one, groups.other)), "it is over")
    window = Window(from_ms=now_ms - HOUR_MS, until_ms=now_ms, start_ms=now_ms + HOUR_MS)
    planned = replay.plan_groups(spark, groups.endpoint, window)
    assert planned.rows == 16 and {name: each.rows for name, each in planned.groups.items()} == {
        "g1": 10,
        "g2": 6,
    }
    assert replay.groups_done_before(groups.endpoint, window.job_id) is None
    done = replay.run_groups(spark, groups.endpoint, window, planned=planned)
    assert (done.rows, done.repeated) == (16, False)
    repeated = replay.groups_done_before(groups.other.endpoint, window.job_id)
    assert repeated is not None and (repeated.rows, repeated.repeated) == (16, True)
    with open_parts(groups.endpoint, window.job_id) as parts:
        assert CampaignParts(parts).progress().waiting == 16


def settled_ms(node: RunningNode) -> int:
    with Endpoint(node.endpoint) as broker:
        return broker.status().settled_before_ms
