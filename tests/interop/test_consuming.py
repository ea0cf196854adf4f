"""Consumers: topics created by a send, filters, order, broadcast, sharing, batches, large bodies."""

from __future__ import annotations

import itertools

import pytest
from tests.interop.conversation import (
    ALI_ONS,
    ALL,
    CPP,
    JAVA,
    JAVA4,
    JAVA5,
    JAVA5_BINARY,
    Conversation,
    by_body,
)
from tests.interop.drivers import ClientError, Driver, Json
from tests.interop.stock_broker import StockBroker
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop


# ali-ons never asks for the template topic: it expects that topics exist.
@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_BINARY], indirect=True)
def test_the_first_send_makes_the_topic(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=0)
    talk.send("first", keys="k", properties={"colour": "red"})
    consumer = talk.listen()
    [message] = client.wait_deliveries(consumer, 1)
    assert (message["body"], message["keys"], message["properties"]["colour"]) == ("first", "k", "red")


@pytest.mark.parametrize("client", [CPP], indirect=True)
def test_a_new_group_that_begins_at_the_end_gets_what_comes_then(
    client: Driver, broker: StockBroker, name: str
) -> None:
    """The C++ client for Python cannot choose another start."""
    talk, numbers = Conversation(client, broker, name, queues=0), itertools.count()
    talk.send("first", keys="k", properties={"colour": "red"})
    consumer = talk.listen()

    def came() -> list[Json]:
        # It asks for the ends of the queues some time after its start.
        talk.send(f"later {next(numbers)}", keys="k", properties={"colour": "red"})
        return client.deliveries(consumer)

    eventually(came, "a message that was sent later comes")
    for message in client.deliveries(consumer):
        assert message["body"].startswith("later")
        assert (message["keys"], message["properties"]["colour"]) == ("k", "red")


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_body_that_clients_compress(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    body = "0123456789" * 5_000 + " äöü"
    talk.send(body)
    assert client.wait_deliveries(consumer, 1)[0]["body"] == body


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_tags(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(expression="A || B")
    for tag in ("C", "Aa", "A", "B", "AB"):
        talk.send(tag, tag=tag)
    talk.send("none")
    talk.send("end", tag="A")
    talk.send("late A", tag="A", level=1)
    talk.send("late C", tag="C", level=1)
    talk.send("late end", tag="B", level=2)
    got = [message["body"] for message in client.wait_deliveries(consumer, 5)]
    # Unlike the others, ali-ons accepts a message without a tag that it received.
    assert sorted(got) == sorted(["A", "B", "end", "late A", "late end"])


@pytest.mark.parametrize("client", [ALI_ONS, *JAVA], indirect=True)
def test_sql(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(sql="colour = 'red' AND (size > 3 OR size IS NULL) AND TAGS <> 'old'")
    rows = [("red", 4, "new"), ("red", 3, "new"), ("blue", 9, "new"), ("red", None, "new"), ("red", 7, "old")]
    for colour, size, tag in rows:
        properties = {"colour": colour} if size is None else {"colour": colour, "size": size}
        talk.send(f"{colour} {size} {tag}", tag=tag, properties=properties)
    talk.send("late red", tag="new", properties={"colour": "red"}, level=1)
    talk.send("late blue", tag="new", properties={"colour": "blue"}, level=1)
    talk.send("end", tag="new", properties={"colour": "red"}, level=2)
    got = by_body(client.wait_deliveries(consumer, 4))
    assert set(got) == {"red 4 new", "red None new", "late red", "end"}


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_sql_that_cannot_be_read_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    with pytest.raises(ClientError) as refused:
        talk.listen(sql="colour = = 'red'")
    assert refused.value.code == 23  # SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_orderly(client: Driver, broker: StockBroker, name: str) -> None:
    """Each message fails once, and those behind it wait for it."""
    talk = Conversation(client, broker, name, queues=2)
    consumer = talk.listen(orderly=True, fail=1)
    for number in range(4):
        for queue in (0, 1):
            talk.send(f"{queue}-{number}", queue_id=queue)
    client.wait_deliveries(consumer, 8, done=True)
    for queue in (0, 1):
        got = [m["body"] for m in client.deliveries(consumer) if m["body"].startswith(f"{queue}-")]
        assert got == [f"{queue}-{number}" for number in range(4) for _ in range(2)]


@pytest.mark.parametrize("client", [CPP, ALI_ONS, *JAVA], indirect=True)
def test_broadcast(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=2)
    consumers = [talk.listen(broadcast=True) for _ in range(2)]
    sent = [f"message {n}" for n in range(6)]
    for body in sent:
        talk.send(body)
    for consumer in consumers:
        assert set(by_body(client.wait_deliveries(consumer, len(sent)))) == set(sent)


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_a_group_shares_the_queues(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=4)
    first, second = talk.listen(), talk.listen()
    sent: list[str] = []
    while not (client.deliveries(first) and client.deliveries(second)):
        assert len(sent) < 2_000, "one consumer got everything"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1], level=1)
    client.wait_deliveries(first, 1)
    both = {m["body"] for c in (first, second) for m in client.deliveries(c)}
    assert both <= set(sent)


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_batch(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    messages = [{"topic": talk.topic, "body": f"message {n}", "tag": "t", "keys": f"k{n}"} for n in range(10)]
    sent = talk.call("send_batch", messages=messages)
    assert sent["status"] == "SEND_OK"
    got = client.wait_deliveries(consumer, 10)
    assert [
        (m["body"], m["keys"], m["queue_offset"]) for m in sorted(got, key=lambda m: m["queue_offset"])
    ] == [(f"message {n}", f"k{n}", n) for n in range(10)]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_lite_pull(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=2)
    for number in range(10):
        talk.send(f"message {number}", tag="A" if number % 2 else "B")
    consumer = talk.listen(kind="lite_consumer", expression="A")
    talk.send("late", tag="A", level=1)
    got = by_body(client.wait_deliveries(consumer, 6))
    assert set(got) == {f"message {n}" for n in range(1, 10, 2)} | {"late"}
    talk.stop(consumer)
    talk.send("after", tag="A")
    again = talk.listen(kind="lite_consumer", expression="A")
    assert [m["body"] for m in client.wait_deliveries(again, 1)] == ["after"], "where the first one stopped"


@pytest.mark.parametrize("client", [CPP], indirect=True)
def test_pull(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=2)
    for number in range(5):
        talk.send(f"message {number}", tag="A" if number % 2 else "B")
    found = client.call("pull", group=talk.group, topic=talk.topic, expression="A")
    assert set(by_body(found["messages"])) == {"message 1", "message 3"}
