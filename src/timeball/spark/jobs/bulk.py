"""The job `bulk` checks the rows of any DataFrame with a column of due times, and schedules them as one campaign.

    preflight check that tasks can use the pending table, before the rows are read
    screen    convert the rows to the columns of scheduled messages, and mark the invalid rows: they break a rule
    survey    count, in one pass, the invalid rows by the rule that they break, and the valid rows by the minute of
              their due time
    plan      create the campaign at the broker; all later tries use the time of this plan as the current time
    reject    write the invalid rows to a separate Delta table, with the rule and the row as JSON
    write     distribute the rows to tasks by due time; the tasks sort and write files (source/scheduled_writer.py)
    attach    append one record with the campaign's id to the broker's log, which schedules all rows at once

A due time must be an exact point in time. So a wall-clock time without a time zone is refused unless the caller gives
the zone. The types of the due column are:

    timestamp               a point in time
    bigint, int             milliseconds since 1970
    timestamp_ntz, date     a wall-clock time in `zone`, midnight for a date (InvalidMessage without `zone`)
    string                  any of these as text (without an offset and without `zone`, the row is rejected)

A job may be killed at any step. Run it again under the same id to continue. Rejected rows are written once, because the
campaign's id is the application id of their commit in the Delta table. Messages are scheduled once, because the attach
contains the campaign's id. Attached rows are not written again. The source must not change until the job is done,
because the survey and the write each read it once. The write checks each row again, in Arrow.

In a cluster, a hash distributes the rows among the groups. The part of each group is attached separately under the same
id, so all messages of a part are scheduled, or none. A later try continues with the missing parts. The plan of each
part names all groups, so a group that is added between two tries changes nothing.

A task gets a contiguous range of due times, so it writes few files. Arrow sorts the rows of a task. If a minute has too
many rows for a task, a hash splits it. The counts of the survey decide the ranges: sorting or sampling the rows in
Spark would cost more than all other steps.
"""

from __future__ import annotations

import logging
import re
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
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import StructType

from timeball.io.clock import Clock, SystemClock
from timeball.model import limits, rules
from timeball.model.errors import InvalidDelay, InvalidMessage, OutOfRange, SetupError, TimeballError
from timeball.model.limits import MINUTE_MS
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, int64
from timeball.model.rules import check_campaign
from timeball.model.time_parsing import load_zone
from timeball.spark.jobs.campaign import Campaign, find_attach, open_parts
from timeball.spark.source.spark_api import described, spark_errors
from timeball.spark.table_store import CHUNK_BYTES, CHUNK_ROWS, Store, create_table, open_table, sibling
from timeball.spark.views.due_histogram import Load, merge
from timeball.table.attachment import Attachment

LOG = logging.getLogger("timeball.spark")

# ---- the job and its steps ------------------------------------------------------------------------------------

