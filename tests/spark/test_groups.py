"""Tests of the groups of a cluster in timeball.spark.endpoint, and of endpoints that are pinned to one group."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.cluster.processes import Cluster, NodeProcess
from tests.spark.traffic import send
from tests.spark.two_groups import two_groups

from timeball.cluster.protocol.replica import Record
from timeball.model.answers import ClusterGroup, LogStatus, Status, TableStatus
from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.spark.endpoint import (
    Endpoint,
    Group,
    group_statuses,
    group_table_uri,
    groups_of,
    pin_to_group,
    query_name,
    read_groups,
    split_endpoint,
)
from timeball.spark.source.log_reader import LogReader
from timeball.spark.source.options import read_options

TWO = [ClusterGroup("g1", ["a:1", "b:1"]), ClusterGroup("g2", ["c:1"])]


def status(group: str, groups: list[ClusterGroup] | None) -> Status:
    """The answer of a node of `group`. `groups` is None when the node does not know them yet."""
    return Status(1, LogStatus(1, 1, 1), TableStatus("file:///x", 0), 1, 1, group=group, groups=groups)


def test_endpoint_is_split_into_addresses_and_group() -> None:
    assert split_endpoint("grpc://a:1,b:1#g2") == ("grpc://a:1,b:1", "g2")
    assert split_endpoint("grpc://a:1") == ("grpc://a:1", "")
    assert pin_to_group("grpc://a:1#g1", "g2") == "grpc://a:1#g2"
    assert query_name("compact", "grpc://a:1") == "compact"
    assert query_name("compact", "grpc://a:1#g2") == "compact-g2"


def test_groups_are_listed_with_their_nodes_and_the_named_group_first() -> None:
    assert groups_of(status("", []), "grpc://a:1") == [Group("", "grpc://a:1")]
    assert groups_of(status("g1", TWO[:1]), "grpc://x:1,a:1") == [Group("g1", "grpc://x:1,a:1")], "as named"
    g1, g2 = Group("g1", "grpc+tls://a:1,b:1#g1"), Group("g2", "grpc+tls://c:1#g2")
    assert groups_of(status("g2", TWO), "grpc+tls://c:1") == [g2, g1]
    assert groups_of(status("g2", TWO), "grpc+tls://a:1#g2") == [g2]
    with pytest.raises(NotFound, match="no group 'g3': there are g1, g2"):
        groups_of(status("g1", TWO), "grpc://a:1#g3")
    with pytest.raises(Unavailable):
        groups_of(status("g1", None), "grpc://a:1")


def test_each_group_has_a_table_of_its_own() -> None:
    assert group_table_uri("--ledger", None, "g1", 2) is None
    assert group_table_uri("--ledger", "/x/ledger", "g1", 1) == "/x/ledger"
    assert group_table_uri("--ledger", "/x/{group}/ledger", "g2", 2) == "/x/g2/ledger"
    with pytest.raises(SetupError, match="--ledger=/x/ledger: each of the 2 groups has a table of its own"):
        group_table_uri("--ledger", "/x/ledger", "g1", 2)


def test_pinned_endpoint_calls_only_its_group(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        send(groups.other.endpoint, 5)
        with Endpoint(pin_to_group(groups.endpoint, "g2"), patience_s=5) as broker:
            first = broker.reserve(10)  # before any other call
            assert broker.status().group == "g2"
        with Endpoint(groups.other.endpoint, patience_s=5) as broker:
            assert broker.reserve(1) >= first + 10
        with Endpoint(pin_to_group(groups.endpoint, "g9"), patience_s=5) as broker:
            with pytest.raises(NotFound, match="no group 'g9': there are g1, g2"):
                broker.reserve(1)
        assert [group.name for group in read_groups(groups.other.endpoint)] == ["g2", "g1"]
        result = {group.name: each.log.durable_seq for group, each in group_statuses(groups.endpoint)}
        assert result["g2"] >= result["g1"] + 5 and set(result) == {"g1", "g2"}


def test_a_broker_without_a_cluster_has_no_groups(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.leave()
        assert read_groups(groups.endpoint) == [Group("", groups.endpoint)]
        with pytest.raises(NotFound, match="no group 'g1': this broker belongs to no cluster"):
            read_groups(pin_to_group(groups.endpoint, "g1"))


@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
def test_reads_of_a_real_cluster_have_both_groups(tmp_path: Path) -> None:
    """Two nodes, each the only replica of its group, and etcd: whichever is named, both are read."""
    need_etcd()
    with EtcdCluster(tmp_path / "etcd") as etcd:
        nodes = {
            name: NodeProcess(name, tmp_path, etcd.endpoints, {"group": group})
            for name, group in (("a", "g1"), ("b", "g2"))
        }
        cluster = Cluster(tmp_path, etcd, nodes)
        try:
            for node in nodes.values():
                node.start()
            cluster.wait("both have registered", lambda: len(cluster.ask("nodes")) == 2)
            for known in cluster.ask("nodes").values():
                cluster.ask("change", known.group, 0, Record(0, "", (known.replica,)))
            for node, rows in zip(nodes.values(), (5, 3), strict=True):
                cluster.wait("it leads", partial(leads, node))
                send(node.endpoint, rows)
            for node in nodes.values():
                cluster.wait("it knows both groups", partial(knows_both, node.endpoint))
                assert read_scheduled(node.endpoint) == {"g1": 5, "g2": 3}
                assert read_scheduled(pin_to_group(node.endpoint, "g2")) == {"g2": 3}
        finally:
            for node in nodes.values():
                if node.process is not None:
                    node.kill()


def leads(node: NodeProcess) -> bool:
    return any(event["event"] == "leads" for event in node.events())


def knows_both(endpoint: str) -> bool:
    return {group.name for group in read_groups(endpoint)} == {"g1", "g2"}


def read_scheduled(endpoint: str) -> dict[str, int]:
    """Count the scheduled messages of each group, as the tasks of a read see them."""
    reader = LogReader(read_options({"endpoint": endpoint, "kinds": "scheduled", "columns": "group"}))
    result: dict[str, int] = {}
    for part in reader.partitions():
        for batch in reader.read(part):
            for name in batch.column("group").to_pylist():
                result[name] = result.get(name, 0) + 1
    return result
