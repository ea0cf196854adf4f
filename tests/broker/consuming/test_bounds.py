"""The limit of leased messages, and the effect of exceeding it."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.consuming.consumer import (
    GROUP,
    MINUTE_MS,
    TOPIC,
    bodies,
    engine,
    pass_time,
    pop,
    send,
    send_in_order,
    stored,
)
from tests.broker.on_node import column, on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.model import limits


@on_node()
async def test_a_full_queue_hands_out_no_more_messages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 3)
    await send(world, [b"%d" % i for i in range(8)])
    popped = await pop(world)
    assert popped.rows.num_rows == 6 and popped.rest == 2
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.consuming.waiting_receives, "the receive waits")
    engine(world).acknowledge_now(popped.receipts[:1])
    assert (await waiting).rows.num_rows == 1


@on_node()
async def test_the_total_of_leased_positions_is_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_MAX", 3)
    await send(world, [b"%d" % i for i in range(8)])
    popped = await pop(world)
    assert popped.rows.num_rows == 3
    assert not (await engine(world).receive(ReceiveRequest("h", TOPIC), 0)).rows.num_rows
    engine(world).acknowledge_now(popped.receipts)
    assert (await engine(world).receive(ReceiveRequest("h", TOPIC), 0)).rows.num_rows == 3


@on_node()
async def test_a_longer_lease_in_a_crowded_queue_becomes_a_scheduled_message(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 4)
    await send_in_order(world)
    receipts = (await pop(world)).receipts
    assert await engine(world).change_invisible_time(receipts[0], 10 * MINUTE_MS, new_receipt=True)
    assert world.broker.redeliveries.counts() == {(GROUP, TOPIC): 1}
    assert stored(world)[0] == 1
    assert engine(world).acknowledge_now(receipts[:1]) == [False], "its position is done"
    engine(world).acknowledge_now(receipts[1:])
    await pass_time(world, 5 * MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    await world.advance(5 * MINUTE_MS)
    again = await pop(world)
    assert bodies(again) == [b"0"] and column(again.rows, "reconsume_times") == [1]


@on_node()
async def test_a_longer_lease_that_keeps_its_receipt_stays_a_lease_in_a_crowded_queue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 4)
    await send_in_order(world)
    receipts = (await pop(world)).receipts
    assert await engine(world).change_invisible_time(receipts[0], 10 * MINUTE_MS) == receipts[0]
    await pass_time(world, 5 * MINUTE_MS)
    assert world.broker.redeliveries.waiting_rows == 0
    assert engine(world).acknowledge_now(receipts[:1]) == [True]
