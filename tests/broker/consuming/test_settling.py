"""POP: a message has one lease at a time, until it is acknowledged, the lease ends, or it is given up."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
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
    stored,
)
from tests.broker.on_node import batch, column, on_node
from tests.crash.world import HOUR_MS, World

from timeball.broker.consuming import retry
from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.broker.filters import compile_filter
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import TopicConfig
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, OverLimit
from timeball.model.message import decode_properties

# ---- handing out and receipts -------------------------------------------------------------------------------


@on_node()
async def test_each_message_is_handed_out_once_and_can_be_acknowledged(world: World) -> None:
    await send(world, [b"%d" % i for i in range(10)])
    first, second = await pop(world, 6), await pop(world, 6)
    assert sorted(bodies(first) + bodies(second)) == [b"%d" % i for i in range(10)]
    assert stored(world) == {0: 0, 1: 0}
    assert engine(world).acknowledge_now(first.receipts + second.receipts) == [True] * 10
    assert stored(world) == {0: 5, 1: 5}
    assert not (await pop(world)).rows.num_rows


@on_node()
async def test_a_receipt_is_valid_once_and_only_for_its_group(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts
    other_receipts = [
        receipt._replace(group="other"), receipt._replace(offset=1), receipt._replace(topic="none"),
        receipt._replace(queue_id=7), receipt._replace(pop_ms=receipt.pop_ms + 1), receipt._replace(pop_ms=-1),
    ]  # fmt: skip
    assert engine(world).acknowledge_now(other_receipts) == [False] * len(other_receipts)
    assert engine(world).acknowledge_now([receipt, receipt]) == [True, False]


@on_node()
async def test_each_group_gets_all_messages(world: World) -> None:
    await send(world, [b"a"])
    assert bodies(await pop(world)) == [b"a"]
    assert bodies(await engine(world).receive(ReceiveRequest("h", TOPIC), 0)) == [b"a"]


@on_node()
async def test_a_request_for_one_queue_gets_only_its_messages(world: World) -> None:
    await send(world, [b"0", b"1"], queue_id=pa.array([0, 1], pa.int32()))
    assert bodies(await pop(world, queue_id=1)) == [b"1"]
    assert bodies(await pop(world)) == [b"0"]


@on_node()
async def test_the_stored_offset_is_that_of_the_first_leased_message(world: World) -> None:
    await send(world, [b"0", b"1", b"2"], queue_id=pa.array([0, 0, 0], pa.int32()))
    receipts = (await pop(world)).receipts
    engine(world).acknowledge_now([receipts[0], receipts[2]])
    assert stored(world)[0] == 1
    engine(world).acknowledge_now([receipts[1]])
    assert stored(world)[0] == 3


@on_node()
async def test_receives_and_changes_outside_the_limits_are_refused(world: World) -> None:
    await send(world, [b"a"])
    for wrong in ({"rows": 0}, {"rows": limits.POP_ROWS_MAX + 1}, {"queue_id": 9}, {"queue_id": -2},
                  {"invisible_ms": 0}, {"invisible_ms": limits.INVISIBLE_MS_MAX + 1}):  # fmt: skip
        with pytest.raises(OutOfRange):
            await pop(world, **wrong)
    with pytest.raises(NotFound):
        await engine(world).receive(ReceiveRequest(GROUP, "none"), 0)
    for group, topic, too_long in (("g" * 121, "t", "group"), ("g", "t" * 128, "topic")):
        with pytest.raises(InvalidMessage, match=f"^{too_long} "):
            await engine(world).receive(ReceiveRequest(group, topic), 0)


@on_node()
async def test_a_new_group_begins_at_the_requested_end_or_at_the_first_message_of_a_young_queue(
    world: World,
) -> None:
    await send(world, [b"a"])
    assert bodies(await pop(world, from_max=True)) == [b"a"]
    assert bodies(await engine(world).receive(ReceiveRequest("h", TOPIC, from_max=False), 0)) == [b"a"]


@on_node()
async def test_an_offset_that_was_committed_elsewhere_is_where_the_group_continues(world: World) -> None:
    await send(world, [b"0", b"1", b"2"], queue_id=pa.array([0, 0, 0], pa.int32()))
    receipts = (await pop(world)).receipts
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 2})
    assert bodies(await pop(world)) == [b"2"]
    assert engine(world).acknowledge_now(receipts[:2]) == [False, False]


# ---- time -----------------------------------------------------------------------------------------------------


@on_node()
async def test_the_message_of_an_expired_lease_comes_back_with_its_count_and_original_topic(
    world: World,
) -> None:
    await send(
        world, [b"a"], tag=["t"], keys=["k"], unique_key=["u"], properties=["DELAY\x013\x02MINE\x01x\x02"]
    )
    popped = await pop(world, invisible_ms=MINUTE_MS)
    await pass_time(world, MINUTE_MS - 1)
    assert not (await pop(world)).rows.num_rows
    await pass_time(world, 1)
    again = await pop(world)
    assert bodies(again) == [b"a"]
    assert [column(again.rows, n)[0] for n in ("reconsume_times", "tag", "keys", "unique_key", "due_ms")] == [
        1, "t", "k", "u", None,
    ]  # fmt: skip
    assert decode_properties(column(again.rows, "properties")[0]) == {
        "MINE": "x", "RETRY_TOPIC": TOPIC, "1ST_POP_TIME": str(popped.pop_ms), "ORIGIN_GROUP": GROUP,
    }  # fmt: skip
    assert engine(world).acknowledge_now(popped.receipts) == [False]
    assert engine(world).acknowledge_now(again.receipts) == [True]
    # The message was alone in one of the two queues.
    assert stored(world) == {0: 0, 1: 0} or sum(stored(world).values()) == 1
    assert stored(world, pop_retry_topic(GROUP, TOPIC)) == {0: 1}


@on_node()
async def test_a_message_whose_last_lease_expires_becomes_a_dead_letter(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup(GROUP, retry_max_times=2))
    await send(world, [b"a"])
    for times in range(3):
        popped = await pop(world)
        assert column(popped.rows, "reconsume_times") == [times]
        await pass_time(world, MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    dead = await world.broker.read_queue(retry.dead_letter_topic(GROUP), 0, 0, 10)
    assert column(dead, "body") == [b"a"] and column(dead, "reconsume_times") == [3]


@on_node()
async def test_a_longer_lease_has_the_same_receipt(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world, invisible_ms=MINUTE_MS)).receipts
    assert await engine(world).change_invisible_time(receipt, 3 * MINUTE_MS) == receipt
    await pass_time(world, 2 * MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    assert engine(world).acknowledge_now([receipt]) == [True]


@on_node()
async def test_a_renamed_longer_lease_has_a_new_receipt(world: World) -> None:
    await send(world, [b"a"])
    (old,) = (await pop(world, invisible_ms=MINUTE_MS)).receipts
    new = await engine(world).change_invisible_time(old, 3 * MINUTE_MS, new_receipt=True)
    assert new is not None and new != old
    assert engine(world).acknowledge_now([old]) == [False]
    assert await engine(world).change_invisible_time(old, 1) is None
    await pass_time(world, 2 * MINUTE_MS)
    assert not (await pop(world)).rows.num_rows
    assert engine(world).acknowledge_now([new]) == [True]


@on_node()
async def test_a_shorter_lease_ends_sooner(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world, invisible_ms=MINUTE_MS)).receipts
    await engine(world).change_invisible_time(receipt, 10)
    await pass_time(world, 10)
    assert bodies(await pop(world)) == [b"a"]


@on_node()
async def test_a_dead_letter_is_written_at_once_and_its_position_is_done(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts
    assert await engine(world).dead_letter(receipt)
    assert not await engine(world).dead_letter(receipt)
    assert column(await world.broker.read_queue("%DLQ%g", 0, 0, 9), "body") == [b"a"]
    assert sum(stored(world).values()) == 1


@on_node()
async def test_a_group_whose_retry_topic_cannot_be_created_does_not_delay_other_groups(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups give messages back in one turn, and only the first group has its retry topic."""
    await send(world, [b"0", b"1"])
    mine = (await pop(world)).receipts
    other = (await engine(world).receive(ReceiveRequest("other", TOPIC), 0)).receipts
    assert await engine(world).nack(mine[0], MINUTE_MS)
    monkeypatch.setattr(limits, "TOPICS_MAX", len(world.broker.tables.topics.all()))
    results = await asyncio.gather(
        *(engine(world).nack(receipt, MINUTE_MS) for receipt in (other[0], mine[1], mine[1], other[1])),
        return_exceptions=True,
    )
    assert results[1:3] == [mine[1], None], "a receipt counts once"
    assert all(isinstance(result, OverLimit) for result in (results[0], results[3]))
    assert engine(world).acknowledge_now(other) == [True, True], "the refused receipts are still valid"


