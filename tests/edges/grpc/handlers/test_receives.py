"""ReceiveMessage: what is found, what is refused, and clients that go away or do not read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.broker.on_node import batch
from tests.edges.grpc.consumer import GROUP, MINUTE_MS, TOPIC, Consumer, with_consumer
from tests.edges.grpc.wire import Wire, d, receive_request, s
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topic import WRITE, TopicConfig
from timeball.edges.grpc import edge
from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.http2 import frames
from timeball.model import limits

Code = d.Code
LARGE_BYTES = 1 << 20
CANCEL = (8).to_bytes(4, "big")  # HTTP/2's code for it; ours never sends it


def ids(messages: list[d.Message]) -> list[str]:
    return [each.system_properties.message_id for each in messages]


# ---- what is found -------------------------------------------------------------------------------------------


@with_consumer()
async def test_an_answer_is_a_status_the_messages_and_when(consumer: Consumer) -> None:
    await consumer.send(2)
    found = await consumer.responses("ReceiveMessage", receive_request(GROUP, TOPIC, invisible_ms=5_000))
    kinds = [each.WhichOneof("content") for each in found]
    assert kinds == ["status", "message", "message", "delivery_timestamp"]
    assert found[0].status.code == Code.OK
    assert found[3].delivery_timestamp.ToMilliseconds() == consumer.world.clock.wall
    system = found[1].message.system_properties
    assert found[1].message.topic.name == TOPIC and system.receipt_handle
    assert system.invisible_duration.ToMilliseconds() == 5_000 and system.delivery_attempt == 1


@with_consumer()
async def test_nothing_is_one_status(consumer: Consumer) -> None:
    await consumer.send()
    await consumer.receive()
    (only,) = await consumer.responses("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=0))
    assert only.status.code == Code.MESSAGE_NOT_FOUND


@with_consumer()
async def test_a_consumer_waits_for_the_first_message(consumer: Consumer) -> None:
    waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
    await consumer.world.until(lambda: consumer.world.broker.waiters._count, "the consumer waits")
    await consumer.send(unique_key=["id-1"])
    assert ids(await waiting) == ["id-1"]


@with_consumer()
async def test_a_delayed_message_is_received_at_its_instant_and_says_so(consumer: Consumer) -> None:
    due_ms = consumer.world.clock.wall + 1_234
    await consumer.send(due_ms=[due_ms])
    assert await consumer.receive() == []
    await consumer.pass_time(1_233)
    assert await consumer.receive() == []
    await consumer.pass_time(1)
    (message,) = await consumer.receive()
    system = message.system_properties
    assert system.message_type == d.MessageType.DELAY
    assert system.delivery_timestamp.ToMilliseconds() == due_ms <= system.store_timestamp.ToMilliseconds()


@with_consumer()
async def test_batches_are_as_large_as_asked_for(consumer: Consumer) -> None:
    await consumer.send(10)
    assert [len(await consumer.receive(batch_size=4)) for _ in range(4)] == [4, 4, 2, 0]


@with_consumer()
async def test_any_queue_is_read_whichever_is_named(consumer: Consumer) -> None:
    """A simple consumer takes turns around a route's queues; its message must not wait for that."""
    await consumer.send(4, queues=4, queue_id=[3, 3, 1, 0])
    assert len(await consumer.receive(queue_id=2)) == 4