REJECTS = "rejects"
REJECT_SCHEMA = pa.schema([("campaign", pa.string()), ("reason", pa.string()), ("row", pa.string())])
# The limits of a task. Its rows fit into one chunk that is sorted in memory, and two tasks share a million rows.
TASK_ROWS, TASK_BYTES = CHUNK_ROWS // 2, CHUNK_BYTES // 2
TASKS_MAX = 2_000  # each writes one or more files, and an attach may have 10,000 files
# A hash of these columns decides the group of a row. Their values do not change between tries.
_GROUP_HASH_COLUMNS = ("topic", "due_ms", "unique_key", "keys", "body")
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

    `campaign`: the id of the campaign, by default a random one. A repeated call with the same id changes nothing.
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
        repeated = job.is_attached()
        surveys = [EMPTY_SURVEY] * len(parts)
        if not repeated:
            if not dry_run:
                job.check_tables()
            surveys = job.survey(screen(frame, columns, job.now_ms))
            if not dry_run:
                job.write(frame, columns, surveys)
        attached = {} if dry_run and not repeated else job.find_attachments()
    reasons = surveys[0].reasons  # of all groups (`count_surveys`)
    files = [entry for attachment in attached.values() for entry in attachment.files]
    rows = {group: int(survey.rows.sum()) for group, survey in zip(parts, surveys, strict=True)}
    rows |= {group: attachment.rows for group, attachment in attached.items()}
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
    """The steps of one bulk write."""

    def __init__(
        self,
        spark: SparkSession,
        parts: Mapping[str, Campaign],
        rejects_uri: str | None,
        tell: Callable[[str], None],
    ) -> None:
        """`parts`: name of a group -> its part of the campaign, for all groups that get rows. The rest: see `run`."""
        self._spark = spark
        self._parts = dict(parts)
        self._groups = list(parts) if len(parts) > 1 else []  # empty if all rows go to one group
        self._tell = tell
        first = next(iter(self._parts.values()))
        self._id = first.id
        self.rejects_uri = rejects_uri or sibling(first.table_uri, REJECTS)
        self._first_states = [part.find_state() for part in self._parts.values()]
        # Each try checks the rows against the time of the first plan. Otherwise a row could be valid in one try and
        # rejected in another, and be both scheduled and rejected, or neither.
        existing_plan = next((state for state in self._first_states if state is not None), None)
        self.now_ms = first.broker.status().now_ms if existing_plan is None else existing_plan.planned_ms

    def is_attached(self) -> bool:
        """Check whether earlier calls have attached all parts. Raises InvalidMessage if the campaign was cancelled."""
        states = self._first_states
        if any(state is not None and state.state == "cancelled" for state in states):
            raise InvalidMessage(f"campaign {self._id} was cancelled: schedule these rows under another id")
        return not any(state is None or state.state == "planned" for state in states)

    def check_tables(self) -> None:
        """Check, before the rows are read, that tasks can use the pending table of each part. Raises SetupError."""
        for part in self._parts.values():
            check_table(self._spark, part.table_uri, part.broker.status().table.version, "--table-uri")

    def survey(self, screened: DataFrame) -> list[Survey]:
        """Count the rows of each part, in one pass. `screened`: the result of `screen`."""
        with self._step("survey"):
            return count_surveys(screened, len(self._parts))

    def write(self, frame: DataFrame, columns: Columns, surveys: Sequence[Survey]) -> None:
        """Plan the campaign, write the rejected rows, and write and attach the parts. May be killed after any step.

        `surveys`: the survey of each part. The plan in the first group fixes the groups, and the time against which all
        later tries check rows. Raises OutOfRange if the broker has forgotten that a part was attached.
        """
        now_ms, states = self.now_ms, []
        for part, survey in zip(self._parts.values(), surveys, strict=True):
            states.append(part.plan(int(survey.rows.sum()), now_ms, self._groups))
            now_ms = states[0].planned_ms
        screened = screen(frame, columns, now_ms)
        if surveys[0].reasons:
            with self._step("rejects"):
                self._put_rejects(screened.where(f.col(REASON).isNotNull()))
        for number, (part, survey) in enumerate(zip(self._parts.values(), surveys, strict=True)):
            if states[number].state != "planned":  # an earlier call has attached this part
                continue
            with self._step("write"):
                self._write_part(screened, number, part, survey)
            if part.read_state().state == "planned":
                raise OutOfRange(
                    f"campaign {self._id} was attached so long ago that the broker has forgotten it: use another id"
                )

    @contextmanager
    def _step(self, step: str) -> Iterator[None]:
        """Report a step, and describe the Spark jobs within the block by it."""
        self._tell(step)
        with described(self._spark, f"bulk {self._id}: {step}"):
            yield

    def _write_part(self, screened: DataFrame, number: int, part: Campaign, survey: Survey) -> None:
        """Write and attach the valid rows of one group. `number`: the index of the group."""
        valid = screened.where(f.col(REASON).isNull())
        if self._groups:
            valid = valid.where(group_number(valid, len(self._groups)) == number)
        writer = with_lists_of_keys(partition_by_task(valid.drop(REASON, ROW), survey)).write.format(
            "timeball"
        )
        writer = writer.option("endpoint", part.broker.uri).option("table_uri", part.table_uri)
        writer.option("job_id", self._id).mode("append").save()

    def _put_rejects(self, rejected: DataFrame) -> None:
        """Append the rejected rows to the Delta table of rejects, once per campaign."""
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
        """Find the attach of each part in the log of its group: {group: attach}. Leaves out parts without an attach."""
        attachments = {}
        for name, part in self._parts.items():
            state = part.find_state()
            attachment = find_attach(part.broker, self._id, state.planned_seq) if state else None
            if attachment is not None:
                attachments[name] = attachment
        return attachments


