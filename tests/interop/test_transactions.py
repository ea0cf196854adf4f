"""Transactions: committed at once, rolled back, or asked about."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA, Conversation, by_body, is_early
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop

COMMIT, ROLLBACK, UNKNOWN = "COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_commit_and_rollback(client: Driver, broker: StockBroker, name: str) -> None:
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
    got = by_body(client.wait_deliveries(consumer, 3))
    assert set(got) == {f"{COMMIT} 0", f"{COMMIT} 2", "end"}
    assert got[f"{COMMIT} 0"]["tag"] == "t"


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_the_broker_asks(client: Driver, broker: StockBroker, name: str) -> None:
    """Shorten the wait for this message's check, by RocketMQ's own property CHECK_IMMUNITY_TIME_IN_SECONDS."""
    talk = Conversation(client, broker, name, transactions=True)
    consumer = talk.listen()
    for state in (COMMIT, ROLLBACK):
        patience = {"CHECK_IMMUNITY_TIME_IN_SECONDS": 1}
        talk.call(
            "send_transaction", topic=talk.topic, body=f"asked: {state}",
            properties={"local": UNKNOWN, "check": state, **patience},
        )  # fmt: skip
    asked = client.wait_checks(2)
    assert {m["body"] for m in asked} >= {f"asked: {COMMIT}", f"asked: {ROLLBACK}"}
    talk.send("end", level=2)
    got = by_body(client.wait_deliveries(consumer, 2))
    assert set(got) == {f"asked: {COMMIT}", "end"}


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_nothing_is_seen_before_the_commit(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, transactions=True)
    consumer = talk.listen()
    talk.call("send_transaction", topic=talk.topic, body="open", properties={"local": UNKNOWN})
    talk.send("end", level=1)
    [end] = client.wait_deliveries(consumer, 1)
    assert end["body"] == "end" and not is_early(end, end["born_ms"] + 1000)