@with_consumer()
async def test_a_push_consumer_in_order_keeps_to_its_queue(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(3, queues=2, queue_id=[0, 1, 1], unique_key=["a", "b", "c"])
    assert ids(await consumer.receive(queue_id=1, auto_renew=True, invisible_ms=None)) == ["b", "c"]
    assert ids(await consumer.receive(queue_id=0, auto_renew=True, invisible_ms=None)) == ["a"]


@with_consumer()
async def test_two_consumers_in_order_never_have_the_same_queue_at_once(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    other = Consumer(consumer.world, consumer.edge, "client-2")
    await consumer.send(6, queues=1, unique_key=list("abcdef"))
    seen: list[str] = []
    for _ in range(6):
        mine, theirs = await asyncio.gather(consumer.receive(batch_size=1), other.receive(batch_size=1))
        assert len(mine) + len(theirs) == 1
        seen += ids(mine + theirs)
        await (consumer if mine else other).ack(*mine, *theirs)
    assert seen == list("abcdef")


@with_consumer()
async def test_in_order_an_attempt_that_got_no_answer_is_given_the_same_again(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    assert ids(await consumer.receive(attempt_id="one")) == ["a", "b"]
    assert await consumer.receive(attempt_id="two") == []
    assert ids(await consumer.receive(attempt_id="one")) == ["a", "b"]


@with_consumer()
async def test_filters_by_tag_and_by_sql(consumer: Consumer) -> None:
    await consumer.send(
        3, tag=["red", "blue", None], unique_key=["a", "b", "c"],
        properties=["price\x015\x02", "price\x0150\x02", "price\x01500\x02"],
    )  # fmt: skip
    assert ids(await consumer.receive("g1", filter_text="red || green")) == ["a"]
    assert sorted(ids(await consumer.receive("g2", filter_text="price > 10", sql=True))) == ["b", "c"]
    assert len(await consumer.receive("g3", filter_text="")) == 3


@with_consumer()
async def test_groups_have_their_own_messages(consumer: Consumer) -> None:
    await consumer.send()
    assert len(await consumer.receive("g1")) == len(await consumer.receive("g2")) == 1


@with_consumer()
async def test_a_namespace_is_part_of_the_names(consumer: Consumer) -> None:
    await consumer.world.broker.send(batch(1, topic=["shop%orders"]))
    request = receive_request(GROUP, TOPIC, wait_ms=0)
    request.group.resource_namespace = request.message_queue.topic.resource_namespace = "shop"
    found = await consumer.responses("ReceiveMessage", request)
    assert found[1].message.topic == d.Resource(resource_namespace="shop", name="orders")
    assert consumer.world.broker.tables.groups.find_group("shop%g") is not None


# ---- what is refused -----------------------------------------------------------------------------------------


def changed(**fields: Any) -> s.ReceiveMessageRequest:
    return receive_request(GROUP, TOPIC, **{"wait_ms": 0, **fields})


def with_duration(name: str, seconds: int, nanos: int = 0) -> s.ReceiveMessageRequest:
    request = changed()
    getattr(request, name).CopyFrom(Duration(seconds=seconds, nanos=nanos))
    return request


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (s.ReceiveMessageRequest(), Code.ILLEGAL_CONSUMER_GROUP),
        (receive_request("no name", TOPIC), Code.ILLEGAL_CONSUMER_GROUP),
        (receive_request(GROUP, "no/topic"), Code.ILLEGAL_TOPIC),
        (changed(batch_size=0), Code.BAD_REQUEST),
        (changed(batch_size=-5), Code.BAD_REQUEST),
        (changed(batch_size=(1 << 31) - 1), Code.BAD_REQUEST),
        (changed(queue_id=99), Code.BAD_REQUEST),
        (changed(queue_id=-2), Code.BAD_REQUEST),
        (changed(attempt_id="x" * 1_000), Code.BAD_REQUEST),
        (changed(invisible_ms=None), Code.ILLEGAL_INVISIBLE_TIME),
        (changed(invisible_ms=0), Code.ILLEGAL_INVISIBLE_TIME),
        (changed(invisible_ms=-60_000), Code.ILLEGAL_INVISIBLE_TIME),
        (changed(invisible_ms=limits.INVISIBLE_MS_MAX + 1), Code.ILLEGAL_INVISIBLE_TIME),
        (with_duration("invisible_duration", 1 << 62), Code.ILLEGAL_INVISIBLE_TIME),
        (with_duration("invisible_duration", 60, -5), Code.ILLEGAL_INVISIBLE_TIME),
        (changed(wait_ms=-1), Code.ILLEGAL_POLLING_TIME),
        (with_duration("long_polling_timeout", -(1 << 63)), Code.ILLEGAL_POLLING_TIME),
        (with_duration("long_polling_timeout", 5, -(1 << 31)), Code.ILLEGAL_POLLING_TIME),
        (changed(filter_text="price >", sql=True), Code.ILLEGAL_FILTER_EXPRESSION),
        (changed(filter_text="x" * (limits.FILTER_BYTES_MAX + 1)), Code.ILLEGAL_FILTER_EXPRESSION),
    ],
)
def test_what_cannot_be_is_refused_in_words(request_: s.ReceiveMessageRequest, code: int) -> None:
    @with_consumer()
    async def check(consumer: Consumer) -> None:
        await consumer.world.broker.create_topic(TOPIC, 2)
        (only,) = await consumer.responses("ReceiveMessage", request_)
        assert only.status.code == code and only.status.message

    check()


@with_consumer()
async def test_a_filter_of_no_kind_is_refused(consumer: Consumer) -> None:
    await consumer.world.broker.create_topic(TOPIC, 2)
    request = changed()
    request.filter_expression.type = 77
    assert await consumer.refused(request) == Code.ILLEGAL_FILTER_EXPRESSION


@with_consumer()
async def test_a_client_without_a_name_is_refused(consumer: Consumer) -> None:
    consumer.name = ""
    assert await consumer.refused(changed()) == Code.CLIENT_ID_REQUIRED


@with_consumer()
async def test_who_may_not_consume_is_told_so(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup("off", consume_enable=False))
    consumer.world.broker.tables.topics.configure("written", TopicConfig(1, 1, perm=WRITE))
    assert await consumer.refused(receive_request("off", TOPIC)) == Code.FORBIDDEN
    assert await consumer.refused(receive_request(GROUP, "written")) == Code.FORBIDDEN


@with_consumer()
async def test_a_consumer_makes_no_topic(consumer: Consumer) -> None:
    for name in (TOPIC, "%DLQ%g", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102"):
        assert await consumer.refused(receive_request(GROUP, name)) == Code.TOPIC_NOT_FOUND
    assert not consumer.world.broker.topics().keys() & {TOPIC, "%DLQ%g"}


# ---- clients that go away, and clients that do not read --------------------------------------------------------


@with_consumer()
async def test_what_a_client_has_not_got_is_given_back_at_once(consumer: Consumer) -> None:
    await consumer.send(3)
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), changed())
    for _ in range(2):
        await anext(responses)
    await responses.aclose()
    await consumer.world.until(
        lambda: (
            consumer.world.broker.tables.topics.find_topic("%RETRY%g_orders").queues[0].index.max_offset == 3
        ),
        "they are back",
    )
    found = await consumer.receive()
    assert len(found) == 3
    assert {each.system_properties.delivery_attempt for each in found} == {1}  # nobody has tried


