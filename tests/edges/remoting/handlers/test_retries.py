"""Retries of failed messages, on a real broker in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.handlers.retries import Retries
from timeball.model import limits
from timeball.model.errors import GroupNotFound
from timeball.model.message import decode_properties, encode_properties

CODE = RequestCode.CONSUMER_SEND_MSG_BACK
OK = (ResponseCode.SUCCESS, None)
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
# RocketMQ's levels from the third on, as waits: what the documents say of sixteen retries.
WAITS_MS = [10 * SECOND_MS, 30 * SECOND_MS] + [n * MINUTE_MS for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)] + [
    1 * HOUR_MS, 2 * HOUR_MS,
]  # fmt: skip
USERS = {"KEYS": "order-17", "TAGS": "close", "UNIQ_KEY": "A17"}
CPP_VERSION = 63


async def send(world: World, **columns: Any) -> int:
    """Send one visible message. Return its sequence number."""
    whole = {"properties": [encode_properties(USERS)], "tag": ["close"], **columns}
    return int((await world.broker.send(batch(1, **whole))).first_seq)


async def return_message(retries: Retries, version: int = 409, **header: object) -> tuple[int, str | None]:
    """Return a message with CONSUMER_SEND_MSG_BACK. Return code and remark of the answer."""
    pair = await Pair.create()
    answer = await pair.ask(retries.handlers, CODE, version=version, **header)
    pair.close()
    return answer.code, answer.remark


async def read(world: World, topic: str) -> list[dict[str, Any]]:
    result = []
    for queue in world.broker.queues(topic):
        result += (await world.broker.read_queue(topic, queue, 0, 100)).to_pylist()
    return result


async def retried(world: World, count: int) -> list[dict[str, Any]]:
    """Wait for so many messages in the retry topic, and return them."""
    await world.until(lambda: world.broker.queues("%RETRY%readers")[0][1] >= count, "the retry")
    return await read(world, "%RETRY%readers")


def create_retries(world: World, group: SubscriptionGroup | None = None, orderly: bool = False) -> Retries:
    world.broker.tables.groups.update(group or SubscriptionGroup("readers"))
    return Retries(context_of(world.broker), lambda name: orderly)


# ---- handed back -----------------------------------------------------------------------------------------


@on_node()
async def test_a_dead_letter_is_the_message_with_its_origin(world: World) -> None:
    seq = await send(
        world, body=[b"close"], keys=["order-17"], unique_key=["A17"], flag=[3], sys_flag=[1], born_ms=[5],
        born_host=["10.0.0.7:5"], reconsume_times=[16],
    )  # fmt: skip
    assert await return_message(create_retries(world), offset=seq, group="readers", delayLevel=0) == OK
    [result] = await read(world, "%DLQ%readers")
    assert (result["body"], result["tag"], result["keys"]) == (b"close", "close", "order-17")
    assert (result["unique_key"], result["flag"], result["sys_flag"]) == ("A17", 3, 1)
    assert (result["born_ms"], result["born_host"], result["reconsume_times"]) == (5, "10.0.0.7:5", 17)
    assert decode_properties(result["properties"]) == {
        **USERS,
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": f"0A00000100002A9F{seq:016X}",
        "WAIT": "false",
    }
    assert world.broker.topics()["%DLQ%readers"] == {"queues": 1}


@on_node()
async def test_a_message_becomes_a_dead_letter_after_sixteen_retries(world: World) -> None:
    retries = create_retries(world)
    seq = first = await send(world, unique_key=["A17"])
    for number, wait_ms in enumerate(WAITS_MS):
        assert await return_message(retries, offset=seq, group="readers", delayLevel=0) == OK
        await world.advance(wait_ms - 1)
        assert len(await read(world, "%RETRY%readers")) == number
        await world.advance(1)
        result = (await retried(world, number + 1))[-1]
        assert (result["reconsume_times"], result["body"]) == (number + 1, b"body")
        properties = decode_properties(result["properties"])
        assert properties["DELAY"] == str(3 + number)
        assert (properties["RETRY_TOPIC"], properties["REAL_TOPIC"]) == ("orders", "%RETRY%readers")
        assert properties["ORIGIN_MESSAGE_ID"] == "0A00000100002A9F" + f"{first:016X}"
        seq = result["seq"]
    assert await return_message(retries, offset=seq, group="readers", delayLevel=0) == OK
    [letter] = await read(world, "%DLQ%readers")
    assert (letter["reconsume_times"], letter["due_ms"]) == (17, None)
    assert "DELAY" not in decode_properties(letter["properties"])
    assert {name: world.broker.topics()[name] for name in ("%RETRY%readers", "%DLQ%readers")} == {
        "%RETRY%readers": {"queues": 1},
        "%DLQ%readers": {"queues": 1},
    }


@on_node()
async def test_a_retry_uses_the_requested_delay_level(world: World) -> None:
    retries, seq = create_retries(world), await send(world)
    assert await return_message(retries, offset=seq, group="readers", delayLevel=1) == OK
    await world.advance(1 * SECOND_MS)
    [result] = await retried(world, 1)
    assert decode_properties(result["properties"])["DELAY"] == "1"


@on_node()
async def test_a_dead_letter_of_a_delayed_message_is_visible_at_once(world: World) -> None:
    before = {**USERS, "DELAY": "18", "TIMER_DELAY_SEC": "7200", "REAL_TOPIC": "orders", "REAL_QID": "1"}
    seq = await send(world, properties=[encode_properties(before)])
    assert await return_message(create_retries(world), offset=seq, group="readers", delayLevel=-1) == OK
    [result] = await read(world, "%DLQ%readers")
    assert result["due_ms"] is None
    assert not {"DELAY", "TIMER_DELAY_SEC", "REAL_TOPIC"} & decode_properties(result["properties"]).keys()


@on_node()
async def test_the_maximum_of_attempts_is_the_clients_from_version_121_on(world: World) -> None:
    retries = create_retries(world, SubscriptionGroup("readers", retry_max_times=2))
    seq = await send(world, reconsume_times=[2])

    async def count_dead_letters(version: int, **most: int) -> int:
        assert await return_message(retries, version, offset=seq, group="readers", **most) == OK
        return len(await read(world, "%DLQ%readers"))

    assert await count_dead_letters(409) == 1  # the group's
    assert (
        await count_dead_letters(CPP_VERSION, maxReconsumeTimes=3) == 2
    )  # a client that cannot have meant it
    assert await count_dead_letters(121, maxReconsumeTimes=3) == 2  # the client's: one more try
    assert await count_dead_letters(121, maxReconsumeTimes=-1) == 2
    assert await count_dead_letters(121, maxReconsumeTimes=1) == 3


@on_node()
async def test_a_return_from_an_unknown_group_is_refused(world: World) -> None:
    seq = await send(world)
    code, remark = await return_message(create_retries(world), offset=seq, group="writers")
    assert (code, remark) == (
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "consumer group 'writers' does not exist",
    )
    assert "%RETRY%writers" not in world.broker.topics()


@on_node()
async def test_a_message_that_is_not_visible_is_not_found(world: World) -> None:
    scheduled_row = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    reserved = await world.broker.reserve(10)
    retries = create_retries(world)
    for offset in (scheduled_row, reserved + 3, 10**9, 0, -1):
        code, remark = await return_message(retries, offset=offset, group="readers", delayLevel=-1)
        assert (code, remark) == (ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
    assert "%DLQ%readers" not in world.broker.topics()


async def return_together(retries: Retries, *asked: tuple[int, str]) -> list[int]:
    """Return several messages (offset, group) at once, as dead letters. Return the codes of the answers."""
    pairs = [await Pair.create() for _ in asked]
    answers = await asyncio.gather(
        *[
            pair.ask(retries.handlers, CODE, offset=seq, group=group, delayLevel=-1)
            for pair, (seq, group) in zip(pairs, asked, strict=True)
        ]
    )
    for pair in pairs:
        pair.close()
    return [answer.code for answer in answers]


@on_node()
async def test_simultaneous_returns_share_a_commit_and_fail_separately(world: World) -> None:
    retries = create_retries(world)
    hidden = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    seqs = [hidden, *[await send(world, body=[b"%d" % number]) for number in range(3)]]
    commits = world.broker.log.writer.statistics.commits
    codes = await return_together(retries, *[(seq, "readers") for seq in seqs])
    assert codes == [ResponseCode.SYSTEM_ERROR, 0, 0, 0]
    assert world.broker.log.writer.statistics.commits == commits + 1
    assert [row["body"] for row in await read(world, "%DLQ%readers")] == [b"0", b"1", b"2"]


@on_node()
async def test_simultaneous_large_returns_do_not_exceed_a_batch(world: World) -> None:
    """Forty returns of a large message by one client must not make the returns of others fail."""
    large = await send(world, body=[bytes(limits.BODY_BYTES_MAX)])
    small = await send(world)
    assert set(
        await return_together(create_retries(world), *[(large, "readers")] * 40, (small, "readers"))
    ) == {0}


@on_node()
async def test_a_return_that_breaks_a_rule_fails_alone(world: World) -> None:
    too_long = encode_properties({"UNIQ_KEY": "x" * 32_740})
    seqs = [await send(world), await send(world, properties=[too_long], tag=[None]), 10**9]
    codes = await return_together(create_retries(world), *[(seq, "readers") for seq in seqs])
    assert codes == [0, ResponseCode.MESSAGE_ILLEGAL, ResponseCode.SYSTEM_ERROR]
    assert len(await read(world, "%DLQ%readers")) == 1


@on_node()
async def test_a_return_whose_topic_cannot_be_created_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries, seq = create_retries(world), await send(world)
    world.broker.tables.groups.update(SubscriptionGroup("others"))
    assert await return_together(retries, (seq, "readers")) == [0]
    monkeypatch.setattr(limits, "TOPICS_MAX", 1)
    assert await return_together(retries, (seq, "others"), (seq, "readers")) == [ResponseCode.SYSTEM_BUSY, 0]


@on_node()
async def test_numbers_beyond_32_bits_are_refused(world: World) -> None:
    seq = await send(world)
    code, remark = await return_message(
        create_retries(world), offset=seq, group="readers", delayLevel=1 << 31
    )
    assert code == ResponseCode.INVALID_PARAMETER and remark is not None and "delayLevel" in remark


@on_node()
async def test_a_return_to_a_group_without_retry_queues_sends_no_copy(world: World) -> None:
    seq = await send(world)
    retries = create_retries(world, SubscriptionGroup("readers", retry_queue_nums=0))
    assert await return_message(retries, offset=seq, group="readers", delayLevel=-1) == OK
    assert "%DLQ%readers" not in world.broker.topics()


@on_node()
async def test_a_header_without_its_fields_is_refused(world: World) -> None:
    code, remark = await return_message(create_retries(world), group="readers")
    assert code == ResponseCode.INVALID_PARAMETER and "offset" in remark
    code, _ = await return_message(create_retries(world), group="readers", offset="first")
    assert code == ResponseCode.INVALID_PARAMETER


# ---- sent by the client itself ---------------------------------------------------------------------------


@on_node()
async def test_the_header_counts_and_then_the_properties(world: World) -> None:
    retries = create_retries(world)
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
    then = create_retries(world, orderly=True).redirect(
        "%RETRY%readers", {**USERS, "DELAY": "19"}, 16, 16, 409
    )
    assert (then.topic, then.delay_level) == ("%DLQ%readers", 0)


@on_node()
async def test_invalid_numbers_in_properties_are_ignored(world: World) -> None:
    nonsense = {"DELAY": "soon", "RECONSUME_TIME": "", "MAX_RECONSUME_TIMES": "x"}
    then = create_retries(world).redirect("%RETRY%readers", nonsense, None, None, 409)
    assert (then.topic, then.delay_level, then.reconsume_times) == ("%RETRY%readers", 0, 0)


@on_node()
async def test_a_send_to_the_retry_topic_of_an_unknown_group_is_refused(world: World) -> None:
    with pytest.raises(GroupNotFound, match="'writers' does not exist"):
        create_retries(world).redirect("%RETRY%writers", {}, 1, 16, 409)
    assert "%RETRY%writers" not in world.broker.topics()


@on_node()
async def test_a_retry_topic_has_the_configured_number_of_queues(world: World) -> None:
    create_retries(world, SubscriptionGroup("readers", retry_queue_nums=3)).redirect(
        "%RETRY%readers", {}, 1, 16, 409
    )
    assert world.broker.topics()["%RETRY%readers"] == {"queues": 3}
    create_retries(world, SubscriptionGroup("readers", retry_queue_nums=3)).redirect(
        "%RETRY%readers", {}, 17, 16, 409
    )
    assert world.broker.topics()["%DLQ%readers"] == {"queues": 1}


def test_a_return_over_a_real_connection_is_retried(node: RunningNode, wire: Wire) -> None:
    """After a failed return, a client sends the message itself, with all its old properties."""
    consumer = {"groupName": "readers", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "me", "consumerDataSet": [consumer]})
    config = {"groupName": "readers", "retryQueueNums": 4}
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)
    properties = {**USERS, "TRAN_MSG": "true", "PGROUP": "payers", "RETRY_TOPIC": "orders", "DELAY": "18"}

    def resend(times: int) -> None:
        wire.ask_ok(
            RequestCode.SEND_MESSAGE_V2, b"again", a="CLIENT_INNER_PRODUCER", b="%RETRY%readers", c="TBW102", d=4,
            e=3, f=4, g=1, h=0, i=encode_properties(properties), j=times, k=False, l=2, m=False,
        )  # fmt: skip

    resend(2)
    waiting = node.run(node.broker.read_queue("SCHEDULE_TOPIC_XXXX", 17, 0, 9)).to_pylist()
    assert [(row["reconsume_times"], row["sys_flag"]) for row in waiting] == [(2, 0)]
    resend(3)
    [letter] = node.run(node.broker.read_queue("%DLQ%readers", 0, 0, 9)).to_pylist()
    assert (letter["body"], letter["reconsume_times"], letter["due_ms"]) == (b"again", 3, None)
    assert "DELAY" not in decode_properties(letter["properties"])
    assert node.broker.transactions.open() == []
