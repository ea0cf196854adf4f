"""The data source `timeball`: log, topics, pending table and ledger as DataFrames, and a DataFrame as promises.

    spark.read.format("timeball").option("endpoint", "grpc://host:7400").load()
    spark.readStream.format("timeball").option("read", "queue").option("topic", "orders").load()
    df.write.format("timeball").mode("append").save()

Executors fetch rows as Arrow batches, over Flight or from the table's files, so they enter the JVM column by column.
Spark has no column pruning for Python sources; a schema that has some of the columns takes its place, as does the
option `columns`: only these are fetched. Filter pushdown reduces the rows
fetched, and Spark applies every filter again: pushdown may be coarse, never wrong.

    read     batch   stream   rows                                        filters pushed down on
    log      yes     yes      READ_SCHEMA                                 seq, kind, topic, due_ms
    queue    yes     yes      READ_SCHEMA, of one topic                   queue_id, queue_offset, seq, due_ms
    pending  yes     -        TABLE_SCHEMA, of one version of the table   due_ms, seq, topic
    ledger   yes     -        EVENT_SCHEMA, of one version of it          first_seq, topic, due_ms, at_ms, event_seq
    events   yes     -        EVENT_SCHEMA, of rows of the log            none
    history  yes     -        HISTORY_SCHEMA: versions of the table       -
    ranges   yes     yes      (from_seq, to_seq): pieces of the log       -

Of a cluster all groups are read, each from its own leader; the column `group` says which, where it is named in
`columns`. Schemas do not depend on how many groups there are, so a stream goes on when one is added.

This module chooses the reader or writer; each has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from timeball.errors import SetupError
from timeball.pipeline.endpoint import read_groups
from timeball.pipeline.groups import GROUP, split_endpoint
from timeball.pipeline.source.log_reader import LogReader, LogStream
from timeball.pipeline.source.options import (
    SCHEMAS,
    ReadOptions,
    WriteOptions,
    arrow_schema,
    check_batch,
    read_options,
    write_options,
)
from timeball.pipeline.source.queue_reader import QueueReader, QueueStream
from timeball.pipeline.source.spark_api import DataSourceStreamArrowWriter, check_streams, spark_schema
from timeball.pipeline.source.table_reader import HistoryReader, TableReader

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
    """`format("timeball")`. Options are documented in options.describe."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return "timeball"

    def schema(self) -> StructType:
        """Return the schema of the rows read, reduced to `columns`; see DataSource."""
        return spark_schema(arrow_schema(read_options(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """See DataSource."""
        options = reduced_to(schema, self.options)
        check_batch(options)
        return READERS[options.read](options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """See DataSource."""
        check_streams()
        options = reduced_to(schema, self.options)
        return QueueStream(options) if options.read == "queue" else LogStream(options)

    # Tasks must reserve numbers where the driver attaches: of a cluster a write goes to one group.

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """See DataSource; the DataFrame's rows become promises."""
        from timeball.pipeline.source.promise_writer import PromiseWriter

        if overwrite:
            raise SetupError(
                "mode overwrite: scheduled messages cannot be overwritten; use mode append, and cancel by key"
            )
        return PromiseWriter(schema, in_one_group(write_options(self.options)))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """See DataSource; the stream's rows become promises."""
        from timeball.pipeline.source.promise_writer import PromiseStreamWriter

        check_streams()
        return PromiseStreamWriter(schema, in_one_group(write_options(self.options)))


def in_one_group(options: WriteOptions) -> WriteOptions:
    """Confine a write to the group that the endpoint names, or to that of the node there."""
    groups = [] if split_endpoint(options.endpoint)[1] else read_groups(options.endpoint)
    return msgspec.structs.replace(options, endpoint=groups[0].endpoint) if len(groups) > 1 else options


def reduced_to(schema: StructType, given_options: Mapping[str, str]) -> ReadOptions:
    """Return the options with the columns of a schema, which may be given by hand; refuse what will not arrive."""
    options = read_options(given_options)
    given = [(field.name, field.dataType) for field in schema.fields]
    every = arrow_schema(msgspec.structs.replace(options, columns=(*SCHEMAS[options.read].names, GROUP)))
    known = {field.name: field.dataType for field in spark_schema(every).fields}
    wrong = [name for name, kind in given if known.get(name) != kind]
    names = tuple(name for name, _ in given)
    if not given_options and names != tuple(arrow_schema(options).names):
        # So is a query of a table of Spark's catalog: it would read another broker than the table's options say.
        raise SetupError(
            ".schema(...) without an option: name the endpoint; in SQL write CREATE TEMPORARY VIEW"
        )
    if wrong or (options.columns is not None and options.columns != names):
        ours = spark_schema(every if options.columns is None else arrow_schema(options))
        raise SetupError(
            f".schema(...){f', column {wrong[0]}' if wrong else ''}: name some of these columns, with their types, or "
            f"leave it out: {ours.simpleString()}"
        )
    return (
        options
        if names == tuple(arrow_schema(options).names)
        else msgspec.structs.replace(options, columns=names)
    )
