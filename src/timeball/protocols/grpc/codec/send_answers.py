"""The answer to messages that were taken, as bytes: every send of this edge gets one, and nearly all look alike.

protobuf's own objects for it, one for the answer and two for each message, cost more than all else that a send costs
this edge. What is written is what protobuf writes of them (tests/protocols/grpc/codec/test_send_answers.py):

    SendMessageResponse   1 status, 2 an entry for each message
    SendResultEntry       1 status, 2 message_id, 3 transaction_id, 4 offset, 5 recall_handle; empty ones are left out
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from timeball.protocols.grpc._generated.definition_pb2 import Code, Status

_ENTRY, _MESSAGE_ID, _TRANSACTION_ID, _OFFSET, _RECALL_HANDLE = b"\x12", b"\x12", b"\x1a", b"\x20", b"\x2a"
_LENGTHS = [bytes([size]) for size in range(128)]  # varints of one byte


class SendEntry(NamedTuple):
    """What a client is told of one message."""

    message_id: str
    transaction_id: str
    offset: int
    recall_handle: str


def encode_answer(entries: Iterable[SendEntry]) -> bytes:
    """Return a SendMessageResponse with these entries, each of which is OK."""
    parts = [_STATUS]
    for message_id, transaction_id, offset, recall_handle in entries:
        entry = _STATUS + _text(_MESSAGE_ID, message_id) + _text(_TRANSACTION_ID, transaction_id)
        if offset:
            entry += _OFFSET + _varint(offset)
        entry += _text(_RECALL_HANDLE, recall_handle)
        parts += (_ENTRY, _varint(len(entry)), entry)
    return b"".join(parts)


def _text(key: bytes, text: str) -> bytes:
    if not text:
        return b""
    data = text.encode()
    return key + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """Return protobuf's number of seven bits a byte; not negative."""
    if number < 128:
        return _LENGTHS[number]
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


_OK = Status(code=Code.OK, message=Code.Name(Code.OK)).SerializeToString()
_STATUS = b"\x0a" + _varint(len(_OK)) + _OK
