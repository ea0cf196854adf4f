"""The figures of one replica of a cluster, which a node reports to its operators; their metrics are beside."""

from __future__ import annotations

import msgspec


class PeerFigures(msgspec.Struct, frozen=True):
    """Another replica, as the leader sees it."""

    replica: str
    acked_seq: int  # rows below are on its disk
    clock_offset_ms: float | None = None  # that its wall clock is ahead of the leader's


class ReplicaFigures(msgspec.Struct, frozen=True):
    """One replica at one instant. Fields that a newer version has added are passed over."""

    group: str
    replica: str
    role: str
    leader: str  # the node that leads, as far as this one knows; empty: none
    epoch: int = 0  # that it leads or stands in
    promised: int = 0
    log_seq: int = 0  # after its last row, as are the next two
    committed_seq: int = 0
    applied_seq: int = 0
    since_ms: int = 0  # by its wall clock: when it entered its role
    connections: int = 0  # with other replicas
    version: str = ""
    peers: dict[str, PeerFigures] = {}  # by node; of a leader alone
