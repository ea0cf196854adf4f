"""The rounds of a run: which brokers are up when, and whose turn it is."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import TOPIC
from benchmarks.report import brief
from benchmarks.versus import calls, delays, delivery, pulling, sending, stock
from benchmarks.versus.peers import GRPC, REMOTING, Flush, Peer, TimeballPeer
from benchmarks.versus.rocketmq import RocketMQ
from benchmarks.versus.table import ConsumerPeer, Figures, value_text
from benchmarks.versus.wire import Link
from benchmarks.versus.work import QUEUES, Bench, Work

T = TypeVar("T")
WORK: list[Work] = [*sending.WORK, *pulling.WORK, *delays.WORK, *calls.WORK, *stock.WORK]
GROUPS = [*dict.fromkeys(work.group for work in WORK), delivery.GROUP_NAME]


def peers_in(folder: Path, flush: Flush, wire: str, timer_precision_ms: int = 1_000) -> list[Peer]:
    """Return the brokers that are compared, not started; ours is the last."""
    for name in ("rocketmq", "timeball"):
        (folder / name).mkdir(parents=True)
    return [
        RocketMQ(folder / "rocketmq", flush, proxy=wire == GRPC, timer_precision_ms=timer_precision_ms),
        TimeballPeer(folder / "timeball", flush),
    ]


def run(
    figures: Figures, bench: Bench, folder: Path, flush: Flush, work: Sequence[Work], *, delivers: bool
) -> None:
    """Do all the work on all peers, round by round in turn. `delivers`: also the work at the consumer."""
    if delivers:
        _delivery_rounds(figures, bench, folder, flush)
    for wire in (REMOTING, GRPC):
        if shared := [each for each in work if each.wire == wire and not each.fresh]:
            peers = peers_in(folder / f"shared-{wire}", flush, wire)
            _name(figures, peers)
            with _started(peers, bench):
                for each in shared:
                    _rounds(figures, bench, each, peers)
        for number, each in enumerate(each for each in work if each.wire == wire and each.fresh):
            _fresh_rounds(figures, bench, each, folder / f"fresh-{wire}-{number}", flush)


def _rounds(figures: Figures, bench: Bench, work: Work, peers: Sequence[Peer]) -> None:
    for number in range(figures.rounds):
        for peer in in_turn(peers, number):
            if work.wire in peer.addresses:
                _measure(figures, bench, work, peer, number)


def _fresh_rounds(figures: Figures, bench: Bench, work: Work, folder: Path, flush: Flush) -> None:
    """One peer at a time, new for each measurement: the other has memory and disk to itself."""
    _name(figures, peers_in(folder / "named", flush, work.wire, work.timer_precision_ms))
    for number in range(figures.rounds):
        for at in in_turn(range(len(figures.peers)), number):
            own = folder / f"{number}-{at}"
            peer = peers_in(own, flush, work.wire, work.timer_precision_ms)[at]
            with _started([peer], bench if work.timer_precision_ms != 1_000 else None):
                _measure(figures, bench, work, peer, number)
            shutil.rmtree(own)


def in_turn(peers: Sequence[T], number: int) -> list[T]:
    """Swap the order in each round: what the first leaves behind must not always meet the same one."""
    return list(peers) if number % 2 == 0 else list(reversed(peers))


def _delivery_rounds(figures: Figures, bench: Bench, folder: Path, flush: Flush) -> None:
    """The work at the consumer: each broker alone, and new for each measurement."""
    for at, row in enumerate(delivery.ROWS):
        for number in range(figures.rounds):
            for start in in_turn(delivery.STARTS, number):
                if start.client not in row.clients:
                    continue
                own = folder / f"delivery-{at}-{number}-{start.name}".replace(" ", "-")
                own.mkdir(parents=True)
                peer = start.make(own, flush)
                with _started([peer]):
                    if bench.page_cache is not None:
                        bench.page_cache.fill()
                    sample = row.measure(start.client, peer, bench)
                figures.at_consumer.add(
                    ConsumerPeer(start.name, peer.settings, start.durable), row.row, sample
                )
                late = "" if sample.p99_ms is None else f", p99 {sample.p99_ms:.1f} ms"
                cpu = "" if sample.cpu_us is None else f", {sample.cpu_us:.1f} us CPU a message"
                say(
                    f"{row.row.name}, round {number + 1} of {figures.rounds}: {start.name}"
                    f" {value_text(row.row, sample)}{late}{cpu}, {sample.failures} failed"
                )
                shutil.rmtree(own)


def _name(figures: Figures, peers: Sequence[Peer]) -> None:
    for peer in peers:
        figures.name_peer(peer.name, peer.settings)


def _measure(figures: Figures, bench: Bench, work: Work, peer: Peer, number: int) -> None:
    if bench.page_cache is not None:
        bench.page_cache.fill()
    samples = work.measure(peer, bench)
    figures.add(peer.name, work.rows, samples)
    for row, sample in zip(work.rows, samples, strict=True):
        more = "" if sample.cpu_us is None else f", {sample.cpu_us:.1f} us CPU a message"
        if sample.p99_ms is not None:
            more += f", p99 {sample.p99_ms:.1f} ms"
        if sample.failures:
            more += f", {sample.failures} FAILED"
        say(
            f"{row.name}, round {number + 1} of {figures.rounds}: {peer.name} {brief(sample.value)} {row.unit}{more}"
        )


@contextmanager
def _started(peers: Sequence[Peer], bench: Bench | None = None) -> Iterator[None]:
    """Brokers that are up, with a topic, and warm if there is a bench; ended whatever happens."""
    try:
        for peer in peers:
            say(f"starting {peer.settings}")
            peer.start()
            if REMOTING in peer.addresses:
                with Link(peer.addresses[REMOTING]) as link:
                    link.create_topic(TOPIC, QUEUES)
                if bench is not None:
                    sending.warm(peer, bench)
        yield
    finally:
        for peer in peers:
            peer.stop()


@contextmanager
def working_folder() -> Iterator[Path]:
    """A temporary folder that is kept, with the brokers' logs, when an error ends the run."""
    folder = Path(tempfile.mkdtemp(prefix="timeball-versus-"))
    try:
        yield folder
    except Exception:
        for data in [*folder.rglob("store"), *folder.rglob("data")]:
            shutil.rmtree(data, ignore_errors=True)
        say(f"the brokers' logs are kept in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def say(text: str) -> None:
    """Print a line of progress, beside what the run prints as its result."""
    print(f"versus: {text}", file=sys.stderr, flush=True)
