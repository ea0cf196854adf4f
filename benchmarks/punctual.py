"""Steady load, due at random milliseconds: how late are the releases, and is any early?

10,000 messages a second are scheduled for 20 seconds, each due 1 to 5 seconds later at a random millisecond,
so that scheduling and releasing run at the same time, as in production. Lateness is store_ms - due_ms of every
release row, read back from the log; a consumer that pulls all the while gives arrival - due_ms besides.

Not measured: time between a release's stamp and the end of its fdatasync (the consumer's figure contains it),
clock differences between machines, more than one consumer. The consumer and the sender share this machine
with the broker.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from benchmarks.harness import TOPIC, Server, messages, now_ms, quantiles, releases, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball

ROWS_PER_S = 10_000
TICK_S = 0.01
LATENESS_BAR_MS = 20.0


def run(small: bool = False) -> Report:
    """Measure; lateness in milliseconds."""
    report = Report("punctual", small)
    seconds = 1 if small else 20
    ahead_ms = (200, 600) if small else (1_000, 5_000)
    with serving() as (server, ball):
        ball.create_topic(TOPIC, 8)
        consumer = _Consumer(server)
        cpu_s, begun = server.cpu_s(), time.monotonic()
        sent = _send_steadily(ball, seconds, ahead_ms)
        wait_until(lambda: len(consumer) >= sent, 60, f"{sent} messages at the consumer")
        used_s, took_s = server.cpu_s() - cpu_s, time.monotonic() - begun
        consumer.stop()
        found = releases(ball)
    late = found["store_ms"] - found["due_ms"]
    p50, p99, worst = quantiles(late)
    report.add("scheduled", sent, "messages")
    report.add("released, distinct", len(np.unique(found["source_seq"])), "messages")
    report.add("early", int((late < 0).sum()), "messages", bar=0, better="lower")
    report.add("lateness p50", p50, "ms")
    report.add("lateness p99", p99, "ms", LATENESS_BAR_MS, "lower")
    report.add("lateness max", worst, "ms")
    arrived = consumer.lateness_ms()
    for label, value in zip(("p50", "p99", "max"), quantiles(arrived)):
        report.add(f"at the consumer {label}", value, "ms")
    report.add("early at the consumer", int((arrived < 0).sum()), "messages", bar=0, better="lower")
    report.add("server CPU (schedule, release, pull)", used_s / sent * 1e6, "us/msg")
    report.add("server CPU share", used_s / took_s * 100, "% of a core")
    return report


def _send_steadily(ball: Timeball, seconds: int, ahead_ms: tuple[int, int]) -> int:
    """Send a small batch every tick; a tick that comes late sends the rows it is behind."""
    rng = np.random.default_rng(7)
    begun, sent, number = time.monotonic(), 0, 0
    while sent < seconds * ROWS_PER_S:
        wanted = min(seconds * ROWS_PER_S, int((time.monotonic() - begun) * ROWS_PER_S))
        if wanted > sent:
            due = now_ms() + rng.integers(*ahead_ms, wanted - sent)
            ball.send_many(messages(wanted - sent, due, seed=(number := number + 1)))
            sent = wanted
        time.sleep(TICK_S)
    return sent


class _Consumer:
    """Pulls everything and notes when it came."""

    def __init__(self, server: Server) -> None:
        self._late: list[npt.NDArray[np.int64]] = []
        self._count = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pull, args=(server,), daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._count

    def stop(self) -> None:
        """End after the pull under way."""
        self._stopping.set()
        self._thread.join(30)

    def lateness_ms(self) -> npt.NDArray[np.int64]:
        """Arrival minus due, for each message."""
        return np.concatenate(self._late)

    def _pull(self, server: Server) -> None:
        with server.client() as ball:
            while not self._stopping.is_set():
                batch = ball.browse_batch(TOPIC, "bench", max_messages=4_096, wait="0.5s")
                if batch.num_rows:
                    self._late.append(now_ms() - np.asarray(batch.column("due_ms"), dtype=np.int64))
                    self._count += batch.num_rows
                    ball.commit(TOPIC, "bench")
