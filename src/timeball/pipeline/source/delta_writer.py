"""The data source `timeball_delta`: append a DataFrame to a Delta table exactly once, without a Java Delta library.

Tasks write Parquet files; the driver adds them in one Delta commit that carries the application's own version number:

    df.write.format("timeball_delta").options(uri=…, app_id=…, app_version="17").mode("append").save()

A table whose version for this application is already 17 or more stays as it is. The caller chooses the version; for the
ledger it is the row of the log up to which the table has events, so the table itself knows where to go on. With
`app_since` the rows are refused (OutOfRange) unless the table stands there: another writer was at work meanwhile.
The table must exist, and the DataFrame must have its columns in its order.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeball.clock import SystemClock
from timeball.errors import OutOfRange, SetupError, StorageError
from timeball.pipeline.table_store import open_table

LOG = logging.getLogger("timeball.pipeline")
OPTIONS = ("uri", "app_id", "app_version")


@dataclass
class AddedFile(WriterCommitMessage):
    """One Parquet file of a task; no rows, no file."""

    path: str
    size_bytes: int
    rows: int


class DeltaDataSource(DataSource):
    """`format("timeball_delta")`, for writing only."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return "timeball_delta"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """See DataSource."""
        given = {key.lower(): value for key, value in self.options.items()}
        for name in OPTIONS:
            if not given.get(name):
                raise SetupError(f"option {name}: missing; timeball_delta needs {', '.join(OPTIONS)}")
        if overwrite:
            raise SetupError("mode overwrite: timeball_delta only appends")
        for name in ("app_version", "app_since"):
            if not given.get(name, "0").isdigit():
                raise SetupError(f"option {name}={given[name]!r}: a whole number")
        since = int(given["app_since"]) if "app_since" in given else None
        return DeltaWriter(
            schema.fieldNames(), given["uri"], given["app_id"], int(given["app_version"]), since
        )


class DeltaWriter(DataSourceArrowWriter):
    """The writer of `format("timeball_delta")`."""

    def __init__(
        self, names: list[str], uri: str, app_id: str, app_version: int, app_since: int | None
    ) -> None:
        table = open_table(uri)
        self.schema = pa.schema(table.schema().to_arrow())
        if names != self.schema.names:
            raise SetupError(f"columns {names} are not those of the table at {uri}: {self.schema.names}")
        self.uri, self.app_id, self.app_version, self.app_since = uri, app_id, app_version, app_since

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one file a task."""
        path = f"{uuid.uuid4().hex}.parquet"
        files, root = fs.FileSystem.from_uri(self.uri)
        rows, sink = 0, None
        try:
            for batch in iterator:
                if sink is None:
                    sink = pq.ParquetWriter(
                        f"{root}/{path}", self.schema, filesystem=files, compression="zstd"
                    )
                sink.write_batch(batch.cast(self.schema))
                rows += batch.num_rows
        except OSError as error:
            raise StorageError(f"cannot write {path} of {self.uri}: {error}") from error
        finally:
            if sink is not None:
                sink.close()
        size_bytes = files.get_file_info(f"{root}/{path}").size if sink is not None else 0
        return AddedFile(path, size_bytes or 0, rows)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit once; not at all when the table has this version of the application already."""
        added = [message for message in messages if isinstance(message, AddedFile) and message.rows]
        table = open_table(self.uri)
        reached = app_version(table, self.app_id) or 0
        if reached >= self.app_version > 0:
            LOG.info(
                "version written before table=%s app=%s version=%d", self.uri, self.app_id, self.app_version
            )
            return
        try:
            if self.app_since not in (None, reached):
                raise OutOfRange(f"the table is at {reached}, these rows begin at {self.app_since}")
            self._add(table, added)
        except (OutOfRange, CommitFailedError) as error:
            # Delta itself refuses two commits of one application side by side, and that is the same case.
            raise OutOfRange(
                f"another writer of {self.app_id} was at work: {error}; planned again"
            ) from error

    def _add(self, table: DeltaTable, added: list[AddedFile]) -> None:
        now_ms = SystemClock().wall_ms()
        table.create_write_transaction(
            [
                AddAction(each.path, each.size_bytes, {}, now_ms, True, json.dumps({"numRecords": each.rows}))
                for each in added
            ],
            "append",
            table.schema(),
            commit_properties=CommitProperties(app_transactions=[Transaction(self.app_id, self.app_version)]),
        )


def app_version(table: DeltaTable, app_id: str) -> int | None:
    """Return the version that `app_id` has reached in this table."""
    version = table.transaction_version(app_id)
    return None if version is None else int(version)
