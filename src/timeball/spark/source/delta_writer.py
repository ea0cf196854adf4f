"""The data source `timeball_delta`: append a DataFrame to a Delta table exactly once, without a Java Delta library.

Tasks write Parquet files. The driver adds them in one Delta commit that contains the application's version number:

    df.write.format("timeball_delta").options(uri=…, app_id=…, app_version="17").mode("append").save()

delta_append.py explains `app_version` and `app_since` (`since` there). The DataFrame must have the table's columns, in
the table's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from timeball.model.errors import SetupError
from timeball.spark.delta_append import DeltaFile, append_once, table_schema, write_file
from timeball.spark.source.table_reader import FilesReader
from timeball.spark.table_store import open_table

OPTIONS = ("uri", "app_id", "app_version")


@dataclass
class Written(WriterCommitMessage):
    """A task's message to the driver: the file that it has written."""

    file: DeltaFile


class DeltaDataSource(DataSource):
    """The entry point of `format("timeball_delta")`. It appends rows, and reads files for table_reader.read_delta."""

    @classmethod
    def name(cls) -> str:
        """Name the format, as DataSource requires."""
        return "timeball_delta"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Build the reader of the files (URIs) in the option `files`, with the columns of `schema`."""
        return FilesReader(json.loads(self.options["files"]), to_arrow_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Check the options and build the writer of an append. Raises SetupError."""
        options = {key.lower(): value for key, value in self.options.items()}
        for name in OPTIONS:
            if not options.get(name):
                raise SetupError(f"option {name}: missing; timeball_delta needs {', '.join(OPTIONS)}")
        if overwrite:
            raise SetupError("mode overwrite: timeball_delta only appends")
        for name in ("app_version", "app_since"):
            if not options.get(name, "0").isdigit():
                raise SetupError(f"option {name}={options[name]!r}: a whole number")
        since = int(options["app_since"]) if "app_since" in options else None
        return DeltaWriter(
            schema.fieldNames(), options["uri"], options["app_id"], int(options["app_version"]), since
        )


class DeltaWriter(DataSourceArrowWriter):
    """The writer of `format("timeball_delta")`: `write` runs in tasks, `commit` on the driver."""

    def __init__(
        self, names: list[str], uri: str, app_id: str, app_version: int, app_since: int | None
    ) -> None:
        self.schema = table_schema(open_table(uri))
        if names != self.schema.names:
            raise SetupError(f"columns {names} are not those of the table at {uri}: {self.schema.names}")
        self.uri, self.app_id, self.app_version, self.app_since = uri, app_id, app_version, app_since

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task as one file."""
        return Written(write_file(self.uri, self.schema, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the files of all tasks, unless the table already has this version of the application."""
        files = [message.file for message in messages if isinstance(message, Written)]
        append_once(self.uri, self.app_id, self.app_since, self.app_version, files)
