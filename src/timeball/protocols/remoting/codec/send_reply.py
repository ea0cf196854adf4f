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

REGION = "DefaultRegion"

_PREFIX = struct.Struct(">iI")
_BINARY = struct.Struct(">hBhiii")  # code, language, version, opaque, flag, length of the remark
_BINARY_TYPE = 1 << 24


class SendReply(msgspec.Struct, gc=False):
    """What a producer is told."""

    opaque: int
    serialisation: int
    queue_id: int
    queue_offset: int
    msg_ids: str  # offsetMsgId, several with commas between for a batch
    unique_key: str
    recall_handle: str = ""


def host_digits(host: Host) -> str:
    """The part of a message id that names the broker; the sequence number follows as 16 digits."""
    return (host.address + struct.pack(">i", host.port)).hex().upper()


def encode_reply(reply: SendReply) -> bytes:
    """One answer, as a frame."""
    return _encode_json(reply) if reply.serialisation == JSON else _encode_binary(reply)


def _encode_json(reply: SendReply) -> bytes:
    key, handle = reply.unique_key, reply.recall_handle
    # Clients choose their keys: what is not plain goes through the encoder.
    quoted = f'"{key}"' if key.isalnum() else msgspec.json.encode(key).decode()
    recall = f',"recallHandle":{msgspec.json.encode(handle).decode()}' if handle else ""
    header = (
        f'{{"code":0,"extFields":{{"queueId":"{reply.queue_id}","TRACE_ON":"false","MSG_REGION":"{REGION}",'
        f'"msgId":"{reply.msg_ids}","queueOffset":"{reply.queue_offset}","transactionId":{quoted}{recall}}},'
        f'"flag":1,"language":"JAVA","opaque":{reply.opaque},"serializeTypeCurrentRPC":"JSON",'
        f'"version":{BROKER_VERSION}}}'
    ).encode()
    return _PREFIX.pack(4 + len(header), len(header)) + header


def _encode_binary(reply: SendReply) -> bytes:
    ext = [
        _pair(b"queueId", b"%d" % reply.queue_id),
        _TRACE_AND_REGION,
        _pair(b"msgId", reply.msg_ids.encode()),
        _pair(b"queueOffset", b"%d" % reply.queue_offset),
        _pair(b"transactionId", reply.unique_key.encode()),
    ]
    if reply.recall_handle:
        ext.append(_pair(b"recallHandle", reply.recall_handle.encode()))
    data = b"".join(ext)
    fixed = _BINARY.pack(0, Language.JAVA, BROKER_VERSION, reply.opaque, CommandFlag.RESPONSE, 0)
    size = len(fixed) + 4 + len(data)
    return b"".join([_PREFIX.pack(4 + size, _BINARY_TYPE | size), fixed, struct.pack(">i", len(data)), data])


def _pair(name: bytes, value: bytes) -> bytes:
    return struct.pack(">h", len(name)) + name + struct.pack(">i", len(value)) + value


_TRACE_AND_REGION = _pair(b"TRACE_ON", b"false") + _pair(b"MSG_REGION", REGION.encode())
