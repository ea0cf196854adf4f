"""The job `archive` stores every visible message in a Delta table, for longer than the log's retention.

The table is beside the pending table by default. It has one row for each message that became visible in a queue: the
MESSAGE and RELEASE rows of the log with all their columns. A message has *passed* when it became visible, at its
`store_ms`. A cancelled message never becomes visible, so it is only in the ledger.

Each epoch extends the archive from its mark to the end of the log (archive_writer.py). So no state outside the table
decides where it continues. A repeated epoch adds nothing, and retention cannot leave an unnoticed gap.

Every TIDY_EVERY versions, the job joins neighbouring small files of one day into one sorted file. A week later it
deletes the replaced files and the files of dead tasks. The delay protects readers that still use an older version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import RemoveAction

from timeball.io.clock import SystemClock
from timeball.model import storage_uris
from timeball.model.errors import NotFound, StorageError
from timeball.model.wire import Status
from timeball.spark.delta_append import app_version
from timeball.spark.endpoint import Endpoint, group_statuses
from timeball.spark.groups import PLACEHOLDER
from timeball.spark.jobs import archive_writer, marked
from timeball.spark.jobs.archive_writer import APP_ID, PARTITION
from timeball.spark.jobs.engine import Engine
from timeball.spark.jobs.marked import MarkedJob
from timeball.spark.log_events import ARCHIVE_SCHEMA
from timeball.spark.source.pacing import split_range
from timeball.spark.table_store import Store, create_table, default_table_uri, open_table

if TYPE_CHECKING:  # a job without Spark imports none of it
    from pyspark.sql import DataFrame, SparkSession

    from timeball.spark.source.pushdown import Bounds

LOG = logging.getLogger("timeball.spark")

NAME = "archive"
SINCE = "timeball.since"  # table property: the first row of the log that the archive contains
SINCE_MS = "timeball.since_ms"  # table property: the time of that row; earlier messages are missing
EPOCH_ROWS = 1_000_000
PIECE_ROWS = 500_000  # rows of the log per task, which usually writes one file
# An archive is not urgent, and each epoch adds one or two files. So there is one epoch per minute, or per 500,000 rows.
OPTIONS = {
    "max_rows_per_batch": str(EPOCH_ROWS),
    "rows_per_partition": str(PIECE_ROWS),
    "min_rows_per_batch": "500000",
    "max_trigger_delay_ms": "60000",
    "few_rows": "1",
}
TIDY_EVERY = 100  # versions
JOINED_ROWS = 1_000_000
JOINED_BYTES = 64 * 1024 * 1024  # of Parquet; several times as much in memory while files are joined


# ---- the table --------------------------------------------------------------------------------------------


def open_archive(uri: str, endpoint: Endpoint) -> DeltaTable:
    """Open the archive at `uri`. If there is none, create one that begins at the first row of the log."""
    try:
        return open_table(uri)
    except NotFound:
        since, since_ms = beginning(endpoint)
        LOG.info("new archive job=archive uri=%s since_seq=%d", uri, since)
        return create_table(
            uri,
            ARCHIVE_SCHEMA,
            partition_by=[PARTITION],
            name=NAME,
            description="Messages that became visible; one row each",
            configuration={SINCE: str(since), SINCE_MS: str(since_ms)},
            raise_if_key_not_exists=False,
            commit_properties=CommitProperties(app_transactions=[Transaction(APP_ID, since)]),
        )


def beginning(endpoint: Endpoint) -> tuple[int, int]:
    """Read (first row of the log, its time in ms). The time is 0 if retention has never removed rows."""
    status = endpoint.status()
    if status.log.first_seq <= 1:
        return status.log.first_seq, 0
    for batch in endpoint.read_log(status.log.first_seq, status.log.durable_seq, columns=["store_ms"]):
        times_ms = batch.column("store_ms").drop_null()
        if len(times_ms):
            return status.log.first_seq, times_ms[0].as_py()
    return status.log.first_seq, status.now_ms


@dataclass(frozen=True)
class Reach:
    """The range of an archive: it has the messages that passed in rows since <= seq < mark of the log."""

    since: int
    since_ms: int  # time of row `since`: the archive has no message that passed before
    mark: int


def reach(table: DeltaTable) -> Reach:
    """Read the range of an archive. Raises StorageError if the table is not an archive."""
    properties = table.metadata().configuration
    mark = app_version(table, APP_ID)
    if SINCE not in properties or SINCE_MS not in properties or mark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not an archive; name another with --archive"
        )
    return Reach(int(properties[SINCE]), int(properties[SINCE_MS]), mark)


def files(
    table: DeltaTable,
    passed_ms: Bounds | None = None,
    due_ms: Bounds | None = None,
    topics: Sequence[str] = (),
) -> list[str]:
    """Select the files that may contain matching rows by their statistics. Returns URIs.

    `passed_ms`, `due_ms`: bounds of the time at which a message passed, and of its due time. `topics`: empty for all.
    """

    def may_contain(action: dict[str, Any]) -> bool:
        low, high = action.get("min.topic"), action.get("max.topic")
        may_have_topics = (
            not topics or low is None or high is None or any(low <= topic <= high for topic in topics)
        )
        bounds_by_column = {"store_ms": passed_ms, "due_ms": due_ms}
        return may_have_topics and all(
            bounds.may_hold(action.get(f"min.{name}"), action.get(f"max.{name}"))
            for name, bounds in bounds_by_column.items()
            if bounds is not None
        )

    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return [f"{table.table_uri.rstrip('/')}/{action['path']}" for action in actions if may_contain(action)]


def read_archive(spark: SparkSession, table: DeltaTable, uris: Sequence[str] | None = None) -> DataFrame:
    """Read one version of the archive, or only the files `uris`. The columns are those of the log, and `day`."""
    from timeball.spark.source.table_reader import read_delta

    return read_delta(spark, table, ARCHIVE_SCHEMA, uris)


def messages(
    spark: SparkSession,
    endpoint: str,
    uri: str | None = None,
    *,
    from_ms: int | None = None,
    until_ms: int | None = None,
    topics: Sequence[str] = (),
) -> DataFrame:
    """Read the messages that became visible at from_ms <= store_ms < until_ms. Without `topics`, of all topics.

    Only the files that can have such messages are read. If there are several groups, the result has the additional
    column `group`.
    """
    from timeball.spark.source.spark_api import unite

    if uri is not None and PLACEHOLDER not in uri:
        return _messages(spark, uri, from_ms, until_ms, topics)
    archives = JOB.sinks_by_group(group_statuses(endpoint), uri)
    messages_by_group = {
        group: _messages(spark, uri, from_ms, until_ms, topics) for group, (_, uri) in archives.items()
    }
    return unite(messages_by_group)


def _messages(
    spark: SparkSession, uri: str, from_ms: int | None, until_ms: int | None, topics: Sequence[str]
) -> DataFrame:
    """Read the messages of one archive, as `messages` does."""
    from timeball.spark.source.pushdown import Bounds

    table = open_table(uri)
    rows = read_archive(
        spark, table, files(table, Bounds(from_ms, None if until_ms is None else until_ms - 1), topics=topics)
    )
    if from_ms is not None:
        rows = rows.where(rows["store_ms"] >= from_ms)
    if until_ms is not None:
        rows = rows.where(rows["store_ms"] < until_ms)
    return rows.where(rows["topic"].isin(*topics)) if topics else rows


# ---- from the log to the archive --------------------------------------------------------------------------


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int = PIECE_ROWS) -> int:
    """Extend the archive up to row `to_seq`, in steps of EPOCH_ROWS. Returns the number of log rows processed."""
    with Endpoint(endpoint) as broker:
        begin = reach(open_archive(uri, broker)).mark
        marked.check_mark(NAME, uri, begin, broker.status().log, to_seq)
    for low in range(begin, to_seq, EPOCH_ROWS):
        high = min(low + EPOCH_ROWS, to_seq)
        work = f"messages of rows {low:,} to {high:,} of the log"
        entries_by_task = engine.run(
            NAME,
            work,
            partial(archive_writer.write_piece, endpoint, uri),
            split_range(low, high, piece_rows),
        )
        archive_writer.commit_epoch(
            uri, low, high, [entry for entries in entries_by_task for entry in entries]
        )
    if begin < to_seq:
        tidy(uri)
    return max(0, to_seq - begin)


def _mark(broker: Endpoint, status: Status, uri: str) -> int:
    return reach(open_archive(uri, broker)).mark


JOB = MarkedJob(
    NAME,
    OPTIONS,
    extend,
    mark=_mark,
    default_uri=lambda status: default_table_uri(NAME, status.table.uri, status),
)


# ---- joining small files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A file that is small enough to be joined with others."""

    path: str
    day: str
    rows: int
    size_bytes: int
    first_seq: int


