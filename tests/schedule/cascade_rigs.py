"""`level_cascade` under the contract, with little memory for bodies, and cascades that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball.message import Int64Array, Kind
from timeball.schedule.level_cascade.hops import FAR_MS, is_last
from timeball.schedule.level_cascade.queue import HopQueue
from timeball.schedule.level_cascade.store import CascadeState, LevelCascade, check
from timeball.schedule.places import Placed
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled, Strategy
from timeball.table.attachment import Attachment
from timeball.table.data_file import DataFile

AHEAD_MS = 1_000  # so that seconds are hops already
GATHER_BYTES = 64 * 512  # some tens of rows near, a few on the move


class CascadeRig:
    """`level_cascade`, or a subclass of it that is wrong."""

    name = "level_cascade"
    has_table = False
    kind = Kind.PROMISE

    def __init__(self, strategy: type[LevelCascade] = LevelCascade, gather_bytes: int = GATHER_BYTES) -> None:
        self._class, self._gather_bytes = strategy, gather_bytes
        self._dress: Callable[[pa.RecordBatch, int], pa.RecordBatch] = lambda rows, _: rows

    def start(self, world: World, restart: Restart) -> LevelCascade:
        settling = Settling()
        settling.restore(restart.settled)
        strategy = self._class(
            world.files, world.reader, world.reader_thread, settling,
            ahead_ms=AHEAD_MS, gather_bytes=self._gather_bytes,
            on_change=world.wake, on_failure=world.failures.append,
        )  # fmt: skip
        self._dress = strategy.dress
        state = None
        if restart.state is not None:
            state = msgspec.convert(restart.state, CascadeState)
            check(world.files, state)  # what a checkpoint vouches for is there
        waiting = restart.waiting if state is None else restart.since
        strategy.restore(state, restart.settled, waiting, world.now_ms)
        return strategy

    def dress(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return self._dress(rows, rows["store_ms"][0].as_py())

    def kept(self, rows: pa.RecordBatch, first_seq: int) -> None:
        pass

    def state(self, strategy: Strategy) -> object:
        assert isinstance(strategy, LevelCascade)
        return msgspec.json.decode(msgspec.json.encode(strategy.state()))

    def settled(self, strategy: Strategy) -> Settled:
        assert isinstance(strategy, LevelCascade)
        return strategy._settling.settled()

    def is_busy(self, strategy: Strategy) -> bool:
        assert isinstance(strategy, LevelCascade)
        return strategy._near.busy or strategy._moves.loading

    def settled_before_ms(self, strategy: Strategy) -> int:
        assert isinstance(strategy, LevelCascade)
        return strategy.settled_before_ms

    def rows_in_memory(self, strategy: Strategy) -> int:
        assert isinstance(strategy, LevelCascade)
        opened = sum(queue.opened_rows for queue in strategy._queues)
        return opened + sum(map(len, (strategy._near, strategy._moves, strategy._settling)))

    def first_needed_seq(self, strategy: Strategy) -> int | None:
        assert isinstance(strategy, LevelCascade)
        return strategy.first_needed_seq

    async def ready_to_cancel(self, strategy: Strategy) -> None:
        pass

    async def attach(self, strategy: Strategy, attachment: Attachment) -> None:
        raise AssertionError("there is no table")

    def live_files(self, strategy: Strategy) -> list[DataFile]:
        return []


# -- negative controls: each breaks one promise of the contract ------------------------------------------------


class TakesLevelsForInstants(LevelCascade):
    """Hands out at the whole second, as the levels have it."""

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().due(now_ms + 999, limit)


class NeverMakesGood(LevelCascade):
    """Opens the last hop when it is over, however late the ones before it were."""

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        super().restore(state, settled, waiting, now_ms)
        self._queues.opens_ms = lambda queue: FAR_MS if queue.head_ms is None else queue.head_ms  # type: ignore[method-assign]


class LosesTheLast(LevelCascade):
    """Forgets the last of several promises that were written again."""

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        enter = self._enter_lying

        def all_but_one(promises: Placed, hops: Int64Array, entry_ms: int) -> None:
            few = np.arange(len(promises)) < max(1, len(promises) - 1)
            enter(promises.part(few), hops[few], entry_ms)

        self._enter_lying = all_but_one  # type: ignore[method-assign]
        super().moved(seq, at_seq)
        self._enter_lying = enter  # type: ignore[method-assign]


class StaysWhereItWas(LevelCascade):
    """Finds after a restart a promise where it was, though it has been written again since."""

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        if isinstance(state, CascadeState):  # what it knew already counts as new
            state = CascadeState(state.generation, 0, state.queues)
        super().restore(state, settled, waiting, now_ms)


class SavesNoOldPlaces(LevelCascade):
    """Does not save which entries' promises stand elsewhere."""

    def state(self) -> CascadeState:
        state = super().state()
        for queue in state.queues:
            queue.gone = []
        return state


class ForgetsTheNear(LevelCascade):
    """Takes what was near for delivered when it starts again."""

    def _look_at_the_near(self) -> None:
        while self._queues.near.head_ms is not None:
            self._queues.take(self._queues.near, FAR_MS, 1 << 20)


class ForgetsWhatCame(LevelCascade):
    """Begins from what the checkpoint knew."""

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        waiting = waiting if state is None else waiting.part(np.zeros(len(waiting), np.bool_))
        super().restore(state, settled, waiting, now_ms)


class NeedsNothing(LevelCascade):
    """Lets go of rows in which promises lie that have not moved for long."""

    @property
    def first_needed_seq(self) -> int | None:
        return None


class CancelsOnlyTheNear(LevelCascade):
    """Says that what is on the move cannot be cancelled."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        moving = np.concatenate([np.empty(0, np.int64), *(movers.seq for movers in self._moves._in_flight)])
        answers = np.zeros(len(seq), dtype=np.bool_)
        here = ~np.isin(seq, moving)
        answers[here] = super().cancel(due_ms[here], seq[here])
        return answers


class SettlesTheUnopened(LevelCascade):
    """Tells a checkpoint that all is settled before what is near."""

    def _below_ms(self) -> int:
        return FAR_MS


class SleepsThroughHops(LevelCascade):
    """Wants to be called for what is near, and not for the ends of hops."""

    def _may_open(self, queue: HopQueue) -> bool:
        return is_last(queue.number) and super()._may_open(queue)


# Those that chance finds soon; and those that stand in the way of one test of the contract, with its arguments.
WRONG_CASCADES: list[type[LevelCascade]] = [
    TakesLevelsForInstants, NeverMakesGood, LosesTheLast, ForgetsWhatCame, SettlesTheUnopened, SleepsThroughHops,
]  # fmt: skip
WRONG_AT_AN_EDGE: list[tuple[type[LevelCascade], str, dict[str, Any]]] = [
    (StaysWhereItWas, "test_restart_on_the_move", {"saved": True, "unheard": True}),
    (ForgetsTheNear, "test_restart_again_and_again", {}),
    (NeedsNothing, "test_the_log_behind_what_has_moved_may_go", {}),
    (CancelsOnlyTheNear, "test_what_is_on_the_move_may_be_cancelled", {}),
]