@on_node()
async def test_names_that_make_the_same_retry_topic_are_kept_apart(world: World) -> None:
    assert pop_retry_topic("a_b", "c") == pop_retry_topic("a", "b_c")
    await world.broker.send(batch(1, topic=["c"]))
    await world.broker.send(batch(1, topic=["b_c"], body=[b"other"]))
    assert (await engine(world).receive(ReceiveRequest("a_b", "c"), 0)).rows.num_rows
    await pass_time(world, MINUTE_MS)
    received = await engine(world).receive(ReceiveRequest("a", "b_c", rows=10), 0)
    assert bodies(received) == [b"other"]
    assert bodies(await engine(world).receive(ReceiveRequest("a_b", "c"), 0)) == [b"body"]


# ---- waiting --------------------------------------------------------------------------------------------------


@on_node()
async def test_a_waiting_receive_gets_messages_that_are_sent_and_released(world: World) -> None:
    await send(world, [b"seen"])
    engine(world).acknowledge_now((await pop(world)).receipts)
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.consuming.waiting_receives, "it waits")
    await send(world, [b"later"], due_ms=[world.clock.wall + 1_000])
    assert not waiting.done()
    await world.advance(1_000)
    assert bodies(await waiting) == [b"later"]


@on_node()
async def test_a_waiting_receive_gets_redelivered_messages(world: World) -> None:
    await send(world, [b"a"])
    await pop(world)
    waiting = asyncio.create_task(pop(world, wait_ms=30_000))
    await world.until(lambda: world.broker.consuming.waiting_receives, "it waits")
    await pass_time(world, MINUTE_MS)
    assert bodies(await waiting) == [b"a"]


