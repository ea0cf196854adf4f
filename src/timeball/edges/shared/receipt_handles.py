"""Encode and decode receipt handles: texts with which a consumer names its lease of a message. No I/O.

    | version 1 | kind 1 | queue 4 | offset 8 | pop ms 8 | seal 16 |   number of bytes of each field, big-endian

    version  VERSION
    kind     1: a position in the topic itself. 2: a position in the group's retry topic for this topic
    pop ms   when the lease began
    seal     a keyed BLAKE2b hash of the bytes before it and of the names of group and topic

The text is URL-safe base64 of these bytes without padding. Consumers must not interpret it. The names of group and
topic are not in the handle, because each call that uses it contains them. So a handle that is forged, changed, or of
another group is refused without a look-up. Only the exact texts that `encode` returns are accepted.
"""

from __future__ import annotations

import binascii
import hmac
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.broker.consuming.requests import Receipt
from timeball.broker.registry.redeliveries import topic_of
from timeball.model.errors import InvalidReceipt

VERSION = 2
TOPIC, RETRY = 1, 2  # kinds, see the layout above
SEAL_BYTES = 16
CHARACTERS_MAX = 64
# The last answers whose handles need no decoding, and the sum of their handles.
ANSWERS_KEPT_MAX, ROWS_KEPT_MAX = 256, 16_384

_STRUCT = struct.Struct(">BBiqq")
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")


class _Answer(NamedTuple):
    """The receipts of an answer to a receive, and their handles in the same order."""

    group: str
    topic: str
    handles: list[str]
    receipts: Sequence[Receipt]


class ReceiptHandles:
    """Encodes and decodes the handles of one data folder. `secret` returns the folder's secret."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        # A BLAKE2b hash with the secret as key, and no data yet. Created at the first use, because the first lease
        # creates the secret.
        self._keyed: Any = None
        # The receipts of the last answers, by their first handle: a consumer usually acknowledges all of an answer.
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._kept_rows = 0

    def encode(self, receipt: Receipt) -> str:
        """Encode a receipt as the text of its handle."""
        return self.encode_all([receipt])[0]

    def encode_answer(self, receipts: Sequence[Receipt], group: str, topic: str) -> list[str]:
        """Encode the receipts of the answer to a receive, and cache them for `decode_all`."""
        handles = self.encode_all(receipts)
        if len(handles) > 1 and handles[0] not in self._answers:
            self._answers[handles[0]] = _Answer(group, topic, handles, receipts)
            self._kept_rows += len(handles)
            while self._kept_rows > ROWS_KEPT_MAX or len(self._answers) > ANSWERS_KEPT_MAX:
                self._kept_rows -= len(self._answers.popitem(last=False)[1].handles)
        return handles

    def encode_all(self, receipts: Sequence[Receipt]) -> list[str]:
        """Encode receipts as the texts of their handles, in their order."""
        group, topic, kind, owner = "", "", TOPIC, b""
        encoded: list[bytes] = []
        for receipt in receipts:
            # Computed once for neighbours: the receipts of an answer have one group, and nearly all have one topic.
            if receipt.topic != topic or receipt.group != group:
                group, topic = receipt.group, receipt.topic
                name = topic_of(group, topic)
                kind, owner = (TOPIC if name == topic else RETRY), _owner(group, name)
            data = _STRUCT.pack(VERSION, kind, receipt.queue_id, receipt.offset, receipt.pop_ms)
            encoded.append(binascii.b2a_base64(data + self._seal(data, owner)))
        # All lines at once: they have the same length, and end with one character of padding.
        return b"".join(encoded).translate(_TO_URL).decode().split("=\n")[:-1]

    def decode(self, text: str, group: str, topic: str) -> Receipt:
        """Decode a handle for a call that names this group and topic. Raises InvalidReceipt."""
        return self.decoder(group, topic)(text)

    def decode_all(self, texts: Sequence[str], group: str, topic: str) -> Sequence[Receipt | None]:
        """Decode the handles (at least one) of a call that names this group and topic. None for each invalid handle.

        If the handles are all handles of one cached answer, they are only compared, which takes a tenth of the time.
        """
        answer = self._answers.get(texts[0])
        if answer is not None and answer[:3] == (group, topic, texts):
            return answer.receipts
        decode, decoded = self.decoder(group, topic), list[Receipt | None]()
        for text in texts:
            try:
                decoded.append(decode(text))
            except InvalidReceipt:
                decoded.append(None)
        return decoded

    def decoder(self, group: str, topic: str) -> Callable[[str], Receipt]:
        """Build the function that decodes the handles of a call that names this group and topic, as `decode` does."""
        name = topic_of(group, topic)  # a consumer may also name the retry topic itself
        owner, retry_name = _owner(group, name), pop_retry_topic(group, name)

        def decode(text: str) -> Receipt:
            """Decode a handle. Raises InvalidReceipt."""
            data = _bytes_from_base64(text)
            content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
            if not hmac.compare_digest(seal, self._seal(content, owner)):
                raise invalid_receipt("it was not made by this broker for this group and topic")
            if len(content) != _STRUCT.size or content[0] != VERSION:
                raise invalid_receipt("it was made by another version of this broker")
            _, kind, queue_id, offset, pop_ms = _STRUCT.unpack(content)
            return Receipt(group, retry_name if kind == RETRY else name, queue_id, offset, pop_ms)

        return decode

    def _seal(self, data: bytes, owner: bytes) -> bytes:
        """Compute the seal of a handle's bytes. `owner`: as of `_owner`."""
        if self._keyed is None:
            self._keyed = blake2b(key=self._secret(), digest_size=SEAL_BYTES)
        seal = self._keyed.copy()
        seal.update(data + owner)
        digest: bytes = seal.digest()
        return digest


def _owner(group: str, topic: str) -> bytes:
    # Names contain no slash, so different pairs of names give different texts.
    return f"{group}/{topic}".encode()


def invalid_receipt(why: str) -> InvalidReceipt:
    """Create the error for a handle that identifies no valid lease."""
    return InvalidReceipt(f"receipt handle: {why}")


def _bytes_from_base64(text: str) -> bytes:
    """Decode a handle to its bytes. Raises InvalidReceipt if `encode` cannot have written this text."""
    if len(text) <= CHARACTERS_MAX and text.isascii():
        try:
            data = binascii.a2b_base64(text.encode().translate(_FROM_URL) + b"=" * (-len(text) % 4))
        except binascii.Error:
            data = b""
        # Several texts have the same bytes: the last character has spare bits, and the decoder skips characters that
        # are not in the alphabet. Only one text is accepted.
        if data and binascii.b2a_base64(data, newline=False).translate(_TO_URL).rstrip(b"=").decode() == text:
            return data
    raise invalid_receipt("this broker did not make it; return the receipt of the message unchanged")
