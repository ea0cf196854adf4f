"""`audit`: prove that every accepted promise was kept, cancelled, or still waits, to the message.

    accepted = released + cancelled + expired + pending

Three witnesses that do not trust each other: the ledger (what happened), the log after the ledger's end, and the
pending table with the log's tail and its promises of delay levels (what waits). Events are those of rows
since <= seq < E, with E the end of the log.

    lost        accepted, not settled, and neither in the pending table nor in the tail, there or written again
    early       released before its due instant. Of a duration, which follows elapsed time, that is the instant to
                which a step of the clock has shifted it: its release names it, and the instant that was promised
    duplicate   accepted or settled more than once
    unknown     settled, or waiting, but never accepted
    queue_gaps  positions of a queue that are missing or taken twice, in the part of the log that is kept
    overdue     not settled although due more than `overdue_ms` ago: reported, since a broker may have been down

Of a cluster each group is audited by itself, since a promise never leaves its group, and the counts are added up.

Order of looking matters on a broker that works: first the table's version, then E. A promise that has left the table by
that version was settled before, so its settlement is below E. Rows in several places (the table and the tail; a
promise and the rows that moved it) are the same promise once. A promise may be written again behind E and its older row
be let go by retention meanwhile: then the audit looks again, because it could take that for a loss.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.errors import NotFound, OutOfRange
from timeball.message import SCHEDULE_TOPIC, Kind
from timeball.pipeline.endpoint import Endpoint, read_groups
from timeball.pipeline.groups import GROUP, place_of
from timeball.pipeline.jobs import ledger
from timeball.pipeline.source.spark_api import described, shuffled_by_size
from timeball.pipeline.spark_errors import spark_errors
from timeball.pipeline.table_store import beside, open_table
from timeball.pipeline.views.snapshot import settled_status
from timeball.pipeline.views.spark_views import read_events

LOG = logging.getLogger("timeball.pipeline")

OVERDUE_MS = 10_000
OFFENDERS_MAX = 100
BREACHES = ("lost", "early", "duplicate", "unknown")
COUNTS = ("accepted", "released", "cancelled", "expired", "pending", "overdue", "queue_gaps", *BREACHES)
LOOKS_MAX = 3  # retention takes seconds or minutes from one segment to the next; an audit may take as long


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of an audit: events of rows since..end, the table at `version`, the tail from `watermark` on.

    `first`: where the log began when it ended at `end`.
    """

    since: int
    first: int
    end: int
    ledger_end: int
    watermark: int
    version: int
    now_ms: int


class AuditReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The balance. Counts are promises; `offenders` holds up to 100 rows of each kind of breach, and of overdue.

    `groups`: of a cluster with several groups the report of each; these have the scopes, and the sum has none.
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
    """Audit all groups at `endpoint`. A ledger is used where there is one; else the log alone must reach back."""
    groups = read_groups(endpoint)
    found = {}
    for group in groups:
        uri = place_of("--ledger", ledger_uri, group.name, len(groups))
        found[group.name] = _audit(spark, group.endpoint, uri, overdue_ms)
    return found[groups[0].name] if len(groups) == 1 else add_up(found)


def add_up(groups: dict[str, AuditReport]) -> AuditReport:
    """Return the report of all groups together; an offender says of which group it is."""
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
    for tries_left in reversed(range(LOOKS_MAX)):
        try:
            with spark_errors(), described(spark, f"audit of {endpoint}"):
                report = _audit_once(spark, endpoint, ledger_uri, overdue_ms)
        except OutOfRange as error:
            if not tries_left:
                raise
            LOG.info("looking again job=audit reason=%s", error)
            continue
        if (
            not report.lost
            or not tries_left
            or report.scope is None
            or not _has_let_go(endpoint, report.scope)
        ):
            break
        LOG.info("looking again, retention may have let them go job=audit lost=%d", report.lost)
    return report


def _audit_once(spark: SparkSession, endpoint: str, uri: str | None, overdue_ms: int) -> AuditReport:
    scope, history = gather_witnesses(spark, endpoint, uri)
    witnessed = history.unionByName(waiting(spark, endpoint, scope), allowMissingColumns=True)
    judged = judge(witnessed.where(f.col("seq") >= scope.since), scope.now_ms, overdue_ms)
    # Spark plans what is kept when it is told so: around that, too, stands how many partitions a shuffle has.
    with shuffled_by_size(spark, scope.end - scope.since):
        judged = judged.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return balance(judged, queue_gaps(spark, endpoint, scope), scope)
        finally:
            judged.unpersist()


