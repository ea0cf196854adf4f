"""The job `dispatch`: Spark reads due messages from the pending table and sends them to the broker for release.

Without this job, the broker reads the due messages itself. The job is for clusters with more cores than one broker
process can use. Its tasks read and decode the message bodies, wait until their rows are due, and send them to the
broker over Flight. A task occupies a core while it waits, usually for at most `lead_ms`. See docs/pipeline/dispatch.md.

    stream      the source of the Spark format `timeball_due`: pointers to rows that are due soon
    due rows    on the driver: find the rows of a window as positions in files, and divide them among tasks
    sink        the sink of `timeball_due`: a task reads the rows of its pointers and sends them when they are due
    job         the query from the source to the sink, and its lease

    spark.readStream.format("timeball_due").option("endpoint", …).load()     rows: POINTER_SCHEMA
         .writeStream.format("timeball_due").option("endpoint", …)           releases them

The broker decides which rows are released, and writes the release records. It releases a row once even if two tasks
send it. It also releases by itself the rows that tasks send too late or never. So no message depends on the job. If
Spark dies or lags, messages are at most 2 s late (GRACE_MS in schedule/loaded.py).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from timeball.client.outgoing import halves
from timeball.io.clock import Clock, SystemClock
from timeball.model import limits, storage_uris
from timeball.model.answers import Status
from timeball.model.errors import NotFound, OutOfRange, SetupError, from_code
from timeball.model.message import TABLE_SCHEMA, Int64Array, int64
from timeball.spark.endpoint import Endpoint, Lease, query_name
from timeball.spark.source import options as values
from timeball.spark.source.options import DEFAULT_ENDPOINT, SPARK_OPTIONS
from timeball.spark.source.spark_api import BrokerStream, Offset, spark_schema, start_query
from timeball.spark.table_store import TableFile, table_files
from timeball.table.layout import ROW_GROUP_ROWS

# ---- the stream: when rows are planned ------------------------------------------------------------------------
# A micro-batch *plans* the rows due in a window: it assigns them to tasks. The window begins at the end of the previous
# one and ends `lead_ms` from now, so tasks already run when their rows are due. An offset describes the last window:
#
#     from_ms, due_ms   the rows due at from_ms <= t < due_ms, on the broker's clock
#     version           the version of the table in which they are searched
#
# `latestOffset` returns the start offset until a row is due within `lead_ms` / 2. So Spark starts no micro-batch while
# no message is due soon. Rows that were due more than `behind_ms` ago are never planned, because the broker has already
# loaded them.

NAME = "timeball_due"
LEAD_MS = 1_000
BEHIND_MS = 10_000


class DueOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the stream and its sink. `describe` explains each of them."""

    endpoint: str = DEFAULT_ENDPOINT
    table_uri: str | None = None
    lead_ms: int = LEAD_MS
    behind_ms: int = BEHIND_MS
    rows_per_partition: int = 65_536
    max_rows_per_batch: int = 4_000_000


_PARSERS = {
    "endpoint": values.endpoint,
    "table_uri": values.text,
    "lead_ms": values.count(0, limits.MINUTE_MS),
    "behind_ms": values.count(0, limits.DAY_MS),
    "rows_per_partition": values.count(1),
    "max_rows_per_batch": values.count(1),
}


def describe() -> dict[str, str]:
    """Describe each option by a short text with its default."""
    return {
        "endpoint": f"where the broker listens ({DEFAULT_ENDPOINT})",
        "table_uri": "the pending table's URI for driver and executors, if it is not the broker's",
        "lead_ms": f"how far ahead of the clock tasks are planned: they wait for their rows ({LEAD_MS})",
        "behind_ms": f"rows that were due longer ago are left to the broker ({BEHIND_MS})",
        "rows_per_partition": "rows that one task releases, about (65536)",
        "max_rows_per_batch": "rows in one micro-batch, about (4000000)",
    }


def due_options(options: Mapping[str, str]) -> DueOptions:
    """Parse and check the options. Raises SetupError for the first invalid one."""
    return values.parse(options, DueOptions, _PARSERS, ignored=SPARK_OPTIONS)