# ---- the survey -----------------------------------------------------------------------------------------------


def _no_values() -> Int64Array:
    return np.empty(0, np.int64)


EMPTY_SURVEY = Survey(_no_values(), _no_values(), _no_values(), {})


def group_number(screened: DataFrame, group_count: int) -> Column:
    """Make the column with the index of the group that gets a row. It depends only on the row, so all tries agree."""
    hash_columns = [f.col(name) for name in _GROUP_HASH_COLUMNS if name in screened.columns]
    # The hash has a salt, because `partition_by_task` splits large minutes by a hash too. Without the salt, all rows of
    # a group could get the same hash there.
    return f.pmod(f.xxhash64(f.lit(_GROUP_HASH_COLUMNS[0]), *hash_columns), f.lit(group_count)).cast("int")


def count_surveys(screened: DataFrame, group_count: int) -> list[Survey]:
    """Count the rows of `screen` for each group. The first survey also counts the invalid rows of all groups."""
    if group_count == 1:
        return [count_survey(screened)]
    part = f.when(f.col(REASON).isNull(), group_number(screened, group_count)).otherwise(0)
    counts = _count(screened, part.alias("part"))
    return [
        _build_survey(counts.filter(pc.equal(counts.column("part"), group))) for group in range(group_count)
    ]


def count_survey(screened: DataFrame) -> Survey:
    """Count the rows of `screen`."""
    return _build_survey(_count(screened))


def _count(screened: DataFrame, *extra_columns: Column) -> pa.Table:
    """Count rows and payload bytes by reason, minute and the extra columns.

    `screened`: the result of `screen`. Returns a table with the columns reason, minute, those extra columns, rows and
    bytes.
    """
    payload_sizes = [
        f.coalesce(f.octet_length(name), f.lit(0)) for name in _PAYLOAD if name in screened.columns
    ]
    size = sum(payload_sizes[1:], payload_sizes[0]).cast("bigint")
    minute = f.when(f.col(REASON).isNull(), f.floor(f.col("due_ms") / MINUTE_MS)).cast("bigint")
    rows = screened.select(REASON, minute.alias("minute"), *extra_columns, size.alias("size"))
    group_by = [name for name in rows.columns if name != "size"]
    return rows.groupBy(*group_by).agg(f.count("*").alias("rows"), f.sum("size").alias("bytes")).toArrow()


def _build_survey(counts: pa.Table) -> Survey:
    """Build the survey of one group from its rows of `_count`."""
    valid = counts.filter(counts.column(REASON).is_null()).sort_by("minute")
    rejected = counts.filter(counts.column(REASON).is_valid()).sort_by([("rows", "descending")])
    minutes, rows, sizes = (
        valid.column(name).to_numpy().astype(np.int64) for name in ("minute", "rows", "bytes")
    )
    reasons = zip(rejected.column(REASON).to_pylist(), rejected.column("rows").to_pylist(), strict=True)
    return Survey(minutes, rows, sizes, dict(reasons))


# ---- dividing rows among tasks --------------------------------------------------------------------------------


