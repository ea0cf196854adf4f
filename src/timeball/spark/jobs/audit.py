"""The job `audit` checks that every accepted scheduled message was released, was cancelled, or is still pending.

    accepted = released + cancelled + expired + pending

The audit compares three independent sources: the ledger (past events), the log after the ledger's end (newer events),
and the pending messages, which are in the pending table, in the log's tail, and in rows of delay levels. Let E be the
end of the log. The audit covers the events of the rows since <= seq < E. A message is *settled* when it is released or
cancelled.

    lost        accepted, not settled, and not among the pending messages, in its first row or in one that moved it
    early       released before its due time. A message whose delay follows elapsed time gets a new due time when the
                clock is set. Its release row contains that shifted due time, which counts here, and the original
                one
    duplicate   accepted or settled more than once
    unknown     settled or pending, but never accepted
    queue_gaps  positions of a queue that are missing or used twice, in the kept part of the log
    overdue     not settled although due more than `overdue_ms` ago. Not a breach, because the broker may have been down

In a cluster, each group is audited separately, because a message never leaves its group. Then the counts are added.

The broker works during an audit, so the order of reading matters: first the version of the table, then E. A message
that is no longer in that version of the table was settled earlier, so the row that settles it is before E. A message
with several rows (in the table and in the tail, or a scheduled message and the rows that moved it) counts once. During
the audit, the broker may write a message again after E, and retention may remove its older row. The message would then
look lost, so the audit runs again.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.model.errors import NotFound, OutOfRange
from timeball.model.message import SCHEDULE_TOPIC, Kind
from timeball.spark.endpoint import GROUP, Endpoint, group_table_uri, read_groups
from timeball.spark.jobs import ledger
from timeball.spark.source.spark_api import described, shuffled_by_size, spark_errors
from timeball.spark.table_store import default_table_uri, open_table
from timeball.spark.views.snapshot import status_with_all_attaches
from timeball.spark.views.spark_views import read_events

LOG = logging.getLogger("timeball.spark")

OVERDUE_MS = 10_000
OFFENDERS_MAX = 100
BREACHES = ("lost", "early", "duplicate", "unknown")
COUNTS = ("accepted", "released", "cancelled", "expired", "pending", "overdue", "queue_gaps", *BREACHES)
AUDITS_MAX = 3  # repeats are needed if retention removes a segment during the audit


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of an audit. All but `version` and `now_ms` are rows of the log."""

    since: int  # the first row whose events count
    first: int  # the first row of the log at the time when it ended at `end`
    end: int  # rows before it count
    ledger_end: int  # the ledger has the events of earlier rows, the log those of later ones
    watermark: int  # the tail of the log begins here
    version: int  # of the pending table
    now_ms: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The balance of an audit. Counts are scheduled messages, except `queue_gaps`: queues, at most OFFENDERS_MAX.

    `offenders`: breach -> up to OFFENDERS_MAX rows. Also contains overdue messages. `groups`: the report of each group,
    if there are several. Then `scope` is None in the sum.
    """

    ok: bool
    scope: Scope | None
    accepted: int
    released: int
    cancelled: int
    expired: int
    pending: int
    lost: int
    early: int
    duplicate: int
    unknown: int
    overdue: int
    queue_gaps: int
    offenders: dict[str, list[dict[str, Any]]]
    groups: dict[str, AuditReport] = {}


def run(
    spark: SparkSession, endpoint: str, *, ledger_uri: str | None = None, overdue_ms: int = OVERDUE_MS
) -> AuditReport:
    """Audit all groups at `endpoint`. Without a ledger, the audit covers only the kept part of the log.

    `ledger_uri`: with `{group}` in it if there are several groups, by default beside the pending table. Raises
    OutOfRange if retention has removed rows of the log that the ledger does not have.
    """
    groups = read_groups(endpoint)
    reports = {}
    for group in groups:
        uri = group_table_uri("--ledger", ledger_uri, group.name, len(groups))
        reports[group.name] = _audit(spark, group.endpoint, uri, overdue_ms)
    return reports[groups[0].name] if len(groups) == 1 else add_up(reports)


def add_up(groups: dict[str, AuditReport]) -> AuditReport:
    """Add the reports of all groups. Offenders get the column `group`."""
    offenders: dict[str, list[dict[str, Any]]] = {}
    for name, report in groups.items():
        for breach, rows in report.offenders.items():
            offenders.setdefault(breach, []).extend({GROUP: name, **row} for row in rows)
    counts = {name: sum(getattr(report, name) for report in groups.values()) for name in COUNTS}
    return AuditReport(
        ok=all(report.ok for report in groups.values()),
        scope=None,
        offenders={breach: rows[:OFFENDERS_MAX] for breach, rows in offenders.items()},
        groups=groups,
        **counts,
    )


def _audit(spark: SparkSession, endpoint: str, ledger_uri: str | None, overdue_ms: int) -> AuditReport:
    """Audit one group. Repeats the audit if retention may have removed rows that it still had to read."""
    for tries_left in reversed(range(AUDITS_MAX)):
        try:
            with spark_errors(), described(spark, f"audit of {endpoint}"):
                report = _audit_once(spark, endpoint, ledger_uri, overdue_ms)
        except OutOfRange as error:
            if not tries_left:
                raise
            LOG.info("auditing again job=audit reason=%s", error)
            continue
        if (
            not report.lost
            or not tries_left
            or report.scope is None
            or not _has_retention_removed_rows(endpoint, report.scope)
        ):
            break
        LOG.info("auditing again, retention may have removed their rows job=audit lost=%d", report.lost)
    return report


def _audit_once(spark: SparkSession, endpoint: str, uri: str | None, overdue_ms: int) -> AuditReport:
    """Read all events and pending messages of one group, and judge them."""
    scope, events = read_scope_and_events(spark, endpoint, uri)
    all_events = events.unionByName(read_pending(spark, endpoint, scope), allowMissingColumns=True)
    judged = judge(all_events.where(f.col("seq") >= scope.since), scope.now_ms, overdue_ms)
    # Spark plans a DataFrame when `persist` is called. So `persist` is inside the block that sets the number of shuffle
    # partitions.
    with shuffled_by_size(spark, scope.end - scope.since):
        judged = judged.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return balance(judged, queue_gaps(spark, endpoint, scope), scope)
        finally:
            judged.unpersist()


def _has_retention_removed_rows(endpoint: str, scope: Scope) -> bool:
    """Check whether retention has removed rows of the log since the audit read its bounds."""
    with Endpoint(endpoint) as broker:
        return broker.status().log.first_seq > scope.first


# ---- the sources ------------------------------------------------------------------------------------------


def read_scope_and_events(spark: SparkSession, endpoint: str, uri: str | None) -> tuple[Scope, DataFrame]:
    """Read the scope of the audit, and all events in it: one row per message and event, with the column `seq`."""
    with Endpoint(endpoint) as broker:
        status = status_with_all_attaches(broker)
        end = broker.status()
    scope = Scope(
        since=end.log.first_seq,
        first=end.log.first_seq,
        end=end.log.durable_seq,
        ledger_end=end.log.first_seq,
        watermark=status.watermark,
        version=status.table.version,
        now_ms=end.now_ms,
    )
    recorded = None
    try:
        table = open_table(uri or default_table_uri(ledger.NAME, end.table.uri, end))
        since, ledger_end = ledger.bounds(table)
        scope = msgspec.structs.replace(scope, since=since, ledger_end=ledger_end)
        recorded = ledger.read_ledger(spark, table)
    except NotFound:
        LOG.info("no ledger, only the log is audited job=audit since_seq=%d", scope.since)
    if scope.ledger_end < end.log.first_seq:
        raise OutOfRange(
            f"the ledger ends at row {scope.ledger_end}, the log begins at {end.log.first_seq}: events are lost"
        )
    fresh = read_events(spark, endpoint, min(scope.ledger_end, scope.end), scope.end)
    history = fresh if recorded is None else recorded.where(f.col("event_seq") < scope.end).unionByName(fresh)
    history = history.where("rows > 0")  # without the starts of the broker, which concern no message
    seq = f.explode(f.expr("sequence(first_seq, first_seq + rows - 1)")).alias("seq")
    return scope, history.select(
        seq, "event", "topic", "unique_key", "due_ms", "at_ms", "event_seq", "from_due_ms"
    )


def read_pending(spark: SparkSession, endpoint: str, scope: Scope) -> DataFrame:
    """Read the pending messages as events 'waiting'. A message with several rows occurs several times.

    They are the rows of the table, the SCHEDULED rows of the tail, and its MOVED rows, under the number of the message
    that they move. Messages of delay levels have a position in a queue and may be anywhere in the log. Retention keeps
    their rows until they are settled.
    """
    columns = "seq,due_ms,topic,unique_key"
    source = spark.read.format("timeball").option("endpoint", endpoint).option("columns", columns)
    source = source.option("read", "pending").option("version", str(scope.version))
    table = source.option("columns", f"{columns},number").load().withColumn("event_seq", f.col("seq"))
    table = table.withColumn("seq", f.coalesce("number", "seq")).drop("number")
    source = spark.read.format("timeball").option("endpoint", endpoint).option("to_seq", str(scope.end))
    # If nothing is compacted, the tail is the whole log. Retention may have removed its first rows since, so "first".
    begin = "first" if scope.watermark <= scope.first else min(scope.watermark, scope.end)
    source = (
        source.option("kinds", "scheduled,moved").option("placed", "false").option("from_seq", str(begin))
    )
    tail = _by_number(source.option("columns", f"kind,source_seq,{columns}").load())
    source = spark.read.format("timeball").option("endpoint", endpoint).option("to_seq", str(scope.end))
    source = source.option("kinds", "scheduled,moved").option("placed", "true")
    levels = _by_number(source.option("columns", f"kind,source_seq,{columns}").load())
    return table.unionByName(tail).unionByName(levels).withColumn("event", f.lit("waiting"))


def _by_number(rows: DataFrame) -> DataFrame:
    """Set `seq` of SCHEDULED and MOVED rows to the number of their message. Leaves out half messages."""
    number = f.when(f.col("kind") == int(Kind.MOVED), f.col("source_seq")).otherwise(f.col("seq"))
    rows = rows.withColumn("event_seq", f.col("seq")).withColumn("seq", number)
    return rows.drop("kind", "source_seq").where("due_ms is not null")


def queue_gaps(spark: SparkSession, endpoint: str, scope: Scope) -> DataFrame:
    """Find the queues with missing or repeated positions in the kept log. Returns the columns of `gaps`."""
    source = spark.read.format("timeball").option("endpoint", endpoint)
    source = source.option("placed", "true")
    source = source.option("columns", "topic,queue_id,queue_offset").option("to_seq", str(scope.end))
    return gaps(source.load())


def gaps(visible: DataFrame) -> DataFrame:
    """Reduce `visible` (topic, queue_id, queue_offset) to the queues whose positions are not consecutive and unique.

    Columns: topic, queue_id, first, last, and the numbers of positions `missing`, `twice` and `unplaced` (null).
    """
    uses = visible.groupBy("topic", "queue_id", "queue_offset").agg(f.count("*").alias("times"))
    queues = uses.groupBy("topic", "queue_id").agg(
        f.min("queue_offset").alias("first"),
        f.max("queue_offset").alias("last"),
        (f.max("queue_offset") - f.min("queue_offset") + 1 - f.count("queue_offset")).alias("missing"),
        f.sum(f.col("times") - 1).alias("twice"),
        f.sum(f.when(f.col("queue_offset").isNull(), f.col("times")).otherwise(0)).alias("unplaced"),
    )
    return queues.where("missing > 0 or twice > 0 or unplaced > 0")


# ---- the judgement ----------------------------------------------------------------------------------------


def judge(events: DataFrame, now_ms: int, overdue_ms: int) -> DataFrame:
    """Combine the events of each message into one row, with counts of its events and a flag for each breach.

    `events`: seq, event (accepted, moved, released, cancelled, waiting), topic, unique_key, due_ms, at_ms,
    event_seq (the row of the log that records the event), and from_due_ms. A row 'waiting' that is older than the last
    move of its message does not count, because its due time is out of date.
    """

    def times(event: str) -> Column:
        return f.count(f.when(f.col("event") == event, 1)).alias(event)

    def newest(event: str) -> Column:
        return f.max(f.when(f.col("event") == event, f.col("event_seq")))

    # The due time that was set last. It is not taken from the release, because the release is checked against it.
    moved_to = f.max_by("due_ms", f.when(f.col("event") == "moved", f.col("event_seq")))
    latest_due_ms = f.coalesce(
        f.when(newest("moved").isNotNull(), moved_to),
        f.max(f.when(f.col("event") != "released", f.col("due_ms"))),
    )
    is_waiting = f.coalesce(newest("waiting") >= f.coalesce(newest("moved"), f.lit(0)), f.lit(False))
    messages = events.groupBy("seq").agg(
        times("accepted"),
        times("released"),
        times("cancelled"),
        is_waiting.cast("int").alias("waiting"),
        # The rows of a message with a delay level are in SCHEDULE_TOPIC. Only its release has the real topic.
        f.coalesce(f.max(f.when(f.col("topic") != SCHEDULE_TOPIC, f.col("topic"))), f.max("topic")).alias(
            "topic"
        ),
        f.max("unique_key").alias("unique_key"),
        f.coalesce(latest_due_ms, f.max("due_ms")).alias("due_ms"),
        f.min(f.when(f.col("event") == "released", f.col("at_ms"))).alias("released_ms"),
        f.min(f.when(f.col("event") == "released", f.col("due_ms"))).alias("shifted_ms"),
        f.min(f.when(f.col("event") == "released", f.col("from_due_ms"))).alias("from_due_ms"),
    )
    settled = f.col("released") + f.col("cancelled")
    open_ = (f.col("accepted") > 0) & (settled == 0)
    # A shifted due time counts only if the release shifted it from the due time that the other sources have.
    is_shifted = f.col("from_due_ms") == f.col("due_ms")
    due_ms = f.when(is_shifted, f.col("shifted_ms")).otherwise(f.col("due_ms"))
    return messages.select(
        "*",
        (open_ & (f.col("waiting") == 0)).alias("lost"),
        f.coalesce(f.col("released_ms") < due_ms, f.lit(False)).alias("early"),
        ((settled > 1) | (f.col("accepted") > 1)).alias("duplicate"),
        (f.col("accepted") == 0).alias("unknown"),
        (open_ & (f.col("waiting") > 0)).alias("pending"),
        f.coalesce(open_ & (f.col("due_ms") < now_ms - overdue_ms), f.lit(False)).alias("overdue"),
    )


def balance(judged: DataFrame, uneven_queues: DataFrame, scope: Scope) -> AuditReport:
    """Count the messages by outcome and breach, and fetch up to OFFENDERS_MAX rows of each breach.

    `judged`: the result of `judge`. `uneven_queues`: the result of `gaps`.
    """

    def count(condition: Column) -> Column:
        return f.count(f.when(condition, 1))

    known = f.col("accepted") > 0
    counts = {
        "accepted": count(known),
        "released": count(known & (f.col("released") > 0)),
        "cancelled": count(known & (f.col("released") == 0) & (f.col("cancelled") > 0)),
        **{name: count(f.col(name)) for name in ("pending", "overdue", *BREACHES)},
    }
    totals = judged.agg(*[column.alias(name) for name, column in counts.items()]).collect()[0].asDict()
    offenders = {
        name: [row.asDict() for row in judged.where(f.col(name)).limit(OFFENDERS_MAX).collect()]
        for name in (*BREACHES, "overdue")
        if totals[name]
    }
    queue_offenders = [row.asDict() for row in uneven_queues.limit(OFFENDERS_MAX).collect()]
    if queue_offenders:
        offenders["queue_gaps"] = queue_offenders
    settled = totals["released"] + totals["cancelled"]
    ok = not any(totals[name] for name in BREACHES) and not queue_offenders
    ok = ok and totals["accepted"] == settled + totals["pending"]
    return AuditReport(
        ok=ok, scope=scope, expired=0, queue_gaps=len(queue_offenders), offenders=offenders, **totals
    )
