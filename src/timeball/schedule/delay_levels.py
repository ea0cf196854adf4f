"""`delay_levels`: one FIFO per level, as in RocketMQ 4. A search replaces RocketMQ's scan.

The queues of the topic SCHEDULE_TOPIC_XXXX are the FIFOs. They exist only as their index, where an entry contains the
due time in place of a tag's hash. Pending messages take no memory here. The offset of a level is the position of its
first entry that is not settled (released or cancelled). A release record refers to the scheduled message that it
settles, so a restart repeats no release.

Each message is an entry in the index of its queue. The entry exists before `add` is called, so nothing else is stored.
Opening takes entries from the heads of all queues. An added message counts as opened at once if it is due within the
lead time (`ahead_ms`) and its queue has no unopened entries before it.

A level is a duration: when the clock is set, its entries are due earlier or later by the step. Then each queue is
scanned again from its offset on, and all loaded messages of this backlog are opened again. After a restart no entry
waits longer than the duration of its level.

An entry of a queue contains the sequence number and, in its tag field, the due time. So a scan reads no messages, and
pending messages are ranges of the queue:

    … settled … | low … opened, or settled out of order … | stretch: next … end | stretch: next … end |

`low` is the offset of the level: the first entry that is not known to be settled. A checkpoint saves it. All messages
of a level wait equally long, so the queue is sorted by due time, and a search finds the due entries. A clock step
breaks this order once, and so does a level that became shorter. Then the queue consists of several *stretches*. Each is
sorted, and none blocks another. Because a level is a duration, all entries of a stretch may be due earlier or later
than they state, by the *shift* of the stretch (schedule/durations.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.checkpoint import LevelFacts
from timeball.log.format import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import Corrupt, InvalidMessage, SetupError
from timeball.model.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    Int64Array,
    byte_lengths,
    int64,
)
from timeball.schedule.backlog import Backlog, Bools, Opened, Rewritten
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import CHUNK, KINDS, Waiting, as_scheduled, leading
from timeball.schedule.outcomes import Outcomes, Settled

# ---- the level table ------------------------------------------------------------------------------------------
# The table is parsed from the text of RocketMQ's `messageDelayLevel`:
#
#     1s 5s 10s 30s 1m …      level n is the nth item; one blank between; units s, m, h, d
#
# Texts with which RocketMQ does not start are refused: two blanks, an unknown unit, no number. So are durations that
# are negative or longer than the maximum delay. Levels need not ascend. The table is fixed at run time. To change it,
# restart the broker. A pending message keeps the due time with which it was accepted.

# RocketMQ's SCHEDULE_TOPIC_QUEUE_NUM: the topic has this many queues, even with fewer levels.
SCHEDULE_QUEUES_MIN = 18

_UNIT_MS = {"s": limits.SECOND_MS, "m": limits.MINUTE_MS, "h": limits.HOUR_MS, "d": limits.DAY_MS}
_ITEM = re.compile(r"([+]?[0-9]{1,18})([smhd])")


class LevelTable:
    """The duration of each level in ms. Level n is at index n - 1."""

    def __init__(self, durations_ms: tuple[int, ...]) -> None:
        self.durations_ms = durations_ms
        self._array: Int64Array = np.array(durations_ms, dtype=np.int64)

    @classmethod
    def parse(cls, text: str) -> LevelTable:
        """Parse the text of --delay-levels. Raise SetupError with the name of the option and the item."""
        items = text.rstrip(" ").split(" ")
        if len(items) > limits.QUEUES_PER_TOPIC_MAX:
            raise SetupError(f"--delay-levels: {len(items)} levels; at most {limits.QUEUES_PER_TOPIC_MAX}")
        return cls(tuple(_duration_ms(number, item) for number, item in enumerate(items, 1)))

    def __len__(self) -> int:
        return len(self.durations_ms)

    @property
    def queues(self) -> int:
        """The number of queues of the schedule topic."""
        return max(SCHEDULE_QUEUES_MIN, len(self))

    def clamp(self, level: Int64Array) -> Int64Array:
        """Replace levels above the last one by the last, as RocketMQ does. No send is refused for its level."""
        return np.minimum(level, len(self))

    def delay_ms(self, level: Int64Array) -> Int64Array:
        """Look up the durations of these levels (1 to len), in ms."""
        return np.asarray(self._array[level - 1])


def _duration_ms(number: int, item: str) -> int:
    """Parse the item of a level, such as "10s". Raise SetupError."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise SetupError(
            f"--delay-levels: level {number} is {item!r}; write a number and one of s, m, h, d, "
            "with one blank between levels, such as '1s 5s 10s 1m'"
        )
    duration_ms = int(match[1]) * _UNIT_MS[match[2]]
    if duration_ms > limits.DELAY_MS_MAX:
        raise SetupError(f"--delay-levels: level {number} is {item}; ten years is the most")
    return duration_ms


