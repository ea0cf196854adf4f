"""The job `archive` stores every visible message in a Delta table, for longer than the log's retention.

The table is beside the pending table by default. It has one row for each message that became visible in a queue: the
MESSAGE and RELEASE rows of the log with all their columns. A message *passes* when it becomes visible, at its
`store_ms`. A cancelled message never becomes visible, so it is only in the ledger.

    day=2026-11-22/<32 hex>.parquet      rows of one day (UTC) and one range of the log, by (topic, seq)

Each epoch extends the archive from its mark to the end of the log. Tasks write ranges of the log as files, and one
Delta commit adds the files. The mark is the row of the log up to which the archive is complete. It is stored in the
table, as Delta's application version. So no state outside the table decides where the job continues. A repeated epoch
adds nothing, and retention cannot leave an unnoticed gap.

The job joins small files of one day into sorted files (joining.py).
"""

from __future__ import annotations

import io
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from timeball.io.clock import SystemClock
from timeball.model.answers import Status
from timeball.model.errors import NotFound, OutOfRange, StorageError
from timeball.model.limits import DAY_MS
from timeball.model.message import READ_SCHEMA, Kind, int64
from timeball.spark.endpoint import PLACEHOLDER, Endpoint, group_statuses
from timeball.spark.jobs import joining, marked
from timeball.spark.jobs.marked import Engine, MarkedJob
from timeball.spark.log_events import ARCHIVE_SCHEMA
from timeball.spark.source.options import split_range
from timeball.spark.table_store import Store, app_version, chunks, create_table, default_table_uri, open_table

# ---- files of the archive -------------------------------------------------------------------------------------
# A task fetches a range of the log over Flight and writes its rows, on Spark's executors or without Spark in the job's
# own process. Message bodies never enter the JVM. The table is partitioned by day only. With partitions by topic, each
# epoch would write a file per topic, and a broker may have thousands of topics (one for each consumer group with
# retries). Instead, each file is sorted by topic. A reader of one topic skips files and row groups by their smallest
# and largest topic.

APP_ID = "timeball-archive"
PARTITION = "day"
PASSED = (Kind.MESSAGE, Kind.RELEASE)  # the kinds of rows that are visible messages in a queue
FILE_SCHEMA = READ_SCHEMA
ROW_GROUP_ROWS = 65_536
_BOUNDED = ("seq", "topic", "store_ms", "due_ms")  # columns with statistics, because readers search by them
_EPOCH_DAY = date(1970, 1, 1)


@dataclass(frozen=True)
class ArchiveFile:
    """One data file of the archive that a task has written."""

    path: str  # below the table's URI
    day: str  # in ISO 8601
    rows: int
    size_bytes: int
    stats: str  # Delta's statistics, as JSON

    def add(self, now_ms: int, *, data_change: bool = True) -> AddAction:
        """Make the entry of the Delta log that adds this file. `data_change` is False if it replaces joined files."""
        return AddAction(self.path, self.size_bytes, {PARTITION: self.day}, now_ms, data_change, self.stats)


# ---- rows -> files --------------------------------------------------------------------------------------------


def sort_by_topic(rows: pa.Table) -> pa.Table:
    """Sort rows by (topic, seq)."""
    # Sorts the distinct topic names instead of comparing names row by row.
    topics = rows.column("topic").combine_chunks().dictionary_encode()
    rank = np.argsort(np.argsort(np.array(topics.dictionary.to_pylist(), dtype=object)))
    order = np.lexsort((int64(rows.column("seq").combine_chunks()), rank[topics.indices.to_numpy()]))
    return rows.take(pa.array(order))


