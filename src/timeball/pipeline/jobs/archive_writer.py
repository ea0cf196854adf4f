"""The tasks of the job `archive` write ranges of the log as sorted files, one Delta commit adds them.

A task gets a range, (from_seq, to_seq), fetches its rows over Flight and writes them: on Spark's executors, or in the
job's own process without Spark. Bodies never enter the JVM. Files and their order:

    day=2026-11-22/<32 hex>.parquet      rows of one day (UTC) and one range of the log, by (topic, seq)

The table is partitioned by day alone. Partitions by topic would be a file for each topic and micro-batch, and a broker
has thousands of topics (one for each group that retries). Here a file is a slice of time sorted by topic, and a reader
of one topic skips files and row groups by their least and greatest topic.

Exactly once: the archive carries the row of the log up to which it reaches, as Delta's application version. At commit,
with M that mark and [low, high) the micro-batch:

    high <= M     it is there already: nothing is added
    low == M      added, the mark moves to high
    else          OutOfRange: another job has archived meanwhile; the query plans again from M
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

from timeball.clock import SystemClock
from timeball.errors import OutOfRange
from timeball.limits import DAY_MS
from timeball.message import READ_SCHEMA, Kind, int64
from timeball.pipeline.delta_append import app_version
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.log_events import ARCHIVE_SCHEMA
from timeball.pipeline.table_store import Store, chunks, open_table

LOG = logging.getLogger("timeball.pipeline")

APP_ID = "timeball-archive"
PARTITION = "day"
PASSED = (Kind.MESSAGE, Kind.RELEASE)  # what stands in a queue where a consumer can read it
FILE_SCHEMA = READ_SCHEMA
ROW_GROUP_ROWS = 65_536
_BOUNDED = ("seq", "topic", "store_ms", "due_ms")  # columns with statistics: what readers search by
_EPOCH_DAY = date(1970, 1, 1)


@dataclass(frozen=True)
class ArchiveFile:
    """One data file: its place, its day, and Delta's statistics as JSON."""

    path: str
    day: str
    rows: int
    size_bytes: int
    stats: str

    def add(self, now_ms: int, *, data_change: bool = True) -> AddAction:
        """Return it as an entry of the Delta log."""
        return AddAction(self.path, self.size_bytes, {PARTITION: self.day}, now_ms, data_change, self.stats)


# ---- rows -> files ----------------------------------------------------------------------------------------


def by_topic(rows: pa.Table) -> pa.Table:
    """Sort rows by (topic, seq). Names are compared once each, not once a row."""
    topics = rows.column("topic").combine_chunks().dictionary_encode()
    rank = np.argsort(np.argsort(np.array(topics.dictionary.to_pylist(), dtype=object)))
    order = np.lexsort((int64(rows.column("seq").combine_chunks()), rank[topics.indices.to_numpy()]))
    return rows.take(pa.array(order))


def by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Split rows by the day (UTC) on which they passed, nearly always one; their order within a day stays."""
    days = int64(rows.column("store_ms").combine_chunks()) // DAY_MS
    for day in np.unique(days).tolist():
        mine = days == day
        part = rows if mine.all() else rows.filter(pa.array(mine))
        yield (_EPOCH_DAY + timedelta(days=day)).isoformat(), part.combine_chunks()


def encode_file(rows: pa.Table) -> bytes:
    """Encode sorted rows as a Parquet file."""
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
    """Cut rows of FILE_SCHEMA into files, write each, and yield its entry. Names are fresh on every call."""
    for day, part in by_day(by_topic(rows)):
        data = encode_file(part)
        path = f"{PARTITION}={day}/{uuid.uuid4().hex}.parquet"
        store.put(path, data)
        yield ArchiveFile(path, day, part.num_rows, len(data), statistics(part))


def statistics(rows: pa.Table) -> str:
    """Return Delta's statistics of a file: rows, and of some columns the least, the greatest and the nulls."""
    ranges = {name: pc.min_max(rows.column(name)) for name in _BOUNDED}
    known = {name: found for name, found in ranges.items() if found["min"].is_valid}
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {name: found["min"].as_py() for name, found in known.items()},
            "maxValues": {name: found["max"].as_py() for name, found in known.items()},
            "nullCount": {name: rows.column(name).null_count for name in _BOUNDED},
        }
    )


# ---- an epoch ---------------------------------------------------------------------------------------------


def write_piece(endpoint: str, uri: str, piece: tuple[int, int]) -> list[ArchiveFile]:
    """Write what passed in rows from <= seq < to of the log; on failure the files are removed again."""
    written: list[ArchiveFile] = []
    store = Store(uri)
    try:
        with Endpoint(endpoint) as broker:
            for rows in chunks(broker.read_log(*piece, PASSED)):
                written.extend(write_files(store, rows))
    except BaseException:  # an interrupt leaves orphans behind just as an error does
        store.remove(entry.path for entry in written)
        raise
    return written


def commit_epoch(uri: str, from_seq: int, to_seq: int, files: list[ArchiveFile]) -> None:
    """Commit the files of rows from_seq <= seq < to_seq once, also when there are none: the mark must move."""
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
        # A store may commit, and its answer be lost: then the failure is only told, and the files are the table's.
        if files and files[0].path in _paths(open_table(uri)):
            return
        Store(uri).remove(entry.path for entry in files)
        raise OutOfRange(f"another archive job was at work: {error}; planned again") from error


def _paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist())


def add(table: DeltaTable, files: list[ArchiveFile], mark: int) -> None:
    """Make files part of the archive, which then reaches up to row `mark`."""
    now_ms = SystemClock().wall_ms()
    commit(table, [entry.add(now_ms) for entry in files], Transaction(APP_ID, mark))


def commit(table: DeltaTable, actions: list[AddAction | RemoveAction], *marks: Transaction) -> None:
    """Commit once to the Delta log."""
    properties = CommitProperties(app_transactions=list(marks)) if marks else None
    table.create_write_transaction(
        actions, "append", ARCHIVE_SCHEMA, partition_by=[PARTITION], commit_properties=properties
    )
