"""The record of a group: the entry in the coordinator that each change of leader replaces by compare-and-swap.

A replica is a node and an incarnation, written `node/incarnation`. A node whose disk is new, wiped or damaged gets
another incarnation, which is not in the record. Such a replica neither counts towards a majority nor becomes a
candidate until a leader has seen that it holds all committed rows and has added it to the record.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True):
    """The leader of an epoch, and the replicas whose promises and acknowledgements count."""

    epoch: int
    leader: str  # a replica; empty before the first election
    replicas: tuple[str, ...]
    generation: int = 1  # number of this set of replicas: grows by 1 with each change of the set


def node_of(replica: str) -> str:
    """Extract the node from a replica (`node/incarnation`)."""
    return replica.partition("/")[0]


def majority(replicas: tuple[str, ...]) -> int:
    """Compute how many replicas are more than half."""
    return len(replicas) // 2 + 1
