"""The epoch of a replicated log: the first row that its leader writes (docs/cluster-protocol.md)."""

from __future__ import annotations

import msgspec

PREFIX = "cluster"
EPOCH_KEY = f"{PREFIX}/epoch"


class EpochFacts(msgspec.Struct, frozen=True):
    """The value of the META row that opens an epoch."""

    epoch: int
    leader: str  # a replica
    wall_ms: int  # of its clock
