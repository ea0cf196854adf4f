"""A node of a cluster as a process: it forwards, leads, hands over, and restarts. tests/cluster tests the rest."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.besieged import replicas_of, served
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import CLUSTER, GROUP, Cluster, NodeProcess, running_cluster

from timeball.cluster.protocol.messages import Hello, encode

pytestmark = pytest.mark.xdist_group("etcd")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_etcd()
    with running_cluster(tmp_path_factory.mktemp("nodes"), **{"lease-ttl-ms": "1s"}) as running:
        with running.leader().client(timeout_ms=BOUND_S * 1_000) as ball:
            ball.create_topic("orders", 1)  # here, as each test may be the only one of its process
        yield running


def followers(cluster: Cluster, leader: NodeProcess) -> list[NodeProcess]:
    return [node for node in cluster.nodes.values() if node is not leader]


def test_every_node_forwards_requests_to_the_leader(cluster: Cluster) -> None:
    cluster.leader()
    for node in cluster.nodes.values():
        with node.client() as ball:
            ball.send("orders", node.name.encode(), message_id=node.name)
            assert "orders" in ball.topics()


def test_the_status_lists_the_nodes_of_the_group_with_the_leader_first(cluster: Cluster) -> None:
    leader = cluster.leader()
    addresses = {f"127.0.0.1:{node.ports['port']}" for node in cluster.nodes.values()}
    with followers(cluster, leader)[0].client() as ball:
        status = ball.status()
    [group] = status["groups"]
    assert status["group"] == group["group"] == GROUP
    assert group["addresses"][0] == leader.endpoint.removeprefix("grpc://")
    assert set(group["addresses"]) == addresses


def test_a_leader_hands_over_after_sigterm_and_joins_again_as_the_same_replica(cluster: Cluster) -> None:
    leader = cluster.leader()
    epoch = served(leader)
    process = leader.process
    assert process is not None
    leader.kill(signal.SIGTERM)
    assert process.returncode == 0
    successor = cluster.leader(epoch)
    assert successor is not leader and served(successor) == epoch + 1
    with successor.client() as ball:
        assert "orders" in ball.topics()
    leader.start()
    cluster.wait("it is the same replica", lambda: len(replicas_of(leader)) == 2)
    assert len(set(replicas_of(leader))) == 1


def test_a_leader_without_a_majority_starts_again_as_a_follower_in_its_process(cluster: Cluster) -> None:
    leader = cluster.leader()
    epoch, starts = served(leader), len(replicas_of(leader))
    process = leader.process
    assert process is not None
    for node in followers(cluster, leader):
        node.kill(signal.SIGSTOP)
    cluster.wait("it begins anew", lambda: len(replicas_of(leader)) > starts)
    assert process.poll() is None and leader.events()[-1]["pid"] == process.pid
    for node in followers(cluster, leader):
        node.kill(signal.SIGCONT)
    with cluster.leader(epoch).client(timeout_ms=BOUND_S * 1_000) as ball:
        assert "orders" in ball.topics()


def test_a_replica_of_another_cluster_gets_no_answer_and_deposes_no_leader(cluster: Cluster) -> None:
    """An address may be used again by another cluster with the same group, whose epochs are higher."""
    leader = cluster.leader()
    epoch = served(leader)
    answers = {}
    for name, hello in {
        "this cluster": Hello(1, f"{CLUSTER}/{GROUP}", "x/1"),
        "another": Hello(1_000, f"another/{GROUP}", "x/1"),
    }.items():
        with socket.create_connection(("127.0.0.1", leader.ports["replication-port"]), BOUND_S) as connection:
            connection.sendall(b"".join(encode(hello)))
            answers[name] = connection.recv(1)
    assert answers["this cluster"], "the control: an old epoch of this cluster is answered with a refusal"
    assert answers["another"] == b""
    assert served(cluster.leader()) == epoch


def test_a_node_whose_port_is_in_use_ends_with_exit_code_4_and_names_the_port(
    cluster: Cluster, tmp_path: Path
) -> None:
    leader = cluster.leader()
    other = NodeProcess("d", tmp_path, leader.etcd, ports=dict(leader.ports))
    other.start()
    assert other.process is not None
    try:
        assert other.process.wait(BOUND_S) == 4
    finally:
        other.process.kill()  # the leader may have left its ports meanwhile
    assert str(leader.ports["replication-port"]) in other.text and "Traceback" not in other.text
