"""The strategy `timer_wheel`: opens slots ahead of their time, rolls what is due beyond the ring, keeps the latch.

A promise that is not settled is in exactly one place, which decides who hands it out:

    a slot from `bound` on (wheel.py)   nobody has looked at it yet
    an opening under way                the reader thread walks its slot's chain
    near (near.py)                      its slot has been opened; or was, when it came
    on the move (moves.py)              its slot was opened long before it is due: it is being rolled

`bound` moves when an opening begins, and what comes from then on for those slots is near at once; `opened` moves
when it ends, and nothing is handed out before it that is due at or after it. Nor past a promise on the move,
which comes back when its new row is durable. So the order holds whichever way a promise took.

The latch: `low` passes a slot when nothing of it is near, in flight or on the move. A restart opens the slots
from `low` on again, and leaves out what is settled or has been moved since.

Clocks: a slot once opened stays open, so a clock set back makes nothing late or early; it costs memory for what
is near by the old clock, two numbers a promise. One set forward opens all it passes, in steps of `OPEN_ROWS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.errors import OverLimit
from timeball.files import File, Files
from timeball.log.reader import LogReader
from timeball.message import Int64Array, int64
from timeball.schedule.moves import Moves
from timeball.schedule.near import FAR_MS, Near
from timeball.schedule.places import Placed
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled
from timeball.schedule.timer_wheel.ring import Heads
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.timer_log import Entries
from timeball.schedule.timer_wheel.wheel import ARRIVALS_MAX, Wheel, WheelState

logger = logging.getLogger(__name__)

OPEN_ROWS = 1 << 20  # promises looked at in one opening, some 40 MB; a slot is opened whole
SORT_ROWS = 1 << 16  # sorted out in one go: some milliseconds of the event loop
PURGE_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Latch:
    """A slot that may not pass before these have arrived, and nothing is open that is due up to `until_ms`."""

    slot: int
    ticket: int
    until_ms: int


class TimerWheel:
    """See the module's docstring; implements `strategy.Keeper`."""

    new_wheel = Wheel

    def __init__(
        self,
        files: Files,
        reader: LogReader,
        reader_thread: Executor,
        settling: Settling,
        *,
        slots: Slots,
        congest_rows: int,
        ahead_ms: int,
        gather_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        arrivals_max: int = ARRIVALS_MAX,
    ) -> None:
        """`congest_rows`: how many a slot takes, 0 for any number. `restore` comes before anything else."""
        self._files, self._reader, self._thread, self._settling = files, reader, reader_thread, settling
        self._slots, self._congest_rows, self._ahead_ms = slots, congest_rows, ahead_ms
        self._arrivals_max = arrivals_max
        self._on_change, self._on_failure = on_change, on_failure
        self._near = Near(
            reader, reader_thread, settling,
            ahead_ms=ahead_ms, gather_bytes=gather_bytes, on_change=on_change, on_failure=on_failure,
        )  # fmt: skip
        self._moves = Moves(
            reader, reader_thread, settling,
            chunk_bytes=gather_bytes // 4, on_change=on_change, on_failure=on_failure,
        )  # fmt: skip
        self._wheel: Wheel
        self._opened = 0
        self._opening: asyncio.Task[None] | None = None
        self._latches: list[Latch] = []
        self._now_ms = -FAR_MS
        self._purged_ms = -FAR_MS
        self._rolled_rows = 0
        settling.bounds.append(lambda: self.settled_before_ms)

    # -- the contract ------------------------------------------------------------------------------------

    def admit(self, promises: pa.RecordBatch) -> None:
        """See Strategy."""
        due, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        now_ms = int(promises.column("store_ms")[-1].as_py())
        before = self.next_due_ms()
        self._pass_unused(now_ms)
        near = self._wheel.is_open(due)
        if near.any():
            self._near.admit(promises if near.all() else promises.filter(pa.array(near)), now_ms)
        self._wheel.keep(due, seq, seq)
        self._tell_if_earlier(before)

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy."""
        self._now_ms = now_ms
        self._open_if_needed(now_ms)
        if abs(now_ms - self._purged_ms) >= PURGE_EVERY_MS:
            self._purged_ms = now_ms
            self._advance()
        return self._near.due(now_ms, limit, self._below_ms())

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """See Strategy."""
        self._settling.released(due_ms, seq)

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy."""
        return self._moves.take(limit)

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        """See Strategy. Where they stood is marked; those still waiting are placed anew."""
        before = self.next_due_ms()
        movers, at = self._moves.moved(seq, at_seq)
        self._rolled_rows += len(seq)
        self._wheel.gone(movers.note)
        waits = ~self._settling.is_settled(movers.due_ms, movers.seq)
        self._keep(movers.due_ms[waits], movers.seq[waits], at[waits])
        self._tell_if_earlier(before)

    def next_due_ms(self) -> int | None:
        """See Strategy. For what is in the wheel it is the instant at which to open its slot, half the lead ahead."""
        if self._moves.ready:
            return self._now_ms
        near = self._near.next_due_ms(self._below_ms())
        if self._opening is not None:
            return near  # its end is told
        open_ms = self._open_ms()
        if open_ms is None or near is None:
            return near if open_ms is None else open_ms
        return min(near, open_ms)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy. It stays where it is and is left out when its turn comes; on the move it holds up nobody."""
        if not len(self._moves):
            return self._settling.cancel(due_ms, seq)
        before = self.next_due_ms()
        waited = self._settling.cancel(due_ms, seq)
        self._tell_if_earlier(before)
        return waited

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy."""
        return self._settling.was_cancelled(due_ms, seq)

    def statistics(self) -> dict[str, int]:
        """See Strategy. `waiting_rows` counts cancelled ones until their slot is opened, `wheel_rows` besides."""
        wheel, near, moving = self._wheel.rows, len(self._near), len(self._moves)
        return {
            "waiting_rows": max(0, wheel + near + moving - self._settling.cancelled_rows),
            "wheel_rows": wheel,
            "near_rows": near,
            "moving_rows": moving,
            "rolled_rows": self._rolled_rows,
            "slots": self._wheel.used_slots,
            "cancelled_rows": self._settling.cancelled_rows,
        }

    # -- what a broker asks besides ------------------------------------------------------------------------

    def refuse(self, due_ms: Int64Array) -> None:
        """Raise OverLimit when a slot within the ring would hold more than `congest_rows` of these and others.

        A straight threshold. What has been accepted and is on its way to the disk is not counted yet.
        """
        if not self._congest_rows or not len(due_ms):
            return
        slots = self._slots.of_instants(due_ms)
        bound = self._wheel.bound
        slots = slots[(slots > self._wheel.low) & (slots < bound + self._slots.reach)]
        distinct, rows = np.unique(slots, return_counts=True)
        there = self._wheel.rows_in(distinct)
        crowded = np.flatnonzero(there + rows > self._congest_rows)
        if len(crowded):
            slot = int(distinct[crowded[0]])
            begin = datetime.fromtimestamp(self._slots.begin_ms(slot) / 1000, UTC)
            raise OverLimit(
                f"slot {slot} ({self._slots.precision_ms} ms from {begin:%Y-%m-%dT%H:%M:%S.%f}Z on) holds "
                f"{int(there[crowded[0]])} messages, {int(rows[crowded[0]])} more would exceed "
                f"--timer-congest-num-each-slot {self._congest_rows}: choose other instants, or raise it"
            )

    def dress(self, promises: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """See Keeper. They stand in the log as they came."""
        return promises

    @property
    def busy(self) -> bool:
        """Whether the reader thread works for us."""
        return self._opening is not None or self._near.busy or self._moves.loading

    @property
    def settled_before_ms(self) -> int:
        """See Keeper."""
        first = self._opened if self._opening is not None else self._wheel.first_slot()
        unopened_ms = FAR_MS if first is None else self._slots.begin_ms(first)
        candidates = (unopened_ms, self._first_open_ms(), self._moves.first_due_ms)
        return min(ms for ms in candidates if ms is not None)

    @property
    def first_needed_seq(self) -> int | None:
        """See Keeper."""
        self._advance()
        return self._wheel.first_at

    def state(self) -> WheelState:
        """See Keeper."""
        self._advance()
        return self._wheel.state()

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        """See Keeper."""
        assert state is None or isinstance(state, WheelState)
        self._now_ms = now_ms
        first_slot = self._slots.of_instant(now_ms)
        self._wheel = self.new_wheel(
            self._files, self._slots, state, first_slot=first_slot, arrivals_max=self._arrivals_max
        )
        if state is not None:
            self._wheel.gone_by_seq(waiting.seq[waiting.at != waiting.seq])
            self._sort_out(self._wheel.reopen())
        self._opened = self._wheel.bound
        self._pass_unused(now_ms)
        order = np.argsort(
            waiting.at
        )  # the timer log follows the commit log, so that both are let go together
        self._keep(waiting.due_ms[order], waiting.seq[order], waiting.at[order])

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """See Keeper."""
        return self._wheel.take_dirty()

    def unsynced(self) -> None:
        """See Keeper."""
        self._wheel.unsynced()

    async def close(self) -> None:
        """See Keeper."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        await self._near.close()
        await self._moves.close()
        self._wheel.close()

    # -- where promises go -----------------------------------------------------------------------------------

    def _keep(self, due: Int64Array, seq: Int64Array, at: Int64Array) -> None:
        """Keep these, whose bodies are in the log."""
        near = self._wheel.is_open(due)
        self._near.expect(due[near], seq[near], at[near])
        self._wheel.keep(due, seq, at)

    def _sort_out(self, found: Entries) -> None:
        """What has been found in slots that are open now: near, or to be rolled."""
        found = found.part(~self._settling.is_settled(found.due_ms, found.seq))
        near = self._wheel.is_open(found.due_ms)
        self._near.expect(found.due_ms[near], found.seq[near], found.at[near])
        rolls = found.part(~near)
        # Of what is near and not in its own slot the latch must be kept besides: it was to be rolled, and came late.
        odd = near & (self._slots.of_instants(found.due_ms) != found.slot)
        if len(rolls) or odd.any():
            ticket = self._moves.add(rolls.due_ms, rolls.seq, rolls.at, rolls.index)
            slot = int(min(found.slot[mask].min() for mask in (~near, odd) if mask.any()))
            until_ms = int(found.due_ms[odd].max()) if odd.any() else -FAR_MS
            self._latches.append(Latch(slot, ticket, until_ms))

    def _tell_if_earlier(self, before: int | None) -> None:
        after = self.next_due_ms()
        if after is not None and (before is None or after < before):
            self._on_change()

    # -- bounds ----------------------------------------------------------------------------------------------

    def _below_ms(self) -> int:
        """Nothing due at or after this may be handed out: something earlier may not be in `near` yet."""
        moving = self._moves.first_due_ms
        opened_ms = self._slots.begin_ms(self._opened)
        return opened_ms if moving is None else min(opened_ms, moving)

    def _first_open_ms(self) -> int:
        """The earliest instant of what is near or in flight."""
        candidates = (self._near.first_due_ms, self._settling.first_in_flight_ms)
        return min((ms for ms in candidates if ms is not None), default=FAR_MS)

    def _advance(self) -> None:
        """Move the mark, and `low` past the slots whose latch has opened."""
        # The mark never goes back: it may not be taken to what nobody has been promised yet.
        mark_ms = min(self.settled_before_ms, self._slots.begin_ms(self._opened))
        self._settling.move_mark(mark_ms, self._reader.next_seq)
        first_ms = self._first_open_ms()
        self._latches = [
            latch
            for latch in self._latches
            if self._moves.is_open(latch.ticket) or first_ms <= latch.until_ms
        ]
        slots = [latch.slot for latch in self._latches]
        # Never ahead of the time: slots to come are counted by `refuse`, and what comes late is not theirs.
        slots += [self._opened - 1, self._slots.of_instant(min(first_ms, self._now_ms))]
        self._wheel.deliver(min(slots))

    # -- opening ---------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return len(self._near) < OPEN_ROWS

    def _target(self, now_ms: int) -> int:
        return self._slots.of_instant(now_ms + self._ahead_ms) + 1

    def _pass_unused(self, now_ms: int) -> None:
        """Slots that nobody uses need no opening."""
        if self._opening is None:
            first, target = self._wheel.first_slot(), self._target(now_ms)
            if first is None or first >= target:
                self._wheel.open(target, 0)
                self._opened = self._wheel.bound

    def _open_ms(self) -> int | None:
        """When to open the next slot in use; None when there is none, or what is due already must make room for it."""
        first = self._wheel.first_slot()
        if first is None:
            return None
        begin_ms = self._slots.begin_ms(first)
        if self._has_room():
            return begin_ms - self._ahead_ms // 2
        near_ms = self._near.first_due_ms
        return None if near_ms is not None and near_ms <= self._now_ms else begin_ms

    def _open_if_needed(self, now_ms: int) -> None:
        # Half the lead at a time: each opening is a walk, and the other half is what is left to load bodies in.
        if self._opening is not None or self._slots.begin_ms(self._opened) > now_ms + self._ahead_ms // 2:
            return
        self._pass_unused(now_ms)
        open_ms, target = self._open_ms(), self._target(now_ms)
        if open_ms is None or open_ms > now_ms:
            return
        heads = self._wheel.open(target, OPEN_ROWS)
        self._opening = asyncio.get_running_loop().create_task(self._open(heads, self._wheel.bound))
        self._opening.add_done_callback(self._opening_ended)

    async def _open(self, heads: Heads, to: int) -> None:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._wheel.walk, heads)
        for begin in range(0, len(found), SORT_ROWS):
            self._sort_out(found.part(slice(begin, begin + SORT_ROWS)))
            await asyncio.sleep(0)
        self._opened = to

    def _opening_ended(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("opening a slot of the timer wheel failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()
