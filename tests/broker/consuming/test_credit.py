"""Credit: each message in flight uses it until its lease ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.broker.consuming.subscriber import GROUP, MINUTE_MS, TOPIC, engine, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.credit import Credit
from timeball.broker.consuming.requests import Receipt
from timeball.model import limits
from timeball.model.errors import OutOfRange

End = Callable[[World, Receipt], Awaitable[object]]  # one of the ways below in which a lease ends


async def acknowledge(world: World, receipt: Receipt) -> None:
    assert await engine(world).acknowledge([receipt]) == [True]


async def give_back(world: World, receipt: Receipt) -> None:
    assert await engine(world).nack(receipt, MINUTE_MS)


async def dead_letter(world: World, receipt: Receipt) -> None:
    assert await engine(world).dead_letter(receipt)


async def give_back_in_order(world: World, receipt: Receipt) -> None:
    """Give back a message of an ordered group: its position stays leased."""
    queue = engine(world).leases.get(receipt.group, receipt.topic, receipt.queue_id)
    assert queue is not None
    queue.in_flight[receipt.offset].in_order = True
    assert await engine(world).nack(receipt, MINUTE_MS)


async def return_unseen(world: World, receipt: Receipt) -> None:
    """Disconnect before the message was received."""
    engine(world).return_unseen([receipt])


async def expire(world: World, receipt: Receipt) -> None:
    assert await engine(world).change_invisible_time(receipt, 0)
    engine(world).wake()
    await world.settled()


async def move_the_group(world: World, receipt: Receipt) -> None:
    """Store another offset, which ends the leases of the queue at the next receive."""
    await world.broker.commit_offsets(GROUP, TOPIC, {receipt.queue_id: receipt.offset + 1})
    await receive(world)


@pytest.mark.parametrize(
    "end", [acknowledge, give_back, give_back_in_order, dead_letter, return_unseen, expire, move_the_group]
)
@on_node()
async def test_a_lease_that_ends_returns_credit_once(world: World, end: End) -> None:
    await send(world, [b"a", b"b"])
    credit = Credit(2)
    received = await receive(world)
    credit.hold(engine(world).leases, received.receipts)
    assert credit.free_rows == 0
    waiting = asyncio.create_task(credit.wait(60.0))
    await end(world, received.receipts[0])
    await waiting
    assert credit.free_rows == 1
    # A second end of the same lease returns no more credit.
    is_valid = end is give_back_in_order  # only then the receipt stays valid
    assert engine(world).acknowledge_now(received.receipts[:1]) == [is_valid]
    assert credit.free_rows == 1


@on_node()
async def test_a_longer_lease_keeps_its_credit(world: World) -> None:
    await send(world, [b"a"])
    credit = Credit(1)
    received = await receive(world)
    credit.hold(engine(world).leases, received.receipts)
    assert await engine(world).change_invisible_time(received.receipts[0], 5 * MINUTE_MS)
    assert credit.free_rows == 0


@on_node()
async def test_a_receipt_that_is_not_valid_uses_no_credit(world: World) -> None:
    await send(world, [b"a"])
    credit = Credit(1)
    received = await receive(world)
    await acknowledge(world, received.receipts[0])
    credit.hold(engine(world).leases, received.receipts)
    assert credit.free_rows == 1
    await credit.wait(60.0)  # returns at once


@pytest.mark.parametrize("rows_max", [0, -1, limits.CREDIT_ROWS_MAX + 1])
def test_credit_has_limits(rows_max: int) -> None:
    with pytest.raises(OutOfRange, match="credit"):
        Credit(rows_max)
