"""`hour_log`: an LSM tree over due time, and the default strategy for any due time.

    log tail      messages since the watermark W: two int64 per row in memory
    pending table immutable Parquet files sorted by due time; complete for all rows before W

Every unopened message is in exactly one of these, the tail or a file. An attach moves W, so no message is in both.

    add     stores a message in the tail, as two int64
    attach  adds files, whose messages leave the tail
    open    takes messages from the tail, and from files whose next due time is near

Tail and files are open up to `opened_ms`: a message that is added later with an earlier due time counts as opened at
once. Each file has a next due time of its own, so messages of a bulk job that are due before `opened_ms` are opened
like all others. This backlog serves the pending table under every strategy.

Together with the scheduler this is a two-level timing wheel over hourly delay logs. Sorted files replace the chains of
messages by the second. Files are open within two hours of now. A heap of used slots (`due_wheel.py`) replaces the
turning of the wheel. The tick and the local index, from which a successor starts, are in the release records
(`outcomes.py`).

The files of the pending table are immutable. So the reader thread works on a list taken at the beginning of an opening,
while the event loop may replace the set. Each file has a *next* due time: all its earlier rows have been opened. A file
is opened when that time comes near, and closed when its rows are at least two hours away. One opening reads a limited
number of files, so a broker that was down for a year does not open all of them. Files with the same next due time are
all read in one opening, but rewrites of the table keep their number small.

If the table is in an object store, some files are not local yet (table/object_store.py). They are not opened and delay
no others. `missing_due_ms` is the earliest due time of their rows, so that none of these counts as settled (released or
cancelled).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import MissingFile
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, build_rows, int64
from timeball.schedule.backlog import IN_TABLE, Backlog, Bools, Opened, Rewritten
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.locations import Locations, Waiting
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment, FileEntry, within
from timeball.table.data_file import DataFile, DataFiles, Position
from timeball.table.file_keys import FileSet

logger = logging.getLogger(__name__)

# ---- the backlog: the tail in memory, and the files that replace it ------------------------------------------


class HourLog(Backlog):
    """The tail in memory, and the files. `_read_window` and `read_files` run in the reader thread."""

    def __init__(
        self,
        files: DataFiles,
        reader: LogReader,
        reader_thread: Executor,
        entries: list[FileEntry],
        *,
        ahead_ms: int,
        is_local: Callable[[str], bool] | None = None,
    ) -> None:
        """`entries`: the live files. `ahead_ms`: added messages that are due within this time count as opened.

        `is_local` checks by its path whether a file can be read now. None: each can be.
        """
        self.reader, self._thread, self._ahead_ms = reader, reader_thread, ahead_ms
        self.pending = PendingFiles(files, entries, is_local)
        self._tail = DueIndex()
        self._locations = Locations()  # of messages in the tail that are not in their first row
        self._opened_ms = -FAR_MS  # all messages of the tail with earlier due times have been opened
        self._update_first_due()

    # -- the core operations of a backlog ---------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Store the messages that are due at `opened_ms` or later in the tail.

        Returns a mask of the earlier ones, which count as opened. A message in the tail takes two numbers, and two more
        if its row is not that of its version.
        """
        ahead_ms = now_ms + self._ahead_ms
        if self.first_due_ms >= ahead_ms:
            self._opened_ms = max(self._opened_ms, ahead_ms)  # nothing before this time has to be opened
        is_opened = np.asarray(waiting.due_ms < self._opened_ms)
        # One count instead of `all` and `any`: for one row these would cost more than all the rest of this method.
        opened_count = np.count_nonzero(is_opened)
        if opened_count < len(is_opened):
            far = waiting.part(~is_opened) if opened_count else waiting
            self._tail.add(far.due_ms, far.seq)
            if waiting.row_seq is not waiting.seq:  # else each message is in the row of its version
                self._locations.add(far.seq, far.row_seq)
            self.first_due_ms = min(self.first_due_ms, self._tail.first_due_ms)
        return is_opened

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open the messages of the files and of the tail that are due before `until_ms`, or before an earlier time.

        The time is earlier if a window of the files would be too large. No bodies are read.
        """
        files, until_ms = self.pending.to_open(until_ms)
        window = Window(until_ms, _NONE, _NONE, {}, [])
        if files:
            loop = asyncio.get_running_loop()
            window = await loop.run_in_executor(self._thread, self._read_window, files, until_ms, now_ms)
            self.pending.set_opened(window.next_ms)
            self.pending.mark_missing(window.missing)
        else:
            self.pending.refresh_local_files()  # files may have become local
        # No await from here on: messages that were added meanwhile must stay in the tail until `_opened_ms` has moved.
        # The window may end before `until_ms`, and tail and files must be open up to the same time.
        due, seq = self._tail.pop_before(window.until_ms, 0)
        self._opened_ms = max(self._opened_ms, window.until_ms)
        self._update_first_due()
        return Opened.near(
            np.concatenate([window.due_ms, due]),
            np.concatenate([window.seq, seq]),
            np.concatenate([np.full(len(window.seq), IN_TABLE), self._locations.pop(seq)]),
        )

    def needed_seq(self, settled_ms: int) -> int | None:
        """No row is needed, because retention keeps all rows from the watermark of the table on."""
        return None

    def state(self, settled_ms: int) -> None:
        """No state is needed: a restart reads the list of files and the log."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Start with the messages of the tail (`waiting`), and with the files without the rows that the mark covers.

        Returns the messages of `waiting` that count as opened.
        """
        self.pending.skip_settled(settled)
        self._update_first_due()
        # Added as if they arrived now: near messages are returned, the others stay in the tail.
        near = waiting.part(self.add(waiting, now_ms))
        return Opened.near(near.due_ms, near.seq, near.row_seq)

    # -- the table -------------------------------------------------------------------------------------------

    @property
    def missing_due_ms(self) -> int:
        """The earliest due time in files that cannot be opened now."""
        return self.pending.missing_due_ms

    @property
    def opened_ms(self) -> int:
        """The time up to which the backlog is open."""
        return self._opened_ms

    def may_attach(self, attachment: Attachment) -> bool:
        """Check whether all messages due before `opened_ms` in the files to be removed have been opened."""
        return not self.pending.has_unopened(attachment.removes, self._opened_ms)

    def attach(self, attachment: Attachment, now_ms: int = 0) -> None:
        """Add and remove files. After a compaction their messages leave the tail.

        `now_ms` is passed on to `PendingFiles.attach`.
        """
        self.pending.attach(attachment, self._opened_ms, now_ms)
        if attachment.job == "compact":
            # Compaction took all pending messages below `to_seq`. Opened ones have left the tail before.
            self._tail.drop_seqs_below(attachment.to_seq)
            # An empty tail needs no locations. Otherwise outdated ones stay in memory for now, at 16 bytes each.
            if not len(self._tail):
                self._locations = Locations()
        self._update_first_due()

    def refresh_local_files(self) -> None:
        """Check again which files are local."""
        self.pending.refresh_local_files()
        self._update_first_due()

    def read_files(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read these messages, which are sorted by (due_ms, seq), from the files (reader thread).

        The rows have READ_SCHEMA and are unsorted. Messages that no file contains are omitted.
        """
        low, high = (int(due_ms[0]), int(seq[0])), (int(due_ms[-1]), int(seq[-1]) + 1)
        rows = read_rows_between(self.pending.overlapping(low[0], high[0]), low, high)
        if rows is None:
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        # The files contain more rows in this span: settled ones, and messages of another gather.
        is_wanted = np.isin(int64(rows.column("seq")), seq)
        return rows if is_wanted.all() else rows.filter(pa.array(is_wanted))

    def rows_due(self, times_ms: list[int]) -> list[int]:
        """Count the rows of tail and files that are due before each of `times_ms`.

        If a time is within the span of a file, a share of the file's rows is counted. Settled (released or cancelled)
        rows are included until they are removed.
        """
        spans = [(entry.min_due_ms, entry.max_due_ms, entry.rows) for entry in self.pending.live_entries()]
        min_due_ms, max_due_ms, rows = np.array(spans, np.float64).reshape(-1, 3).T
        counts = []
        for until_ms in times_ms:
            # An estimate: it assumes that due times are evenly spread over the span of a file.
            share = (until_ms - min_due_ms) / (max_due_ms - min_due_ms + 1)
            counts.append(self._tail.count_before(until_ms) + int((np.clip(share, 0, 1) * rows).sum()))
        return counts

    def statistics(self) -> dict[str, int]:
        """Count the rows in the tail and in files."""
        return {
            "tail_rows": len(self._tail),
            "table_rows": self.pending.rows,
            "table_files": len(self.pending),
            "open_files": self.pending.open_files,
        }

    def _update_first_due(self) -> None:
        self.first_due_ms = min(self._tail.first_due_ms, self.pending.first_due_ms)

    def _read_window(self, files: list[tuple[DataFile, int]], until_ms: int, now_ms: int) -> Window:
        """Read a window of `files`, and close the files that are far from now (reader thread)."""
        window = read_window(files, until_ms)
        # In the reader thread, which alone opens and reads data files, so no file is closed during a read.
        close_far(self.pending.all(), now_ms)
        return window


