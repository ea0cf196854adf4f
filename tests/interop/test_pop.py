"""Pop consumers: the broker gives the messages of a queue to several members, and failed messages again."""

from __future__ import annotations

import pytest
from tests.interop.admin_tool import AdminTool
from tests.interop.conversation import JAVA5, JAVA5_5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_pop_consumers_share_the_queues_and_receive_failed_messages_again(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    mode = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    mqadmin(broker, "setConsumeMode", "-b", broker.remoting, *mode)
    consumers = [talk.listen(server_rebalance=True, fail=fail) for fail in (1, 0)]
    sent = ["delayed"]
    talk.send("delayed", level=1)
    while not all(client.deliveries(consumer) for consumer in consumers):
        assert len(sent) < 2_000, "one consumer received all messages"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1], level=1)

    def consumed() -> set[str]:
        return {m["body"] for c in consumers for m in client.deliveries(c, done=True)}

    client.wait_until(lambda: consumed() == set(sent), lambda: f"all is consumed, not only {consumed()}")
    assert client.deliveries(consumers[0], done=False), "some messages have failed"
    deliveries = [m for c in consumers for m in client.deliveries(c)]
    assert any("POP_CK" in m["properties"] for m in deliveries), "the consumers pop"


@pytest.mark.parametrize("client", [JAVA5_5], indirect=True)
def test_messages_of_the_highest_priority_are_received_first(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    """Messages of one priority are received in the order of their sends."""
    talk = Conversation(client, broker, name, queues=0)
    config = ["-r", "4", "-w", "4", "-a", "+message.type=PRIORITY"]
    mqadmin(broker, "updateTopic", "-b", broker.remoting, "-t", talk.topic, *config)
    mode = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    mqadmin(broker, "setConsumeMode", "-b", broker.remoting, *mode)
    priorities = [1, 0, 3, 2, 9, 0, 2, 1, 3]  # with four queues, 9 has the same effect as 3
    for number, priority in enumerate(priorities):
        sent = talk.send(f"{number}", priority=priority)
        assert sent["queue_id"] == min(priority, 3)
    consumer = talk.listen(server_rebalance=True, threads=1)
    received = [int(message["body"]) for message in client.wait_deliveries(consumer, len(priorities))]
    assert received == sorted(range(len(priorities)), key=lambda number: -min(priorities[number], 3))