@on_node()
async def test_as_many_waiting_receives_are_served_as_there_are_messages(world: World) -> None:
    await send(world, [b"seen"])
    engine(world).acknowledge_now((await pop(world)).receipts)
    waiting = [asyncio.create_task(pop(world, 1, wait_ms=30_000)) for _ in range(20)]
    await world.until(lambda: engine(world).waiting_receives == 20, "all receives wait")
    await send(world, [b"%d" % i for i in range(15)])
    await world.until(lambda: sum(task.done() for task in waiting) == 15, "15 receives have a message")
    await send(world, [b"%d" % i for i in range(15, 20)])
    all_bodies = [body for popped in await asyncio.gather(*waiting) for body in bodies(popped)]
    assert sorted(all_bodies) == sorted(b"%d" % i for i in range(20))


@on_node()
async def test_the_end_of_a_lease_wakes_no_other_group(world: World) -> None:
    await send(world, [b"a", b"b"])
    receipts = (await pop(world)).receipts
    await engine(world).receive(ReceiveRequest("other", TOPIC), 0)
    reader = asyncio.create_task(world.broker.waiters.wait(TOPIC, 60))
    request = ReceiveRequest("other", TOPIC, in_order=True)
    other_group = asyncio.create_task(engine(world).wait_for_rows(request, 30_000))
    own_group = asyncio.create_task(engine(world).wait_for_rows(ReceiveRequest(GROUP, TOPIC), 30_000))
    await world.until(lambda: world.broker.waiters._count == 3, "all three wait")
    engine(world).acknowledge_now(receipts[:1])
    await engine(world).change_invisible_time(receipts[1], 0, counts=False)
    assert await own_group, "the group has a message again"
    assert not reader.done() and not other_group.done()
    reader.cancel()
    other_group.cancel()