# ---- the live files ------------------------------------------------------------------------------------------


WINDOW_ROWS_MAX = 8_000_000  # positions read in one opening, 16 bytes each
WINDOW_FILES_MAX = 64  # files read in one opening
OPEN_MS = 2 * limits.HOUR_MS  # a file without rows due within this time from now is closed

_NONE = np.empty(0, np.int64)


class PendingFiles:
    """The set of live files. It is replaced, never changed in place. Belongs to the event loop."""

    def __init__(
        self, files: DataFiles, entries: list[FileEntry], is_local: Callable[[str], bool] | None = None
    ) -> None:
        """`is_local` checks by path whether a file can be read now. None: all files can."""
        self._files, self._is_local = files, is_local
        self._live = {entry.path: DataFile(files, entry) for entry in entries}
        # Columns in one order of files, because each opening scans all files, perhaps ten thousand: the path of each
        # file, its next due time and its last due time. `_index_of` maps a path to its index.
        self._paths, self._index_of = list[str](), dict[str, int]()
        self._next_ms = self._last_ms = _NONE
        self._set_next({entry.path: entry.min_due_ms for entry in entries})
        # A lower bound of the unopened due times in available files, and one for all other files. Stored, because there
        # may be thousands of files.
        self.first_due_ms = self.missing_due_ms = FAR_MS
        self._opened_paths: set[str] = set()  # files from which rows may have been opened
        # Paths of live files that do not exist any more, until an operator restores them.
        self.missing: frozenset[str] = frozenset()
        # Built when needed. The first item is the `_live` of which it was built.
        self._set: tuple[dict[str, DataFile], FileSet] | None = None
        self._update_first_due()

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
        live, cached = self._live, self._set
        if cached is None or cached[0] is not live:
            cached = self._set = live, FileSet([file.entry for file in live.values()])
        return cached[1]

    def all(self) -> list[DataFile]:
        """List all live files."""
        return list(self._live.values())

    def live_entries(self) -> list[FileEntry]:
        """List the entries of all live files."""
        return [file.entry for file in self._live.values()]

    def entries(self, paths: list[str]) -> list[FileEntry]:
        """List the entries of the named files that are live."""
        return [self._live[path].entry for path in paths if path in self._live]

    def overlapping(self, low_ms: int, high_ms: int) -> list[DataFile]:
        """List the files that may contain rows due in [low_ms, high_ms], opened or not (any thread).

        Files that are not local are excluded, unless rows of them have been opened.
        """
        files = self._between(low_ms, high_ms)
        return files if self._are_all_available else [file for file in files if self._is_readable(file)]

    def due_between(self, low_ms: int, high_ms: int) -> list[FileEntry]:
        """List the entries of all files that may contain rows due in [low_ms, high_ms], the earliest first."""
        entries = (file.entry for file in self._between(low_ms, high_ms))
        return sorted(entries, key=lambda entry: entry.min_due_ms)

    def ending_before(self, due_ms: int) -> list[FileEntry]:
        """List the entries of files without rows due at or after `due_ms`."""
        return [file.entry for file in self._live.values() if file.entry.max_due_ms < due_ms]

    # -- unopened rows ---------------------------------------------------------------------------------------

    def skip_settled(self, settled: Settled) -> None:
        """Skip the rows due before the mark (outcomes.py), in files of which the mark covers all numbers.

        A file with other numbers is opened from its first row on.
        """
        self._set_next(
            {
                path: file.entry.min_due_ms
                if settled.may_be_pending_in(file.entry.min_seq, file.entry.max_seq)
                else max(file.entry.min_due_ms, settled.before_ms)
                for path, file in self._live.items()
            }
        )
        self._update_first_due()

    def has_unopened(self, paths: list[str], before_ms: int) -> bool:
        """Check whether one of these files may contain unopened rows due before `before_ms`."""
        indexes = [self._index_of[path] for path in paths if path in self._index_of]
        next_ms = self._next_ms[indexes]
        return bool(((next_ms < before_ms) & (next_ms <= self._last_ms[indexes])).any())

    def attach(self, attachment: Attachment, opened_ms: int, now_ms: int = 0) -> None:
        """Add and remove files.

        Rows that were moved from other files or from the tail count as opened up to `opened_ms`. New rows (of a bulk
        job, or of a resumed campaign) count as unopened. They may be due before `now_ms`, and their lateness counts
        from `now_ms`.
        """
        removed = set(attachment.removes)
        remaining = {path: file for path, file in self._live.items() if path not in removed}
        added = {entry.path: DataFile(self._files, entry) for entry in attachment.files}
        # Replaced, not changed: `overlapping` may iterate over the old one in the reader thread.
        self._live, self._set = remaining | added, None
        old_next_ms = dict(zip(self._index_of, self._next_ms.tolist(), strict=True))
        next_ms = {path: old_next_ms[path] for path in remaining}
        # Messages that compaction and rewriting move were opened up to `opened_ms` in their old file or in the tail.
        # Messages of a bulk job or of a resumed campaign are new, so even those due before `opened_ms` must be opened.
        # A file with the number of a resumed message contains only resumed messages.
        is_new = within(np.array([entry.min_seq for entry in attachment.files], np.int64), attachment.ranges)
        is_new |= attachment.job == "bulk"
        for entry, is_new_file in zip(attachment.files, is_new.tolist(), strict=True):
            next_ms[entry.path] = entry.min_due_ms if is_new_file else max(entry.min_due_ms, opened_ms)
            if next_ms[entry.path] > entry.min_due_ms:
                self._opened_paths.add(entry.path)
            if is_new_file and entry.min_due_ms < now_ms:
                added[entry.path].lateness_from_ms = now_ms
        self._opened_paths -= removed
        self.missing -= removed
        self._set_next(next_ms)
        self._update_first_due()

    def to_open(self, until_ms: int) -> tuple[list[tuple[DataFile, int]], int]:
        """List the available files with unopened rows due before `until_ms`, each with its next due time.

        Also returns the time up to which to open them: earlier than `until_ms` if there would be too many files.
        """
        unopened = zip(*self._unopened_before(until_ms), strict=True)
        # Sorted by next due time, so that the limit excludes the files that are due last.
        candidates = sorted((next_ms, path) for path, next_ms in unopened if self._is_available(path))
        if len(candidates) > WINDOW_FILES_MAX:
            # Files with equal next due times cannot be separated, so all of them are opened.
            until_ms = min(until_ms, max(candidates[WINDOW_FILES_MAX][0], candidates[0][0] + 1))
        return [(self._live[path], next_ms) for next_ms, path in candidates if next_ms < until_ms], until_ms

    def set_opened(self, next_ms: dict[str, int]) -> None:
        """Record that rows of these files were opened. `next_ms` contains their new next due times, by path."""
        for path, due_ms in next_ms.items():
            if path in self._index_of:
                self._next_ms[self._index_of[path]] = due_ms
        self._opened_paths.update(next_ms)
        self._update_first_due()

    def _between(self, low_ms: int, high_ms: int) -> list[DataFile]:
        """List the files that may contain rows due in [low_ms, high_ms], available or not."""
        return [
            file
            for file in self._live.values()
            if file.entry.min_due_ms <= high_ms and file.entry.max_due_ms >= low_ms
        ]

    def _set_next(self, next_ms: dict[str, int]) -> None:
        """Set the next due times of all live files, by path."""
        self._paths = list(next_ms)
        self._index_of = {path: index for index, path in enumerate(self._paths)}
        self._next_ms = np.array(list(next_ms.values()), np.int64)
        self._last_ms = np.array([self._live[path].entry.max_due_ms for path in self._paths], np.int64)

    def _unopened_before(self, until_ms: int) -> tuple[list[str], list[int]]:
        """List the paths and next due times of files with unopened rows due before `until_ms`."""
        indexes = np.flatnonzero((self._next_ms <= self._last_ms) & (self._next_ms < until_ms))
        return [self._paths[index] for index in indexes.tolist()], self._next_ms[indexes].tolist()

    def refresh_local_files(self) -> None:
        """Check again which files are local."""
        if not self._are_all_available:
            self._update_first_due()

    def mark_missing(self, paths: Iterable[str]) -> None:
        """Mark these files as missing, so that they are not opened."""
        if new_missing := self.missing.union(paths) - self.missing:
            self.missing |= new_missing
            self._update_first_due()

    def mark_restored(self, paths: Iterable[str]) -> None:
        """Mark these files as present again, so that they are opened."""
        self.missing = self.missing.difference(paths)
        self._update_first_due()

    @property
    def _are_all_available(self) -> bool:
        """True if all files can be read, so that no single one has to be checked."""
        return self._is_local is None and not self.missing

    def _is_available(self, path: str) -> bool:
        return path not in self.missing and (self._is_local is None or self._is_local(path))

    def _is_readable(self, file: DataFile) -> bool:
        """Check whether to read a file: it is available, or rows of it have been opened and must be loaded."""
        return self._is_available(file.entry.path) or file.entry.path in self._opened_paths

    def _update_first_due(self) -> None:
        """Store the earliest next due time of available files, and that of files that cannot be opened now."""
        if self._are_all_available:
            self.missing_due_ms = FAR_MS
            unopened = self._next_ms[self._next_ms <= self._last_ms]
            self.first_due_ms = int(unopened.min(initial=FAR_MS))
            return
        first = {True: FAR_MS, False: FAR_MS}
        for path, next_ms in zip(*self._unopened_before(FAR_MS), strict=True):
            is_available = self._is_available(path)  # read once, because it may change meanwhile
            first[is_available] = min(first[is_available], next_ms)
        self.first_due_ms, self.missing_due_ms = first[True], first[False]


