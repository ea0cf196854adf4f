"""Members of a group: their shares of messages, their answers, and loops that end."""

import threading
from pathlib import Path

import pytest
from tests.client.awaited import Dial, awaited
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.client.messages import Member, Message
from timeball.client.network import run
from timeball.model.errors import InvalidFilter, NotFound, RequestError

BOTH_CLIENTS = True


def send(ball: Timeball, topic: str, count: int) -> list[bytes]:
    """Send messages with the bodies 0 to `count` - 1 to a topic with two queues. Returns the bodies."""
    bodies = [b"%d" % i for i in range(count)]
    ball.create_topic(topic, 2)
    ball.send_many([{"body": body} for body in bodies], topic=topic)
    return bodies


def pull_all(ball: Timeball, topic: str, group: str, count: int) -> list[Message]:
    """Pull until there are `count` messages, and acknowledge none."""
    received: list[Message] = []
    while len(received) < count:
        received += ball.pull(topic, group, max_messages=7)
    return received


def test_members_of_a_group_share_the_messages_and_another_group_gets_all_of_them(
    node: RunningNode, ball: Timeball, dial: Dial
) -> None:
    bodies = send(ball, "shared", 20)
    with dial(node.http_endpoint) as second:
        of_first: list[Message] = []
        of_second: list[Message] = []
        while len(of_first) + len(of_second) < 20:
            of_first += ball.pull("shared", "workers", max_messages=3)
            of_second += second.pull("shared", "workers", max_messages=3, wait=0)
        assert of_first and of_second
        assert sorted(message.body for message in of_first + of_second) == sorted(bodies)
        assert ball.pull("shared", "workers", wait=0) == second.pull("shared", "workers", wait=0) == []
        assert ball.ack(of_first) + second.ack(of_second) == 20
        assert sorted(message.body for message in pull_all(second, "shared", "readers", 20)) == sorted(bodies)
    assert sum(ball.offsets("workers", "shared").values()) == 20


def test_a_message_whose_lease_ends_is_delivered_again_and_the_attempt_counts(
    node: RunningNode, ball: Timeball, dial: Dial
) -> None:
    send(ball, "leased", 1)
    (first,) = ball.pull("leased", "g", lease="50ms")
    with dial(node.http_endpoint) as other:
        (redelivered,) = other.pull("leased", "g", lease="1m")
        assert (redelivered.body, redelivered.topic, redelivered.id, redelivered.attempts) == (
            first.body,
            "leased",
            first.id,
            1,
        )
        assert not first.ack() and not first.nack() and not first.extend("1m")
        assert redelivered.ack() and not redelivered.ack()
    assert ball.pull("leased", "g", wait=0) == []


def test_after_its_last_failed_attempt_a_message_is_a_dead_letter_with_the_last_reason(
    node: RunningNode, ball: Timeball
) -> None:
    send(ball, "failing", 1)
    node.broker.tables.groups.update(SubscriptionGroup("tries", retry_max_times=2))
    for attempts in range(3):
        (message,) = ball.pull("failing", "tries", wait="30s")
        assert message.attempts == attempts
        assert message.nack_reason == (f"fault {attempts - 1}?" if attempts else None)
        assert message.nack(after=0, reason=f"fault {attempts}\ud800")
    eventually(
        lambda: "%DLQ%tries" in ball.topics() and ball.queues("%DLQ%tries")[0].max == 1,
        "the message is a dead letter",
    )
    with node.client() as browser:
        (dead,) = browser.browse("%DLQ%tries")
    assert (dead.body, dead.attempts, dead.properties["RETRY_TOPIC"]) == (b"0", 3, "failing")
    assert [letter.reason for letter in ball.dead_letters("tries").dead_letters] == ["fault 2?"]
    assert ball.pull("failing", "tries", wait=0) == []


def test_a_lease_can_be_extended_and_a_nack_can_delay_the_next_delivery(ball: Timeball) -> None:
    send(ball, "longer", 2)
    first, second = sorted(pull_all(ball, "longer", "g", 2), key=lambda message: message.body)
    assert first.extend("1h") and first.extend("2h") and first.ack()
    assert second.nack(after="100ms")
    (redelivered,) = ball.pull("longer", "g", wait="30s")
    assert (redelivered.body, redelivered.attempts) == (b"1", 1)


def test_a_receipt_is_invalid_in_another_group_and_a_browsed_message_has_none(
    columns: Timeball, client_kind: str
) -> None:
    send(columns, "sealed", 1)
    (message,) = columns.pull("sealed", "g")
    member, receipt = message.lease
    answers = Member(member._calls, "sealed", "other").ack([receipt, "made up"])
    assert (awaited if client_kind == "asyncio" else run)(answers) == [None, None]
    assert message.ack()
    (browsed, *_) = columns.browse("sealed")
    with pytest.raises(RequestError, match="browsed"):
        browsed.ack()


