"""Files of the pending table as an executor sees them: put, remove, list.

An executor may sit on another machine, so the table is a URI and the file system is Arrow's (local folders,
S3, GCS, HDFS). A file that nobody attaches is no part of the table, whatever its name: writing needs no
protocol, and a dead task leaves only bytes, which the broker sweeps. Durability is the broker's too: it syncs what
it attaches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from timeball.errors import NotFound, StorageError
from timeball.table.attachment import FileEntry
from timeball.table.layout import cut_files

LOG = logging.getLogger("timeball.pipeline")


class Store:
    """The folder of a table. OS errors become StorageError with the name of the file."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        try:
            self._files, self._root = fs.FileSystem.from_uri(uri)
        except (pa.ArrowException, OSError) as error:
            raise StorageError(f"table_uri {uri}: not a place that Arrow can write to: {error}") from error
        self._folders: set[str] = set()

    def put(self, path: str, data: bytes) -> None:
        """Write one file; `path` is relative to the table."""
        target = f"{self._root}/{path}"
        folder = target.rpartition("/")[0]
        try:
            if folder not in self._folders:
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
        """Cut sorted rows of TABLE_SCHEMA into files and write each; yields its entry once it is written."""
        for entry, data in cut_files(rows, now_ms):
            self.put(entry.path, data)
            yield entry


def open_table(uri: str, version: int | None = None) -> DeltaTable:
    """The Delta table at `uri`; NotFound when there is none, or not that version."""
    try:
        return DeltaTable(uri, version=version)
    except TableNotFoundError as error:
        raise NotFound(f"no Delta table at {uri}") from error
    except DeltaError as error:
        raise NotFound(f"no version {version} of the Delta table at {uri}: {error}") from error


def as_dataset(table: DeltaTable, schema: pa.Schema) -> ds.Dataset:
    """The rows of one version in these columns, with all that it is partitioned by, read by Arrow alone.

    delta-rs brings a file system of its own for this, whose threads may abort a process that ends.
    """
    found = [fs.FileSystem.from_uri(uri) for uri in table.file_uris()]
    if not found:
        return ds.dataset(schema.empty_table())
    names = table.metadata().partition_columns
    folders = ds.partitioning(pa.schema([schema.field(name) for name in names]), flavor="hive")
    paths = [path for _, path in found]
    return ds.dataset(
        paths, schema, format="parquet", filesystem=found[0][0], partitioning=folders if names else None
    )


def sibling(uri: str, name: str) -> str:
    """The URI of a folder next to the table: the ledger and the jobs' checkpoints live there."""
    return uri.rstrip("/").rpartition("/")[0] + "/" + name
