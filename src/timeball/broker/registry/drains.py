"""What a group hands over to another one for good (a drain), and what it has adopted, as META rows.

    drain/out          DrainFacts: to which group, and which transfer that one has not confirmed
    adopted/<group>    AdoptedFacts: the last transfer that this group has taken over from that one

Both are written in the frame of the rows that they speak of: the promises that a transfer ends here, or begins there.
So a transfer that is repeated after a crash has the same rows, and is taken over once.
"""

from __future__ import annotations

import msgspec

from timeball.answers import HANDED
from timeball.broker.registry.meta import Change, MetaLog, MetaTable

OUT = "out"


class DrainFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a drained group's META row. A drain is known by its group and `since_ms`."""

    heir: str
    since_ms: int
    account: str = ""  # as which the heir is asked
    transfer: int = 0  # number of the last one; it grows by one with each
    moved_rows: int = 0  # confirmed by the heir
    # Of a transfer that the heir has not confirmed: the rows of this log that hold it, and when they were written.
    first_seq: int = 0
    rows: int = 0
    at_ms: int = 0


class AdoptedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The value of an heir's META row."""

    since_ms: int  # of the drain
    transfer: int
    rows: int  # of all its transfers


class Drains:
    """Both sides of drains. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._out, self._adopted = (
            MetaTable(meta, "drain", DrainFacts),
            MetaTable(meta, "adopted", AdoptedFacts),
        )

    @property
    def out(self) -> DrainFacts | None:
        """Return what this group hands over; None when it is not drained."""
        return self._out.values.get(OUT)

    @property
    def needed_seq(self) -> int | None:
        """Return the first row of a transfer that is not confirmed, which may have to be sent again."""
        out = self.out
        return out.first_seq if out is not None and out.rows else None

    def was_handed(self, word: str, at_ms: int | None) -> bool:
        """Return whether a promise of this log whose end is told like that was handed over.

        `word`: a verdict, or the state of a place.
        """
        # No row says any more what ended it. A message that was handed over must not be called cancelled.
        is_faded = at_ms is None and word in ("cancelled", "already_cancelled")
        return word == HANDED or (is_faded and self.out is not None)

    def is_moving(self, at_ms: int | None) -> bool:
        """Return whether what was handed over then may not have arrived yet."""
        out = self.out
        return out is not None and bool(out.rows) and (at_ms is None or at_ms >= out.at_ms)

    def put(self, facts: DrainFacts) -> None:
        """Append what this group hands over."""
        self._out.put([(OUT, facts)])

    def changed(self, facts: DrainFacts) -> Change:
        """Return the row that says what this group hands over, for a frame with others."""
        return self._out.changed([(OUT, facts)])

    def adopted(self, source: str) -> AdoptedFacts | None:
        """Return what was taken over last from a group."""
        return self._adopted.values.get(source)

    def adopting(self, source: str, facts: AdoptedFacts) -> Change:
        """Return the row that says what was taken over, for a frame with others."""
        return self._adopted.changed([(source, facts)])
