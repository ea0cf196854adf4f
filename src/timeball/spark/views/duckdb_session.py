"""Queries on the views with DuckDB in this process, without Spark and Java.

In a cluster, a view has the rows of all groups. With several groups it has a column "group". The name needs quotes,
because GROUP is a keyword of SQL.

A query sees one version of each group: one snapshot of the pending messages (snapshot.py), the ledger and archive as of
then, and no row of the log after the snapshot's end. `Version` describes it. The views are those of view_sql.py. A view
is prepared when the first query names it. The view of the ledger adds the events up to the end of the log. So it is
complete even without the ledger job, as far back as the log is kept.

Sessions are read-only: one SELECT (or EXPLAIN) at a time, on a database in memory without access to files or the
network. All other statements are refused. `memory_bytes` limits DuckDB's memory. Beyond it, DuckDB uses a temporary
folder where it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.model.errors import NotFound, OverLimit, RequestError, TimeballError
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.spark.endpoint import GROUP, Endpoint, Group, group_table_uri, groups_of
from timeball.spark.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA, read_events
from timeball.spark.table_store import (
    ANY_DUE_TIME,
    Due,
    as_dataset,
    deleted_file_error,
    files_dataset,
    table_files,
)
from timeball.spark.views import broker_state, view_sql
from timeball.spark.views.due_histogram import Load, count_due
from timeball.spark.views.snapshot import Snapshot, Version, all_versions, check_version

T = TypeVar("T")

MEMORY_BYTES = 1 << 30
LOG_ROWS = 100_000  # default number of rows, from the log's end, in the view `log`
BATCH_ROWS = 8_192
INTERRUPT_S = 0.1  # time between attempts to interrupt a query
_WAITING_SCHEMA = pa.schema(
    [*(TABLE_SCHEMA.field(name) for name in view_sql.PENDING_COLUMNS), pa.field("place", pa.string())]
)


class Answer(msgspec.Struct, frozen=True):
    """The result of a query. The rows can be read once, while the session is open."""

    version: Version
    rows: pa.RecordBatchReader


def view_columns() -> dict[str, list[str]]:
    """List {view: columns}, without the columns that the ledger and archive jobs add to their tables."""
    bases = {
        "waiting_rows": _WAITING_SCHEMA,
        "table_rows": TABLE_SCHEMA,
        "ledger_events": EVENT_SCHEMA,
        "archive_rows": ARCHIVE_SCHEMA,
        "log_rows": READ_SCHEMA,
        "schedule_rows": broker_state.SCHEDULE_SCHEMA,
        "selection_rows": broker_state.SELECTION_SCHEMA,
    }
    with tempfile.TemporaryDirectory() as scratch, open_database(Path(scratch), MEMORY_BYTES) as database:
        for base, schema in bases.items():
            database.register(base, schema.empty_table())
        texts = view_sql.definitions("duckdb", {base: schema.names for base, schema in bases.items()})
        return {view: list(database.sql(texts[view]).columns) for view in view_sql.VIEWS}


class SqlSession:
    """A session of queries on one version. Use it as a context manager.

    The version is that of `snapshot`, or else of a new one (`version`, `upcoming` and `table_uri`: see Snapshot.pin).
    The view `pending` has only scheduled messages with a due time within `due`. Without `bodies` it has no column
    `body`, and no bodies are fetched for it. `memory_bytes`: of DuckDB. `log_rows`: the rows of the view `log`.

    DuckDB runs in the session's own thread.
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
        due: Due = ANY_DUE_TIME,
        memory_bytes: int = MEMORY_BYTES,
        log_rows: int = LOG_ROWS,
    ) -> None:
        """See the class for the arguments. Opens the database and the connections, and takes the snapshots.

        Raises RequestError for a version number with several groups, SetupError for a `table_uri` that the groups would
        share, and the errors of `groups_of` and Snapshot.pin.
        """
        self._memory_bytes = memory_bytes
        columns = tuple(name for name in view_sql.PENDING_COLUMNS if bodies or name != "body")
        session_options = SessionOptions(columns, due, log_rows)
        with ExitStack() as resources:
            scratch = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="timeball-sql-")))
            self._database = resources.enter_context(open_database(scratch, memory_bytes))
            self._worker = resources.enter_context(ThreadPoolExecutor(1, "timeball-sql"))
            broker = resources.enter_context(Endpoint(endpoint, patience_s=0))
            groups = [Group("", endpoint)] if snapshot else groups_of(broker.status(), endpoint)
            check_version(version, len(groups))
            self._groups: list[Relations] = []
            for number, group in enumerate(groups):
                if len(groups) > 1:
                    broker = resources.enter_context(Endpoint(group.endpoint, patience_s=0))
                uri = group_table_uri("--table-uri", table_uri, group.name, len(groups))
                shot = snapshot or Snapshot.pin(broker, version=version, upcoming=upcoming, table_uri=uri)
                number_of_group = number if len(groups) > 1 else None
                self._groups.append(
                    Relations(self._database, scratch, broker, group, shot, session_options, number_of_group)
                )
            self._resources = resources.pop_all()
        self.version = all_versions({relations.group.name: relations.version for relations in self._groups})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and the connections. Rows that are not read yet are lost."""
        self._resources.close()

    def run(self, text: str) -> Answer:
        """Run one SELECT.

        Raises RequestError for a bad query (with the list of views, if it names an unknown one), OutOfRange when a file
        of the version has been deleted, and OverLimit when the memory is not enough.
        """
        try:
            self._check(text)
            self._prepare(view_sql.views_in_query(text))
            rows = self._run_in_worker(lambda: self._database.sql(text).to_arrow_reader(BATCH_ROWS))
        except duckdb.Error as error:
            raise self._to_timeball_error(error) from error
        return Answer(self.version, pa.RecordBatchReader.from_batches(rows.schema, self._read(rows)))

    def due_load(self, *, by_topic: bool = False) -> Load:
        """Count the pending messages by the second in which they are due. Raises the errors of `run`."""
        return count_due(lambda text: self.run(text).rows.read_all(), by_topic=by_topic)

    def _read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        """Yield the batches. DuckDB computes them during the read, so some of its errors appear only here."""
        try:
            while (batch := self._run_in_worker(lambda: next(rows, None))) is not None:
                yield batch
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._to_timeball_error(error) from error

    def _run_in_worker(self, call: Callable[[], T]) -> T:
        """Run a call in DuckDB's thread. Ctrl-C reaches the caller's thread, which interrupts the query."""
        future = self._worker.submit(call)
        try:
            return future.result()
        except KeyboardInterrupt:
            # Repeated, because an interrupt before the query has begun has no effect.
            while not future.done():
                self._database.interrupt()
                wait([future], INTERRUPT_S)
            raise

    def _check(self, text: str) -> None:
        """Raise RequestError unless the text is a single SELECT or EXPLAIN."""
        statements = self._database.extract_statements(text)
        if len(statements) != 1:
            raise RequestError(f"{len(statements)} statements: one query at a time")
        allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if statements[0].type not in allowed:
            raise RequestError(
                f"only SELECT: the views cannot be changed ({statements[0].type.name} refused)"
            )

    def _to_timeball_error(self, error: Exception) -> TimeballError:
        """Convert an error of DuckDB, Arrow or the system.

        Returns an OutOfRange for a deleted file, an OverLimit without memory, otherwise a RequestError.
        """
        text = str(error)
        if "FileNotFoundError" in text or isinstance(error, FileNotFoundError):
            return deleted_file_error(" or ".join(each.snapshot.uri for each in self._groups), error)
        if "Out of Memory" in text:
            return OverLimit(
                f"the query needs more than {self._memory_bytes:,} bytes of memory: allow more, or ask for less"
            )
        sentence = " ".join(line.strip() for line in text.split("\n\n")[0].splitlines() if line.strip())
        views = f"; views: {', '.join(view_sql.VIEWS)}" if "Catalog Error" in text else ""
        return RequestError(f"SQL: {sentence}{views}")

    def _prepare(self, names: list[str]) -> None:
        """Create these views and their base relations in the database."""
        for relations in self._groups:
            relations.make(view_sql.base_relations_of(names))
        self.version = all_versions({each.group.name: each.version for each in self._groups})
        for view, query in self._views().items():
            self._database.execute(f"create or replace view {view} as {query}")

    def _views(self) -> dict[str, str]:
        """Build {view: query}. With several groups, a view has the rows of all groups and a column `group`."""
        if len(self._groups) == 1:
            return self._groups[0].views()
        views_by_group = {relations.group.name: relations.views() for relations in self._groups}
        names = next(iter(views_by_group.values()))
        return {
            view: union_of_groups({group: views[view] for group, views in views_by_group.items()})
            for view in names
        }


def open_database(scratch: Path, memory_bytes: int) -> duckdb.DuckDBPyConnection:
    """Open an empty database in memory, without access to files or the network."""
    database = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{memory_bytes}B",
            "temp_directory": str(scratch / "spill"),
            "python_enable_replacements": False,  # otherwise a query could read this program's variables
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    database.execute("set timezone = 'UTC'")
    for macro in view_sql.DUCKDB_MACROS:
        database.execute(macro)
    # DuckDB does not know the number of rows of an Arrow relation. So it might hold all pending messages in memory to
    # join them with the few that were moved. Without this optimizer it holds the right side of each join.
    database.execute("set disabled_optimizers = 'build_side_probe_side'")
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")
    return database


# ---- the base relations of the views, for one group and one snapshot ------------------------------------------
# DuckDB reads the files of tables through Arrow, without a copy of them. Rows of the log are first written to a
# temporary file of the session, so that memory holds only one batch of them. Each relation is made when a view first
# needs it. All groups share one database, so the names of a group's relations end in the group's number.


class SessionOptions(msgspec.Struct, frozen=True):
    """The options of a session: columns of messages, bounds of due times, number of rows from the log's end."""

    scheduled_columns: tuple[str, ...]
    due: Due
    log_rows: int


