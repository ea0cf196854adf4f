"""A group whose network is cut: one way, between halves, from etcd, repeatedly. No message is lost or doubled.

Each node runs in a separate namespace (namespaces.py). At the end the answers to clients are compared with the queues,
and the logs of the replicas with each other. Every third schedule runs on a slow and lossy network.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.besieged import log_of
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.namespaces import ETCD, HERE, Network, Slow, network
from tests.cluster.processes import Cluster, NodeProcess, client_of, running_cluster
from tests.rounds import rounds

from timeball import Timeball
from timeball.io.clock import SystemClock
from timeball.model.errors import TimeballError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0), pytest.mark.xdist_group("etcd")]

SCHEDULES = range(rounds(1, 9))
SCHEDULE_S, FLAP_S = 25.0, 0.2
SLOW_EVERY, HOLD_MS, LOSS = 3, 100, 0.05  # 200 ms for both ways
SLOW_SENDERS = 24  # each waits for its answer, many seconds when a packet is lost several times
LONGEST_S, SLOW_LONGEST_S = 4.0, 8.0  # a cut: longer than a lease, now and then
LEASE_TTL, SLOW_LEASE_TTL = "1s", "5s"  # an eighth is for the answer of a member of etcd
TOPIC, EVERY_S, AHEAD_MS = "cut", 0.02, 1_500
CLOCK = SystemClock()


@dataclass
class Sender:
    """Sends one scheduled message after the other, to any of the nodes."""

    nodes: Sequence[NodeProcess]
    name: str = "m"
    acknowledged: set[str] = field(default_factory=set)
    due_ms: dict[str, int] = field(default_factory=dict)
    failed_calls: int = 0
    longest_s: float = 0.0  # without an acknowledgement
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send until `ended` is set."""
        number, last_s = 0, time.monotonic()
        with client_of(self.nodes, timeout_ms=5_000) as ball:
            while not self.ended.wait(EVERY_S):
                number += 1
                key, due_ms = f"{self.name}{number}", CLOCK.wall_ms() + AHEAD_MS
                self.due_ms[key] = due_ms
                try:
                    ball.send(TOPIC, "x", at=due_ms, message_id=key, retry=True)
                except TimeballError:
                    self.failed_calls += 1
                else:
                    self.acknowledged.add(key)
                    self.longest_s = max(self.longest_s, time.monotonic() - last_s)
                    last_s = time.monotonic()


# -- faults, each of which lasts until it is healed -----------------------------------------------------------------


def cut_one_way(net: Network, names: list[str]) -> None:
    """Cut the way from the first node to the second one."""
    net.cut(names[0], names[1])


def cut_pair(net: Network, names: list[str]) -> None:
    """Cut both ways between the first two nodes."""
    net.cut(names[0], names[1])
    net.cut(names[1], names[0])


def cut_off(net: Network, names: list[str]) -> None:
    """Cut the first node off from the other two; etcd and clients reach it."""
    for other in names[1:]:
        net.cut(names[0], other)
        net.cut(other, names[0])


def cut_unheard(net: Network, names: list[str]) -> None:
    """Let the first node hear the others, and not be heard."""
    for other in names[1:]:
        net.cut(names[0], other)


def cut_from_etcd(net: Network, names: list[str]) -> None:
    """Cut the first node off from etcd."""
    net.cut(names[0], ETCD)
    net.cut(ETCD, names[0])


def cut_half(net: Network, names: list[str]) -> None:
    """Cut the first node off from the other two and from etcd; clients reach it."""
    cut_off(net, names)
    cut_from_etcd(net, names)


FAULTS: list[Callable[[Network, list[str]], None]] = [
    cut_one_way, cut_pair, cut_off, cut_unheard, cut_from_etcd, cut_half,
]  # fmt: skip


def cut_repeatedly(net: Network, cluster: Cluster, chance: random.Random, longest_s: float) -> Iterator[str]:
    """Cut and heal for a while, and yield the name of each cut. Half of the cuts are around the leader."""
    end_s = time.monotonic() + SCHEDULE_S
    while time.monotonic() < end_s:
        names = list(cluster.nodes)
        chance.shuffle(names)
        leader = cluster.view().leader
        if leader and chance.random() < 0.5:
            names.sort(key=lambda name: name != leader)
        fault = chance.choice(FAULTS)
        yield f"{fault.__name__}({', '.join(names)})"
        if chance.random() < 0.2:
            for _ in range(chance.randrange(3, 8)):
                fault(net, names)
                time.sleep(FLAP_S)
                net.heal()
                time.sleep(FLAP_S)
        else:
            fault(net, names)
            time.sleep(chance.uniform(0.5, longest_s))
            net.heal()
        time.sleep(chance.uniform(0.2, 2.0))