class TaskPlan(msgspec.Struct, frozen=True):
    """The distribution of rows among tasks: spans of time, each with one or more tasks."""

    minute: Int64Array  # first minute of each span, since 1970
    first: Int64Array  # index of the first task of each span
    tasks: Int64Array  # how many tasks each span has

    @property
    def total(self) -> int:
        """The number of tasks of all spans."""
        return int(self.tasks.sum())


def plan_tasks(survey: Survey, task_rows: int, task_bytes: int) -> TaskPlan:
    """Cut the time into spans, each with the rows of about one task. A larger minute is a span with several tasks.

    `task_rows`, `task_bytes`: the limits of a task. If there would be more than TASKS_MAX tasks, each task gets more
    rows. Fractions of tasks are rounded up, so there may be up to twice TASKS_MAX tasks.
    """
    # The work of each minute, as a number of tasks.
    tasks_per_minute = np.maximum(survey.rows / task_rows, survey.payload_bytes / task_bytes)
    tasks_per_minute = tasks_per_minute / max(1.0, tasks_per_minute.sum() / TASKS_MAX)
    cumulative = np.cumsum(tasks_per_minute)
    # A span ends where the sum passes the next whole number. A large minute is a separate span.
    span_number = np.floor(cumulative - tasks_per_minute)
    is_large = tasks_per_minute > 1
    begins_span = (
        np.append(True, (np.diff(span_number) != 0) | is_large[1:] | is_large[:-1])
        if len(tasks_per_minute)
        else np.empty(0, bool)
    )
    starts = np.flatnonzero(begins_span)
    tasks = np.where(is_large[starts], np.ceil(tasks_per_minute[starts]), 1).astype(np.int64)
    return TaskPlan(survey.minute[starts], np.cumsum(tasks) - tasks, tasks)


def partition_by_task(valid: DataFrame, survey: Survey) -> DataFrame:
    """Partition the valid rows of `screen` by task, as `plan_tasks` divides them. No shuffle if one task is enough."""
    task_plan = plan_tasks(survey, TASK_ROWS, TASK_BYTES)
    if task_plan.total == 1:
        return valid.coalesce(1)
    minute = f.floor(f.col("due_ms") / MINUTE_MS)
    names = [f.col(name) for name in valid.columns]

    def task_of_span(low: int, high: int) -> Column:
        """Make the column with the index of a row's task, if it is in the spans low <= i < high. A binary search."""
        if high - low == 1:
            first = f.lit(int(task_plan.first[low]))
            if task_plan.tasks[low] == 1:
                return first
            return first + f.pmod(f.xxhash64(*names), f.lit(int(task_plan.tasks[low])))
        middle = (low + high) // 2
        return f.when(minute < int(task_plan.minute[middle]), task_of_span(low, middle)).otherwise(
            task_of_span(middle, high)
        )

    return valid.repartitionById(task_plan.total, task_of_span(0, len(task_plan.minute)).cast("int"))


# ---- preflight: check that tasks can use the pending table ----------------------------------------------------
# If executors and broker do not share the table's folder, a job would run for minutes and then fail at its attach. Or
# it would write into a folder of the same name on another machine. So, before a job starts, a task opens the table at
# the given URI, compares its version with the broker's, and writes and removes an empty file. With a local master, this
# process does the check itself.


def check_table(spark: SparkSession, uri: str, version: int, option: str) -> None:
    """Check that a task can read and write the table at `uri`, which is at `version` or later at the broker.

    `option`: the command line option for another URI, named in the error. Raises SetupError.
    """
    reason = _find_problem_in_task(spark, uri, version)
    if reason is not None:
        raise SetupError(
            f"a task of Spark cannot use the broker's pending table at {uri}: {reason}. Share this folder with the "
            f"executors, under the same name, or say with {option} where they reach it"
        )


