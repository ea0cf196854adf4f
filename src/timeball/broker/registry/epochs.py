"""The epoch of a replicated log: the first row that its leader writes (docs/cluster-protocol.md)."""

from __future__ import annotations

import msgspec

PREFIX = "cluster"
EPOCH_KEY = f"{PREFIX}/epoch"


class EpochFacts(msgspec.Struct, frozen=True):
    """The value of the META row that opens an epoch."""

    # Grows with each change of leader. Every later frame has it in its header.
    epoch: int
    leader: str  # a replica: node and incarnation
    # Only information for people and for the dump. Due times follow each leader's own clock, guarded against steps.
    wall_ms: int  # by the leader's clock
