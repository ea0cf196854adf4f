"""Recorded histories of messages are linearizable on three machines with mixed faults (tests/crash/histories.py).

Each node runs in a namespace, on a disk that can hang. `make siege` runs for 20 minutes:
`TIMEBALL_SIEGE=all pytest tests/cluster/test_histories.py -s`.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.besieged import log_of
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.namespaces import Network, network
from tests.cluster.processes import Cluster, NodeProcess, client_of, running_cluster
from tests.crash.histories import Recording, judge, make_topic
from tests.rounds import rounds

from timeball.model.errors import TimeballError

pytestmark = [pytest.mark.slow, pytest.mark.siege, pytest.mark.timeout(0), pytest.mark.xdist_group("etcd")]

ROUNDS, CLIENTS, SEED = rounds(1, 60), 8, 1
LASTS_S, REST_S = (0.5, 4.0), (0.5, 2.0)


# -- faults: each lasts for the length of a block ------------------------------------------------------------------


@contextmanager
def killed(net: Network, cluster: Cluster, node: NodeProcess) -> Iterator[None]:
    """The node's process is dead."""
    node.kill()
    yield
    node.start()


@contextmanager
def paused(net: Network, cluster: Cluster, node: NodeProcess) -> Iterator[None]:
    """The node's process is stopped."""
    node.kill(signal.SIGSTOP)
    yield
    node.kill(signal.SIGCONT)


@contextmanager
def unheard(net: Network, cluster: Cluster, node: NodeProcess) -> Iterator[None]:
    """The node hears the others, and is not heard."""
    for other in cluster.nodes:
        if other != node.name:
            net.cut(node.name, other)
    yield
    net.heal()


@contextmanager
def hanging(net: Network, cluster: Cluster, node: NodeProcess) -> Iterator[None]:
    """The node's disk does not answer."""
    node.stalled.touch()
    yield
    node.stalled.unlink()


@contextmanager
def without_etcd(net: Network, cluster: Cluster, node: NodeProcess) -> Iterator[None]:
    """No member of etcd answers."""
    for member in cluster.etcd.members:
        member.stop()
    yield
    for member in cluster.etcd.members:
        member.go_on()


FAULTS = [killed, paused, unheard, hanging, without_etcd]


def leader_of(cluster: Cluster) -> str:
    """Return the node that holds the group, or "" while there is none, or while etcd does not answer."""
    with suppress(TimeballError):
        return cluster.view().leader or ""
    return ""


def strike(
    net: Network, cluster: Cluster, chance: random.Random, history_size: Callable[[], int]
) -> tuple[Counter[str], Counter[str]]:
    """Make each fault ROUNDS times, half of them at the leader. Return how often, and the operations during each."""
    times: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for fault in [fault for _ in range(ROUNDS) for fault in chance.sample(FAULTS, len(FAULTS))]:
        leader = leader_of(cluster)
        node = cluster.nodes[leader if leader and chance.random() < 0.5 else chance.choice("abc")]
        before = history_size()
        with fault(net, cluster, node):
            time.sleep(chance.uniform(*LASTS_S))
        time.sleep(chance.uniform(*REST_S))
        times[fault.__name__] += 1
        operations[fault.__name__] += history_size() - before
    return times, operations


def are_equal(cluster: Cluster) -> bool:
    """Check whether the replicas have equal logs."""
    first, *others = [log_of(node) for node in cluster.nodes.values()]
    return all(log == first for log in others)


def test_messages_are_linearizable_with_mixed_faults(tmp_path: Path) -> None:
    need_etcd()
    with (
        network() as net,
        running_cluster(
            tmp_path, net=net, module="tests.cluster.stalled", **{"lease-ttl-ms": "1s"}
        ) as cluster,
    ):
        cluster.leader()
        nodes, first_epoch = [*cluster.nodes.values()], cluster.epoch()
        with client_of(nodes) as ball:
            make_topic(ball)
        addresses = [(node.host, node.ports["http-port"]) for node in nodes]
        with Recording(lambda: addresses, SEED, CLIENTS) as recording:
            times, operations = strike(net, cluster, random.Random(SEED), lambda: len(recording.history.ops))
        with client_of(nodes, timeout_ms=30_000) as ball:
            recording.settle(ball)
        cluster.wait("three equal logs", lambda: are_equal(cluster), 2 * BOUND_S)
        epochs = cluster.epoch() - first_epoch
    verdict = judge(recording.history.ops, tmp_path)
    print(f"faults {dict(times)}, operations during each {dict(operations)}")
    print(f"{epochs} new leaders, {dict(verdict.counts)}")
    assert not verdict.wrong, verdict.text
    assert verdict.counts["release"] and verdict.counts["cancel"]
