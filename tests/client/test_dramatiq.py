"""The broker for Dramatiq, with Dramatiq's own workers, against a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout, QueueNotFound
from dramatiq.middleware import Retries
from tests.bounds import BOUND_S
from tests.cli.processes import environment
from tests.node_fixture import RunningNode, eventually, running_node

from timeball import InvalidMessage, InvalidName, RequestError, Timeball
from timeball.client.dramatiq import TimeballBroker
from timeball.model import limits
from timeball.testing import TestBroker

NUMBERS = count(1)


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: TestBroker) -> Iterator[TimeballBroker]:
    """A broker for each test, with its own prefix of topics."""
    broker = TimeballBroker(Timeball(shared_broker.endpoint), prefix=f"t{next(NUMBERS)}-")
    yield broker
    broker.close()


@contextmanager
def working(broker: TimeballBroker, threads: int = 2) -> Iterator[dramatiq.Worker]:
    """Run a worker of Dramatiq in this block."""
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def actor(broker: TimeballBroker, function: Callable[..., Any], **options: Any) -> Any:
    """Declare the function as an actor of this broker, under its own name."""
    return dramatiq.actor(function, broker=broker, actor_name=function.__name__, **options)


def lag_and_in_flight(broker: TimeballBroker, queue: str = "default") -> tuple[int, int]:
    """The lag of the group of this queue, and the number of messages in flight in the group."""
    (group,) = broker.ball.groups(broker.topic(queue))
    return group.lag, group.in_flight


def test_a_message_with_a_delay_is_delivered_at_its_due_time(
    broker: TimeballBroker, shared_broker: TestBroker
) -> None:
    received: list[int] = []
    run = actor(broker, received.append)
    with working(broker):
        run.send_with_options(args=(17,), delay=timedelta(days=40))
        shared_broker.assert_scheduled(broker.topic("default"), after="40d")
        shared_broker.clock.advance("39d")
        broker.join("default", timeout=BOUND_S * 1000)
        assert received == []
        shared_broker.clock.advance("1d")
        eventually(lambda: received == [17], "delivered")
        broker.join("default", timeout=BOUND_S * 1000)
    assert lag_and_in_flight(broker) == (0, 0)


def test_messages_of_two_queues_are_processed_once_by_their_actors(broker: TimeballBroker) -> None:
    received: list[tuple[str, int]] = []

    def mail(number: int) -> None:
        received.append(("mail", number))

    def default(number: int) -> None:
        received.append(("default", number))

    actors = [actor(broker, mail, queue_name="mail"), actor(broker, default)]
    for number in range(20):
        actors[number % 2].send(number)
    with working(broker, threads=4):
        for queue in ("mail", "default"):
            broker.join(queue, timeout=BOUND_S * 1000)
    assert sorted(received) == sorted((("mail", "default")[number % 2], number) for number in range(20))


def test_a_delayed_message_is_cancelled_by_its_id(broker: TimeballBroker, shared_broker: TestBroker) -> None:
    message = actor(broker, print).send_with_options(args=(1,), delay=60_000)
    assert [verdict.verdict for verdict in broker.ball.cancel(key=message.message_id)] == ["cancelled"]
    assert shared_broker.pending(broker.topic("default")) == []


def test_a_retry_is_scheduled_and_runs_at_its_due_time(
    broker: TimeballBroker, shared_broker: TestBroker
) -> None:
    attempts: list[int] = []

    def fail_once() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise ValueError("a fault of the actor")

    actor(broker, fail_once, min_backoff=3_600_000, max_backoff=3_600_000).send()
    with working(broker):
        eventually(lambda: shared_broker.pending(broker.topic("default")), "the retry is scheduled")
        broker.join("default", timeout=BOUND_S * 1000)
        # The clock is advanced to this instant and not beyond it: the lease of the retry would end.
        shared_broker.clock.advance_to(shared_broker.assert_scheduled(broker.topic("default")).due)
        eventually(lambda: len(attempts) == 2, "the retry has run")
        broker.join("default", timeout=BOUND_S * 1000)
    assert broker.ball.dead_letters(broker.topic("default")).dead_letters == []


def test_a_message_without_retries_that_fails_is_a_dead_letter_with_its_reason(
    broker: TimeballBroker,
) -> None:
    def fail() -> None:
        raise ValueError("a fault of the actor")

    actor(broker, fail, max_retries=0).send()
    with working(broker):
        broker.join("default", timeout=BOUND_S * 1000)
    (letter,) = broker.ball.dead_letters(broker.topic("default")).dead_letters
    assert letter.reason == "ValueError: a fault of the actor"


def test_a_message_of_another_program_becomes_a_dead_letter(broker: TimeballBroker) -> None:
    received: list[int] = []
    run = actor(broker, received.append)
    for body in ("no JSON", "{}"):
        broker.ball.send(broker.topic("default"), body)
    run.send(1)
    with working(broker):
        broker.join("default", timeout=BOUND_S * 1000)
    assert received == [1]
    letters = broker.ball.dead_letters(broker.topic("default")).dead_letters
    assert sorted(letter.body for letter in letters) == [b"no JSON", b"{}"]


def test_a_message_that_kills_17_workers_becomes_a_dead_letter(
    broker: TimeballBroker, shared_broker: TestBroker
) -> None:
    actor(broker, print).send("x")
    attempts, letters, topic = 0, list[Any](), broker.topic("default")
    while not letters:
        if next(broker.consume("default", timeout=10)) is not None:
            attempts += 1
            broker._held.clear()  # nobody answers for the message, as after a kill -9
        shared_broker.clock.advance("61s")
        letters = broker.ball.dead_letters(topic).dead_letters
    assert attempts == 17 and [letter.attempts for letter in letters] == [17]


def test_a_worker_holds_at_most_its_prefetch_and_gives_the_unprocessed_ones_back_at_a_stop(
    broker: TimeballBroker,
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def hold(number: int) -> None:
        begun.release()
        may_end.wait(BOUND_S)

    run = actor(broker, hold)
    for number in range(20):
        run.send(number)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    for _ in range(2):
        assert begun.acquire(timeout=BOUND_S)
    eventually(lambda: lag_and_in_flight(broker)[1] == 4, "the worker holds two messages for each thread")
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    # From then on they take no other message.
    eventually(lambda: not any(thread.running for thread in worker.workers), "the threads are told to stop")
    may_end.set()
    stopping.join(BOUND_S)
    topic = broker.topic("default")
    assert lag_and_in_flight(broker)[1] == 0, "the worker holds no message"
    unprocessed = broker.ball.pull(topic, topic, wait=0)
    assert len(unprocessed) == 18 and {message.attempts for message in unprocessed} == {0}


def test_a_flush_removes_the_due_and_the_scheduled_messages(
    broker: TimeballBroker, shared_broker: TestBroker
) -> None:
    received: list[int] = []
    run = actor(broker, received.append)
    broker.declare_queue("unused")
    broker.flush_all()  # has no effect: no message has created the topics
    for number in range(5):
        run.send(number)
        run.send_with_options(args=(number,), delay=60_000)
    broker.flush_all()
    assert shared_broker.pending(broker.topic("default")) == []
    with working(broker):
        run.send(99)
        broker.join("default", timeout=BOUND_S * 1000)
    assert received == [99]


def test_a_join_returns_without_messages_and_raises_after_its_time_limit(broker: TimeballBroker) -> None:
    run = actor(broker, print)
    broker.join("default", timeout=1_000)
    run.send("x")
    with pytest.raises(QueueJoinTimeout):
        broker.join("default", timeout=1, interval=1)


def test_invalid_and_unknown_queue_names_and_a_client_without_http_are_refused(
    broker: TimeballBroker, shared_broker: TestBroker
) -> None:
    with pytest.raises(InvalidName, match=r"with\.dot"):
        broker.declare_queue("with.dot")
    with pytest.raises(InvalidName, match="120 letters"):
        TimeballBroker(broker.ball).declare_queue("q" * 112)
    with pytest.raises(QueueNotFound):
        broker.consume("never declared")
    with Timeball(shared_broker.flight) as ball, pytest.raises(RequestError, match="http://"):
        TimeballBroker(ball)


# ---- with the real clock ------------------------------------------------------------------------------------


def test_the_lease_of_a_running_actor_is_renewed(node: RunningNode) -> None:
    broker = TimeballBroker(Timeball(node.http_endpoint), prefix="leased-", lease="300ms")
    attempts: list[int] = []
    may_end = threading.Event()

    def slow() -> None:
        attempts.append(1)
        may_end.wait(BOUND_S)

    actor(broker, slow).send()
    try:
        with working(broker):
            eventually(lambda: attempts, "the actor has begun")
            (received,) = broker._held["default"]

            def lease_end_ms() -> int:
                return broker.ball.get(received.id or "").groups[0].until_ms or 0

            first_ms = lease_end_ms()
            eventually(
                lambda: lease_end_ms() > first_ms + 900, "the lease is renewed for the time of three leases"
            )
            may_end.set()
            broker.join("default", timeout=BOUND_S * 1000)
    finally:
        may_end.set()
    assert len(attempts) == 1
    broker.close()


def test_a_message_whose_retry_cannot_be_sent_is_delivered_again(tmp_path: Path, no_pauses: None) -> None:
    with running_node(tmp_path / "data") as node:
        broker = TimeballBroker(Timeball(node.http_endpoint), middleware=[Retries()])
        message_id = actor(broker, print).send("x").message_id
        consumer = broker.consume("default", timeout=1_000)
        message = next(consumer)
        assert message is not None and message.message_id == message_id
        node.stop()
        with pytest.raises(ConnectionClosed):
            broker.enqueue(message, delay=1_000)
        with pytest.raises(ConnectionClosed):
            consumer.ack(message)  # Dramatiq calls it again after the error
        node.start()
        consumer.ack(message)
        consumer.close()
        (place,) = broker.ball.get(message.received.id).groups
        assert (place.state, place.attempts) == ("waiting", 1)
        broker.close()


def test_a_message_whose_retry_is_refused_is_delivered_again(broker: TimeballBroker) -> None:
    """A retry with a traceback may be too large for a message."""
    actor(broker, print).send("x")
    consumer = broker.consume("default", timeout=1_000)
    message = next(consumer)
    assert message is not None
    message.options["traceback"] = "x" * limits.BODY_BYTES_MAX
    with pytest.raises(InvalidMessage):
        broker.enqueue(message, delay=1_000)
    consumer.ack(message)
    (place,) = broker.ball.get(message.received.id).groups
    assert (place.state, place.attempts) == ("waiting", 1)
    consumer.close()


def test_a_message_with_a_negative_delay_is_delivered_at_once(broker: TimeballBroker) -> None:
    received: list[int] = []
    run = actor(broker, received.append)
    with working(broker):
        run.send_with_options(args=(1,), delay=timedelta(seconds=-5))
        broker.join("default", timeout=BOUND_S * 1000)
    assert received == [1]


def test_a_consumer_receives_again_when_its_broker_is_back(tmp_path: Path, no_pauses: None) -> None:
    with running_node(tmp_path / "data") as node:
        broker = TimeballBroker(Timeball(node.http_endpoint))
        run = actor(broker, print)
        run.send("x")
        consumer = broker.consume("default", timeout=10)
        node.stop()
        assert next(consumer) is None
        node.start()
        message = next(consumer)
        assert message is not None and message.args == ("x",)
        consumer.requeue([message])
        consumer.close()
        topic = broker.topic("default")
        assert [message.attempts for message in broker.ball.pull(topic, topic)] == [0]
        broker.close()


@pytest.mark.slow
def test_all_messages_are_processed_although_their_workers_are_killed(node: RunningNode) -> None:
    """All processes end twice by kill -9 while they work."""
    words, counts = [str(number) for number in range(200)], Counter[str]()
    with Timeball(node.http_endpoint) as ball:
        broker = TimeballBroker(ball)

        def forward(topic: str, word: str) -> None:
            raise AssertionError("the workers run the actor of the same name in dramatiq_actors")

        run = actor(broker, forward, queue_name="forwarding")
        for word in words:
            run.send("survived-dramatiq", word)
        arriving_messages = ball.consume("survived-dramatiq", "observers")
        for kill_at in (60, 130, len(words)):
            process = subprocess.Popen(
                [sys.executable, "-m", "dramatiq", "tests.client.dramatiq_actors", "--processes=2", "--threads=2"],
                start_new_session=True, stderr=subprocess.DEVNULL,
                env=environment(SHOP_ENDPOINT=node.http_endpoint, PYTHONPATH=os.pathsep.join(sys.path)),
            )  # fmt: skip
            try:
                while len(counts) < kill_at:
                    counts[next(arriving_messages).body.decode()] += 1
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(BOUND_S)
        arriving_messages.close()
        assert set(counts) == set(words)
        assert ball.dead_letters("dramatiq-forwarding").dead_letters == []
