"""Requests of tools about the progress of queues and groups, and resets of offsets, which members are notified of."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of

from timeball.edges.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.connection import Member
from timeball.edges.remoting.handlers.admin.progress import Progress, store_times
from timeball.edges.shared.sessions import Membership, Subscription

STATS, CONSUMED = RequestCode.GET_TOPIC_STATS_INFO, RequestCode.GET_CONSUME_STATS


def entries(body: bytes) -> dict[tuple[str, int], dict[str, Any]]:
    """Decode a table with object keys to a dict: (topic, queue) -> values. No JSON library accepts such keys."""
    result = {}
    for key, value in re.findall(rb"(\{[^{}]*\}):(\{[^{}]*\})", body):
        queue = msgspec.json.decode(key)
        assert queue["brokerName"] == "timeball"
        result[queue["topic"], queue["queueId"]] = msgspec.json.decode(value)
    return result


async def send(world: World, topic: str, queue: int, rows: int) -> None:
    """Send `rows` messages to a queue of a topic."""
    queues = pa.array([queue] * rows, pa.int32())
    await world.broker.send(batch(rows, topic=[topic] * rows, queue_id=queues))


@on_node()
async def test_topic_stats_have_offsets_and_last_store_times(world: World) -> None:
    pair, progress = await Pair.create(), Progress(context_of(world.broker)).handlers
    await send(world, "orders", 0, 2)
    world.clock.advance(5_000)
    await send(world, "orders", 0, 1)
    answer = await pair.ask(progress, STATS, topic="orders")
    now_ms = world.broker.clock.now_ms()
    assert answer.code == 0
    assert entries(answer.body) == {
        ("orders", 0): {"minOffset": 0, "maxOffset": 3, "lastUpdateTimestamp": now_ms},
        ("orders", 1): {"minOffset": 0, "maxOffset": 0, "lastUpdateTimestamp": 0},
    }
    assert (await pair.ask(progress, STATS, topic="x")).code == ResponseCode.TOPIC_NOT_EXIST
    pair.close()


@on_node()
async def test_consume_stats_cover_all_topics_of_a_group(world: World) -> None:
    pair, context = await Pair.create(), context_of(world.broker)
    progress = Progress(context).handlers
    await send(world, "orders", 0, 3)
    sent_ms = world.broker.clock.now_ms()
    await send(world, "bills", 1, 2)
    await world.broker.commit_offsets("g", "orders", {0: 2})
    read_before = entries((await pair.ask(progress, CONSUMED, consumerGroup="g")).body)
    assert read_before == {
        ("orders", 0): {"brokerOffset": 3, "consumerOffset": 2, "pullOffset": 2, "lastTimestamp": sent_ms},
        ("orders", 1): {"brokerOffset": 0, "consumerOffset": 0, "pullOffset": 0, "lastTimestamp": 0},
    }
    membership = Membership("g", subscriptions=(Subscription("bills"), Subscription("nothing")))
    context.sessions.beat(Member(pair.connection, "c"), "c", (), [membership], 0)
    all_topics = entries((await pair.ask(progress, CONSUMED, consumerGroup="g")).body)
    assert all_topics.keys() == {(topic, queue) for topic in ("orders", "bills") for queue in (0, 1)}
    assert all_topics["bills", 1]["brokerOffset"] - all_topics["bills", 1]["consumerOffset"] == 2
    one_topic = entries((await pair.ask(progress, CONSUMED, consumerGroup="g", topic="bills")).body)
    assert one_topic.keys() == {("bills", 0), ("bills", 1)}
    assert entries((await pair.ask(progress, CONSUMED, consumerGroup="nobody")).body) == {}
    pair.close()


@on_node()
async def test_broker_consume_stats_cover_all_groups_with_their_lag(world: World) -> None:
    pair, context = await Pair.create(), context_of(world.broker)
    progress = Progress(context).handlers
    await send(world, "orders", 0, 3)
    for group, offset in (("g", 2), ("h", 0)):
        world.broker.tables.groups.ensure(group)
        await world.broker.commit_offsets(group, "orders", {0: offset})
    world.broker.tables.groups.ensure("idle")
    body = (await pair.ask(progress, RequestCode.GET_BROKER_CONSUME_STATS, isOrder="false")).body
    assert entries(body).keys() == {("orders", 0), ("orders", 1)}
    assert b'"totalDiff":4,' in body and b'"brokerAddr":"10.0.0.1:10911"' in body
    assert b'{"g":[{' in body and b'{"h":[{' in body and b'"idle"' not in body
    pair.close()


@on_node()
async def test_a_message_deleted_by_retention_has_time_zero(world: World) -> None:
    await send(world, "orders", 0, 3)
    index = world.broker.tables.topics.get("orders").queues[0].index
    index.hide(world.broker.log.reader.next_seq)
    reader = world.broker.log.reader
    assert store_times(reader, [(index, 0), (index, 3), (index, -1)]) == [0, 0, 0]


@on_node()
async def test_time_spans_state_the_delay_of_a_group(world: World) -> None:
    pair, progress = await Pair.create(), Progress(context_of(world.broker)).handlers
    store_ms = []
    for _ in range(3):
        await send(world, "orders", 0, 1)
        store_ms.append(world.broker.clock.now_ms())
        world.clock.advance(1_000)

    async def query_spans() -> list[dict[str, Any]]:
        answer = await pair.ask(progress, RequestCode.QUERY_CONSUME_TIME_SPAN, topic="orders", group="g")
        result: list[dict[str, Any]] = msgspec.json.decode(answer.body)["consumeTimeSpanSet"]
        assert [span.pop("messageQueue")["queueId"] for span in result] == [0, 1]
        return result

    first, empty = await query_spans()
    now_ms = world.broker.clock.now_ms()
    ends = {"minTimeStamp": store_ms[0], "maxTimeStamp": store_ms[2]}
    assert first == ends | {"consumeTimeStamp": store_ms[0], "delayTime": now_ms - store_ms[0]}
    assert set(empty.values()) == {0}
    await world.broker.commit_offsets("g", "orders", {0: 2})
    assert (await query_spans())[0] == ends | {
        "consumeTimeStamp": store_ms[1],
        "delayTime": now_ms - store_ms[2],
    }
    await world.broker.commit_offsets("g", "orders", {0: 3})
    assert (await query_spans())[0] == ends | {"consumeTimeStamp": store_ms[2], "delayTime": 0}
    answer = await pair.ask(progress, RequestCode.QUERY_CONSUME_TIME_SPAN, topic="x", group="g")
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    pair.close()


RESET, RESET_CLIENT = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.RESET_CONSUMER_CLIENT_OFFSET


class ResetGroup:
    """The group `g` for resets: offset 5 of 10 in queue 0 of `orders`. It has one member, or none.

    The messages are one second apart, and the first is stored at `began_ms`.
    """

    def __init__(self, world: World, pair: Pair) -> None:
        self.world, self.pair = world, pair
        self.context = context_of(world.broker)
        self.handlers = Progress(self.context).handlers

    @classmethod
    async def create(cls, world: World, *, language: int = Language.JAVA, members: bool = True) -> ResetGroup:
        """Send ten messages, one each second, commit offset 5, and connect a member unless `members` is False."""
        group = cls(world, await Pair.create())
        group.began_ms = world.clock.wall
        for _ in range(10):
            await world.broker.send(batch(1, queue_id=pa.array([0], pa.int32())))
            world.clock.advance(1_000)
        await world.broker.commit_offsets("g", "orders", {0: 5})
        if members:
            member = Member(group.pair.connection, "c", language)
            group.context.sessions.beat(member, "c", (), [Membership("g")], 0)
        return group

    async def reset(self, **fields: object) -> Command:
        """Reset the offsets of the group with these fields, and return the answer."""
        return await self.pair.ask(self.handlers, RESET, **{"topic": "orders", "group": "g", **fields})

    @property
    def offsets(self) -> dict[int, int]:
        return dict(self.world.broker.offsets("g", "orders"))


@pytest.mark.parametrize(
    ("second", "force", "offset"), [(2, False, 2), (8, False, 5), (8, True, 8), (99, True, 10), (-9, True, 0)]
)
@on_node()
async def test_a_reset_to_a_time_never_advances_an_offset_unless_forced(
    world: World, second: int, force: bool, offset: int
) -> None:
    group = await ResetGroup.create(world)
    answer = await group.reset(timestamp=group.began_ms + second * 1_000, isForce=str(force).lower())
    assert answer.code == 0
    assert b'{"brokerName":"timeball","queueId":0,"topic":"orders"}:%d' % offset in answer.body
    assert group.offsets == {0: offset, 1: 0}
    pushed = await group.pair.read()
    assert (pushed.code, pushed.is_one_way, pushed.body) == (RESET_CLIENT, True, answer.body)
    assert (pushed.ext["topic"], pushed.ext["group"]) == ("orders", "g")
    assert pushed.ext["isForce"] == str(force).lower()
    group.pair.close()


@on_node()
async def test_a_reset_to_minus_one_moves_to_the_end(world: World) -> None:
    group = await ResetGroup.create(world)
    assert (await group.reset(timestamp=-1, isForce="true")).code == 0
    assert group.offsets == {0: 10, 1: 0}
    group.pair.close()


@on_node()
async def test_a_cpp_member_is_notified_in_standard_json(world: World) -> None:
    group = await ResetGroup.create(world, language=Language.CPP)
    await group.reset(timestamp=group.began_ms, isForce="true")
    assert msgspec.json.decode((await group.pair.read()).body)["offsetTable"] == [
        {"brokerName": "timeball", "queueId": queue, "topic": "orders", "offset": 0} for queue in (0, 1)
    ]
    group.pair.close()


@pytest.mark.parametrize("members", [True, False])
@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({"queueId": 0, "offset": 7, "timestamp": 0}, {0: 7, 1: 1}),
        ({"queueId": 1, "offset": 0, "timestamp": 0}, {0: 5, 1: 0}),
        ({"queueId": 0, "offset": 0, "timestamp": 0}, {0: 0, 1: 1}),
        ({"queueId": 0, "offset": 10, "timestamp": 0, "isForce": "false"}, {0: 10, 1: 1}),
        ({"queueId": 0, "offset": -1, "timestamp": 0}, {0: 0, 1: 1}),
        ({"queueId": 0, "timestamp": -1, "isForce": "true"}, {0: 10, 1: 1}),
        ({"queueId": -1, "offset": -1, "timestamp": 0, "isForce": "true"}, {0: 0, 1: 0}),
    ],
)
@on_node()
async def test_a_reset_of_one_queue_leaves_the_others(
    world: World, fields: dict[str, object], offsets: dict[int, int], members: bool
) -> None:
    group = await ResetGroup.create(world, members=members)
    await send(world, "orders", 1, 2)
    await world.broker.commit_offsets("g", "orders", {1: 1})
    answer = await group.reset(**fields)
    assert (answer.code, group.offsets) == (0, offsets), answer.remark
    changed = fields["queueId"] if fields["queueId"] != -1 else 0
    assert b'"queueId":%d,"topic":"orders"}:%d' % (changed, offsets[changed]) in answer.body
    assert answer.body.count(b"queueId") == (1 if fields["queueId"] != -1 else 2)
    if members:
        assert (await group.pair.read()).body == answer.body
    group.pair.close()


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        (
            {"queueId": 0, "offset": 11},
            ResponseCode.SYSTEM_ERROR,
            "Target offset 11 not in consume queue range [0-10]",
        ),
        (
            {"queueId": 0, "offset": -7},
            ResponseCode.SYSTEM_ERROR,
            "Target offset -7 not in consume queue range [0-10]",
        ),
        ({"queueId": 2, "offset": 0}, ResponseCode.INVALID_PARAMETER, "queueId[2] is illegal"),
        ({"topic": "x", "timestamp": 0}, ResponseCode.TOPIC_NOT_EXIST, "topic[x] not exist"),
        ({"group": "x", "timestamp": 0}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "Group x does not exist"),
        ({"group": "x", "topic": "x"}, ResponseCode.TOPIC_NOT_EXIST, "topic[x] not exist"),
    ],
)
@on_node()
async def test_an_invalid_reset_is_refused_without_effect(
    world: World, fields: dict[str, object], code: int, remark: str
) -> None:
    group = await ResetGroup.create(world)
    answer = await group.reset(**fields)
    assert (answer.code, str(answer.remark)[: len(remark)]) == (code, remark)
    assert group.offsets == {0: 5}
    group.pair.close()


@on_node()
async def test_a_group_without_members_can_be_reset(world: World) -> None:
    group = await ResetGroup.create(world, members=False)
    answer = await group.reset(timestamp=group.began_ms + 2_000, isForce="true")
    assert (answer.code, group.offsets) == (0, {0: 2, 1: 0})
    assert b'"queueId":0,"topic":"orders"}:2' in answer.body
    group.pair.close()


@on_node()
async def test_consume_stats_cover_only_the_listed_topics(world: World) -> None:
    pair, progress = await Pair.create(), Progress(context_of(world.broker)).handlers
    for topic in ("orders", "other", "third"):
        await send(world, topic, 0, 1)
        await world.broker.commit_offsets("g", topic, {0: 1})
    answer = await pair.ask(progress, CONSUMED, consumerGroup="g", topicList="orders;third;", topic="other")
    assert {topic for topic, _ in entries(answer.body)} == {"orders", "third"}
    pair.close()
