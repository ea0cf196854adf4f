"""The backlog `delay_levels`: RocketMQ's levels, with one queue of the schedule topic per level.

A message is an entry in the index of its queue. That entry exists before `add` is called, so nothing else is stored.
Opening takes entries from the heads of all queues. An added message counts as opened at once if it is due within the
lead time (`ahead_ms`) and its queue has no unopened entries before it.

A level is a duration: when the clock is set, its entries are due earlier or later by the step. Then each queue is
scanned again from its offset on, and all loaded messages of this backlog are opened again. After a restart no entry
waits longer than the duration of its level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model.message import Int64Array, int64
from timeball.schedule.backlog import Backlog, Bools, Opened, Rewritten
from timeball.schedule.delay_levels.queue import LevelQueue, ShiftOf
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.levels import LevelTable, restored
from timeball.schedule.locations import KINDS, Waiting, as_scheduled
from timeball.schedule.outcomes import Outcomes, Settled

OPEN_ROWS = 131_072  # entries of a queue opened at a time; the event loop reads them in a few ms

_NONE = np.empty(0, np.int64)


class LevelsState(msgspec.Struct):
    """The offset of each queue, in a checkpoint."""

    levels: dict[int, LevelFacts]


class DelayLevels(Backlog):
    """The queues of the schedule topic, opened at their heads. Belongs to the event loop."""

    changes_due_times = True

    def __init__(
        self,
        reader: LogReader,
        table: LevelTable,
        indexes: Callable[[], Sequence[QueueIndex]],
        outcomes: Outcomes,
        *,
        ahead_ms: int,
    ) -> None:
        """Take the queues of the schedule topic from `indexes` with every call."""
        self.table, self.reader, self._indexes, self._outcomes = table, reader, indexes, outcomes
        self._ahead_ms = ahead_ms
        self._queues: dict[int, LevelQueue] = {}
        # The earliest original due time of entries that a clock step has postponed, and the ends of the queues at that
        # step, by queue.
        self._postponed_ms, self._postponed_ends = FAR_MS, dict[int, int]()

    # -- the five operations of a backlog --------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Read the new entries from the indexes of all queues."""
        opened_seqs = []
        for number, index in enumerate(self._indexes()):
            queue = self._queues.get(number)
            if queue is not None or index.max_offset > index.min_offset:
                queue = queue or self._queue(number, index)
                # All queues are read, not only those of `waiting`, because the indexes already contain all new entries.
                seq = queue.add_new(now_ms + self._ahead_ms)
                if seq is not None:
                    opened_seqs.append(seq)
        self._update_first_due()
        if not opened_seqs:
            return np.zeros(len(waiting), np.bool_)
        return np.isin(waiting.seq, np.concatenate(opened_seqs))

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open the heads of all queues. Skip messages that are settled (released or cancelled) or in flight."""
        parts = [part for queue in self._queues.values() for part in queue.open(until_ms, OPEN_ROWS)]
        self._update_first_due()
        if not parts:
            return Opened.nothing()
        release_ms, due, seq = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        pending = self._outcomes.waits(due, seq)
        return Opened.near(release_ms[pending], seq[pending], seq[pending])

    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest of the rows at the queues' offsets. None if all queues are empty."""
        self._advance()
        return min(
            (seq for queue in self._queues.values() if (seq := queue.needed_seq()) is not None), default=None
        )

    def state(self, settled_ms: int) -> LevelsState:
        """Build the offsets of all queues. They include all durable releases."""
        self._advance()
        return LevelsState({number: LevelFacts(queue.low) for number, queue in self._queues.items()})

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Scan the queues from their saved offsets on. An offset outside its queue is moved to the nearest end."""
        assert state is None or isinstance(state, LevelsState)
        for number, index in enumerate(self._indexes()):
            if index.max_offset > index.min_offset:
                queue = self._queue(number, index)
                offset = state.levels[number].offset if state is not None and number in state.levels else 0
                # The offset is from a checkpoint. The index may have been rebuilt since, and retention may have moved
                # its start.
                queue.low = min(max(offset, index.min_offset), index.max_offset)
                due = queue.find_entries(settled.seq)
                # A message may have been released under another due time, because the clock was set. It is settled
                # under its original due time as well.
                differs = (due >= 0) & (due != settled.due_ms)
                self._outcomes.add_settled(due[differs], settled.seq[differs])
                queue.rebuild()
                self._restore_durations(queue)
                queue.shorten_long_waits(now_ms)
        self._update_first_due()
        return Opened.nothing()

    # -- further methods of a backlog ------------------------------------------------------------------------

    def read_bodies(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read the messages in these rows (reader thread). Skip rows that are no scheduled messages.

        Those were sent to this topic before the broker reserved it, and are in its queue already.
        """
        rows = self.reader.read_rows(row_seq)
        is_scheduled = np.isin(rows.column("kind").to_numpy(), list(KINDS))
        return restored(as_scheduled(rows if is_scheduled.all() else rows.filter(pa.array(is_scheduled))))

    def decode_from_log(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
        """Restore the topics and queues to which the messages were sent."""
        return restored(scheduled_rows)

    @property
    def missing_due_ms(self) -> int:
        """The earliest original due time of unsettled entries that are postponed. The mark must not pass it."""
        if self._postponed_ms < FAR_MS:
            self._advance()
            if all(self._queues[number].low >= end for number, end in self._postponed_ends.items()):
                self._postponed_ms = FAR_MS
        return self._postponed_ms

    def clock_stepped(self, now_ms: int, shift_of: ShiftOf) -> bool:
        """Scan all queues again with the new shifts. All loaded messages of this backlog must be opened again."""
        self._advance()
        for queue in self._queues.values():
            queue.rebuild(shift_of)
            queue.shorten_long_waits(now_ms)
        self._postponed_ms = min((queue.first_late_ms() for queue in self._queues.values()), default=FAR_MS)
        self._postponed_ends = {number: queue.added_to for number, queue in self._queues.items()}
        self._update_first_due()
        return True

    def holds(self, seq: Int64Array) -> Bools:
        """Compute a mask of the numbers that are in a queue."""
        is_in_queue = np.zeros(len(seq), np.bool_)
        for queue in self._queues.values():
            is_in_queue |= queue.find_entries(seq) >= 0
        return is_in_queue

    def statistics(self) -> dict[str, int]:
        """Count the pending messages. Cancelled ones are included until their turn comes."""
        self._advance()
        return {"waiting_rows": sum(queue.waiting_rows for queue in self._queues.values())}

    def offsets(self) -> dict[int, tuple[int, int]]:
        """List (offset, end of the queue) by level, for administrators."""
        self._advance()
        return {
            number + 1: (queue.low, queue.index.max_offset) for number, queue in sorted(self._queues.items())
        }

    # -- internals -------------------------------------------------------------------------------------------

    def _queue(self, number: int, index: QueueIndex) -> LevelQueue:
        """Make and store the queue `number`. A level that the table no longer has gets no duration."""
        duration_ms = self.table.durations_ms[number] if number < len(self.table) else None
        queue = self._queues[number] = LevelQueue(number, index, duration_ms)
        return queue

    def _update_first_due(self) -> None:
        """Store the earliest due time of the unopened entries of all queues."""
        firsts = (queue.first_due_ms() for queue in self._queues.values())
        self.first_due_ms = min((ms for ms in firsts if ms is not None), default=FAR_MS)

    def _advance(self) -> None:
        """Move the offsets of all queues past settled entries."""
        for queue in self._queues.values():
            queue.advance(self._outcomes)

    def _restore_durations(self, queue: LevelQueue) -> None:
        """Restore the duration with which the entries of a queue were accepted, if it is longer than in the table."""
        for stretch in queue.stretches:
            entry = queue.index.read(stretch.next, 1)
            row = self.reader.read_rows(entry["seq"].astype(np.int64))
            # One row per stretch is enough, because all its messages were accepted for the same level, in order.
            queue.extend_duration(stretch.head_ms - int(int64(row.column("store_ms"))[0]))
