"""The groups of a cluster as `timeball cluster status`, the HTTP API and the dashboard show them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from timeball.monitoring.replica_figures import ReplicaFigures


class ReplicaState(msgspec.Struct, frozen=True):
    """One replica of a group. Unknown figures are None."""

    node: str
    replica: str
    role: str  # as it reports, or `gone` or `silent`
    is_in_record: bool
    log_seq: int | None = None  # the number after its last row, as are the next two
    committed_seq: int | None = None
    applied_seq: int | None = None
    lag_rows: int | None = None
    clock_offset_ms: float | None = None
    version: str = ""
    since_ms: int | None = None


class ReplicaGroup(msgspec.Struct, frozen=True):
    """One group."""

    group: str
    leader: str  # "" for none
    epoch: int
    generation: int
    replicas: list[ReplicaState]
    asked: str  # the operation requested of the leader, in words, or "" for none
    problems: list[str]


class ReplicaReadOuts(NamedTuple):
    """A cluster node's information: the figures of its replica, and a survey of all groups and nodes.

    The survey comes from the coordinator. `survey` raises Unavailable while the coordinator does not answer.
    """

    figures: Callable[[], ReplicaFigures]
    survey: Callable[[], Awaitable[list[ReplicaGroup]]]
    hosts: Callable[[], Collection[str]] = tuple  # names and addresses of the cluster's nodes
