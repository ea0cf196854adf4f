"""Resets of offsets by RocketMQ's administration client, with and without consumers, and the start of new groups."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA4, JAVA5, JAVA5_5, Conversation
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import StockBroker
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop

TOOLS = [JAVA5, JAVA5_5]
TOPIC_MISSING, GROUP_MISSING = 17, 26


def consume_all(talk: Conversation, broker: StockBroker, queues: int, count: int) -> str:
    """Start a consumer, and wait until it has consumed and committed `count` messages of each queue."""
    consumer = talk.listen()
    talk.client.wait_deliveries(consumer, queues * count)
    expected = dict.fromkeys(range(queues), count)
    eventually(lambda: broker.offsets(talk.group, talk.topic) == expected, "the offsets are committed")
    return consumer


def send_to_each(talk: Conversation, queues: int, count: int) -> None:
    """Send `count` messages to each queue, with the bodies "<queue>-<number>"."""
    for queue in range(queues):
        for number in range(count):
            talk.send(f"{queue}-{number}", queue_id=queue)


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("client", TOOLS, indirect=True)
def test_one_queue_of_a_group_is_reset_to_an_offset(
    client: Driver, broker: StockBroker, name: str, connected: bool
) -> None:
    talk = Conversation(client, broker, name, queues=3)
    send_to_each(talk, 3, 4)
    consumer = consume_all(talk, broker, 3, 4)
    if not connected:
        talk.stop(consumer)
    reset = {"topic": talk.topic, "group": talk.group, "broker_address": broker.remoting}
    client.call("reset_queue", **reset, queue_id=1, offset=2)
    if connected:
        after_reset = client.wait_deliveries(consumer, 14)[12:]  # 3 times 4 are those before the reset
    else:
        assert broker.offsets(talk.group, talk.topic) == {0: 4, 1: 2, 2: 4}
        after_reset = client.wait_deliveries(talk.listen(), 2)
    assert sorted(message["body"] for message in after_reset) == ["1-2", "1-3"]
    eventually(
        lambda: broker.offsets(talk.group, talk.topic) == {0: 4, 1: 4, 2: 4}, "all queues are at their end"
    )


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("client", TOOLS, indirect=True)
def test_a_group_is_reset_to_a_time(client: Driver, broker: StockBroker, name: str, connected: bool) -> None:
    talk = Conversation(client, broker, name, queues=2)
    send_to_each(talk, 2, 2)
    between_ms = max(row["store_ms"] for row in broker.rows(talk.topic)) + 1
    eventually(lambda: broker.now_ms() > between_ms, "the following messages are stored later")
    send_to_each(talk, 2, 2)
    consumer = consume_all(talk, broker, 2, 4)
    if not connected:
        talk.stop(consumer)
    offsets = client.call("reset_to_time", topic=talk.topic, group=talk.group, at_ms=between_ms, force=True)
    assert offsets == {"0": 2, "1": 2}
    if connected:
        after_reset = client.wait_deliveries(consumer, 12)[8:]  # 2 times 4 are those before the reset
    else:
        assert broker.offsets(talk.group, talk.topic) == {0: 2, 1: 2}
        after_reset = client.wait_deliveries(talk.listen(), 4)
    assert sorted(message["body"] for message in after_reset) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.parametrize("client", TOOLS, indirect=True)
def test_a_reset_of_an_unknown_topic_or_group_is_refused(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    talk.send("only")
    for topic, group, code in ((talk.topic, "nobody", GROUP_MISSING), ("nowhere", "nobody", TOPIC_MISSING)):
        with pytest.raises(ClientError) as refused:
            client.call("reset_to_time", topic=topic, group=group, at_ms=0, force=True)
        assert refused.value.code == code


@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_5], indirect=True)
def test_a_new_group_that_begins_at_the_end_receives_no_earlier_message(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    talk.send("earlier")
    consumer = talk.listen(from_last=True)
    eventually(
        lambda: broker.offsets(talk.group, talk.topic) == {0: 1}, "the offset is at the end of the queue"
    )
    talk.send("later")
    assert [message["body"] for message in client.wait_deliveries(consumer, 1)] == ["later"]


@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_5], indirect=True)
def test_a_group_that_subscribed_before_the_first_message_receives_all(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name, queues=4)
    consumer = talk.listen(from_last=True)
    sent = [f"message {number}" for number in range(8)]
    for number, body in enumerate(sent):
        talk.send(body, queue_id=number % 4)
    assert sorted(message["body"] for message in client.wait_deliveries(consumer, 8)) == sent