def find_table_problem(uri: str, version: int) -> str | None:
    """Explain why this process cannot use the table: it is older than `version`, or not writable. Else returns None."""
    try:
        table_version = open_table(uri).version()
        if table_version < version:
            return f"it is of version {table_version} there, and of version {version} at the broker"
        store = Store(uri)
        # The name does not begin with `_` or `.`, so if this task dies, Delta's vacuum at the broker deletes the file.
        probe = f"preflight-{uuid.uuid4().hex}"
        store.put(probe, b"")
        store.remove([probe])
    except TimeballError as error:
        return str(error)
    return None


def _find_problem_in_task(spark: SparkSession, uri: str, version: int) -> str | None:
    """Call `find_table_problem` in a task of Spark. With a local master, call it in this process."""
    context = spark.sparkContext
    if (context.master or "").startswith("local["):
        return find_table_problem(uri, version)
    with spark_errors(), described(spark, f"preflight: is the table at {uri}?"):
        [reason] = context.parallelize([uri], 1).map(partial(find_table_problem, version=version)).collect()
    return None if reason is None else str(reason)


# ---- screen: convert the rows, and mark those that break a rule -----------------------------------------------
# The `shape` of each rule in rules.RULES becomes a Spark expression. So Spark finds, counts and separates invalid rows
# without a Python function, before anything is written. A text with a due time must match one of the patterns
# completely, because Spark's own cast would ignore a zone at its end. Wall-clock times are resolved by
# model/time_parsing.py on Arrow batches. The time zone rules of Java are never used.

REASON = "reason"
ROW = "row"  # column with the original row, for the table of rejects
NO_DUE_TIME = "due: missing, or no instant"
NO_ZONE = "due: no offset from UTC in the text, and no time zone given for it"
_NUMBER = r"\A-?\d+\z"
_DATE, _TIME_OF_DAY = r"\d{4}-\d\d?-\d\d?", r"[T ]\d\d?:\d\d(:\d\d([.]\d{1,9})?)?"
_LOCAL = rf"\A{_DATE}({_TIME_OF_DAY})?\z"
_WITH_OFFSET = rf"\A{_DATE}{_TIME_OF_DAY} ?([Zz]|UTC|[+-]\d\d(:?\d\d)?)\z"
# Spark reads a time of day without seconds, but not with an offset behind it.
_NO_SECONDS = rf"\A({_DATE}[T ]\d\d?:\d\d)( ?[ZzU+-])"
# A text with digits after the microseconds that are not all zero. Spark ignores them.
_DIGITS_BELOW_MICROS = r"[.]\d{6}\d*[1-9]"
_BAD_FORM = "_bad_form_of_"  # prefix of columns that mark values in a bad form
_AS_JSON = ("struct", "array", "map")
_NO_TEXT = ("binary", "geometry", "geography")
_NO_JSON = re.compile(r"\b(geometry|geography)\(")  # in the text of a type, also of a nested one


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the DataFrame's columns from which scheduled messages are made."""

    due: str = "due"
    topic: str | None = None  # the column with the topic; either this or `topic_name` is given
    topic_name: str | None = None  # one topic for all rows
    body: str | None = "body"  # None: all columns without another purpose become one JSON object
    keys: str | None = None
    tag: str | None = None
    unique_key: str | None = None
    properties: str | None = None
    zone: str | None = None  # the time zone of wall-clock times in `due`

    @property
    def taken(self) -> list[str]:
        """The names of the columns that have a purpose."""
        named = (self.due, self.topic, self.body, self.keys, self.tag, self.unique_key, self.properties)
        return [name for name in named if name is not None]


def screen(frame: DataFrame, columns: Columns, now_ms: int) -> DataFrame:
    """Convert the rows to the columns (row, topic, body, due_ms, …, reason). Raises the errors of `check`.

    `reason` is the first rule that a row breaks at the time `now_ms`. It is null for valid rows.
    """
    check(frame.schema, columns)
    screened = frame.select(
        f.struct("*").alias(ROW),
        (f.lit(columns.topic_name) if columns.topic is None else _text(frame, columns.topic)).alias("topic"),
        _body(frame, columns).alias("body"),
        _due_ms(frame, columns).alias("due_ms"),
        _no_zone(frame, columns).alias("_no_zone"),
        *[
            convert(frame, column).alias(name)
            for name, convert in _CONVERTERS.items()
            if (column := getattr(columns, name)) is not None
        ],
        *[
            _bad_form(frame, name, column).alias(_BAD_FORM + name)
            for name in rules.FORM_RULES
            if (column := getattr(columns, name)) is not None
        ],
    )
    form_marks = [name for name in screened.columns if name.startswith(_BAD_FORM)]
    return screened.withColumn(REASON, reason(screened, now_ms)).drop("_no_zone", *form_marks)


