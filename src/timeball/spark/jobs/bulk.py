"""The job `bulk` schedules the rows of any DataFrame that has a column with a due time, as one campaign.

    survey    count, in one pass, the invalid rows by the rule that they break, and the valid rows by the minute of
              their due time
    plan      create the campaign at the broker; the time of its plan is the "now" of all later tries
    reject    write rows that break a rule to a separate Delta table, with the rule and the row as JSON
    write     distribute the rows to tasks by due time; the tasks sort and write files (source/scheduled_writer.py)
    attach    append one record with the campaign's id to the broker's log: it schedules all rows, or none

A job may be killed at any step. Run it again under the same id to continue. Rejected rows are written once, because the
campaign's id is the application id of their commit in the Delta table. Messages are scheduled once, because the attach
contains the campaign's id. Attached rows are not written again. The source must not change until the job is done,
because the survey and the write each read it once. The write checks each row again.

In a cluster, a hash distributes the rows to the groups. The part of each group is attached separately under the same
id, so all messages of a part are scheduled, or none. A later try continues with the parts that are missing. The plan of
each part names all groups, so a group that is added between two tries changes nothing.

A task gets a contiguous range of due times, so it writes few files. Arrow sorts them. If a minute has too many rows for
a task, a hash splits it. To sort or sample the rows in Spark would be more expensive than everything else, and the
survey has counted the rows already.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.io.clock import Clock, SystemClock
from timeball.model.errors import InvalidMessage, OutOfRange, SetupError, TimeballError
from timeball.model.limits import MINUTE_MS
from timeball.model.message import Int64Array
from timeball.model.rules import check_campaign
from timeball.spark.jobs.bulk_input import REASON, ROW, Columns, screen, with_lists_of_keys
from timeball.spark.jobs.campaign import Campaign, find_attach
from timeball.spark.jobs.campaign_groups import open_parts
from timeball.spark.source.spark_api import described
from timeball.spark.spark_errors import spark_errors
from timeball.spark.table_store import CHUNK_BYTES, CHUNK_ROWS, Store, create_table, open_table, sibling
from timeball.spark.views.due_histogram import Load, merge
from timeball.table.attachment import Attachment

LOG = logging.getLogger("timeball.spark")

REJECTS = "rejects"
REJECT_SCHEMA = pa.schema([("campaign", pa.string()), ("reason", pa.string()), ("row", pa.string())])
# The limits of one task. Its rows fit into one sorted run, and two tasks can share a million rows.
TASK_ROWS, TASK_BYTES = CHUNK_ROWS // 2, CHUNK_BYTES // 2
TASKS_MAX = 2_000  # each writes one or more files, and an attach may have 10,000 files
# A hash of these columns decides the group of a row. They do not change between tries.
_PLACED_BY = ("topic", "due_ms", "unique_key", "keys", "body")
_PAYLOAD = ("body", "keys", "tag", "unique_key", "properties")


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a bulk write, or of its dry run."""

    campaign: str
    dry_run: bool
    repeated: bool  # the campaign was attached before, and this call has written nothing
    rows: int
    rejected: int
    reasons: dict[str, int]  # broken rule -> rejected rows
    rejects_uri: str | None
    payload_bytes: int  # bodies, keys, tags, ids and properties, as the DataFrame has them
    written_bytes: int  # of the attached files
    files: int
    seconds: float
    load: Load  # the due load of the valid rows
    groups: dict[str, int] = {}  # group -> rows, if there are several groups

    @property
    def rows_per_s(self) -> int:
        """The rate of the whole call in rows per second, including the survey."""
        return int(self.rows / self.seconds) if self.seconds else 0

    @property
    def amplification(self) -> float | None:
        """The ratio of bytes written to bytes of payload. None if nothing was written or there is no payload."""
        return self.written_bytes / self.payload_bytes if self.payload_bytes and self.files else None


class Survey(msgspec.Struct, frozen=True):
    """Counts of the rows of a DataFrame: valid rows by the minute in which they are due, invalid rows by reason."""

    minute: Int64Array  # minutes since 1970 with valid rows, in ascending order
    rows: Int64Array  # valid rows of each minute
    payload_bytes: Int64Array  # of the valid rows of each minute
    reasons: dict[str, int]  # broken rule -> rows

    @property
    def load(self) -> Load:
        """The due load of the valid rows, with one cell per minute."""
        return Load(topic=np.zeros_like(self.minute), second=self.minute * 60, rows=self.rows, width_s=60)


