"""One broker, two protocols: clients of each receive the messages of the other, and handles work for both."""

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
def test_each_reads_the_other_s(client: Driver, talks: Talks, broker: StockBroker, name: str) -> None:
    new = talks()
    old = Conversation(client, broker, name, queues=0)
    given, asked = old.listen(), new.simple(group=f"{new.group}-asked")
    how = {"tag": "t", "keys": "k", "properties": {"colour": "red"}}
    due_ms = new.due_ms(1_500)
    ids = {
        "old": old.send("old", **how)["message_id"],
        "old, late": old.send("old, late", timer="TIMER_DELAY_MS", timer_value=1_500, **how)["message_id"],
        "new": new.send("new", **how)["message_id"],
        "new, late": new.send("new, late", due_ms=due_ms, **how)["message_id"],
    }
    to_new = by_body(new.receive(asked, set(ids)))
    to_old = by_body(client.wait_deliveries(given, len(ids)))
    assert set(to_new) == set(to_old) == set(ids)
    for body, message_id in ids.items():
        assert message_id == to_new[body]["message_id"] == to_old[body]["message_id"]
        assert to_new[body]["tag"] == to_old[body]["tag"] == "t"
        assert to_new[body]["keys"] == ["k"] and to_old[body]["keys"] == "k"
        assert to_new[body]["properties"]["colour"] == to_old[body]["properties"]["colour"] == "red"
    assert not new.is_early("old, late", to_new["old, late"]["born_ms"] + 1_500)
    assert not new.is_early("new, late", due_ms)


@pytest.mark.parametrize("talks", ALL, indirect=True)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_each_recalls_the_other_s(client: Driver, talks: Talks, broker: StockBroker, name: str) -> None:
    new = talks()
    old = Conversation(client, broker, name, queues=0)
    consumer = new.simple()
    by_old = old.send("by the old one", timer="TIMER_DELAY_MS", timer_value=5_000)
    by_new = new.send("by the new one", due_ms=new.due_ms(5_000))
    new.send("end", due_ms=new.due_ms(6_000))
    assert old.call("recall", topic=new.topic, handle=by_new["recall_handle"]) == by_new["message_id"]
    assert new.call("recall", topic=new.topic, handle=by_old["recall_handle"]) == by_old["message_id"]
    assert set(by_body(new.receive(consumer, {"end"}))) == {"end"}


@pytest.mark.parametrize("talks", ALL, indirect=True)
@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_group_goes_on_with_the_other_client(
    client: Driver, talks: Talks, broker: StockBroker, name: str
) -> None:
    """A message consumed by one kind of client is consumed for the group."""
    new = talks()
    old = Conversation(client, broker, name, queues=0)
    assert new.group == old.group
    listener = old.listen()
    old.send("first")
    client.wait_deliveries(listener, 1)
    # Java's consumer forgets what it has just consumed when it is stopped before its listener has returned.
    eventually(lambda: broker.offsets(new.group, new.topic) == {0: 1}, "its offset is committed")
    old.stop(listener)
    new.send("second")
    consumer = new.simple()
    [message] = new.receive(consumer, {"second"})
    new.ack(consumer, message)
    new.stop(consumer)
    listener = old.listen()
    old.send("third")
    assert [m["body"] for m in client.wait_deliveries(listener, 1)] == ["third"]
