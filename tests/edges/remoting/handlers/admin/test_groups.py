"""Requests of tools about consumer groups: configuration, deletion, cloned offsets, and the connected clients."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.broker.registry.state_rows import rows_of
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode

UPDATE, GET_ALL = (
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
)
GET_ONE, DELETE = RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, RequestCode.DELETE_SUBSCRIPTIONGROUP

# `mqadmin` of RocketMQ 5.3 sends this body for `updateSubGroup -g g -r 3 -q 2`.
JAVA_BODY = {
    "attributes": {}, "brokerId": 0, "consumeBroadcastEnable": False, "consumeEnable": True,
    "consumeFromMinEnable": False, "consumeMessageOrderly": False, "consumeTimeoutMinute": 15,
    "groupName": "g", "groupRetryPolicy": {"type": "CUSTOMIZED"}, "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True, "retryMaxTimes": 3, "retryQueueNums": 2,
    "whichBrokerWhenConsumeSlowly": 1,
}  # fmt: skip


def test_a_created_group_has_its_configuration(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(UPDATE, JAVA_BODY)
    group = node.node.broker.tables.groups.get("g")
    assert group == SubscriptionGroup(
        "g",
        consume_broadcast_enable=False,
        consume_from_min_enable=False,
        retry_max_times=3,
        retry_queue_nums=2,
    )
    assert json_body(wire.ask_ok(GET_ONE, group="g")) == msgspec.to_builtins(group)
    listed = json_body(wire.ask_ok(GET_ALL))
    assert listed["subscriptionGroupTable"] == {"g": msgspec.to_builtins(group)}
    assert listed["dataVersion"]["counter"] == 1


def test_null_or_absent_settings_have_defaults(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(
        UPDATE, {"groupName": "g", "attributes": None, "retryMaxTimes": None, "groupRetryPolicy": None}
    )
    assert node.node.broker.tables.groups.get("g") == SubscriptionGroup("g")


def test_the_attributes_of_a_request_change_only_the_named_attributes(node: RunningNode, wire: Wire) -> None:
    groups, name = node.node.broker.tables.groups, "timeball.max.per.key"
    wire.ask_ok(UPDATE, {**JAVA_BODY, "attributes": {f"+{name}": "2"}})
    assert groups.max_per_key("g") == 2
    wire.ask_ok(UPDATE, JAVA_BODY)
    assert groups.max_per_key("g") == 2, "the request has no attributes"
    wire.ask_ok(UPDATE, {**JAVA_BODY, "attributes": {name: "3"}})
    assert groups.max_per_key("g") == 3
    many = {f"+{number}": "" for number in range(64)}
    assert wire.ask(UPDATE, {**JAVA_BODY, "attributes": many}).code == ResponseCode.INVALID_PARAMETER
    wire.ask_ok(UPDATE, {**JAVA_BODY, "attributes": {f"-{name}": ""}})
    assert groups.max_per_key("g") is None and groups.get("g").attributes == {}


def test_a_change_is_saved_before_the_answer(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(UPDATE, JAVA_BODY)
    saved = rows_of(node.node.broker, "group/")
    assert [group["retryMaxTimes"] for group in saved.values()] == [3]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        {},
        {"groupName": "a/b"},
        {"groupName": "g", "retryQueueNums": 100_000},
        {"groupName": "g", "retryMaxTimes": "many"},
        {"groupName": "g", "attributes": {str(i): "" for i in range(1_000)}},
    ],
)
def test_an_invalid_configuration_is_refused(node: RunningNode, wire: Wire, body: Any) -> None:
    assert wire.ask(UPDATE, body).code == ResponseCode.INVALID_PARAMETER
    assert node.node.broker.tables.groups.all() == []


def test_an_unknown_group_has_no_configuration(wire: Wire) -> None:
    assert wire.ask(GET_ONE, group="g").code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.mark.parametrize(("clean", "remaining"), [(True, {}), (False, {0: 0})])
def test_deleting_a_group_deletes_its_offsets_on_request(
    node: RunningNode, wire: Wire, clean: bool, remaining: dict[int, int]
) -> None:
    wire.ask_ok(UPDATE, JAVA_BODY)
    node.node.broker.tables.offsets.commit("g", "orders", {0: 0}, {0: 0})
    wire.ask_ok(DELETE, groupName="g", cleanOffset=clean)
    assert node.node.broker.tables.groups.find_group("g") is None
    assert node.node.broker.offsets("g", "orders") == remaining
    wire.ask_ok(DELETE, groupName="g", cleanOffset=clean)


# ---- several groups in one request, and offsets that are cloned from another group ----------------------------

UPDATE_LIST = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
CLONE = RequestCode.CLONE_GROUP_OFFSET


def test_several_groups_are_configured_by_one_request(node: RunningNode, wire: Wire) -> None:
    groups = [JAVA_BODY, {"groupName": "h", "attributes": None, "retryMaxTimes": "7"}]
    wire.ask_ok(UPDATE_LIST, {"groupConfigList": groups})
    result = node.node.broker.tables.groups
    assert [result.get(name).retry_max_times for name in "gh"] == [3, 7]
    assert len(rows_of(node.node.broker, "group/")) == 2, "saved before the answer"


@pytest.mark.parametrize("wrong", [{"groupName": "h", "retryMaxTimes": "x"}, {"retryMaxTimes": 1}])
def test_no_group_is_created_if_one_of_several_is_invalid(
    node: RunningNode, wire: Wire, wrong: dict[str, Any]
) -> None:
    answer = wire.ask(UPDATE_LIST, {"groupConfigList": [JAVA_BODY, wrong]})
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert node.node.broker.tables.groups.find_group("g") is None


def test_cloned_offsets_are_those_of_the_source_group(node: RunningNode, wire: Wire) -> None:
    broker = node.broker
    for topic in ("a", "b"):
        assert sent(wire, topic=topic).code == 0
        node.run(broker.commit_offsets("old", topic, {0: 1}))
    wire.ask_ok(CLONE, srcGroup="old", destGroup="one", topic="a", offline=True)
    wire.ask_ok(CLONE, srcGroup="old", destGroup="all")
    assert [broker.offsets("one", topic) for topic in "ab"] == [{0: 1}, {}]
    assert [broker.offsets("all", topic) for topic in "ab"] == [{0: 1}, {0: 1}]
    wire.ask_ok(CLONE, srcGroup="old", destGroup="none", topic="nowhere")
    assert wire.ask(CLONE, srcGroup="old", destGroup="a b").code == ResponseCode.INVALID_PARAMETER


def test_offsets_are_cloned_only_in_the_subscribed_topics_of_a_connected_group(
    node: RunningNode, wire: Wire
) -> None:
    for topic in ("now", "before"):
        assert sent(wire, topic=topic).code == 0
        node.run(node.broker.commit_offsets("old", topic, {0: 1}))
    member = {"groupName": "old", "subscriptionDataSet": [{"topic": "now"}]}
    wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "c", "consumerDataSet": [member]})
    wire.ask_ok(CLONE, srcGroup="old", destGroup="new")
    assert [node.broker.offsets("new", topic) for topic in ("now", "before")] == [{0: 1}, {}]
    wire.ask_ok(CLONE, srcGroup="old", destGroup="new", offline=True)
    assert node.broker.offsets("new", "before") == {0: 1}


BEAT = {
    "clientID": "c1",
    "producerDataSet": [{"groupName": "p"}],
    "consumerDataSet": [
        {
            "groupName": "g",
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{"topic": "orders", "subString": "A || B", "subVersion": 7}],
        }
    ],
}


@pytest.fixture
def client(wire: Wire) -> Wire:
    """Return a wire whose client is a producer of the group `p` and a consumer of the group `g`."""
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    return wire


def connections(result: Any) -> list[Any]:
    """Return the connections of a decoded answer without their addresses, which differ in each run."""
    return [{k: v for k, v in item.items() if k != "clientAddr"} for item in result["connectionSet"]]


def test_consumer_connections_list_members_and_subscriptions(client: Wire) -> None:
    result = json_body(client.ask_ok(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    assert connections(result) == [{"clientId": "c1", "language": "JAVA", "version": 409}]
    assert result["connectionSet"][0]["clientAddr"].startswith("127.0.0.1:")
    assert (result["consumeType"], result["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert result["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"
    subscription = result["subscriptionTable"]["orders"]
    assert (subscription["subString"], subscription["tagsSet"]) == ("A || B", ["A", "B"])
    assert subscription["subVersion"] == 7


def test_a_group_without_members_is_not_online(wire: Wire) -> None:
    answer = wire.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert (answer.code, answer.remark) == (
        ResponseCode.CONSUMER_NOT_ONLINE, "the consumer group[g] not online",
    )  # fmt: skip


def test_producer_connections_list_the_members(client: Wire) -> None:
    result = json_body(client.ask_ok(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="p"))
    assert connections(result) == [{"clientId": "c1", "language": "JAVA", "version": 409}]
    answer = client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="nobody")
    assert answer.code == ResponseCode.SYSTEM_ERROR


def test_all_producers_are_listed_by_group(node: RunningNode, client: Wire) -> None:
    data = json_body(client.ask_ok(RequestCode.GET_ALL_PRODUCER_INFO))["data"]
    (producer,) = data["p"]
    assert (producer["clientId"], producer["language"]) == ("c1", "JAVA")
    assert 0 <= node.node.broker.clock.now_ms() - producer["lastUpdateTimestamp"] < 60_000


def test_an_unknown_language_is_other(node: RunningNode, client: Wire) -> None:
    (member,) = node.node.edges.remoting.context.sessions.producers("p")
    member.language = 99
    result = json_body(client.ask_ok(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="p"))
    assert result["connectionSet"][0]["language"] == "OTHER"


def test_groups_of_a_topic_are_those_with_subscription_or_offsets(node: RunningNode, client: Wire) -> None:
    node.node.broker.tables.offsets.commit("before", "orders", {0: 0}, {0: 0})
    result = json_body(client.ask_ok(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders"))
    assert result == {"groupList": ["before", "g"]}
    assert json_body(client.ask_ok(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="x")) == {"groupList": []}
    topics = json_body(client.ask_ok(RequestCode.QUERY_TOPICS_BY_CONSUMER, group="before"))
    assert topics == {"topicList": ["orders"]}


def test_the_subscription_of_a_group_to_a_topic_is_returned(client: Wire) -> None:
    query = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    result = json_body(client.ask_ok(query, group="g", topic="orders"))
    assert result["subscriptionData"]["subString"] == "A || B"
    assert json_body(client.ask_ok(query, group="g", topic="x"))["subscriptionData"] is None
