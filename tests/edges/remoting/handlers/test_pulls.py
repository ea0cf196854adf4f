"""Pulls over a real connection: found, filtered, waiting and moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stored_message import StoredMessage, decode_stored
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.edges.remoting.codec.test_plain_pulls import GOLDEN
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.topics import READ, WRITE
from timeball.edges.remoting.calls import Call
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import (
    BINARY,
    FRAME_BYTES_MAX,
    JSON,
    Command,
    cut,
    decode,
    encode,
)
from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON
from timeball.edges.remoting.handlers import pulls as module
from timeball.edges.remoting.handlers.pulls import Pulls, StoredFrames
from timeball.model.access import ANONYMOUS, Caller

PULL, LITE = RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE


def pull(wire: Wire, offset: int = 0, *, code: int = PULL, topic: str = "orders", **fields: object) -> int:
    """Send a pull of queue 0 with a subscription to all messages, and return its opaque. `fields` replace others."""
    header = {
        "consumerGroup": "group", "topic": topic, "queueId": 0, "queueOffset": offset, "maxMsgNums": 32,
        "sysFlag": PullFlag.SUBSCRIPTION, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
        "subVersion": 0, **fields,
    }  # fmt: skip
    return wire.send(code, **header)


def pulled(wire: Wire, offset: int = 0, **fields: object) -> Command:
    """Send a pull as `pull` does, and return its answer."""
    return wire.answer_to(pull(wire, offset, **fields))  # type: ignore[arg-type]


def messages(answer: Command) -> list[StoredMessage]:
    """Return the messages of a successful pull."""
    assert answer.code == ResponseCode.SUCCESS, (answer.code, answer.remark)
    return decode_stored(answer.body)


def bodies(answer: Command) -> list[bytes]:
    """Return the bodies of the messages of a successful pull."""
    return [message.body for message in messages(answer)]


def recorded(name: str) -> Iterator[tuple[bytes, Command]]:
    """Yield the bytes of each recorded frame, and its command."""
    data, begin = (GOLDEN / name).read_bytes(), 0
    for frame in cut(data, FRAME_BYTES_MAX)[0]:
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "big")
        yield data[begin:end], decode(frame)
        begin = end


def subscribes(command: Command) -> bool:
    """Check that a command is a pull with a subscription of its own."""
    return command.code in (PULL, LITE) and bool(int(command.ext["sysFlag"]) & PullFlag.SUBSCRIPTION)


def answered_counts(node: RunningNode) -> tuple[int, int]:
    """Return how many pulls were answered since the start: as plain pulls, and by the reference."""
    with node.client() as ball:
        pulls = ball.status()["pulls"]
    return pulls["plain"], pulls["other"]


def were_answered(node: RunningNode, before: tuple[int, int], plain: int, other: int) -> bool:
    """Return whether `plain` and `other` more pulls were answered. Python's codec answers no pull as plain."""
    assert node.node.edges is not None
    if node.node.edges.remoting.codec is PYTHON:
        plain, other = 0, plain + other
    return answered_counts(node) == (before[0] + plain, before[1] + other)


@pytest.mark.parametrize("name", ["java-4.9.8.bin", "java-5.3.3.bin"])
def test_recorded_pulls_of_stock_consumers_are_answered_as_plain_pulls(node: RunningNode, name: str) -> None:
    """The test sends only pulls with a subscription in their header, because no heartbeat precedes them."""
    pulls = [(raw, command.opaque) for raw, command in recorded(name) if subscribes(command)]
    assert len(pulls) >= 2
    node.run(node.broker.create_topic("recorded-topic", 2))
    with Wire.to(node) as wire:
        for queue in (0, 1):
            sent(wire, b"stored", topic="recorded-topic", queue_id=queue)
        before = answered_counts(node)
        for raw, opaque in pulls:
            wire.send_bytes(raw)
            assert bodies(wire.answer_to(opaque)) == [b"stored"]
    assert were_answered(node, before, plain=len(pulls), other=0)


