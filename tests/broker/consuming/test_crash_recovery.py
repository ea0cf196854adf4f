"""After a crash positions that were handed out are done, whatever the saved offsets say, and no others are."""

from __future__ import annotations

import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    GROUP,
    MINUTE_MS,
    TOPIC,
    acknowledge,
    attempts,
    bodies,
    engine,
    in_queue,
    receive,
    send,
)
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming import crash_recovery
from timeball.broker.consuming.requests import ReceiveRequest


async def save(world: World) -> None:
    assert world.node is not None
    await world.node.upkeep.save_offsets()


async def power_cut(world: World) -> None:
    """What was not synced is gone."""
    files = world.files
    await world.abandon()
    world.files = files.crash(survival="nothing")
    await world.start()


@on_node()
async def test_what_was_handed_out_since_the_offsets_were_saved_is_not_handed_out_again(world: World) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    first = await receive(world, 4)
    await save(world)
    second = await receive(world, 4)
    await acknowledge(world, second)
    await power_cut(world)
    rest = await receive(world)
    assert sorted(bodies(first) + bodies(second) + bodies(rest)) == [b"%d" % i for i in range(10)]
    assert attempts(rest) == [1, 1]
    await world.advance(MINUTE_MS)
    again = await receive(world)
    assert sorted(bodies(again)) == sorted(bodies(first) + bodies(rest)) and set(attempts(again)) == {2}


@on_node()
async def test_without_a_look_at_the_log_they_would_come_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the step that reads positions from the log, left out."""
    await send(world, [b"a"])
    await receive(world)
    with monkeypatch.context() as patch:
        patch.setattr(crash_recovery, "restore", lambda *_: None)
        await power_cut(world)
    assert bodies(await receive(world)) == [b"a"], "handed out again while its promise waits"


@on_node()
async def test_what_came_again_and_was_handed_out_again_is_not_handed_out_a_third_time(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    await world.advance(MINUTE_MS)
    assert attempts(await receive(world)) == [2]
    await power_cut(world)
    assert bodies(await receive(world)) == []
    await world.advance(MINUTE_MS)
    assert attempts(await receive(world)) == [3]


@on_node()
async def test_a_group_that_somebody_moved_back_stays_there(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world)
    await acknowledge(world, received)
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    await save(world)
    await power_cut(world)
    assert sorted(bodies(await receive(world))) == [b"a", b"b"]


@on_node()
async def test_a_group_that_is_gone_does_not_come_back(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    world.broker.parts.offsets.forget_group(GROUP)
    await save(world)
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC) == {}
    assert bodies(await receive(world)) == [b"a"]


@on_node()
async def test_holes_that_others_leave_are_remembered(world: World) -> None:
    """A consumer of RocketMQ 4 holds a position, while others behind it are handed out as promises."""
    await send(world, [b"%d" % i for i in range(8)])
    held = await world.broker.consuming.receive(
        ReceiveRequest(GROUP, TOPIC, rows=1, queue_id=0, invisible_ms=MINUTE_MS), 0
    )
    assert held.rows.num_rows == 1
    received = await receive(world)
    assert len(received.receipts) == 7
    await acknowledge(world, received)
    await save(world)
    await world.send("filler", [None] * 3)
    await save(world)
    await power_cut(world)
    again = await receive(world)
    assert bodies(again) == [bytes(held.rows.column("body")[0].as_py())]
    assert attempts(again) == [1]


@on_node()
async def test_an_ordered_stop_leaves_nothing_to_look_for(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world, 1)
    await world.restart()
    parked = world.broker.parts.offsets.parked
    assert parked is not None and parked.from_seq > max(one.seq for one in received.receipts)
    assert len(bodies(await receive(world))) == 1
    assert await acknowledge(world, received) == [True]


@on_node()
async def test_where_a_group_begins_is_saved_before_it_is_handed_anything(world: World) -> None:
    await send(world, [b"%d" % i for i in range(6)])
    ask = ReceiveRequest(GROUP, TOPIC, rows=1, invisible_ms=MINUTE_MS, from_max=True, in_log=True)
    await engine(world).receive(ask, 0)
    await power_cut(world)
    assert set(world.broker.offsets(GROUP, TOPIC)) >= {0} and await in_queue(world, AGAIN) == []
    total = 1
    while (got := await engine(world).receive(ask, 0)).receipts:
        total += len(got.receipts)
    assert total == 6
