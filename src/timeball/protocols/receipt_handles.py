"""Receipt handles: the text by which a consumer names one lease of one message, over gRPC and Flight. No I/O.

    | version 1 | kind 1 | seq 8 | due ms 8           | seal 16 |    kind 1: a lease kept in the log
    | version 1 | kind 1 | queue 4 | offset 8 | pop ms 8 | seal 16 | kind 2: in order, a lease of a position

big-endian, as URL-safe base64 without padding. To consumers it means nothing. The seal is a keyed hash of all that
stands before it and of group and topic, which are not in the text, since each call names them: a handle that is made
up, changed, or another group's is refused before anything is looked up. Exactly the texts that `encode` makes are read.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections.abc import Callable
from hashlib import blake2b

from timeball.broker.consuming.requests import AnyReceipt, PositionReceipt, Receipt
from timeball.errors import InvalidReceipt

VERSION = 1
PROMISED, IN_ORDER = 1, 2  # kinds
SEAL_BYTES = 16
CHARACTERS_MAX = 64

_PROMISED = struct.Struct(">BBqq")
_IN_ORDER = struct.Struct(">BBiqq")


class ReceiptHandles:
    """Makes and reads the handles of one data folder, whose secret `secret` returns."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._key = b""  # read when the first handle is made or read, since the first lease makes it

    def encode(self, receipt: AnyReceipt) -> str:
        """Return the text for a receipt."""
        group, topic, *named = receipt
        if isinstance(receipt, Receipt):
            data = _PROMISED.pack(VERSION, PROMISED, *named)
        else:
            data = _IN_ORDER.pack(VERSION, IN_ORDER, *named)
        sealed = data + self._seal(data, group, topic)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def decode(self, text: str, group: str, topic: str) -> AnyReceipt:
        """Return the receipt of a text, for a call that names this group and topic; raise InvalidReceipt."""
        data = _bytes_of(text)
        content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(content, group, topic)):
            raise invalid("it was not made by this broker for this group and topic")
        if content[:2] == bytes([VERSION, PROMISED]) and len(content) == _PROMISED.size:
            return Receipt(group, topic, *_PROMISED.unpack(content)[2:])
        if content[:2] == bytes([VERSION, IN_ORDER]) and len(content) == _IN_ORDER.size:
            return PositionReceipt(group, topic, *_IN_ORDER.unpack(content)[2:])
        raise invalid("it was made by another version of this broker")

    def _seal(self, data: bytes, group: str, topic: str) -> bytes:
        self._key = self._key or self._secret()
        # No name has the character between them, so no two pairs make the same text.
        return blake2b(data + f"{group}/{topic}".encode(), key=self._key, digest_size=SEAL_BYTES).digest()


def invalid(why: str) -> InvalidReceipt:
    """Return the error for a handle that names no lease (any more)."""
    return InvalidReceipt(f"receipt handle: {why}")


def _bytes_of(text: str) -> bytes:
    if len(text) <= CHARACTERS_MAX:
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        # Base64 has bits to spare at the end: the same bytes have one text.
        if data and base64.urlsafe_b64encode(data).rstrip(b"=").decode() == text:
            return data
    raise invalid("it is none of ours; hand back what came with the message, unchanged")
