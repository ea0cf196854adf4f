"""A message is found wherever it lies: in the log, in the table when its segment is gone, where a wheel has put it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.broker.consuming.subscriber import bodies, engine, receive, send
from tests.broker.on_node import column, on_node
from tests.crash.world import HOUR_MS, World

from timeball.broker.consuming import lookup
from timeball.broker.consuming.requests import Receipt
from timeball.io.threads import in_thread


async def push_out(world: World, seq: int) -> None:
    """Go on until retention has let the row go; what waits has been moved before."""
    for _ in range(40):
        await world.send("filler", [None] * 6, 100_000)
        world.clock.advance(1_000)
        world.broker.ticker.wake()
        await world.checkpoint()
        await world.let_go()
        if world.broker.log.reader.first_seq > seq:
            return
    raise AssertionError("the row stays")


@pytest.mark.parametrize("schedule", ["hour_log", "timer_wheel", "level_cascade"])
def test_a_lease_survives_the_removal_of_its_segment(schedule: str) -> None:
    @on_node(retention_ms=1, strategy=schedule, timer_wheel_ms=60_000)
    async def live(world: World) -> None:
        await send(world, [b"a", b"b", b"c"])
        received = await receive(world, invisible_ms=2 * HOUR_MS)
        receipts = [one for one in received.receipts if isinstance(one, Receipt)]
        if schedule == "hour_log":
            await push_out(world, receipts[-1].seq)
            assert world.broker.log.reader.first_seq > receipts[-1].seq
        due_ms = np.array([one.due_ms for one in receipts])
        seqs = np.array([one.seq for one in receipts])
        files = world.broker.scheduling.hour_log.pending.all()
        rows, at = await in_thread(
            world.broker.threads.reader, lookup.scheduled_rows, world.broker.log.reader, files, due_ms, seqs
        )
        assert column(rows, "seq") == [one.seq for one in receipts] and at.tolist() == [0, 1, 2]
        first, second, third = receipts
        for ms in (3 * HOUR_MS, 2 * HOUR_MS, 1_000):
            if schedule == "hour_log":
                await push_out(world, world.broker.log.reader.next_seq - 1)
            assert await engine(world).change_invisible_time(first, ms) == first
        assert await engine(world).acknowledge([second]) == [True]
        assert await engine(world).dead_letter(third)
        await world.advance(1_000)
        again = await receive(world)
        assert bodies(again) == bodies(received)[:1]
        assert column(again.rows, "reconsume_times") == [1]

    live()
