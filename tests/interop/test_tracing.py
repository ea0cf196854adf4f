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


def print_trace(mqadmin: AdminTool, broker: StockBroker, message_id: str) -> str | None:
    """Return the output of RocketMQ's tool for the trace of a message, None if there is no trace.

    The tool waits some hundred milliseconds for an answer. On a busy machine it may need them to load its classes, and
    is called again.
    """
    for remaining in reversed(range(TRIES)):
        try:
            return mqadmin(broker, "queryMsgTraceById", "-i", message_id)
        except AssertionError as error:  # the tool fails when it finds nothing
            if "no message" in str(error):
                return None
            if "RemotingTimeoutException" not in str(error) or not remaining:
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
    expected = {f"{name}-producer", talk.group}

    def groups(text: str) -> set[str]:
        """Return the groups of this test that a text names."""
        return set(re.findall(rf"{name}-(?:producer|group)", text))

    def traced_groups() -> set[str]:
        """Return the groups whose traces of the message are in the broker. Clients send them with a delay."""
        return {
            group for trace in broker.bodies(TRACES) if sent["message_id"] in trace for group in groups(trace)
        }

    eventually(lambda: traced_groups() == expected, "producer and consumer have sent their traces")
    assert groups(print_trace(mqadmin, broker, sent["message_id"]) or "") == expected


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_a_producer_without_tracing_sends_no_trace(
    client: Driver, broker: StockBroker, name: str, mqadmin: AdminTool
) -> None:
    sent = Conversation(client, broker, name).send("not traced")
    assert print_trace(mqadmin, broker, sent["message_id"]) is None