@on_node()
async def test_wait_for_rows_returns_when_the_group_has_a_message_to_receive(world: World) -> None:
    await send(world, [b"a"])
    assert await engine(world).wait_for_rows(ReceiveRequest(GROUP, TOPIC), 0)
    await pop(world)
    assert not await engine(world).wait_for_rows(ReceiveRequest(GROUP, TOPIC), 0)
    waiting = asyncio.create_task(engine(world).wait_for_rows(ReceiveRequest(GROUP, TOPIC), 30_000))
    await world.until(lambda: world.broker.waiters._count, "it waits")
    await send(world, [b"b"])
    assert await waiting


@pytest.mark.parametrize("begins_at_end", [False, True])
@on_node()
async def test_wait_for_rows_stores_the_first_offset_only_if_a_new_group_begins_at_the_end(
    world: World, begins_at_end: bool
) -> None:
    await send(world, [b"a", b"b", b"c"])
    if begins_at_end:
        world.broker.tables.groups.update(SubscriptionGroup("late", consume_from_min_enable=False))
    assert await engine(world).wait_for_rows(ReceiveRequest("late", TOPIC), 0) is not begins_at_end
    assert bool(world.broker.offsets("late", TOPIC)) is begins_at_end, "otherwise the first receive decides"
    received = await engine(world).receive(ReceiveRequest("late", TOPIC), 0)
    assert sorted(bodies(received)) == ([] if begins_at_end else [b"a", b"b", b"c"])


