"""`timer_wheel`: RocketMQ 5's wheel. A ring of slots, with a chain of messages per slot.

A slot only groups messages: rows keep their due time in ms. A message due beyond the ring waits in a slot within it.
When that slot is opened, the message is *rolled*: it is rewritten and placed again.

    add    collects messages in memory, then appends them to the timer log as a batch and pushes its links to the ring
    open   walks the chains of the next used slots; messages due later than these slots must be rolled

`bound` is the first slot that is not opened. It moves when an opening begins, and later messages for slots before it
count as opened. They are stored in a slot as well, so that a restart finds them. If its own slot is delivered already,
a message is stored in the first slot that is not delivered, `low`. `low` passes a slot when all messages opened from it
are settled (released or cancelled) or durably rolled. A restart opens the slots from `low` on.

The ring is one mapped file with the end of each slot's chain in the timer log:

    byte  0                8          12         16
          +----------------+----------+----------+
          | last           | lap      | rows     |   little-endian, 16 bytes a slot
          +----------------+----------+----------+
            newest link      slot //    placed in
            of the slot      count      the slot; 0: unused

Slot n is at byte (n mod count) * 16. Several slots share this position, and `lap` distinguishes them. The ring is never
synced, and no start reads it: each start makes an empty ring and pushes the durable links of the timer log, which have
checksums.

The timer log contains the messages of each slot as a chain of batches. It consists of two mapped logs, links and
entries.

    link     | prev      | slot      | first     | rows      | crc32c    |   40 bytes: a batch of one slot
             +-----------+-----------+-----------+-----------+-----------+
               the slot's              entries first … first + rows
               link before

    entry    | due_ms    | seq       | row_seq   | crc32c    |               32 bytes: a scheduled message
             +-----------+-----------+-----------+-----------+
               its due time, the row of the log that set it, and the row that contains the message now

All fields are little-endian int64. The checksum is that of mapped_log.py, over the fields before it.

As in RocketMQ, the ring contains the newest link of each slot's chain, and each link refers to the one before it.
Unlike in RocketMQ, a link covers all messages of one batch that share a slot, so slots are read and written in batches.
The first link of a slot has -1 as `prev`.

No field is ever changed except `row_seq`. When the message has another entry, the old one is *marked* (mapped_log.py):
its `row_seq` is replaced by the complement, which is negative. While the broker runs, no slot is opened twice, so only
a restart needs marks. Pages of mapped files may reach the disk before the commit log does. So a checkpoint marks the
entries, after it has synced the commit log with the new rows. For rows after the checkpoint, the restart itself marks
the old entries of their messages.

Space is freed by *spans*, parts of the log that end after a number of entries or slots. When the last slot of a span is
delivered, the span is dropped, and the rows of the commit log to which it refers are no longer needed.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.io.files import File, Files
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.errors import Corrupt, OverLimit, SetupError
from timeball.model.message import Int64Array
from timeball.schedule import mapped_log
from timeball.schedule.backlog import Bools, Opened, Rewritten
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.durations import is_in
from timeball.schedule.locations import Columns, Waiting, runs_of
from timeball.schedule.mapped_log import BacklogInFiles, LogBounds, RecordArray, RecordType
from timeball.schedule.outcomes import Outcomes, Settled

# ---- the timer log -------------------------------------------------------------------------------------------

LINK = np.dtype([("prev", "<i8"), ("slot", "<i8"), ("first", "<i8"), ("rows", "<i8")])
ENTRY = np.dtype([("due_ms", "<i8"), ("seq", "<i8"), ("row_seq", "<i8")])
LINKS, ENTRIES = RecordType(LINK), RecordType(ENTRY, marked="row_seq")

# Entries after which a span ends.
SPAN_ENTRIES = 1 << 16
# A span ends after this fraction of the ring has passed: an hour, with a ring of three days.
SPANS_A_REACH = 64

_NONE = np.empty(0, np.int64)


class Span(msgspec.Struct, array_like=True):
    """A part of the log: its first link and entry, the ring's `bound` at its begin, its last slot, its oldest row."""

    first_link: int
    first_entry: int
    begun_slot: int
    last_slot: int
    first_row_seq: int


