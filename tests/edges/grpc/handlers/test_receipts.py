"""AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue, and their effects on messages."""

from __future__ import annotations

import pytest
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, resource, run_with_consumer
from tests.edges.grpc.wire import consumer_settings, definition, service

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.broker.registry.rates import Stat, of_group
from timeball.edges.grpc.calls import store_settings
from timeball.model import limits

OK, INVALID = definition.Code.OK, definition.Code.INVALID_RECEIPT_HANDLE


def codes(response: service.AckMessageResponse) -> tuple[int, list[int]]:
    """Return the code of the response, and the codes of its entries."""
    return response.status.code, [entry.status.code for entry in response.entries]


def message_with_handle(text: str) -> definition.Message:
    return definition.Message(
        system_properties=definition.SystemProperties(message_id="m", receipt_handle=text)
    )


@run_with_consumer()
async def test_an_acknowledged_message_is_not_delivered_again(consumer: Consumer) -> None:
    await consumer.send(5)
    messages = await consumer.receive()
    assert len(messages) == 5
    assert codes(await consumer.ack(*messages)) == (OK, [OK] * 5)
    await consumer.pass_time(10 * MINUTE_MS)
    assert await consumer.receive() == []


@run_with_consumer()
async def test_an_unacknowledged_message_is_redelivered_with_the_next_attempt(consumer: Consumer) -> None:
    await consumer.send(unique_key=["id-1"])
    for attempt in (1, 2, 3):
        (message,) = await consumer.receive()
        assert message.system_properties.delivery_attempt == attempt
        assert message.system_properties.message_id == "id-1"
        assert await consumer.receive() == []  # the consumer holds it
        await consumer.pass_time()


@run_with_consumer()
async def test_each_handle_of_a_call_has_its_own_status(consumer: Consumer) -> None:
    await consumer.send(2)
    first, second = await consumer.receive()
    assert codes(await consumer.ack(first, message_with_handle("x"), second)) == (
        definition.Code.MULTIPLE_RESULTS,
        [OK, INVALID, OK],
    )
    assert codes(await consumer.ack(first, second)) == (OK, [OK, OK])  # the first answer may have been lost
    response = await consumer.ack(message_with_handle("x"))
    assert codes(response) == (INVALID, [INVALID])
    assert response.entries[0].message_id == "m" and response.entries[0].receipt_handle == "x"


