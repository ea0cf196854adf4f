"""The base relations of the views in DuckDB: those of one group, as of one snapshot.

DuckDB reads the files of tables through Arrow, without a copy of them. Rows of the log are first written to a temporary
file of the session, so that memory holds only one batch of them. Each relation is made when a view first needs it. All
groups share one database, so the names of a group's relations end in the group's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.model.errors import NotFound
from timeball.model.message import READ_SCHEMA
from timeball.spark.endpoint import Endpoint
from timeball.spark.groups import GROUP, Group
from timeball.spark.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA, LEDGER_APP_ID, read_events
from timeball.spark.table_store import Due, as_dataset, files_dataset, table_files
from timeball.spark.views import view_sql
from timeball.spark.views.snapshot import Snapshot


class Chosen(msgspec.Struct, frozen=True):
    """The choices of a session, for each group: columns of promises, bounds of due times, rows at the log's end."""

    promise_columns: tuple[str, ...]
    due: Due
    log_rows: int


class Relations:
    """The relations of one group. `number` is the suffix of their names, or None if there is only one group."""

    def __init__(
        self,
        database: duckdb.DuckDBPyConnection,
        scratch: Path,
        broker: Endpoint,
        group: Group,
        snapshot: Snapshot,
        chosen: Chosen,
        number: int | None,
    ) -> None:
        self.group, self.snapshot, self.version = group, snapshot, snapshot.shown()
        self.columns: dict[str, list[str]] = {}  # of the relations made so far
        self._database, self._scratch, self._broker = database, scratch, broker
        self._chosen, self._number = chosen, number
        self._makers: dict[str, Callable[[], None]] = {
            "waiting_rows": self._make_waiting_rows,
            "table_rows": self._make_table_rows,
            "ledger_events": self._make_ledger_events,
            "archive_rows": self._make_archive_rows,
            "log_rows": self._make_log_rows,
        }

    def name(self, relation: str) -> str:
        """Return the name of this group's relation in the database."""
        return relation if self._number is None else f"{relation}_{self._number}"

    def make(self, bases: Iterable[str]) -> None:
        """Make the given relations of view_sql.BASES, unless they exist."""
        for base in bases:
            if base not in self.columns:
                self._makers[base]()
                described = self._database.sql(f"select * from {self.name(base)} limit 0")
                self.columns[base] = list(described.columns)

    def views(self) -> dict[str, str]:
        """Return {view: query} for the views whose relations exist."""
        return view_sql.definitions("duckdb", self.columns, self.name)

    def _register(self, relation: str, rows: object) -> None:
        self._database.register(self.name(relation), rows)

    def _make_view(self, relation: str, query: str) -> None:
        self._database.execute(f"create view {self.name(relation)} as {query}")

    def _make_waiting_rows(self) -> None:
        shot, due = self.snapshot, self._chosen.due
        ledger = shot.open_beside("ledger") if shot.first_seq > 1 else None
        cancels = EVENT_SCHEMA.empty_table() if ledger is None else as_dataset(ledger, EVENT_SCHEMA)
        self._register("ledger_rows", cancels)
        bounds = view_sql.clipped(shot, due)
        paths = [file.path for file in table_files(shot.uri, shot.version) if file.may_hold(bounds)]
        self._register("waiting_table_rows", files_dataset(shot.uri, paths))
        for name in ("settled_rows", "moved_rows", "tail_rows", "level_rows"):
            self._fetch(name, shot.watermark)
        columns = self._chosen.promise_columns
        self._make_view("waiting_rows", view_sql.waiting_sql(shot, columns, due, relation=self.name))

    def _fetch(self, name: str, marked_seq: int) -> None:
        """Make a relation of view_sql.LOG_RELATIONS, from the log's first row on, or else from `marked_seq` on."""
        rows = view_sql.LOG_RELATIONS[name]
        columns = view_sql.log_columns(name, self._chosen.promise_columns)
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
        """Make a relation of the rows begin <= seq < end of the log."""
        schema = pa.schema([READ_SCHEMA.field(column) for column in columns])
        rows: Iterable[pa.RecordBatch] = ()
        if begin < end:
            rows = self._broker.read_log(begin, end, kinds, columns=columns, placed=placed)
        self._keep(name, schema, (batch.select(columns) for batch in rows))

    def _keep(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
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
        begin, kept = 0, ""
        table = shot.open_beside("ledger")
        if table is not None:
            begin = int(table.transaction_version(LEDGER_APP_ID) or 0)
            self.version = msgspec.structs.replace(self.version, ledger=table.version())
            self._register("ledger_table", as_dataset(table, EVENT_SCHEMA))
            kept = f"select * from {self.name('ledger_table')} where event_seq < {shot.end_seq} union all by name "
        self._keep("fresh_events", EVENT_SCHEMA, read_events(self._broker, *shot.log_range(begin)))
        self._make_view("ledger_events", f"{kept}(select * from {self.name('fresh_events')})")

    def _make_archive_rows(self) -> None:
        table = self.snapshot.open_beside("archive")
        if table is None:
            of_group = f" of group {self.group.name}" if self._number is not None else ""
            raise NotFound(
                f"there is no archive beside the pending table{of_group}; 'timeball pipeline run archive' makes one"
            )
        self.version = msgspec.structs.replace(self.version, archive=table.version())
        self._register("archive_table", as_dataset(table, ARCHIVE_SCHEMA))
        rows = f"select * from {self.name('archive_table')} where seq < {self.snapshot.end_seq}"
        self._make_view("archive_rows", rows)

    def _make_log_rows(self) -> None:
        begin, end = self.snapshot.log_range(self.snapshot.end_seq - self._chosen.log_rows)
        self._spool("log_rows", begin, end, None, READ_SCHEMA.names)


def united(queries: Mapping[str, str]) -> str:
    """Combine {group: query} to one query for the rows of all groups, with a column for the group's name."""
    named = (f"select *, '{group}' as \"{GROUP}\" from ({query})" for group, query in queries.items())
    return " union all by name ".join(named)