class DueDataSource(DataSource):
    """The data source of `format("timeball_due")`, for streams only."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return NAME

    def schema(self) -> StructType:
        """See DataSource."""
        return spark_schema(POINTER_SCHEMA)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """See DataSource."""
        return DueStream(due_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """See DataSource."""
        if schema.fieldNames() != POINTER_SCHEMA.names:
            raise SetupError(f"{NAME} accepts only the columns of its own stream: {POINTER_SCHEMA.names}")
        options = due_options(self.options)
        return ReleaseWriter(options.endpoint, options.lead_ms)


@dataclass
class DuePart(InputPartition):
    """The pointers of one task, as columns of POINTER_SCHEMA."""

    columns: dict[str, list[Any]]


class DueStream(BrokerStream):
    """The stream of pointers to rows that are due soon. Tasks only call `read`."""

    def __init__(self, options: DueOptions) -> None:
        super().__init__(options.endpoint)
        self.options = options
        self._final_ms: int | None = None  # with Trigger.AvailableNow: the offset at which the query ends
        self._now_ms: int | None = None  # the broker's clock at the latest status
        self._files: DueFiles | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Choose the offset of a new query: `behind_ms` before now, because the broker has loaded all earlier rows."""
        status = self.broker().status()
        begin_ms = status.now_ms - self.options.behind_ms
        return {"due_ms": begin_ms, "from_ms": begin_ms, "version": status.table.version}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Choose the window of the next micro-batch.

        Returns `start` while no row is due soon: Spark then starts no micro-batch.
        """
        options, status = self.options, self.broker().status()
        self._now_ms = status.now_ms
        begin_ms = max(int(start["due_ms"]), status.now_ms - options.behind_ms)
        end_ms = status.now_ms + options.lead_ms if self._final_ms is None else self._final_ms
        spans = self._spans(status.table.version, begin_ms, end_ms, status)
        if self._final_ms is None and not self._is_batch_due(spans, status.now_ms):
            return start
        if spans:
            end_ms = window_end(spans, options.max_rows_per_batch, end_ms)
        return {"due_ms": max(begin_ms, end_ms), "from_ms": begin_ms, "version": status.table.version}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end when all messages that are due now are planned."""
        self._final_ms = self.broker().status().now_ms + 1

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report the broker's clock at the latest status, so that Spark's progress shows the lag of the query."""
        return None if self._now_ms is None else {"due_ms": self._now_ms}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader. The earliest rows come first, because Spark starts tasks in this order."""
        if start == end:
            return []
        spans = self._spans(int(end["version"]), int(end["from_ms"]), int(end["due_ms"]))
        return [
            DuePart(encode_pointers(task_spans).to_pydict())
            for task_spans in cut_into_tasks(spans, self.options.rows_per_partition)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceStreamReader."""
        if isinstance(partition, DuePart):
            yield pa.RecordBatch.from_pydict(partition.columns, POINTER_SCHEMA)

    def _is_batch_due(self, spans: list[Span], now_ms: int) -> bool:
        """Check whether the first row is due within half of `lead_ms`.

        With the whole `lead_ms`, each micro-batch would be planned as soon as it has its first rows, and be small.
        """
        first_ms = min((int(span.due_ms[0]) for span in spans), default=None)
        return first_ms is not None and first_ms <= now_ms + self.options.lead_ms // 2

    def _spans(self, version: int, begin_ms: int, end_ms: int, status: Status | None = None) -> list[Span]:
        """Find the rows of a table version that are due at begin_ms <= due_ms < end_ms.

        `status`: a recent status of the broker, if there is one. Returns no spans if files of the version are missing.
        """
        if begin_ms >= end_ms:
            return []
        if self._files is None:
            uri = self.options.table_uri or (status or self.broker().status()).table.uri
            self._files = DueFiles(uri)
        try:
            self._files.use_version(version)
            return self._files.between(begin_ms, end_ms)
        except (NotFound, OSError):
            # The files of this version are already deleted, or not written yet. Planning nothing is safe, because the
            # broker releases rows that no task sends. The next micro-batch opens the table again.
            self._files = None
            return []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_files": None}  # tasks do not need the driver's columns


# ---- the driver's side: find due rows in files ----------------------------------------------------------------
# Files are sorted by due time, so the rows due within a window form one contiguous span of each file. The driver reads
# only the column `due_ms` (8 bytes per row) of the row groups that the windows have reached. It drops the column of a
# row group when a window begins after the group. A task gets *pointers* (file, first row, number of rows) and reads the
# whole rows itself.

POINTER_SCHEMA = pa.schema([("uri", pa.string()), ("first_row", pa.int64()), ("rows", pa.int64())])
ROWS_SLACK = 1.5  # a task may have this many times the requested rows before it is cut further


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one file and their due times, in ascending order."""

    uri: str
    first_row: int
    due_ms: Int64Array

    def slice_rows(self, begin: int, end: int) -> Span:
        """Cut out the rows begin <= i < end of this span."""
        return Span(self.uri, self.first_row + begin, self.due_ms[begin:end])


@dataclass
class _FileColumns:
    """The row groups of one file, and the column `due_ms` of those that were read."""

    starts: Int64Array  # first row of each group, and at the end the number of rows of the file
    low: Int64Array  # earliest due time of each group, in ms
    high: Int64Array  # latest due time of each group, in ms
    due_ms: dict[int, Int64Array] = field(default_factory=dict)  # row group -> its column `due_ms`


class DueFiles:
    """Finds due rows in the data files of one version of the table. Used only on the driver's side of a stream."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._version: int | None = None
        self._live: list[TableFile] = []
        self._columns: dict[str, _FileColumns] = {}

    def use_version(self, version: int) -> None:
        """Switch to a version of the table. Keeps the columns of files that this version still has.

        Raises the errors of `table_files`.
        """
        if version != self._version:
            self._live, self._version = table_files(self.uri, version), version
            live = {self._uri_of(file) for file in self._live}
            self._columns = {uri: columns for uri, columns in self._columns.items() if uri in live}

    def between(self, low_ms: int, high_ms: int) -> list[Span]:
        """Find the rows due at low_ms <= due_ms < high_ms, one span for each file that has some.

        Drops the columns of earlier row groups, because later calls do not go back. Raises OSError.
        """
        spans = []
        for file in self._live:
            if file.may_hold((low_ms, high_ms)):
                span = self._span(self._uri_of(file), low_ms, high_ms)
                if len(span.due_ms):
                    spans.append(span)
            elif not file.may_hold((low_ms, None)):
                # All rows of the file are earlier than the window.
                self._columns.pop(self._uri_of(file), None)
        return spans

    def _uri_of(self, file: TableFile) -> str:
        return f"{self.uri.rstrip('/')}/{file.path}"

    def _span(self, uri: str, low_ms: int, high_ms: int) -> Span:
        """Find the rows of one file that are due within the window.

        Reads the columns that are not in memory, and drops the columns of earlier row groups. Raises OSError.
        """
        columns = self._columns.get(uri)
        if columns is None:
            columns = self._columns[uri] = _read_footer(uri)
        for group in [group for group in columns.due_ms if columns.high[group] < low_ms]:
            del columns.due_ms[group]
        begin = int(np.searchsorted(columns.high, low_ms, side="left"))
        end = int(np.searchsorted(columns.low, high_ms, side="left"))
        missing = [group for group in range(begin, end) if group not in columns.due_ms]
        if missing:
            columns.due_ms.update(zip(missing, _read_due_ms(uri, missing), strict=True))
        due = np.concatenate([np.empty(0, np.int64), *(columns.due_ms[group] for group in range(begin, end))])
        first, last = np.searchsorted(due, [low_ms, high_ms], side="left")
        return Span(uri, int(columns.starts[begin]) + int(first), due[first:last])


def _read_footer(uri: str) -> _FileColumns:
    """Read the row groups of a file and the bounds of their due times from its footer. Raises OSError."""
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        metadata = pq.ParquetFile(source).metadata
    column = metadata.schema.names.index("due_ms")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    statistics = [group.column(column).statistics for group in groups]
    return _FileColumns(
        np.cumsum([0, *(group.num_rows for group in groups)]),
        np.array([bounds.min for bounds in statistics], np.int64),
        np.array([bounds.max for bounds in statistics], np.int64),
    )


def _read_due_ms(uri: str, groups: list[int]) -> Iterator[Int64Array]:
    """Read the column `due_ms` of each of these row groups. Yields one array per group. Raises OSError."""
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        for group in groups:
            yield int64(parquet.read_row_group(group, columns=["due_ms"]).column(0).combine_chunks())


def read_rows(uri: str, first_row: int, rows: int, columns: Sequence[str]) -> pa.Table:
    """Read rows of a file, starting at `first_row`. Only the row groups with these rows are read. Raises OSError."""
    files, path = storage_uris.arrow(uri)
    with files.open_input_file(path) as source:
        parquet = pq.ParquetFile(source)
        counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
        starts = np.cumsum([0, *counts])
        begin = int(np.searchsorted(starts, first_row, side="right")) - 1
        end = int(np.searchsorted(starts, first_row + rows, side="left"))
        table = parquet.read_row_groups(list(range(begin, end)), columns=list(columns))
    return table.slice(first_row - int(starts[begin]), rows)


# ---- dividing rows among tasks --------------------------------------------------------------------------------


def count_rows(spans: Sequence[Span]) -> int:
    """Count the rows of all spans."""
    return sum(len(span.due_ms) for span in spans)


def window_end(spans: Sequence[Span], rows: int, high_ms: int) -> int:
    """Find the latest end (ms) of the window, at most `high_ms`, before which at most `rows` rows are due.

    Rows that are due in the same millisecond stay together. So the window always contains all rows of the first
    millisecond with rows, even if there are more than `rows` of them.
    """
    if count_rows(spans) <= rows:
        return high_ms
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    return max(int(due[rows]), int(due[0]) + 1)


def cut_into_tasks(spans: Sequence[Span], rows: int) -> list[list[Span]]:
    """Divide the spans of a window among tasks of about `rows` rows each.

    Returns the spans of each task. The tasks with the earliest rows come first: so messages are released in time even
    if only a few tasks run at the same time.

    A single file is cut where row groups begin, because a task decodes whole row groups. Several files are cut at due
    times, so that a task has the rows of the same time from each file. If too many rows are due in one millisecond,
    they are cut by number of rows.
    """
    if not spans:
        return []
    if len(spans) == 1:
        return [[part] for part in _cut_at_row_groups(spans[0], rows)]
    due = np.sort(np.concatenate([span.due_ms for span in spans]))
    cuts = np.unique(due[rows::rows])
    tasks: list[list[Span]] = []
    for low_ms, high_ms in zip([None, *cuts.tolist()], [*cuts.tolist(), None], strict=True):
        task = _spans_within(spans, low_ms, high_ms)
        if count_rows(task) > rows * ROWS_SLACK:
            # There is a cut after every `rows` rows, so only the first millisecond of a task can have too many.
            first_ms_spans = _spans_within(task, low_ms, low_ms + 1)
            task = _spans_within(task, low_ms + 1, high_ms)
            tasks += [
                [span.slice_rows(begin, begin + rows)]
                for span in first_ms_spans
                for begin in range(0, len(span.due_ms), rows)
            ]
        if task:
            tasks.append(task)
    return tasks


def _spans_within(spans: Sequence[Span], low_ms: int | None, high_ms: int | None) -> list[Span]:
    """Select the rows due at low_ms <= due_ms < high_ms. Leaves out empty spans."""
    return [rows_within for span in spans if len((rows_within := _span_within(span, low_ms, high_ms)).due_ms)]


def _cut_at_row_groups(span: Span, rows: int) -> list[Span]:
    """Cut a span into spans of at most `rows` rows, where row groups begin if they have no more rows than that."""
    step = rows // ROW_GROUP_ROWS * ROW_GROUP_ROWS or rows
    cuts = [0, *range(step - span.first_row % step, len(span.due_ms), step), len(span.due_ms)]
    return [span.slice_rows(begin, end) for begin, end in itertools.pairwise(cuts)]


def _span_within(span: Span, low_ms: int | None, high_ms: int | None) -> Span:
    """Cut out the rows of a span due at low_ms <= due_ms < high_ms. None means no bound."""
    begin = 0 if low_ms is None else int(np.searchsorted(span.due_ms, low_ms))
    end = len(span.due_ms) if high_ms is None else int(np.searchsorted(span.due_ms, high_ms))
    return span.slice_rows(begin, end)


def encode_pointers(spans: Sequence[Span]) -> pa.RecordBatch:
    """Encode the spans of a task as a batch in POINTER_SCHEMA, one row per span."""
    rows = [{"uri": span.uri, "first_row": span.first_row, "rows": len(span.due_ms)} for span in spans]
    return pa.RecordBatch.from_pylist(rows, POINTER_SCHEMA)


# ---- the sink: release rows when they are due -----------------------------------------------------------------
# A task reads its rows, sorts them by (due_ms, seq), waits until they are due by the broker's clock, and sends them
# batch by batch. Its estimate of this clock is a little late and never ahead, because a reading is already old when the
# answer arrives. If the broker refuses a batch as early nevertheless, the broker's clock was set back, and the task
# sends these rows again later. A task waits for at most `lead_ms` + `PATIENCE_MS`. The broker decides which rows are
# released (broker/accepting/delivery.py), so a repeated task changes nothing.

LOG = logging.getLogger("timeball.spark")

BATCH_ROWS = 16_384
TICK_MS = 10  # the shortest wait between two batches, when rows become due one by one
CLOCK_EVERY_MS = 1_000
# A task waits longer than its lead only if the broker's clock was set back. After this time it leaves its rows to the
# broker.
PATIENCE_MS = 10_000


@dataclass
class ReleaseCounts(WriterCommitMessage):
    """The result of a task: numbers of rows."""

    released: int = 0
    # The broker has settled these rows (released or cancelled), or has loaded them and releases them itself.
    left_to_broker: int = 0


class BrokerClock:
    """An estimate of the broker's clock that is never ahead of it.

    It is the last reading, plus the time that has passed since then on the task's own monotonic clock.
    """

    def __init__(self, endpoint: Endpoint, clock: Clock | None = None) -> None:
        self._endpoint, self._clock = endpoint, clock or SystemClock()
        self.read_clock()

    def now_ms(self) -> int:
        """Estimate the time of the broker's scheduler, in milliseconds since 1970. Asks the broker once a second."""
        elapsed_ms = (self._clock.monotonic_ns() - self._broker_read_ns) // 1_000_000
        if elapsed_ms >= CLOCK_EVERY_MS:
            self.read_clock()
            elapsed_ms = 0
        return self._broker_ms + elapsed_ms

    def read_clock(self) -> None:
        """Read the broker's clock by a `status` call. Raises the errors of Endpoint."""
        self._broker_ms = self._endpoint.status().now_ms
        # Read after the call, so that the estimate is never ahead.
        self._broker_read_ns = self._clock.monotonic_ns()


class ReleaseWriter(DataSourceStreamArrowWriter):
    """The sink of the stream. Spark runs `write` in a task, and `commit` on the driver after each micro-batch."""

    def __init__(self, endpoint: str, lead_ms: int) -> None:
        self._endpoint, self._lead_ms = endpoint, lead_ms

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Release the rows of one task's pointers, as they become due. Returns ReleaseCounts.

        Raises the errors of `read_all` and `release_when_due`.
        """
        rows = read_all([pointer for batch in iterator for pointer in batch.to_pylist()])
        if rows is None:
            return ReleaseCounts()
        with Endpoint(self._endpoint) as endpoint:
            return release_when_due(rows, endpoint, self._lead_ms + PATIENCE_MS)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """See DataSourceStreamWriter. Only logs the counts, because the broker has stored the releases already."""
        counts = [message for message in messages if isinstance(message, ReleaseCounts)]
        released, left = sum(task.released for task in counts), sum(task.left_to_broker for task in counts)
        LOG.info("epoch done job=dispatch epoch=%d released=%d left=%d", batchId, released, left)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: the rows that tasks have sent are released, and the broker releases all others."""


def read_all(pointers: list[dict[str, Any]]) -> pa.RecordBatch | None:
    """Read the rows of these pointers (POINTER_SCHEMA), in TABLE_SCHEMA, sorted by (due_ms, seq).

    Skips deleted files. Returns None without rows. Raises OSError for a file that cannot be read.
    """
    tables = []
    for pointer in pointers:
        try:
            tables.append(read_rows(**pointer, columns=TABLE_SCHEMA.names))
        except FileNotFoundError:
            # The broker has rewritten the file. Its pending rows are in another file.
            LOG.warning("file rewritten meanwhile, the broker releases its rows file=%s", pointer["uri"])
    if not tables:
        return None
    rows = pa.concat_tables(tables).select(TABLE_SCHEMA.names).cast(TABLE_SCHEMA).combine_chunks()
    if len(tables) > 1:
        order = np.lexsort((rows.column("seq").to_numpy(), rows.column("due_ms").to_numpy()))
        rows = rows.take(pa.array(order)).combine_chunks()
    batches = rows.to_batches()
    return batches[0] if batches else None


def release_when_due(
    rows: pa.RecordBatch, endpoint: Endpoint, patience_ms: int, clock: Clock | None = None
) -> ReleaseCounts:
    """Send rows of TABLE_SCHEMA, sorted by due time, to the broker as they become due.

    After `patience_ms`, leaves the remaining rows to the broker. Raises the broker's error for a refused batch, except
    for a batch that is early: its rows are sent again.
    """
    counts, clock = ReleaseCounts(), clock or SystemClock()
    give_up_ns = clock.monotonic_ns() + patience_ms * 1_000_000
    broker_clock = BrokerClock(endpoint, clock)
    remaining: pa.RecordBatch | None = rows
    while remaining is not None and clock.monotonic_ns() < give_up_ns:
        # When `release` returns, `sent.batches` has the batch of each answer.
        sent = RecordingIterator(due_batches(remaining, broker_clock, give_up_ns, clock))
        refused_as_early = []
        for batch, answer in zip(sent.batches, endpoint.release(sent), strict=True):
            if answer.error == OutOfRange.code:
                refused_as_early.append(batch)
            elif answer.error:
                raise from_code(answer.error, answer.text)
            counts.released += answer.released
            counts.left_to_broker += answer.left
        remaining = pa.concat_batches(refused_as_early) if refused_as_early else None
        if refused_as_early:
            broker_clock.read_clock()
            threading.Event().wait(TICK_MS / 1000)
    return counts


class RecordingIterator:
    """An iterator over batches that records them, so that each can be matched with its answer."""

    def __init__(self, source: Iterator[pa.RecordBatch]) -> None:
        self._source = source
        self.batches: list[pa.RecordBatch] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._source:
            self.batches.append(batch)
            yield batch


def due_batches(
    rows: pa.RecordBatch, broker_clock: BrokerClock, give_up_ns: int, clock: Clock
) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows, sorted by due time, as they become due.

    Stops at `give_up_ns` on the monotonic clock, even if rows are left.
    """
    due = int64(rows.column("due_ms"))
    next_row = 0
    while next_row < len(due):
        due_rows = _count_due(due, broker_clock.now_ms())
        if due_rows > next_row:
            end = min(due_rows, next_row + BATCH_ROWS)
            yield from halves(rows.slice(next_row, end - next_row))
            next_row = end
        if next_row < len(due) and next_row >= due_rows:
            if clock.monotonic_ns() >= give_up_ns:
                return
            wait_ms = min(max(TICK_MS, int(due[next_row]) - broker_clock.now_ms()), CLOCK_EVERY_MS)
            threading.Event().wait(wait_ms / 1000)


def _count_due(due_ms: Int64Array, now_ms: int) -> int:
    """Count the rows due at `now_ms` or earlier. `due_ms` is in ascending order."""
    return int(np.searchsorted(due_ms, now_ms, side="right"))


# ---- the job: a query and its lease ---------------------------------------------------------------------------

JOB_NAME = "dispatch"
LEASE_MS = 10_000
RENEW_EVERY_S = 3.0
TRIGGER = "50 milliseconds"


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    *,
    once: bool = False,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start the query with a checkpoint folder of Spark. With `once` it ends after the messages due at its start.

    `options`: of DueOptions, except the endpoint.
    """
    stream_options = {**(options or {}), "endpoint": endpoint}
    due = spark.readStream.format(NAME).options(**stream_options).load()
    writer = due.writeStream.format(NAME).options(**stream_options)
    return start_query(writer, query_name(JOB_NAME, endpoint), checkpoint, None if once else TRIGGER)


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Make the lease of a dispatcher, held while `needed` returns True.

    While the job has it, the broker does not load due messages from files, but leaves them to the job. When `needed`
    returns False, the lease ends at once, and the broker loads them by itself again.
    """
    return Lease(
        endpoint,
        JOB_NAME,
        Endpoint.lease_dispatcher,
        needed,
        lease_ms=LEASE_MS,
        renew_s=RENEW_EVERY_S,
        ends_when_unneeded=True,
    )
