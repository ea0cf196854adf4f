"""Stored messages read back as a client does; their layout is drawn in edges/remoting/codec/records.py."""

from __future__ import annotations

import struct
from zlib import crc32

import msgspec

from timeball.edges.remoting.codec.codes import MessageFlag
from timeball.edges.remoting.codec.records import MAGIC_V1, MAGIC_V2, Host
from timeball.model.errors import InvalidMessage
from timeball.model.message import decode_properties

_HEAD = struct.Struct(">iIIiiqqiq")
_TAIL = struct.Struct(">iqi")


class StoredMessage(msgspec.Struct, frozen=True):
    """One message as a consumer gets it."""

    seq: int
    topic: str
    queue_id: int
    queue_offset: int
    body: bytes
    properties: dict[str, str]
    flag: int
    sys_flag: int
    born_ms: int
    born_host: Host
    store_ms: int
    store_host: Host
    reconsume_times: int
    prepared_seq: int


def decode_stored(data: bytes) -> list[StoredMessage]:
    """The messages in the body of a pull's answer; raises InvalidMessage."""
    found = []
    at = 0
    try:
        while at < len(data):
            (total,) = struct.unpack_from(">i", data, at)
            if total <= 0 or at + total > len(data):
                raise InvalidMessage(f"a stored message of {total} bytes at byte {at} of {len(data)}")
            found.append(_decode(data[at : at + total]))
            at += total
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidMessage(f"the stored message at byte {at}: {error}") from error
    return found


def _decode(data: bytes) -> StoredMessage:
    _, magic, crc, queue_id, flag, offset, seq, sys_flag, born_ms = _HEAD.unpack_from(data)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise InvalidMessage(f"magic {magic:#x} is none of a stored message")
    born, at = _host(data, _HEAD.size, bool(sys_flag & MessageFlag.BORN_HOST_V6))
    (store_ms,) = struct.unpack_from(">q", data, at)
    store, at = _host(data, at + 8, bool(sys_flag & MessageFlag.STORE_HOST_V6))
    times, prepared, body_size = _TAIL.unpack_from(data, at)
    at += _TAIL.size
    body, at = data[at : at + body_size], at + body_size
    if crc32(body) & 0x7FFFFFFF != crc:
        raise InvalidMessage(f"the body of message {seq} does not match its checksum")
    topic_size, at = (
        (data[at], at + 1) if magic == MAGIC_V1 else (*struct.unpack_from(">h", data, at), at + 2)
    )
    topic, at = data[at : at + topic_size].decode(), at + topic_size
    (size,) = struct.unpack_from(">H", data, at)
    if at + 2 + size != len(data):
        raise InvalidMessage(f"message {seq} does not end where it says")
    properties = decode_properties(data[at + 2 :].decode())
    return StoredMessage(
        seq, topic, queue_id, offset, body, properties, flag, sys_flag, born_ms, born, store_ms, store, times, prepared
    )  # fmt: skip


def _host(data: bytes, at: int, is_v6: bool) -> tuple[Host, int]:
    size = 16 if is_v6 else 4
    (port,) = struct.unpack_from(">i", data, at + size)
    return Host(data[at : at + size], port), at + size + 4
