"""The pending scheduled messages at one time, for every strategy: rows of the log and of the table, and settled pairs.

    in the log     scheduled messages from the watermark on, which were not moved to the table. Messages of delay levels
                   are always in the log, also before the watermark. The messages of a strategy with its own files are
                   in the log, too
    in the table   scheduled messages in the data files
    settled        the mark of the schedule, and pairs (due time, version) that the mark does not cover
                   (schedule/outcomes.py)
    selected       the selections, which change the states of messages (registry/selections.py)

A snapshot is taken on the event loop without an await, and between two attaches. So all parts belong to the same time,
and a message that an attach moves from the log to the table is in exactly one of the two.

`LogTail` reads the messages of the log, and keeps them sorted by due time between two reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.selections import (
    CONDITION_COLUMNS,
    NOTHING_SELECTED,
    Described,
    Selected,
    Selections,
)
from timeball.io.clock import SchedulerClock
from timeball.log.disk_thread import ConfirmLead
from timeball.log.reader import LogReader
from timeball.model.answers import FIRST_POSITION, LAST_POSITION, PagePosition
from timeball.model.errors import OutOfRange
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, Kind, int64
from timeball.schedule.backlog import Bools
from timeball.schedule.delay_levels import with_original_topics
from timeball.schedule.locations import KINDS, Columns, moved_versions
from timeball.schedule.outcomes import Holds, Settled
from timeball.schedule.scheduler import Scheduling
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile, search
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
    selected: Selected = NOTHING_SELECTED

    @cached_property
    def settled_seq(self) -> Int64Array:
        """The versions of the settled pairs, sorted.

        Sorted at the first use, in another thread, because a million of them would block the event loop.
        """
        return np.sort(self.settled.seq)

    def are_pending(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Compute a mask of the pending messages among these scheduled messages (columns)."""
        is_settled = (due_ms < self.settled.before_ms) & ~self.settled.may_be_pending(seq)
        # Holds matter only for messages that the mark covers. Usually there are no holds.
        if is_settled.any() and len(self.holds):
            is_settled &= ~self.holds.contains(due_ms, seq)
        if len(self.settled_seq):
            # Compare versions only, because a version has exactly one due time.
            index = np.minimum(np.searchsorted(self.settled_seq, seq), len(self.settled_seq) - 1)
            is_settled |= self.settled_seq[index] == seq
        return np.asarray(~is_settled)

    def first_ms(self, entry: FileEntry) -> int:
        """Find a due time before which this file contains no pending scheduled message."""
        # Held messages may be pending before the mark. It costs too much to find out which files contain any.
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
        selections: Selections,
        confirm_lead: ConfirmLead,
    ) -> None:
        """Create the source of snapshots. `attaching` is locked during each change of the pending table."""
        self._attaching, self._clock, self._reader = attaching, clock, reader
        self._attach_state, self._scheduling, self._pending_table = attach_state, scheduling, pending_table
        self._selections, self._confirm_lead = selections, confirm_lead

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Snapshot]:
        """Take a snapshot. Its files are not deleted before the end of the block.

        Raises NotLeader if this node may not lead its group any more.
        """
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
                entries, self._selections.selected,
            )  # fmt: skip
        with self._pending_table.catalog.keeping(entry.path for entry in entries):
            await self._confirm_lead()
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


# ---- states of messages, as selections have changed them -----------------------------------------------------
# Rows are read only for messages that a selection may have changed.

# Messages at some ascending indexes of a part, with the columns that conditions need.
DescribedPart = tuple[Int64Array, Described]


@dataclass(frozen=True, slots=True)
class View(Columns):
    """Pending messages in the states that selections have given them, as columns."""

    due_ms: Int64Array
    topic: Codes
    is_cancelled: Bools
    is_held: Bools


