"""Leaders that run but cannot commit: their disk hangs, or nobody reads what they send. Another node takes over."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, NodeProcess, client_of, running_cluster
from tests.cluster.stalled import FAILS
from tests.cluster.test_etcd_restored import command

from timeball.io.clock import SystemClock
from timeball.monitoring.figures import ReplicaFigures

TOPIC, GROUP = "grey", "readers"
EVERY_MS = 20
AWAY_MS = 5_000  # five leases
CLOCK = SystemClock()


@dataclass
class KeyedSends:
    """One sender that repeats a send after a failure, with a client that knows all nodes."""

    nodes: Sequence[NodeProcess]
    accepted: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    answered_ms: list[int] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send from a thread for the length of a block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._send, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _send(self, ended: threading.Event) -> None:
        """Send one message after the other until `ended` is set."""
        with client_of(self.nodes) as ball:
            while not ended.wait(EVERY_MS / 1_000):
                key = f"m{len(self.answered_ms)}"
                try:
                    self.accepted.append(ball.send(TOPIC, "body", message_id=key, after="1s", retry=True).id)
                except Exception as error:  # of any kind: it is what the test is about
                    self.failures.append(error)
                self.answered_ms.append(CLOCK.wall_ms())

    @property
    def gap_ms(self) -> int:
        """The longest time without an answer."""
        pairs = zip(self.answered_ms, self.answered_ms[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)


def report_of(cluster: Cluster, node: NodeProcess) -> ReplicaFigures | None:
    """Return the last report of a node, or None."""
    reports = cluster.ask("reports")
    assert isinstance(reports, dict)
    report = reports.get(node.name)
    assert report is None or isinstance(report, ReplicaFigures)
    return report


def has_role(cluster: Cluster, node: NodeProcess, role: str) -> bool:
    """Check whether a node reports this role."""
    report = report_of(cluster, node)
    return report is not None and report.role == role


def received(nodes: Sequence[NodeProcess], count: int) -> Counter[str]:
    """Consume until all messages have come and no more do. Return how often each came."""
    counts: Counter[str] = Counter()
    until_ms = CLOCK.wall_ms() + BOUND_S * 1_000
    with client_of(nodes) as ball:
        while CLOCK.wall_ms() < until_ms:
            batch = ball.browse_batch(
                TOPIC, GROUP, max_messages=4_096, wait="1s" if counts.total() < count else "200ms"
            )
            if batch.num_rows == 0 and counts.total() >= count:
                break
            counts.update(batch.column("unique_key").to_pylist())
            ball.commit(TOPIC, GROUP)
    return counts


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_leader_whose_disk_hangs_steps_down_and_follows_later(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, module="tests.cluster.stalled", **{"lease-ttl-ms": "1s"}) as cluster:
        leader, epoch = cluster.leader(), cluster.epoch()
        nodes = [*cluster.nodes.values()]
        sends = KeyedSends(nodes)
        with sends.running():
            cluster.wait("some sends are accepted", lambda: len(sends.accepted) > 20)
            leader.stalled.touch()
            successor = cluster.leader(epoch)
            accepted = len(sends.accepted)
            cluster.wait("the next leader accepts sends", lambda: len(sends.accepted) > accepted + 20)
            assert successor is not leader
            cluster.wait("the old leader reports why", lambda: has_role(cluster, leader, "stopped"))
            report = report_of(cluster, leader)
            assert report is not None and report.problem.startswith("its disk has not answered for ")
            with leader.client() as ball:
                ball.send(TOPIC, "body", message_id="forwarded", retry=True)  # it forwards to the next leader
            leader.stalled.unlink()
            cluster.wait("the old leader follows", lambda: has_role(cluster, leader, "follower"))
            assert report_of(cluster, leader).problem == ""  # type: ignore[union-attr]
        print(f"{len(sends.accepted)} accepted, longest time without an answer {sends.gap_ms} ms")
        assert not sends.failures
        assert received(nodes, len(sends.accepted) + 1) == Counter([*sends.accepted, "forwarded"])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_candidate_whose_disk_hangs_releases_the_group_and_follows_later(tmp_path: Path) -> None:
    """Its disk hangs in an idle group, so its promise is the first sync that shows it."""
    need_etcd()
    with running_cluster(tmp_path, module="tests.cluster.stalled", **{"lease-ttl-ms": "1s"}) as cluster:
        leader, epoch = cluster.leader(), cluster.epoch()
        candidate, third = (node for node in cluster.nodes.values() if node is not leader)
        third.kill()
        candidate.stalled.touch()
        leader.kill()
        cluster.wait("the candidate is the holder", lambda: cluster.epoch() > epoch)
        third.start()
        leader.start()
        successor = cluster.leader(epoch + 1)
        assert successor is not candidate
        with candidate.client() as ball:
            ball.send(TOPIC, "body", message_id="forwarded", retry=True)
        candidate.stalled.unlink()
        cluster.wait("the candidate follows", lambda: has_role(cluster, candidate, "follower"))
        assert received([successor], 1) == Counter(["forwarded"])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_keyed_sends_go_to_another_node_when_a_leader_s_disk_fails(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, module="tests.cluster.stalled", **{"lease-ttl-ms": "1s"}) as cluster:
        leader, epoch = cluster.leader(), cluster.epoch()
        nodes = [*cluster.nodes.values()]
        sends = KeyedSends(nodes)
        with sends.running():
            cluster.wait("some sends are accepted", lambda: len(sends.accepted) > 20)
            leader.stalled.write_text(FAILS)
            cluster.leader(epoch)
            accepted = len(sends.accepted)
            cluster.wait("the next leader accepts sends", lambda: len(sends.accepted) > accepted + 20)
        assert leader.process is not None and leader.process.wait(BOUND_S) == 5, (
            "only an operator can repair it"
        )
        print(f"{len(sends.accepted)} accepted, longest time without an answer {sends.gap_ms} ms")
        assert not sends.failures
        assert received(nodes, len(sends.accepted)) == Counter(sends.accepted)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_leader_continues_without_etcd_and_holds_the_group_again_afterwards(tmp_path: Path) -> None:
    """The leader continues without etcd, and creates the holder's key again, which has ended with its lease."""
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        leader, epoch = cluster.leader(), cluster.epoch()
        nodes = [*cluster.nodes.values()]
        sends = KeyedSends(nodes)
        with sends.running():
            cluster.wait("some sends are accepted", lambda: len(sends.accepted) > 20)
            for member in cluster.etcd.members:
                member.stop()
            stopped_ms = CLOCK.wall_ms()
            cluster.wait("the lease ended long ago", lambda: CLOCK.wall_ms() - stopped_ms > AWAY_MS)
            status = command(
                cluster, "status", "--endpoint", f"http://{leader.host}:{leader.ports['http-port']}"
            )
            assert status.returncode == 6 and "The leader serves" in status.stdout, status
            dead = command(cluster, "status", "--endpoint", "http://127.0.0.1:1")
            assert dead.returncode == 3 and "etcd has not answered" in dead.stderr, dead
            for member in cluster.etcd.members:
                member.go_on()
            cluster.etcd.wait_ready()
            cluster.wait("the leader holds the group", lambda: cluster.view().leader == leader.name)
            accepted = len(sends.accepted)
            cluster.wait("it accepts sends", lambda: len(sends.accepted) > accepted + 100)
        print(f"{len(sends.accepted)} accepted, longest time without an answer {sends.gap_ms} ms")
        assert cluster.epoch() == epoch and cluster.view().leader == leader.name
        assert not sends.failures
        assert received(nodes, len(sends.accepted)) == Counter(sends.accepted)
