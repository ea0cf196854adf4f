"""The two engines that run the SQL of the audit (views/audit_sql.py): DuckDB in this process, and Spark.

An engine makes the relations that the SQL texts name from the ledger, the pending table and rows of the log (`Reads`).
No body is read. DuckDB reads the tables through Arrow, writes rows of the log to a temporary folder, and uses that
folder when a query needs more than `memory_bytes`. Spark reads Parquet files itself. Its tasks read rows of the log, or
the driver does if there are at most DRIVER_ROWS.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable

from timeball.model.errors import OverLimit, StorageError
from timeball.model.message import READ_SCHEMA, Kind
from timeball.spark.endpoint import Endpoint, after_last_seq, retrying_read
from timeball.spark.log_events import EVENT_SCHEMA, read_row_events
from timeball.spark.table_store import (
    as_dataset,
    deleted_file_error,
    files_dataset,
    open_version,
    table_files,
)
from timeball.spark.views.audit_sql import EVENT_COLUMNS, EVENTS, FILED, LOGGED, PLACED
from timeball.spark.views.view_sql import SPARK_RELATION, Engine, Relation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

MEMORY_BYTES = 512 << 20  # the limit of DuckDB's own memory; Arrow needs some more
# Rows of the log that the driver reads itself, because Spark's processes for a Python data source cost more.
DRIVER_ROWS = 500_000
Span = tuple[int, int]  # rows begin <= seq < end of the log


@dataclass(frozen=True, kw_only=True)
class Reads:
    """The parts of the log and the tables that an audit reads. Levels and tail have no row in common."""

    endpoint: str
    table_uri: str
    table_version: int
    ledger: DeltaTable | None
    events: Span  # events of these rows are read from the ledger
    fresh_events: Span  # events of these rows are read from the log
    tail: Span  # for rows of pending messages without a queue position
    levels: Span  # for rows of pending messages with a queue position, which wait for a delay level
    placed: Span  # for the queue positions of all rows


class AuditEngine(Protocol):
    """An engine, as a context manager. Relations have the names that audit_sql uses."""

    dialect: Engine
    relation: Relation

    def __enter__(self) -> Self:
        """Open the engine."""

    def __exit__(self, *_: object) -> None:
        """Close the engine, and free the memory of its relations."""

    def read(self, reads: Reads) -> None:
        """Make the relations events, filed, logged and placed, in place of earlier ones."""

    def register(self, name: str, rows: pa.Table) -> None:
        """Make a relation of rows in memory."""

    def query(self, text: str) -> pa.Table:
        """Run a query. Raises OutOfRange for a deleted file, StorageError and other errors of Timeball."""

    def materialize(self, name: str, text: str) -> None:
        """Run a query and make a relation of its result, which other queries read several times."""


def read_log_rows(
    broker: Endpoint, span: Span, kinds: Sequence[Kind] | None, schema: pa.Schema, placed: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows of the log with the columns of `schema`. Resumes after a restart of the broker.

    `placed`: rows with a queue position, or rows without one. `kinds`: None for all.
    """
    columns = [name for name in READ_SCHEMA.names if name in {"seq", *schema.names}]

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        return broker.read_log(begin, span[1], kinds, columns=columns, placed=placed)

    if span[0] < span[1]:
        for batch in retrying_read(broker, read, span[0], after_last_seq):
            yield batch.select(schema.names)


