"""The live files of the pending table, as the schedule uses them: select the files to open next, and read their rows.

Files are immutable. So the reader thread works on a list taken at the beginning of an opening, while the event loop may
replace the set. Each file has a *next* due time: all its earlier rows have been opened. A file is opened when that time
comes near, and closed when its rows are at least two hours away. One opening reads a limited number of files, so a
broker that was down for a year does not open all of them. Only files with the same next due time are read together in
any number, and rewrites of the table keep that number small.

Of a table in an object store some files are not local yet (table/file_cache.py). They are not opened and delay no
others. `missing_due_ms` covers their rows, so that none of these counts as settled (released or cancelled).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.model import limits
from timeball.model.errors import MissingFile
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, build_rows
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment, FileEntry, within
from timeball.table.data_file import DataFile, DataFiles, Position
from timeball.table.file_keys import FileSet

logger = logging.getLogger(__name__)

WINDOW_ROWS_MAX = 8_000_000  # positions read in one opening, 16 bytes each
WINDOW_FILES_MAX = 64  # files read in one opening
OPEN_MS = 2 * limits.HOUR_MS  # a file farther than this from the opened time is closed

_NONE = np.empty(0, np.int64)


class PendingFiles:
    """The set of live files. It is replaced, never changed in place. Belongs to the event loop."""

    def __init__(
        self, files: DataFiles, entries: list[FileEntry], is_local: Callable[[str], bool] | None = None
    ) -> None:
        """`is_local` checks by path whether a file can be read now. None: all files can."""
        self._files, self._is_local = files, is_local
        self._live = {entry.path: DataFile(files, entry) for entry in entries}
        # As columns in one order: each opening scans all files, of which there may be ten thousand.
        self._paths, self._places = list[str](), dict[str, int]()
        # The next due time of each file, and its last due time.
        self._next_ms = self._last_ms = _NONE
        self._set_next({entry.path: entry.min_due_ms for entry in entries})
        # A lower bound of the unopened due times. Stored, because there may be thousands of files.
        self.first_due_ms = FAR_MS
        self.missing_due_ms = FAR_MS  # the same for files that are not local
        self._looked_into: set[str] = set()  # files from which rows may have been opened
        # Paths of live files that are gone, until they are restored.
        self.missing: frozenset[str] = frozenset()
        # Built when needed. The first item is the `_live` of which it was built.
        self._set: tuple[dict[str, DataFile], FileSet] | None = None
        self._keep_first()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def rows(self) -> int:
        """The number of rows in all live files, settled ones included."""
        return sum(file.entry.rows for file in self._live.values())

    @property
    def open_files(self) -> int:
        """The number of live files whose footers are in memory."""
        return sum(file.is_open for file in self._live.values())

    @property
    def live(self) -> FileSet:
        """The live files for look-ups. The same object until an attach changes them. Any thread."""
        # Stored with its source: an attach may replace `_live` on the event loop while another thread builds the set.
        live, made = self._live, self._set
        if made is None or made[0] is not live:
            made = self._set = live, FileSet([file.entry for file in live.values()])
        return made[1]

    def all(self) -> list[DataFile]:
        """List all live files."""
        return list(self._live.values())

    def live_entries(self) -> list[FileEntry]:
        """List the entries of all live files."""
        return [file.entry for file in self._live.values()]

    def entries(self, paths: list[str]) -> list[FileEntry]:
        """List the entries of the named files that are live."""
        return [self._live[path].entry for path in paths if path in self._live]

    def over(self, low_ms: int, high_ms: int) -> list[DataFile]:
        """List the files that may contain rows due in [low_ms, high_ms], opened or not (any thread).

        Files that are not local are excluded, unless rows of them have been opened.
        """
        found = self._between(low_ms, high_ms)
        return found if self._has_all else [file for file in found if self._is_readable(file)]

    def due_between(self, low_ms: int, high_ms: int) -> list[FileEntry]:
        """List the entries of all files that may contain rows due in [low_ms, high_ms], the earliest first."""
        found = (file.entry for file in self._between(low_ms, high_ms))
        return sorted(found, key=lambda entry: entry.min_due_ms)

    def behind(self, due_ms: int) -> list[FileEntry]:
        """List the entries of files without rows due at or after `due_ms`."""
        return [file.entry for file in self._live.values() if file.entry.max_due_ms < due_ms]

    # -- what has not been opened ----------------------------------------------------------------------------

    def skip_settled(self, settled: Settled) -> None:
        """Skip the rows that the mark covers by due time, in files of which it covers all numbers.

        A file with other numbers is opened from its first row on.
        """
        self._set_next(
            {
                path: file.entry.min_due_ms
                if settled.may_touch(file.entry.min_seq, file.entry.max_seq)
                else max(file.entry.min_due_ms, settled.before_ms)
                for path, file in self._live.items()
            }
        )
        self._keep_first()

    def has_unopened(self, paths: list[str], before_ms: int) -> bool:
        """Check whether one of these files may contain unopened rows due before `before_ms`."""
        places = [self._places[path] for path in paths if path in self._places]
        next_ms = self._next_ms[places]
        return bool(((next_ms < before_ms) & (next_ms <= self._last_ms[places])).any())

    def attach(self, attachment: Attachment, opened_ms: int, now_ms: int = 0) -> None:
        """Add and remove files. Moved rows are open up to `opened_ms`, new and resumed rows not at all.

        Rows of new or resumed files may be due before `now_ms`. Their lateness counts from `now_ms`.
        """
        gone = set(attachment.removes)
        kept = {path: file for path, file in self._live.items() if path not in gone}
        fresh = {entry.path: DataFile(self._files, entry) for entry in attachment.files}
        # Replaced, not changed: `over` may iterate over the old one in the reader thread.
        self._live, self._set = kept | fresh, None
        before_ms = dict(zip(self._places, self._next_ms.tolist(), strict=True))
        next_ms = {path: before_ms[path] for path in kept}
        # Compaction and rewriting move messages that were opened up to `opened_ms` in their old place. Messages of a
        # bulk job and of a resumed campaign are new, so even those due before that must be opened. A file with the
        # number of a resumed message contains no others.
        is_new = within(np.array([entry.min_seq for entry in attachment.files], np.int64), attachment.ranges)
        is_new |= attachment.job == "bulk"
        for entry, new in zip(attachment.files, is_new.tolist(), strict=True):
            next_ms[entry.path] = entry.min_due_ms if new else max(entry.min_due_ms, opened_ms)
            if next_ms[entry.path] > entry.min_due_ms:
                self._looked_into.add(entry.path)
            if new and entry.min_due_ms < now_ms:
                fresh[entry.path].joined_ms = now_ms
        self._looked_into -= gone
        self.missing -= gone
        self._set_next(next_ms)
        self._keep_first()

    def to_open(self, until_ms: int) -> tuple[list[tuple[DataFile, int]], int]:
        """List the files with unopened rows due before `until_ms`, each with its next due time.

        Also return the time to open them up to. It is earlier than `until_ms` if there would be too many files.
        """
        found = zip(*self._ahead(until_ms), strict=True)
        # By next due time, so that a window that is cut excludes the files that are due last.
        touched = sorted((next_ms, path) for path, next_ms in found if self._is_there(path))
        if len(touched) > WINDOW_FILES_MAX:
            # Files with equal next due times cannot be separated, so the window contains all of them.
            until_ms = min(until_ms, max(touched[WINDOW_FILES_MAX][0], touched[0][0] + 1))
        return [(self._live[path], next_ms) for next_ms, path in touched if next_ms < until_ms], until_ms

    def opened(self, next_ms: dict[str, int]) -> None:
        """Store the new next due times of files, by path."""
        for path, due_ms in next_ms.items():
            if path in self._places:
                self._next_ms[self._places[path]] = due_ms
        self._looked_into.update(next_ms)
        self._keep_first()

    def _between(self, low_ms: int, high_ms: int) -> list[DataFile]:
        return [
            file
            for file in self._live.values()
            if file.entry.min_due_ms <= high_ms and file.entry.max_due_ms >= low_ms
        ]

    def _set_next(self, next_ms: dict[str, int]) -> None:
        """Set the next due times of all live files, by path."""
        self._paths = list(next_ms)
        self._places = {path: place for place, path in enumerate(self._paths)}
        self._next_ms = np.array(list(next_ms.values()), np.int64)
        self._last_ms = np.array([self._live[path].entry.max_due_ms for path in self._paths], np.int64)

    def _ahead(self, until_ms: int) -> tuple[list[str], list[int]]:
        """List the paths and next due times of files with unopened rows due before `until_ms`."""
        places = np.flatnonzero((self._next_ms <= self._last_ms) & (self._next_ms < until_ms))
        return [self._paths[place] for place in places.tolist()], self._next_ms[places].tolist()

    def look_again(self) -> None:
        """Check again which files are local."""
        if not self._has_all:
            self._keep_first()

    def miss(self, paths: Iterable[str]) -> None:
        """Mark these files as missing, so that they are not opened."""
        if more := self.missing.union(paths) - self.missing:
            self.missing |= more
            self._keep_first()

    def found(self, paths: Iterable[str]) -> None:
        """Mark these files as present again, so that they are opened."""
        self.missing = self.missing.difference(paths)
        self._keep_first()

    @property
    def _has_all(self) -> bool:
        """True if all files can be read, so that no single one has to be checked."""
        return self._is_local is None and not self.missing

    def _is_there(self, path: str) -> bool:
        return path not in self.missing and (self._is_local is None or self._is_local(path))

    def _is_readable(self, file: DataFile) -> bool:
        """Check whether to read a file: it is local, or rows were opened from it, which must not be skipped."""
        return self._is_there(file.entry.path) or file.entry.path in self._looked_into

    def _keep_first(self) -> None:
        if self._has_all:
            self.missing_due_ms = FAR_MS
            ahead = self._next_ms[self._next_ms <= self._last_ms]
            self.first_due_ms = int(ahead.min(initial=FAR_MS))
            return
        first = {True: FAR_MS, False: FAR_MS}
        for path, next_ms in zip(*self._ahead(FAR_MS), strict=True):
            is_there = self._is_there(path)  # read once, because it may change meanwhile
            first[is_there] = min(first[is_there], next_ms)
        self.first_due_ms, self.missing_due_ms = first[True], first[False]


@dataclass(frozen=True, slots=True)
class Window:
    """The result of an opening: (due_ms, seq) of the rows before `until_ms`, and the next due time of each file."""

    until_ms: int
    due_ms: Int64Array
    seq: Int64Array
    next_ms: dict[str, int]
    missing: list[str]  # paths of files that are gone, from which no rows were opened


def survey(files: list[tuple[DataFile, int]], until_ms: int) -> Window:
    """Read the pairs of these files from their next due times on, within the limits of one opening (reader thread)."""
    files, missing = _there(files)
    until_ms = _bounded(files, until_ms)
    pairs = [file.positions_between((low_ms, 0), (until_ms, 0)) for file, low_ms in files]
    due = np.concatenate([_NONE, *(due for due, _ in pairs)])
    seq = np.concatenate([_NONE, *(seq for _, seq in pairs)])
    next_ms = {}
    for (file, low_ms), (found, _) in zip(files, pairs, strict=True):
        # Without this, a file with one row a week would be read at every half of the lead time, not once a week.
        ahead_ms = file.first_due_from(until_ms) if not len(found) else None
        next_ms[file.entry.path] = max(low_ms, until_ms if ahead_ms is None else ahead_ms)
    return Window(until_ms, due, seq, next_ms, missing)


def _there(files: list[tuple[DataFile, int]]) -> tuple[list[tuple[DataFile, int]], list[str]]:
    """Split the files into those that can be opened, and the paths of those that are gone."""
    there, missing = [], []
    for file, next_ms in files:
        try:
            file.check()
        except MissingFile as error:
            # The broker goes on with the messages of other files. Those of this file wait for an operator.
            logger.error("data file cannot be opened reason=%s", error)
            missing.append(file.entry.path)
        else:
            there.append((file, next_ms))
    return there, missing


def _bounded(files: list[tuple[DataFile, int]], until_ms: int) -> int:
    """Reduce `until_ms` while the statistics show that more than WINDOW_ROWS_MAX rows may be before it."""
    low_ms = min((low_ms for _, low_ms in files), default=until_ms)
    while until_ms - low_ms > 1:
        if (
            sum(file.row_count_up_to(low, until_ms) for file, low in files if low < until_ms)
            <= WINDOW_ROWS_MAX
        ):
            break
        # Halved by time, because statistics count the rows of row groups, not of due times.
        until_ms = low_ms + (until_ms - low_ms + 1) // 2
    return until_ms


def close_far(files: list[DataFile], now_ms: int) -> None:
    """Close the files that have no rows within two hours of now (reader thread)."""
    for file in files:
        entry = file.entry
        # Both ends must be far: a file that spans the present is read every few seconds, and its footer takes ms.
        if file.is_open and (entry.max_due_ms < now_ms - OPEN_MS or entry.min_due_ms > now_ms + OPEN_MS):
            file.close()


def load(files: list[DataFile], low: Position, high: Position) -> pa.RecordBatch | None:
    """Read the rows in [low, high) of these files in READ_SCHEMA, unsorted across files. None if there are none."""
    tables = [(file, table) for file in files if (table := file.rows_between(low, high)).num_rows]
    if not tables:
        return None
    return as_scheduled(pa.concat_tables([_counted_from(file.joined_ms, table) for file, table in tables]))


def _counted_from(joined_ms: int, rows: pa.Table) -> pa.Table:
    """Set the accepted time of rows due before `joined_ms` to at least that time. Lateness counts from there.

    `joined_ms` is the time at which the file joined the table, or 0.
    """
    if not joined_ms:
        return rows
    due_ms, accepted_ms = rows.column("due_ms").to_numpy(), rows.column("accepted_ms").to_numpy()
    changed = np.where(due_ms < joined_ms, np.maximum(accepted_ms, joined_ms), accepted_ms)
    at = rows.schema.get_field_index("accepted_ms")
    return rows.set_column(at, rows.schema.field(at), pa.array(changed, rows.schema.field(at).type))


def as_scheduled(rows: pa.Table) -> pa.RecordBatch:
    """Convert TABLE_SCHEMA rows to READ_SCHEMA rows that equal those read from the log (schedule/locations.py)."""
    rows = rows.combine_chunks()
    shared = {name: rows.column(name).chunk(0) for name in LOG_SCHEMA.names if name in rows.schema.names}
    number = rows.column("number").chunk(0)
    has_none = number.null_count == len(number)
    batch = build_rows(
        rows.num_rows,
        kind=int(Kind.SCHEDULED) if has_none else np.where(number.is_valid(), Kind.MOVED, Kind.SCHEDULED),
        source_seq=None if has_none else number,
        store_ms=rows.column("accepted_ms").chunk(0),
        **{name: column for name, column in shared.items() if name != "accepted_ms"},
    )
    return pa.RecordBatch.from_arrays([rows.column("seq").chunk(0), *batch.columns], schema=READ_SCHEMA)
