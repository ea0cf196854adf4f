"""Tests of timeball.spark.jobs.audit: the balance of a real broker, and that each kind of breach is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from tests.broker.on_node import batch
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node
from tests.spark.traffic import commit_half, send, send_due_now, visible
from tests.written_again import apply_retention, fill_segment, write_again

from timeball import Timeball
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.cli.sql import count_waiting
from timeball.io.clock import ManualClock
from timeball.model.config import MIB
from timeball.model.errors import OutOfRange
from timeball.model.limits import HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import TABLE_SCHEMA
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit, audit_engines, audit_snapshot, ledger
from timeball.spark.jobs.audit_engines import AuditEngine, DuckDbEngine, Reads, SparkAuditEngine
from timeball.spark.jobs.marked import InProcessEngine
from timeball.spark.source.options import write_options
from timeball.spark.source.scheduled_writer import ScheduledTask, attach_all
from timeball.spark.table_store import sibling
from timeball.spark.views import audit_sql

SPARK = pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.timeout(600)])
EVENTS = pa.schema([audit_sql.EVENTS.field(name) for name in audit_sql.EVENT_COLUMNS])
FAR_MS = 1 << 50
Forged = dict[str, str | pa.Table]  # relation -> the rows in its place, or a query for them
# (seq, event, due_ms, at_ms) or (seq, event, due_ms, at_ms, from_due_ms). The event `waiting` is a row that is stored
# for a pending message.
Event = tuple[int, str, int | None, int] | tuple[int, str, int | None, int, int]

ACCEPTED: list[Event] = [(1, "accepted", 500, 1), (2, "accepted", 500, 1), (3, "accepted", FAR_MS, 1)]
SETTLED: list[Event] = [(1, "released", 500, 501), (2, "cancelled", 500, 400)]
WAITING: list[Event] = [(3, "waiting", FAR_MS, 0)]
BALANCED = ACCEPTED + SETTLED + WAITING


@pytest.fixture(params=["duckdb", SPARK])
def session(request: pytest.FixtureRequest) -> SparkSession | None:
    """The engine of an audit: None is DuckDB."""
    return request.getfixturevalue("spark") if request.param == "spark" else None


class ForgedRows:
    """An engine that reads other rows in place of some relations."""

    def __init__(self, engine: AuditEngine, forged: Forged) -> None:
        self._engine, self._forged = engine, forged
        self.dialect, self.relation = engine.dialect, engine.relation
        self.register, self.query, self.materialize = engine.register, engine.query, engine.materialize

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.__exit__()

    def read(self, reads: Reads) -> None:
        """Read the real rows, then replace the forged relations."""
        self._engine.read(reads)
        for name, rows in self._forged.items():
            if isinstance(rows, str):
                rows = self._engine.query(rows.format(rows=self.relation(name)))
            self._engine.register(name, rows)


def audit_forged(
    session: SparkSession | None,
    endpoint: str,
    forged: Forged,
    *,
    full: bool = True,
    ledger_uri: str | None = None,
) -> audit.AuditReport:
    """Audit with rows that `forged` changes, on Spark, or with `session` None on DuckDB."""
    engine = DuckDbEngine() if session is None else SparkAuditEngine(session, "forged")
    with ForgedRows(engine, forged) as reading:
        return audit.Audit(reading, endpoint, ledger_uri, 1_000, full=full).run()


def judge(
    session: SparkSession | None,
    node: RunningNode,
    events: list[Event],
    queues: list[tuple[str, int, int]] | None = None,
) -> audit.AuditReport:
    """Audit these events, stored rows and queue positions on a node without messages.

    `queues`: (topic, queue, position) of each row with a queue position.
    """
    rows = [
        {
            "event": event, "first_seq": seq, "due_ms": due_ms, "at_ms": at_ms, "event_seq": event_seq,
            "from_due_ms": from_due_ms[0] if from_due_ms else None, "topic": "t", "unique_key": f"u{seq}",
        }
        for event_seq, (seq, event, due_ms, at_ms, *from_due_ms) in enumerate(events, 1)
        if event != "waiting"
    ]  # fmt: skip
    filed = [
        {"seq": seq, "due_ms": due_ms, "topic": "t", "unique_key": f"u{seq}"}
        for seq, event, due_ms, *_ in events
        if event == "waiting"
    ]
    placed = [dict(zip(audit_sql.PLACED_COLUMNS, position, strict=True)) for position in queues or []]
    return audit_forged(
        session,
        node.endpoint,
        {
            "events": pa.Table.from_pylist(rows, EVENTS),
            "filed": pa.Table.from_pylist(filed, audit_sql.FILED),
            "logged": audit_sql.LOGGED.empty_table(),
            "placed": pa.Table.from_pylist(placed, audit_sql.PLACED),
        },
    )


def test_a_released_a_cancelled_and_a_pending_message_balance(
    session: SparkSession | None, node: RunningNode
) -> None:
    report = judge(session, node, BALANCED, [("t", 0, 4), ("t", 0, 5), ("t", 1, 0)])
    assert report.ok, report
    assert (report.accepted, report.released, report.cancelled, report.pending) == (3, 1, 1, 1)
    assert [getattr(report, breach) for breach in (*audit.BREACHES, "overdue")] == [0] * 6
    assert report.offenders == {}


CANCELLED = SETTLED[1:]
# (events, the breach that they contain, the number of its message)
BREACHES: list[tuple[list[Event], str, int]] = [
    (ACCEPTED + SETTLED, "lost", 3),
    ([*ACCEPTED, (1, "released", 500, 499), *CANCELLED, *WAITING], "early", 1),
    # The release row has another due time than the accepted one.
    ([*ACCEPTED, (1, "released", 498, 499), *CANCELLED, *WAITING], "early", 1),
    ([*ACCEPTED, (1, "released", 501, 502), *CANCELLED, *WAITING], "changed", 1),
    ([*ACCEPTED, *SETTLED, (3, "waiting", FAR_MS + 1, 0)], "changed", 3),
    ([*BALANCED, (1, "released", 500, 502)], "duplicate", 1),
    ([*BALANCED, (1, "cancelled", 500, 300)], "duplicate", 1),
    ([*BALANCED, (3, "accepted", FAR_MS, 2)], "duplicate", 3),
    ([*BALANCED, (3, "waiting", FAR_MS, 0)], "duplicate", 3),
    # All events of a message twice: the numbers of accepted and ended messages are equal.
    ([*BALANCED, (1, "accepted", 500, 1), (1, "released", 500, 501)], "duplicate", 1),
    ([*BALANCED, (9, "released", 500, 502)], "unknown", 9),
    ([*BALANCED, (9, "waiting", FAR_MS, 0)], "unknown", 9),
]


@pytest.mark.parametrize(("events", "breach", "seq"), BREACHES)
def test_each_breach_is_counted_and_its_message_is_named(
    session: SparkSession | None, node: RunningNode, events: list[Event], breach: str, seq: int
) -> None:
    report = judge(session, node, events)
    assert not report.ok
    assert getattr(report, breach) == 1
    assert [row["seq"] for row in report.offenders[breach]] == [seq]


@pytest.mark.parametrize(
    ("release", "is_early"),
    [
        ((1, "released", 40, 40, 500), False),  # the clock was set back to before the acceptance
        ((1, "released", 400, 401, 500), False),  # after the shifted due time
        ((1, "released", 400, 399, 500), True),  # before the shifted due time
        ((1, "released", 600, 599, 500), True),  # before the shifted due time, after the original one
        ((1, "released", 400, 401), True),  # the row lacks the original due time
        ((1, "released", 400, 401, 450), True),  # the row has another original due time
    ],
)
def test_release_before_the_shifted_due_time_is_early(
    node: RunningNode, release: Event, is_early: bool
) -> None:
    """A set clock shifts due times of messages whose delay follows elapsed time. `release` has both due times."""
    report = judge(None, node, [(1, "accepted", 500, 50), release])
    assert (report.early, report.ok) == (int(is_early), not is_early)
    moved: list[Event] = [(1, "accepted", 9_000, 50), (1, "moved", 500, 60, 9_000), release]
    assert judge(None, node, moved).early == int(is_early)


def test_durations_balance_when_the_clock_is_set_back(tmp_path: Path) -> None:
    """A relative delay and a delay level end when their time has passed: an hour before the due times in their rows."""
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node:
        node.run(node.broker.send(batch(2, delay_ms=[MINUTE_MS] * 2)))
        send_levels(node, 5)
        clock.step_wall(-HOUR_MS)
        node.run(move_on(node, clock, 65))
        extend_ledger(node)
        report = audit.run(None, node.endpoint)
        assert report.ok and report.released == 3 and counts(report) == (3, 0, 0, 0), report
        # The control: the same events, but one release lacks the original due time.
        forged = "select * replace (case when first_seq > 2 then from_due_ms end as from_due_ms) from {rows}"
        report = audit_forged(None, node.endpoint, {"events": forged})
        assert (report.ok, report.early) == (False, 1)


def send_levels(node: RunningNode, *levels: int) -> list[int]:
    """Send a message to `orders` for each of these delay levels. Returns their sequence numbers."""
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


def test_scheduled_messages_of_delay_levels_balance(node: RunningNode) -> None:
    seqs = send_levels(node, 1, 18, 18, 17, 1)
    with node.client() as ball:
        assert [verdict.verdict for verdict in ball.cancel(ids=["level2"])] == ["cancelled"]
        eventually(lambda: visible(ball, "orders") == 2, "the messages of level 1 are released")
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 5)
    report = audit.run(None, node.endpoint)
    assert report.ok, report
    assert (report.accepted, report.released, report.cancelled, report.pending) == (10, 7, 1, 2)
    extend_ledger(node)
    report = audit.run(None, node.endpoint)
    assert report.ok and report.pending == 2 and report.scope.begin > 1, report
    assert audit.run(None, node.endpoint, full=True).pending == 2
    # The control: without its row in the log, a message of a level is lost.
    for full in (True, False):
        forged = {"logged": f"select * from {{rows}} where seq <> {seqs[3]}"}
        report = audit_forged(None, node.endpoint, forged, full=full)
        assert report.lost == 1 and report.offenders["lost"][0]["seq"] == seqs[3]


def test_moved_scheduled_messages_balance(node: RunningNode, broker: Endpoint) -> None:
    """A moved message is accepted once and settled once, wherever it is stored and however often it is moved."""
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
    extend_ledger(node)
    move([2, tail, bulk_seq + 1], 0)
    assert [v.verdict for v in node.run(node.broker.cancel(seqs=[3, bulk_seq]))] == ["cancelled"] * 2
    assert [v.verdict for v in node.run(node.broker.reschedule(ids=["level1"], delay_ms=0))] == [
        "rescheduled"
    ]
    with node.client() as ball:
        eventually(lambda: visible(ball, "orders") + visible(ball, "bulk") == 4, "four messages are released")
    report = audit.run(None, node.endpoint)
    assert report.ok, report
    sent, cancelled, released = 10 + 2 + 4 + 2, 2, 4
    assert (report.accepted, report.cancelled, report.released) == (sent, cancelled, released)
    assert report.pending == sent - cancelled - released


def test_half_messages_balance(node: RunningNode) -> None:
    """A half message that is committed with a delay is accepted at its commit, under the number of its first row."""
    soon = [commit_half(node, **delay) for delay in ({"delay_ms": 1}, {"delay_level": 1})]
    later = [
        commit_half(node, **delay) for delay in ({"delay_ms": 10**7}, {"delay_level": 18}) for _ in range(3)
    ]
    node.run(node.broker.compact())
    later += [commit_half(node, delay_ms=10**7)]
    assert [v.verdict for v in node.run(node.broker.cancel(seqs=[later[0], later[3]]))] == ["cancelled"] * 2
    reported = node.run(node.broker.reschedule(seqs=[later[1], later[4]], delay_ms=10**6))
    assert [v.verdict for v in reported] == ["rescheduled"] * 2
    extend_ledger(node)
    with node.client() as ball:
        eventually(lambda: visible(ball, "orders") == len(soon), "they are released")
    report = audit.run(None, node.endpoint)
    assert report.ok and counts(report) == (9, 2, 5, 0), report


def test_messages_returned_by_a_consumer_with_a_delay_balance(node: RunningNode) -> None:
    """They become scheduled messages. Leases, acknowledgements and messages returned without a delay do not."""
    verbs = node.broker.consuming

    def receive(rows: int, invisible_ms: int = 10**6) -> list[Receipt]:
        ask = ReceiveRequest("g", "plain", rows=rows, invisible_ms=invisible_ms, counts_times=True)
        return node.run(verbs.receive(ask, 0)).receipts

    send(node.endpoint, 10)
    node.run(node.broker.send(batch(12, topic=["plain"] * 12)))
    acknowledged, returned, dead, leased = receive(4), receive(2), receive(1), receive(3)
    assert all(node.run(verbs.acknowledge(acknowledged)))
    for receipt, delay_ms in zip(returned, (1, 10**7), strict=True):
        assert node.run(verbs.nack(receipt, delay_ms)) is not None
    assert node.run(verbs.change_invisible_time(leased[1], 10**7)) is not None
    assert node.run(verbs.dead_letter(dead[0]))
    receive(2, invisible_ms=1)
    with node.client() as ball:
        eventually(lambda: visible(ball, "%RETRY%g_plain") == 3, "three messages are visible again")
    extend_ledger(node)
    node.run(node.broker.compact())
    repeated = receive(1)
    assert len(repeated) == 1 and all(node.run(verbs.acknowledge([*repeated, leased[0]])))
    report = audit.run(None, node.endpoint)
    assert report.ok, report
    sent, delayed, released = 10, 2, 1
    assert (report.accepted, report.cancelled, report.released) == (sent + delayed, 0, released)
    assert report.pending == sent + delayed - released


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningNode]:
    """A broker with small segments, so that retention can remove some."""
    with running_node(tmp_path / "data", compact_rows=0, segment_bytes=MIB) as running:
        yield running


def extend_ledger(node: RunningNode, to_seq: int | None = None) -> str:
    """Extend the ledger beside the pending table, by default to the end of the log. Returns its URI."""
    with Endpoint(node.endpoint) as broker:
        status = broker.status()
    uri = sibling(status.table.uri, "ledger")
    ledger.extend(InProcessEngine(), node.endpoint, uri, to_seq or status.log.durable_seq)
    return uri


def counts(report: audit.AuditReport) -> tuple[int, int, int, int]:
    """Get (accepted, cancelled, pending, lost) from a report."""
    return report.accepted, report.cancelled, report.pending, report.lost


def test_rewritten_messages_are_accepted_once_and_pending_once(small: RunningNode) -> None:
    send(small.endpoint, 10)
    new_seqs = write_again(small, 2, 3, 4)
    assert [verdict.verdict for verdict in small.run(small.broker.cancel(seqs=[3]))] == ["cancelled"]
    write_again(small, new_seqs[0])
    report = audit.run(None, small.endpoint)
    assert report.ok and counts(report) == (10, 1, 9, 0), report
    fill_segment(small)
    extend_ledger(small)
    write_again(small, 2, 4, 5, 6, 7, 8, 9, 10)
    assert apply_retention(small) > 10
    # The message 11 was not written again, and retention has removed its row. So it is lost.
    report = audit.run(None, small.endpoint)
    assert not report.ok and counts(report) == (10, 1, 8, 1), report
    assert [row["seq"] for row in report.offenders["lost"]] == [11]


def test_messages_whose_first_rows_are_removed_balance(small: RunningNode) -> None:
    send(small.endpoint, 10)
    with Endpoint(small.endpoint) as broker:
        bulk(small, broker, 5, 10**9)
    fill_segment(small)
    extend_ledger(small)
    write_again(small, *range(2, 12))
    apply_retention(small)
    report = audit.run(None, small.endpoint)
    assert report.ok and counts(report) == (15, 0, 15, 0), report
    assert report.unknown == 0 and report.scope.first > 10
    # The control: the same log without the newest row of message 7.
    forged = {"logged": "select * from {rows} where source_seq is null or source_seq <> 7"}
    for full in (True, False):
        report = audit_forged(None, small.endpoint, forged, full=full)
        assert not report.ok and report.lost == 1
    # Without a ledger, messages whose first rows retention has removed do not count, and are not unknown either.
    report = audit.run(None, small.endpoint, ledger_uri=str(small.settings.data / "elsewhere"), full=True)
    assert report.ok and counts(report) == (0, 0, 0, 0), report


async def move_on(node: RunningNode, clock: ManualClock, seconds: int) -> None:
    """Let time pass, in steps of five seconds, and wait each time until the broker has released all due messages."""
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
def test_messages_moved_by_other_strategies_balance(tmp_path: Path, schedule: str) -> None:
    """After 75 s each strategy has written its messages again, and retention removes their first rows."""
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
        extend_ledger(node)
        node.run(move_on(node, clock, 75))
        # The strategy writes messages again some moments after it has released others.
        eventually(lambda: let_segments_go(node) > 20, "retention has removed the first segment")
        report = audit.run(None, node.endpoint)
        assert report.ok and counts(report) == (20, 0, 10, 0), report
        assert report.released == 10 and report.scope.first > 20
        assert count_waiting(node.endpoint).tail_rows == 10
        node.run(move_on(node, clock, 30))
        report = audit.run(None, node.endpoint)
        assert report.ok and report.released == 20 and counts(report) == (20, 0, 0, 0), report


def send_at(ball: Timeball, due_ms: list[int]) -> None:
    ball.send_many([{"topic": "orders", "body": b"x", "due_ms": instant} for instant in due_ms])


@pytest.mark.parametrize("audits_max", [1, 3])
def test_an_audit_is_repeated_if_retention_removes_rows_meanwhile(
    small: RunningNode, monkeypatch: pytest.MonkeyPatch, audits_max: int
) -> None:
    """The message is written again after the end of the scope, and its older row is removed. It is not lost.

    With a single audit there is no report.
    """
    send(small.endpoint, 1)
    fill_segment(small)
    extend_ledger(small)
    read, is_first = DuckDbEngine.read, [True]

    def meanwhile(engine: DuckDbEngine, reads: Reads) -> None:
        if is_first.pop() if is_first else False:
            write_again(small, 2)  # 1 is the row of the topic
            apply_retention(small)
        read(engine, reads)

    monkeypatch.setattr(DuckDbEngine, "read", meanwhile)
    monkeypatch.setattr(audit, "AUDITS_MAX", audits_max)
    if audits_max == 1:
        with pytest.raises(OutOfRange):
            audit.run(None, small.endpoint)
        return
    report = audit.run(None, small.endpoint)
    assert counts(report) == (1, 0, 1, 0), report


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_an_audit_of_few_rows_runs_few_spark_tasks(spark: SparkSession, node: RunningNode) -> None:
    """Although Spark's setting asks for 50 partitions of each shuffle."""
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


