"""Messages of a push consumer stay invisible while it is connected, and come back when it disconnects."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broker.on_node import batch
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, run_with_consumer
from tests.edges.grpc.wire import Wire, consumer_settings, definition, service
from tests.node_fixture import eventually, running_node

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.edges.grpc.edge import GrpcEdge
from timeball.edges.grpc.handlers import receipts as module
from timeball.edges.grpc.handlers.receipts import AHEAD_MS, FIRST_LEASE_MS, TOTAL_MS_MAX, Renewals
from timeball.io.clock import ManualClock
from timeball.model.errors import Unavailable

OK = definition.Code.OK


def renewals_of(consumer: Consumer) -> Renewals:
    return consumer.edge._renewals


async def receive_renewed(consumer: Consumer, **fields: Any) -> list[definition.Message]:
    """Receive messages as a push consumer does: the broker renews their leases."""
    return await consumer.receive(auto_renew=True, invisible_ms=None, **fields)


async def renew_due(consumer: Consumer) -> int:
    """Renew due messages, as the background task does each second, and return the number of renewals."""
    before = renewals_of(consumer).renewed
    await asyncio.gather(*renewals_of(consumer).start_due())
    return renewals_of(consumer).renewed - before


async def stay_connected(consumer: Consumer, ms: int, step_ms: int = 5_000) -> int:
    """Let time pass while the client is connected, and return the number of renewals."""
    renewed = 0
    for _ in range(ms // step_ms):
        await consumer.pass_time(step_ms)
        renewed += await renew_due(consumer)
    return renewed


@run_with_consumer()
async def test_a_handle_is_valid_while_its_client_is_connected(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    assert message.system_properties.invisible_duration.ToMilliseconds() == FIRST_LEASE_MS
    renewed = await stay_connected(consumer, 30 * MINUTE_MS)
    assert 3 <= renewed <= 10  # each renewal is longer than the previous one
    assert await consumer.receive() == []
    assert (await consumer.ack(message)).status.code == OK
    assert len(renewals_of(consumer)) == 0
    await stay_connected(consumer, 30 * MINUTE_MS, MINUTE_MS)
    assert await consumer.receive() == []


@run_with_consumer()
async def test_without_renewal_it_comes_again(consumer: Consumer) -> None:
    """Control: nothing renews the message."""
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await consumer.pass_time(FIRST_LEASE_MS)
    assert len(await consumer.receive()) == 1
    assert (await consumer.ack(message)).status.code == definition.Code.INVALID_RECEIPT_HANDLE


@run_with_consumer()
async def test_a_renewed_message_counts_one_attempt(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await stay_connected(consumer, 10 * MINUTE_MS)
    changed = await consumer.change(message, 1_000)
    assert changed.status.code == OK and len(renewals_of(consumer)) == 0
    await consumer.pass_time(1_000)
    (again,) = await receive_renewed(consumer)
    assert again.system_properties.delivery_attempt == 2


@run_with_consumer()
async def test_a_renewed_message_can_become_a_dead_letter(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await stay_connected(consumer, 5 * MINUTE_MS)
    assert await consumer.dead_letter(message) == OK and len(renewals_of(consumer)) == 0
    assert len(await consumer.receive("readers-of-dead-letters", "%DLQ%g")) == 1


@run_with_consumer()
async def test_renewal_ends_after_the_maximum_time(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await stay_connected(consumer, TOTAL_MS_MAX - MINUTE_MS, AHEAD_MS)
    assert await consumer.receive() == []
    await stay_connected(consumer, 2 * MINUTE_MS)
    assert len(renewals_of(consumer)) == 0
    assert len(await consumer.receive()) == 1
    assert (await consumer.ack(message)).status.code == definition.Code.INVALID_RECEIPT_HANDLE


@run_with_consumer()
async def test_messages_of_a_client_without_settings_are_not_renewed(consumer: Consumer) -> None:
    await consumer.send()
    await receive_renewed(consumer)
    assert await stay_connected(consumer, FIRST_LEASE_MS) == 0
    assert len(await consumer.receive()) == 1 and len(renewals_of(consumer)) == 0


@run_with_consumer()
async def test_messages_of_a_removed_client_come_back_by_the_retry_policy(consumer: Consumer) -> None:
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([1_000, 2_000, 3_000]))
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
    consumer.connect()
    await consumer.send(2)
    first, second = await receive_renewed(consumer)
    await stay_connected(consumer, 2 * MINUTE_MS)
    assert (await consumer.ack(first)).status.code == OK
    consumer.edge.context.sessions.remove(consumer.name)
    await consumer.world.until(lambda: not renewals_of(consumer)._tasks, "its messages are given back")
    assert await consumer.receive() == []
    await consumer.pass_time(3_000)
    (again,) = await consumer.receive()
    assert again.system_properties.delivery_attempt == 2
    assert (await consumer.ack(second)).status.code == definition.Code.INVALID_RECEIPT_HANDLE
    assert len(renewals_of(consumer)) == 0


@run_with_consumer()
async def test_in_order_messages_of_a_removed_client_come_back_at_once(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    consumer.connect()
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    await receive_renewed(consumer, queue_id=0, batch_size=1)
    await stay_connected(consumer, 10 * MINUTE_MS)
    assert await consumer.receive() == []  # the other consumer holds it
    consumer.edge.context.sessions.remove(consumer.name)
    messages: list[definition.Message] = []
    while not messages:
        messages = await consumer.receive(wait_ms=1_000)
    assert [each.system_properties.message_id for each in messages] == ["a", "b"]


@run_with_consumer()
async def test_the_end_of_a_client_does_not_affect_messages_of_others(consumer: Consumer) -> None:
    other = Consumer(consumer.world, consumer.edge, "client-2")
    consumer.connect()
    other.connect()
    await consumer.send(2)
    await receive_renewed(consumer, batch_size=1)
    (theirs,) = await receive_renewed(other, batch_size=1)
    consumer.edge.context.sessions.remove(consumer.name)
    await stay_connected(consumer, 5 * MINUTE_MS)
    assert (await other.ack(theirs)).status.code == OK


@run_with_consumer()
async def test_an_acknowledgement_during_a_renewal_succeeds(consumer: Consumer) -> None:
    """The acknowledgement succeeds, whether it begins before or during a renewal."""
    consumer.connect()
    overlapped = 0
    for turns in range(12):
        for answer_first in (True, False):
            await consumer.send()
            (message,) = await receive_renewed(consumer)
            await consumer.pass_time(FIRST_LEASE_MS - AHEAD_MS + 1_000)
            renewal_tasks = [] if answer_first else renewals_of(consumer).start_due()
            answer = asyncio.create_task(consumer.ack(message)) if answer_first else None
            for _ in range(turns):
                await asyncio.sleep(0)
            renewal_tasks = renewal_tasks or renewals_of(consumer).start_due()
            overlapped += any(not task.done() for task in renewal_tasks)
            answer = answer or asyncio.create_task(consumer.ack(message))
            assert (await answer).status.code == OK
            await asyncio.gather(*renewal_tasks)
    assert overlapped  # otherwise the test has shown nothing
    await stay_connected(consumer, 15 * MINUTE_MS, MINUTE_MS)
    assert await consumer.receive() == []


@run_with_consumer()
async def test_a_renewal_that_fails_is_tried_again(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await consumer.pass_time(FIRST_LEASE_MS - AHEAD_MS + 1_000)
    engine = consumer.world.broker.consuming
    change, failures = engine.change_invisible_time, []

    async def failing(*args: Any, **options: Any) -> Any:
        failures.append(args)
        raise Unavailable("not now")

    engine.change_invisible_time = failing
    await renew_due(consumer)
    engine.change_invisible_time = change
    assert len(failures) == 1
    await consumer.pass_time(1_000)
    assert await renew_due(consumer) == 1
    await consumer.pass_time(AHEAD_MS)
    assert (await consumer.ack(message)).status.code == OK


@run_with_consumer()
async def test_after_a_failed_acknowledgement_the_message_is_renewed_again(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send()
    (message,) = await receive_renewed(consumer)
    await stay_connected(consumer, 2 * MINUTE_MS)
    engine = consumer.world.broker.consuming
    acknowledge = engine.acknowledge

    async def failing(receipts: Any) -> Any:
        raise Unavailable("not now")

    engine.acknowledge = failing
    assert (await consumer.ack(message)).status.code == definition.Code.HA_NOT_AVAILABLE
    engine.acknowledge = acknowledge
    await stay_connected(consumer, 20 * MINUTE_MS)
    assert (await consumer.ack(message)).status.code == OK


def test_renewed_messages_are_limited_per_client_and_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWED_PER_CLIENT_MAX", 3)
    monkeypatch.setattr(module, "RENEWED_MAX", 5)

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.send(12)
        for name, expected in (("a", 3), ("b", 5), ("c", 5)):
            other = Consumer(consumer.world, consumer.edge, name)
            other.connect()
            await receive_renewed(other, batch_size=4)
            assert len(renewals_of(consumer)) == expected
        await stay_connected(consumer, 2 * MINUTE_MS)
        assert len(await consumer.receive()) == 12 - 5

    check()


@run_with_consumer()
async def test_after_a_restart_messages_are_redelivered_after_their_last_renewal(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send(2)
    answered, left = await receive_renewed(consumer)
    await stay_connected(consumer, 2 * MINUTE_MS)
    await consumer.edge.close()
    await consumer.world.restart()
    other = Consumer(consumer.world, GrpcEdge(consumer.world.broker))
    other.connect()
    assert await receive_renewed(other) == []  # their last renewal is not over
    assert (await other.ack(answered)).status.code == OK  # the handle is valid as long
    await stay_connected(other, 4 * MINUTE_MS)
    (again,) = await receive_renewed(other)
    assert again.system_properties.delivery_attempt == 2
    assert (await other.ack(left)).status.code == definition.Code.INVALID_RECEIPT_HANDLE
    assert (await other.ack(again)).status.code == OK
    await stay_connected(other, 20 * MINUTE_MS, MINUTE_MS)
    assert await receive_renewed(other) == []
    await other.edge.close()


@run_with_consumer()
async def test_many_due_messages_are_all_renewed_with_limited_concurrency(consumer: Consumer) -> None:
    consumer.connect()
    await consumer.send(300)
    messages = await receive_renewed(consumer, batch_size=300)
    await consumer.pass_time(FIRST_LEASE_MS - AHEAD_MS + 1_000)
    renewal_tasks = renewals_of(consumer).start_due()
    assert len(renewal_tasks) == module.RENEWING_MAX < len(messages)
    # An acknowledgement amid the renewals does not wait for all of them.
    assert (await consumer.ack(*messages[:10])).status.code == OK
    assert not all(task.done() for task in renewal_tasks)
    await asyncio.gather(*renewal_tasks)
    assert 290 <= renewals_of(consumer).renewed <= 300 and not renewals_of(consumer)._ready
    await consumer.pass_time(AHEAD_MS)
    assert (await consumer.ack(*messages[10:])).status.code == OK


def test_nothing_is_kept_of_settled_messages() -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        consumer.connect()
        for _ in range(5):
            await consumer.send(10)
            await consumer.ack(*await receive_renewed(consumer))
        renewals = renewals_of(consumer)
        assert not renewals._held and not renewals._by_client and not renewals._due

    check()


def test_the_background_task_renews_messages_of_a_connected_client(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:

        async def send() -> None:
            await node.broker.send(batch(1))

        def pass_time(ms: int) -> None:
            clock.advance(ms)
            node.loop.call_soon_threadsafe(node.broker.ticker.wake)

        node.run(send())
        assert node.node.edges is not None
        renewals = node.node.edges.grpc._renewals
        stream = wire.telemetry(consumer_settings(GROUP, definition.ClientType.PUSH_CONSUMER))
        (message,) = wire.receive(GROUP, TOPIC, auto_renew=True, invisible_ms=None)
        for _ in range(2):
            due_times_ms = [held.due_ms for held in renewals._held.values()]
            pass_time(due_times_ms[0] - AHEAD_MS - clock.wall)
            eventually(
                lambda earlier=due_times_ms: [held.due_ms for held in renewals._held.values()] != earlier,
                "the message is renewed",
            )
        entry = service.AckMessageEntry(receipt_handle=message.system_properties.receipt_handle)
        group, topic = definition.Resource(name=GROUP), definition.Resource(name=TOPIC)
        wire.ask_ok("AckMessage", service.AckMessageRequest(group=group, topic=topic, entries=[entry]))
        stream.end()