def split_by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield (day, its rows): splits rows by the day (UTC) on which they passed. Keeps the order within a day.

    The day is in ISO 8601. Nearly always there is only one.
    """
    days = int64(rows.column("store_ms").combine_chunks()) // DAY_MS
    for day in np.unique(days).tolist():
        is_of_day = days == day
        rows_of_day = rows if is_of_day.all() else rows.filter(pa.array(is_of_day))
        yield (_EPOCH_DAY + timedelta(days=day)).isoformat(), rows_of_day.combine_chunks()


def encode_archive_file(rows: pa.Table) -> bytes:
    """Encode sorted rows as a Parquet file with the columns of FILE_SCHEMA."""
    sink = io.BytesIO()
    pq.write_table(
        rows.select(FILE_SCHEMA.names).cast(FILE_SCHEMA),
        sink,
        compression="zstd",
        compression_level=1,
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=["topic", "tag", "born_host", "store_host"],
        write_statistics=list(_BOUNDED),
        write_page_checksum=True,
    )
    return sink.getvalue()


def write_archive_files(store: Store, rows: pa.Table) -> Iterator[ArchiveFile]:
    """Write rows of FILE_SCHEMA to one file per day, sorted by (topic, seq), and yield the files.

    Each call makes new file names. Raises StorageError.
    """
    for day, rows_of_day in split_by_day(sort_by_topic(rows)):
        data = encode_archive_file(rows_of_day)
        path = f"{PARTITION}={day}/{uuid.uuid4().hex}.parquet"
        store.put(path, data)
        yield ArchiveFile(path, day, rows_of_day.num_rows, len(data), delta_statistics(rows_of_day))


def write_joined(store: Store, rows: pa.Table, now_ms: int) -> Iterator[AddAction]:
    """Write the rows of joined files (`joining.Write`)."""
    return (entry.add(now_ms, data_change=False) for entry in write_archive_files(store, rows))


def delta_statistics(rows: pa.Table) -> str:
    """Encode Delta's statistics of a file: number of rows, and minimum, maximum and nulls of the columns _BOUNDED."""
    all_bounds = {name: pc.min_max(rows.column(name)) for name in _BOUNDED}
    # A column of nulls has no bounds.
    bounds_by_name = {name: bounds for name, bounds in all_bounds.items() if bounds["min"].is_valid}
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {name: bounds["min"].as_py() for name, bounds in bounds_by_name.items()},
            "maxValues": {name: bounds["max"].as_py() for name, bounds in bounds_by_name.items()},
            "nullCount": {name: rows.column(name).null_count for name in _BOUNDED},
        }
    )


# ---- an epoch -------------------------------------------------------------------------------------------------
# An epoch adds the rows from_seq <= seq < to_seq of the log exactly once. `mark` is the mark of the archive:
#
#     to_seq <= mark      the rows are in the archive already: nothing is added
#     from_seq == mark    the files are added, and the mark moves to `to_seq`
#     else                OutOfRange: another job has extended the archive, and the loop plans again from the mark


def archive_piece(endpoint: str, uri: str, piece: tuple[int, int]) -> list[ArchiveFile]:
    """Write the messages that passed in the rows of one piece of the log. On failure, deletes the files.

    This is the job's task. `uri`: of the archive. Returns the files, which are in no version of the table yet.
    """
    written: list[ArchiveFile] = []
    store = Store(uri)
    try:
        with Endpoint(endpoint) as broker:
            for rows in chunks(broker.read_log(*piece, PASSED)):
                written.extend(write_archive_files(store, rows))
    except BaseException:  # also for an interrupt, which would leave unused files
        store.remove(entry.path for entry in written)
        raise
    return written


def commit_epoch(uri: str, from_seq: int, to_seq: int, files: list[ArchiveFile]) -> None:
    """Add the files of the rows from_seq <= seq < to_seq once, and move the mark. An epoch without files moves it too.

    If another job has extended the archive, deletes the files and raises OutOfRange.
    """
    table = open_table(uri)
    mark = app_version(table, APP_ID) or 0
    if to_seq <= mark:
        LOG.info("epoch archived before job=archive to_seq=%d mark=%d", to_seq, mark)
        return
    try:
        if mark != from_seq:
            raise OutOfRange(f"the archive ends at row {mark}, this epoch begins at {from_seq}")
        add(table, files, to_seq)
    except (OutOfRange, CommitFailedError) as error:
        # If the answer of an object store was lost, a commit that succeeded is reported as failed. Then the files
        # belong to the table and must not be removed.
        if files and files[0].path in _list_paths(open_table(uri)):
            return
        Store(uri).remove(entry.path for entry in files)
        raise OutOfRange(f"another archive job was at work: {error}; planned again") from error


def _list_paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist())


def add(table: DeltaTable, files: list[ArchiveFile], mark: int) -> None:
    """Add files to the archive, and set its mark, in one commit. Raises CommitFailedError."""
    now_ms = SystemClock().wall_ms()
    table.create_write_transaction(
        [entry.add(now_ms) for entry in files],
        "append",
        ARCHIVE_SCHEMA,
        partition_by=[PARTITION],
        commit_properties=CommitProperties(app_transactions=[Transaction(APP_ID, mark)]),
    )


# ---- settings of the job --------------------------------------------------------------------------------------

if TYPE_CHECKING:  # a job without Spark imports none of it
    from pyspark.sql import DataFrame, SparkSession

    from timeball.spark.source.spark_api import Bounds

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


