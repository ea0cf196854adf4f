"""The suites catch every wrong schedule of wrong.py, disks that ignore fsync, and clocks that accept every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from tests.schedule.contract import Contract, assert_caught, invalid_exemptions, split_by_target
from tests.schedule.cuts import FEW, calls_of, violations
from tests.schedule.rigs import DEFAULT, CascadeRig, HourLogRig, WheelRig
from tests.schedule.stage import Rig
from tests.schedule.world import World
from tests.schedule.wrong import AT_AN_EDGE, BY_CHANCE, CascadeWithoutSync, WheelWithoutSync

from timeball.io.clock import SchedulerClock
from timeball.schedule.scheduler import Scheduler

DISKS = 40  # of a cut: few have a file that looks whole and is not, and any other is noticed by its backlog


class Suite(Contract):
    """The tests of the contract, callable one by one."""

    __test__ = False


@pytest.mark.siege
@pytest.mark.parametrize("name", split_by_target(list(BY_CHANCE)))
def test_wrong_schedule_is_caught_by_random_steps(name: str) -> None:
    assert_caught(BY_CHANCE[name])


@pytest.mark.parametrize(
    ("wrong", "new_rig", "test", "arguments"),
    AT_AN_EDGE,
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_wrong_schedule_is_caught_by_an_edge_test(
    wrong: type, new_rig: type[HourLogRig], test: str, arguments: dict[str, Any]
) -> None:
    rig = new_rig(scheduler=wrong) if issubclass(wrong, Scheduler) else new_rig(wrong)
    right = World(new_rig())
    with contextlib.closing(right):
        getattr(Suite(), test)(right, **arguments)
    world = World(rig)
    with pytest.raises(AssertionError), contextlib.closing(world):
        getattr(Suite(), test)(world, **arguments)


# -- disks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "new_rig",
    [lambda: WheelRig(WheelWithoutSync, slots=DEFAULT), lambda: CascadeRig(CascadeWithoutSync)],
    ids=["timer_wheel", "level_cascade"],
)
def test_backlog_that_does_not_sync_is_noticed(new_rig: Callable[[], Rig]) -> None:
    first, last = calls_of(new_rig)
    assert violations(new_rig, range(last, first, -10), ["random"] * DISKS, violations_max=1)


@pytest.mark.parametrize("forget", ["forget_sync", "forget_sync_dir"])
def test_disk_that_ignores_fsync_is_noticed(forget: str) -> None:
    first, last = calls_of(WheelRig)
    assert violations(WheelRig, range(first, last, 10), FEW, violations_max=1, **{forget: True})


# -- clocks ----------------------------------------------------------------------------------------------------


class BelievesTheWall(SchedulerClock):
    """A wrong scheduler clock: it accepts every step of the wall clock."""

    def now_ms(self) -> int:
        return self.clock.wall_ms()


@pytest.mark.parametrize("name", ["spikes", "spike in pieces"])
def test_clock_that_accepts_every_step_is_caught(name: str) -> None:
    world = World(HourLogRig())
    world.clock = BelievesTheWall(world.manual)
    with pytest.raises(AssertionError, match="late"), contextlib.closing(world):
        Suite().test_temporary_clock_faults_shift_releases_by_bounded_times(world, name)


# -- exemptions ------------------------------------------------------------------------------------------------


class ExemptForNothing(Contract):
    """A contract with invalid exemptions."""

    __test__ = False
    new_rig = HourLogRig
    exempt: ClassVar[dict[str, str]] = {
        "test_message_is_handed_out_at_its_due_millisecond": "it is too hard",
        "test_that_is_gone_since": "this strategy cannot do what it says",
        "examples": "this names no test at all",
        "test_temporary_clock_faults_shift_releases_by_bounded_times": "its clock is an hourglass and cannot be set",
    }


def test_exemption_needs_a_test_and_a_reason() -> None:
    assert invalid_exemptions(ExemptForNothing) == [
        "test_message_is_handed_out_at_its_due_millisecond",
        "test_that_is_gone_since",
        "examples",
    ]