def test_pulls_that_wait_or_filter_or_are_refused_are_answered_by_the_reference(node: RunningNode) -> None:
    with Wire.to(node) as wire:
        sent(wire, b"first", properties={"TAGS": "A"})
        before = answered_counts(node)
        assert pulled(wire, 1).code == ResponseCode.PULL_NOT_FOUND
        assert bodies(pulled(wire, subscription="A")) == [b"first"]
        assert pulled(wire, topic="nowhere").code == ResponseCode.TOPIC_NOT_EXIST
        assert pulled(wire, sysFlag=0).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
        assert were_answered(node, before, plain=0, other=4)
        assert bodies(pulled(wire)) == [b"first"]
        assert were_answered(node, before, plain=1, other=4)


def test_a_fault_in_the_compiled_codec_is_logged_and_the_reference_answers(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("a fault of the broker")

    assert node.node.edges is not None
    with Wire.to(node) as wire:
        sent(wire, b"first")
        before = answered_counts(node)
        monkeypatch.setattr(StoredFrames, "append_from_memory", broken)
        monkeypatch.setattr(StoredFrames, "get_from_memory", lambda *_: None)
        assert bodies(pulled(wire)) == [b"first"]
        assert were_answered(node, before, plain=0, other=1)
    assert ("plain pull failed topic=orders queue=0" in caplog.text) == (
        node.node.edges.remoting.codec is not PYTHON
    )


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize("code", [PULL, LITE])
def test_pulled_messages_are_as_sent_with_their_positions(
    node: RunningNode, serialisation: int, code: int
) -> None:
    with Wire.to(node, serialisation) as wire:
        send_answer = sent(wire, b"first", properties={"KEYS": "k"})
        sent(wire, b"second")
        answer = pulled(wire, code=code)
    first, second = messages(answer)
    assert (first.body, second.body) == (b"first", b"second")
    assert (first.topic, first.queue_id, first.queue_offset) == ("orders", 0, 0)
    assert f"{first.seq:016X}" == send_answer.ext["msgId"][-16:]
    assert first.properties["KEYS"] == "k"
    assert first.store_host.port == node.node.remoting_port
    offsets = {name: answer.ext[name] for name in ("nextBeginOffset", "minOffset", "maxOffset")}
    assert offsets == {"nextBeginOffset": "2", "minOffset": "0", "maxOffset": "2"}


def test_a_pull_returns_at_most_the_requested_number(wire: Wire) -> None:
    for number in range(5):
        sent(wire, b"%d" % number)
    answer = pulled(wire, 1, maxMsgNums=3)
    assert (bodies(answer), answer.ext["nextBeginOffset"]) == ([b"1", b"2", b"3"], "4")


def test_a_pull_returns_at_most_the_requested_bytes_or_one_message(wire: Wire) -> None:
    for _ in range(5):
        sent(wire, bytes(1_000))
    answer = pulled(wire, maxMsgBytes=2_600)
    assert (len(bodies(answer)), answer.ext["nextBeginOffset"]) == (2, "2")
    assert len(bodies(pulled(wire, maxMsgBytes=1))) == 1


def test_tag_keys_and_id_of_a_message_sent_over_http_are_rocketmqs_properties(
    node: RunningNode, wire: Wire
) -> None:
    node.run(node.broker.create_topic("orders", 1))
    with node.client() as ball:
        ball.send("orders", b"x", tag="A", keys=["k1"], properties={"TAGS2": "no"}, message_id="I" * 32)
    [message] = messages(pulled(wire))
    assert message.properties == {
        "TAGS2": "no", "UNIQ_KEY": "I" * 32, "TAGS": "A", "KEYS": "k1", "MSG_REGION": "DefaultRegion",
    }  # fmt: skip


def test_a_tag_filter_selects_messages_also_among_tags_with_the_same_hash(wire: Wire) -> None:
    """The tags Aa and BB have the same hash. The broker distinguishes them, not the client."""
    for tag in ("Aa", "BB", "C", "Aa"):
        sent(wire, tag.encode(), properties={"TAGS": tag})
    assert bodies(pulled(wire, subscription="Aa")) == [b"Aa", b"Aa"]
    assert bodies(pulled(wire, subscription="BB || C")) == [b"BB", b"C"]
    assert bodies(pulled(wire, 1, subscription="BB")) == [b"BB"]


def test_a_pull_without_a_match_continues_behind_the_examined_messages(wire: Wire) -> None:
    for _ in range(4):
        sent(wire, properties={"TAGS": "A"})
    answer = pulled(wire, subscription="D")
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "4")


