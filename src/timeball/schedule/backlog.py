"""The interface of a backlog, which stores messages that are not due soon. It answers five questions, for batches.

    add            Store durable messages. Report which are *near*: the scheduler takes these at once.
    first_due_ms   No unopened message is due before this time. FAR_MS if there are none.
    open           Return the messages that may be due before a time, to be loaded or to be rewritten.
    needed_seq     Return the oldest row of the log that is still needed.
    state/restore  Save and restore the data that is neither in the log nor in the backlog's own files.

All methods run on the event loop. Reads of files run in the reader thread, within `open` and `read_bodies`.

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
from timeball.schedule.columns import Columns
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import Waiting, take_scheduled
from timeball.schedule.outcomes import Settled

IN_TABLE = -1  # in place of a row: the message is in a file of the pending table
SORT_ROWS = 1 << 16  # messages that the event loop sorts out at a time, which takes a few ms

Bools = npt.NDArray[np.bool_]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Opened(Columns):
    """Messages that a backlog has opened: due time, number, row, a note of the backlog, and the next step.

    `due_ms` is the time of the release. `rewrites` marks the messages that must be rewritten to stay pending. `note` is
    a number that the backlog gets back with the new row (`Rewritten`).
    """

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    note: Int64Array
    rewrites: Bools

    @classmethod
    def near(cls, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> Opened:
        """Build opened messages that are all to be loaded."""
        return cls(due_ms, seq, row_seq, np.zeros(len(seq), np.int64), np.zeros(len(seq), np.bool_))

    @classmethod
    def nothing(cls) -> Opened:
        """Build an empty result."""
        return cls.near(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The previous rows of messages that come back to `add`, and the notes with which they were opened."""

    row_seq: Int64Array
    note: Int64Array


class Backlog(Protocol):
    """The five questions, and methods with a default. Times are in ms of the scheduler's clock."""

    reader: LogReader
    # True if `open` may return other due times than the original ones, by which outcomes identify a message. Such a
    # backlog skips settled messages itself.
    has_own_instants: bool = False
    # A lower bound of the due times of all unopened messages. Each backlog updates it with every change, since the
    # scheduler reads it at every step.
    first_due_ms: int = FAR_MS

    # Such messages delay no others, but messages due later do not count as settled either.
    @property
    def missing_due_ms(self) -> int:
        """The `first_due_ms` of messages that cannot be opened now, or that are due later than their pair states."""
        return FAR_MS

    # Called from the commit's callback, in log order. It must not fail: an exception here stops the log
    # (log/writer.py), because the row is durable and only a recovery would find the message.
    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Store messages. Return a mask of those that count as opened, which belong to the scheduler from now on."""

    # The only one of the five questions that may pause. `add` may be called meanwhile. Its messages are then returned
    # by this `open` or by that `add`, never by both.
    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open all messages that may be due before `until_ms`, or the first part of them. Advance `first_due_ms`."""

    # Retention removes rows below the result, so it may be too low but never too high.
    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest row that is needed. Opened messages due before `settled_ms` are settled."""

    # The state may be older than the files. `restore` gets the later messages as `waiting`.
    def state(self, settled_ms: int) -> msgspec.Struct | None:
        """Build the state for a checkpoint, which is saved after the `files_to_sync` are synced."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Start with a saved state and the messages that were added or rewritten since. This blocks.

        Without a state, `waiting` contains all pending messages. Return the messages that count as opened.
        """

    # -- besides, as a backlog answers that has no files, no bound and no form of its own ----------------------

    # Called before the rows are appended, the only time at which a message can still be refused.
    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit if messages for these due times, which are not in the log yet, would be too many."""
        return

    def encode_waiting(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Convert LOG_SCHEMA messages to the form in which the log stores them."""
        return scheduled_rows

    def encode_rewrite(self, scheduled_rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        """Build the new rows of messages, given the notes with which they were opened (reader thread)."""
        return scheduled_rows

    def decode_waiting(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert messages in the log back to the form in which they were sent."""
        return scheduled_rows

    def read_bodies(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read these messages in the order of `row_seq`, which ascends (reader thread)."""
        return self.decode_waiting(take_scheduled(self.reader, row_seq))

    def clock_stepped(self, now_ms: int, shift_of: Callable[[Int64Array], Int64Array]) -> bool:
        """Handle a clock step. Return True if all loaded messages must be opened again with other due times.

        `shift_of` maps numbers to shifts in ms: durations are due that much later than their rows state since the clock
        was set.
        """
        return False

    def holds(self, seq: Int64Array) -> Bools:
        """Return a mask of the numbers that belong to this backlog. Called when `clock_stepped` has returned True."""
        return np.ones(len(seq), np.bool_)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List (folder, files) written since the last call. They are synced before `state` is saved."""
        return []

    def sync_failed(self) -> None:
        """Undo the last `files_to_sync`, whose files were not synced."""
        return

    def statistics(self) -> dict[str, int]:
        """Collect counts for statistics, by name."""
        return {}

    def close(self) -> None:
        """Close the files. The reader thread has finished."""
        return
