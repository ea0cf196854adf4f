"""The sink of the job `archive`: tasks write ranges of the log as sorted files, one Delta commit adds them.

The sink receives pointers, (from_seq, to_seq). The task fetches the rows of its range over Flight and writes them, so
bodies never enter the JVM. Files and their order:

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
from dataclasses import dataclass, field
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeball.clock import SystemClock
from timeball.errors import OutOfRange, SetupError
from timeball.limits import DAY_MS
from timeball.message import READ_SCHEMA, Kind, int64
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.log_events import ARCHIVE_SCHEMA
from timeball.pipeline.source.delta_writer import app_version
from timeball.pipeline.source.options import RANGE_COLUMNS
from timeball.pipeline.table_store import Store, chunks, open_table

LOG = logging.getLogger("timeball.pipeline")

APP_ID = "timeball-archive"
PARTITION = "day"
PASSED = (Kind.MESSAGE, Kind.RELEASE)  # what stands in a queue where a consumer can read it
FILE_SCHEMA = READ_SCHEMA
ROW_GROUP_ROWS = 65_536
OPTIONS = ("endpoint", "uri", "from_seq", "to_seq")
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


@dataclass
class Archived(WriterCommitMessage):
    """The files that one task wrote."""

    files: list[ArchiveFile] = field(default_factory=list)


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


# ---- the sink ---------------------------------------------------------------------------------------------


class ArchiveDataSource(DataSource):
    """`format("timeball_archive")`, for writing only; takes the rows of `read=ranges`."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return "timeball_archive"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """See DataSource."""
        given = {key.lower(): value for key, value in self.options.items()}
        for name in OPTIONS:
            if not given.get(name):
                raise SetupError(f"option {name}: missing; timeball_archive needs {', '.join(OPTIONS)}")
        if overwrite:
            raise SetupError("mode overwrite: timeball_archive only appends")
        if tuple(schema.fieldNames()) != RANGE_COLUMNS:
            raise SetupError(f"timeball_archive takes ({', '.join(RANGE_COLUMNS)}), the rows of read=ranges")
        return ArchiveWriter(given["endpoint"], given["uri"], int(given["from_seq"]), int(given["to_seq"]))


class ArchiveWriter(DataSourceArrowWriter):
    """The sink of an epoch. Writes what passed in rows from_seq <= seq < to_seq of the log."""

    def __init__(self, endpoint: str, uri: str, from_seq: int, to_seq: int) -> None:
        self.endpoint, self.uri, self.from_seq, self.to_seq = endpoint, uri, from_seq, to_seq

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """See DataSourceArrowWriter; on failure the task's own files are removed again."""
        written = Archived()
        store = Store(self.uri)
        try:
            with Endpoint(self.endpoint) as endpoint:
                for rows in chunks(passed(endpoint, iterator)):
                    written.files.extend(write_files(store, rows))
        except BaseException:  # an interrupt leaves orphans behind just as an error does
            store.remove(entry.path for entry in written.files)
            raise
        return written

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit once, also for an epoch without rows: the mark must move."""
        files = [entry for message in messages if isinstance(message, Archived) for entry in message.files]
        table = open_table(self.uri)
        mark = app_version(table, APP_ID) or 0
        if self.to_seq <= mark:
            LOG.info("epoch archived before job=archive to_seq=%d mark=%d", self.to_seq, mark)
            return
        try:
            if mark != self.from_seq:
                raise OutOfRange(f"the archive ends at row {mark}, this epoch begins at {self.from_seq}")
            add(table, files, self.to_seq)
        except (OutOfRange, CommitFailedError) as error:
            Store(self.uri).remove(entry.path for entry in files)
            raise OutOfRange(f"another archive job was at work: {error}; planned again") from error

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what the others wrote after a failed task. When all messages are present a commit was tried."""
        if any(message is None for message in messages):
            written = [message for message in messages if isinstance(message, Archived)]
            Store(self.uri).remove(entry.path for message in written for entry in message.files)


def passed(endpoint: Endpoint, ranges: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read rows of the log that consumers could read, of all ranges (from_seq, to_seq)."""
    for batch in ranges:
        for row in batch.to_pylist():  # a handful: one row is half a million of the log
            yield from endpoint.read_log(row["from_seq"], row["to_seq"], PASSED)


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
