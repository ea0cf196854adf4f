"""Scheduled messages: a steady stream of them, a burst at one instant, and many that wait through a kill -9.

Both brokers are sent RocketMQ's own timer messages: the instant is the property TIMER_DELIVER_MS. Lateness is the
instant at which a message was stored in its queue, less the one that was asked for, which its body repeats. A message
that is early, missing, or there twice counts as failed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.harness import BODY_BYTES, TOPIC, now_ms, quantiles, wait_until
from benchmarks.remoting import RING, send_request
from benchmarks.stored_message import StoredMessage
from benchmarks.versus.peers import REMOTING, Peer
from benchmarks.versus.sending import WARM_SHAPE, sends
from benchmarks.versus.wire import Link
from benchmarks.versus.work import QUEUES, Bench, Row, Sample, Work
from timeball.edges.remoting.codec.frame import JSON

RATES = [5_000, 10_000]
STEADY_S, STEADY_S_SMALL = 10.0, 1.0
AHEAD_MS = 3_000
# RocketMQ refuses sends that have waited for 200 ms, as they do at first in a deeper pipeline.
LOAD_SHAPE, PROBE_SHAPE = (16, 16), (8, 1)
STAMP = "9999999999999"  # load.c writes the instant over it
FAR_MS = 3_600_000
SETTLE_S = 5.0
PROBES, PROBE_EVERY_MS, PROBES_AHEAD_MS = 400, 50, 10_000
BOUND_S = 180.0


def steady(rate: int, peer: Peer, bench: Bench) -> list[Sample]:
    """Send at a rate, each message due a few seconds later; measured until the last is in its queue."""
    seconds = STEADY_S_SMALL if bench.small else STEADY_S
    ring = [_delayed(n, STAMP, STAMP) for n in range(RING)]
    with Link(peer.addresses[REMOTING]) as link:
        begins, cpu_s = link.ends(TOPIC, QUEUES), peer.cpu_s()
        outcome = bench.load.run(
            peer.addresses[REMOTING], ring, WARM_SHAPE, seconds, rate=rate, stamp=AHEAD_MS
        )
        _await_visible(link, begins, outcome.delivered)
        cpu_us = (peer.cpu_s() - cpu_s) / outcome.delivered * 1e6
        found = _stored(link, begins)
    p50, p99, most = quantiles(np.array([each.store_ms - _due_ms(each) for each in found]))
    sent = Sample(
        outcome.messages / outcome.seconds, outcome.p50_ms, outcome.p99_ms, cpu_us, outcome.failures
    )
    return [sent, Sample(most, p50, p99, failures=wrong(found, outcome.delivered))]


def burst(peer: Peer, bench: Bench) -> list[Sample]:
    """Have many messages due at one instant; the time from then until all can be pulled, and the CPU of it."""
    address = peer.addresses[REMOTING]
    probe = bench.load.run(address, sends(), LOAD_SHAPE, bench.seconds / 2)
    # As long as sending them will take, thrice: a message that is sent behind its instant is not scheduled.
    due_ms = now_ms() + int(3_000 * bench.waiting * probe.seconds / probe.messages) + AHEAD_MS
    with Link(address) as link:
        begins = link.ends(TOPIC, QUEUES)
        sent = _send_waiting(peer, bench, due_ms)
        time.sleep(max(0.0, (due_ms - now_ms() - 500) / 1e3))
        early = sum(link.ends(TOPIC, QUEUES)) - sum(begins)
        time.sleep(max(0.0, (due_ms - now_ms()) / 1e3))
        cpu_s = peer.cpu_s()
        _await_visible(link, begins, sent)
        passed_s = (now_ms() - due_ms) / 1e3
        used_s = peer.cpu_s() - cpu_s
    return [Sample(passed_s, cpu_us=used_s / sent * 1e6, failures=early)]


def wait_and_kill(peer: Peer, bench: Bench) -> list[Sample]:
    """Let many messages wait; then kill -9, start again, and see when the first that is due comes."""
    _send_waiting(peer, bench, now_ms() + FAR_MS)
    time.sleep(SETTLE_S)  # what is done behind the answers is done
    held = [Sample(value) for value in (peer.rss_mb(), peer.anonymous_mb(), peer.disk_mb())]
    count = PROBES // 10 if bench.small else PROBES
    due_ms = now_ms() + PROBES_AHEAD_MS
    probes = [f"{due_ms + n * PROBE_EVERY_MS}" for n in range(count)]
    with Link(peer.addresses[REMOTING]) as link:
        begins = link.ends(TOPIC, QUEUES)
    ring = [_delayed(n, probe, probe) for n, probe in enumerate(probes)]
    taken = bench.load.run(peer.addresses[REMOTING], ring, PROBE_SHAPE, BOUND_S, limit=count)
    if taken.failures or now_ms() >= due_ms:
        raise RuntimeError(f"{peer.name}: the probes were not all taken in time; codes {taken.codes}")
    time.sleep((due_ms - now_ms()) / 1e3)
    peer.kill()
    started_ms = now_ms()
    peer.start()
    with Link(peer.addresses[REMOTING]) as link:
        time.sleep(max(0.0, (int(probes[-1]) - now_ms()) / 1e3))
        found: list[StoredMessage] = []

        def all_came() -> bool:
            found[:] = _stored(link, begins)
            return {_due_ms(each) for each in found} >= {int(probe) for probe in probes}

        wait_until(all_came, BOUND_S, f"{peer.name}: all {count} probes after a kill -9")
    first_s = (min(each.store_ms for each in found if each.store_ms >= started_ms) - started_ms) / 1e3
    return [*held, Sample(first_s, failures=wrong(found, count))]


def wrong(found: Sequence[StoredMessage], sent: int) -> int:
    """Count the messages that were stored before their instants, that are missing, and that are there once more."""
    return sum(each.store_ms < _due_ms(each) for each in found) + abs(len(found) - sent)


def _delayed(number: int, due_ms: str, body: str) -> bytes:
    padded = body.encode().ljust(BODY_BYTES, b".")
    return send_request(number, JSON, padded, TIMER_DELIVER_MS=due_ms)


def _due_ms(message: StoredMessage) -> int:
    return int(message.body[: len(STAMP)])


def _send_waiting(peer: Peer, bench: Bench, due_ms: int) -> int:
    """Send as many as are wanted, those that are refused again; returns how many were taken."""
    ring = [_delayed(n, str(due_ms), str(due_ms)) for n in range(RING)]
    taken = 0
    while taken < bench.waiting:
        limit = -(-(bench.waiting - taken) // LOAD_SHAPE[0]) * LOAD_SHAPE[0]
        outcome = bench.load.run(peer.addresses[REMOTING], ring, LOAD_SHAPE, BOUND_S, limit=limit)
        taken += outcome.delivered
        if not outcome.delivered or now_ms() >= due_ms:
            count = f"{taken:,} of {bench.waiting:,}"
            raise RuntimeError(
                f"{peer.name} took {count} messages before they were due: ask for fewer, --waiting"
            )
    return taken


def _await_visible(link: Link, begins: list[int], messages: int) -> None:
    wait_until(
        lambda: sum(link.ends(TOPIC, QUEUES)) - sum(begins) >= messages,
        BOUND_S,
        f"{messages} messages visible",
    )


def _stored(link: Link, begins: list[int]) -> list[StoredMessage]:
    ends = link.ends(TOPIC, QUEUES)
    return [
        message
        for queue, (begin, end) in enumerate(zip(begins, ends))
        for message in link.stored(queue, begin, end)
    ]


WORK = [
    Work(
        "steady",
        (
            Row(f"steady {rate:,}/s, due {AHEAD_MS // 1000} s later: sent", "msg/s"),
            Row(
                f"steady {rate:,}/s: lateness in the queue, most",
                "ms",
                "lower",
            ),
        ),
        partial(steady, rate),
    )
    for rate in RATES
]
WORK.append(
    Work(
        "steady",
        (
            Row(f"steady {RATES[0]:,}/s, RocketMQ's timer with a precision of 100 ms: sent", "msg/s"),
            Row(
                f"steady {RATES[0]:,}/s, RocketMQ with a precision of 100 ms: lateness in the queue, most",
                "ms",
                "lower",
            ),
        ),
        partial(steady, RATES[0]),
        fresh=True,
        timer_precision_ms=100,
    )
)
WORK += [
    Work("burst", (Row("burst at one instant: all visible after", "s", "lower"),), burst),
    Work(
        "waiting",
        (
            Row("waiting: resident memory", "MB", "lower"),
            Row("waiting: of it anonymous", "MB", "lower"),
            Row("waiting: disk", "MB", "lower"),
            Row("waiting, then kill -9: from the start to the first release", "s", "lower"),
        ),
        wait_and_kill,
        fresh=True,
    ),
]