def run(
    spark: SparkSession,
    frame: DataFrame,
    endpoint: str,
    *,
    columns: Columns,
    campaign: str | None = None,
    dry_run: bool = False,
    rejects_uri: str | None = None,
    table_uri: str | None = None,
    tell: Callable[[str], None] = LOG.info,
    clock: Clock | None = None,
) -> BulkReport:
    """Schedule the rows of `frame`. A dry run writes nothing.

    `campaign`: the id of the campaign, with which a repeated call changes nothing; by default a random one.
    `rejects_uri`: a Delta table, by default `rejects` beside the pending table. `table_uri`: the URI of the pending
    table for the driver and the executors, if it is not the broker's. `tell` is called with the name of each step.

    Raises InvalidMessage for unusable columns or a cancelled campaign, SetupError if tasks cannot use the pending
    table, and OutOfRange if the broker has forgotten the campaign.
    """
    clock = clock or SystemClock()
    begin_ns = clock.monotonic_ns()
    name = check_campaign(campaign or f"bulk-{uuid.uuid4().hex}")
    with spark_errors(), open_parts(endpoint, name, table_uri) as parts:
        job = Job(spark, parts, rejects_uri, tell)
        repeated = job.attached_before()
        surveys = [NOTHING] * len(parts)
        if not repeated:
            if not dry_run:
                job.check_tables()
            surveys = job.survey(screen(frame, columns, job.now_ms))
            if not dry_run:
                job.write(frame, columns, surveys)
        attached = {} if dry_run and not repeated else job.find_attachments()
    reasons = surveys[0].reasons
    files = [entry for each in attached.values() for entry in each.files]
    rows = {group: int(survey.rows.sum()) for group, survey in zip(parts, surveys, strict=True)}
    rows |= {group: each.rows for group, each in attached.items()}
    return BulkReport(
        campaign=name,
        dry_run=dry_run,
        repeated=repeated,
        rows=sum(rows.values()),
        rejected=sum(reasons.values()),
        reasons=reasons,
        rejects_uri=job.rejects_uri if reasons and not dry_run else None,
        payload_bytes=sum(int(survey.payload_bytes.sum()) for survey in surveys),
        written_bytes=sum(entry.size_bytes for entry in files),
        files=len(files),
        seconds=(clock.monotonic_ns() - begin_ns) / 1e9,
        load=merge(survey.load for survey in surveys),
        groups=rows if len(parts) > 1 else {},
    )


