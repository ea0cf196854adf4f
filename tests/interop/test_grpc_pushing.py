"""Push consumers: every message once, failed ones again after the group's pauses, then dead letters; and in order."""

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
def test_all_of_it_comes_once(talks: Talks) -> None:
    talk = talks(queues=3)
    consumer = talk.listen()
    sent = {f"message {n}": talk.send(f"message {n}") for n in range(20)}
    due_ms = talk.due_ms(1_500)
    sent |= {f"late {n}": talk.send(f"late {n}", due_ms=due_ms + 1_000 * n) for n in range(3)}
    got = by_body(talk.client.wait_deliveries(consumer, len(sent)))
    assert {body: m["message_id"] for body, m in got.items()} == {b: s["message_id"] for b, s in sent.items()}
    assert {m["attempt"] for m in got.values()} == {1}
    assert not any(talk.is_early(f"late {n}", due_ms + 1_000 * n) for n in range(3))


@pytest.mark.parametrize("talks", WITH_GO, indirect=True)
def test_a_failed_message_comes_again(talks: Talks) -> None:
    talk = talks(group={"retry_ms": [1_000, 2_000]})
    consumer = talk.listen(fail=2)
    talk.send("again", tag="t", keys="k", properties={"colour": "red"})
    tries = talk.client.wait_deliveries(consumer, 3)
    assert [m["attempt"] for m in tries] == [1, 2, 3]
    for said in ("topic", "tag", "keys", "message_id", "properties"):
        assert tries[0][said] == tries[1][said] == tries[2][said], said
    first, second = sorted(talk.returned(), key=lambda row: row["store_ms"])
    assert second["store_ms"] >= first["store_ms"] + 2_000, (
        "the pauses are the group's, whatever the client makes of them"
    )
    assert not talk.dead_letters()


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_message_that_fails_for_good_is_a_dead_letter(talks: Talks) -> None:
    talk = talks(group={"retryMaxTimes": 2, "retry_ms": [1_000]})
    consumer = talk.listen(fail=1_000_000)
    talk.send("hopeless")
    talk.send("hopeless too", due_ms=talk.due_ms(1_000))
    eventually(lambda: sorted(talk.dead_letters()) == ["hopeless", "hopeless too"], "both are dead letters")
    for body in ("hopeless", "hopeless too"):
        tries = [m["attempt"] for m in talk.client.deliveries(consumer) if m["body"] == body]
        assert tries == [1, 2, 3]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_a_group_shares_the_messages(talks: Talks) -> None:
    talk = talks(queues=2)
    consumers = [talk.listen(), talk.listen()]
    sent: list[str] = []
    while not all(talk.client.deliveries(consumer) for consumer in consumers):
        assert len(sent) < 2_000, "one consumer got everything"
        sent.append(f"message {len(sent)}")
        talk.send(sent[-1])

    def both() -> list[str]:
        return [m["body"] for consumer in consumers for m in talk.client.deliveries(consumer)]

    talk.client.wait_until(lambda: len(both()) >= len(sent), "all has come")
    assert sorted(both()) == sorted(sent)


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_in_order(talks: Talks) -> None:
    """A FIFO group: the messages of a message group one after the other, those behind a failed one wait for it."""
    talk = talks(queues=2, group={"consumeMessageOrderly": True, "groupRetryPolicy": EXPONENTIAL})
    consumer = talk.listen(fail=1)
    for number in range(3):
        for lane in ("red", "blue"):
            talk.send(f"{lane} {number}", message_group=lane)
    talk.client.wait_deliveries(consumer, 6, done=True)
    for lane in ("red", "blue"):
        got = [m for m in talk.client.deliveries(consumer) if m["message_group"] == lane]
        assert [m["body"] for m in got] == [f"{lane} {number}" for number in range(3) for _ in range(2)]


@pytest.mark.parametrize("talks", ALL, indirect=True)
def test_in_order_a_dead_letter_lets_the_next_one_pass(talks: Talks) -> None:
    """Here the client counts the attempts, and then forwards the message itself."""
    talk = talks(group={"consumeMessageOrderly": True, "retryMaxTimes": 1, "retry_ms": [1_000]})
    consumer = talk.listen(fail=2)
    for body in ("hopeless", "next"):
        talk.send(body, message_group="lane")
    eventually(lambda: talk.dead_letters() == ["hopeless", "next"], "each is a dead letter, in order")
    bodies = [m["body"] for m in talk.client.deliveries(consumer)]
    assert bodies == ["hopeless", "hopeless", "next", "next"]
