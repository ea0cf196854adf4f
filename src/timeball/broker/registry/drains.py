"""State of drains as META rows: a drained group hands its pending messages over to another group, the heir.

    drain/out          DrainFacts, in the drained group: the heir, and the transfer that it has not confirmed yet
    adopted/<group>    AdoptedFacts, in the heir: the last transfer that it has adopted from <group>

Each row is in the same frame as the transfer's messages: the rows that end them in the drained group, or those that
begin them in the heir. So a transfer that is sent again after a crash has the same messages, and is adopted once.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.model.answers import HANDED

OUT = "out"


class DrainFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a drained group's META row. Group and `since_ms` identify a drain."""

    heir: str
    since_ms: int
    account: str = ""  # the account used for requests to the heir
    transfer: int = 0  # number of the last transfer, counted from 1
    moved_rows: int = 0  # confirmed by the heir
    # The unconfirmed transfer: its rows in this log, and the time when they were written. rows 0: there is none.
    first_seq: int = 0
    rows: int = 0
    at_ms: int = 0


class AdoptedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The value of an heir's META row: the last transfer of a drain."""

    since_ms: int  # identifies the drain
    transfer: int
    rows: int  # in all transfers of the drain


class Drains:
    """The drain of this group, and the drains of other groups to it. Belongs to the event loop."""

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
        """The first row of the unconfirmed transfer, which may have to be sent again. None if there is none."""
        out = self.out
        return out.first_seq if out is not None and out.rows else None

    def was_handed_over(self, word: str, at_ms: int | None) -> bool:
        """Check whether a message of this log was, or may have been, handed over, by its verdict or state `word`.

        `at_ms`: the time when the message ended, None if that is no longer known.
        """
        # No row shows any more how the message ended. In a drained group it may have been handed over, so it must not
        # be reported as cancelled.
        is_faded = at_ms is None and word in ("cancelled", "already_cancelled")
        return word == HANDED or (is_faded and self.out is not None)

    def is_moving(self, at_ms: int | None) -> bool:
        """Check whether messages handed over at `at_ms` may not have arrived at the heir yet."""
        out = self.out
        return out is not None and bool(out.rows) and (at_ms is None or at_ms >= out.at_ms)

    def put(self, facts: DrainFacts) -> None:
        """Append the state of this group's drain."""
        self._out.put([(OUT, facts)])

    def changed(self, facts: DrainFacts) -> Change:
        """Build the row of the drain's state, for a frame with other rows."""
        return self._out.changed([(OUT, facts)])

    def adopted(self, source: str) -> AdoptedFacts | None:
        """Find the last transfer that this group has adopted from `source`."""
        return self._adopted.values.get(source)

    def adoption_row(self, source: str, facts: AdoptedFacts) -> Change:
        """Build the META row of an adopted transfer, for the frame with its messages."""
        return self._adopted.changed([(source, facts)])