class Relations:
    """The relations of one group at one snapshot, each made when it is first needed."""

    def __init__(
        self,
        database: duckdb.DuckDBPyConnection,
        scratch: Path,
        broker: Endpoint,
        group: Group,
        snapshot: Snapshot,
        session_options: SessionOptions,
        number: int | None,
    ) -> None:
        """`number`: the suffix of the relations' names, or None if there is only one group."""
        self.group, self.snapshot, self.version = group, snapshot, snapshot.describe_version()
        self.columns: dict[str, list[str]] = {}  # of the relations made so far
        self._database, self._scratch, self._broker = database, scratch, broker
        self._options, self._number = session_options, number
        self._makers: dict[str, Callable[[], None]] = {
            "waiting_rows": self._make_pending_rows,
            "table_rows": self._make_table_rows,
            "ledger_events": self._make_ledger_events,
            "archive_rows": self._make_archive_rows,
            "log_rows": self._make_log_rows,
            "schedule_rows": self._make_schedule_rows,
            "selection_rows": self._make_selection_rows,
        }

    def name(self, relation: str) -> str:
        """Build the name of this group's relation in the database."""
        return relation if self._number is None else f"{relation}_{self._number}"

    def make(self, bases: Iterable[str]) -> None:
        """Make the given relations of view_sql.BASES, unless they exist."""
        for base in bases:
            if base not in self.columns:
                self._makers[base]()
                described = self._database.sql(f"select * from {self.name(base)} limit 0")
                self.columns[base] = list(described.columns)

    def views(self) -> dict[str, str]:
        """Build {view: query} for the views whose relations exist."""
        return view_sql.definitions("duckdb", self.columns, self.name)

    def _register(self, relation: str, rows: object) -> None:
        self._database.register(self.name(relation), rows)

    def _make_view(self, relation: str, query: str) -> None:
        self._database.execute(f"create view {self.name(relation)} as {query}")

    def _make_pending_rows(self) -> None:
        """Make the relation of pending messages from files of the table, the log, and events in the ledger."""
        shot, due = self.snapshot, self._options.due
        # The whole log is kept if retention has never removed rows. Then the ledger has no other events.
        ledger = shot.open_ledger_or_archive("ledger") if shot.first_seq > 1 else None
        events = EVENT_SCHEMA.empty_table() if ledger is None else as_dataset(ledger, EVENT_SCHEMA)
        self._register("ledger_rows", events)
        bounds = view_sql.clip_to_snapshot(shot, due)
        paths = [file.path for file in table_files(shot.uri, shot.version) if file.may_hold(bounds)]
        self._register("waiting_table_rows", files_dataset(shot.uri, paths))
        for name in view_sql.LOG_RELATIONS:
            self._fetch(name)
        columns = self._options.scheduled_columns
        text = view_sql.pending_sql(shot, columns, due, relation=self.name, effect=self._make_effect())
        self._make_view("waiting_rows", text)

    def _make_effect(self) -> str:
        """Make the SQL function for the effect of bulk operations. Returns its name, or "" if there are none."""
        if not self.snapshot.selections:
            return ""
        name = self.name("effect_of_selections")
        types = ["BIGINT"] * 3 + ["VARCHAR"] * (len(broker_state.ARGUMENTS) - 3)
        self._database.create_function(  # type: ignore[call-overload]  # the stubs lack Arrow functions
            name, broker_state.effect_of(self.snapshot.selections), types,
            broker_state.EFFECT_SQL["duckdb"], type="arrow", null_handling="special",
        )  # fmt: skip
        return name

    def _fetch(self, name: str) -> None:
        """Make a relation of view_sql.LOG_RELATIONS, from the log's first row or the watermark on."""
        rows = view_sql.LOG_RELATIONS[name]
        columns = view_sql.log_columns(name, self._options.scheduled_columns)
        begin, end = self.snapshot.log_range(0 if rows.begin == "first" else self.snapshot.watermark)
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
        """Make a relation of the rows begin <= seq < end of the log, with these columns.

        `kinds`: None for all. `placed`: as in Endpoint.read_log.
        """
        schema = pa.schema([READ_SCHEMA.field(column) for column in columns])
        rows: Iterable[pa.RecordBatch] = ()
        if begin < end:
            rows = self._broker.read_log(begin, end, kinds, columns=columns, placed=placed)
        self._write_relation(name, schema, (batch.select(columns) for batch in rows))

    def _write_relation(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Write batches to a file of this session, as a relation that can be read more than once."""
        path = self._scratch / f"{self.name(name)}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        self._register(name, ds.dataset(str(path), schema, format="ipc"))

    def _make_table_rows(self) -> None:
        shot = self.snapshot
        paths = [file.path for file in table_files(shot.uri, shot.version)]
        self._register("table_rows", files_dataset(shot.uri, paths))

    def _make_ledger_events(self) -> None:
        """Make the relation of events: first those in the ledger's table, then newer ones from the log."""
        shot = self.snapshot
        table, recorded = shot.open_ledger_or_archive("ledger"), ""
        fresh = read_events(self._broker, *shot.fresh_events_range(table))
        if table is not None:
            self.version = msgspec.structs.replace(self.version, ledger=table.version())
            self._register("ledger_table", as_dataset(table, EVENT_SCHEMA))
            recorded = f"select * from {self.name('ledger_table')} where event_seq < {shot.end_seq} union all by name "
        self._write_relation("fresh_events", EVENT_SCHEMA, fresh)
        self._make_view("ledger_events", f"{recorded}(select * from {self.name('fresh_events')})")

    def _make_archive_rows(self) -> None:
        """Make the relation of the archive. Raises NotFound if there is none."""
        table = self.snapshot.open_ledger_or_archive("archive")
        if table is None:
            of_group = f" of group {self.group.name}" if self._number is not None else ""
            raise NotFound(
                f"there is no archive beside the pending table{of_group}; 'timeball pipeline run archive' makes one"
            )
        self.version = msgspec.structs.replace(self.version, archive=table.version())
        self._register("archive_table", as_dataset(table, ARCHIVE_SCHEMA))
        rows = f"select * from {self.name('archive_table')} where seq < {self.snapshot.end_seq}"
        self._make_view("archive_rows", rows)

    def _make_schedule_rows(self) -> None:
        rows = broker_state.schedule_rows(self._broker.schedules())
        self._write_relation("schedule_rows", broker_state.SCHEDULE_SCHEMA, rows)

    def _make_selection_rows(self) -> None:
        rows = broker_state.selection_rows(self._broker.selections())
        self._write_relation("selection_rows", broker_state.SELECTION_SCHEMA, [rows])

    def _make_log_rows(self) -> None:
        begin, end = self.snapshot.log_range(self.snapshot.end_seq - self._options.log_rows)
        self._spool("log_rows", begin, end, None, READ_SCHEMA.names)


def union_of_groups(queries: Mapping[str, str]) -> str:
    """Combine {group: query} into one query for the rows of all groups, with the group's name in a column `group`."""
    named = (f"select *, '{group}' as \"{GROUP}\" from ({query})" for group, query in queries.items())
    return " union all by name ".join(named)
