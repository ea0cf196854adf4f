"""Messages of Timeball become committed records, and a bridge with an unsuitable position refuses to start."""

from __future__ import annotations

import shutil
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.edges.kafka.conftest import SmallKafka
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.client.calls import Calls
from timeball.client.http_calls import HttpCalls
from timeball.edges.kafka.delivery import END_MARKERS_S, NO_ENVELOPE, Delivery, read_position
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue, Counts
from timeball.io.clock import ManualClock, SystemClock
from timeball.model import limits
from timeball.model.errors import SetupError


def test_a_message_of_another_client_becomes_a_dead_letter(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: BridgeQueue, stop: threading.Event
) -> None:
    counts = Counts()
    delivery = Delivery(options, queue, counts, SystemClock())
    delivery.open(stop)
    assert read_position(options) == 0
    running = threading.Thread(target=delivery.run, args=(stop,))
    running.start()
    with node.client() as ball:
        ball.send(options.topic, "by hand")
    eventually(lambda: counts.delivered == 1, "it is delivered")
    stop.set()
    running.join()
    (dead,) = kafka.read(options.dead)
    headers = dict(dead.headers())
    assert dead.value() == b"by hand" and headers["timeball-reason"] == NO_ENVELOPE.encode()
    assert headers["timeball-topic"] == options.topic.encode() and read_position(options) == 1
    assert (counts.undeliverable, counts.transactions) == (1, 1)


def test_a_compressed_message_of_a_remoting_producer_becomes_a_readable_record(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: BridgeQueue, stop: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(limits, "PULL_BYTES_MAX", 1_500)  # decompressed bodies of one transaction
    counts = Counts()
    delivery = Delivery(options, queue, counts, SystemClock())
    delivery.open(stop)
    with Wire.to(node) as wire:
        for text in (b"a", b"b", b"c"):
            assert sent(wire, zlib.compress(text * 1_000), topic=options.topic, e=0, f=1).code == 0
    running = threading.Thread(target=delivery.run, args=(stop,))
    running.start()
    eventually(lambda: counts.delivered == 3, "all are delivered")
    stop.set()
    running.join()
    assert sorted(record.value() for record in kafka.read(options.dead)) == [
        b"a" * 1_000,
        b"b" * 1_000,
        b"c" * 1_000,
    ]
    assert read_position(options) == 3


class RecordingEvent(threading.Event):
    """Records the waiting times instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits_s.append(timeout or 0)
        return self.is_set()


def test_the_pause_before_a_transaction_counts_from_the_last_commit(
    kafka: SmallKafka, options: BridgeOptions, queue: BridgeQueue
) -> None:
    stop, clock = RecordingEvent(), ManualClock()
    delivery = Delivery(options, queue, Counts(), clock)
    delivery.open(stop)
    for passed_ms in (0, 3, 5):
        clock.advance(passed_ms)
        delivery._write([], 0, stop)
    assert stop.waits_s == pytest.approx([END_MARKERS_S, END_MARKERS_S - 0.003])


def test_a_used_queue_without_a_position_is_a_setup_error(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, queue: BridgeQueue, stop: threading.Event
) -> None:
    with node.client() as ball:
        ball.send(options.topic, "before")
    with pytest.raises(SetupError, match=f"--position-topic {options.position_topic}: has no position"):
        Delivery(options, queue, Counts(), SystemClock()).open(stop)


def test_a_position_behind_the_end_of_the_queue_is_a_setup_error(
    kafka: SmallKafka, options: BridgeOptions, queue: BridgeQueue, stop: threading.Event
) -> None:
    kafka.produce(options.position_topic, {"key": b"position", "value": b'{"offset":3}'})
    with pytest.raises(SetupError, match="another data folder, or an older copy"):
        Delivery(options, queue, Counts(), SystemClock()).open(stop)


def test_a_running_bridge_does_not_deliver_again_from_an_older_copy(
    kafka: SmallKafka, options: BridgeOptions, stop: threading.Event, tmp_path: Path
) -> None:
    data, copy, bodies = tmp_path / "data", tmp_path / "copy", [{"topic": options.topic, "body": "x"}] * 2
    node = RunningNode(data)
    node.start()
    operations, columns = HttpCalls(node.http_endpoint, 30_000), Calls(node.endpoint, 30_000)
    queue = BridgeQueue(operations, columns, options.topic)
    queue.ensure()
    delivery = Delivery(options, queue, Counts(), SystemClock())
    delivery.open(stop)
    for older, newer in ((data, copy), (copy, data)):
        with node.client() as ball:
            ball.send_many(bodies)
        delivery._deliver(delivery._pull(), stop)
        node.stop()
        shutil.rmtree(newer, ignore_errors=True)
        shutil.copytree(older, newer)
        node.start()
    assert read_position(options) == 4
    with pytest.raises(SetupError, match=r"4 messages were delivered, and .* has had 2: .* an older copy"):
        delivery._pull()
    operations.close()
    columns.close()
    node.stop()


def test_a_missing_topic_of_out_is_a_setup_error(
    options: BridgeOptions, queue: BridgeQueue, stop: threading.Event
) -> None:
    with pytest.raises(SetupError, match="--out nowhere: Kafka has no such topic"):
        Delivery(replace(options, out="nowhere"), queue, Counts(), SystemClock()).open(stop)