@with_consumer()
async def test_in_order_it_is_the_same_message_that_comes_again(consumer: Consumer) -> None:
    consumer.world.broker.tables.groups.update(SubscriptionGroup(GROUP, consume_message_orderly=True))
    await consumer.send(2, queues=1, unique_key=["a", "b"])
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), changed())
    await anext(responses)
    await responses.aclose()
    found = await consumer.receive()
    assert ids(found) == ["a", "b"] and found[0].system_properties.delivery_attempt == 1


@with_consumer()
async def test_a_client_that_has_all_keeps_it(consumer: Consumer) -> None:
    await consumer.send(2)
    responses: Any = consumer.edge.dispatch.stream("ReceiveMessage", consumer.call(), changed())
    for _ in range(4):
        await anext(responses)
    await responses.aclose()
    assert await consumer.receive() == []


@with_consumer()
async def test_one_that_goes_while_it_waits_takes_nothing(consumer: Consumer) -> None:
    waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
    await consumer.world.until(lambda: consumer.world.broker.waiters._count, "the consumer waits")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert consumer.world.broker.waiters._count == 0
    await consumer.send()
    assert len(await consumer.receive()) == 1


@with_consumer()
async def test_one_that_goes_at_any_moment_loses_nothing(consumer: Consumer) -> None:
    """It is cut off so many turns of the loop after its message came: before, while and after it is handed out."""
    given_back = 0
    for turns in range(60):
        waiting = asyncio.create_task(consumer.receive(wait_ms=20_000))
        await consumer.world.until(lambda: consumer.world.broker.waiters._count, "it waits")
        await consumer.send(unique_key=[f"id-{turns}"])
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        (mine,) = await asyncio.gather(waiting, return_exceptions=True)
        found = mine if isinstance(mine, list) else await consumer.receive(wait_ms=20_000)
        given_back += found is not mine
        assert ids(found) == [f"id-{turns}"] and found[0].system_properties.delivery_attempt == 1
        assert (await consumer.ack(*found)).status.code == Code.OK
    assert given_back
    await consumer.pass_time(10 * MINUTE_MS)
    assert await consumer.receive() == []


