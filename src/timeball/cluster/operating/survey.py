"""The state of a cluster from the coordinator and the nodes' reports, with its problems as sentences for operators.

Reports are up to 1 s old. The lag of each replica comes from the leader's report, so all lags are of the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Node
from timeball.cluster.protocol.replica import majority, node_of
from timeball.monitoring.replica_figures import PeerFigures, ReplicaFigures
from timeball.monitoring.replica_groups import ReplicaGroup, ReplicaState

OFFSET_MS_MAX = 500.0  # if such a clock is ahead and its node leads, it releases messages this much too early
LAG_ROWS_MAX = 1_000_000


async def survey(coordinator: Coordinator) -> list[ReplicaGroup]:
    """Describe all groups, including groups without a record."""
    views, nodes = await coordinator.read_all(), await coordinator.nodes()
    reports = await coordinator.reports()
    known = set(views) | {node.group for node in nodes.values() if node.group}
    return [_group(name, views.get(name), nodes, reports) for name in sorted(known)]


def _group(
    name: str, view: GroupView | None, nodes: dict[str, Node], reports: dict[str, ReplicaFigures]
) -> ReplicaGroup:
    record = view.record if view is not None else None
    standing = view.leader if view is not None else ""
    led = reports.get(standing)
    is_sealing = (
        record is not None and led is not None and led.epoch == record.epoch and led.role == "sealing"
    )
    leader = "" if is_sealing else standing
    in_record = record.replicas if record is not None else ()
    others = [node.replica for node in nodes.values() if node.group == name and node.replica not in in_record]
    replicas = [
        _replica(each, each in in_record, nodes, reports, led) for each in (*in_record, *sorted(others))
    ]
    return ReplicaGroup(
        name,
        leader,
        record.epoch if record else 0,
        record.generation if record else 0,
        replicas,
        view.asked.wish.describe() if view is not None and view.asked is not None else "",
        list(_problems(name, view, replicas, led, leader)),
    )


def _replica(
    replica: str,
    is_in: bool,
    nodes: dict[str, Node],
    reports: dict[str, ReplicaFigures],
    led: ReplicaFigures | None,
) -> ReplicaState:
    name = node_of(replica)
    node, report = nodes.get(name), reports.get(name)
    if node is None or node.replica != replica or report is None or report.replica != replica:
        return ReplicaState(
            name, replica, "gone" if node is None or node.replica != replica else "silent", is_in
        )
    peer = _peer(led, report)
    lag = None if peer is None or led is None else max(0, led.log_seq - peer.acked_seq)
    return ReplicaState(
        name, replica, report.role, is_in, report.log_seq, report.committed_seq, report.applied_seq, lag,
        None if peer is None else peer.clock_offset_ms, report.version, report.since_ms,
    )  # fmt: skip


def _peer(led: ReplicaFigures | None, report: ReplicaFigures) -> PeerFigures | None:
    """Find the leader's figures of a replica. The leader itself has lag 0 and clock offset 0."""
    if led is None:
        return None
    if led.replica == report.replica:
        return PeerFigures(led.replica, led.log_seq, 0.0)
    peer = led.peers.get(node_of(report.replica))
    return peer if peer is not None and peer.replica == report.replica else None


def _problems(
    group: str,
    view: GroupView | None,
    replicas: list[ReplicaState],
    led: ReplicaFigures | None,
    leader: str,
) -> Iterator[str]:
    if view is None or view.record is None:
        names = ",".join(each.node for each in replicas)
        yield f"group {group} has no record yet: 'timeball cluster init --group {group} --nodes {names}' makes it"
        return
    members = [each for each in replicas if each.is_in_record]
    there = [each for each in members if each.role not in ("gone", "silent")]
    if not leader:
        yield f"group {group} has no leader: nothing is accepted or released"
    if len(there) < majority(view.record.replicas):
        yield (
            f"{len(there)} of {len(members)} replicas run, and {majority(view.record.replicas)} are needed: start the "
            "others; if their disks are gone for good, see 'timeball cluster force --help'"
        )
    for each in replicas:
        yield from _of_replica(each, led)
    if len(members) < 3:
        yield f"replicas: {len(members)}; with fewer than three the loss of one stops the group"
    versions = sorted({each.version for each in replicas if each.version})
    if len(versions) > 1:
        yield f"replicas run versions {', '.join(versions)}: finish the upgrade"


def _of_replica(each: ReplicaState, led: ReplicaFigures | None) -> Iterator[str]:
    if each.role == "gone":
        yield f"replica {each.node} ({each.replica}) is missing: its node does not run, or does not reach etcd"
    elif each.role == "silent":
        yield f"replica {each.node} has not reported yet"
    elif not each.is_in_record:
        yield (
            f"node {each.node} is a learner and counts for nothing yet: 'timeball cluster add-replica {each.node}' "
            "makes it a replica"
        )
    elif led is not None and each.lag_rows is None:
        yield f"replica {each.node} is not connected with the leader: look at its --replication-port"
    elif each.lag_rows is not None and each.lag_rows > LAG_ROWS_MAX:
        yield f"replica {each.node} is {each.lag_rows:,} rows behind"
    if each.clock_offset_ms is not None and abs(each.clock_offset_ms) > OFFSET_MS_MAX:
        yield f"the clock of {each.node} is {each.clock_offset_ms / 1_000:+.1f} s off the leader's: look at its NTP"
