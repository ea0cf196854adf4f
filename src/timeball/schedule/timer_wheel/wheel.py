"""The wheel: ring and timer log together, over files alone. Who waits in which slot; nothing about when.

    keep   promises, by instant and place in the log; they wait in memory until there are `ARRIVALS_MAX` of them
    open   the next slots in use, once; their chains are then walked in the reader thread
    gone   a promise found in a slot stands elsewhere now

Arrivals are held back so that a link covers more of them, and a message sent alone costs no write of its own. They
are on disk no later than with the next checkpoint, and the log has those that came after it.

A promise whose slot has been opened already is kept too, in that slot or, when it is late, in the first one that is
not wholly delivered: nobody looks there before the next restart, and that is when it is needed.

A state belongs to one generation of files (generations.py). The ring belongs to none: each start makes it.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.errors import SetupError
from timeball.files import File, Files
from timeball.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.timer_wheel import timer_log
from timeball.schedule.timer_wheel.ring import Heads, Ring
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.timer_log import Entries, LogState, TimerLog, entries_of

FOLDER = "timer_wheel"
RING = f"{FOLDER}/ring"
ARRIVALS_MAX = 4_096  # some milliseconds of sorting; a hundred kilobytes

_NONE = np.empty(0, np.int64)


class WheelState(msgspec.Struct, frozen=True):
    """What a restart needs besides the files: which they are, and how far what was."""

    generation: int
    precision_ms: int
    reach: int
    count: int
    low: int  # slots before it are delivered, durably
    bound: int  # slots before it have been opened, by this run or one before it
    log: LogState


class Wheel:
    """See the module. `walk` is for the reader thread, the rest for the event loop."""

    def __init__(
        self,
        files: Files,
        slots: Slots,
        state: WheelState | None,
        *,
        first_slot: int,
        arrivals_max: int = ARRIVALS_MAX,
    ) -> None:
        """Open what `state` says, or begin anew with `first_slot`. The ring is made from all links."""
        self._arrivals_max = arrivals_max
        self._generation = generations.begin(files, FOLDER, None if state is None else state.generation)
        self.slots, folder = slots, generations.folder_of(FOLDER, self._generation)
        # Slots before it may have lost their records to later ones, placed when `bound` stood where it had ever been.
        bound = first_slot if state is None else max(state.low, state.bound - slots.margin)
        self._furthest = bound if state is None else state.bound
        self._log = TimerLog(files, folder, slots.reach, None if state is None else state.log)
        self._ring = Ring(files, RING, slots, bound=bound)
        self._low = bound - 1 if state is None else state.low
        self._arrivals: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        self._arrival_rows = self._far_rows = 0
        self._arrivals_first: int | None = None  # the first slot from `bound` on for which one has arrived
        self._push_links()

    @property
    def bound(self) -> int:
        """The first slot that has not been opened."""
        return self._ring.bound

    @property
    def low(self) -> int:
        """Slots before it are delivered, durably, as far as anybody has said."""
        return self._low

    @property
    def rows(self) -> int:
        """Promises in slots that have not been opened, settled ones included."""
        return self._ring.rows + self._far_rows

    @property
    def used_slots(self) -> int:
        """Slots in use that have not been opened."""
        return self._ring.used

    @property
    def arrival_rows(self) -> int:
        """Promises that are in memory because they are not in the files yet."""
        return self._arrival_rows

    @property
    def first_at(self) -> int | None:
        """The oldest row of the commit log that may be needed."""
        found = [int(at.min()) for _, _, at in self._arrivals]
        if self._log.first_at is not None:
            found.append(self._log.first_at)
        return min(found, default=None)

    # -- slots -----------------------------------------------------------------------------------------------

    def is_open(self, due_ms: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these instants are in slots that have been opened."""
        return np.asarray(due_ms < self.slots.begin_ms(self.bound))

    def keep(self, due_ms: Int64Array, seq: Int64Array, at: Int64Array) -> None:
        """Keep these, each at a place of the log."""
        if not len(seq):
            return
        self._arrivals.append((due_ms, seq, at))
        self._arrival_rows += len(seq)
        far = ~self.is_open(due_ms)
        if far.any():
            self._far_rows += int(far.sum())
            slots = self.slots.place(self.slots.of_instants(due_ms[far]), self.bound)
            first = int(slots.min())
            if self._arrivals_first is None or first < self._arrivals_first:
                self._arrivals_first = first
        if self._arrival_rows >= self._arrivals_max:
            self.flush()

    def first_slot(self) -> int | None:
        """The first slot in use that has not been opened."""
        known = [slot for slot in (self._ring.first_used(), self._arrivals_first) if slot is not None]
        return min(known, default=None)

    def open(self, to: int, rows_max: int) -> Heads:
        """Move `bound` up to `to`, or less far when there are many; returns what is to be walked."""
        if self._arrivals_first is not None and self._arrivals_first < to:
            self.flush()
        return self._ring.open(to, rows_max)

    def walk(self, heads: Heads) -> Entries:
        """All that waits in these slots (reader thread)."""
        return self._log.walk(heads.slot, heads.last)

    def gone(self, index: Int64Array) -> None:
        """These entries' promises have been moved, durably, and kept again."""
        self._log.gone(index)

    def rows_in(self, slots: Int64Array) -> Int64Array:
        """How many have been placed in each of these slots, settled ones included."""
        _, rows = self._ring.heads(slots)
        if self._arrivals:
            arrived = np.concatenate([self.slots.of_instants(due) for due, _, _ in self._arrivals])
            arrived.sort()
            rows = rows + np.searchsorted(arrived, slots, side="right") - np.searchsorted(arrived, slots)
        return np.asarray(rows)

    def deliver(self, low: int) -> None:
        """Slots before `low` are delivered: all that waited there is settled or gone, durably.

        There is always one before `bound` that is not: a promise that comes late needs a slot to be found in.
        """
        low = min(low, self.bound - 1)
        if low > self._low:
            self._low = low
            self._log.forget(low)

    def flush(self) -> None:
        """Write the arrivals to the timer log."""
        if not self._arrivals:
            return
        due, seq, at = (np.concatenate(columns) for columns in zip(*self._arrivals, strict=True))
        slots = self.slots.of_instants(due)
        far = slots >= self.bound
        slots = np.where(far, self.slots.place(slots, self.bound), np.maximum(slots, self._low))
        if bool((np.diff(slots) < 0).any()):
            order = np.argsort(slots, kind="stable")
            slots, due, seq, at = slots[order], due[order], seq[order], at[order]
        begins = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
        rows = np.diff(np.append(begins, len(slots)))
        prev, _ = self._ring.heads(slots[begins])
        last = self._log.append(slots[begins], rows, prev, entries_of(due, seq, at), self.bound)
        self._ring.push(slots[begins], last, rows)
        # Only now: on a full disk they go on waiting in memory, and a checkpoint is tried again later.
        self._arrivals, self._arrival_rows, self._far_rows, self._arrivals_first = [], 0, 0, None

    # -- restarts --------------------------------------------------------------------------------------------

    def state(self) -> WheelState:
        """For a checkpoint, after the files of `take_dirty` have been synced."""
        self.flush()
        slots = self.slots
        return WheelState(
            generation=self._generation,
            precision_ms=slots.precision_ms,
            reach=slots.reach,
            count=slots.count,
            low=self._low,
            bound=max(self._furthest, self.bound),
            log=self._log.state(),
        )

    def reopen(self) -> Entries:
        """The first slot that is not delivered, and those whose records have been lost since they were opened."""
        if self._low < self.bound:
            return self._log.in_slots(self._low, self.bound)
        return self.walk(self._ring.open(self._low + 1, 1 << 62))

    def gone_by_seq(self, seq: Int64Array) -> int:
        """These were moved after the checkpoint: where they stood before does not count. Returns how many were."""
        return self._log.gone_by_seq(seq)

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """As of a MappedLog, for both logs; the ring is never synced."""
        self.flush()
        return self._log.take_dirty()

    def unsynced(self) -> None:
        """As of a MappedLog, for both logs; the ring is never synced."""
        self._log.unsynced()

    def close(self) -> None:
        """Let go of the files."""
        self._log.close()
        self._ring.close()

    def _push_links(self) -> None:
        """Read all durable links, and push them to the ring, which is empty."""
        for begin, end in self._log.link_parts():
            links = self._log.links.read(begin, end)
            slots = np.ascontiguousarray(links["slot"])  # a column is sorted several times as fast
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], links["rows"][order]
            begins = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
            last = begin + order[np.append(begins[1:], len(slots)) - 1]
            self._ring.push(slots[begins], last, np.add.reduceat(rows, begins))


def check(files: Files, slots: Slots, state: WheelState) -> None:
    """Raise SetupError when `state` is that of a wheel with other slots, Corrupt when a file of it is damaged."""
    if (state.precision_ms, state.reach, state.count) != (slots.precision_ms, slots.reach, slots.count):
        raise SetupError("--timer-precision-ms, --timer-wheel-ms or --gather-ahead-ms has changed")
    timer_log.check(files, generations.folder_of(FOLDER, state.generation), state.log)
