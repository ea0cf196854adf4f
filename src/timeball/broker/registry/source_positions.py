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
        self._table = MetaTable(meta, "source", SourceState)

    def __len__(self) -> int:
        """The number of known sources."""
        return len(self._table.values)

    def of(self, caller: str, source: str) -> dict[int, int]:
        """Find the next position of an account's source in each partition. Empty for an unknown source."""
        state = self._table.values.get(_key(caller, source))
        return {} if state is None else dict(state.positions)

    def moved(self, caller: str, step: SourceStep) -> Change:
        """Build the row with a source's positions after this step.

        Raise Conflict if the step does not begin at the current positions, OverLimit for too many sources or
        partitions.
        """
        current = self.of(caller, step.source)
        for partition, begin in step.begin.items():
            # A partition that is new here may begin anywhere.
            expected = current.get(partition, begin)
            if expected != begin:
                raise Conflict(
                    f"source {step.source!r} stands at {expected} in partition {partition}, "
                    f"this batch begins at {begin}: "
                    "it was sent before, or another process sends for this source; ask for the positions, go on there"
                )
        # Partitions that are not in this step keep their positions.
        key, positions = _key(caller, step.source), {**current, **step.end}
        if len(positions) > limits.SOURCE_PARTITIONS_MAX:
            raise OverLimit(
                f"source {step.source!r}: at most {limits.SOURCE_PARTITIONS_MAX} partitions; use a source for each part"
            )
        # Positions never expire, so their number needs a bound.
        if key not in self._table.values and len(self) >= limits.SOURCES_MAX:
            raise OverLimit(
                f"{limits.SOURCES_MAX} sources are known, and no more are taken: use one of their names"
            )
        return self._table.changed([(key, SourceState(step.source, positions))])


def _key(caller: str, source: str) -> str:
    # Hashed with the account, so that no account can move the positions of another account.
    return hashlib.blake2b(msgspec.msgpack.encode([caller, source]), digest_size=_HASH_BYTES).hexdigest()
