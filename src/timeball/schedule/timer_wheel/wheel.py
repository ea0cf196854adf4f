"""The wheel: ring and timer log together, over files alone. Who waits in which slot; nothing about when.

    keep   promises, by instant and place in the log; they wait in memory until there are `ARRIVALS_MAX` of them
    open   the next slots in use, once; their chains are then walked in the reader thread
    gone   a promise found in a slot stands elsewhere now

Arrivals are held back so that a link covers more of them, and a message sent alone costs no write of its own. They
are on disk no later than with the next checkpoint, and the log has those that came after it.

A promise whose slot has been opened already is kept too, in that slot or, when it is late, in the first one that is
not wholly delivered: nobody looks there before the next restart, and that is when it is needed.

A state belongs to one *generation*, a folder. Whoever begins without a state begins a new one, so that a state
saved long ago never meets files that others have written since.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.files import File, Files
from timeball.message import Int64Array
from timeball.schedule.timer_wheel import ring, timer_log
from timeball.schedule.timer_wheel.ring import Heads, Ring
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.timer_log import Entries, LogState, TimerLog, entries_of

logger = logging.getLogger(__name__)

FOLDER = "timer_wheel"
ARRIVALS_MAX = 4_096  # some milliseconds of sorting; a hundred kilobytes
# A ring up to this is read at a start: 64 MB. A larger one, of few links, is made anew from them: at a millisecond
# it is 4 GB, which take some ten seconds, and a link costs some tens of microseconds.
SCANNED_SLOTS_MAX = 1 << 22
SLOTS_A_LINK = 1 << 10

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
        """Open what `state` says, or begin anew with `first_slot`. Reads the ring, and what must be revised."""
        self._arrivals_max = arrivals_max
        generations = [int(name) for name in files.list_dir(FOLDER) if name.isdigit()]
        self._generation = max(generations, default=0) + 1 if state is None else state.generation
        for generation in generations:
            if generation != self._generation:
                _remove(files, generation)
        self.slots, self._folder = slots, folder_of(self._generation)
        files.make_dir(self._folder)
        # Slots before it may have lost their records to later ones, placed when `bound` stood where it had ever been.
        bound = first_slot if state is None else max(state.low, state.bound - slots.margin)
        self._furthest = bound if state is None else state.bound
        self._log = TimerLog(files, self._folder, slots.reach, None if state is None else state.log)
        anew = state is not None and is_made_anew(slots, state)
        if anew and files.exists(f"{self._folder}/ring"):
            files.remove(f"{self._folder}/ring")
        self._ring = Ring(files, f"{self._folder}/ring", slots, bound=bound)
        self._low = bound - 1 if state is None else state.low
        self._arrivals: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        self._arrival_rows = self._far_rows = 0
        self._arrivals_first: int | None = None  # the first slot from `bound` on for which one has arrived
        if anew:
            self._push_again(None)
        elif state is not None:
            self._revise()

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
        """As of a MappedLog, for all files."""
        self.flush()
        return [*self._log.take_dirty(), (self._folder, self._ring.take_dirty())]

    def unsynced(self) -> None:
        """As of a MappedLog, for all files."""
        self._log.unsynced()
        self._ring.unsynced()

    def close(self) -> None:
        """Let go of the files."""
        self._log.close()
        self._ring.close()

    def _revise(self) -> None:
        """Records of the ring that point behind the durable links get the ends that these have."""
        suspects = self._ring.suspects(self._log.links.end)
        if len(suspects):
            self._push_again(suspects)
            logger.info("slots written after the checkpoint revised slots=%d", len(suspects))

    def _push_again(self, places: Int64Array | None) -> None:
        """Read all links, and push those that stand at these places of the ring, or all."""
        for begin, end in self._log.link_parts():
            links = self._log.links.read(begin, end)
            mine = np.arange(len(links))
            if places is not None:
                found = self.slots.index(links["slot"])
                mine = np.flatnonzero(
                    places[np.minimum(np.searchsorted(places, found), len(places) - 1)] == found
                )
            if not len(mine):
                continue
            order = mine[np.argsort(links["slot"][mine], kind="stable")]
            slots, rows = links["slot"][order], links["rows"][order]
            begins = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
            last = begin + order[np.append(begins[1:], len(slots)) - 1]
            self._ring.push(slots[begins], last, np.add.reduceat(rows, begins))


def is_made_anew(slots: Slots, state: WheelState) -> bool:
    """Whether the ring is not read at a start from this state, but made anew.

    It must follow from the state alone: a start that is cut off leaves a ring that is not whole, and the next one, from
    the same state, must not believe it.
    """
    begin, end = state.log.links
    return slots.count > SCANNED_SLOTS_MAX and (end - begin) * SLOTS_A_LINK < slots.count


def is_usable(files: Files, slots: Slots, state: WheelState) -> bool:
    """Whether a wheel of these slots can begin with `state`: it is one of the same shape, and its files are there."""
    folder = folder_of(state.generation)
    same = (state.precision_ms, state.reach, state.count) == (slots.precision_ms, slots.reach, slots.count)
    return (
        same
        and (is_made_anew(slots, state) or ring.is_whole(files, f"{folder}/ring", slots))
        and timer_log.is_whole(files, folder, state.log)
    )


def folder_of(generation: int) -> str:
    """Where the files of a generation are."""
    return f"{FOLDER}/{generation:08d}"


def _remove(files: Files, generation: int) -> None:
    folder = folder_of(generation)
    for part in ("links", "entries"):
        for name in files.list_dir(f"{folder}/{part}"):
            files.remove(f"{folder}/{part}/{name}")
    if files.exists(f"{folder}/ring"):
        files.remove(f"{folder}/ring")