@on_node()
async def test_a_new_group_that_a_full_disk_refuses_does_not_block_other_groups(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(world, [b"%d" % i for i in range(4)])
    await pop(world, rows=1)
    with monkeypatch.context() as full:
        full.setattr(type(world.broker.log.writer), "no_room", property(lambda _: "the disk is full"))
        for _ in range(2):
            with pytest.raises(OverLimit, match="the disk is full"):
                await engine(world).receive(ReceiveRequest("new", TOPIC), 0)
            assert len(bodies(await pop(world, rows=1))) == 1
    assert len(bodies(await engine(world).receive(ReceiveRequest("new", TOPIC), 0))) == 4


@on_node()
async def test_a_consumer_that_waits_for_the_limit_of_leases_is_served_when_some_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_HELD_MAX", 3)
    monkeypatch.setattr(limits, "PULL_WAIT_MS_MAX", HOUR_MS)  # so that no wait ends by itself
    await send(world, [b"%d" % i for i in range(4)])
    receipts = (await pop(world)).receipts
    assert len(receipts) == 3
    other = asyncio.create_task(engine(world).receive(ReceiveRequest("other", TOPIC), HOUR_MS))
    await world.until(lambda: world.broker.consuming.waiting_receives, "it waits")
    engine(world).acknowledge_now(receipts[:2])
    await world.until(other.done, "it was served")
    assert len(bodies(await other)) == 2


@on_node()
async def test_a_group_that_is_moved_back_is_served_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PULL_WAIT_MS_MAX", HOUR_MS)
    await send(world, [b"a", b"b"])
    engine(world).acknowledge_now((await pop(world)).receipts)
    waiting = asyncio.create_task(pop(world, wait_ms=HOUR_MS))
    await world.until(lambda: world.broker.consuming.waiting_receives, "it waits")
    await world.broker.commit_offsets(GROUP, TOPIC, {0: 0, 1: 0})
    await world.until(waiting.done, "it was served")
    assert len(bodies(await waiting)) >= 1


# ---- filters --------------------------------------------------------------------------------------------------


@on_node()
async def test_messages_that_the_filter_excludes_are_done_without_being_handed_out(world: World) -> None:
    await send(
        world,
        [b"%d" % i for i in range(6)],
        tag=["Aa", "BB", "x"] * 2,
        queue_id=pa.array([0] * 6, pa.int32()),
    )
    popped = await pop(world, wanted=compile_filter("BB"))  # "Aa" has the same hash
    assert bodies(popped) == [b"1", b"4"]
    assert stored(world)[0] == 1
    engine(world).acknowledge_now(popped.receipts)
    assert stored(world)[0] == 6


@on_node()
async def test_a_filter_with_few_matches_finds_them_after_many_other_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timeball.broker.consuming.selection.SCAN_ENTRIES", 4)
    await send(world, [b"x"] * 50 + [b"hit"], tag=["no"] * 50 + ["yes"])
    assert bodies(await pop(world, wanted=compile_filter("yes"))) == [b"hit"]


@on_node()
async def test_many_concurrent_consumers_get_each_message_once(world: World) -> None:
    await send(world, [b"%d" % i for i in range(200)])
    answers = await asyncio.gather(*(pop(world, 7) for _ in range(40)))
    all_bodies = [body for popped in answers for body in bodies(popped)]
    assert sorted(all_bodies) == sorted(b"%d" % i for i in range(200))
    assert np.all([popped.rows.num_rows <= 7 for popped in answers])
    assert all(isinstance(receipt, Receipt) for popped in answers for receipt in popped.receipts)


@on_node()
async def test_messages_of_a_hidden_queue_are_not_handed_out(world: World) -> None:
    """Its receipts would be refused: the acknowledgement would name a queue that consumers do not have."""
    await send(world, [b"shown", b"hidden"], queue_id=pa.array([0, 1], pa.int32()))
    topics = world.broker.tables.topics
    topics.configure(TOPIC, TopicConfig(read_queues=1, write_queues=2))
    assert bodies(await pop(world)) == [b"shown"]
    with pytest.raises(OutOfRange, match="has 1"):
        await pop(world, queue_id=1)
    topics.configure(TOPIC, TopicConfig(read_queues=0, write_queues=2))
    assert [(await pop(world, in_order=in_order)).rows.num_rows for in_order in (False, True)] == [0, 0]
    topics.configure(TOPIC, TopicConfig(read_queues=2, write_queues=2))
    assert bodies(await pop(world)) == [b"hidden"]


# ---- the delay of a message that is given back --------------------------------------------------------------


@on_node()
async def test_a_nack_with_a_delay_of_days_is_one_attempt(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts
    assert await engine(world).nack(receipt, 36 * HOUR_MS, "tomorrow")
    await world.advance(36 * HOUR_MS - 1)
    assert not (await pop(world)).rows.num_rows
    await world.advance(1)
    again = await pop(world)
    assert bodies(again) == [b"a"] and column(again.rows, "reconsume_times") == [1]


@on_node()
async def test_the_longest_delay_of_a_nack_is_that_of_a_send(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts
    for delay_ms in (-1, limits.DELAY_MS_MAX + 1):
        message = f"after={delay_ms} ms: between 0 and {limits.DELAY_MS_MAX} ms$"
        with pytest.raises(InvalidDelay, match=message):
            await engine(world).nack(receipt, delay_ms)
    assert await engine(world).nack(receipt, limits.DELAY_MS_MAX)
    assert world.broker.redeliveries.counts() == {(GROUP, TOPIC): 1}


@on_node(delay_ms_max=HOUR_MS)
async def test_the_longest_delay_of_a_nack_is_at_least_the_longest_lease(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world)).receipts
    with pytest.raises(InvalidDelay):
        await engine(world).nack(receipt, limits.INVISIBLE_MS_MAX + 1)
    assert await engine(world).nack(receipt, limits.INVISIBLE_MS_MAX)


@on_node()
async def test_the_longest_delay_of_an_ordered_nack_is_that_of_a_lease(world: World) -> None:
    await send(world, [b"a"])
    (receipt,) = (await pop(world, in_order=True)).receipts
    with pytest.raises(InvalidDelay, match="after=43200001 ms: between 0 and 43200000 ms for a message"):
        await engine(world).nack(receipt, limits.INVISIBLE_MS_MAX + 1)
    assert await engine(world).nack(receipt, limits.INVISIBLE_MS_MAX) == receipt
