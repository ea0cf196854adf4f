"""Messages of Timeball as committed records, and what a bridge refuses to begin with."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.edges.kafka.conftest import SmallKafka
from tests.node_fixture import RunningNode, eventually

from timeball import Timeball
from timeball.edges.kafka.delivery import MARKS_S, STRANGE, Delivery, read_position
from timeball.edges.kafka.options import BridgeOptions, Counts
from timeball.edges.kafka.waiting import WaitingQueue
from timeball.io.clock import ManualClock, SystemClock
from timeball.model.errors import SetupError


def test_a_message_of_another_client_is_a_dead_letter(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: WaitingQueue, stop: threading.Event
) -> None:
    counts = Counts()
    delivery = Delivery(options, queue, counts, SystemClock())
    delivery.open(stop)
    assert read_position(options) == 0
    running = threading.Thread(target=delivery.run, args=(stop,))
    running.start()
    with Timeball(node.endpoint) as ball:
        ball.send(options.topic, "by hand")
    eventually(lambda: counts.delivered == 1, "it is delivered")
    stop.set()
    running.join()
    (dead,) = kafka.read(options.dead)
    headers = dict(dead.headers())
    assert dead.value() == b"by hand" and headers["timeball-reason"] == STRANGE.encode()
    assert headers["timeball-topic"] == options.topic.encode() and read_position(options) == 1
    assert (counts.undeliverable, counts.transactions) == (1, 1)


class Timed(threading.Event):
    """Notes for how long it was waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout or 0)
        return self.is_set()


def test_what_passed_since_the_last_commit_is_a_part_of_the_pause_before_a_transaction(
    kafka: SmallKafka, options: BridgeOptions, queue: WaitingQueue
) -> None:
    stop, clock = Timed(), ManualClock()
    delivery = Delivery(options, queue, Counts(), clock)
    delivery.open(stop)
    for passed_ms in (0, 3, 5):
        clock.advance(passed_ms)
        delivery._write([], 0, stop)
    assert stop.waits_s == pytest.approx([MARKS_S, MARKS_S - 0.003])


def test_a_queue_that_is_used_needs_its_position(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: WaitingQueue, stop: threading.Event
) -> None:
    with Timeball(node.endpoint) as ball:
        ball.send(options.topic, "before")
    with pytest.raises(SetupError, match=f"--position-topic {options.position_topic}: has no position"):
        Delivery(options, queue, Counts(), SystemClock()).open(stop)


def test_a_position_behind_the_queues_end_is_of_another_folder(
    kafka: SmallKafka, options: BridgeOptions, queue: WaitingQueue, stop: threading.Event
) -> None:
    kafka.produce(options.position_topic, {"key": b"position", "value": b'{"offset":3}'})
    with pytest.raises(SetupError, match="another data folder, or an older copy"):
        Delivery(options, queue, Counts(), SystemClock()).open(stop)


def test_the_topic_of_out_must_be_there(
    options: BridgeOptions, queue: WaitingQueue, stop: threading.Event
) -> None:
    with pytest.raises(SetupError, match="--out nowhere: Kafka has no such topic"):
        Delivery(replace(options, out="nowhere"), queue, Counts(), SystemClock()).open(stop)