@run_with_consumer()
async def test_the_same_handle_twice_in_a_call_is_acknowledged_once(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    assert codes(await consumer.ack(message, message)) == (OK, [OK, OK])
    rates = consumer.world.broker.rates
    assert rates.total(Stat.GROUP_ACK_NUMS, of_group(TOPIC, GROUP)) == 1


@run_with_consumer()
async def test_a_settled_message_can_be_acknowledged_again_but_not_changed(consumer: Consumer) -> None:
    await consumer.send(2)
    first, second = await consumer.receive()
    assert codes(await consumer.ack(first))[0] == OK
    assert await consumer.dead_letter(second) == OK
    await consumer.pass_time(30_000)
    assert codes(await consumer.ack(first, second)) == (OK, [OK, OK])
    for message in (first, second):  # their leases have ended
        assert (await consumer.change(message, 1_000)).status.code == INVALID
        assert await consumer.dead_letter(message) == INVALID


@run_with_consumer()
async def test_a_handle_is_invalid_for_another_group_or_topic(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    assert codes(await consumer.ack(message, group="h"))[0] == INVALID
    assert codes(await consumer.ack(message, topic="others"))[0] == INVALID
    assert codes(await consumer.ack(message))[0] == OK


@run_with_consumer()
async def test_a_handle_is_invalid_after_the_invisible_time(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    await consumer.pass_time()
    assert codes(await consumer.ack(message))[0] == INVALID
    assert (await consumer.change(message, 1_000)).status.code == INVALID
    assert await consumer.dead_letter(message) == INVALID
    (again,) = await consumer.receive()
    assert codes(await consumer.ack(again))[0] == OK


@run_with_consumer()
async def test_a_longer_invisible_time_keeps_the_handle_valid(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    changed = await consumer.change(message, 10 * MINUTE_MS)
    assert changed.status.code == OK
    await consumer.pass_time(9 * MINUTE_MS)
    assert await consumer.receive() == []
    assert changed.receipt_handle == message.system_properties.receipt_handle
    assert codes(await consumer.ack(message))[0] == OK
    # The same handle once more.
    assert codes(await consumer.ack(message_with_handle(changed.receipt_handle)))[0] == OK


@pytest.mark.parametrize("ms", [0, 10, 500, 1_000, 5_000])
def test_a_message_is_redelivered_after_the_changed_invisible_time(ms: int) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.send()
        (message,) = await consumer.receive()
        assert (await consumer.change(message, ms)).status.code == OK
        if ms:
            assert await consumer.receive() == []
        await consumer.pass_time(ms)
        (again,) = await consumer.receive()
        assert again.system_properties.delivery_attempt == 2

    check()


@pytest.mark.parametrize(
    ("ms", "pause_ms"), [(0, 7_000), (10, 7_000), (999, 7_000), (1_000, 1_000), (9_000, 9_000)]
)
def test_for_a_push_consumer_times_below_a_second_become_the_policy_s_pause(ms: int, pause_ms: int) -> None:
    """RocketMQ's Node client asks for no time, or for as many ms as the policy has seconds."""

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        policy = RetryPolicy(customized_retry_policy=CustomizedRetry([7_000]))
        consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, group_retry_policy=policy))
        settings = consumer_settings(GROUP, definition.ClientType.PUSH_CONSUMER)
        store_settings(
            consumer.edge.context.sessions, consumer.name, settings, consumer.edge.context.monotonic_ms()
        )
        await consumer.send()
        (message,) = await consumer.receive()
        assert (await consumer.change(message, ms)).status.code == OK
        await consumer.pass_time(pause_ms - 1)
        assert await consumer.receive() == []
        await consumer.pass_time(1)
        (again,) = await consumer.receive()
        assert again.system_properties.delivery_attempt == 2

    check()


@run_with_consumer()
async def test_a_suspended_delivery_counts_as_no_attempt(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    assert (await consumer.change(message, 1_000, suspend=True)).status.code == OK
    await consumer.pass_time(1_000)
    (again,) = await consumer.receive()
    assert again.system_properties.delivery_attempt == 1


@pytest.mark.parametrize("ms", [None, -1, limits.INVISIBLE_MS_MAX + 1])
def test_an_illegal_invisible_time_changes_nothing(ms: int | None) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.send()
        (message,) = await consumer.receive()
        assert (await consumer.change(message, ms)).status.code == definition.Code.ILLEGAL_INVISIBLE_TIME
        assert codes(await consumer.ack(message))[0] == OK

    check()


@run_with_consumer()
async def test_invalid_durations_are_refused(consumer: Consumer) -> None:
    await consumer.send()
    (message,) = await consumer.receive()
    for seconds, nanos in [(1, -1), (0, 2_000_000_000), (1 << 62, 0), (-(1 << 63), 0)]:
        request = service.ChangeInvisibleDurationRequest(
            group=resource(GROUP),
            topic=resource(TOPIC),
            receipt_handle=message.system_properties.receipt_handle,
        )
        request.invisible_duration.seconds, request.invisible_duration.nanos = seconds, nanos
        response = await consumer.ask("ChangeInvisibleDuration", request)
        assert response.status.code == definition.Code.ILLEGAL_INVISIBLE_TIME


@run_with_consumer()
async def test_after_the_last_attempt_a_message_becomes_a_dead_letter(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, retry_max_times=2))
    await consumer.send(unique_key=["id-1"])
    for attempt in (1, 2, 3):
        (message,) = await consumer.receive()
        assert message.system_properties.delivery_attempt == attempt
        await consumer.pass_time()
    assert await consumer.receive() == []
    (dead,) = await consumer.receive("readers-of-dead-letters", "%DLQ%g")
    system = dead.system_properties
    assert system.dead_letter_queue.topic == TOPIC and system.dead_letter_queue.message_id == "id-1"
    assert system.message_id == "id-1" and dead.topic.name == "%DLQ%g"


@run_with_consumer()
async def test_a_consumer_can_make_a_message_a_dead_letter(consumer: Consumer) -> None:
    await consumer.send(unique_key=["id-1"])
    (message,) = await consumer.receive()
    assert await consumer.dead_letter(message) == OK
    assert await consumer.dead_letter(message) == INVALID
    await consumer.pass_time(10 * MINUTE_MS)
    assert await consumer.receive() == []
    (dead,) = await consumer.receive("readers-of-dead-letters", "%DLQ%g")
    assert dead.system_properties.message_id == "id-1"


@run_with_consumer()
async def test_handles_in_order_settle_change_and_give_up_messages(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(3, queues=1, unique_key=["a", "b", "c"])
    (first,) = await consumer.receive(batch_size=1)
    assert await consumer.receive() == []  # the first message is not settled yet
    assert codes(await consumer.ack(first))[0] == OK
    (second,) = await consumer.receive(batch_size=1)
    assert second.system_properties.message_id == "b"
    changed = await consumer.change(second, 5_000)
    assert changed.status.code == OK and changed.receipt_handle
    await consumer.pass_time(5_000)
    (again,) = await consumer.receive(batch_size=1)
    assert (again.system_properties.message_id, again.system_properties.delivery_attempt) == ("b", 2)
    assert await consumer.dead_letter(again) == OK
    (third,) = await consumer.receive(batch_size=1)
    assert third.system_properties.message_id == "c"


@pytest.mark.parametrize("count", [0, limits.CANCELS_PER_REQUEST_MAX + 1])
def test_a_call_with_no_or_too_many_entries_is_refused(count: int) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        response = await consumer.ack(*[message_with_handle("x")] * count)
        assert response.status.code == definition.Code.BAD_REQUEST and not response.entries

    check()


@run_with_consumer()
async def test_empty_requests_with_receipts_are_refused(consumer: Consumer) -> None:
    for name, request in [
        ("AckMessage", service.AckMessageRequest()),
        ("ChangeInvisibleDuration", service.ChangeInvisibleDurationRequest()),
        ("ForwardMessageToDeadLetterQueue", service.ForwardMessageToDeadLetterQueueRequest()),
    ]:
        assert (await consumer.ask(name, request)).status.code == definition.Code.ILLEGAL_CONSUMER_GROUP


@run_with_consumer()
async def test_a_handle_is_valid_after_a_restart(consumer: Consumer) -> None:
    await consumer.send(2)
    first, second = await consumer.receive()
    await consumer.world.restart()
    other = Consumer(consumer.world, type(consumer.edge)(consumer.world.broker))
    assert codes(await other.ack(first))[0] == OK
    await other.pass_time()
    (again,) = await other.receive()
    assert again.system_properties.delivery_attempt == 2
    assert codes(await other.ack(second, again)) == (definition.Code.MULTIPLE_RESULTS, [INVALID, OK])
    await other.edge.close()
