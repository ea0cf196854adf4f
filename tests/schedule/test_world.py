"""The world knows what becomes of promises that are written again: a right strategy passes, each wrong one does not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from tests.schedule.contract import Contract
from tests.schedule.moves import Moves
from tests.schedule.roller import (
    ForgetsThemAtARestart,
    HandsOutOnTheMove,
    LetsGoTooMuch,
    LosesBodiesOnTheMove,
    MovesAgain,
    MovesRows,
    MovesTheCancelled,
    MovesTooMuch,
    Roller,
    RollerRig,
    SleepsOnTheMove,
    TakesEachRowForAPromise,
    TurnsOnTheMove,
)
from tests.schedule.world import World


class TestRoller(Contract):
    """The contract's other end."""

    new_rig = RollerRig


CANCELLED = "test_what_is_on_the_move_may_be_cancelled"
CANCELLED_BEFORE = "test_what_is_cancelled_is_not_moved"
COMES_DUE = "test_what_comes_due_on_the_move_waits_for_it"
PARTS = "test_a_move_that_becomes_durable_in_parts"
RESTART = "test_restart_on_the_move"
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
        (SleepsOnTheMove, PARTS, {"limit": 4}, "asleep until"),
        (TurnsOnTheMove, COMES_DUE, {}, "turns in place"),
        (MovesTooMuch, PARTS, {"limit": 4}, "asked for at most 4"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_roller_is_caught(
    wrong: type[Roller], test: str, arguments: dict[str, Any], words: str
) -> None:
    world = World(RollerRig(wrong))
    with pytest.raises(AssertionError, match=words), contextlib.closing(world):
        getattr(Moves(), test)(world, **arguments)
