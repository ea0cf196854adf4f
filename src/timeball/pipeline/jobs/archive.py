"""`archive`: keep every message that passed in a Delta table beside the pending table, beyond the log's retention.

The archive has one row for each message that became visible in a queue: MESSAGE and RELEASE rows with all columns of
the log (`store_ms` is the instant at which it became visible). A cancelled promise never passed; the ledger has it.

Each epoch goes from the archive's own mark to the end of the log (archive_writer.py). So the table alone tells its
contents: a repeated epoch adds nothing, and retention leaves no hole without an error.

Every TIDY_EVERY versions the job joins small files, neighbours of one day into one sorted file. It removes what was
replaced, and what a dead task left behind, a week later, so that no reader loses a file while reading it.
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

from timeball import places
from timeball.clock import SystemClock
from timeball.errors import NotFound, StorageError
from timeball.pipeline.delta_append import app_version
from timeball.pipeline.endpoint import Endpoint, group_statuses
from timeball.pipeline.groups import PLACEHOLDER
from timeball.pipeline.jobs import archive_writer, marked
from timeball.pipeline.jobs.archive_writer import APP_ID, PARTITION
from timeball.pipeline.jobs.engine import Engine
from timeball.pipeline.jobs.marked import MarkedJob
from timeball.pipeline.log_events import ARCHIVE_SCHEMA
from timeball.pipeline.source.pacing import split_range
from timeball.pipeline.table_store import Store, beside, create_table, open_table
from timeball.wire import Status

if TYPE_CHECKING:  # a job without Spark imports none of it
    from pyspark.sql import DataFrame, SparkSession

    from timeball.pipeline.source.pushdown import Bounds

LOG = logging.getLogger("timeball.pipeline")

NAME = "archive"
SINCE = "timeball.since"  # table property: the first row of the log that the archive has seen
SINCE_MS = "timeball.since_ms"  # and the instant of that row: what passed before it is not here
EPOCH_ROWS = 1_000_000
PIECE_ROWS = 500_000  # of the log, for one task: a file
# An archive is not urgent, and each micro-batch is a file or two: one a minute, or half a million rows.
OPTIONS = {
    "max_rows_per_batch": str(EPOCH_ROWS),
    "rows_per_partition": str(PIECE_ROWS),
    "min_rows_per_batch": "500000",
    "max_trigger_delay_ms": "60000",
    "few_rows": "1",
}
TIDY_EVERY = 100  # versions
JOINED_ROWS = 1_000_000
JOINED_BYTES = 64 * 1024 * 1024  # of Parquet; some times that in memory while they are joined


# ---- the table --------------------------------------------------------------------------------------------


def open_archive(uri: str, endpoint: Endpoint) -> DeltaTable:
    """Open the archive at `uri`; create it, for what passes from the log's first row on, when there is none."""
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
    """Return (first row of the log, its instant); the instant is 0 when nothing was ever removed."""
    status = endpoint.status()
    if status.log.first_seq <= 1:
        return status.log.first_seq, 0
    for batch in endpoint.read_log(status.log.first_seq, status.log.durable_seq, columns=["store_ms"]):
        known = batch.column("store_ms").drop_null()
        if len(known):
            return status.log.first_seq, known[0].as_py()
    return status.log.first_seq, status.now_ms


@dataclass(frozen=True)
class Reach:
    """The archive holds what passed in rows since <= seq < mark of the log, since_ms being the first one's instant."""

    since: int
    since_ms: int
    mark: int


def reach(table: DeltaTable) -> Reach:
    """Return how far an archive goes back and forward; StorageError for another table."""
    known = table.metadata().configuration
    mark = app_version(table, APP_ID)
    if SINCE not in known or SINCE_MS not in known or mark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not an archive; name another with --archive"
        )
    return Reach(int(known[SINCE]), int(known[SINCE_MS]), mark)


def files(
    table: DeltaTable,
    passed_ms: Bounds | None = None,
    due_ms: Bounds | None = None,
    topics: Sequence[str] = (),
) -> list[str]:
    """Return URIs of files that can hold rows of these topics (none: all) that passed, or were due, within bounds."""

    def may_hold(action: dict[str, Any]) -> bool:
        low, high = action.get("min.topic"), action.get("max.topic")
        named = not topics or low is None or high is None or any(low <= topic <= high for topic in topics)
        asked = {"store_ms": passed_ms, "due_ms": due_ms}
        return named and all(
            bounds.may_hold(action.get(f"min.{name}"), action.get(f"max.{name}"))
            for name, bounds in asked.items()
            if bounds is not None
        )

    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return [f"{table.table_uri.rstrip('/')}/{action['path']}" for action in actions if may_hold(action)]


