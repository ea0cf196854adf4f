"""Delayed messages over remoting: delay levels, RocketMQ 5's timers, Aliyun's delivery time.

No message may enter its queue before it is due by the broker's clock.
"""

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
def test_a_message_with_a_delay_level_is_received_in_time(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("first")  # the client finds the route, which may take longer than the shortest level
    sent = {f"level {n}": talk.send(f"level {n}", level=n, tag="t", keys=f"k{n}") for n in range(1, 6)}
    immediate = talk.send("immediate")
    received = by_body(client.wait_deliveries(consumer, 7))
    assert received["first"]["queue_offset"] == 0
    assert received["immediate"]["queue_offset"] == immediate["queue_offset"] == 1, (
        "all others are in the queue later"
    )
    for level, seconds in enumerate(LEVELS_S, 1):
        message = received[f"level {level}"]
        assert not is_early(message, message["born_ms"] + seconds * 1000)
        assert (message["topic"], message["tag"], message["keys"]) == (talk.topic, "t", f"k{level}")
        assert message["properties"]["DELAY"] == str(level)
        assert message["properties"]["REAL_TOPIC"] == talk.topic
        assert message["reconsume_times"] == 0
    in_queue = sorted(received.values(), key=lambda message: message["queue_offset"])
    assert [message["body"] for message in in_queue[2:]] == list(sent), "in the order of their levels"


@pytest.mark.parametrize("client", ALL, indirect=True)
def test_a_delay_level_above_the_highest_means_the_highest(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("body", level=18)
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
def test_a_message_with_a_timer_is_received_in_time(
    client: Driver, timer: str, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    absolute = timer in ("TIMER_DELIVER_MS", "__STARTDELIVERTIME")
    value = broker.now_ms() + 2137 if absolute else 2 if timer == "TIMER_DELAY_SEC" else 2137
    talk.send("delayed", timer=timer, timer_value=value)
    talk.send("immediate")
    immediate, delayed = client.wait_deliveries(consumer, 2)
    assert (immediate["body"], delayed["body"]) == ("immediate", "delayed")
    due_ms = value if absolute else delayed["born_ms"] + value * (1000 if timer == "TIMER_DELAY_SEC" else 1)
    assert not is_early(delayed, due_ms)
    assert not is_early(delayed, immediate["store_ms"])
    if timer != "__STARTDELIVERTIME":
        properties = delayed["properties"]
        assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == (talk.topic, "0")
        assert int(properties["TIMER_OUT_MS"]) <= int(properties["TIMER_DEQUEUE_MS"]) == delayed["store_ms"]
        assert int(properties["TIMER_ENQUEUE_MS"]) <= int(properties["TIMER_OUT_MS"])


@pytest.mark.parametrize("client", [JAVA5], indirect=True)
def test_the_producer_and_the_consumer_get_the_same_message_id(
    client: Driver, broker: StockBroker, name: str
) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    sent = [
        talk.send("level", level=1)["message_id"],
        talk.send("timer", timer="TIMER_DELAY_MS", timer_value=500)["message_id"],
    ]
    received = by_body(client.wait_deliveries(consumer, 2))
    assert [received["level"]["message_id"], received["timer"]["message_id"]] == sent


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_a_timer_beyond_ten_years_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    eleven_years_ms = 11 * 366 * 86_400_000
    with pytest.raises(ClientError) as refused:
        talk.send("eleven years", timer="TIMER_DELAY_MS", timer_value=eleven_years_ms)
    assert refused.value.code == 13  # MESSAGE_ILLEGAL
    assert talk.send("one year", timer="TIMER_DELAY_MS", timer_value=366 * 86_400_000)


DELAYS = [
    {"level": 2}, {"timer": "TIMER_DELAY_SEC", "timer_value": 2}, {"timer": "TIMER_DELAY_MS", "timer_value": 2_000},
    {"timer": "TIMER_DELIVER_MS", "timer_value": 4_000_000_000_000},
]  # fmt: skip


@pytest.mark.parametrize("client", [JAVA4, JAVA5, JAVA5_5], indirect=True)
def test_a_batch_with_a_delay_is_refused(client: Driver, broker: StockBroker, name: str) -> None:
    """The client refuses some delays itself, but not in a MessageBatch that its caller creates.

    The delay is a property of the batch (whole) or of one of its messages (inner).
    """
    talk = Conversation(client, broker, name)
    batch = {"messages": [{"topic": talk.topic, "body": f"message {number}"} for number in range(3)]}
    assert talk.call("send_message_batch", **batch)["status"] == "SEND_OK"
    for delay in DELAYS:
        for part in ("whole", "inner"):
            with pytest.raises(ClientError) as refused:
                talk.call("send_message_batch", **batch, **{part: delay})
            assert (refused.value.code, "one by one" in refused.value.text) == (13, True), (part, delay)
    assert sorted(broker.bodies(talk.topic)) == ["message 0", "message 1", "message 2"]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_a_timer_in_the_past_is_due_now(client: Driver, broker: StockBroker, name: str) -> None:
    talk = Conversation(client, broker, name)
    consumer = talk.listen()
    talk.send("past", timer="TIMER_DELIVER_MS", timer_value=broker.now_ms() - 60_000)
    assert [message["body"] for message in client.wait_deliveries(consumer, 1)] == ["past"]


@pytest.mark.parametrize("client", [JAVA4, JAVA5], indirect=True)
def test_pending_messages_of_a_level_can_be_read(client: Driver, broker: StockBroker, name: str) -> None:
    """As in RocketMQ, a pending message is in a queue of the schedule's own topic."""
    talk = Conversation(client, broker, name)
    sent = talk.send("pending", level=5)
    pulled = client.call(
        "pull", group=talk.group, topic="SCHEDULE_TOPIC_XXXX", broker="timeball", queue_id=4,
        offset=sent["queue_offset"], expression="*",
    )  # fmt: skip
    message = pulled["messages"][0]
    assert (message["topic"], message["body"]) == ("SCHEDULE_TOPIC_XXXX", "pending")
    assert message["properties"]["REAL_TOPIC"] == talk.topic
    assert message["queue_offset"] == sent["queue_offset"]
