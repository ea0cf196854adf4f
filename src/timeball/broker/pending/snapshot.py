"""The pending scheduled messages at one time, for every strategy: rows of the log and of the table, and settled pairs.

    in the log     scheduled messages from the watermark on that have not been moved to the table; those of delay
    levels, older
                   ones too. A strategy with files of its own keeps its scheduled messages' rows in the log as well
    in the table   scheduled messages in its files
    settled        the mark of the schedule and the pairs that it does not cover (schedule/outcomes.py)

The snapshot is taken on the event loop without an await, and between two attaches, so that all three are from the same
time: a scheduled message that an attach moves from the log to the table is in one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from timeball.broker.registry.attach import AttachState
from timeball.io.clock import SchedulerClock
from timeball.log.reader import LogReader
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array
from timeball.schedule.backlog import Bools
from timeball.schedule.outcomes import Holds, Settled
from timeball.schedule.scheduler import Scheduling
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.pending_table import PendingTable


@dataclass(frozen=True)
class Snapshot:
    """The scheduled messages that are pending at `now_ms`. Its methods may be called in any thread."""

    now_ms: int
    from_seq: int  # no row of the log before it is pending
    watermark: int  # earlier rows, except those of delay levels, are in the table
    to_seq: int
    settled: Settled
    holds: Holds
    entries: list[FileEntry]

    @cached_property
    def settled_seq(self) -> Int64Array:
        """The numbers of the settled pairs, sorted on demand: there may be a million, too many for the event loop."""
        return np.sort(self.settled.seq)

    def waits(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Return which of these scheduled messages are not settled."""
        done = (due_ms < self.settled.before_ms) & ~self.settled.may_wait(seq)
        # Checked only for scheduled messages before the mark: usually there are none, because files contain no past
        # scheduled messages.
        if done.any() and len(self.holds):
            done &= ~self.holds.contains(due_ms, seq)
        if len(self.settled_seq):
            # By number only, because a version has one due time.
            at = np.minimum(np.searchsorted(self.settled_seq, seq), len(self.settled_seq) - 1)
            done |= self.settled_seq[at] == seq
        return np.asarray(~done)

    def first_ms(self, entry: FileEntry) -> int:
        """Return a due time before which this file contains no pending scheduled message."""
        # Held rows may be pending before the mark, and it is not worthwhile to find out which files contain some.
        if len(self.holds) or self.settled.may_touch(entry.min_seq, entry.max_seq):
            return entry.min_due_ms
        return max(entry.min_due_ms, self.settled.before_ms)


class Snapshots:
    """Takes snapshots of the pending scheduled messages. Belongs to the event loop."""

    def __init__(
        self,
        attaching: asyncio.Lock,
        *,
        clock: SchedulerClock,
        reader: LogReader,
        attach_state: AttachState,
        scheduling: Scheduling,
        pending_table: PendingTable,
    ) -> None:
        """Create the source of snapshots. `attaching` is locked during each change of the pending table."""
        self._attaching, self._clock, self._reader = attaching, clock, reader
        self._attach_state, self._scheduling, self._pending_table = attach_state, scheduling, pending_table

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Snapshot]:
        """Yield a snapshot. Its files are kept until the end of the block."""
        scheduling = self._scheduling
        # During a change of the table, some scheduled messages are in neither place.
        async with self._attaching:
            watermark = self._attach_state.watermark
            settled, entries = scheduling.scheduler.settled(), scheduling.hour_log.pending.live_entries()
            needed = scheduling.scheduler.needed_seq()
            first = [watermark] if scheduling.compacts else []
            first += [] if needed is None else [needed]
            to_seq = self._reader.next_seq
            snapshot = Snapshot(
                self._clock.now_ms(), min([*first, to_seq]), watermark, to_seq, settled, scheduling.outcomes.holds,
                entries,
            )  # fmt: skip
        with self._pending_table.catalog.keeping(entry.path for entry in entries):
            yield snapshot

    def open_file(self, entry: FileEntry) -> DataFile:
        """Open a file of the table for the background thread, separate from the files of the reader thread."""
        return DataFile(self._pending_table.data_files, entry)


def is_shown(topic: str, asked: str | None) -> bool:
    """Return whether messages for a topic are shown: copies on their way back only if their topic was requested."""
    return topic == asked if asked is not None else not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
