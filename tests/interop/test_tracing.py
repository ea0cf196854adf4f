"""Clients that trace: the broker stores their traces, and RocketMQ's tool finds them by a message's id."""

from __future__ import annotations

import re

import pytest
from tests.interop.admin_tool import AdminTool
from tests.interop.conversation import JAVA, JAVA5_5, Conversation
from tests.interop.drivers import Driver
from tests.interop.stock_broker import StockBroker
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop

TRACES = "RMQ_SYS_TRACE_TOPIC"
TRIES = 5


def traced(mqadmin: AdminTool, broker: StockBroker, message_id: str) -> str | None:
    """Print the trace of a message with RocketMQ's tool. None: it has none.

    The tool gives a request some hundred milliseconds, in which a busy machine may not have loaded its classes. The
    next try finds them loaded, so a broker that answers needs few. The last failure is the test's.
    """
    for left in reversed(range(TRIES)):
        try:
            return mqadmin(broker, "queryMsgTraceById", "-i", message_id)
        except AssertionError as error:  # the tool fails when it finds nothing
            if "no message" in str(error):
                return None
            if "RemotingTimeoutException" not in str(error) or not left:
                raise
    raise AssertionError("unreachable")


@pytest.mark.parametrize("client", [*JAVA, JAVA5_5], indirect=True)
def test_a_message_is_traced_from_its_producer_to_its_consumer(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    talk = Conversation(client, broker, name, trace=True)
    consumer = talk.listen(trace=True)
    sent = talk.send("traced", keys="order-17")
    client.wait_deliveries(consumer, 1)
    wanted = {f"{name}-producer", talk.group}

    def groups(text: str) -> set[str]:
        """The groups of this test that a text names."""
        return set(re.findall(rf"{name}-(?:producer|group)", text))

    def written() -> set[str]:
        """The groups whose traces of the message are in the broker: clients write them when they have time."""
        return {
            group for trace in broker.bodies(TRACES) if sent["message_id"] in trace for group in groups(trace)
        }

    eventually(lambda: written() == wanted, "producer and consumer have written what they did")
    assert groups(traced(mqadmin, broker, sent["message_id"]) or "") == wanted


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_a_producer_that_does_not_trace_writes_no_trace(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    sent = Conversation(client, broker, name).send("not traced")
    assert traced(mqadmin, broker, sent["message_id"]) is None
