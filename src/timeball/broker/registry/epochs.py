"""The epoch of a replicated log: the first row that its leader writes (docs/cluster-protocol.md)."""

from __future__ import annotations

import msgspec

PREFIX = "cluster"
EPOCH_KEY = f"{PREFIX}/epoch"


class EpochFacts(msgspec.Struct, frozen=True):
    """The value of the META row that opens an epoch."""

    # Grows with each change of leader; every frame behind the row has it in its header.
    epoch: int
    leader: str  # a replica: node and incarnation
    # Told for people and for the dump alone: the promises' clock is each leader's own, guarded against steps.
    wall_ms: int  # of its clock
