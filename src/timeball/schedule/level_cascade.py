"""`level_cascade`: any due time by hops over a table of 32 levels, with one FIFO each.

Pending messages take no memory, and due times have no bound. The cost is in the log: one row per hop, which is at most
eight rows for the next 24 hours, and one row every 20 hours beyond.

A remaining time is split into levels of a table of 32:

    1s 5s 10s 30s 1m … 2h                                levels 1 to 18 are RocketMQ's: a number means the same
    3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h     levels 19 to 32 are the digits that RocketMQ lacks

A *list* contains the digits of the time, largest first: tens and ones of hours, minutes and seconds. A digit that is in
the table is one level. Another digit is two levels, the digit below it and 1. The table has all tens, all minutes and
all odd digits, so 24 hours take eight levels at most. Seconds are rounded down: the sum is less than a second below the
time. Beyond 24 hours the list is 20h alone, and the rest is split when that is over. A list is an int64 with six bits
per level, the first level in the lowest bits, and 0 after the last.

A hop begins when the message is added to a queue, and ends one level's duration later, so that each queue is sorted:

    queue 0            near messages: no hop any more
    queue 2·level - 1  messages in a hop of this level, with more hops after it
    queue 2·level      messages in their last hop, of this level: near when it is over

Each message that is not settled (released or cancelled) has exactly one entry in one queue, with the row of the log
that contains it. A queue of hops that are not the last of their messages is opened when the hop of its first entry is
over. A queue of last hops is opened earlier, by up to the lead time. An opened message is either near, or it is
rewritten and begins the next hop of its list. A message that is near when it arrives gets an entry as well, so that a
restart finds it. This entry is opened at once.

`first_due_ms` serves two purposes: it is a lower bound of the due times, and the scheduler opens the backlog half the
lead time before it. For a queue of hops that are not the last, it is half the lead time after the end of the first hop,
whose messages are due more than the lead time after that. So a state can only be used with the same lead time.

A clock that is set back changes no entry. Later entries begin another stretch of their queue. If the levels left in a
list no longer fit the remaining time, a new list is made.

A queue contains messages that wait for the end of a hop, on disk, first in, first out:

    … done … | opened: near, or on the move | stretch: waits on disk | stretch: … |
             low                            next                                  end

    entry   | hop_end_ms | due_ms    | seq       | row_seq   | hops      | crc32c    |   48 bytes, little-endian
            +------------+-----------+-----------+-----------+-----------+-----------+

All messages of a queue wait equally long. So entries arrive sorted by the end of their hop, and a search finds the
entries whose hop is over. Two events break this order: a clock that is set back, and a restart that adds messages in
another order than before. Then the queue consists of several *stretches*, each sorted by hop end and by row. None
blocks another.

An opened entry ("near, or on the move" in the figure) stays until its message is settled or has a new entry, in which
case the old one is *superseded*. `low` is the first entry that may still be needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.io.files import Files
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import SetupError
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END, Int64Array, Kind, byte_lengths
from timeball.schedule import mapped_log
from timeball.schedule.backlog import Bools, Opened, Rewritten
from timeball.schedule.delay_levels import LevelTable
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import CHUNK, Columns, Waiting, leading, runs_of, with_column
from timeball.schedule.mapped_log import BacklogInFiles, LogBounds, RecordArray, RecordType
from timeball.schedule.outcomes import Outcomes, Settled

# ---- one queue of hops ---------------------------------------------------------------------------------------

RECORD = np.dtype(
    [
        ("hop_end_ms", "<i8"),  # the end of the hop
        ("due_ms", "<i8"),
        ("seq", "<i8"),  # the version of the message
        ("row_seq", "<i8"),  # the row of the log that contains it now
        ("hops", "<i8"),  # the levels left when the hop is over
    ]
)
RECORDS = RecordType(RECORD, file_records=1 << 17)  # 5 MB per file, for each of 65 queues

Mask = npt.NDArray[np.bool_]
IsSettled = Callable[[Int64Array, Int64Array], Mask]


class QueueState(msgspec.Struct, array_like=True):
    """One queue in a checkpoint."""

    number: int
    low: int
    end: int
    cuts: list[int]  # the ends of the stretches that end after `low`
    # (first, count) of the superseded entries from `low` on: their messages have another entry.
    gone: list[tuple[int, int]]

    def bounds(self) -> LogBounds:
        """Describe the queue's log for `mapped_log.open_logs`."""
        return f"{self.number:02d}", RECORDS, self.low, self.end


