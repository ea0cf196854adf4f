"""Simple consumers over gRPC: acknowledgements, invisible times, order, and dead letters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.drivers import ClientError
from tests.interop.grpc_conversation import ALL, WITH_GO, GrpcConversation, came_early
from tests.node_fixture import eventually

from timeball.model import limits

pytestmark = pytest.mark.interop

INVALID_RECEIPT_HANDLE = 40013
Talks = Callable[..., GrpcConversation]


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_only_unacknowledged_messages_are_received_again(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    talk.send("acknowledged"), talk.send("other")
    both = {m["body"]: m for m in talk.receive(consumer, {"acknowledged", "other"}, invisible_s=1)}
    talk.ack(consumer, both["acknowledged"])
    first = both["other"]
    [second] = talk.receive(consumer, {"other"}, invisible_s=1)
    [third] = talk.receive(consumer, {"other"}, invisible_s=1)
    talk.ack(consumer, third)
    assert [m["attempt"] for m in (first, second, third)] == [1, 2, 3]
    for field in ("topic", "message_id", "born_ms", "tag", "keys", "properties"):
        assert first[field] == second[field] == third[field], field
    returned = talk.returned()
    assert len(returned) == 2 and not any(came_early(row, 1_000) for row in returned)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_invisible_time_of_a_message_can_be_changed(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    talk.send("changed"), talk.send("other")
    first = {m["body"]: m for m in talk.receive(consumer, {"changed", "other"}, invisible_s=2)}
    talk.change(consumer, first["changed"], 60)
    # When the other message has been received twice again, the first time of the changed one would be over, too.
    others = [talk.receive(consumer, {"other"}, invisible_s=2) for _ in range(2)]
    assert all([m["body"] for m in messages] == ["other"] for messages in others)
    talk.ack(consumer, others[-1][-1])
    talk.change(consumer, first["changed"], 1)
    [second] = talk.receive(consumer, {"changed"})
    talk.ack(consumer, second)
    assert second["attempt"] == 2


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_receipt_handle_is_invalid_after_the_next_delivery(talks: Talks) -> None:
    """A late acknowledgement is refused, and has no effect on the later delivery."""
    talk = talks()
    consumer = talk.simple()
    talk.send("body")
    [first] = talk.receive(consumer, {"body"}, invisible_s=1)
    [second] = talk.receive(consumer, {"body"})
    for call in (talk.ack, lambda *message: talk.change(*message, 60)):
        with pytest.raises(ClientError) as refused:
            call(consumer, first)
        assert refused.value.code == INVALID_RECEIPT_HANDLE
    talk.ack(consumer, second)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_after_the_last_attempt_a_message_is_a_dead_letter(talks: Talks) -> None:
    talk = talks(group={"retryMaxTimes": 1})
    consumer = talk.simple()
    talk.send("unacknowledged", tag="t", properties={"colour": "red"})
    deliveries = [talk.receive(consumer, {"unacknowledged"}, invisible_s=1)[-1] for _ in range(2)]
    assert [m["attempt"] for m in deliveries] == [1, 2]
    eventually(lambda: talk.dead_letters() == ["unacknowledged"], "the message is one dead letter")
    dead_letter_consumer = talk.simple(topic=f"%DLQ%{talk.group}", group=f"{talk.group}-dead")
    [letter] = talk.receive(dead_letter_consumer, {"unacknowledged"})
    talk.ack(dead_letter_consumer, letter)
    assert letter["tag"] == "t" and letter["properties"]["colour"] == "red"
    assert letter["message_id"] == deliveries[0]["message_id"]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_consumers_of_a_group_share_a_queue(talks: Talks) -> None:
    """Any consumer of the group may receive any message, and only one of them receives each message."""
    talk = talks()
    consumers = [talk.simple() for _ in range(2)]
    sent = {f"message {n}" for n in range(12)}
    for body in sorted(sent):
        talk.send(body)
    batches = [talk.receive_once(consumers[n % 2], count=3) for n in range(4)]
    bodies = [message["body"] for messages in batches for message in messages]
    assert sorted(bodies) == sorted(sent) and all(batches)


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_consumer_in_order_receives_one_message_at_a_time(talks: Talks) -> None:
    """A FIFO group receives no message after one that it has not acknowledged."""
    talk = talks(queues=1, group={"consumeMessageOrderly": True})
    consumer = talk.simple()
    for number in range(3):
        talk.send(f"message {number}", message_group="lane")
    [first] = talk.receive_once(consumer, count=1, invisible_s=1)
    [first_again] = talk.receive(consumer, {"message 0"}, count=1)
    talk.ack(consumer, first_again)
    [second] = talk.receive(consumer, {"message 1"}, count=1)
    talk.ack(consumer, second)
    [third] = talk.receive(consumer, {"message 2"}, count=1)
    talk.ack(consumer, third)
    assert [m["attempt"] for m in (first, first_again, second, third)] == [1, 2, 1, 1]
    assert {m["message_group"] for m in (first, first_again, second, third)} == {"lane"}


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_each_group_receives_all_messages(talks: Talks) -> None:
    talk = talks()
    talk.send("for all")
    for group in ("first", "second"):
        consumer = talk.simple(group=f"{talk.group}-{group}")
        [message] = talk.receive(consumer, {"for all"})
        talk.ack(consumer, message)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_longest_names_of_topic_and_group_work(talks: Talks, name: str) -> None:
    """A redelivered message is in a retry topic whose name contains that of the group and that of the topic."""
    talk = talks()
    topic, group = (
        f"{name}-".ljust(limits.TOPIC_BYTES_MAX, "t"),
        f"{name}-".ljust(limits.GROUP_BYTES_MAX, "g"),
    )
    consumer = talk.simple(topic=topic, group=group)
    talk.call("send", topic=topic, body="body")
    [first] = talk.receive(consumer, {"body"}, invisible_s=1)
    [second] = talk.receive(consumer, {"body"})
    talk.ack(consumer, second)
    assert (first["attempt"], second["attempt"], second["topic"]) == (1, 2, topic)
