"""Replicas whose disks are full: one acknowledges nothing until it has space, and three lose nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.full import fill
from tests.cluster.processes import Cluster, NodeProcess, client_of, pulled_ids, running_cluster
from tests.cluster.trio import Trio, running_trio

from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.replica import Role
from timeball.model.errors import OverLimit, TimeballError
from timeball.monitoring.figures import ReplicaFigures

TOPIC = "full"
BODY = b"x" * 200_000


@contextmanager
def full_disks(*folders: Path) -> Iterator[None]:
    """Let the disks with these folders be full."""

    def is_full(fd: int) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return any(path.is_relative_to(folder) for folder in folders)

    with pytest.MonkeyPatch.context() as patch:
        for module, name, function in fill(is_full):
            patch.setattr(module, name, function)
        yield


def test_a_follower_with_a_full_disk_acknowledges_nothing_until_it_has_space(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        follower = trio.others(leader)[0]
        await leader.append(1)
        with full_disks(tmp_path / follower.name):
            for number in range(40):  # over several segments
                await leader.append(10 + 10 * number, 10)
            await trio.wait_until(lambda: follower.thread.problem, "it reports its disk")
            assert follower.thread.problem.startswith("acknowledges nothing: disk full")
            await trio.wait_until(
                lambda: follower.name not in lead_peers(leader), "the leader does not count on it"
            )
            # It still votes.
            promised = follower.thread.state.promised
            other = trio.others(leader)[1]
            leader.thread.tell(on.HandOver(other.name))
            await trio.wait_until(
                lambda: follower.thread.state.promised > promised, "it has promised the epoch"
            )
            await leader.crash()
            await leader.start()
            successor = await trio.leader(leader.epochs[-1])
            assert successor is other and not follower.ended and follower.role is Role.FOLLOWER
        await successor.append(1_000)
        await trio.wait_until(lambda: not follower.thread.problem, "it has found the space")
        await trio.wait_for_equal_logs()

    def lead_peers(leader: object) -> dict[str, object]:
        """Return the other replicas that a leader hears."""
        lead = leader.thread.state.lead  # type: ignore[attr-defined]
        return lead.peers if lead else {}

    async def within() -> None:
        async with running_trio(tmp_path) as trio:
            await scenario(trio)

    asyncio.run(asyncio.wait_for(within(), 4 * BOUND_S))


def problem_of(cluster: Cluster, node: NodeProcess) -> str:
    """Return the problem that a node reports, or ""."""
    reports = cluster.ask("reports")
    assert isinstance(reports, dict)
    report = reports.get(node.name)
    return report.problem if isinstance(report, ReplicaFigures) else ""


def send_until_refused(nodes: list[NodeProcess], sent: list[str]) -> OverLimit:
    """Send until the group has no space, and return the refusal."""
    with client_of(nodes) as ball:
        while True:
            try:
                sent.append(ball.send(TOPIC, BODY, retry=True).id)
            except OverLimit as error:
                return error


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_three_full_disks_refuse_sends_and_lose_nothing(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, module="tests.cluster.full", **{"lease-ttl-ms": "1s"}) as cluster:
        nodes, sent = [*cluster.nodes.values()], list[str]()
        leader, epoch = cluster.leader(), cluster.epoch()
        for node in nodes:
            node.full.touch()
        assert "disk full" in str(send_until_refused(nodes, sent))
        leader.kill()
        cluster.leader(epoch)  # the vote needs no space
        leader.start()
        assert "disk full" in str(send_until_refused(nodes, sent))
        for node in nodes:
            node.full.unlink()

        def accepts() -> bool:
            with client_of(nodes) as ball:
                try:
                    sent.append(ball.send(TOPIC, BODY, message_id="after", retry=True).id)
                except TimeballError:
                    return False
            return True

        cluster.wait("the group has noticed the free space", accepts)
        assert sorted(pulled_ids(nodes, TOPIC, len(sent))) == sorted(sent)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_follower_reports_a_full_disk(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, module="tests.cluster.full", **{"lease-ttl-ms": "1s"}) as cluster:
        nodes, leader = [*cluster.nodes.values()], cluster.leader()
        follower = next(node for node in nodes if node is not leader)
        follower.full.touch()
        with client_of(nodes) as ball:
            sent = [ball.send(TOPIC, BODY, retry=True).id for _ in range(60)]  # more than a segment
        cluster.wait("it reports its disk", lambda: "disk full" in problem_of(cluster, follower))
        follower.full.unlink()
        cluster.wait("it has found the space", lambda: not problem_of(cluster, follower))
        assert sorted(pulled_ids(nodes, TOPIC, len(sent))) == sorted(sent)