def read_logged_rows(broker: Endpoint, reads: Reads) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the log that may be stored for pending messages, in LOGGED: of the tail and of delay levels."""
    kinds = (Kind.SCHEDULED, Kind.MOVED)
    yield from read_log_rows(broker, reads.tail, kinds, LOGGED, placed=False)
    yield from read_log_rows(broker, reads.levels, kinds, LOGGED, placed=True)


def read_fresh_events(broker: Endpoint, span: Span) -> Iterator[pa.RecordBatch]:
    """Yield the events of rows of the log that concern one message each, with EVENT_COLUMNS."""
    for batch in read_row_events(broker, *span):
        yield batch.select(EVENT_COLUMNS)


# ---- DuckDB ---------------------------------------------------------------------------------------------------


class DuckDbEngine:
    """Runs the audit on DuckDB, in this process."""

    dialect: Engine = "duckdb"
    relation: Relation = str

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._files_written = 0

    def __enter__(self) -> Self:
        """Open the database and a temporary folder. `__exit__` closes the database and deletes the folder."""
        from timeball.spark.views.duckdb_session import open_database

        with ExitStack() as resources:
            folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="timeball-audit-"))
            self._scratch = Path(folder)
            self._database = resources.enter_context(open_database(self._scratch, self._memory_bytes))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def read(self, reads: Reads) -> None:
        """See AuditEngine."""
        with Endpoint(reads.endpoint) as broker:
            fresh = read_fresh_events(broker, reads.fresh_events)
            self._database.register("fresh_events", self._write_relation(EVENTS, fresh))
            logged = self._write_relation(LOGGED, read_logged_rows(broker, reads))
            self._database.register("logged", logged)
            placed = read_log_rows(broker, reads.placed, None, PLACED, placed=True)
            self._database.register("placed", self._write_relation(PLACED, placed))
        self._table_uri = reads.table_uri
        paths = [file.path for file in table_files(reads.table_uri, reads.table_version)]
        self._database.register("filed", files_dataset(reads.table_uri, paths))
        self._make_events(reads)

    def _make_events(self, reads: Reads) -> None:
        """Make the relation `events` from events in the ledger and `fresh_events`."""
        recorded = (
            EVENT_SCHEMA.empty_table() if reads.ledger is None else as_dataset(reads.ledger, EVENT_SCHEMA)
        )
        self._database.register("recorded_events", recorded)
        columns = ", ".join(EVENT_COLUMNS)
        # `coalesce` keeps filters on the event in DuckDB: Arrow cannot compare the strings of a file of delta-rs.
        recorded_columns = columns.replace("event,", "coalesce(event, '') as event,", 1)
        self._database.execute(
            f"create or replace temporary view events as select {recorded_columns} from recorded_events "
            f"where rows = 1 and event_seq >= {reads.events[0]} and event_seq < {reads.events[1]} "
            f"union all select {columns} from fresh_events"
        )

    def _write_relation(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ds.Dataset:
        """Write batches to a file as a relation, which queries may read more than once. Memory holds only one batch."""
        self._files_written += 1
        path = str(self._scratch / f"{self._files_written}.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return ds.dataset(path, schema, format="ipc")

    def register(self, name: str, rows: pa.Table) -> None:
        """See AuditEngine."""
        self._database.execute(
            f"drop view if exists {name}"
        )  # DuckDB does not replace a view of SQL, like `events`
        self._database.register(name, rows)

    def query(self, text: str) -> pa.Table:
        """See AuditEngine. Also raises OverLimit if `memory_bytes` are not enough."""
        import duckdb

        try:
            return self._database.sql(text).to_arrow_table()
        except duckdb.OutOfMemoryException as error:
            raise OverLimit(
                f"the audit needs more than {self._memory_bytes:,} bytes of memory: {error}"
            ) from error
        except duckdb.Error as error:
            if "FileNotFoundError" in str(error):
                raise deleted_file_error(self._table_uri, error) from error
            raise StorageError(f"the audit cannot read its tables: {error}") from error

    def materialize(self, name: str, text: str) -> None:
        """See AuditEngine."""
        self.register(name, self.query(text))


# ---- Spark ----------------------------------------------------------------------------------------------------


class SparkAuditEngine:
    """Runs the audit on a Spark session."""

    dialect: Engine = "spark"
    relation: Relation = SPARK_RELATION

    def __init__(self, session: SparkSession, description: str) -> None:
        """`description`: the text that Spark's web UI shows."""
        self._session, self._description = session, description
        self._resources = ExitStack()
        self._frames: dict[str, DataFrame] = {}
        self._persisted: list[DataFrame] = []

    def __enter__(self) -> Self:
        """Describe the Spark jobs until `__exit__`, which also frees the persisted frames."""
        from timeball.spark.source.spark_api import described

        self._resources.enter_context(described(self._session, self._description))
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._persisted:
            frame.unpersist()
        self._resources.close()

    def read(self, reads: Reads) -> None:
        """See AuditEngine."""
        from timeball.spark.source.spark_api import shuffled_by_size, spark_errors

        self._reads = reads
        files = table_files(reads.table_uri, reads.table_version)
        log_rows = sum(end - begin for begin, end in (reads.tail, reads.levels))
        rows = sum(file.rows for file in files) + log_rows
        self._resources.enter_context(shuffled_by_size(self._session, max(1, rows)))
        with spark_errors():
            filed = self._frame(FILED.empty_table())
            if files:
                filed = self._read_delta(open_version(reads.table_uri, reads.table_version), FILED)
            events, logged, placed = self._events(), self._logged(), self._placed()
        self._frames |= {"events": events, "filed": filed, "logged": logged, "placed": placed}

    def _events(self) -> DataFrame:
        """Unite the events of single messages: those in the ledger, and newer ones from the log."""
        fresh, table = self._fresh_events(), self._reads.ledger
        if table is None:
            return fresh
        begin, end = self._reads.events
        recorded = self._read_delta(table, pa.schema([*EVENTS, EVENT_SCHEMA.field("rows")]))
        recorded = recorded.where(f"rows = 1 and event_seq >= {begin} and event_seq < {end}")
        return recorded.select(*EVENT_COLUMNS).unionByName(fresh)

    def _fresh_events(self) -> DataFrame:
        """Read the events of single messages from the log."""
        span = self._reads.fresh_events
        with Endpoint(self._reads.endpoint) as broker:
            if (frame := self._frame_if_few(read_fresh_events(broker, span), EVENTS)) is not None:
                return frame
        source = (
            self._source(span).option("read", "events").option("columns", ",".join([*EVENT_COLUMNS, "rows"]))
        )
        # This read also has the events of bulk writes and starts, which have no due time. Audit._read_spans reads them.
        return self._read_once(source.load().where("rows = 1 and due_ms is not null").select(*EVENT_COLUMNS))

    def _logged(self) -> DataFrame:
        """Read the rows of the log that may be stored for pending messages, as `read_logged_rows` does."""
        reads = self._reads
        with Endpoint(reads.endpoint) as broker:
            if (frame := self._frame_if_few(read_logged_rows(broker, reads), LOGGED)) is not None:
                return frame
        kinds = ",".join(str(int(kind)) for kind in (Kind.SCHEDULED, Kind.MOVED))
        tail, levels = (
            self._source(span).option("kinds", kinds).option("placed", str(placed).lower())
            .option("columns", ",".join(LOGGED.names)).load()
            for span, placed in ((reads.tail, False), (reads.levels, True))
        )  # fmt: skip
        return self._read_once(tail.unionByName(levels))

    def _placed(self) -> DataFrame:
        """Read the queue positions of rows of the log."""
        span = self._reads.placed
        with Endpoint(self._reads.endpoint) as broker:
            rows = read_log_rows(broker, span, None, PLACED, placed=True)
            if (frame := self._frame_if_few(rows, PLACED)) is not None:
                return frame
        return self._source(span).option("placed", "true").option("columns", ",".join(PLACED.names)).load()

    def _source(self, span: Span) -> DataFrameReader:
        """Configure a read of these rows of the log."""
        source = self._session.read.format("timeball").option("endpoint", self._reads.endpoint)
        return source.option("from_seq", str(span[0])).option("to_seq", str(span[1]))

    def _read_delta(self, table: DeltaTable, schema: pa.Schema) -> DataFrame:
        from timeball.spark.source.table_reader import read_delta

        return read_delta(self._session, table, schema)

    def _frame_if_few(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> DataFrame | None:
        """Read rows on the driver and make a frame of them. Returns None if there are more than DRIVER_ROWS."""
        read_batches: list[pa.RecordBatch] = []
        for batch in batches:
            read_batches.append(batch)
            if sum(each.num_rows for each in read_batches) > DRIVER_ROWS:
                return None
        return self._frame(pa.Table.from_batches(read_batches, schema))

    def _frame(self, rows: pa.Table) -> DataFrame:
        """Make a frame of rows in memory."""
        from timeball.spark.source.spark_api import spark_schema

        if not rows.num_rows:  # Spark leaves a relation with `where false` out of its plans
            types = {each.name: each.dataType.simpleString() for each in spark_schema(rows.schema)}
            columns = ", ".join(f"cast(null as {kind}) as {name}" for name, kind in types.items())
            return self._session.sql(f"select {columns} where false")
        # Spark 4.2 drops rows behind an empty chunk.
        whole = rows.combine_chunks()
        return self._session.createDataFrame(whole).coalesce(1)  # few rows: more tasks would cost more

    def _read_once(self, frame: DataFrame) -> DataFrame:
        """Read rows of the log now, and store them on the executors, because several queries use them."""
        return frame.localCheckpoint(eager=True)

    def register(self, name: str, rows: pa.Table) -> None:
        """See AuditEngine."""
        self._frames[name] = self._frame(rows)

    def query(self, text: str) -> pa.Table:
        """See AuditEngine."""
        from timeball.spark.source.spark_api import spark_errors

        with spark_errors():
            return self._sql(text).toArrow()

    def materialize(self, name: str, text: str) -> None:
        """See AuditEngine."""
        from pyspark import StorageLevel

        frame = self._sql(text).persist(StorageLevel.MEMORY_AND_DISK)
        self._persisted.append(frame)
        self._frames[name] = frame

    def _sql(self, text: str) -> DataFrame:
        """Plan a query on the relations that its text names."""
        named: dict[str, Any] = {
            name: frame for name, frame in self._frames.items() if self.relation(name) in text
        }
        return self._session.sql(text, **named)
