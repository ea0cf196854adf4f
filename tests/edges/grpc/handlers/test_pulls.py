"""PullMessage and the calls about offsets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.edges.grpc.consumer import GROUP, TOPIC, Consumer, resource, run_with_consumer
from tests.edges.grpc.wire import Wire, definition, service
from tests.node_fixture import RunningNode

from timeball.model import limits

Code = definition.Code
QUEUE = definition.MessageQueue(topic=resource(TOPIC), id=1)


def pull(
    offset: int = 0, *, wait_ms: int = 0, text: str = "*", sql: bool = False, **fields: Any
) -> service.PullMessageRequest:
    """Return a PullMessage request from this offset on. `text` is a tag expression, or SQL."""
    filter_type = definition.FilterType.SQL if sql else definition.FilterType.TAG
    request = service.PullMessageRequest(
        group=resource(GROUP), offset=offset,
        filter_expression=definition.FilterExpression(type=filter_type, expression=text),
        **{"message_queue": QUEUE, "batch_size": 32, **fields},
    )  # fmt: skip
    request.long_polling_timeout.FromMilliseconds(wait_ms)
    return request


async def pulled(
    consumer: Consumer, request: service.PullMessageRequest
) -> tuple[int, list[definition.Message], int]:
    """Make a PullMessage call, and return the code, the messages and the next offset."""
    first, *rest = await consumer.responses("PullMessage", request)
    assert [each.WhichOneof("content") for each in rest] == ["message"] * (len(rest) - 1) + ["next_offset"]
    return first.status.code, [each.message for each in rest[:-1]], rest[-1].next_offset


async def fill(consumer: Consumer, count: int, **columns: object) -> None:
    """Send `count` messages with the ids id-0, id-1 … to queue 1."""
    await consumer.send(count, queue_id=[1] * count, unique_key=[f"id-{n}" for n in range(count)], **columns)


@run_with_consumer()
async def test_a_queue_is_read_from_an_offset_on(consumer: Consumer) -> None:
    await fill(consumer, 10)
    code, messages, next_offset = await pulled(consumer, pull(3, batch_size=4))
    assert (code, next_offset) == (Code.OK, 7)
    assert [each.system_properties.queue_offset for each in messages] == [3, 4, 5, 6]
    assert messages[0].system_properties.message_id == "id-3" and messages[0].topic.name == TOPIC
    assert not messages[0].system_properties.HasField("receipt_handle")
    assert await pulled(consumer, pull(3)) == await pulled(consumer, pull(3)), (
        "a pull leaves the messages in the queue"
    )


@run_with_consumer()
async def test_a_pull_at_the_end_of_a_queue_waits_for_a_message(consumer: Consumer) -> None:
    await fill(consumer, 1)
    assert await pulled(consumer, pull(1)) == (Code.MESSAGE_NOT_FOUND, [], 1)
    waiting = asyncio.create_task(pulled(consumer, pull(1, wait_ms=20_000)))
    await consumer.world.until(lambda: consumer.world.broker.waiters._count, "the pull waits")
    await fill(consumer, 1)
    code, messages, next_offset = await waiting
    assert (code, len(messages), next_offset) == (Code.OK, 1, 2)


@run_with_consumer()
async def test_a_filter_moves_the_offset_past_messages_that_do_not_match(consumer: Consumer) -> None:
    tags = ["red" if n == 7 else "blue" for n in range(10)]
    await fill(consumer, 10, tag=tags, properties=[f"n\x01{n}\x02" for n in range(10)])
    code, messages, next_offset = await pulled(consumer, pull(text="red"))
    assert (code, next_offset) == (Code.OK, 10)
    assert [each.system_properties.message_id for each in messages] == ["id-7"]
    assert await pulled(consumer, pull(text="green")) == (Code.MESSAGE_NOT_FOUND, [], 10)
    code, messages, _ = await pulled(consumer, pull(text="n BETWEEN 2 AND 3", sql=True))
    assert [each.system_properties.message_id for each in messages] == ["id-2", "id-3"]


@pytest.mark.parametrize(("offset", "nearest"), [(-1, 0), (11, 10), (1 << 62, 10), (-(1 << 63), 0)])
def test_an_illegal_offset_is_answered_with_the_nearest_valid_one(offset: int, nearest: int) -> None:
    @run_with_consumer()  # makes a function that runs `check` to its end
    async def check(consumer: Consumer) -> None:
        await fill(consumer, 10)
        assert await pulled(consumer, pull(offset)) == (Code.ILLEGAL_OFFSET, [], nearest)

    check()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (service.PullMessageRequest(), Code.ILLEGAL_CONSUMER_GROUP),
        (pull(message_queue=definition.MessageQueue()), Code.ILLEGAL_TOPIC),
        (pull(message_queue=definition.MessageQueue(topic=resource(TOPIC), id=-1)), Code.BAD_REQUEST),
        (pull(message_queue=definition.MessageQueue(topic=resource(TOPIC), id=99)), Code.BAD_REQUEST),
        (pull(batch_size=0), Code.BAD_REQUEST),
        (pull(batch_size=limits.POP_ROWS_MAX + 1), Code.BAD_REQUEST),
        (pull(wait_ms=-5), Code.ILLEGAL_POLLING_TIME),
        (pull(text="a >", sql=True), Code.ILLEGAL_FILTER_EXPRESSION),
    ],
)
def test_an_invalid_pull_is_refused_with_code_and_text(
    request_: service.PullMessageRequest, code: int
) -> None:
    @run_with_consumer()
    async def check(consumer: Consumer) -> None:
        await fill(consumer, 1)
        (only,) = await consumer.responses("PullMessage", request_)
        assert only.status.code == code and only.status.message

    check()


@run_with_consumer()
async def test_the_deletion_of_a_topic_ends_its_waiting_pulls(consumer: Consumer) -> None:
    await fill(consumer, 1)
    waiting = asyncio.create_task(consumer.responses("PullMessage", pull(1, wait_ms=20_000)))
    await consumer.world.until(lambda: consumer.world.broker.waiters._count, "the pull waits")
    consumer.world.broker.tables.topics.delete(TOPIC, consumer.world.broker.log.writer.next_seq)
    consumer.world.broker.waiters.wake({TOPIC})
    (only,) = await waiting
    assert only.status.code == Code.TOPIC_NOT_FOUND


# ---- offsets -------------------------------------------------------------------------------------------------


def get(queue: definition.MessageQueue = QUEUE) -> service.GetOffsetRequest:
    """Return a GetOffset request."""
    return service.GetOffsetRequest(group=resource(GROUP), message_queue=queue)


def update(offset: int) -> service.UpdateOffsetRequest:
    """Return an UpdateOffset request."""
    return service.UpdateOffsetRequest(group=resource(GROUP), message_queue=QUEUE, offset=offset)


@run_with_consumer()
async def test_an_updated_offset_is_stored_durably_if_it_is_valid(consumer: Consumer) -> None:
    await fill(consumer, 10)
    assert (await consumer.ask("GetOffset", get())).status.code == Code.OFFSET_NOT_FOUND
    assert (await consumer.ask("UpdateOffset", update(7))).status.code == Code.OK
    response = await consumer.ask("GetOffset", get())
    assert (response.status.code, response.offset) == (Code.OK, 7)
    for beyond in (11, -1, 1 << 62):
        assert (await consumer.ask("UpdateOffset", update(beyond))).status.code == Code.ILLEGAL_OFFSET
    assert (await consumer.ask("GetOffset", get())).offset == 7
    await consumer.world.restart()
    assert consumer.world.broker.offsets(GROUP, TOPIC) == {1: 7}


@run_with_consumer()
async def test_query_offset_finds_the_first_the_last_and_a_time_based_offset(consumer: Consumer) -> None:
    await fill(consumer, 3)
    consumer.world.clock.advance(60_000)
    between_ms = consumer.world.clock.wall
    consumer.world.clock.advance(60_000)
    await fill(consumer, 4)

    async def query(policy: int, time_ms: int | None = None) -> Any:
        """Query the offset of a policy, for a time if `time_ms` is given."""
        request = service.QueryOffsetRequest(message_queue=QUEUE)
        request.query_offset_policy = policy  # type: ignore[assignment]
        if time_ms is not None:
            request.timestamp.FromMilliseconds(time_ms)
        return await consumer.ask("QueryOffset", request)

    assert (await query(definition.QueryOffsetPolicy.BEGINNING)).offset == 0
    assert (await query(definition.QueryOffsetPolicy.END)).offset == 7
    assert (await query(definition.QueryOffsetPolicy.TIMESTAMP, between_ms)).offset == 3
    assert (await query(definition.QueryOffsetPolicy.TIMESTAMP, 0)).offset == 0
    for policy, time_ms in [
        (definition.QueryOffsetPolicy.TIMESTAMP, None),
        (definition.QueryOffsetPolicy.TIMESTAMP, -1),
        (77, 0),
    ]:
        assert (await query(policy, time_ms)).status.code == Code.BAD_REQUEST


@run_with_consumer()
async def test_empty_requests_about_offsets_are_refused(consumer: Consumer) -> None:
    for name, request in [
        ("GetOffset", service.GetOffsetRequest()),
        ("UpdateOffset", service.UpdateOffsetRequest()),
    ]:
        assert (await consumer.ask(name, request)).status.code == Code.ILLEGAL_CONSUMER_GROUP
    assert (await consumer.ask("QueryOffset", service.QueryOffsetRequest())).status.code == Code.ILLEGAL_TOPIC
    await consumer.world.broker.create_topic(TOPIC, 2)
    unknown_queue = definition.MessageQueue(topic=resource(TOPIC), id=77)
    assert (await consumer.ask("GetOffset", get(unknown_queue))).status.code == Code.BAD_REQUEST


def test_a_pull_of_an_empty_queue_over_the_wire_finds_nothing(node: RunningNode, wire: Wire) -> None:
    node.run(node.broker.create_topic(TOPIC, 2))
    responses = list(wire.stream("PullMessage", pull()))
    assert responses[0].status.code == Code.MESSAGE_NOT_FOUND and responses[1].next_offset == 0