class Job:
    """The steps of one bulk write. `parts`: the campaign in each group that gets a part of the rows."""

    def __init__(
        self,
        spark: SparkSession,
        parts: Mapping[str, Campaign],
        rejects_uri: str | None,
        tell: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._parts = dict(parts)
        self._groups = list(parts) if len(parts) > 1 else []
        self._tell = tell
        first = next(iter(self._parts.values()))
        self._id = first.id
        self.rejects_uri = rejects_uri or sibling(first.table_uri, REJECTS)
        self._known = {name: part.find_decided() for name, part in self._parts.items()}
        # Each try checks the rows against the time of the first plan. Otherwise a row could be valid in one try and
        # rejected in another, and be both scheduled and rejected, or neither.
        planned = next((known for known in self._known.values() if known is not None), None)
        self.now_ms = first.broker.status().now_ms if planned is None else planned.planned_ms

    def attached_before(self) -> bool:
        """Check whether earlier calls have attached all parts. Raises InvalidMessage if the campaign was cancelled."""
        known = self._known.values()
        if any(each is not None and each.state == "cancelled" for each in known):
            raise InvalidMessage(f"campaign {self._id} was cancelled: schedule these rows under another id")
        return not any(each is None or each.state == "planned" for each in known)

    def check_tables(self) -> None:
        """Raise SetupError unless a task can use the pending table of each part. Called before the rows are read."""
        for part in self._parts.values():
            check_table(self._spark, part.table_uri, part.broker.status().table.version, "--table-uri")

    def survey(self, screened: DataFrame) -> list[Survey]:
        """Count the rows of each part, in one pass. `screened`: the result of bulk_input.screen."""
        with self._step("survey"):
            return count_surveys(screened, len(self._parts))

    def write(self, frame: DataFrame, columns: Columns, surveys: Sequence[Survey]) -> None:
        """Plan the campaign, write the rejected rows, and write and attach the parts. May be killed after any step.

        The plan in the first group decides. It fixes the groups, and the time against which all later tries check rows.
        """
        now_ms, planned = self.now_ms, []
        for part, survey in zip(self._parts.values(), surveys, strict=True):
            planned.append(part.plan(int(survey.rows.sum()), now_ms, self._groups))
            now_ms = planned[0].planned_ms
        screened = screen(frame, columns, now_ms)
        if surveys[0].reasons:
            with self._step("rejects"):
                self._put_rejects(screened.where(f.col(REASON).isNotNull()))
        for number, (part, survey) in enumerate(zip(self._parts.values(), surveys, strict=True)):
            if planned[number].state != "planned":
                continue
            with self._step("write"):
                self._write_part(screened, number, part, survey)
            if part.decided().state == "planned":
                raise OutOfRange(
                    f"campaign {self._id} was attached so long ago that it is forgotten: use another id"
                )

    @contextmanager
    def _step(self, step: str) -> Iterator[None]:
        self._tell(step)
        with described(self._spark, f"bulk {self._id}: {step}"):
            yield

    def _write_part(self, screened: DataFrame, number: int, part: Campaign, survey: Survey) -> None:
        valid = screened.where(f.col(REASON).isNull())
        if self._groups:
            valid = valid.where(part_of(valid, len(self._groups)) == number)
        writer = with_lists_of_keys(deal_out(valid.drop(REASON, ROW), survey)).write.format("timeball")
        writer = writer.option("endpoint", part.broker.uri).option("table_uri", part.table_uri)
        writer.option("job_id", self._id).mode("append").save()

    def _put_rejects(self, rejected: DataFrame) -> None:
        create_table(
            self.rejects_uri,
            REJECT_SCHEMA,
            mode="ignore",
            name=REJECTS,
            description="Rows that could not be scheduled",
        )
        rows = rejected.select(
            f.lit(self._id).alias("campaign"), f.col(REASON), f.to_json(f.col(ROW)).alias("row")
        )
        writer = rows.write.format("timeball_delta").option("uri", self.rejects_uri)
        writer = writer.option("app_id", f"bulk {self._id}").option("app_version", "1")
        writer.mode("append").save()

    def find_attachments(self) -> dict[str, Attachment]:
        """Find the attach of each part in the log of its group. Parts without one are left out."""
        found = {}
        for name, part in self._parts.items():
            known = part.find_decided()
            attachment = find_attach(part.broker, self._id, known.planned_seq) if known else None
            if attachment is not None:
                found[name] = attachment
        return found


# ---- the survey -------------------------------------------------------------------------------------------


def _no_numbers() -> Int64Array:
    return np.empty(0, np.int64)


NOTHING = Survey(_no_numbers(), _no_numbers(), _no_numbers(), {})


def part_of(screened: DataFrame, parts: int) -> Column:
    """Make the column with the number of a row's part. It depends on the row only, so it is the same in each try."""
    named = [f.col(name) for name in _PLACED_BY if name in screened.columns]
    # The hash has a salt, because `deal_out` splits large minutes by a hash too. Without it, the rows of one part could
    # all get the same hash there.
    return f.pmod(f.xxhash64(f.lit(_PLACED_BY[0]), *named), f.lit(parts)).cast("int")


def count_surveys(screened: DataFrame, parts: int) -> list[Survey]:
    """Count the rows of `screen` by part. The first survey contains the rows of all parts that break a rule."""
    if parts == 1:
        return [count_survey(screened)]
    placed = f.when(f.col(REASON).isNull(), part_of(screened, parts)).otherwise(0)
    counted = _count(screened, placed.alias("part"))
    return [_survey_of(counted.filter(pc.equal(counted.column("part"), part))) for part in range(parts)]


def count_survey(screened: DataFrame) -> Survey:
    """Count the rows of `screen`."""
    return _survey_of(_count(screened))


def _count(screened: DataFrame, *more: Column) -> pa.Table:
    given = [f.coalesce(f.octet_length(name), f.lit(0)) for name in _PAYLOAD if name in screened.columns]
    size = sum(given[1:], given[0]).cast("bigint")
    minute = f.when(f.col(REASON).isNull(), f.floor(f.col("due_ms") / MINUTE_MS)).cast("bigint")
    rows = screened.select(REASON, minute.alias("minute"), *more, size.alias("size"))
    by = [name for name in rows.columns if name != "size"]
    return rows.groupBy(*by).agg(f.count("*").alias("rows"), f.sum("size").alias("bytes")).toArrow()


def _survey_of(found: pa.Table) -> Survey:
    valid = found.filter(found.column(REASON).is_null()).sort_by("minute")
    rejected = found.filter(found.column(REASON).is_valid()).sort_by([("rows", "descending")])
    minute_, rows, size_ = (
        valid.column(name).to_numpy().astype(np.int64) for name in ("minute", "rows", "bytes")
    )
    reasons = zip(rejected.column(REASON).to_pylist(), rejected.column("rows").to_pylist(), strict=True)
    return Survey(minute_, rows, size_, dict(reasons))


# ---- who writes what --------------------------------------------------------------------------------------


class Deal(msgspec.Struct, frozen=True):
    """The distribution of rows to tasks: spans of time, and one or more tasks for each."""

    minute: Int64Array  # first minute of each span, since 1970
    first: Int64Array  # number of the first task of each span
    tasks: Int64Array  # number of tasks of each span

    @property
    def total(self) -> int:
        """The number of tasks of all spans."""
        return int(self.tasks.sum())


def plan_deal(survey: Survey, task_rows: int, task_bytes: int) -> Deal:
    """Cut the time into spans, each with the rows of about one task. A larger minute is a span with several tasks.

    If this makes more than TASKS_MAX tasks, each task gets more rows. As parts of tasks are rounded up, there may be up
    to twice as many.
    """
    # The work of each minute, in tasks.
    worth = np.maximum(survey.rows / task_rows, survey.payload_bytes / task_bytes)
    worth = worth / max(1.0, worth.sum() / TASKS_MAX)
    total = np.cumsum(worth)
    # A span ends where the sum passes the next whole number. A large minute is a separate span.
    span = np.floor(total - worth)
    large = worth > 1
    begins = (
        np.append(True, (np.diff(span) != 0) | large[1:] | large[:-1]) if len(worth) else np.empty(0, bool)
    )
    at = np.flatnonzero(begins)
    tasks = np.where(large[at], np.ceil(worth[at]), 1).astype(np.int64)
    return Deal(survey.minute[at], np.cumsum(tasks) - tasks, tasks)


def deal_out(valid: DataFrame, survey: Survey) -> DataFrame:
    """Partition the rows by task, as `plan_deal` plans it. There is no shuffle if one task is enough."""
    deal = plan_deal(survey, TASK_ROWS, TASK_BYTES)
    if deal.total == 1:
        return valid.coalesce(1)
    minute = f.floor(f.col("due_ms") / MINUTE_MS)
    names = [f.col(name) for name in valid.columns]

    def task(low: int, high: int) -> Column:
        """Make the column with the task of a row that is in the spans low <= i < high, by binary search."""
        if high - low == 1:
            first = f.lit(int(deal.first[low]))
            if deal.tasks[low] == 1:
                return first
            return first + f.pmod(f.xxhash64(*names), f.lit(int(deal.tasks[low])))
        middle = (low + high) // 2
        return f.when(minute < int(deal.minute[middle]), task(low, middle)).otherwise(task(middle, high))

    return valid.repartitionById(deal.total, task(0, len(deal.minute)).cast("int"))


# Check, before a job starts, that a Spark task can read the broker's pending table and write into its folder.
#
# If executors and broker do not share the folder, a job would run for minutes and then fail at its attach. Or it would
# write into a folder of the same name on another machine. Therefore one task opens the table at the given URI, compares
# its version with the broker's, and writes and removes an empty file. With a local master, this process does the check
# itself.


def check_table(spark: SparkSession, uri: str, version: int, option: str) -> None:
    """Raise SetupError unless a task can use the table at `uri`, which has at least `version` at the broker.

    `option`: the command line option with which a user can give another URI, for the error.
    """
    reason = _in_a_task(spark, uri, version)
    if reason is not None:
        raise SetupError(
            f"a task of Spark cannot use the broker's pending table at {uri}: {reason}. Share this folder with the "
            f"executors, under the same name, or say with {option} where they reach it"
        )


def reason_against(uri: str, version: int) -> str | None:
    """Explain why the table at a URI is older than the broker's `version` or cannot be written to, or return None."""
    try:
        there = open_table(uri).version()
        if there < version:
            return f"it is of version {there} there, and of version {version} at the broker"
        store = Store(uri)
        # The name does not begin with `_` or `.`, so if this task dies, Delta's vacuum at the broker deletes the file.
        probe = f"preflight-{uuid.uuid4().hex}"
        store.put(probe, b"")
        store.remove([probe])
    except TimeballError as error:
        return str(error)
    return None


def _in_a_task(spark: SparkSession, uri: str, version: int) -> str | None:
    context = spark.sparkContext
    if (context.master or "").startswith("local["):
        return reason_against(uri, version)
    with spark_errors(), described(spark, f"preflight: is the table at {uri}?"):
        [reason] = context.parallelize([uri], 1).map(partial(reason_against, version=version)).collect()
    return None if reason is None else str(reason)
