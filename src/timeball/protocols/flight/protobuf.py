"""Flight's protobuf messages <-> bytes: the few fields of Flight.proto that this edge reads or writes.

Written by hand because a batch's body is most of a message: it is read in place and copied once when it is written,
where protobuf's own classes copy it in and out. Does no I/O; raises InvalidMessage for bytes that are no protobuf.

    Action          1 type, 2 body            Ticket    1 ticket
    FlightData      1 descriptor, 2 header (an Arrow IPC message without its body), 3 app_metadata, 1000 body
    FlightDescriptor  1 type (1 = path), 3 path
    Result          1 body                    ActionType  1 type, 2 description        SchemaResult  1 schema
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from timeball.errors import InvalidMessage

BODY_FIELD = 1_000
DESCRIPTOR_TYPE_PATH = 1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_EMPTY = memoryview(b"")


class Data(NamedTuple):
    """A FlightData. `path` is None where there is no descriptor of that kind; the views are parts of the message."""

    path: list[bytes] | None
    described: bool
    header: memoryview
    metadata: memoryview
    body: Sequence[bytes | memoryview]  # parts that stand one behind the other
    size_bytes: int


def action(message: bytes) -> tuple[str, memoryview]:
    """Return type and body of an Action."""
    fields = dict(_fields(memoryview(message)))
    try:
        return str(_bytes(fields, 1), "utf-8"), _bytes(fields, 2)
    except UnicodeDecodeError as error:
        raise InvalidMessage("an action's type is not UTF-8") from error


def ticket(message: bytes) -> bytes:
    """Return what a Ticket holds."""
    return bytes(_bytes(dict(_fields(memoryview(message))), 1))


def data(parts: Sequence[bytes | memoryview]) -> Data:
    """Return what a FlightData says that came in parts; a body at its end is not put together from them."""
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
    """Return the fields before a body that reaches to the end of the message, and where it begins.

    None when the first part holds no more than some of those fields, or something stands behind the body.
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
        return None  # it is read whole, and refused then if it is none


def data_parts(
    header: memoryview | bytes = b"", body: memoryview = _EMPTY, metadata: bytes = b""
) -> list[bytes | memoryview]:
    """Return the parts that make a FlightData."""
    parts: list[bytes | memoryview] = []
    for number, value in ((2, header), (3, metadata), (BODY_FIELD, body)):
        if len(value):
            parts += (_tag(number, len(value)), value)
    return parts


def result(body: bytes) -> bytes:
    """Return a Result; a SchemaResult looks the same."""
    return _tag(1, len(body)) + body


def action_type(verb: str, description: str) -> bytes:
    """Return an ActionType."""
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
    """Number and value of each field, in their order; fixed-width ones, of which Flight has none, are passed over."""
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
    if at < len(message) and message[at] < 0x80:  # nearly all
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