def delivered(ball: Timeball) -> list[dict[str, object]]:
    """Return the rows of all queues of the topic."""
    return [
        row
        for queue, ends in ball.queues(TOPIC).items()
        if ends.max > ends.min
        for batch in ball.read_queue(TOPIC, queue, ends.min, ends.max - ends.min)
        for row in batch.to_pylist()
    ]


def are_equal(cluster: Cluster) -> bool:
    """Check whether the replicas have equal logs."""
    logs = [log_of(node) for node in cluster.nodes.values()]
    return all(log == logs[0] for log in logs)


@contextmanager
def sending(nodes: Sequence[NodeProcess], senders: int) -> Iterator[list[Sender]]:
    """Send from several threads for the length of a block."""
    running = [Sender(nodes, f"{chr(ord('m') + number)}") for number in range(senders)]
    threads = [threading.Thread(target=sender.run) for sender in running]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        for sender in running:
            sender.ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.siege
@pytest.mark.parametrize("seed", SCHEDULES)
def test_cuts_of_the_network_lose_and_double_no_message(tmp_path: Path, seed: int) -> None:
    need_etcd()
    slow = Slow(HOLD_MS, LOSS, seed) if seed % SLOW_EVERY == 1 else None
    lease_ttl, longest_s = (SLOW_LEASE_TTL, SLOW_LONGEST_S) if slow else (LEASE_TTL, LONGEST_S)
    with (
        network(slow=slow) as net,
        running_cluster(tmp_path, net=net, **{"lease-ttl-ms": lease_ttl}) as cluster,
    ):
        cluster.leader()
        nodes = [*cluster.nodes.values()]
        first_epoch = cluster.epoch()
        with sending(nodes, SLOW_SENDERS if slow else 1) as senders:
            try:
                cuts = list(cut_repeatedly(net, cluster, random.Random(seed), longest_s))
            finally:
                net.heal()
        acknowledged = {key for sender in senders for key in sender.acknowledged} | {"last"}
        with client_of(nodes, timeout_ms=30_000) as ball:
            ball.send(TOPIC, "x", after=f"{AHEAD_MS + 500}ms", message_id="last", retry=True)
            cluster.wait(
                "the last message is stored", lambda: "last" in {row["unique_key"] for row in delivered(ball)}
            )
            rows = delivered(ball)
        cluster.wait("three equal logs", lambda: are_equal(cluster), 2 * BOUND_S)
        epochs = cluster.epoch() - first_epoch
    counts = Counter(str(row["unique_key"]) for row in rows)
    print(
        f"seed {seed}{', slow' if slow else ''}: {len(cuts)} cuts, {epochs} new leaders, "
        f"{len(acknowledged)} acknowledged, {sum(sender.failed_calls for sender in senders)} failed calls, "
        f"longest without an acknowledgement {max(sender.longest_s for sender in senders):.1f} s, {net.frames}"
    )
    assert not acknowledged - counts.keys(), f"lost after {cuts}"
    assert not [key for key, count in counts.items() if count > 1], f"doubled after {cuts}"
    early = [row for row in rows if row["store_ms"] < row["due_ms"]]  # type: ignore[operator]
    assert not early, f"early after {cuts}"
    assert len(acknowledged) > 50


def test_a_leader_cut_off_from_its_followers_acknowledges_nothing(tmp_path: Path) -> None:
    """The control: a leader that no follower hears acknowledges nothing, and another one leads."""
    need_etcd()
    with network() as net, running_cluster(tmp_path, net=net, **{"lease-ttl-ms": LEASE_TTL}) as cluster:
        leader = cluster.leader()
        epoch = cluster.epoch()
        cut_half(net, [leader.name, *(name for name in cluster.nodes if name != leader.name)])
        with leader.client(timeout_ms=3_000) as ball, pytest.raises(TimeballError):
            ball.send(TOPIC, "x", message_id="alone")
        assert cluster.leader(epoch) is not leader
        net.cut(HERE, leader.name)
        net.heal()
