"""Write files of the archive: tasks write ranges of the log as sorted files, and one Delta commit adds them.

A task gets a range (from_seq, to_seq), fetches its rows over Flight and writes them. It runs on Spark's executors, or
without Spark in the job's own process. Message bodies never enter the JVM. The files are:

    day=2026-11-22/<32 hex>.parquet      rows of one day (UTC) and one range of the log, by (topic, seq)

The table is partitioned by day only. With partitions by topic, each epoch would write a file per topic, and a broker
may have thousands of topics (one for each consumer group with retries). So a file contains a range of time, sorted by
topic. A reader of one topic skips files and row groups by their smallest and largest topic.

Each row is added exactly once. The archive stores its mark, the row of the log up to which it is complete, as Delta's
application version. An epoch that covers the rows [low, high) is committed as follows, with M the mark:

    high <= M     the rows are in the archive already: nothing is added
    low == M      the files are added, and the mark moves to high
    else          OutOfRange: another job has extended the archive; the loop plans again from M
"""

from __future__ import annotations

import io
import json
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from timeball.io.clock import SystemClock
from timeball.model.errors import OutOfRange
from timeball.model.limits import DAY_MS
from timeball.model.message import READ_SCHEMA, Kind, int64
from timeball.spark.delta_append import app_version
from timeball.spark.endpoint import Endpoint
from timeball.spark.log_events import ARCHIVE_SCHEMA
from timeball.spark.table_store import Store, chunks, open_table

LOG = logging.getLogger("timeball.spark")

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


# ---- rows -> files ----------------------------------------------------------------------------------------


def by_topic(rows: pa.Table) -> pa.Table:
    """Sort rows by (topic, seq). Sorts the distinct topic names instead of comparing names row by row."""
    topics = rows.column("topic").combine_chunks().dictionary_encode()
    rank = np.argsort(np.argsort(np.array(topics.dictionary.to_pylist(), dtype=object)))
    order = np.lexsort((int64(rows.column("seq").combine_chunks()), rank[topics.indices.to_numpy()]))
    return rows.take(pa.array(order))


def by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Split rows by the day (UTC) on which they passed, nearly always a single one. Keeps the order within a day."""
    days = int64(rows.column("store_ms").combine_chunks()) // DAY_MS
    for day in np.unique(days).tolist():
        is_of_day = days == day
        rows_of_day = rows if is_of_day.all() else rows.filter(pa.array(is_of_day))
        yield (_EPOCH_DAY + timedelta(days=day)).isoformat(), rows_of_day.combine_chunks()


def encode_file(rows: pa.Table) -> bytes:
    """Encode sorted rows as a Parquet file, in the columns of FILE_SCHEMA."""
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


def write_files(store: Store, rows: pa.Table) -> Iterator[ArchiveFile]:
    """Write rows of FILE_SCHEMA to one file per day, and yield the entries. Each call makes new file names."""
    for day, rows_of_day in by_day(by_topic(rows)):
        data = encode_file(rows_of_day)
        path = f"{PARTITION}={day}/{uuid.uuid4().hex}.parquet"
        store.put(path, data)
        yield ArchiveFile(path, day, rows_of_day.num_rows, len(data), statistics(rows_of_day))


def statistics(rows: pa.Table) -> str:
    """Encode Delta's statistics of a file: number of rows, and minimum, maximum and nulls of the columns _BOUNDED."""
    ranges = {name: pc.min_max(rows.column(name)) for name in _BOUNDED}
    known = {name: bounds for name, bounds in ranges.items() if bounds["min"].is_valid}
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {name: bounds["min"].as_py() for name, bounds in known.items()},
            "maxValues": {name: bounds["max"].as_py() for name, bounds in known.items()},
            "nullCount": {name: rows.column(name).null_count for name in _BOUNDED},
        }
    )


# ---- an epoch ---------------------------------------------------------------------------------------------


def write_piece(endpoint: str, uri: str, piece: tuple[int, int]) -> list[ArchiveFile]:
    """Write the messages that passed in one range of the log. On failure the files are removed again."""
    written: list[ArchiveFile] = []
    store = Store(uri)
    try:
        with Endpoint(endpoint) as broker:
            for rows in chunks(broker.read_log(*piece, PASSED)):
                written.extend(write_files(store, rows))
    except BaseException:  # also for an interrupt, which would leave unused files
        store.remove(entry.path for entry in written)
        raise
    return written


def commit_epoch(uri: str, from_seq: int, to_seq: int, files: list[ArchiveFile]) -> None:
    """Add the files of the rows from_seq <= seq < to_seq once, and move the mark. An epoch without files moves it too.

    Raises OutOfRange if another job has extended the archive. The files are then removed.
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
        if files and files[0].path in _paths(open_table(uri)):
            return
        Store(uri).remove(entry.path for entry in files)
        raise OutOfRange(f"another archive job was at work: {error}; planned again") from error


def _paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist())


def add(table: DeltaTable, files: list[ArchiveFile], mark: int) -> None:
    """Add files to the archive, and set its mark, in one commit."""
    now_ms = SystemClock().wall_ms()
    commit(table, [entry.add(now_ms) for entry in files], Transaction(APP_ID, mark))


def commit(table: DeltaTable, actions: list[AddAction | RemoveAction], *marks: Transaction) -> None:
    """Make one commit to the Delta log, with `marks` as application versions."""
    properties = CommitProperties(app_transactions=list(marks)) if marks else None
    table.create_write_transaction(
        actions, "append", ARCHIVE_SCHEMA, partition_by=[PARTITION], commit_properties=properties
    )
