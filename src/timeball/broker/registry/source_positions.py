"""Positions of external sources such as Kafka topics: up to which position their records were sent, per partition.

A program that forwards the records names with each batch the begin and end positions in the source. The new position is
written in the frame of the messages, so both are on disk or neither is. Unlike an idempotency key it never expires. A
batch with another begin is refused: it was sent before, or another process forwards the same source.
"""

from __future__ import annotations

import hashlib

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model import limits
from timeball.model.errors import Conflict, OverLimit
from timeball.model.wire import SourceStep

_HASH_BYTES = 16


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """The value of a source's META row: its name, and its next position in each partition."""

    name: str  # stored for people: the key is a hash
    positions: dict[int, int]  # of the next record to send


class SourcePositions:
    """The known sources. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "source", SourceState)

    def __len__(self) -> int:
        """Return the number of known sources."""
        return len(self._kept.values)

    def of(self, caller: str, source: str) -> dict[int, int]:
        """Return the next position of an account's source in each partition, empty if nothing of it was sent."""
        found = self._kept.values.get(_key(caller, source))
        return {} if found is None else dict(found.positions)

    def moved(self, caller: str, step: SourceStep) -> Change:
        """Build the row of a source after this step. Raise Conflict, OverLimit."""
        stands = self.of(caller, step.source)
        for partition, begin in step.begin.items():
            # A partition that is new here may begin anywhere.
            at = stands.get(partition, begin)
            if at != begin:
                raise Conflict(
                    f"source {step.source!r} stands at {at} in partition {partition}, this batch begins at {begin}: "
                    "it was sent before, or another process sends for this source; ask for the positions, go on there"
                )
        # Partitions that are not in this step keep their positions.
        key, positions = _key(caller, step.source), {**stands, **step.end}
        if len(positions) > limits.SOURCE_PARTITIONS_MAX:
            raise OverLimit(
                f"source {step.source!r}: at most {limits.SOURCE_PARTITIONS_MAX} partitions; use a source for each part"
            )
        # Positions never expire, so their number needs a bound.
        if key not in self._kept.values and len(self) >= limits.SOURCES_MAX:
            raise OverLimit(
                f"{limits.SOURCES_MAX} sources are known, and no more are taken: use one of their names"
            )
        return self._kept.changed([(key, SourceState(step.source, positions))])


def _key(caller: str, source: str) -> str:
    # Hashed with the account, so that no account moves another one's positions.
    return hashlib.blake2b(msgspec.msgpack.encode([caller, source]), digest_size=_HASH_BYTES).hexdigest()
