"""Append rows to a Delta table exactly once: tasks write Parquet files, and one commit adds them with a mark.

The mark is Delta's application version, and the caller chooses it. If the table already has this mark or a later one
for the application, the append changes nothing. The ledger's mark is the row of the log up to which the table has
events, so the table itself stores where the next append begins.

With `since`, the append raises OutOfRange unless the table's mark is `since`. A different mark shows that another
writer has appended meanwhile. The table must exist.

Spark's executors and a process without Spark write the same files and marks.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from timeball.io.clock import SystemClock
from timeball.model import storage_uris
from timeball.model.errors import OutOfRange, StorageError
from timeball.spark.table_store import open_table

LOG = logging.getLogger("timeball.spark")


@dataclass(frozen=True)
class DeltaFile:
    """A Parquet file that a task has written. With 0 rows there is no file."""

    path: str
    size_bytes: int
    rows: int


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


def append_once(uri: str, app_id: str, since: int | None, version: int, written: Sequence[DeltaFile]) -> None:
    """Commit the files together with the mark `version`, unless the table already has this mark or a later one.

    `since`: the mark that the table must have, or None for any. Raises OutOfRange when it has another mark, or when
    another writer of `app_id` commits at the same time.
    """
    table = open_table(uri)
    current_mark = app_version(table, app_id) or 0
    if current_mark >= version > 0:
        LOG.info("version already written table=%s app=%s version=%d", uri, app_id, version)
        return
    now_ms = SystemClock().wall_ms()
    try:
        if since not in (None, current_mark):
            raise OutOfRange(f"the table is at {current_mark}, these rows begin at {since}")
        table.create_write_transaction(
            [
                AddAction(file.path, file.size_bytes, {}, now_ms, True, json.dumps({"numRecords": file.rows}))
                for file in written
                if file.rows
            ],
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, version)]),
        )
    except (OutOfRange, CommitFailedError) as error:
        # CommitFailedError: Delta refuses concurrent commits of one application, so here, too, another writer was
        # faster.
        raise OutOfRange(f"another writer of {app_id} was at work: {error}; planned again") from error


def app_version(table: DeltaTable, app_id: str) -> int | None:
    """Read the mark of `app_id` in this table. Returns None if this application has never written to it."""
    version = table.transaction_version(app_id)
    return None if version is None else int(version)
