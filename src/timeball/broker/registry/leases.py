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
    """The saved form of a lease on the message at `offset`."""

    offset: int
    seq: int
    size_bytes: int
    pop_ms: int  # identifies the receipt
    # On the wall clock. In memory a deadline is elapsed time.
    deadline_ms: int
    in_order: bool
    times: int  # ordered consumption: how often the lease ended without an acknowledgement
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
        self._table = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """True if the log contains the secret. It must be durable before a receipt is returned to a consumer."""
        return NAME in self._table.values

    def get(self) -> bytes:
        """Read the secret. Create it if there is none."""
        if not self.is_made:
            # Created with the first receipt, so that a broker that never leases a message stores no secret.
            self._table.put([(NAME, secrets.token_bytes(SIZE_BYTES))])
        return self._table.values[NAME]
