"""The stock Java client of 5.5.0: a producer with 64 threads that wait for each answer, and a push consumer.

The backlog is sent by the load generator, as 64 x 16 single sends, to a topic of its own. The client's own work is on
the same cores; the CPU that is shown is the server's alone.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import msgspec
from tests.interop.environments import rocketmq

from benchmarks.harness import TOPIC
from benchmarks.versus.peers import NAME_SERVER, REMOTING, Peer
from benchmarks.versus.sending import WARM_SHAPE, sends
from benchmarks.versus.wire import Link
from benchmarks.versus.work import QUEUES, Bench, Row, Sample, Work

PROGRAM = Path(__file__).with_name("StockLoad.java")
THREADS = 64
BACKLOG, BACKLOG_SMALL = 192_000, 6_400
SECONDS_MIN = 3.0  # a Java that has just started sends nothing for a while
BOUND_S = 240
_NAMES = itertools.count(10)


class Outcome(msgspec.Struct, frozen=True):
    """What the client did; `delivered` counts its warm-up too."""

    messages: int
    seconds: float
    delivered: int
    failures: int
    p50_ms: float
    p99_ms: float


def produce(peer: Peer, bench: Bench) -> list[Sample]:
    """Send from many threads, each waiting for its answer."""
    outcome, cpu_us = _run(
        peer, bench, "produce", TOPIC, str(THREADS), str(max(SECONDS_MIN, 2 * bench.seconds))
    )
    rate = outcome.messages / outcome.seconds
    return [Sample(rate, outcome.p50_ms, outcome.p99_ms, cpu_us, outcome.failures)]


def consume(peer: Peer, bench: Bench) -> list[Sample]:
    """Have a push consumer take a backlog."""
    topic = f"bnc{next(_NAMES)}"  # as long as the topic's name in the frames
    frames = [frame.replace(f'"b":"{TOPIC}"'.encode(), f'"b":"{topic}"'.encode()) for frame in sends()]
    with Link(peer.addresses[REMOTING]) as link:
        link.create_topic(topic, QUEUES)
        count = BACKLOG_SMALL if bench.small else BACKLOG
        bench.load.run(peer.addresses[REMOTING], frames, WARM_SHAPE, BOUND_S, limit=count)
        held = sum(link.ends(topic, QUEUES))
    outcome, cpu_us = _run(peer, bench, "consume", topic, f"group-{topic}", str(held), str(BOUND_S))
    return [Sample(outcome.messages / outcome.seconds, cpu_us=cpu_us, failures=outcome.failures)]


def _run(peer: Peer, bench: Bench, *words: str) -> tuple[Outcome, float]:
    what, *others = words
    java, *options = rocketmq("-Xmx512m", f"-Duser.home={bench.load.folder}")
    command = [java, *options, str(PROGRAM), what, peer.addresses[NAME_SERVER], *others]
    cpu_s = peer.cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND_S, check=False)
    used_s = peer.cpu_s() - cpu_s
    if done.returncode:
        raise RuntimeError(f"{peer.name}, the stock Java client: {done.stderr.strip()[-2000:]}")
    outcome = msgspec.convert(json.loads(done.stdout.splitlines()[-1]), Outcome)
    if not outcome.messages:
        raise RuntimeError(f"{peer.name}, the stock Java client: nothing went through")
    return outcome, used_s / outcome.delivered * 1e6


WORK = [
    Work("java", (Row(f"stock Java producer, {THREADS} threads, each waits", "msg/s"),), produce),
    Work("java", (Row(f"stock Java push consumer, backlog of {BACKLOG:,}", "msg/s"),), consume),
]
