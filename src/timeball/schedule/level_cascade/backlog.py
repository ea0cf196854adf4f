"""The backlog `level_cascade`: the queue of each message, and the times at which queues are opened.

Each message that is not settled (released or cancelled) has exactly one entry in one queue (queue.py), with the row of
the log that contains it. A queue of hops that are not the last of their messages is opened when the hop of its first
entry is over. A queue of last hops is opened earlier, by up to the lead time. An opened message is either near, or it
is rewritten and begins the next hop of its list. A message that is near when it arrives gets an entry as well, so that
a restart finds it. This entry is opened at once.

`first_due_ms` serves two purposes: it is a lower bound of the due times, and the scheduler opens the backlog half the
lead time before it. For a queue of hops that are not the last, it is half the lead time after the end of the first hop,
whose messages are due more than the lead time after that (placement.py). So a state can only be used with the same lead
time.

A clock that is set back changes no entry. Later entries begin another stretch of their queue. If the rest of a list no
longer fits the remaining time, a new list is made.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa

from timeball.io.files import Files
from timeball.log.reader import LogReader
from timeball.model.errors import SetupError
from timeball.model.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.backlog import Bools, Opened, Rewritten
from timeball.schedule.columns import runs_of
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.generations import BacklogInFiles
from timeball.schedule.level_cascade import placement, timing_list
from timeball.schedule.level_cascade.placement import NEAR, QUEUES, is_last, lead_ms_of, plan
from timeball.schedule.level_cascade.queue import RECORD, Entries, HopQueue, QueueState
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Outcomes, Settled

# A smaller difference is no clock step, because the scheduler's clock stands still meanwhile.
SET_BACK_MS = 1_000
OPEN_ROWS = 65_536  # entries of each queue that are opened at a time
FOLDER = "cascade"

_NONE = np.empty(0, np.int64)


class CascadeState(msgspec.Struct):
    """The data that a restart needs besides the files of the queues."""

    generation: int  # the number of the folder of the files
    known_seq: int  # messages with lower numbers and in lower rows have their entries
    lead_ms: int
    queues: list[QueueState]


def check(files: Files, state: CascadeState, lead_ms: int) -> None:
    """Raise SetupError if `state` has another lead time, Corrupt if an entry within its bounds is damaged."""
    if state.lead_ms != lead_ms:
        raise SetupError("--gather-ahead-ms has changed")
    folder = generations.folder_of(FOLDER, state.generation)
    generations.check(files, folder, (queue.bounds() for queue in state.queues))


class LevelCascade(BacklogInFiles):
    """All queues of the cascade. Belongs to the event loop."""

    def __init__(self, files: Files, reader: LogReader, outcomes: Outcomes, *, ahead_ms: int) -> None:
        """Make a backlog without queues. Call `restore` before any other method."""
        self._files, self.reader, self._outcomes = files, reader, outcomes
        self.lead_ms = lead_ms_of(ahead_ms)
        self.queues: list[HopQueue] = []
        self._known_seq = 0
        self._latest_entry_ms = -FAR_MS  # the time at which the latest hops began
        # Previous rows of rewritten messages, since the last `_advance`.
        self._previous_rows: list[Int64Array] = []

    # -- the five operations of a backlog --------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Add an entry for each message, sorted by row. Rewritten messages begin their next hop."""
        if not len(waiting):
            return np.zeros(0, np.bool_)
        # A hop does not begin before the latest one, unless the clock was set back.
        is_set_back = now_ms < self._latest_entry_ms - SET_BACK_MS
        self._latest_entry_ms = now_ms if is_set_back else max(now_ms, self._latest_entry_ms)
        # The old entry is removed only by `_advance`. Until then a checkpoint contains it, and the log contains the new
        # row.
        if rewritten is not None:
            self._previous_rows.append(rewritten.row_seq)
        hops = plan(waiting.due_ms - now_ms) if rewritten is None else rewritten.note
        return self._enter(waiting, hops, self._latest_entry_ms)

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open the entries whose hops are over, and those of last hops that are due."""
        opened = Opened.nothing()
        for queue in reversed(self.queues):
            hop_end_until_ms = until_ms if is_last(queue.number) else now_ms
            while (
                queue.head_ms is not None
                and placement.opens_ms(queue.number, queue.head_ms, self.lead_ms) <= now_ms
                and queue.head_ms <= hop_end_until_ms
            ):
                opened = Opened.joined([opened, self._open_some(queue, now_ms, hop_end_until_ms)])
                if queue.head_ms is None or len(opened) >= OPEN_ROWS:
                    break
            if len(opened) >= OPEN_ROWS:
                break
        self._update_first_due()
        return opened

    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest row that an entry refers to. None if there are no entries."""
        self._advance()
        return min((row for queue in self.queues if (row := queue.first_row_seq) is not None), default=None)

    def state(self, settled_ms: int) -> CascadeState:
        """Build the bounds of the queues, and list the superseded entries within them."""
        self._advance()
        # Queues that never had an entry have no files. A state without them is a few hundred bytes.
        states = [queue.state() for queue in self.queues if queue.log.end]
        return CascadeState(self._generation, self._known_seq, self.lead_ms, states)

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Start from a state. Messages in rows that the state does not include get a new entry."""
        assert state is None or isinstance(state, CascadeState)
        folder = self._begin_generation(self._files, FOLDER, state)
        states = {} if state is None else {queue.number: queue for queue in state.queues}
        self.queues = [HopQueue(self._files, folder, number, states.get(number)) for number in range(QUEUES)]
        self.logs = [queue.log for queue in self.queues]
        self._known_seq, self._latest_entry_ms = 0 if state is None else state.known_seq, now_ms
        waiting = waiting.part(waiting.row_seq >= self._known_seq)
        self._forget_old_rows(waiting.seq[waiting.seq < self._known_seq])
        near = self._reopen_near(now_ms)
        added_near = self._add_in_log_order(waiting, now_ms)
        self._update_first_due()
        return Opened.joined([near, added_near])

    # -- further methods of a backlog ------------------------------------------------------------------------

    def encode_for_log(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """Add the list of the later hops to the properties of messages."""
        return timing_list.encode_for_log(scheduled_rows, now_ms)

    def encode_rewrite(self, scheduled_rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        """Add the list of the hops after the next one to the properties of rewritten messages."""
        return timing_list.encode_rewrite(scheduled_rows, note)

    def statistics(self) -> dict[str, int]:
        """Count the messages that wait for the end of a hop. Cancelled ones may be included until that time."""
        return {"waiting_rows": sum(queue.unopened_rows for queue in self.queues)}

    # -- adding to queues -------------------------------------------------------------------------------------

    def _enter(self, waiting: Waiting, hops: Int64Array, entry_ms: int) -> Bools:
        """Add messages to the queues of their first hops, which begin at `entry_ms`. Return which of them are near."""
        due, seq, row_seq = waiting.due_ms, waiting.seq, waiting.row_seq
        self._known_seq = max(self._known_seq, int(row_seq.max()) + 1, int(seq.max()) + 1)
        placements = placement.enter(due, hops, entry_ms, self.lead_ms)
        # Grouped by queue, so that each queue gets one append of a batch that is sorted by row.
        order = np.argsort(placements.queue, kind="stable")
        records = np.empty(len(due), RECORD)
        records["hop_end_ms"], records["due_ms"] = placements.hop_end_ms[order], due[order]
        records["seq"], records["row_seq"] = seq[order], row_seq[order]
        records["hops"] = placements.left[order]
        numbers = placements.queue[order]
        for begin, count in zip(*runs_of(numbers), strict=True):
            queue = self.queues[int(numbers[begin])]
            head_ms = queue.head_ms
            queue.append(records[begin : begin + count])
            if queue.head_ms != head_ms and queue.number != NEAR:
                self._update_first_due()
        near = np.asarray(placements.queue == NEAR)
        if near.any():
            # Opened at once. The entry is only for a restart, which would not find the message elsewhere.
            self.queues[NEAR].keep_opened(self.queues[NEAR].take_due(FAR_MS, len(due)))
        return near

    # -- opening queues --------------------------------------------------------------------------------------

    def _open_some(self, queue: HopQueue, now_ms: int, until_ms: int) -> Opened:
        """Open up to OPEN_ROWS entries whose hops end by `until_ms`. Choose the next hops of far messages."""
        entries = queue.take_due(until_ms, OPEN_ROWS)
        entries = entries.part(~self._outcomes.is_settled(entries.due_ms, entries.seq))
        queue.keep_opened(entries)
        # A message is not rewritten after its last hop, which ends near the due time.
        must_rewrite = (entries.due_ms - now_ms > self.lead_ms) & (not is_last(queue.number))
        hops = entries.hops
        if must_rewrite.any():
            hops = np.where(must_rewrite, placement.next_hops(entries.due_ms, hops, now_ms), hops)
        return Opened(entries.due_ms, entries.seq, entries.row_seq, hops, must_rewrite)

    def _update_first_due(self) -> None:
        """Store a lower bound of the due times in all queues."""
        firsts = (
            placement.first_due_ms(queue.number, queue.head_ms, self.lead_ms)
            for queue in self.queues
            if queue.head_ms is not None
        )
        self.first_due_ms = min(firsts, default=FAR_MS)

    # -- removing entries, and restarts ------------------------------------------------------------------------

    def _advance(self) -> None:
        """Remove the entries of settled and rewritten messages from all queues."""
        previous_rows = np.concatenate([_NONE, *self._previous_rows])
        for queue in self.queues:
            queue.advance(self._outcomes.is_settled, previous_rows)
        self._previous_rows = []
        self._update_first_due()

    def _forget_old_rows(self, seq: Int64Array) -> None:
        """Mark the entries of messages that were rewritten after the state was saved.

        They had been opened, so they are at the beginning of a stretch. The search ends when all have been found.
        """
        searches = [(queue, queue.low) for queue in self.queues if queue.low < queue.log.end]
        remaining = len(seq)
        while remaining and searches:
            next_searches = []
            for queue, begin in searches:
                old_entries, end = queue.find_entries(seq, begin)
                queue.mark_superseded(old_entries)
                remaining -= len(old_entries)
                # Each round searches one chunk of each queue, so that it ends soon after the last entry is found.
                if end < queue.log.end:
                    next_searches.append((queue, end))
            searches = next_searches

    def _reopen_near(self, now_ms: int) -> Opened:
        """Open the messages that were near. Make new entries for those that no longer are: the clock was set back."""
        queue, reopened, no_longer_near = self.queues[NEAR], Opened.nothing(), list[Entries]()
        while queue.head_ms is not None:
            entries = queue.take_due(FAR_MS, OPEN_ROWS)
            entries = entries.part(~self._outcomes.is_settled(entries.due_ms, entries.seq))
            near = entries.due_ms - now_ms <= self.lead_ms
            queue.keep_opened(entries.part(near))
            opened = Opened.near(entries.due_ms[near], entries.seq[near], entries.row_seq[near])
            reopened = Opened.joined([reopened, opened])
            no_longer_near.append(entries.part(~near))
            queue.mark_superseded(no_longer_near[-1].index)
        for part in no_longer_near:  # only now: an entry that is near would join the queue that is being read
            if len(part):
                self._enter(Waiting(part.due_ms, part.seq, part.row_seq), plan(part.due_ms - now_ms), now_ms)
        return reopened