def with_lists_of_keys(screened: DataFrame) -> DataFrame:
    """Convert the keys of `screen` from one text to a list, the form in which the data source accepts several keys."""
    if "keys" not in screened.columns:
        return screened
    return screened.withColumn("keys", f.when(f.col("keys") != "", f.split("keys", " ")))


def check(schema: StructType, columns: Columns) -> None:
    """Check the columns. Raises InvalidMessage if one is missing, ambiguous or of an unusable type.

    Also raises it for an unknown or missing zone, for a missing topic, and if no column is left for the body.
    """
    names = schema.fieldNames()
    for name in columns.taken:
        if name not in names:
            raise InvalidMessage(f"column {name}: there is none; there are {', '.join(names)}")
    used_names = names if columns.body is None else columns.taken
    lower_names = [name.lower() for name in names]  # for Spark, upper and lower case are the same
    if ambiguous := sorted({name for name in used_names if lower_names.count(name.lower()) > 1}):
        raise InvalidMessage(f"column {', '.join(ambiguous)}: there twice; drop or rename one of them")
    if (columns.topic is None) == (columns.topic_name is None):
        raise InvalidMessage("name either a topic or the column that holds it")
    if columns.body is None and not set(names) - set(columns.taken):
        raise InvalidMessage("no column is left for the body")
    kind = _kind(schema, columns.due)
    if kind in ("timestamp_ntz", "date") and columns.zone is None:
        raise InvalidMessage(
            f"column {columns.due}: {kind}, a wall-clock time that names no instant; say in which time zone it is meant"
        )
    if kind not in ("timestamp", "timestamp_ntz", "date", "bigint", "int", "string"):
        raise InvalidMessage(
            f"column {columns.due}: {kind}; wanted a timestamp, milliseconds since 1970, or text"
        )
    if columns.zone is not None:
        try:
            load_zone(columns.zone)
        except InvalidDelay as error:
            raise InvalidMessage(f"zone {error}") from error


# ---- the columns of a scheduled message -----------------------------------------------------------------------


def _kind(schema: StructType, name: str) -> str:
    """Get the type of a column as Spark's text, such as `array<string>`. All kinds of text are `string`."""
    kind = schema[name].dataType.simpleString()
    return "string" if kind.startswith(("string ", "varchar", "char")) else kind


def _column(name: str) -> Column:
    return f.col("`" + name.replace("`", "``") + "`")


def _text(frame: DataFrame, name: str) -> Column:
    """Make a text column. Raises InvalidMessage for a type that Spark does not convert to text, and for bytes."""
    kind = _kind(frame.schema, name)
    if kind.startswith(_NO_TEXT):
        raise InvalidMessage(f"column {name}: {kind}, wanted text")
    return _column(name) if kind == "string" else _column(name).cast("string")


def _keys(frame: DataFrame, name: str) -> Column:
    """Make the column of keys in the form of the log: one text, with blanks between several keys of a list."""
    if not _kind(frame.schema, name).startswith("array<"):
        return _text(frame, name)
    return f.array_join(_column(name).cast("array<string>"), " ")


