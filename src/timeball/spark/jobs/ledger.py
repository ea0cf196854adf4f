"""The job `ledger` writes the events of scheduled messages (log_events.py) to an append-only Delta table.

The table is beside the pending table by default. The number of a scheduled message is its sequence number in the log. A
bulk attach is one row of the log for all its messages. So the ledger has the topics and due times of these messages
only after their release. Until then they are only in the pending table.

Each epoch extends the ledger from its mark, which is the application version of the Delta table, to the end of the log.
So no state outside the table decides where it continues. A repeated epoch adds nothing, and a lost table cannot leave
an unnoticed gap. A task reads a range of the log over Flight, and writes the events of its rows as one file. Spark's
executors run the tasks, or this process does. The job joins small files (joining.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction

from timeball.model.answers import Status
from timeball.model.errors import NotFound, StorageError
from timeball.spark.endpoint import Endpoint, group_statuses
from timeball.spark.jobs import joining, marked
from timeball.spark.jobs.marked import Engine, MarkedJob, Piece
from timeball.spark.log_events import EVENT_SCHEMA, LEDGER_APP_ID, read_events
from timeball.spark.source.options import split_range
from timeball.spark.table_store import (
    DeltaFile,
    Store,
    app_version,
    append_once,
    create_table,
    default_table_uri,
    open_table,
    table_schema,
    write_file,
)
from timeball.spark.views.view_sql import scheduled_sql

if TYPE_CHECKING:  # a job without Spark imports none of it
    from pyspark.sql import DataFrame, SparkSession

NAME = "ledger"
SINCE = "timeball.since"  # table property: the first row of the log that the ledger contains
EPOCH_ROWS = 1_000_000
OPTIONS = {"max_rows_per_batch": str(EPOCH_ROWS), "rows_per_partition": str(EPOCH_ROWS)}


# ---- the table --------------------------------------------------------------------------------------------


def open_ledger(uri: str, since: int) -> DeltaTable:
    """Open the ledger at `uri`. If there is none, create one that begins at row `since` of the log.

    Adds the columns that an older ledger does not have, because Delta drops unknown columns when it joins files. Raises
    StorageError if the table is not a ledger.
    """
    try:
        table = open_table(uri)
        if missing_fields := [f for f in EVENT_SCHEMA if f.name not in table_schema(table).names]:
            bounds(table)  # raises if the table is not a ledger, before it is changed
            table.alter.add_columns(Schema.from_arrow(pa.schema(missing_fields)).fields)
        return table
    except NotFound:
        return create_table(
            uri,
            EVENT_SCHEMA,
            name=NAME,
            description="Events of scheduled messages: accepted, moved, released, cancelled",
            configuration={SINCE: str(since)},
            raise_if_key_not_exists=False,
            commit_properties=CommitProperties(app_transactions=[Transaction(LEDGER_APP_ID, since)]),
        )


def bounds(table: DeltaTable) -> tuple[int, int]:
    """Read (since, watermark): the ledger has the events of rows since <= seq < watermark.

    Raises StorageError if the table is not a ledger.
    """
    since = table.metadata().configuration.get(SINCE)
    watermark = app_version(table, LEDGER_APP_ID)
    if since is None or watermark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not a ledger; name another with --ledger"
        )
    return int(since), watermark


def write_events(endpoint: str, uri: str, piece: Piece) -> DeltaFile:
    """Write the events of one piece of the log as one file of the ledger. This is the job's task."""
    with Endpoint(endpoint) as broker:
        return write_file(uri, EVENT_SCHEMA, read_events(broker, *piece))


def extend(engine: Engine, endpoint: str, uri: str, to_seq: int, piece_rows: int = EPOCH_ROWS) -> int:
    """Extend the ledger up to row `to_seq` of the log, in steps of EPOCH_ROWS, as marked.Extend requires."""
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
        # `low` makes the commit fail if another process has extended the ledger from the same row.
        append_once(uri, LEDGER_APP_ID, low, high, written)
    joining.maintain(NAME, uri, write_joined)
    return max(0, to_seq - begin)


def write_joined(store: Store, rows: pa.Table, now_ms: int) -> Iterator[AddAction]:
    """Write the rows of joined files (`joining.Write`)."""
    yield write_file(store.uri, rows.schema, rows.to_batches()).add(now_ms, data_change=False)


# ---- the job ----------------------------------------------------------------------------------------------


def _mark(broker: Endpoint, status: Status, uri: str) -> int:
    return bounds(open_ledger(uri, status.log.first_seq))[1]


JOB = MarkedJob(
    NAME,
    OPTIONS,
    extend,
    mark=_mark,
    default_uri=lambda status: default_table_uri(NAME, status.table.uri, status),
)


# ---- the view ---------------------------------------------------------------------------------------------


def read_ledger(spark: SparkSession, table: DeltaTable) -> DataFrame:
    """Read all events of one version of the ledger, in EVENT_SCHEMA."""
    from timeball.spark.source.table_reader import read_delta

    return read_delta(spark, table, EVENT_SCHEMA)


def scheduled_rows(spark: SparkSession, endpoint: str, uri: str | None = None) -> DataFrame:
    """Build a view with one row per scheduled message, with the causes of its lateness: view_sql.COLUMNS.

    The view contains the messages in the ledger, up to its mark. The pending table supplies the due times of pending
    messages of bulk jobs. If there are several groups, the view has the additional column `group`.
    """
    from timeball.spark.source.spark_api import union_groups

    ledgers = JOB.sinks_by_group(group_statuses(endpoint), uri)
    return union_groups(
        {group: _scheduled_rows(spark, sink.endpoint, sink.uri) for group, sink in ledgers.items()}
    )


def _scheduled_rows(spark: SparkSession, endpoint: str, uri: str) -> DataFrame:
    """Build the view of one group. `uri`: of its ledger."""
    history = read_ledger(spark, open_table(uri))
    table = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    return one_row_each(spark, history, table.option("columns", "seq,due_ms,topic,unique_key").load())


def one_row_each(spark: SparkSession, history: DataFrame, waiting: DataFrame) -> DataFrame:
    """Combine events into one row per scheduled message, with the columns view_sql.COLUMNS.

    `history`: events in EVENT_SCHEMA. `waiting`: rows (seq, due_ms, topic, unique_key) of pending messages, for values
    that the events do not have.
    """
    text = scheduled_sql("spark", events="{history}", waiting="{waiting}")
    return spark.sql(text, history=history, waiting=waiting)
