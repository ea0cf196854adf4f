"""`timer_wheel` under the contract: rings of several shapes over the files of a disk, and wheels that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from tests.schedule.rigs import AHEAD_MS, GATHER_BYTES
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball import limits
from timeball.errors import SetupError
from timeball.message import Int64Array, Kind
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled, Strategy
from timeball.schedule.timer_wheel.ring import Heads
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.store import TimerWheel
from timeball.schedule.timer_wheel.timer_log import Entries
from timeball.schedule.timer_wheel.wheel import Wheel, WheelState, check
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile

DEFAULT = Slots.of(1_000, 3 * limits.DAY_MS, AHEAD_MS)
# Nothing of this ring is spare: what is opened and not settled loses its record as soon as the ring has turned.
MINUTE = Slots(1_000, reach=61, count=61)
# Rolled every few seconds: to reach only three, of milliseconds, is less than may be configured.
TINY = Slots(1, reach=3_000, count=60_000)


class WheelRig:
    """`timer_wheel`, or a subclass of it that is wrong."""

    name = "timer_wheel"
    has_table = False
    kind = Kind.PROMISE

    def __init__(
        self,
        strategy: type[TimerWheel] = TimerWheel,
        slots: Slots = MINUTE,
        *,
        gather_bytes: int = GATHER_BYTES,
        congest_rows: int = 0,
        arrivals_max: int = 8,  # so that some batches are written at once, and others with the next checkpoint
    ) -> None:
        self._class, self._slots = strategy, slots
        self._gather_bytes, self._congest_rows, self._arrivals_max = gather_bytes, congest_rows, arrivals_max

    def start(self, world: World, restart: Restart) -> TimerWheel:
        settling = Settling()
        settling.restore(restart.settled)
        strategy = self._class(
            world.files, world.reader, world.reader_thread, settling,
            slots=self._slots, congest_rows=self._congest_rows, ahead_ms=AHEAD_MS, gather_bytes=self._gather_bytes,
            on_change=world.wake, on_failure=world.failures.append, arrivals_max=self._arrivals_max,
        )  # fmt: skip
        state = restart.state
        assert state is None or isinstance(state, WheelState)
        try:
            if state is not None:
                check(world.files, self._slots, state)
        except SetupError:
            state = None
        waiting = restart.waiting if state is None else restart.since
        strategy.restore(state, restart.settled, waiting, world.now_ms)
        return strategy

    def dress(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def kept(self, rows: pa.RecordBatch, first_seq: int) -> None:
        pass

    def state(self, strategy: Strategy) -> object:
        assert isinstance(strategy, TimerWheel)
        return strategy.state()

    def settled(self, strategy: Strategy) -> Settled:
        assert isinstance(strategy, TimerWheel)
        strategy._advance()
        return strategy._settling.settled()

    def is_busy(self, strategy: Strategy) -> bool:
        assert isinstance(strategy, TimerWheel)
        return strategy.busy

    def settled_before_ms(self, strategy: Strategy) -> int:
        assert isinstance(strategy, TimerWheel)
        return strategy.settled_before_ms

    def rows_in_memory(self, strategy: Strategy) -> int:
        assert isinstance(strategy, TimerWheel)
        held = (strategy._near, strategy._moves, strategy._settling)
        return strategy._wheel.arrival_rows + sum(map(len, held))

    def first_needed_seq(self, strategy: Strategy) -> int | None:
        assert isinstance(strategy, TimerWheel)
        return strategy.first_needed_seq

    async def ready_to_cancel(self, strategy: Strategy) -> None:
        pass

    async def attach(self, strategy: Strategy, attachment: Attachment) -> None:
        raise AssertionError("there is no table")

    def live_files(self, strategy: Strategy) -> list[DataFile]:
        return []


# -- negative controls: each breaks one promise of the contract ------------------------------------------------


class RoundsUp(TimerWheel):
    """A slot is due as soon as it begins, as if the precision were the promise's."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().due(now_ms - now_ms % self._slots.precision_ms + self._slots.precision_ms - 1, limit)


class RoundsDown(TimerWheel):
    """A slot is due when it is over, as RocketMQ's are."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().due(now_ms - now_ms % self._slots.precision_ms - 1, limit)


class SleepsThroughSlots(TimerWheel):
    """Wakes for what is near, and for no slot."""

    def next_due_ms(self) -> int | None:
        return self._near.next_due_ms(self._below_ms())


class LooseLatch(TimerWheel):
    """A slot is delivered once it has been opened, whatever has become of what was in it."""

    def _advance(self) -> None:
        super()._advance()
        self._wheel.deliver(self._opened - 1)


class Unmarked(Wheel):
    def gone(self, index: Int64Array) -> None:
        pass

    def gone_by_seq(self, seq: Int64Array) -> int:
        return 0


class LeavesItWhereItStood(TimerWheel):
    """What has been moved stays in its old slot as well, for a restart to find."""

    new_wheel = Unmarked


class Unchained(Wheel):
    def walk(self, heads: Heads) -> Entries:
        found = super().walk(heads)
        newest = self._log.links.at(heads.last)
        ends = newest["first"] + newest["rows"]
        at = np.searchsorted(newest["first"], found.index, side="right") - 1
        return found.part((at >= 0) & (found.index < ends[np.maximum(at, 0)]))


class OnlyTheLastBatch(TimerWheel):
    """Finds of each slot what came last, and does not follow the chain."""

    new_wheel = Unchained


class Unpushed(Wheel):
    def _push_links(self) -> None:
        pass


class BeginsWithAnEmptyRing(TimerWheel):
    """Takes every slot for empty after a restart."""

    new_wheel = Unpushed


class OpensOnce(TimerWheel):
    """A restart begins behind what had been opened before it."""

    def restore(self, state: WheelState | None, *rest: object) -> None:
        behind = None if state is None else replace_low(state, state.bound)
        super().restore(behind, *rest)  # type: ignore[arg-type]


class Farsighted(Wheel):
    def keep(self, due_ms: Int64Array, seq: Int64Array, at: Int64Array) -> None:
        far = ~self.is_open(due_ms)
        super().keep(due_ms[far], seq[far], at[far])


class KeepsOnlyTheFar(TimerWheel):
    """What comes when its slot is open already is in memory, and in no slot."""

    new_wheel = Farsighted


class LetsGoTooEarly(TimerWheel):
    """Needs nothing of the log."""

    @property
    def first_needed_seq(self) -> int | None:
        return None


def replace_low(state: WheelState, low: int) -> WheelState:
    """The state of a wheel that has delivered all before `low`."""
    return WheelState(
        state.generation, state.precision_ms, state.reach, state.count, low, state.bound, state.log
    )


# Those that chance finds soon, in a ring where little is rolled away; and those that stand in the way of one test of
# the contract, with its arguments, in a short one.
WRONG_WHEELS: list[type[TimerWheel]] = [
    RoundsUp, RoundsDown, SleepsThroughSlots, LooseLatch, OnlyTheLastBatch, BeginsWithAnEmptyRing, OpensOnce,
    KeepsOnlyTheFar,
]  # fmt: skip
WRONG_WHEELS_AT_AN_EDGE: list[tuple[type[TimerWheel], str, dict[str, Any]]] = [
    (LeavesItWhereItStood, "test_restart_on_the_move", {"saved": True, "unheard": True}),
    (LetsGoTooEarly, "test_the_log_behind_what_has_moved_may_go", {}),
    (LooseLatch, "test_restart_again_and_again", {}),
]