@dataclass(slots=True)
class Stretch:
    """A sorted part of the queue. It ends at `end`, and its entries from `next` on are not opened."""

    next: int
    end: int
    head_ms: int  # the hop end of entry `next`
    last_ms: int  # the hop end of the last entry
    last_row_seq: int


@dataclass(frozen=True, slots=True)
class Entries(Columns):
    """Some entries, with their indexes in the queue."""

    index: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array
    hops: Int64Array


class HopQueue:
    """The entries of one queue, and which of them are opened. Belongs to the event loop."""

    def __init__(self, files: Files, folder: str, number: int, state: QueueState | None = None) -> None:
        """Open the part of a queue in `folder` that a checkpoint contains. None stands for an empty queue."""
        state = state or QueueState(number, 0, 0, [], [])
        self.number, self.low = number, state.low
        (self.log,) = mapped_log.open_logs(files, folder, [state.bounds()])
        self.head_ms: int | None = None  # the earliest hop end among the entries that wait on disk
        self._stretches = [
            self._read_stretch(begin, end)
            for begin, end in zip([state.low, *state.cuts], state.cuts, strict=False)
        ]
        # Opened entries that are not known to be done, and the indexes of superseded entries.
        self._opened: list[Entries] = []
        self._superseded = np.concatenate([_NONE, *(np.arange(first, first + n) for first, n in state.gone)])
        self._update_head()

    @property
    def unopened_rows(self) -> int:
        """The number of entries that wait for the end of their hop."""
        rows = 0
        for stretch in self._stretches:
            is_within = (self._superseded >= stretch.next) & (self._superseded < stretch.end)
            rows += stretch.end - stretch.next - int(np.count_nonzero(is_within))
        return rows

    @property
    def opened_rows(self) -> int:
        """The number of opened entries that are not known to be done, as of the last `advance`."""
        return sum(map(len, self._opened))

    def append(self, records: RecordArray) -> None:
        """Append entries whose hops all end at one time, sorted by row."""
        begin = self.log.append(records)
        hop_end_ms, first_row_seq = int(records["hop_end_ms"][0]), int(records["row_seq"][0])
        last = self._stretches[-1] if self._stretches else None
        # By row as well: a checkpoint saves only the ends of stretches, and a restart relies on both orders within one.
        if last and last.last_ms <= hop_end_ms and last.last_row_seq < first_row_seq:
            if last.next == last.end:
                last.head_ms = hop_end_ms
            last.end, last.last_ms, last.last_row_seq = self.log.end, hop_end_ms, int(records["row_seq"][-1])
        else:
            self._stretches.append(
                Stretch(begin, self.log.end, hop_end_ms, hop_end_ms, int(records["row_seq"][-1]))
            )
        self.head_ms = hop_end_ms if self.head_ms is None else min(self.head_ms, hop_end_ms)

    def take_due(self, until_ms: int, rows_max: int) -> Entries:
        """Take up to `rows_max` entries whose hops end by `until_ms`, from the stretch with the earliest hop end.

        There must be unopened entries. The caller then passes the entries of unsettled messages to `keep_opened`.
        """
        # After a clock was set back there may be several stretches with unopened entries.
        unopened = (stretch for stretch in self._stretches if stretch.next < stretch.end)
        stretch = min(unopened, key=lambda stretch: stretch.head_ms)
        begin, end = stretch.next, min(stretch.end, stretch.next + rows_max)
        records = leading(self.log.read, "hop_end_ms", begin, end, until_ms + 1)
        stretch.next += len(records)
        if stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])
        self._update_head()
        columns = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq", "row_seq", "hops"))
        entries = Entries(np.arange(begin, stretch.next), *columns)
        return entries.part(~np.isin(entries.index, self._superseded)) if len(self._superseded) else entries

    def keep_opened(self, entries: Entries) -> None:
        """Keep opened entries until their messages are settled or rewritten."""
        if len(entries):
            self._opened.append(entries)

    def mark_superseded(self, index: Int64Array) -> None:
        """Mark entries as superseded: their messages have another entry."""
        self._superseded = np.concatenate([self._superseded, index])

    def find_entries(self, seq: Int64Array, begin: int) -> tuple[Int64Array, int]:
        """Find the entries of these messages in a chunk from `begin` on. Returns their indexes and the chunk's end."""
        end = min(begin + CHUNK, self.log.end)
        indexes = begin + np.flatnonzero(np.isin(self.log.read(begin, end)["seq"], seq))
        return indexes[~np.isin(indexes, self._superseded)], end

    def advance(self, is_settled: IsSettled, moved_from: Int64Array) -> None:
        """Remove the opened entries of messages that are settled, or were rewritten from one of the rows `moved_from`.

        Unopened entries of settled messages are removed from the beginning of each stretch.
        """
        if self.low == self.log.end:
            return
        if self._opened:
            opened = Entries.joined(self._opened)
            # Entries of rewritten messages are listed as superseded, because a restart must not open both entries.
            is_moved = np.isin(opened.row_seq, moved_from)
            is_done = is_moved | is_settled(opened.due_ms, opened.seq)
            self.mark_superseded(opened.index[is_moved])
            opened = opened.part(~is_done)
            self._opened = [opened] if len(opened) else []
        for stretch in self._stretches:
            self._skip_settled(stretch, is_settled)
        self._update_head()
        first_indexes = [int(opened.index.min()) for opened in self._opened]
        first_indexes += [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        # Everything before `low` is done, so its files and its rows of the log may be removed.
        self.low = min(first_indexes, default=self.log.end)
        self._superseded = self._superseded[self._superseded >= self.low]
        self._stretches = [stretch for stretch in self._stretches if stretch.end > self.low]
        self.log.drop_below(self.low)

    @property
    def first_row_seq(self) -> int | None:
        """A row of the log below which no entry needs a row, as of the last `advance`. None if there are no entries."""
        row_seqs = [int(opened.row_seq.min()) for opened in self._opened]
        heads = [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        if heads:
            row_seqs.append(int(self.log.at(np.array(heads))["row_seq"].min()))
        return min(row_seqs, default=None)

    def state(self) -> QueueState:
        """Build the state of the queue for a checkpoint. Call `advance` before."""
        cuts = [stretch.end for stretch in self._stretches]
        return QueueState(self.number, self.low, self.log.end, cuts, _ranges(np.sort(self._superseded)))

    # -- internals -------------------------------------------------------------------------------------------

    def _read_stretch(self, begin: int, end: int) -> Stretch:
        """Read the bounds of a saved stretch from its first and its last entry."""
        head, last = self.log.at(np.array([begin, end - 1]))
        return Stretch(begin, end, int(head["hop_end_ms"]), int(last["hop_end_ms"]), int(last["row_seq"]))

    def _skip_settled(self, stretch: Stretch, is_settled: IsSettled) -> None:
        """Skip settled entries at the beginning of a stretch. Otherwise the log would keep their rows for hours."""
        begin, chunk_rows = stretch.next, 1  # one entry first: nearly always it is pending
        while stretch.next < stretch.end and stretch.next - begin < CHUNK:
            records = self.log.read(stretch.next, min(stretch.end, stretch.next + chunk_rows))
            due, seq = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq"))
            is_superseded = np.isin(np.arange(stretch.next, stretch.next + len(records)), self._superseded)
            pending = np.flatnonzero(~(is_superseded | is_settled(due, seq)))
            stretch.next += int(pending[0]) if len(pending) else len(records)
            if len(pending):
                stretch.head_ms = int(records["hop_end_ms"][pending[0]])
                return
            chunk_rows = CHUNK  # at most one chunk per call, because the event loop is blocked meanwhile
        if begin < stretch.next < stretch.end:
            stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])

    def _update_head(self) -> None:
        """Store the earliest hop end of the unopened entries."""
        self.head_ms = min((s.head_ms for s in self._stretches if s.next < s.end), default=None)


