"""Receive: what is handed out is promised first, comes back when its time is over, and is in no hand twice."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.consuming.subscriber import (
    AGAIN,
    DEAD,
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
    try_at_most,
)
from tests.broker.on_node import InTurn, column, on_node
from tests.crash.world import World

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.filters import compile_filter
from timeball.model.errors import NotFound, OutOfRange, OverLimit
from timeball.model.message import Kind


@on_node()
async def test_a_lease_is_a_scheduled_message_in_the_log(world: World) -> None:
    await send(world, [b"a", b"b"], tag=["x", None], keys=["k", None])
    received = await receive(world, invisible_ms=5_000)
    assert sorted(bodies(received)) == [b"a", b"b"] and attempts(received) == [1, 1]
    seqs = [receipt.seq for receipt in received.receipts]
    rows = world.broker.log.reader.read_rows(np.array(seqs)).to_pylist()
    for row, given in zip(rows, received.rows.to_pylist(), strict=True):
        assert (row["kind"], row["topic"], row["source_seq"]) == (Kind.SCHEDULED, AGAIN, given["seq"])
        assert row["due_ms"] == world.clock.wall + 5_000 == received.receipts[0].due_ms
        assert (row["body"], row["tag"], row["keys"]) == (given["body"], given["tag"], given["keys"])
    assert world.broker.offsets(GROUP, TOPIC) == {0: 1, 1: 1}, "the positions are done"
    assert world.broker.consuming.leases.count.rows == 0, "and nothing is in memory"


@on_node()
async def test_an_unacknowledged_message_is_redelivered_once_and_counted(world: World) -> None:
    await send(world, [b"a", b"b"])
    received = await receive(world, 1)
    await acknowledge(world, await receive(world, 1))
    await world.advance(MINUTE_MS - 1)
    assert bodies(await receive(world)) == []
    await world.advance(1)
    again = await receive(world)
    assert bodies(again) == bodies(received) and attempts(again) == [2]
    assert await acknowledge(world, received) == [False], "its time was over"
    assert await acknowledge(world, again) == [True]
    await world.advance(2 * MINUTE_MS)
    assert bodies(await receive(world)) == []


@on_node()
async def test_after_the_last_attempt_a_message_is_a_dead_letter(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a"])
    for attempt in (1, 2):
        received = await receive(world)
        assert attempts(received) == [attempt]
        await world.advance(MINUTE_MS)
    assert bodies(await receive(world)) == [] and await in_queue(world, DEAD) == [b"a"]
    assert column(await world.broker.read_queue(DEAD, 0, 0, 9), "reconsume_times") == [2]


@on_node()
async def test_a_last_attempt_acknowledged_in_time_leaves_no_dead_letter(world: World) -> None:
    try_at_most(world, 0)
    await send(world, [b"a"])
    assert await acknowledge(world, await receive(world)) == [True]
    await world.advance(MINUTE_MS)
    assert await in_queue(world, DEAD) == []


@on_node()
async def test_a_waiting_receive_gets_the_first_message(world: World) -> None:
    await world.broker.create_topic(TOPIC, 2)
    waiting = [asyncio.create_task(receive(world, wait_ms=30_000)) for _ in range(3)]
    await asyncio.sleep(0.01)
    await send(world, [b"a"])
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [bodies(task.result()) for task in done] == [[b"a"]]
    for body in (b"b", b"c"):
        await send(world, [body])
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert [bodies(task.result()) for task in done] == [[body]]
    assert not pending


@on_node()
async def test_a_receive_without_messages_returns_after_its_wait_time(world: World) -> None:
    await world.broker.create_topic(TOPIC, 2)
    assert (await receive(world, wait_ms=10)).receipts == []


@on_node()
async def test_many_at_once_get_each_message_once(world: World) -> None:
    await send(world, [b"%d" % i for i in range(60)])
    received = await asyncio.gather(*(receive(world, 7) for _ in range(12)))
    got = [body for one in received for body in bodies(one)]
    assert len(got) == len(set(got)) == 60
    assert world.broker.offsets(GROUP, TOPIC) == {0: 30, 1: 30}


@on_node()
async def test_a_filter_is_asked_once_and_not_of_what_comes_again(world: World) -> None:
    await send(world, [b"a", b"b", b"c", b"d"], tag=["x", "y", "x", "y"])
    wanted = compile_filter("y")
    assert sorted(bodies(await receive(world, wanted=wanted))) == [b"b", b"d"]
    assert world.broker.offsets(GROUP, TOPIC) == {0: 2, 1: 2}, "what nobody wants is done"
    await world.advance(MINUTE_MS)
    assert sorted(bodies(await receive(world, wanted=compile_filter("z")))) == [b"b", b"d"]


@on_node()
async def test_a_consumer_that_goes_away_before_the_rows_are_read_leaves_nothing_behind(world: World) -> None:
    await send(world, [b"a"])
    asking = asyncio.create_task(receive(world))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await world.broker.log.writer.flushed()
    reader = world.broker.log.reader
    assert not list(reader.rows(1, reader.next_seq, [Kind.SCHEDULED]))
    again = await receive(world)
    assert bodies(again) == [b"a"] and attempts(again) == [1]


@on_node(InTurn)
async def test_a_consumer_that_goes_away_while_its_scheduled_message_is_written_loses_no_attempt(
    world: World,
) -> None:
    await send(world, [b"a"])
    asking = asyncio.create_task(receive(world))
    while not world.broker.consuming._log_leases._under_way:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    again = await receive(world, wait_ms=30_000)
    assert bodies(again) == [b"a"] and attempts(again) == [1]
    assert await in_queue(world, AGAIN) == [b"a"]


@on_node()
async def test_when_nothing_can_be_written_the_positions_come_back(world: World) -> None:
    await send(world, [b"a"])
    writer = world.broker.log.writer
    writer.next_segment.disk_full_error = OverLimit("full")
    with pytest.raises(OverLimit, match="full"):
        await receive(world)
    writer.next_segment.disk_full_error = None
    assert bodies(await receive(world)) == [b"a"]


@on_node()
async def test_invalid_receive_requests_are_refused(world: World) -> None:
    await send(world, [b"a"])
    with pytest.raises(NotFound, match="'nothing' does not exist"):
        await receive(world, topic="nothing")
    for wrong in ({"rows": 0}, {"invisible_ms": 0}, {"queue_id": 2}):
        with pytest.raises(OutOfRange):
            await receive(world, **wrong)
    (receipt,) = (await receive(world)).receipts
    with pytest.raises(OutOfRange, match="between 0 and"):
        await engine(world).change_invisible_time(receipt, -1)


@on_node()
async def test_in_order_a_message_that_has_used_up_its_attempts_is_a_dead_letter(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a", b"b"], queue_id=pa.array([0, 0], pa.int32()))
    for attempt in (1, 2):
        received = await receive(world, 1, in_order=True)
        assert (bodies(received), attempts(received)) == ([b"a"], [attempt])
        assert await engine(world).change_invisible_time(received.receipts[0], 0) == received.receipts[0]
        world.broker.consuming.wake()
        await world.until(
            lambda: not any(w.in_flight for w in world.broker.consuming.leases.all()), "it is back"
        )
    received = await receive(world, 1, in_order=True)
    assert (bodies(received), attempts(received)) == ([b"b"], [1])
    assert await in_queue(world, DEAD) == [b"a"]
    assert await acknowledge(world, received) == [True]


@on_node()
async def test_in_order_the_verbs_are_the_same(world: World) -> None:
    await send(world, [b"a"])
    received = await receive(world, in_order=True)
    assert await engine(world).dead_letter(received.receipts[0])
    assert await in_queue(world, DEAD) == [b"a"]
    await send(world, [b"b"])
    received = await receive(world, in_order=True)
    await engine(world).give_back(received.receipts)
    assert bodies(await receive(world, in_order=True)) == [b"b"]


@on_node()
async def test_a_message_too_many_groups_want_is_each_ones_own(world: World) -> None:
    await send(world, [b"a"])
    mine = await receive(world)
    theirs = await engine(world).receive(
        ReceiveRequest("other", TOPIC, invisible_ms=MINUTE_MS, counts_times=True), 0
    )
    assert await acknowledge(world, mine) == [True]
    await world.advance(MINUTE_MS)
    assert bodies(await receive(world)) == []
    again = await engine(world).receive(
        ReceiveRequest("other", TOPIC, invisible_ms=MINUTE_MS, counts_times=True), 0
    )
    assert bodies(again) == bodies(theirs) == [b"a"]


@on_node()
async def test_a_producer_who_takes_its_message_back_does_not_take_it_from_a_consumer(world: World) -> None:
    await send(world, [b"now"], unique_key=["u1"], keys=["k"])
    later = pa.array([1_000], pa.int64())
    await send(world, [b"later"], unique_key=["u2"], keys=["k"], delay_ms=later)
    await world.advance(1_000)
    received = await receive(world)
    assert len(received.receipts) == 2
    verdicts = await world.broker.cancel(ids=["u1", "u2"])
    assert [verdict.verdict for verdict in verdicts] == ["not_found", "released"]
    assert {verdict.verdict for verdict in await world.broker.cancel(keys=["k"])} == {"released"}
    moved = await world.broker.reschedule(ids=["u1", "u2"], delay_ms=5_000)
    assert [verdict.verdict for verdict in moved] == ["not_found", "released"]
    assert await acknowledge(world, received) == [True, True], "they are the consumer's still"
    named = await receive(world)
    assert named.receipts == []


@on_node()
async def test_who_names_the_retry_topic_finds_what_waits_for_it(world: World) -> None:
    await send(world, [b"a"], unique_key=["u1"])
    received = await receive(world)
    verdicts = await world.broker.cancel(ids=["u1"], topic=AGAIN)
    assert [verdict.verdict for verdict in verdicts] == ["cancelled"]
    assert await acknowledge(world, received) == [False]
