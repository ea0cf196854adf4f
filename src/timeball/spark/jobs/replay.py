"""The job `replay` schedules the messages of a past window again, moved and stretched in time.

    a message that passed at t in [from, until)  ->  a scheduled message due at  start + (t - from) * stretch

A message *passes* when it becomes visible in a queue. `t` is the time at which it passed, or its due time (`by`). The
messages come from the archive up to its mark, and from the log after that. So a replay is complete even if the job
`archive` lags. A window is refused if it begins before the archive (without an archive: before the log), or if it has
not ended yet. Otherwise a replay of some of its messages would look complete.

All messages are written in one attach. Its name follows from the arguments, and the broker accepts each name only once.
So a second run with the same arguments changes nothing. A replay is a campaign (jobs/campaign.py) of that name, so its
pending messages can be counted, paused and cancelled together. If a run dies, another run with the same arguments
completes the replay.

A replayed message is a new message. It has its own id, and its property REPLAY_OF contains the old id. Queue, tag,
keys, properties, flags and body are the same. The topics for retries and dead letters (%RETRY%…, %DLQ%…) are replayed
only if they are named. Otherwise retried messages would occur twice.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
from deltalake import DeltaTable
from msgspec import UNSET, UnsetType
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.model import limits
from timeball.model.answers import Campaign as CampaignState
from timeball.model.answers import Status
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, Unavailable
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END
from timeball.model.rules import check_campaign
from timeball.spark.endpoint import Endpoint, Group, group_table_uri, read_groups
from timeball.spark.jobs import archive
from timeball.spark.jobs.archive import PASSED
from timeball.spark.jobs.bulk import check_table
from timeball.spark.jobs.campaign import Campaign
from timeball.spark.source.spark_api import Bounds, described, spark_errors
from timeball.spark.table_store import default_table_uri, open_table

LOG = logging.getLogger("timeball.spark")

REPLAY_OF = "REPLAY_OF"
RETRY_TOPICS = "^%(RETRY|DLQ)%"
ROWS_PER_TASK = 500_000
BARS_MAX = 48  # of the due load that a plan shows
_WIDTHS_MS = [
    *(n * limits.SECOND_MS for n in (1, 5, 15)),
    *(n * limits.MINUTE_MS for n in (1, 5, 15)),
    *(n * limits.HOUR_MS for n in (1, 3, 6, 12)),
    *(n * limits.DAY_MS for n in (1, 7, 30, 365)),
]
_TRANSACTION_BITS = 0x4 | 0x8  # of RocketMQ's sys_flag: cleared, because a replay is no transaction
# The columns of the messages that a replay reads.
_COLUMNS = (
    "topic", "queue_id", "tag", "keys", "unique_key", "body", "properties", "flag", "sys_flag", "kind", "seq",
    "store_ms", "due_ms",
)  # fmt: skip
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


# ---- the messages of a window -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The sources of a replay: the archive (if any) up to row `mark` of the log, and the log from there on."""

    table: DeltaTable | None
    since_ms: int  # the sources have all messages that passed at this time or later
    mark: int  # the log is read from this row on
    end: int  # up to this row, exclusive
    now_ms: int
    settled_before_ms: int  # all messages that were due earlier are settled (released or cancelled)


def open_sources(endpoint: str, archive_uri: str | None = None, table_uri: str | None = None) -> Sources:
    """Open the archive, and find the bounds of archive and log.

    All messages that passed before `now_ms` are in rows before `end`. `archive_uri`: by default the archive beside the
    pending table, if it exists. `table_uri`: the URI of the pending table for this process, if it is not the broker's.

    Raises NotFound if there is no archive at a given `archive_uri`, StorageError if the table there is not an archive
    or cannot be read, OutOfRange if rows between the archive and the log are missing, and Unavailable if the broker's
    disk lags.
    """
    with Endpoint(endpoint) as broker:
        status = _wait_until_durable(broker)
        first = status.log.first_seq
        table, reach = None, archive.ArchiveRange(first, 0, first)
        try:
            table = open_table(
                archive_uri or default_table_uri(archive.NAME, table_uri or status.table.uri, status)
            )
            reach = archive.read_range(table)
        except NotFound:
            if archive_uri is not None:
                raise
            reach = archive.ArchiveRange(first, archive.beginning(broker)[1], first)
    if reach.mark < first:
        raise OutOfRange(
            f"the archive ends at row {reach.mark} but the log begins at {first}: messages between them are missing"
        )
    end = max(reach.mark, status.log.durable_seq)
    return Sources(table, reach.since_ms, reach.mark, end, status.now_ms, status.settled_before_ms)


