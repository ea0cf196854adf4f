"""The answer to messages that were taken, as bytes: every send of this edge gets one, and nearly all look alike.

protobuf's own objects for it, one for the answer and two for each message, cost more than all else that a send costs
this edge. What is written is what protobuf writes of them (tests/protocols/grpc/codec/test_send_answers.py):

    SendMessageResponse   1 status, 2 an entry for each message
    SendResultEntry       1 status, 2 message_id, 3 transaction_id, 4 offset, 5 recall_handle; empty ones are left out
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball.protocols.grpc._generated.definition_pb2 import Code, Status

_ENTRY, _MESSAGE_ID, _TRANSACTION_ID, _OFFSET, _RECALL_HANDLE = b"\x12", b"\x12", b"\x1a", b"\x20", b"\x2a"
_SMALL = [bytes([number]) for number in range(128)]  # numbers of one byte


def encode_answer(entries: Iterable[bytes]) -> bytes:
    """Return a SendMessageResponse that is OK, with these entries."""
    return _STATUS + b"".join(entries)


def encode_entry(message_id: str, transaction_id: str, offset: int, recall_handle: str) -> bytes:
    """Return a SendResultEntry that is OK, as a field of the answer."""
    named = _text(message_id)
    # Only a half message has another transaction than its own name.
    transaction = named if transaction_id == message_id else _text(transaction_id)
    entry = _STATUS
    if named:
        entry += _MESSAGE_ID + named
    if transaction:
        entry += _TRANSACTION_ID + transaction
    if offset:
        entry += _OFFSET + _number(offset)
    if recall_handle:
        entry += _RECALL_HANDLE + _text(recall_handle)
    return _ENTRY + _number(len(entry)) + entry


def _text(text: str) -> bytes:
    """Return a text behind its length; nothing for an empty one."""
    data = text.encode()
    size_bytes = len(data)
    if not size_bytes:
        return data
    return (_SMALL[size_bytes] if size_bytes < 128 else _number(size_bytes)) + data


def _number(number: int) -> bytes:
    """Return protobuf's number of seven bits a byte; not negative."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    return bytes((number & 127 | 128, number >> 7 & 127 | 128)) + _number(number >> 14)


_OK = Status(code=Code.OK, message=Code.Name(Code.OK)).SerializeToString()
_STATUS = b"\x0a" + _number(len(_OK)) + _OK
