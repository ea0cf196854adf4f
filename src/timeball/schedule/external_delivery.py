"""Promises in files of the pending table that a dispatcher may deliver: its lease, and how late it may be.

While a *dispatcher* has its lease, promises of the table's source that are near stay without bodies (loaded.py). The
dispatcher reads the bodies itself and brings them when they are due; each that still waits is then handed out.

    not brought `grace_ms` after its instant, or the lease is over      it is loaded here, like any other

So a dispatcher that dies, lags or repeats itself loses no promise and doubles none, and delays none by more than the
grace and a look into a file. A promise that was brought stays in the index until the grace is over, and is then left
out as it has an outcome.
"""

from __future__ import annotations

from timeball import limits

LEASE_MS_MAX = limits.HOUR_MS
LEFT_ROWS_MAX = 8_000_000  # promises left to a dispatcher, 16 to 32 bytes each; beyond it the backlog waits
OPENED_ROWS_MAX = 1 << 20  # without a dispatcher
GRACE_MS = 2_000  # as in config.py


class ExternalDelivery:
    """The lease of one dispatcher. Belongs to the event loop."""

    def __init__(self, grace_ms: int = GRACE_MS) -> None:
        self.grace_ms = grace_ms
        self.loaded_rows = 0  # since the start: promises that the dispatcher did not bring in time
        self._lease_until_ms = 0

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave promises to a dispatcher for so long from now on; 0: end its lease."""
        # Bounded, so that a dispatcher which dies with a lease of a year delays promises by the grace for an hour at
        # most.
        self._lease_until_ms = now_ms + min(lease_ms, LEASE_MS_MAX)

    def is_leased(self, now_ms: int) -> bool:
        """Return whether a dispatcher is at work; a clock that was set back does not make a lease longer."""
        # The upper bound is for a clock that was set back: a lease that would end later than any can is over.
        return now_ms < self._lease_until_ms <= now_ms + LEASE_MS_MAX

    def rows_max(self, now_ms: int) -> int:
        """Return how many promises may wait without bodies."""
        return LEFT_ROWS_MAX if self.is_leased(now_ms) else OPENED_ROWS_MAX

    def load_ms(self, now_ms: int, due_ms: int, otherwise_ms: int) -> int:
        """Return when to load the first promise, due at `due_ms`; `otherwise_ms`: when without a dispatcher."""
        if not self.is_leased(now_ms):
            return otherwise_ms
        # At the end of the grace, or when the lease ends, but never earlier than without a dispatcher.
        return min(due_ms + self.grace_ms, max(self._lease_until_ms, otherwise_ms))
