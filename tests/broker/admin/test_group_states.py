"""Figures of groups: lag, leased messages, dead letters."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.broker.consuming.subscriber import GROUP, TOPIC, acknowledge, bodies, receive, send
from tests.broker.on_node import on_node, settled
from tests.crash.world import World
from tests.loop_turns import LoopTurns, Watched

from timeball.broker.admin.administration import add_in_flight, lags
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.rates import GROUPS_AT_ONCE
from timeball.broker.registry.redeliveries import Counts
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.answers import TopicState
from timeball.model.errors import GroupNotFound, OutOfRange


@on_node()
async def test_the_lag_of_a_group_counts_the_messages_it_has_not_received(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 4)
    await acknowledge(world, received)
    state = await world.broker.groups.one(GROUP, ANONYMOUS)
    assert (state.lag, state.topics) == (6, [TopicState(TOPIC, 6, 0)])
    assert await world.broker.groups.lags() == {(GROUP, TOPIC): 6}
    with pytest.raises(GroupNotFound, match="does not exist"):
        await world.broker.groups.one("none", ANONYMOUS)


MANY = 3_000


async def with_many_groups(world: World) -> LoopTurns:
    """Create thousands of groups that have received messages. Each read of a group's offsets is counted."""
    await send(world, [b"x"], queue_id=[0], unique_key=["named"])
    for number in range(MANY):
        await world.broker.commit_offsets(f"g{number:04d}", TOPIC, {0: number % 2})
    offsets, turns = world.broker.tables.offsets, LoopTurns()
    offsets.table = Watched(offsets.table, turns)
    return turns


async def scrape_metrics(world: World) -> int:
    """Read the metrics. Returns the number of groups that were examined, as the next two functions do."""
    assert world.node is not None
    text = (await world.node.metrics.text(ANONYMOUS)).decode()
    assert 'timeball_group_lag_messages{group="(others)",topic="(others)"}' in text
    return MANY


async def count_paged(world: World) -> int:
    page = await world.broker.groups.page(limits.LISTED_ROWS_MAX, None, ANONYMOUS)
    assert page.next_page == page.groups[-1].group == f"g{limits.LISTED_ROWS_MAX - 1:04d}"
    return len(page.groups)


async def find_message(world: World) -> int:
    (place,) = await world.broker.find("named")
    return len(place.groups)


@pytest.mark.parametrize(
    ("read_out", "groups"),
    [(scrape_metrics, MANY), (count_paged, limits.LISTED_ROWS_MAX), (find_message, MANY)],
)
@on_node()
async def test_queries_over_many_groups_examine_few_groups_per_turn_of_the_loop(
    world: World, read_out: Callable[[World], Coroutine[Any, Any, int]], groups: int
) -> None:
    turns = await with_many_groups(world)
    assert await turns.most(read_out(world)) == (groups, GROUPS_AT_ONCE)


@on_node()
async def test_a_walk_over_all_groups_in_one_turn_is_noticed(world: World) -> None:
    turns = await with_many_groups(world)

    async def walk() -> Counts:
        tables = world.broker.tables
        return lags(tables.offsets.table, topics=tables.topics, offsets=tables.offsets)

    _, most = await turns.most(walk())
    assert most == MANY


@on_node()
async def test_pages_list_each_group_exactly_once(world: World) -> None:
    names = [f"g{number:04d}" for number in range(7)]
    for name in reversed(names):
        world.broker.tables.groups.update(SubscriptionGroup(name))
    seen, page = list[str](), await world.broker.groups.page(3, None, ANONYMOUS)
    while page.next_page is not None:
        seen += [state.group for state in page.groups]
        assert len(page.groups) == 3
        page = await world.broker.groups.page(3, page.next_page, ANONYMOUS)
    assert [*seen, *(state.group for state in page.groups)] == names
    with pytest.raises(OutOfRange, match="1 to 1000"):
        await world.broker.groups.page(limits.LISTED_ROWS_MAX + 1, None, ANONYMOUS)


def in_flight_counts(world: World) -> Counts:
    counts = Counts()
    add_in_flight(counts, world.broker.consuming.leases.all())
    return counts


@on_node()
async def test_leased_messages_are_in_flight_until_their_answer(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 4)
    assert in_flight_counts(world) == await world.broker.groups.in_flight() == {(GROUP, TOPIC): 4}
    assert world.broker.consuming.acknowledge_now(received.receipts) == [True] * 4
    state = await world.broker.groups.one(GROUP, ANONYMOUS)
    assert (state.lag, state.in_flight) == (6, 0)


@on_node()
async def test_the_number_in_flight_changes_with_each_answer_and_not_with_a_restart(world: World) -> None:
    await send(world, [b"%d" % number for number in range(10)])
    received = await receive(world, 6)
    engine, receipts = world.broker.consuming, received.receipts
    assert in_flight_counts(world) == {(GROUP, TOPIC): 6}
    await engine.acknowledge(receipts[:1])
    await engine.nack(receipts[1], 5_000)
    assert await engine.dead_letter(receipts[2])
    await engine.change_invisible_time(receipts[3], 120_000)
    assert in_flight_counts(world) == {(GROUP, TOPIC): 3}
    await world.advance(61_000)
    await settled(world)
    assert in_flight_counts(world) == {(GROUP, TOPIC): 1}
    again = await receive(world, 10)
    answered = [bodies(received)[number] for number in (0, 2, 3)]
    assert sorted([*bodies(again), *answered]) == [b"%d" % number for number in range(10)]
    assert in_flight_counts(world) == {(GROUP, TOPIC): 8}, (
        "a redelivered message counts for its original topic"
    )
    await world.restart()
    assert in_flight_counts(world) == {(GROUP, TOPIC): 8}


@on_node()
async def test_an_ordered_message_that_was_given_back_is_not_in_flight(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await send(world, [b"a"])
    (receipt,) = (await receive(world, 1, in_order=True)).receipts
    assert in_flight_counts(world) == {(GROUP, TOPIC): 1}
    assert await world.broker.consuming.nack(receipt, 5_000, "not yet") == receipt
    assert in_flight_counts(world) == {}
    await world.restart()
    assert in_flight_counts(world) == {}
    assert await world.broker.consuming.change_invisible_time(receipt, 5_000) == receipt
    assert in_flight_counts(world) == {(GROUP, TOPIC): 1}, "a longer invisible time leases it again"