# ---- reading files (reader thread) ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of files that are to be opened: those due before `until_ms`, from the next due time of each file on."""

    until_ms: int
    due_ms: Int64Array
    seq: Int64Array
    next_ms: dict[str, int]  # the new next due time of each file, by path
    missing: list[str]  # paths of files that are gone, from which no rows were opened


def read_window(files: list[tuple[DataFile, int]], until_ms: int) -> Window:
    """Read the pairs (due_ms, seq) of the window up to `until_ms`, or up to an earlier time if there are too many.

    `files` are given with their next due times. Runs in the reader thread.
    """
    files, missing = _split_missing(files)
    until_ms = _limit_until(files, until_ms)
    pairs = [file.positions_between((low_ms, 0), (until_ms, 0)) for file, low_ms in files]
    due = np.concatenate([_NONE, *(due for due, _ in pairs)])
    seq = np.concatenate([_NONE, *(seq for _, seq in pairs)])
    next_ms = {}
    for (file, low_ms), (file_due, _) in zip(files, pairs, strict=True):
        # A file without rows in the window continues at the due time of its next row. Otherwise a file with one row a
        # week would be read at every opening.
        next_due_ms = file.first_due_at_or_after(until_ms) if not len(file_due) else None
        next_ms[file.entry.path] = max(low_ms, until_ms if next_due_ms is None else next_due_ms)
    return Window(until_ms, due, seq, next_ms, missing)


