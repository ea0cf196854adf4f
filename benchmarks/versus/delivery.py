"""Delivery to a consumer: from the due time to the handler, with a lease and an acknowledgement of each message.

A producer and a consumer are processes of their own. The consumer notes the time at which it holds each body, so the
lateness is that of the user, not of the queue. A message that is early, missing or there twice counts as failed.

    steady   calls of 20 at 2,000 messages a second, due 2 to 5 s later at random milliseconds; one consumer
    wide     calls of 100 at 10,000 messages a second from four connections, due 2 to 5 s later; eight consumers
    burst    many messages due at one instant; one consumer; the time until it has the last
    groups   one message for 1,000 groups that wait (groups.py)

The rows of small_calls.py are measured on the same brokers.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import BODY_BYTES, now_ms, quantiles
from benchmarks.versus import groups, small_calls
from benchmarks.versus.delayed_queues import CLIENTS, DelayedQueue
from benchmarks.versus.other_peers import BeanstalkdPeer, NatsPeer, RedisPeer
from benchmarks.versus.peers import DELIVERY, HTTP, PYTHON, REMOTING, Flush, Peer, TimeballPeer
from benchmarks.versus.work import Bench, Row, Sample

RATE, CALL_ROWS = 2_000, 20
WIDE_RATE, WIDE_CALL_ROWS, WIDE_PRODUCERS, WIDE_CONSUMERS = 10_000, 100, 4, 8
STEADY_S, STEADY_S_SMALL = 8.0, 0.5
AHEAD_MS = (2_000, 5_000)
BURST, BURST_SMALL = 100_000, 2_000
BURST_AHEAD_S = 20.0
SEND_ROWS = 500
RECEIVE_ROWS = 256
BOUND_S = 180.0


@dataclass(frozen=True)
class Account:
    """What a consumer noted: for each message its number, its due time, and when it was there."""

    numbers: np.ndarray[Any, Any]
    due_ms: np.ndarray[Any, Any]
    seen_ms: np.ndarray[Any, Any]

    def failures(self, sent: int) -> int:
        """Count the messages that were early, that are missing, and that came once more."""
        early = int((self.seen_ms < self.due_ms).sum())
        distinct = len(np.unique(self.numbers))
        return early + (sent - distinct) + (len(self.numbers) - distinct)


def body_of(number: int, due_ms: int) -> bytes:
    """A body of 128 bytes that names the message and its due time."""
    return b"%d %d " % (number, due_ms) + b"." * (BODY_BYTES - len(b"%d %d " % (number, due_ms)))


def consume(client: str, address: str, count: int, bound_s: float, consumers: int, pipe: Connection) -> None:
    """The consumers' process: receive and acknowledge until all have come."""
    noted: list[tuple[bytes, int]] = []
    give_up = time.monotonic() + bound_s
    queues = [CLIENTS[client](address) for _ in range(consumers)]

    def receive(queue: DelayedQueue) -> None:
        while len(noted) < count and time.monotonic() < give_up:
            received = queue.receive(RECEIVE_ROWS, 1.0)
            if received:
                seen_ms = now_ms()
                noted.extend((body, seen_ms) for body, _ in received)
                queue.acknowledge([token for _, token in received])
        # One more look: a message that comes twice is to be seen.
        noted.extend((body, now_ms()) for body, _ in queue.receive(RECEIVE_ROWS, 0.2))
        queue.close()

    pipe.send("ready")
    _at_once(receive, queues)
    words = [body.split(b" ", 2) for body, _ in noted]
    pipe.send(([int(w[0]) for w in words], [int(w[1]) for w in words], [seen for _, seen in noted]))


