"""Promises in files of the pending table that somebody outside may deliver: who has a lease, and how late he may be.

While a *dispatcher* has its lease, promises of the table's source that are near stay without bodies (loaded.py). The
dispatcher reads the bodies itself and brings them when they are due; each that still waits is then handed out.

    not brought `grace_ms` after its instant, or the lease is over      it is loaded here, like any other

So whatever a dispatcher does, nothing is lost, nothing comes twice, and nothing is later than the grace and a look
into a file. What was brought stays in the index until the grace is over, and is then left out as it has an outcome.
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
        self.loaded_rows = 0  # since the start: what the dispatcher did not bring in time
        self._lease_until_ms = 0

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Count a dispatcher as at work for so long from now on; 0: it is no more."""
        self._lease_until_ms = now_ms + min(lease_ms, LEASE_MS_MAX)

    def is_leased(self, now_ms: int) -> bool:
        """Return whether a dispatcher is at work; a clock that was set back does not make a lease longer."""
        return now_ms < self._lease_until_ms <= now_ms + LEASE_MS_MAX

    def rows_max(self, now_ms: int) -> int:
        """Return how many promises may wait without bodies."""
        return LEFT_ROWS_MAX if self.is_leased(now_ms) else OPENED_ROWS_MAX

    def load_ms(self, now_ms: int, due_ms: int, otherwise_ms: int) -> int:
        """Return when to load what is due first here, and would be loaded at `otherwise_ms` without a dispatcher."""
        if not self.is_leased(now_ms):
            return otherwise_ms
        return min(due_ms + self.grace_ms, max(self._lease_until_ms, otherwise_ms))