def tidy(uri: str, every: int = TIDY_EVERY) -> None:
    """Every `every` versions, join small files, and delete files that no version has used for a week."""
    table = open_table(uri)
    if table.version() % every != every - 1:
        return
    try:
        join(table)
        table.vacuum(dry_run=False, full=True)
        table.create_checkpoint()
    except DeltaError as error:  # another process has committed at the same time; the next try is enough
        LOG.warning("archive not tidied job=archive reason=%s", error)


def join(table: DeltaTable) -> int:
    """Join neighbouring small files. Returns the number of replaced files, which stay on disk for older versions."""
    store = Store(table.table_uri)
    replaced = 0
    for group in neighbours(small_files(table)):
        read = [_rows(f"{table.table_uri.rstrip('/')}/{small.path}") for small in group]
        now_ms = SystemClock().wall_ms()
        written = archive_writer.write_files(store, pa.concat_tables(read))
        joined = [entry.add(now_ms, data_change=False) for entry in written]
        removed = [
            RemoveAction(small.path, False, now_ms, small.size_bytes, {PARTITION: small.day})
            for small in group
        ]
        archive_writer.commit(table, [*joined, *removed])
        table.update_incremental()
        replaced += len(group)
    return replaced


def small_files(table: DeltaTable) -> list[Small]:
    """List the files with less than half the size limits of a joined file, ordered by day and first row."""
    files = [
        Small(a["path"], str(a[f"partition.{PARTITION}"]), a["num_records"], a["size_bytes"], a["min.seq"])
        for a in pa.table(table.get_add_actions(flatten=True)).to_pylist()
    ]
    small = [file for file in files if file.rows < JOINED_ROWS // 2 and file.size_bytes < JOINED_BYTES // 2]
    return sorted(small, key=lambda file: (file.day, file.first_seq))


def neighbours(small_files: Sequence[Small]) -> Iterator[list[Small]]:
    """Yield groups of two or more consecutive files of one day, each group within JOINED_ROWS and JOINED_BYTES."""
    group: list[Small] = []
    for file in small_files:
        rows, size = (
            sum(g.rows for g in group) + file.rows,
            sum(g.size_bytes for g in group) + file.size_bytes,
        )
        if group and (group[0].day != file.day or rows > JOINED_ROWS or size > JOINED_BYTES):
            if len(group) > 1:
                yield group
            group = []
        group.append(file)
    if len(group) > 1:
        yield group


def _rows(uri: str) -> pa.Table:
    system, path = storage_uris.arrow(uri)
    with system.open_input_file(path) as source:
        return pq.ParquetFile(source).read()
