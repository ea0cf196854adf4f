"""Encode and decode receipt handles: texts with which a gRPC or Flight consumer names its lease of a message. No I/O.

    | version 1 | kind 1 | seq 8 | due ms 8           | seal 16 |    kind 1: a lease kept in the log
    | version 1 | kind 1 | queue 4 | offset 8 | pop ms 8 | seal 16 | kind 2: in order, a lease of a position

The bytes are big-endian, and the text is URL-safe base64 without padding. Consumers must not interpret it. The seal is
a keyed hash of the bytes before it and of the names of group and topic. The names themselves are not in the handle,
since each call that uses it contains them. So a handle that is forged, changed, or of another group is refused without
a look-up. Only the exact texts that `encode` returns are accepted.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from collections.abc import Callable
from hashlib import blake2b

from timeball.broker.consuming.requests import AnyReceipt, PositionReceipt, Receipt
from timeball.model.errors import InvalidReceipt

VERSION = 1
PROMISED, IN_ORDER = 1, 2  # kinds of receipts, see the layouts above
SEAL_BYTES = 16
CHARACTERS_MAX = 64

_RECEIPT_STRUCT = struct.Struct(">BBqq")
_POSITION_RECEIPT_STRUCT = struct.Struct(">BBiqq")


class ReceiptHandles:
    """Encodes and decodes the handles of one data folder. `secret` returns the folder's secret."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._key = b""  # read at the first use, since the first lease creates the secret

    def encode(self, receipt: AnyReceipt) -> str:
        """Encode a receipt as the text of its handle."""
        group, topic, *numbers = receipt
        if isinstance(receipt, Receipt):
            data = _RECEIPT_STRUCT.pack(VERSION, PROMISED, *numbers)
        else:
            data = _POSITION_RECEIPT_STRUCT.pack(VERSION, IN_ORDER, *numbers)
        sealed = data + self._seal(data, group, topic)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def decode(self, text: str, group: str, topic: str) -> AnyReceipt:
        """Decode a handle for a call that names this group and topic. Raises InvalidReceipt."""
        data = _bytes_from_base64(text)
        content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(content, group, topic)):
            raise invalid("it was not made by this broker for this group and topic")
        if content[:2] == bytes([VERSION, PROMISED]) and len(content) == _RECEIPT_STRUCT.size:
            return Receipt(group, topic, *_RECEIPT_STRUCT.unpack(content)[2:])
        if content[:2] == bytes([VERSION, IN_ORDER]) and len(content) == _POSITION_RECEIPT_STRUCT.size:
            return PositionReceipt(group, topic, *_POSITION_RECEIPT_STRUCT.unpack(content)[2:])
        raise invalid("it was made by another version of this broker")

    def _seal(self, data: bytes, group: str, topic: str) -> bytes:
        self._key = self._key or self._secret()
        # Names contain no slash, so different pairs of names give different texts.
        return blake2b(data + f"{group}/{topic}".encode(), key=self._key, digest_size=SEAL_BYTES).digest()


def invalid(why: str) -> InvalidReceipt:
    """Create the error for a handle that identifies no valid lease."""
    return InvalidReceipt(f"receipt handle: {why}")


def _bytes_from_base64(text: str) -> bytes:
    """Decode a handle to its bytes. Raises InvalidReceipt if `encode` cannot have written this text."""
    if len(text) <= CHARACTERS_MAX:
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        # The last character of base64 has spare bits, so several texts have the same bytes. Only one is accepted.
        if data and base64.urlsafe_b64encode(data).rstrip(b"=").decode() == text:
            return data
    raise invalid("it is none of ours; hand back what came with the message, unchanged")
