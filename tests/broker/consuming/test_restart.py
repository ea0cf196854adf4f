"""Leases across a restart: what was handed out before a crash is done, and an orderly stop loses no lease."""

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
from tests.broker.consuming.test_leases import leases_of_queue, take
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World
from tests.crash_files import CrashFiles
from timeball.broker.consuming.memory_leases import pop_leases, save
from timeball.broker.registry.lease_counts import SavedLeases

from timeball.broker.consuming import memory_leases
from timeball.broker.consuming.leases import OpenCount, QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.topic import Queues, Topic, TopicFacts
from timeball.log.queue_index import QueueIndexes


async def save_offsets(world: World) -> None:
    assert world.node is not None
    await world.node.maintenance.save_offsets()


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
    await save_offsets(world)
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
        patch.setattr(memory_leases, "skip_done", lambda *_, **__: None)
        await power_cut(world)
    assert bodies(await receive(world)) == [b"a"], "handed out again while its scheduled message waits"


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
    await save_offsets(world)
    await power_cut(world)
    assert sorted(bodies(await receive(world))) == [b"a", b"b"]


@on_node()
async def test_a_group_that_is_gone_does_not_come_back(world: World) -> None:
    await send(world, [b"a"])
    await receive(world)
    world.broker.tables.offsets.forget_group(GROUP)
    await save_offsets(world)
    await power_cut(world)
    assert world.broker.offsets(GROUP, TOPIC) == {}
    assert bodies(await receive(world)) == [b"a"]


@on_node()
async def test_holes_that_others_leave_are_remembered(world: World) -> None:
    """A consumer of RocketMQ 4 holds a position, while others behind it are handed out as scheduled messages."""
    await send(world, [b"%d" % i for i in range(8)])
    held = await world.broker.consuming.receive(
        ReceiveRequest(GROUP, TOPIC, rows=1, queue_id=0, invisible_ms=MINUTE_MS), 0
    )
    assert held.rows.num_rows == 1
    received = await receive(world)
    assert len(received.receipts) == 7
    await acknowledge(world, received)
    await save_offsets(world)
    await world.send("filler", [None] * 3)
    await save_offsets(world)
    await power_cut(world)
    again = await receive(world)
    assert bodies(again) == [bytes(held.rows.column("body")[0].as_py())]
    assert attempts(again) == [1]


@on_node()
async def test_after_an_orderly_stop_no_positions_need_recovery(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world, 1)
    await world.restart()
    parked = world.broker.tables.offsets.parked
    assert parked is not None and parked.from_seq > max(one.seq for one in received.receipts)
    assert len(bodies(await receive(world))) == 1
    assert await acknowledge(world, received) == [True]


@on_node()
async def test_where_a_group_begins_is_saved_before_it_is_handed_anything(world: World) -> None:
    await send(world, [b"%d" % i for i in range(6)])
    ask = ReceiveRequest(GROUP, TOPIC, rows=1, invisible_ms=MINUTE_MS, from_max=True, counts_times=True)
    await engine(world).receive(ask, 0)
    await power_cut(world)
    assert set(world.broker.offsets(GROUP, TOPIC)) >= {0} and await in_queue(world, AGAIN) == []
    total = 1
    while (got := await engine(world).receive(ask, 0)).receipts:
        total += len(got.receipts)
    assert total == 6


# ---- an orderly stop -----------------------------------------------------------------------------------------------


def find_topic(name: str) -> Topic:
    return Topic(name, Queues(QueueIndexes(CrashFiles()), name, 1), TopicFacts(1))


def kept(meta: MetaLog) -> MetaTable[SavedLeases]:
    return MetaTable(meta, "in_flight", SavedLeases)


def facts(w: QueueLeases) -> tuple[object, ...]:
    return (
        w.next_offset,
        w.stored_offset,
        w.in_flight,
        w.returned,
        w.acked_ahead,
        w.first_open,
        w.count,
        w.last_pop_ms,
    )


NOW_MS = 1_000  # later than all leases of these tests


def test_a_window_goes_on_where_it_ended_and_idle_ones_are_left_out() -> None:
    busy, idle = leases_of_queue(), leases_of_queue()
    take(busy, list(range(6)), pop_ms=7)
    busy.done(0)
    busy.give_back(2)
    busy.in_flight[3].times, busy.in_flight[3].in_order = 4, True
    busy.ack_ahead(9)
    busy.last_pop_ms, busy.attempt_id = 7, "x"
    log = StateRows()
    save(log.opened(kept), [busy, idle], lambda ms: ms)
    (found,) = pop_leases(log.opened(kept), find_topic, OpenCount(), NOW_MS)
    assert facts(found) == facts(busy) and found.attempt_id == "x"
    found.done(1)
    assert found.first_open == 2


def test_saved_leases_are_restored_only_once() -> None:
    busy = leases_of_queue()
    take(busy, [0])
    log = StateRows()
    assert pop_leases(log.opened(kept), find_topic, OpenCount(), NOW_MS) == []
    assert log.count == 0
    save(log.opened(kept), [busy], lambda ms: ms)
    assert len(pop_leases(log.opened(kept), find_topic, OpenCount(), NOW_MS)) == 1
    assert pop_leases(log.opened(kept), find_topic, OpenCount(), NOW_MS) == []


@on_node()
async def test_what_was_moved_while_nobody_looked_is_forgotten(world: World) -> None:
    await world.broker.create_topic("orders", 1)
    await world.broker.send(batch(3))
    await world.broker.consuming.receive(ReceiveRequest("g", "orders"), 0)
    await world.restart()
    await world.broker.commit_offsets("g", "orders", {0: 1})
    assert (await world.broker.consuming.receive(ReceiveRequest("g", "orders"), 0)).rows.num_rows == 2


def test_a_lease_from_the_future_lasts_no_longer_than_its_whole_time() -> None:
    """The clock was set back while no broker ran."""
    busy = leases_of_queue()
    take(busy, [0], pop_ms=NOW_MS + 500)
    lasting_ms = busy.in_flight[0].deadline_ms - busy.in_flight[0].pop_ms
    log = StateRows()
    save(log.opened(kept), [busy], lambda ms: ms)
    (found,) = pop_leases(log.opened(kept), find_topic, OpenCount(), NOW_MS)
    assert found.in_flight[0].deadline_ms == NOW_MS + lasting_ms