# ---- the table ------------------------------------------------------------------------------------------------


def open_archive(uri: str, endpoint: Endpoint) -> DeltaTable:
    """Open the archive at `uri`. If there is none, create one that begins at the first row of the kept log."""
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
    """Read (first row of the kept log, its time in ms). The time is 0 if retention has never removed rows."""
    status = endpoint.status()
    if status.log.first_seq <= 1:
        return status.log.first_seq, 0
    for batch in endpoint.read_log(status.log.first_seq, status.log.durable_seq, columns=["store_ms"]):
        times_ms = batch.column("store_ms").drop_null()
        if len(times_ms):
            return status.log.first_seq, times_ms[0].as_py()
    return status.log.first_seq, status.now_ms  # the kept log has no row with a time


@dataclass(frozen=True)
class ArchiveRange:
    """The range of an archive: it has the messages of the rows since <= seq < mark of the log."""

    since: int
    since_ms: int  # time of row `since`: the archive has no message that passed before
    mark: int


def read_range(table: DeltaTable) -> ArchiveRange:
    """Read the range of an archive. Raises StorageError if the table is not an archive."""
    properties = table.metadata().configuration
    mark = app_version(table, APP_ID)
    if SINCE not in properties or SINCE_MS not in properties or mark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not an archive; name another with --archive"
        )
    return ArchiveRange(int(properties[SINCE]), int(properties[SINCE_MS]), mark)


def select_files(
    table: DeltaTable,
    passed_ms: Bounds | None = None,
    due_ms: Bounds | None = None,
    topics: Sequence[str] = (),
) -> list[str]:
    """List the URIs of the files that may contain matching rows, by their statistics.

    `passed_ms`, `due_ms`: bounds of the time at which a message passed, and of its due time. `topics`: empty for all.
    """

    def may_contain(action: dict[str, Any]) -> bool:
        """Check the statistics of one file. A file may contain rows if its statistics have no bounds."""
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

    `uri`: one archive, or with `{group}` the archive of each group; by default the archives beside the pending tables.
    Only the files that may have matching messages are read. If there are several groups, the result has the additional
    column `group`. Raises NotFound if there is no archive.
    """
    from timeball.spark.source.spark_api import union_groups

    if uri is not None and PLACEHOLDER not in uri:
        return _messages(spark, uri, from_ms, until_ms, topics)
    archives = JOB.sinks_by_group(group_statuses(endpoint), uri)
    return union_groups(
        {group: _messages(spark, sink.uri, from_ms, until_ms, topics) for group, sink in archives.items()}
    )


def _messages(
    spark: SparkSession, uri: str, from_ms: int | None, until_ms: int | None, topics: Sequence[str]
) -> DataFrame:
    """Read the messages of one archive, as `messages` does."""
    from timeball.spark.source.spark_api import Bounds

    table = open_table(uri)
    rows = read_archive(
        spark,
        table,
        select_files(table, Bounds(from_ms, None if until_ms is None else until_ms - 1), topics=topics),
    )
    if from_ms is not None:
        rows = rows.where(rows["store_ms"] >= from_ms)
    if until_ms is not None:
        rows = rows.where(rows["store_ms"] < until_ms)
    return rows.where(rows["topic"].isin(*topics)) if topics else rows


# ---- from the log to the archive ------------------------------------------------------------------------------


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int = PIECE_ROWS) -> int:
    """Extend the archive up to row `to_seq` of the log, in steps of EPOCH_ROWS, as marked.Extend requires."""
    with Endpoint(endpoint) as broker:
        begin = read_range(open_archive(uri, broker)).mark
        marked.check_mark(NAME, uri, begin, broker.status().log, to_seq)
    for low in range(begin, to_seq, EPOCH_ROWS):
        high = min(low + EPOCH_ROWS, to_seq)
        work = f"messages of rows {low:,} to {high:,} of the log"
        entries_by_task = engine.run(
            NAME,
            work,
            partial(archive_piece, endpoint, uri),
            split_range(low, high, piece_rows),
        )
        commit_epoch(uri, low, high, [entry for entries in entries_by_task for entry in entries])
    if begin < to_seq:
        joining.maintain(NAME, uri, write_joined)
    return max(0, to_seq - begin)


def _mark(broker: Endpoint, status: Status, uri: str) -> int:
    return read_range(open_archive(uri, broker)).mark


JOB = MarkedJob(
    NAME,
    OPTIONS,
    extend,
    mark=_mark,
    default_uri=lambda status: default_table_uri(NAME, status.table.uri, status),
)