def test_overdue_messages_are_reported_and_are_no_breach(node: RunningNode) -> None:
    report = judge(None, node, [(1, "accepted", 500, 1), (1, "waiting", 500, 0)])
    assert report.ok
    assert report.overdue == 1
    assert report.offenders["overdue"][0]["due_ms"] == 500


@pytest.mark.parametrize("positions", [[("t", 0, 1), ("t", 0, 3)], [("t", 0, 1), ("t", 0, 1)]])
def test_a_queue_with_a_missing_or_repeated_position_is_reported(
    session: SparkSession | None, node: RunningNode, positions: list[tuple[str, int, int]]
) -> None:
    report = judge(session, node, BALANCED, positions)
    assert not report.ok
    assert report.queue_gaps == 1


def bulk(node: RunningNode, broker: Endpoint, rows: int, ahead_ms: int) -> None:
    """Attach this number of messages by a bulk write to the topic `bulk`, due `ahead_ms` from now."""
    options = write_options({"endpoint": node.endpoint})
    due = [broker.status().now_ms + ahead_ms] * rows
    table = pa.table({"topic": ["bulk"] * rows, "body": ["b"] * rows, "due_ms": due})
    attach_all([ScheduledTask(options).write(iter(table.to_batches()))], options, f"job-{rows}", 0)


