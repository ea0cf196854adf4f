"""Decode the header of a send and encode its answer. This is the hottest Python code of the edge.

Current producers name the fields with a letter (SEND_MESSAGE_V2, SEND_BATCH_MESSAGE). The C++ client and old clients
use long names (SEND_MESSAGE). A JSON header is decoded into a typed structure in one call, which also converts texts to
numbers. Decoding a binary header field by field in Python would be slower. But its fields have a fixed order, and most
of them are the same for all messages of a producer to a queue: those before `g` (the born time) and those after `i`
(the properties). These two parts are cached, by their bytes:

    | a group | b topic | c … | d … | e queue | f sys flag | g born | h flag | i properties | j … n |
      \\------------- looked up whole in a cache -----------/                                \\--cached--/

A part is decoded field by field once. It is reused only for exactly the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, cast

import msgspec

from timeball.edges.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    Language,
    RequestCode,
    ResponseCode,
)
from timeball.edges.remoting.codec.frame import (
    BINARY,
    HEADER_BYTES_MAX,
    JSON,
    BadHeader,
    Command,
    Frame,
    Int32,
    bad_header,
    decode,
    header_too_large,
)
from timeball.edges.remoting.codec.records import Host
from timeball.model.errors import UNDECODABLE

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

SHORT_NAMES = {
    "group": "a", "topic": "b", "default_topic": "c", "default_queues": "d", "queue_id": "e", "sys_flag": "f",
    "born_ms": "g", "flag": "h", "properties": "i", "reconsume_times": "j", "unit_mode": "k",
    "max_reconsume_times": "l", "batch": "m",
}  # fmt: skip
LONG_NAMES = {
    "group": "producerGroup", "topic": "topic", "default_topic": "defaultTopic",
    "default_queues": "defaultTopicQueueNums", "queue_id": "queueId", "sys_flag": "sysFlag",
    "born_ms": "bornTimestamp", "flag": "flag", "properties": "properties", "reconsume_times": "reconsumeTimes",
    "unit_mode": "unitMode", "max_reconsume_times": "maxReconsumeTimes", "batch": "batch",
}  # fmt: skip


class SendFields(msgspec.Struct, rename=SHORT_NAMES, gc=False):
    """The fields of a send, without the body. All but the topic are optional on the wire."""

    topic: str
    group: str | None = None
    default_topic: str | None = None
    default_queues: Int32 | None = None
    queue_id: Int32 | None = None
    sys_flag: Int32 | None = None
    born_ms: Int64 | None = None
    flag: Int32 | None = None
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None
    batch: bool | None = None


# The same fields with the long names. Not a subclass, since msgspec renames only fields that a class declares itself.
LongFields = msgspec.defstruct(
    "LongFields",
    [
        (field.name, field.type) if field.required else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(SendFields)
    ],
    rename=LONG_NAMES,
)


class SendHeader(msgspec.Struct, gc=False):
    """The header of one send."""

    code: Int32
    fields: SendFields = msgspec.field(name="extFields")
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = 0


class _LongHeader(msgspec.Struct, gc=False):
    code: Int32
    fields: LongFields = msgspec.field(name="extFields")  # type: ignore[valid-type]
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = 0


SEND_CODES = frozenset(
    {int(RequestCode.SEND_MESSAGE), int(RequestCode.SEND_MESSAGE_V2), int(RequestCode.SEND_BATCH_MESSAGE)}
)
_LONG = int(RequestCode.SEND_MESSAGE)
_decode = msgspec.json.Decoder(SendHeader, strict=False).decode
# A _LongHeader has the attributes of a SendHeader, and only the names on the wire differ. So it is used as one.
_decode_long = cast(Callable[[bytes], SendHeader], msgspec.json.Decoder(_LongHeader, strict=False).decode)

_FIXED = struct.Struct(">hBhii")
_CODE = struct.Struct(">h")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_LENGTHS = struct.Struct(">ii")  # of the remark and of the extFields
_EXT_AT = _FIXED.size + 8  # position of the extFields, after an empty remark and their length
_BORN = b"\x00\x01g\x00\x00\x00\x0d"  # field `g` with 13 digits: the born time in ms, until the year 2286
_BORN_BYTES = 13
_FLAG = b"\x00\x01h"
_PROPERTIES = b"\x00\x01i"
CACHED_MAX = 4_096
CACHED_BYTES_MAX = 512  # of one entry. With headers of 64 KiB, the cache could take hundreds of megabytes
_first_parts: dict[bytes, SendFields] = {}
_last_parts: dict[bytes, SendFields] = {}


def read_send(frame: Frame) -> SendHeader | None:
    """Decode the header of a send. Returns None for other requests. Raises BadHeader, or BadFrame (see `decode`)."""
    header = frame.header
    if len(header) > HEADER_BYTES_MAX:
        raise header_too_large(frame)
    if frame.serialisation == JSON:
        code = _json_code(header)
        if code is None:
            return from_command(decode(frame))
        if code not in SEND_CODES:
            return None
        try:
            return _decode_long(header) if code == _LONG else _decode(header)
        except UNDECODABLE as error:
            raise bad_header(frame, f"the header of a send: {error}") from error
    if frame.serialisation == BINARY and len(header) >= 2 and _CODE.unpack_from(header)[0] in SEND_CODES:
        return _read_cached(header) or from_command(decode(frame))
    return None


def _json_code(header: bytes) -> int | None:
    """Read the request code if it is the first field, as in all known clients. Otherwise returns None."""
    if header[:8] != b'{"code":':
        return None
    end = header.find(b",", 8, 16)
    digits = header[8:end] if end >= 0 else b""
    return int(digits) if digits.isdigit() else None


def from_command(command: Command) -> SendHeader | None:
    """Convert a decoded command to the header of a send. Returns None for other requests. Raises BadHeader."""
    if command.code not in SEND_CODES or command.is_response:
        return None
    fields_type = LongFields if command.code == RequestCode.SEND_MESSAGE else SendFields
    try:
        fields = cast(SendFields, msgspec.convert(command.ext, fields_type, strict=False))
    except msgspec.ValidationError as error:
        raise BadHeader(f"the header of a send: {error}", command, ResponseCode.INVALID_PARAMETER) from error
    return SendHeader(command.code, fields, command.opaque, command.flag, command.version)


def _read_cached(header: bytes) -> SendHeader | None:
    """Decode a binary header with the caches. Returns None if it does not have the usual form."""
    if len(header) < _EXT_AT:
        return None
    code, _, version, opaque, flag = _FIXED.unpack_from(header)
    born_position = header.find(_BORN, _EXT_AT)
    if code == _LONG or born_position < 0:
        return None
    try:
        remark_bytes, ext_bytes = _LENGTHS.unpack_from(header, _FIXED.size)
        if remark_bytes != 0 or ext_bytes != len(header) - _EXT_AT:
            return None
        first_part = _decode_part_cached(_first_parts, header[_EXT_AT:born_position])
        position = born_position + len(_BORN) + _BORN_BYTES
        born_ms = int(header[position - _BORN_BYTES : position])
        flag_digits, position = _read_value(header, position, _FLAG)
        message_flag = int(flag_digits)
        properties, position = _read_value(header, position, _PROPERTIES)
        last_part = _decode_part_cached(_last_parts, header[position:])
        if first_part is None or last_part is None or not -(1 << 31) <= message_flag < 1 << 31:
            return None
        fields = SendFields(
            first_part.topic, first_part.group, first_part.default_topic, first_part.default_queues,
            first_part.queue_id, first_part.sys_flag, born_ms, message_flag, properties.decode(),
            last_part.reconsume_times, last_part.unit_mode, last_part.max_reconsume_times, last_part.batch,
        )  # fmt: skip
    except (ValueError, struct.error):
        return None  # `decode` reads every field and names the fault
    return SendHeader(code, fields, opaque, flag, version)


def _read_value(header: bytes, position: int, name: bytes) -> tuple[bytes, int]:
    """Read the field that must begin at `position`. Returns its value and the position of the next field.

    `name` is the encoded name of the field. Raises ValueError if another field is there.
    """
    if header[position : position + len(name)] != name:
        raise ValueError("not the usual order")
    (value_bytes,) = _INT.unpack_from(header, position + len(name))
    start = position + len(name) + 4
    if value_bytes < 0 or start + value_bytes > len(header):
        raise ValueError("a length beyond the header")
    return header[start : start + value_bytes], start + value_bytes


def _decode_part_cached(cache: dict[bytes, SendFields], data: bytes) -> SendFields | None:
    """Look up the fields of one of the two cached parts of a header, or decode them as `_decode_part` does."""
    fields = cache.get(data)
    if fields is None:
        fields = _decode_part(data)
        if fields is not None and len(data) <= CACHED_BYTES_MAX:
            if len(cache) >= CACHED_MAX:
                cache.clear()  # the entries can be decoded again, and hostile headers must not fill the memory
            cache[data] = fields
    return fields


def _decode_part(data: bytes) -> SendFields | None:
    """Decode complete name-value pairs. Without a topic among them, the topic is empty.

    Returns None if they are incomplete or have invalid values. Raises ValueError or struct.error for invalid bytes.
    """
    pairs: dict[str, str] = {"b": ""}
    position = 0
    while position < len(data):
        (name_bytes,) = _SHORT.unpack_from(data, position)
        name = data[position + 2 : position + 2 + name_bytes].decode()
        (value_bytes,) = _INT.unpack_from(data, position + 2 + name_bytes)
        value_position = position + 6 + name_bytes
        position = value_position + value_bytes
        if name_bytes < 0 or value_bytes < 0 or position > len(data):
            return None  # the bytes of _BORN were found inside a value
        pairs[name] = data[value_position:position].decode()
    try:
        return msgspec.convert(pairs, SendFields, strict=False)
    except msgspec.ValidationError:
        return None


# ---- answers -------------------------------------------------------------------------------------------------------


# Answers are formatted from a template: at 500,000 per second, a dictionary per answer is too slow. The fields are
# those of RocketMQ's SendMessageResponseHeader. `extFields` is never absent, because Java clients read TRACE_ON and
# MSG_REGION without a null check, in answers to sends and to recalls. Clients trace only sends whose answer has these
# two fields.
TRACED = {"TRACE_ON": "true", "MSG_REGION": "DefaultRegion"}
_TRACED_JSON = msgspec.json.encode(TRACED).decode().strip("{}")

_PREFIX = struct.Struct(">iI")
# The prefix, then code, language, version, opaque, flag, length of the remark, length of the extFields.
_BINARY = struct.Struct(">iIhBhiiii")
_BINARY_TYPE = 1 << 24
_RESPONSE = int(CommandFlag.RESPONSE)


def host_digits(host: Host) -> str:
    """Encode the first part of an offsetMsgId, which names the broker. 16 digits of the sequence number follow it."""
    return (host.address + struct.pack(">i", host.port)).hex().upper()


def encode_reply(
    opaque: int,
    serialisation: int,
    queue_id: int,
    queue_offset: int,
    msg_ids: str,
    unique_key: str,
    recall_handle: str = "",
) -> bytes:
    """Encode the answer to a send as a frame.

    `msg_ids` is an offsetMsgId, or for a batch several of them, separated by commas. So is `unique_key`. An empty
    `recall_handle` is left out.
    """
    if serialisation != JSON:
        return _encode_binary(opaque, queue_id, queue_offset, msg_ids, unique_key, recall_handle)
    # Clients choose the keys, so a key with special characters is escaped by the JSON encoder.
    key = f'"{unique_key}"' if unique_key.isalnum() else msgspec.json.encode(unique_key).decode()
    recall = f',"recallHandle":{msgspec.json.encode(recall_handle).decode()}' if recall_handle else ""
    header = (
        f'{{"code":0,"extFields":{{"queueId":"{queue_id}",{_TRACED_JSON},'
        f'"msgId":"{msg_ids}","queueOffset":"{queue_offset}","transactionId":{key}{recall}}},'
        f'"flag":1,"language":"JAVA","opaque":{opaque},"serializeTypeCurrentRPC":"JSON",'
        f'"version":{BROKER_VERSION}}}'
    ).encode()
    return _PREFIX.pack(4 + len(header), len(header)) + header


def _encode_binary(
    opaque: int, queue_id: int, queue_offset: int, msg_ids: str, unique_key: str, recall_handle: str
) -> bytes:
    """Encode the answer to a send as a frame with a binary header. The arguments are those of `encode_reply`."""
    queue, offset, ids, key = b"%d" % queue_id, b"%d" % queue_offset, msg_ids.encode(), unique_key.encode()
    pack_length = _INT.pack  # not by `_pair`: four calls would take 0.4 us per answer
    ext = b"".join(
        (
            _TRACED_BINARY, _QUEUE_ID, pack_length(len(queue)), queue, _MSG_ID, pack_length(len(ids)), ids,
            _QUEUE_OFFSET, pack_length(len(offset)), offset, _TRANSACTION_ID, pack_length(len(key)), key,
            _pair(_RECALL_HANDLE, recall_handle.encode()) if recall_handle else b"",
        )
    )  # fmt: skip
    header_bytes = _BINARY.size - _PREFIX.size + len(ext)
    type_and_header_bytes = _BINARY_TYPE | header_bytes
    success, remark_bytes = 0, 0
    return (
        _BINARY.pack(
            4 + header_bytes, type_and_header_bytes, success, Language.JAVA, BROKER_VERSION, opaque, _RESPONSE,
            remark_bytes, len(ext),
        )
        + ext
    )  # fmt: skip


def _pair(name: bytes, value: bytes) -> bytes:
    return name + _INT.pack(len(value)) + value


def _with_length(name: bytes) -> bytes:
    return struct.pack(">h", len(name)) + name


_QUEUE_ID, _MSG_ID = _with_length(b"queueId"), _with_length(b"msgId")
_QUEUE_OFFSET, _TRANSACTION_ID = _with_length(b"queueOffset"), _with_length(b"transactionId")
_RECALL_HANDLE = _with_length(b"recallHandle")
_TRACED_BINARY = b"".join(
    _pair(_with_length(name.encode()), value.encode()) for name, value in TRACED.items()
)
