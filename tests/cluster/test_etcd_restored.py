"""etcd loses its data, or is restored from a copy older than the last election: one command renews the record."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.cluster.processes import CLUSTER, GROUP, Cluster, client_of, running_cluster

TOPIC = "restored"


def stop(etcd: EtcdCluster) -> None:
    for member in etcd.members:
        member.kill()


def start(etcd: EtcdCluster) -> None:
    for member in etcd.members:
        member.start()
    etcd.wait_ready()


def copy(etcd: EtcdCluster, suffix: str) -> None:
    for member in etcd.members:
        shutil.copytree(etcd.folder / member.name, etcd.folder / f"{member.name}{suffix}")


def restore(etcd: EtcdCluster, suffix: str) -> None:
    """Give the members their copies, or no data for "" as the suffix."""
    for member in etcd.members:
        shutil.rmtree(etcd.folder / member.name)
        if suffix:
            shutil.copytree(etcd.folder / f"{member.name}{suffix}", etcd.folder / member.name)


def command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "timeball", "cluster", *arguments, "--cluster", CLUSTER,
         "--etcd", ",".join(cluster.etcd.endpoints)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def promises(cluster: Cluster) -> set[int]:
    reports = cluster.ask("reports")
    assert isinstance(reports, dict) and len(reports) <= len(cluster.nodes)
    found = [report.promised for report in reports.values()]
    return set(found) if len(found) == len(cluster.nodes) else set()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize(
    ("suffix", "restarts"),
    [(".old", True), (".old", False), ("", False)],
    ids=["restored, nodes restarted", "restored", "lost"],
)
def test_one_command_renews_the_group_s_record(tmp_path: Path, suffix: str, restarts: bool) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        nodes = [*cluster.nodes.values()]
        cluster.leader()
        stop(cluster.etcd)
        copy(cluster.etcd, ".old")
        start(cluster.etcd)
        cluster.wait("one node holds the group", lambda: cluster.view().leader)
        epoch = cluster.epoch()
        done = command(cluster, "hand-over", "--group", GROUP)
        assert done.returncode == 0, done.stderr
        cluster.leader(epoch)
        cluster.wait("all have promised the epoch", lambda: promises(cluster) == {cluster.epoch()})
        with client_of(nodes) as ball:
            sent = [ball.send(TOPIC, "body", after="1s", retry=True).id for _ in range(50)]
        epoch = cluster.epoch()
        stop(cluster.etcd)
        restore(cluster.etcd, suffix)
        if restarts:
            for node in nodes:
                node.kill()
        start(cluster.etcd)
        if restarts:
            for node in nodes:
                node.start()
        said = f"timeball cluster init --group {GROUP} --nodes a,b,c' {'renews' if suffix else 'makes'} it"
        cluster.wait("the status names the command", lambda: said in command(cluster, "status").stdout)
        done = command(cluster, "init", "--group", GROUP, "--nodes", "a,b,c")
        assert done.returncode == 0, done.stderr
        cluster.leader(epoch)
        with client_of(nodes) as ball:
            received: list[str] = []
            while len(received) < len(sent):
                messages = ball.pull(TOPIC, "readers", wait="1s")
                received += [message.id for message in messages]
                ball.ack(messages)
        assert sorted(received) == sorted(sent)