def _has_let_go(endpoint: str, scope: Scope) -> bool:
    """Return whether the log begins later than it did when the audit looked."""
    with Endpoint(endpoint) as broker:
        return broker.status().log.first_seq > scope.first


# ---- the witnesses ----------------------------------------------------------------------------------------


def gather_witnesses(spark: SparkSession, endpoint: str, uri: str | None) -> tuple[Scope, DataFrame]:
    """Return the scope, and all events in it with a column `seq`, one row a promise and event."""
    with Endpoint(endpoint) as broker:
        status = settled_status(broker)
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
        table = open_table(uri or beside(ledger.NAME, end.table.uri, end))
        since, ledger_end = ledger.bounds(table)
        scope = msgspec.structs.replace(scope, since=since, ledger_end=ledger_end)
        recorded = ledger.read_ledger(spark, table)
    except NotFound:
        LOG.info("no ledger, the log alone is the witness job=audit since_seq=%d", scope.since)
    if scope.ledger_end < end.log.first_seq:
        raise OutOfRange(
            f"the ledger ends at row {scope.ledger_end}, the log begins at {end.log.first_seq}: events are lost"
        )
    fresh = read_events(spark, endpoint, min(scope.ledger_end, scope.end), scope.end)
    history = fresh if recorded is None else recorded.where(f.col("event_seq") < scope.end).unionByName(fresh)
    history = history.where("rows > 0")  # a start of the broker is no promise's event
    seq = f.explode(f.expr("sequence(first_seq, first_seq + rows - 1)")).alias("seq")
    return scope, history.select(
        seq, "event", "topic", "unique_key", "due_ms", "at_ms", "event_seq", "from_due_ms"
    )


def waiting(spark: SparkSession, endpoint: str, scope: Scope) -> DataFrame:
    """Return promises at rest, as the event 'waiting', more than once where they lie in several places.

    Rows of the table, PROMISE rows of the tail, and its MOVED rows, under the number of the promise they hold.
    Promises of delay levels have a place in a queue; retention leaves their rows in the log until they are settled.
    """
    columns = "seq,due_ms,topic,unique_key"
    source = spark.read.format("timeball").option("endpoint", endpoint).option("columns", columns)
    source = source.option("read", "pending").option("version", str(scope.version))
    table = source.option("columns", f"{columns},number").load().withColumn("event_seq", f.col("seq"))
    table = table.withColumn("seq", f.coalesce("number", "seq")).drop("number")
    source = spark.read.format("timeball").option("endpoint", endpoint).option("to_seq", str(scope.end))
    # Where nothing compacts, the tail is the whole log, less what retention has removed since.
    begin = "first" if scope.watermark <= scope.first else min(scope.watermark, scope.end)
    source = source.option("kinds", "promise,moved").option("placed", "false").option("from_seq", str(begin))
    tail = _by_number(source.option("columns", f"kind,source_seq,{columns}").load())
    source = spark.read.format("timeball").option("endpoint", endpoint).option("to_seq", str(scope.end))
    source = source.option("kinds", "promise,moved").option("placed", "true")
    levels = _by_number(source.option("columns", f"kind,source_seq,{columns}").load())
    return table.unionByName(tail).unionByName(levels).withColumn("event", f.lit("waiting"))


def _by_number(rows: DataFrame) -> DataFrame:
    """Return PROMISE and MOVED rows under the numbers of their promises, without half messages."""
    number = f.when(f.col("kind") == int(Kind.MOVED), f.col("source_seq")).otherwise(f.col("seq"))
    rows = rows.withColumn("event_seq", f.col("seq")).withColumn("seq", number)
    return rows.drop("kind", "source_seq").where("due_ms is not null")


def queue_gaps(spark: SparkSession, endpoint: str, scope: Scope) -> DataFrame:
    """Return queues whose positions are not unique and dense, with how many are missing and how many taken twice."""
    source = spark.read.format("timeball").option("endpoint", endpoint)
    source = source.option("placed", "true")
    source = source.option("columns", "topic,queue_id,queue_offset").option("to_seq", str(scope.end))
    return gaps(source.load())


def gaps(visible: DataFrame) -> DataFrame:
    """Reduce `visible` (topic, queue_id, queue_offset) to the queues that are not dense."""
    taken = visible.groupBy("topic", "queue_id", "queue_offset").agg(f.count("*").alias("times"))
    queues = taken.groupBy("topic", "queue_id").agg(
        f.min("queue_offset").alias("first"),
        f.max("queue_offset").alias("last"),
        (f.max("queue_offset") - f.min("queue_offset") + 1 - f.count("queue_offset")).alias("missing"),
        f.sum(f.col("times") - 1).alias("twice"),
        f.sum(f.when(f.col("queue_offset").isNull(), f.col("times")).otherwise(0)).alias("unplaced"),
    )
    return queues.where("missing > 0 or twice > 0 or unplaced > 0")