def produce(
    client: str, address: str, count: int, rate: int, call_rows: int, producers: int, pipe: Connection
) -> None:
    """The producers' process: calls at a rate. It falls behind if the broker does, and says how far."""
    queues = [CLIENTS[client](address) for _ in range(producers)]
    pipe.send("ready")
    pipe.recv()
    begin_s = time.monotonic()

    def send(queue: DelayedQueue) -> None:
        at, rng = queues.index(queue), random.Random(5)
        for first in range(at * call_rows, count, call_rows * producers):
            wait_s = begin_s + first / rate - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            at_ms = now_ms()
            dues = [at_ms + rng.randrange(*AHEAD_MS) for _ in range(min(call_rows, count - first))]
            queue.send([(due_ms, body_of(first + n, due_ms)) for n, due_ms in enumerate(dues)])
        queue.close()

    _at_once(send, queues)
    pipe.send(time.monotonic() - begin_s)


def _at_once(work: Callable[[DelayedQueue], None], queues: list[DelayedQueue]) -> None:
    """Do the work on each queue, in a thread of its own. Raises the first error."""
    with ThreadPoolExecutor(len(queues)) as threads:
        for done in [threads.submit(work, queue) for queue in queues]:
            done.result()


def steady(client: str, peer: Peer, bench: Bench) -> Sample:
    """See the module."""
    return _steady(client, peer, bench, (RATE, CALL_ROWS, 1, 1))


def wide(client: str, peer: Peer, bench: Bench) -> Sample:
    """See the module."""
    return _steady(client, peer, bench, (WIDE_RATE, WIDE_CALL_ROWS, WIDE_PRODUCERS, WIDE_CONSUMERS))


def _steady(client: str, peer: Peer, bench: Bench, shape: tuple[int, int, int, int]) -> Sample:
    """Send at a rate and consume. `shape`: messages a second and a call, connections of producers and consumers."""
    rate, call_rows, producers, consumers = shape
    address, count = _address(client, peer), int(rate * (STEADY_S_SMALL if bench.small else STEADY_S))
    _warm(client, address)
    with _Client(produce, client, address, count, rate, call_rows, producers) as producer:
        with _Client(consume, client, address, count, BOUND_S, consumers) as consumer:
            cpu_s = peer.cpu_s()
            producer.send("go")
            sent_s = float(_received(producer))
            account = _account(consumer)
            used_s = peer.cpu_s() - cpu_s
    late = account.seen_ms - account.due_ms
    p50, p99, _ = quantiles(late)
    return Sample(count / sent_s, p50, p99, used_s / count * 1e6, account.failures(count))


def burst(client: str, peer: Peer, bench: Bench) -> Sample:
    """See the module."""
    address, count = _address(client, peer), BURST_SMALL if bench.small else BURST
    _warm(client, address)
    queue = CLIENTS[client](address)
    begin_s = time.monotonic()
    probe = SEND_ROWS
    due_ms = now_ms() + int(BURST_AHEAD_S * 1000)
    queue.send([(due_ms, body_of(n, due_ms)) for n in range(probe)])
    # Twice the time to send all of them: messages that are sent after the due time are no burst.
    needed_s = 2 * (time.monotonic() - begin_s) * count / probe
    if needed_s > BURST_AHEAD_S - 5:
        return Sample(float("nan"))
    for first in range(probe, count, SEND_ROWS):
        queue.send([(due_ms, body_of(n, due_ms)) for n in range(first, min(first + SEND_ROWS, count))])
    queue.close()
    if now_ms() >= due_ms:
        raise RuntimeError(f"{peer.name}: the burst was due before all of it was sent")
    with _Client(consume, client, address, count, BOUND_S, 1) as consumer:
        time.sleep(max(0.0, (due_ms - now_ms()) / 1e3 - 0.5))
        cpu_s = peer.cpu_s()
        account = _account(consumer)
        used_s = peer.cpu_s() - cpu_s
    late = account.seen_ms - account.due_ms
    p50, p99, most = quantiles(late)
    return Sample(most / 1e3, p50, p99, used_s / count * 1e6, account.failures(count))


