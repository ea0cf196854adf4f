"""Clients that trace: their traces are kept, and RocketMQ's tool finds them by a message's id."""

from __future__ import annotations

import re

import pytest
from tests.interop.conversation import JAVA, JAVA5_5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker
from tests.interop.stock_clients import mqadmin
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop


def traced(broker: StockBroker, message_id: str) -> str | None:
    """Print the trace of a message with RocketMQ's tool; None: it has none. Tried again when the tool is too slow."""
    while True:
        try:
            return mqadmin(broker, "queryMsgTraceById", "-i", message_id)
        except AssertionError as error:  # the tool fails when it finds nothing
            if "no message" in str(error):
                return None
            # It gives its own requests some hundred milliseconds, and its Java is starting meanwhile.
            assert "RemotingTimeoutException" in str(error), error


@pytest.mark.parametrize("client", [*JAVA, JAVA5_5], indirect=True)
def test_a_message_is_traced_from_its_producer_to_its_consumer(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name, trace=True)
    consumer = talk.listen(trace=True)
    sent = talk.send("traced", keys="order-17")
    client.wait_deliveries(consumer, 1)

    def groups() -> set[str]:
        """The groups that the tool lists for this message."""
        return set(re.findall(rf"{name}-(?:producer|group)", traced(broker, sent["message_id"]) or ""))

    wanted = {f"{name}-producer", talk.group}
    eventually(lambda: groups() == wanted, "producer and consumer have written what they did")


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_a_producer_that_does_not_trace_writes_no_trace(
    client: Driver, broker: StockBroker, name: str
) -> None:
    sent = Conversation(client, broker, name).send("not traced")
    assert traced(broker, sent["message_id"]) is None
