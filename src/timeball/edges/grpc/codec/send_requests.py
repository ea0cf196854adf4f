"""Read sends: a plain send in C (plain_sends.pyx) if the build had a compiler, any other by protobuf.

protobuf and the checks of messages_in.py are the reference. For the same bytes, a plain send gives the same row at a
tenth of the cost. `--codec python` forces the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from timeball.edges.grpc._generated.definition_pb2 import Code, MessageType, Resource, Status
from timeball.edges.grpc._generated.service_pb2 import SendMessageRequest
from timeball.model.config import CodecChoice
from timeball.model.message import SendRow

try:
    from timeball.edges.grpc.codec.plain_sends import read_plain  # type: ignore[import-not-found]
except ImportError:  # The build had no compiler.
    read_plain = None


class PlainSend(Protocol):
    """One message with nothing unusual: only its topic, its due time and its caller are still to be checked."""

    topic: tuple[str, str]  # namespace and name
    kind: MessageType  # NORMAL, or DELAY with a due time
    due_ms: int | None
    needs_now: bool  # it has a due time, or no time of birth
    size_bytes: int  # of body and properties

    def row(self, topic: str, now_ms: int, peer: str) -> SendRow:
        """Return the values of SEND_NAMES; `now_ms` and `peer` replace values that the producer did not set."""


def decode_compiled(data: bytes) -> Any:
    """Return a PlainSend or a SendMessageRequest. Raises DecodeError."""
    plain = read_plain(data)
    return SendMessageRequest.FromString(data) if plain is None else plain


def decoder_of(choice: CodecChoice) -> Callable[[bytes], Any]:
    """Return the decoder of sends for this setting."""
    return decode_compiled if read_plain is not None and choice == "auto" else SendMessageRequest.FromString


def topics_of(request: Any) -> list[Resource]:
    """Return the topics of a send: one, or several in a call that is refused later."""
    if isinstance(request, SendMessageRequest):
        found = {(each.topic.resource_namespace, each.topic.name): each.topic for each in request.messages}
        return list(found.values())
    namespace, name = request.topic
    return [Resource(resource_namespace=namespace, name=name)]


# Encode the answer to accepted messages. Every send of this edge gets one, and nearly all are alike.
#
# protobuf's own objects for an answer (one for it, and two for each message) cost more than the rest of a send at this
# edge. The bytes written here equal those that protobuf writes (tests/edges/grpc/codec/test_send_answers.py):
#
#     SendMessageResponse   1 status, 2 an entry for each message
#     SendResultEntry       1 status, 2 message_id, 3 transaction_id, 4 offset, 5 recall_handle; empty ones are left out

_ENTRY, _MESSAGE_ID, _TRANSACTION_ID, _OFFSET, _RECALL_HANDLE = b"\x12", b"\x12", b"\x1a", b"\x20", b"\x2a"
_SMALL = [bytes([number]) for number in range(128)]  # numbers of one byte


def encode_answer(entries: Iterable[bytes]) -> bytes:
    """Encode a SendMessageResponse with the status OK and these entries."""
    return _STATUS + b"".join(entries)


def encode_entry(message_id: str, transaction_id: str, offset: int, recall_handle: str) -> bytes:
    """Encode a SendResultEntry with the status OK, as a field of the answer."""
    named = _text(message_id)
    # Only half messages have a transaction id that differs from the message id.
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
    """Encode a text with its length in front, or an empty text as no bytes."""
    data = text.encode()
    size_bytes = len(data)
    if not size_bytes:
        return data
    return (_SMALL[size_bytes] if size_bytes < 128 else _number(size_bytes)) + data


def _number(number: int) -> bytes:
    """Encode a non-negative number as protobuf does, seven bits per byte."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    return bytes((number & 127 | 128, number >> 7 & 127 | 128)) + _number(number >> 14)


_OK = Status(code=Code.OK, message=Code.Name(Code.OK)).SerializeToString()
_STATUS = b"\x0a" + _number(len(_OK)) + _OK
