"""`timer_wheel` under the contract: rings of several shapes over the files of a disk, and wheels that are wrong."""

from __future__ import annotations

import pyarrow as pa
from tests.schedule.rigs import AHEAD_MS, GATHER_BYTES
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball import limits
from timeball.message import Kind
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled, Strategy
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.store import TimerWheel
from timeball.schedule.timer_wheel.wheel import WheelState, is_usable
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile

DEFAULT = Slots.of(1_000, 3 * limits.DAY_MS, AHEAD_MS)
MINUTE = Slots.of(1_000, limits.MINUTE_MS, AHEAD_MS)
# Three seconds of milliseconds, and nothing of the ring is spare: what is opened and not settled loses its record
# as soon as the ring has turned.
TINY = Slots(1, 3_000, 3_000)


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
    ) -> None:
        self._class, self._slots = strategy, slots
        self._gather_bytes, self._congest_rows = gather_bytes, congest_rows

    def start(self, world: World, restart: Restart) -> TimerWheel:
        settling = Settling()
        settling.restore(restart.settled)
        strategy = self._class(
            world.files, world.reader, world.reader_thread, settling,
            slots=self._slots, congest_rows=self._congest_rows, ahead_ms=AHEAD_MS, gather_bytes=self._gather_bytes,
            on_change=world.wake, on_failure=world.failures.append,
        )  # fmt: skip
        state = restart.state
        assert state is None or isinstance(state, WheelState)
        usable = state is not None and is_usable(world.files, self._slots, state)
        strategy.restore(
            state if usable else None,
            restart.settled,
            restart.since if usable else restart.waiting,
            world.now_ms,
        )
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
