"""Kafka in and out through the bridge: how late into Kafka at 5,000 a second, and whether 20,000 a second go through.

A stock Kafka (one node, KRaft, 512 MB), a broker and `timeball kafka` share the machine with the load: a process that
produces, due one to three seconds ahead at a random millisecond, and one that reads committed records. Lateness is
arrival at that reader minus `at`, so it has Kafka's transaction and its fetch in it.

Java compiles what it does often, with half a core of the two for the better part of a minute. A bridge runs for months,
so the same loads go through first, for WARM_UP seconds each, and are not measured; the report says for how long.

Not measured: several partitions' leaders, replication and its acknowledgements, TLS, the network (loopback).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil

from benchmarks.harness import Server, now_ms, quantiles, serving, wait_until
from benchmarks.report import Report

if TYPE_CHECKING:
    from tests.interop.kafka_server import KafkaServer

ONLY_BY_NAME = True  # fetches Kafka: mvn, a Java 17; `make interop` has it already
HEAP = ["-Xms512m", "-Xmx512m", "-XX:+UseSerialGC"]
BODY = b"x" * 128
PARTITIONS = 3
AHEAD_MS = (1_000, 3_000)
TICK_S = 0.01
STEADY, FAST = 5_000, 20_000
WARM_UP = {FAST: 20, STEADY: 30}  # seconds
LATENESS_BAR_MS = 50.0
KEPT_UP = 0.98  # of the rate sent, so that the last second's jitter is no miss
GIVE_UP_S = 120


class _Reader:
    """Reads a topic's committed records as they come, and notes when they came."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self.late_ms: list[int] = []
        self.at_ms: list[int] = []
        self.seen: Counter[bytes] = Counter()
        self._stopping = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap, "group.id": "bench", "auto.offset.reset": "earliest",
                "isolation.level": "read_committed", "fetch.wait.max.ms": 100,
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
            found = [first, *self._consumer.consume(5_000, 0)]
            at_ms = now_ms()
            self.at_ms.extend([at_ms] * len(found))
            for message in found:
                ((_, due_ms),) = cast("list[tuple[str, bytes]]", message.headers())
                self.late_ms.append(at_ms - int(due_ms))
                self.seen[message.key() or b""] += 1

    def close(self) -> None:
        """End after the poll under way."""
        self._stopping.set()
        self._thread.join(30)
        self._consumer.close()


def _send(bootstrap: str, topic: str, rate: int, seconds: int) -> None:
    """Send at a steady rate; a tick that comes late sends what it is behind."""
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 500_000}
    )
    rng, begun, sent = random.Random(7), time.monotonic(), 0
    while sent < seconds * rate:
        wanted = min(seconds * rate, int((time.monotonic() - begun) * rate))
        base_ms = now_ms()
        for number in range(sent, wanted):
            at = str(base_ms + rng.randrange(*AHEAD_MS)).encode()
            producer.produce(topic, BODY, b"%d" % number, headers=[("at", at)])
        producer.poll(0)
        sent = wanted
        time.sleep(TICK_S)
    producer.flush(60)


class _Bridge:
    """`timeball kafka` in a process of its own, and its last status line."""

    def __init__(self, kafka: KafkaServer, server: Server, topic: str, out: str) -> None:
        command = [sys.executable, "-m", "timeball", "kafka", "--in", topic, "--out", out, "--json"]
        command += ["--bootstrap", kafka.bootstrap, "--status-every", "1s"]
        command += ["--endpoint", f"http://{server.http}", "--flight", server.endpoint]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.status: dict[str, Any] = {}
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                if said["event"] == "ready":
                    self._is_ready.set()
                else:
                    self.status = said

    def wait_ready(self) -> None:
        """Wait for its ready line; RuntimeError when it does not come."""
        if not self._is_ready.wait(60):
            raise RuntimeError("the bridge is not ready")

    def stop(self) -> None:
        """End it, and wait for its last line."""
        self._process.terminate()
        self._process.wait(30)
        self._thread.join(30)


def _phase(report: Report, kafka: KafkaServer, server: Server, rate: int, seconds: int) -> None:
    is_steady = rate == STEADY
    name = f"{rate:,}/s"
    rate = rate // 10 if report.small else rate
    topic, out = f"{report.name}-in-{rate}", f"{report.name}-out-{rate}"
    kafka.make(topic, out, partitions=PARTITIONS)
    bridge = _Bridge(kafka, server, topic, out)
    spawn = multiprocessing.get_context("spawn")
    load = spawn.Process(target=_send, args=(kafka.bootstrap, topic, rate, seconds))
    try:
        bridge.wait_ready()
        reader = _Reader(kafka.bootstrap, out)
        pids, count = {"bridge": bridge.pid, "Kafka": kafka.pid}, rate * seconds
        before = {who: _cpu_s(pid) for who, pid in pids.items()}
        with server.spending(name) as spent:
            load.start()
            wait_until(lambda: len(reader.seen) >= count, GIVE_UP_S, f"{count} records at the reader")
        used_s = {who: _cpu_s(pid) - before[who] for who, pid in pids.items()}
        reader.close()
    finally:
        bridge.stop()
        if load.pid is not None:
            load.join(30)
    p50, p99, worst = quantiles(np.asarray(reader.late_ms, np.int64))
    # The first and the last are due at random: between them as many come a second as were sent.
    took_s = (reader.at_ms[-1] - reader.at_ms[0] - (AHEAD_MS[1] - AHEAD_MS[0])) / 1000
    report.add(f"{name}: lateness p50", p50, "ms")
    report.add(f"{name}: lateness p99", p99, "ms", LATENESS_BAR_MS if is_steady else None, "lower")
    report.add(f"{name}: lateness max", worst, "ms")
    bar = None if is_steady else KEPT_UP * FAST
    report.add(f"{name}: in and out, sustained", count / max(took_s, 0.001), "msg/s", bar)
    report.add(f"{name}: early", sum(late < 0 for late in reader.late_ms), "messages", 0, "lower")
    doubled = sum(times - 1 for times in reader.seen.values())
    report.add(f"{name}: missing or doubled", count - len(reader.seen) + doubled, "messages", 0, "lower")
    done = bridge.status
    report.add(f"{name}: a transaction", done["delivered"] / max(1, done["transactions"]), "messages")
    report.add_cost(spent, count)
    for who, cpu_s in used_s.items():
        report.add(f"{name}: {who} CPU", cpu_s / count * 1e6, "us/msg")


def _cpu_s(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def run(small: bool = False) -> Report:
    """Measure; lateness in milliseconds."""
    from tests.interop import environments
    from tests.interop.kafka_server import KafkaServer

    report = Report("kafka", small)
    report.add("load of the machine, before", os.getloadavg()[0], "processes")
    with tempfile.TemporaryDirectory() as folder, serving() as (server, _):
        kafka = KafkaServer(Path(folder) / "kafka", environments.kafka(), HEAP)
        kafka.start()
        try:
            if not small:
                for rate, seconds in WARM_UP.items():
                    _phase(Report("warm", small), kafka, server, rate, seconds)
                report.add("warm-up of Kafka, not measured", sum(WARM_UP.values()), "s")
            for rate in (STEADY, FAST):
                _phase(report, kafka, server, rate, 1 if small else 20)
        finally:
            kafka.kill()
    report.add("load of the machine, after", os.getloadavg()[0], "processes")
    return report
