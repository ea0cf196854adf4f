"""The Python client: small calls over Flight and HTTP, a trickle, and the log read as a stream over Flight.

One client makes one call after the other. Over Flight: a batch of one row on an open stream, the same with a delay, and
a read of one row. Over HTTP: a call that does nothing (`queues`), and a pull of one message with its acknowledgement
(two calls, two commits). The trickle is 400 delayed messages a second in twos over Flight, due within a second, shared
out among four consumers of one group over HTTP that pull 32 at most and acknowledge each pull. The log is read whole in
batches of the broker's own size.

Not measured: the network (loopback), other disks, TLS, new connections, many clients at once. The clients share the
machine with the broker; their CPU is not in CPU per message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import TOPIC, Server, messages, now_ms, quantiles, releases, serving, wait_until
from benchmarks.report import Report
from benchmarks.stream import drive
from timeball import Timeball

QUEUES = 8
CALLS, CALLS_SMALL = 1_500, 15
ROWS_PER_S, TICK_S, AHEAD_MS = 400, 0.005, (200, 1_000)
SECONDS, SECONDS_SMALL = 20, 1
CONSUMERS, PULL_ROWS = 4, 32
READ_ROWS, READ_ROWS_SMALL = 1_000_000, 5_000
# Of the server's CPU; a pull with its acknowledgement is two.
BARS_US = {"send of one": 400.0, "pull of one and ack": 600.0, "trickle": 300.0}


def run(small: bool = False) -> Report:
    """Measure; CPU in microseconds a call, or a message."""
    report = Report("flight", small)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        _calls(report, server, ball, CALLS_SMALL if small else CALLS)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, QUEUES)
        _trickle(report, server, ball, SECONDS_SMALL if small else SECONDS)
    with serving() as (server, ball):
        _log(report, server, ball, READ_ROWS_SMALL if small else READ_ROWS)
    return report


def _calls(report: Report, server: Server, ball: Timeball, count: int) -> None:
    one, delayed = messages(1), messages(1, np.array([now_ms() + 3_600_000]))
    for label, batch in (("send of one", one), ("send of one, delayed", delayed)):
        drive(server.endpoint, [batch] * 20, 1)
        with server.spending(label) as spent:
            latency_ms, seconds = drive(server.endpoint, [batch] * count, 1)
        report.add(f"{label}: rate", count / seconds, "msg/s")
        report.add(f"{label}: answer p50", quantiles(latency_ms)[0], "ms")
        report.add_cost(spent, count, BARS_US.get(label))

    def pull() -> None:
        (message,) = ball.pull(TOPIC, "ones", max_messages=1, wait="1s")
        assert message.ack()

    def read() -> None:
        assert ball.read_queue(TOPIC, 0, 0, 1).read_all().num_rows == 1

    ball.send_many(messages(2 * count + 64 * QUEUES))
    _row(report, server, "call that does nothing", count, lambda: ball.queues(TOPIC))
    _row(report, server, "read of one", count, read)
    _row(report, server, "pull of one and ack", count, pull)


def _row(report: Report, server: Server, label: str, count: int, call: Callable[[], object]) -> None:
    for _ in range(10):
        call()
    taken_ms = np.zeros(count)
    with server.spending(label) as spent:
        for at in range(count):
            begun = time.perf_counter()
            call()
            taken_ms[at] = 1000 * (time.perf_counter() - begun)
    report.add(f"{label}: rate", 1000 * count / taken_ms.sum(), "msg/s")
    report.add(f"{label}: answer p50", quantiles(taken_ms)[0], "ms")
    report.add_cost(spent, count, BARS_US.get(label))


def _trickle(report: Report, server: Server, ball: Timeball, seconds: int) -> None:
    label, wanted = "trickle", seconds * ROWS_PER_S
    arrived: list[int] = []
    stopping = threading.Event()
    consumers = [
        threading.Thread(target=_consume, args=(server, arrived, stopping)) for _ in range(CONSUMERS)
    ]
    rng = np.random.default_rng(7)
    ball.send_many(messages(1))
    for consumer in consumers:
        consumer.start()
    wait_until(lambda: bool(arrived), 30, "the first message at a consumer")
    arrived.clear()
    with server.spending(label) as spent:
        begun, sent = time.monotonic(), 0
        while sent < wanted:
            rows = min(wanted, int((time.monotonic() - begun) * ROWS_PER_S)) - sent
            if rows:
                ball.send_many(messages(rows, now_ms() + rng.integers(*AHEAD_MS, rows), seed=sent + 1))
                sent += rows
            time.sleep(TICK_S)
        wait_until(lambda: len(arrived) >= wanted, 60, f"{wanted} messages at the consumers")
    stopping.set()
    for consumer in consumers:
        consumer.join(30)
    found = releases(ball)
    late_ms = found["store_ms"] - found["due_ms"]
    report.add(f"{label}: missing or twice", len(arrived) - wanted, "messages")
    report.add(f"{label}: early", int((late_ms < 0).sum()), "messages", bar=0, better="lower")
    report.add(f"{label}: lateness p99", quantiles(late_ms)[1], "ms")
    for name, value in zip(("p50", "p99"), quantiles(np.array(arrived))):
        report.add(f"{label}: at the consumer {name}", value, "ms")
    report.add_cost(spent, wanted, BARS_US[label])


def _consume(server: Server, arrived: list[int], stopping: threading.Event) -> None:
    """Pull and acknowledge; note how late each message came."""
    with server.client() as ball:
        while not stopping.is_set():
            pulled = ball.pull(TOPIC, "trickle", max_messages=PULL_ROWS, wait="0.5s")
            if pulled:
                arrived += [now_ms() - (message.due_ms or 0) for message in pulled]
                ball.ack(pulled)


def _log(report: Report, server: Server, ball: Timeball, rows: int) -> None:
    label = "read the log"
    for seed in range(rows // 5_000):
        ball.send_many(messages(5_000, seed=seed))
    log = ball.status()["log"]
    with server.spending(label) as spent:
        begun = time.monotonic()
        read = sum(batch.num_rows for batch in ball.read_log(log["first_seq"], log["durable_seq"]))
        seconds = time.monotonic() - begun
    assert read >= rows, f"{read} of {rows} rows"
    report.add(f"{label}: rate", read / seconds, "rows/s")
    report.add_cost(spent, read)
