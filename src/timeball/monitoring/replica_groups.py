"""The groups of a cluster as `timeball cluster status`, the HTTP API and the dashboard show them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from timeball.monitoring.replica_figures import ReplicaFigures


class ReplicaState(msgspec.Struct, frozen=True):
    """A replica of a group. Unknown figures are None."""

    node: str
    replica: str
    role: str  # as the replica reports, or `gone` or `silent`
    is_in_record: bool  # whether the group's record in the coordinator lists it
    log_seq: int | None = None  # the number after the last row in its log
    committed_seq: int | None = None  # the number after the last committed row
    applied_seq: int | None = None  # the number after the last applied row
    lag_rows: int | None = None
    clock_offset_ms: float | None = None
    version: str = ""
    since_ms: int | None = None


class ReplicaGroup(msgspec.Struct, frozen=True):
    """The state of a group and of its replicas."""

    group: str
    leader: str  # "" for none
    epoch: int
    generation: int
    replicas: list[ReplicaState]
    asked: str  # the operation that an operator has requested from the leader, in words, or ""
    problems: list[str]


class ReplicaReaders(NamedTuple):
    """The functions by which the edges and the metrics read a cluster node's state.

    `figures` reads the node's own replica. `survey` reads all groups and nodes from the coordinator, and raises
    Unavailable while the coordinator does not answer.
    """

    figures: Callable[[], ReplicaFigures]
    survey: Callable[[], Awaitable[list[ReplicaGroup]]]
    hosts: Callable[[], Collection[str]] = tuple  # names and addresses of the cluster's nodes
