"""SQL over what waits and what happened, on DuckDB in this process: a quick look that needs neither Spark nor Java.

Everything a query sees is of one version: one snapshot of what waits (snapshot.py), the ledger and the archive as they
stood then, no row of the log behind the snapshot's end. `Version` says which. The views are those of view_sql.py, and a
view is prepared only when a query names it. The ledger's view goes on to the end of the log by itself, so it is
complete without the ledger job, as far back as the log is kept.

Rows of the tables are read where they lie, through Arrow: columns and row groups that a query does not need are
not read. What comes from the log is put into a file of this session, so that memory holds a batch of it and not all.

Read only: one SELECT (or EXPLAIN) at a time, on a database in memory without access to files or the network. Refuses
everything else by name. `memory` bounds DuckDB; what exceeds it goes to a temporary folder where DuckDB can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs

from timeball.errors import NotFound, OverLimit, RequestError, SetupError
from timeball.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.table_store import as_dataset, open_table, sibling
from timeball.pipeline.views import view_sql
from timeball.pipeline.views.log_events import EVENT_SCHEMA, read_events
from timeball.pipeline.views.snapshot import Snapshot, table_files

if TYPE_CHECKING:
    import duckdb
    from deltalake import DeltaTable

T = TypeVar("T")

MEMORY_BYTES = 1 << 30
LOG_ROWS = 100_000  # of the log's end in the view `log`
BATCH_ROWS = 8_192
INTERRUPT_S = 0.1
_LEDGER_APP_ID = "timeball-ledger"
_ARCHIVE_SCHEMA = pa.schema([*READ_SCHEMA, pa.field("day", pa.date32())])
_WAITING_SCHEMA = pa.schema([*TABLE_SCHEMA, pa.field("place", pa.string())])


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """What a query saw: the table at a version, rows of the log below `log_end`, ledger and archive if they were asked.

    `is_whole` is False when retention has let go of a part of what waited at an older version.
    """

    now_ms: int
    table: int
    log_end: int
    ledger: int | None = None
    archive: int | None = None
    is_whole: bool = True


class Answer(msgspec.Struct, frozen=True):
    """Rows as batches; to be read once, while the session is open."""

    version: Version
    rows: pa.RecordBatchReader


def view_columns() -> dict[str, list[str]]:
    """Every view with its columns. (What the ledger and archive jobs add to their tables comes on top.)"""
    bases = {
        "waiting_rows": _WAITING_SCHEMA,
        "table_rows": TABLE_SCHEMA,
        "ledger_events": EVENT_SCHEMA,
        "archive_rows": _ARCHIVE_SCHEMA,
        "log_rows": READ_SCHEMA,
    }
    with tempfile.TemporaryDirectory() as scratch, _open_database(Path(scratch), MEMORY_BYTES) as database:
        for base, schema in bases.items():
            database.register(base, schema.empty_table())
        texts = view_sql.definitions("duckdb", {base: schema.names for base, schema in bases.items()})
        return {view: list(database.sql(texts[view]).columns) for view in view_sql.VIEWS}


class SqlSession:
    """Queries on one version. Use as a context manager."""

    def __init__(
        self,
        endpoint: str,
        *,
        version: int | None = None,
        table_uri: str | None = None,
        memory_bytes: int = MEMORY_BYTES,
        log_rows: int = LOG_ROWS,
    ) -> None:
        self._log_rows = log_rows
        self._memory_bytes = memory_bytes
        self._columns: dict[str, list[str]] = {}  # of the base relations there are
        with ExitStack() as opened:
            self._scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="timeball-sql-")))
            self._database = opened.enter_context(_open_database(self._scratch, memory_bytes))
            self._worker = opened.enter_context(ThreadPoolExecutor(1, "timeball-sql"))
            self._broker = opened.enter_context(Endpoint(endpoint, patience_s=0))
            self._snapshot = Snapshot.take(self._broker, version=version, table_uri=table_uri)
            self._opened = opened.pop_all()
        shot = self._snapshot
        self.version = Version(
            now_ms=shot.now_ms, table=shot.version, log_end=shot.end_seq, is_whole=shot.is_whole
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything, also of rows not read yet."""
        self._opened.close()

    def run(self, text: str) -> Answer:
        """The answer to one SELECT; RequestError says what is wrong with it, and names the views there are."""
        import duckdb

        try:
            self._check(text)
            self._prepare(view_sql.named(text))
            rows = self._work(lambda: self._database.sql(text).to_arrow_reader(BATCH_ROWS))
        except duckdb.Error as error:
            raise self._plain(error) from error
        return Answer(self.version, pa.RecordBatchReader.from_batches(rows.schema, self._read(rows)))

    def _read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        """DuckDB works while it is read, so it may fail then."""
        import duckdb

        try:
            while (batch := self._work(lambda: next(rows, None))) is not None:
                yield batch
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._plain(error) from error

    def _work(self, call: Callable[[], T]) -> T:
        """Let DuckDB work on a thread of its own: Ctrl-C reaches this one at once, and the query is told."""
        future = self._worker.submit(call)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():  # it may come before the query has begun
                self._database.interrupt()
                wait([future], INTERRUPT_S)
            raise

    def _check(self, text: str) -> None:
        import duckdb

        statements = self._database.extract_statements(text)
        if len(statements) != 1:
            raise RequestError(f"{len(statements)} statements: one query at a time")
        allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if statements[0].type not in allowed:
            raise RequestError(
                f"only SELECT: the views cannot be changed ({statements[0].type.name} refused)"
            )

    def _plain(self, error: Exception) -> RequestError | OverLimit:
        text = str(error)
        if "Out of Memory" in text:
            return OverLimit(
                f"the query needs more than {self._memory_bytes:,} bytes of memory: allow more, or ask for less"
            )
        sentence = " ".join(line.strip() for line in text.split("\n\n")[0].splitlines() if line.strip())
        views = f"; views: {', '.join(view_sql.VIEWS)}" if "Catalog Error" in text else ""
        return RequestError(f"SQL: {sentence}{views}")

    # ---- base relations -------------------------------------------------------------------------------------

    def _prepare(self, names: Iterable[str]) -> None:
        """Make the views that are named, and what they stand on."""
        for base in view_sql.needed_bases(names):
            if base not in self._columns:
                getattr(self, f"_make_{base}")()
                described = self._database.sql(f"select * from {base} limit 0")
                self._columns[base] = list(described.columns)
        for view, query in view_sql.definitions("duckdb", self._columns).items():
            self._database.execute(f"create or replace view {view} as {query}")

    def _make_waiting_rows(self) -> None:
        shot = self._snapshot
        self._database.register(
            "gone_rows",
            pa.table({"seq": pa.concat_arrays([pa.array(shot.settled()), pa.array(shot.moved())])}),
        )
        paths = [file.path for file in shot.files()]
        self._database.register("waiting_table", _dataset(shot.uri, paths))
        self._database.register("waiting_log", self._spooled("waiting", _WAITING_SCHEMA, self._in_the_log()))
        self._database.execute(
            f"""create view waiting_rows as
                select *, 'table' as place from waiting_table anti join gone_rows using (seq)
                where due_ms >= {shot.due_from_ms}
                union all select * from waiting_log"""
        )

    def _in_the_log(self) -> Iterator[pa.RecordBatch]:
        for place, rows in self._snapshot.places(among=("tail", "level")):
            yield pa.RecordBatch.from_arrays(
                [*rows.columns, pa.repeat(pa.scalar(place), rows.num_rows)], schema=_WAITING_SCHEMA
            )

    def _make_table_rows(self) -> None:
        shot = self._snapshot
        paths = [file.path for file in table_files(shot.uri, shot.version)]
        self._database.register("table_rows", _dataset(shot.uri, paths))

    def _make_ledger_events(self) -> None:
        """The ledger up to where it has come, then the log."""
        shot = self._snapshot
        begin, kept = shot.first_seq, ""
        table = self._beside("ledger")
        if table is not None:
            begin = max(begin, int(table.transaction_version(_LEDGER_APP_ID) or 0))
            self.version = msgspec.structs.replace(self.version, ledger=table.version())
            self._database.register("ledger_table", as_dataset(table, EVENT_SCHEMA))
            kept = f"select * from ledger_table where event_seq < {shot.end_seq} union all by name "
        fresh = self._spooled("events", EVENT_SCHEMA, read_events(self._broker, begin, shot.end_seq))
        self._database.register("fresh_events", fresh)
        self._database.execute(f"create view ledger_events as {kept} select * from fresh_events")

    def _make_archive_rows(self) -> None:
        table = self._beside("archive")
        if table is None:
            raise NotFound(
                "there is no archive beside the pending table; 'timeball pipeline run archive' makes one"
            )
        self.version = msgspec.structs.replace(self.version, archive=table.version())
        self._database.register("archive_table", as_dataset(table, _ARCHIVE_SCHEMA))
        self._database.execute(
            f"create view archive_rows as select * from archive_table where seq < {self._snapshot.end_seq}"
        )

    def _make_log_rows(self) -> None:
        end = self._snapshot.end_seq
        begin = max(self._snapshot.first_seq, end - self._log_rows)
        rows = self._broker.read_log(begin, end) if begin < end else iter(())
        self._database.register("log_rows", self._spooled("log", READ_SCHEMA, rows))

    def _beside(self, name: str) -> DeltaTable | None:
        try:
            return open_table(sibling(self._snapshot.uri, name))
        except NotFound:
            return None

    def _spooled(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> ds.Dataset:
        """Batches in a file of this session, as a relation that can be read more than once."""
        path = self._scratch / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return ds.dataset(str(path), schema, format="ipc")


def _dataset(uri: str, paths: list[str]) -> ds.Dataset | pa.Table:
    """Files of the pending table as a relation."""
    if not paths:
        return TABLE_SCHEMA.empty_table()
    files, root = fs.FileSystem.from_uri(uri)
    return ds.dataset([f"{root}/{path}" for path in paths], TABLE_SCHEMA, format="parquet", filesystem=files)


def _open_database(scratch: Path, memory_bytes: int) -> duckdb.DuckDBPyConnection:
    """An empty database in memory that reaches neither files nor the network."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{error.name} is not installed: install the extra, pip install 'timeball[sql]'"
        ) from error
    database = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{memory_bytes}B",
            "temp_directory": str(scratch / "spill"),
            "python_enable_replacements": False,  # a query sees our views, not this program's variables
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    database.execute("set timezone = 'UTC'")
    for macro in view_sql.DUCKDB_MACROS:
        database.execute(macro)
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")
    return database
