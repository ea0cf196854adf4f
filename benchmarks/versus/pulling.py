"""Pulls of 32 messages: the first read of what has just been sent in batches, and the second read of the newest.

Each pull's answer must hold 32 stored messages, or it has failed.
"""

from __future__ import annotations

from benchmarks.harness import TOPIC
from benchmarks.remoting import pull_request
from benchmarks.versus.peers import REMOTING, Peer
from benchmarks.versus.sending import BATCH_ROWS, BATCH_SHAPE, batches
from benchmarks.versus.wire import Link
from benchmarks.versus.work import QUEUES, Bench, Row, Sample, Work, measured

PULL_ROWS, SHAPE = 32, (8, 4)
FRESH, FRESH_SMALL = 262_144, 8_192  # messages of a first read
AGAIN = 65_536  # and at most so many of a second, over and over
BOUND_S = 120.0


def measure(peer: Peer, bench: Bench) -> list[Sample]:
    """Send messages, pull each once, then pull the newest over and over."""
    address = peer.addresses[REMOTING]
    fresh = FRESH_SMALL if bench.small else FRESH
    with Link(address) as link:
        begins = link.ends(TOPIC, QUEUES)
        # A busy RocketMQ refuses some batches: what has come is read.
        bench.load.run(address, batches(), BATCH_SHAPE, BOUND_S, limit=fresh // BATCH_ROWS, rows=BATCH_ROWS)
        ends = link.ends(TOPIC, QUEUES)
    # Reading the first eighth warms up.
    middles = [begin + (end - begin) // 8 for begin, end in zip(begins, ends)]
    ring = _pulls(middles, ends)
    options = {"rows": PULL_ROWS, "stored": 1}
    older = _pulls(begins, middles)
    bench.load.run(address, older, SHAPE, BOUND_S, limit=len(older), **options)
    first = measured(peer, lambda: bench.load.run(address, ring, SHAPE, BOUND_S, limit=len(ring), **options))
    newest = [max(middle, end - AGAIN // QUEUES) for middle, end in zip(middles, ends)]
    again = _pulls(newest, ends)
    second = measured(peer, lambda: bench.load.run(address, again, SHAPE, bench.seconds, **options))
    return [first, second]


def _pulls(begins: list[int], ends: list[int]) -> list[bytes]:
    """Pulls of all between these offsets, a stretch of each queue in turn; as many of each queue."""
    span = min(end - begin for begin, end in zip(begins, ends)) // PULL_ROWS * PULL_ROWS
    places = [(queue, begin + at) for at in range(0, span, PULL_ROWS) for queue, begin in enumerate(begins)]
    return [pull_request(queue, offset, PULL_ROWS, n + 1) for n, (queue, offset) in enumerate(places)]


NAME = f"pulls of {PULL_ROWS}, {SHAPE[0]}x{SHAPE[1]}"
WORK = [Work("pull", (Row(f"{NAME}, first read", "msg/s"), Row(f"{NAME}, second read", "msg/s")), measure)]