class LogState(msgspec.Struct, frozen=True):
    """The bounds (begin, end) of both logs, and the spans."""

    links: tuple[int, int]
    entries: tuple[int, int]
    spans: list[Span]

    def logs(self) -> list[LogBounds]:
        """Describe both logs for `mapped_log.open_logs`."""
        return [("links", LINKS, *self.links), ("entries", ENTRIES, *self.entries)]


@dataclass(frozen=True, slots=True)
class Entries(Columns):
    """Entries that were read: the index in the log, the slot, and the fields of the entry."""

    index: Int64Array
    slot: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


class TimerLog:
    """Links and entries. `walk` runs in the reader thread, the rest on the event loop."""

    def __init__(self, files: Files, folder: str, reach: int, state: LogState | None) -> None:
        """Open the logs of a state, or empty logs. `reach` is that of the ring, in slots."""
        state = state or LogState((0, 0), (0, 0), [])
        self.links, self.entries = mapped_log.open_logs(files, folder, state.logs())
        self._spans = [msgspec.structs.replace(span) for span in state.spans]
        self._span_slots = max(1, reach // SPANS_A_REACH)

    @property
    def first_row_seq(self) -> int | None:
        """The oldest row of the commit log that an entry may refer to. None if there are no entries."""
        return min((span.first_row_seq for span in self._spans), default=None)

    def append(
        self, slots: Int64Array, rows: Int64Array, prev: Int64Array, waiting: Waiting, bound: int
    ) -> Int64Array:
        """Append messages. The first rows[0] of them belong to slots[0], and so on. Returns the index of each new link.

        `prev` contains the newest link of each slot so far, or -1. `bound` is that of the ring, for the spans.
        """
        entries = np.empty(len(waiting), ENTRY)
        entries["due_ms"], entries["seq"], entries["row_seq"] = waiting.due_ms, waiting.seq, waiting.row_seq
        self._extend_span(int(slots.max()), int(waiting.row_seq.min()), bound)
        # Entries first: if the disk becomes full, entries without a link only take space, but a link without entries
        # would be damage.
        first = self.entries.append(entries)
        links = np.empty(len(slots), LINK)
        links["prev"], links["slot"], links["rows"] = prev, slots, rows
        links["first"] = first + np.cumsum(rows) - rows
        return self.links.append(links) + np.arange(len(slots), dtype=np.int64)

    def walk(self, slots: Int64Array, last: Int64Array) -> Entries:
        """Read all entries of these slots, whose chains end in the links `last` (reader thread). Raise Corrupt."""
        link_batches = [np.empty(0, LINK)]
        while len(last):
            links = self.links.at(last)
            # The checksums cover single records. This checks the chain: each link refers to an earlier one of its slot.
            if not bool(((links["slot"] == slots) & (links["prev"] < last) & (links["rows"] > 0)).all()):
                fault = "the chain of a slot is broken; start the broker again, and the ring is made anew"
                raise Corrupt(f"{self.links.folder}: {fault}")
            link_batches.append(links)
            has_previous = links["prev"] >= 0
            slots, last = slots[has_previous], links["prev"][has_previous]
        return self.read_entries(np.concatenate(link_batches))

    def mark_moved(self, index: Int64Array) -> None:
        """Mark the entries at these indexes: their messages have another entry, whose commit log row is synced."""
        self.entries.mark(index)

    def drop_before(self, low: int) -> None:
        """Drop the spans of slots before `low`: their messages are settled, or have another entry."""
        count = next((n for n, span in enumerate(self._spans) if span.last_slot >= low), len(self._spans))
        if not count:
            return
        del self._spans[:count]
        self.links.drop_below(self._spans[0].first_link if self._spans else self.links.end)
        self.entries.drop_below(self._spans[0].first_entry if self._spans else self.entries.end)

    # -- restarts --------------------------------------------------------------------------------------------------

    def state(self) -> LogState:
        """Build the bounds and spans for a checkpoint."""
        return LogState(
            (self.links.begin, self.links.end),
            (self.entries.begin, self.entries.end),
            [msgspec.structs.replace(span) for span in self._spans],
        )

    def mark_moved_by_seq(self, seq: Int64Array) -> int:
        """Mark all entries of these messages, in one pass over the log. Returns the number of marked entries."""
        marked_rows, sorted_seqs = 0, np.sort(seq)
        for begin, entries in self.entries.parts() if len(seq) else ():
            index = begin + np.flatnonzero(is_in(sorted_seqs, entries["seq"]))
            self.mark_moved(index)
            marked_rows += len(index)
        return marked_rows

    def read_entries(self, links: RecordArray) -> Entries:
        """Read the entries of these links, without the marked ones."""
        # Entry n of a link is at index first + n. The counter of all entries begins each link at its `ends - rows`.
        rows = links["rows"]
        ends = np.cumsum(rows)
        total = int(ends[-1]) if len(ends) else 0
        index = np.repeat(links["first"] - (ends - rows), rows) + np.arange(total, dtype=np.int64)
        entries = self.entries.at(index)
        columns = (np.ascontiguousarray(entries[name]) for name in ("due_ms", "seq", "row_seq"))
        result = Entries(index, np.repeat(links["slot"], rows), *columns)
        is_unmarked = result.row_seq >= 0
        return result if is_unmarked.all() else result.part(is_unmarked)

    # -- internals -------------------------------------------------------------------------------------------------

    def _extend_span(self, last_slot: int, first_row_seq: int, bound: int) -> None:
        """Add the batch that is being appended to the last span, or to a new one if the last is large enough.

        `last_slot` and `first_row_seq` are those of the batch.
        """
        span = self._spans[-1] if self._spans else None
        if (
            span is None
            or self.entries.end - span.first_entry >= SPAN_ENTRIES
            or bound - span.begun_slot >= self._span_slots
        ):
            self._spans.append(Span(self.links.end, self.entries.end, bound, last_slot, first_row_seq))
            return
        # A span is dropped only after its last slot, which may be far away, so the limits above keep spans small.
        span.last_slot = max(span.last_slot, last_slot)
        span.first_row_seq = min(span.first_row_seq, first_row_seq)


# ---- the backlog ---------------------------------------------------------------------------------------------

FOLDER = "timer_wheel"
RING = f"{FOLDER}/ring"
# Arrivals that are collected in memory before a write. The commit log contains them, too.
ARRIVALS_MAX = 4_096
OPEN_ROWS = 1 << 20  # messages read in one opening, about 40 MB; a slot is always opened as a whole

Rolled = tuple[int, Int64Array]  # a bound of the ring, and the indexes of rolled entries, in slots before it


class WheelState(msgspec.Struct, frozen=True):
    """The data that a restart needs besides the files: their generation and bounds, and the dimensions of the ring."""

    generation: int
    precision_ms: int
    reach: int
    count: int
    low: int  # slots before it are durably delivered
    bound: int  # slots before it have been opened, by this run or an earlier one
    log: LogState


class TimerWheel(BacklogInFiles):
    """Arrivals, ring and timer log. The timer log's `walk` runs in the reader thread, the rest on the event loop."""

    def __init__(
        self,
        files: Files,
        reader: LogReader,
        reader_thread: Executor,
        outcomes: Outcomes,
        *,
        slots: Slots,
        congest_rows: int = 0,
        ahead_ms: int,
        arrivals_max: int = ARRIVALS_MAX,
    ) -> None:
        """Accept up to `congest_rows` messages per slot. 0 means any number. Call `restore` before any other method.

        Slots are opened `ahead_ms` before their due times. Up to `arrivals_max` messages are collected before a write.
        """
        self._files, self.reader, self._thread, self._outcomes = files, reader, reader_thread, outcomes
        self.slots, self._congest_rows, self._ahead_ms = slots, congest_rows, ahead_ms
        self._arrivals_max = arrivals_max
        # `_largest_bound` is the largest `bound` of all runs.
        self._low, self._largest_bound = 0, 0
        self._log: TimerLog
        self._ring: Ring
        self._arrivals: list[Waiting] = []
        # The number of all arrivals, and of those due in slots that are not opened.
        self.arrival_rows = self._far_rows = 0
        self._arrivals_first: int | None = None  # the first slot from `bound` on that has an arrival
        # Opened messages outside the slot of their due time: to be rolled, or rolled too late. They keep `low` back.
        self._kept_entries: list[Entries] = []
        # The old entries of messages that were rolled since the last `files_to_sync`, and those that the current
        # checkpoint marks.
        self._rolled, self._rolled_in_checkpoint = list[Rolled](), list[Rolled]()
        self._opened: int | None = None  # slots before it are opened; None: all before `bound`

    # -- the core operations of a backlog ---------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Add messages as arrivals. The next checkpoint marks the old entries of rolled messages.

        Returns a mask of the messages that count as opened, because their slots are.
        """
        if rewritten is not None:
            # Not marked here: with `async` durability the new rows may not be synced yet, and a power cut may keep the
            # mark and lose the row.
            self._rolled.append((self._ring.bound, rewritten.note))
            self._kept_entries = [
                entries.part(~np.isin(entries.index, rewritten.note)) for entries in self._kept_entries
            ]
        self._pass_unused(now_ms)
        is_opened = np.asarray(waiting.due_ms < self.slots.begin_ms(self._ring.bound))
        if len(waiting):
            self._arrivals.append(waiting)
            self.arrival_rows += len(waiting)
            if not is_opened.all():
                self._far_rows += len(is_opened) - int(is_opened.sum())
                due_slots = self.slots.slots_at(waiting.due_ms[~is_opened])
                first = int(self.slots.choose_slots(due_slots, self._ring.bound).min())
                if self._arrivals_first is None or first < self._arrivals_first:
                    self._arrivals_first = first
            if self.arrival_rows >= self._arrivals_max:
                self.flush()
        self._update_first_due()
        return is_opened

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Read the messages of the used slots up to `until_ms`, or of the first ones: OPEN_ROWS messages or one slot.

        The chains are walked in the reader thread. Raises Corrupt for a broken chain or a damaged record.
        """
        to = self.slots.slot_at(until_ms) + 1
        if self._arrivals_first is not None and self._arrivals_first < to:
            self.flush()
        before = self._ring.bound
        slots, last = self._ring.open(to, OPEN_ROWS)
        # While the reader thread walks, `low` must not pass these slots: their content is not known yet.
        self._opened = before
        self._update_first_due()
        entries = await asyncio.get_running_loop().run_in_executor(self._thread, self._log.walk, slots, last)
        self._opened = None
        return self._split_opened(entries)

    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest row that an arrival or the timer log refers to. None if there are none."""
        self._advance(settled_ms)
        row_seqs = [int(part.row_seq.min()) for part in self._arrivals]
        if self._log.first_row_seq is not None:
            row_seqs.append(self._log.first_row_seq)
        return min(row_seqs, default=None)

    def state(self, settled_ms: int) -> WheelState:
        """Build the state for a checkpoint: the generation, the ring and the bounds of the logs."""
        self._advance(settled_ms)
        self.flush()
        ring = self.slots.precision_ms, self.slots.reach, self.slots.count
        bound = max(self._largest_bound, self._ring.bound)
        return WheelState(self._generation, *ring, self._low, bound, self._log.state())

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Build the ring from all links within the saved bounds, and add the messages of `waiting`.

        Returns the messages of the slots from `low` on that were opened, and those of `waiting` in opened slots.
        """
        assert state is None or isinstance(state, WheelState)
        folder = self._begin_generation(self._files, FOLDER, state)
        first_slot = self.slots.slot_at(now_ms)
        # Records of earlier slots may have been overwritten by later slots, which were placed under a larger `bound`.
        bound = first_slot if state is None else max(state.low + 1, state.bound - self.slots.margin)
        self._largest_bound = bound if state is None else state.bound
        self._log = TimerLog(self._files, folder, self.slots.reach, None if state is None else state.log)
        self.logs = [self._log.links, self._log.entries]
        self._ring = Ring(self._files, RING, self.slots, bound=bound)
        self._low = bound - 1 if state is None else state.low
        # Messages that were rolled after the checkpoint have new rows in the log, so their old entries are marked.
        self._log.mark_moved_by_seq(waiting.seq[waiting.row_seq != waiting.seq])
        reopened = self._split_opened(self._log.read_entries(self._push_links()))
        self._update_first_due()
        return Opened.joined([reopened, self._add_in_log_order(waiting, now_ms)])

    # -- further methods of a backlog ------------------------------------------------------------------------

    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit if a slot within the ring would contain more than `congest_rows` messages.

        The threshold is hard. Accepted messages that are still being written to disk do not count yet.
        """
        if not self._congest_rows or not len(due_ms):
            return
        slots = self.slots.slots_at(due_ms)
        # Only slots within reach have a limit. Those beyond it collect messages, which are rolled in time.
        slots = slots[(slots > self._low) & (slots < self._ring.bound + self.slots.reach)]
        distinct, rows = np.unique(slots, return_counts=True)
        rows_before = self.rows_in(distinct)
        # The rows of the batch count as well, so that one batch cannot fill a slot far beyond the limit.
        crowded_indexes = np.flatnonzero(rows_before + rows > self._congest_rows)
        if len(crowded_indexes):
            slot = int(distinct[crowded_indexes[0]])
            begin = datetime.fromtimestamp(self.slots.begin_ms(slot) / 1000, UTC)
            raise OverLimit(
                f"slot {slot} ({self.slots.precision_ms} ms from {begin:%Y-%m-%dT%H:%M:%S.%f}Z on) holds "
                f"{int(rows_before[crowded_indexes[0]])} messages, {int(rows[crowded_indexes[0]])} more would exceed "
                f"--timer-congest-num-each-slot {self._congest_rows}: choose other instants, or raise it"
            )

    def rows_in(self, slots: Int64Array) -> Int64Array:
        """Count the messages placed in each of these slots, settled ones included."""
        _, rows = self._ring.heads(slots)
        if self._arrivals:
            due_slots = np.concatenate([self.slots.slots_at(part.due_ms) for part in self._arrivals])
            due_slots.sort()
            rows = rows + np.searchsorted(due_slots, slots, side="right") - np.searchsorted(due_slots, slots)
        return np.asarray(rows)

    def statistics(self) -> dict[str, int]:
        """Count the messages in slots that are not opened, cancelled ones included."""
        return {"waiting_rows": self._ring.rows + self._far_rows, "slots": self._ring.used}

    def flush(self) -> None:
        """Write the arrivals to the timer log."""
        if not self._arrivals:
            return
        waiting, bound = Waiting.joined(self._arrivals), self._ring.bound
        slots = self.slots.slots_at(waiting.due_ms)
        # Messages of opened slots go to a slot that is not delivered, where a restart finds them.
        slots = np.where(slots >= bound, self.slots.choose_slots(slots, bound), np.maximum(slots, self._low))
        if bool((np.diff(slots) < 0).any()):
            order = np.argsort(slots, kind="stable")
            slots, waiting = slots[order], waiting.part(order)
        begins, rows = runs_of(slots)
        prev, _ = self._ring.heads(slots[begins])
        last = self._log.append(slots[begins], rows, prev, waiting, bound)
        self._ring.push(slots[begins], last, rows)
        # Only after the writes: if the disk is full, they stay in memory, and a later checkpoint tries again.
        self._arrivals, self.arrival_rows, self._far_rows, self._arrivals_first = [], 0, 0, None
        self._update_first_due()

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List the files of the timer log, with those that `rows_synced` changes. The ring is never synced."""
        self.flush()
        self._rolled, self._rolled_in_checkpoint = [], self._rolled
        for _, index in self._rolled_in_checkpoint:
            self._log.entries.expect_marks(index)
        return super().files_to_sync()

    def rows_synced(self) -> None:
        """Mark the entries of messages that were rolled before the last `files_to_sync`."""
        for _, index in self._rolled_in_checkpoint:
            self._log.mark_moved(index)

    def sync_failed(self) -> None:
        """Leave the marks to the next checkpoint, which also repeats marks that are set already."""
        super().sync_failed()
        self._rolled = [*self._rolled_in_checkpoint, *self._rolled]

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._ring.close()

    # -- internals -------------------------------------------------------------------------------------------

    def _update_first_due(self) -> None:
        """Store the begin of the first used slot that is not opened."""
        used_slots = (slot for slot in (self._ring.first_used(), self._arrivals_first) if slot is not None)
        self.first_due_ms = min(map(self.slots.begin_ms, used_slots), default=FAR_MS)

    def _pass_unused(self, now_ms: int) -> None:
        """Move the bound past unused slots, which need no opening."""
        to = self.slots.slot_at(now_ms + self._ahead_ms) + 1
        # Not while the reader thread walks: the slots that are being opened keep `low` back.
        if self._opened is None and self.first_due_ms >= self.slots.begin_ms(to):
            self._ring.open(to, 0)

    def _split_opened(self, entries: Entries) -> Opened:
        """Build the result of an opening: messages due at or after `bound` must be rolled, the others are near.

        Entries outside the slot of their due time are kept (`_kept_entries`).
        """
        rolls = entries.due_ms >= self.slots.begin_ms(self._ring.bound)
        must_keep = rolls | (self.slots.slots_at(entries.due_ms) != entries.slot)
        if must_keep.any():
            self._kept_entries.append(entries.part(must_keep))
        return Opened(entries.due_ms, entries.seq, entries.row_seq, entries.index, rolls)

    def _advance(self, settled_ms: int) -> None:
        """Move `low` past slots whose messages are all settled or rolled. Drop arrivals due before `settled_ms`."""
        self._pass_unused(settled_ms)
        unsettled_arrivals = [part.part(part.due_ms >= settled_ms) for part in self._arrivals]
        self._arrivals = [part for part in unsettled_arrivals if len(part)]
        self.arrival_rows = sum(map(len, self._arrivals))
        if self._kept_entries:
            unsettled_entries = [
                entries.part(~self._outcomes.is_settled(entries.due_ms, entries.seq))
                for entries in self._kept_entries
            ]
            self._kept_entries = [entries for entries in unsettled_entries if len(entries)]
        # `low` stays at least one slot before the bound: late messages need a slot that a restart reads.
        opened = self._ring.bound if self._opened is None else self._opened
        # A message that must be rolled is in a slot before its due time. A restart needs it until the roll is durable.
        first_slots = (int(entries.slot.min()) for entries in self._kept_entries)
        low = min(opened - 1, self.slots.slot_at(settled_ms), *first_slots)
        if low > self._low:
            self._low = low
            self._log.drop_before(low)
            # A restart reads no entries of earlier slots.
            self._rolled = [(bound, index) for bound, index in self._rolled if bound > low]

    def _push_links(self) -> RecordArray:
        """Push all links of the timer log into the empty ring. Return the links of slots in [low, bound)."""
        opened = [np.empty(0, LINK)]
        for begin, links in self._log.links.parts():
            # Sorting a contiguous column is several times as fast.
            slots = np.ascontiguousarray(links["slot"])
            opened.append(links[(slots >= self._low) & (slots < self._ring.bound)])
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], links["rows"][order]
            begins, counts = runs_of(slots)
            # The sort is stable, so the last link of each run is the newest of its slot.
            last = begin + order[begins + counts - 1]
            self._ring.push(slots[begins], last, np.add.reduceat(rows, begins))
        return np.concatenate(opened)


