"""Push consumers over gRPC: each message is delivered once, and a failed one again until it is a dead letter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.conversation import by_body
from tests.interop.grpc_conversation import ALL, WITH_GO, GrpcConversation
from tests.node_fixture import eventually

pytestmark = pytest.mark.interop

Talks = Callable[..., GrpcConversation]
EXPONENTIAL = {
    "type": "EXPONENTIAL",
    "exponentialRetryPolicy": {"initial": 1000, "max": 1000, "multiplier": 1},
}


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_push_consumer_receives_each_message_once(talks: Talks) -> None:
    talk = talks(queues=3)
    consumer = talk.listen()
    sent = {f"message {n}": talk.send(f"message {n}") for n in range(20)}
    due_ms = talk.due_ms(1_500)
    sent |= {f"delayed {n}": talk.send(f"delayed {n}", due_ms=due_ms + 1_000 * n) for n in range(3)}
    received = by_body(talk.client.wait_deliveries(consumer, len(sent)))
    assert {b: m["message_id"] for b, m in received.items()} == {b: s["message_id"] for b, s in sent.items()}
    assert {m["attempt"] for m in received.values()} == {1}
    assert not any(talk.is_early(f"delayed {n}", due_ms + 1_000 * n) for n in range(3))


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_failed_message_is_delivered_again_after_each_pause(talks: Talks) -> None:
    talk = talks(group={"retry_ms": [1_000, 2_000]})
    consumer = talk.listen(fail=2)
    talk.send("failing", tag="t", keys="k", properties={"colour": "red"})
    deliveries = talk.client.wait_deliveries(consumer, 3)
    assert [m["attempt"] for m in deliveries] == [1, 2, 3]
    for field in ("topic", "tag", "keys", "message_id", "properties"):
        assert deliveries[0][field] == deliveries[1][field] == deliveries[2][field], field
    first, second = sorted(talk.returned(), key=lambda row: row["store_ms"])
    assert second["store_ms"] >= first["store_ms"] + 2_000, "the pause is that of the group's policy"
    assert not talk.dead_letters()


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_message_that_fails_for_good_is_a_dead_letter(talks: Talks) -> None:
    talk = talks(group={"retryMaxTimes": 2, "retry_ms": [1_000]})
    consumer = talk.listen(fail=1_000_000)
    talk.send("immediate")
    talk.send("delayed", due_ms=talk.due_ms(1_000))
    eventually(lambda: sorted(talk.dead_letters()) == ["delayed", "immediate"], "both are dead letters")
    for body in ("immediate", "delayed"):
        attempts = [m["attempt"] for m in talk.client.deliveries(consumer) if m["body"] == body]
        assert attempts == [1, 2, 3]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_the_push_consumers_of_a_group_share_the_messages(talks: Talks) -> None:
    talk = talks(queues=2)
    consumers = [talk.listen(), talk.listen()]
    sent: list[str] = []
    while not all(talk.client.deliveries(consumer) for consumer in consumers):
        assert len(sent) < 2_000, "one consumer received all messages"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1])

    def received() -> list[str]:
        return [m["body"] for consumer in consumers for m in talk.client.deliveries(consumer)]

    talk.client.wait_until(lambda: len(received()) >= len(sent), "all messages are received")
    assert sorted(received()) == sorted(sent)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_fifo_group_receives_each_message_group_in_order(talks: Talks) -> None:
    """Each message fails once. The following messages of its message group wait for its next attempt."""
    talk = talks(queues=2, group={"consumeMessageOrderly": True, "groupRetryPolicy": EXPONENTIAL})
    consumer = talk.listen(fail=1)
    for number in range(3):
        for group in ("red", "blue"):
            talk.send(f"{group} {number}", message_group=group)
    talk.client.wait_deliveries(consumer, 6, done=True)
    for group in ("red", "blue"):
        received = [m["body"] for m in talk.client.deliveries(consumer) if m["message_group"] == group]
        assert received == [f"{group} {number}" for number in range(3) for _ in range(2)]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_in_order_the_message_after_a_dead_letter_is_delivered(talks: Talks) -> None:
    """For a FIFO group the client counts the attempts, and then forwards the message to the dead letters itself."""
    talk = talks(group={"consumeMessageOrderly": True, "retryMaxTimes": 1, "retry_ms": [1_000]})
    consumer = talk.listen(fail=2)
    for body in ("first", "second"):
        talk.send(body, message_group="lane")
    eventually(lambda: talk.dead_letters() == ["first", "second"], "both are dead letters, in order")
    bodies = [m["body"] for m in talk.client.deliveries(consumer)]
    assert bodies == ["first", "first", "second", "second"]