def described_in_group(
    selected: Selected, file: DataFile, group: int, row: Int64Array, due_ms: Int64Array, seq: Int64Array
) -> Iterator[DescribedPart]:
    """Describe the pending messages of a row group that a selection may have changed. Yields one part or none.

    `row`, `due_ms` and `seq` contain the row in the group (ascending), due time and version of each pending message.
    """
    # Most row groups are outside the bounds of all selections, and nothing more is read of them.
    index = np.flatnonzero(selected.may_change(due_ms, seq))
    if not len(index):
        return
    columns = ["topic", *(("number", *CONDITION_COLUMNS) if selected.reads_rows else ())]
    rows = file.read_group_rows(group, row[index], columns).combine_chunks().to_batches()[0]
    numbers = seq[index]  # only a condition needs the number of a message that was moved
    if selected.reads_rows:
        number = rows.column("number")
        numbers = np.where(np.asarray(number.is_valid()), number.fill_null(0).to_numpy(), numbers)
    yield index, Described(due_ms[index], seq[index], numbers, _topic_texts(rows.column("topic")), rows)


def described_in_log(
    selected: Selected, reader: LogReader, rows: Logged, topics: Sequence[str]
) -> Iterator[DescribedPart]:
    """Describe the pending messages of the log that a selection may have changed, in parts. `topics`: names by code."""
    index = np.flatnonzero(selected.may_change(rows.due_ms, rows.seq))
    for begin in range(0, len(index), _SCAN_ROWS):
        part = index[begin : begin + _SCAN_ROWS]
        chosen = rows.part(part)
        topic = pa.array(topics, pa.string()).take(pa.array(chosen.topic))
        # Only a condition needs the number of a message that was moved.
        number, condition_rows = chosen.seq, None
        if selected.reads_rows:
            condition_rows = reader.read_rows(chosen.row_seq, ["kind", "source_seq", *CONDITION_COLUMNS])
            is_moved = condition_rows.column("kind").to_numpy() == Kind.MOVED
            # A MOVED row contains the message's number in `source_seq`.
            source_seq = condition_rows.column("source_seq").fill_null(0).to_numpy()
            number = np.where(is_moved, source_seq, chosen.row_seq)
        yield part, Described(chosen.due_ms, chosen.seq, number, topic, condition_rows)


def view_of(
    selected: Selected, parts: Iterable[DescribedPart], due_ms: Int64Array, topic: Codes, codes: TopicCodes
) -> View:
    """Compute the states of pending messages with these due times and topics.

    `parts` describe the messages that a selection may have changed. All other messages are unchanged.
    """
    result = View(due_ms.copy(), topic.copy(), *(np.zeros(len(due_ms), np.bool_) for _ in range(2)))
    for index, described in parts:
        states = selected.states(described)
        result.due_ms[index] = states.due_ms
        result.is_cancelled[index], result.is_held[index] = states.owner >= 0, states.holder >= 0
        for mover in np.unique(states.mover[states.mover >= 0]).tolist():
            result.topic[index[states.mover == mover]] = codes.code(selected.facts[mover].to_topic)
    return result


def _topic_texts(topic: pa.Array) -> pa.Array:
    """Convert a column of topics, which may be dictionary-encoded, to strings."""
    return topic if topic.type == pa.string() else topic.cast(pa.string())


# ---- the messages of the log, sorted by due time -------------------------------------------------------------
# A page needs the messages that are due next, but the log is in the order of arrival. So its scheduled messages are
# kept sorted in memory as long as a client reads pages. `ROWS_MAX` bounds their number. If the log has more, the
# earliest ones up to some due time are kept, and a page after that time reads the log again.

# 29 bytes each. During a read there are up to twice as many.
ROWS_MAX = 4_000_000
_SCAN_ROWS = 65_536
Codes = npt.NDArray[np.int32]
_COLUMNS = ["seq", "kind", "topic", "queue_offset", "due_ms", "source_seq", "version_seq", "from_due_ms"]


