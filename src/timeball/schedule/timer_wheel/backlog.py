"""The backlog `timer_wheel`: messages by slot, in a ring and a timer log, and those that are rolled.

    add    -> arrivals in memory -> a batch of the timer log, and the ends of its slots' chains in the ring
    open   <- the next slots in use: their chains are walked; messages due beyond the ring must be rolled

`bound` is the first slot that is not opened. It moves when an opening begins, and later messages for slots before it
count as opened. They are stored in a slot all the same, for a restart. Messages whose own slot is delivered go into the
first slot that is not. `low` passes a slot when all messages opened from it are settled (released or cancelled) or
durably rolled (the latch). A restart opens the slots from `low` on.
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
# Arrivals are collected, so that a link covers more of them and a single message costs no write. The log contains them.
ARRIVALS_MAX = 4_096
OPEN_ROWS = 1 << 20  # messages read in one opening, about 40 MB; a slot is always opened as a whole


class WheelState(msgspec.Struct, frozen=True):
    """The data that a restart needs besides the files: which files, and the position up to which each was read."""

    generation: int
    precision_ms: int
    reach: int
    count: int
    low: int  # slots before it are delivered, durably
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
        # `_furthest` is the largest `bound` of all runs.
        self._low, self._furthest = 0, 0
        self._log: TimerLog
        self._ring: Ring
        self._arrivals: list[Waiting] = []
        # The number of all arrivals, and of those due in slots that are not opened.
        self.arrival_rows = self._far_rows = 0
        self._arrivals_first: int | None = None  # the first slot from `bound` on that has an arrival
        # Opened messages outside the slot of their due time: to be rolled, or rolled too late. They keep `low` back.
        self._held: list[Entries] = []
        self._opened: int | None = None  # slots before it are opened; None: all before `bound`

    # -- the five questions ----------------------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Add messages as arrivals. Mark the old entries of rolled messages."""
        if rewritten is not None:
            # Marked once the new rows are durable: a restart must find each message in exactly one entry, old or new.
            self._log.gone(rewritten.note)
            self._held = [held.part(~np.isin(held.index, rewritten.note)) for held in self._held]
        self._pass_unused(now_ms)
        opened = np.asarray(waiting.due_ms < self.slots.begin_ms(self._ring.bound))
        if len(waiting):
            self._arrivals.append(waiting)
            self.arrival_rows += len(waiting)
            if not opened.all():
                self._far_rows += len(opened) - int(opened.sum())
                far = self.slots.of_instants(waiting.due_ms[~opened])
                first = int(self.slots.place(far, self._ring.bound).min())
                if self._arrivals_first is None or first < self._arrivals_first:
                    self._arrivals_first = first
            if self.arrival_rows >= self._arrivals_max:
                self.flush()
        self._keep_first()
        return opened

    async def open(self, now_ms: int, until_ms: int) -> Opened:
        """Walk the chains of the next slots in use."""
        to = self.slots.of_instant(until_ms) + 1
        if self._arrivals_first is not None and self._arrivals_first < to:
            self.flush()
        before = self._ring.bound
        slots, last = self._ring.open(to, OPEN_ROWS)
        # While the reader thread walks, `low` must not pass these slots: their content is not known yet.
        self._opened = before
        self._keep_first()
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._log.walk, slots, last)
        self._opened = None
        return self._sorted_out(found)

    def needed_seq(self, settled_ms: int) -> int | None:
        """Find the oldest row that an arrival or the timer log refers to. None if there are none."""
        self._advance(settled_ms)
        found = [int(part.row_seq.min()) for part in self._arrivals]
        if self._log.first_row_seq is not None:
            found.append(self._log.first_row_seq)
        return min(found, default=None)

    def state(self, settled_ms: int) -> WheelState:
        """Build the state for a checkpoint: the generation, the ring and the bounds of the logs."""
        self._advance(settled_ms)
        self.flush()
        ring = self.slots.precision_ms, self.slots.reach, self.slots.count
        bound = max(self._furthest, self._ring.bound)
        return WheelState(self._generation, *ring, self._low, bound, self._log.state())

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Build the ring from all durable links. Open again the messages that were opened and may not be settled."""
        assert state is None or isinstance(state, WheelState)
        folder = self._begin_generation(self._files, FOLDER, state)
        first_slot = self.slots.of_instant(now_ms)
        # Earlier slots may have lost their records to later slots, which were placed under the largest `bound` so far.
        bound = first_slot if state is None else max(state.low + 1, state.bound - self.slots.margin)
        self._furthest = bound if state is None else state.bound
        self._log = TimerLog(self._files, folder, self.slots.reach, None if state is None else state.log)
        self.logs = [self._log.links, self._log.entries]
        self._ring = Ring(self._files, RING, self.slots, bound=bound)
        self._low = bound - 1 if state is None else state.low
        # Messages rolled after the checkpoint have new rows in the log. Their old entries are marked first.
        self._log.gone_by_seq(waiting.seq[waiting.row_seq != waiting.seq])
        again = self._sorted_out(self._log.entries_of(self._push_links()))
        self._keep_first()
        return Opened.joined([again, self._add_in_log_order(waiting, now_ms)])

    # -- what it is besides ----------------------------------------------------------------------------------

    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit if a slot within the ring would contain more than `congest_rows` messages.

        The threshold is hard. Accepted messages that are still being written to disk do not count yet.
        """
        if not self._congest_rows or not len(due_ms):
            return
        slots = self.slots.of_instants(due_ms)
        # Only slots within reach have a limit. Those beyond it collect messages, which are rolled in time.
        slots = slots[(slots > self._low) & (slots < self._ring.bound + self.slots.reach)]
        distinct, rows = np.unique(slots, return_counts=True)
        there = self.rows_in(distinct)
        # The rows of the batch count as well, so that one batch cannot fill a slot far beyond the limit.
        crowded = np.flatnonzero(there + rows > self._congest_rows)
        if len(crowded):
            slot = int(distinct[crowded[0]])
            begin = datetime.fromtimestamp(self.slots.begin_ms(slot) / 1000, UTC)
            raise OverLimit(
                f"slot {slot} ({self.slots.precision_ms} ms from {begin:%Y-%m-%dT%H:%M:%S.%f}Z on) holds "
                f"{int(there[crowded[0]])} messages, {int(rows[crowded[0]])} more would exceed "
                f"--timer-congest-num-each-slot {self._congest_rows}: choose other instants, or raise it"
            )

    def rows_in(self, slots: Int64Array) -> Int64Array:
        """Count the messages placed in each of these slots, settled ones included."""
        _, rows = self._ring.heads(slots)
        if self._arrivals:
            arrived = np.concatenate([self.slots.of_instants(part.due_ms) for part in self._arrivals])
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
        slots = self.slots.of_instants(waiting.due_ms)
        # Late ones go to a slot that is opened but not delivered, where a restart finds them.
        slots = np.where(slots >= bound, self.slots.place(slots, bound), np.maximum(slots, self._low))
        if bool((np.diff(slots) < 0).any()):
            order = np.argsort(slots, kind="stable")
            slots, waiting = slots[order], waiting.part(order)
        begins, rows = runs_of(slots)
        prev, _ = self._ring.heads(slots[begins])
        last = self._log.append(slots[begins], rows, prev, waiting, bound)
        self._ring.push(slots[begins], last, rows)
        # Only now: on a full disk they stay in memory, and a later checkpoint tries again.
        self._arrivals, self.arrival_rows, self._far_rows, self._arrivals_first = [], 0, 0, None
        self._keep_first()

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List the files of the timer log. The ring is never synced."""
        self.flush()
        return super().files_to_sync()

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._ring.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _keep_first(self) -> None:
        """Store the begin of the first used slot that is not opened."""
        known = (slot for slot in (self._ring.first_used(), self._arrivals_first) if slot is not None)
        self.first_due_ms = min(map(self.slots.begin_ms, known), default=FAR_MS)

    def _pass_unused(self, now_ms: int) -> None:
        """Move the bound past unused slots, which need no opening."""
        to = self.slots.of_instant(now_ms + self._ahead_ms) + 1
        # Not while the reader thread walks: the slots that are being opened keep `low` back.
        if self._opened is None and self.first_due_ms >= self.slots.begin_ms(to):
            self._ring.open(to, 0)

    def _sorted_out(self, found: Entries) -> Opened:
        """Sort the messages of opened slots into near ones and those to be rolled."""
        rolls = found.due_ms >= self.slots.begin_ms(self._ring.bound)
        held = rolls | (self.slots.of_instants(found.due_ms) != found.slot)
        if held.any():
            self._held.append(found.part(held))
        return Opened(found.due_ms, found.seq, found.row_seq, found.index, rolls)

    def _advance(self, settled_ms: int) -> None:
        """Move `low` past slots whose messages are all settled or rolled. Drop settled arrivals."""
        self._pass_unused(settled_ms)
        kept = [part.part(part.due_ms >= settled_ms) for part in self._arrivals]
        self._arrivals = [part for part in kept if len(part)]
        self.arrival_rows = sum(map(len, self._arrivals))
        if self._held:
            parts = [held.part(~self._outcomes.is_settled(held.due_ms, held.seq)) for held in self._held]
            self._held = [held for held in parts if len(held)]
        # One slot before the bound is never delivered: late messages need a slot that a restart reads.
        opened = self._ring.bound if self._opened is None else self._opened
        # A message to be rolled is in a slot before its due time. Until the roll is durable, a restart needs that slot.
        held = (int(entries.slot.min()) for entries in self._held)
        low = min(opened - 1, self.slots.of_instant(settled_ms), *held)
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
            # The order within a slot is stable, so the last link of each run is the newest.
            last = begin + order[begins + counts - 1]
            self._ring.push(slots[begins], last, np.add.reduceat(rows, begins))
        return np.concatenate(opened)


def check(files: Files, slots: Slots, state: WheelState) -> None:
    """Raise SetupError if `state` belongs to a wheel with other slots, Corrupt if one of its files is damaged."""
    if (state.precision_ms, state.reach, state.count) != (slots.precision_ms, slots.reach, slots.count):
        raise SetupError("--timer-precision-ms, --timer-wheel-ms or --gather-ahead-ms has changed")
    generations.check(files, generations.folder_of(FOLDER, state.generation), state.log.logs())