def _wait_until_durable(broker: Endpoint) -> Status:
    """Wait until all rows that have a number now are durable. Returns a status with the current `now_ms`.

    Raises Unavailable after _DURABLE_TRIES tries.
    """
    first_status = broker.status()
    for _ in range(_DURABLE_TRIES):
        status = broker.status()
        if status.log.durable_seq >= first_status.log.next_seq:
            return msgspec.structs.replace(status, now_ms=first_status.now_ms)
        threading.Event().wait(_DURABLE_PAUSE_S)
    raise Unavailable("the broker's disk does not keep up; try again when less is being sent")


def check_covered(window: Window, sources: Sources) -> None:
    """Check that the sources have all messages of the window, and that no new due time is too far ahead.

    Raises OutOfRange if messages are too old or have not passed yet, InvalidDelay for a due time too far ahead.
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


def deciding_time(by: By) -> Column:
    """Make the column of the time that decides whether a message is in the window (Window.by).

    For a message without a due time, it is always the time at which it became visible.
    """
    return f.coalesce(f.col("due_ms"), f.col("store_ms")) if by == "due" else f.col("store_ms")


def read_window(spark: SparkSession, endpoint: str, window: Window, sources: Sources) -> DataFrame:
    """Read the messages of a window: _COLUMNS, and `at_ms`, the time that decides (`deciding_time`)."""
    source = spark.read.format("timeball").option("endpoint", endpoint).option("columns", ",".join(_COLUMNS))
    source = source.option("kinds", ",".join(str(int(kind)) for kind in PASSED))
    source = source.option("from_seq", str(sources.mark)).option("to_seq", str(sources.end))
    rows = source.load()
    if sources.table is not None:
        # Messages that were due in the window became visible in it or after it, but never before.
        span = Bounds(window.from_ms, window.until_ms - 1 if window.by == "visible" else None)
        uris = archive.select_files(sources.table, span, topics=window.topics)
        rows = archive.read_archive(spark, sources.table, uris).select(*_COLUMNS).unionByName(rows)
    return select_window(rows, window)


def select_window(rows: DataFrame, window: Window) -> DataFrame:
    """Select the rows of the log or the archive that are in the window, and add the column `at_ms`."""
    at_ms = deciding_time(window.by)
    topic = f.col("topic")
    has_topic = topic.isin(*window.topics) if window.topics else ~topic.rlike(RETRY_TOPICS)
    is_in_window = (at_ms >= window.from_ms) & (at_ms < window.until_ms) & has_topic
    return rows.where(is_in_window).withColumn("at_ms", at_ms)


# ---- the new messages -------------------------------------------------------------------------------------


def new_due_time(window: Window) -> Column:
    """Make the column of new due times (ms) from `at_ms`. Rounded up, because a message may never be early."""
    return f.lit(window.start_ms) + f.ceil((f.col("at_ms") - window.from_ms) * f.lit(window.stretch)).cast(
        "bigint"
    )


def scheduled_rows(rows: DataFrame, window: Window, count: int | None = None) -> DataFrame:
    """Convert the messages of `read_window` to rows for the data source's writer, partitioned and sorted by due time.

    `count`: the number of rows, for partitions of about ROWS_PER_TASK rows. None: one partition. Messages with the same
    new due time are in the same partition, sorted by `at_ms`, then by their row in the log.
    """
    properties = f.coalesce(f.col("properties"), f.lit(""))
    has_end = (properties == "") | properties.endswith(PROPERTY_END)
    properties = f.when(has_end, properties).otherwise(f.concat(properties, f.lit(PROPERTY_END)))
    with_replay_of = f.concat(
        properties, f.lit(REPLAY_OF + PROPERTY_NAME_END), f.col("unique_key"), f.lit(PROPERTY_END)
    )
    # If the properties would become too long, the row keeps its properties, without REPLAY_OF.
    has_id = f.col("unique_key").isNotNull()
    fits = has_id & (f.octet_length(with_replay_of) <= limits.PROPERTIES_BYTES_MAX)
    topic = f.col("topic") if window.to_topic is None else f.lit(window.to_topic)
    flags = f.coalesce(f.col("sys_flag"), f.lit(0)).bitwiseAND(f.lit(~_TRANSACTION_BITS))
    scheduled = rows.select(
        topic.alias("topic"),
        "body",
        new_due_time(window).alias("due_ms"),
        "tag",
        "keys",
        f.when(fits, with_replay_of).otherwise(f.col("properties")).alias("properties"),
        "queue_id",
        "flag",
        flags.cast("int").alias("sys_flag"),
        "at_ms",
        "seq",
    )
    partitions = 1 if count is None else -(-count // ROWS_PER_TASK)
    # Messages with the same due time are released in the order of their numbers, and each task numbers only its own
    # rows. So all messages with the same due time must be in one task.
    in_order = scheduled.repartitionByRange(partitions, "due_ms").sortWithinPartitions(
        "due_ms", "at_ms", "seq"
    )
    return in_order.drop("at_ms", "seq")


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
    new_due_ms = new_due_time(window)
    step = (f.floor(new_due_ms / width) * width).cast("bigint")
    with spark_errors(), described(spark, f"replay {window.job_id}: what passed"):
        counts = (
            read_window(spark, endpoint, window, sources)
            .groupBy("topic", step.alias("step"))
            .agg(
                f.count("*").alias("rows"),
                f.sum(f.octet_length("body")).alias("bytes"),
                f.min(new_due_ms).alias("first"),
                f.max(new_due_ms).alias("last"),
                f.count_if(new_due_ms < sources.now_ms).alias("overdue"),
            )
            .collect()
        )
    curve: dict[int, int] = {}
    topics: dict[str, int] = {}
    for count in counts:  # one for each topic and step of the curve
        curve[count["step"]] = curve.get(count["step"], 0) + count["rows"]
        topics[count["topic"]] = topics.get(count["topic"], 0) + count["rows"]
    return ReplayPlan(
        job_id=window.job_id,
        rows=sum(topics.values()),
        body_bytes=sum(count["bytes"] or 0 for count in counts),
        first_due_ms=min((count["first"] for count in counts), default=None),
        last_due_ms=max((count["last"] for count in counts), default=None),
        overdue=sum(count["overdue"] for count in counts),
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
    """Schedule the messages of the window again, in one attach. If this name is attached already, only reports it.

    `archive_uri`: the archive, by default beside the pending table. `table_uri`: the URI of the pending table for the
    driver and the executors, if it is not the broker's. `job_id`: a name other than the window's, to replay the same
    window again. `planned`: a recent result of `plan`, so that the messages are not counted again.

    Raises InvalidMessage if the replay was cancelled, OutOfRange if the broker has forgotten its campaign, and the
    errors of `plan`.
    """
    window.check()
    name = check_campaign(job_id or window.job_id)
    earlier_report = done_before(endpoint, name, table_uri)
    if earlier_report is not None:
        return earlier_report
    uris = {"archive_uri": archive_uri, "table_uri": table_uri}
    planned = planned or plan(spark, endpoint, window, **uris)
    sources = open_sources(endpoint, **uris)
    if not planned.rows:
        return ReplayReport(job_id=name, rows=0, at_ms=sources.now_ms, repeated=False, ranges=[])
    with spark_errors(), Endpoint(endpoint) as broker:
        campaign = Campaign(broker, name, table_uri)
        check_table(spark, campaign.table_uri, broker.status().table.version, "--table-uri")
        campaign.plan(planned.rows, sources.now_ms)
        scheduled = scheduled_rows(read_window(spark, endpoint, window, sources), window, planned.rows)
        writer = scheduled.write.format("timeball").option("endpoint", endpoint).option("job_id", name)
        with described(spark, f"replay {name}"):
            # The rows were accepted before and are not changed. For example, RocketMQ's clients join several keys into
            # one text, which the writer would refuse in a DataFrame.
            writer = writer.option("as_stored", "true")
            writer.option("table_uri", campaign.table_uri).mode("append").save()
        attached = campaign.read_state()
        if attached.state == "planned":
            raise OutOfRange(
                f"replay {name} was done so long ago that the broker has forgotten it: use another name"
            )
    LOG.info("window scheduled again job=replay id=%s rows=%d", name, attached.rows)
    return _report(attached)


def done_before(endpoint: str, job_id: str, table_uri: str | None = None) -> ReplayReport | None:
    """Report the result of an earlier replay of this name. Returns None if there is none, or if it was not completed.

    Raises InvalidMessage if it was cancelled.
    """
    with Endpoint(endpoint) as broker:
        state = Campaign(broker, job_id, table_uri).find_state()
    if state is None or state.state == "planned":
        return None
    if state.state == "cancelled":
        raise InvalidMessage(
            f"replay {job_id} was cancelled: to do it nevertheless, give another name with --job-id"
        )
    return _report(state, repeated=True)


def _report(state: CampaignState, *, repeated: bool = False) -> ReplayReport:
    """Build the report of a replay from its campaign. `repeated`: an earlier call has done the replay."""
    return ReplayReport(
        job_id=state.campaign,
        rows=state.rows,
        at_ms=state.planned_ms,
        repeated=repeated,
        ranges=state.ranges,
    )


# ---- the groups of a cluster ----------------------------------------------------------------------------------
# Each group has its own replay, whose messages are scheduled again in the same group. All replays have the same name.
# If a run dies, the next run completes it: groups that have done their replay do nothing, and a group that was added
# meanwhile replays its messages. With one group, the result is that of `run`.


K = TypeVar("K", int, str)


def plan_groups(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
) -> ReplayPlan:
    """Count the messages that `run_groups` would schedule. Writes nothing. Raises the errors of `plan`.

    `archive_uri`, `table_uri`: as in `run_groups`.
    """
    groups = read_groups(endpoint)
    plans = {
        group.name: plan(
            spark, group.endpoint, window, **_group_uris(group, len(groups), archive_uri, table_uri)
        )
        for group in groups
    }
    return plans[groups[0].name] if len(groups) == 1 else sum_plans(plans)


def run_groups(
    spark: SparkSession,
    endpoint: str,
    window: Window,
    *,
    archive_uri: str | None = None,
    table_uri: str | None = None,
    job_id: str | None = None,
    planned: ReplayPlan | None = None,
) -> ReplayReport:
    """Schedule the messages of the window again, in one attach per group. Does nothing in groups that have done so.

    The arguments are those of `run`. `planned`: a recent result of `plan_groups`. URIs contain `{group}` if there are
    several groups. Raises the errors of `run`.
    """
    groups, reports = read_groups(endpoint), {}
    for group in groups:
        group_plan = planned
        if planned is not None and len(groups) > 1:
            group_plan = planned.groups.get(group.name) if planned.groups else None
        uris = _group_uris(group, len(groups), archive_uri, table_uri)
        reports[group.name] = run(spark, group.endpoint, window, job_id=job_id, planned=group_plan, **uris)
    return reports[groups[0].name] if len(groups) == 1 else sum_reports(reports)


def groups_done_before(endpoint: str, job_id: str, table_uri: str | None = None) -> ReplayReport | None:
    """Report the result of an earlier replay of this name. Returns None unless all groups have done their part."""
    groups, reports = read_groups(endpoint), {}
    for group in groups:
        uri = group_table_uri("--table-uri", table_uri, group.name, len(groups))
        report = done_before(group.endpoint, job_id, uri)
        if report is None:
            return None
        reports[group.name] = report
    return reports[groups[0].name] if len(groups) == 1 else sum_reports(reports)


def sum_plans(groups: Mapping[str, ReplayPlan]) -> ReplayPlan:
    """Add the plans of all groups. They have the same `width_ms`, because it follows from the window."""
    plans = list(groups.values())
    first_due_ms = [each.first_due_ms for each in plans if each.first_due_ms is not None]
    last_due_ms = [each.last_due_ms for each in plans if each.last_due_ms is not None]
    topics = _add_counts(each.topics for each in plans)
    return msgspec.structs.replace(
        plans[0],
        rows=sum(each.rows for each in plans),
        body_bytes=sum(each.body_bytes for each in plans),
        first_due_ms=min(first_due_ms, default=None),
        last_due_ms=max(last_due_ms, default=None),
        overdue=sum(each.overdue for each in plans),
        now_ms=min(each.now_ms for each in plans),
        curve=dict(sorted(_add_counts(each.curve for each in plans).items())),
        topics=dict(sorted(topics.items(), key=lambda item: (-item[1], item[0]))),
        groups=dict(groups),
    )


def sum_reports(groups: Mapping[str, ReplayReport]) -> ReplayReport:
    """Add the reports of all groups.

    `repeated` is True if no group has scheduled a row now, and at least one before.
    """
    reports = list(groups.values())
    return ReplayReport(
        job_id=reports[0].job_id,
        rows=sum(report.rows for report in reports),
        at_ms=min(report.at_ms for report in reports),
        repeated=any(report.repeated for report in reports)
        and not any(report.rows and not report.repeated for report in reports),
        ranges=[],
        groups=dict(groups),
    )


def _group_uris(
    group: Group, groups: int, archive_uri: str | None, table_uri: str | None
) -> dict[str, str | None]:
    """Replace `{group}` in the URIs by the name of the group. `groups`: the number of groups."""
    return {
        "archive_uri": group_table_uri("--archive", archive_uri, group.name, groups),
        "table_uri": group_table_uri("--table-uri", table_uri, group.name, groups),
    }


def _add_counts(counts_of_groups: Iterable[Mapping[K, int]]) -> dict[K, int]:
    """Add the counts of all groups, key by key."""
    total: dict[K, int] = {}
    for counts in counts_of_groups:
        for key, rows in counts.items():
            total[key] = total.get(key, 0) + rows
    return total