def read_archive(spark: SparkSession, table: DeltaTable, uris: Sequence[str] | None = None) -> DataFrame:
    """Return all of one version of the archive, or some of its files: the log's columns, and `day`."""
    from timeball.pipeline.source.table_reader import read_delta

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
    """Read messages that became visible at from_ms <= store_ms < until_ms, of these topics (none: of all).

    Only files that can hold some of them are read. Of several groups each message has a column `group` besides.
    """
    from timeball.pipeline.source.spark_api import unite

    if uri is not None and PLACEHOLDER not in uri:
        return _messages(spark, uri, from_ms, until_ms, topics)
    where = JOB.places(group_statuses(endpoint), uri)
    found = {group: _messages(spark, uri, from_ms, until_ms, topics) for group, (_, uri) in where.items()}
    return unite(found)


def _messages(
    spark: SparkSession, uri: str, from_ms: int | None, until_ms: int | None, topics: Sequence[str]
) -> DataFrame:
    from timeball.pipeline.source.pushdown import Bounds

    table = open_table(uri)
    found = read_archive(
        spark, table, files(table, Bounds(from_ms, None if until_ms is None else until_ms - 1), topics=topics)
    )
    if from_ms is not None:
        found = found.where(found["store_ms"] >= from_ms)
    if until_ms is not None:
        found = found.where(found["store_ms"] < until_ms)
    return found.where(found["topic"].isin(*topics)) if topics else found


# ---- from the log to the archive --------------------------------------------------------------------------


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int = PIECE_ROWS) -> int:
    """Bring the archive up to row `to_seq`, in steps of EPOCH_ROWS; returns how many rows of the log that took."""
    with Endpoint(endpoint) as broker:
        begin = reach(open_archive(uri, broker)).mark
        marked.check_mark(NAME, uri, begin, broker.status().log, to_seq)
    for low in range(begin, to_seq, EPOCH_ROWS):
        high = min(low + EPOCH_ROWS, to_seq)
        work = f"what passed in rows {low:,} to {high:,} of the log"
        written = engine.run(
            NAME,
            work,
            partial(archive_writer.write_piece, endpoint, uri),
            split_range(low, high, piece_rows),
        )
        archive_writer.commit_epoch(uri, low, high, [entry for each in written for entry in each])
    if begin < to_seq:
        tidy(uri)
    return max(0, to_seq - begin)


def _mark(broker: Endpoint, status: Status, uri: str) -> int:
    return reach(open_archive(uri, broker)).mark


JOB = MarkedJob(
    NAME, OPTIONS, extend, mark=_mark, place=lambda status: beside(NAME, status.table.uri, status)
)


# ---- few files --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A file worth joining."""

    path: str
    day: str
    rows: int
    size_bytes: int
    first_seq: int


def tidy(uri: str, every: int = TIDY_EVERY) -> None:
    """Every TIDY_EVERY versions, join small files and remove those that no version has named for a week."""
    table = open_table(uri)
    if table.version() % every != every - 1:
        return
    try:
        join(table)
        table.vacuum(dry_run=False, full=True)
        table.create_checkpoint()
    except DeltaError as error:  # another process has committed; the next time will do
        LOG.warning("archive not tidied job=archive reason=%s", error)


def join(table: DeltaTable) -> int:
    """Return join neighbouring small files; returns how many have gone. Readers of older versions keep theirs."""
    store = Store(table.table_uri)
    gone = 0
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
        gone += len(group)
    return gone


def small_files(table: DeltaTable) -> list[Small]:
    """Return files less than half of what a joined one may be, by day and by their place in the log."""
    found = [
        Small(a["path"], str(a[f"partition.{PARTITION}"]), a["num_records"], a["size_bytes"], a["min.seq"])
        for a in pa.table(table.get_add_actions(flatten=True)).to_pylist()
    ]
    small = [each for each in found if each.rows < JOINED_ROWS // 2 and each.size_bytes < JOINED_BYTES // 2]
    return sorted(small, key=lambda each: (each.day, each.first_seq))


def neighbours(small: Sequence[Small]) -> Iterator[list[Small]]:
    """Group at least two files of one day that together stay within JOINED_ROWS and JOINED_BYTES."""
    group: list[Small] = []
    for each in small:
        rows, size = (
            sum(g.rows for g in group) + each.rows,
            sum(g.size_bytes for g in group) + each.size_bytes,
        )
        if group and (group[0].day != each.day or rows > JOINED_ROWS or size > JOINED_BYTES):
            if len(group) > 1:
                yield group
            group = []
        group.append(each)
    if len(group) > 1:
        yield group


def _rows(uri: str) -> pa.Table:
    system, path = places.arrow(uri)
    with system.open_input_file(path) as source:
        return pq.ParquetFile(source).read()
