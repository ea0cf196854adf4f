"""`timeball cluster`: one cluster of real processes from its creation to its repair, and refusals."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from tests.cli.in_process import run_here
from tests.cluster.etcd_cluster import EtcdCluster
from tests.cluster.processes import CLUSTER, GROUP, Cluster, NodeProcess

pytestmark = pytest.mark.xdist_group("etcd")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three running nodes, without a record."""
    folder = tmp_path_factory.mktemp("cluster")
    with EtcdCluster(folder / "etcd") as etcd:
        cluster = Cluster(folder, etcd)
        try:
            for name in "abc":
                start(cluster, name)
            yield cluster
        finally:
            for node in cluster.nodes.values():
                if node.process is not None:
                    node.kill()


def start(cluster: Cluster, name: str) -> None:
    """Start the process of another node."""
    cluster.nodes[name] = NodeProcess(name, cluster.folder, cluster.etcd.endpoints)
    cluster.nodes[name].start()


def command(cluster: Cluster, *arguments: str, code: int = 0) -> dict[str, object]:
    """Run a command and return its document, or its text on stderr."""
    etcd = ",".join(cluster.etcd.endpoints)
    result = run_here("cluster", *arguments, "--cluster", CLUSTER, "--etcd", etcd, "--json")
    assert result.returncode == code, result.stdout + result.stderr
    return json.loads(result.stdout) if result.stdout else {"said": result.stderr}


def get(node: NodeProcess, path: str) -> tuple[int, str]:
    """Return the status and the text of an HTTP answer of a node."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.ports['http-port']}{path}") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_status(cluster: Cluster) -> dict[str, object]:
    """Return the group as `status` shows it, whatever its exit code."""
    etcd = ",".join(cluster.etcd.endpoints)
    return dict(
        json.loads(run_here("cluster", "status", "--cluster", CLUSTER, "--etcd", etcd, "--json").stdout)
    )


def without_problems(cluster: Cluster) -> dict[str, object]:
    """Wait until `status` reports no problem."""
    status = cluster.wait(
        "no problem", lambda: group if not (group := read_status(cluster))["problems"] else None
    )
    assert isinstance(status, dict)
    return status


def nodes_of(document: dict[str, object]) -> list[str]:
    """Return the names of the nodes of the group's replicas."""
    replicas = document["replicas"]
    assert isinstance(replicas, list)
    return [replica.partition("/")[0] for replica in replicas]


def test_a_cluster_is_created_and_changed_by_commands(cluster: Cluster) -> None:
    planned = command(cluster, "init", "--nodes", "a,b,c", "--dry-run")
    assert planned["dry_run"] and cluster.view().record is None
    assert nodes_of(command(cluster, "init", "--nodes", "a,b,c")) == ["a", "b", "c"]
    assert nodes_of(command(cluster, "init", "--nodes", "c,b,a")) == ["a", "b", "c"], "as it is"
    assert "has a record already" in str(command(cluster, "init", "--nodes", "a,b", code=2)["said"])

    first = cluster.leader()
    group = without_problems(cluster)
    assert group["leader"] == first.name
    with first.client() as ball:
        ball.send("orders", "kept", after="1h")
        assert ball.status()["replica"]["role"] == "leader"
    other_nodes = [node for node in cluster.nodes.values() if node is not first]

    # Every node knows the leader. All other questions are answered by the leader.
    assert get(first, f"/leader/{GROUP}")[0] == 200
    status, text = get(other_nodes[0], f"/leader/{GROUP}")
    assert status == 503 and json.loads(text)["leader"] == first.name
    assert [get(node, "/health/ready")[0] for node in cluster.nodes.values()] == [200, 200, 200]
    assert 'role="leader"} 1.0' in get(first, "/metrics")[1]
    assert 'role="follower"} 1.0' in get(other_nodes[0], "/metrics")[1]
    assert json.loads(get(other_nodes[0], "/v1/topics")[1]) == json.loads(get(first, "/v1/topics")[1])

    # A hand-over is one change of leader, to the one that was named.
    epoch, second = cluster.epoch(), other_nodes[0]
    planned = command(cluster, "hand-over", "--to", second.name, "--dry-run")
    assert (planned["leader"], planned["changed"]) == (second.name, False)
    result = command(cluster, "hand-over", "--to", second.name)
    assert (result["leader"], result["epoch"], result["changed"]) == (second.name, epoch + 1, True)
    assert cluster.leader(epoch) is second

    # A node is added, and another one, which has failed, is removed.
    start(cluster, "d")
    cluster.wait("d has reported", lambda: "d" in cluster.ask("reports"))  # type: ignore[operator]
    assert nodes_of(command(cluster, "add-replica", "d", "--wait", "30s")) == ["a", "b", "c", "d"]
    assert not command(cluster, "add-replica", "d")["changed"]
    third = other_nodes[1]
    third.kill()
    after_removal = command(cluster, "remove-replica", third.name)
    assert third.name not in nodes_of(after_removal)
    without_problems(cluster)

    # Two of three machines are gone for good.
    second.kill()
    first.kill()
    assert "--lose-acknowledged" in str(command(cluster, "force", "d", code=2)["said"])
    assert nodes_of(command(cluster, "force", "d", "--lose-acknowledged")) == ["d"]
    last = cluster.leader(epoch + 1)
    assert last.name == "d"
    with last.client() as ball:
        assert ball.status()["waiting_messages"] == 1
    assert read_status(cluster)["problems"] == [
        "replicas: 1; with fewer than three the loss of one stops the group"
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status"], 4, "name the cluster"),
        (["status", "--cluster", "x"], 4, "--etcd"),
        (["status", "--cluster", "x", "--etcd", "http://127.0.0.1:1"], 3, "etcd"),
        (["force", "a", "--cluster", "x"], 4, "--etcd"),
        (["init", "--cluster", "x", "--etcd", "http://127.0.0.1:1"], 2, "--nodes"),
    ],
)
def test_missing_options_and_an_unreachable_etcd_are_errors(
    arguments: list[str], code: int, text: str
) -> None:
    result = run_here("cluster", *arguments)
    assert (result.returncode, result.stdout) == (code, "") and text in result.stderr
