"""Figures that other parts of the broker write, and that metrics, the HTTP API and the dashboard read.

They are about the deliveries of a push subscription, about one replica of a cluster, and about all groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Literal, NamedTuple

import msgspec

from timeball.io.clock import Clock, Durations

# ---- a push subscription, as the push edge writes its figures --------------------------------------------------

Outcome = Literal[
    "delivered",  # the receiver answered 2xx
    "client_error",  # 4xx
    "server_error",  # 5xx, or an unknown status
    "redirect",  # 3xx, which the broker does not follow
    "timeout",
    "unreachable",  # the name does not resolve, no connection, or no trusted certificate
    "broken",  # the connection ended, or the answer is not HTTP
    "forbidden_address",  # the name resolves to an address to which pushes are not allowed
    "failed",  # an internal error, which the log describes
]


class PushFigures:
    """The figures of one subscription. Belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.durations = Durations(clock)  # of all requests, successful and failed
        self.late_acks = 0  # messages acknowledged after their lease had ended, so they are delivered again
        self.in_flight = 0  # requests under way
        self.failures = 0  # failed requests since the last success or change of the subscription
        self.is_held = False  # True after several failures in a row: one request at a time tests the receiver
        self.last_failure = ""  # its reason, also why no messages can be received

    def add(self, outcome: Outcome, duration_ns: int) -> None:
        """Count a request that has ended."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.durations.add(duration_ns)

    @property
    def delivered(self) -> int:
        """The number of requests that the receiver answered with 2xx."""
        return self.outcomes.get("delivered", 0)

    @property
    def failed(self) -> int:
        """The number of requests with any other outcome than "delivered"."""
        return sum(self.outcomes.values()) - self.delivered


# ---- one replica; metrics.py makes metrics of its figures ------------------------------------------------------


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
    generation: int = 0  # of the newest set of replicas that it knows, 0 if it knows none
    members: tuple[str, ...] = ()  # this set
    log_seq: int = 0  # the number after the last row in its log
    committed_seq: int = 0  # the number after the last committed row
    applied_seq: int = 0  # the number after the last applied row
    since_ms: int = 0  # when it entered its role, by its wall clock
    connections: int = 0  # connections with other replicas
    version: str = ""
    problem: str = ""  # the reason why it does not take part although its process runs, or ""
    peers: dict[str, PeerFigures] = {}  # by node; empty unless the replica leads


# ---- groups, as `timeball cluster status`, the HTTP API and the dashboard show them --------------------------


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
    problem: str = ""  # the reason why it does not take part although its process runs, or ""


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