def test_a_group_that_consumes_in_order_gets_one_message_of_a_queue_at_a_time(
    node: RunningNode, ball: Timeball
) -> None:
    node.broker.tables.groups.update(SubscriptionGroup("orderly", consume_message_orderly=True))
    ball.create_topic("steps-in-order", 1)
    ball.send_many([{"body": b"%d" % i} for i in range(3)], topic="steps-in-order")
    for body in (b"0", b"1", b"2"):
        (message,) = ball.pull("steps-in-order", "orderly", max_messages=1)
        assert message.body == body
        assert ball.pull("steps-in-order", "orderly", wait=0) == [], (
            "the queue waits for the answer to this message"
        )
        assert message.ack()


def test_leases_and_acknowledgements_survive_a_restart_of_the_broker(data: Path) -> None:
    with running_node(data) as node:
        with Timeball(node.http_endpoint) as ball:
            send(ball, "kept", 3)
            first, second, third = pull_all(ball, "kept", "g", 3)
            assert first.ack()
        node.stop()
        node.start()
        with Timeball(node.http_endpoint) as ball:
            assert ball.pull("kept", "g", wait=0) == []
            receipts = [message.lease[1] for message in (second, third)]
            assert None not in run(Member(ball._operations, "kept", "g").ack(receipts))


def test_a_group_that_starts_at_latest_gets_only_later_messages(ball: Timeball) -> None:
    send(ball, "latest-group", 5)
    assert ball.pull("latest-group", "late", wait=0, start="latest") == []
    ball.send("latest-group", "new")
    assert [message.body for message in ball.pull("latest-group", "late", start="latest")] == [b"new"]


def test_a_waiting_pull_returns_the_message_that_becomes_due(ball: Timeball) -> None:
    ball.create_topic("polled-group", 1)
    receipt = ball.send("polled-group", "later", after="200ms")
    (message,) = ball.pull("polled-group", "g", wait="60s")
    assert message.body == b"later" and message.id == receipt.id and message.due_ms == receipt.due_ms
    assert message.lateness_ms is not None and message.lateness_ms >= 0  # never early


def test_a_loop_that_is_left_gives_back_its_unprocessed_messages(
    node: RunningNode, ball: Timeball, dial: Dial
) -> None:
    send(ball, "loop", 10)
    received = []
    for message in ball.consume("loop", "g", max_messages=4):
        received.append(message.body)
        if len(received) == 6:
            break
    with dial(node.http_endpoint) as other:
        remaining = {
            message.body: message.attempts for message in other.consume("loop", "g", until_idle="500ms")
        }
    assert len(set(received)) == 6
    assert set(remaining) == {b"%d" % i for i in range(10)} - set(received[:5])
    assert remaining[received[5]] == 1, "the message at which the loop was left has failed once"
    assert [attempts for body, attempts in remaining.items() if body != received[5]] == [0] * 4
    assert sum(ball.offsets("g", "loop").values()) == 10


def test_a_loop_that_ends_by_an_error_acknowledges_the_processed_messages(ball: Timeball) -> None:
    ball.create_topic("crash", 1)
    ball.send_many([{"body": b"%d" % i} for i in range(5)], topic="crash")
    with pytest.raises(ValueError, match="2"):
        for message in ball.consume("crash", "g"):
            if message.body == b"2":
                raise ValueError(message.body)
    redelivered = [message.body for message in ball.consume("crash", "g", until_idle="500ms")]
    assert sorted(redelivered) == [b"2", b"3", b"4"]


def test_a_slow_loop_renews_the_leases_of_its_queued_messages(node: RunningNode, ball: Timeball) -> None:
    send(ball, "slow", 7)
    pause = threading.Event()
    handled = []
    for message in ball.consume("slow", "g", until_idle="200ms", lease="2s"):
        handled.append(message.body)
        pause.wait(0.35)
    assert sorted(handled) == [b"%d" % i for i in range(7)], (
        "each message once, although the loop takes longer than a lease"
    )


def test_a_loop_ends_when_its_stop_event_is_set(ball: Timeball) -> None:
    ball.create_topic("stopped", 1)
    stop, received = threading.Event(), []
    loop = threading.Thread(target=lambda: received.extend(ball.consume("stopped", "g", stop=stop)))
    loop.start()
    ball.send("stopped", "x")
    stop.set()
    loop.join(BOUND_S)
    assert not loop.is_alive()


