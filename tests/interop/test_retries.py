"""Failing listeners: messages come again after the group's delays, and end as dead letters."""

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
def test_a_failed_message_comes_again(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1)
    talk.send("again", tag="t", keys="k", properties={"colour": "red"})
    first, second = client.wait_deliveries(consumer, 2)
    assert (first["reconsume_times"], second["reconsume_times"]) == (0, 1)
    assert not is_early(second, first["store_ms"] + FIRST_RETRY_S * 1000)
    for seen in ("topic", "body", "tag", "keys"):
        assert first[seen] == second[seen]
    assert second["properties"]["RETRY_TOPIC"] == talk.topic
    assert second["properties"]["colour"] == "red"
    assert first["properties"].get("UNIQ_KEY") == second["properties"].get("UNIQ_KEY")


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_message_that_fails_for_good_is_a_dead_letter(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    limit_retries(broker, talk.group, 2)
    consumer = talk.listen(fail=1_000_000, max_reconsume_times=2)
    talk.send("hopeless")
    talk.send("good too late", level=1)
    dead = f"%DLQ%{talk.group}"
    eventually(lambda: len(broker.bodies(dead)) == 2, "both are dead letters")
    tries = [m for m in client.deliveries(consumer) if m["body"] == "hopeless"]
    assert [m["reconsume_times"] for m in tries] == [0, 1, 2]
    assert not is_early(tries[1], tries[0]["store_ms"] + FIRST_RETRY_S * 1000)
    assert not is_early(tries[2], tries[1]["store_ms"] + SECOND_RETRY_S * 1000)
    begin_at_the_first(broker, f"{talk.group}-undertaker", dead)
    reader = talk.listen(topic=dead, group=f"{talk.group}-undertaker")
    letters = client.wait_deliveries(reader, 2)
    assert {m["body"] for m in letters} == {"hopeless", "good too late"}
    assert {m["properties"]["RETRY_TOPIC"] for m in letters} == {talk.topic}


def limit_retries(broker: StockBroker, group: str, times: int) -> None:
    """For the C++ client, which does not tell the broker its own limit."""
    config = {"groupName": group, "consumeEnable": True, "retryQueueNums": 1, "retryMaxTimes": times}
    answer = broker.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=json.dumps(config).encode())
    assert answer.code == 0, answer.remark


def begin_at_the_first(broker: StockBroker, group: str, topic: str) -> None:
    """For the C++ client, which cannot say where a new group begins."""
    limit_retries(broker, group, 2)
    fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 0}
    answer = broker.request(RequestCode.UPDATE_CONSUMER_OFFSET, **fields)
    assert answer.code == 0, answer.remark


@pytest.mark.parametrize("client", JAVA, indirect=True)
def test_orderly_too(client: Driver, broker: StockBroker, name: str) -> None:
    """The client counts an orderly listener's attempts, and gives up by a send to the retry topic."""
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1_000_000, orderly=True, max_reconsume_times=1)
    talk.send("hopeless")
    eventually(lambda: broker.bodies(f"%DLQ%{talk.group}") == ["hopeless"], "it is a dead letter")
    assert len(client.deliveries(consumer)) == 2


@pytest.mark.parametrize("client", [CPP, ALI_ONS, *JAVA], indirect=True)
def test_broadcast_does_not_retry(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen(fail=1, broadcast=True)
    talk.send("once")
    client.wait_deliveries(consumer, 1)
    talk.send("end", level=4)  # longer than a retry would wait
    assert [m["body"] for m in client.wait_deliveries(consumer, 2)] == ["once", "end"]
