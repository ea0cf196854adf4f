"""Codec of the Flight edge: its JSON (actions, tickets, answers), and Flight's protobuf messages. Does no I/O.

All JSON from clients is decoded here, once, after a check of its size. The results are structs of model/wire.py, which
limit every number and length. A wrong type, an unknown field, a number beyond 64 bits or too many items is a typed
error that names the field. Only the body of `attach` has another decoder, with limits of its own (table/attachment.py).

Invariant: the results of `decode_action` and `decode_ticket` are within every limit of their types, so the server
checks no limit again.

The protobuf codec is handwritten, because the body of a batch makes up most of a message. The body is not copied on
reading, and copied once on writing. The classes of protobuf would copy it more often.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from timeball.edges.http2.frames import literal
from timeball.edges.shared.error_codes import sentence
from timeball.model import answers, wire
from timeball.model.errors import (
    UNDECODABLE,
    InvalidMessage,
    NotFound,
    OverLimit,
    RequestError,
    TimeballError,
)
from timeball.model.message import READ_SCHEMA
from timeball.model.rules import with_valid_fields
from timeball.table import attachment

# ---- actions -------------------------------------------------------------------------------------------------

ACTIONS: dict[str, tuple[type[wire.Request] | None, int, str]] = {
    # verb: (type of the body, largest size of the body in bytes, description); `attach` has a separate decoder
    "status": (wire.Nothing, wire.BODY_BYTES_MAX, "the broker's figures: messages, lateness, limits"),
    "queues": (wire.Queues, wire.BODY_BYTES_MAX, "first and next offset of each queue of a topic"),
    "source_positions": (
        wire.SourcePositions,
        wire.BODY_BYTES_MAX,
        "the positions up to which a source was sent",
    ),
    "cancel_range": (
        wire.CancelRange,
        wire.CANCEL_BODY_BYTES_MAX,
        "cancel the pending messages of a bulk job",
    ),
    "drain": (wire.Drain, wire.BODY_BYTES_MAX, "move all pending messages to another group of the cluster"),
    "campaigns": (wire.Campaigns, wire.BODY_BYTES_MAX, "campaigns (bulk writes) and their states"),
    "campaign": (wire.ChangeCampaign, wire.BODY_BYTES_MAX, "plan, pause, resume or cancel a campaign"),
    "starts": (wire.Starts, wire.BODY_BYTES_MAX, "the times at which the broker was started again"),
    "occurrences": (
        wire.Occurrences,
        wire.BODY_BYTES_MAX,
        "later occurrences of recurring schedules, by topic and interval",
    ),
    "schedules": (wire.Schedules, wire.BODY_BYTES_MAX, "recurring schedules and their states"),
    "selections": (wire.Selections, wire.BODY_BYTES_MAX, "bulk operations and the messages that they cover"),
    "reserve": (wire.Reserve, wire.BODY_BYTES_MAX, "reserve sequence numbers for a later attach"),
    "attach": (None, wire.ATTACH_BODY_BYTES_MAX, "attach data files to the pending table, all or none"),
    "compact": (wire.Nothing, wire.BODY_BYTES_MAX, "move the log's tail to the pending table now"),
    "compactor": (wire.Lease, wire.BODY_BYTES_MAX, "renew the lease of an external compactor"),
    "dispatcher": (wire.DispatcherLease, wire.BODY_BYTES_MAX, "renew the lease of an external dispatcher"),
}

# Actions for administrators whose bodies may be larger than BODY_BYTES_MAX. Their permission is checked before
# decoding.
LARGE_ADMIN_ACTIONS = ("attach", "cancel_range")

ActionRequest = wire.Request | attachment.Attachment


def body_bytes_max(verb: str) -> int:
    """Find the size limit of an action's body, in bytes. Raises NotFound for an unknown verb."""
    if verb not in ACTIONS:
        raise NotFound(f"no action {_shorten(verb)!r}; there are: {', '.join(ACTIONS)}")
    return ACTIONS[verb][1]


