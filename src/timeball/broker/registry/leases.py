"""State of leases as META rows: the secret that seals receipts, and the leases saved by an orderly stop.

There is one row for each queue that was not idle. It is written when the broker stops and deleted before the next start
serves, so that a crash never finds old ones (consuming/restart.py).
"""

from __future__ import annotations

import secrets

import msgspec

from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.model.message import SECRET_PREFIX


class SavedLease(msgspec.Struct, array_like=True):
    """The saved form of a lease, with its position in the queue."""

    offset: int
    seq: int
    size_bytes: int
    pop_ms: int  # identifies the receipt
    # By the wall clock, while a live lease has elapsed time.
    deadline_ms: int
    in_order: bool
    times: int  # leases in order that ended without an acknowledgement
    nacked_ms: int | None = None
    nack_reason: str = ""  # missing in rows of older versions, as `nacked_ms`


class SavedLeases(msgspec.Struct):
    """The leases of one group in one queue that was not idle."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int  # if another offset is stored at the start, this row is ignored
    last_pop_ms: int
    attempt_id: str
    in_flight: list[SavedLease]
    returned: list[SavedLease]
    acked_ahead: list[int]
    in_log: bool  # see QueueLeases


NAME = "receipts"
SIZE_BYTES = 32


class ReceiptSecret:
    """The secret of this data folder, which seals the texts of receipts. Belongs to the event loop.

    Receipts that consumers hold must stay valid across a restart, so the secret is a META row. It protects only against
    invented or changed receipts: a user who can read the folder can read the secret too. Readers of the log outside the
    broker do not get its value (`Broker.read_log`).
    """

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """True if the log contains the secret. No receipt may be given out before it is on disk."""
        return NAME in self._kept.values

    def get(self) -> bytes:
        """Return the secret. Create it if there is none."""
        if not self.is_made:
            # Made with the first receipt, so that a broker without leases in the log has no secret to lose.
            self._kept.put([(NAME, secrets.token_bytes(SIZE_BYTES))])
        return self._kept.values[NAME]
