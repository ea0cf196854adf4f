"""The duty that wakes messages of bulk operations; tests/broker/admin/test_selection_changes.py has the messages."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World


@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_that_comes_with_an_event_ends_the_duty(turns: int) -> None:
    """A duty that ignored it would let the stop of the broker wait for ever."""

    @on_node()
    async def ends(world: World) -> None:
        await world.broker.wakers.wake()
        duty = asyncio.create_task(world.broker.wakers.wait_and_wake())
        for _ in range(4):
            await asyncio.sleep(0)
        assert not duty.done(), "it waits for an event"
        world.broker.tables.selections.has_changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_asked = duty.cancel()
        await asyncio.gather(duty, return_exceptions=True)
        assert duty.cancelled() == is_asked

    ends()