class TopicCodes:
    """Maps topics to codes: indexes in `names`, assigned at the first use. Belongs to the background thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}

    def encode(self, topics: pa.Array) -> Codes:
        """Convert a column of topics to their codes."""
        # A frame has only a few distinct topics. Each is looked up once.
        dictionary = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
        codes = np.array([self.code(name) for name in dictionary.dictionary.to_pylist()], dtype=np.int32)
        return (
            codes[dictionary.indices.to_numpy(zero_copy_only=False)] if len(codes) else np.empty(0, np.int32)
        )

    def code(self, name: str) -> int:
        """Find the code of a topic, or assign one."""
        code = self._codes.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code


@dataclass(frozen=True, slots=True)
class Logged(Columns):
    """Rows of the log that contain scheduled messages, as columns.

    A message may have several rows: one row sets its due time, and later rows write it again with the same due time
    (hops, rolls). The last row of a message is the valid one.
    """

    due_ms: Int64Array
    seq: Int64Array  # the version
    row_seq: Int64Array
    topic: Codes
    is_level: Bools  # the message is in the queue of a delay level

    def sorted(self) -> Logged:
        """Sort by due time and version, and keep only the last row of each version."""
        # The sort puts the last row of each version first.
        order = np.lexsort((-self.row_seq, self.seq, self.due_ms))
        ordered = self.part(order)
        is_first = np.ones(len(ordered), np.bool_)
        is_first[1:] = ordered.seq[1:] != ordered.seq[:-1]
        return ordered if is_first.all() else ordered.part(is_first)


_NONE = np.empty(0, np.int64)
NOTHING = Logged(_NONE, _NONE, _NONE, np.empty(0, np.int32), np.empty(0, np.bool_))


def scan(reader: LogReader, snapshot: Snapshot, from_seq: int, codes: TopicCodes) -> Iterator[Logged]:
    """Yield the scheduled messages of the log from row `from_seq` on that are not in the table (background thread).

    Settled messages are included.
    """
    begin_seq = max(from_seq, reader.first_seq)
    while True:
        try:
            batches = reader.coalesced(begin_seq, snapshot.to_seq, KINDS, _SCAN_ROWS, _COLUMNS)
            rows = next(batches, None)
            break
        except OutOfRange:
            if reader.first_seq <= begin_seq:
                raise
            # Retention has removed a segment since `first_seq` was read. None of its messages is pending.
            begin_seq = reader.first_seq
    while rows is not None:
        scheduled = _scheduled_rows(reader, rows, snapshot.watermark, codes)
        if len(scheduled):
            yield scheduled
        rows = next(batches, None)


def _scheduled_rows(reader: LogReader, rows: pa.RecordBatch, watermark: int, codes: TopicCodes) -> Logged:
    """Select the scheduled messages among SCHEDULED and MOVED rows that are not in the table."""
    row_seq, is_level = int64(rows.column("seq")), np.asarray(rows.column("queue_offset").is_valid())
    # A half message has no due time. Rows before the watermark are in the table, except those of delay levels.
    is_relevant = np.asarray(rows.column("due_ms").is_valid()) & ((row_seq >= watermark) | is_level)
    if not is_relevant.all():
        rows, row_seq, is_level = (
            rows.filter(pa.array(is_relevant)),
            row_seq[is_relevant],
            is_level[is_relevant],
        )
    if not len(row_seq):
        return NOTHING
    is_moved = rows.column("kind").to_numpy() == Kind.MOVED
    # The version: the row that set the due time.
    seq = np.where(is_moved, moved_versions(rows), row_seq) if is_moved.any() else row_seq
    topic = codes.encode(rows.column("topic"))
    if is_level.any():
        # Messages of delay levels are stored under SCHEDULE_TOPIC. Their properties contain the real topic.
        topic[is_level] = codes.encode(
            with_original_topics(reader.read_rows(row_seq[is_level])).column("topic")
        )
    return Logged(int64(rows.column("due_ms")), seq, row_seq, topic, is_level)


class LogTail:
    """The sorted scheduled messages of the log between two positions. Belongs to the background thread."""

    def __init__(self, reader: LogReader, codes: TopicCodes, rows_max: int = ROWS_MAX) -> None:
        self._reader, self._codes, self._rows_max = reader, codes, rows_max
        self.forget()

    def forget(self) -> None:
        """Drop all kept messages, to free their memory."""
        self._rows, self._next_seq = NOTHING, -1  # rows before `_next_seq` were read
        # The scheduled messages in [_low, _high) are kept.
        self._low = self._high = FIRST_POSITION

    def after(
        self, snapshot: Snapshot, low: PagePosition, high: PagePosition, rows: int
    ) -> tuple[Logged, PagePosition]:
        """Find the pending messages of the log in [low, high), sorted, and the position up to which all were examined.

        One call examines at most `rows` messages.
        """
        if not self._low <= low < self._high:
            # First try to keep all messages, from the earliest due time on. If there are too many, keep messages from
            # `low` on.
            self.forget()
            self._high = LAST_POSITION
            self._read(snapshot)
            if low >= self._high:
                self.forget()
                self._low, self._high = low, LAST_POSITION
                self._read(snapshot)
        elif self._next_seq < snapshot.to_seq:
            self._read(snapshot)
        # Binary searches, so that the number of earlier messages does not matter.
        rows_by_due_time = self._rows
        begin = search(rows_by_due_time.due_ms, rows_by_due_time.seq, low)
        end = search(rows_by_due_time.due_ms, rows_by_due_time.seq, high)
        page = rows_by_due_time.part(slice(begin, min(end, begin + rows)))
        if begin + rows < end:
            # The position after the last scheduled message examined.
            end_position = int(page.due_ms[-1]), int(page.seq[-1]) + 1
        else:
            end_position = min(high, self._high)
        is_pending = snapshot.are_pending(page.due_ms, page.seq) & _is_in_log(page, snapshot)
        return page if is_pending.all() else page.part(is_pending), end_position

    def _read(self, snapshot: Snapshot) -> None:
        """Read the rows of the log since the last read, up to the end of the snapshot."""
        begin_seq = snapshot.from_seq if self._next_seq < 0 else self._next_seq
        still_in_log = self._rows.part(_is_in_log(self._rows, snapshot))
        batches, count = [still_in_log], len(still_in_log)
        for scheduled in scan(self._reader, snapshot, begin_seq, self._codes):
            is_kept = (scheduled.due_ms >= self._low[0]) & (scheduled.due_ms <= self._high[0])
            is_kept &= snapshot.are_pending(scheduled.due_ms, scheduled.seq)
            if is_kept.any():
                batches.append(scheduled.part(is_kept))
                count += len(batches[-1])
            # Not after each batch, because a cut sorts all kept messages.
            if count > 2 * self._rows_max:
                batches = [self._sort_and_cut(Logged.joined(batches))]
                count = len(batches[0])
        self._rows = self._sort_and_cut(Logged.joined(batches))
        self._next_seq = snapshot.to_seq

    def _sort_and_cut(self, rows: Logged) -> Logged:
        """Sort the messages and cut them to [`_low`, `_high`). If they are more than `rows_max`, lower `_high`."""
        rows = rows.sorted()
        rows = rows.part(
            slice(search(rows.due_ms, rows.seq, self._low), search(rows.due_ms, rows.seq, self._high))
        )
        if len(rows) > self._rows_max:
            self._high = int(rows.due_ms[self._rows_max]), int(rows.seq[self._rows_max])
            rows = rows.part(slice(0, self._rows_max))
        return rows


def _is_in_log(rows: Logged, snapshot: Snapshot) -> Bools:
    """Compute a mask of the messages that are in the log. All other messages were compacted into the table."""
    return np.asarray((rows.row_seq >= snapshot.watermark) | rows.is_level)
