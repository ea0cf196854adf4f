"""etcd loses its data, or is restored from a copy that is older than the last election, or the last change of the set.

One command renews the record.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.cluster.processes import (
    CLUSTER,
    GROUP,
    Cluster,
    NodeProcess,
    client_of,
    node_of,
    pulled_ids,
    running_cluster,
)

TOPIC = "restored"


def stop(etcd: EtcdCluster) -> None:
    """Kill all members."""
    for member in etcd.members:
        member.kill()


def start(etcd: EtcdCluster) -> None:
    """Start all members, and wait until they answer."""
    for member in etcd.members:
        member.start()
    etcd.wait_ready()


def copy(etcd: EtcdCluster, suffix: str) -> None:
    """Copy the data of the members, which must not run, to folders with this suffix."""
    for member in etcd.members:
        shutil.copytree(etcd.folder / member.name, etcd.folder / f"{member.name}{suffix}")


def restore(etcd: EtcdCluster, suffix: str) -> None:
    """Give the members their copies, or no data for "" as the suffix."""
    for member in etcd.members:
        shutil.rmtree(etcd.folder / member.name)
        if suffix:
            shutil.copytree(etcd.folder / f"{member.name}{suffix}", etcd.folder / member.name)


def command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `timeball cluster`."""
    return subprocess.run(
        [sys.executable, "-m", "timeball", "cluster", *arguments, "--cluster", CLUSTER,
         "--etcd", ",".join(cluster.etcd.endpoints)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def promises(cluster: Cluster) -> set[int]:
    """Collect the promised epochs of all nodes. Empty until all nodes have reported."""
    reports = cluster.ask("reports")
    assert isinstance(reports, dict) and len(reports) <= len(cluster.nodes)
    epochs = [report.promised for report in reports.values()]
    return set(epochs) if len(epochs) == len(cluster.nodes) else set()


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
        # It is refused until a follower has reported that it is connected.
        cluster.wait(
            "the lead is handed over",
            lambda: command(cluster, "hand-over", "--group", GROUP).returncode == 0,
        )
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
        advice = f"timeball cluster init --group {GROUP} --nodes a,b,c' {'renews' if suffix else 'makes'} it"
        cluster.wait("the status names the command", lambda: advice in command(cluster, "status").stdout)
        process = command(cluster, "init", "--group", GROUP, "--nodes", "a,b,c")
        assert process.returncode == 0, process.stderr
        cluster.leader(epoch)
        assert sorted(pulled_ids(nodes, TOPIC, len(sent))) == sorted(sent)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_copy_of_before_a_change_of_the_set_elects_nobody(tmp_path: Path) -> None:
    """The set in the copy does not have all messages, and the epoch is the same."""
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        stop(cluster.etcd)
        copy(cluster.etcd, ".old")
        start(cluster.etcd)
        cluster.wait("one node holds the group", lambda: cluster.view().leader)
        new = NodeProcess("d", tmp_path, cluster.etcd.endpoints, {"lease-ttl-ms": "1s"})
        cluster.nodes["d"] = new
        new.start()
        cluster.wait("the new node reports", lambda: "d" in cluster.ask("reports"))  # type: ignore[operator]
        leader = cluster.view().leader
        removed = next(name for name in "abc" if name != leader)
        for words in (("add-replica", "d"), ("remove-replica", removed)):
            process = command(cluster, *words, "--group", GROUP)
            assert process.returncode == 0, process.stderr
        record, nodes = cluster.view().record, [*cluster.nodes.values()]
        assert record is not None and not record.former
        with client_of(nodes) as ball:
            sent = [ball.send(TOPIC, "body", after="1s", retry=True).id for _ in range(50)]
        stop(cluster.etcd)
        restore(cluster.etcd, ".old")
        for node in nodes:
            node.kill()
        start(cluster.etcd)
        for node in nodes:
            node.start()
        last = ",".join(map(node_of, record.replicas))
        advice = f"timeball cluster init --group {GROUP} --nodes {last}' renews it"
        cluster.wait("the status names the last set", lambda: advice in command(cluster, "status").stdout)
        process = command(cluster, "init", "--group", GROUP, "--nodes", last)
        assert process.returncode == 0, process.stderr
        cluster.leader(record.epoch)
        assert sorted(pulled_ids(nodes, TOPIC, len(sent))) == sorted(sent)
