"""Flight's protobuf messages <-> bytes: the few fields of Flight.proto that this edge reads or writes.

This codec is handwritten, because the body of a batch is most of a message. It is read in place, and copied once when
it is written. The classes of protobuf copy it in and out. Does no I/O. Raises InvalidMessage for bytes that are not
protobuf.

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
    """A FlightData. `path` is None without a descriptor of type PATH. The views are parts of the message."""

    path: list[bytes] | None
    described: bool
    header: memoryview
    metadata: memoryview
    body: Sequence[bytes | memoryview]  # consecutive parts of the body
    size_bytes: int


def action(message: bytes) -> tuple[str, memoryview]:
    """Decode the type and the body of an Action."""
    fields = dict(_fields(memoryview(message)))
    try:
        return str(_bytes(fields, 1), "utf-8"), _bytes(fields, 2)
    except UnicodeDecodeError as error:
        raise InvalidMessage("an action's type is not UTF-8") from error


def ticket(message: bytes) -> bytes:
    """Decode the bytes of a Ticket."""
    return bytes(_bytes(dict(_fields(memoryview(message))), 1))


def data(parts: Sequence[bytes | memoryview]) -> Data:
    """Decode a FlightData that arrived in parts. A body at its end stays in these parts and is not joined."""
    size_bytes = sum(map(len, parts))
    if len(parts) > 1:
        found = _until_body(memoryview(parts[0]), size_bytes)
        if found is not None:
            fields, begin = found
            return _data(fields, [memoryview(parts[0])[begin:], *parts[1:]], size_bytes)
        parts = [b"".join(parts)]
    fields = dict(_fields(memoryview(parts[0])))
    return _data(fields, [_bytes(fields, BODY_FIELD)], size_bytes)


def _data(fields: dict[int, int | memoryview], body: Sequence[bytes | memoryview], size_bytes: int) -> Data:
    descriptor = fields.get(1)
    path = None if descriptor is None else _path(_bytes(fields, 1))
    return Data(path, descriptor is not None, _bytes(fields, 2), _bytes(fields, 3), body, size_bytes)


def _until_body(first: memoryview, size_bytes: int) -> tuple[dict[int, int | memoryview], int] | None:
    """Decode the fields before a body that reaches to the end of the message, and find the offset of the body.

    None if the first part does not contain all of those fields, or if the body is not the last field.
    """
    fields: dict[int, int | memoryview] = {}
    at = 0
    try:
        while True:
            tag, at = _varint(first, at)
            number, kind = tag >> 3, tag & 7
            if kind != _BYTES:
                return None
            size, at = _varint(first, at)
            if number == BODY_FIELD:
                return (fields, at) if at + size == size_bytes else None
            if size > len(first) - at:
                return None
            fields[number] = first[at : at + size]
            at += size
    except InvalidMessage:
        return None  # the caller reads the whole message, and refuses it if it is not protobuf


def data_parts(
    header: memoryview | bytes = b"", body: memoryview = _EMPTY, metadata: bytes = b""
) -> list[bytes | memoryview]:
    """Encode a FlightData as a list of parts to be joined."""
    parts: list[bytes | memoryview] = []
    for number, value in ((2, header), (3, metadata), (BODY_FIELD, body)):
        if len(value):
            parts += (_tag(number, len(value)), value)
    return parts


def result(body: bytes) -> bytes:
    """Encode a Result. A SchemaResult has the same bytes."""
    return _tag(1, len(body)) + body


def action_type(verb: str, description: str) -> bytes:
    """Encode an ActionType."""
    name, text = verb.encode(), description.encode()
    return _tag(1, len(name)) + name + _tag(2, len(text)) + text


def _path(descriptor: memoryview) -> list[bytes] | None:
    fields = list(_fields(descriptor))
    if (1, DESCRIPTOR_TYPE_PATH) not in fields:
        return None
    return [bytes(value) for number, value in fields if number == 3 and isinstance(value, memoryview)]


def _bytes(fields: dict[int, int | memoryview], number: int) -> memoryview:
    value = fields.get(number, _EMPTY)
    if isinstance(value, int):
        raise InvalidMessage(f"field {number} of a Flight message is a number; it must be bytes")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field, in order. Fixed-width fields are skipped, because Flight has none."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise InvalidMessage(f"not a Flight message: a field of protobuf's wire type {kind}")
        if size > end - at:
            raise InvalidMessage("not a Flight message: a field is longer than the message")
        if kind == _BYTES:
            yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    if at < len(message) and message[at] < 0x80:  # nearly all numbers have one byte
        return message[at], at + 1
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        if at + shift >= len(message):
            break
        byte = message[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise InvalidMessage("not a Flight message: a number without an end")


def _tag(number: int, size: int) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(size)


def _encoded(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
