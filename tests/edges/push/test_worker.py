"""A real node delivers to a real receiver: the outcome of each message, and its number of attempts."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.edges.http.client import Client, client_of
from tests.edges.push.conftest import LOOPBACK
from tests.edges.push.receiver import Receiver, Reply, Request, Script, receiver_of
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup
from timeball.broker.registry.topics import TopicConfig
from timeball.edges.push import worker


def make_group(node: RunningNode, group: str, *, times_max: int = 16, delay_ms: int = 1, **more: Any) -> None:
    """Create a group with a maximum number of attempts, and the same pause before each retry."""
    policy = RetryPolicy(customized_retry_policy=CustomizedRetry([delay_ms] * 3))

    async def update() -> None:
        node.broker.tables.groups.update(
            SubscriptionGroup(group, retry_max_times=times_max, group_retry_policy=policy, **more)
        )

    node.run(update())


def subscribe(client: Client, name: str, receiver: Receiver, **fields: Any) -> Any:
    """Put a subscription that pushes to the receiver, and return it."""
    wanted = {"topic": name, "group": name, "url": receiver.url, **fields}
    answer = client.ask("PUT", f"/v1/subscriptions/{name}", wanted)
    assert answer.status in (200, 201), answer
    return answer.value


def show(client: Client, name: str) -> Any:
    """Return a subscription as the HTTP API shows it."""
    return client.ask("GET", f"/v1/subscriptions/{name}").value


def dead_letters(node: RunningNode, group: str) -> int:
    """Count the dead letters of a group."""
    topic = node.broker.tables.topics.find_topic(f"%DLQ%{group}")
    return 0 if topic is None else sum(queue.index.max_offset for queue in topic.queues)


def send(client: Client, topic: str, count: int) -> list[bytes]:
    """Send `count` different messages, and return their bodies."""
    bodies = [f"{topic}-{at}" for at in range(count)]
    assert client.send(topic, [{"body": body} for body in bodies]).status == 201
    return [body.encode() for body in bodies]


def answer_first_with(first: Reply) -> Script:
    """Answer the first attempt at each message with `first`, and later ones with 200."""
    seen: set[bytes] = set()

    def script(request: Request) -> Reply:
        is_new = request.body not in seen
        seen.add(request.body)
        return first if is_new else Reply()

    return script


def wait_for_requests(node: RunningNode, client: Client, name: str) -> None:
    """Wait until no request of a subscription is in flight."""
    eventually(lambda: show(client, name)["in_flight"] == 0, "nothing is in flight")


def test_messages_are_delivered_once_with_their_headers(node: RunningNode, client: Client) -> None:
    with receiver_of() as receiver:
        subscribe(client, "once", receiver)
        sent = client.send("once", {"body": "hello", "tag": "new", "key": "k", "properties": {"a": "b"}})
        later = client.send("once", {"body": "later", "after": "20ms"})
        eventually(lambda: len(receiver.requests) == 2, "both are delivered")
        wait_for_requests(node, client, "once")
    hello, delayed = sorted(receiver.requests, key=lambda request: request.body)
    assert (hello.body, hello.headers["webhook-id"]) == (b"hello", sent.value["id"])
    assert hello.headers["timeball-attempt"] == "1" and hello.headers["timeball-property-a"] == "b"
    assert hello.headers["timeball-tag"] == "new" and hello.headers["timeball-key"] == "k"
    assert delayed.headers["timeball-due"] == later.value["due"]
    client.ask("DELETE", "/v1/subscriptions/once")
    assert client.receive("once", group="once", wait="0").value["messages"] == []


@pytest.mark.parametrize(
    "reply",
    [Reply(400), Reply(404), Reply(500), Reply(503), Reply(302, {"location": "/"}), Reply(instead="reset"),
     Reply(instead="close"), Reply(instead="noise"), Reply(429, {"retry-after": "0"})],
    ids=lambda reply: reply.instead or str(reply.status),
)  # fmt: skip
def test_a_failed_request_is_tried_again(node: RunningNode, client: Client, reply: Reply) -> None:
    name = f"again-{reply.instead or reply.status}"
    make_group(node, name)
    with receiver_of(answer_first_with(reply)) as receiver:
        subscribe(client, name, receiver)
        bodies = send(client, name, 3)
        eventually(lambda: len(receiver.requests) == 6, "each is tried twice")
        wait_for_requests(node, client, name)
        client.ask("DELETE", f"/v1/subscriptions/{name}")
    assert Counter(receiver.bodies()) == dict.fromkeys(bodies, 2)
    attempts = {(item.body, item.headers["timeball-attempt"]) for item in receiver.requests}
    assert attempts == {(body, attempt) for body in bodies for attempt in "12"}
    ids = {item.body: item.headers["webhook-id"] for item in receiver.requests}
    assert all(item.headers["webhook-id"] == ids[item.body] for item in receiver.requests)


def test_a_request_that_times_out_is_tried_again(node: RunningNode, client: Client) -> None:
    make_group(node, "hangs")
    with receiver_of(answer_first_with(Reply(instead="hang"))) as receiver:
        subscribe(client, "hangs", receiver, timeout="1s")
        send(client, "hangs", 1)
        eventually(lambda: len(receiver.requests) == 2, "it is tried again")
        wait_for_requests(node, client, "hangs")
        figures = node.node.metrics.push["hangs"]
        assert figures.outcomes == {"timeout": 1, "delivered": 1}


def test_a_message_becomes_a_dead_letter_after_its_last_attempt(node: RunningNode, client: Client) -> None:
    make_group(node, "dies", times_max=2)
    with receiver_of(lambda request: Reply(500 if request.body == b"dies-1" else 200)) as receiver:
        subscribe(client, "dies", receiver)
        send(client, "dies", 3)
        eventually(lambda: dead_letters(node, "dies") == 1, "it is a dead letter")
        wait_for_requests(node, client, "dies")
        assert Counter(receiver.bodies()) == {b"dies-0": 1, b"dies-1": 3, b"dies-2": 1}


def test_retry_after_pauses_a_subscription_until_it_is_resumed(node: RunningNode, client: Client) -> None:
    make_group(node, "asks")
    began = threading.Event()

    def script(request: Request) -> Reply:
        if not began.is_set():
            began.set()
            return Reply(503, {"retry-after": "3600"})
        return Reply()

    with receiver_of(script) as receiver:
        subscribe(client, "asks", receiver, in_flight_max=1)
        send(client, "asks", 3)
        eventually(began.is_set, "it was asked")
        eventually(lambda: node.node.metrics.push["asks"].outcomes == {"server_error": 1}, "it was counted")
        held_ms = node.node.edges.push._workers["asks"]._pace.held_ms()  # type: ignore[union-attr]
        assert 3_500_000 < held_ms <= 3_600_000
        # A resume ends the pause.
        client.ask("POST", "/v1/subscriptions/asks/resume")
        eventually(lambda: len(receiver.requests) == 3, "the others are sent")
        # The message that was answered with Retry-After still waits for its time.
        wait_for_requests(node, client, "asks")
        assert max(Counter(receiver.bodies()).values()) == 1


def test_status_410_pauses_the_subscription(node: RunningNode, client: Client) -> None:
    with receiver_of(lambda _: Reply(410)) as receiver:
        subscribe(client, "gone", receiver, in_flight_max=1)
        bodies = send(client, "gone", 3)
        eventually(lambda: show(client, "gone")["state"] == "gone", "it is paused")
        wait_for_requests(node, client, "gone")
        assert len(receiver.requests) == 1
        receiver.script = lambda _: Reply()
        assert client.ask("POST", "/v1/subscriptions/gone/resume").value["state"] == "delivering"
        eventually(lambda: len(receiver.requests) == 4, "all are sent")
        wait_for_requests(node, client, "gone")
    # The answer 410 does not count as an attempt.
    assert sorted(receiver.bodies()[1:]) == bodies
    assert {item.headers["timeball-attempt"] for item in receiver.requests} == {"1"}


def test_concurrent_requests_reach_but_do_not_exceed_in_flight_max(node: RunningNode, client: Client) -> None:
    together = threading.Barrier(3)

    def script(request: Request) -> Reply:
        together.wait(30)
        return Reply()

    with receiver_of(script) as receiver:
        subscribe(client, "bounded", receiver, in_flight_max=3)
        send(client, "bounded", 30)
        eventually(lambda: len(receiver.requests) == 30, "all are sent")
        wait_for_requests(node, client, "bounded")
        assert receiver.most == 3


def test_a_receiver_that_is_down_costs_few_attempts(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_group(node, "down", times_max=2)
    monkeypatch.setattr(worker, "PAUSE_MS_MIN", 50)
    monkeypatch.setattr(worker, "PAUSE_MS_MAX", 50)
    with receiver_of(lambda _: Reply(500)) as receiver:
        subscribe(client, "down", receiver, in_flight_max=4)
        bodies = send(client, "down", 200)
        eventually(lambda: show(client, "down")["state"] == "failing", "the circuit is open")
        eventually(
            lambda: len(receiver.requests) >= worker.FAILURES_MAX + 5, "single requests test the receiver"
        )
        attempts = len(receiver.requests)
        assert attempts <= 40 and dead_letters(node, "down") <= attempts / 3
        receiver.script = lambda _: Reply()
        eventually(lambda: show(client, "down")["state"] == "delivering", "the circuit is closed")
        outcomes = node.node.metrics.push["down"].outcomes
        eventually(
            lambda: outcomes["delivered"] + dead_letters(node, "down") == 200,
            "each message is delivered or a dead letter",
        )
        assert set(receiver.bodies()) == set(bodies)


def test_without_a_circuit_all_attempts_would_be_used_up(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the circuit breaker, each message uses up all its attempts."""
    make_group(node, "burnt", times_max=2)
    monkeypatch.setattr(worker, "FAILURES_MAX", 1_000_000)
    with receiver_of(lambda _: Reply(500)) as receiver:
        subscribe(client, "burnt", receiver)
        send(client, "burnt", 50)
        eventually(lambda: dead_letters(node, "burnt") == 50, "all are dead letters")
        assert len(receiver.requests) == 150


