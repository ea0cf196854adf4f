"""Workers: each outcome of a handler gives the right answer, leases outlive long handlers, and a stop loses nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.processes import environment
from tests.client import handlers
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Dead, Message, RequestError, Retry, Timeball, Unauthorized, Worker
from timeball.broker.registry.groups import CustomizedRetry, RetryPolicy, SubscriptionGroup


def send(ball: Timeball, topic: str, bodies: list[str]) -> None:
    """Send messages with these bodies to a topic with two queues."""
    ball.create_topic(topic, 2)
    ball.send_many([{"body": body} for body in bodies], topic=topic)


def is_empty(ball: Timeball, topic: str, group: str) -> bool:
    """Whether no message of the topic is due for the group. Messages in flight are not due."""
    return ball.pull(topic, group, wait=0) == []


def test_each_message_is_handled_once_and_acknowledged(ball: Timeball) -> None:
    bodies = [f"{i}" for i in range(200)]
    send(ball, "worked", bodies)
    handled: list[str] = []
    with Worker(
        ball, "g", "worked", lambda message: handled.append(message.body.decode()), threads=3
    ) as worker:
        eventually(lambda: worker.counts.acknowledged == 200, "all messages are acknowledged")
    assert sorted(handled) == sorted(bodies)
    assert is_empty(ball, "worked", "g") and sum(ball.offsets("g", "worked").values()) == 200


class Unprintable(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("missing")


@pytest.mark.parametrize("base", [ValueError, Retry, Dead])
def test_a_worker_survives_an_exception_whose_text_cannot_be_read(
    ball: Timeball, base: type[Exception]
) -> None:
    topic = f"unprintable-{base.__name__}"
    send(ball, topic, ["broken", "good"])

    def handler(message: Message) -> None:
        if message.body == b"broken":
            if base is Retry:
                raise Retry("1h") from Unprintable()
            raise type("Odd", (Unprintable, base), {})()

    with Worker(ball, "g", topic, handler) as worker:
        eventually(lambda: worker.counts.acknowledged == 1, "the other message is handled")
        eventually(lambda: worker.counts.retried + worker.counts.dead == 1, "the message is given back")
    assert ball.pull(topic, "g", wait=0) == []


def test_the_exception_of_a_handler_decides_between_retry_and_dead_letter(
    node: RunningNode, ball: Timeball, caplog: pytest.LogCaptureFixture
) -> None:
    at_once = RetryPolicy(customized_retry_policy=CustomizedRetry(next=[50]))
    node.broker.tables.groups.update(SubscriptionGroup("raisers", group_retry_policy=at_once))
    send(ball, "raised", ["later", "dead", "broken"])
    handled: list[tuple[str, int]] = []
    reasons: dict[str, str | None] = {}

    def handler(message: Message) -> None:
        body = message.body.decode()
        reasons[body] = message.nack_reason
        handled.append((body, message.attempts))
        if message.attempts == 0 and body == "later":
            raise Retry("50ms") from KeyError("stock")
        if body == "dead":
            raise Dead("no such order")
        if message.attempts == 0 and body == "broken":
            raise ValueError("a fault of the handler")

    with Worker(ball, "raisers", "raised", handler, threads=2) as worker:
        eventually(lambda: {("later", 1), ("broken", 1)} <= set(handled), "both messages are delivered again")
        eventually(lambda: worker.counts.acknowledged == 2, "both messages are acknowledged")
    assert worker.counts.dead == 1 and worker.counts.retried == 2
    (letter,) = ball.dead_letters("raisers").dead_letters
    assert (letter.body, letter.reason) == (b"dead", "Dead: no such order")
    assert reasons == {
        "later": "KeyError: 'stock'", "broken": "ValueError: a fault of the handler", "dead": None,
    }  # fmt: skip
    assert "a fault of the handler" in caplog.text and "no such order" in caplog.text


def test_a_retry_can_have_a_longer_delay_than_a_lease(node: RunningNode, ball: Timeball) -> None:
    send(ball, "days", ["x"])

    def handler(message: Message) -> None:
        raise Retry("1d")

    with Worker(ball, "g", "days", handler) as worker:
        counts = node.broker.redeliveries.counts
        eventually(lambda: counts().get(("g", "days")) == 1, "the message waits for its next delivery")
    assert worker.counts.retried == 1


def test_a_retry_with_a_refused_delay_follows_the_retry_policy(
    node: RunningNode, ball: Timeball, caplog: pytest.LogCaptureFixture
) -> None:
    node.broker.tables.groups.update(SubscriptionGroup("in-order", consume_message_orderly=True))
    send(ball, "refused", ["x"])
    reasons: list[str | None] = []

    def handler(message: Message) -> None:
        reasons.append(message.nack_reason)
        if message.attempts < 2:
            raise Retry("13h") from (KeyError("stock") if message.attempts else None)

    # The lease is so long that only the worker can cause the next attempts.
    with Worker(ball, "in-order", "refused", handler, lease="10m") as worker:
        eventually(lambda: worker.counts.acknowledged == 1, "the third attempt")
    assert reasons[0] is None and "after=46800000 ms" in str(reasons[1])
    assert reasons[2] == "KeyError: 'stock'"
    assert "delay refused, retry policy used group=in-order" in caplog.text


def test_the_lease_of_a_running_handler_is_renewed(ball: Timeball) -> None:
    send(ball, "long", ["slow"])
    may_end, handled = threading.Event(), []

    def handler(message: Message) -> None:
        handled.append(message)
        may_end.wait(BOUND_S)

    with Worker(ball, "g", "long", handler, lease="300ms", threads=2) as worker:
        eventually(lambda: handled, "the handler has begun")
        first_receipt = handled[0].lease[1]
        # Another member waits for several lease times and gets nothing.
        assert ball.pull("long", "g", wait="1500ms") == []
        assert handled[0].lease[1] == first_receipt and handled[0].is_leased
        may_end.set()
        eventually(lambda: worker.counts.acknowledged == 1, "acknowledged in time")
    assert len(handled) == 1 and worker.counts.late == 0


def test_several_renewals_of_a_lease_count_as_one_attempt(node: RunningNode, ball: Timeball) -> None:
    node.broker.tables.groups.update(SubscriptionGroup("patient", retry_max_times=2))
    send(ball, "renewed", ["x"])
    (message,) = ball.pull("renewed", "patient")
    for _ in range(5):
        assert message.extend("1m")
    assert message.nack(after=0)
    (redelivered,) = ball.pull("renewed", "patient", wait="30s")
    assert redelivered.attempts == 1 and redelivered.ack()


def test_a_stop_waits_for_the_running_handler_and_gives_back_the_queued_messages(ball: Timeball) -> None:
    send(ball, "stopped", [f"{i}" for i in range(6)])
    begun, may_end, handled = threading.Event(), threading.Event(), []

    def handler(message: Message) -> None:
        begun.set()
        may_end.wait(BOUND_S)
        handled.append(message.body)

    worker = Worker(ball, "g", "stopped", handler, lease="10m")
    worker.start()
    assert begun.wait(BOUND_S)
    worker.stop()
    may_end.set()
    worker.join()
    assert len(handled) == worker.counts.acknowledged == 1
    unprocessed = []
    while len(unprocessed) < 5:
        unprocessed += ball.pull("stopped", "g", wait="30s")
    assert {message.attempts for message in unprocessed} == {0}
    assert {message.body for message in unprocessed}.isdisjoint(handled)


@contextmanager
def stopping_without_a_broker(data: Path, timeout_ms: int) -> Iterator[tuple[RunningNode, Worker]]:
    """A stopped worker whose last handler ends while no broker runs. Yields the stopped node and the worker."""
    begun, may_end = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        begun.set()
        may_end.wait(BOUND_S)

    with running_node(data) as node, Timeball(node.http_endpoint, timeout_ms=timeout_ms) as ball:
        ball.send("last", "x")
        worker = Worker(ball, "g", "last", handler, lease="10m")
        worker.start()
        assert begun.wait(BOUND_S)
        node.stop()
        worker.stop()
        may_end.set()
        yield node, worker


def test_a_stopping_worker_acknowledges_when_the_broker_is_back(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stopping_without_a_broker(data, 30_000) as (node, worker):
        try:
            eventually(lambda: "trying again call=ack" in caplog.text, "an attempt has failed")
        finally:
            node.start()
        worker.join()
        assert worker.counts.acknowledged == 1


def test_a_stopping_worker_ends_after_the_time_limit_if_no_broker_answers(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stopping_without_a_broker(data, 100) as (node, worker):
        try:
            worker.join()
        finally:
            node.start()
        assert worker.counts.acknowledged == 0
    assert "handled messages not acknowledged group=g messages=1" in caplog.text


def test_run_raises_the_error_that_ended_the_worker(ball: Timeball, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unauthorized("who are you?")

    monkeypatch.setattr(ball._consumer, "pull", refuse)
    with pytest.raises(Unauthorized, match="who are you"):
        Worker(ball, "g", "forbidden", print).run()


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"threads": 100_000}, {"processes": -1}])
def test_numbers_of_threads_and_processes_out_of_range_are_refused(
    ball: Timeball, wrong: dict[str, int]
) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Worker(ball, "g", "t", print, **wrong)


def test_a_handler_for_processes_that_is_not_importable_is_refused(ball: Timeball) -> None:
    with pytest.raises(RequestError, match="top of a module"):
        Worker(ball, "g", "t", lambda message: None, processes=2)


def test_a_killed_worker_process_is_replaced_and_all_messages_are_handled(
    node: RunningNode, ball: Timeball
) -> None:
    send(ball, "spread", [f"{i}" for i in range(4)])
    ball.create_topic("spread-done", 1)
    worker = Worker(ball, "g", "spread", handlers.Forward(ball, "spread-done"), processes=2, lease="2s")
    worker.start()
    try:
        eventually(lambda: ball.queues("spread-done")[0].max >= 4, "all messages are handled")
        assert worker._processes is not None
        before = worker._processes.pids
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len(set(worker._processes.pids) - set(before)) == 1, "the process is replaced")
        send(ball, "spread", ["more"])
        with node.client() as browser:
            eventually(
                lambda: (
                    b"more"
                    in {message.body for message in browser.browse("spread-done", "", max_messages=100)}
                ),
                "handled",
            )
    finally:
        worker.stop()
        worker.join()
    assert worker._processes.pids == []


def test_a_worker_leases_only_as_many_messages_as_it_has_free_threads(ball: Timeball) -> None:
    """If the process died, an attempt would be counted for messages that no handler has seen."""
    send(ball, "greedy", [f"{i}" for i in range(8)])
    begun, may_end = threading.Semaphore(0), threading.Event()

    def handler(message: Message) -> None:
        begun.release()
        may_end.wait(BOUND_S)

    with Worker(ball, "g", "greedy", handler, threads=2) as worker:
        assert begun.acquire(timeout=BOUND_S) and begun.acquire(timeout=BOUND_S)
        unleased = ball.pull("greedy", "g", max_messages=8, wait="1s")
        unleased += ball.pull("greedy", "g", max_messages=8, wait=0)
        may_end.set()
        eventually(lambda: worker.counts.acknowledged >= 2, "acknowledged")
    assert len(unleased) == 6, "of eight messages, the worker with two threads has leased two"


@pytest.mark.slow
def test_only_the_message_that_kills_its_processes_becomes_a_dead_letter(
    node: RunningNode, ball: Timeball
) -> None:
    node.broker.tables.groups.update(SubscriptionGroup("victims", retry_max_times=2))
    send(ball, "poisoned", ["poison", *(f"{i}" for i in range(20))])
    ball.create_topic("poisoned-done", 1)
    handler = handlers.Poisoned(ball, "poisoned-done")
    worker = Worker(ball, "victims", "poisoned", handler, processes=2, lease="2s")
    worker.start()
    try:
        eventually(lambda: len(ball.dead_letters("victims").dead_letters) == 1, "three attempts are over")
        eventually(lambda: ball.queues("poisoned-done")[0].max >= 20, "all other messages are handled")
    finally:
        worker.stop()
        worker.join()
    assert [letter.body for letter in ball.dead_letters("victims").dead_letters] == [b"poison"]


def test_after_sigterm_a_worker_finishes_its_handler_and_gives_back_other_messages(
    node: RunningNode, ball: Timeball
) -> None:
    send(ball, "terminated", [f"{i}" for i in range(3)])
    script = Path(handlers.__file__).with_name("worker_program.py")
    program = subprocess.Popen(
        [sys.executable, str(script), node.http_endpoint, "terminated"],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None and program.stdin is not None
    assert program.stdout.readline() == "handling\n"
    program.send_signal(signal.SIGTERM)
    program.stdin.write("go on\n")  # the handler waits for this line
    output, _ = program.communicate(timeout=BOUND_S)
    assert (program.returncode, output) == (0, "acknowledged 1\n")
    unprocessed = []
    while len(unprocessed) < 2:
        unprocessed += ball.pull("terminated", "g", wait="30s")
    assert {message.attempts for message in unprocessed} == {0}