def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "UNREAD_BYTES_MAX", 15_000)

    @with_consumer()
    async def check(consumer: Consumer) -> None:
        other = Consumer(consumer.world, consumer.edge, "client-2", "10.0.0.2")
        await consumer.send(body=[bytes(10_000)])
        await consumer.world.broker.create_topic("later", 1)
        waiting = asyncio.create_task(
            consumer.responses("ReceiveMessage", receive_request(GROUP, "later", wait_ms=20_000))
        )
        await consumer.world.until(lambda: consumer.world.broker.waiters._count, "it waits")
        responses: Any = consumer.edge.dispatch.stream(
            "ReceiveMessage", consumer.call(), changed(batch_size=1)
        )
        await anext(responses)
        await consumer.send()
        assert await consumer.refused(changed()) == Code.TOO_MANY_REQUESTS
        await consumer.world.broker.send(batch(1, topic=["later"]))
        (late,) = await waiting  # it had asked before, and nothing is lost of what it would have got
        assert late.status.code == Code.TOO_MANY_REQUESTS
        assert len(await other.receive(topic="later", wait_ms=20_000)) == 1
        assert len(await other.receive(batch_size=1)) == 1  # it reads, and so it is not held up
        await responses.aclose()
        assert len(await consumer.receive(wait_ms=20_000)) == 1

    check()


# ---- over the wire ---------------------------------------------------------------------------------------------


def fill(node: RunningNode, count: int, body: bytes = b"body") -> None:
    async def send() -> None:
        await node.broker.send(batch(count, body=[body] * count))

    node.run(send())


def test_a_message_over_the_wire(node: RunningNode, wire: Wire) -> None:
    fill(node, 3)
    found = wire.receive(GROUP, TOPIC)
    assert len(found) == 3
    entries = [s.AckMessageEntry(receipt_handle=each.system_properties.receipt_handle) for each in found]
    wire.ask_ok(
        "AckMessage",
        s.AckMessageRequest(group=d.Resource(name=GROUP), topic=d.Resource(name=TOPIC), entries=entries),
    )
    assert wire.receive(GROUP, TOPIC, wait_ms=0) == []


