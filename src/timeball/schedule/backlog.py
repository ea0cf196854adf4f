"""The contract of a backlog: how promises wait that are far from their instant. Five questions, asked in batches.

    add            Keep these durable promises. Which of them are near enough that the scheduler has them at once?
    first_due_ms   Nothing that has not been opened is due before this; FAR_MS when nothing waits.
    open           Give up what may be due before an instant: to be loaded, or to be written again.
    needed_seq     Which is the oldest row of the log that is still needed?
    state/restore  What does a restart need besides the log and the backlog's own files?

All of it runs on the event loop. What must read files does so in the reader thread, within `open` and `read_bodies`.
A promise that has been opened belongs to the scheduler until it is settled, and the backlog never hears of it again
unless its row was rewritten: then `add` gets it once more. A backlog may keep cancelled promises and open them when
their time comes; the scheduler leaves them out.

The scheduler may ask several backlogs in turn (scheduler.py), so a backlog knows neither clocks nor other backlogs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.files import File
from timeball.log.reader import LogReader
from timeball.message import Int64Array
from timeball.schedule.columns import Columns
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import Waiting, take_promises
from timeball.schedule.outcomes import Settled

IN_TABLE = -1  # as a row: the promise lies in a file of the pending table
SORT_ROWS = 1 << 16  # promises that the event loop sorts out in one go: some milliseconds

Bools = npt.NDArray[np.bool_]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Opened(Columns):
    """Promises given up by a backlog: instant, number, row, a number of the backlog's own, and the next step.

    `due_ms` is the instant to release at; `rewrites` says which must be written again to go on waiting, and `note`
    comes back with the new row (`Rewritten`).
    """

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    note: Int64Array
    rewrites: Bools

    @classmethod
    def near(cls, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> Opened:
        """Return promises that are all to be loaded."""
        return cls(due_ms, seq, row_seq, np.zeros(len(seq), np.int64), np.zeros(len(seq), np.bool_))

    @classmethod
    def nothing(cls) -> Opened:
        """Return no promises."""
        return cls.near(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Rows in which promises that come back to `add` lay until now, and the notes they were opened with."""

    row_seq: Int64Array
    note: Int64Array


class Backlog(Protocol):
    """The five questions, and what has a usual answer. Instants are the scheduler clock's milliseconds."""

    reader: LogReader
    # Whether `open` may give another instant than the promised one, by which outcomes know a promise. Such a backlog
    # leaves out what is settled itself.
    has_own_instants: bool = False
    # A lower bound of the instants of all that has not been opened. Each backlog keeps it whenever it changes, since
    # the scheduler reads it at every step.
    first_due_ms: int = FAR_MS

    # It holds up nothing, and nothing after it counts as settled.
    @property
    def missing_due_ms(self) -> int:
        """Return `first_due_ms` of what cannot be opened now, or is due later than its pair says."""
        return FAR_MS

    # Called from the commit's callback, in log order. It must not fail: an exception here stops the log
    # (log/writer.py), since the row is durable and only a recovery would find the promise.
    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Keep these; true for those that count as opened, which are the scheduler's from now on."""

    # The one question that may pause. While it does, `add` may be called; an added promise is then given up by this
    # `open` or returned by that `add`, never both.
    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Give up all that may be due before `until_ms`, or the first part of it; `first_due_ms` moves on."""

    # Retention removes rows below the answer, so it may be too low and never too high.
    def needed_seq(self, settled_ms: int) -> int | None:
        """Return the oldest row that is needed; what was opened and is due before `settled_ms` is settled."""

    # The state may be older than the files: what lies behind it comes to `restore` as `waiting`.
    def state(self, settled_ms: int) -> msgspec.Struct | None:
        """Return what a restart needs, for a checkpoint saved after `files_to_sync` were synced."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Begin with what `state` returned and with what came, or was rewritten, since; blocking.

        Without a state `waiting` is all that waits. Return what counts as opened.
        """

    # -- besides, as a backlog answers that has no files, no bound and no form of its own ----------------------

    # Asked before the rows are appended, the only moment at which a promise can still be refused.
    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit when promises for these instants, not yet in the log, would be too many."""
        return

    def encode_waiting(self, promises: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Return LOG_SCHEMA promises as they are to stand in the log."""
        return promises

    def encode_rewrite(self, promises: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        """Return promises as the new rows hold them, given the notes they were opened with (reader thread)."""
        return promises

    def decode_waiting(self, promises: pa.RecordBatch) -> pa.RecordBatch:
        """Return promises that lie in the log as the messages they are."""
        return promises

    def read_bodies(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Return these promises in the order of `row_seq`, which ascends (reader thread)."""
        return self.decode_waiting(take_promises(self.reader, row_seq))

    def clock_stepped(self, now_ms: int, shift_of: Callable[[Int64Array], Int64Array]) -> bool:
        """Return whether all that is loaded of this backlog must be opened again, as its rows are due at other times.

        `shift_of` gives, by number, how much later than they say durations are due since the clock was set.
        """
        return False

    def holds(self, seq: Int64Array) -> Bools:
        """Return which of these numbers are this backlog's; asked when `clock_stepped` says so."""
        return np.ones(len(seq), np.bool_)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """Return (folder, files) written since the last call: to be synced before `state` is saved."""
        return []

    def sync_failed(self) -> None:
        """Take back what `files_to_sync` gave out: it was not synced."""
        return

    def statistics(self) -> dict[str, int]:
        """Return counts for people, by name."""
        return {}

    def close(self) -> None:
        """Close the files; the reader thread has finished."""
        return
