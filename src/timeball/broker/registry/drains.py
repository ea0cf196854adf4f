"""Drains as META rows: a replica group hands its pending scheduled messages over to another group for good.

    drain/out          DrainFacts: the receiving group (heir), and the transfer that it has not confirmed yet
    adopted/<group>    AdoptedFacts: the last transfer that this group has taken over from that one

Both rows are written in the same frame as the rows of the transfer: the scheduled messages that it ends here, or begins
there. Therefore a transfer that is repeated after a crash contains the same rows, and is taken over once.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model.answers import HANDED

OUT = "out"


class DrainFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a drained group's META row. A drain is identified by its group and `since_ms`."""

    heir: str
    since_ms: int
    account: str = ""  # the account used for requests to the heir
    transfer: int = 0  # number of the last transfer, counted from 1
    moved_rows: int = 0  # confirmed by the heir
    # The rows of this log with the transfer that the heir has not confirmed, and the time when they were written.
    first_seq: int = 0
    rows: int = 0
    at_ms: int = 0


class AdoptedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The value of an heir's META row."""

    since_ms: int  # identifies the drain
    transfer: int
    rows: int  # in all transfers of the drain


class Drains:
    """Both sides of drains. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._out, self._adopted = (
            MetaTable(meta, "drain", DrainFacts),
            MetaTable(meta, "adopted", AdoptedFacts),
        )

    @property
    def out(self) -> DrainFacts | None:
        """The drain of this group, or None if it is not drained."""
        return self._out.values.get(OUT)

    @property
    def needed_seq(self) -> int | None:
        """The first row of a transfer that is not confirmed, which may have to be sent again."""
        out = self.out
        return out.first_seq if out is not None and out.rows else None

    def was_handed(self, word: str, at_ms: int | None) -> bool:
        """Return whether a scheduled message of this log was handed over, judged by its reported end.

        `word`: a verdict, or the state of a place. `at_ms`: the time of the end, None if no longer known.
        """
        # No row shows any more how the scheduled message ended. A scheduled message that was handed over must not be
        # called cancelled.
        is_faded = at_ms is None and word in ("cancelled", "already_cancelled")
        return word == HANDED or (is_faded and self.out is not None)

    def is_moving(self, at_ms: int | None) -> bool:
        """Return whether scheduled messages handed over at `at_ms` may not have arrived yet."""
        out = self.out
        return out is not None and bool(out.rows) and (at_ms is None or at_ms >= out.at_ms)

    def put(self, facts: DrainFacts) -> None:
        """Append the state of the drain."""
        self._out.put([(OUT, facts)])

    def changed(self, facts: DrainFacts) -> Change:
        """Build the row of the drain's state, for a frame with other rows."""
        return self._out.changed([(OUT, facts)])

    def adopted(self, source: str) -> AdoptedFacts | None:
        """Return the last transfer that was taken over from a group."""
        return self._adopted.values.get(source)

    def adopting(self, source: str, facts: AdoptedFacts) -> Change:
        """Build the row of a transfer that is taken over, for a frame with other rows."""
        return self._adopted.changed([(source, facts)])
