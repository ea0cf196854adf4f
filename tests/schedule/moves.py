"""The contract, of scheduled messages that are written again while they wait: a wheel's roll, a cascade's hop.

    still waits: may be cancelled, is not handed out before its new row is durable · not durable, it has not
    happened · durable, nothing of the old row is needed · a sleeper is woken by it, and for it

A strategy that moves nothing passes: for it these are tests of scheduled messages that wait for long.
"""

from __future__ import annotations

import pytest
from tests.schedule.world import ALL, World

from timeball.model import limits

FAR_MS = 40 * limits.DAY_MS
CALLS_MAX = 10_000


class Moves:
    """Ask of scheduled messages that are written again; a part of `contract.Contract`."""

    def test_what_is_on_the_move_may_be_cancelled(self, world: World) -> None:
        seqs = world.admit([world.now_ms + FAR_MS] * 6)
        sleep_until_moving(world)
        assert world.cancel(seqs[:2]) == [True, True]
        assert world.cancel(seqs[1:3]) == [False, True]
        world.land_part(2)
        assert world.cancel(seqs[2:4]) == [False, True]
        world.land()
        assert [seq for _, seq in to_the_end(world)] == seqs[4:]

    def test_what_is_cancelled_is_not_moved(self, world: World) -> None:
        (gone,) = world.admit([world.now_ms + FAR_MS])
        sleep_until_moving(world)
        world.cancel([gone])
        world.land()
        assert to_the_end(world) == []

    def test_what_comes_due_on_the_move_waits_for_it(self, world: World) -> None:
        due_ms = world.now_ms + FAR_MS
        seqs = world.admit([due_ms, due_ms + 1, due_ms + 2])
        sleep_until_moving(world)
        world.advance(due_ms + 2 - world.now_ms)
        world.take()
        world.settle()
        world.take()
        world.release()
        world.land()
        world.check_sleep()
        world.drain()
        world.release()
        assert sorted(world.model.released) == seqs

    @pytest.mark.parametrize("limit", [1, 4])
    def test_a_move_that_becomes_durable_in_parts(self, world: World, limit: int) -> None:
        world.drain()
        seqs = world.admit([world.now_ms + FAR_MS] * 10)
        sleep_until_moving(world, limit)
        world.land_part(1)
        world.check_sleep()
        world.save()
        world.land_part(2)
        world.take(limit)
        world.check_sleep()
        world.restart()
        assert [seq for _, seq in to_the_end(world)] == seqs

    @pytest.mark.parametrize("unheard", [False, True])
    @pytest.mark.parametrize("saved", [False, True])
    def test_restart_on_the_move(self, world: World, unheard: bool, saved: bool) -> None:
        seqs = world.admit([world.now_ms + FAR_MS] * 3)
        for _ in range(3):
            sleep_until_moving(world)
            if saved:
                world.save()
            world.restart(unheard=unheard, power_cut=1)
            world.drain()
        assert [seq for _, seq in to_the_end(world)] == seqs

    def test_the_log_behind_what_has_moved_may_go(self, world: World) -> None:
        seqs = []
        for day in range(0, 38, 2):
            if day % 10 == 0:
                seqs += world.admit([world.now_ms + FAR_MS] * 40)
            world.advance(2 * limits.DAY_MS)
            assert world.drain() == []
            world.let_go()
            if day % 10 == 4:
                world.restart()
        assert world.reader.first_seq > 1 or not world.model.moved_rows
        assert [seq for _, seq in to_the_end(world)] == seqs


def sleep_until_moving(world: World, limit: int = ALL, naps: int = CALLS_MAX) -> None:
    """As a ticker, until something is on the move, and stays there; or, where nothing moves, until it comes due.

    At most so many naps.
    """
    for _ in range(naps):
        world.settle()
        if world.take(limit) is not None:
            return
        world.settle()
        upcoming, first = world.strategy.next_due_ms(), world.model.first_due_ms
        if world.model.moving or first is None:
            return
        assert upcoming is not None, "there is something to wait for"
        if upcoming >= first:
            return
        world.advance(max(0, upcoming - world.now_ms))
    assert naps < CALLS_MAX, "there is always something next"


def sleep_through(world: World) -> list[tuple[int, int]]:
    """As a ticker: take what is due, sleep until the next instant, until there is none."""
    taken = []
    for _ in range(CALLS_MAX):
        taken += world.drain()
        world.check_sleep()
        upcoming = world.strategy.next_due_ms()
        if upcoming is None:
            return taken
        world.advance(upcoming - world.now_ms)
    raise AssertionError("there is always something next")


def to_the_end(world: World) -> list[tuple[int, int]]:
    """As a ticker that nobody lets sleep: from each instant's last millisecond to the next, until nothing waits."""
    taken = world.drain()
    while world.model.waiting:
        due_ms = world.model.first_due_ms
        assert due_ms is not None
        world.check_sleep()
        world.advance(due_ms - 1 - world.now_ms)
        assert world.drain() == []
        world.check_sleep()
        world.advance(1)
        taken += world.drain()
    return taken
