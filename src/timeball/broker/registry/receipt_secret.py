"""The secret of this data folder, by which texts of receipts are sealed.

Receipts that consumers hold must be as good after a restart as before, so it is a META row. It protects against
receipts made up or changed, and no more than that: who can read the folder can read it. No reader of the log outside
the broker is given its value (`Broker.read_log`).
"""

from __future__ import annotations

import secrets

from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.log.meta_rows import SECRET_PREFIX

NAME = "receipts"
SIZE_BYTES = 32


class ReceiptSecret:
    """Makes the secret once. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """Whether the log holds it; until it does, on disk, no receipt may be given out."""
        return NAME in self._kept.values

    def get(self) -> bytes:
        """Return the secret, made when there is none."""
        if not self.is_made:
            self._kept.put([(NAME, secrets.token_bytes(SIZE_BYTES))])
        return self._kept.values[NAME]
