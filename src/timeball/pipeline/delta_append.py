"""Append rows to a Delta table exactly once: tasks write Parquet files, one commit adds them with a mark.

The mark is Delta's application version. A table whose mark for this application is already there stays as it is. The
caller chooses it; for the ledger it is the row of the log up to which the table has events, so the table itself knows
where to go on. With `since` the rows are refused (OutOfRange) unless the table stands there: another writer was at work
meanwhile. The table must exist.

Who runs the tasks is of no matter: Spark's executors, or one process without Spark, write the same files and marks.
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

from timeball import places
from timeball.clock import SystemClock
from timeball.errors import OutOfRange, StorageError
from timeball.pipeline.table_store import open_table

LOG = logging.getLogger("timeball.pipeline")


@dataclass(frozen=True)
class DeltaFile:
    """One Parquet file of a task; no rows, no file."""

    path: str
    size_bytes: int
    rows: int


def table_schema(table: DeltaTable) -> pa.Schema:
    """Return the table's columns as Arrow has them."""
    return pa.schema(table.schema().to_arrow())


def write_file(uri: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> DeltaFile:
    """Write all batches as one file of the table at `uri`, which no version of it names yet."""
    path = f"{uuid.uuid4().hex}.parquet"
    files, root = places.arrow(uri)
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
    """Commit files, and the mark `version`, once; not at all when the table has that mark already."""
    table = open_table(uri)
    reached = app_version(table, app_id) or 0
    if reached >= version > 0:
        LOG.info("version written before table=%s app=%s version=%d", uri, app_id, version)
        return
    now_ms = SystemClock().wall_ms()
    try:
        if since not in (None, reached):
            raise OutOfRange(f"the table is at {reached}, these rows begin at {since}")
        table.create_write_transaction(
            [
                AddAction(each.path, each.size_bytes, {}, now_ms, True, json.dumps({"numRecords": each.rows}))
                for each in written
                if each.rows
            ],
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, version)]),
        )
    except (OutOfRange, CommitFailedError) as error:
        # Delta itself refuses two commits of one application side by side, and that is the same case.
        raise OutOfRange(f"another writer of {app_id} was at work: {error}; planned again") from error


def app_version(table: DeltaTable, app_id: str) -> int | None:
    """Return the version that `app_id` has reached in this table."""
    version = table.transaction_version(app_id)
    return None if version is None else int(version)