def test_a_message_that_was_processed_when_its_loop_is_stopped_is_acknowledged(ball: Timeball) -> None:
    stop = threading.Event()
    ball.send("stopped-later", "x")
    for _ in ball.consume("stopped-later", "g", stop=stop):
        stop.set()
    assert ball.pull("stopped-later", "g", wait=0) == []
    assert sum(ball.offsets("g", "stopped-later").values()) == 1


def test_a_loop_acknowledges_a_message_whose_lease_was_extended(ball: Timeball) -> None:
    ball.send("extended-in-loop", "x")
    for message in ball.consume("extended-in-loop", "g", until_idle="100ms"):
        assert message.extend("5m")
    assert sum(ball.offsets("g", "extended-in-loop").values()) == 1


def test_a_pull_of_an_unknown_topic_or_with_a_number_out_of_range_is_refused(ball: Timeball) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        ball.pull("nowhere", "g", wait=0)
    with pytest.raises(RequestError, match="max_messages"):
        ball.pull("nowhere", "g", max_messages=0)
    with pytest.raises(RequestError, match="lease"):
        ball.pull("nowhere", "g", lease=0)


def test_a_pull_that_waits_for_its_topic_gets_the_first_messages(
    node: RunningNode, ball: Timeball, dial: Dial
) -> None:
    topic, received = "group-not-yet", list[Message]()

    def consume() -> None:
        with dial(node.http_endpoint) as member:
            while len(received) < 3:
                received.extend(member.pull(topic, "g", wait=f"{BOUND_S}s", start="latest"))

    waiting = threading.Thread(target=consume)
    waiting.start()
    waiters = node.broker.waiters
    eventually(lambda: topic in waiters._by_topic, "a pull waits for the topic")
    assert topic not in ball.topics()
    ball.send_many([{"body": b"%d" % i} for i in range(3)], topic=topic)
    waiting.join(BOUND_S)
    assert sorted(message.body for message in received) == [b"0", b"1", b"2"]


def test_a_filter_selects_messages_by_tag_or_sql_and_skips_the_others(
    node: RunningNode, ball: Timeball
) -> None:
    ball.create_topic("filtered", 2)
    for number, (tag, region) in enumerate(
        [("paid", "eu"), ("refunded", "us"), ("open", "eu"), (None, "eu")]
    ):
        ball.send("filtered", f"{number}", tag=tag, properties={"region": region, "total": f"{number}00"})
    received = [
        message.body for message in ball.consume("filtered", "tags", tag="paid || refunded", until_idle="2s")
    ]
    assert sorted(received) == [b"0", b"1"]
    sql = "region = 'eu' AND total BETWEEN 0 AND 250"
    assert sorted(message.body for message in ball.consume("filtered", "sql", sql=sql, until_idle="2s")) == [
        b"0",
        b"2",
    ]
    assert [message.body for message in ball.pull("filtered", "rows", tag="open")] == [b"2"]
    # Messages that did not match are skipped: the group's offsets are after them.
    assert sum(ball.offsets("tags", "filtered").values()) == 4


def test_a_filtered_message_is_delivered_again_to_the_same_filter(ball: Timeball) -> None:
    ball.send("filtered-again", "x", tag="paid")
    (message,) = ball.pull("filtered-again", "g", tag="paid")
    assert message.nack(after="10ms")
    (redelivered,) = ball.pull("filtered-again", "g", tag="paid", wait="30s")
    assert (redelivered.attempts, redelivered.tag) == (1, "paid")


@pytest.mark.parametrize("wait", [0, "10s"])
def test_a_wrong_filter_is_refused_without_waiting(ball: Timeball, wait: object) -> None:
    with pytest.raises(InvalidFilter, match="1"):
        ball.pull("no-such-topic-yet", "g", sql="region = ", wait=wait)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="one of them"):
        ball.pull("filtered", "g", sql="a = 1", tag="a")


def test_a_message_can_be_made_a_dead_letter_once(node: RunningNode, ball: Timeball) -> None:
    send(ball, "given-up", 1)
    (message,) = ball.pull("given-up", "givers")
    assert message.dead_letter() and not message.dead_letter()
    with node.client() as browser:
        assert [dead.body for dead in browser.browse("%DLQ%givers")] == [b"0"]


def test_an_uncounted_nack_does_not_raise_the_number_of_attempts(ball: Timeball) -> None:
    ball.send("not-yet", "x")
    for _ in range(3):
        [message] = ball.pull("not-yet", "g", wait="30s")
        assert message.attempts == 0
        assert message.nack(after="10ms", reason="not yet", counted=False)
    [message] = ball.pull("not-yet", "g", wait="30s")
    assert message.nack(after="10ms") and message.nack_reason == "not yet"
    assert ball.pull("not-yet", "g", wait="30s")[0].attempts == 1
