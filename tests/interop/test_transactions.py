"""Transactions of Java clients: committed, rolled back, or open until the broker checks them."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA, Conversation, by_body, is_early
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop

COMMIT, ROLLBACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_only_committed_messages_are_delivered(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, transactions=True)
    consumer = talk.listen()
    for number in range(4):
        state = ROLLBACK if number % 2 else COMMIT
        sent = talk.call(
            "send_transaction",
            topic=talk.topic,
            body=f"{state} {number}",
            tag="t",
            properties={"local": state},
        )
        assert sent["status"] == "SEND_OK"
    talk.send("end", level=1)
    received = by_body(client.wait_deliveries(consumer, 3))
    assert set(received) == {f"{COMMIT} 0", f"{COMMIT} 2", "end"}
    assert received[f"{COMMIT} 0"]["tag"] == "t"


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_the_broker_checks_an_open_transaction(client: Driver, broker: StockBroker, name: str) -> None:
    """RocketMQ's property CHECK_IMMUNITY_TIME_IN_SECONDS lets the broker check these messages after a second."""
    talk = Conversation(client, broker, name, transactions=True)
    consumer = talk.listen()
    for state in (COMMIT, ROLLBACK):
        properties = {"local": UNKNOWN, "check": state, "CHECK_IMMUNITY_TIME_IN_SECONDS": 1}
        talk.call("send_transaction", topic=talk.topic, body=f"checked: {state}", properties=properties)
    checked = client.wait_checks(2)
    assert {m["body"] for m in checked} >= {f"checked: {COMMIT}", f"checked: {ROLLBACK}"}
    talk.send("end", level=2)
    received = by_body(client.wait_deliveries(consumer, 2))
    assert set(received) == {f"checked: {COMMIT}", "end"}


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_an_open_half_message_is_not_delivered(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, transactions=True)
    consumer = talk.listen()
    talk.call("send_transaction", topic=talk.topic, body="open", properties={"local": UNKNOWN})
    talk.send("end", level=1)
    [end] = client.wait_deliveries(consumer, 1)
    assert end["body"] == "end" and not is_early(end, end["born_ms"] + 1000)