def decode_action(verb: str, body: bytes) -> ActionRequest:
    """Decode the body of an action. An empty body means `{}`, except for `attach`, which refuses it.

    Raises NotFound, OverLimit, RequestError, InvalidMessage.
    """
    check_size(f"the body of action {_shorten(verb)}", len(body), body_bytes_max(verb))
    body_type = ACTIONS[verb][0]
    if body_type is None:
        return attachment.decode(body)
    request: wire.Request = _decode(body or b"{}", body_type, f"the body of action {verb}")
    return request


# ---- tickets -------------------------------------------------------------------------------------------------


def decode_ticket(data: bytes) -> wire.Ticket:
    """Decode the ticket of a DoGet. Raises OverLimit, RequestError and InvalidMessage."""
    check_size("a ticket", len(data), wire.TICKET_BYTES_MAX)
    ticket: wire.Ticket = _decode(data, wire.Ticket, "the ticket")
    if isinstance(ticket, wire.ReadLog) and ticket.to_seq < ticket.from_seq:
        raise RequestError(f"the ticket: to_seq {ticket.to_seq} is before from_seq {ticket.from_seq}")
    if isinstance(ticket, wire.ReadLog) and ticket.columns is not None:
        for name in ticket.columns:
            if name not in READ_SCHEMA.names or ticket.columns.count(name) > 1:
                raise RequestError(
                    f"the ticket: columns: {name!r} is no column of the log, or is named twice"
                )
    return ticket


# ---- answers -------------------------------------------------------------------------------------------------

_encoder = msgspec.json.Encoder()
_IO_ERROR = "5"  # Arrow's StatusCode, which its clients read as a FlightServerError
_DETAIL = "Failed"


