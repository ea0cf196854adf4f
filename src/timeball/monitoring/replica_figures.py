"""The figures of one replica of a cluster, for its operators. replica_metrics.py makes metrics of them."""

from __future__ import annotations

import msgspec


class PeerFigures(msgspec.Struct, frozen=True):
    """Another replica, as the leader sees it."""

    replica: str
    acked_seq: int  # rows below this number are on its disk
    clock_offset_ms: float | None = None  # by which its wall clock is ahead of the leader's


class ReplicaFigures(msgspec.Struct, frozen=True):
    """One replica at one time. Fields that a newer version has added are ignored."""

    group: str
    replica: str
    role: str
    leader: str  # the leader that this node knows of, or "" for none
    epoch: int = 0  # the epoch in which it leads or is a candidate
    promised: int = 0
    log_seq: int = 0  # the number after its last row, as are the next two
    committed_seq: int = 0
    applied_seq: int = 0
    since_ms: int = 0  # when it entered its role, by its wall clock
    connections: int = 0  # with other replicas
    version: str = ""
    peers: dict[str, PeerFigures] = {}  # by node; only a leader has them
