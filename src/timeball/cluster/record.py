"""The record of a group: what the coordinator keeps and every change of leader swaps.

A replica is a node and an incarnation, written `node/incarnation`. A disk that is new, wiped or damaged has another
incarnation, so it is not in the record: it neither counts nor stands until a leader has seen it hold all that was
committed and has put it in.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True):
    """The leader of an epoch, and the replicas whose promises and acknowledgements count."""

    epoch: int
    leader: str  # a replica; empty before the first election
    replicas: tuple[str, ...]
    generation: int = 1  # of `replicas`


def node_of(replica: str) -> str:
    """Return the node of a replica."""
    return replica.partition("/")[0]


def majority(replicas: tuple[str, ...]) -> int:
    """Return how many replicas are more than half."""
    return len(replicas) // 2 + 1
