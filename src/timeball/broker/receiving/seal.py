"""The secret of this data folder, for whoever makes texts of receipts.

Written once and then only read: receipts that consumers hold must be as good after a restart as before. It protects
against receipts made up or changed, and no more than that; who can read the folder can read it.
"""

from __future__ import annotations

import secrets

from timeball.files import Files

NAME = "receipts.key"
SIZE_BYTES = 32


def load(files: Files) -> bytes:
    """The secret, made when there is none. Blocking."""
    if files.exists(NAME):
        data = bytes(files.map_readonly(NAME))
        if len(data) == SIZE_BYTES:
            return data
    # A new one voids the receipts of those who hold some: their messages come back, as after any lost receipt.
    data = secrets.token_bytes(SIZE_BYTES)
    files.replace(NAME, data)
    return data