def test_the_answer_comes_before_the_deadline(node: RunningNode, wire: Wire) -> None:
    fill(node, 1)
    wire.receive(GROUP, TOPIC)
    call = wire.stream("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=20_000), timeout_s=3.0)
    assert [each.status.code for each in call] == [Code.MESSAGE_NOT_FOUND]


def test_one_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    """Its answer is many times what a stream's window holds, so it is stuck; and it is given back when it goes.

    gRPC's own client under load lets megabytes in that its caller has not read: this one never widens its window.
    """
    with (
        running_node(tmp_path / "data", segment_bytes=64 << 20) as node,
        RawClient(node, greets=False) as deaf,
        Wire.to(node, "keen") as keen,
    ):
        fill(node, 6, bytes(LARGE_BYTES))
        deaf.send(frames.PREFACE + frames.settings({}))
        stuck = deaf.headers(headers=fields(f"/{SERVICE_NAME}/ReceiveMessage", x_mq_client_id="deaf"))
        deaf.data(stuck, message(receive_request(GROUP, TOPIC).SerializeToString()))
        eventually(
            lambda: node.broker.tables.topics.find_topic("%RETRY%g_orders"), "it has been handed something"
        )
        for _ in range(3):
            fill(node, 5)
            found = keen.receive(GROUP, TOPIC, wait_ms=10_000)
            assert found and {each.body for each in found} == {b"body"}
        deaf.send(frames.frame(frames.RST_STREAM, 0, stuck, CANCEL))
        back: list[d.Message] = []
        eventually(
            lambda: back.extend(keen.receive(GROUP, TOPIC, wait_ms=1_000)) or len(back) >= 6, "all is back"
        )
        large = [each for each in back if len(each.body) == LARGE_BYTES]
        assert len(large) == 6 and {each.system_properties.delivery_attempt for each in large} == {1}


def test_many_who_wait_do_not_hold_up_one_who_sends_and_receives(node: RunningNode, wire: Wire) -> None:
    node.run(node.broker.create_topic("elsewhere"))
    with Wire.to(node, "patient") as patient:
        waiting = [
            patient.stream("ReceiveMessage", receive_request(f"g{n}", "elsewhere", wait_ms=20_000))
            for n in range(200)
        ]
        eventually(lambda: node.broker.waiters._count == 200, "all wait")
        fill(node, 1)
        assert len(wire.receive(GROUP, TOPIC, wait_ms=10_000)) == 1
        for call in waiting:
            call.cancel()
        eventually(lambda: node.broker.waiters._count == 0, "all have gone")


def test_a_stop_ends_those_who_wait(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        node.run(node.broker.create_topic(TOPIC))
        wire = Wire.to(node)
        waiting = wire.stream("ReceiveMessage", receive_request(GROUP, TOPIC, wait_ms=20_000))
        eventually(lambda: node.broker.waiters._count, "it waits")
    with pytest.raises(grpc.RpcError):
        list(waiting)
    wire.close()


@with_consumer()
async def test_all_is_received_once_by_many(consumer: Consumer) -> None:
    """The control of the harness: a hundred messages, ten consumers at once, each message in one hand."""
    await consumer.send(100, unique_key=[f"id-{n}" for n in range(100)])
    consumers = [Consumer(consumer.world, consumer.edge, f"client-{n}") for n in range(10)]
    found = await asyncio.gather(*(each.receive(batch_size=15) for each in consumers))
    seen = [name for some in found for name in ids(some)]
    assert sorted(seen) == sorted(f"id-{n}" for n in range(100))
    await consumer.pass_time(MINUTE_MS)
    assert len([1 for _ in range(10) for _ in await consumer.receive(batch_size=15)]) == 100


@with_consumer()
async def test_a_new_group_begins_at_the_end_if_its_operator_wants_that(consumer: Consumer) -> None:
    groups = consumer.world.broker.tables.groups
    groups.update(SubscriptionGroup("late", consume_from_min_enable=False))
    await consumer.send(3)
    assert len(await consumer.receive("early")) == 3
    assert await consumer.receive("late") == []
    await consumer.send(2)
    assert len(await consumer.receive("late")) == 2
    groups.update(SubscriptionGroup("early", consume_from_min_enable=False))  # it is not new any more
    assert len(await consumer.receive("early")) == 2
    # A queue that comes later is read from its beginning.
    await consumer.world.broker.create_topic(TOPIC, 9)
    await consumer.send(1, queue_id=pa.array([8], pa.int32()))
    assert len(await consumer.receive("late")) == 1


@with_consumer()
async def test_the_highest_priority_is_received_first(consumer: Consumer) -> None:
    broker = consumer.world.broker
    config = TopicConfig(attributes={"message.type": "PRIORITY"})
    await broker.create_topic(TOPIC, 4)
    broker.tables.topics.configure(TOPIC, config)
    for priority in (0, 3, 1, 9, 0, 2):
        system = d.SystemProperties(
            message_id=f"{priority}", message_type=d.MessageType.PRIORITY, priority=priority
        )
        request = s.SendMessageRequest(
            messages=[d.Message(topic=d.Resource(name=TOPIC), body=b"x", system_properties=system)]
        )
        assert (await consumer.ask("SendMessage", request)).status.code == d.Code.OK
    found = [message for _ in range(3) for message in await consumer.receive(batch_size=2)]
    assert [message.system_properties.priority for message in found] == [3, 9, 2, 1, 0, 0]
    assert {message.system_properties.message_type for message in found} == {d.MessageType.PRIORITY}
    assert [message.system_properties.queue_id for message in found] == [3, 3, 2, 1, 0, 0]
    assert not any(message.user_properties for message in found)