def test_a_real_broker_balances_at_every_stage(
    session: SparkSession | None, node: RunningNode, broker: Endpoint
) -> None:
    send_due_now(node.endpoint, 5)
    send(node.endpoint, 100)
    with node.client() as ball:
        ball.send("plain", b"at once")
        ball.cancel(ball.send("orders", b"x", after="1d").id)
    bulk(node, broker, 40, 10**9)
    report = audit.run(session, node.endpoint)  # no ledger yet, nothing compacted
    assert report.ok and report.full_because == "there is no snapshot of a balanced audit", report
    assert (report.accepted, report.released, report.cancelled, report.pending) == (146, 5, 1, 140)
    extend_ledger(node, 60)
    node.run(node.broker.compact())
    send(node.endpoint, 10)
    # Some events are in the ledger, some only in the log. Some messages are compacted.
    report = audit.run(session, node.endpoint, full=True)
    assert report.ok and report.full_because == "", report
    assert (report.accepted, report.pending, report.scope.ledger_end) == (156, 150, 60)
    bulk(node, broker, 30, 10**9)
    send_due_now(node.endpoint, 5)
    extend_ledger(node)
    since = audit.run(session, node.endpoint)
    assert since.ok and since.scope.begin == report.scope.end, since
    assert (since.accepted, since.pending, since.released) == (191, 180, 10)
    whole = audit.run(session, node.endpoint, full=True)
    assert {name: getattr(whole, name) for name in audit.COUNTS} == {
        name: getattr(since, name) for name in audit.COUNTS
    }


