"""The interface of a backlog, which stores messages that are not due soon. Its core operations:

    add            Store durable messages. Report which are *near*: the scheduler takes these at once.
    first_due_ms   No unopened message is due before this time. FAR_MS if there are none.
    open           Return the messages that may be due before a time, to be loaded or to be rewritten.
    needed_seq     Return the oldest row of the log that is still needed.
    state/restore  Save and restore the data that is neither in the log nor in the backlog's own files.

All operations work on batches. All methods run on the event loop, except those marked with "reader thread". `open`
reads files in the reader thread.

An opened message belongs to the scheduler until it is settled (released or cancelled). The backlog gets it back only if
its row was rewritten: then `add` is called for it again. A backlog may keep cancelled messages and open them in their
turn, since the scheduler skips them.

The scheduler works with several backlogs (scheduler.py), so a backlog uses neither clocks nor other backlogs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.io.files import File
from timeball.log.reader import LogReader
from timeball.model.message import Int64Array
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import Columns, Waiting, take_scheduled
from timeball.schedule.outcomes import Settled

IN_TABLE = -1  # as `row_seq`: the message is in a file of the pending table, not in a row of the log
SORT_ROWS = 1 << 16  # opened messages that the event loop processes at a time, which takes a few ms

Bools = npt.NDArray[np.bool_]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Opened(Columns):
    """Messages that a backlog has opened, to be loaded or rewritten.

    `due_ms` is the time of the release. `row_seq` is the row of the log that contains the message, or IN_TABLE.
    `rewrites` is a mask of the messages that must be rewritten to stay pending. `note` is a number for the backlog's
    own use, which it gets back with the new row (`Rewritten`).
    """

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    note: Int64Array
    rewrites: Bools

    @classmethod
    def near(cls, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> Opened:
        """Build opened messages of which none must be rewritten."""
        return cls(due_ms, seq, row_seq, np.zeros(len(seq), np.int64), np.zeros(len(seq), np.bool_))

    @classmethod
    def nothing(cls) -> Opened:
        """Build an empty result."""
        return cls.near(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """An argument of `add` for rewritten messages: their previous rows, and their notes from `Opened`."""

    row_seq: Int64Array
    note: Int64Array


class Backlog(Protocol):
    """The core operations, and further methods with a default. Times are in ms of the scheduler's clock."""

    reader: LogReader
    # True if `open` may return other due times than the original ones, by which outcomes identify a message. Such a
    # backlog skips settled messages itself.
    changes_due_times: bool = False
    # A lower bound of the due times of all unopened messages. Each backlog updates it with every change, since the
    # scheduler reads it at every step.
    first_due_ms: int = FAR_MS

    # Messages in missing files delay no other messages. But `settled_before_ms` of the scheduler must not pass their
    # due times.
    @property
    def missing_due_ms(self) -> int:
        """The earliest original due time of messages that cannot be opened now, or that a clock step has postponed.

        FAR_MS if there are none.
        """
        return FAR_MS

    # Called from the commit's callback, in log order. It must not fail: an exception here stops the log
    # (log/writer.py), because the row is durable and only a recovery would find the message.
    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Store messages. Returns a mask of those that count as opened: they belong to the scheduler from now on."""

    # The only coroutine. `add` may be called while it waits. An added message is then returned by this `open` or marked
    # by that `add`, never both.
    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open the messages that may be due before `until_ms`, or only the first of them. Advance `first_due_ms`."""

    # Retention removes rows below the result. So the result may be lower than necessary, but never higher.
    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest row of the log that is needed, None if no row is.

        All opened messages due before `settled_ms` are settled.
        """

    # The state may be older than the files. `restore` receives the messages since then as `waiting`.
    def state(self, settled_ms: int) -> msgspec.Struct | None:
        """Build the state for a checkpoint, which is saved after the `files_to_sync` are synced.

        None if the backlog needs no state.
        """

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Start with a saved state and the messages that were added or rewritten since (`waiting`).

        Without a state, `waiting` contains all pending messages of this backlog that are in the log. `settled`: the
        messages that are released or cancelled, which a backlog may leave out. Returns the messages that count as
        opened, as for `add`. Blocks the event loop, so only a start calls it.
        """

    # -- defaults for a backlog without files, without a capacity limit and without a stored form of its own ----

    # Called before the rows are appended, the only time at which a message can still be refused.
    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit if the backlog has no capacity for messages with these due times."""
        return

    def encode_for_log(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Convert LOG_SCHEMA messages to the form in which the log stores them."""
        return scheduled_rows

    def encode_rewrite(self, scheduled_rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        """Build the new rows of messages, given the notes with which they were opened (reader thread)."""
        return scheduled_rows

    def decode_from_log(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert messages in the log back to the form in which they were sent."""
        return scheduled_rows

    def read_bodies(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read these messages in the order of `row_seq`, which ascends (reader thread)."""
        return self.decode_from_log(take_scheduled(self.reader, row_seq))

    def clock_stepped(self, now_ms: int, shift_of: Callable[[Int64Array], Int64Array]) -> bool:
        """Handle a clock step. Returns True if all messages of this backlog must be opened again, with other due times.

        `shift_of` maps numbers of durations to shifts: how many ms later than their rows state they are due now.
        """
        return False

    def holds(self, seq: Int64Array) -> Bools:
        """Compute a mask of the numbers that belong to this backlog. Called if `clock_stepped` has returned True."""
        return np.ones(len(seq), np.bool_)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List (folder, files) written since the last call. They are synced before `state` is saved."""
        return []

    # Between `files_to_sync` and the sync of these files.
    def rows_synced(self) -> None:
        """Write changes to the files that are valid only now: the rows before the last `files_to_sync` are synced."""
        return

    def sync_failed(self) -> None:
        """Undo the last `files_to_sync`, whose files were not synced."""
        return

    def statistics(self) -> dict[str, int]:
        """Collect counts for statistics, by name."""
        return {}

    def close(self) -> None:
        """Close the files. The reader thread has finished."""
        return
