"""The metrics of one replica of a cluster.

A follower has only these metrics. Only the leader has the metrics of the broker.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from timeball.monitoring.replica_figures import ReplicaFigures

ROLES = ("learner", "follower", "candidate", "sealing", "syncing", "leader", "stopped")


def collect(figures: ReplicaFigures) -> Iterator[Metric]:
    """Yield the metrics of a replica."""
    role = GaugeMetricFamily(
        "timeball_cluster_role", "1 for the state that this replica is in.", labels=["group", "role"]
    )
    for name in ROLES:
        role.add_metric([figures.group, name], int(name == figures.role))
    yield role
    for name, text, value in (
        ("has_leader", "1 while this node knows of a leader.", int(bool(figures.leader))),
        ("epoch", "Epoch that this replica leads or stands in; 0 for a follower.", figures.epoch),
        ("promised_epoch", "Epoch below which this replica obeys no leader.", figures.promised),
        ("log_rows", "Rows of this replica's log since its first.", figures.log_seq),
        ("committed_rows", "Of these, known to be committed.", figures.committed_seq),
        (
            "commit_lag_rows",
            "Rows of this replica's log not known to be committed.",
            max(0, figures.log_seq - figures.committed_seq),
        ),
        (
            "apply_lag_rows",
            "Committed rows that this replica has not applied.",
            max(0, min(figures.committed_seq, figures.log_seq) - figures.applied_seq),
        ),
        ("connections", "Connections with other replicas.", figures.connections),
    ):
        family = GaugeMetricFamily(f"timeball_cluster_{name}", text, labels=["group"])
        family.add_metric([figures.group], value)
        yield family
    yield from _peer_metrics(figures)


def _peer_metrics(figures: ReplicaFigures) -> Iterator[Metric]:
    lag = GaugeMetricFamily(
        "timeball_cluster_replica_lag_rows",
        "Rows of the leader's log that are not on a replica's disk.",
        labels=["group", "node"],
    )
    offset = GaugeMetricFamily(
        "timeball_cluster_clock_offset_seconds",
        "That a replica's clock is ahead of the leader's.",
        labels=["group", "node"],
    )
    for node, peer in figures.peers.items():
        lag.add_metric([figures.group, node], max(0, figures.log_seq - peer.acked_seq))
        if peer.clock_offset_ms is not None:
            offset.add_metric([figures.group, node], peer.clock_offset_ms / 1_000)
    yield from (lag, offset)
