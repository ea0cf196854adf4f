"""The suite knows what becomes of promises that are written again, and of clocks that are set.

One strategy that is right passes, and the wrong ones do not.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
from tests.schedule.contract import Contract, Variant, unfounded
from tests.schedule.cuts import FEW, calls_of, violations
from tests.schedule.roller import (
    ForgetsThemAtARestart,
    HandsOutOnTheMove,
    LetsGoTooMuch,
    LosesBodiesOnTheMove,
    MovesAgain,
    MovesRows,
    MovesTheCancelled,
    MovesTooMuch,
    NeverGoesBack,
    Place,
    Roller,
    RollerRig,
    SleepsOnTheMove,
    TakesEachRowForAPromise,
    TurnsOnTheMove,
    WaitsForTheClock,
)
from tests.schedule.world import World

from timeball.clock import SchedulerClock
from timeball.limits import HOUR_MS


class TestRoller(Variant):
    """The contract's other end."""

    new_rig = RollerRig


CANCELLED = "test_what_is_on_the_move_may_be_cancelled"
CANCELLED_BEFORE = "test_what_is_cancelled_is_not_moved"
COMES_DUE = "test_what_comes_due_on_the_move_waits_for_it"
PARTS = "test_a_move_that_becomes_durable_in_parts"
RESTART = "test_restart_on_the_move"
STEP = "test_the_wall_is_set"
LET_GO = "test_the_log_behind_what_has_moved_may_go"


@pytest.mark.parametrize(
    ("wrong", "test", "arguments", "words"),
    [
        (HandsOutOnTheMove, COMES_DUE, {}, "handed out while being written again"),
        (MovesAgain, COMES_DUE, {}, "to be written again while being written again"),
        (MovesTheCancelled, CANCELLED_BEFORE, {}, "to be written again while cancelled"),
        (MovesRows, PARTS, {"limit": 4}, "accepted at"),
        (LosesBodiesOnTheMove, COMES_DUE, {}, "has changed"),
        (LetsGoTooMuch, LET_GO, {}, "OutOfRange"),
        (ForgetsThemAtARestart, RESTART, {"saved": True, "unheard": False}, "something to wait for"),
        (TakesEachRowForAPromise, RESTART, {"saved": True, "unheard": True}, "twice in one go"),
        (SleepsOnTheMove, COMES_DUE, {}, "asleep until"),
        (TurnsOnTheMove, COMES_DUE, {}, "turns in place"),
        (MovesTooMuch, PARTS, {"limit": 4}, "asked for at most 4"),
        (NeverGoesBack, STEP, {"step_ms": -HOUR_MS, "restarts": False}, "ms early"),
        (WaitsForTheClock, STEP, {"step_ms": -HOUR_MS, "restarts": False}, "not handed out"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_roller_is_caught(
    wrong: type[Roller], test: str, arguments: dict[str, Any], words: str
) -> None:
    world = World(RollerRig(wrong))
    with pytest.raises(AssertionError, match=words), contextlib.closing(world):
        getattr(TestRoller(), test)(world, **arguments)


class BelievesTheWall(SchedulerClock):
    """A scheduler without doubts."""

    def now_ms(self) -> int:
        return self.clock.wall_ms()


@pytest.mark.parametrize("name", ["spikes", "spike in pieces"])
def test_a_clock_that_believes_every_step_is_caught(name: str) -> None:
    world = World(RollerRig())
    world.clock = BelievesTheWall(world.manual)
    with pytest.raises(AssertionError, match="late"), contextlib.closing(world):
        TestRoller().test_what_goes_away_again(world, name)


@pytest.mark.parametrize("forget", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(forget: str) -> None:
    first, last = calls_of(RollerRig)
    assert violations(RollerRig, range(first, last, 10), FEW, **{forget: True})


class SavesTooLittle(Roller):
    """Its state leaves out what is handed out: a cut before the release loses it."""

    def state(self) -> dict[int, Place]:
        return self.waiting


def test_a_state_that_lacks_something_is_noticed() -> None:
    first, last = calls_of(lambda: RollerRig(SavesTooLittle))
    assert violations(lambda: RollerRig(SavesTooLittle), range(first, last, 5), FEW)


class ExemptForNothing(Contract):
    """What a contract may not look like."""

    new_rig = RollerRig
    exempt: ClassVar[dict[str, str]] = {
        "test_to_the_millisecond": "it is too hard",
        "test_that_is_gone_since": "this strategy cannot do what it says",
        "examples": "this names no test at all",
        "test_what_goes_away_again": "its clock is an hourglass and cannot be set",
    }


def test_an_exemption_wants_a_test_and_a_reason() -> None:
    assert unfounded(ExemptForNothing) == ["test_to_the_millisecond", "test_that_is_gone_since", "examples"]
