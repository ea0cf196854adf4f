"""Who is connected, as tools see it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.node_fixture import RunningNode
from tests.protocols.remoting.wire import Wire, json_body

from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode

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
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    return wire


def connections(found: Any) -> list[Any]:
    return [{k: v for k, v in one.items() if k != "clientAddr"} for one in found["connectionSet"]]


def test_the_members_of_a_consumer_group_and_what_they_want(client: Wire) -> None:
    found = json_body(client.ask_ok(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    assert connections(found) == [{"clientId": "c1", "language": "JAVA", "version": 409}]
    assert found["connectionSet"][0]["clientAddr"].startswith("127.0.0.1:")
    assert (found["consumeType"], found["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert found["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"
    wanted = found["subscriptionTable"]["orders"]
    assert (wanted["subString"], wanted["tagsSet"], wanted["subVersion"]) == ("A || B", ["A", "B"], 7)


def test_a_group_without_members_is_not_online(wire: Wire) -> None:
    answer = wire.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g")
    assert (answer.code, answer.remark) == (
        ResponseCode.CONSUMER_NOT_ONLINE, "the consumer group[g] not online",
    )  # fmt: skip


def test_the_members_of_a_producer_group(client: Wire) -> None:
    found = json_body(client.ask_ok(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="p"))
    assert connections(found) == [{"clientId": "c1", "language": "JAVA", "version": 409}]
    answer = client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="nobody")
    assert answer.code == ResponseCode.SYSTEM_ERROR


def test_all_producers(node: RunningNode, client: Wire) -> None:
    data = json_body(client.ask_ok(RequestCode.GET_ALL_PRODUCER_INFO))["data"]
    (one,) = data["p"]
    assert (one["clientId"], one["language"]) == ("c1", "JAVA")
    assert 0 <= node.node.broker.parts.clock.now_ms() - one["lastUpdateTimestamp"] < 60_000


def test_a_language_nobody_knows_is_another(node: RunningNode, client: Wire) -> None:
    (member,) = node.node.remoting.site.clients.producer_members("p")
    member.language = 99
    found = json_body(client.ask_ok(RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="p"))
    assert found["connectionSet"][0]["language"] == "OTHER"


def test_who_reads_a_topic_is_who_subscribes_now_or_has_read_before(node: RunningNode, client: Wire) -> None:
    node.node.broker.parts.offsets.commit("before", "orders", {0: 0}, {0: 0})
    found = json_body(client.ask_ok(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="orders"))
    assert found == {"groupList": ["before", "g"]}
    assert json_body(client.ask_ok(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="x")) == {"groupList": []}
    topics = json_body(client.ask_ok(RequestCode.QUERY_TOPICS_BY_CONSUMER, group="before"))
    assert topics == {"topicList": ["orders"]}


def test_a_groups_subscription_to_a_topic(client: Wire) -> None:
    ask = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    found = json_body(client.ask_ok(ask, group="g", topic="orders"))
    assert found["subscriptionData"]["subString"] == "A || B"
    assert json_body(client.ask_ok(ask, group="g", topic="x"))["subscriptionData"] is None