# ---- the stored form of a message of a level ------------------------------------------------------------------

# While a message waits for a level it is stored as RocketMQ stores it. The conversion works on columns:
#
#     waiting      topic SCHEDULE_TOPIC_XXXX, queue level - 1,
#                  properties … DELAY \x01 level \x02 REAL_TOPIC \x01 topic \x02 REAL_QID \x01 queue \x02
#     released     topic and queue as they were; the three properties stay, as consumers of RocketMQ see them
#
# Properties that a client sent under these names are removed first, so that each name occurs once, with the broker's
# value. The timer properties are removed as well, since a level overrules them.

LEVEL, REAL_TOPIC, REAL_QUEUE = "DELAY", "REAL_TOPIC", "REAL_QID"
OVERRULED = ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")

# `_LEVEL_PROPERTIES` matches one property with one of these names and the separator before it. `_REAL_PROPERTIES`
# matches the two properties with the original topic and queue at the end of a text.
_NAMES = "|".join((LEVEL, REAL_TOPIC, REAL_QUEUE, *OVERRULED))
_LEVEL_PROPERTIES = f"{PROPERTY_END}(?:{_NAMES}){PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_REAL_PROPERTIES = (
    f"{REAL_TOPIC}{PROPERTY_NAME_END}(?P<topic>[^{PROPERTY_END}]+){PROPERTY_END}"
    f"{REAL_QUEUE}{PROPERTY_NAME_END}(?P<queue>-?[0-9]+){PROPERTY_END}$"
)


def with_level_properties(
    properties: pa.Array, level: Int64Array, topic: pa.Array, queue_id: pa.Array
) -> pa.Array:
    """Add the three properties of a pending message of a level. Raise InvalidMessage if a text becomes too long."""
    text = pc.binary_join_element_wise(
        "", pc.utf8_rtrim(properties.fill_null(""), PROPERTY_END), PROPERTY_END
    )
    # Properties of a client with these names are removed: it must not choose the topic that the broker restores later.
    text = pc.replace_substring_regex(text, _LEVEL_PROPERTIES, "")
    added = [
        part
        for name, value in (
            (LEVEL, pa.array(level).cast(pa.string())),
            (REAL_TOPIC, topic),
            (REAL_QUEUE, queue_id.cast(pa.string())),
        )
        for part in (name + PROPERTY_NAME_END, value, PROPERTY_END)
    ]
    # The texts got a leading separator above, so that each property could be matched with the separator before it. The
    # first separator is removed.
    text = pc.binary_join_element_wise(text, PROPERTY_END, *added, "")
    text = pc.utf8_ltrim(text, PROPERTY_END)
    lengths = byte_lengths(text)
    if int(lengths.max()) > limits.PROPERTIES_BYTES_MAX:
        raise InvalidMessage(
            f"properties of row {int(lengths.argmax())} are longer than {limits.PROPERTIES_BYTES_MAX} bytes "
            "with the names a delay level adds"
        )
    return text


