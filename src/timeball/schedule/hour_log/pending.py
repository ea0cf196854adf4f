"""The live files of the pending table, as the schedule sees them: which are near, and rows of a due range.

Files are immutable, so the reader thread works on a tuple taken at the start of a gather while the event loop
goes on replacing the set. A file is opened when the horizon comes near and forgotten when all it holds is
behind it and settled.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.files import Files
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, build_rows
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile, Position

WINDOW_ROWS_MAX = 8_000_000  # positions looked at in one gather: 16 bytes each


class PendingFiles:
    """The set of live files; replaced, never changed in place."""

    def __init__(self, files: Files, entries: list[FileEntry]) -> None:
        self._files = files
        self._live = {entry.path: DataFile(files, entry) for entry in entries}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def rows(self) -> int:
        """Rows in all live files, settled ones included."""
        return sum(file.entry.rows for file in self._live.values())

    def all(self) -> list[DataFile]:
        """All live files."""
        return list(self._live.values())

    def live_entries(self) -> list[FileEntry]:
        """Entries of all live files."""
        return [file.entry for file in self._live.values()]

    def entries(self, paths: list[str]) -> list[FileEntry]:
        """Entries of the named files that are live."""
        return [self._live[path].entry for path in paths if path in self._live]

    def apply(self, attachment: Attachment) -> list[DataFile]:
        """Take files in and out; returns the new ones."""
        fresh = [DataFile(self._files, entry) for entry in attachment.files]
        gone = set(attachment.removes)
        self._live = {path: file for path, file in self._live.items() if path not in gone}
        self._live.update({file.entry.path: file for file in fresh})
        return fresh

    def near(self, low_ms: int, high_ms: int) -> list[DataFile]:
        """Files whose due range touches [low, high]."""
        return [
            file
            for file in self._live.values()
            if file.entry.min_due_ms <= high_ms and file.entry.max_due_ms >= low_ms
        ]

    def next_due_ms(self, from_ms: int) -> int | None:
        """A lower bound of the first instant at or after `from_ms`."""
        starts = [
            max(file.entry.min_due_ms, from_ms)
            for file in self._live.values()
            if file.entry.max_due_ms >= from_ms
        ]
        return min(starts, default=None)

    def behind(self, due_ms: int) -> list[FileEntry]:
        """Files that hold nothing due at or after `due_ms`."""
        return [file.entry for file in self._live.values() if file.entry.max_due_ms < due_ms]


def bounded_window(files: list[DataFile], low: Position, high: Position) -> Position:
    """`high`, or less when the statistics say that too many rows may lie in between."""
    while high[0] - low[0] > 1:
        if sum(file.row_count_up_to(low[0], high[0]) for file in files) <= WINDOW_ROWS_MAX:
            return high
        middle = max(low[0] + 1, low[0] + (high[0] - low[0]) // 2)
        if middle >= high[0]:
            return high
        high = (middle, 0)
    return high


def positions(files: list[DataFile], low: Position, high: Position) -> tuple[Int64Array, Int64Array]:
    """(due_ms, seq) of all rows of these files in [low, high), sorted."""
    pairs = [file.positions_between(low, high) for file in files]
    due = np.concatenate([d for d, _ in pairs]) if pairs else np.empty(0, np.int64)
    seq = np.concatenate([s for _, s in pairs]) if pairs else np.empty(0, np.int64)
    order = np.lexsort((seq, due))
    return due[order], seq[order]


def load(files: list[DataFile], low: Position, high: Position) -> pa.RecordBatch | None:
    """Rows of these files in [low, high) as READ_SCHEMA promises, unsorted across files; None when none."""
    tables = [table for table in (file.rows_between(low, high) for file in files) if table.num_rows]
    if not tables:
        return None
    return as_promises(pa.concat_tables(tables))


def as_promises(rows: pa.Table) -> pa.RecordBatch:
    """TABLE_SCHEMA rows as the log would have shown them, in READ_SCHEMA."""
    rows = rows.combine_chunks()
    shared = {name: rows.column(name).chunk(0) for name in LOG_SCHEMA.names if name in rows.schema.names}
    batch = build_rows(
        rows.num_rows,
        kind=int(Kind.PROMISE),
        store_ms=rows.column("accepted_ms").chunk(0),
        **{name: column for name, column in shared.items() if name != "accepted_ms"},
    )
    return pa.RecordBatch.from_arrays([rows.column("seq").chunk(0), *batch.columns], schema=READ_SCHEMA)
