"""Simple consumers: an acknowledged message is gone. Others come again after their time, then become dead letters."""

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
def test_acknowledged_does_not_come_again(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    talk.send("done"), talk.send("lost")
    found = {m["body"]: m for m in talk.receive(consumer, {"done", "lost"}, invisible_s=1)}
    talk.ack(consumer, found["done"])
    [again] = talk.receive(consumer, {"lost"}, invisible_s=1)
    [once_more] = talk.receive(consumer, {"lost"}, invisible_s=1)
    talk.ack(consumer, once_more)
    assert [m["attempt"] for m in (found["lost"], again, once_more)] == [1, 2, 3]
    for said in ("topic", "message_id", "born_ms", "tag", "keys", "properties"):
        assert again[said] == once_more[said] == found["lost"][said], said
    returned = talk.returned()
    assert len(returned) == 2 and not any(came_early(row, 1_000) for row in returned)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_longer_and_a_shorter_time(talks: Talks) -> None:
    talk = talks()
    consumer = talk.simple()
    talk.send("held"), talk.send("other")
    first = {m["body"]: m for m in talk.receive(consumer, {"held", "other"}, invisible_s=2)}
    talk.change(consumer, first["held"], 60)
    # By the time that the other one has come twice again, the first one's own time is long over.
    others = [talk.receive(consumer, {"other"}, invisible_s=2) for _ in range(2)]
    assert all([m["body"] for m in found] == ["other"] for found in others)
    talk.ack(consumer, others[-1][-1])
    talk.change(consumer, first["held"], 1)
    [again] = talk.receive(consumer, {"held"})
    talk.ack(consumer, again)
    assert again["attempt"] == 2


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_receipt_is_good_for_one_handing_out(talks: Talks) -> None:
    """A late acknowledgement is reported, and does not end the lease of the next consumer."""
    talk = talks()
    consumer = talk.simple()
    talk.send("slow")
    [late] = talk.receive(consumer, {"slow"}, invisible_s=1)
    [current] = talk.receive(consumer, {"slow"})
    for op in (talk.ack, lambda *which: talk.change(*which, 60)):
        with pytest.raises(ClientError) as refused:
            op(consumer, late)
        assert refused.value.code == INVALID_RECEIPT_HANDLE
    talk.ack(consumer, current)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_after_the_last_attempt_a_dead_letter(talks: Talks) -> None:
    talk = talks(group={"retryMaxTimes": 1})
    consumer = talk.simple()
    talk.send("hopeless", tag="t", properties={"colour": "red"})
    tries = [talk.receive(consumer, {"hopeless"}, invisible_s=1)[-1] for _ in range(2)]
    assert [m["attempt"] for m in tries] == [1, 2]
    eventually(lambda: talk.dead_letters() == ["hopeless"], "it is a dead letter, once")
    undertaker = talk.simple(topic=f"%DLQ%{talk.group}", group="undertaker")
    [letter] = talk.receive(undertaker, {"hopeless"})
    talk.ack(undertaker, letter)
    assert letter["tag"] == "t" and letter["properties"]["colour"] == "red"
    assert letter["message_id"] == tries[0]["message_id"]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_group_shares_a_queue(talks: Talks) -> None:
    """Any of a group's consumers may be given any message, and each message goes to one of them."""
    talk = talks()
    consumers = [talk.simple() for _ in range(2)]
    sent = {f"message {n}" for n in range(12)}
    for body in sorted(sent):
        talk.send(body)
    found = [talk.receive_once(consumers[n % 2], count=3) for n in range(4)]
    bodies = [message["body"] for messages in found for message in messages]
    assert sorted(bodies) == sorted(sent) and all(found)


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_in_order_one_by_one(talks: Talks) -> None:
    """A FIFO group is given nothing behind a message that it has not acknowledged."""
    talk = talks(queues=1, group={"consumeMessageOrderly": True})
    consumer = talk.simple()
    for number in range(3):
        talk.send(f"message {number}", message_group="lane")
    [first] = talk.receive_once(consumer, count=1, invisible_s=1)
    [again] = talk.receive(consumer, {"message 0"}, count=1)
    talk.ack(consumer, again)
    [second] = talk.receive(consumer, {"message 1"}, count=1)
    talk.ack(consumer, second)
    [third] = talk.receive(consumer, {"message 2"}, count=1)
    talk.ack(consumer, third)
    assert [m["attempt"] for m in (first, again, second, third)] == [1, 2, 1, 1]
    assert {m["message_group"] for m in (first, again, second, third)} == {"lane"}


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_groups_do_not_share(talks: Talks) -> None:
    talk = talks()
    talk.send("for all")
    for group in ("first", "second"):
        consumer = talk.simple(group=f"{talk.group}-{group}")
        [message] = talk.receive(consumer, {"for all"})
        talk.ack(consumer, message)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_longest_names(talks: Talks, name: str) -> None:
    """A redelivered message passes through a retry topic whose name is made of group and topic."""
    talk = talks()
    topic, group = (
        f"{name}-".ljust(limits.TOPIC_BYTES_MAX, "t"),
        f"{name}-".ljust(limits.GROUP_BYTES_MAX, "g"),
    )
    consumer = talk.simple(topic=topic, group=group)
    talk.call("send", topic=topic, body="far")
    [first] = talk.receive(consumer, {"far"}, invisible_s=1)
    [again] = talk.receive(consumer, {"far"})
    talk.ack(consumer, again)
    assert (first["attempt"], again["attempt"], again["topic"]) == (1, 2, topic)
