"""The runtime information and the statistics that tools read, under RocketMQ's names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode, eventually

from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.handlers.admin.topics import Runtime
from timeball.model import limits

# `mqadmin clusterList` of 4.9 or 5.3 reads these entries and fails if one is missing.
NAMES_OF_CLUSTER_LIST = [
    "brokerActive", "brokerVersionDesc", "putTps", "getTransferredTps", "getTransferedTps", "sendThreadPoolQueueSize",
    "pullThreadPoolQueueSize", "ackThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills", "ackThreadPoolQueueHeadWaitTimeMills", "earliestMessageTimeStamp",
    "commitLogDiskRatio", "timerReadBehind", "timerOffsetBehind", "timerCongestNum", "timerEnqueueTps",
    "timerDequeueTps", "msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow",
    "msgGetTotalYesterdayMorning", "msgGetTotalTodayMorning", "msgGetTotalTodayNow", "pageCacheLockTimeMills",
]  # fmt: skip


async def info(pair: Pair, runtime: Runtime) -> dict[str, str]:
    """Query the runtime information, and return its entries."""
    answer = await pair.ask(runtime.handlers, RequestCode.GET_BROKER_RUNTIME_INFO)
    assert answer.code == 0, answer.remark
    result: dict[str, str] = msgspec.json.decode(answer.body)["table"]
    return result


@on_node()
async def test_runtime_info_has_all_names_that_tools_read_as_text(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    began_ms = world.clock.wall
    await world.broker.send(batch(3))
    await world.broker.send(batch(2, delay_ms=[10_000, 10_000]))
    world.clock.advance(90_061_000)
    result = await info(pair, runtime)
    assert set(NAMES_OF_CLUSTER_LIST) <= result.keys()
    assert all(isinstance(value, str) for value in result.values())
    assert result["putMessageTimesTotal"] == result["msgPutTotalTodayNow"] == "6"  # and the row of the topic
    assert result["timerCongestNum"] == "2"
    assert result["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert result["earliestMessageTimeStamp"] == str(began_ms)
    pair.close()


@on_node()
async def test_rates_cover_ten_seconds_one_minute_and_ten_minutes(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    for second in range(700):
        if second >= 680:  # the last 20 s
            await world.broker.send(batch(6))
        world.clock.advance(1_000)
        runtime.sample()
    assert (await info(pair, runtime))["putTps"] == "6.0 2.0 0.2"
    pair.close()


@on_node()
async def test_a_rate_without_a_recent_sample_is_zero(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    await world.broker.send(batch(6))
    assert (await info(pair, runtime))["putTps"] == "0.0 0.0 0.0"
    world.clock.advance(limits.DAY_MS)
    assert (await info(pair, runtime))["putTps"] == "0.0 0.0 0.0", "the newest sample is a day old"
    pair.close()


@on_node()
async def test_counts_of_yesterday_and_today_begin_at_midnight(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    await world.broker.send(batch(4))
    for count in (1, 2):
        world.clock.advance(limits.DAY_MS)
        runtime.sample()
        await world.broker.send(batch(count))
        runtime.sample()
    result = await info(pair, runtime)
    mornings = ["msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow"]
    assert [result[name] for name in mornings] == ["5", "6", "8"]  # and the row of the topic
    pair.close()


@on_node()
async def test_every_delay_level_has_its_offsets(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    await world.broker.send(batch(2, delay_level=pa.array([3, 3], pa.int32())))
    result = await info(pair, runtime)
    levels = {name: value for name, value in result.items() if name.startswith("scheduleMessageOffset_")}
    assert len(levels) == 18
    assert levels["scheduleMessageOffset_3"] == "0,2"
    assert levels["scheduleMessageOffset_18"] == "0,0"
    await world.advance(11_000)
    assert (await info(pair, runtime))["scheduleMessageOffset_3"] == "2,2"
    answer = await pair.ask(runtime.handlers, RequestCode.GET_ALL_DELAY_OFFSET)
    offsets: dict[str, Any] = msgspec.json.decode(answer.body)["offsetTable"]
    assert (offsets["3"], offsets["1"], len(offsets)) == (2, 0, 18)
    pair.close()


@on_node(queues_per_topic=5)
async def test_settings_can_be_read_but_not_written(world: World) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    answer = await pair.ask(runtime.handlers, RequestCode.GET_BROKER_CONFIG)
    lines = dict(line.split("=", 1) for line in answer.body.decode().splitlines())
    assert lines["defaultTopicQueueNums"] == lines["timeball.queues_per_topic"] == "5"
    assert lines["autoCreateTopicEnable"] == "true"
    assert lines["messageDelayLevel"].startswith("1s 5s 10s")
    assert "version" in answer.ext
    for field in dataclasses.fields(world.settings):
        assert f"timeball.{field.name}" in lines
    refused = await pair.ask(runtime.handlers, RequestCode.UPDATE_BROKER_CONFIG, b"a=b")
    assert refused.code == ResponseCode.NO_PERMISSION
    pair.close()


@pytest.mark.parametrize("name", NAMES_OF_CLUSTER_LIST)
@on_node()
async def test_an_empty_broker_has_runtime_info(world: World, name: str) -> None:
    pair, runtime = await Pair.create(), Runtime(context_of(world.broker))
    assert name in await info(pair, runtime)
    pair.close()


VIEW = RequestCode.VIEW_BROKER_STATS_DATA
BEAT = {
    "clientID": "c1",
    "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "orders"}]}],
}


def total(wire: Wire, name: str, key: str) -> int:
    """Return the sum of the day of a statistic, 0 if the broker has no such statistic."""
    answer = wire.ask(VIEW, statsName=name, statsKey=key)
    if answer.code == ResponseCode.SYSTEM_ERROR:
        assert answer.remark == f"The stats <{name}> <{key}> not exist"
        return 0
    result = json_body(answer)
    assert result.keys() == {"statsMinute", "statsHour", "statsDay"}
    assert result["statsMinute"] == result["statsHour"] | {"tps": result["statsMinute"]["tps"]}, (
        "all was counted in this minute"
    )
    return int(result["statsDay"]["sum"])


def pull(wire: Wire, offset: int = 0, queue_id: int = 0) -> Any:
    """Pull from an offset on, and return the answer."""
    return wire.ask(
        RequestCode.PULL_MESSAGE, consumerGroup="g", topic="orders", queueId=queue_id, queueOffset=offset,
        sysFlag=int(PullFlag.SUBSCRIPTION), subscription="*",
    )  # fmt: skip


def test_sends_and_pulls_are_counted(wire: Wire) -> None:
    assert total(wire, "TOPIC_PUT_NUMS", "orders") == total(wire, "GROUP_GET_NUMS", "orders@g") == 0
    for _ in range(3):
        assert sent(wire, b"x" * 1_000).code == 0
    assert total(wire, "TOPIC_PUT_NUMS", "orders") == total(wire, "BROKER_PUT_NUMS", "DefaultCluster") == 3
    assert 3_000 < total(wire, "TOPIC_PUT_SIZE", "orders") < 4_000
    answer = pull(wire)
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == total(wire, "BROKER_GET_NUMS", "DefaultCluster") == 3
    assert total(wire, "GROUP_GET_SIZE", "orders@g") == len(answer.body)
    pull(wire, offset=3)
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == 3, "the pull found no message"


def test_a_scheduled_message_is_counted_when_sent_and_when_released(wire: Wire) -> None:
    sent(wire, properties={"TIMER_DELAY_MS": "50"})
    assert total(wire, "TOPIC_PUT_NUMS", "rmq_sys_wheel_timer") == 1
    sent(wire, properties={"DELAY": "18"})
    assert total(wire, "TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX") == 1
    eventually(lambda: total(wire, "TOPIC_PUT_NUMS", "orders") == 1, "the message of the timer is released")
    assert total(wire, "BROKER_PUT_NUMS", "DefaultCluster") == 3


def test_pops_and_acknowledgements_are_counted(wire: Wire) -> None:
    sent(wire)
    popped = wire.ask_ok(
        RequestCode.POP_MESSAGE, consumerGroup="g", topic="orders", queueId=-1, maxMsgNums=8, invisibleTime=60_000,
        pollTime=0, bornTime=0, initMode=0,
    )  # fmt: skip
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == 1
    assert total(wire, "GROUP_ACK_NUMS", "orders@g") == 0
    extra = f"0 {popped.ext['popTime']} 60000 {popped.ext['reviveQid']} 0 timeball 0 0"
    ack = {"consumerGroup": "g", "topic": "orders", "queueId": 0, "extraInfo": extra, "offset": 0}
    wire.ask_ok(RequestCode.ACK_MESSAGE, **ack)
    wire.ask_ok(RequestCode.ACK_MESSAGE, **ack)  # a repeated acknowledgement succeeds but is not counted
    assert total(wire, "GROUP_ACK_NUMS", "orders@g") == 1


def test_returned_messages_are_counted(wire: Wire) -> None:
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    seq = int(sent(wire).ext["msgId"][-16:], 16)
    wire.ask_ok(RequestCode.CONSUMER_SEND_MSG_BACK, offset=seq, group="g", delayLevel=3)
    assert total(wire, "SNDBCK_PUT_NUMS", "orders@g") == 1


def test_messages_that_the_broker_reads_without_a_group_are_counted(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    node.run(node.broker.read_queue("orders", 0, 0, 8))
    assert total(wire, "BROKER_GET_NUMS", "DefaultCluster") == 1


def test_the_tables_of_topics_and_groups_contain_the_rates(wire: Wire) -> None:
    sent(wire)
    pull(wire)
    # These tables have objects as keys, which no JSON library accepts.
    topic = wire.ask_ok(RequestCode.GET_TOPIC_STATS_INFO, topic="orders").body
    group = wire.ask_ok(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="orders").body
    for name, body in ((b"topicPutTps", topic), (b"consumeTps", group)):
        result = re.search(rb'"%s":([0-9.]+)' % name, body)
        assert result is not None and float(result[1]) > 0, body
    table = json_body(wire.ask_ok(RequestCode.GET_BROKER_RUNTIME_INFO))["table"]
    assert table["msgGetTotalTodayNow"] == "1"


@pytest.mark.parametrize("name", ["TOPIC_PUT_NUMS", "BROKER_PUT_NUMS", "NO_SUCH_STATS", ""])
def test_a_statistic_without_a_count_does_not_exist(wire: Wire, name: str) -> None:
    sent(wire)
    assert total(wire, name, "nobody") == 0
