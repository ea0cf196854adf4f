"""Ordered groups: one batch of a queue at a time, and a returned message is the next one."""

from __future__ import annotations

import asyncio

from tests.broker.consuming.consumer import (
    GROUP,
    MINUTE_MS,
    TOPIC,
    bodies,
    engine,
    pass_time,
    pop,
    send_in_order,
    stored,
)
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.model.access import ANONYMOUS
from timeball.model.message import decode_properties


@on_node()
async def test_an_ordered_queue_hands_out_nothing_while_one_of_its_messages_is_leased(world: World) -> None:
    await send_in_order(world)
    popped = await pop(world, 2, in_order=True)
    assert bodies(popped) == [b"0", b"1"] and popped.times == [0, 0]  # no earlier leases
    waiting = asyncio.create_task(pop(world, 2, in_order=True, wait_ms=30_000))
    receipts = popped.receipts
    engine(world).acknowledge_now(receipts[:1])
    assert not (await pop(world, in_order=True)).rows.num_rows
    assert stored(world)[0] == 1
    engine(world).acknowledge_now(receipts[1:])
    assert bodies(await waiting) == [b"2", b"3"]


@on_node()
async def test_an_ordered_message_that_comes_back_is_next_with_a_count_and_a_new_receipt(
    world: World,
) -> None:
    await send_in_order(world)
    popped = await pop(world, 2, in_order=True)
    engine(world).acknowledge_now(popped.receipts[:1])
    await pass_time(world, MINUTE_MS)
    again = await pop(world, 2, in_order=True)
    assert bodies(again) == [b"1", b"2"] and again.times == [1, 0]
    assert engine(world).acknowledge_now(popped.receipts[1:]) == [False]
    assert engine(world).acknowledge_now(again.receipts) == [True, True]
    assert pop_retry_topic(GROUP, TOPIC) not in world.broker.topics()


@on_node()
async def test_a_longer_lease_of_an_ordered_message_keeps_its_receipt(world: World) -> None:
    await send_in_order(world, 1)
    (receipt,) = (await pop(world, in_order=True)).receipts
    assert await engine(world).change_invisible_time(receipt, 2 * MINUTE_MS) == receipt
    await pass_time(world, MINUTE_MS)
    assert not (await pop(world, in_order=True)).rows.num_rows
    await pass_time(world, MINUTE_MS)
    assert bodies(await pop(world, in_order=True)) == [b"0"]


@on_node()
async def test_a_repeated_attempt_id_of_an_ordered_group_gets_the_same_messages_with_new_receipts(
    world: World,
) -> None:
    await send_in_order(world)
    first = await pop(world, 2, in_order=True, attempt_id="x")
    assert not (await pop(world, 2, in_order=True, attempt_id="y")).rows.num_rows
    again = await pop(world, 2, in_order=True, attempt_id="x")
    assert bodies(again) == bodies(first) and again.times == [0, 0]
    assert engine(world).acknowledge_now(first.receipts) == [False, False]
    assert engine(world).acknowledge_now(again.receipts) == [True, True]


@on_node()
async def test_the_next_delivery_and_the_dead_letter_of_an_ordered_message_show_the_nack_reason(
    world: World,
) -> None:
    await send_in_order(world, 1)
    (receipt,) = (await pop(world, in_order=True, counts_times=True)).receipts
    assert await engine(world).nack(receipt, 1_000, "no\nstock") == receipt
    await pass_time(world, 1_000)
    again = await pop(world, in_order=True, counts_times=True)
    (text,) = again.rows.column("properties").to_pylist()
    assert decode_properties(text)["NACK_REASON"] == "no stock"
    await world.restart()
    assert await engine(world).dead_letter(again.receipts[0])
    page = await world.broker.dead_letters.page(GROUP, 1, None, ANONYMOUS)
    assert [letter.reason for letter in page.dead_letters] == ["no stock"]