def test_an_sql_filter_selects_messages_and_an_invalid_one_is_refused(wire: Wire) -> None:
    for number in range(4):
        sent(wire, b"%d" % number, properties={"n": str(number)})
    answer = pulled(wire, subscription="n BETWEEN 1 AND 2", expressionType="SQL92")
    assert bodies(answer) == [b"1", b"2"]
    invalid = pulled(wire, subscription="n >", expressionType="SQL92")
    assert invalid.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_a_pull_outside_the_queue_is_moved_to_the_nearest_offset(wire: Wire) -> None:
    sent(wire)
    for offset, nearest in ((7, "1"), (-3, "0")):
        answer = pulled(wire, offset)
        assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, nearest)
    assert pulled(wire, 1).code == ResponseCode.PULL_NOT_FOUND, "the end of the queue is a valid offset"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "nobody"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queueId": 99}, ResponseCode.INVALID_PARAMETER),
        ({"queueId": -1}, ResponseCode.INVALID_PARAMETER),
        ({"subscription": "||"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"sysFlag": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ({"consumerGroup": "no/such"}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_invalid_pulls_are_refused_with_rocketmqs_codes(
    wire: Wire, fields: dict[str, object], code: int
) -> None:
    sent(wire)
    answer = pulled(wire, **fields)
    assert (answer.code, bool(answer.remark)) == (code, True)


def waiting_pull(node: RunningNode, wire: Wire, offset: int, **fields: object) -> int:
    """Send a pull that may wait for a minute, and return its opaque when it waits."""
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    opaque = pull(wire, offset, sysFlag=int(flags), suspendTimeoutMillis=60_000, **fields)  # type: ignore[arg-type]
    eventually(lambda: waiting_count(node) == 1, "the pull waits")
    return opaque


def waiting_count(node: RunningNode) -> int:
    """Return the number of calls that wait for messages."""
    return node.broker.waiters._count


def test_a_waiting_pull_is_answered_with_the_next_message(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    opaque = waiting_pull(node, wire, 1)
    with Wire.to(node) as other:
        sent(other, b"next")
    assert bodies(wire.answer_to(opaque)) == [b"next"]


def test_a_waiting_pull_is_answered_with_a_released_message(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    opaque = waiting_pull(node, wire, 1)
    due_ms = node.broker.clock.now_ms() + 50
    with Wire.to(node) as other:
        sent(other, b"later", properties={"TIMER_DELIVER_MS": str(due_ms)})
    [message] = messages(wire.answer_to(opaque))
    assert message.body == b"later"
    assert message.store_ms >= due_ms


def test_a_waiting_pull_continues_to_wait_if_a_message_does_not_match(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    opaque = waiting_pull(node, wire, 1, subscription="B")
    with Wire.to(node) as other:
        sent(other, b"no match")
        eventually(lambda: waiting_count(node) == 1, "it waits again")
        sent(other, b"match", properties={"TAGS": "B"})
    answer = wire.answer_to(opaque)
    assert (bodies(answer), answer.ext["nextBeginOffset"]) == ([b"match"], "3")


def test_a_waiting_pull_is_answered_with_not_found_at_its_timeout(wire: Wire) -> None:
    sent(wire)
    flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
    answer = pulled(wire, 1, sysFlag=int(flags), suspendTimeoutMillis=20)
    assert answer.code == ResponseCode.PULL_NOT_FOUND


def test_a_waiting_pull_fails_if_its_topic_is_deleted(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    opaque = waiting_pull(node, wire, 1)
    with Wire.to(node) as other:
        other.ask_ok(RequestCode.DELETE_TOPIC_IN_BROKER, topic="orders")
    assert wire.answer_to(opaque).code == ResponseCode.TOPIC_NOT_EXIST
    assert "orders" not in node.broker.topics()


def waiting_call(pair: Pair) -> Call:
    """Create the call of a pull of queue 0 from its beginning that may wait for 15 s."""
    ext = {
        "consumerGroup": "group", "topic": "orders", "queueId": 0, "queueOffset": 0, "subscription": "*",
        "sysFlag": int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND), "suspendTimeoutMillis": 15_000,
    }  # fmt: skip
    return Call(pair.connection, Command(PULL, ext={name: str(value) for name, value in ext.items()}))


@on_node()
async def test_a_message_that_arrives_before_a_pull_begins_to_wait_is_found(world: World) -> None:
    """The commit of the message wakes no pull, because the pull has checked the queue but does not wait yet."""
    await world.broker.create_topic("orders", 1)
    pair, handlers = await Pair.create(), Pulls(context_of(world.broker)).handlers
    pending_answer: Any = handlers[PULL](waiting_call(pair))
    await world.broker.send(batch(1))

    async def wait(*_: object) -> bool:
        raise AssertionError("the pull waits although the queue has a message")

    world.broker.waiters.wait = wait
    assert bodies(await pending_answer) == [b"body"]
    pair.close()


@on_node()
async def test_a_waiting_pull_finds_the_messages_of_a_topic_that_is_created_again(world: World) -> None:
    """A deletion wakes the pull. Before it runs, another client's message may have created the topic again."""
    await world.broker.create_topic("orders", 1)
    pair, handlers = await Pair.create(), Pulls(context_of(world.broker)).handlers
    has_waited = False

    async def delete_and_send(*_: object) -> bool:
        nonlocal has_waited
        assert not has_waited, "the pull waits although the queue has a message"
        has_waited = True
        await world.broker.administration.delete_topic("orders", ANONYMOUS)
        await world.broker.send(batch(1))
        return True

    world.broker.waiters.wait = delete_and_send
    answer: Any = await handlers[PULL](waiting_call(pair))  # type: ignore[misc]
    assert bodies(answer) == [b"body"]
    pair.close()


def test_the_waiting_pull_of_a_disconnected_client_is_cancelled(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    with Wire.to(node) as other:
        waiting_pull(node, other, 1)
    eventually(lambda: waiting_count(node) == 0, "the pull does not wait any more")


def test_a_pull_commits_the_offset_in_its_header(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    flags = PullFlag.SUBSCRIPTION | PullFlag.COMMIT_OFFSET
    pulled(wire, 1, sysFlag=int(flags), commitOffset=1)
    assert node.broker.offsets("group", "orders") == {0: 1}


def test_messages_can_be_pulled_after_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        sent(wire, b"before")
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        sent(wire, b"after")
        assert bodies(pulled(wire)) == [b"before", b"after"]


def beat(wire: Wire, text: str = "*", version: int = 1, model: str = "CLUSTERING") -> None:
    """Send a heartbeat of a consumer that subscribes to the topic with this filter text."""
    subscription = {"topic": "orders", "subString": text, "subVersion": version, "expressionType": "TAG"}
    consumer = {
        "groupName": "group", "consumeType": "CONSUME_PASSIVELY", "messageModel": model,
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [subscription],
    }  # fmt: skip
    body = {"clientID": "one", "producerDataSet": [], "consumerDataSet": [consumer]}
    wire.ask_ok(RequestCode.HEART_BEAT, body)


def test_a_pull_without_a_subscription_uses_the_latest_one_of_the_heartbeats(wire: Wire) -> None:
    for tag in "AB":
        sent(wire, tag.encode(), properties={"TAGS": tag})
    beat(wire, "B", version=5)
    assert bodies(pulled(wire, sysFlag=0, subVersion=5)) == [b"B"]
    newer = pulled(wire, sysFlag=0, subVersion=6)
    assert newer.code == ResponseCode.SUBSCRIPTION_NOT_LATEST, "no heartbeat had this version"
    beat(wire, "*", version=6)
    # A subscription to all messages counts even if it is older than the client's.
    assert bodies(pulled(wire, sysFlag=0, subVersion=7)) == [b"A", b"B"]


def test_a_pull_in_broadcast_mode_is_refused_if_the_group_disables_it(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    beat(wire, model="BROADCASTING")
    assert len(bodies(pulled(wire, sysFlag=0, subVersion=1))) == 1
    config = {"groupName": "group", "consumeBroadcastEnable": False}
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)
    refused = pulled(wire, sysFlag=0, subVersion=1)
    assert (refused.code, "broadcast" in str(refused.remark)) == (ResponseCode.NO_PERMISSION, True)
    beat(wire, version=2)
    assert len(bodies(pulled(wire, sysFlag=0, subVersion=2))) == 1, "the mode is clustering now"


def test_a_change_of_topic_or_group_applies_to_the_next_plain_pull(node: RunningNode, wire: Wire) -> None:
    """The cached grants of plain pulls become invalid."""
    sent(wire)
    before = answered_counts(node)
    for _ in range(3):
        assert len(bodies(pulled(wire))) == 1
    topic = {"topic": "orders", "defaultTopic": "TBW102", "readQueueNums": 8, "writeQueueNums": 8}
    topic |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_TOPIC, **topic, perm=WRITE)
    assert pulled(wire).code == ResponseCode.NO_PERMISSION
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_TOPIC, **topic, perm=READ | WRITE)
    assert len(bodies(pulled(wire))) == 1
    config = {"groupName": "group", "consumeEnable": False}
    wire.ask_ok(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, config)
    assert pulled(wire).code == ResponseCode.NO_PERMISSION
    assert len(bodies(pulled(wire, consumerGroup="other"))) == 1
    assert were_answered(node, before, plain=5, other=2)


def test_a_grant_is_valid_for_one_queue_and_subscription(node: RunningNode, wire: Wire) -> None:
    for queue, tag in enumerate("AB"):
        sent(wire, tag.encode(), queue_id=queue, properties={"TAGS": tag})
    for _ in range(2):  # the first pulls fill the cache of grants
        assert bodies(pulled(wire)) == [b"A"]
        assert bodies(pulled(wire, queueId=1)) == [b"B"]
        assert pulled(wire, queueId=1, subscription="A").code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert bodies(pulled(wire, queueId=1, subscription="B")) == [b"B"]
        assert pulled(wire, queueId=99).code == ResponseCode.INVALID_PARAMETER


def test_the_number_of_grants_is_limited(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRANTS_MAX", 2)
    sent(wire)
    for group in ("a", "b", "c", "a"):
        assert len(bodies(pulled(wire, consumerGroup=group))) == 1
    assert node.node.edges is not None
    assert len(node.node.edges.remoting._pulls._grants) <= 2


@pytest.mark.skipif(COMPILED is None, reason="only the compiled codec makes plain pulls")
@on_node(queues_per_topic=1)
async def test_a_plain_pull_of_an_account_gets_no_cached_grant(world: World) -> None:
    """The edge passes no signed request to `answer_plain`, which must not use a cached grant for one either."""
    assert COMPILED is not None
    await world.broker.send(batch(1))
    pair, pulls = await Pair.create(), Pulls(context_of(world.broker), COMPILED)
    ext = {
        "consumerGroup": "group",
        "topic": "orders",
        "queueId": "0",
        "queueOffset": "0",
        "subscription": "*",
    }
    request = Command(PULL, ext={**ext, "sysFlag": str(int(PullFlag.SUBSCRIPTION))})
    [plain_pull], _, _ = COMPILED.cut(encode(request), FRAME_BYTES_MAX)
    assert pulls.answer_plain(pair.connection, plain_pull), "the caller is anonymous"
    pair.connection.caller = Caller()
    assert not pulls.answer_plain(pair.connection, plain_pull)
    pair.close()
