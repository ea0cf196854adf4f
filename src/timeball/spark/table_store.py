"""Read and write files of the pending table, and append to other Delta tables, in any process, also a Spark executor.

An executor may run on another machine, so the table is named by a URI, and all access goes through Arrow's file systems
(model/storage_uris.py). A file belongs to the table only after the broker has attached it. So writers need not
coordinate, and a task that dies leaves only unused files, which the broker deletes later. The broker makes files
durable: it syncs them when it attaches them.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from timeball.io.clock import SystemClock
from timeball.model import storage_uris
from timeball.model.answers import Status
from timeball.model.errors import NotFound, OutOfRange, SetupError, StorageError, Unavailable
from timeball.model.limits import SECOND_MS
from timeball.model.message import TABLE_SCHEMA
from timeball.spark.endpoint import group_table_uri
from timeball.table.attachment import FileEntry
from timeball.table.file_keys import FileKeys, run_path
from timeball.table.layout import cut_files

LOG = logging.getLogger("timeball.spark")

Due = tuple[int | None, int | None]  # (low, high): low <= due_ms < high; None means no bound
ANY_DUE_TIME: Due = (None, None)
FILE_TIME_MS = 1_000  # the time in a commit may be this much later than the modification time of its file
# A task sorts and writes its rows in chunks, each at most so large.
CHUNK_ROWS = 1_000_000
# With the sorted copy and the encoder's pages, a worker then needs less than 1 GB.
CHUNK_BYTES = 256 * 1024 * 1024


class Store:
    """The folder of a table. Errors of the file system become StorageError with the file's name."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._files, self._root = storage_uris.arrow(uri)
        self._has_folders = not storage_uris.in_object_store(uri)
        self._folders: set[str] = set()

    def put(self, path: str, data: bytes) -> None:
        """Write one file. `path` is relative to the table's folder. Raises StorageError."""
        target = f"{self._root}/{path}"
        folder = target.rpartition("/")[0]
        try:
            if self._has_folders and folder not in self._folders:
                self._files.create_dir(folder, recursive=True)
                self._folders.add(folder)
            with self._files.open_output_stream(target) as stream:
                stream.write(data)
        except OSError as error:
            raise StorageError(f"cannot write {path} of {self.uri}: {error}") from error

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files that belong to no version of the table. A failure is only logged: unused files do no harm."""
        for path in paths:
            try:
                self._files.delete_file(f"{self._root}/{path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                LOG.warning("file not removed file=%s reason=%s", path, error)

    def put_rows(self, rows: pa.Table, now_ms: int) -> Iterator[FileEntry]:
        """Cut sorted rows of TABLE_SCHEMA into files, write them, and yield each file's entry after it is written.

        Then writes the key run of all files, with which the broker finds messages by key (table/key_index.py). `now_ms`
        decides the buckets (layout.cut_files). Raises StorageError.
        """
        keys = FileKeys()
        for entry, data in cut_files(rows, now_ms, keys):
            self.put(entry.path, data)
            yield entry
        if keys.has_files:
            self.put(run_path(), keys.run().data.to_pybytes())


# ---- a version of the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableFile:
    """One file of the pending table: its path below the table's URI, and its statistics in the Delta log.

    A bound is None when the statistics do not contain it.
    """

    path: str
    rows: int
    size_bytes: int
    min_due_ms: int | None
    max_due_ms: int | None
    min_seq: int | None = None
    max_seq: int | None = None

    def may_hold(self, due: Due) -> bool:
        """Check whether the file may contain rows due within these bounds. It may if its statistics have no bounds."""
        low, high = due
        above = low is not None and self.max_due_ms is not None and self.max_due_ms < low
        below = high is not None and self.min_due_ms is not None and self.min_due_ms >= high
        return not (above or below)


def open_version(uri: str, version: int | None = None) -> DeltaTable:
    """Open one version of the pending table, by default the newest.

    Raises NotFound for an unknown version, SetupError when there is no table at `uri`, and the other errors of
    `open_table`.
    """
    try:
        return open_table(uri, version)
    except NotFound as error:
        if str(error).startswith("no version"):
            raise
        raise SetupError(
            f"cannot read the pending table at {uri}: run this where the broker's data folder is"
        ) from error


def table_files(uri: str, version: int) -> list[TableFile]:
    """List the files of one version of the pending table. Raises the errors of `open_version`."""
    if version == 0:
        return []  # the broker creates the table empty, as version 0
    actions = pa.table(open_version(uri, version).get_add_actions(flatten=True))
    return [
        TableFile(
            path=action["path"],
            rows=action["num_records"] or 0,
            size_bytes=action["size_bytes"],
            min_due_ms=action.get("min.due_ms"),
            max_due_ms=action.get("max.due_ms"),
            min_seq=action.get("min.seq"),
            max_seq=action.get("max.seq"),
        )
        for action in actions.to_pylist()
    ]


def files_dataset(uri: str, paths: Sequence[str]) -> ds.Dataset:
    """Open files of the pending table as one Arrow dataset in TABLE_SCHEMA. Without paths it is empty.

    `paths` are relative to `uri`. Raises OutOfRange for a deleted file.
    """
    if not paths:
        return ds.dataset(TABLE_SCHEMA.empty_table())
    files, root = storage_uris.arrow(uri)
    full_paths = [f"{root}/{path}" for path in paths]
    try:
        return ds.dataset(full_paths, TABLE_SCHEMA, format="parquet", filesystem=files)
    except FileNotFoundError as error:
        raise deleted_file_error(uri, error) from error


def read_files(
    uri: str, paths: Sequence[str], columns: Sequence[str], row_filter: ds.Expression
) -> Iterator[pa.RecordBatch]:
    """Yield `columns` of the rows that match a filter, from files of the table. Skips row groups that cannot match.

    `paths` are relative to `uri`. Raises OutOfRange for a deleted file, StorageError for other failures.
    """
    if not paths:
        return
    try:
        # Small read-ahead limits the memory: bodies may be large, and a file may have a whole day's scheduled messages.
        yield from files_dataset(uri, paths).to_batches(
            columns=list(columns),
            filter=row_filter,
            batch_size=65_536,
            batch_readahead=4,
            fragment_readahead=2,
        )
    except FileNotFoundError as error:
        raise deleted_file_error(uri, error) from error
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read the pending table at {uri}: {error}") from error


def raw_bytes(uri: str, path: str) -> int:
    """Read the uncompressed size of a Parquet file of the table at `uri` from its footer. Raises StorageError."""
    files, full_path = storage_uris.arrow(f"{uri.rstrip('/')}/{path}")
    try:
        metadata = pq.read_metadata(full_path, filesystem=files)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read {path} of {uri}: {error}") from error
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def deleted_file_error(uri: str, error: Exception) -> OutOfRange:
    """Build the error for a data file that the broker has deleted since the version was listed."""
    return OutOfRange(
        f"a file of the pending table at {uri} has gone meanwhile, or this version was cleaned up: {error}"
    )


def open_table(uri: str, version: int | None = None) -> DeltaTable:
    """Open the Delta table at `uri`, by default its newest version. Raises StorageError.

    Raises NotFound if the table or the version does not exist. Raises Unavailable for a negative version: the broker
    reports it while the table lacks rows of its log because the object store does not answer.
    """
    if version is not None and version < 0:
        raise Unavailable(
            f"the pending table at {uri} is behind the broker's log until its object store answers"
        )
    delta_uri, options = storage_uris.delta(uri)
    try:
        return DeltaTable(delta_uri, version=version, storage_options=options)
    except TableNotFoundError as error:
        raise NotFound(f"no Delta table at {uri}") from error
    except DeltaError as error:
        if version is None:  # the store does not answer, so it is unknown whether the table exists
            raise StorageError(f"cannot read the Delta table at {uri}: {error}") from error
        raise NotFound(f"no version {version} of the Delta table at {uri}: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read the Delta table at {uri}: {error}") from error


def create_table(uri: str, schema: pa.Schema, **create_options: Any) -> DeltaTable:
    """Create a Delta table at `uri` with these options of DeltaTable.create. Raises StorageError."""
    delta_uri, options = storage_uris.delta(uri)
    try:
        return DeltaTable.create(delta_uri, schema, storage_options=options, **create_options)
    except OSError as error:
        raise StorageError(f"cannot create a Delta table at {uri}: {error}") from error


def created_at_ms(table: DeltaTable) -> int:
    """Read the time (ms) at which the loaded version of `table` was made."""
    # history(1) should have one commit, that of the loaded version. If this version is not the newest, delta-rs also
    # returns all newer commits, the newest first (tests/table/test_delta_rs.py). So the wanted commit is the last.
    return int(table.history(1)[-1]["timestamp"])


def load_version_at(table: DeltaTable, time_ms: int) -> DeltaTable:
    """Load the version that was current at `time_ms` (since 1970) into `table`. Returns `table`.

    Raises NotFound when the table is newer than `time_ms`, or when its log no longer has that version.
    """
    table.load_as_version(datetime.fromtimestamp(time_ms / SECOND_MS, UTC))
    created_ms = created_at_ms(table)
    # For a time before the oldest version, delta-rs loads the oldest version. It compares `time_ms` with the
    # modification time of a commit's file, which may be some milliseconds before the time stored in the file.
    if created_ms > time_ms + FILE_TIME_MS:
        oldest = datetime.fromtimestamp(created_ms / SECOND_MS, UTC).isoformat(timespec="milliseconds")
        raise NotFound(
            f"the Delta table at {table.table_uri} has no version so old: the first is of {oldest}"
        )
    return table


def as_dataset(table: DeltaTable, schema: pa.Schema) -> ds.Dataset:
    """Open one version as an Arrow dataset with the columns of `schema`, partition columns included.

    Arrow's file system reads the files: threads of delta-rs's own file system may abort a process that ends.
    """
    return dataset_of(table.file_uris(), schema, table.metadata().partition_columns)


def dataset_of(uris: Sequence[str], schema: pa.Schema, partition_columns: Sequence[str]) -> ds.Dataset:
    """Open files of a Delta table, by URI, as an Arrow dataset in `schema`. Without files it is empty.

    The folders' names (`day=2026-11-22`) supply the values of `partition_columns`.
    """
    if not uris:
        return ds.dataset(schema.empty_table())
    files, paths = storage_uris.arrow_all(uris)
    columns = pa.schema([schema.field(name) for name in partition_columns])
    folders = ds.partitioning(columns, flavor="hive") if partition_columns else None
    return ds.dataset(paths, schema, format="parquet", filesystem=files, partitioning=folders)


def sibling(uri: str, name: str) -> str:
    """Build the URI of the folder `name` beside the table's folder, for ledger, archive or the checkpoints of jobs."""
    return uri.rstrip("/").rpartition("/")[0] + "/" + name