# ---- the judgement ----------------------------------------------------------------------------------------


def judge(witnessed: DataFrame, now_ms: int, overdue_ms: int) -> DataFrame:
    """Fold events into one row a promise: what happened to it, and a flag for each breach.

    `witnessed`: seq, event (accepted, moved, released, cancelled, waiting), topic, unique_key, due_ms, at_ms,
    event_seq, the row that says so, and from_due_ms. What waits at an instant from before the last move does not count.
    """

    def times(event: str) -> Column:
        return f.count(f.when(f.col("event") == event, 1)).alias(event)

    def newest(event: str) -> Column:
        return f.max(f.when(f.col("event") == event, f.col("event_seq")))

    # The instant promised last counts, not the one the release claims for itself.
    moved_to = f.max_by("due_ms", f.when(f.col("event") == "moved", f.col("event_seq")))
    promised = f.coalesce(
        f.when(newest("moved").isNotNull(), moved_to),
        f.max(f.when(f.col("event") != "released", f.col("due_ms"))),
    )
    waits = f.coalesce(newest("waiting") >= f.coalesce(newest("moved"), f.lit(0)), f.lit(False))
    folded = witnessed.groupBy("seq").agg(
        times("accepted"),
        times("released"),
        times("cancelled"),
        waits.cast("int").alias("waiting"),
        # While it waits for a level a promise stands in another topic, until it is settled.
        f.coalesce(f.max(f.when(f.col("topic") != SCHEDULE_TOPIC, f.col("topic"))), f.max("topic")).alias(
            "topic"
        ),
        f.max("unique_key").alias("unique_key"),
        f.coalesce(promised, f.max("due_ms")).alias("due_ms"),
        f.min(f.when(f.col("event") == "released", f.col("at_ms"))).alias("released_ms"),
        f.min(f.when(f.col("event") == "released", f.col("due_ms"))).alias("shifted_ms"),
        f.min(f.when(f.col("event") == "released", f.col("from_due_ms"))).alias("from_due_ms"),
    )
    settled = f.col("released") + f.col("cancelled")
    open_ = (f.col("accepted") > 0) & (settled == 0)
    # A shift counts only if it is one of the instant that the other witnesses know.
    is_shifted = f.col("from_due_ms") == f.col("due_ms")
    due_ms = f.when(is_shifted, f.col("shifted_ms")).otherwise(f.col("due_ms"))
    return folded.select(
        "*",
        (open_ & (f.col("waiting") == 0)).alias("lost"),
        f.coalesce(f.col("released_ms") < due_ms, f.lit(False)).alias("early"),
        ((settled > 1) | (f.col("accepted") > 1)).alias("duplicate"),
        (f.col("accepted") == 0).alias("unknown"),
        (open_ & (f.col("waiting") > 0)).alias("pending"),
        f.coalesce(open_ & (f.col("due_ms") < now_ms - overdue_ms), f.lit(False)).alias("overdue"),
    )


def balance(judged: DataFrame, uneven_queues: DataFrame, scope: Scope) -> AuditReport:
    """Return count, and fetch some rows of every breach there is."""

    def count(condition: Column) -> Column:
        return f.count(f.when(condition, 1))

    known = f.col("accepted") > 0
    counts = {
        "accepted": count(known),
        "released": count(known & (f.col("released") > 0)),
        "cancelled": count(known & (f.col("released") == 0) & (f.col("cancelled") > 0)),
        **{name: count(f.col(name)) for name in ("pending", "overdue", *BREACHES)},
    }
    found = judged.agg(*[column.alias(name) for name, column in counts.items()]).collect()[0].asDict()
    offenders = {
        name: [row.asDict() for row in judged.where(f.col(name)).limit(OFFENDERS_MAX).collect()]
        for name in (*BREACHES, "overdue")
        if found[name]
    }
    uneven = [row.asDict() for row in uneven_queues.limit(OFFENDERS_MAX).collect()]
    if uneven:
        offenders["queue_gaps"] = uneven
    settled = found["released"] + found["cancelled"]
    ok = not any(found[name] for name in BREACHES) and not uneven
    ok = ok and found["accepted"] == settled + found["pending"]
    return AuditReport(ok=ok, scope=scope, expired=0, queue_gaps=len(uneven), offenders=offenders, **found)
