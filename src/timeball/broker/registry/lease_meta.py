"""META rows about leases: the saved leases of consumer groups, and the secret that seals receipts."""

from __future__ import annotations

import secrets

import msgspec

from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.model.message import SECRET_PREFIX

# ---- saved leases --------------------------------------------------------------------------------------------
# consuming/lease_saver.py writes and reads these rows. A row covers PART_POSITIONS positions of one queue, so that an
# acknowledgement in a queue with thousands of leases does not write all of them again.


class LeaseRun(msgspec.Struct, array_like=True):
    """Consecutive positions that are open, and whose leases are equal."""

    offset: int  # of the first one
    count: int
    pop_ms: int  # identifies the receipts, or NO_RECEIPT for positions that are leased again before new ones
    # On the wall clock, as the next one. In memory a deadline is elapsed time.
    deadline_ms: int
    since_ms: int  # when the deadline was set
    in_order: bool = False
    counts: bool = True
    times: int = 0
    nacked_ms: int | None = None
    nack_reason: str = ""


class SavedPart(msgspec.Struct):
    """The leases of one group in a part of one queue. Positions before `next_offset` are done unless they are open."""

    group: str
    topic: str
    queue_id: int
    part: int  # of the positions from part * PART_POSITIONS on
    next_offset: int
    runs: list[LeaseRun]
    acked_ahead: list[int]  # positions from `next_offset` on that are done
    last_pop_ms: int = 0
    attempt_id: str = ""


# ---- the secret of receipts ----------------------------------------------------------------------------------

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
