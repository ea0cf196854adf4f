"""Positions of sources: how far the records of a queue outside, a Kafka topic say, have been sent here, by partition.

A program that sends them says with each batch where in its source the batch begins and ends. The new position stands in
the frame of the messages, so that both are on disk or neither is; unlike an idempotency key it counts for ever. A batch
that begins elsewhere is refused: it was sent before, or another process sends for the same source.
"""

from __future__ import annotations

import hashlib

import msgspec

from timeball import limits
from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.errors import Conflict, OverLimit
from timeball.wire import SourceStep

_HASH_BYTES = 16


class SourceState(msgspec.Struct, frozen=True, array_like=True):
    """The value of a source's META row: its name, and where it goes on in each partition."""

    name: str
    positions: dict[int, int]


class SourcePositions:
    """The sources that are known. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "source", SourceState)

    def __len__(self) -> int:
        """Return how many are known."""
        return len(self._kept.values)

    def of(self, caller: str, source: str) -> dict[int, int]:
        """Return where an account's source goes on in each partition; empty when nothing was sent of it."""
        found = self._kept.values.get(_key(caller, source))
        return {} if found is None else dict(found.positions)

    def moved(self, caller: str, step: SourceStep) -> Change:
        """Return the row of a source that has come to the end of this step; raise Conflict, OverLimit."""
        stands = self.of(caller, step.source)
        for partition, begin in step.begin.items():
            at = stands.get(partition, begin)
            if at != begin:
                raise Conflict(
                    f"source {step.source!r} stands at {at} in partition {partition}, this batch begins at {begin}: "
                    "it was sent before, or another process sends for this source; ask for the positions, go on there"
                )
        key, positions = _key(caller, step.source), {**stands, **step.end}
        if len(positions) > limits.SOURCE_PARTITIONS_MAX:
            raise OverLimit(
                f"source {step.source!r}: at most {limits.SOURCE_PARTITIONS_MAX} partitions; use a source for each part"
            )
        if key not in self._kept.values and len(self) >= limits.SOURCES_MAX:
            raise OverLimit(
                f"{limits.SOURCES_MAX} sources are known, and no more are taken: use one of their names"
            )
        return self._kept.changed([(key, SourceState(step.source, positions))])


def _key(caller: str, source: str) -> str:
    # Of account and name, so that no account moves another's positions.
    return hashlib.blake2b(msgspec.msgpack.encode([caller, source]), digest_size=_HASH_BYTES).hexdigest()
