"""Figures of groups: how far behind, what is held, how many are dead."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.consuming.subscriber import GROUP, TOPIC, acknowledge, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.access import ANONYMOUS
from timeball.answers import TopicState
from timeball.broker.group_states import GROUPS_AT_ONCE, in_flight, lags
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.lease_counts import Counts
from timeball.errors import GroupNotFound


@on_node()
async def test_a_group_is_behind_by_what_it_was_not_handed(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 4)
    await acknowledge(world, received)
    (state,) = await world.broker.groups.all(GROUP, ANONYMOUS)
    assert (state.lag, state.topics) == (6, [TopicState(TOPIC, 6, 0)])
    assert lags(world.broker.parts) == {(GROUP, TOPIC): 6}
    with pytest.raises(GroupNotFound, match="does not exist"):
        await world.broker.groups.all("none", ANONYMOUS)


@on_node()
async def test_the_loop_has_its_turn_between_many_groups(world: World) -> None:
    names = [f"g{number:04d}" for number in range(3 * GROUPS_AT_ONCE)]
    for name in names:
        world.broker.parts.groups.update(SubscriptionGroup(name))
    found = asyncio.create_task(world.broker.groups.all(None, ANONYMOUS))
    turns = 0
    while not found.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 3
    assert [state.group for state in found.result() if state.group in set(names)] == names


def held(world: World) -> Counts:
    return in_flight(world.broker.consuming.leases, world.broker.parts.lease_counts)


@on_node()
async def test_what_is_leased_in_memory_is_in_flight(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 4, in_log=False)
    assert held(world) == {(GROUP, TOPIC): 4}
    assert world.broker.consuming.acknowledge_positions(received.receipts) == [True] * 4
    (state,) = await world.broker.groups.all(GROUP, ANONYMOUS)
    assert (state.lag, state.in_flight) == (6, 0)


@on_node()
async def test_what_is_leased_in_the_log_is_in_flight(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 6)
    engine, receipts = world.broker.consuming, received.receipts
    assert held(world) == {(GROUP, TOPIC): 6}
    await engine.acknowledge(receipts[:1])
    await engine.nack(receipts[1], 5_000)
    assert await engine.dead_letter(receipts[2])
    await engine.change_invisible_time(receipts[3], 120_000)
    assert held(world) == {(GROUP, TOPIC): 3}
    await world.advance(61_000)
    assert held(world) == {(GROUP, TOPIC): 1}
    again = await receive(world, 6)
    assert held(world) == {(GROUP, TOPIC): 1 + len(again.receipts)}, "what came again counts for its topic"
    await world.restart()
    assert held(world) == {(GROUP, TOPIC): 1 + len(again.receipts)}


@on_node()
async def test_in_order_what_is_given_back_is_not_in_flight(world: World) -> None:
    world.broker.parts.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await send(world, [b"a"])
    (receipt,) = (await receive(world, 1, in_order=True)).receipts
    assert held(world) == {(GROUP, TOPIC): 1}
    assert await world.broker.consuming.nack(receipt, 5_000, "not yet") == receipt
    assert held(world) == {}
    await world.restart()
    assert held(world) == {}
    assert await world.broker.consuming.change_invisible_time(receipt, 5_000) == receipt
    assert held(world) == {(GROUP, TOPIC): 1}, "its consumer has changed its mind"
