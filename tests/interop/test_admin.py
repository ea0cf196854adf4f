"""RocketMQ's administration tool, called with the commands of its users."""

from __future__ import annotations

import json
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
    """Split the output of a command to the words of each line. Headings and empty lines are left out."""
    return [line.split() for line in printed.splitlines() if line.strip() and not line.startswith("#")]


def test_the_tool_creates_and_changes_a_topic(broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
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


def test_the_tool_sets_the_rate_limit_of_a_topic(broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    topic = broker.create_topic(f"{name}-limited")
    mqadmin(broker, "updateTopic", "-c", CLUSTER, "-t", topic, "-a", "+timeball.max.per.second=50")
    with urlopen(f"http://{broker.http}/v1/topics/{topic}") as answer:
        assert json.load(answer)["max_per_second"] == 50


def test_the_tool_sets_the_limit_for_each_key_of_a_group(
    broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    """A later change without attributes keeps the limit."""
    update = ["updateSubGroup", "-c", CLUSTER, "-g", f"{name}-group"]
    mqadmin(broker, *update, "--attributes", "+timeball.max.per.key=1")
    mqadmin(broker, *update, "-r", "3")
    with broker.client() as ball:
        assert [group.max_per_key for group in ball.groups(f"{name}-group")] == [1]


def test_the_tool_reports_an_unknown_topic(broker: StockBroker, mqadmin: AdminTool) -> None:
    with pytest.raises(AssertionError, match="No topic route info"):
        mqadmin(broker, "topicRoute", "-t", "nowhere")


def test_the_tool_lists_the_broker_of_the_cluster(broker: StockBroker, mqadmin: AdminTool) -> None:
    [row] = [row for row in rows(mqadmin(broker, "clusterList")) if row[0] == CLUSTER]
    assert row[1:4] == [BROKER, "0", broker.remoting]


def test_the_tool_shows_the_status_of_the_broker(broker: StockBroker, mqadmin: AdminTool) -> None:
    entries = {row[0]: row[2:] for row in rows(mqadmin(broker, "brokerStatus", "-b", broker.remoting))}
    assert "brokerVersionDesc" in entries and "bootTimestamp" in entries


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_tool_shows_the_progress_of_a_group(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    mqadmin(broker, "updateSubGroup", "-c", CLUSTER, "-g", talk.group, "-r", "1")
    for number in range(6):
        talk.send(f"message {number}", queue_id=number % 2)
    consumer = talk.listen()
    client.wait_deliveries(consumer, 6)
    eventually(lambda: broker.offsets(talk.group, talk.topic) == {0: 3, 1: 3}, "the offsets are committed")
    talk.stop(consumer)
    talk.send("unread", queue_id=0)
    printed = rows(mqadmin(broker, "consumerProgress", "-g", talk.group))
    # The columns are topic, broker, queue, the offset of the broker, that of the group, their difference …
    offsets = sorted([row[2], row[3], row[4]] for row in printed if row[0] == talk.topic)
    assert offsets == [["0", "4", "3"], ["1", "3", "3"]]


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_tool_finds_a_message_by_key_and_by_id(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name)
    sent = talk.send("wanted", keys="order-17", tag="t")
    by_key = mqadmin(broker, "queryMsgByKey", "-t", talk.topic, "-k", "order-17")
    assert sent["message_id"] in by_key
    by_id = mqadmin(broker, "queryMsgById", "-t", talk.topic, "-i", sent["offset_id"])
    assert talk.topic in by_id and "order-17" in by_id


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_tool_shows_the_connection_of_a_consumer(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()

    def print_connections() -> str:
        """Return the output of the tool, "" while it fails because the group has no members."""
        try:
            return mqadmin(broker, "consumerConnection", "-g", talk.group)
        except AssertionError:
            return ""

    eventually(print_connections, "the broker knows the consumer")
    printed = print_connections()
    assert consumer in printed and talk.topic in printed and "JAVA" in printed


def test_the_tool_sends_to_the_topic_of_the_broker(broker: StockBroker, mqadmin: AdminTool) -> None:
    """The tool measures the time of sends to all queues of the topic with the broker's name."""
    printed = mqadmin(broker, "sendMsgStatus", "-b", BROKER, "-c", "9")
    assert printed.count("sendStatus=SEND_OK") == 9


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_tool_shows_the_counts_of_a_topic(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    for number in range(7):
        talk.send(f"message {number}")
    client.wait_deliveries(consumer, 7)
    eventually(lambda: broker.offsets(talk.group, talk.topic) == {0: 7}, "the offset is committed")
    [row] = [row for row in rows(mqadmin(broker, "statsAll", "-t", talk.topic)) if row[0] == talk.topic]
    # The columns are topic, group, lag, messages in and out per second, messages in and out in 24 hours.
    assert (row[1], row[2]) == (talk.group, "0")
    assert float(row[3]) > 0 and float(row[4]) > 0
    assert row[5:7] == ["7", "7"]


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_requests_of_the_tool_are_forwarded_to_a_consumer(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    sent = talk.send("body")
    client.wait_deliveries(consumer, 1)
    [member] = [
        row[0] for row in rows(mqadmin(broker, "consumerConnection", "-g", talk.group)) if consumer in row[0]
    ]
    # Consoles send this request. mqadmin has a command for it that cannot be called.
    status = broker.request(
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, topic=talk.topic, group=talk.group
    )
    queue = f'{{"brokerName":"{BROKER}","queueId":0,"topic":"{talk.topic}"}}'
    assert f'"consumerTable":{{"{member}":{{{queue}:1}}}}' in status.body.decode()
    of_message = ["-t", talk.topic, "-i", sent["message_id"]]
    printed = mqadmin(broker, "queryMsgByUniqueKey", *of_message, "-g", talk.group, "-d", member)
    assert "consumeResult=CR_SUCCESS" in printed, printed
    assert [message["body"] for message in client.deliveries(consumer)] == ["body"] * 2


def test_the_tool_creates_several_topics_and_groups(
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
def test_the_cleaning_commands_of_the_tool_succeed(
    broker: StockBroker, command: str, mqadmin: AdminTool
) -> None:
    assert "success" in mqadmin(broker, command, "-b", broker.remoting)
