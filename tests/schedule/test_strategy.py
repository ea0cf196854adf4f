"""The contract notices every strategy that does not keep it, and `Settled` says which promises may wait."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.cascade_rigs import WRONG_AT_AN_EDGE, WRONG_CASCADES, CascadeRig
from tests.schedule.contract import Contract, assert_caught, one_now
from tests.schedule.level_rigs import WRONG_LEVELS, LevelsRig
from tests.schedule.rigs import WRONG, HourLogRig
from tests.schedule.wheel_rigs import DEFAULT, WRONG_WHEELS, WRONG_WHEELS_AT_AN_EDGE, WheelRig
from tests.schedule.world import World

from timeball.schedule.delay_levels.fifo import DelayLevels
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.level_cascade.store import LevelCascade
from timeball.schedule.strategy import Settled
from timeball.schedule.timer_wheel.store import TimerWheel

NONE = np.empty(0, np.int64)


@pytest.mark.parametrize("wrong", one_now(WRONG), ids=lambda wrong: wrong.__name__)
def test_a_wrong_strategy_is_caught(wrong: type[HourLog]) -> None:
    assert_caught(lambda: HourLogRig(wrong))


@pytest.mark.parametrize("wrong", one_now(WRONG_LEVELS), ids=lambda wrong: wrong.__name__)
def test_wrong_delay_levels_are_caught(wrong: type[DelayLevels]) -> None:
    assert_caught(lambda: LevelsRig(wrong))


@pytest.mark.parametrize("wrong", one_now(WRONG_WHEELS), ids=lambda wrong: wrong.__name__)
def test_a_wrong_wheel_is_caught(wrong: type[TimerWheel]) -> None:
    # Each batch is written at once: what only memory holds, no restart can find in the wrong place.
    assert_caught(lambda: WheelRig(wrong, DEFAULT, arrivals_max=1))


@pytest.mark.parametrize(("wrong", "test", "arguments"), WRONG_WHEELS_AT_AN_EDGE)
def test_a_wrong_wheel_is_caught_at_an_edge(
    wrong: type[TimerWheel], test: str, arguments: dict[str, Any]
) -> None:
    for strategy, outcome in ((TimerWheel, nullcontext()), (wrong, pytest.raises(AssertionError))):
        world = World(WheelRig(strategy, arrivals_max=1))
        with outcome:
            getattr(Contract(), test)(world, **arguments)
        world.failures.clear()
        world.close()


@pytest.mark.parametrize("wrong", one_now(WRONG_CASCADES), ids=lambda wrong: wrong.__name__)
def test_a_wrong_cascade_is_caught(wrong: type[LevelCascade]) -> None:
    assert_caught(lambda: CascadeRig(wrong))


@pytest.mark.parametrize(("wrong", "test", "arguments"), WRONG_AT_AN_EDGE)
def test_a_wrong_cascade_is_caught_at_an_edge(
    wrong: type[LevelCascade], test: str, arguments: dict[str, Any]
) -> None:
    for strategy, outcome in ((LevelCascade, nullcontext()), (wrong, pytest.raises(AssertionError))):
        world = World(CascadeRig(strategy))
        with outcome:
            getattr(Contract(), test)(world, **arguments)
        world.failures.clear()
        world.close()


def test_below_the_mark_only_late_ranges_may_wait() -> None:
    settled = Settled(1_000, NONE, NONE, before_seq=50, late=((10, 3), (30, 1)))
    seq = np.array([9, 10, 12, 13, 29, 30, 31, 49, 50, 51])
    assert settled.may_wait(seq).tolist() == [
        False, True, True, False, False, True, False, False, True, True,
    ]  # fmt: skip


def test_without_a_sequence_number_the_mark_covers_all() -> None:
    assert not Settled(1_000, NONE, NONE).may_wait(np.arange(1, 100)).any()


@given(
    before_seq=st.integers(0, 40),
    late=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=3),
    low=st.integers(0, 40),
    span=st.integers(0, 10),
)
def test_may_touch_agrees_with_may_wait(
    before_seq: int, late: list[tuple[int, int]], low: int, span: int
) -> None:
    settled = Settled(0, NONE, NONE, before_seq, tuple(late))
    some = bool(settled.may_wait(np.arange(low, low + span + 1)).any())
    assert settled.may_touch(low, low + span) == some
