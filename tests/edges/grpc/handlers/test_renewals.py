"""What a push consumer has in hand stays invisible while it is there, and comes back when it goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broker.on_node import batch
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, with_consumer
from tests.edges.grpc.wire import Wire, consumer_settings, d, s
from tests.node_fixture import eventually, running_node

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.edges.grpc.edge import GrpcEdge
from timeball.edges.grpc.handlers import renewals as module
from timeball.edges.grpc.handlers.renewals import AHEAD_MS, FIRST_MS, IN_ALL_MS, Renewals
from timeball.io.clock import ManualClock
from timeball.model.errors import Unavailable

OK = d.Code.OK


def renewals_of(consumer: Consumer) -> Renewals:
    return consumer.edge._renewals


async def push(consumer: Consumer, **fields: Any) -> list[d.Message]:
    return await consumer.receive(auto_renew=True, invisible_ms=None, **fields)


async def look(consumer: Consumer) -> int:
    """What the watch does each second; how many were renewed."""
    before = renewals_of(consumer).renewed
    await asyncio.gather(*renewals_of(consumer).start_due())
    return renewals_of(consumer).renewed - before


async def stay(consumer: Consumer, ms: int, step_ms: int = 5_000) -> int:
    """Time passes and the client is there; how many renewals that took."""
    renewed = 0
    for _ in range(ms // step_ms):
        await consumer.pass_time(step_ms)
        renewed += await look(consumer)
    return renewed


@with_consumer()
async def test_the_first_handle_is_good_for_as_long_as_the_client_is_there(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    assert message.system_properties.invisible_duration.ToMilliseconds() == FIRST_MS
    renewed = await stay(consumer, 30 * MINUTE_MS)
    assert 3 <= renewed <= 10  # each for longer than the one before
    assert await consumer.receive() == []
    assert (await consumer.ack(message)).status.code == OK
    assert len(renewals_of(consumer)) == 0
    await stay(consumer, 30 * MINUTE_MS, MINUTE_MS)
    assert await consumer.receive() == []


@with_consumer()
async def test_without_renewal_it_comes_again(consumer: Consumer) -> None:
    """The control: nobody looks."""
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await consumer.pass_time(FIRST_MS)
    assert len(await consumer.receive()) == 1
    assert (await consumer.ack(message)).status.code == d.Code.INVALID_RECEIPT_HANDLE


@with_consumer()
async def test_a_renewed_message_counts_one_attempt(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await stay(consumer, 10 * MINUTE_MS)
    changed = await consumer.change(message, 1_000)
    assert changed.status.code == OK and len(renewals_of(consumer)) == 0
    await consumer.pass_time(1_000)
    (again,) = await push(consumer)
    assert again.system_properties.delivery_attempt == 2


@with_consumer()
async def test_a_renewed_message_can_be_given_up(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await stay(consumer, 5 * MINUTE_MS)
    assert await consumer.dead_letter(message) == OK and len(renewals_of(consumer)) == 0
    assert len(await consumer.receive("undertaker", "%DLQ%g")) == 1


@with_consumer()
async def test_not_for_ever(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await stay(consumer, IN_ALL_MS - MINUTE_MS, AHEAD_MS)
    assert await consumer.receive() == []
    await stay(consumer, 2 * MINUTE_MS)
    assert len(renewals_of(consumer)) == 0
    assert len(await consumer.receive()) == 1
    assert (await consumer.ack(message)).status.code == d.Code.INVALID_RECEIPT_HANDLE


@with_consumer()
async def test_who_has_not_made_itself_known_has_a_minute(consumer: Consumer) -> None:
    await consumer.send()
    await push(consumer)
    assert await stay(consumer, FIRST_MS) == 0
    assert len(await consumer.receive()) == 1 and len(renewals_of(consumer)) == 0


@with_consumer()
async def test_what_a_client_had_when_it_went_comes_again_by_its_groups_policy(consumer: Consumer) -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1_000, 2_000, 3_000]))
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
    consumer.connect()
    await consumer.send(2)
    first, second = await push(consumer)
    await stay(consumer, 2 * MINUTE_MS)
    assert (await consumer.ack(first)).status.code == OK
    consumer.edge.context.sessions.remove(consumer.name)
    await consumer.world.until(lambda: not renewals_of(consumer)._tasks, "it is given back")
    assert await consumer.receive() == []
    await consumer.pass_time(3_000)
    (again,) = await consumer.receive()
    assert again.system_properties.delivery_attempt == 2
    assert (await consumer.ack(second)).status.code == d.Code.INVALID_RECEIPT_HANDLE
    assert len(renewals_of(consumer)) == 0


@with_consumer()
async def test_in_order_the_next_consumer_has_it_at_once(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    consumer.connect()
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    await push(consumer, queue_id=0, batch_size=1)
    await stay(consumer, 10 * MINUTE_MS)
    assert await consumer.receive() == []  # still in hand
    consumer.edge.context.sessions.remove(consumer.name)
    found: list[d.Message] = []
    while not found:
        found = await consumer.receive(wait_ms=1_000)
    assert [each.system_properties.message_id for each in found] == ["a", "b"]


@with_consumer()
async def test_another_clients_messages_stay_where_they_are(consumer: Consumer) -> None:
    other = Consumer(consumer.world, consumer.edge, "client-2")
    consumer.connect()
    other.connect()
    await consumer.send(2)
    await push(consumer, batch_size=1)
    (theirs,) = await push(other, batch_size=1)
    consumer.edge.context.sessions.remove(consumer.name)
    await stay(consumer, 5 * MINUTE_MS)
    assert (await other.ack(theirs)).status.code == OK


@with_consumer()
async def test_an_answer_and_a_renewal_at_the_same_time(consumer: Consumer) -> None:
    """Whichever is first, the answer counts: the handle is resolved behind the renewal."""
    consumer.connect()
    overlapped = 0
    for turns in range(12):
        for answer_first in (True, False):
            await consumer.send()
            (message,) = await push(consumer)
            await consumer.pass_time(FIRST_MS - AHEAD_MS + 1_000)
            begun = [] if answer_first else renewals_of(consumer).start_due()
            answer = asyncio.create_task(consumer.ack(message)) if answer_first else None
            for _ in range(turns):
                await asyncio.sleep(0)
            begun = begun or renewals_of(consumer).start_due()
            overlapped += any(not task.done() for task in begun)
            answer = answer or asyncio.create_task(consumer.ack(message))
            assert (await answer).status.code == OK
            await asyncio.gather(*begun)
    assert overlapped  # else this has shown nothing
    await stay(consumer, 15 * MINUTE_MS, MINUTE_MS)
    assert await consumer.receive() == []


@with_consumer()
async def test_a_renewal_that_fails_is_tried_again(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await consumer.pass_time(FIRST_MS - AHEAD_MS + 1_000)
    engine = consumer.world.broker.consuming
    change, failures = engine.change_invisible_time, []

    async def failing(*args: Any, **how: Any) -> Any:
        failures.append(args)
        raise Unavailable("not now")

    engine.change_invisible_time = failing
    await look(consumer)
    engine.change_invisible_time = change
    assert len(failures) == 1
    await consumer.pass_time(1_000)
    assert await look(consumer) == 1
    await consumer.pass_time(AHEAD_MS)
    assert (await consumer.ack(message)).status.code == OK


@with_consumer()
async def test_an_answer_that_fails_leaves_it_in_hand(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await push(consumer)
    await stay(consumer, 2 * MINUTE_MS)
    engine = consumer.world.broker.consuming
    acknowledge = engine.acknowledge

    async def failing(receipts: Any) -> Any:
        raise Unavailable("not now")

    engine.acknowledge = failing
    assert (await consumer.ack(message)).status.code == d.Code.HA_NOT_AVAILABLE
    engine.acknowledge = acknowledge
    await stay(consumer, 20 * MINUTE_MS)
    assert (await consumer.ack(message)).status.code == OK


def test_a_client_has_so_many_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWED_PER_CLIENT_MAX", 3)
    monkeypatch.setattr(module, "RENEWED_MAX", 5)

    @with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.send(12)
        for name, expected in (("a", 3), ("b", 5), ("c", 5)):
            other = Consumer(consumer.world, consumer.edge, name)
            other.connect()
            await push(other, batch_size=4)
            assert len(renewals_of(consumer)) == expected
        await stay(consumer, 2 * MINUTE_MS)
        assert len(await consumer.receive()) == 12 - 5

    check()


@with_consumer()
async def test_after_a_restart_a_renewed_message_comes_again_once(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send(2)
    answered, left = await push(consumer)
    await stay(consumer, 2 * MINUTE_MS)
    await consumer.edge.close()
    await consumer.world.restart()
    other = Consumer(consumer.world, GrpcEdge(consumer.world.broker))
    other.connect()
    assert await push(other) == []  # still within the time that it was renewed for
    assert (await other.ack(answered)).status.code == OK  # the first handle is good for as long as it waits
    await stay(other, 4 * MINUTE_MS)
    (again,) = await push(other)
    assert again.system_properties.delivery_attempt == 2
    assert (await other.ack(left)).status.code == d.Code.INVALID_RECEIPT_HANDLE
    assert (await other.ack(again)).status.code == OK
    await stay(other, 20 * MINUTE_MS, MINUTE_MS)
    assert await push(other) == []
    await other.edge.close()


@with_consumer()
async def test_a_crowd_is_renewed_by_few_at_a_time_and_all_of_it(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send(300)
    messages = await push(consumer, batch_size=300)
    await consumer.pass_time(FIRST_MS - AHEAD_MS + 1_000)
    begun = renewals_of(consumer).start_due()
    assert len(begun) == module.RENEWING_MAX < len(messages)
    # Whoever answers in the middle of that is not behind all of it.
    assert (await consumer.ack(*messages[:10])).status.code == OK
    assert not all(task.done() for task in begun)
    await asyncio.gather(*begun)
    assert 290 <= renewals_of(consumer).renewed <= 300 and not renewals_of(consumer)._crowd
    await consumer.pass_time(AHEAD_MS)
    assert (await consumer.ack(*messages[10:])).status.code == OK


def test_nothing_is_kept_of_what_is_answered() -> None:
    @with_consumer()
    async def check(consumer: Consumer) -> None:
        consumer.connect()
        for _ in range(5):
            await consumer.send(10)
            await consumer.ack(*await push(consumer))
        kept = renewals_of(consumer)
        assert not kept._held and not kept._of_client and not kept._due

    check()


def test_the_watch_renews_by_itself_over_the_wire(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:

        async def send() -> None:
            await node.broker.send(batch(1))

        def pass_time(ms: int) -> None:
            clock.advance(ms)
            node.loop.call_soon_threadsafe(node.broker.ticker.wake)

        node.run(send())
        assert node.node.edges is not None
        kept = node.node.edges.grpc._renewals
        stream = wire.telemetry(consumer_settings(GROUP, d.ClientType.PUSH_CONSUMER))
        (message,) = wire.receive(GROUP, TOPIC, auto_renew=True, invisible_ms=None)
        for _ in range(2):
            before = [held.due_ms for held in kept._held.values()]
            pass_time(before[0] - AHEAD_MS - clock.wall)
            eventually(lambda b=before: [held.due_ms for held in kept._held.values()] != b, "it is renewed")
        entry = s.AckMessageEntry(receipt_handle=message.system_properties.receipt_handle)
        group, topic = d.Resource(name=GROUP), d.Resource(name=TOPIC)
        wire.ask_ok("AckMessage", s.AckMessageRequest(group=group, topic=topic, entries=[entry]))
        stream.end()
