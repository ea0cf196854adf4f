"""The backlog `timer_wheel`: promises by slot, in a ring and a timer log, and those that are rolled.

    add    -> arrivals in memory -> a batch of the timer log, and the ends of its slots' chains in the ring
    open   <- the next slots in use: their chains are walked; promises due beyond the ring must be rolled

`bound` moves when an opening begins, and promises that come from then on for those slots count as opened. They are kept
in a slot too, or when they are late in the first one that is not delivered: only a restart looks there. `low` passes a
slot when all that was opened of it is settled, or rolled durably (the latch); a restart opens the slots from `low` on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from datetime import UTC, datetime

import msgspec
import numpy as np

from timeball.errors import OverLimit, SetupError
from timeball.files import File, Files
from timeball.log.reader import LogReader
from timeball.message import Int64Array
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
# Held back, so that a link covers more of them and a message sent alone costs no write; the log has them all.
ARRIVALS_MAX = 4_096
OPEN_ROWS = 1 << 20  # promises looked at in one opening, some 40 MB; a slot is opened whole


class WheelState(msgspec.Struct, frozen=True):
    """The facts that a restart needs besides the files: which they are, and how far each was read."""

    generation: int
    precision_ms: int
    reach: int
    count: int
    low: int  # slots before it are delivered, durably
    bound: int  # slots before it have been opened, by this run or one before it
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
        """Accept up to `congest_rows` a slot, 0 for any number. `restore` comes before anything else."""
        self._files, self.reader, self._thread, self._outcomes = files, reader, reader_thread, outcomes
        self.slots, self._congest_rows, self._ahead_ms = slots, congest_rows, ahead_ms
        self._arrivals_max = arrivals_max
        self._low, self._furthest = 0, 0
        self._log: TimerLog
        self._ring: Ring
        self._arrivals: list[Waiting] = []
        self.arrival_rows = self._far_rows = 0
        self._arrivals_first: int | None = None  # the first slot from `bound` on for which one has arrived
        # Opened, and not in the slot of their instant: to be rolled, or rolled too late. They hold `low`.
        self._held: list[Entries] = []
        self._opened: int | None = None  # slots before it are opened; None: as far as `bound`

    # -- the five questions ----------------------------------------------------------------------------------

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        """Keep these as arrivals; what was rolled stands no more where it stood."""
        if rewritten is not None:
            # Marked once the new rows are durable: a restart must find each promise in one place, old or new.
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
        # While the reader thread walks, `low` must not pass these slots: what they hold is not known yet.
        self._opened = before
        self._keep_first()
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._log.walk, slots, last)
        self._opened = None
        return self._sorted_out(found)

    def needed_seq(self, settled_ms: int) -> int | None:
        """Return the oldest row that an arrival or the timer log names."""
        self._advance(settled_ms)
        found = [int(part.row_seq.min()) for part in self._arrivals]
        if self._log.first_row_seq is not None:
            found.append(self._log.first_row_seq)
        return min(found, default=None)

    def state(self, settled_ms: int) -> WheelState:
        """Return which files they are, and how far they go."""
        self._advance(settled_ms)
        self.flush()
        ring = self.slots.precision_ms, self.slots.reach, self.slots.count
        bound = max(self._furthest, self._ring.bound)
        return WheelState(self._generation, *ring, self._low, bound, self._log.state())

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        """Make the ring from all durable links, and open again what was opened and may not be settled."""
        assert state is None or isinstance(state, WheelState)
        folder = self._begin_generation(self._files, FOLDER, state)
        first_slot = self.slots.of_instant(now_ms)
        # Slots before it may have lost their records to later ones, placed when `bound` stood where it had ever been.
        bound = first_slot if state is None else max(state.low + 1, state.bound - self.slots.margin)
        self._furthest = bound if state is None else state.bound
        self._log = TimerLog(self._files, folder, self.slots.reach, None if state is None else state.log)
        self.logs = [self._log.links, self._log.entries]
        self._ring = Ring(self._files, RING, self.slots, bound=bound)
        self._low = bound - 1 if state is None else state.low
        # Rolled after the checkpoint: the log names their new rows, so old entries are marked before links are pushed.
        self._log.gone_by_seq(waiting.seq[waiting.row_seq != waiting.seq])
        again = self._sorted_out(self._log.entries_of(self._push_links()))
        self._keep_first()
        return Opened.joined([again, self._add_in_log_order(waiting, now_ms)])

    # -- what it is besides ----------------------------------------------------------------------------------

    def check_capacity(self, due_ms: Int64Array) -> None:
        """Raise OverLimit when a slot within the ring would hold more than `congest_rows` of these and others.

        A straight threshold. What has been accepted and is on its way to the disk is not counted yet.
        """
        if not self._congest_rows or not len(due_ms):
            return
        slots = self.slots.of_instants(due_ms)
        # Only slots within reach have a bound: those beyond it are piles for rolling, and are rolled in time.
        slots = slots[(slots > self._low) & (slots < self._ring.bound + self.slots.reach)]
        distinct, rows = np.unique(slots, return_counts=True)
        there = self.rows_in(distinct)
        # The batch's own rows count too, so that one batch cannot fill a slot far beyond the bound.
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
        """Return how many have been placed in each of these slots, settled ones included."""
        _, rows = self._ring.heads(slots)
        if self._arrivals:
            arrived = np.concatenate([self.slots.of_instants(part.due_ms) for part in self._arrivals])
            arrived.sort()
            rows = rows + np.searchsorted(arrived, slots, side="right") - np.searchsorted(arrived, slots)
        return np.asarray(rows)

    def statistics(self) -> dict[str, int]:
        """Return how many wait in slots that have not been opened, cancelled ones included."""
        return {"waiting_rows": self._ring.rows + self._far_rows, "slots": self._ring.used}

    def flush(self) -> None:
        """Write the arrivals to the timer log."""
        if not self._arrivals:
            return
        waiting, bound = Waiting.joined(self._arrivals), self._ring.bound
        slots = self.slots.of_instants(waiting.due_ms)
        # Late ones go to a slot that is open but not delivered, where a restart finds them (see the module).
        slots = np.where(slots >= bound, self.slots.place(slots, bound), np.maximum(slots, self._low))
        if bool((np.diff(slots) < 0).any()):
            order = np.argsort(slots, kind="stable")
            slots, waiting = slots[order], waiting.part(order)
        begins, rows = runs_of(slots)
        prev, _ = self._ring.heads(slots[begins])
        last = self._log.append(slots[begins], rows, prev, waiting, bound)
        self._ring.push(slots[begins], last, rows)
        # Only now: on a full disk they go on waiting in memory, and a checkpoint is tried again later.
        self._arrivals, self.arrival_rows, self._far_rows, self._arrivals_first = [], 0, 0, None
        self._keep_first()

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """Return those of the timer log; the ring is never synced."""
        self.flush()
        return super().files_to_sync()

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._ring.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _keep_first(self) -> None:
        """Keep the begin of the first slot in use that has not been opened."""
        known = (slot for slot in (self._ring.first_used(), self._arrivals_first) if slot is not None)
        self.first_due_ms = min(map(self.slots.begin_ms, known), default=FAR_MS)

    def _pass_unused(self, now_ms: int) -> None:
        """Move the bound over slots that are not used: they need no opening."""
        to = self.slots.of_instant(now_ms + self._ahead_ms) + 1
        # Not while the reader thread walks: `low` is held by the slots that are being opened.
        if self._opened is None and self.first_due_ms >= self.slots.begin_ms(to):
            self._ring.open(to, 0)

    def _sorted_out(self, found: Entries) -> Opened:
        """Return what was found in slots that are open now: near, or to be rolled."""
        rolls = found.due_ms >= self.slots.begin_ms(self._ring.bound)
        held = rolls | (self.slots.of_instants(found.due_ms) != found.slot)
        if held.any():
            self._held.append(found.part(held))
        return Opened(found.due_ms, found.seq, found.row_seq, found.index, rolls)

    def _advance(self, settled_ms: int) -> None:
        """Move `low` past the slots of which all is settled, or gone; drop such arrivals, which need no record."""
        self._pass_unused(settled_ms)
        kept = [part.part(part.due_ms >= settled_ms) for part in self._arrivals]
        self._arrivals = [part for part in kept if len(part)]
        self.arrival_rows = sum(map(len, self._arrivals))
        if self._held:
            parts = [held.part(~self._outcomes.is_settled(held.due_ms, held.seq)) for held in self._held]
            self._held = [held for held in parts if len(held)]
        # There is always a slot before the bound that is not delivered: what comes late needs one to be found in.
        opened = self._ring.bound if self._opened is None else self._opened
        # A promise to be rolled stands in a slot before its instant: until that is durable, a restart needs it.
        held = (int(entries.slot.min()) for entries in self._held)
        low = min(opened - 1, self.slots.of_instant(settled_ms), *held)
        if low > self._low:
            self._low = low
            self._log.forget(low)

    def _push_links(self) -> RecordArray:
        """Push all durable links to the ring, which is empty; return those of slots that are open, from `low` on."""
        opened = [np.empty(0, timer_log.LINK)]
        for begin, links in self._log.links.parts():
            slots = np.ascontiguousarray(links["slot"])  # a column is sorted several times as fast
            opened.append(links[(slots >= self._low) & (slots < self._ring.bound)])
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], links["rows"][order]
            begins, counts = runs_of(slots)
            last = begin + order[begins + counts - 1]
            self._ring.push(slots[begins], last, np.add.reduceat(rows, begins))
        return np.concatenate(opened)


def check(files: Files, slots: Slots, state: WheelState) -> None:
    """Raise SetupError when `state` is that of a wheel with other slots, Corrupt when a file of it is damaged."""
    if (state.precision_ms, state.reach, state.count) != (slots.precision_ms, slots.reach, slots.count):
        raise SetupError("--timer-precision-ms, --timer-wheel-ms or --gather-ahead-ms has changed")
    generations.check(files, generations.folder_of(FOLDER, state.generation), state.log.logs())
