"""Failed messages over remoting: they are delivered again after the pauses of the group, and end as dead letters."""

from __future__ import annotations

import json

import pytest
from tests.interop.conversation import ALI_ONS, ALL, CPP, JAVA, Conversation, is_early
from tests.interop.drivers import Driver
from tests.interop.stock_broker import LEVELS_S, StockBroker
from tests.node_fixture import eventually

from timeball.edges.remoting.codec.codes import RequestCode

pytestmark = pytest.mark.interop

FIRST_RETRY_S, SECOND_RETRY_S = LEVELS_S[2], LEVELS_S[3]  # retry n waits for level 3 + n


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_failed_remoting_message_is_delivered_again(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1)
    talk.send("failing", tag="t", keys="k", properties={"colour": "red"})
    first, second = client.wait_deliveries(consumer, 2)
    assert (first["reconsume_times"], second["reconsume_times"]) == (0, 1)
    assert not is_early(second, first["store_ms"] + FIRST_RETRY_S * 1000)
    for field in ("topic", "body", "tag", "keys"):
        assert first[field] == second[field]
    assert second["properties"]["RETRY_TOPIC"] == talk.topic
    assert second["properties"]["colour"] == "red"
    assert first["properties"].get("UNIQ_KEY") == second["properties"].get("UNIQ_KEY")


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_remoting_message_that_fails_for_good_is_a_dead_letter(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    limit_retries(broker, talk.group, 2)
    consumer = talk.listen(fail=1_000_000, max_reconsume_times=2)
    talk.send("immediate")
    talk.send("delayed", level=1)
    dead_letter_topic = f"%DLQ%{talk.group}"
    eventually(lambda: len(broker.bodies(dead_letter_topic)) == 2, "both are dead letters")
    first, second, third = (m for m in client.deliveries(consumer) if m["body"] == "immediate")
    assert [m["reconsume_times"] for m in (first, second, third)] == [0, 1, 2]
    assert not is_early(second, first["store_ms"] + FIRST_RETRY_S * 1000)
    assert not is_early(third, second["store_ms"] + SECOND_RETRY_S * 1000)
    begin_at_zero(broker, f"{talk.group}-dead", dead_letter_topic)
    reader = talk.listen(topic=dead_letter_topic, group=f"{talk.group}-dead")
    letters = client.wait_deliveries(reader, 2)
    assert {m["body"] for m in letters} == {"immediate", "delayed"}
    assert {m["properties"]["RETRY_TOPIC"] for m in letters} == {talk.topic}


def limit_retries(broker: StockBroker, group: str, times: int) -> None:
    """Create or change a group with a maximum number of retries. The C++ client does not send its own maximum."""
    config = {"groupName": group, "consumeEnable": True, "retryQueueNums": 1, "retryMaxTimes": times}
    answer = broker.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=json.dumps(config).encode())
    assert answer.code == 0, answer.remark


def begin_at_zero(broker: StockBroker, group: str, topic: str) -> None:
    """Commit offset 0 of queue 0 for a group. The C++ client would let a new group begin at the end."""
    limit_retries(broker, group, 2)
    fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 0}
    answer = broker.request(RequestCode.UPDATE_CONSUMER_OFFSET, **fields)
    assert answer.code == 0, answer.remark


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_an_orderly_consumer_makes_a_failed_message_a_dead_letter(
    client: Driver, broker: StockBroker, name: str
) -> None:
    """For an orderly consumer the client counts the attempts, and at last sends the message to the retry topic."""
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1_000_000, orderly=True, max_reconsume_times=1)
    talk.send("failing")
    eventually(lambda: broker.bodies(f"%DLQ%{talk.group}") == ["failing"], "the message is a dead letter")
    assert len(client.deliveries(consumer)) == 2


@pytest.mark.parametrize("client", [CPP, ALI_ONS, *JAVA], indirect=True)
def test_a_failed_broadcast_message_is_not_delivered_again(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1, broadcast=True)
    talk.send("failing")
    client.wait_deliveries(consumer, 1)
    talk.send("end", level=4)  # a retry would be delivered before this
    assert [m["body"] for m in client.wait_deliveries(consumer, 2)] == ["failing", "end"]
