"""Queries of Java clients for messages by key and by id, and for offsets by time."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA, Conversation, by_body
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_messages_are_found_by_key(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    talk.send("one", keys="order-17")
    talk.send("two", keys="order-17 order-18")
    talk.send("three", keys="order-19")
    assert set(by_body(talk.call("query_key", topic=talk.topic, key="order-17"))) == {"one", "two"}
    assert set(by_body(talk.call("query_key", topic=talk.topic, key="order-18"))) == {"two"}
    with pytest.raises(ClientError) as refused:
        talk.call("query_key", topic=talk.topic, key="order-20")
    assert refused.value.code == 208  # NO_MESSAGE


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_a_message_is_found_by_its_ids(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    talk.send("other")
    sent = talk.send("body", keys="k")
    for message_id in (sent["offset_id"], sent["message_id"]):
        found = talk.call("view", topic=talk.topic, message_id=message_id)
        assert (found["body"], found["keys"], found["queue_offset"]) == ("body", "k", sent["queue_offset"])


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_offsets_are_found_by_time(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    for number in range(3):
        talk.send(f"message {number}", level=number + 1)
    _, second, third = sorted(client.wait_deliveries(consumer, 3), key=lambda m: m["queue_offset"])
    for at_ms, offset in [(0, 0), (second["store_ms"], 1), (third["store_ms"], 2)]:
        found = talk.call("offsets", topic=talk.topic, at_ms=at_ms)
        assert found["0"] == {"min": 0, "max": 3, "by_time": offset}