def _address(client: str, peer: Peer) -> str:
    wires = {"http": HTTP, "http stream": HTTP, "python": PYTHON, "remoting": REMOTING}
    return peer.addresses[wires.get(client, DELIVERY)]


def _warm(client: str, address: str) -> None:
    """Create topic and group, and let the broker run each call once."""
    queue = CLIENTS[client](address)
    for _ in range(20):
        at_ms = now_ms()
        queue.send(
            [
                (at_ms, body_of(n + 1_000_000_000 + time.monotonic_ns() % 10**9, at_ms))
                for n in range(CALL_ROWS)
            ]
        )
    seen, give_up = 0, time.monotonic() + 20
    while seen < 20 * CALL_ROWS and time.monotonic() < give_up:
        received = queue.receive(RECEIVE_ROWS, 1.0)
        seen += len(received)
        if received:
            queue.acknowledge([token for _, token in received])
    queue.close()
    if seen < 20 * CALL_ROWS:
        raise RuntimeError(f"{client}: only {seen} of {20 * CALL_ROWS} warm-up messages came")


class _Client:
    """A process that talks over a pipe; ended whatever happens."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, theirs), daemon=True)

    def __enter__(self) -> Connection:
        self._process.start()
        _received(self._pipe)
        return self._pipe

    def __exit__(self, *_: object) -> None:
        self._process.join(5)
        self._process.kill()


def _received(pipe: Connection) -> Any:
    if not pipe.poll(BOUND_S + 30):
        raise TimeoutError("a client does not answer")
    return pipe.recv()


def _account(consumer: Connection) -> Account:
    return Account(*(np.array(column, np.int64) for column in _received(consumer)))


@dataclass(frozen=True)
class Start:
    """A broker and a client of it."""

    name: str
    client: str  # of delayed_queues.CLIENTS
    make: Callable[[Path, Flush], Peer]
    durable: bool = True


@dataclass(frozen=True)
class DeliveryRow:
    """A row of the table, and how it is measured."""

    row: Row
    measure: Callable[[str, Peer, Bench], Sample]
    clients: Container[str] = frozenset(CLIENTS)  # those that can do the work


GROUP_NAME = "delivery"
STARTS = [
    Start("Redis", "redis", lambda folder, _: RedisPeer(folder)),
    Start("NATS", "nats", lambda folder, _: NatsPeer(folder)),
    Start("NATS, default sync", "nats", lambda folder, _: NatsPeer(folder, durable=False), durable=False),
    Start("beanstalkd", "beanstalkd", lambda folder, _: BeanstalkdPeer(folder)),
    Start("Timeball, HTTP", "http", TimeballPeer),
    Start("Timeball, HTTP stream", "http stream", TimeballPeer),
    Start("Timeball, Python client", "python", TimeballPeer),
    Start("Timeball, remoting", "remoting", TimeballPeer),
]
ROWS = [
    DeliveryRow(Row(f"steady {RATE:,}/s in calls of {CALL_ROWS}, one consumer: sent", "msg/s"), steady),
    DeliveryRow(Row(f"steady {WIDE_RATE:,}/s, {WIDE_CONSUMERS} consumers: sent", "msg/s"), wide),
    DeliveryRow(Row(f"{BURST:,} due at one instant, one consumer: the last after", "s", "lower"), burst),
    DeliveryRow(
        Row(f"one message for {groups.GROUPS:,} groups that wait: the last has it after", "ms", "lower"),
        groups.one_for_all, groups.REQUESTS,
    ),
    DeliveryRow(
        Row(f"single delayed sends, {small_calls.CONNECTIONS} connections", "msg/s"), small_calls.single_sends,
        small_calls.WIRES,
    ),
    DeliveryRow(
        Row(f"cancels by id, {small_calls.CONNECTIONS} connections", "msg/s"), small_calls.cancels, small_calls.WIRES
    ),
    DeliveryRow(
        Row("memory of a pending message", "bytes", "lower"), small_calls.pending_bytes, small_calls.WIRES
    ),
]  # fmt: skip