def test_two_subscriptions_of_one_group_share_its_messages(node: RunningNode, client: Client) -> None:
    with receiver_of() as first, receiver_of() as second:
        for name, receiver in (("share-1", first), ("share-2", second)):
            subscribe(client, name, receiver, topic="share", group="share", in_flight_max=2)
        bodies = send(client, "share", 200)
        eventually(lambda: len(first.requests) + len(second.requests) >= 200, "all are sent")
        for name in ("share-1", "share-2"):
            wait_for_requests(node, client, name)
            client.ask("DELETE", f"/v1/subscriptions/{name}")
    assert sorted(first.bodies() + second.bodies()) == sorted(bodies)
    assert first.requests and second.requests


@pytest.mark.parametrize(
    ("kind", "text"), [("tag", "red || blue"), ("sql", "TAGS IS NOT NULL AND TAGS <> 'green'")]
)
def test_only_messages_that_pass_the_filter_are_sent(
    node: RunningNode, client: Client, kind: str, text: str
) -> None:
    name = f"filtered-{kind}"
    with receiver_of() as receiver:
        subscribe(client, name, receiver, filter=text, filter_type=kind)
        for tag in ("red", "green", "blue"):
            client.send(name, [{"body": f"{tag}{at}", "tag": tag} for at in range(5)])
        client.send(name, {"body": "red-last", "tag": "red"})
        eventually(lambda: b"red-last" in receiver.bodies(), "the last is sent")
        wait_for_requests(node, client, name)
        wanted = {f"{tag}{at}".encode() for tag in ("red", "blue") for at in range(5)} | {b"red-last"}
        assert sorted(receiver.bodies()) == sorted(wanted)


