"""Figures and settings under RocketMQ's names."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.protocols.remoting.pairs import Pair, site_of

from timeball import limits
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.handlers.admin.runtime import Runtime

# What `mqadmin clusterList` of 4.9 or 5.3 reads without asking whether it is there.
READ_BY_CLUSTER_LIST = [
    "brokerActive", "brokerVersionDesc", "putTps", "getTransferredTps", "getTransferedTps", "sendThreadPoolQueueSize",
    "pullThreadPoolQueueSize", "ackThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills", "ackThreadPoolQueueHeadWaitTimeMills", "earliestMessageTimeStamp",
    "commitLogDiskRatio", "timerReadBehind", "timerOffsetBehind", "timerCongestNum", "timerEnqueueTps",
    "timerDequeueTps", "msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow",
    "msgGetTotalYesterdayMorning", "msgGetTotalTodayMorning", "msgGetTotalTodayNow", "pageCacheLockTimeMills",
]  # fmt: skip


async def info(pair: Pair, runtime: Runtime) -> dict[str, str]:
    answer = await pair.ask(runtime.handlers(), RequestCode.GET_BROKER_RUNTIME_INFO)
    assert answer.code == 0, answer.remark
    found: dict[str, str] = msgspec.json.decode(answer.body)["table"]
    return found


@on_node()
async def test_the_figures_tools_count_on_are_there_as_text(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    began_ms = world.clock.wall
    await world.broker.send(batch(3))
    await world.broker.send(batch(2, delay_ms=[10_000, 10_000]))
    world.clock.advance(90_061_000)
    found = await info(pair, runtime)
    assert set(READ_BY_CLUSTER_LIST) <= found.keys()
    assert all(isinstance(value, str) for value in found.values())
    assert found["putMessageTimesTotal"] == found["msgPutTotalTodayNow"] == "6"  # with the topic's row
    assert found["timerCongestNum"] == "2"
    assert found["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert found["earliestMessageTimeStamp"] == str(began_ms)
    pair.close()


@on_node()
async def test_rates_are_over_ten_seconds_a_minute_and_ten(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    for second in range(700):
        if second >= 680:
            await world.broker.send(batch(6))
        world.clock.advance(1_000)
        runtime.sample()
    assert (await info(pair, runtime))["putTps"] == "6.0 2.0 0.2"
    pair.close()


@on_node()
async def test_a_rate_without_a_second_is_nothing(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    await world.broker.send(batch(6))
    assert (await info(pair, runtime))["putTps"] == "0.0 0.0 0.0"
    world.clock.advance(limits.DAY_MS)
    assert (await info(pair, runtime))["putTps"] == "0.0 0.0 0.0", "the loop was held up: no sample is fresh"
    pair.close()


@on_node()
async def test_days_are_counted_from_their_mornings(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    await world.broker.send(batch(4))
    for sent in (1, 2):
        world.clock.advance(limits.DAY_MS)
        runtime.sample()
        await world.broker.send(batch(sent))
        runtime.sample()
    found = await info(pair, runtime)
    mornings = ["msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow"]
    assert [found[name] for name in mornings] == ["5", "6", "8"]  # with the topic's row
    pair.close()


@on_node()
async def test_every_level_has_its_offset_and_its_end(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    await world.broker.send(batch(2, delay_level=pa.array([3, 3], pa.int32())))
    found = await info(pair, runtime)
    levels = {name: value for name, value in found.items() if name.startswith("scheduleMessageOffset_")}
    assert len(levels) == 18
    assert levels["scheduleMessageOffset_3"] == "0,2"
    assert levels["scheduleMessageOffset_18"] == "0,0"
    await world.advance(11_000)
    assert (await info(pair, runtime))["scheduleMessageOffset_3"] == "2,2"
    answer = await pair.ask(runtime.handlers(), RequestCode.GET_ALL_DELAY_OFFSET)
    offsets: dict[str, Any] = msgspec.json.decode(answer.body)["offsetTable"]
    assert (offsets["3"], offsets["1"], len(offsets)) == (2, 0, 18)
    pair.close()


@on_node(queues_per_topic=5)
async def test_settings_can_be_read_and_not_written(world: World) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    answer = await pair.ask(runtime.handlers(), RequestCode.GET_BROKER_CONFIG)
    lines = dict(line.split("=", 1) for line in answer.body.decode().splitlines())
    assert lines["defaultTopicQueueNums"] == lines["timeball.queues_per_topic"] == "5"
    assert lines["autoCreateTopicEnable"] == "true"
    assert lines["messageDelayLevel"].startswith("1s 5s 10s")
    assert "version" in answer.ext
    for field in dataclasses.fields(world.settings):
        assert f"timeball.{field.name}" in lines
    refused = await pair.ask(runtime.handlers(), RequestCode.UPDATE_BROKER_CONFIG, b"a=b")
    assert refused.code == ResponseCode.NO_PERMISSION
    pair.close()


@pytest.mark.parametrize("name", READ_BY_CLUSTER_LIST)
@on_node()
async def test_an_empty_broker_has_figures_too(world: World, name: str) -> None:
    pair, runtime = await Pair.made(), Runtime(site_of(world.broker))
    assert name in await info(pair, runtime)
    pair.close()
