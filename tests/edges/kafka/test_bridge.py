"""Both directions at once: records pass through the bridge, and it stops cleanly."""

from __future__ import annotations

import threading

import pytest
from tests.bounds import BOUND_S
from tests.edges.kafka.conftest import SmallKafka
from tests.node_fixture import RunningNode, eventually

from timeball.client.http_codec import create_topic
from timeball.edges.kafka.bridge import Bridge
from timeball.edges.kafka.options import BridgeOptions
from timeball.io.clock import SystemClock
from timeball.model.errors import SetupError


def test_records_pass_through_the_bridge_unchanged(
    kafka: SmallKafka, node: RunningNode, options: BridgeOptions, stop: threading.Event
) -> None:
    ready = threading.Event()
    bridge = Bridge(options, node.http_endpoint, node.endpoint, SystemClock())
    running = threading.Thread(target=bridge.run, args=(stop, ready.set))
    running.start()
    assert ready.wait(BOUND_S)
    headers = [("after", b"20ms"), ("a", b"\xff")]
    kafka.produce(
        options.own,
        {"value": b"one", "key": b"k", "headers": headers, "partition": 3},
        {"value": b"two", "headers": []},
    )
    eventually(lambda: bridge.counts.delivered == 2, "both are delivered")
    stop.set()
    running.join(BOUND_S)
    assert not running.is_alive()
    (out,), (dead,) = kafka.read(f"{options.name}.out"), kafka.read(options.dead)
    assert (out.value(), out.key(), out.partition(), out.headers()) == (b"one", b"k", 3, headers)
    assert dead.value() == b"two" and dict(dead.headers())["timeball-offset"] == b"0"
    assert (bridge.counts.taken, bridge.counts.dead, bridge.counts.undeliverable) == (2, 1, 1)


def test_an_error_in_one_direction_stops_both(
    node: RunningNode, options: BridgeOptions, calls: object
) -> None:
    bridge = Bridge(options, node.http_endpoint, node.endpoint, SystemClock())
    bridge._queue.ensure()
    # More queues than a bridge's topic may have.
    bridge._queue._operations.run(create_topic(options.topic, 2))
    with pytest.raises(SetupError, match="has 2 queues"):
        bridge.run(threading.Event(), lambda: None)