def _body(frame: DataFrame, columns: Columns) -> Column:
    """Make the column of bodies. Without a body column, all columns without another purpose become one JSON object."""
    if columns.body is None:
        other_columns = [name for name in frame.columns if name not in columns.taken]
        for name in other_columns:
            _check_json(frame.schema, name)
        return f.to_json(f.struct(*[_column(name) for name in other_columns]))
    kind = _kind(frame.schema, columns.body)
    if kind in ("string", "binary"):
        return _column(columns.body)
    if not kind.startswith(_AS_JSON):
        return _text(frame, columns.body)
    _check_json(frame.schema, columns.body)
    return f.to_json(_column(columns.body))


def _check_json(schema: StructType, name: str) -> None:
    """Raise InvalidMessage for a type that Spark does not convert to JSON."""
    kind = _kind(schema, name)
    if _NO_JSON.search(kind):
        raise InvalidMessage(
            f"column {name}: {kind}, which JSON does not have; convert it to text, or drop it"
        )


def _properties(frame: DataFrame, name: str) -> Column:
    """Make the column of properties in the form of the log, from a map or from text that has this form already."""
    kind = _kind(frame.schema, name)
    if kind == "string":
        return _column(name)
    if not kind.startswith("map<string,"):
        raise InvalidMessage(f"column {name}: {kind}, wanted map<string,string> or RocketMQ's text form")
    entries = f.map_entries(_column(name).cast("map<string,string>"))
    texts = f.transform(
        entries,
        lambda entry: f.concat(
            entry["key"], f.lit(PROPERTY_NAME_END), f.coalesce(entry["value"], f.lit("")), f.lit(PROPERTY_END)
        ),
    )
    # For a null, `concat_ws` alone would make an empty text.
    return f.when(_column(name).isNotNull(), f.concat_ws("", texts))


# Column of a scheduled message -> the function that makes it from the DataFrame and the name of its column.
_CONVERTERS = {"keys": _keys, "tag": _text, "unique_key": _text, "properties": _properties}


def _bad_form(frame: DataFrame, name: str, column: str) -> Column:
    """Make the column that marks values which break the rule of shape "form" of the message column `name`.

    `column`: the column of the DataFrame. The rule is that of rules.form_faults.
    """
    kind = _kind(frame.schema, column)
    if name == "properties":
        is_bad = f.lit(False) if kind == "string" else _bad_pairs(column)
    elif name == "keys" and kind.startswith("array<"):
        is_bad = f.exists(
            _column(column).cast("array<string>"),
            lambda key: key.isNull() | key.rlike(rules.NOT_AN_ENTRY),
        )
    else:
        is_bad = _text(frame, column).rlike(rules.NOT_IN_KEY if name == "keys" else rules.NOT_A_LABEL)
    return f.coalesce(is_bad, f.lit(False))


def _bad_pairs(column: str) -> Column:
    """Make the column that marks maps with a pair that cannot be a property. It is null for a null."""
    return f.exists(
        f.map_entries(_column(column).cast("map<string,string>")),
        lambda entry: (
            (entry["key"] == "")
            | entry["key"].rlike(rules.MARKS)
            | f.coalesce(entry["value"].rlike(rules.MARKS), f.lit(False))
        ),
    )


# ---- the due time ---------------------------------------------------------------------------------------------


def _due_ms(frame: DataFrame, columns: Columns) -> Column:
    """Make the column of due times in ms since 1970. It is null for a text that is no due time."""
    kind, column = _kind(frame.schema, columns.due), _column(columns.due)
    if kind in ("bigint", "int"):
        return column.cast("bigint")
    if kind == "timestamp":
        return _up_to_ms(column)
    if kind in ("timestamp_ntz", "date"):
        return _in_zone(column.cast("timestamp_ntz"), columns.zone)
    text = f.trim(column)
    # Spark ignores digits below microseconds. One microsecond more makes `_up_to_ms` and `_in_zone` round them up.
    has_finer_digits = text.rlike(_DIGITS_BELOW_MICROS).cast("int")
    wall_clock = f.when(text.rlike(_LOCAL), text.try_cast("timestamp_ntz"))
    wall_clock = wall_clock + f.make_dt_interval(secs=has_finer_digits / 1_000_000)
    with_seconds = f.regexp_replace(text, _NO_SECONDS, "$1:00$2")
    timestamp = f.when(text.rlike(_WITH_OFFSET), with_seconds.try_cast("timestamp"))
    timestamp = timestamp + f.make_dt_interval(secs=has_finer_digits / 1_000_000)
    milliseconds = f.when(text.rlike(_NUMBER), text.try_cast("bigint"))
    return f.coalesce(milliseconds, _up_to_ms(timestamp), _in_zone(wall_clock, columns.zone))


