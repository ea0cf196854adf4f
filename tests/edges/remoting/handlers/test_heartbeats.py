"""Heartbeats of three generations of clients, and notifications to the members of a group."""

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
from timeball.edges.remoting.handlers.heartbeats import BODY_BYTES_MAX, HeartBeats, Locks
from timeball.edges.shared.sessions import Subscription

BEAT, UNREGISTER = RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT
LIST_MEMBERS, CHANGED = RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED

JAVA_SUBSCRIPTION = {
    "classFilterMode": False, "codeSet": [2_598_919], "expressionType": "TAG", "subString": "A || B",
    "subVersion": 1_700_000_000_000, "tagsSet": ["A", "B"], "topic": "orders",
}  # fmt: skip


def java_heartbeat(client_id: str = "127.0.0.1@1#2", group: str = "g", **consumer: Any) -> dict[str, Any]:
    """Build a heartbeat of the Java client. `consumer` adds or replaces fields of its one consumer."""
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


def cpp_heartbeat(**consumer: Any) -> dict[str, Any]:
    """Build a heartbeat of the C++ client, which sends numbers instead of enum names, and some numbers as text."""
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
def test_a_message_model_that_is_no_number_is_kept_as_text(node: RunningNode, wire: Wire, word: str) -> None:
    wire.ask_ok(BEAT, cpp_heartbeat(messageModel=word))
    remoting = node.node.edges.remoting
    assert remoting is not None
    group = remoting.context.sessions.group("g")
    assert group is not None and group.membership.message_model == word[:64]


def test_the_answer_to_a_heartbeat_has_the_version_of_a_broker_with_sql_filters(wire: Wire) -> None:
    answer = wire.ask_ok(BEAT, java_heartbeat())
    assert answer.version == BROKER_VERSION >= 232
    assert answer.ext == {}


def test_the_heartbeat_of_a_java_consumer_makes_it_a_member(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java_heartbeat())
    assert json_body(wire.ask_ok(LIST_MEMBERS, consumerGroup="g")) == {"consumerIdList": ["127.0.0.1@1#2"]}
    clients = node.node.edges.remoting.context.sessions
    assert clients.subscription("g", "orders") == Subscription("orders", "A || B", "TAG", 1_700_000_000_000)
    assert clients.group("g").membership.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert len(clients.producers("CLIENT_INNER_PRODUCER")) == 1


def test_the_heartbeat_of_a_cpp_consumer_gives_the_same_membership(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, cpp_heartbeat())
    clients = node.node.edges.remoting.context.sessions
    membership = clients.group("g").membership
    assert (membership.consume_type, membership.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert membership.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert clients.subscription("g", "orders") == Subscription("orders", "*", "TAG", 1_700_000_000_000)


@pytest.mark.parametrize("model", ["Clustering", "CLUSTERING", 1, "1"])
def test_a_message_model_may_be_a_name_or_a_number(node: RunningNode, wire: Wire, model: object) -> None:
    wire.ask_ok(BEAT, java_heartbeat(messageModel=model))
    assert node.node.edges.remoting.context.sessions.group("g").membership.message_model == "CLUSTERING"


def test_a_heartbeat_without_groups_is_accepted(wire: Wire) -> None:
    wire.ask_ok(BEAT, {"clientID": "idle", "producerDataSet": None})
    wire.ask_ok(BEAT, {"clientID": "idle", "consumerDataSet": [], "producerDataSet": []})


def test_the_first_heartbeat_creates_the_group_and_its_retry_topic(node: RunningNode, wire: Wire) -> None:
    assert "%RETRY%g" not in node.broker.topics()
    wire.ask_ok(BEAT, java_heartbeat())
    (queues,) = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%g"))["queueDatas"]
    assert queues["readQueueNums"] == queues["writeQueueNums"] == 1
    assert node.node.broker.tables.groups.get("g") == SubscriptionGroup("g")


def test_an_unknown_group_has_no_members(wire: Wire) -> None:
    answer = wire.ask(LIST_MEMBERS, consumerGroup="g")
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "no consumer for this group, g")


def test_members_are_notified_when_others_join_or_leave(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java_heartbeat("first"))
    assert wire.next_pushed().ext == {"consumerGroup": "g"}
    with Wire.to(node) as second:
        second.ask_ok(BEAT, java_heartbeat("second"))
        pushed = wire.next_pushed()
        assert (pushed.code, pushed.is_one_way, pushed.ext) == (CHANGED, True, {"consumerGroup": "g"})
        assert json_body(wire.ask_ok(LIST_MEMBERS, consumerGroup="g")) == {
            "consumerIdList": ["first", "second"]
        }
        second.ask_ok(UNREGISTER, clientID="second", producerGroup="", consumerGroup="g")
        assert wire.next_pushed().code == CHANGED
        second.ask_ok(BEAT, java_heartbeat("second"))
        assert wire.next_pushed().code == CHANGED
    assert wire.next_pushed().code == CHANGED, "the second disconnected without unregistering"
    assert json_body(wire.ask_ok(LIST_MEMBERS, consumerGroup="g")) == {"consumerIdList": ["first"]}


def test_an_unchanged_heartbeat_notifies_nobody(wire: Wire) -> None:
    wire.ask_ok(BEAT, java_heartbeat())
    wire.next_pushed()
    for _ in range(3):
        wire.ask_ok(BEAT, java_heartbeat())
    assert wire.pushed == []


