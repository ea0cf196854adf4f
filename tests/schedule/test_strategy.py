"""The contract notices every strategy that does not keep it, and `Settled` says which promises may wait."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from tests.schedule.contract import FAST
from tests.schedule.level_rigs import WRONG_LEVELS, LevelsRig
from tests.schedule.machine import machine
from tests.schedule.rigs import WRONG, HourLogRig
from tests.schedule.stage import Rig

from timeball.schedule.delay_levels.fifo import DelayLevels
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.strategy import Settled

# Nothing is shrunk: that it fails is all we want to know.
UNTIL_CAUGHT = hypothesis.settings(
    FAST, max_examples=400, database=None, derandomize=True, report_multiple_bugs=False,
    phases=[hypothesis.Phase.generate],
)  # fmt: skip
NONE = np.empty(0, np.int64)


def assert_caught(new_rig: Callable[[], Rig]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine(new_rig), settings=UNTIL_CAUGHT)
    # It is the suite that noticed, not an assert in the strategy itself.
    assert caught.traceback[-1].path.name in ("stage.py", "world.py")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_strategy_is_caught(wrong: type[HourLog]) -> None:
    assert_caught(lambda: HourLogRig(wrong))


@pytest.mark.parametrize("wrong", WRONG_LEVELS, ids=lambda wrong: wrong.__name__)
def test_wrong_delay_levels_are_caught(wrong: type[DelayLevels]) -> None:
    assert_caught(lambda: LevelsRig(wrong))


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
