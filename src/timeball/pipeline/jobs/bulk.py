"""`bulk`: any DataFrame with an instant column becomes promises, all in one attach, as one campaign.

    survey    count the rows by the rule they break, and the valid ones by the minute they are due: one pass
    plan      make the campaign at the broker; the instant of its plan is the "now" of every later try
    reject    write rows that break a rule to a Delta table of their own, with the rule and the row as JSON
    write     deal the rows out by due instant; the tasks sort and write files (source/promise_writer.py)
    attach    one record in the broker's log, by the campaign's id: all rows are promises, or none

A job that is killed at any step goes on when it is run again under the same id: the rejects are there once (the
campaign is their version in the Delta table), the promises are there once (the attach carries the campaign's id), and
attached rows are not written again. The source must not change meanwhile: the survey reads it once and the write
once, and the write checks each row again.

Of a cluster the rows are dealt out to its groups by a hash, and each group's part is an attach of its own under the one
id: all of a part are promises, or none. A later try goes on with the parts that are missing. The plan of each part
names the groups, so that one that is added between two tries changes nothing.

A task gets a contiguous span of time, so that it writes few files, which Arrow sorts. A minute with too many rows is
split by hash. A sort or a sample in Spark would cost more than all the rest, and the survey has counted anyway.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.clock import Clock, SystemClock
from timeball.errors import InvalidMessage, OutOfRange
from timeball.limits import MINUTE_MS
from timeball.message import Int64Array
from timeball.pipeline.jobs.bulk_input import REASON, ROW, Columns, screen, with_lists_of_keys
from timeball.pipeline.jobs.campaign import Campaign, find_attach
from timeball.pipeline.jobs.campaign_groups import open_parts
from timeball.pipeline.jobs.preflight import check_table
from timeball.pipeline.source.spark_api import described
from timeball.pipeline.spark_errors import spark_errors
from timeball.pipeline.table_store import CHUNK_BYTES, CHUNK_ROWS, create_table, sibling
from timeball.pipeline.views.due_histogram import Load, merge
from timeball.rules import check_campaign
from timeball.table.attachment import Attachment

LOG = logging.getLogger("timeball.pipeline")

REJECTS = "rejects"
REJECT_SCHEMA = pa.schema([("campaign", pa.string()), ("reason", pa.string()), ("row", pa.string())])
TASK_ROWS, TASK_BYTES = (
    CHUNK_ROWS // 2,
    CHUNK_BYTES // 2,
)  # of one task: one run, and two tasks for a million rows
TASKS_MAX = 2_000  # each writes a file or more, and an attach takes 10,000
_PLACED_BY = ("topic", "due_ms", "unique_key", "keys", "body")
_PAYLOAD = ("body", "keys", "tag", "unique_key", "properties")


class BulkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a bulk write, or of its dry run.

    `payload_bytes`: of bodies, keys, tags, ids and properties as they were given; `written_bytes`: of the files
    attached. `repeated`: the campaign was attached before, and this call has written nothing. `groups`: of several
    groups the rows of each.
    """

    campaign: str
    dry_run: bool
    repeated: bool
    rows: int
    rejected: int
    reasons: dict[str, int]
    rejects_uri: str | None
    payload_bytes: int
    written_bytes: int
    files: int
    seconds: float
    load: Load
    groups: dict[str, int] = {}

    @property
    def rows_per_s(self) -> int:
        """Return rows a second of the whole call, survey included."""
        return int(self.rows / self.seconds) if self.seconds else 0

    @property
    def amplification(self) -> float | None:
        """Return the bytes written for a byte of payload."""
        return self.written_bytes / self.payload_bytes if self.payload_bytes and self.files else None


