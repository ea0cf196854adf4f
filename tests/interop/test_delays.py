"""Delayed messages: delay levels, RocketMQ 5's timers, Aliyun's delivery time. Never early by the broker's clock."""

from __future__ import annotations

import pytest
from tests.interop.conversation import (
    ALI_ONS,
    ALL,
    CPP,
    JAVA4,
    JAVA5,
    JAVA5_5,
    JAVA5_BINARY,
    Conversation,
    by_body,
    is_early,
)
from tests.interop.drivers import ClientError, Driver
from tests.interop.stock_broker import LEVELS_S, StockBroker

pytestmark = pytest.mark.interop


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_every_level(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("first")  # makes the topic and finds its route, which may take longer than the shortest level
    sent = {f"level {n}": talk.send(f"level {n}", level=n, tag="t", keys=f"k{n}") for n in range(1, 6)}
    at_once = talk.send("at once")
    got = by_body(client.wait_deliveries(consumer, 7))
    assert got["first"]["queue_offset"] == 0
    assert got["at once"]["queue_offset"] == at_once["queue_offset"] == 1, "the others came later"
    for level, seconds in enumerate(LEVELS_S, 1):
        message = got[f"level {level}"]
        assert not is_early(message, message["born_ms"] + seconds * 1000)
        assert (message["topic"], message["tag"], message["keys"]) == (talk.topic, "t", f"k{level}")
        assert message["properties"]["DELAY"] == str(level)
        assert message["properties"]["REAL_TOPIC"] == talk.topic
        assert message["reconsume_times"] == 0
    order = sorted(got.values(), key=lambda message: message["queue_offset"])
    assert [message["body"] for message in order[2:]] == list(sent), "they came in the order of their levels"


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_level_beyond_the_last_is_the_last(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("far", level=18)
    [message] = client.wait_deliveries(consumer, 1)
    assert not is_early(message, message["born_ms"] + LEVELS_S[-1] * 1000)
    assert message["properties"]["DELAY"] == str(len(LEVELS_S))


TIMERS = [
    (CPP, "TIMER_DELAY_MS"), (CPP, "TIMER_DELIVER_MS"),
    (JAVA4, "TIMER_DELAY_SEC"), (JAVA4, "TIMER_DELAY_MS"), (JAVA4, "TIMER_DELIVER_MS"),
    (JAVA5, "TIMER_DELAY_SEC"), (JAVA5, "TIMER_DELAY_MS"), (JAVA5, "TIMER_DELIVER_MS"),
    (JAVA5_BINARY, "TIMER_DELIVER_MS"),
    (ALI_ONS, "__STARTDELIVERTIME"), (ALI_ONS, "TIMER_DELAY_MS"),
]  # fmt: skip


@pytest.mark.parametrize(("client", "timer"), TIMERS, indirect=["client"])
def test_timer(client: Driver, timer: str, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    absolute = timer in ("TIMER_DELIVER_MS", "__STARTDELIVERTIME")
    value = broker.now_ms() + 2137 if absolute else 2 if timer == "TIMER_DELAY_SEC" else 2137
    talk.send("later", timer=timer, timer_value=value)
    talk.send("now")
    now, later = client.wait_deliveries(consumer, 2)
    assert (now["body"], later["body"]) == ("now", "later")
    due_ms = value if absolute else later["born_ms"] + value * (1000 if timer == "TIMER_DELAY_SEC" else 1)
    assert not is_early(later, due_ms)
    assert not is_early(later, now["store_ms"])
    if timer != "__STARTDELIVERTIME":
        shown = later["properties"]
        assert (shown["REAL_TOPIC"], shown["REAL_QID"]) == (talk.topic, "0")
        assert int(shown["TIMER_OUT_MS"]) <= int(shown["TIMER_DEQUEUE_MS"]) == later["store_ms"]
        assert int(shown["TIMER_ENQUEUE_MS"]) <= int(shown["TIMER_OUT_MS"])


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_id_that_the_producer_got_is_the_one_that_the_consumer_sees(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    sent = [
        talk.send("level", level=1)["message_id"],
        talk.send("timer", timer="TIMER_DELAY_MS", timer_value=500)["message_id"],
    ]
    got = by_body(client.wait_deliveries(consumer, 2))
    assert [got["level"]["message_id"], got["timer"]["message_id"]] == sent


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_a_timer_beyond_ten_years_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    eleven_years_ms = 11 * 366 * 86_400_000
    with pytest.raises(ClientError) as refused:
        talk.send("far", timer="TIMER_DELAY_MS", timer_value=eleven_years_ms)
    assert refused.value.code == 13  # MESSAGE_ILLEGAL
    assert talk.send("a year", timer="TIMER_DELAY_MS", timer_value=366 * 86_400_000)


LATER = [
    {"level": 2}, {"timer": "TIMER_DELAY_SEC", "timer_value": 2}, {"timer": "TIMER_DELAY_MS", "timer_value": 2_000},
    {"timer": "TIMER_DELIVER_MS", "timer_value": 4_000_000_000_000},
]  # fmt: skip


@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_5], indirect=True)
def test_a_batch_with_a_delay_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    """The client refuses some of them itself; a MessageBatch made by hand goes past that."""
    talk = Conversation(client, broker, name)
    batch = {"messages": [{"topic": talk.topic, "body": f"message {number}"} for number in range(3)]}
    assert talk.call("send_message_batch", **batch)["status"] == "SEND_OK"
    for delay in LATER:
        for where in ("whole", "inner"):
            with pytest.raises(ClientError) as refused:
                talk.call("send_message_batch", **batch, **{where: delay})
            assert (refused.value.code, "one by one" in refused.value.text) == (13, True), (where, delay)
    assert sorted(broker.bodies(talk.topic)) == ["message 0", "message 1", "message 2"]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_a_timer_in_the_past_is_due_now(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("gone by", timer="TIMER_DELIVER_MS", timer_value=broker.now_ms() - 60_000)
    assert [message["body"] for message in client.wait_deliveries(consumer, 1)] == ["gone by"]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_pending_messages_of_a_level_can_be_read(client: Driver, broker: StockBroker, name: str) -> None:
    """As in RocketMQ, a pending message is in a queue of the schedule's own topic."""
    talk = Conversation(client, broker, name)
    sent = talk.send("waiting", level=5)
    found = client.call(
        "pull", group=talk.group, topic="SCHEDULE_TOPIC_XXXX", broker="timeball", queue_id=4,
        offset=sent["queue_offset"], expression="*",
    )  # fmt: skip
    message = found["messages"][0]
    assert (message["topic"], message["body"]) == ("SCHEDULE_TOPIC_XXXX", "waiting")
    assert message["properties"]["REAL_TOPIC"] == talk.topic
    assert message["queue_offset"] == sent["queue_offset"]
