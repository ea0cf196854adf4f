"""The Spark data sources `timeball`, for the messages of a broker, and `timeball_delta`, for appends to a Delta table.

`timeball` reads log, topics, pending table and ledger, and writes a DataFrame as messages:

    spark.read.format("timeball").option("endpoint", "grpc://host:7400").load()
    spark.readStream.format("timeball").option("read", "queue").option("topic", "orders").load()
    df.write.format("timeball").mode("append").save()

Executors fetch rows as Arrow batches, over Flight or from the table's files, so rows enter the JVM column by column.
Spark has no column pruning for Python sources. To fetch only some columns, give a schema of these columns, or the
option `columns`. Filters of a query do not reduce the fetched rows (spark_api.py says why), but options do.

    read     batch   stream   rows
    log      yes     yes      READ_SCHEMA
    queue    yes     yes      READ_SCHEMA, of one topic
    pending  yes     -        TABLE_SCHEMA, of one version of the table
    ledger   yes     -        EVENT_SCHEMA, of one version of it
    events   yes     -        EVENT_SCHEMA, of rows of the log
    history  yes     -        HISTORY_SCHEMA: versions of the table
    ranges   yes     yes      (from_seq, to_seq): pieces of the log

In a cluster, all groups are read, each from its own leader. The column `group`, if the option `columns` names it,
contains each row's group. Schemas do not depend on the number of groups, so a stream continues when a group is added.

`timeball_delta` appends a DataFrame to a Delta table exactly once, without a Java Delta library:

    df.write.format("timeball_delta").options(uri=…, app_id=…, app_version="17").mode("append").save()

Only the writer of `timeball_delta` is in this file. All other readers and writers are in modules of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from timeball.model.errors import SetupError
from timeball.spark.endpoint import GROUP, read_groups, split_endpoint
from timeball.spark.source.log_reader import LogReader, LogStream
from timeball.spark.source.options import (
    SCHEMAS,
    ReadOptions,
    WriteOptions,
    arrow_schema,
    check_batch,
    read_options,
    write_options,
)
from timeball.spark.source.queue_reader import QueueReader, QueueStream
from timeball.spark.source.spark_api import spark_schema
from timeball.spark.source.table_reader import FilesReader, HistoryReader, TableReader
from timeball.spark.table_store import DeltaFile, append_once, open_table, table_schema, write_file

# ---- the data source `timeball`: choose the reader or writer --------------------------------------------------

READERS: dict[str, type[LogReader | QueueReader | TableReader | HistoryReader]] = {
    "log": LogReader,
    "events": LogReader,
    "ranges": LogReader,
    "queue": QueueReader,
    "pending": TableReader,
    "ledger": TableReader,
    "history": HistoryReader,
}


class TimeballDataSource(DataSource):
    """The entry point of `format("timeball")`, which Spark calls. `options.describe` documents the options."""

    @classmethod
    def name(cls) -> str:
        """Name the format, as DataSource requires."""
        return "timeball"

    def schema(self) -> StructType:
        """Build the schema of a read, with only the columns of the option `columns`."""
        return spark_schema(arrow_schema(read_options(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Build the reader of a batch read. `schema` may have some of the columns only."""
        options = options_for_schema(schema, self.options)
        check_batch(options)
        return READERS[options.read](options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Build the reader of a stream. `schema` may have some of the columns only."""
        options = options_for_schema(schema, self.options)
        return QueueStream(options) if options.read == "queue" else LogStream(options)

    # In a cluster, a write goes to one group: tasks must reserve sequence numbers at the broker where the driver
    # attaches the files.

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Build the writer of a batch, which turns the DataFrame's rows into scheduled messages."""
        from timeball.spark.source.scheduled_writer import ScheduledWriter

        if overwrite:
            raise SetupError(
                "mode overwrite: scheduled messages cannot be overwritten; use mode append, and cancel by key"
            )
        return ScheduledWriter(schema, pin_to_one_group(write_options(self.options)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """Build the writer of a stream, which turns the stream's rows into scheduled messages."""
        from timeball.spark.source.scheduled_writer import ScheduledStreamWriter

        return ScheduledStreamWriter(schema, pin_to_one_group(write_options(self.options)))


def pin_to_one_group(options: WriteOptions) -> WriteOptions:
    """Pin a write to one group, if there are several: that of the endpoint, or else that of its node."""
    groups = [] if split_endpoint(options.endpoint)[1] else read_groups(options.endpoint)
    return msgspec.structs.replace(options, endpoint=groups[0].endpoint) if len(groups) > 1 else options


def options_for_schema(schema: StructType, given_options: Mapping[str, str]) -> ReadOptions:
    """Parse the options, and restrict them to the columns of `schema`.

    Spark passes the schema of `.schema(...)`, or else the one that `TimeballDataSource.schema` built. Raises SetupError
    for columns or types that the read cannot supply, or that differ from the option `columns`.
    """
    options = read_options(given_options)
    given_fields = [(field.name, field.dataType) for field in schema.fields]
    all_columns = arrow_schema(
        msgspec.structs.replace(options, columns=(*SCHEMAS[options.read].names, GROUP))
    )
    type_by_name = {field.name: field.dataType for field in spark_schema(all_columns).fields}
    unsupported = [name for name, kind in given_fields if type_by_name.get(name) != kind]
    names = tuple(name for name, _ in given_fields)
    if not given_options and names != tuple(arrow_schema(options).names):
        # A query of a table in Spark's catalog also has a schema and no options. Spark drops the table's options, so
        # the query would read the default endpoint instead of the table's.
        raise SetupError(
            ".schema(...) without an option: name the endpoint; in SQL write CREATE TEMPORARY VIEW"
        )
    if unsupported or (options.columns is not None and options.columns != names):
        readable = spark_schema(all_columns if options.columns is None else arrow_schema(options))
        raise SetupError(
            f".schema(...){f', column {unsupported[0]}' if unsupported else ''}: name some of these columns, with "
            f"their types, or leave it out: {readable.simpleString()}"
        )
    return (
        options
        if names == tuple(arrow_schema(options).names)
        else msgspec.structs.replace(options, columns=names)
    )


# ---- the data source `timeball_delta` -------------------------------------------------------------------------
# Tasks write Parquet files. The driver adds them in one Delta commit that contains the application's version number.
# table_store.py explains `app_version` and `app_since` (`since` there). The DataFrame must have the table's columns,
# in the table's order.

OPTIONS = ("uri", "app_id", "app_version")


@dataclass
class WrittenFile(WriterCommitMessage):
    """A task's message to the driver: the file that the task has written."""

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
        """Check the columns `names`. Raises SetupError unless they are those of the table, in its order.

        `app_version`: the mark of this append. `app_since`: see `append_once`. Raises the errors of `open_table`.
        """
        self.schema = table_schema(open_table(uri))
        if names != self.schema.names:
            raise SetupError(f"columns {names} are not those of the table at {uri}: {self.schema.names}")
        self.uri, self.app_id, self.app_version, self.app_since = uri, app_id, app_version, app_since

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task as one file."""
        return WrittenFile(write_file(self.uri, self.schema, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit the files of all tasks, unless the table already has this version of the application."""
        files = [message.file for message in messages if isinstance(message, WrittenFile)]
        append_once(self.uri, self.app_id, self.app_since, self.app_version, files)
