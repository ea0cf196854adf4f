"""State of leases as META rows: the secret of receipts, and the leases that an orderly stop has left.

There is one row for each queue that was not idle. It is written when the broker stops and deleted before the next start
serves, so that a crash never finds old ones (consuming/restart.py).
"""

from __future__ import annotations

import secrets

import msgspec

from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.message import SECRET_PREFIX


class SavedLease(msgspec.Struct, array_like=True):
    """A lease, with its position in the queue."""

    offset: int
    seq: int
    size_bytes: int
    pop_ms: int
    deadline_ms: int
    in_order: bool
    times: int
    nacked_ms: int | None = None
    nack_reason: str = ""


class SavedLeases(msgspec.Struct):
    """The leases of one group in one queue that was not idle."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int
    last_pop_ms: int
    attempt_id: str
    in_flight: list[SavedLease]
    returned: list[SavedLease]
    acked_ahead: list[int]
    in_log: bool


NAME = "receipts"
SIZE_BYTES = 32


class ReceiptSecret:
    """The secret of this data folder, by which texts of receipts are sealed. Belongs to the event loop.

    Receipts that consumers hold must be as good after a restart as before, so it is a META row. It protects against
    receipts made up or changed, and no more than that: who can read the folder can read it. No reader of the log
    outside the broker is given its value (`Broker.read_log`).
    """

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """Return whether the log holds it; until it does, on disk, no receipt may be given out."""
        return NAME in self._kept.values

    def get(self) -> bytes:
        """Return the secret, made when there is none."""
        if not self.is_made:
            # Made with the first receipt, so a broker without leases in the log has none to lose.
            self._kept.put([(NAME, secrets.token_bytes(SIZE_BYTES))])
        return self._kept.values[NAME]
