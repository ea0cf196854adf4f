"""The live files of the pending table, as the schedule sees them: which are near, and rows of a due range.

Files are immutable, so the reader thread works on a list taken at the start of a gather while the event loop
goes on replacing the set. A file is opened when a gather comes to it, closed when the horizon is more than two
hours away, and forgotten when all it holds is behind the horizon and settled. One gather comes to few files, so that
a broker that was down for a year does not open them all; only files over the same instant are read together,
however many they are, and rewriting sees to it that these are few.

What a gather has found a file not to hold is remembered as its *next* instant: a month with a row a week is looked
into once a week, and not at each half of the lead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.files import Files
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, build_rows
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile, Position

WINDOW_ROWS_MAX = 8_000_000  # positions looked at in one gather: 16 bytes each
WINDOW_FILES_MAX = 64  # files opened for one gather
OPEN_MS = 2 * limits.HOUR_MS  # how far from the horizon a file may be and stay open

_NONE = np.empty(0, np.int64)


class PendingFiles:
    """The set of live files; replaced, never changed in place. Belongs to the event loop.

    `from_ms`, where one is asked for, is the horizon.
    """

    def __init__(self, files: Files, entries: list[FileEntry]) -> None:
        self._files = files
        self._live = {entry.path: DataFile(files, entry) for entry in entries}
        self._next: dict[str, int] = {}  # of some files: before this instant there is nothing to gather
        # The last answer of `next_due_ms`, which is asked at each admit: there may be thousands of files.
        self._answered: tuple[int, int | None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    @property
    def rows(self) -> int:
        """Rows in all live files, settled ones included."""
        return sum(file.entry.rows for file in self._live.values())

    @property
    def open_files(self) -> int:
        """Live files whose footer is in memory."""
        return sum(file.is_open for file in self._live.values())

    def any_far(self, horizon_ms: int) -> bool:
        """Whether a file is open that `close_far` would close."""
        return any(file.is_open and is_far(file, horizon_ms) for file in self._live.values())

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
        kept = {path: file for path, file in self._live.items() if path not in gone}
        self._live = kept | {file.entry.path: file for file in fresh}
        self._next = {path: due_ms for path, due_ms in self._next.items() if path in self._live}
        self._answered = None
        return fresh

    def near(self, low: Position, high: Position) -> tuple[list[DataFile], Position]:
        """The files that may hold rows of [low, high), and `high`: less when these would be too many."""
        found = [(self._first_ms(file, low[0]), file) for file in self._live.values()]
        touched = sorted(
            ((first_ms, file) for first_ms, file in found if first_ms is not None and first_ms <= high[0]),
            key=lambda one: one[0],
        )
        if len(touched) > WINDOW_FILES_MAX:
            # Those due at the same instant cannot be told apart: the window holds them all.
            begins = [first_ms for first_ms, _ in touched]
            high = min(high, (max(begins[WINDOW_FILES_MAX], begins[0] + 1), 0))
        return [file for first_ms, file in touched if (first_ms, 0) < high], high

    def over(self, low_ms: int, high_ms: int) -> list[DataFile]:
        """The files that may hold rows due in [low_ms, high_ms], looked through or not."""
        return [
            file
            for file in self._live.values()
            if file.entry.min_due_ms <= high_ms and file.entry.max_due_ms >= low_ms
        ]

    def next_due_ms(self, from_ms: int) -> int | None:
        """A lower bound of the first instant at or after `from_ms`."""
        if self._answered is None or self._answered[0] != from_ms:
            found = [self._first_ms(file, from_ms) for file in self._live.values()]
            self._answered = from_ms, min((ms for ms in found if ms is not None), default=None)
        return self._answered[1]

    def learn(self, next_due_ms: dict[str, int]) -> None:
        """There is nothing to gather in these files, by path, before these instants."""
        self._next |= {path: due_ms for path, due_ms in next_due_ms.items() if path in self._live}
        self._answered = None

    def passed(self, due_ms: int) -> None:
        """What these files hold before `due_ms` is settled, or somewhere else, wherever the horizon is."""
        self.learn({path: max(due_ms, self._next.get(path, due_ms)) for path in self._live})

    def _first_ms(self, file: DataFile, from_ms: int) -> int | None:
        """A lower bound of its first instant at or after `from_ms`; None when there is none."""
        first_ms = max(self._next.get(file.entry.path, file.entry.min_due_ms), from_ms)
        return first_ms if first_ms <= file.entry.max_due_ms else None

    def behind(self, due_ms: int) -> list[FileEntry]:
        """Files that hold nothing due at or after `due_ms`."""
        return [file.entry for file in self._live.values() if file.entry.max_due_ms < due_ms]


@dataclass(frozen=True, slots=True)
class Window:
    """What a gather finds in its files: (due_ms, seq) of the rows before `high`, sorted."""

    high: Position
    due_ms: Int64Array
    seq: Int64Array
    next_due_ms: dict[str, int]  # path -> first instant from `high` on, of files without such rows


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


def survey(files: list[DataFile], low: Position, high: Position) -> Window:
    """What lies from `low` on, to `high` or as far as one gather may look (reader thread)."""
    high = bounded_window(files, low, high)
    pairs = [file.positions_between(low, high) for file in files]
    due = np.concatenate([_NONE, *(d for d, _ in pairs)])
    seq = np.concatenate([_NONE, *(s for _, s in pairs)])
    order = np.lexsort((seq, due))
    idle = [file for file, (found, _) in zip(files, pairs, strict=True) if len(found) == 0]
    ahead = ((file.entry.path, file.first_due_from(high[0])) for file in idle)
    return Window(high, due[order], seq[order], {path: ms for path, ms in ahead if ms is not None})


def close_far(files: list[DataFile], horizon_ms: int) -> None:
    """Close those that are not near the horizon (reader thread)."""
    for file in files:
        if file.is_open and is_far(file, horizon_ms):
            file.close()


def is_far(file: DataFile, horizon_ms: int) -> bool:
    """Whether all it holds is two hours from the horizon."""
    entry = file.entry
    return entry.max_due_ms < horizon_ms - OPEN_MS or entry.min_due_ms > horizon_ms + OPEN_MS


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
