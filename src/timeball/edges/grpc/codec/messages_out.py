"""Convert rows of the log to messages for a gRPC client.

RocketMQ's own properties become fields of the message. All other properties are shown as the user's. A message that
comes from a retry topic shows the topic that it was sent to. RocketMQ's names are listed here, and messages_in.py
refuses them as user properties. A gRPC client sets such values in fields (a tag, keys, a due time), while RocketMQ's
other clients look for them among the properties.

A remoting producer may compress a body with zlib, LZ4 or Zstandard. Every client of this protocol reads gzip, but only
some read zlib. So these bodies are decompressed here, up to the maximum size of a body. The digest is MD5, whose
spelling all clients share. CRC32 has three spellings.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import md5
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa
from google.protobuf.timestamp_pb2 import Timestamp

from timeball.broker.consuming import retry
from timeball.broker.consuming.retry import SPENT
from timeball.edges.grpc._generated.definition_pb2 import (
    DeadLetterQueue,
    DigestType,
    Encoding,
    Message,
    MessageType,
    Resource,
    SystemProperties,
)
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.model import limits
from timeball.model.message import (
    DLQ_PREFIX,
    LITE_TOPIC,
    NACK_TIME,
    PRIORITY,
    READ_SCHEMA,
    RETRY_TOPIC,
    decode_properties,
)

COMPRESSED_BIT, COMMITTED_BITS, ENDED_BITS = 1, 8, 12  # of RocketMQ's sysFlag
COMPRESSION_BITS, COMPRESSION_SHIFT = 0x700, 8
LZ4, ZSTD = 1, 2  # values of these bits; 0 and 3 are zlib
GZIP_MAGIC = b"\x1f\x8b"
UNPACKED_BYTES_MAX = limits.BODY_BYTES_MAX  # a producer's maximum. A larger body is sent as stored
DLQ_TOPIC, DLQ_MESSAGE_ID = "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"
MESSAGE_ID_DIGITS = 32
INT32_DIGITS = 10

# Looked up once: each look into a protobuf enumeration searches by name, and every message needs these.
MD5, IDENTITY = DigestType.MD5, Encoding.IDENTITY
TRANSACTION, DELAY, FIFO, NORMAL = (
    MessageType.TRANSACTION, MessageType.DELAY, MessageType.FIFO, MessageType.NORMAL,
)  # fmt: skip

TAGS, KEYS, UNIQ_KEY = "TAGS", "KEYS", "UNIQ_KEY"
MESSAGE_GROUP = "__SHARDINGKEY"  # also shown as a user's property, as in RocketMQ. So is TRANSACTION_ID
DELIVER_MS = "TIMER_DELIVER_MS"
TRACE_CONTEXT = "TRACE_CONTEXT"
PREPARED, PRODUCER_GROUP = "TRAN_MSG", "PGROUP"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
TRANSACTION_ID = "__transactionId__"

# RocketMQ's MessageConst.STRING_HASH_SET, the properties of delays, and those that duplicate a field of a message.
RESERVED = SPENT | frozenset(
    {
        PRIORITY, LITE_TOPIC, TAGS, KEYS, UNIQ_KEY, DELIVER_MS, TRACE_CONTEXT, PREPARED, PRODUCER_GROUP, CHECK_IMMUNITY,
        "1ST_POP_TIME", "ARRIVE_TIME", "BORN_TIMESTAMP", "BUYER_ID", "CLUSTER", "CONSUME_START_TIME",
        "CORRECTION_FLAG", "CORRELATION_ID", "DLQ_ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "DUP_INFO",
        "EXTEND_UNIQ_INFO", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "INSTANCE_ID", "MAX_OFFSET",
        "MAX_RECONSUME_TIMES", "MIN_OFFSET", "MQ2_FLAG", "MSG_REGION", "MSG_TYPE", "ORIGIN_GROUP", "ORIGIN_MESSAGE_ID",
        "POP_CK", "POP_CK_OFFSET", "PUSH_REPLY_TIME", "RECONSUME_TIME", "REPLY_TO_CLIENT", "RETRY_TOPIC",
        "TIMER_DEL_MS", "TIMER_DEL_UNIQKEY", "TRACE_ON", "TRANSACTION_CHECK_TIMES", "TRANSFER_FLAG",
        "TRAN_PREPARED_QUEUE_OFFSET", "TTL", "WAIT", "__BORNHOST", "__CRC32#",
    }
)  # fmt: skip

# RocketMQ does not know NACK_TIME, so a sender may use it. The broker sets it for its count of leases, so it is hidden.
_HIDDEN = RESERVED | {NACK_TIME}


class _Row(NamedTuple):
    """The columns of the log that a message is made from."""

    seq: int
    topic: str
    queue_id: int
    queue_offset: int | None
    body: bytes | None
    properties: str | None
    tag: str | None
    keys: str | None
    unique_key: str | None
    born_ms: int | None
    born_host: str | None
    store_ms: int | None
    store_host: str | None
    sys_flag: int | None
    reconsume_times: int | None
    due_ms: int | None


_FIELDS = itemgetter(*[READ_SCHEMA.get_field_index(name) for name in _Row._fields])


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The fields that a receive adds: a handle for each message, and their invisible time."""

    handles: Sequence[str]
    invisible_ms: int


