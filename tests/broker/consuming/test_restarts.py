"""Leased messages when a consumer disconnects, the broker stops or is killed, or retention removes the rows."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.consuming.consumer import (
    MINUTE_MS,
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

from timeball.log.writer import NewestRows


@on_node()
async def test_a_consumer_that_disconnects_before_its_answer_leaves_no_lease(world: World) -> None:
    await send(world, [b"a"])
    # Without the rows in memory, the receive waits for the reader.
    world.broker.log.writer.newest = NewestRows()
    receiving = asyncio.create_task(pop(world))
    await asyncio.sleep(0)  # now the position is leased, and its row is being read
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    assert bodies(await pop(world)) == [b"a"]


async def crash(world: World) -> None:
    """Save the leases and kill the process. Start it again a second later."""
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    await world.abandon()
    world.clock.advance(1_000)
    await world.start()


@on_node()
async def test_leases_that_were_saved_before_a_crash_stay_valid(world: World) -> None:
    await send_in_order(world, 6)
    receipts = (await pop(world, 4, invisible_ms=MINUTE_MS)).receipts
    engine(world).acknowledge_now([receipts[0], receipts[3]])
    await crash(world)
    assert bodies(await pop(world)) == [b"4", b"5"]
    assert engine(world).acknowledge_now(receipts) == [False, True, True, False]
    assert stored(world)[0] == 4


@on_node()
async def test_an_unsaved_receipt_is_valid_after_a_crash_until_its_message_is_handed_out_again(
    world: World,
) -> None:
    await send_in_order(world)
    engine(world).acknowledge_now((await pop(world, 1)).receipts)
    assert world.node is not None
    await world.node.maintenance.save_offsets()
    files = world.files
    receipts = (await pop(world)).receipts
    await world.abandon()
    world.files = files.crash(survival="nothing")
    world.clock.advance(1_000)
    await world.start()
    assert engine(world).acknowledge_now([receipts[1], receipts[1]._replace(offset=99)]) == [True, False]
    popped = await pop(world)
    assert bodies(popped) == [b"1", b"3"]
    assert engine(world).acknowledge_now(receipts) == [False] * 3
    assert engine(world).acknowledge_now(popped.receipts) == [True] * 2
    assert stored(world)[0] == 4
    assert engine(world).leases.count.rows == 0


@on_node()
async def test_leases_stay_valid_after_an_orderly_stop(world: World) -> None:
    await send_in_order(world, 6)
    receipts = (await pop(world, 4, invisible_ms=MINUTE_MS)).receipts
    engine(world).acknowledge_now([receipts[0], receipts[2]])
    world.clock.advance(1_000)
    await world.restart()
    assert bodies(await pop(world)) == [b"4", b"5"]
    assert engine(world).acknowledge_now([receipts[1], receipts[2]]) == [True, False]
    await pass_time(world, MINUTE_MS - 1_000)
    again = await pop(world)
    assert bodies(again) == [b"3"] and column(again.rows, "reconsume_times") == [1]


@on_node(retention_ms=1, unread_retention_ms=1)
@pytest.mark.parametrize("in_order", [False, True])
async def test_positions_whose_rows_retention_removed_do_not_block_the_queue(
    world: World, in_order: bool
) -> None:
    await send_in_order(world, 3)
    await pop(world, 3, in_order=in_order, invisible_ms=MINUTE_MS)
    for _ in range(4):  # a segment has space for about ten of these messages
        await world.send("filler", [None] * 6, 100_000)
        world.clock.advance(1_000)
    await world.checkpoint()
    await world.apply_retention()
    assert world.broker.log.reader.first_seq > 3
    await send(world, [b"new"])
    await pass_time(world, MINUTE_MS)
    assert bodies(await pop(world, in_order=in_order)) == [b"new"]
    await world.until(lambda: engine(world).leases.count.rows == 1, "only the new message is leased")
