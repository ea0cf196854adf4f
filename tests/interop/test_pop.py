"""Pop: the broker gives messages to any member, and takes back those that are not acknowledged in time."""

from __future__ import annotations

import pytest
from tests.interop.admin_tool import AdminTool
from tests.interop.conversation import JAVA5, JAVA5_5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_pop(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    """Queues are shared without being divided, and a failed message comes again after its time."""
    talk = Conversation(client, broker, name, queues=2)
    how = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    mqadmin(broker, "setConsumeMode", "-b", broker.remoting, *how)
    consumers = [talk.listen(server_rebalance=True, fail=fail) for fail in (1, 0)]
    sent = ["late"]
    talk.send("late", level=1)
    while not all(client.deliveries(consumer) for consumer in consumers):
        assert len(sent) < 2_000, "one consumer got everything"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1], level=1)

    def done() -> set[str]:
        return {m["body"] for c in consumers for m in client.deliveries(c, done=True)}

    client.wait_until(lambda: done() == set(sent), lambda: f"all was consumed, not only {done()}")
    assert client.deliveries(consumers[0], done=False), "some failed, and came again"
    tries = [m for c in consumers for m in client.deliveries(c)]
    assert any("POP_CK" in m["properties"] for m in tries), "they were popped, not pulled"


@pytest.mark.parametrize("client", [JAVA5_5], indirect=True)
def test_priorities(client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool) -> None:
    """The highest priority of the visible messages comes first, then the order of the sends."""
    talk = Conversation(client, broker, name, queues=0)
    how = ["-r", "4", "-w", "4", "-a", "+message.type=PRIORITY"]
    mqadmin(broker, "updateTopic", "-b", broker.remoting, "-t", talk.topic, *how)
    how = ["-t", talk.topic, "-g", talk.group, "-m", "POP", "-q", "8"]
    mqadmin(broker, "setConsumeMode", "-b", broker.remoting, *how)
    priorities = [1, 0, 3, 2, 9, 0, 2, 1, 3]  # the topic has four queues: 9 is 3
    for number, priority in enumerate(priorities):
        sent = talk.send(f"{number}", priority=priority)
        assert sent["queue_id"] == min(priority, 3)
    consumer = talk.listen(server_rebalance=True, threads=1)
    got = [int(message["body"]) for message in client.wait_deliveries(consumer, len(priorities))]
    assert got == sorted(range(len(priorities)), key=lambda number: -min(priorities[number], 3))
