"""Messages that come back, on a real broker in memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.protocols.remoting.calling import ask, site_of

from timeball.broker.groups import SubscriptionGroup
from timeball.message import decode_properties, encode_properties
from timeball.protocols.remoting.calls import Refused
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.retries import Retries

CODE = RequestCode.CONSUMER_SEND_MSG_BACK
OK = (ResponseCode.SUCCESS, None)
USERS = {"KEYS": "order-17", "TAGS": "close", "UNIQ_KEY": "A17"}
CPP_VERSION = 63


async def send(world: World, **columns: Any) -> int:
    """One visible message; its number."""
    whole = {"properties": [encode_properties(USERS)], "tag": ["close"], **columns}
    return int((await world.broker.send(batch(1, **whole))).first_seq)


async def read(world: World, topic: str) -> list[dict[str, Any]]:
    found = []
    for queue in world.broker.queues(topic):
        found += (await world.broker.read_queue(topic, queue, 0, 100)).to_pylist()
    return found


def room(world: World, group: SubscriptionGroup | None = None, orderly: bool = False) -> Retries:
    world.broker.parts.groups.update(group or SubscriptionGroup("readers"))
    return Retries(site_of(world.broker), lambda name: orderly)


# ---- handed back -----------------------------------------------------------------------------------------


@on_node()
async def test_a_dead_letter_is_the_message_and_says_where_it_came_from(world: World) -> None:
    seq = await send(
        world, body=[b"close"], keys=["order-17"], unique_key=["A17"], flag=[3], sys_flag=[1], born_ms=[5],
        born_host=["10.0.0.7:5"], reconsume_times=[16],
    )  # fmt: skip
    handlers = room(world).handlers()
    assert await ask(handlers, CODE, offset=seq, group="readers", delayLevel=0) == OK
    [found] = await read(world, "%DLQ%readers")
    assert (found["body"], found["tag"], found["keys"]) == (b"close", "close", "order-17")
    assert (found["unique_key"], found["flag"], found["sys_flag"]) == ("A17", 3, 1)
    assert (found["born_ms"], found["born_host"], found["reconsume_times"]) == (5, "10.0.0.7:5", 17)
    assert decode_properties(found["properties"]) == {
        **USERS,
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": f"0A00000100002A9F{seq:016X}",
        "WAIT": "false",
    }
    assert world.broker.topics()["%DLQ%readers"] == {"queues": 1}


@on_node()
async def test_a_dead_letter_is_there_at_once_whatever_had_delayed_the_message(world: World) -> None:
    before = {**USERS, "DELAY": "18", "TIMER_DELAY_SEC": "7200", "REAL_TOPIC": "orders", "REAL_QID": "1"}
    seq = await send(world, properties=[encode_properties(before)])
    assert await ask(room(world).handlers(), CODE, offset=seq, group="readers", delayLevel=-1) == OK
    [found] = await read(world, "%DLQ%readers")
    assert found["due_ms"] is None
    assert not {"DELAY", "TIMER_DELAY_SEC", "REAL_TOPIC"} & decode_properties(found["properties"]).keys()


@on_node()
async def test_whose_maximum_counts(world: World) -> None:
    handlers = room(world, SubscriptionGroup("readers", retry_max_times=2)).handlers()
    seq = await send(world, reconsume_times=[2])

    async def back(most: int | None, version: int) -> int:
        assert await ask(
            handlers, CODE, version=version, offset=seq, group="readers", maxReconsumeTimes=most
        ) == OK  # fmt: skip
        return len(await read(world, "%DLQ%readers"))

    assert await back(None, 409) == 1  # the group's
    assert await back(3, CPP_VERSION) == 2  # a client that cannot have meant it
    assert await back(3, 121) == 2  # the client's: one more try
    assert await back(-1, 121) == 2
    assert await back(1, 121) == 3


@on_node()
async def test_an_unknown_group(world: World) -> None:
    seq = await send(world)
    code, remark = await ask(room(world).handlers(), CODE, offset=seq, group="writers")
    assert (code, remark) == (
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "subscription group not exist, writers",
    )
    assert "%RETRY%writers" not in world.broker.topics()


@on_node()
async def test_a_message_nobody_was_handed_is_not_found(world: World) -> None:
    promise = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    reserved = await world.broker.reserve(10)
    handlers = room(world).handlers()
    for offset in (promise, reserved + 3, 10**9, 0, -1):
        code, remark = await ask(handlers, CODE, offset=offset, group="readers", delayLevel=-1)
        assert (code, remark) == (ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
    assert "%DLQ%readers" not in world.broker.topics()


@on_node()
async def test_a_group_without_retry_queues_drops(world: World) -> None:
    seq = await send(world)
    handlers = room(world, SubscriptionGroup("readers", retry_queue_nums=0)).handlers()
    assert await ask(handlers, CODE, offset=seq, group="readers", delayLevel=-1) == OK
    assert "%DLQ%readers" not in world.broker.topics()


@on_node()
async def test_a_header_without_its_fields(world: World) -> None:
    code, remark = await ask(room(world).handlers(), CODE, group="readers")
    assert code == ResponseCode.INVALID_PARAMETER and "offset" in remark
    code, _ = await ask(room(world).handlers(), CODE, group="readers", offset="first")
    assert code == ResponseCode.INVALID_PARAMETER


# ---- sent by the client itself ---------------------------------------------------------------------------


@on_node()
async def test_the_header_counts_and_then_the_properties(world: World) -> None:
    retries = room(world)
    before = {**USERS, "DELAY": "5", "RECONSUME_TIME": "4", "MAX_RECONSUME_TIMES": "4"}
    then = retries.redirect("%RETRY%readers", before, 2, 16, 409)
    assert (then.topic, then.delay_level, then.reconsume_times) == ("%RETRY%readers", 5, 2)
    then = retries.redirect("%RETRY%readers", before, 0, None, 409)
    assert (then.topic, then.delay_level, then.reconsume_times) == ("%RETRY%readers", 5, 4)
    then = retries.redirect("%RETRY%readers", before, 5, None, 409)
    assert (then.topic, then.delay_level, then.reconsume_times) == ("%DLQ%readers", 0, 5)
    assert "DELAY" not in then.properties
    assert world.broker.topics()["%RETRY%readers"] == world.broker.topics()["%DLQ%readers"] == {"queues": 1}


@on_node()
async def test_an_orderly_group_sends_what_it_has_given_up(world: World) -> None:
    then = room(world, orderly=True).redirect("%RETRY%readers", {**USERS, "DELAY": "19"}, 16, 16, 409)
    assert (then.topic, then.delay_level) == ("%DLQ%readers", 0)


@on_node()
async def test_nonsense_in_the_properties_counts_as_nothing(world: World) -> None:
    nonsense = {"DELAY": "soon", "RECONSUME_TIME": "", "MAX_RECONSUME_TIMES": "x"}
    then = room(world).redirect("%RETRY%readers", nonsense, None, None, 409)
    assert (then.topic, then.delay_level, then.reconsume_times) == ("%RETRY%readers", 0, 0)


@on_node()
async def test_a_retry_topic_of_nobody_is_refused(world: World) -> None:
    with pytest.raises(Refused, match="subscription group not exist, writers"):
        room(world).redirect("%RETRY%writers", {}, 1, 16, 409)
    assert "%RETRY%writers" not in world.broker.topics()


@on_node()
async def test_as_many_queues_as_the_group_is_to_have(world: World) -> None:
    room(world, SubscriptionGroup("readers", retry_queue_nums=3)).redirect("%RETRY%readers", {}, 1, 16, 409)
    assert world.broker.topics()["%RETRY%readers"] == {"queues": 3}