def default_table_uri(name: str, table_uri: str, status: Status) -> str:
    """Find the default URI of the ledger or the archive of the group that answered `status`.

    `name`: "ledger" or "archive". The environment variables TIMEBALL_LEDGER and TIMEBALL_ARCHIVE set the URI for all
    commands and for Spark's readers. Without them it is a folder beside the table. Raises SetupError if a variable has
    no `{group}` but there are several groups.
    """
    variable = f"TIMEBALL_{name.upper()}"
    configured_uri = group_table_uri(
        variable, os.environ.get(variable) or None, status.group, len(status.groups or ())
    )
    return configured_uri or sibling(table_uri, name)


# ---- bounded memory of a task ---------------------------------------------------------------------------------


def chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join batches to tables of at most CHUNK_ROWS rows and about CHUNK_BYTES bytes.

    All batches of a task may be too large for memory. A chunk is as large as memory allows, because its sorted rows
    become files, and few large files are cheaper to read than many small ones.
    """
    chunk: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for source_batch in batches:
        for begin in range(0, source_batch.num_rows, CHUNK_ROWS):
            batch = source_batch.slice(begin, CHUNK_ROWS)
            if chunk and (rows + batch.num_rows > CHUNK_ROWS or size_bytes + batch.nbytes > CHUNK_BYTES):
                yield pa.Table.from_batches(chunk)
                chunk, rows, size_bytes = [], 0, 0
            chunk.append(batch)
            rows += batch.num_rows
            size_bytes += batch.nbytes
    if chunk:
        yield pa.Table.from_batches(chunk)


# ---- appends, exactly once ------------------------------------------------------------------------------------
# Tasks write Parquet files, and one commit adds them with a *mark*: a number that the caller chooses. Delta stores the
# newest mark of each application, as its application version. If the table already has this mark or a later one for
# the application, the append changes nothing. The ledger's mark is the row of the log up to which the table has events,
# so the table itself stores where the next append begins.
#
# With `since`, the append raises OutOfRange unless the table's mark is `since`. A different mark shows that another
# writer has appended meanwhile. Spark's executors and a process without Spark write the same files and marks.


@dataclass(frozen=True)
class DeltaFile:
    """A Parquet file that a task has written. With 0 rows there is no file."""

    path: str
    size_bytes: int
    rows: int

    def add(self, now_ms: int, *, data_change: bool = True) -> AddAction:
        """Make the entry of the Delta log that adds this file.

        `data_change` is False if the file only replaces files with the same rows.
        """
        return AddAction(
            self.path, self.size_bytes, {}, now_ms, data_change, json.dumps({"numRecords": self.rows})
        )


def table_schema(table: DeltaTable) -> pa.Schema:
    """Convert the table's schema to Arrow."""
    return pa.schema(table.schema().to_arrow())