def _split_missing(files: list[tuple[DataFile, int]]) -> tuple[list[tuple[DataFile, int]], list[str]]:
    """Split the files into those that exist and the paths of missing ones."""
    available, missing = [], []
    for file, next_ms in files:
        try:
            file.check()
        except MissingFile as error:
            # The broker goes on with the messages of other files. An operator must restore this one.
            logger.error("data file cannot be opened reason=%s", error)
            missing.append(file.entry.path)
        else:
            available.append((file, next_ms))
    return available, missing


def _limit_until(files: list[tuple[DataFile, int]], until_ms: int) -> int:
    """Reduce `until_ms` until the statistics of the files show at most WINDOW_ROWS_MAX rows before it.

    It stays at least 1 ms after the first next due time, however many rows are due then.
    """
    low_ms = min((low_ms for _, low_ms in files), default=until_ms)
    while until_ms - low_ms > 1:
        if (
            sum(file.max_rows_due_between(low, until_ms) for file, low in files if low < until_ms)
            <= WINDOW_ROWS_MAX
        ):
            break
        # Halved by time, because statistics count the rows of row groups, not of due times.
        until_ms = low_ms + (until_ms - low_ms + 1) // 2
    return until_ms


def close_far(files: list[DataFile], now_ms: int) -> None:
    """Close the open files whose rows are all due more than OPEN_MS before `now_ms`, or all more than OPEN_MS after it.

    Reader thread.
    """
    for file in files:
        entry = file.entry
        # A file that spans the present stays open: it is read every few seconds, and opening it takes some ms.
        if file.is_open and (entry.max_due_ms < now_ms - OPEN_MS or entry.min_due_ms > now_ms + OPEN_MS):
            file.close()