def test_a_bulk_write_of_one_row_balances(
    session: SparkSession | None, node: RunningNode, broker: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event looks like that of a single message. It counts once, whether it is read from the log or the ledger."""
    monkeypatch.setattr(audit_engines, "DRIVER_ROWS", 0)  # Spark's tasks read the events of the log
    send(node.endpoint, 2)
    bulk(node, broker, 1, 10**9)
    fresh = audit.run(session, node.endpoint, full=True)
    assert fresh.ok and (fresh.accepted, fresh.pending, fresh.unknown) == (3, 3, 0), fresh
    extend_ledger(node)
    recorded = audit.run(session, node.endpoint, full=True)
    assert recorded.ok and (recorded.accepted, recorded.pending) == (3, 3), recorded


# ---- differences in the tables --------------------------------------------------------------------------------


def change_filed_row(uri: str, seq: int, change: Callable[[pa.Table, int], pa.Table]) -> None:
    """Replace the data file with this row by a changed one, without a commit in the Delta log."""
    for path in map(Path, DeltaTable(uri).file_uris()):
        rows = pq.read_table(path, schema=TABLE_SCHEMA, partitioning=None)
        index = rows.column("seq").to_pylist()
        if seq in index:
            pq.write_table(change(rows, index.index(seq)), path)
            return
    raise AssertionError(f"no file has the row {seq}")


def lost(rows: pa.Table, index: int) -> pa.Table:
    """Remove a row."""
    return pa.concat_tables([rows[:index], rows[index + 1 :]])


def doubled(rows: pa.Table, index: int) -> pa.Table:
    """Repeat a row."""
    return pa.concat_tables([rows, rows[index : index + 1]])


def changed(rows: pa.Table, index: int) -> pa.Table:
    """Change the due time of a row."""
    due = rows.column("due_ms").to_pylist()
    due[index] += 1
    return rows.set_column(rows.schema.get_field_index("due_ms"), "due_ms", pa.array(due, pa.int64()))


def change_ledger(uri: str, fault: str) -> tuple[str, int]:
    """Change events of the newest released message in the ledger. Returns (expected breach, number of the message)."""
    table = DeltaTable(uri)
    events = table.to_pyarrow_table()
    is_released = pc.equal(events.column("event"), "released")
    seq = pc.max(events.filter(is_released).column("first_seq")).as_py()
    if fault == "early":
        table.update({"at_ms": "due_ms - 1"}, predicate=f"first_seq = {seq} and event = 'released'")
        return "early", seq
    if fault == "unknown":
        table.delete(f"first_seq = {seq} and event = 'accepted'")
        return "unknown", seq
    assert fault == "recorded twice"
    write_deltalake(table, events.filter(pc.equal(events.column("first_seq"), seq)), mode="append")
    return "duplicate", seq


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("fault", ["lost", "doubled", "changed", "early", "unknown", "recorded twice"])
def test_a_difference_in_a_table_is_found_in_full_and_since_the_last_audit(
    session: SparkSession | None, node: RunningNode, broker: Endpoint, fault: str, full: bool
) -> None:
    """The difference: a changed row of the pending table, or a changed event since the last balanced audit."""
    send(node.endpoint, 100)
    node.run(node.broker.compact())
    extend_ledger(node)
    assert audit.run(session, node.endpoint).ok
    table = broker.status().table.uri
    snapshot = Path(audit_snapshot.snapshot_uri(table))
    first = snapshot.read_bytes()
    send(node.endpoint, 60)
    send_due_now(node.endpoint, 3)
    node.run(node.broker.compact())
    uri = extend_ledger(node)
    assert audit.run(session, node.endpoint, full=full).ok  # without the fault
    snapshot.write_bytes(first)
    rows = {"lost": lost, "doubled": doubled, "changed": changed}
    if fault in rows:
        change_filed_row(table, 50, rows[fault])
        breach, seq = {"doubled": "duplicate"}.get(fault, fault), 50
    else:
        breach, seq = change_ledger(uri, fault)
    report = audit.run(session, node.endpoint, full=full)
    assert not report.ok and getattr(report, breach) == 1, report
    assert [row["seq"] for row in report.offenders[breach]] == [seq]
    assert report.full_because == ""
    assert snapshot.read_bytes() == first  # only a balanced audit replaces it


FILED_WRONG = "select seq, number, {due} as due_ms, topic, unique_key from {{rows}}".format(
    due="case when number is null then due_ms else due_ms - 1 end"
)


@pytest.mark.parametrize("full", [True, False])
def test_a_moved_message_of_a_bulk_write_with_a_wrong_due_time_is_found(
    node: RunningNode, broker: Endpoint, full: bool
) -> None:
    """All messages of its group are of the bulk write, whose due times the log lacks. But the log has the new one."""
    send(node.endpoint, 1)
    assert audit.run(None, node.endpoint).ok
    bulk(node, broker, 3 * audit_sql.GROUP_NUMBERS, 10**9)
    number = broker.status().log.durable_seq - audit_sql.GROUP_NUMBERS
    node.run(node.broker.reschedule(seqs=[number], delay_ms=2 * 10**9))
    node.run(node.broker.compact())
    report = audit_forged(None, node.endpoint, {"filed": FILED_WRONG}, full=full)
    assert not report.ok and report.changed == 1, report
    assert [row["seq"] for row in report.offenders["changed"]] == [number]


def test_file_removed_from_the_table_is_detected(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 100)
    write_again(node, *range(2, 52))
    # The rows that moved messages are then below the watermark, too, and do not count as stored.
    node.run(node.broker.compact())
    assert audit.run(None, node.endpoint).ok
    table = DeltaTable(broker.status().table.uri)
    before = table.version()
    table.delete("seq % 2 = 0")
    forged = {"filed": "select * from {rows} where seq % 2 = 1"}
    report = audit_forged(None, node.endpoint, forged)
    assert report.scope.version == before, "the audit reads the broker's version, not that of another program"
    assert not report.ok
    assert report.lost == len(report.offenders["lost"]) == 50


# ---- the snapshot of the last audit ---------------------------------------------------------------------------


DAMAGED = "the snapshot of the last balanced audit is damaged"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, "there is no snapshot of a balanced audit"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], DAMAGED),
        (lambda data: data[:-7], DAMAGED),
        (lambda data: b"", DAMAGED),
    ],
)
def test_without_an_intact_snapshot_the_audit_is_full_and_reports_the_reason(
    node: RunningNode, broker: Endpoint, damage: Callable[[bytes], bytes] | None, reason: str
) -> None:
    send(node.endpoint, 10)
    assert audit.run(None, node.endpoint).ok
    snapshot = Path(audit_snapshot.snapshot_uri(broker.status().table.uri))
    if damage is None:
        snapshot.unlink()
    else:
        snapshot.write_bytes(damage(snapshot.read_bytes()))
    report = audit.run(None, node.endpoint)
    assert report.ok and report.scope.begin == report.scope.since and report.full_because == reason, report
    assert audit.run(None, node.endpoint).full_because == ""


def test_a_snapshot_of_another_log_is_not_used(node: RunningNode, broker: Endpoint, tmp_path: Path) -> None:
    """The snapshot of a longer log, and then that of a log which has another row at the snapshot's end."""
    with running_node(tmp_path / "other", compact_rows=0) as other:
        send(other.endpoint, 5)
        assert audit.run(None, other.endpoint).ok
        with Endpoint(other.endpoint) as connection:
            copy = Path(audit_snapshot.snapshot_uri(connection.status().table.uri)).read_bytes()
    snapshot = Path(audit_snapshot.snapshot_uri(broker.status().table.uri))
    snapshot.parent.mkdir(exist_ok=True)
    for _ in range(2):
        snapshot.write_bytes(copy)
        report = audit.run(None, node.endpoint)
        assert report.ok
        assert report.full_because == "the snapshot of the last balanced audit is of another log"
        with node.client() as ball:  # now this log is the longer one
            ball.send_many([{"topic": "plain", "body": b"x"}] * 20)


def test_a_snapshot_with_a_message_that_the_log_lacks_is_not_used(
    node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 5)
    assert audit.run(None, node.endpoint).ok
    uri = audit_snapshot.snapshot_uri(broker.status().table.uri)
    snapshot = audit_snapshot.read_snapshot(uri)
    snapshot.open_bits[0] |= 1 << 40
    audit_snapshot.write_snapshot(uri, snapshot)
    report = audit.run(None, node.endpoint)
    assert report.ok
    assert report.full_because == "the snapshot of the last balanced audit does not fit to the log"


def test_a_ledger_without_the_column_reason_balances(session: SparkSession | None, node: RunningNode) -> None:
    """A ledger of an older version. The replaced message counts as cancelled, because its event has no reason."""
    send(node.endpoint, 10)
    with node.client() as ball:
        for _ in range(2):
            ball.send("orders", b"x", after="1h", unique_key="order-17", on_pending="replace")
    table = DeltaTable(extend_ledger(node))
    older = table.to_pyarrow_table().drop_columns(["reason"])
    write_deltalake(table, older, mode="overwrite", schema_mode="overwrite")
    report = audit.run(session, node.endpoint)
    assert report.ok and (report.cancelled, report.replaced, report.pending) == (1, 0, 11), report


# ---- messages that end otherwise than by a release ------------------------------------------------------------


def test_every_end_of_a_message_is_counted_once(tmp_path: Path) -> None:
    """Expired, replaced, cancelled by selection, undone, missed, and occurrences of recurring schedules."""
    clock = ManualClock()
    with running_node(tmp_path / "data", clock, compact_rows=0) as node, node.client() as ball:
        for _ in range(3):
            ball.send("orders", b"x", after="1h", unique_key="order-17", on_pending="replace")
        chosen = [ball.send("news", b"x", after="30s").id for _ in range(4)]
        ball.send("other", b"x", after="30s")
        ball.selections.cancel(topics=["news"])
        undone = ball.selections.cancel(topics=["other"])
        eventually(lambda: ball.selections.get(undone.id).count == 1, "it has been counted")
        ball.selections.undo(undone.id)
        ball.schedules.put("tick", {"every": "10s"}, topic="ticks", body="x")
        ball.cancel(ball.send("orders", b"x", after="1d").id)
        first = audit.run(None, node.endpoint)
        assert first.ok and (first.replaced, first.undone, first.occurrences) == (2, 1, 1), first
        node.run(move_on(node, clock, 40))
        report = audit.run(None, node.endpoint)
        assert report.ok and report.scope.begin == first.scope.end, report
        assert (report.selected, report.undone, report.replaced, report.cancelled) == (len(chosen), 1, 2, 1)
        assert report.occurrences == report.released  # one is pending; `other` was released
        ball.send("late", b"x", after="10s", expires_in="1s")
        ball.send("late", b"x", after="10s", expires_in="1s", on_expiry="move")
        clock.advance(HOUR_MS // 2)  # the broker was not awake: two expire, and an occurrence is missed
        node.run(move_on(node, clock, 10))
        extend_ledger(node)
        for full in (False, True):
            report = audit.run(None, node.endpoint, full=full)
            assert report.ok and (report.expired, report.missed) == (2, 1), report
            assert report.full_because == ""


def test_messages_that_selections_change_are_in_one_state(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock, compact_rows=0) as node, node.client() as ball:
        for topic in ("shifted", "moved", "held", "freed", "undone"):
            for after in ("30s", "2h"):
                ball.send(topic, b"x", after=after)
        node.run(node.broker.compact())
        ball.selections.shift("3h", topics=["shifted"])
        ball.selections.move("elsewhere", topics=["moved"])
        ball.selections.pause(topics=["held"])
        ball.selections.release(topics=["freed"])
        ball.selections.undo(ball.selections.shift("1h", topics=["undone"]).id)
        node.run(node.broker.wakers.wake())
        node.run(move_on(node, clock, 40))
        for _ in range(2):
            report = audit.run(None, node.endpoint, full=True)
            assert report.ok, report
            assert (report.accepted, report.released, report.pending, report.selected) == (10, 4, 6, 0)
            node.run(node.broker.compact())
