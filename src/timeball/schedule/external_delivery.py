"""The lease of an external dispatcher, which reads due messages from files of the pending table and passes them on.

While a *dispatcher* has its lease, the scheduler does not load the bodies of near messages in files (loaded.py). The
dispatcher reads them itself and brings them when they are due. The scheduler then hands out those that are still
pending. It loads a message itself if the dispatcher has not brought it `grace_ms` after its due time, or when the lease
is over.

So a dispatcher that crashes, lags or repeats itself loses no message and duplicates none. It delays no message by more
than the grace period plus one read of a file. A message that was brought stays in the index until the grace period is
over. Then it is skipped, because it is settled.
"""

from __future__ import annotations

from timeball.model import limits

LEASE_MS_MAX = limits.HOUR_MS
# Messages left to a dispatcher, 16 to 32 bytes each. With more, the backlog is opened as late as possible.
LEASED_ROWS_MAX = 8_000_000
OPENED_ROWS_MAX = 1 << 20  # the same limit without a dispatcher
GRACE_MS = 2_000  # the default of the setting in config.py


class ExternalDelivery:
    """The lease of one dispatcher. Belongs to the event loop."""

    def __init__(self, grace_ms: int = GRACE_MS) -> None:
        self.grace_ms = grace_ms
        self.loaded_rows = 0  # messages since the start that the dispatcher did not bring in time
        self._lease_until_ms = 0

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave messages to a dispatcher for `lease_ms` from now on. 0 ends the lease."""
        # Bounded, because a dispatcher that crashes delays messages by the grace period until its lease is over.
        self._lease_until_ms = now_ms + min(lease_ms, LEASE_MS_MAX)

    def is_leased(self, now_ms: int) -> bool:
        """Check whether a dispatcher has a lease. A clock that was set back does not extend it."""
        # A lease that seems to end later than any lease can: the clock was set back, so treat it as over.
        return now_ms < self._lease_until_ms <= now_ms + LEASE_MS_MAX

    def rows_max(self, now_ms: int) -> int:
        """Compute the maximum number of opened messages without bodies."""
        return LEASED_ROWS_MAX if self.is_leased(now_ms) else OPENED_ROWS_MAX

    def load_ms(self, now_ms: int, due_ms: int, default_ms: int) -> int:
        """Compute when to load the first message, due at `due_ms`. Without a dispatcher this is `default_ms`."""
        if not self.is_leased(now_ms):
            return default_ms
        # At the end of the grace period or of the lease, but never earlier than without a dispatcher.
        return min(due_ms + self.grace_ms, max(self._lease_until_ms, default_ms))
