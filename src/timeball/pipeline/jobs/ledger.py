"""`ledger`: the events of promises (log_events.py), in an append-only Delta table beside the pending table.

A promise that is given another instant has an event `moved`; one that is only written again has none. It was accepted
once, and waits.

A promise's number is its sequence number in the log. Rows of a bulk attach never pass through the log one by one,
so their topic and due instant are known here only once they are released; until then the pending table has them.

Each epoch goes from the ledger's own mark (the Delta table's application version) to the end of the log. So the table
alone tells its contents: a repeated epoch adds nothing, and a lost table leaves no hole without an error. A task reads
the rows of a range over Flight, and writes their events as a file; Spark's executors do it, or this process.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError

from timeball.errors import NotFound, StorageError
from timeball.pipeline.delta_append import DeltaFile, app_version, append_once, table_schema, write_file
from timeball.pipeline.endpoint import Endpoint, group_statuses
from timeball.pipeline.jobs import marked
from timeball.pipeline.jobs.engine import Engine, Piece
from timeball.pipeline.jobs.marked import MarkedJob
from timeball.pipeline.log_events import EVENT_SCHEMA, LEDGER_APP_ID, read_events
from timeball.pipeline.source.pacing import split_range
from timeball.pipeline.table_store import beside, create_table, open_table
from timeball.pipeline.views.view_sql import promises_sql
from timeball.wire import Status

if TYPE_CHECKING:  # a job without Spark imports none of it
    from pyspark.sql import DataFrame, SparkSession

LOG = logging.getLogger("timeball.pipeline")

NAME = "ledger"
SINCE = "timeball.since"  # table property: the first row of the log that the ledger has seen
EPOCH_ROWS = 1_000_000
OPTIONS = {"max_rows_per_batch": str(EPOCH_ROWS), "rows_per_partition": str(EPOCH_ROWS)}
TIDY_EVERY = 100  # versions; each left a file or two, which are then joined


# ---- the table --------------------------------------------------------------------------------------------


def open_ledger(uri: str, since: int) -> DeltaTable:
    """Open the ledger at `uri`; create it, for events from row `since` on, when there is none.

    An older one is given the columns that it lacks: to join files would leave out columns that the table has not.
    """
    try:
        table = open_table(uri)
        if lacking := [f for f in EVENT_SCHEMA if f.name not in table_schema(table).names]:
            bounds(table)  # refuses a table that is none of ours
            table.alter.add_columns(Schema.from_arrow(pa.schema(lacking)).fields)
        return table
    except NotFound:
        return create_table(
            uri,
            EVENT_SCHEMA,
            name=NAME,
            description="Events of promises: accepted, moved, released, cancelled",
            configuration={SINCE: str(since)},
            raise_if_key_not_exists=False,
            commit_properties=CommitProperties(app_transactions=[Transaction(LEDGER_APP_ID, since)]),
        )


def bounds(table: DeltaTable) -> tuple[int, int]:
    """Return (since, watermark): the ledger holds the events of rows since <= seq < watermark."""
    since = table.metadata().configuration.get(SINCE)
    watermark = app_version(table, LEDGER_APP_ID)
    if since is None or watermark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not a ledger; name another with --ledger"
        )
    return int(since), watermark


def write_events(endpoint: str, uri: str, piece: Piece) -> DeltaFile:
    """Write the events of one range of the log as one file of the ledger: the work of a task."""
    with Endpoint(endpoint) as broker:
        return write_file(uri, EVENT_SCHEMA, read_events(broker, *piece))


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int = EPOCH_ROWS) -> int:
    """Bring the ledger up to row `to_seq`, in steps of EPOCH_ROWS; returns how many rows of the log that took."""
    with Endpoint(endpoint) as broker:
        log = broker.status().log
    _, begin = bounds(open_ledger(uri, log.first_seq))
    marked.check_mark(NAME, uri, begin, log, to_seq)
    for low in range(begin, to_seq, EPOCH_ROWS):
        high = min(low + EPOCH_ROWS, to_seq)
        work = f"events of rows {low:,} to {high:,} of the log"
        written = engine.run(
            NAME, work, partial(write_events, endpoint, uri), split_range(low, high, piece_rows)
        )
        # Two ledgers that began at the same row must not both add what lies behind it.
        append_once(uri, LEDGER_APP_ID, low, high, written)
    _tidy(uri)
    return max(0, to_seq - begin)


def _tidy(uri: str) -> None:
    """Every TIDY_EVERY versions, join files and remove those that no version has named for a week."""
    table = open_table(uri)
    if table.version() % TIDY_EVERY != TIDY_EVERY - 1:
        return
    try:
        table.optimize.compact()
        table.vacuum(dry_run=False, full=True)
        table.create_checkpoint()
    except DeltaError as error:  # another process has committed; the next time will do
        LOG.warning("ledger not tidied job=ledger reason=%s", error)


# ---- the job ----------------------------------------------------------------------------------------------


def _mark(broker: Endpoint, status: Status, uri: str) -> int:
    return bounds(open_ledger(uri, status.log.first_seq))[1]


JOB = MarkedJob(
    NAME, OPTIONS, extend, mark=_mark, place=lambda status: beside(NAME, status.table.uri, status)
)


# ---- the view ---------------------------------------------------------------------------------------------


def read_ledger(spark: SparkSession, table: DeltaTable) -> DataFrame:
    """Return all events of one version of the ledger."""
    from timeball.pipeline.source.table_reader import read_delta

    return read_delta(spark, table, EVENT_SCHEMA)


def promises(spark: SparkSession, endpoint: str, uri: str | None = None) -> DataFrame:
    """Return one row a promise, with the causes of its lateness: view_sql.COLUMNS.

    From the ledger as far as it reaches; the due instants of bulk promises that still wait come from the pending table.
    Of several groups each promise has a column `group` besides.
    """
    from timeball.pipeline.source.spark_api import unite

    where = JOB.places(group_statuses(endpoint), uri)
    return unite({group: _promises(spark, *place) for group, place in where.items()})


def _promises(spark: SparkSession, endpoint: str, uri: str) -> DataFrame:
    history = read_ledger(spark, open_table(uri))
    table = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    return one_row_each(spark, history, table.option("columns", "seq,due_ms,topic,unique_key").load())


def one_row_each(spark: SparkSession, history: DataFrame, waiting: DataFrame) -> DataFrame:
    """Fold events in EVENT_SCHEMA, and rows (seq, due_ms, topic, unique_key) that fill gaps, into one row a promise."""
    text = promises_sql("spark", events="{history}", waiting="{waiting}")
    return spark.sql(text, history=history, waiting=waiting)
