"""The state of a cluster, from the coordinator and the nodes' reports, with a sentence for each problem.

Reports are up to 1 s old. The lag of each replica comes from the leader's report, so all lags are of the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Node
from timeball.cluster.protocol.replica import majority, node_of
from timeball.monitoring.replica_figures import PeerFigures, ReplicaFigures
from timeball.monitoring.replica_groups import ReplicaGroup, ReplicaState

OFFSET_MS_MAX = 500.0  # a leader whose clock is ahead releases messages too early by this much
LAG_ROWS_MAX = 1_000_000


async def survey(coordinator: Coordinator) -> list[ReplicaGroup]:
    """Describe all groups by name, including those that have nodes but no record yet."""
    views, nodes = await coordinator.read_all(), await coordinator.nodes()
    reports = await coordinator.reports()
    names = set(views) | {node.group for node in nodes.values() if node.group}
    return [_describe_group(name, views.get(name), nodes, reports) for name in sorted(names)]


def _describe_group(
    name: str, view: GroupView | None, nodes: dict[str, Node], reports: dict[str, ReplicaFigures]
) -> ReplicaGroup:
    record = view.record if view is not None else None
    holder = view.leader if view is not None else ""
    lead_report = reports.get(holder)
    is_sealing = (
        record is not None
        and lead_report is not None
        and lead_report.epoch == record.epoch
        and lead_report.role == "sealing"
    )
    leader = "" if is_sealing else holder
    members = record.replicas if record is not None else ()
    others = [node.replica for node in nodes.values() if node.group == name and node.replica not in members]
    replicas = [
        _describe_replica(replica, replica in members, nodes, reports, lead_report)
        for replica in (*members, *sorted(others))
    ]
    return ReplicaGroup(
        name,
        leader,
        record.epoch if record else 0,
        record.generation if record else 0,
        replicas,
        view.pending_wish.wish.describe() if view is not None and view.pending_wish is not None else "",
        list(_group_problems(name, view, replicas, lead_report, leader)),
    )


def _describe_replica(
    replica: str,
    is_in_record: bool,
    nodes: dict[str, Node],
    reports: dict[str, ReplicaFigures],
    lead_report: ReplicaFigures | None,
) -> ReplicaState:
    name = node_of(replica)
    node, report = nodes.get(name), reports.get(name)
    if node is None or node.replica != replica or report is None or report.replica != replica:
        return ReplicaState(
            name, replica, "gone" if node is None or node.replica != replica else "silent", is_in_record
        )
    peer = _leader_figures_of(lead_report, report)
    lag = None if peer is None or lead_report is None else max(0, lead_report.log_seq - peer.acked_seq)
    return ReplicaState(
        name, replica, report.role, is_in_record, report.log_seq, report.committed_seq, report.applied_seq, lag,
        None if peer is None else peer.clock_offset_ms, report.version, report.since_ms,
    )  # fmt: skip


def _leader_figures_of(lead_report: ReplicaFigures | None, report: ReplicaFigures) -> PeerFigures | None:
    """Find the leader's figures of a replica. The leader itself has lag 0 and clock offset 0."""
    if lead_report is None:
        return None
    if lead_report.replica == report.replica:
        return PeerFigures(lead_report.replica, lead_report.log_seq, 0.0)
    peer = lead_report.peers.get(node_of(report.replica))
    return peer if peer is not None and peer.replica == report.replica else None


def _group_problems(
    group: str,
    view: GroupView | None,
    replicas: list[ReplicaState],
    lead_report: ReplicaFigures | None,
    leader: str,
) -> Iterator[str]:
    if view is None or view.record is None:
        names = ",".join(replica.node for replica in replicas)
        yield f"group {group} has no record yet: 'timeball cluster init --group {group} --nodes {names}' makes it"
        return
    members = [replica for replica in replicas if replica.is_in_record]
    running = [replica for replica in members if replica.role not in ("gone", "silent")]
    if not leader:
        yield f"group {group} has no leader: nothing is accepted or released"
    if len(running) < majority(view.record.replicas):
        yield (
            f"{len(running)} of {len(members)} replicas run, and {majority(view.record.replicas)} are needed: start "
            "the others; if their disks are gone for good, see 'timeball cluster force --help'"
        )
    for replica in replicas:
        yield from _replica_problems(replica, lead_report)
    if len(members) < 3:
        yield f"replicas: {len(members)}; with fewer than three the loss of one stops the group"
    versions = sorted({replica.version for replica in replicas if replica.version})
    if len(versions) > 1:
        yield f"replicas run versions {', '.join(versions)}: finish the upgrade"


def _replica_problems(replica: ReplicaState, lead_report: ReplicaFigures | None) -> Iterator[str]:
    if replica.role == "gone":
        yield f"replica {replica.node} ({replica.replica}) is missing: its node does not run, or does not reach etcd"
    elif replica.role == "silent":
        yield f"replica {replica.node} has not reported yet"
    elif not replica.is_in_record:
        yield (
            f"node {replica.node} is a learner and counts for nothing yet: 'timeball cluster add-replica "
            f"{replica.node}' makes it a replica"
        )
    elif lead_report is not None and replica.lag_rows is None:
        yield f"replica {replica.node} is not connected with the leader: look at its --replication-port"
    elif replica.lag_rows is not None and replica.lag_rows > LAG_ROWS_MAX:
        yield f"replica {replica.node} is {replica.lag_rows:,} rows behind"
    if replica.clock_offset_ms is not None and abs(replica.clock_offset_ms) > OFFSET_MS_MAX:
        yield (
            f"the clock of {replica.node} is {replica.clock_offset_ms / 1_000:+.1f} s off the leader's: "
            "look at its NTP"
        )
