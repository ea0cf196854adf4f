"""Retries of failed messages, on a real broker in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.broker.consuming.retry import Destination
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.handlers.retries import Retries
from timeball.model import limits
from timeball.model.errors import GroupNotFound
from timeball.model.message import decode_properties, encode_properties

CODE = RequestCode.CONSUMER_SEND_MSG_BACK
OK = (ResponseCode.SUCCESS, None)
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
FIRST_RETRY_LEVEL = 3
# The delays of RocketMQ's sixteen retries: its delay levels from the third on.
RETRY_DELAYS_MS = [10 * SECOND_MS, 30 * SECOND_MS]
RETRY_DELAYS_MS += [minutes * MINUTE_MS for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)]
RETRY_DELAYS_MS += [1 * HOUR_MS, 2 * HOUR_MS]
PROPERTIES = {"KEYS": "order-17", "TAGS": "close", "UNIQ_KEY": "A17"}  # of the returned message
CPP_VERSION = 63


async def send(world: World, **columns: Any) -> int:
    """Send one visible message. Return its sequence number."""
    all_columns = {"properties": [encode_properties(PROPERTIES)], "tag": ["close"], **columns}
    return int((await world.broker.send(batch(1, **all_columns))).first_seq)


async def return_message(retries: Retries, version: int = 409, **header: object) -> tuple[int, str | None]:
    """Return a message with CONSUMER_SEND_MSG_BACK. Return code and remark of the answer."""
    pair = await Pair.create()
    answer = await pair.ask(retries.handlers, CODE, version=version, **header)
    pair.close()
    return answer.code, answer.remark


async def read(world: World, topic: str) -> list[dict[str, Any]]:
    """Return all visible messages of a topic."""
    result = []
    for queue in world.broker.queues(topic):
        result += (await world.broker.read_queue(topic, queue, 0, 100)).to_pylist()
    return result


async def retries_of(world: World, count: int) -> list[dict[str, Any]]:
    """Wait for `count` messages in the retry topic, and return them."""
    await world.until(lambda: world.broker.queues("%RETRY%readers")[0][1] >= count, "the retry")
    return await read(world, "%RETRY%readers")


def create_retries(world: World, group: SubscriptionGroup | None = None, orderly: bool = False) -> Retries:
    """Create a group, and return the handlers of its retries. `orderly` is the answer for each group."""
    world.broker.tables.groups.update(group or SubscriptionGroup("readers"))
    return Retries(context_of(world.broker), lambda name: orderly)


# ---- messages returned by CONSUMER_SEND_MSG_BACK ---------------------------------------------------------


@on_node()
async def test_a_dead_letter_has_the_values_of_the_message_and_its_origin(world: World) -> None:
    seq = await send(
        world, body=[b"close"], keys=["order-17"], unique_key=["A17"], flag=[3], sys_flag=[1], born_ms=[5],
        born_host=["10.0.0.7:5"], reconsume_times=[16],
    )  # fmt: skip
    assert await return_message(create_retries(world), offset=seq, group="readers", delayLevel=0) == OK
    [letter] = await read(world, "%DLQ%readers")
    assert (letter["body"], letter["tag"], letter["keys"]) == (b"close", "close", "order-17")
    assert (letter["unique_key"], letter["flag"], letter["sys_flag"]) == ("A17", 3, 1)
    assert (letter["born_ms"], letter["born_host"], letter["reconsume_times"]) == (5, "10.0.0.7:5", 17)
    assert decode_properties(letter["properties"]) == {
        **PROPERTIES,
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": f"0A00000100002A9F{seq:016X}",
        "WAIT": "false",
    }
    assert world.broker.topics()["%DLQ%readers"] == {"queues": 1}


@on_node()
async def test_a_message_becomes_a_dead_letter_after_sixteen_retries(world: World) -> None:
    retries = create_retries(world)
    seq = first_seq = await send(world, unique_key=["A17"])
    for number, delay_ms in enumerate(RETRY_DELAYS_MS):
        assert await return_message(retries, offset=seq, group="readers", delayLevel=0) == OK
        await world.advance(delay_ms - 1)
        assert len(await read(world, "%RETRY%readers")) == number
        await world.advance(1)
        retry = (await retries_of(world, number + 1))[-1]
        assert (retry["reconsume_times"], retry["body"]) == (number + 1, b"body")
        properties = decode_properties(retry["properties"])
        assert properties["DELAY"] == str(FIRST_RETRY_LEVEL + number)
        assert (properties["RETRY_TOPIC"], properties["REAL_TOPIC"]) == ("orders", "%RETRY%readers")
        assert properties["ORIGIN_MESSAGE_ID"] == "0A00000100002A9F" + f"{first_seq:016X}"
        seq = retry["seq"]
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
    await world.advance(1 * SECOND_MS)  # level 1
    [retry] = await retries_of(world, 1)
    assert decode_properties(retry["properties"])["DELAY"] == "1"


@on_node()
async def test_a_dead_letter_of_a_delayed_message_is_visible_at_once(world: World) -> None:
    """It keeps none of the properties of the delay."""
    delay = {"DELAY": "18", "TIMER_DELAY_SEC": "7200", "REAL_TOPIC": "orders", "REAL_QID": "1"}
    seq = await send(world, properties=[encode_properties({**PROPERTIES, **delay})])
    assert await return_message(create_retries(world), offset=seq, group="readers", delayLevel=-1) == OK
    [letter] = await read(world, "%DLQ%readers")
    assert letter["due_ms"] is None
    assert not {"DELAY", "TIMER_DELAY_SEC", "REAL_TOPIC"} & decode_properties(letter["properties"]).keys()


@pytest.mark.parametrize(
    ("version", "client_times_max", "is_dead_letter"),
    [
        (409, None, True),  # the group's maximum counts
        (CPP_VERSION, 3, True),  # too old to know the field
        (121, 3, False),
        (121, -1, False),  # RocketMQ's maximum, 16
        (121, 1, True),
    ],
)
@on_node()
async def test_a_client_from_version_121_on_sets_the_maximum_of_attempts(
    world: World, version: int, client_times_max: int | None, is_dead_letter: bool
) -> None:
    """The group allows two retries, and the message has had two."""
    retries = create_retries(world, SubscriptionGroup("readers", retry_max_times=2))
    seq = await send(world, reconsume_times=[2])
    times_max = {} if client_times_max is None else {"maxReconsumeTimes": client_times_max}
    assert await return_message(retries, version, offset=seq, group="readers", **times_max) == OK
    assert ("%DLQ%readers" in world.broker.topics()) == is_dead_letter


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
async def test_a_return_of_a_message_that_is_not_visible_or_not_in_the_log_is_refused(world: World) -> None:
    scheduled_seq = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    reserved_seq = 3 + await world.broker.reserve(10)
    retries = create_retries(world)
    for offset in (scheduled_seq, reserved_seq, 10**9, 0, -1):
        code, remark = await return_message(retries, offset=offset, group="readers", delayLevel=-1)
        assert (code, remark) == (ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}")
    assert "%DLQ%readers" not in world.broker.topics()


async def return_together(retries: Retries, *messages: tuple[int, str]) -> list[int]:
    """Return several messages (seq, group) at once, as dead letters. Return the codes of the answers."""
    pairs = [await Pair.create() for _ in messages]
    answers = await asyncio.gather(
        *[
            pair.ask(retries.handlers, CODE, offset=seq, group=group, delayLevel=-1)
            for pair, (seq, group) in zip(pairs, messages, strict=True)
        ]
    )
    for pair in pairs:
        pair.close()
    return [answer.code for answer in answers]


@on_node()
async def test_simultaneous_returns_share_a_commit_and_fail_separately(world: World) -> None:
    retries = create_retries(world)
    scheduled_seq = (await world.broker.send(batch(1, delay_ms=[1_000]))).first_seq
    seqs = [scheduled_seq, *[await send(world, body=[b"%d" % number]) for number in range(3)]]
    commits = world.broker.log.writer.statistics.commits
    codes = await return_together(retries, *[(seq, "readers") for seq in seqs])
    assert codes == [ResponseCode.SYSTEM_ERROR, 0, 0, 0]
    assert world.broker.log.writer.statistics.commits == commits + 1
    assert [row["body"] for row in await read(world, "%DLQ%readers")] == [b"0", b"1", b"2"]


@on_node()
async def test_forty_simultaneous_returns_of_the_largest_message_all_succeed(world: World) -> None:
    """A batch of all of them would be too large, and its refusal would also refuse the returns of other clients."""
    large_seq = await send(world, body=[bytes(limits.BODY_BYTES_MAX)])
    small_seq = await send(world)
    returned = [*[(large_seq, "readers")] * 40, (small_seq, "readers")]
    assert set(await return_together(create_retries(world), *returned)) == {0}


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
    # The dead-letter topic of the other group cannot be created.
    monkeypatch.setattr(limits, "TOPICS_MAX", 1)
    assert await return_together(retries, (seq, "others"), (seq, "readers")) == [ResponseCode.SYSTEM_BUSY, 0]


@on_node()
async def test_a_delay_level_beyond_32_bits_is_refused(world: World) -> None:
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


@pytest.mark.parametrize("fields", [{}, {"offset": "first"}], ids=["missing", "no number"])
@on_node()
async def test_a_return_without_a_valid_offset_is_refused(world: World, fields: dict[str, str]) -> None:
    code, remark = await return_message(create_retries(world), group="readers", **fields)
    assert code == ResponseCode.INVALID_PARAMETER and "offset" in str(remark)


# ---- messages that the client sends to the retry topic itself --------------------------------------------


def redirect(
    retries: Retries,
    properties: dict[str, str],
    *,
    topic: str = "%RETRY%readers",
    reconsume_times: int | None = None,
    max_reconsume_times: int | None = None,
) -> Destination:
    """Decide the destination of a message that a current client sends with these counts in its header."""
    return retries.redirect(topic, properties, reconsume_times, max_reconsume_times, 409)


@on_node()
async def test_counts_in_the_header_count_before_counts_in_the_properties(world: World) -> None:
    retries = create_retries(world)
    properties = {**PROPERTIES, "DELAY": "5", "RECONSUME_TIME": "4", "MAX_RECONSUME_TIMES": "4"}
    both_in_header = redirect(retries, properties, reconsume_times=2, max_reconsume_times=16)
    assert (both_in_header.topic, both_in_header.reconsume_times) == ("%RETRY%readers", 2)
    none_in_header = redirect(retries, properties, reconsume_times=0)
    assert (none_in_header.topic, none_in_header.reconsume_times) == ("%RETRY%readers", 4)
    assert both_in_header.delay_level == none_in_header.delay_level == 5
    beyond_maximum_of_properties = redirect(retries, properties, reconsume_times=5)
    assert beyond_maximum_of_properties.topic == "%DLQ%readers"
    assert beyond_maximum_of_properties.delay_level == 0
    assert "DELAY" not in beyond_maximum_of_properties.properties
    assert world.broker.topics()["%RETRY%readers"] == world.broker.topics()["%DLQ%readers"] == {"queues": 1}


@on_node()
async def test_a_message_that_an_orderly_group_sends_to_its_retry_topic_is_a_dead_letter(
    world: World,
) -> None:
    """An orderly consumer retries by itself. It sends a message only when it has given it up."""
    retries = create_retries(world, orderly=True)
    properties = {**PROPERTIES, "DELAY": "19"}
    destination = redirect(retries, properties, reconsume_times=16, max_reconsume_times=16)
    assert (destination.topic, destination.delay_level) == ("%DLQ%readers", 0)


@on_node()
async def test_invalid_numbers_in_the_properties_of_a_retry_are_ignored(world: World) -> None:
    properties = {"DELAY": "soon", "RECONSUME_TIME": "", "MAX_RECONSUME_TIMES": "x"}
    destination = redirect(create_retries(world), properties)
    assert destination.topic == "%RETRY%readers"
    assert (destination.delay_level, destination.reconsume_times) == (0, 0)


@on_node()
async def test_a_send_to_the_retry_topic_of_an_unknown_group_is_refused(world: World) -> None:
    with pytest.raises(GroupNotFound, match="'writers' does not exist"):
        redirect(create_retries(world), {}, topic="%RETRY%writers", reconsume_times=1)
    assert "%RETRY%writers" not in world.broker.topics()


@on_node()
async def test_a_retry_topic_has_the_configured_number_of_queues_and_a_dead_letter_topic_one(
    world: World,
) -> None:
    retries = create_retries(world, SubscriptionGroup("readers", retry_queue_nums=3))
    redirect(retries, {}, reconsume_times=1, max_reconsume_times=16)
    assert world.broker.topics()["%RETRY%readers"] == {"queues": 3}
    redirect(retries, {}, reconsume_times=17, max_reconsume_times=16)
    assert world.broker.topics()["%DLQ%readers"] == {"queues": 1}


def test_a_send_to_the_retry_topic_waits_for_its_level_or_is_a_dead_letter(
    node: RunningNode, wire: Wire
) -> None:
    """The send has all properties of the failed message, also those of the transaction that it came from."""
    consumer = {"groupName": "readers", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "me", "consumerDataSet": [consumer]})
    config = {"groupName": "readers", "retryQueueNums": 4}
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)
    transaction = {"TRAN_MSG": "true", "PGROUP": "payers"}
    properties = {**PROPERTIES, **transaction, "RETRY_TOPIC": "orders", "DELAY": "18"}
    fields = {"queue_id": 3, "sys_flag": 4, "max_reconsume_times": 2, "properties": properties}
    answer = sent(wire, b"again", topic="%RETRY%readers", reconsume_times=2, **fields)
    assert answer.code == ResponseCode.SUCCESS
    level_queue = 18 - 1
    pending = node.run(node.broker.read_queue("SCHEDULE_TOPIC_XXXX", level_queue, 0, 9)).to_pylist()
    assert [(row["reconsume_times"], row["sys_flag"]) for row in pending] == [(2, 0)]
    answer = sent(wire, b"again", topic="%RETRY%readers", reconsume_times=3, **fields)
    assert answer.code == ResponseCode.SUCCESS
    [letter] = node.run(node.broker.read_queue("%DLQ%readers", 0, 0, 9)).to_pylist()
    assert (letter["body"], letter["reconsume_times"], letter["due_ms"]) == (b"again", 3, None)
    assert "DELAY" not in decode_properties(letter["properties"])
    assert node.broker.transactions.open() == [], "neither send has begun a transaction"
