"""Every wrong schedule of the list is noticed, by the suite and not by itself; and so are disks and clocks that lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from tests.schedule.contract import Contract, assert_caught, one_now, unfounded
from tests.schedule.cuts import FEW, calls_of, violations
from tests.schedule.rigs import DEFAULT, CascadeRig, HourLogRig, WheelRig
from tests.schedule.stage import Rig
from tests.schedule.world import World
from tests.schedule.wrong import AT_AN_EDGE, BY_CHANCE, CascadeWithoutSync, WheelWithoutSync

from timeball.io.clock import SchedulerClock
from timeball.schedule.scheduler import Scheduler

DISKS = 40  # of a cut: few have a file that looks whole and is not, and any other is noticed by its backlog


class Suite(Contract):
    """The tests themselves."""

    __test__ = False


@pytest.mark.siege
@pytest.mark.parametrize("name", one_now(list(BY_CHANCE)))
def test_a_wrong_schedule_is_caught_by_chance(name: str) -> None:
    assert_caught(BY_CHANCE[name])


@pytest.mark.parametrize(
    ("wrong", "new_rig", "test", "arguments"),
    AT_AN_EDGE,
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_schedule_is_caught_at_an_edge(
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
def test_a_backlog_that_does_not_sync_is_noticed(new_rig: Callable[[], Rig]) -> None:
    first, last = calls_of(new_rig)
    assert violations(new_rig, range(last, first, -10), ["random"] * DISKS, enough=1)


@pytest.mark.parametrize("forget", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(forget: str) -> None:
    first, last = calls_of(WheelRig)
    assert violations(WheelRig, range(first, last, 10), FEW, enough=1, **{forget: True})


# -- clocks ----------------------------------------------------------------------------------------------------


class BelievesTheWall(SchedulerClock):
    """A scheduler without doubts."""

    def now_ms(self) -> int:
        return self.clock.wall_ms()


@pytest.mark.parametrize("name", ["spikes", "spike in pieces"])
def test_a_clock_that_believes_every_step_is_caught(name: str) -> None:
    world = World(HourLogRig())
    world.clock = BelievesTheWall(world.manual)
    with pytest.raises(AssertionError, match="late"), contextlib.closing(world):
        Suite().test_what_goes_away_again(world, name)


# -- exemptions ------------------------------------------------------------------------------------------------


class ExemptForNothing(Contract):
    """What a contract may not look like."""

    __test__ = False
    new_rig = HourLogRig
    exempt: ClassVar[dict[str, str]] = {
        "test_to_the_millisecond": "it is too hard",
        "test_that_is_gone_since": "this strategy cannot do what it says",
        "examples": "this names no test at all",
        "test_what_goes_away_again": "its clock is an hourglass and cannot be set",
    }


def test_an_exemption_wants_a_test_and_a_reason() -> None:
    assert unfounded(ExemptForNothing) == ["test_to_the_millisecond", "test_that_is_gone_since", "examples"]
