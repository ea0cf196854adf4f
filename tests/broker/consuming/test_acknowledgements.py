"""Acknowledgements that come together are one append, and each request gets the verdicts of its own receipts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.broker.consuming.subscriber import MINUTE_MS, engine, receive, send
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming import log_leases
from timeball.broker.consuming.log_leases import Acknowledgements
from timeball.broker.consuming.requests import Receipt
from timeball.model.errors import StorageError
from timeball.model.message import Int64Array


def of(world: World) -> Acknowledgements:
    broker = world.broker
    return Acknowledgements(
        broker.appender,
        clock=broker.clock,
        writer=broker.log.writer,
        lease_counts=broker.lease_counts,
        scheduler=broker.scheduling.scheduler,
        outcomes=broker.scheduling.outcomes,
    )


@on_node()
async def test_each_request_gets_its_own_verdicts(world: World) -> None:
    await send(world, [b"%d" % i for i in range(6)])
    got = [one for one in (await receive(world)).receipts if isinstance(one, Receipt)]
    acks = of(world)
    ended = got.pop()
    assert await acks.put([ended]) == [True]
    commits = world.broker.log.writer.statistics.commits
    asked = [got[:2], [ended], [got[2], got[0]], [], got[3:5]]
    verdicts = await asyncio.gather(*map(acks.put, asked))
    assert verdicts == [[True, True], [False], [True, False], [], [True, True]]
    assert world.broker.log.writer.statistics.commits == commits + 1
    assert await acks.put(got) == [False] * 5


@pytest.mark.parametrize("count", [1, 2, 40])
@on_node()
async def test_few_and_many_receipts_are_acknowledged_alike(world: World, count: int) -> None:
    """And also when one append does not take all of them."""
    await send(world, [b"%d" % i for i in range(count)])
    got = [one for one in (await receive(world, count)).receipts if isinstance(one, Receipt)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_leases, "ROWS_PER_APPEND", 3)
        assert await of(world).put(got) == [True] * count
    assert not any(world.broker.lease_counts.held().values())
    await world.advance(MINUTE_MS)
    assert (await receive(world)).receipts == []


@on_node()
async def test_a_receipt_moved_by_another_request_is_decided_again(world: World) -> None:
    await send(world, [b"a", b"b"])
    one, other = (await receive(world)).receipts
    assert isinstance(one, Receipt) and isinstance(other, Receipt)
    change = asyncio.create_task(engine(world).change_invisible_time(one, 5 * MINUTE_MS))
    while world.broker.scheduling.scheduler.outcomes.waits(*_pair(one)).any():
        await asyncio.sleep(0)
    assert await of(world).put([other, one]) == [True, True]
    assert await change == one


def _pair(receipt: Receipt) -> tuple[Int64Array, Int64Array]:
    return np.array([receipt.due_ms]), np.array([receipt.seq])


@on_node()
async def test_a_stopped_log_refuses_all_acknowledgements(world: World) -> None:
    await send(world, [b"a"])
    (one,) = (await receive(world)).receipts
    assert isinstance(one, Receipt)
    writer = world.broker.log.writer
    writer.failed = StorageError("no disk")
    acks = of(world)
    answers = await asyncio.gather(acks.put([one]), acks.put([one, one]), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StorageError] * 2
    writer.failed = None
