"""Read the header of a send straight into its fields and write its answer: the hottest code of this edge.

Current producers name the fields with a letter (SEND_MESSAGE_V2, SEND_BATCH_MESSAGE). The C++ client and old clients
use words (SEND_MESSAGE). A JSON header is decoded into a typed structure in one call, which also turns text into
numbers. A binary header would be slower, because it takes a Python step per field. But its fields have a fixed order.
The fields before `g` (the time of birth) are the same for all messages of a producer to a queue. So are those behind
`i` (the properties). These two parts are cached:

    | a group | b topic | c … | d … | e queue | f sys flag | g born | h flag | i properties | j … n |
      \\------------- looked up whole in a cache -----------/                                \\--cached--/

A part enters the cache after it was read field by field. It is found again only for exactly the same bytes.
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


# The same fields, named in words. Not a subclass: msgspec renames only the fields that a class itself declares.
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
# The attributes are the same, only the names on the wire differ. So the result is used as a SendHeader.
_decode_long = cast(Callable[[bytes], SendHeader], msgspec.json.Decoder(_LongHeader, strict=False).decode)

_FIXED = struct.Struct(">hBhii")
_CODE = struct.Struct(">h")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_LENGTHS = struct.Struct(">ii")  # of the remark and of the extFields
_EXT_AT = _FIXED.size + 8  # behind an empty remark and the length of the extFields
_BORN = b"\x00\x01g\x00\x00\x00\x0d"  # `g`, 13 digits: the time of birth in ms, until the year 2286
_BORN_BYTES = 13
_FLAG = b"\x00\x01h"
_PROPERTIES = b"\x00\x01i"
CACHED_MAX = 4_096
CACHED_BYTES_MAX = 512  # of one entry: with headers of 64 KiB the cache could take hundreds of megabytes
_heads: dict[bytes, SendFields] = {}
_tails: dict[bytes, SendFields] = {}


def read_send(frame: Frame) -> SendHeader | None:
    """Return the header of a send, or None for another request. Raises BadFrame and BadHeader."""
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
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise bad_header(frame, f"the header of a send: {error}") from error
    if frame.serialisation == BINARY and len(header) >= 2 and _CODE.unpack_from(header)[0] in SEND_CODES:
        return _read_cached(header) or from_command(decode(frame))
    return None


def _json_code(header: bytes) -> int | None:
    """Return the request code if it is the first field, as with every client seen so far, otherwise None."""
    if header[:8] != b'{"code":':
        return None
    end = header.find(b",", 8, 16)
    digits = header[8:end] if end >= 0 else b""
    return int(digits) if digits.isdigit() else None


def from_command(command: Command) -> SendHeader | None:
    """Return the header of a send from a decoded command, or None for another request. Raises BadHeader."""
    if command.code not in SEND_CODES or command.is_response:
        return None
    kind = LongFields if command.code == RequestCode.SEND_MESSAGE else SendFields
    try:
        fields = cast(SendFields, msgspec.convert(command.ext, kind, strict=False))
    except msgspec.ValidationError as error:
        raise BadHeader(f"the header of a send: {error}", command, ResponseCode.INVALID_PARAMETER) from error
    return SendHeader(command.code, fields, command.opaque, command.flag, command.version)


def _read_cached(header: bytes) -> SendHeader | None:
    """Read a binary header with the help of the cache, or return None if it does not have the usual form."""
    if len(header) < _EXT_AT:
        return None
    code, _, version, opaque, flag = _FIXED.unpack_from(header)
    born_at = header.find(_BORN, _EXT_AT)
    if code == _LONG or born_at < 0:
        return None
    try:
        remark_bytes, ext_bytes = _LENGTHS.unpack_from(header, _FIXED.size)
        if remark_bytes != 0 or ext_bytes != len(header) - _EXT_AT:
            return None
        head = _cached(_heads, header[_EXT_AT:born_at])
        at = born_at + len(_BORN) + _BORN_BYTES
        born_ms = int(header[at - _BORN_BYTES : at])
        digits, at = _value(header, at, _FLAG)
        message_flag = int(digits)
        properties, at = _value(header, at, _PROPERTIES)
        tail = _cached(_tails, header[at:])
        if head is None or tail is None or not -(1 << 31) <= message_flag < 1 << 31:
            return None
        fields = SendFields(
            head.topic, head.group, head.default_topic, head.default_queues, head.queue_id, head.sys_flag,
            born_ms, message_flag, properties.decode(), tail.reconsume_times, tail.unit_mode,
            tail.max_reconsume_times, tail.batch,
        )  # fmt: skip
    except (ValueError, struct.error):
        return None  # `decode` reads every field and names the fault
    return SendHeader(code, fields, opaque, flag, version)


def _value(header: bytes, at: int, name: bytes) -> tuple[bytes, int]:
    """Return the value of the field `name` that must begin at `at`, and the position of the next field."""
    if header[at : at + len(name)] != name:
        raise ValueError("not the usual order")
    (size,) = _INT.unpack_from(header, at + len(name))
    begin = at + len(name) + 4
    if size < 0 or begin + size > len(header):
        raise ValueError("a length that lies")
    return header[begin : begin + size], begin + size


def _cached(cache: dict[bytes, SendFields], data: bytes) -> SendFields | None:
    found = cache.get(data)
    if found is None:
        found = _read_pairs(data)
        if found is not None and len(data) <= CACHED_BYTES_MAX:
            if len(cache) >= CACHED_MAX:
                cache.clear()  # it can be computed again, and hostile headers must not fill the memory
            cache[data] = found
    return found


def _read_pairs(data: bytes) -> SendFields | None:
    """Read a run of whole key-value pairs. A run without a topic gets an empty one."""
    pairs: dict[str, str] = {"b": ""}
    at = 0
    while at < len(data):
        (size,) = _SHORT.unpack_from(data, at)
        name = data[at + 2 : at + 2 + size].decode()
        (value_size,) = _INT.unpack_from(data, at + 2 + size)
        begin = at + 6 + size
        at = begin + value_size
        if size < 0 or value_size < 0 or at > len(data):
            return None  # the bytes of _BORN were found inside a value
        pairs[name] = data[begin:at].decode()
    try:
        return msgspec.convert(pairs, SendFields, strict=False)
    except msgspec.ValidationError:
        return None


# ---- answers -------------------------------------------------------------------------------------------------------


# Answers are formatted from a pattern: at 500,000 per second, a dictionary per answer is too slow. The fields are those
# of RocketMQ's SendMessageResponseHeader. `extFields` is never absent, because Java reads TRACE_ON and MSG_REGION
# without a check for null, in answers to sends and to recalls. A client traces only sends whose answer contains these
# two.
TRACED = {"TRACE_ON": "true", "MSG_REGION": "DefaultRegion"}
_TRACED_JSON = msgspec.json.encode(TRACED).decode().strip("{}")

_PREFIX = struct.Struct(">iI")
# The prefix, then code, language, version, opaque, flag, length of the remark, length of the extFields.
_BINARY = struct.Struct(">iIhBhiiii")
_BINARY_TYPE = 1 << 24
_RESPONSE = int(CommandFlag.RESPONSE)


def host_digits(host: Host) -> str:
    """Return the part of a message id that names the broker. The sequence number follows it as 16 digits."""
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
    """Encode one answer as a frame. `msg_ids` is the offsetMsgId, or several joined with commas for a batch."""
    if serialisation != JSON:
        return _encode_binary(opaque, queue_id, queue_offset, msg_ids, unique_key, recall_handle)
    # Clients choose their keys, so a key with special characters goes through the JSON encoder.
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
    queue, offset, ids, key = b"%d" % queue_id, b"%d" % queue_offset, msg_ids.encode(), unique_key.encode()
    size = _INT.pack  # packed inline instead of by `_pair`: four calls take 0.4 us per answer
    ext = b"".join(
        (
            _TRACED_BINARY, _QUEUE_ID, size(len(queue)), queue, _MSG_ID, size(len(ids)), ids,
            _QUEUE_OFFSET, size(len(offset)), offset, _TRANSACTION_ID, size(len(key)), key,
            _pair(_RECALL_HANDLE, recall_handle.encode()) if recall_handle else b"",
        )
    )  # fmt: skip
    header_bytes = _BINARY.size - _PREFIX.size + len(ext)
    word = _BINARY_TYPE | header_bytes
    fixed = _BINARY.pack(
        4 + header_bytes, word, 0, Language.JAVA, BROKER_VERSION, opaque, _RESPONSE, 0, len(ext)
    )
    return fixed + ext


def _pair(name: bytes, value: bytes) -> bytes:
    return name + _INT.pack(len(value)) + value


def _sized(name: bytes) -> bytes:
    return struct.pack(">h", len(name)) + name


_QUEUE_ID, _MSG_ID, _QUEUE_OFFSET = _sized(b"queueId"), _sized(b"msgId"), _sized(b"queueOffset")
_TRANSACTION_ID, _RECALL_HANDLE = _sized(b"transactionId"), _sized(b"recallHandle")
_TRACED_BINARY = b"".join(_pair(_sized(name.encode()), value.encode()) for name, value in TRACED.items())
