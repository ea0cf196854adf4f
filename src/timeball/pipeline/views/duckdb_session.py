"""The views on DuckDB in this process: a quick look that needs neither Spark nor Java.

Of a cluster a view has the rows of all groups, and with several groups a column "group" (a word of SQL: in quotes).

Everything a query sees is of one version of each group: one snapshot of what waits (snapshot.py), the ledger and the
archive as they stood then, no row of the log behind the snapshot's end. `Version` says which. The views are those of
view_sql.py, and a view is prepared only when a query names it. The ledger's view goes on to the end of the log by
itself, so it is complete without the ledger job, as far back as the log is kept.

Read only: one SELECT (or EXPLAIN) at a time, on a database in memory without access to files or the network. Refuses
everything else by name. `memory_bytes` bounds DuckDB; what exceeds it goes to a temporary folder where DuckDB can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import duckdb
import msgspec
import pyarrow as pa

from timeball.errors import OverLimit, RequestError, TimeballError
from timeball.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.groups import Group, groups_of, place_of
from timeball.pipeline.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA
from timeball.pipeline.table_store import ALWAYS, Due, files_gone
from timeball.pipeline.views import view_sql
from timeball.pipeline.views.duckdb_relations import Chosen, Relations, united
from timeball.pipeline.views.due_histogram import Load, count_due
from timeball.pipeline.views.snapshot import Snapshot, Version, all_versions, check_version

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
        self._memory_bytes = memory_bytes
        columns = tuple(name for name in view_sql.PENDING_COLUMNS if bodies or name != "body")
        chosen = Chosen(columns, due, log_rows)
        with ExitStack() as opened:
            scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="timeball-sql-")))
            self._database = opened.enter_context(_open_database(scratch, memory_bytes))
            self._worker = opened.enter_context(ThreadPoolExecutor(1, "timeball-sql"))
            broker = opened.enter_context(Endpoint(endpoint, patience_s=0))
            groups = [Group("", endpoint)] if snapshot else groups_of(broker.status(), endpoint)
            check_version(version, len(groups))
            self._groups: list[Relations] = []
            for number, group in enumerate(groups):
                if len(groups) > 1:
                    broker = opened.enter_context(Endpoint(group.endpoint, patience_s=0))
                uri = place_of("--table-uri", table_uri, group.name, len(groups))
                shot = snapshot or Snapshot.pin(broker, version=version, upcoming=upcoming, table_uri=uri)
                place = number if len(groups) > 1 else None
                self._groups.append(Relations(self._database, scratch, broker, group, shot, chosen, place))
            self._opened = opened.pop_all()
        self.version = all_versions({each.group.name: each.version for each in self._groups})

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
            return files_gone(" or ".join(each.snapshot.uri for each in self._groups), error)
        if "Out of Memory" in text:
            return OverLimit(
                f"the query needs more than {self._memory_bytes:,} bytes of memory: allow more, or ask for less"
            )
        sentence = " ".join(line.strip() for line in text.split("\n\n")[0].splitlines() if line.strip())
        views = f"; views: {', '.join(view_sql.VIEWS)}" if "Catalog Error" in text else ""
        return RequestError(f"SQL: {sentence}{views}")

    def _prepare(self, names: list[str]) -> None:
        """Make the views that are named, and the relations they stand on."""
        for relations in self._groups:
            relations.make(view_sql.needed_bases(names))
        self.version = all_versions({each.group.name: each.version for each in self._groups})
        for view, query in self._views().items():
            self._database.execute(f"create or replace view {view} as {query}")

    def _views(self) -> dict[str, str]:
        """Return view -> query; of several groups the rows of all, with a column `group`."""
        if len(self._groups) == 1:
            return self._groups[0].views()
        found = {each.group.name: each.views() for each in self._groups}
        names = next(iter(found.values()))
        return {view: united({group: views[view] for group, views in found.items()}) for view in names}


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
    # Of rows that Arrow brings DuckDB does not know how many there are, and may hold all that waits to join it with the
    # few that were moved. In the views' texts, and in a query, it now holds what stands on the right.
    database.execute("set disabled_optimizers = 'build_side_probe_side'")
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")
    return database