def read_rows_between(files: list[DataFile], low: Position, high: Position) -> pa.RecordBatch | None:
    """Read the rows in [low, high) of these files in READ_SCHEMA, unsorted across files. None if there are none."""
    tables = [(file, table) for file in files if (table := file.rows_between(low, high)).num_rows]
    if not tables:
        return None
    return scheduled_from_table(
        pa.concat_tables([_count_lateness_from(file.lateness_from_ms, table) for file, table in tables])
    )


def _count_lateness_from(lateness_from_ms: int, rows: pa.Table) -> pa.Table:
    """Raise `accepted_ms` of rows due before `lateness_from_ms` to that time, from which their lateness counts.

    `lateness_from_ms` is the time at which the file joined the table. 0 changes no row.
    """
    if not lateness_from_ms:
        return rows
    due_ms, accepted_ms = rows.column("due_ms").to_numpy(), rows.column("accepted_ms").to_numpy()
    new_accepted_ms = np.where(
        due_ms < lateness_from_ms, np.maximum(accepted_ms, lateness_from_ms), accepted_ms
    )
    column_number = rows.schema.get_field_index("accepted_ms")
    return rows.set_column(
        column_number,
        rows.schema.field(column_number),
        pa.array(new_accepted_ms, rows.schema.field(column_number).type),
    )


def scheduled_from_table(rows: pa.Table) -> pa.RecordBatch:
    """Convert rows of the pending table (TABLE_SCHEMA) to READ_SCHEMA.

    The result equals that of `locations.as_scheduled` for the same messages in the log, but without `store_host`, which
    the table does not contain. A row with a `number` becomes a MOVED row with that `source_seq`, any other becomes a
    SCHEDULED row.
    """
    rows = rows.combine_chunks()
    columns = {name: rows.column(name).chunk(0) for name in LOG_SCHEMA.names if name in rows.schema.names}
    number = rows.column("number").chunk(0)
    has_numbers = number.null_count < len(number)
    batch = build_rows(
        rows.num_rows,
        kind=np.where(number.is_valid(), Kind.MOVED, Kind.SCHEDULED) if has_numbers else int(Kind.SCHEDULED),
        source_seq=number if has_numbers else None,
        store_ms=rows.column("accepted_ms").chunk(0),
        **{name: column for name, column in columns.items() if name != "accepted_ms"},
    )
    return pa.RecordBatch.from_arrays([rows.column("seq").chunk(0), *batch.columns], schema=READ_SCHEMA)
