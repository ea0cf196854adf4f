"""The views on DuckDB in this process: a quick look that needs neither Spark nor Java.

Everything a query sees is of one version: one snapshot of what waits (snapshot.py), the ledger and the archive as they
stood then, no row of the log behind the snapshot's end. `Version` says which. The views are those of view_sql.py, and a
view is prepared only when a query names it. The ledger's view goes on to the end of the log by itself, so it is
complete without the ledger job, as far back as the log is kept.

DuckDB reads the rows of tables where they lie, through Arrow: columns and row groups that a query does not need are
not read. The session writes what comes from the log to a file of its own, so that memory holds a batch of it, not all.

Read only: one SELECT (or EXPLAIN) at a time, on a database in memory without access to files or the network. Refuses
everything else by name. `memory_bytes` bounds DuckDB; what exceeds it goes to a temporary folder where DuckDB can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.errors import NotFound, OverLimit, RequestError, TimeballError
from timeball.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA, LEDGER_APP_ID, read_spans
from timeball.pipeline.table_store import ALWAYS, Due, as_dataset, files_dataset, files_gone, table_files
from timeball.pipeline.views import view_sql
from timeball.pipeline.views.due_histogram import Load, count_due
from timeball.pipeline.views.snapshot import Snapshot, Version

T = TypeVar("T")

MEMORY_BYTES = 1 << 30
LOG_ROWS = 100_000  # of the log's end in the view `log`
BATCH_ROWS = 8_192
INTERRUPT_S = 0.1
_WAITING_SCHEMA = pa.schema(
    [*(TABLE_SCHEMA.field(name) for name in view_sql.PENDING_COLUMNS), pa.field("place", pa.string())]
)


class Answer(msgspec.Struct, frozen=True):
    """Rows as batches, to be read once while the session is open."""

    version: Version
    rows: pa.RecordBatchReader


def view_columns() -> dict[str, list[str]]:
    """Return every view with its columns. (What the ledger and archive jobs add to their tables comes on top.)"""
    bases = {
        "waiting_rows": _WAITING_SCHEMA,
        "table_rows": TABLE_SCHEMA,
        "ledger_events": EVENT_SCHEMA,
        "archive_rows": ARCHIVE_SCHEMA,
        "log_rows": READ_SCHEMA,
    }
    with tempfile.TemporaryDirectory() as scratch, _open_database(Path(scratch), MEMORY_BYTES) as database:
        for base, schema in bases.items():
            database.register(base, schema.empty_table())
        texts = view_sql.definitions("duckdb", {base: schema.names for base, schema in bases.items()})
        return {view: list(database.sql(texts[view]).columns) for view in view_sql.VIEWS}


class SqlSession:
    """Queries on one version. Use as a context manager.

    The snapshot is given, or chosen by `version`, `upcoming` and `table_uri` (Snapshot.pin). `due` cuts the view
    `pending` to promises due within these bounds; without `bodies` it has no column `body`, and none is fetched for it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        snapshot: Snapshot | None = None,
        version: int | None = None,
        upcoming: bool = False,
        table_uri: str | None = None,
        bodies: bool = True,
        due: Due = ALWAYS,
        memory_bytes: int = MEMORY_BYTES,
        log_rows: int = LOG_ROWS,
    ) -> None:
        self._log_rows = log_rows
        self._memory_bytes = memory_bytes
        self._columns: dict[str, list[str]] = {}  # of the relations there are
        self._promise_columns = [name for name in view_sql.PENDING_COLUMNS if bodies or name != "body"]
        with ExitStack() as opened:
            self._scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="timeball-sql-")))
            self._database = opened.enter_context(_open_database(self._scratch, memory_bytes))
            self._worker = opened.enter_context(ThreadPoolExecutor(1, "timeball-sql"))
            self._broker = opened.enter_context(Endpoint(endpoint, patience_s=0))
            self.snapshot = snapshot or Snapshot.pin(
                self._broker, version=version, upcoming=upcoming, table_uri=table_uri
            )
            self._opened = opened.pop_all()
        self.due = due
        self.version = self.snapshot.shown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and the connection; rows not read yet are lost."""
        self._opened.close()

    def run(self, text: str) -> Answer:
        """Answer one SELECT; RequestError names its fault and the views there are."""
        try:
            self._check(text)
            self._prepare(view_sql.named(text))
            rows = self._work(lambda: self._database.sql(text).to_arrow_reader(BATCH_ROWS))
        except duckdb.Error as error:
            raise self._plain(error) from error
        return Answer(self.version, pa.RecordBatchReader.from_batches(rows.schema, self._read(rows)))

    def due_load(self, *, by_topic: bool = False) -> Load:
        """Count what waits by the second it is due."""
        return count_due(lambda text: self.run(text).rows.read_all(), by_topic=by_topic)

    def _read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        """Read on; DuckDB works while it is read, so it may fail here."""
        try:
            while (batch := self._work(lambda: next(rows, None))) is not None:
                yield batch
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._plain(error) from error

    def _work(self, call: Callable[[], T]) -> T:
        """Let DuckDB work on a thread of its own: Ctrl-C reaches this one at once, which interrupts the query."""
        future = self._worker.submit(call)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.done():  # it may come before the query has begun
                self._database.interrupt()
                wait([future], INTERRUPT_S)
            raise

    def _check(self, text: str) -> None:
        statements = self._database.extract_statements(text)
        if len(statements) != 1:
            raise RequestError(f"{len(statements)} statements: one query at a time")
        allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if statements[0].type not in allowed:
            raise RequestError(
                f"only SELECT: the views cannot be changed ({statements[0].type.name} refused)"
            )

    def _plain(self, error: Exception) -> TimeballError:
        text = str(error)
        if "FileNotFoundError" in text or isinstance(error, FileNotFoundError):
            return files_gone(self.snapshot.uri, error)
        if "Out of Memory" in text:
            return OverLimit(
                f"the query needs more than {self._memory_bytes:,} bytes of memory: allow more, or ask for less"
            )
        sentence = " ".join(line.strip() for line in text.split("\n\n")[0].splitlines() if line.strip())
        views = f"; views: {', '.join(view_sql.VIEWS)}" if "Catalog Error" in text else ""
        return RequestError(f"SQL: {sentence}{views}")

    # ---- relations ------------------------------------------------------------------------------------------

    def _prepare(self, names: Iterable[str]) -> None:
        """Make the views that are named, and the relations they stand on."""
        for base in view_sql.needed_bases(names):
            if base not in self._columns:
                getattr(self, f"_make_{base}")()
                described = self._database.sql(f"select * from {base} limit 0")
                self._columns[base] = list(described.columns)
        for view, query in view_sql.definitions("duckdb", self._columns).items():
            self._database.execute(f"create or replace view {view} as {query}")

    def _make_waiting_rows(self) -> None:
        shot = self.snapshot
        ledger = shot.open_beside("ledger") if shot.first_seq > 1 else None
        cancels = EVENT_SCHEMA.empty_table() if ledger is None else as_dataset(ledger, EVENT_SCHEMA)
        self._database.register("ledger_rows", cancels)
        bounds = view_sql.clipped(shot, self.due)
        paths = [file.path for file in table_files(shot.uri, shot.version) if file.may_hold(bounds)]
        self._database.register("waiting_table_rows", files_dataset(shot.uri, paths))
        for name in ("settled_rows", "moved_rows", "tail_rows", "level_rows"):
            self._fetch(name, shot.watermark)
        query = view_sql.waiting_sql(shot, self._promise_columns, self.due)
        self._database.execute(f"create view waiting_rows as {query}")

    def _fetch(self, name: str, marked_seq: int) -> None:
        """Make a relation of the log; one that does not begin where the log does begins at `marked_seq`."""
        rows = view_sql.LOG_RELATIONS[name]
        columns = view_sql.log_columns(name, self._promise_columns)
        begin, end = self.snapshot.log_range(0 if rows.begin == "first" else marked_seq)
        self._spool(name, begin, end, rows.kinds, columns, rows.placed)

    def _spool(
        self,
        name: str,
        begin: int,
        end: int,
        kinds: Sequence[int] | None,
        columns: Sequence[str],
        placed: bool | None = None,
    ) -> None:
        """Write rows of the log to a file of this session, a relation that can be read more than once."""
        schema = pa.schema([READ_SCHEMA.field(column) for column in columns])
        path = self._scratch / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            if begin < end:
                for batch in self._broker.read_log(begin, end, kinds, columns=columns, placed=placed):
                    writer.write_batch(batch.select(columns))
        self._database.register(name, ds.dataset(str(path), schema, format="ipc"))

    def _make_table_rows(self) -> None:
        shot = self.snapshot
        paths = [file.path for file in table_files(shot.uri, shot.version)]
        self._database.register("table_rows", files_dataset(shot.uri, paths))

    def _make_ledger_events(self) -> None:
        """Make the ledger up to where it has come, and go on with the log."""
        shot = self.snapshot
        begin, kept = 0, ""
        table = shot.open_beside("ledger")
        if table is not None:
            begin = int(table.transaction_version(LEDGER_APP_ID) or 0)
            self.version = msgspec.structs.replace(self.version, ledger=table.version())
            self._database.register("ledger_table", as_dataset(table, EVENT_SCHEMA))
            kept = f"select * from ledger_table where event_seq < {shot.end_seq} union all by name "
        self._fetch("event_rows", begin)
        self._database.register("span_rows", read_spans(self._broker, *shot.log_range(begin)))
        self._database.execute(f"create view ledger_events as {kept}({view_sql.events_sql()})")

    def _make_archive_rows(self) -> None:
        table = self.snapshot.open_beside("archive")
        if table is None:
            raise NotFound(
                "there is no archive beside the pending table; 'timeball pipeline run archive' makes one"
            )
        self.version = msgspec.structs.replace(self.version, archive=table.version())
        self._database.register("archive_table", as_dataset(table, ARCHIVE_SCHEMA))
        self._database.execute(
            f"create view archive_rows as select * from archive_table where seq < {self.snapshot.end_seq}"
        )

    def _make_log_rows(self) -> None:
        begin, end = self.snapshot.log_range(self.snapshot.end_seq - self._log_rows)
        self._spool("log_rows", begin, end, None, READ_SCHEMA.names)


def _open_database(scratch: Path, memory_bytes: int) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory that reaches neither files nor the network."""
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
