"""Sends and batches of 128-byte messages with JSON headers, as stock Java producers send them (SEND_MESSAGE_V2).

C x W: C connections with W requests in flight each. A batch holds 32 messages; its latency is the request's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from benchmarks.remoting import RING, batch_request, send_request
from benchmarks.versus.peers import REMOTING, Peer
from benchmarks.versus.work import Bench, Row, Sample, Work, measured
from timeball.edges.remoting.codec.frame import JSON

SHAPES = [(8, 512), (64, 16), (256, 1), (64, 1), (1, 1)]
WARM_SHAPE = (64, 16)
WARM_WINDOW_S, WARM_WINDOWS, WARM_GROWTH = 10.0, 12, 1.03
BATCH_ROWS, BATCH_SHAPE, BATCH_RING = 32, (8, 8), 64


@cache
def sends() -> list[bytes]:
    """A ring of sends, the same for all peers."""
    return [send_request(number, JSON) for number in range(RING)]


@cache
def batches() -> list[bytes]:
    """A ring of batches."""
    return [batch_request(number, BATCH_ROWS) for number in range(BATCH_RING)]


def _measure(
    requests: Callable[[], list[bytes]], shape: tuple[int, int], rows: int, peer: Peer, bench: Bench
) -> list[Sample]:
    load = partial(bench.load.run, peer.addresses[REMOTING], requests(), shape, rows=rows)
    load(seconds=bench.seconds / 4)  # the first calls pay for code paths never run before
    return [measured(peer, lambda: load(seconds=bench.seconds))]


def warm(peer: Peer, bench: Bench) -> None:
    """Load a broker that has just started, until its rate grows by less than 3 % from one window to the next.

    A Java broker compiles for a minute: after 8 s it has a tenth of its later rate. A small run has two short windows.
    """
    window_s, windows = (bench.seconds, 2) if bench.small else (WARM_WINDOW_S, WARM_WINDOWS)
    last = 0.0
    for _ in range(windows):
        outcome = bench.load.run(peer.addresses[REMOTING], sends(), WARM_SHAPE, window_s)
        rate = outcome.messages / outcome.seconds
        if rate < WARM_GROWTH * last:
            return
        last = rate


WORK = [
    Work("send", (Row(f"send {shape[0]}x{shape[1]}", "msg/s"),), partial(_measure, sends, shape, 1))
    for shape in SHAPES
]
WORK.append(
    Work(
        "batch",
        (Row(f"batches of {BATCH_ROWS}, {BATCH_SHAPE[0]}x{BATCH_SHAPE[1]}", "msg/s"),),
        partial(_measure, batches, BATCH_SHAPE, BATCH_ROWS),
    )
)
