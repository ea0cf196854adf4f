"""The groups of a cluster as they are shown: by `timeball cluster status`, over HTTP, on the dashboard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

import msgspec

from timeball.monitoring.replica_figures import ReplicaFigures


class ReplicaState(msgspec.Struct, frozen=True):
    """One replica of a group; figures that are not known are None."""

    node: str
    replica: str
    role: str  # as it reports, or `gone`, or `silent`
    is_in_record: bool
    log_seq: int | None = None  # after its last row, as are the next two
    committed_seq: int | None = None
    applied_seq: int | None = None
    lag_rows: int | None = None
    clock_offset_ms: float | None = None
    version: str = ""
    since_ms: int | None = None


class ReplicaGroup(msgspec.Struct, frozen=True):
    """One group."""

    group: str
    leader: str  # empty: none
    epoch: int
    generation: int
    replicas: list[ReplicaState]
    asked: str  # of the leader, in words; empty: nothing
    problems: list[str]


class ReplicaReadOuts(NamedTuple):
    """The read-outs of a node of a cluster: its own replica's, and what the coordinator says of all groups and nodes.

    `survey` raises Unavailable while the coordinator does not answer.
    """

    figures: Callable[[], ReplicaFigures]
    survey: Callable[[], Awaitable[list[ReplicaGroup]]]
    hosts: Callable[[], Collection[str]] = tuple  # names and addresses of the cluster's nodes
