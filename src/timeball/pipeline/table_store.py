"""Files of the pending table as an executor sees them: put, remove, list, read.

An executor may run on another machine, so the table is a URI, and the file system is Arrow's (timeball/places.py). A
file that is never attached is no part of the table: writing needs no protocol, and a dead task leaves only bytes, which
the broker sweeps. The broker makes files durable: it syncs what it attaches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from timeball import places
from timeball.errors import NotFound, OutOfRange, SetupError, StorageError, Unavailable
from timeball.limits import SECOND_MS
from timeball.message import TABLE_SCHEMA
from timeball.pipeline.groups import place_of
from timeball.table.attachment import FileEntry
from timeball.table.file_keys import FileKeys, run_path
from timeball.table.layout import cut_files
from timeball.wire import Status

LOG = logging.getLogger("timeball.pipeline")

Due = tuple[int | None, int | None]  # low <= due_ms < high; None is open
ALWAYS: Due = (None, None)
FILE_TIME_MS = 1_000
CHUNK_ROWS = 1_000_000
CHUNK_BYTES = 256 * 1024 * 1024  # with its sorted copy and the encoder's pages: under 1 GB in a worker


class Store:
    """The folder of a table. OS errors become StorageError with the name of the file."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._files, self._root = places.arrow(uri)
        self._has_folders = not places.in_object_store(uri)
        self._folders: set[str] = set()

    def put(self, path: str, data: bytes) -> None:
        """Write one file; `path` is relative to the table."""
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
        """Delete files that were never attached. What cannot be deleted is only waste: logged, not raised."""
        for path in paths:
            try:
                self._files.delete_file(f"{self._root}/{path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                LOG.warning("file not removed file=%s reason=%s", path, error)

    def put_rows(self, rows: pa.Table, now_ms: int) -> Iterator[FileEntry]:
        """Cut sorted rows of TABLE_SCHEMA into files and write each; yields its entry once it is written.

        Behind the last one come their keys, for the broker's look-ups (table/key_index.py).
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
    """One file of the pending table: its path below the table's URI, and what its statistics say."""

    path: str
    rows: int
    size_bytes: int
    min_due_ms: int | None
    max_due_ms: int | None
    min_seq: int | None = None
    max_seq: int | None = None

    def may_hold(self, due: Due) -> bool:
        """Return False when the statistics rule out a row due within these bounds."""
        low, high = due
        above = low is not None and self.max_due_ms is not None and self.max_due_ms < low
        below = high is not None and self.min_due_ms is not None and self.min_due_ms >= high
        return not (above or below)


def open_version(uri: str, version: int | None = None) -> DeltaTable:
    """Open one version, or the newest, of the pending table; NotFound, or SetupError when the table is out of reach."""
    try:
        return open_table(uri, version)
    except NotFound as error:
        if str(error).startswith("no version"):
            raise
        raise SetupError(
            f"cannot read the pending table at {uri}: run this where the broker's data folder is"
        ) from error


def table_files(uri: str, version: int) -> list[TableFile]:
    """Return the files of one version of the pending table; raises as open_version does."""
    if version == 0:
        return []  # the broker makes the table before anything lies in it
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
    """Return files of the pending table as one Arrow dataset, empty for no files; OutOfRange when one has gone."""
    if not paths:
        return ds.dataset(TABLE_SCHEMA.empty_table())
    files, root = places.arrow(uri)
    found = [f"{root}/{path}" for path in paths]
    try:
        return ds.dataset(found, TABLE_SCHEMA, format="parquet", filesystem=files)
    except FileNotFoundError as error:
        raise files_gone(uri, error) from error


def read_files(
    uri: str, paths: Sequence[str], columns: Sequence[str], rows: ds.Expression
) -> Iterator[pa.RecordBatch]:
    """Read the rows of files of the table that match a filter; row groups that cannot match are not read."""
    if not paths:
        return
    try:
        # Little is read ahead: bodies may be large, and a file is a day's promises.
        yield from files_dataset(uri, paths).to_batches(
            columns=list(columns), filter=rows, batch_size=65_536, batch_readahead=4, fragment_readahead=2
        )
    except FileNotFoundError as error:
        raise files_gone(uri, error) from error
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read the pending table at {uri}: {error}") from error


def files_gone(uri: str, error: Exception) -> OutOfRange:
    """Return the error for a file of a version that the broker has removed since."""
    return OutOfRange(
        f"a file of the pending table at {uri} has gone meanwhile, or this version was cleaned up: {error}"
    )


def open_table(uri: str, version: int | None = None) -> DeltaTable:
    """Open the Delta table at `uri`; NotFound when there is none, or not that version."""
    if version is not None and version < 0:
        raise Unavailable(
            f"the pending table at {uri} is behind the broker's log until its object store answers"
        )
    place, options = places.delta(uri)
    try:
        return DeltaTable(place, version=version, storage_options=options)
    except TableNotFoundError as error:
        raise NotFound(f"no Delta table at {uri}") from error
    except DeltaError as error:
        if version is None:  # a store that does not answer has said nothing about the table
            raise StorageError(f"cannot read the Delta table at {uri}: {error}") from error
        raise NotFound(f"no version {version} of the Delta table at {uri}: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot read the Delta table at {uri}: {error}") from error


def create_table(uri: str, schema: pa.Schema, **how: Any) -> DeltaTable:
    """Create a Delta table at `uri`; `how` is what DeltaTable.create takes."""
    place, options = places.delta(uri)
    try:
        return DeltaTable.create(place, schema, storage_options=options, **how)
    except OSError as error:
        raise StorageError(f"cannot create a Delta table at {uri}: {error}") from error


def as_of(table: DeltaTable, instant_ms: int) -> DeltaTable:
    """Go to the version that was current at an instant; NotFound when the table is younger, or its log shorter."""
    table.load_as_version(datetime.fromtimestamp(instant_ms / SECOND_MS, UTC))
    made_ms = int(table.history(1)[0]["timestamp"])
    # Asked for something older, delta-rs answers with the oldest version it has. It goes by the time of the file, which
    # may lie some milliseconds before the time in it.
    if made_ms > instant_ms + FILE_TIME_MS:
        oldest = datetime.fromtimestamp(made_ms / SECOND_MS, UTC).isoformat(timespec="milliseconds")
        raise NotFound(
            f"the Delta table at {table.table_uri} has no version so old: the first is of {oldest}"
        )
    return table


def as_dataset(table: DeltaTable, schema: pa.Schema) -> ds.Dataset:
    """Return the rows of one version in these columns, and in those it is partitioned by, read by Arrow alone.

    delta-rs brings a file system of its own for this, whose threads may abort a process that ends.
    """
    return dataset_of(table.file_uris(), schema, table.metadata().partition_columns)


def dataset_of(uris: Sequence[str], schema: pa.Schema, partition_columns: Sequence[str]) -> ds.Dataset:
    """Return the rows of some files of a Delta table, as `as_dataset` does."""
    if not uris:
        return ds.dataset(schema.empty_table())
    files, paths = places.arrow_all(uris)
    columns = pa.schema([schema.field(name) for name in partition_columns])
    folders = ds.partitioning(columns, flavor="hive") if partition_columns else None
    return ds.dataset(paths, schema, format="parquet", filesystem=files, partitioning=folders)


def sibling(uri: str, name: str) -> str:
    """Return the URI of a folder next to the table: the ledger and the jobs' checkpoints live there."""
    return uri.rstrip("/").rpartition("/")[0] + "/" + name


def beside(name: str, table_uri: str, status: Status) -> str:
    """Return the URI of the ledger or the archive of the group that answered `status`, where no option names it.

    TIMEBALL_LEDGER and TIMEBALL_ARCHIVE say it once for every command and for Spark's readers.
    """
    variable = f"TIMEBALL_{name.upper()}"
    named = place_of(variable, os.environ.get(variable) or None, status.group, len(status.groups or ()))
    return named or sibling(table_uri, name)


# ---- as much as a task holds ----------------------------------------------------------------------------------


def chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Gather batches into tables of at most CHUNK_ROWS rows and about CHUNK_BYTES bytes.

    A task has a stream of batches without a bound on their number, and a file should have as many sorted rows as memory
    allows.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for whole in batches:
        for begin in range(0, whole.num_rows, CHUNK_ROWS):
            batch = whole.slice(begin, CHUNK_ROWS)
            if held and (rows + batch.num_rows > CHUNK_ROWS or size + batch.nbytes > CHUNK_BYTES):
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
            held.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
    if held:
        yield pa.Table.from_batches(held)
