"""The pending scheduled messages at one time, for every strategy: rows of the log and of the table, and settled pairs.

    in the log     scheduled messages from the watermark on, which were not moved to the table. Messages of delay levels
                   are always in the log, also before the watermark. A strategy with its own files keeps the rows of its
                   messages in the log, too
    in the table   scheduled messages in the data files
    settled        the mark of the schedule, and pairs (due time, version) that the mark does not cover
                   (schedule/outcomes.py)

A snapshot is taken on the event loop without an await, and between two attaches. So all three belong to the same time,
and a message that an attach moves from the log to the table is in exactly one of them.
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
    from_seq: int  # rows of the log before it contain no pending message
    watermark: int  # earlier rows, except those of delay levels, are in the table
    to_seq: int  # end of the log
    settled: Settled
    holds: Holds
    entries: list[FileEntry]  # the files of the table

    @cached_property
    def settled_seq(self) -> Int64Array:
        """The versions of the settled pairs, sorted.

        Sorted at the first use, in another thread, because a million of them would block the event loop.
        """
        return np.sort(self.settled.seq)

    def waits(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Check which of these scheduled messages (columns) are pending."""
        is_settled = (due_ms < self.settled.before_ms) & ~self.settled.may_wait(seq)
        # Only messages due before the mark may be held. Usually there are none.
        if is_settled.any() and len(self.holds):
            is_settled &= ~self.holds.contains(due_ms, seq)
        if len(self.settled_seq):
            # Compare versions only, because a version has exactly one due time.
            index = np.minimum(np.searchsorted(self.settled_seq, seq), len(self.settled_seq) - 1)
            is_settled |= self.settled_seq[index] == seq
        return np.asarray(~is_settled)

    def first_ms(self, entry: FileEntry) -> int:
        """Find a due time before which this file contains no pending scheduled message."""
        # Held messages may be pending before the mark. To find out which files contain some is not worthwhile.
        if len(self.holds) or self.settled.may_be_pending_in(entry.min_seq, entry.max_seq):
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
        """Take a snapshot. Its files are not deleted before the end of the block."""
        scheduling = self._scheduling
        # During a change of the table, some messages may be neither in the tail of the log nor in the listed files.
        async with self._attaching:
            watermark = self._attach_state.watermark
            settled, entries = scheduling.scheduler.settled(), scheduling.hour_log.pending.live_entries()
            needed_seq = scheduling.scheduler.needed_seq()
            from_seqs = [watermark] if scheduling.compacts else []
            from_seqs += [] if needed_seq is None else [needed_seq]
            to_seq = self._reader.next_seq
            snapshot = Snapshot(
                self._clock.now_ms(), min([*from_seqs, to_seq]), watermark, to_seq, settled, scheduling.outcomes.holds,
                entries,
            )  # fmt: skip
        with self._pending_table.catalog.keeping(entry.path for entry in entries):
            yield snapshot

    def open_file(self, entry: FileEntry) -> DataFile:
        """Open a file of the table for the background thread, separate from the files of the reader thread."""
        return DataFile(self._pending_table.data_files, entry)


def is_shown(topic: str, requested_topic: str | None) -> bool:
    """Check whether a page may show a topic. Retry and dead-letter topics are shown only if they were requested."""
    return (
        topic == requested_topic
        if requested_topic is not None
        else not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    )