def test_a_broadcast_group_is_not_notified(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(BEAT, java_heartbeat("first", messageModel="BROADCASTING"))
    with Wire.to(node) as second:
        second.ask_ok(BEAT, java_heartbeat("second", messageModel=0))
    wire.ask_ok(BEAT, java_heartbeat("first", messageModel="BROADCASTING"))
    assert wire.pushed == []


def test_a_group_can_be_configured_to_get_no_notifications(node: RunningNode, wire: Wire) -> None:
    node.node.broker.tables.groups.update(SubscriptionGroup("g", notify_consumer_ids_changed_enable=False))
    wire.ask_ok(BEAT, java_heartbeat())
    wire.ask_ok(BEAT, java_heartbeat())
    assert wire.pushed == []


def test_unregistering_an_unknown_client_succeeds(wire: Wire) -> None:
    wire.ask_ok(UNREGISTER, clientID="nobody", consumerGroup="g", producerGroup="p")


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
def test_the_expression_of_a_client_is_checked(wire: Wire, text: str, kind: str | None, code: int) -> None:
    subscription = {"topic": "orders", "subString": text, "expressionType": kind}
    body = {"clientId": "c", "group": "g", "subscriptionData": subscription}
    answer = wire.ask(RequestCode.CHECK_CLIENT_CONFIG, body)
    assert answer.code == code
    assert bool(answer.remark) == bool(code)


def test_a_check_without_an_expression_succeeds(wire: Wire) -> None:
    wire.ask_ok(RequestCode.CHECK_CLIENT_CONFIG, {"clientId": "c", "group": "g"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        msgspec.json.encode({"producerDataSet": []}),
        msgspec.json.encode(java_heartbeat(subscriptionDataSet=[{"subString": "*"}])),
        msgspec.json.encode(java_heartbeat(messageModel=2)),
        msgspec.json.encode(java_heartbeat(consumeFromWhere=-1)),
        msgspec.json.encode(java_heartbeat(group="a/b")),
        msgspec.json.encode(java_heartbeat(padding="x" * BODY_BYTES_MAX)),
    ],
)
def test_an_invalid_heartbeat_changes_nothing(node: RunningNode, wire: Wire, body: bytes) -> None:
    answer = wire.ask(BEAT, body)
    assert answer.code in (ResponseCode.INVALID_PARAMETER, ResponseCode.MESSAGE_ILLEGAL)
    assert node.node.edges.remoting.context.sessions._groups == {}
    assert node.node.broker.tables.groups.all() == []
    wire.ask_ok(BEAT, java_heartbeat())


@on_node()
async def test_a_refused_heartbeat_registers_no_session(world: World) -> None:
    context, pair = context_of(world.broker), await Pair.create()
    handlers = HeartBeats(context, Locks(context)).handlers
    many = {"clientID": "c", "producerDataSet": [{"groupName": f"p{n}"} for n in range(1_025)]}
    for _ in range(3):
        assert (await pair.ask(handlers, BEAT, msgspec.json.encode(many))).code == ResponseCode.SYSTEM_BUSY
    assert pair.connection.on_close == []
    for _ in range(2):
        assert (await pair.ask(handlers, BEAT, msgspec.json.encode(java_heartbeat()))).code == 0
    assert len(pair.connection.on_close) == 1
    pair.close()


@on_node()
async def test_a_silent_client_is_removed(world: World) -> None:
    context = context_of(world.broker)
    beats = HeartBeats(context, Locks(context))
    silent, lively = await Pair.create(), await Pair.create()
    await silent.ask(beats.handlers, BEAT, msgspec.json.encode(java_heartbeat("silent")))
    await lively.ask(beats.handlers, BEAT, msgspec.json.encode(java_heartbeat("lively")))
    assert [(await lively.read()).code] == [CHANGED]
    world.clock.advance(EXPIRY_MS)
    await lively.ask(beats.handlers, BEAT, msgspec.json.encode(java_heartbeat("lively")))
    beats.expire()
    assert context.sessions.consumer_ids("g") == ["silent", "lively"], (
        "a client expires after EXPIRY_MS, not at it"
    )
    world.clock.advance(1)
    beats.expire()
    assert context.sessions.consumer_ids("g") == ["lively"]
    assert (await lively.read()).ext == {"consumerGroup": "g"}
    assert not silent.connection.is_open
    for pair in (silent, lively):
        pair.close()


@on_node()
async def test_members_with_different_subscriptions_are_reported(world: World) -> None:
    context = context_of(world.broker)
    handlers = HeartBeats(context, Locks(context)).handlers
    red = {**JAVA_SUBSCRIPTION, "subString": "red"}
    returns = {**JAVA_SUBSCRIPTION, "topic": "returns"}
    retries = {**JAVA_SUBSCRIPTION, "topic": "%RETRY%g", "subString": "*"}
    pairs = [await Pair.create() for _ in range(3)]
    for pair, subscriptions in zip(pairs, ([red, retries], [JAVA_SUBSCRIPTION, returns], [red]), strict=True):
        beat = msgspec.json.encode(java_heartbeat(subscriptionDataSet=subscriptions))
        assert (await pair.ask(handlers, BEAT, beat)).code == 0
        world.clock.advance(1_000)
    conflicts = world.broker.consuming.subscriptions.conflicts("g")
    assert [(conflict.topic, conflict.wanted) for conflict in conflicts] == [
        ("", ["orders", "orders, returns"]),
        ("orders", ["A || B", "red"]),
    ]
    for pair in pairs:
        pair.close()