def write_file(uri: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> DeltaFile:
    """Write all batches to one new Parquet file below `uri`. It belongs to no version of the table before the commit.

    Without rows no file is written. Raises StorageError.
    """
    path = f"{uuid.uuid4().hex}.parquet"
    files, root = storage_uris.arrow(uri)
    rows, sink = 0, None
    try:
        for batch in batches:
            if sink is None:
                sink = pq.ParquetWriter(f"{root}/{path}", schema, filesystem=files, compression="zstd")
            sink.write_batch(batch.cast(schema))
            rows += batch.num_rows
    except OSError as error:
        raise StorageError(f"cannot write {path} of {uri}: {error}") from error
    finally:
        if sink is not None:
            sink.close()
    size_bytes = files.get_file_info(f"{root}/{path}").size if sink is not None else 0
    return DeltaFile(path, size_bytes or 0, rows)


def append_once(uri: str, app_id: str, since: int | None, mark: int, written: Sequence[DeltaFile]) -> None:
    """Commit the files together with the mark of `app_id`, unless the table already has this mark or a later one.

    `since`: the mark that the table must have, or None for any. Raises OutOfRange when it has another mark, or when
    another writer of `app_id` commits at the same time. Raises NotFound if there is no table, and StorageError if it
    cannot be opened.
    """
    table = open_table(uri)
    current_mark = app_version(table, app_id) or 0
    if current_mark >= mark > 0:
        LOG.info("version already written table=%s app=%s version=%d", uri, app_id, mark)
        return
    now_ms = SystemClock().wall_ms()
    try:
        if since not in (None, current_mark):
            raise OutOfRange(f"the table is at {current_mark}, these rows begin at {since}")
        table.create_write_transaction(
            [file.add(now_ms) for file in written if file.rows],
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, mark)]),
        )
    except (OutOfRange, CommitFailedError) as error:
        # CommitFailedError: another writer was faster, because Delta refuses concurrent commits of one application.
        raise OutOfRange(f"another writer of {app_id} was at work: {error}; planned again") from error


def app_version(table: DeltaTable, app_id: str) -> int | None:
    """Read the mark of `app_id` in this table. Returns None if this application has never written to it."""
    version = table.transaction_version(app_id)
    return None if version is None else int(version)
