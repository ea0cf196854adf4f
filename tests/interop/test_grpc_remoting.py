"""Clients of gRPC and of remoting at one broker: each receives and recalls the messages of the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import JAVA5, Conversation, by_body
from tests.interop.drivers import Driver
from tests.interop.grpc_conversation import ALL, GrpcConversation
from tests.interop.stock_broker import StockBroker
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop

Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", ALL, indirect=True)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_clients_of_both_protocols_receive_each_other_s_messages(
    client: Driver, talks: Talks, broker: StockBroker, name: str
) -> None:
    grpc = talks()
    remoting = Conversation(client, broker, name, queues=0)
    push, simple = remoting.listen(), grpc.simple(group=f"{grpc.group}-simple")
    fields = {"tag": "t", "keys": "k", "properties": {"colour": "red"}}
    due_ms = grpc.due_ms(1_500)
    timer = {"timer": "TIMER_DELAY_MS", "timer_value": 1_500}
    sent = {
        "remoting": remoting.send("remoting", **fields),
        "remoting, delayed": remoting.send("remoting, delayed", **timer, **fields),
        "grpc": grpc.send("grpc", **fields),
        "grpc, delayed": grpc.send("grpc, delayed", due_ms=due_ms, **fields),
    }
    over_grpc = by_body(grpc.receive(simple, set(sent)))
    over_remoting = by_body(client.wait_deliveries(push, len(sent)))
    assert set(over_grpc) == set(over_remoting) == set(sent)
    for body, result in sent.items():
        for received in (over_grpc[body], over_remoting[body]):
            assert received["message_id"] == result["message_id"] and received["tag"] == "t"
            assert received["properties"]["colour"] == "red"
        assert over_grpc[body]["keys"] == ["k"] and over_remoting[body]["keys"] == "k"
    assert not grpc.is_early("remoting, delayed", over_grpc["remoting, delayed"]["born_ms"] + 1_500)
    assert not grpc.is_early("grpc, delayed", due_ms)


@pytest.mark.parametrize("talks", ALL, indirect=True)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_clients_of_both_protocols_recall_each_other_s_messages(
    client: Driver, talks: Talks, broker: StockBroker, name: str
) -> None:
    grpc = talks()
    remoting = Conversation(client, broker, name, queues=0)
    consumer = grpc.simple()
    first = remoting.send("over remoting", timer="TIMER_DELAY_MS", timer_value=5_000)
    second = grpc.send("over gRPC", due_ms=grpc.due_ms(5_000))
    grpc.send("end", due_ms=grpc.due_ms(6_000))
    for talk, sent in ((remoting, second), (grpc, first)):
        assert talk.call("recall", topic=grpc.topic, handle=sent["recall_handle"]) == sent["message_id"]
    assert set(by_body(grpc.receive(consumer, {"end"}))) == {"end"}


@pytest.mark.parametrize("talks", ALL, indirect=True)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_group_can_change_to_a_client_of_the_other_protocol(
    client: Driver, talks: Talks, broker: StockBroker, name: str
) -> None:
    """A message that a client of one protocol has consumed is not delivered to those of the other."""
    grpc = talks()
    remoting = Conversation(client, broker, name, queues=0)
    assert grpc.group == remoting.group
    listener = remoting.listen()
    remoting.send("first")
    client.wait_deliveries(listener, 1)
    # Java's consumer does not commit a message if it is stopped before its listener has returned.
    eventually(lambda: broker.offsets(grpc.group, grpc.topic) == {0: 1}, "the offset is committed")
    remoting.stop(listener)
    grpc.send("second")
    consumer = grpc.simple()
    [message] = grpc.receive(consumer, {"second"})
    grpc.ack(consumer, message)
    grpc.stop(consumer)
    listener = remoting.listen()
    remoting.send("third")
    assert [m["body"] for m in client.wait_deliveries(listener, 1)] == ["third"]