def _ranges(index: Int64Array) -> list[tuple[int, int]]:
    """Convert sorted indexes to ranges (first, count)."""
    if len(index) == 0:
        return []
    begins, counts = runs_of(index - np.arange(len(index)))
    return list(zip(index[begins].tolist(), counts.tolist(), strict=True))


# ---- the backlog: all queues ---------------------------------------------------------------------------------

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
        raise SetupError("the time for which bodies are loaded ahead has changed")
    folder = mapped_log.folder_of(FOLDER, state.generation)
    mapped_log.check_generation(files, folder, (queue.bounds() for queue in state.queues))


class LevelCascade(BacklogInFiles):
    """All queues of the cascade. Belongs to the event loop."""

    def __init__(self, files: Files, reader: LogReader, outcomes: Outcomes, *, ahead_ms: int) -> None:
        """Make a backlog without queues. Call `restore` before any other method.

        `ahead_ms`: bodies are loaded this long before the due time. The lead time is at least LEAD_MS_MIN.
        """
        self._files, self.reader, self._outcomes = files, reader, outcomes
        self.lead_ms = lead_ms_of(ahead_ms)
        self.queues: list[HopQueue] = []
        self._known_seq = 0
        self._latest_entry_ms = -FAR_MS  # the time at which the latest hops began
        # The rows that messages had before they were rewritten for their next hop, since the last `_advance`.
        self._previous_rows: list[Int64Array] = []

    # -- the core operations of a backlog ---------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Add an entry for each of the messages, which are sorted by row. Rewritten messages begin their next hop.

        Returns a mask of the near messages, which count as opened.
        """
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
        """Open the entries whose hops are over, and those in last hops that end by `until_ms`.

        The opening ends as soon as it has OPEN_ROWS messages or more.
        """
        opened = Opened.nothing()
        for queue in reversed(self.queues):
            hop_end_until_ms = until_ms if holds_last_hops(queue.number) else now_ms
            while (
                queue.head_ms is not None
                and opens_ms(queue.number, queue.head_ms, self.lead_ms) <= now_ms
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
        """Build the state for a checkpoint: the bounds of the queues, and the superseded entries within them."""
        self._advance()
        # Queues that never had an entry have no files. A state without them is a few hundred bytes.
        states = [queue.state() for queue in self.queues if queue.log.end]
        return CascadeState(self._generation, self._known_seq, self.lead_ms, states)

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Start from a state. Messages in rows that the state does not include get a new entry.

        Returns the near messages, of the state and of `waiting`.
        """
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
        """Add the hops after the first one to the properties of the scheduled messages, as TIMING-LIST."""
        return encode_for_log(scheduled_rows, now_ms)

    def encode_rewrite(self, scheduled_rows: pa.RecordBatch, note: Int64Array) -> pa.RecordBatch:
        """Set TIMING-LIST of rewritten messages to the hops after the next one. `note` contains their hops."""
        return encode_rewrite(scheduled_rows, note)

    def statistics(self) -> dict[str, int]:
        """Count the messages that wait for the end of a hop. Cancelled ones may be included until that time."""
        return {"waiting_rows": sum(queue.unopened_rows for queue in self.queues)}

    # -- adding to queues -------------------------------------------------------------------------------------

    def _enter(self, waiting: Waiting, hops: Int64Array, entry_ms: int) -> Bools:
        """Add messages to the queues of the first hops in `hops`, which begin at `entry_ms`.

        Near messages enter the queue NEAR, where they are opened at once. Returns a mask of these.
        """
        due, seq, row_seq = waiting.due_ms, waiting.seq, waiting.row_seq
        self._known_seq = max(self._known_seq, int(row_seq.max()) + 1, int(seq.max()) + 1)
        placements = place(due, hops, entry_ms, self.lead_ms)
        # Grouped by queue, so that each queue gets one append of a batch that is sorted by row.
        order = np.argsort(placements.queue, kind="stable")
        records = np.empty(len(due), RECORD)
        records["hop_end_ms"], records["due_ms"] = placements.hop_end_ms[order], due[order]
        records["seq"], records["row_seq"] = seq[order], row_seq[order]
        records["hops"] = placements.left[order]
        numbers = placements.queue[order]
        for begin, count in zip(*runs_of(numbers), strict=True):
            queue = self.queues[int(numbers[begin])]
            previous_head_ms = queue.head_ms
            queue.append(records[begin : begin + count])
            if queue.head_ms != previous_head_ms and queue.number != NEAR:
                self._update_first_due()
        near = np.asarray(placements.queue == NEAR)
        if near.any():
            # Opened at once. The entry is only for a restart, which would not find the message elsewhere.
            self.queues[NEAR].keep_opened(self.queues[NEAR].take_due(FAR_MS, len(due)))
        return near

    # -- opening queues --------------------------------------------------------------------------------------

    def _open_some(self, queue: HopQueue, now_ms: int, until_ms: int) -> Opened:
        """Open up to OPEN_ROWS entries of a queue whose hops end by `until_ms`.

        Messages that are due more than the lead time from now must be rewritten, with their next hops as notes.
        """
        entries = queue.take_due(until_ms, OPEN_ROWS)
        entries = entries.part(~self._outcomes.is_settled(entries.due_ms, entries.seq))
        queue.keep_opened(entries)
        # Never after a last hop, which ends near the due time.
        must_rewrite = (entries.due_ms - now_ms > self.lead_ms) & (not holds_last_hops(queue.number))
        hops = entries.hops
        if must_rewrite.any():
            hops = np.where(must_rewrite, fitting_lists(entries.due_ms, hops, now_ms), hops)
        return Opened(entries.due_ms, entries.seq, entries.row_seq, hops, must_rewrite)

    def _update_first_due(self) -> None:
        """Store a lower bound of the due times in all queues."""
        firsts = (
            first_due_ms(queue.number, queue.head_ms, self.lead_ms)
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
        """Mark the saved entries of these messages as superseded: they were rewritten after the state was saved.

        The entries had been opened, so they are at the beginnings of stretches. The search ends when all are found.
        """
        searches = [(queue, queue.low) for queue in self.queues if queue.low < queue.log.end]
        remaining = len(seq)
        while remaining and searches:
            next_searches = []
            for queue, begin in searches:
                old_indexes, end = queue.find_entries(seq, begin)
                queue.mark_superseded(old_indexes)
                remaining -= len(old_indexes)
                # Each round searches one chunk of each queue, so that it ends soon after the last entry is found.
                if end < queue.log.end:
                    next_searches.append((queue, end))
            searches = next_searches

    def _reopen_near(self, now_ms: int) -> Opened:
        """Open the saved messages of the queue NEAR that are still near.

        The others get new entries in other queues. There are some if the clock was set back.
        """
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


# ---- placement: the next queue of a message, and its next hops -----------------------------------------------
# Delays between hops (a scan every 100 ms, a commit, a restart) add up and are not compensated for each hop: the list
# is followed while its next level ends at most `DRIFT_MS` after the due time. Otherwise a new list is made for the
# remaining time. Last hops are opened early, by up to `lead_ms`, so that these delays are not visible in a delivery.
#     not the last:  end of the hop <  due - lead          opened at its end
#     the last:      end of the hop <= due + DRIFT_MS      opened up to lead_ms before its end

ROCKETMQ = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
NAMES = tuple(f"{ROCKETMQ} 3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h".split())
LEVELS = len(NAMES)
assert LEVELS == 32

# The most levels in a list, and the bits of one level.
HOPS_MAX = 8
HOP_BITS = 6
REACH_MS = DAY_MS  # the longest time that one list covers
# The level of times beyond that.
BEYOND_REACH = NAMES.index("20h") + 1

# Level n is at index n. There is no level 0: its duration is 0.
DURATION_MS: Int64Array = np.array((0, *LevelTable.parse(" ".join(NAMES)).durations_ms), dtype=np.int64)

DRIFT_MS = SECOND_MS  # eight hops, each delayed by a scan and a commit
LEAD_MS_MIN = 4 * DRIFT_MS  # half of it, the latest time to open a queue, is still twice the drift
# The queue of near messages, and the number of all queues.
NEAR = 0
QUEUES = 1 + 2 * LEVELS
SCAN_MS = 100  # the interval of RocketMQ's scan


def _levels_of(count: int, unit: str) -> list[int]:
    """Split a number of hours, minutes or seconds into levels, largest first."""
    names = []
    tens, ones = divmod(count, 10)
    for digit, zeros in ((tens, "0"), (ones, "")):
        name = f"{digit}{zeros}{unit}"
        if digit and name in NAMES:
            names.append(name)
        elif digit:
            names += [f"{digit - 1}{zeros}{unit}", f"1{zeros}{unit}"]
    return [NAMES.index(name) + 1 for name in names]


def _packed(levels: list[int]) -> int:
    """Encode a list of levels as a number: six bits per level, the first level lowest."""
    return sum(level << (HOP_BITS * index) for index, level in enumerate(levels))


def _table(values: int, unit: str) -> tuple[Int64Array, Int64Array]:
    """Build the packed levels of each number from 0 to values - 1 in this unit, and the bits that each list takes."""
    lists = [_levels_of(value, unit) for value in range(values)]
    bits = [HOP_BITS * len(levels) for levels in lists]
    return np.array([_packed(levels) for levels in lists]), np.array(bits)


_HOURS, _HOUR_BITS = _table(25, "h")
_MINUTES, _MINUTE_BITS = _table(60, "m")
_SECONDS, _ = _table(60, "s")


def plan(remaining_ms: Int64Array) -> Int64Array:
    """Split each remaining time (ms) into a list of levels. The list is 0 (empty) for less than a second."""
    within = np.clip(remaining_ms, 0, REACH_MS)
    hours, minutes, seconds = within // HOUR_MS, within // MINUTE_MS % 60, within // SECOND_MS % 60
    hour_bits = _HOUR_BITS[hours]
    hops = _HOURS[hours] | _MINUTES[minutes] << hour_bits
    hops |= _SECONDS[seconds] << (hour_bits + _MINUTE_BITS[minutes])
    return np.where(remaining_ms > REACH_MS, BEYOND_REACH, hops)


def first_level(hops: Int64Array) -> Int64Array:
    """Extract the first level of each list. 0 for an empty list."""
    return np.asarray(hops & ((1 << HOP_BITS) - 1))


def levels_after_first(hops: Int64Array) -> Int64Array:
    """Remove the first level of each list."""
    return np.asarray(hops >> HOP_BITS)


def lead_ms_of(ahead_ms: int) -> int:
    """Compute the lead time: how many ms before its due time a message is near. Bodies are loaded `ahead_ms` ahead."""
    return max(ahead_ms, LEAD_MS_MIN)


def holds_last_hops(queue: int) -> bool:
    """Check whether the hops of this queue are the last ones of their messages."""
    return queue % 2 == 0


def opens_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Compute when to open a queue whose first hop ends at `head_ms`. Queues of last hops open ahead of that."""
    # Hops that are not the last are opened together with others, at the next multiple of SCAN_MS.
    return head_ms - DRIFT_MS - lead_ms // 2 if holds_last_hops(queue) else -(-head_ms // SCAN_MS) * SCAN_MS


def first_due_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Compute a lower bound of the due times in a queue, half the lead time after its opening."""
    return opens_ms(queue, head_ms, lead_ms) + lead_ms // 2


@dataclass(frozen=True, slots=True)
class Placements:
    """The queue of each message, the end of its hop, and the levels left after that."""

    queue: Int64Array
    hop_end_ms: Int64Array
    left: Int64Array


def fitting_lists(due_ms: Int64Array, hops: Int64Array, now_ms: int) -> Int64Array:
    """Choose the list of levels of each message whose next hop begins at `now_ms`.

    `hops` are the present lists. A list is kept if its first level ends at most DRIFT_MS after the due time. Otherwise,
    and if it is empty (0), the remaining time is split anew (`plan`).
    """
    level = first_level(hops)
    fits = (level > 0) & (now_ms + DURATION_MS[level] <= due_ms + DRIFT_MS)
    return hops if fits.all() else np.where(fits, hops, plan(due_ms - now_ms))


def place(due_ms: Int64Array, hops: Int64Array, entry_ms: int, lead_ms: int) -> Placements:
    """Choose the queues of messages whose first hops begin at `entry_ms`. Near messages have no hop.

    A message that `hops` no longer fits gets a new list (`fitting_lists`).
    """
    is_near = due_ms - entry_ms <= lead_ms
    hops = fitting_lists(due_ms, hops, entry_ms)
    level = np.where(is_near, 0, first_level(hops))
    hop_end = entry_ms + DURATION_MS[level]
    is_last_hop = hop_end >= due_ms - lead_ms
    return Placements(np.where(is_near, NEAR, 2 * level - 1 + is_last_hop), hop_end, levels_after_first(hops))


# ---- the property TIMING-LIST --------------------------------------------------------------------------------
# The property shows readers of the log or the table the progress of a message: the numbers of the levels of its later
# hops, in order, such as "27,9,22". The broker does not read it, because the queues contain the lists. So it is omitted
# if it would make the properties longer than RocketMQ allows, or if the list is empty. A property of this name that a
# client sent is removed. A release removes it (broker/accepting/delivery.py), even if another strategy is used by then.

NAME = "TIMING-LIST"

_FIRST = pa.array(["", *(f"{number}" for number in range(1, LEVELS + 1))], pa.string())
_NEXT = pa.array(["", *(f",{number}" for number in range(1, LEVELS + 1))], pa.string())
# Patterns: one property of this name, a sequence of them at the start of a text, and one after other properties.
_ENTRY = f"{NAME}{PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_AT_THE_START = f"^(?:{_ENTRY}(?:{PROPERTY_END}|$))+"
_BEHIND_OTHERS = f"{PROPERTY_END}{_ENTRY}"


def hop_texts(hops: Int64Array) -> pa.Array:
    """Build the hop list of each message as the value of its property: level numbers, "27,9,22". Empty for none."""
    columns = [_FIRST.take(pa.array(first_level(hops)))]
    while (hops := levels_after_first(hops)).any():
        columns.append(_NEXT.take(pa.array(first_level(hops))))
    return pc.binary_join_element_wise(*columns, "")


def without_list(properties: pa.Array) -> pa.Array:
    """Remove all properties TIMING-LIST. Texts without any are returned unchanged, byte by byte."""
    if not pc.any(pc.match_substring(properties, NAME)).as_py():
        return properties
    properties = pc.replace_substring_regex(properties, _AT_THE_START, "")
    return pc.replace_substring_regex(properties, _BEHIND_OTHERS, "")


def with_list(properties: pa.Array, hops: Int64Array) -> pa.Array:
    """Replace TIMING-LIST by the levels of `hops`, or remove it where `hops` is empty or the text becomes too long."""
    properties = without_list(properties)
    has_list = hops != 0
    if not has_list.any():
        return properties
    texts_before = properties.fill_null("")
    # Some clients send texts without a separator at the end.
    lacks_separator = pc.and_(
        pc.not_equal(texts_before, ""), pc.invert(pc.ends_with(texts_before, PROPERTY_END))
    )
    separator = pc.if_else(lacks_separator, PROPERTY_END, "")
    text = pc.binary_join_element_wise(
        texts_before, separator, NAME + PROPERTY_NAME_END, hop_texts(hops), PROPERTY_END, ""
    )
    # A list is for readers only. Where it does not fit, the message is stored without one.
    has_list &= byte_lengths(text) <= limits.PROPERTIES_BYTES_MAX
    return pc.if_else(pa.array(has_list), text, properties)


def encode_for_log(rows: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
    """Add TIMING-LIST to the messages of kind SCHEDULED among these rows, which were accepted at `now_ms`."""
    is_scheduled = rows.column("kind").to_numpy() == Kind.SCHEDULED
    if not is_scheduled.any():
        return rows
    later_hops = levels_after_first(plan(rows.column("due_ms").fill_null(0).to_numpy() - now_ms))
    if is_scheduled.all():
        return with_column(rows, "properties", with_list(rows.column("properties"), later_hops))
    # The properties of immediate messages stay unchanged.
    mask = pa.array(is_scheduled)
    new_properties = with_list(rows.column("properties").filter(mask), later_hops[is_scheduled])
    return with_column(
        rows, "properties", pc.replace_with_mask(rows.column("properties"), mask, new_properties)
    )


def encode_rewrite(rows: pa.RecordBatch, hops: Int64Array) -> pa.RecordBatch:
    """Set TIMING-LIST of messages whose next hop is the first level of `hops`."""
    return with_column(rows, "properties", with_list(rows.column("properties"), levels_after_first(hops)))