def check(files: Files, slots: Slots, state: WheelState) -> None:
    """Raise SetupError if `state` belongs to a wheel with other slots, Corrupt if one of its files is damaged."""
    if (state.precision_ms, state.reach, state.count) != (slots.precision_ms, slots.reach, slots.count):
        raise SetupError(
            "--timer-precision-ms, --timer-wheel-ms or the time for which bodies are loaded ahead changed"
        )
    mapped_log.check_generation(files, mapped_log.folder_of(FOLDER, state.generation), state.log.logs())


# ---- the slots and the ring ----------------------------------------------------------------------------------
# The reach is a length of *time*: a finer precision makes more slots, not a shorter ring. (RocketMQ's number of slots
# is fixed, so that at 100 ms its seven days are 17 hours.) A roll of a message due beyond the reach must not be urgent.
# So a message due just beyond the reach waits in the middle of the reach, not at the end as in RocketMQ. A roll is
# never made later than a third of the reach before its message is due.

# The delivery lag up to which opened slots keep their records, in ms.
MARGIN_MS = limits.MINUTE_MS


@dataclass(frozen=True, slots=True)
class Slots:
    """The dimensions of a ring: the width of a slot, the number of slots in reach, and the number of all slots.

    Slots are numbered for ever, due time // precision. Counted from `bound`, the first slot that is not opened:

        … | low … handed out, not all durable … | bound … in reach … | bound + reach
        <------------------------------ count ------------------------------------>

    The part of `count` beyond the reach is for slots that are opened but whose messages are not all settled (released
    or cancelled) yet. Their records stay readable for a restart, unless the delivery lags by more than `MARGIN_MS`.
    """

    precision_ms: int
    reach: int
    count: int

    @classmethod
    def of(cls, precision_ms: int, wheel_ms: int, ahead_ms: int) -> Slots:
        """Compute the slots of a ring that reaches `wheel_ms` beyond the slots that are opened `ahead_ms` ahead."""
        # `-(-a // b)` rounds up.
        reach = max(4, -(-wheel_ms // precision_ms) + 1)
        count = reach + -(-(ahead_ms + MARGIN_MS) // precision_ms) + 1
        # A record has 32 bits for its lap. With a ring of one minute they last until the year 9999.
        assert limits.INSTANT_MS_MAX // precision_ms // count < 1 << 32
        return cls(precision_ms, reach, count)

    @property
    def margin(self) -> int:
        """The number of slots before `bound` that keep their records."""
        return self.count - self.reach

    def slot_at(self, ms: int) -> int:
        """Compute the slot of a due time."""
        return ms // self.precision_ms

    def slots_at(self, ms: Int64Array) -> Int64Array:
        """Compute the slot of each due time."""
        return np.asarray(ms // self.precision_ms)

    def begin_ms(self, slot: int) -> int:
        """Compute the first ms of a slot."""
        return slot * self.precision_ms

    def index(self, slots: Int64Array) -> Int64Array:
        """Compute the positions of slots in the ring."""
        return np.asarray(slots % self.count)

    def choose_slots(self, slots: Int64Array, bound: int) -> Int64Array:
        """Choose the slots in which messages due in `slots` are stored. None of `slots` may be before `bound`."""
        last = bound + self.reach - 1
        beyond = slots - last
        if not (beyond > 0).any():
            return slots
        # Just beyond the reach: the middle, so that the roll is not urgent. Farther away: the last slot.
        roll_slots = np.where(beyond < self.reach // 3, bound + self.reach // 2, last)
        return np.where(beyond > 0, roll_slots, slots)


RECORD = np.dtype([("last", "<i8"), ("lap", "<u4"), ("rows", "<u4")])
assert RECORD.itemsize == 16  # a power of two, so no record crosses a sector

BLOCK = 4_096  # slots that are counted together
SCAN = 1 << 20  # records read at a time
# A record has 32 bits for its row count.
ROWS_MAX = (1 << 32) - 1

Records = npt.NDArray[np.void]


class Ring:
    """The ends of all chains. `bound` is the first slot that is not opened. Slots from there on are counted.

    With slots of 1000 ms and three days the ring takes 4 MB, with slots of 1 ms 4 GB. The space is allocated when the
    ring is made, so a full disk is an error at the start instead of a fault when a page is written.
    """

    def __init__(self, files: Files, name: str, slots: Slots, *, bound: int) -> None:
        """Replace the ring `name` by an empty one. Raise SetupError if the disk has no room for it."""
        self._slots, self.bound = slots, bound
        size_bytes = slots.count * RECORD.itemsize
        # Never reused: it is not synced, so after a power cut each page may have the content of any time.
        if files.exists(name):
            files.remove(name)
        self._file: File = files.create(name)
        try:
            self._file.allocate(size_bytes)
        except OverLimit as error:
            self._file.close()
            files.remove(name)
            raise SetupError(
                f"the timer wheel's ring takes {size_bytes} bytes, {slots.count} slots of {slots.precision_ms} ms "
                "each, and the disk has no room for it: free some space, raise --timer-precision-ms or lower "
                "--timer-wheel-ms"
            ) from error
        # A slot is 16 bytes of a page. Read-ahead of the pages around it would fill the memory with a fine ring.
        mapped = self._file.map(at_random=True)
        self._records: Records = np.frombuffer(mapped, dtype=RECORD, count=slots.count)
        # The number of used slots from `bound` on, in each block of the ring. A search for the next one skips blocks
        # without any.
        self._used = np.zeros(-(-slots.count // BLOCK), np.int64)
        self.rows = 0  # in slots from `bound` on
        self._first: int | None = None  # the first used slot; None: there is none, or it is not known

    @property
    def used(self) -> int:
        """The number of used slots from `bound` on."""
        return int(self._used.sum())

    def heads(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Read (newest link, rows) of these slots. (-1, 0) for a slot that is unused or no longer in the ring."""
        records = self._records[self._slots.index(slots)]
        # The position may belong to a slot of another lap.
        is_current = (records["rows"] > 0) & (records["lap"] == slots // self._slots.count)
        rows = records["rows"].astype(np.int64)
        return np.where(is_current, records["last"], -1), np.where(is_current, rows, 0)

    def push(self, slots: Int64Array, last: Int64Array, rows: Int64Array) -> None:
        """Set the newest links of these slots, and add `rows` to their row counts. `slots` is distinct and ascends.

        A slot whose position belongs to a later lap is skipped: it was opened long ago.
        """
        count = self._slots.count
        index, lap = self._slots.index(slots), slots // count
        old_records = self._records[index]
        in_use = old_records["rows"] > 0
        is_current = in_use & (old_records["lap"] == lap)
        is_writable = ~in_use | (old_records["lap"] <= lap)
        new_records = np.empty(len(slots), RECORD)
        new_records["last"], new_records["lap"] = last, lap
        new_records["rows"] = np.minimum(np.where(is_current, old_records["rows"], 0) + rows, ROWS_MAX)
        # Whole records are written, so that a page on disk contains either the old or the new record.
        self._records[index[is_writable]] = new_records[is_writable]
        is_unopened = slots >= self.bound
        self.rows += int(rows[is_unopened].sum())
        is_new = is_unopened & ~is_current
        if is_new.any():
            np.add.at(self._used, index[is_new] // BLOCK, 1)
        if is_unopened.any() and self._first is not None:
            self._first = min(self._first, int(slots[is_unopened][0]))

    def first_used(self) -> int | None:
        """Find the first used slot from `bound` on. None if there is none."""
        if self._first is None and self._used.any():
            self._first = self._find_first()
        return self._first

    def open(self, to: int, rows_max: int) -> tuple[Int64Array, Int64Array]:
        """Move `bound` towards `to`. Returns the used slots that it passed, ascending, and the newest link of each.

        The bound stops earlier if the slots contain more than `rows_max` rows, but it passes at least one used slot.
        """
        first = self.first_used()
        if first is None or first >= to:
            self.bound = max(self.bound, to)
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # A fine ring may have millions of unused slots in a row. One step scans a bounded number of them.
        to = min(to, first + SCAN)
        slots = np.arange(first, to, dtype=np.int64)
        last, rows = self.heads(slots)
        in_use = np.flatnonzero(rows)
        fitting_count = int(np.searchsorted(np.cumsum(rows[in_use]), rows_max, side="right"))
        if fitting_count < len(in_use):
            in_use = in_use[: max(1, fitting_count)]
            to = int(slots[in_use[-1]]) + 1
        self.bound = to
        self.rows -= int(rows[in_use].sum())
        np.subtract.at(self._used, self._slots.index(slots[in_use]) // BLOCK, 1)
        # Unknown now: the next call of `first_used` searches with the counts of the blocks.
        self._first = None
        return slots[in_use], last[in_use]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find_first(self) -> int:
        """Find the first used slot from `bound` on. There must be one.

        The used blocks are searched in slot order. The block of `bound` comes first, and once more last: its positions
        before `bound` belong to the next lap.
        """
        begin = self.bound % self._slots.count
        next_lap, first_block = self.bound - begin + self._slots.count, begin // BLOCK
        blocks = np.flatnonzero(self._used)
        for chosen_blocks, end_slot in (
            (blocks[blocks >= first_block], next_lap),
            (blocks[blocks <= first_block], FAR_MS),
        ):
            for block in chosen_blocks.tolist():
                slots = self._slots_in(block)
                slots = slots[(slots >= self.bound) & (slots < end_slot)]
                if len(slots):
                    return int(slots.min())
        raise AssertionError("a slot is counted and not in the ring")

    def _slots_in(self, block: int) -> Int64Array:
        """List the used slots whose positions are in a block."""
        begin = block * BLOCK
        records = self._records[begin : begin + BLOCK]
        in_use = np.flatnonzero(records["rows"])
        return np.asarray(records["lap"][in_use].astype(np.int64) * self._slots.count + begin + in_use)