def _no_zone(frame: DataFrame, columns: Columns) -> Column:
    """Make the column that marks texts which are a valid wall-clock time, but without the zone that they need."""
    if columns.zone is not None or _kind(frame.schema, columns.due) != "string":
        return f.lit(False)
    text = f.trim(_column(columns.due))
    return text.rlike(_LOCAL) & text.try_cast("timestamp_ntz").isNotNull()


def _in_zone(wall_clock: Column, zone: str | None) -> Column:
    """Convert a wall-clock time (timestamp_ntz) in a zone to ms since 1970, rounded up. Null without a zone."""
    if zone is None:
        return f.lit(None).cast("bigint")
    time_zone = load_zone(zone)

    def resolve(local: pa.Array) -> pa.Array:
        times_us = time_zone.instants_us(int64(local.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(0)))
        return pa.array(-(-times_us // 1_000), mask=np.asarray(local.is_null()))

    due_ms: Column = arrow_udf(resolve, "bigint")(wall_clock)  # type: ignore[call-overload]
    return due_ms


def _up_to_ms(timestamp: Column) -> Column:
    """Convert a timestamp to milliseconds since 1970. Rounded up, because a message may never be early."""
    has_microseconds = f.pmod(f.unix_micros(timestamp), f.lit(1000)) > 0
    return f.unix_millis(timestamp) + has_microseconds.cast("bigint")


# ---- the rules ------------------------------------------------------------------------------------------------


def reason(screened: DataFrame, now_ms: int) -> Column:
    """Make the column with the text of the first rule that a row breaks at the time `now_ms`. Null for valid rows."""
    conditions: list[tuple[Column, str]] = [
        (f.col("_no_zone"), NO_ZONE),
        (f.col("due_ms").isNull(), NO_DUE_TIME),
    ]
    conditions += [
        (breaks(rule, now_ms), rule.text) for rule in rules.RULES if rule.column in screened.columns
    ]
    first_reason = f.lit(None).cast("string")
    for condition, text in reversed(conditions):  # the first condition is the outermost one
        first_reason = f.when(condition, f.lit(text)).otherwise(first_reason)
    return first_reason


def breaks(rule: rules.Rule, now_ms: int) -> Column:
    """Make the column that marks rows which break a rule, as an expression that Spark evaluates without Python.

    Has the same result as `rule.in_column`, which explains the shapes.
    """
    column = f.col(rule.column)
    match rule.shape:
        case "name":
            name = f.coalesce(column, f.lit(""))
            pattern = limits.NAME.pattern.removesuffix("$") + r"\z"  # Java's $ also matches before a line end
            return ~name.rlike(pattern) | (f.octet_length(name) > limits.TOPIC_BYTES_MAX)
        case "reserved":
            is_reserved = column.isin(list(rules.NOT_SCHEDULED))
            for prefix in rules.NOT_SCHEDULED_PREFIXES:
                is_reserved |= column.startswith(prefix)
            return is_reserved
        case "form":
            return f.col(_BAD_FORM + rule.column)
        case "present":
            return column.isNull()
        case "one":
            return column.rlike(rules.MARKS)
        case "longest":
            return f.octet_length(column) >= rule.needs_bytes
        case "words":
            blanks = f.length(column) - f.length(f.replace(column, f.lit(" "), f.lit("")))
            return blanks >= rule.needs_bytes
        case "between":
            return (column < rule.low) | (column > rule.high(now_ms))
