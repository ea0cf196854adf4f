"""ReceiveMessage: the messages, refusals, and clients that disconnect or do not read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.broker.on_node import batch
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, run_with_consumer
from tests.edges.grpc.wire import Wire, definition, receive_request, service
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import WRITE, TopicConfig
from timeball.broker.service import Broker
from timeball.edges.grpc import edge
from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.http2 import frames
from timeball.model import limits

Code = definition.Code
LARGE_BYTES = 1 << 20
CANCEL = (8).to_bytes(4, "big")  # an error code of HTTP/2 that Timeball never sends


def ids(messages: list[definition.Message]) -> list[str]:
    """Return the ids of messages."""
    return [each.system_properties.message_id for each in messages]


# ---- received messages ---------------------------------------------------------------------------------------


@run_with_consumer()
async def test_responses_are_a_status_the_messages_and_the_delivery_time(consumer: Consumer) -> None:
    await consumer.send(2)
    responses = await consumer.responses("ReceiveMessage", receive_request(GROUP, TOPIC, invisible_ms=5_000))
    kinds = [each.WhichOneof("content") for each in responses]
    assert kinds == ["status", "message", "message", "delivery_timestamp"]
    assert responses[0].status.code == Code.OK
    assert responses[3].delivery_timestamp.ToMilliseconds() == consumer.world.clock.wall
    system = responses[1].message.system_properties
    assert responses[1].message.topic.name == TOPIC and system.receipt_handle
    assert system.invisible_duration.ToMilliseconds() == 5_000 and system.delivery_attempt == 1


@run_with_consumer()
async def test_without_messages_there_is_one_response_with_the_status(consumer: Consumer) -> None:
    await consumer.send()
    await consumer.receive()
    (only,) = await consumer.responses("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=0))
    assert only.status.code == Code.MESSAGE_NOT_FOUND


@run_with_consumer()
async def test_a_consumer_waits_for_the_first_message(consumer: Consumer) -> None:
    waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
    await consumer.world.until(lambda: consumer.world.broker.consuming.waiting_receives, "the consumer waits")
    await consumer.send(unique_key=["id-1"])
    assert ids(await waiting) == ["id-1"]


@run_with_consumer()
async def test_a_delayed_message_is_received_at_its_due_time(consumer: Consumer) -> None:
    due_ms = consumer.world.clock.wall + 1_234
    await consumer.send(due_ms=[due_ms])
    assert await consumer.receive() == []
    await consumer.pass_time(1_233)
    assert await consumer.receive() == []
    await consumer.pass_time(1)
    (message,) = await consumer.receive()
    system = message.system_properties
    assert system.message_type == definition.MessageType.DELAY
    assert system.delivery_timestamp.ToMilliseconds() == due_ms <= system.store_timestamp.ToMilliseconds()


@run_with_consumer()
async def test_a_batch_has_at_most_the_requested_size(consumer: Consumer) -> None:
    await consumer.send(10)
    assert [len(await consumer.receive(batch_size=4)) for _ in range(4)] == [4, 4, 2, 0]


@run_with_consumer()
async def test_messages_of_any_queue_are_received(consumer: Consumer) -> None:
    """A simple consumer asks the queues in turn. A message must not wait until its queue is asked."""
    await consumer.send(4, queues=4, queue_id=[3, 3, 1, 0])
    assert len(await consumer.receive(queue_id=2)) == 4


@run_with_consumer()
async def test_a_push_consumer_in_order_receives_from_its_queue(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(3, queues=2, queue_id=[0, 1, 1], unique_key=["a", "b", "c"])
    assert ids(await consumer.receive(queue_id=1, auto_renew=True, invisible_ms=None)) == ["b", "c"]
    assert ids(await consumer.receive(queue_id=0, auto_renew=True, invisible_ms=None)) == ["a"]


@run_with_consumer()
async def test_two_consumers_in_order_never_have_the_same_queue_at_once(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    other = Consumer(consumer.world, consumer.edge, "client-2")
    await consumer.send(6, queues=1, unique_key=list("abcdef"))
    received_ids: list[str] = []
    for _ in range(6):
        mine, theirs = await asyncio.gather(consumer.receive(batch_size=1), other.receive(batch_size=1))
        assert len(mine) + len(theirs) == 1
        received_ids += ids(mine + theirs)
        await (consumer if mine else other).ack(*mine, *theirs)
    assert received_ids == list("abcdef")


@run_with_consumer()
async def test_in_order_a_repeated_attempt_gets_the_same_messages(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    assert ids(await consumer.receive(attempt_id="one")) == ["a", "b"]
    assert await consumer.receive(attempt_id="two") == []
    assert ids(await consumer.receive(attempt_id="one")) == ["a", "b"]


@run_with_consumer()
async def test_a_filter_by_tag_or_sql_selects_messages(consumer: Consumer) -> None:
    await consumer.send(
        3, tag=["red", "blue", None], unique_key=["a", "b", "c"],
        properties=["price\x015\x02", "price\x0150\x02", "price\x01500\x02"],
    )  # fmt: skip
    assert ids(await consumer.receive("g1", filter_text="red || green")) == ["a"]
    assert sorted(ids(await consumer.receive("g2", filter_text="price > 10", sql=True))) == ["b", "c"]
    assert len(await consumer.receive("g3", filter_text="")) == 3


@run_with_consumer()
async def test_each_group_receives_every_message(consumer: Consumer) -> None:
    await consumer.send()
    assert len(await consumer.receive("g1")) == len(await consumer.receive("g2")) == 1


@run_with_consumer()
async def test_a_namespace_is_part_of_the_names(consumer: Consumer) -> None:
    await consumer.world.broker.send(batch(1, topic=["shop%orders"]))
    request = receive_request(GROUP, TOPIC, wait_ms=0)
    request.group.resource_namespace = request.message_queue.topic.resource_namespace = "shop"
    responses = await consumer.responses("ReceiveMessage", request)
    assert responses[1].message.topic == definition.Resource(resource_namespace="shop", name="orders")
    assert consumer.world.broker.tables.groups.find_group("shop%g") is not None


# ---- refused requests ----------------------------------------------------------------------------------------


def request_with(**fields: Any) -> service.ReceiveMessageRequest:
    """Return a receive request that does not wait, with these fields."""
    return receive_request(GROUP, TOPIC, **{"wait_ms": 0, **fields})


def with_duration(name: str, seconds: int, nanos: int = 0) -> service.ReceiveMessageRequest:
    """Return a receive request with a duration in the field `name`."""
    request = request_with()
    getattr(request, name).CopyFrom(Duration(seconds=seconds, nanos=nanos))
    return request


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (service.ReceiveMessageRequest(), Code.ILLEGAL_CONSUMER_GROUP),
        (receive_request("no name", TOPIC), Code.ILLEGAL_CONSUMER_GROUP),
        (receive_request(GROUP, "no/topic"), Code.ILLEGAL_TOPIC),
        (request_with(batch_size=0), Code.BAD_REQUEST),
        (request_with(batch_size=-5), Code.BAD_REQUEST),
        (request_with(batch_size=(1 << 31) - 1), Code.BAD_REQUEST),
        (request_with(queue_id=99), Code.BAD_REQUEST),
        (request_with(queue_id=-2), Code.BAD_REQUEST),
        (request_with(attempt_id="x" * 1_000), Code.BAD_REQUEST),
        (request_with(invisible_ms=None), Code.ILLEGAL_INVISIBLE_TIME),
        (request_with(invisible_ms=0), Code.ILLEGAL_INVISIBLE_TIME),
        (request_with(invisible_ms=-60_000), Code.ILLEGAL_INVISIBLE_TIME),
        (request_with(invisible_ms=limits.INVISIBLE_MS_MAX + 1), Code.ILLEGAL_INVISIBLE_TIME),
        (with_duration("invisible_duration", 1 << 62), Code.ILLEGAL_INVISIBLE_TIME),
        (with_duration("invisible_duration", 60, -5), Code.ILLEGAL_INVISIBLE_TIME),
        (request_with(wait_ms=-1), Code.ILLEGAL_POLLING_TIME),
        (with_duration("long_polling_timeout", -(1 << 63)), Code.ILLEGAL_POLLING_TIME),
        (with_duration("long_polling_timeout", 5, -(1 << 31)), Code.ILLEGAL_POLLING_TIME),
        (request_with(filter_text="price >", sql=True), Code.ILLEGAL_FILTER_EXPRESSION),
        (request_with(filter_text="x" * (limits.FILTER_BYTES_MAX + 1)), Code.ILLEGAL_FILTER_EXPRESSION),
    ],
)
def test_an_invalid_receive_is_refused_with_code_and_text(
    request_: service.ReceiveMessageRequest, code: int
) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.world.broker.create_topic(TOPIC, 2)
        (only,) = await consumer.responses("ReceiveMessage", request_)
        assert only.status.code == code and only.status.message

    check()


@run_with_consumer()
async def test_a_filter_of_an_unknown_type_is_refused(consumer: Consumer) -> None:
    await consumer.world.broker.create_topic(TOPIC, 2)
    request = request_with()
    request.filter_expression.type = 77
    assert await consumer.refused(request) == Code.ILLEGAL_FILTER_EXPRESSION


@run_with_consumer()
async def test_a_client_without_an_id_is_refused(consumer: Consumer) -> None:
    consumer.name = ""
    assert await consumer.refused(request_with()) == Code.CLIENT_ID_REQUIRED


@run_with_consumer()
async def test_a_disabled_group_and_an_unreadable_topic_are_forbidden(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup("off", consume_enable=False))
    consumer.world.broker.tables.topics.configure("written", TopicConfig(1, 1, perm=WRITE))
    assert await consumer.refused(receive_request("off", TOPIC)) == Code.FORBIDDEN
    assert await consumer.refused(receive_request(GROUP, "written")) == Code.FORBIDDEN


@run_with_consumer()
async def test_a_receive_does_not_create_a_topic(consumer: Consumer) -> None:
    for name in (TOPIC, "%DLQ%g", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102"):
        assert await consumer.refused(receive_request(GROUP, name)) == Code.TOPIC_NOT_FOUND
    assert not consumer.world.broker.topics().keys() & {TOPIC, "%DLQ%g"}


# ---- clients that disconnect, and clients that do not read -----------------------------------------------------


def held(broker: Broker) -> int:
    """How many messages members of the group hold."""
    return sum(queue.held_rows for queue in broker.consuming.leases.all() if queue.group == GROUP)


@run_with_consumer()
async def test_messages_that_a_client_has_not_read_come_back_at_once(consumer: Consumer) -> None:
    await consumer.send(3)
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), request_with())
    for _ in range(2):
        await anext(responses)
    await responses.aclose()
    await consumer.world.until(lambda: held(consumer.world.broker) == 0, "the messages are back")
    messages = await consumer.receive()
    assert len(messages) == 3
    assert {each.system_properties.delivery_attempt for each in messages} == {1}  # no attempt is counted


@run_with_consumer()
async def test_in_order_unread_messages_are_delivered_again_first(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), request_with())
    await anext(responses)
    await responses.aclose()
    messages = await consumer.receive()
    assert ids(messages) == ["a", "b"] and messages[0].system_properties.delivery_attempt == 1


@run_with_consumer()
async def test_a_client_that_has_read_all_messages_holds_them(consumer: Consumer) -> None:
    await consumer.send(2)
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), request_with())
    for _ in range(4):
        await anext(responses)
    await responses.aclose()
    assert await consumer.receive() == []


@run_with_consumer()
async def test_a_cancelled_wait_takes_no_message(consumer: Consumer) -> None:
    waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
    await consumer.world.until(lambda: consumer.world.broker.consuming.waiting_receives, "the consumer waits")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert consumer.world.broker.consuming.waiting_receives == 0
    await consumer.send()
    assert len(await consumer.receive()) == 1


@run_with_consumer()
async def test_a_call_cancelled_at_any_moment_loses_no_message(consumer: Consumer) -> None:
    """The call is cancelled a varying number of loop turns after the send: before, during and after the hand-out."""
    given_back = 0
    for turns in range(60):
        waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
        await consumer.world.until(lambda: consumer.world.broker.consuming.waiting_receives, "the call waits")
        await consumer.send(unique_key=[f"id-{turns}"])
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        (mine,) = await asyncio.gather(waiting, return_exceptions=True)
        messages = mine if isinstance(mine, list) else await consumer.receive(wait_ms=20_000)
        given_back += messages is not mine
        assert ids(messages) == [f"id-{turns}"] and messages[0].system_properties.delivery_attempt == 1
        assert (await consumer.ack(*messages)).status.code == Code.OK
    assert given_back
    await consumer.pass_time(10 * MINUTE_MS)
    assert await consumer.receive() == []


def test_unread_responses_of_an_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "UNREAD_BYTES_MAX", 15_000)

    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        other = Consumer(consumer.world, consumer.edge, "client-2", "10.0.0.2")
        await consumer.send(body=[bytes(10_000)])
        await consumer.world.broker.create_topic("later", 1)
        waiting = asyncio.create_task(
            consumer.responses("ReceiveMessage", receive_request(GROUP, "later", wait_ms=20_000))
        )
        await consumer.world.until(lambda: consumer.world.broker.consuming.waiting_receives, "the call waits")
        responses: Any = consumer.edge.dispatch.stream(
            "ReceiveMessage", consumer.call(), request_with(batch_size=1)
        )
        await anext(responses)
        await consumer.send()
        assert await consumer.refused(request_with()) == Code.TOO_MANY_REQUESTS
        await consumer.world.broker.send(batch(1, topic=["later"]))
        (late,) = await waiting  # refused after its wait. Its message is not lost
        assert late.status.code == Code.TOO_MANY_REQUESTS
        assert len(await other.receive(topic="later", wait_ms=20_000)) == 1
        # This client reads its responses, so it is not refused.
        assert len(await other.receive(batch_size=1)) == 1
        await responses.aclose()
        assert len(await consumer.receive(wait_ms=20_000)) == 1

    check()


# ---- over the wire ---------------------------------------------------------------------------------------------


def fill(node: RunningNode, count: int, body: bytes = b"body") -> None:
    async def send() -> None:
        await node.broker.send(batch(count, body=[body] * count))

    node.run(send())


def test_messages_are_received_and_acknowledged_over_the_wire(node: RunningNode, wire: Wire) -> None:
    fill(node, 3)
    messages = wire.receive(GROUP, TOPIC)
    assert len(messages) == 3
    entries = [
        service.AckMessageEntry(receipt_handle=each.system_properties.receipt_handle) for each in messages
    ]
    wire.ask_ok(
        "AckMessage",
        service.AckMessageRequest(
            group=definition.Resource(name=GROUP), topic=definition.Resource(name=TOPIC), entries=entries
        ),
    )
    assert wire.receive(GROUP, TOPIC, wait_ms=0) == []


def test_a_long_poll_is_answered_before_the_deadline_over_the_wire(node: RunningNode, wire: Wire) -> None:
    fill(node, 1)
    wire.receive(GROUP, TOPIC)
    call = wire.stream("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=20_000), timeout_s=3.0)
    assert [each.status.code for each in call] == [Code.MESSAGE_NOT_FOUND]


def test_a_client_that_does_not_read_does_not_delay_others(tmp_path: Path) -> None:
    """The response is much larger than the window of the stream. Its messages are redelivered after a reset.

    The client is not gRPC's own, which accepts megabytes that its caller has not read. It never raises its window.
    """
    with (
        running_node(tmp_path / "data", segment_bytes=64 << 20) as node,
        RawClient(node, greets=False) as not_reading,
        Wire.to(node, "reading") as reading,
    ):
        fill(node, 6, bytes(LARGE_BYTES))
        not_reading.send(frames.PREFACE + frames.settings({}))
        stuck = not_reading.headers(
            headers=fields(f"/{SERVICE_NAME}/ReceiveMessage", x_mq_client_id="not_reading")
        )
        not_reading.data(stuck, message(receive_request(GROUP, TOPIC).SerializeToString()))
        eventually(lambda: held(node.broker) == 6, "the client has received the messages")
        for _ in range(3):
            fill(node, 5)
            messages = reading.receive(GROUP, TOPIC, wait_ms=10_000)
            assert messages and {received.body for received in messages} == {b"body"}
        not_reading.send(frames.frame(frames.RST_STREAM, 0, stuck, CANCEL))
        redelivered: list[definition.Message] = []
        eventually(
            lambda: redelivered.extend(reading.receive(GROUP, TOPIC, wait_ms=1_000)) or len(redelivered) >= 6,
            "all messages are redelivered",
        )
        large = [received for received in redelivered if len(received.body) == LARGE_BYTES]
        assert len(large) == 6 and {received.system_properties.delivery_attempt for received in large} == {1}


def test_many_waiting_calls_do_not_delay_other_calls(node: RunningNode, wire: Wire) -> None:
    node.run(node.broker.create_topic("elsewhere"))
    with Wire.to(node, "patient") as patient:
        waiting = [
            patient.stream("ReceiveMessage", receive_request(f"g{n}", "elsewhere", wait_ms=20_000))
            for n in range(200)
        ]
        eventually(lambda: node.broker.consuming.waiting_receives == 200, "all calls wait")
        fill(node, 1)
        assert len(wire.receive(GROUP, TOPIC, wait_ms=10_000)) == 1
        for call in waiting:
            call.cancel()
        eventually(lambda: node.broker.consuming.waiting_receives == 0, "no call waits")


def test_a_stop_ends_waiting_calls(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        node.run(node.broker.create_topic(TOPIC))
        wire = Wire.to(node)
        waiting = wire.stream("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=20_000))
        eventually(lambda: node.broker.consuming.waiting_receives, "the call waits")
    with pytest.raises(grpc.RpcError):
        list(waiting)
    wire.close()


@run_with_consumer()
async def test_all_is_received_once_by_many(consumer: Consumer) -> None:
    """Control of the harness: ten consumers receive a hundred messages at once, each message once."""
    await consumer.send(100, unique_key=[f"id-{n}" for n in range(100)])
    consumers = [Consumer(consumer.world, consumer.edge, f"client-{n}") for n in range(10)]
    batches = await asyncio.gather(*(each.receive(batch_size=15) for each in consumers))
    received_ids = [name for batch_ in batches for name in ids(batch_)]
    assert sorted(received_ids) == sorted(f"id-{n}" for n in range(100))
    await consumer.pass_time(MINUTE_MS)
    assert len([1 for _ in range(10) for _ in await consumer.receive(batch_size=15)]) == 100


@run_with_consumer()
async def test_a_new_group_begins_at_the_end_if_configured_so(consumer: Consumer) -> None:
    groups = consumer.world.broker.tables.groups
    groups.update(SubscriptionGroup("late", consume_from_min_enable=False))
    await consumer.send(3)
    assert len(await consumer.receive("early")) == 3
    assert await consumer.receive("late") == []
    await consumer.send(2)
    assert len(await consumer.receive("late")) == 2
    # This has no effect, because the group is not new.
    groups.update(SubscriptionGroup("early", consume_from_min_enable=False))
    assert len(await consumer.receive("early")) == 2
    # A queue that is created later is read from its beginning.
    await consumer.world.broker.create_topic(TOPIC, 9)
    await consumer.send(1, queue_id=pa.array([8], pa.int32()))
    assert len(await consumer.receive("late")) == 1


@run_with_consumer()
async def test_the_queue_of_the_highest_priority_is_received_first(consumer: Consumer) -> None:
    broker = consumer.world.broker
    config = TopicConfig(attributes={"message.type": "PRIORITY"})
    await broker.create_topic(TOPIC, 4)
    broker.tables.topics.configure(TOPIC, config)
    for priority in (0, 3, 1, 9, 0, 2):
        system = definition.SystemProperties(
            message_id=f"{priority}", message_type=definition.MessageType.PRIORITY, priority=priority
        )
        request = service.SendMessageRequest(
            messages=[
                definition.Message(topic=definition.Resource(name=TOPIC), body=b"x", system_properties=system)
            ]
        )
        assert (await consumer.ask("SendMessage", request)).status.code == definition.Code.OK
    messages = [message for _ in range(3) for message in await consumer.receive(batch_size=2)]
    # 4 queues: the priorities from 3 on share the last queue, in which messages stay in the order of sending.
    assert [message.system_properties.priority for message in messages] == [3, 9, 2, 1, 0, 0]
    assert {message.system_properties.message_type for message in messages} == {
        definition.MessageType.PRIORITY
    }
    assert [message.system_properties.queue_id for message in messages] == [3, 3, 2, 1, 0, 0]
    assert not any(message.user_properties for message in messages)
