"""RocketMQ's own administration tool, as its users call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.interop.admin_tool import AdminTool
from tests.interop.conversation import JAVA5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import BROKER, CLUSTER, StockBroker
from tests.node_fixture import eventually

from timeball.edges.remoting.codec.codes import RequestCode

pytestmark = pytest.mark.interop


def rows(printed: str) -> list[list[str]]:
    """The words of each line that is no heading."""
    return [line.split() for line in printed.splitlines() if line.strip() and not line.startswith("#")]


def test_topics(broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    topic = f"{name}-made"
    mqadmin(
        broker, "updateTopic", "-c", CLUSTER, "-t", topic, "-r", "3", "-w", "3", "-a", "+message.type=DELAY"
    )
    assert topic in mqadmin(broker, "topicList").split()
    route = mqadmin(broker, "topicRoute", "-t", topic)
    assert broker.remoting in route and BROKER in route
    assert len([row for row in rows(mqadmin(broker, "topicStatus", "-t", topic)) if row[0] == BROKER]) == 3
    mqadmin(broker, "updateTopic", "-b", broker.remoting, "-t", topic, "-r", "4", "-w", "4")
    assert len([row for row in rows(mqadmin(broker, "topicStatus", "-t", topic)) if row[0] == BROKER]) == 4


def test_the_limit_of_a_topic(broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    topic = broker.create_topic(f"{name}-limited")
    mqadmin(broker, "updateTopic", "-c", CLUSTER, "-t", topic, "-a", "+timeball.max.per.second=50")
    with urlopen(f"http://{broker.http}/v1/topics/{topic}") as answer:
        assert json.load(answer)["max_per_second"] == 50


def test_the_limit_of_a_key(broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    """A later change of something else keeps the attribute."""
    how = ["updateSubGroup", "-c", CLUSTER, "-g", f"{name}-group"]
    mqadmin(broker, *how, "--attributes", "+timeball.max.per.key=1")
    mqadmin(broker, *how, "-r", "3")
    with broker.client() as ball:
        assert [group.max_per_key for group in ball.groups(f"{name}-group")] == [1]


def test_a_topic_that_is_not_there(broker: StockBroker, mqadmin: AdminTool) -> None:
    with pytest.raises(AssertionError, match="No topic route info"):
        mqadmin(broker, "topicRoute", "-t", "nowhere")


def test_the_cluster(broker: StockBroker, mqadmin: AdminTool) -> None:
    [row] = [row for row in rows(mqadmin(broker, "clusterList")) if row[0] == CLUSTER]
    assert row[1:4] == [BROKER, "0", broker.remoting]


def test_the_broker(broker: StockBroker, mqadmin: AdminTool) -> None:
    told = {row[0]: row[2:] for row in rows(mqadmin(broker, "brokerStatus", "-b", broker.remoting))}
    assert "brokerVersionDesc" in told and "bootTimestamp" in told


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_groups(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    talk = Conversation(client, broker, name, queues=2)
    mqadmin(broker, "updateSubGroup", "-c", CLUSTER, "-g", talk.group, "-r", "1")
    for number in range(6):
        talk.send(f"message {number}", queue_id=number % 2)
    consumer = talk.listen()
    client.wait_deliveries(consumer, 6)
    eventually(lambda: broker.offsets(talk.group, talk.topic) == {0: 3, 1: 3}, "it said where it is")
    talk.stop(consumer)
    talk.send("unread", queue_id=0)
    printed = rows(mqadmin(broker, "consumerProgress", "-g", talk.group))
    # topic, broker, queue, the broker's offset, the group's, their difference …
    found = sorted([row[2], row[3], row[4]] for row in printed if row[0] == talk.topic)
    assert found == [["0", "4", "3"], ["1", "3", "3"]]


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_messages(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    talk = Conversation(client, broker, name)
    sent = talk.send("wanted", keys="order-17", tag="t")
    by_key = mqadmin(broker, "queryMsgByKey", "-t", talk.topic, "-k", "order-17")
    assert sent["message_id"] in by_key
    by_id = mqadmin(broker, "queryMsgById", "-t", talk.topic, "-i", sent["offset_id"])
    assert talk.topic in by_id and "order-17" in by_id


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_connections(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()

    def told() -> str:
        return mqadmin(broker, "consumerConnection", "-g", talk.group)

    eventually(never_raises(told), "the broker knows the consumer")
    printed = told()
    assert consumer in printed and talk.topic in printed and "JAVA" in printed


def never_raises(ask: Callable[[], str]) -> Callable[[], bool]:
    """Whether a query works."""

    def asked() -> bool:
        try:
            ask()
        except AssertionError:
            return False
        return True

    return asked


def test_sends_that_are_timed(broker: StockBroker, mqadmin: AdminTool) -> None:
    """The tool sends to a topic with the broker's name, to each of the queues that the route tells."""
    printed = mqadmin(broker, "sendMsgStatus", "-b", BROKER, "-c", "9")
    assert printed.count("sendStatus=SEND_OK") == 9


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_rates(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    for number in range(7):
        talk.send(f"message {number}")
    client.wait_deliveries(consumer, 7)
    eventually(lambda: broker.offsets(talk.group, talk.topic) == {0: 7}, "it said where it is")
    [row] = [row for row in rows(mqadmin(broker, "statsAll", "-t", talk.topic)) if row[0] == talk.topic]
    # topic, group, behind by, in and out a second, in and out within 24 hours
    assert (row[1], row[2]) == (talk.group, "0")
    assert float(row[3]) > 0 and float(row[4]) > 0
    assert row[5:7] == ["7", "7"]


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_consumer_is_asked_through_the_broker(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    sent = talk.send("again, please")
    client.wait_deliveries(consumer, 1)
    [member] = [
        row[0] for row in rows(mqadmin(broker, "consumerConnection", "-g", talk.group)) if consumer in row[0]
    ]
    # mqadmin has the command for this and does not register it; consoles ask.
    status = broker.request(
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, topic=talk.topic, group=talk.group
    )
    queue = f'{{"brokerName":"{BROKER}","queueId":0,"topic":"{talk.topic}"}}'
    assert f'"consumerTable":{{"{member}":{{{queue}:1}}}}' in status.body.decode()
    printed = mqadmin(
        broker,
        "queryMsgByUniqueKey",
        "-t",
        talk.topic,
        "-i",
        sent["message_id"],
        "-g",
        talk.group,
        "-d",
        member,
    )
    assert "consumeResult=CR_SUCCESS" in printed, printed
    assert [message["body"] for message in client.deliveries(consumer)] == ["again, please"] * 2


def test_many_topics_and_groups_at_once(
    broker: StockBroker, name: str, tmp_path: Path, mqadmin: AdminTool
) -> None:
    topics, groups = tmp_path / "topics.json", tmp_path / "groups.json"
    topics.write_text(json.dumps([{"topicName": f"{name}-{n}", "readQueueNums": n} for n in (1, 2)]))
    groups.write_text(json.dumps([{"groupName": f"{name}-{n}", "retryMaxTimes": n} for n in (1, 2)]))
    mqadmin(broker, "updateTopicList", "-b", broker.remoting, "-f", str(topics))
    mqadmin(broker, "updateSubGroupList", "-b", broker.remoting, "-f", str(groups))
    listed = mqadmin(broker, "topicList").split()
    assert {f"{name}-1", f"{name}-2"} <= set(listed)
    group = broker.request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group=f"{name}-2")
    assert json.loads(group.body)["retryMaxTimes"] == 2


@pytest.mark.parametrize("command", ["cleanExpiredCQ", "cleanUnusedTopic"])
def test_cleaning(broker: StockBroker, command: str, mqadmin: AdminTool) -> None:
    assert "success" in mqadmin(broker, command, "-b", broker.remoting)
