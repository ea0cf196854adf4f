"""A piece of work, the rows of the table it fills, and what one measurement of it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.versus.load import Generator, Outcome
from benchmarks.versus.page_cache import PageCache
from benchmarks.versus.peers import REMOTING, Peer

SECONDS, SECONDS_SMALL = 4.0, 0.3
QUEUES = 8


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    unit: str
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True)
class Sample:
    """What one measurement of one row says of one peer; None: not measured by this work."""

    value: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    cpu_us: float | None = None  # of the server, a message
    failures: int = 0


@dataclass(frozen=True)
class Bench:
    """What work is given: the load generator, and how much of it is wanted."""

    load: Generator
    small: bool
    waiting: int  # scheduled messages of the rows that are about many of them
    page_cache: PageCache | None = None  # filled before each measurement

    @property
    def seconds(self) -> float:
        """How long a load lasts."""
        return SECONDS_SMALL if self.small else SECONDS


@dataclass(frozen=True)
class Work:
    """One thing that each peer does in turn. `measure` returns a sample for each row, in their order.

    `group`: what --rows calls it. `fresh`: each measurement gets a broker of its own, started for it; other work
    shares a pair of warm ones. `timer_precision_ms` other than the default needs a fresh one.
    """

    group: str
    rows: tuple[Row, ...]
    measure: Callable[[Peer, Bench], Sequence[Sample]]
    wire: str = REMOTING
    fresh: bool = False
    timer_precision_ms: int = 1_000  # RocketMQ's timerPrecisionMs


def measured(peer: Peer, load: Callable[[], Outcome]) -> Sample:
    """Run a load and return its rate in messages a second, with the CPU that the server used from begin to end."""
    cpu_s = peer.cpu_s()
    outcome = load()
    used_s = peer.cpu_s() - cpu_s
    if not outcome.delivered:
        raise RuntimeError(f"{peer.name}: not one request succeeded; codes of the answers: {outcome.codes}")
    return Sample(
        outcome.messages / outcome.seconds, outcome.p50_ms, outcome.p99_ms, used_s / outcome.delivered * 1e6,
        outcome.failures,
    )  # fmt: skip
