"""Sends of the gRPC clients: unchanged, never visible before the due time, and refused with a code."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from tests.interop.drivers import ClientError
from tests.interop.grpc_conversation import ALL, PYTHON, WITH_GO, GrpcConversation
from tests.interop.stock_broker import StockBroker

from timeball.broker.registry.topics import READ, WRITE
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.model import limits

pytestmark = pytest.mark.interop

ILLEGAL_TOPIC, ILLEGAL_DELIVERY_TIME, FORBIDDEN, TOPIC_NOT_FOUND = 40002, 40012, 40300, 40402
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_message_is_received_as_it_was_sent(talks: Talks) -> None:
    talk = talks(queues=3)
    consumer = talk.simple()
    body = "0123456789" * 5_000 + " äöü"
    sent = talk.send(body, tag="t", keys="order-17", properties={"colour": "red", "größe": "ü"})
    [message] = talk.receive(consumer, {body})
    talk.ack(consumer, message)
    for field, value in {
        "topic": talk.topic,
        "body": body,
        "tag": "t",
        "keys": ["order-17"],
        "properties": {"colour": "red", "größe": "ü"},
        "message_id": sent["message_id"],
        "attempt": 1,
        "message_group": None,
    }.items():
        assert message[field] == value, field


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_first_send_creates_the_topic(talks: Talks) -> None:
    talk = talks(queues=0)
    talk.send("first")
    consumer = talk.simple()
    talk.ack(consumer, *talk.receive(consumer, {"first"}))


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_delayed_message_is_received_at_its_due_millisecond(talks: Talks) -> None:
    """The receives wait for messages that are not due yet. The Python client sends whole seconds."""
    talk = talks()
    consumer = talk.simple(wait_s=20)
    due_ms = {f"in {delay_ms} ms": talk.due_ms(delay_ms) for delay_ms in (5_217, 3_109, 86_400_000)}
    for body, message_due_ms in due_ms.items():
        talk.send(body, due_ms=message_due_ms)
    talk.send("past", due_ms=talk.due_ms(-10_000))
    assert [m["body"] for m in talk.receive_once(consumer)] == ["past"]
    [first], [second] = talk.receive_once(consumer), talk.receive_once(consumer)
    talk.ack(consumer, first, second)
    assert (first["body"], second["body"]) == ("in 3109 ms", "in 5217 ms")
    for message in (first, second):
        assert message["due_ms"] == due_ms[message["body"]]
        assert not talk.is_early(message["body"], due_ms[message["body"]])
        [row] = [row for row in talk.broker.rows(talk.topic) if row["body"].decode() == message["body"]]
        assert row["due_ms"] == due_ms[message["body"]]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_delay_beyond_ten_years_is_refused(talks: Talks) -> None:
    talk = talks()
    assert talk.send("accepted", due_ms=talk.due_ms(limits.DELAY_MS_MAX - 60_000))["recall_handle"]
    with pytest.raises(ClientError, match="3653 days") as refused:
        talk.send("refused", due_ms=talk.due_ms(limits.DELAY_MS_MAX + 60_000))
    assert refused.value.code == ILLEGAL_DELIVERY_TIME


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_clients_refuse_a_message_of_another_type_than_the_topic_s(
    talks: Talks, broker: StockBroker, name: str
) -> None:
    """The route contains the topic's attribute message.type."""
    config = {"topic": f"{name}-topic", "readQueueNums": 1, "writeQueueNums": 1, "perm": READ | WRITE}
    answer = broker.request(
        RequestCode.UPDATE_AND_CREATE_TOPIC, **config, attributes="+message.type=DELAY", defaultTopic="TBW102",
        topicFilterType="SINGLE_TAG",
    )  # fmt: skip
    assert answer.code == 0, answer.remark
    talk = talks(queues=0)
    consumer = talk.simple()
    with pytest.raises(ClientError, match=r"(?i)message type"):
        talk.send("without a delay")
    talk.send("delayed", due_ms=talk.due_ms(1))
    talk.ack(consumer, *talk.receive(consumer, {"delayed"}))


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_send_to_a_topic_with_a_reserved_name_is_refused(talks: Talks) -> None:
    """Some clients refuse the name themselves, others report the refusal of the broker."""
    talk = talks()
    with pytest.raises(ClientError) as refused:
        talk.call("send", topic="SCHEDULE_TOPIC_XXXX", body="no")
    if talk.which == PYTHON:
        # The Python client reports only the topic of a refused route, and the broker's text for a refused send.
        assert re.search(r"topic(:|\[)SCHEDULE_TOPIC_XXXX(\] is forbidden| route)", refused.value.text)
    else:
        assert refused.value.code in (ILLEGAL_TOPIC, TOPIC_NOT_FOUND, FORBIDDEN), refused.value
