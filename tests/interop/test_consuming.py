"""Consumers over remoting: created topics, filters, order, broadcast, shared queues, batches, large bodies."""

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


# ali-ons expects that the topic exists: it never requests the route of the template topic.
@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_BINARY], indirect=True)
def test_the_first_remoting_send_creates_the_topic(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=0)
    talk.send("first", keys="k", properties={"colour": "red"})
    consumer = talk.listen()
    [message] = client.wait_deliveries(consumer, 1)
    assert (message["body"], message["keys"], message["properties"]["colour"]) == ("first", "k", "red")


@pytest.mark.parametrize("client", [CPP], indirect=True)
def test_a_new_group_that_begins_at_the_end_receives_later_messages(
    client: Driver, broker: StockBroker, name: str
) -> None:
    """The C++ client always begins there."""
    talk, numbers = Conversation(client, broker, name, queues=0), itertools.count()
    talk.send("first", keys="k", properties={"colour": "red"})
    consumer = talk.listen()

    def send_and_receive() -> list[Json]:
        # It requests the ends of the queues some time after its start.
        talk.send(f"later {next(numbers)}", keys="k", properties={"colour": "red"})
        return client.deliveries(consumer)

    eventually(send_and_receive, "a message that was sent later is received")
    for message in client.deliveries(consumer):
        assert message["body"].startswith("later")
        assert (message["keys"], message["properties"]["colour"]) == ("k", "red")


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_body_that_the_client_compresses_is_received_unchanged(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    body = "0123456789" * 5_000 + " äöü"
    talk.send(body)
    assert client.wait_deliveries(consumer, 1)[0]["body"] == body


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_remoting_tag_filter_selects_messages(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(expression="A || B")
    for tag in ("C", "Aa", "A", "B", "AB"):
        talk.send(tag, tag=tag)
    talk.send("none")
    talk.send("end", tag="A")
    talk.send("delayed A", tag="A", level=1)
    talk.send("delayed C", tag="C", level=1)
    talk.send("delayed end", tag="B", level=2)
    bodies = [message["body"] for message in client.wait_deliveries(consumer, 5)]
    # The broker must filter "none": unlike the others, ali-ons would accept a message without a tag.
    assert sorted(bodies) == sorted(["A", "B", "end", "delayed A", "delayed end"])


@pytest.mark.parametrize("client", [ALI_ONS, *JAVA], indirect=True)
def test_a_remoting_sql_filter_selects_messages(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(sql="colour = 'red' AND (size > 3 OR size IS NULL) AND TAGS <> 'old'")
    rows = [("red", 4, "new"), ("red", 3, "new"), ("blue", 9, "new"), ("red", None, "new"), ("red", 7, "old")]
    for colour, size, tag in rows:
        properties = {"colour": colour} if size is None else {"colour": colour, "size": size}
        talk.send(f"{colour} {size} {tag}", tag=tag, properties=properties)
    talk.send("delayed red", tag="new", properties={"colour": "red"}, level=1)
    talk.send("delayed blue", tag="new", properties={"colour": "blue"}, level=1)
    talk.send("end", tag="new", properties={"colour": "red"}, level=2)
    received = by_body(client.wait_deliveries(consumer, 4))
    assert set(received) == {"red 4 new", "red None new", "delayed red", "end"}


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_invalid_sql_is_refused_when_the_consumer_starts(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    with pytest.raises(ClientError) as refused:
        talk.listen(sql="colour = = 'red'")
    assert refused.value.code == 23  # SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_an_orderly_consumer_receives_each_queue_in_order(
    client: Driver, broker: StockBroker, name: str
) -> None:
    """Each message fails once, and the following messages of its queue wait for its next attempt."""
    talk = Conversation(client, broker, name, queues=2)
    consumer = talk.listen(orderly=True, fail=1)
    for number in range(4):
        for queue in (0, 1):
            talk.send(f"{queue}-{number}", queue_id=queue)
    client.wait_deliveries(consumer, 8, done=True)
    for queue in (0, 1):
        bodies = [m["body"] for m in client.deliveries(consumer) if m["body"].startswith(f"{queue}-")]
        assert bodies == [f"{queue}-{number}" for number in range(4) for _ in range(2)]


@pytest.mark.parametrize("client", [CPP, ALI_ONS, *JAVA], indirect=True)
def test_each_broadcast_consumer_receives_all_messages(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    consumers = [talk.listen(broadcast=True) for _ in range(2)]
    sent = [f"message {n}" for n in range(6)]
    for body in sent:
        talk.send(body)
    for consumer in consumers:
        assert set(by_body(client.wait_deliveries(consumer, len(sent)))) == set(sent)


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_the_consumers_of_a_group_divide_the_queues(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=4)
    first, second = talk.listen(), talk.listen()
    sent: list[str] = []
    while not (client.deliveries(first) and client.deliveries(second)):
        assert len(sent) < 2_000, "one consumer received all messages"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1], level=1)
    client.wait_deliveries(first, 1)
    both = {m["body"] for c in (first, second) for m in client.deliveries(c)}
    assert both <= set(sent)


@pytest.mark.parametrize("client", [CPP, *JAVA], indirect=True)
def test_a_batch_is_received_in_its_order(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    messages = [{"topic": talk.topic, "body": f"message {n}", "tag": "t", "keys": f"k{n}"} for n in range(10)]
    sent = talk.call("send_batch", messages=messages)
    assert sent["status"] == "SEND_OK"
    received = sorted(client.wait_deliveries(consumer, 10), key=lambda m: m["queue_offset"])
    assert [(m["body"], m["keys"], m["queue_offset"]) for m in received] == [
        (f"message {n}", f"k{n}", n) for n in range(10)
    ]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_a_lite_pull_consumer_continues_at_its_offset(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name, queues=2)
    for number in range(10):
        talk.send(f"message {number}", tag="A" if number % 2 else "B")
    consumer = talk.listen(kind="lite_consumer", expression="A")
    talk.send("delayed", tag="A", level=1)
    received = by_body(client.wait_deliveries(consumer, 6))
    assert set(received) == {f"message {n}" for n in range(1, 10, 2)} | {"delayed"}
    talk.stop(consumer)
    talk.send("after", tag="A")
    second = talk.listen(kind="lite_consumer", expression="A")
    assert [m["body"] for m in client.wait_deliveries(second, 1)] == ["after"]


@pytest.mark.parametrize("client", [CPP], indirect=True)
def test_a_pull_returns_the_messages_that_match_its_filter(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name, queues=2)
    for number in range(5):
        talk.send(f"message {number}", tag="A" if number % 2 else "B")
    pulled = client.call("pull", group=talk.group, topic=talk.topic, expression="A")
    assert set(by_body(pulled["messages"])) == {"message 1", "message 3"}
