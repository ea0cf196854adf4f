"""Tests of timeball.spark.jobs.audit: the balance of a real broker, and that each kind of breach is found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from tests.broker.on_node import batch
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node
from tests.spark.traffic import commit_half, send, send_due_now, visible
from tests.written_again import fill_segment, let_go, write_again

from timeball import Timeball
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.cli.sql import count_waiting
from timeball.io.clock import ManualClock
from timeball.model.config import MIB
from timeball.model.limits import HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import SCHEDULE_TOPIC
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit, ledger
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.options import write_options
from timeball.spark.source.scheduled_writer import ScheduledTask, attach_all
from timeball.spark.table_store import sibling

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

SCHEMA = (
    "seq bigint, event string, topic string, unique_key string, due_ms bigint, at_ms bigint, from_due_ms bigint, "
    "event_seq bigint"
)
SCOPE = audit.Scope(since=1, first=1, end=100, ledger_end=50, watermark=20, version=3, now_ms=10_000)
QUEUES = "topic string, queue_id int, queue_offset bigint"

Event = (
    tuple[int, str, int | None, int] | tuple[int, str, int | None, int, int]
)  # seq, event, due_ms, at_ms, from_due_ms

ACCEPTED: list[Event] = [(1, "accepted", 500, 1), (2, "accepted", 500, 1), (3, "accepted", 20_000, 1)]
SETTLED: list[Event] = [(1, "released", 500, 501), (2, "cancelled", None, 400)]
WAITING: list[Event] = [(3, "waiting", 20_000, 0)]
BALANCED = ACCEPTED + SETTLED + WAITING


def judge(
    spark: SparkSession, events: list[Event], queues: list[tuple[str, int, int | None]]
) -> audit.AuditReport:
    rows = [
        (seq, event, "t", f"u{seq}", due, at, from_due[0] if from_due else None, i)
        for i, (seq, event, due, at, *from_due) in enumerate(events, 1)
    ]
    judged = audit.judge(spark.createDataFrame(rows, SCHEMA), SCOPE.now_ms, 1000)
    return audit.balance(judged, audit.gaps(spark.createDataFrame(queues, QUEUES)), SCOPE)


@pytest.mark.smoke
def test_audit_balances_after_all_kinds_of_events(spark: SparkSession) -> None:
    report = judge(spark, BALANCED, [("t", 0, 4), ("t", 0, 5), ("t", 1, 0)])
    assert report.ok
    assert (report.accepted, report.released, report.cancelled, report.pending) == (3, 1, 1, 1)
    assert (report.lost, report.early, report.duplicate, report.unknown, report.overdue) == (0, 0, 0, 0, 0)
    assert report.offenders == {}


@pytest.mark.parametrize(
    ("events", "breach", "seq"),
    [
        (ACCEPTED + SETTLED, "lost", 3),
        ([*BALANCED[:3], (1, "released", 500, 499), *BALANCED[4:]], "early", 1),
        # The release claims another instant than the one that was accepted.
        ([*BALANCED[:3], (1, "released", 498, 499), *BALANCED[4:]], "early", 1),
        ([*BALANCED, (1, "released", 500, 502)], "duplicate", 1),
        ([*BALANCED, (1, "cancelled", None, 300)], "duplicate", 1),
        ([*BALANCED, (3, "accepted", 20_000, 2)], "duplicate", 3),
        ([*BALANCED, (9, "released", 500, 502)], "unknown", 9),
        ([*BALANCED, (9, "waiting", 20_000, 0)], "unknown", 9),
    ],
)
def test_each_breach_is_found_and_shown(
    spark: SparkSession, events: list[Event], breach: str, seq: int
) -> None:
    report = judge(spark, events, [])
    assert not report.ok
    assert getattr(report, breach) == 1
    assert [row["seq"] for row in report.offenders[breach]] == [seq]


@pytest.mark.parametrize(
    ("release", "is_early"),
    [
        ((1, "released", 40, 40, 500), False),  # the clock was set back behind the acceptance
        ((1, "released", 400, 401, 500), False),
        ((1, "released", 400, 399, 500), True),  # before the shifted instant
        ((1, "released", 600, 599, 500), True),  # set forward: due later by the clock
        ((1, "released", 400, 401), True),  # without the instant that was promised
        ((1, "released", 400, 401, 450), True),  # another instant was promised
    ],
)
def test_release_before_the_shifted_due_time_is_early(
    spark: SparkSession, release: Event, is_early: bool
) -> None:
    report = judge(spark, [(1, "accepted", 500, 50), release], [])
    assert (report.early, report.ok) == (int(is_early), not is_early)
    moved: list[Event] = [(1, "accepted", 9_000, 50), (1, "moved", 500, 60), release]
    assert judge(spark, moved, []).early == int(is_early)


def test_durations_balance_when_the_clock_is_set_back(spark: SparkSession, tmp_path: Path) -> None:
    """A relative delay and a level end when their time has passed, an hour before the instants in their rows."""
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node:
        node.run(node.broker.send(batch(2, delay_ms=[MINUTE_MS] * 2)))
        send_levels(node, 5)
        clock.step_wall(-HOUR_MS)
        node.run(move_on(node, clock, 65))
        extend_ledger(spark, node)
        report = audit.run(spark, node.endpoint)
        assert report.ok and report.released == 3 and counts(report) == (3, 0, 0, 0), report
        # The control: the same events, one of which names no instant that was promised.
        scope, history = audit.read_scope_and_events(spark, node.endpoint, None)
        named = f.when(f.col("seq") > 2, f.col("from_due_ms"))
        assert history.where("from_due_ms is not null").count() == 3
        forged = audit.judge(history.withColumn("from_due_ms", named), scope.now_ms, 1000)
        report = audit.balance(forged, audit.queue_gaps(spark, node.endpoint, scope), scope)
        assert (report.ok, report.early) == (False, 1)


def send_levels(node: RunningNode, *levels: int) -> list[int]:
    """Send messages to `orders` with these delay levels. Returns their sequence numbers."""
    rows = pa.record_batch(
        {
            "topic": ["orders"] * len(levels),
            "body": [b"level"] * len(levels),
            "unique_key": [f"level{i}" for i in range(len(levels))],
            "delay_level": pa.array(levels, pa.int32()),
        }
    )
    first_seq = node.run(node.broker.send(rows)).first_seq
    return list(range(first_seq, first_seq + len(levels)))


def test_scheduled_messages_of_delay_levels_balance(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    seqs = send_levels(node, 1, 18, 18, 17, 1)
    with node.client() as ball:
        assert [verdict.verdict for verdict in ball.cancel(ids=["level2"])] == ["cancelled"]
        eventually(lambda: visible(ball, "orders") == 2, "the first level is over")
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 5)
    report = audit.run(spark, node.endpoint)
    assert report.ok, report
    assert (report.accepted, report.released, report.cancelled, report.pending) == (10, 7, 1, 2)
    uri = sibling(broker.status().table.uri, "ledger")
    ledger.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    report = audit.run(spark, node.endpoint)
    assert report.ok and report.pending == 2, report
    rows = {row.seq: row for row in ledger.scheduled_rows(spark, node.endpoint).collect()}
    assert [rows[seq].topic for seq in (seqs[0], seqs[2], seqs[1])] == ["orders", "orders", SCHEDULE_TOPIC]
    # The control: a scheduled message of a level that nobody has any more is lost.
    scope, history = audit.read_scope_and_events(spark, node.endpoint, None)
    forged = audit.read_pending(spark, node.endpoint, scope).where(f"seq != {seqs[3]}")
    judged = audit.judge(history.unionByName(forged, allowMissingColumns=True), scope.now_ms, 1000)
    assert audit.balance(judged, audit.queue_gaps(spark, node.endpoint, scope), scope).lost == 1


def test_moved_scheduled_messages_balance(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    """A message that is moved is accepted once and settled once, wherever it lay and however often it moves."""
    send(node.endpoint, 10)
    node.run(node.broker.compact())
    send_levels(node, 18, 18)
    bulk(node, broker, 4, 10**9)
    bulk_seq = node.broker.scheduling.hour_log.pending.live_entries()[-1].min_seq
    tail = node.run(node.broker.send(batch(2, delay_ms=[10**8] * 2))).first_seq

    def move(seqs: list[int], delay_ms: int) -> None:
        reported = node.run(node.broker.reschedule(seqs=seqs, delay_ms=delay_ms))
        assert [verdict.verdict for verdict in reported] == ["rescheduled"] * len(seqs)

    move([2, 3, tail, bulk_seq], 10**7)
    node.run(node.broker.compact())
    extend_ledger(spark, node)
    move([2, tail, bulk_seq + 1], 0)
    assert [v.verdict for v in node.run(node.broker.cancel(seqs=[3, bulk_seq]))] == ["cancelled"] * 2
    assert [v.verdict for v in node.run(node.broker.reschedule(ids=["level1"], delay_ms=0))] == [
        "rescheduled"
    ]
    with node.client() as ball:
        eventually(lambda: visible(ball, "orders") + visible(ball, "bulk") == 4, "four have come")
    report = audit.run(spark, node.endpoint)
    assert report.ok, report
    sent, cancelled, came = 10 + 2 + 4 + 2, 2, 4
    assert (report.accepted, report.cancelled, report.released) == (sent, cancelled, came)
    assert report.pending == sent - cancelled - came


def test_half_messages_balance(spark: SparkSession, node: RunningNode) -> None:
    """A half message that is committed with a delay counts as accepted from the commit on, under its own number."""
    soon = [commit_half(node, **delay) for delay in ({"delay_ms": 1}, {"delay_level": 1})]
    later = [
        commit_half(node, **delay) for delay in ({"delay_ms": 10**7}, {"delay_level": 18}) for _ in range(3)
    ]
    node.run(node.broker.compact())
    later += [commit_half(node, delay_ms=10**7)]
    assert [v.verdict for v in node.run(node.broker.cancel(seqs=[later[0], later[3]]))] == ["cancelled"] * 2
    reported = node.run(node.broker.reschedule(seqs=[later[1], later[4]], delay_ms=10**6))
    assert [v.verdict for v in reported] == ["rescheduled"] * 2
    extend_ledger(spark, node)
    with node.client() as ball:
        eventually(lambda: visible(ball, "orders") == len(soon), "they are released")
    report = audit.run(spark, node.endpoint)
    assert report.ok and counts(report) == (9, 2, 5, 0), report
    rows = {row.seq: row for row in ledger.scheduled_rows(spark, node.endpoint).collect()}
    assert {*soon, *later} <= rows.keys() and rows[soon[0]].released_ms is not None


def test_messages_that_are_given_back_with_a_delay_balance(spark: SparkSession, node: RunningNode) -> None:
    """They are scheduled messages. Leases, acknowledgements and messages that come back at once are not."""
    verbs = node.broker.consuming

    def receive(rows: int, invisible_ms: int = 10**6) -> list[Receipt]:
        ask = ReceiveRequest("g", "plain", rows=rows, invisible_ms=invisible_ms, counts_times=True)
        return node.run(verbs.receive(ask, 0)).receipts

    send(node.endpoint, 10)
    node.run(node.broker.send(batch(12, topic=["plain"] * 12)))
    acked, given_back, dead, held = receive(4), receive(2), receive(1), receive(3)
    assert all(node.run(verbs.acknowledge(acked)))
    for receipt, delay_ms in zip(given_back, (1, 10**7), strict=True):
        assert node.run(verbs.nack(receipt, delay_ms)) is not None
    assert node.run(verbs.change_invisible_time(held[1], 10**7)) is not None
    assert node.run(verbs.dead_letter(dead[0]))
    receive(2, invisible_ms=1)
    with node.client() as ball:
        eventually(lambda: visible(ball, "%RETRY%g_plain") == 3, "three are here again")
    extend_ledger(spark, node)
    node.run(node.broker.compact())
    repeated = receive(1)
    assert len(repeated) == 1 and all(node.run(verbs.acknowledge([*repeated, held[0]])))
    report = audit.run(spark, node.endpoint)
    assert report.ok, report
    sent, delayed, came = 10, 2, 1
    assert (report.accepted, report.cancelled, report.released) == (sent + delayed, 0, came)
    assert report.pending == sent + delayed - came


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningNode]:
    """A broker with small segments, so that retention can remove some."""
    with running_node(tmp_path / "data", compact_rows=0, segment_bytes=MIB) as running:
        yield running


def extend_ledger(spark: SparkSession, node: RunningNode) -> None:
    with Endpoint(node.endpoint) as broker:
        status = broker.status()
    ledger.extend(
        SparkEngine(spark), node.endpoint, sibling(status.table.uri, "ledger"), status.log.durable_seq
    )


def counts(report: audit.AuditReport) -> tuple[int, int, int, int]:
    return report.accepted, report.cancelled, report.pending, report.lost


def test_rewritten_messages_are_accepted_once_and_pending_once(
    spark: SparkSession, small: RunningNode
) -> None:
    send(small.endpoint, 10)
    places = write_again(small, 2, 3, 4)
    assert [verdict.verdict for verdict in small.run(small.broker.cancel(seqs=[3]))] == ["cancelled"]
    write_again(small, places[0])
    report = audit.run(spark, small.endpoint)
    assert report.ok and counts(report) == (10, 1, 9, 0), report
    fill_segment(small)
    extend_ledger(spark, small)
    write_again(small, 2, 4, 5, 6, 7, 8, 9, 10)
    assert let_go(small) > 10
    # The tenth was not written again: its row is gone, and so is it.
    report = audit.run(spark, small.endpoint)
    assert not report.ok and counts(report) == (10, 1, 8, 1), report
    assert [row["seq"] for row in report.offenders["lost"]] == [11]


def test_messages_whose_first_rows_are_removed_balance(spark: SparkSession, small: RunningNode) -> None:
    send(small.endpoint, 10)
    with Endpoint(small.endpoint) as broker:
        bulk(small, broker, 5, 10**9)
    fill_segment(small)
    extend_ledger(spark, small)
    write_again(small, *range(2, 12))
    let_go(small)
    report = audit.run(spark, small.endpoint)
    assert report.ok and counts(report) == (15, 0, 15, 0), report
    assert report.unknown == 0 and report.scope.first > 10
    # The control: the same log without the row that one of them was moved to.
    scope, history = audit.read_scope_and_events(spark, small.endpoint, None)
    forged = audit.read_pending(spark, small.endpoint, scope).where("seq != 7")
    judged = audit.judge(history.unionByName(forged, allowMissingColumns=True), scope.now_ms, 1000)
    report = audit.balance(judged, audit.queue_gaps(spark, small.endpoint, scope), scope)
    assert not report.ok and report.lost == 1
    # Without a ledger nothing is known of what retention has let go: neither accepted nor unknown.
    report = audit.run(spark, small.endpoint, ledger_uri=str(small.settings.data / "elsewhere"))
    assert report.ok and counts(report) == (0, 0, 0, 0), report


async def move_on(node: RunningNode, clock: ManualClock, seconds: int) -> None:
    """Let time pass, five seconds a look."""
    for _ in range(seconds // 5):
        clock.advance(5 * SECOND_MS)
        node.broker.ticker.wake()
        async with asyncio.timeout(BOUND_S):
            while node.broker.scheduling.scheduler.settled_before_ms <= clock.wall:
                await asyncio.sleep(0.005)


def let_segments_go(node: RunningNode) -> int:
    """Run the retention of the maintenance. Returns the first kept row."""
    node.run(node.node.maintenance.checkpoint())
    node.run(node.node.maintenance.apply_retention())
    return node.broker.log.reader.first_seq


@pytest.mark.parametrize("schedule", ["timer_wheel", "level_cascade"])
def test_messages_moved_by_other_strategies_balance(
    spark: SparkSession, tmp_path: Path, schedule: str
) -> None:
    """A ring of a minute and a level of a minute are over, and what they held in the beginning is gone."""
    clock = ManualClock()
    settings = {
        "strategy": schedule,
        "timer_wheel_ms": MINUTE_MS,
        "retention_ms": 1,
        "unread_retention_ms": 1,
        "segment_bytes": MIB,
    }
    with running_node(tmp_path / "data", clock, **settings) as node, node.client() as ball:
        for after_ms in (30 * SECOND_MS, 100 * SECOND_MS):
            send_at(ball, [clock.wall + after_ms] * 10)
        fill_segment(node)
        extend_ledger(spark, node)
        node.run(move_on(node, clock, 75))
        # A roll or a hop comes some moments behind the look that settles.
        eventually(lambda: let_segments_go(node) > 20, "the first segment goes")
        report = audit.run(spark, node.endpoint)
        assert report.ok and counts(report) == (20, 0, 10, 0), report
        assert report.released == 10 and report.scope.first > 20
        assert count_waiting(node.endpoint).tail_rows == 10
        node.run(move_on(node, clock, 30))
        report = audit.run(spark, node.endpoint)
        assert report.ok and report.released == 20 and counts(report) == (20, 0, 0, 0), report


def send_at(ball: Timeball, due_ms: list[int]) -> None:
    ball.send_many([{"topic": "orders", "body": b"x", "due_ms": instant} for instant in due_ms])


@pytest.mark.parametrize("looks", [1, 3])
def test_rows_removed_by_retention_during_the_audit_are_not_lost(
    spark: SparkSession, small: RunningNode, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """Written again behind the end of the scope, and its older row let go; with one look it is missed."""
    send(small.endpoint, 1)
    fill_segment(small)
    extend_ledger(spark, small)
    waiting = audit.read_pending

    def meanwhile(spark: SparkSession, endpoint: str, scope: audit.Scope) -> DataFrame:
        if scope.first == 1:
            write_again(small, 2)  # 1 is the row of the topic
            let_go(small)
        return waiting(spark, endpoint, scope)

    monkeypatch.setattr(audit, "read_pending", meanwhile)
    monkeypatch.setattr(audit, "AUDITS_MAX", looks)
    report = audit.run(spark, small.endpoint)
    assert counts(report) == ((1, 0, 1, 0) if looks > 1 else (1, 0, 0, 1)), report


def test_an_audit_of_few_rows_has_few_tasks(spark: SparkSession, node: RunningNode) -> None:
    send(node.endpoint, 100)
    context, partitions = spark.sparkContext, "spark.sql.shuffle.partitions"
    before = spark.conf.get(partitions) or ""
    context.setJobGroup("few", "")
    spark.conf.set(partitions, "50")
    try:
        assert audit.run(spark, node.endpoint).ok
    finally:
        spark.conf.set(partitions, before)
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]  # None: none
    tracker = context.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup("few")]
    stages = {stage for job in jobs if job for stage in job.stageIds}
    tasks = [info.numTasks for info in map(tracker.getStageInfo, stages) if info]
    assert len(tasks) >= 4 and max(tasks) < 10 and sum(tasks) <= 20


def test_overdue_messages_are_reported_and_are_no_breach(spark: SparkSession) -> None:
    report = judge(spark, [(1, "accepted", 500, 1), (1, "waiting", 500, 0)], [])
    assert report.ok
    assert report.overdue == 1
    assert report.offenders["overdue"][0]["due_ms"] == 500


@pytest.mark.parametrize(
    "positions", [[("t", 0, 1), ("t", 0, 3)], [("t", 0, 1), ("t", 0, 1)], [("t", 0, 1), ("t", 0, None)]]
)
def test_queue_with_gap_or_repeated_position_is_reported(
    spark: SparkSession, positions: list[tuple[str, int, int | None]]
) -> None:
    report = judge(spark, BALANCED, positions)
    assert not report.ok
    assert report.queue_gaps == 1


def bulk(node: RunningNode, broker: Endpoint, rows: int, ahead_ms: int) -> None:
    options = write_options({"endpoint": node.endpoint})
    due = [broker.status().now_ms + ahead_ms] * rows
    table = pa.table({"topic": ["bulk"] * rows, "body": ["b"] * rows, "due_ms": due})
    attach_all([ScheduledTask(options).write(iter(table.to_batches()))], options, f"job-{rows}", 0)


def test_a_real_broker_balances_at_every_stage(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    send_due_now(node.endpoint, 5)
    send(node.endpoint, 100)
    with node.client() as ball:
        ball.send("plain", b"at once")
        ball.cancel(ball.send("orders", b"x", after="1d").id)
    bulk(node, broker, 40, 10**9)
    report = audit.run(spark, node.endpoint)  # no ledger yet, nothing compacted
    assert report.ok, report
    assert (report.accepted, report.released, report.cancelled, report.pending) == (146, 5, 1, 140)
    uri = sibling(broker.status().table.uri, "ledger")
    ledger.extend(SparkEngine(spark), node.endpoint, uri, 60)
    node.run(node.broker.compact())
    send(node.endpoint, 10)
    report = audit.run(spark, node.endpoint)  # part in the ledger, part in the log; part compacted
    assert report.ok, report
    assert (report.accepted, report.pending, report.scope.ledger_end) == (156, 150, 60)


def test_file_removed_from_the_table_is_detected(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 100)
    write_again(node, *range(2, 52))
    node.run(
        node.broker.compact()
    )  # also what moved a scheduled message is behind the watermark now, and no witness
    assert audit.run(spark, node.endpoint).ok
    table = DeltaTable(broker.status().table.uri)
    before = table.version()
    table.delete("seq % 2 = 0")
    scope, history = audit.read_scope_and_events(spark, node.endpoint, None)
    assert scope.version == before  # the broker's own version: what others commit is not what it serves from
    forged = audit.read_pending(spark, node.endpoint, msgspec.structs.replace(scope, version=before + 1))
    judged = audit.judge(history.unionByName(forged, allowMissingColumns=True), scope.now_ms, 1000)
    report = audit.balance(judged, audit.queue_gaps(spark, node.endpoint, scope), scope)
    assert not report.ok
    assert report.lost == len(report.offenders["lost"]) == 50
