"""Flight's protobuf messages <-> bytes: the few fields of Flight.proto that this edge reads or writes.

This codec is handwritten, because the body of a batch makes up most of a message. The body is not copied on reading,
and copied once on writing. The classes of protobuf would copy it more often. Does no I/O. Raises InvalidMessage for
bytes that are not protobuf.

    Action          1 type, 2 body            Ticket    1 ticket
    FlightData      1 descriptor, 2 header (an Arrow IPC message without its body), 3 app_metadata, 1000 body
    FlightDescriptor  1 type (1 = path), 3 path
    Result          1 body                    ActionType  1 type, 2 description        SchemaResult  1 schema
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from timeball.model.errors import InvalidMessage

BODY_FIELD = 1_000
DESCRIPTOR_TYPE_PATH = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_EMPTY = memoryview(b"")


class Data(NamedTuple):
    """A decoded FlightData.

    `path` is None without a descriptor of type PATH. The views refer to the message's bytes.
    """

    path: list[bytes] | None
    has_descriptor: bool
    header: memoryview
    metadata: memoryview
    body: Sequence[bytes | memoryview]  # consecutive parts of the body
    size_bytes: int


def parse_action(message: bytes) -> tuple[str, memoryview]:
    """Decode the type and the body of an Action."""
    fields = dict(_fields(memoryview(message)))
    try:
        return str(_bytes_field(fields, 1), "utf-8"), _bytes_field(fields, 2)
    except UnicodeDecodeError as error:
        raise InvalidMessage("an action's type is not UTF-8") from error


def parse_ticket(message: bytes) -> bytes:
    """Decode the bytes of a Ticket."""
    return bytes(_bytes_field(dict(_fields(memoryview(message))), 1))


def parse_data(chunks: Sequence[bytes | memoryview]) -> Data:
    """Decode a FlightData that arrived in several chunks. A body at its end is not copied: it stays in the chunks."""
    size_bytes = sum(map(len, chunks))
    if len(chunks) > 1:
        head = _fields_before_body(memoryview(chunks[0]), size_bytes)
        if head is not None:
            fields, body_offset = head
            return _data(fields, [memoryview(chunks[0])[body_offset:], *chunks[1:]], size_bytes)
        chunks = [b"".join(chunks)]
    fields = dict(_fields(memoryview(chunks[0])))
    return _data(fields, [_bytes_field(fields, BODY_FIELD)], size_bytes)


def _data(fields: dict[int, int | memoryview], body: Sequence[bytes | memoryview], size_bytes: int) -> Data:
    descriptor = fields.get(1)
    path = None if descriptor is None else _path(_bytes_field(fields, 1))
    return Data(
        path, descriptor is not None, _bytes_field(fields, 2), _bytes_field(fields, 3), body, size_bytes
    )


def _fields_before_body(first: memoryview, size_bytes: int) -> tuple[dict[int, int | memoryview], int] | None:
    """Decode the fields before the body, and find the offset of the body, which must reach to the end of the message.

    None if the first chunk does not contain all of those fields, or if the body is not the last field.
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
    """Encode a FlightData as a list of segments, which the caller joins."""
    segments: list[bytes | memoryview] = []
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
    """Decode the path of a FlightDescriptor. None if it is not of type PATH."""
    fields = list(_fields(descriptor))
    if (1, DESCRIPTOR_TYPE_PATH) not in fields:
        return None
    return [bytes(value) for number, value in fields if number == 3 and isinstance(value, memoryview)]


def _bytes_field(fields: dict[int, int | memoryview], number: int) -> memoryview:
    """Look up a field of type bytes, empty if it is missing. Raises InvalidMessage if it is a number."""
    value = fields.get(number, _EMPTY)
    if isinstance(value, int):
        raise InvalidMessage(f"field {number} of a Flight message is a number; it must be bytes")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field, in order. Fixed-width fields are skipped, because Flight has none."""
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
    """Decode the varint at `offset`. The result is its value, and the offset after it."""
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
