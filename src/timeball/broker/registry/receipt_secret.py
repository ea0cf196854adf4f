"""The secret of this data folder, for whoever makes texts of receipts.

Written once and then only read, as a document (documents.py): receipts that consumers hold must be as good after a
restart as before. It protects against receipts made up or changed, and no more than that; who can read the folder
can read it.
"""

from __future__ import annotations

import secrets

import msgspec

from timeball import documents
from timeball.files import Files

NAME = "receipts.key"
SIZE_BYTES = 32


class _Key(msgspec.Struct):
    secret: bytes


def load(files: Files) -> bytes:
    """Return the secret, made when there is none; blocking.

    Raise Corrupt when it is damaged: a new one would void the receipts that consumers hold.
    """
    kept = documents.load(files, NAME, _Key)
    if kept is None:
        kept = _Key(secrets.token_bytes(SIZE_BYTES))
        files.replace(NAME, documents.encode(kept))
    return kept.secret