def messages(
    rows: ReadRows, asked: Resource, topic: str, store_host: str, handed_out: HandedOut | None = None
) -> Iterator[Message]:
    """Yield a message for each of these READ_SCHEMA rows, under the resource `asked`, which the broker names `topic`.

    The messages are created one at a time, so that other calls get their turn in between.
    """
    for at, row in enumerate(_rows(rows)):
        properties = decode_properties(row.properties or "")
        body, encoding = _readable(row.body or b"", row.sys_flag or 0)
        digest = md5(body, usedforsecurity=False).hexdigest().upper()
        system = _system(row, properties, came_again=row.topic != topic)
        system.body_digest.type, system.body_digest.checksum = MD5, digest
        system.body_encoding = encoding
        system.store_host = row.store_host or store_host
        if handed_out is not None:
            system.receipt_handle = handed_out.handles[at]
            system.invisible_duration.FromMilliseconds(handed_out.invisible_ms)
        users = {name: value for name, value in properties.items() if name not in _HIDDEN}
        yield Message(topic=asked, user_properties=users, system_properties=system, body=body)


def _rows(rows: ReadRows) -> Iterator[_Row]:
    if isinstance(rows, NumberedRows):
        return map(_Row._make, map(_FIELDS, rows.values))
    return map(_Row._make, zip(*[rows.column(name).to_pylist() for name in _Row._fields], strict=True))


def timestamp(instant_ms: int) -> Timestamp:
    """Convert ms since 1970 to a protobuf timestamp."""
    return Timestamp(seconds=instant_ms // 1_000, nanos=instant_ms % 1_000 * 1_000_000)


def stored_id(seq: int) -> str:
    """Return the id of a message that was sent without one: its sequence number, as in the end of RocketMQ's ids."""
    return f"{seq:0{MESSAGE_ID_DIGITS}X}"


def _system(row: _Row, properties: dict[str, str], *, came_again: bool) -> SystemProperties:
    """Return the system properties from columns and properties. Body and receipt fields are set later."""
    group = properties.get(MESSAGE_GROUP)
    # In a retry topic, the due time of a row is the end of an invisible time. No producer asked for it.
    delivery_ms = None if came_again else row.due_ms
    keys = row.keys or properties.get(KEYS)
    priority = _priority(properties.get(PRIORITY))
    was_half = (row.sys_flag or 0) & ENDED_BITS == COMMITTED_BITS
    return SystemProperties(
        tag=row.tag or properties.get(TAGS),
        keys=[key for key in keys.split(" ") if key] if keys else None,
        message_id=row.unique_key or properties.get(UNIQ_KEY) or stored_id(row.seq),
        message_type=_type(was_half, delivery_ms is not None, group is not None, priority is not None),
        born_timestamp=timestamp(row.born_ms or 0),
        born_host=row.born_host or "",
        store_timestamp=timestamp(row.store_ms or 0),
        delivery_timestamp=None if delivery_ms is None else timestamp(delivery_ms),
        queue_id=row.queue_id,
        queue_offset=row.queue_offset or 0,
        delivery_attempt=(row.reconsume_times or 0) + 1,
        message_group=group,
        priority=priority,
        trace_context=properties.get(TRACE_CONTEXT),
        dead_letter_queue=_dead_letter(row, properties),
    )


def _type(is_committed: bool, has_waited: bool, has_group: bool, has_priority: bool) -> MessageType:
    if is_committed:
        return TRANSACTION
    if has_waited:
        return DELAY
    if has_group:
        return FIFO
    return MessageType.PRIORITY if has_priority else NORMAL


def _priority(text: str | None) -> int | None:
    """Return a message's priority, or None if its property is missing or no number."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < INT32_DIGITS):
        return None
    return int(text)


def _dead_letter(row: _Row, properties: dict[str, str]) -> DeadLetterQueue | None:
    if not row.topic.startswith(DLQ_PREFIX):
        return None
    return DeadLetterQueue(
        topic=properties.get(DLQ_TOPIC) or properties.get(RETRY_TOPIC),
        message_id=properties.get(DLQ_MESSAGE_ID)
        or row.unique_key
        or properties.get(retry.ORIGIN_MESSAGE_ID),
    )


def _readable(body: bytes, sys_flag: int) -> tuple[bytes, Encoding]:
    """Return the body in an encoding that every client can read, and that encoding."""
    if not sys_flag & COMPRESSED_BIT:
        return body, IDENTITY
    if not body.startswith(GZIP_MAGIC):
        unpacked = _unpacked(body, (sys_flag & COMPRESSION_BITS) >> COMPRESSION_SHIFT)
        if unpacked is not None:
            return unpacked, IDENTITY
    return body, Encoding.GZIP


def _unpacked(body: bytes, compression: int) -> bytes | None:
    """Decompress a body, or return None if that fails or the result is too large."""
    try:
        if compression in (LZ4, ZSTD):
            packed = pa.CompressedInputStream(pa.BufferReader(body), "lz4" if compression == LZ4 else "zstd")
            found: bytes = packed.read(UNPACKED_BYTES_MAX + 1)
            return found if len(found) <= UNPACKED_BYTES_MAX else None
        unpacking = zlib.decompressobj()
        found = unpacking.decompress(body, UNPACKED_BYTES_MAX)
        return found if unpacking.eof else None
    except (zlib.error, pa.ArrowInvalid, OSError):
        return None