def decode_metadata(metadata: memoryview) -> str:
    """Decode the metadata of a batch as UTF-8. Empty metadata gives "". Raises InvalidMessage."""
    try:
        return str(metadata, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMessage("the metadata of a batch is JSON, and must be UTF-8") from error


def decode_send_key(metadata: str) -> wire.SendKey:
    """Decode the metadata of a batch with an idempotency key. Raises InvalidMessage, OverLimit and RequestError."""
    check_size("the metadata of a batch", len(metadata), wire.BODY_BYTES_MAX)
    key: wire.SendKey = _decode(metadata.encode(), wire.SendKey, "the metadata of a batch")
    return key


def decode_source_step(metadata: str) -> wire.SourceStep:
    """Decode the metadata of a source's batch: the positions before and after it, by partition.

    Raises InvalidMessage, OverLimit and RequestError.
    """
    check_size("the metadata of a batch", len(metadata), wire.BODY_BYTES_MAX)
    step: wire.SourceStep = _decode(metadata.encode(), wire.SourceStep, "the metadata of a batch")
    if step.begin.keys() != step.end.keys() or any(
        end < step.begin[partition] for partition, end in step.end.items()
    ):
        raise RequestError("the metadata of a batch: each partition has a begin, and an end behind it")
    return step


def encode(answer: object) -> bytes:
    """Encode an answer as JSON: a struct, or a dict or list of plain values."""
    return _encoder.encode(answer)


def encode_refusal(error: BaseException) -> bytes:
    """Encode the answer to a refused batch: the error's code and text."""
    return _encoder.encode(answers.SendRefusal(_code(error), sentence(error)))


def status_text(error: BaseException) -> str:
    """Build the message of the gRPC status with which a failed call ends, as Arrow's own server writes it."""
    return f"{sentence(error)}. Detail: {_DETAIL}"


def error_trailers(error: BaseException) -> bytes:
    """Encode the four trailers with an error for the client, as Arrow's own server writes them."""
    return b"".join(
        (
            literal("grpc-status-details-bin", _binary(_code(error))),
            literal("x-arrow-status", _IO_ERROR),
            literal("x-arrow-status-detail-bin", _binary(_DETAIL)),
            literal("x-arrow-status-message-bin", _binary(sentence(error))),
        )
    )


def _binary(text: str) -> str:
    """Encode the value of a header whose name ends with -bin."""
    return b64encode(text.encode()).decode()


def _code(error: BaseException) -> str:
    """Return the error code for clients. An internal fault has that of TimeballError."""
    return error.code if isinstance(error, TimeballError) else TimeballError.code


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# ---- decoding of JSON ----------------------------------------------------------------------------------------

T = TypeVar("T")


def check_size(subject: str, size_bytes: int, size_bytes_max: int) -> None:
    """Raise OverLimit if there are too many bytes of `subject`. Call it before the bytes are copied or parsed."""
    if size_bytes > size_bytes_max:
        raise OverLimit(f"{subject} has {size_bytes} bytes; at most {size_bytes_max}")


@cache  # there are few types, and building a decoder takes longer than decoding
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decode(data: bytes, kind: Any, subject: str) -> Any:
    """Decode JSON to a struct of type `kind`. `subject`: of the error text.

    Raises RequestError for wrong fields, and InvalidMessage for text that is no JSON.
    """
    try:
        return _decoder_of(kind).decode(data)
    except msgspec.ValidationError as error:
        raise RequestError(f"{subject}: {with_valid_fields(str(error), kind)}") from error
    except UNDECODABLE as error:
        raise InvalidMessage(f"{subject} is not JSON: {error}") from error


# ---- Flight's protobuf messages ------------------------------------------------------------------------------
# The few fields of Flight.proto that this edge reads or writes. Bytes that are not protobuf raise InvalidMessage.
#
#     Action          1 type, 2 body            Ticket    1 ticket
#     FlightData      1 descriptor, 2 header (an Arrow IPC message without its body), 3 app_metadata, 1000 body
#     FlightDescriptor  1 type (1 = path), 3 path
#     Result          1 body                    ActionType  1 type, 2 description        SchemaResult  1 schema

BODY_FIELD = 1_000
DESCRIPTOR_TYPE_PATH = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_EMPTY = memoryview(b"")


class Data(NamedTuple):
    """A decoded FlightData. The views refer to the message's bytes."""

    path: list[bytes] | None  # None without a descriptor of type PATH
    has_descriptor: bool
    header: memoryview  # of an Arrow IPC message
    metadata: memoryview
    body: Sequence[bytes | memoryview]  # consecutive parts of the body
    size_bytes: int  # of the whole message


def parse_action(message: bytes) -> tuple[str, memoryview]:
    """Decode the type and the body of an Action. Raises InvalidMessage."""
    fields = dict(_fields(memoryview(message)))
    try:
        return str(_bytes_field(fields, 1), "utf-8"), _bytes_field(fields, 2)
    except UnicodeDecodeError as error:
        raise InvalidMessage("an action's type is not UTF-8") from error


def parse_ticket(message: bytes) -> bytes:
    """Decode the bytes of a Ticket. Raises InvalidMessage."""
    return bytes(_bytes_field(dict(_fields(memoryview(message))), 1))


def parse_data(chunks: Sequence[bytes | bytearray | memoryview]) -> Data:
    """Decode a FlightData that arrived in chunks. Raises InvalidMessage.

    A body at the end of the message is not copied: it stays in the chunks.
    """
    size_bytes = sum(map(len, chunks))
    if len(chunks) > 1:
        head = _fields_before_body(memoryview(chunks[0]), size_bytes)
        if head is not None:
            fields, body_offset = head
            views = [memoryview(chunk) for chunk in chunks]
            return _data(fields, [views[0][body_offset:], *views[1:]], size_bytes)
        chunks = [b"".join(chunks)]
    fields = dict(_fields(memoryview(chunks[0])))
    return _data(fields, [_bytes_field(fields, BODY_FIELD)], size_bytes)


def _data(fields: dict[int, int | memoryview], body: Sequence[bytes | memoryview], size_bytes: int) -> Data:
    """Build the result of `parse_data` from the fields by number, and the body."""
    descriptor = fields.get(1)
    path = None if descriptor is None else _path(_bytes_field(fields, 1))
    return Data(
        path, descriptor is not None, _bytes_field(fields, 2), _bytes_field(fields, 3), body, size_bytes
    )


def _fields_before_body(first: memoryview, size_bytes: int) -> tuple[dict[int, int | memoryview], int] | None:
    """Decode the fields before the body, and find the offset of the body in the first chunk.

    None if the first chunk does not contain all these fields, or if the body does not end with the message.
    """
    fields: dict[int, int | memoryview] = {}
    offset = 0
    try:
        while True:
            tag, offset = _decode_varint(first, offset)
            number, kind = tag >> 3, tag & 7
            if kind != _BYTES:
                return None
            size, offset = _decode_varint(first, offset)
            if number == BODY_FIELD:
                return (fields, offset) if offset + size == size_bytes else None
            if size > len(first) - offset:
                return None
            fields[number] = first[offset : offset + size]
            offset += size
    except InvalidMessage:
        return None  # the caller reads the whole message, and refuses it if it is not protobuf


def encode_data(
    header: memoryview | bytes = b"", body: memoryview = _EMPTY, metadata: bytes = b""
) -> list[bytes | memoryview]:
    """Encode a FlightData as a list of segments, which the caller joins. Empty fields are left out."""
    segments: list[bytes | memoryview] = []
    # The numbers of data_header, app_metadata and data_body.
    for number, value in ((2, header), (3, metadata), (BODY_FIELD, body)):
        if len(value):
            segments += (_encode_tag(number, len(value)), value)
    return segments


def encode_result(body: bytes) -> bytes:
    """Encode a Result. A SchemaResult has the same bytes."""
    return _encode_tag(1, len(body)) + body


def encode_action_type(verb: str, description: str) -> bytes:
    """Encode an ActionType."""
    name, text = verb.encode(), description.encode()
    return _encode_tag(1, len(name)) + name + _encode_tag(2, len(text)) + text


def _path(descriptor: memoryview) -> list[bytes] | None:
    """Decode the path of a FlightDescriptor. None if it is not of type PATH. Raises InvalidMessage."""
    # Field 1 is the type, and each field 3 is a part of the path.
    fields = list(_fields(descriptor))
    if (1, DESCRIPTOR_TYPE_PATH) not in fields:
        return None
    return [bytes(value) for number, value in fields if number == 3 and isinstance(value, memoryview)]


def _bytes_field(fields: dict[int, int | memoryview], number: int) -> memoryview:
    """Return a field of type bytes, empty if it is missing. Raises InvalidMessage if it is a number."""
    value = fields.get(number, _EMPTY)
    if isinstance(value, int):
        raise InvalidMessage(f"field {number} of a Flight message is a number; it must be bytes")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field, in order. Raises InvalidMessage.

    Fixed-width fields are skipped, because Flight has none.
    """
    offset, end = 0, len(message)
    while offset < end:
        tag, offset = _decode_varint(message, offset)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, offset = _decode_varint(message, offset)
            yield number, value
            continue
        if kind == _BYTES:
            size, offset = _decode_varint(message, offset)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise InvalidMessage(f"not a Flight message: a field of protobuf's wire type {kind}")
        if size > end - offset:
            raise InvalidMessage("not a Flight message: a field is longer than the message")
        if kind == _BYTES:
            yield number, message[offset : offset + size]
        offset += size


def _decode_varint(message: memoryview, offset: int) -> tuple[int, int]:
    """Decode the varint at `offset`. Returns its value, and the offset after it. Raises InvalidMessage."""
    if offset < len(message) and message[offset] < 0x80:  # nearly all numbers have one byte
        return message[offset], offset + 1
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        if offset + shift >= len(message):
            break
        byte = message[offset + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, offset + shift + 1
    raise InvalidMessage("not a Flight message: a number without an end")


def _encode_tag(number: int, size: int) -> bytes:
    """Encode the tag of a bytes field, and the size of its value in bytes."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(size)


def _encode_varint(value: int) -> bytes:
    """Encode an unsigned number as a varint."""
    if value <= 0x7F:
        return bytes((value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