def test_in_an_ordered_group_a_failed_message_blocks_its_queue(node: RunningNode, client: Client) -> None:
    make_group(node, "ordered", consume_message_orderly=True)

    async def configure_one_queue() -> None:
        node.broker.tables.topics.configure("ordered", TopicConfig(1, 1))

    node.run(configure_one_queue())
    with receiver_of(answer_first_with(Reply(500))) as receiver:
        subscribe(client, "ordered", receiver)
        bodies = send(client, "ordered", 5)
        eventually(lambda: len(receiver.requests) == 10, "each is tried twice")
        wait_for_requests(node, client, "ordered")
    assert receiver.bodies() == [body for body in bodies for _ in range(2)]
    assert receiver.most == 1


def test_delivery_begins_when_the_topic_is_created(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    with receiver_of() as receiver:
        subscribe(client, "not-yet", receiver)
        eventually(lambda: show(client, "not-yet")["last_failure"], "the missing topic is reported")
        send(client, "not-yet", 1)
        eventually(lambda: len(receiver.requests) == 1, "it is sent")


def test_requests_do_not_exceed_the_rate(node: RunningNode, client: Client) -> None:
    with receiver_of() as receiver:
        subscribe(client, "rated", receiver, rate_per_s=0.001)
        send(client, "rated", 20)
        eventually(lambda: len(receiver.requests) == 1, "the first is sent")
        wait_for_requests(node, client, "rated")
        assert len(receiver.requests) == 1
        subscribe(client, "rated", receiver, rate_per_s=10_000)
        eventually(lambda: len(receiver.requests) == 20, "all are sent")


def test_after_a_stop_messages_whose_requests_were_under_way_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STOP_S", 0.1)
    with receiver_of(lambda _: Reply(instead="hang")) as receiver:
        with (
            running_node(tmp_path / "data", http_port=0, push_allow=LOOPBACK) as node,
            client_of(node) as client,
        ):
            subscribe(client, "kept", receiver, timeout="5m")
            bodies = send(client, "kept", 3)
            eventually(lambda: len(receiver.requests) == 3, "all are under way")
        receiver.script = lambda _: Reply()
        # The messages are sent again at once, and the cancelled requests do not count as attempts.
        with (
            running_node(tmp_path / "data", http_port=0, push_allow=LOOPBACK) as node,
            client_of(node) as client,
        ):
            eventually(lambda: len(receiver.requests) == 6, "all are sent again")
            wait_for_requests(node, client, "kept")
    assert sorted(receiver.bodies()[3:]) == bodies
    assert {item.headers["timeball-attempt"] for item in receiver.requests} == {"1"}
