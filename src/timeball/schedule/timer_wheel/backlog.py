"""The backlog `timer_wheel`: messages by slot, in a ring and a timer log.

    add    collects messages in memory, then appends them to the timer log as a batch and pushes its links to the ring
    open   walks the chains of the next used slots; messages due beyond the ring must be rolled

`bound` is the first slot that is not opened. It moves when an opening begins, and later messages for slots before it
count as opened. They are stored in a slot as well, so that a restart finds them. A message whose own slot is delivered
is stored in the first slot that is not. `low` passes a slot when all messages opened from it are settled (released or
cancelled) or durably rolled. A restart opens the slots from `low` on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from datetime import UTC, datetime

import msgspec
import numpy as np

from timeball.io.files import File, Files
from timeball.log.reader import LogReader
from timeball.model.errors import OverLimit, SetupError
from timeball.model.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.backlog import Bools, Opened, Rewritten
from timeball.schedule.columns import runs_of
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.generations import BacklogInFiles
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import RecordArray
from timeball.schedule.outcomes import Outcomes, Settled
from timeball.schedule.timer_wheel import timer_log
from timeball.schedule.timer_wheel.ring import Ring, Slots
from timeball.schedule.timer_wheel.timer_log import Entries, LogState, TimerLog

FOLDER = "timer_wheel"
RING = f"{FOLDER}/ring"
# Arrivals that are collected in memory before a write. The commit log contains them, too.
ARRIVALS_MAX = 4_096
OPEN_ROWS = 1 << 20  # messages read in one opening, about 40 MB; a slot is always opened as a whole


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
        """Accept up to `congest_rows` messages per slot. 0 means any number. Call `restore` before any other method."""
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
        self._opened: int | None = None  # slots before it are opened; None: all before `bound`

    # -- the five operations of a backlog --------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Add messages as arrivals. Mark the old entries of rolled messages."""
        if rewritten is not None:
            # The new rows are durable now. A restart must find each message in exactly one entry, the old or the new.
            self._log.mark_moved(rewritten.note)
            self._kept_entries = [
                held.part(~np.isin(held.index, rewritten.note)) for held in self._kept_entries
            ]
        self._pass_unused(now_ms)
        is_opened = np.asarray(waiting.due_ms < self.slots.begin_ms(self._ring.bound))
        if len(waiting):
            self._arrivals.append(waiting)
            self.arrival_rows += len(waiting)
            if not is_opened.all():
                self._far_rows += len(is_opened) - int(is_opened.sum())
                far = self.slots.slots_at(waiting.due_ms[~is_opened])
                first = int(self.slots.choose_slots(far, self._ring.bound).min())
                if self._arrivals_first is None or first < self._arrivals_first:
                    self._arrivals_first = first
            if self.arrival_rows >= self._arrivals_max:
                self.flush()
        self._update_first_due()
        return is_opened

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Walk the chains of the next slots in use."""
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
        """Build the ring from all durable links. Open the messages again that were opened and may not be settled."""
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
        reopened = self._split_opened(self._log.entries_of(self._push_links()))
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
        crowded = np.flatnonzero(rows_before + rows > self._congest_rows)
        if len(crowded):
            slot = int(distinct[crowded[0]])
            begin = datetime.fromtimestamp(self.slots.begin_ms(slot) / 1000, UTC)
            raise OverLimit(
                f"slot {slot} ({self.slots.precision_ms} ms from {begin:%Y-%m-%dT%H:%M:%S.%f}Z on) holds "
                f"{int(rows_before[crowded[0]])} messages, {int(rows[crowded[0]])} more would exceed "
                f"--timer-congest-num-each-slot {self._congest_rows}: choose other instants, or raise it"
            )

    def rows_in(self, slots: Int64Array) -> Int64Array:
        """Count the messages placed in each of these slots, settled ones included."""
        _, rows = self._ring.heads(slots)
        if self._arrivals:
            arrived = np.concatenate([self.slots.slots_at(part.due_ms) for part in self._arrivals])
            arrived.sort()
            rows = rows + np.searchsorted(arrived, slots, side="right") - np.searchsorted(arrived, slots)
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
        """List the files of the timer log. The ring is never synced."""
        self.flush()
        return super().files_to_sync()

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
        """Build the result of an opening: messages due beyond the opened slots must be rolled, the others are near."""
        rolls = entries.due_ms >= self.slots.begin_ms(self._ring.bound)
        must_keep = rolls | (self.slots.slots_at(entries.due_ms) != entries.slot)
        if must_keep.any():
            self._kept_entries.append(entries.part(must_keep))
        return Opened(entries.due_ms, entries.seq, entries.row_seq, entries.index, rolls)

    def _advance(self, settled_ms: int) -> None:
        """Move `low` past slots whose messages are all settled or rolled. Drop settled arrivals."""
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
            self._log.forget(low)

    def _push_links(self) -> RecordArray:
        """Push all durable links into the empty ring. Return the links of opened slots from `low` on."""
        opened = [np.empty(0, timer_log.LINK)]
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
        raise SetupError("--timer-precision-ms, --timer-wheel-ms or --gather-ahead-ms has changed")
    generations.check(files, generations.folder_of(FOLDER, state.generation), state.log.logs())
