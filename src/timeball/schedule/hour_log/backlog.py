"""The backlog `hour_log`: the tail of the log in memory, and the files of the pending table that replace it.

    add     stores a message in the tail, as two int64
    attach  adds files, whose messages leave the tail
    open    takes messages from the tail, and from files whose next due time is near

Tail and files are open up to `opened_ms`: a message that is added later with an earlier due time counts as opened at
once. Each file has a next due time of its own (pending.py), so messages of a bulk job that are due before `opened_ms`
are opened like all others. This backlog serves the pending table under every strategy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.model.message import READ_SCHEMA, Int64Array, int64
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
        """`is_local` is passed on to PendingFiles."""
        self.reader, self._thread, self._ahead_ms = reader, reader_thread, ahead_ms
        self.pending = PendingFiles(files, entries, is_local)
        self._tail = DueIndex()
        self._locations = Locations()  # of messages in the tail that are not in their first row
        self._opened_ms = -FAR_MS  # all messages of the tail with earlier due times have been opened
        self._update_first_due()

    # -- the five operations of a backlog --------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Store two numbers per message, and two more if its row is not that of its version."""
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
        """Open the due messages of the files, without bodies, and of the tail."""
        files, until_ms = self.pending.to_open(until_ms)
        window = Window(until_ms, _NONE, _NONE, {}, [])
        if files:
            loop = asyncio.get_running_loop()
            window = await loop.run_in_executor(self._thread, self._survey, files, until_ms, now_ms)
            self.pending.opened(window.next_ms)
            self.pending.miss(window.missing)
        else:
            self.pending.look_again()  # files may have become local
        # No await from here on: messages that were added meanwhile must stay in the tail until `_opened_ms` has moved.
        # The survey may have ended before `until_ms`, and tail and files must be open up to the same time.
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
        """Start with the messages of the tail, and with the files without the rows that the mark covers."""
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

    def look_again(self) -> None:
        """Check again which files are local."""
        self.pending.look_again()
        self._update_first_due()

    def read_files(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read these messages, which are sorted, from the files (reader thread)."""
        low, high = (int(due_ms[0]), int(seq[0])), (int(due_ms[-1]), int(seq[-1]) + 1)
        rows = load(self.pending.over(low[0], high[0]), low, high)
        if rows is None:
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        # The files contain more rows in this span: settled ones, and messages of another gather.
        is_wanted = np.isin(int64(rows.column("seq")), seq)
        return rows if is_wanted.all() else rows.filter(pa.array(is_wanted))

    def rows_due(self, times_ms: list[int]) -> list[int]:
        """Count the rows of tail and files that are due before each of `times_ms`, which ascend.

        If a time is within the span of a file, a share of the file's rows is counted. Settled (released or cancelled)
        rows are included until they are removed.
        """
        spans = np.array(
            [(entry.min_due_ms, entry.max_due_ms, entry.rows) for entry in self.pending.live_entries()],
            dtype=np.float64,
        ).reshape(-1, 3)
        counts = []
        for until_ms in times_ms:
            # An estimate: it assumes that due times are evenly spread over the span of a file.
            share = (until_ms - spans[:, 0]) / (spans[:, 1] - spans[:, 0] + 1)
            counts.append(self._tail.count_before(until_ms) + int((np.clip(share, 0, 1) * spans[:, 2]).sum()))
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

    def _survey(self, files: list[tuple[DataFile, int]], until_ms: int, now_ms: int) -> Window:
        """Read the pairs to open from `files`, and close files that are far from now (reader thread)."""
        window = survey(files, until_ms)
        # In the reader thread, which alone opens and reads data files, so no file is closed during a read.
        close_far(self.pending.all(), now_ms)
        return window
