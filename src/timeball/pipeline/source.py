"""The data source `timeball`: the log and the pending table as DataFrames, and a DataFrame as promises.

    spark.read.format("timeball").option("endpoint", "grpc://host:7400").load()
    spark.readStream.format("timeball").option("kinds", "promise,release").load()
    df.write.format("timeball").mode("append").save()

Rows arrive as Arrow batches which executors fetch over Flight, so they enter the JVM column by column. Spark has
no column pruning for Python sources; the option `columns` is what it would do. Filters on `seq`, `kind` and
`due_ms` narrow what is fetched, and Spark still applies them: narrowing may be coarse, never wrong.

    read     batch   stream   rows
    log      yes     yes      READ_SCHEMA
    pending  yes     -        TABLE_SCHEMA, of one version of the table; rows already settled may still be in it
    ranges   yes     yes      (from_seq, to_seq): pieces of the log, for writers that fetch the rows themselves
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from timeball.errors import OutOfRange, SetupError
from timeball.pipeline.endpoint import Endpoint, Status
from timeball.pipeline.narrow import Bounds, bounds, kinds
from timeball.pipeline.options import ReadOptions, read_options, write_options
from timeball.pipeline.schema import arrow_schema, spark_schema
from timeball.pipeline.store import open_table

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH_ROWS = 65_536


class TimeballDataSource(DataSource):
    """`format("timeball")`. Options are documented in options.describe."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return "timeball"

    def schema(self) -> StructType:
        """See DataSource; READ_SCHEMA, TABLE_SCHEMA or (from_seq, to_seq), reduced to `columns`."""
        return spark_schema(arrow_schema(read_options(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """See DataSource."""
        options = read_options(self.options)
        expect_schema(schema, options)
        return PendingReader(options) if options.read == "pending" else LogReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """See DataSource."""
        from timeball.pipeline.stream import LogStream

        options = read_options(self.options)
        expect_schema(schema, options)
        return LogStream(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """See DataSource; the DataFrame's rows become promises."""
        from timeball.pipeline.sink import PromiseWriter

        if overwrite:
            raise SetupError(
                "mode overwrite: promises cannot be overwritten; use mode append, and cancel by key"
            )
        return PromiseWriter(schema, write_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """See DataSource; a stream of ranges is compacted, any other becomes promises."""
        from timeball.pipeline.sink import stream_writer

        return stream_writer(schema, write_options(self.options))


def expect_schema(schema: StructType, options: ReadOptions) -> None:
    """Refuse a schema given by hand that is not what will arrive."""
    ours = spark_schema(arrow_schema(options))
    if [(f.name, f.dataType) for f in schema.fields] != [(f.name, f.dataType) for f in ours.fields]:
        raise SetupError(f"leave .schema(...) out: with these options it is {ours.simpleString()}")


# ---- the log ----------------------------------------------------------------------------------------------


@dataclass
class LogPart(InputPartition):
    """Rows from_seq <= seq < to_seq."""

    from_seq: int
    to_seq: int


def split_range(from_seq: int, to_seq: int, rows_per_partition: int) -> list[LogPart]:
    """Even pieces of at most `rows_per_partition` rows; none for an empty range."""
    span = max(0, to_seq - from_seq)
    pieces = -(-span // rows_per_partition)
    cuts = [from_seq + span * i // pieces for i in range(pieces + 1)] if pieces else []
    return [LogPart(a, b) for a, b in itertools.pairwise(cuts)]


def start_seq(position: int | str | None, status: Status, otherwise: str) -> int:
    """The sequence number an option names."""
    named = {
        "first": status.log.first_seq,
        "latest": status.log.durable_seq,
        "watermark": status.watermark,
    }
    wanted = otherwise if position is None else position
    return named[wanted] if isinstance(wanted, str) else wanted


def check_kept(from_seq: int, to_seq: int, status: Status) -> None:
    """Refuse a range the broker no longer, or not yet, has: a shorter answer would look like a whole one."""
    if from_seq < status.log.first_seq:
        raise OutOfRange(
            f"from_seq {from_seq}: retention has removed rows below {status.log.first_seq}; start at 'first'"
        )
    if to_seq > status.log.durable_seq:
        raise OutOfRange(f"to_seq {to_seq}: the log ends at {status.log.durable_seq}")


def read_part(options: ReadOptions, part: LogPart) -> Iterator[pa.RecordBatch]:
    """The rows of one partition, in the columns asked for."""
    if options.read == "ranges":
        row = pa.record_batch({"from_seq": [part.from_seq], "to_seq": [part.to_seq]})
        yield row if options.columns is None else row.select(list(options.columns))
        return
    with Endpoint(options.endpoint) as endpoint:
        for batch in endpoint.read_log(part.from_seq, part.to_seq, options.kinds):
            yield shape(batch, options)


def shape(batch: pa.RecordBatch, options: ReadOptions) -> pa.RecordBatch:
    """Apply `body_kinds` and `columns`: what the JVM need not see stays out of it."""
    if options.body_kinds is not None and (options.columns is None or "body" in options.columns):
        wanted = pc.is_in(batch.column("kind"), pa.array(options.body_kinds, pa.int8()))
        body = pc.if_else(wanted, batch.column("body"), pa.scalar(None, pa.binary()))
        batch = batch.set_column(batch.schema.get_field_index("body"), "body", body)
    return batch if options.columns is None else batch.select(list(options.columns))


class LogReader(DataSourceReader):
    """A batch read of [from_seq, to_seq); without to_seq, of all that is durable when the read is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.seqs = Bounds()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow the range and the kinds; every filter is returned, so Spark applies them as well."""
        if self.options.read == "log":
            self.seqs = bounds(filters, "seq")
            self.options = msgspec.structs.replace(self.options, kinds=kinds(self.options.kinds, filters))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader."""
        options = self.options
        with Endpoint(options.endpoint) as endpoint:
            status = endpoint.status()
        begin = start_seq(options.from_seq, status, "first")
        end = status.log.durable_seq if options.to_seq is None else options.to_seq
        check_kept(begin, end, status)
        begin, end = self.seqs.clip(begin, end)
        if options.kinds == ():
            return []
        return split_range(begin, end, options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader."""
        # Planned without partitions, Spark asks once all the same, for None.
        return read_part(self.options, partition) if isinstance(partition, LogPart) else iter(())


# ---- the pending table ------------------------------------------------------------------------------------


@dataclass
class FilesPart(InputPartition):
    """Some files of the pending table, as URIs."""

    uris: list[str]


class PendingReader(DataSourceReader):
    """A batch read of one version of the pending table."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.due = Bounds()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Leave files out whose due range lies outside; every filter is returned, so Spark applies them as well."""
        self.due = bounds(filters, "due_ms")
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader; files are dealt out by size, largest first, so that tasks are even."""
        with Endpoint(self.options.endpoint) as endpoint:
            status = endpoint.status()
        version = status.table.version if self.options.version is None else self.options.version
        return deal(pending_files(status.table.uri, version, self.due), self.options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader."""
        if not isinstance(partition, FilesPart):
            return
        schema = arrow_schema(self.options)
        for uri in partition.uris:
            files, path = fs.FileSystem.from_uri(uri)
            with files.open_input_file(path) as source:
                for batch in pq.ParquetFile(source).iter_batches(BATCH_ROWS, columns=schema.names):
                    yield batch.select(schema.names).cast(schema)


def pending_files(uri: str, version: int | None, due: Bounds) -> list[tuple[str, int]]:
    """(URI, rows) of the files of one version that can hold rows due within `due`."""
    table = open_table(uri, version)
    actions = pa.table(table.get_add_actions(flatten=True))
    names = set(actions.column_names)
    if not actions.num_rows:
        return []
    rows = actions.column("num_records").to_pylist()
    low = actions.column("min.due_ms").to_pylist() if "min.due_ms" in names else [None] * len(rows)
    high = actions.column("max.due_ms").to_pylist() if "max.due_ms" in names else [None] * len(rows)
    base = table.table_uri.rstrip("/")
    return [
        (f"{base}/{path}", count or 0)
        for path, count, least, most in zip(actions.column("path").to_pylist(), rows, low, high, strict=True)
        if due.may_hold(least, most)
    ]


def deal(files: list[tuple[str, int]], rows_per_partition: int) -> list[FilesPart]:
    """Files as partitions of about `rows_per_partition` rows; a file is never split."""
    total = sum(rows for _, rows in files)
    parts = [FilesPart([]) for _ in range(min(len(files), max(1, -(-total // rows_per_partition))))]
    load = [0] * len(parts)
    for uri, rows in sorted(files, key=lambda entry: -entry[1]):
        lightest = load.index(min(load))
        parts[lightest].uris.append(uri)
        load[lightest] += max(rows, 1)
    return parts
