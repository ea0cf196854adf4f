"""The backlog `hour_log`: the tail of the log in memory, and the files that promises were moved to from there.

    add    -> tail: two int64 a promise          attach: files take the place of the tail's promises
    open   <- tail, and files whose next instant has come near

Both are open up to `opened_ms`: a promise due before it that comes later counts as opened at once. A file has a next
instant of its own (pending.py), so that the promises that a bulk job attaches behind that are opened like all others.
This backlog keeps the pending table under every strategy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.message import READ_SCHEMA, Int64Array, int64
from timeball.schedule.backlog import IN_TABLE, Backlog, Bools, Opened, Rewritten
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.hour_log.pending import PendingFiles, Window, close_far, load, survey
from timeball.schedule.locations import Locations, Waiting
from timeball.schedule.outcomes import Settled
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile, DataFiles

_NONE = np.empty(0, np.int64)


class HourLog(Backlog):
    """The tail in memory, and the files. `_survey` and `read_files` run in the reader thread."""

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
        """`is_local`: as PendingFiles has it."""
        self.reader, self._thread, self._ahead_ms = reader, reader_thread, ahead_ms
        self.pending = PendingFiles(files, entries, is_local)
        self._tail = DueIndex()
        self._locations = Locations()  # of promises in the tail that do not lie in their first row
        self._opened_ms = -FAR_MS  # the tail has given up all that is due before
        self._keep_first()

    # -- the five questions ----------------------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Keep two numbers a promise, and of one that does not lie in its first row two more."""
        ahead_ms = now_ms + self._ahead_ms
        if self.first_due_ms >= ahead_ms:
            self._opened_ms = max(self._opened_ms, ahead_ms)  # nothing is there to be opened
        opened = np.asarray(waiting.due_ms < self._opened_ms)
        # Counted once: `all` and `any` are Python's code each, which for one row costs more than the rest.
        opened_rows = np.count_nonzero(opened)
        if opened_rows < len(opened):
            far = waiting.part(~opened) if opened_rows else waiting
            self._tail.add(far.due_ms, far.seq)
            if waiting.row_seq is not waiting.seq:  # else they lie where they got their instants
                self._locations.add(far.seq, far.row_seq)
            self.first_due_ms = min(self.first_due_ms, self._tail.first_due_ms)
        return opened

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Give up due promises in the files, without bodies, and in the tail."""
        files, until_ms = self.pending.to_open(until_ms)
        window = Window(until_ms, _NONE, _NONE, {}, [])
        if files:
            loop = asyncio.get_running_loop()
            window = await loop.run_in_executor(self._thread, self._survey, files, until_ms, now_ms)
            self.pending.opened(window.next_ms)
            self.pending.miss(window.missing)
        else:
            self.pending.look_again()  # what came first may have made room for others
        # No pause from here on: what is added meanwhile goes to the tail, until the bound has moved.
        # `window.until_ms` and not `until_ms`: the files may have allowed less, and both must be open to the same
        # instant.
        due, seq = self._tail.pop_before(window.until_ms, 0)
        self._opened_ms = max(self._opened_ms, window.until_ms)
        self._keep_first()
        return Opened.near(
            np.concatenate([window.due_ms, due]),
            np.concatenate([window.seq, seq]),
            np.concatenate([np.full(len(window.seq), IN_TABLE), self._locations.pop(seq)]),
        )

    def needed_seq(self, settled_ms: int) -> int | None:
        """Return None: the watermark of the table already keeps the rows of the tail."""
        return None

    def state(self, settled_ms: int) -> None:
        """Return None: the list of files and the log say it all."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Begin with the tail's promises, and with files of which the mark covers the beginnings."""
        self.pending.skip_settled(settled)
        self._keep_first()
        # As if they came now: those whose instants are near are returned, the others stay in the tail.
        near = waiting.part(self.add(waiting, now_ms))
        return Opened.near(near.due_ms, near.seq, near.row_seq)

    # -- the table -------------------------------------------------------------------------------------------

    @property
    def missing_due_ms(self) -> int:
        """See Backlog."""
        return self.pending.missing_due_ms

    @property
    def opened_ms(self) -> int:
        """Return the instant up to which it has been opened."""
        return self._opened_ms

    def may_attach(self, attachment: Attachment) -> bool:
        """Return whether all that the files to be removed hold of the opened time has been opened."""
        return not self.pending.has_unopened(attachment.removes, self._opened_ms)

    def attach(self, attachment: Attachment, now_ms: int = 0) -> None:
        """Take files in and out; the tail gives up what they hold. `now_ms`: see PendingFiles."""
        self.pending.attach(attachment, self._opened_ms, now_ms)
        if attachment.job == "compact":
            # Compaction took all promises below `to_seq` that waited; opened ones have left the tail already.
            self._tail.drop_seqs_below(attachment.to_seq)
            # With an empty tail no location is of use. With others left, stale ones cost 16 bytes each until then.
            if not len(self._tail):
                self._locations = Locations()
        self._keep_first()

    def look_again(self) -> None:
        """Take note of which files are local by now."""
        self.pending.look_again()
        self._keep_first()

    def read_files(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Return those of these sorted promises that the files hold (reader thread)."""
        low, high = (int(due_ms[0]), int(seq[0])), (int(due_ms[-1]), int(seq[-1]) + 1)
        rows = load(self.pending.over(low[0], high[0]), low, high)
        if rows is None:
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        # The files hold more of the stretch: settled rows, and promises that another gather has taken.
        wanted = np.isin(int64(rows.column("seq")), seq)
        return rows if wanted.all() else rows.filter(pa.array(wanted))

    def rows_due(self, instants_ms: list[int]) -> list[int]:
        """Return how many rows of tail and files are due before each instant, which ascend.

        Of a file that reaches over an instant it is the share of its span; settled rows count until they are removed.
        """
        spans = np.array(
            [(entry.min_due_ms, entry.max_due_ms, entry.rows) for entry in self.pending.live_entries()],
            dtype=np.float64,
        ).reshape(-1, 3)
        found = []
        for until_ms in instants_ms:
            share = (until_ms - spans[:, 0]) / (spans[:, 1] - spans[:, 0] + 1)
            found.append(self._tail.count_before(until_ms) + int((np.clip(share, 0, 1) * spans[:, 2]).sum()))
        return found

    def statistics(self) -> dict[str, int]:
        """Return what lies in the tail and in files."""
        return {
            "tail_rows": len(self._tail),
            "table_rows": self.pending.rows,
            "table_files": len(self.pending),
            "open_files": self.pending.open_files,
        }

    def _keep_first(self) -> None:
        self.first_due_ms = min(self._tail.first_due_ms, self.pending.first_due_ms)

    def _survey(self, files: list[tuple[DataFile, int]], until_ms: int, now_ms: int) -> Window:
        window = survey(files, until_ms)
        # In the reader thread, which alone opens and reads data files: none is closed under a read.
        close_far(self.pending.all(), now_ms)
        return window
