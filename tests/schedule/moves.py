"""The contract for rewritten messages: the rolls of a timer wheel and the hops of a cascade.

    still pending: may be cancelled, is not handed out before its new row is durable · new row not durable: the old
    row counts · new row durable: the old row is not needed · a durable rewrite wakes the ticker if necessary

A strategy without rewrites passes: for it these are tests of messages that are pending for a long time.
"""

from __future__ import annotations

import pytest
from tests.schedule.world import ALL, World

from timeball.model import limits

FAR_MS = 40 * limits.DAY_MS
CALLS_MAX = 10_000


class Moves:
    """Tests of rewritten messages. A part of `contract.Contract`."""

    def test_message_being_rewritten_may_be_cancelled(self, world: World) -> None:
        seqs = world.admit([world.now_ms + FAR_MS] * 6)
        sleep_until_rewriting(world)
        assert world.cancel(seqs[:2]) == [True, True]
        assert world.cancel(seqs[1:3]) == [False, True]
        world.finish_part_of_rewrite(2)
        assert world.cancel(seqs[2:4]) == [False, True]
        world.finish_rewrites()
        assert [seq for _, seq in release_all_pending(world)] == seqs[4:]

    def test_cancelled_message_is_not_rewritten(self, world: World) -> None:
        (cancelled,) = world.admit([world.now_ms + FAR_MS])
        sleep_until_rewriting(world)
        world.cancel([cancelled])
        world.finish_rewrites()
        assert release_all_pending(world) == []

    def test_message_due_during_its_rewrite_is_released_after_it(self, world: World) -> None:
        due_ms = world.now_ms + FAR_MS
        seqs = world.admit([due_ms, due_ms + 1, due_ms + 2])
        sleep_until_rewriting(world)
        world.advance(due_ms + 2 - world.now_ms)
        world.take()
        world.settle()
        world.take()
        world.release()
        world.finish_rewrites()
        world.check_sleep()
        world.drain()
        world.release()
        assert sorted(world.model.released) == seqs

    @pytest.mark.parametrize("limit", [1, 4])
    def test_rewrite_that_becomes_durable_in_parts_loses_nothing(self, world: World, limit: int) -> None:
        world.drain()
        seqs = world.admit([world.now_ms + FAR_MS] * 10)
        sleep_until_rewriting(world, limit)
        world.finish_part_of_rewrite(1)
        world.check_sleep()
        world.save()
        world.finish_part_of_rewrite(2)
        world.take(limit)
        world.check_sleep()
        world.restart()
        assert [seq for _, seq in release_all_pending(world)] == seqs

    @pytest.mark.parametrize("unreported", [False, True])
    @pytest.mark.parametrize("saved", [False, True])
    def test_restart_during_a_rewrite_loses_nothing(
        self, world: World, unreported: bool, saved: bool
    ) -> None:
        seqs = world.admit([world.now_ms + FAR_MS] * 3)
        for _ in range(3):
            sleep_until_rewriting(world)
            if saved:
                world.save()
            world.restart(unreported=unreported, power_cut=1)
            world.drain()
        assert [seq for _, seq in release_all_pending(world)] == seqs

    def test_rows_before_rewritten_messages_are_not_needed(self, world: World) -> None:
        seqs = []
        for day in range(0, 38, 2):
            if day % 10 == 0:
                seqs += world.admit([world.now_ms + FAR_MS] * 40)
            world.advance(2 * limits.DAY_MS)
            assert world.drain() == []
            world.apply_retention()
            if day % 10 == 4:
                world.restart()
        assert world.reader.first_seq > 1 or not world.model.moved_rows
        assert [seq for _, seq in release_all_pending(world)] == seqs


def sleep_until_rewriting(world: World, limit: int = ALL, sleeps_max: int = CALLS_MAX) -> None:
    """Sleep as a ticker does until a message is being rewritten, or until it is due if nothing is rewritten.

    Fails after a bounded number of steps.
    """
    for _ in range(sleeps_max):
        world.settle()
        if world.take(limit) is not None:
            return
        world.settle()
        upcoming, first = world.strategy.next_due_ms(), world.model.first_due_ms
        if world.model.moving or first is None:
            return
        assert upcoming is not None, "a message is pending"
        if upcoming >= first:
            return
        world.advance(max(0, upcoming - world.now_ms))
    assert sleeps_max < CALLS_MAX, "the loop does not end"


def sleep_through(world: World) -> list[tuple[int, int]]:
    """Hand out and sleep as a ticker does, until there is no next due time."""
    taken = []
    for _ in range(CALLS_MAX):
        taken += world.drain()
        world.check_sleep()
        upcoming = world.strategy.next_due_ms()
        if upcoming is None:
            return taken
        world.advance(upcoming - world.now_ms)
    raise AssertionError("the loop does not end")


def release_all_pending(world: World) -> list[tuple[int, int]]:
    """Jump from each due time to the next without intermediate sleeps, until nothing is pending."""
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