class Survey(msgspec.Struct, frozen=True):
    """Counts of a DataFrame: valid rows and their payload by the minute they are due, the others by reason."""

    minute: Int64Array  # since 1970, in order
    rows: Int64Array
    payload_bytes: Int64Array
    reasons: dict[str, int]

    @property
    def load(self) -> Load:
        """Return the due load of the valid rows, a cell a minute."""
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
    """Schedule the rows of `frame`; a dry run writes nothing at all. `tell` is told of each step.

    `campaign`: the id under which a repeat changes nothing; a random one by default. `rejects_uri`: a Delta table, by
    default `rejects` beside the pending table. `table_uri`: where the driver and the executors reach the pending
    table, if not where the broker says.
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
    """The steps of one bulk write, over the groups that have a part of it."""

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
        # What was valid at the first try is valid at the next one: else a row could be both, or neither.
        planned = next((known for known in self._known.values() if known is not None), None)
        self.now_ms = first.broker.status().now_ms if planned is None else planned.planned_ms

    def attached_before(self) -> bool:
        """Return whether an earlier call has attached all of it; InvalidMessage when it was cancelled."""
        known = self._known.values()
        if any(each is not None and each.state == "cancelled" for each in known):
            raise InvalidMessage(f"campaign {self._id} was cancelled: schedule these rows under another id")
        return not any(each is None or each.state == "planned" for each in known)

    def check_tables(self) -> None:
        """Raise SetupError, before the rows are read, unless tasks reach the table of each part."""
        for part in self._parts.values():
            check_table(self._spark, part.table_uri, part.broker.status().table.version, "--table-uri")

    def survey(self, screened: DataFrame) -> list[Survey]:
        """Count the rows of each part in one pass."""
        with self._step("survey"):
            return count_surveys(screened, len(self._parts))

    def write(self, frame: DataFrame, columns: Columns, surveys: Sequence[Survey]) -> None:
        """Do the steps that leave a trace, in an order that can be cut anywhere.

        The plan in the first group is what decides: it names the groups and the instant for all later tries.
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
        """Return the attach of each part in its log."""
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
    """Return the number of the part that a row belongs to: its own columns alone decide, so each try finds the same."""
    named = [f.col(name) for name in _PLACED_BY if name in screened.columns]
    # Salted: within a part a large minute is dealt out by a hash too, and the two must not go together.
    return f.pmod(f.xxhash64(f.lit(_PLACED_BY[0]), *named), f.lit(parts)).cast("int")


def count_surveys(screened: DataFrame, parts: int) -> list[Survey]:
    """Count the rows of `screen` by part; the rows that break a rule are in the first survey."""
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
    """Spans of time by their first minute, and the tasks of each: `first`, and as many as its rows call for."""

    minute: Int64Array
    first: Int64Array
    tasks: Int64Array

    @property
    def total(self) -> int:
        """Return the number of tasks."""
        return int(self.tasks.sum())


def plan_deal(survey: Survey, task_rows: int, task_bytes: int) -> Deal:
    """Cut the time into spans of about a task's worth; a minute that is worth more has several tasks to itself."""
    worth = np.maximum(survey.rows / task_rows, survey.payload_bytes / task_bytes)
    worth = worth / max(1.0, worth.sum() / TASKS_MAX)
    total = np.cumsum(worth)
    # A span ends where the sum passes the next whole number; a large minute is a span of its own.
    span = np.floor(total - worth)
    large = worth > 1
    begins = (
        np.append(True, (np.diff(span) != 0) | large[1:] | large[:-1]) if len(worth) else np.empty(0, bool)
    )
    at = np.flatnonzero(begins)
    tasks = np.where(large[at], np.ceil(worth[at]), 1).astype(np.int64)
    return Deal(survey.minute[at], np.cumsum(tasks) - tasks, tasks)


def deal_out(valid: DataFrame, survey: Survey) -> DataFrame:
    """Partition the rows by task; without a shuffle when one task does."""
    deal = plan_deal(survey, TASK_ROWS, TASK_BYTES)
    if deal.total == 1:
        return valid.coalesce(1)
    minute = f.floor(f.col("due_ms") / MINUTE_MS)
    names = [f.col(name) for name in valid.columns]

    def task(low: int, high: int) -> Column:
        """Return the task of a row that lies in the spans low <= i < high."""
        if high - low == 1:
            first = f.lit(int(deal.first[low]))
            if deal.tasks[low] == 1:
                return first
            return first + f.pmod(f.xxhash64(*names), f.lit(int(deal.tasks[low])))
        middle = (low + high) // 2
        return f.when(minute < int(deal.minute[middle]), task(low, middle)).otherwise(task(middle, high))

    return valid.repartitionById(deal.total, task(0, len(deal.minute)).cast("int"))
