"""Answers to sends, made from a pattern: with half a million a second there is no room for a dictionary each.

The fields are RocketMQ's SendMessageResponseHeader. `extFields` is never absent, for Java reads TRACE_ON and
MSG_REGION from it without a look.
"""

from __future__ import annotations

import struct

import msgspec

from timeball.protocols.remoting.codec.codes import BROKER_VERSION, CommandFlag, Language
from timeball.protocols.remoting.codec.frame import JSON
from timeball.protocols.remoting.codec.records import Host

# RocketMQ's answers to sends and recalls say so; a client that traces sends no trace of what it got no such answer to.
TRACED = {"TRACE_ON": "true", "MSG_REGION": "DefaultRegion"}
_TRACED_JSON = msgspec.json.encode(TRACED).decode().strip("{}")

_PREFIX = struct.Struct(">iI")
_INT = struct.Struct(">i")
# The prefix, then code, language, version, opaque, flag, length of the remark, length of the extFields.
_BINARY = struct.Struct(">iIhBhiiii")
_BINARY_TYPE = 1 << 24
_RESPONSE = int(CommandFlag.RESPONSE)


def host_digits(host: Host) -> str:
    """The part of a message id that names the broker; the sequence number follows as 16 digits."""
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
    """One answer, as a frame. `msg_ids`: the offsetMsgId, several with commas between for a batch."""
    if serialisation != JSON:
        return _encode_binary(opaque, queue_id, queue_offset, msg_ids, unique_key, recall_handle)
    # Clients choose their keys: what is not plain goes through the encoder.
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
    ext = b"".join(
        [
            _TRACED_BINARY, _value(_QUEUE_ID, b"%d" % queue_id), _value(_MSG_ID, msg_ids.encode()),
            _value(_QUEUE_OFFSET, b"%d" % queue_offset), _value(_TRANSACTION_ID, unique_key.encode()),
            _value(_RECALL_HANDLE, recall_handle.encode()) if recall_handle else b"",
        ]
    )  # fmt: skip
    size = _BINARY.size - _PREFIX.size + len(ext)
    word = _BINARY_TYPE | size
    fixed = _BINARY.pack(4 + size, word, 0, Language.JAVA, BROKER_VERSION, opaque, _RESPONSE, 0, len(ext))
    return fixed + ext


def _value(name: bytes, value: bytes) -> bytes:
    return name + _INT.pack(len(value)) + value


def _name(name: bytes) -> bytes:
    return struct.pack(">h", len(name)) + name


_QUEUE_ID, _MSG_ID, _QUEUE_OFFSET = _name(b"queueId"), _name(b"msgId"), _name(b"queueOffset")
_TRANSACTION_ID, _RECALL_HANDLE = _name(b"transactionId"), _name(b"recallHandle")
_TRACED_BINARY = b"".join(_value(_name(name.encode()), value.encode()) for name, value in TRACED.items())
