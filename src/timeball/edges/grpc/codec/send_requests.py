"""Decode SendMessage requests and encode their answers.

If the build had a compiler, plain_sends.pyx decodes requests of the usual form ("plain sends") in C. protobuf decodes
all others. protobuf and the checks of messages_in.py are the reference: for the same bytes, plain_sends.pyx gives the
same row at a tenth of the cost. `--codec python` forces the reference.
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
    """A request with one message of the usual form. The handler only has to check topic, due time and caller."""

    topic: tuple[str, str]  # namespace and name
    message_type: MessageType  # NORMAL, or DELAY with a due time
    due_ms: int | None
    needs_now: bool  # `row` or the check of the due time needs the current time
    size_bytes: int  # of body and properties

    def row(self, topic: str, now_ms: int, peer: str) -> SendRow:
        """Create the row with the values of SEND_NAMES.

        `now_ms` and `peer` are used as born time and born host if the producer did not set them.
        """


def decode_compiled(data: bytes) -> Any:
    """Decode a request to a PlainSend if it has the usual form, else to a SendMessageRequest. Raises DecodeError."""
    plain = read_plain(data)
    return SendMessageRequest.FromString(data) if plain is None else plain


def choose_decoder(choice: CodecChoice) -> Callable[[bytes], Any]:
    """Choose the decoder of SendMessage requests for this setting."""
    return decode_compiled if read_plain is not None and choice == "auto" else SendMessageRequest.FromString


def topics_in_send(request: Any) -> list[Resource]:
    """Find the topics in a decoded request: one, or several in a call that the handler refuses later."""
    if isinstance(request, SendMessageRequest):
        topics = [message.topic for message in request.messages]
        return list({(topic.resource_namespace, topic.name): topic for topic in topics}.values())
    namespace, name = request.topic
    return [Resource(resource_namespace=namespace, name=name)]


# The answer to accepted messages is encoded by hand, because every send gets one. protobuf's objects for an answer (one
# for the answer, and two for each message) would cost more than all other work for a send at this edge. The bytes equal
# those that protobuf writes (tests/edges/grpc/codec/test_send_answers.py):
#
#     SendMessageResponse   1 status, 2 an entry for each message
#     SendResultEntry       1 status, 2 message_id, 3 transaction_id, 4 offset, 5 recall_handle; empty ones are left out

# Keys of protobuf fields (number and wire type).
_ENTRY, _MESSAGE_ID, _TRANSACTION_ID, _OFFSET, _RECALL_HANDLE = b"\x12", b"\x12", b"\x1a", b"\x20", b"\x2a"
_SMALL = [bytes([number]) for number in range(128)]  # the varints of one byte


def encode_answer(entries: Iterable[bytes]) -> bytes:
    """Encode a SendMessageResponse with the status OK and these entries."""
    return _STATUS + b"".join(entries)


def encode_entry(message_id: str, transaction_id: str, offset: int, recall_handle: str) -> bytes:
    """Encode a SendResultEntry with the status OK, with its key and length as a field of the answer."""
    encoded_id = _encode_text(message_id)
    # Only half messages have a transaction id that differs from the message id.
    encoded_transaction = encoded_id if transaction_id == message_id else _encode_text(transaction_id)
    entry = _STATUS
    if encoded_id:
        entry += _MESSAGE_ID + encoded_id
    if encoded_transaction:
        entry += _TRANSACTION_ID + encoded_transaction
    if offset:
        entry += _OFFSET + _encode_varint(offset)
    if recall_handle:
        entry += _RECALL_HANDLE + _encode_text(recall_handle)
    return _ENTRY + _encode_varint(len(entry)) + entry


def _encode_text(text: str) -> bytes:
    """Encode a text with its length in front. An empty text is no bytes, because protobuf omits its field."""
    data = text.encode()
    size_bytes = len(data)
    if not size_bytes:
        return data
    return (_SMALL[size_bytes] if size_bytes < 128 else _encode_varint(size_bytes)) + data


def _encode_varint(number: int) -> bytes:
    """Encode a non-negative number as protobuf's varint: seven bits per byte, the lowest first."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    return bytes((number & 127 | 128, number >> 7 & 127 | 128)) + _encode_varint(number >> 14)


_OK = Status(code=Code.OK, message=Code.Name(Code.OK)).SerializeToString()
_STATUS = b"\x0a" + _encode_varint(len(_OK)) + _OK
