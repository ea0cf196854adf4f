"""Kafka in and out through the bridge: how late into Kafka at 5,000 a second, and whether 20,000 a second go through.

    python -m benchmarks.kafka [--size small]

A stock Kafka (one node, KRaft, 512 MB), a broker and `timeball kafka` share the machine with the load: one producer,
due one to three seconds ahead at a random millisecond, and one consumer that reads committed records. Lateness is
arrival at that consumer minus `deliver-at`, so it has Kafka's transaction and its fetch in it. It is none of `timeball
bench`'s, as it fetches Kafka (mvn, a Java 17; `make interop` has it already).

Not measured: several partitions' leaders, replication and its acknowledgements, TLS, the network (loopback).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.interop import environments
from tests.interop.kafka_server import KafkaServer

from benchmarks.harness import Server, now_ms, quantiles, serving, wait_until
from benchmarks.report import Report

HEAP = ["-Xms512m", "-Xmx512m", "-XX:+UseSerialGC"]
BODY = b"x" * 128
PARTITIONS = 3
AHEAD_MS = (1_000, 3_000)
TICK_S = 0.01
LATENESS_BAR_MS, RATE_BAR = 50.0, 20_000.0
KEPT_UP = 0.98  # of the rate sent, so that the last second's jitter is no miss


class _Reader:
    """Reads a topic's committed records as they come, and notes when they came."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.late_ms: list[int] = []
        self.at_ms: list[int] = []
        self.seen: Counter[bytes] = Counter()
        self._stopping = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap, "group.id": "bench", "auto.offset.reset": "earliest",
                "isolation.level": "read_committed", "fetch.wait.max.ms": 5,
            }
        )  # fmt: skip
        self._consumer.assign([TopicPartition(topic, at, 0) for at in range(PARTITIONS)])
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopping.is_set():
            first = self._consumer.poll(0.1)
            if first is None or first.error() is not None:
                continue
            for message in (first, *self._consumer.consume(5_000, 0)):
                at_ms = now_ms()
                self.at_ms.append(at_ms)
                headers = dict(cast("list[tuple[str, bytes]]", message.headers()))
                self.late_ms.append(at_ms - int(headers["deliver-at"]))
                self.seen[message.key() or b""] += 1

    def close(self) -> None:
        """End after the poll under way."""
        self._stopping.set()
        self._thread.join(30)
        self._consumer.close()


def _send(bootstrap: str, topic: str, rate: int, seconds: int) -> int:
    """Send at a steady rate; a tick that comes late sends what it is behind."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 500_000}
    )
    rng, begun, sent = random.Random(7), time.monotonic(), 0
    while sent < seconds * rate:
        wanted = min(seconds * rate, int((time.monotonic() - begun) * rate))
        base_ms = now_ms()
        for number in range(sent, wanted):
            at = str(base_ms + rng.randrange(*AHEAD_MS)).encode()
            producer.produce(topic, BODY, b"%d" % number, headers=[("deliver-at", at)])
        producer.poll(0)
        sent = wanted
        time.sleep(TICK_S)
    producer.flush(60)
    return sent


def _phase(report: Report, kafka: KafkaServer, server: Server, rate: int, seconds: int) -> None:
    name = f"{rate:,}/s"
    topic, out = f"in{rate}", f"out{rate}"
    kafka.make(topic, out, partitions=PARTITIONS)
    command = [sys.executable, "-m", "timeball", "kafka", "--in", topic, "--out", out, "--json"]
    command += ["--bootstrap", kafka.bootstrap, "--endpoint", server.endpoint, "--status-every", "1s"]
    bridge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert bridge.stdout is not None
    lines: list[dict[str, Any]] = []
    ready = threading.Event()

    def follow() -> None:
        for line in bridge.stdout or ():
            lines.append(json.loads(line))
            if lines[-1]["event"] == "ready":
                ready.set()

    threading.Thread(target=follow, daemon=True).start()
    try:
        assert ready.wait(60), "the bridge is not ready"
        reader = _Reader(kafka.bootstrap, out)
        process, cpu_s = psutil.Process(bridge.pid), server.cpu_s()
        own_s = sum(process.cpu_times()[:2])
        sent = _send(kafka.bootstrap, topic, rate, seconds)
        wait_until(lambda: len(reader.seen) >= sent, 120, f"{sent} records at the consumer")
        own_s, cpu_s = sum(process.cpu_times()[:2]) - own_s, server.cpu_s() - cpu_s
        reader.close()
    finally:
        bridge.terminate()
        bridge.wait(30)
    last = [line for line in lines if line["event"] == "status"][-1]
    p50, p99, worst = quantiles(_array(reader.late_ms))
    # The first and the last are due at random: between them as many come a second as were sent.
    took_s = (reader.at_ms[-1] - reader.at_ms[0] - (AHEAD_MS[1] - AHEAD_MS[0])) / 1000
    steady = rate < 10_000 // (10 if report.small else 1)
    report.add(f"{name}: lateness p50", p50, "ms")
    report.add(f"{name}: lateness p99", p99, "ms", LATENESS_BAR_MS if steady else None, "lower")
    report.add(f"{name}: lateness max", worst, "ms")
    bar = None if steady else KEPT_UP * RATE_BAR
    report.add(f"{name}: out, sustained", sent / max(took_s, 0.001), "msg/s", bar)
    report.add(f"{name}: early", sum(late < 0 for late in reader.late_ms), "messages", 0, "lower")
    doubled = sum(times - 1 for times in reader.seen.values())
    report.add(f"{name}: missing or doubled", sent - len(reader.seen) + doubled, "messages", 0, "lower")
    report.add(
        f"{name}: records in a transaction", last["delivered"] / max(1, last["transactions"]), "messages"
    )
    report.add(f"{name}: bridge CPU, in and out", own_s / sent * 1e6, "us/msg")
    report.add(f"{name}: server CPU, in and out", cpu_s / sent * 1e6, "us/msg")


def _array(values: list[int]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.int64)


def run(small: bool = False) -> Report:
    """Measure; lateness in milliseconds."""
    report = Report("kafka", small)
    seconds = 2 if small else 20
    with tempfile.TemporaryDirectory() as folder, serving() as (server, _):
        java, *options = environments.kafka()
        kafka = KafkaServer(Path(folder) / "kafka", [java, *options], HEAP)
        kafka.start()
        try:
            for rate in (5_000, 20_000):
                _phase(report, kafka, server, rate // 10 if small else rate, seconds)
        finally:
            kafka.kill()
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["small", "full"], default="full")
    print("load before:", " ".join(f"{load:.1f}" for load in os.getloadavg()))
    print("\n".join(run(small=parser.parse_args().size == "small").lines()))
    print("load after:", " ".join(f"{load:.1f}" for load in os.getloadavg()))
