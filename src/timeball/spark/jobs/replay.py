"""The job `replay` schedules the messages of a past window again, moved and stretched in time.

    a message that passed at t in [from, until)  ->  a scheduled message due at  start + (t - from) * stretch

A message *passes* when it becomes visible in a queue. `t` is that time, or the message's due time (`by`). The messages
come from the archive up to its mark, and from the log after that. So a replay is complete even if the job `archive` has
not caught up. A window is refused if it begins before the archive (or, without one, before the log), or if it is not
over yet. Otherwise a replay of a part of the messages would look complete.

All messages are written in one attach. Its name follows from the arguments, and the broker accepts each name only once.
So a second run with the same arguments changes nothing. A replay is a campaign (jobs/campaign.py) of that name, so its
pending messages can be counted, paused and cancelled together. If a run dies, the next one completes it.

A replayed message is a new message. It has its own id, and its property REPLAY_OF contains the old id. Queue, tag,
keys, properties, flags and body are the same. The topics for retries and dead letters (%RETRY%…, %DLQ%…) are replayed
only if they are named. Otherwise retried messages would occur twice.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from typing import Literal

import msgspec
from deltalake import DeltaTable
from msgspec import UNSET, UnsetType
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, Unavailable
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END
from timeball.model.rules import check_campaign
from timeball.model.wire import Campaign as Decided
from timeball.model.wire import Status
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive
from timeball.spark.jobs.archive_writer import PASSED
from timeball.spark.jobs.bulk import check_table
from timeball.spark.jobs.campaign import Campaign
from timeball.spark.source.pushdown import Bounds
from timeball.spark.source.spark_api import described
from timeball.spark.spark_errors import spark_errors
from timeball.spark.table_store import beside, open_table

LOG = logging.getLogger("timeball.spark")

REPLAY_OF = "REPLAY_OF"
SECOND_TRIES = "^%(RETRY|DLQ)%"
ROWS_PER_TASK = 500_000
BARS_MAX = 48  # of the due load that a plan shows
_WIDTHS_MS = [
    *(n * limits.SECOND_MS for n in (1, 5, 15)),
    *(n * limits.MINUTE_MS for n in (1, 5, 15)),
    *(n * limits.HOUR_MS for n in (1, 3, 6, 12)),
    *(n * limits.DAY_MS for n in (1, 7, 30, 365)),
]
_TRANSACTION_BITS = 0x4 | 0x8  # of RocketMQ's sys_flag: cleared, because a replay is no transaction
_KEPT = ("topic", "queue_id", "tag", "keys", "unique_key", "body", "properties", "flag", "sys_flag")
_READ = (*_KEPT, "kind", "seq", "store_ms", "due_ms")
_DURABLE_TRIES = 100
_DURABLE_PAUSE_S = 0.05

By = Literal["visible", "due"]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The messages to replay, and their new times. Times are in milliseconds since 1970."""

    from_ms: int
    until_ms: int  # exclusive
    start_ms: int  # the new time of `from_ms`
    stretch: float = 1.0  # factor for the length of the window; 0: all messages at `start_ms`
    topics: tuple[str, ...] = ()  # empty: all, without retries and dead letters
    to_topic: str | None = None  # None: each message stays in its topic
    by: By = "visible"  # the time that decides: when a message became visible, or when it was due

    def check(self) -> None:
        """Raise InvalidDelay for an empty window, a start before 1970, or a negative or infinite stretch."""
        if self.until_ms <= self.from_ms:
            raise InvalidDelay("the window is empty: its end must lie behind its beginning")
        if not 0 <= self.stretch < float("inf"):
            raise InvalidDelay(f"stretch {self.stretch}: 0 (all at once) or more")
        if self.start_ms < 0:
            raise InvalidDelay("the replayed window would begin before 1970")

    @property
    def job_id(self) -> str:
        """The default name of the replay, which is the same for the same window."""
        return "replay-" + hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]

    @property
    def end_ms(self) -> int:
        """The new time of `until_ms`, rounded up."""
        return self.start_ms + int(-(-(self.until_ms - self.from_ms) * self.stretch // 1))


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a replay: the messages that it would schedule."""

    job_id: str
    rows: int
    body_bytes: int
    first_due_ms: int | None
    last_due_ms: int | None
    overdue: int  # rows whose new due time is before `now_ms`
    now_ms: int
    width_ms: int
    curve: dict[int, int]  # due time, in steps of `width_ms` -> rows
    topics: dict[str, int]  # topic in which messages passed -> rows
    groups: dict[str, ReplayPlan] | UnsetType = UNSET  # the plan of each group, if there are several


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    job_id: str
    rows: int
    at_ms: int  # when it was planned first
    repeated: bool  # it was done by an earlier run
    ranges: list[tuple[int, int]]  # (first_seq, rows) of the new messages; empty for several groups
    groups: dict[str, ReplayReport] | UnsetType = UNSET  # the report of each group, if there are several


# ---- what passed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The sources of a replay: the archive, if there is one, up to row `mark` of the log, and the log from there on."""

    table: DeltaTable | None
    since_ms: int  # all messages that passed at this time or later are known
    mark: int
    end: int  # exclusive
    now_ms: int
    settled_before_ms: int  # all messages that were due before are settled (released or cancelled)


def open_sources(endpoint: str, archive_uri: str | None = None, table_uri: str | None = None) -> Sources:
    """Find the bounds of archive and log, such that all messages that passed before `now_ms` are in rows before `end`.

    Raises NotFound if there is no archive at a given `archive_uri`. Raises OutOfRange if rows between the archive and
    the log are missing.
    """
    with Endpoint(endpoint) as broker:
        status = _all_durable(broker)
        first = status.log.first_seq
        table, known = None, archive.Reach(first, 0, first)
        try:
            table = open_table(archive_uri or beside(archive.NAME, table_uri or status.table.uri, status))
            known = archive.reach(table)
        except NotFound:
            if archive_uri is not None:
                raise
            known = archive.Reach(first, archive.beginning(broker)[1], first)
    if known.mark < first:
        raise OutOfRange(
            f"the archive ends at row {known.mark} but the log begins at {first}: messages between them are missing"
        )
    end = max(known.mark, status.log.durable_seq)
    return Sources(table, known.since_ms, known.mark, end, status.now_ms, status.settled_before_ms)


def _all_durable(broker: Endpoint) -> Status:
    """Wait for a status in which all rows that were numbered at its `now_ms` are durable.

    Raises Unavailable after _DURABLE_TRIES tries.
    """
    asked = broker.status()
    for _ in range(_DURABLE_TRIES):
        status = broker.status()
        if status.log.durable_seq >= asked.log.next_seq:
            return msgspec.structs.replace(status, now_ms=asked.now_ms)
        threading.Event().wait(_DURABLE_PAUSE_S)
    raise Unavailable("the broker's disk does not keep up; try again when less is being sent")


def check_covered(window: Window, sources: Sources) -> None:
    """Raise OutOfRange if some messages of the window are unknown, because they are too old or have not passed yet.

    Raises InvalidDelay if a new due time would be too far ahead.
    """
    if window.from_ms < sources.since_ms:
        raise OutOfRange(
            f"the window begins at {window.from_ms}, but what passed is known from {sources.since_ms} on "
            "(milliseconds since 1970): start the job `archive` before the log lets go"
        )
    if window.end_ms > sources.now_ms + limits.DELAY_MS_MAX:
        raise InvalidDelay(
            f"the replay would end more than {limits.DELAY_MS_MAX // limits.DAY_MS} days from now"
        )
    settled = sources.now_ms if window.by == "visible" else min(sources.now_ms, sources.settled_before_ms)
    if window.until_ms > settled:
        raise OutOfRange(
            f"the window ends at {window.until_ms}, but is only over when what passes until then has passed: "
            f"now up to {settled} (milliseconds since 1970)"
        )


def moment(by: By) -> Column:
    """Make the column of the time that decides. The due time of a message without delay is when it became visible."""
    return f.coalesce(f.col("due_ms"), f.col("store_ms")) if by == "due" else f.col("store_ms")


def passed(spark: SparkSession, endpoint: str, window: Window, sources: Sources) -> DataFrame:
    """Read the messages of a window: the columns that a replay needs, and `at_ms`, the time that decides."""
    source = spark.read.format("timeball").option("endpoint", endpoint).option("columns", ",".join(_READ))
    source = source.option("kinds", ",".join(str(int(kind)) for kind in PASSED))
    source = source.option("from_seq", str(sources.mark)).option("to_seq", str(sources.end))
    rows = source.load()
    if sources.table is not None:
        # Messages that were due in the window became visible in it or after it, but never before.
        span = Bounds(window.from_ms, window.until_ms - 1 if window.by == "visible" else None)
        uris = archive.files(sources.table, span, topics=window.topics)
        rows = archive.read_archive(spark, sources.table, uris).select(*_READ).unionByName(rows)
    return within(rows, window)


def within(rows: DataFrame, window: Window) -> DataFrame:
    """Select the rows of the log or the archive that are in the window, and add the column `at_ms`."""
    at = moment(window.by)
    topic = f.col("topic")
    wanted = topic.isin(*window.topics) if window.topics else ~topic.rlike(SECOND_TRIES)
    inside = (at >= window.from_ms) & (at < window.until_ms) & wanted
    return rows.where(inside).withColumn("at_ms", at)


# ---- when it passes again ---------------------------------------------------------------------------------


def due(window: Window) -> Column:
    """Make the column of new due times. They are rounded up, because a message may be slightly late but never early."""
    return f.lit(window.start_ms) + f.ceil((f.col("at_ms") - window.from_ms) * f.lit(window.stretch)).cast(
        "bigint"
    )


def scheduled_rows(rows: DataFrame, window: Window, count: int | None = None) -> DataFrame:
    """Convert messages that passed to rows for the data source's writer, partitioned and sorted by due time.

    `count`: the number of rows, for partitions of about ROWS_PER_TASK rows. None: one partition. Messages with the same
    due time are in the same partition, in the order in which they passed.
    """
    given = f.coalesce(f.col("properties"), f.lit(""))
    closed = (given == "") | given.endswith(PROPERTY_END)
    given = f.when(closed, given).otherwise(f.concat(given, f.lit(PROPERTY_END)))
    named = f.concat(given, f.lit(REPLAY_OF + PROPERTY_NAME_END), f.col("unique_key"), f.lit(PROPERTY_END))
    # If the properties would become too long, the row keeps its properties, without REPLAY_OF.
    fits = f.col("unique_key").isNotNull() & (f.octet_length(named) <= limits.PROPERTIES_BYTES_MAX)
    topic = f.col("topic") if window.to_topic is None else f.lit(window.to_topic)
    flags = f.coalesce(f.col("sys_flag"), f.lit(0)).bitwiseAND(f.lit(~_TRANSACTION_BITS))
    again = rows.select(
        topic.alias("topic"),
        "body",
        due(window).alias("due_ms"),
        "tag",
        "keys",
        f.when(fits, named).otherwise(f.col("properties")).alias("properties"),
        "queue_id",
        "flag",
        flags.cast("int").alias("sys_flag"),
        "at_ms",
        "seq",
    )
    parts = 1 if count is None else -(-count // ROWS_PER_TASK)
    # Each task numbers its rows in order, and messages with the same due time are released in the order of numbers. So
    # all of them must be in one task.
    ordered = again.repartitionByRange(parts, "due_ms").sortWithinPartitions("due_ms", "at_ms", "seq")
    return ordered.drop("at_ms", "seq")


def width_ms(span_ms: int) -> int:
    """Choose the smallest step (ms) that shows a span in at most BARS_MAX bars."""
    return next((width for width in _WIDTHS_MS if span_ms <= width * BARS_MAX), _WIDTHS_MS[-1])


# ---- the job ----------------------------------------------------------------------------------------------


def plan(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
) -> ReplayPlan:
    """Count the messages that `run` would schedule. Writes nothing.

    `archive_uri`, `table_uri`: as in `run`. Raises InvalidDelay and OutOfRange for a window that cannot be replayed.
    """
    window.check()
    sources = open_sources(endpoint, archive_uri, table_uri)
    check_covered(window, sources)
    width = width_ms(window.end_ms - window.start_ms)
    again = due(window)
    step = (f.floor(again / width) * width).cast("bigint")
    with spark_errors(), described(spark, f"replay {window.job_id}: what passed"):
        groups = (
            passed(spark, endpoint, window, sources)
            .groupBy("topic", step.alias("step"))
            .agg(
                f.count("*").alias("rows"),
                f.sum(f.octet_length("body")).alias("bytes"),
                f.min(again).alias("first"),
                f.max(again).alias("last"),
                f.count_if(again < sources.now_ms).alias("overdue"),
            )
            .collect()
        )
    curve: dict[int, int] = {}
    topics: dict[str, int] = {}
    for group in groups:
        curve[group["step"]] = curve.get(group["step"], 0) + group["rows"]
        topics[group["topic"]] = topics.get(group["topic"], 0) + group["rows"]
    return ReplayPlan(
        job_id=window.job_id,
        rows=sum(topics.values()),
        body_bytes=sum(group["bytes"] or 0 for group in groups),
        first_due_ms=min((group["first"] for group in groups), default=None),
        last_due_ms=max((group["last"] for group in groups), default=None),
        overdue=sum(group["overdue"] for group in groups),
        now_ms=sources.now_ms,
        width_ms=width,
        curve=dict(sorted(curve.items())),
        topics=dict(sorted(topics.items(), key=lambda item: (-item[1], item[0]))),
    )


def run(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
    job_id: str | None = None,
    planned: ReplayPlan | None = None,
) -> ReplayReport:
    """Schedule the messages of the window again, in one attach. Does nothing if this name is attached already.

    `archive_uri`: the archive, by default beside the pending table. `table_uri`: the URI of the pending table for the
    driver and the executors, if it is not the broker's. `job_id`: a name other than the window's, to replay the same
    window again. `planned`: a recent result of `plan`, so that the messages are not counted again.

    Raises InvalidMessage if the replay was cancelled. Raises OutOfRange if the broker has forgotten its campaign.
    """
    window.check()
    name = check_campaign(job_id or window.job_id)
    done = done_before(endpoint, name, table_uri)
    if done is not None:
        return done
    places = {"archive_uri": archive_uri, "table_uri": table_uri}
    planned = planned or plan(spark, endpoint, window, **places)
    sources = open_sources(endpoint, **places)
    if not planned.rows:
        return ReplayReport(job_id=name, rows=0, at_ms=sources.now_ms, repeated=False, ranges=[])
    with spark_errors(), Endpoint(endpoint) as broker:
        campaign = Campaign(broker, name, table_uri)
        check_table(spark, campaign.table_uri, broker.status().table.version, "--table-uri")
        campaign.plan(planned.rows, sources.now_ms)
        again = scheduled_rows(passed(spark, endpoint, window, sources), window, planned.rows)
        writer = again.write.format("timeball").option("endpoint", endpoint).option("job_id", name)
        with described(spark, f"replay {name}"):
            # The rows were accepted before and are not changed. For example, RocketMQ's clients join several keys into
            # one text, which the writer would refuse in a DataFrame.
            writer = writer.option("as_stored", "true")
            writer.option("table_uri", campaign.table_uri).mode("append").save()
        attached = campaign.decided()
        if attached.state == "planned":
            raise OutOfRange(f"replay {name} was done so long ago that it is forgotten: name it anew")
    LOG.info("window scheduled again job=replay id=%s rows=%d", name, attached.rows)
    return _report(attached)


def done_before(endpoint: str, job_id: str, table_uri: str | None = None) -> ReplayReport | None:
    """Report the result of an earlier replay of this name, or None. Raises InvalidMessage if it was cancelled."""
    with Endpoint(endpoint) as broker:
        known = Campaign(broker, job_id, table_uri).find_decided()
    if known is None or known.state == "planned":
        return None
    if known.state == "cancelled":
        raise InvalidMessage(
            f"replay {job_id} was cancelled: to do it all the same, name it anew with --job-id"
        )
    return _report(known, repeated=True)


def _report(attached: Decided, *, repeated: bool = False) -> ReplayReport:
    return ReplayReport(
        job_id=attached.campaign,
        rows=attached.rows,
        at_ms=attached.planned_ms,
        repeated=repeated,
        ranges=attached.ranges,
    )
