"""Read one version of the pending table or the ledger.

The Delta log lists the files, and tasks open them by URI. The option `topic` is applied to rows in Arrow.

    read=pending   TABLE_SCHEMA; settled (released or cancelled) messages remain until their file is rewritten
    read=ledger    EVENT_SCHEMA; columns that an older ledger does not have are null
    read=history   HISTORY_SCHEMA; the versions of the pending table that can be read, with their times

In a cluster each group has its own tables. All of them are read, and the option `version` requires the option `group`.

If a file of an old version has been deleted, the read fails with an error that names the file. It never yields fewer
rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.model import storage_uris
from timeball.model.answers import Status
from timeball.model.errors import NotFound, SetupError, StorageError
from timeball.spark.endpoint import GROUP, PLACEHOLDER, Group, group_statuses, group_table_uri
from timeball.spark.source.log_reader import piece_rows
from timeball.spark.source.options import GROUP_FIELD, SCHEMAS, ReadOptions, arrow_schema
from timeball.spark.source.spark_api import select_topic, spark_schema
from timeball.spark.table_store import dataset_of, default_table_uri, load_version_at, open_table
from timeball.table.layout import ROW_GROUP_ROWS

BATCH_ROWS = 65_536
NAMED_TASKS_MAX = 64  # tasks of a FilesReader


@dataclass(frozen=True)
class Slice:
    """A part of one file: the row groups that begin at begin_row <= row < end_row. They have about `rows` rows.

    `end_row` is None for the last slice of a file.
    """

    uri: str
    begin_row: int
    end_row: int | None
    rows: int


@dataclass
class TablePart(InputPartition):
    """The slices that one task reads, of one group."""

    slices: list[Slice]
    group: Group | None = None


class TableReader(DataSourceReader):
    """A batch read of one version of a table."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read on the driver: divide the files of each group's table among tasks."""
        files_by_group = [(group, list_files(table)) for group, table in tables_of(self.options)]
        rows = piece_rows(sum(rows for _, files in files_by_group for _, rows in files), self.options)
        return [
            TablePart(part.slices, group)
            for group, files in files_by_group
            for part in divide_among_tasks(files, rows)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part, in a task. Raises NotFound for a deleted file, StorageError for other failures."""
        if not isinstance(partition, TablePart):
            return
        schema = arrow_schema(self.options)
        for piece in partition.slices:
            try:
                for batch in read_slice(piece, schema, self.options.topic):
                    yield fill_group_column(batch, partition.group)
            except FileNotFoundError as error:
                raise NotFound(
                    f"{piece.uri} is gone: this version of the table has been swept, a day after its files left "
                    "the table; read a newer one"
                ) from error
            except (OSError, pa.ArrowException) as error:
                raise StorageError(f"cannot read {piece.uri}: {error}") from error


class HistoryReader(DataSourceReader):
    """A read of the list of the pending table's versions, from the Delta log."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the read on the driver: one partition for each group."""
        # Only the URI of the slice is used.
        return [
            TablePart([Slice(table.table_uri, 0, None, 0)], group) for group, table in tables_of(self.options)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the versions of one group's table in HISTORY_SCHEMA, the oldest first."""
        assert isinstance(partition, TablePart)
        for piece in partition.slices:
            rows = [
                {
                    "version": commit["version"],
                    "at_ms": commit["timestamp"],
                    "job": commit.get("job"),
                    "watermark": int(commit["watermark"]) if "watermark" in commit else None,
                }
                for commit in reversed(open_table(piece.uri).history())
            ]
            batch = pa.RecordBatch.from_pylist(rows, SCHEMAS["history"])
            yield fill_group_column(cast_batch(batch, arrow_schema(self.options)), partition.group)


def tables_of(options: ReadOptions) -> list[tuple[Group, DeltaTable]]:
    """Open the table to read, in the requested version, for each group.

    Raises SetupError for a version number with several groups, and NotFound for a missing table or version.
    """
    if options.ledger_uri is not None and PLACEHOLDER not in options.ledger_uri:
        return [(Group("", options.endpoint), _open_version(options, options.ledger_uri, options.version))]
    statuses = group_statuses(options.endpoint)
    if len(statuses) > 1 and options.version is not None:
        raise SetupError(f"option version: each of the {len(statuses)} groups has its own; name one: group")
    return [(group, _table_of(options, group, status, len(statuses))) for group, status in statuses]


def _table_of(options: ReadOptions, group: Group, status: Status, groups: int) -> DeltaTable:
    """Open the pending table or the ledger of one group. `groups`: the number of groups."""
    version = options.version
    uri = group_table_uri("option ledger_uri", options.ledger_uri, group.name, groups)
    if uri is None:
        uri = group_table_uri("option table_uri", options.table_uri, group.name, groups) or status.table.uri
        if options.read == "ledger":
            uri = default_table_uri("ledger", uri, status)
        elif version is None and options.timestamp is None:
            # It is -1 while the table lacks rows of the log. Then `open_table` raises Unavailable.
            version = status.table.version
    return _open_version(options, uri, version)


def _open_version(options: ReadOptions, uri: str, version: int | None) -> DeltaTable:
    """Open the version at the option `timestamp` if it is set, else `version`, or the newest for None."""
    table = open_table(uri, version)
    if options.timestamp is None:
        return table
    try:
        return load_version_at(table, options.timestamp)
    except NotFound as error:
        raise NotFound(f"option timestamp: {error}") from error


def fill_group_column(batch: pa.RecordBatch, group: Group | None) -> pa.RecordBatch:
    """Fill the column `group` with the group's name, if the batch has the column."""
    index = batch.schema.get_field_index(GROUP)
    if index < 0 or group is None or not group.name:
        return batch
    return batch.set_column(index, GROUP_FIELD, pa.repeat(pa.scalar(group.name), batch.num_rows))


def read_delta(
    spark: SparkSession, table: DeltaTable, schema: pa.Schema, uris: Sequence[str] | None = None
) -> DataFrame:
    """Read one version of a Delta table, or only its files `uris`, as a DataFrame.

    In an object store, Arrow reads the files, because Spark would need a jar for each kind of store, and its own keys.
    """
    file_uris = table.file_uris() if uris is None else list(uris)
    if not file_uris:
        return spark.createDataFrame([], spark_schema(schema))
    if storage_uris.in_object_store(table.table_uri):
        reader = spark.read.format("timeball_delta").schema(spark_schema(schema))
        return reader.option("files", json.dumps(file_uris)).load()
    source = spark.read.schema(spark_schema(schema)).option("basePath", table.table_uri.rstrip("/"))
    return source.parquet(*file_uris)


@dataclass
class NamedFiles(InputPartition):
    """The files that one task reads whole."""

    uris: list[str]


class FilesReader(DataSourceReader):
    """Reads files of a Delta table, listed by the driver, with the columns of `schema`.

    The paths of the files contain the values of partition columns, so a task does not have to open the table.
    """

    def __init__(self, uris: Sequence[str], schema: pa.Schema) -> None:
        self.uris, self.schema = list(uris), schema

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the files among at most NAMED_TASKS_MAX tasks."""
        tasks = min(len(self.uris), NAMED_TASKS_MAX)
        return [NamedFiles(self.uris[task::tasks]) for task in range(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the files of one task. Raises StorageError."""
        if not isinstance(partition, NamedFiles):
            return
        for uri in partition.uris:
            folders = [part.partition("=")[0] for part in uri.split("/") if "=" in part]
            partition_columns = [name for name in folders if name in self.schema.names]
            try:
                for rows in dataset_of([uri], self.schema, partition_columns).to_batches(
                    batch_size=BATCH_ROWS, batch_readahead=4, fragment_readahead=2
                ):
                    yield cast_batch(rows, self.schema)
            except (OSError, pa.ArrowException) as error:
                raise StorageError(f"cannot read {uri}: {error}") from error


def list_files(table: DeltaTable) -> list[tuple[str, int]]:
    """List (URI, number of rows) of the files."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if not actions.num_rows:
        return []
    base = table.table_uri.rstrip("/")
    paths, counts = actions.column("path").to_pylist(), actions.column("num_records").to_pylist()
    return [(f"{base}/{path}", count or 0) for path, count in zip(paths, counts, strict=True)]


def divide_among_tasks(files: list[tuple[str, int]], rows_per_part: int) -> list[TablePart]:
    """Divide files (URI, rows) into partitions of about `rows_per_part` rows. Large files are cut between row groups.

    The largest slices are assigned first, each to the partition with the fewest rows, so that tasks are even.
    """
    slices = [
        piece for uri, rows in files for piece in cut_file(uri, rows, max(rows_per_part, ROW_GROUP_ROWS))
    ]
    total = sum(piece.rows for piece in slices)
    parts = [TablePart([]) for _ in range(min(len(slices), max(1, -(-total // rows_per_part))))]
    rows_of_parts = [0] * len(parts)
    for piece in sorted(slices, key=lambda each: -each.rows):
        smallest = rows_of_parts.index(min(rows_of_parts))
        parts[smallest].slices.append(piece)
        rows_of_parts[smallest] += max(piece.rows, 1)
    return parts


def cut_file(uri: str, rows: int, rows_per_slice: int) -> list[Slice]:
    """Cut a file into even slices of whole row groups, of at most `rows_per_slice` rows (at least one row group)."""
    groups, per_slice = -(-rows // ROW_GROUP_ROWS), max(1, rows_per_slice // ROW_GROUP_ROWS)
    slices = max(1, -(-groups // per_slice))
    cuts = [groups * i // slices * ROW_GROUP_ROWS for i in range(slices)]
    ends = [*cuts[1:], None]
    return [Slice(uri, begin, end, (rows if end is None else end) - begin) for begin, end in zip(cuts, ends)]


def read_slice(file_slice: Slice, schema: pa.Schema, topic: str | None) -> Iterator[pa.RecordBatch]:
    """Read the rows of a slice, with `topic` only those of this topic, in `schema`."""
    files, path = storage_uris.arrow(file_slice.uri)
    with files.open_input_file(path) as source:
        file = pq.ParquetFile(source)
        stored_columns = set(file.schema_arrow.names)
        needed = schema.names if topic is None else dict.fromkeys([*schema.names, "topic"])
        names = [name for name in needed if name in stored_columns]
        groups = row_groups_of(file.metadata, file_slice)
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=names):
            selected = select_topic(batch, topic)
            if selected.num_rows:
                yield cast_batch(selected, schema)


def row_groups_of(footer: Any, file_slice: Slice) -> list[int]:
    """List the indexes of the row groups that begin within the slice. `footer`: the file's pq.FileMetaData."""
    groups, row = [], 0
    for group in range(footer.num_row_groups):
        if file_slice.begin_row <= row and (file_slice.end_row is None or row < file_slice.end_row):
            groups.append(group)
        row += footer.row_group(group).num_rows
    return groups


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch to exactly this schema. Missing columns become null."""
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
