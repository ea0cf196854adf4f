"""The duty that wakes messages of bulk operations. More is in tests/broker/admin/test_selection_changes.py."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import HOUR_MS, SECOND_MS, World

from timeball.broker.registry.selections import SelectionFacts
from timeball.model.access import ANONYMOUS

MINUTE_MS = 60_000


@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_at_the_same_time_as_an_event_ends_the_duty(turns: int) -> None:
    """If the duty ignored the cancel, the stop of the broker would wait for ever."""

    @on_node()
    async def ends(world: World) -> None:
        await world.broker.wakers.wake()
        duty = asyncio.create_task(world.broker.wakers.wait_and_wake())
        for _ in range(4):
            await asyncio.sleep(0)
        assert not duty.done(), "the duty waits for an event"
        world.broker.tables.selections.has_changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        accepts_cancel = duty.cancel()
        await asyncio.gather(duty, return_exceptions=True)
        assert duty.cancelled() == accepts_cancel

    ends()


@pytest.mark.parametrize(("command", "state"), [("pause", "paused"), ("cancel", "cancelled")])
def test_messages_that_are_held_after_the_walk_has_read_them_are_not_woken(command: str, state: str) -> None:
    @on_node()
    async def stay(world: World) -> None:
        await world.campaign("spring", "a", [HOUR_MS, 2 * HOUR_MS])
        broker = world.broker
        facts = SelectionFacts(seq=0, at_ms=0, action="release", topics=["a"])
        await broker.wakers._lock.acquire()  # the walk begins when this test holds the gate
        await broker.selections.select(facts, ANONYMOUS)
        async with broker.gate.alone():
            broker.wakers._lock.release()
            await world.until(lambda: broker.gate._exclusive._waiters, "the walk has read its page")
            change = asyncio.create_task(broker.change_campaign("spring", command))
            await world.until(lambda: broker.campaigns("spring")[0].state == state, "the change has begun")
        await change
        await broker.wakers.wake()
        await world.advance(SECOND_MS)
        assert not (await world.outcome()).rows, "none is released"

    stay()


@on_node()
async def test_a_wake_up_after_a_clock_that_was_set_back_keeps_its_base_at_a_restart(world: World) -> None:
    """The wake-up is due before the mark, which does not move back, and must still count as pending."""
    await world.send("a", [HOUR_MS])
    await world.advance(5 * SECOND_MS)
    await world.checkpoint()
    world.clock.step_wall(-50 * SECOND_MS)
    shift_ms = -HOUR_MS - 10 * SECOND_MS
    for facts in (
        SelectionFacts(seq=0, at_ms=0, action="move", to_topic="b", topics=["a"]),
        SelectionFacts(seq=0, at_ms=0, action="shift", shift_ms=shift_ms),
    ):
        await world.broker.selections.select(facts, ANONYMOUS)
    await world.broker.wakers.wake()
    await world.restart()
    await world.advance(2 * MINUTE_MS)
    assert [row.place.topic for row in (await world.outcome()).rows] == ["b"]
