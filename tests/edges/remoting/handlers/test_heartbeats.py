"""Heartbeats as three generations of clients send them, and what the members of a group hear of each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.codec.codes import BROKER_VERSION, RequestCode, ResponseCode
from timeball.edges.remoting.connection import EXPIRY_MS
from timeball.edges.remoting.handlers.heartbeats import BODY_BYTES_MAX, HeartBeats
from timeball.edges.remoting.handlers.rebalance import Locks
from timeball.edges.shared.sessions import Subscription

BEAT, BYE = RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT
IDS, CHANGED = RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED

JAVA_SUBSCRIPTION = {
    "classFilterMode": False, "codeSet": [2_598_919], "expressionType": "TAG", "subString": "A || B",
    "subVersion": 1_700_000_000_000, "tagsSet": ["A", "B"], "topic": "orders",
}  # fmt: skip


def java(client_id: str = "127.0.0.1@1#2", group: str = "g", **consumer: Any) -> dict[str, Any]:
    return {
        "clientID": client_id,
        "consumerDataSet": [
            {
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "consumeType": "CONSUME_PASSIVELY",
                "groupName": group,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [JAVA_SUBSCRIPTION],
                "unitMode": False,
                **consumer,
            }
        ],
        "heartbeatFingerprint": 0,
        "isWithoutSub": False,
        "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
    }


def cpp(**consumer: Any) -> dict[str, Any]:
    """The C++ client sends numbers for words and text for numbers."""
    return {
        "clientID": "cpp@1",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [
            {
                "groupName": "g",
                "consumeType": 1,
                "messageModel": 1,
                "consumeFromWhere": 4,
                "subscriptionDataSet": [{"topic": "orders", "subString": "*", "subVersion": "1700000000000"}],
                **consumer,
            }
        ],
    }


@pytest.mark.parametrize("word", ["²", "9" * 5_000, "X" * 5_000])
def test_a_word_that_looks_like_a_number_is_a_word(node: RunningNode, wire: Wire, word: str) -> None:
    wire.ask_ok(BEAT, cpp(messageModel=word))
    remoting = node.node.edges.remoting
    assert remoting is not None
    group = remoting.context.sessions.group("g")
    assert group is not None and group.how.message_model == word[:64]


def test_the_answer_tells_a_version_that_clients_trust(wire: Wire) -> None:
    answer = wire.ask_ok(BEAT, java())
    assert answer.version == BROKER_VERSION >= 232
    assert answer.ext == {}


def test_a_java_consumer_is_in_its_group(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java())
    assert json_body(wire.ask_ok(IDS, consumerGroup="g")) == {"consumerIdList": ["127.0.0.1@1#2"]}
    clients = node.node.edges.remoting.context.sessions
    assert clients.subscription("g", "orders") == Subscription("orders", "A || B", "TAG", 1_700_000_000_000)
    assert clients.group("g").how.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert len(clients.producers("CLIENT_INNER_PRODUCER")) == 1


def test_a_cpp_consumer_means_the_same(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, cpp())
    clients = node.node.edges.remoting.context.sessions
    how = clients.group("g").how
    assert (how.consume_type, how.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert how.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert clients.subscription("g", "orders") == Subscription("orders", "*", "TAG", 1_700_000_000_000)


@pytest.mark.parametrize("model", ["Clustering", "CLUSTERING", 1, "1"])
def test_words_and_numbers_name_one_model(node: RunningNode, wire: Wire, model: object) -> None:
    wire.ask_ok(BEAT, java(messageModel=model))
    assert node.node.edges.remoting.context.sessions.group("g").how.message_model == "CLUSTERING"


def test_a_client_without_groups_is_welcome(wire: Wire) -> None:
    wire.ask_ok(BEAT, {"clientID": "idle", "producerDataSet": None})
    wire.ask_ok(BEAT, {"clientID": "idle", "consumerDataSet": [], "producerDataSet": []})


def test_the_first_heartbeat_makes_the_group_and_its_retry_topic(node: RunningNode, wire: Wire) -> None:
    assert "%RETRY%g" not in node.broker.topics()
    wire.ask_ok(BEAT, java())
    (queues,) = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%g"))["queueDatas"]
    assert queues["readQueueNums"] == queues["writeQueueNums"] == 1
    assert node.node.broker.tables.groups.get("g") == SubscriptionGroup("g")


def test_nobody_is_in_an_unknown_group(wire: Wire) -> None:
    answer = wire.ask(IDS, consumerGroup="g")
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no consumer for this group, g")


def test_members_hear_who_comes_and_goes(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java("first"))
    assert wire.next_pushed().ext == {"consumerGroup": "g"}
    with Wire.to(node) as second:
        second.ask_ok(BEAT, java("second"))
        heard = wire.next_pushed()
        assert (heard.code, heard.is_one_way, heard.ext) == (CHANGED, True, {"consumerGroup": "g"})
        assert json_body(wire.ask_ok(IDS, consumerGroup="g")) == {"consumerIdList": ["first", "second"]}
        second.ask_ok(BYE, clientID="second", producerGroup="", consumerGroup="g")
        assert wire.next_pushed().code == CHANGED
        second.ask_ok(BEAT, java("second"))
        assert wire.next_pushed().code == CHANGED
    assert wire.next_pushed().code == CHANGED, "the second has hung up without a word"
    assert json_body(wire.ask_ok(IDS, consumerGroup="g")) == {"consumerIdList": ["first"]}


def test_a_heartbeat_that_says_nothing_new_is_told_nobody(wire: Wire) -> None:
    wire.ask_ok(BEAT, java())
    wire.next_pushed()
    for _ in range(3):
        wire.ask_ok(BEAT, java())
    assert wire.pushed == []


def test_a_broadcast_group_is_left_alone(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java("first", messageModel="BROADCASTING"))
    with Wire.to(node) as second:
        second.ask_ok(BEAT, java("second", messageModel=0))
    wire.ask_ok(BEAT, java("first", messageModel="BROADCASTING"))
    assert wire.pushed == []


def test_a_group_may_be_configured_to_be_left_alone(node: RunningNode, wire: Wire) -> None:
    node.node.broker.tables.groups.update(SubscriptionGroup("g", notify_consumer_ids_changed_enable=False))
    wire.ask_ok(BEAT, java())
    wire.ask_ok(BEAT, java())
    assert wire.pushed == []


def test_goodbye_of_somebody_unknown_is_fine(wire: Wire) -> None:
    wire.ask_ok(BYE, clientID="nobody", consumerGroup="g", producerGroup="p")


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("A || B", "TAG", 0),
        ("*", None, 0),
        ("a > 5 AND TAGS IS NOT NULL", "SQL92", 0),
        ("a >", "SQL92", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ("a", "LUA", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
    ],
)
def test_a_client_may_ask_whether_its_expression_can_be_read(
    wire: Wire, text: str, kind: str | None, code: int
) -> None:
    wanted = {"topic": "orders", "subString": text, "expressionType": kind}
    body = {"clientId": "c", "group": "g", "subscriptionData": wanted}
    answer = wire.ask(RequestCode.CHECK_CLIENT_CONFIG, body)
    assert answer.code == code
    assert bool(answer.remark) == bool(code)


def test_a_client_may_ask_about_nothing(wire: Wire) -> None:
    wire.ask_ok(RequestCode.CHECK_CLIENT_CONFIG, {"clientId": "c", "group": "g"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        msgspec.json.encode({"producerDataSet": []}),
        msgspec.json.encode(java(subscriptionDataSet=[{"subString": "*"}])),
        msgspec.json.encode(java(messageModel=2)),
        msgspec.json.encode(java(consumeFromWhere=-1)),
        msgspec.json.encode(java(group="a/b")),
        msgspec.json.encode(java(padding="x" * BODY_BYTES_MAX)),
    ],
)
def test_a_heartbeat_that_makes_no_sense_changes_nothing(node: RunningNode, wire: Wire, body: bytes) -> None:
    answer = wire.ask(BEAT, body)
    assert answer.code in (ResponseCode.INVALID_PARAMETER, ResponseCode.MESSAGE_ILLEGAL)
    assert node.node.edges.remoting.context.sessions._groups == {}
    assert node.node.broker.tables.groups.all() == []
    wire.ask_ok(BEAT, java())


@on_node()
async def test_a_heartbeat_that_is_refused_leaves_nothing_with_the_connection(world: World) -> None:
    context, pair = context_of(world.broker), await Pair.made()
    handlers = HeartBeats(context, Locks(context)).handlers
    many = {"clientID": "c", "producerDataSet": [{"groupName": f"p{n}"} for n in range(1_025)]}
    for _ in range(3):
        assert (await pair.ask(handlers, BEAT, msgspec.json.encode(many))).code == ResponseCode.SYSTEM_BUSY
    assert pair.connection.on_close == []
    for _ in range(2):
        assert (await pair.ask(handlers, BEAT, msgspec.json.encode(java()))).code == 0
    assert len(pair.connection.on_close) == 1
    pair.close()


@on_node()
async def test_a_client_that_falls_silent_is_let_go(world: World) -> None:
    context = context_of(world.broker)
    beats = HeartBeats(context, Locks(context))
    silent, lively = await Pair.made(), await Pair.made()
    await silent.ask(beats.handlers, BEAT, msgspec.json.encode(java("silent")))
    await lively.ask(beats.handlers, BEAT, msgspec.json.encode(java("lively")))
    assert [(await lively.read()).code] == [CHANGED]
    world.clock.advance(EXPIRY_MS)
    await lively.ask(beats.handlers, BEAT, msgspec.json.encode(java("lively")))
    beats.expire()
    assert context.sessions.consumer_ids("g") == ["silent", "lively"], "the last millisecond counts"
    world.clock.advance(1)
    beats.expire()
    assert context.sessions.consumer_ids("g") == ["lively"]
    assert (await lively.read()).ext == {"consumerGroup": "g"}
    assert not silent.connection.is_open
    for pair in (silent, lively):
        pair.close()


@on_node()
async def test_members_with_different_subscriptions_are_told_of(world: World) -> None:
    context = context_of(world.broker)
    handlers = HeartBeats(context, Locks(context)).handlers
    red = {**JAVA_SUBSCRIPTION, "subString": "red"}
    more = {**JAVA_SUBSCRIPTION, "topic": "returns"}
    again = {**JAVA_SUBSCRIPTION, "topic": "%RETRY%g", "subString": "*"}
    pairs = [await Pair.made() for _ in range(3)]
    for pair, wanted in zip(pairs, ([red, again], [JAVA_SUBSCRIPTION, more], [red]), strict=True):
        beat = msgspec.json.encode(java(subscriptionDataSet=wanted))
        assert (await pair.ask(handlers, BEAT, beat)).code == 0
        world.clock.advance(1_000)
    conflicts = world.broker.consuming.subscriptions.conflicts("g")
    assert [(one.topic, one.wanted) for one in conflicts] == [
        ("", ["orders", "orders, returns"]),
        ("orders", ["A || B", "red"]),
    ]
    for pair in pairs:
        pair.close()
