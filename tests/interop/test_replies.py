"""Requests with replies: a producer sends a message, and waits for the reply of a consumer."""

from __future__ import annotations

import pytest
from tests.interop.conversation import JAVA, Conversation
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_the_producer_of_a_request_receives_the_reply(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    client.call("producer", name=f"{name}-replier", group=f"{name}-repliers")
    consumer = talk.listen(reply_by=f"{name}-replier")
    for number in range(3):
        reply = talk.call("request", topic=talk.topic, body=f"question {number}", timeout_ms=20_000)
        assert reply["body"] == f"question {number}!"
        assert reply["topic"] == "DefaultCluster_REPLY_TOPIC"
    requests = client.wait_deliveries(consumer, 3, done=True)
    assert {message["properties"]["CLUSTER"] for message in requests} == {"DefaultCluster"}


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_a_request_without_a_reply_times_out(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    with pytest.raises(ClientError, match=r"[Tt]imeout"):
        talk.call("request", topic=talk.topic, body="question", timeout_ms=200)
