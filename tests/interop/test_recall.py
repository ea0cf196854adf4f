"""Recall over remoting: a recalled message is not delivered, and the recall of a delivered message is refused."""

from __future__ import annotations

import base64

import pytest
from tests.interop.conversation import JAVA5, JAVA5_BINARY, Conversation, by_body
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import StockBroker

pytestmark = pytest.mark.interop

ILLEGAL_OPERATION = 604


@pytest.mark.parametrize("client", [JAVA5, JAVA5_BINARY], indirect=True)
def test_a_message_recalled_over_remoting_is_not_delivered(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    kept = talk.send("kept", timer="TIMER_DELAY_MS", timer_value=3_000)
    recalled = talk.send("recalled", timer="TIMER_DELAY_MS", timer_value=3_000)
    talk.send("end", timer="TIMER_DELAY_MS", timer_value=4_000)
    assert recalled["recall_handle"] != kept["recall_handle"]
    message_id = talk.call("recall", topic=talk.topic, handle=recalled["recall_handle"])
    assert message_id == recalled["message_id"]
    assert set(by_body(client.wait_deliveries(consumer, 2))) == {"kept", "end"}


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_delivered_message_cannot_be_recalled(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    sent = talk.send("delivered", timer="TIMER_DELAY_MS", timer_value=300)
    client.wait_deliveries(consumer, 1)
    with pytest.raises(ClientError) as refused:
        talk.call("recall", topic=talk.topic, handle=sent["recall_handle"])
    assert refused.value.code == ILLEGAL_OPERATION


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_a_recall_handle_of_another_topic_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    handle = base64.urlsafe_b64encode(
        f"v1 elsewhere timeball {broker.now_ms() + 60_000} 0A".encode()
    ).decode()
    with pytest.raises(ClientError) as refused:
        talk.call("recall", topic=talk.topic, handle=handle)
    assert refused.value.code == ILLEGAL_OPERATION


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_only_a_message_with_a_timer_has_a_recall_handle(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    assert talk.send("timer", timer="TIMER_DELAY_SEC", timer_value=60)["recall_handle"]
    assert not talk.send("level", level=5).get("recall_handle")
    assert not talk.send("immediate").get("recall_handle")
