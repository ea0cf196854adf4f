"""The figures of one replica of a cluster, for its operators. replica_metrics.py makes metrics of them."""

from __future__ import annotations

import msgspec


class PeerFigures(msgspec.Struct, frozen=True):
    """Another replica, as the leader sees it."""

    replica: str
    acked_seq: int  # rows below this number are on the replica's disk
    clock_offset_ms: float | None = None  # how far its wall clock is ahead of the leader's; None if unknown


class ReplicaFigures(msgspec.Struct, frozen=True):
    """The state of a replica at one time. A decoder ignores fields that a newer version has added."""

    group: str
    replica: str
    role: str
    leader: str  # the leader that this node knows of, or ""
    epoch: int = 0  # the epoch in which it leads or is a candidate
    promised: int = 0  # the replica obeys no leader of an epoch below this
    log_seq: int = 0  # the number after the last row in its log
    committed_seq: int = 0  # the number after the last committed row
    applied_seq: int = 0  # the number after the last applied row
    since_ms: int = 0  # when it entered its role, by its wall clock
    connections: int = 0  # connections with other replicas
    version: str = ""
    peers: dict[str, PeerFigures] = {}  # by node; empty unless the replica leads