def with_original_topics(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert READ_SCHEMA rows of the schedule topic to messages with their own topics and queues.

    Raises Corrupt for a row whose properties do not contain its topic and queue.
    """
    original = pc.extract_regex(rows.column("properties"), _REAL_PROPERTIES)
    if original.null_count:
        seq = rows.column("seq")[pc.index(original.is_null(), True).as_py()]
        raise Corrupt(f"seq {seq} waits in {SCHEDULE_TOPIC} and does not say for which topic")
    changed = {
        "topic": original.field("topic"),
        "queue_id": original.field("queue").cast(pa.int32()),
        "queue_offset": pa.nulls(rows.num_rows, pa.int64()),
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


# ---- the backlog: all levels ---------------------------------------------------------------------------------

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
        """`indexes` returns the indexes of the schedule topic's queues, and is called anew for each use.

        Messages that are due within `ahead_ms` when they arrive may count as opened.
        """
        self.table, self.reader, self._indexes, self._outcomes = table, reader, indexes, outcomes
        self._ahead_ms = ahead_ms
        self._queues: dict[int, LevelQueue] = {}  # by level - 1
        # The earliest original due time of entries that a clock step has postponed, and the end of each queue at that
        # step.
        self._postponed_ms, self._postponed_ends = FAR_MS, dict[int, int]()

    # -- the core operations of a backlog ---------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Read the new entries from the indexes of all queues. Returns a mask of the messages that count as opened."""
        opened_seqs = []
        for number, index in enumerate(self._indexes()):
            queue = self._queues.get(number)
            if queue is not None or index.max_offset > index.min_offset:
                queue = queue or self._make_queue(number, index)
                # `waiting` does not name the queues of its messages. Their entries are in the indexes before this call,
                # so the new entries of all queues are these.
                seq = queue.add_new(now_ms + self._ahead_ms)
                if seq is not None:
                    opened_seqs.append(seq)
        self._update_first_due()
        if not opened_seqs:
            return np.zeros(len(waiting), np.bool_)
        return np.isin(waiting.seq, np.concatenate(opened_seqs))

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Open up to OPEN_ROWS entries of each stretch that are due before `until_ms`.

        Messages that are settled (released or cancelled) or in flight are skipped.
        """
        parts = [part for queue in self._queues.values() for part in queue.open(until_ms, OPEN_ROWS)]
        self._update_first_due()
        if not parts:
            return Opened.nothing()
        release_ms, due, seq = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        pending = self._outcomes.are_pending(due, seq)
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
                queue = self._make_queue(number, index)
                offset = state.levels[number].offset if state is not None and number in state.levels else 0
                # The offset is from a checkpoint. The index may have been rebuilt since, and retention may have moved
                # its start.
                queue.low = min(max(offset, index.min_offset), index.max_offset)
                due = queue.find_due_times(settled.seq)
                # A message may have been released at another due time, because the clock was set. Its original due time
                # gets a settled pair as well.
                differs = (due >= 0) & (due != settled.due_ms)
                self._outcomes.add_settled(due[differs], settled.seq[differs])
                queue.rebuild()
                self._restore_durations(queue)
                queue.shorten_long_waits(now_ms)
        self._update_first_due()
        return Opened.nothing()

    # -- further methods of a backlog ------------------------------------------------------------------------

    def read_bodies(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read the messages in these rows (reader thread), with the topics and queues to which they were sent.

        Rows that are no scheduled messages are skipped: they were sent to the schedule topic before the broker reserved
        it. Raises Corrupt if a scheduled message lacks its original topic.
        """
        rows = self.reader.read_rows(row_seq)
        is_scheduled = np.isin(rows.column("kind").to_numpy(), list(KINDS))
        return with_original_topics(
            as_scheduled(rows if is_scheduled.all() else rows.filter(pa.array(is_scheduled)))
        )

    def decode_from_log(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch:
        """Restore the topics and queues to which the messages were sent."""
        return with_original_topics(scheduled_rows)

    @property
    def missing_due_ms(self) -> int:
        """The earliest original due time of unsettled entries that are postponed. The mark must not pass it."""
        if self._postponed_ms < FAR_MS:
            self._advance()
            if all(self._queues[number].low >= end for number, end in self._postponed_ends.items()):
                self._postponed_ms = FAR_MS
        return self._postponed_ms

    def clock_stepped(self, now_ms: int, shift_of: ShiftOf) -> bool:
        """Scan all queues again with the new shifts. Returns True: all loaded messages must be opened again."""
        self._advance()
        for queue in self._queues.values():
            queue.rebuild(shift_of)
            queue.shorten_long_waits(now_ms)
        firsts = (queue.first_postponed_ms() for queue in self._queues.values())
        self._postponed_ms = min(firsts, default=FAR_MS)
        self._postponed_ends = {number: queue.added_to for number, queue in self._queues.items()}
        self._update_first_due()
        return True

    def holds(self, seq: Int64Array) -> Bools:
        """Compute a mask of the numbers that are in a queue."""
        is_in_queue = np.zeros(len(seq), np.bool_)
        for queue in self._queues.values():
            is_in_queue |= queue.find_due_times(seq) >= 0
        return is_in_queue

    def statistics(self) -> dict[str, int]:
        """Count the pending messages. Settled ones are included until their queue's offset passes them."""
        self._advance()
        return {"waiting_rows": sum(queue.waiting_rows for queue in self._queues.values())}

    def offsets(self) -> dict[int, tuple[int, int]]:
        """List (offset, end of the queue) by level, for administrators."""
        self._advance()
        return {
            number + 1: (queue.low, queue.index.max_offset) for number, queue in sorted(self._queues.items())
        }

    # -- internals -------------------------------------------------------------------------------------------

    def _make_queue(self, number: int, index: QueueIndex) -> LevelQueue:
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
        """Extend the duration of a queue to the longest one with which the last entry of a stretch was accepted.

        It was longer than now if the level table has changed since.
        """
        for stretch in queue.stretches:
            entry = queue.index.read(stretch.end - 1, 1)
            row = self.reader.read_rows(entry["seq"].astype(np.int64))
            # One stretch may have entries of several tables. Its last entry alone decides by how much it is shifted
            # (`shorten_long_waits`), so no entry before it is read.
            queue.extend_duration(stretch.last_ms - int(int64(row.column("store_ms"))[0]))


# ---- the queue of one level ----------------------------------------------------------------------------------

# release times, original due times, sequence numbers
OpenedColumns = tuple[Int64Array, Int64Array, Int64Array]
# Maps sequence numbers to the ms by which entries are due later than they state.
ShiftOf = Callable[[Int64Array], Int64Array]


@dataclass(slots=True)
class Stretch:
    """The entries [next, end), which are not opened. They are sorted by due time."""

    next: int
    end: int
    head_ms: int  # the due time of entry `next`
    last_ms: int  # the due time of entry `end - 1`
    shift_ms: int = 0  # ms by which the entries are due later than they state; negative: earlier

    @property
    def first_due_ms(self) -> int:
        """The time at which the first entry is due, with the shift."""
        return self.head_ms + self.shift_ms


class LevelQueue:
    """The entries of one level. `number` is the queue in the schedule topic, level - 1."""

    def __init__(self, number: int, index: QueueIndex, duration_ms: int | None) -> None:
        """Start at the first entry of the index. `duration_ms` is None if the table no longer has this level."""
        self.number, self.index = number, index
        self._duration_ms = duration_ms
        self.low = self.added_to = index.min_offset  # entries before `added_to` have been added
        self.stretches: list[Stretch] = []

    @property
    def waiting_rows(self) -> int:
        """The number of entries from `low` on. Some of them may be settled, out of order."""
        return self.added_to - self.low

    def extend_duration(self, duration_ms: int) -> None:
        """Treat the level as at least `duration_ms` long: a shorter table must not release accepted messages early."""
        if self._duration_ms is not None:
            self._duration_ms = max(self._duration_ms, duration_ms)

    # -- adding entries --------------------------------------------------------------------------------------

    def add_new(self, near_ms: int) -> Int64Array | None:
        """Add the new entries of the index. Return the numbers of the entries that count as opened. None if none do.

        The first new entries count as opened if they are due up to `near_ms` and the queue has no stretch. Only the
        first ones, because the offset of the level passes entries in order.
        """
        if self.added_to == self.index.max_offset:
            return None
        offset, entries = self.added_to, self.index.read(self.added_to, self.index.max_offset - self.added_to)
        self.added_to += len(entries)
        due, near_count = _due(entries), 0
        if not self.stretches:
            near_count = int(np.argmin(np.append(due <= near_ms, False)))
        self._extend(offset + near_count, due[near_count:])
        return _seq(entries[:near_count]) if near_count else None

    def rebuild(self, shift_of: ShiftOf | None = None) -> None:
        """Treat all entries from `low` on as unopened, with the shifts of `shift_of` (None: no shifts).

        The backlog skips settled entries when it opens them.
        """
        self.stretches, offset, self.added_to = [], self.low, self.index.max_offset
        while offset < self.added_to:
            entries = self.index.read(offset, min(CHUNK, self.added_to - offset))
            self._extend(offset, _due(entries), None if shift_of is None else shift_of(_seq(entries)))
            offset += len(entries)

    def _extend(self, offset: int, due: Int64Array, shift_ms: Int64Array | None = None) -> None:
        """Add unopened entries with the due times `due`, from `offset` on, to the last stretch or as new stretches."""
        if not len(due):
            return
        shift_ms = np.zeros(len(due), np.int64) if shift_ms is None else shift_ms
        # A new stretch begins where due times go back, or where the shift changes.
        begins = np.concatenate(([0], np.flatnonzero((np.diff(due) < 0) | (np.diff(shift_ms) != 0)) + 1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(due)], strict=True):
            last, head_ms = self.stretches[-1] if self.stretches else None, int(due[begin])
            shift, last_ms = int(shift_ms[begin]), int(due[end - 1])
            # In the usual case the new entries continue the last stretch, and no stretch is added.
            if last and last.shift_ms == shift and last.end == offset + begin and last.last_ms <= head_ms:
                last.end, last.last_ms = offset + end, last_ms
            else:
                self.stretches.append(Stretch(offset + begin, offset + end, head_ms, last_ms, shift))

    # -- opening entries -------------------------------------------------------------------------------------

    def first_due_ms(self) -> int | None:
        """Find the time at which the first entry of a stretch is due. None if there are no stretches."""
        return min((stretch.first_due_ms for stretch in self.stretches), default=None)

    def open(self, until_ms: int, rows_max: int) -> list[OpenedColumns]:
        """Open up to `rows_max` entries of each stretch that are due, with the shift, before `until_ms`.

        Returns the entries of each stretch.
        """
        opened = []
        for stretch in [stretch for stretch in self.stretches if stretch.first_due_ms < until_ms]:
            end = min(stretch.end, stretch.next + rows_max)
            entries = leading(self._read, "tag", stretch.next, end, until_ms - stretch.shift_ms)
            stretch.next += len(entries)
            if stretch.next == stretch.end:
                self.stretches.remove(stretch)
            else:
                stretch.head_ms = int(_due(self.index.read(stretch.next, 1))[0])
            due = _due(entries)
            # `due` is returned as well, because outcomes identify a message by its original due time.
            opened.append((due + stretch.shift_ms if stretch.shift_ms else due, due, _seq(entries)))
        return opened

    def _read(self, begin: int, end: int) -> EntryArray:
        return self.index.read(begin, end - begin)

    # -- clocks ----------------------------------------------------------------------------------------------

    def shorten_long_waits(self, now_ms: int) -> None:
        """Shift stretches so that no entry waits longer than the duration of the level from now on.

        An entry that would wait longer was accepted before the clock was set back, perhaps while no broker ran, so the
        size of the step is not known. The last entry of its stretch then waits for the whole duration. The due times of
        the earlier entries keep their distances to it: they were accepted before it, so the same step affects them. The
        durations of their tables do not matter.
        """
        if self._duration_ms is None:
            return
        for stretch in self.stretches:
            stretch.shift_ms = min(stretch.shift_ms, now_ms + self._duration_ms - stretch.last_ms)

    # -- settled entries -------------------------------------------------------------------------------------

    def first_postponed_ms(self) -> int:
        """Find the earliest original due time of entries that are postponed. FAR_MS if there are none."""
        postponed = (stretch.head_ms for stretch in self.stretches if stretch.shift_ms > 0)
        return min(postponed, default=FAR_MS)

    def advance(self, outcomes: Outcomes) -> None:
        """Move `low` to the first entry that is not settled or not opened."""
        end = min((stretch.next for stretch in self.stretches), default=self.added_to)
        while self.low < end:
            entries = self.index.read(self.low, min(CHUNK, end - self.low))
            settled = outcomes.is_settled(_due(entries), _seq(entries))
            # Only up to the first unsettled entry, although later ones may be settled already.
            count = int(np.argmin(np.append(settled, False)))
            self.low += count
            if count < len(entries):
                return

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log that is needed, as of the last `advance`. None if no row is needed."""
        return int(_seq(self.index.read(self.low, 1))[0]) if self.low < self.added_to else None

    def find_due_times(self, seq: Int64Array) -> Int64Array:
        """Find the original due times of these numbers among the entries from `low` on. -1 for other numbers."""
        # A bisection for all numbers at once. Each round reads one entry of the index for each number.
        low, high = np.full(len(seq), self.low), np.full(len(seq), self.index.max_offset)
        while (unfinished := low < high).any():
            middle = (low + high) // 2
            is_below = np.zeros(len(seq), dtype=np.bool_)
            is_below[unfinished] = _seq(self.index.at(middle[unfinished])) < seq[unfinished]
            low = np.where(unfinished & is_below, middle + 1, low)
            high = np.where(unfinished & ~is_below, middle, high)
        candidates = np.flatnonzero(low < self.index.max_offset)
        due_ms = np.full(len(seq), -1, dtype=np.int64)
        if len(candidates):
            entries = self.index.at(low[candidates])
            is_exact = _seq(entries) == seq[candidates]
            due_ms[candidates[is_exact]] = _due(entries)[is_exact]
        return due_ms


def _due(entries: EntryArray) -> Int64Array:
    return entries["tag"].astype(np.int64)


def _seq(entries: EntryArray) -> Int64Array:
    return entries["seq"].astype(np.int64)
