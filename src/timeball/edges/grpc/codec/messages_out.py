"""Convert rows of the log to messages for a gRPC client.

RocketMQ's own properties become fields of the message. All other properties become its user properties. A message that
comes from a retry topic shows the topic that it was sent to. RESERVED lists the names of RocketMQ's properties, and
messages_in.py refuses them as user properties. A gRPC client sets such values in fields (a tag, keys, a due time).
RocketMQ's remoting clients look for them among the properties.

Every gRPC client reads gzip, but only some read zlib. So bodies that a producer has compressed are decompressed here
(model/bodies.py). The digest is MD5, because all clients write it in the same form. They write CRC32 in three forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import md5
from operator import itemgetter
from typing import NamedTuple

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
from timeball.model.bodies import COMPRESSED_BIT, decompressed_body
from timeball.model.message import (
    DLQ_PREFIX,
    LITE_TOPIC,
    NACK_TIME,
    PRIORITY,
    READ_SCHEMA,
    RETRY_TOPIC,
    decode_properties,
)
from timeball.model.time_parsing import LOCAL_TIME

COMMITTED_BITS, ENDED_BITS = 8, 12  # of RocketMQ's sysFlag
GZIP_MAGIC = b"\x1f\x8b"
DLQ_TOPIC, DLQ_MESSAGE_ID = "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"
MESSAGE_ID_DIGITS = 32
INT32_DIGITS = 10  # a number with fewer digits fits into 32 bits

# Looked up once, because each look-up in a protobuf enumeration searches by name, and every message needs these.
MD5, IDENTITY = DigestType.MD5, Encoding.IDENTITY
TRANSACTION, DELAY, FIFO, NORMAL = (
    MessageType.TRANSACTION, MessageType.DELAY, MessageType.FIFO, MessageType.NORMAL,
)  # fmt: skip

TAGS, KEYS, UNIQ_KEY = "TAGS", "KEYS", "UNIQ_KEY"
# This property and TRANSACTION_ID are also user properties of the message, as in RocketMQ.
MESSAGE_GROUP = "__SHARDINGKEY"
DELIVER_MS = "TIMER_DELIVER_MS"
TRACE_CONTEXT = "TRACE_CONTEXT"
PREPARED, PRODUCER_GROUP = "TRAN_MSG", "PGROUP"
CHECK_IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
TRANSACTION_ID = "__transactionId__"

# RocketMQ's MessageConst.STRING_HASH_SET, the properties of delays, and those that duplicate a field of the message.
# A sender may set the local time of a delay.
RESERVED = (SPENT - {LOCAL_TIME}) | frozenset(
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

# NACK_TIME is not RocketMQ's, so a sender may set it. The broker sets it to count leases, so clients do not get it. The
# local time belongs to the delay, which has passed.
_HIDDEN = RESERVED | {NACK_TIME, LOCAL_TIME}


class _Row(NamedTuple):
    """The columns of a READ_SCHEMA row from which a message is made."""

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


_GET_COLUMNS = itemgetter(*[READ_SCHEMA.get_field_index(name) for name in _Row._fields])


@dataclass(frozen=True, slots=True)
class ReceiptFields:
    """The fields that ReceiveMessage adds: a receipt handle for each message, and their common invisible time."""

    handles: Sequence[str]
    invisible_ms: int


def messages(
    rows: ReadRows, resource: Resource, topic: str, store_host: str, receipt: ReceiptFields | None = None
) -> Iterator[Message]:
    """Yield a message for each of these READ_SCHEMA rows.

    `resource` is the topic as the client names it, `topic` its name in the broker. `store_host` is used for rows
    without one. The messages are created one at a time, so that other calls get their turn in between.
    """
    for index, row in enumerate(_iterate_rows(rows)):
        properties = decode_properties(row.properties or "")
        body, encoding = _make_readable(row.body or b"", row.sys_flag or 0)
        digest = md5(body, usedforsecurity=False).hexdigest().upper()
        system = _build_system_properties(row, properties, is_redelivered=row.topic != topic)
        system.body_digest.type, system.body_digest.checksum = MD5, digest
        system.body_encoding = encoding
        system.store_host = row.store_host or store_host
        if receipt is not None:
            system.receipt_handle = receipt.handles[index]
            system.invisible_duration.FromMilliseconds(receipt.invisible_ms)
        user_properties = {name: value for name, value in properties.items() if name not in _HIDDEN}
        yield Message(topic=resource, user_properties=user_properties, system_properties=system, body=body)


def _iterate_rows(rows: ReadRows) -> Iterator[_Row]:
    """Yield the rows, which are tuples of values or Arrow columns."""
    if isinstance(rows, NumberedRows):
        return map(_Row._make, map(_GET_COLUMNS, rows.values))
    return map(_Row._make, zip(*[rows.column(name).to_pylist() for name in _Row._fields], strict=True))


def timestamp(time_ms: int) -> Timestamp:
    """Convert ms since 1970 to a protobuf timestamp."""
    return Timestamp(seconds=time_ms // 1_000, nanos=time_ms % 1_000 * 1_000_000)


def id_from_seq(seq: int) -> str:
    """Derive the id of a message that was sent without one: its sequence number, as at the end of RocketMQ's ids."""
    return f"{seq:0{MESSAGE_ID_DIGITS}X}"


def _build_system_properties(
    row: _Row, properties: dict[str, str], *, is_redelivered: bool
) -> SystemProperties:
    """Build the system properties from columns and properties. The caller sets the fields of body and receipt.

    `is_redelivered`: the row is in a retry topic.
    """
    group = properties.get(MESSAGE_GROUP)
    # In a retry topic, the due time of a row is the end of an invisible time. The producer did not set it.
    delivery_ms = None if is_redelivered else row.due_ms
    keys = row.keys or properties.get(KEYS)
    priority = _parse_priority(properties.get(PRIORITY))
    is_committed_half = (row.sys_flag or 0) & ENDED_BITS == COMMITTED_BITS
    return SystemProperties(
        tag=row.tag or properties.get(TAGS),
        keys=[key for key in keys.split(" ") if key] if keys else None,
        message_id=row.unique_key or properties.get(UNIQ_KEY) or id_from_seq(row.seq),
        message_type=_determine_type(
            is_committed_half, delivery_ms is not None, group is not None, priority is not None
        ),
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
        dead_letter_queue=_build_dead_letter_queue(row, properties),
    )


def _determine_type(
    is_committed_half: bool, has_delivery_time: bool, has_group: bool, has_priority: bool
) -> MessageType:
    """Determine the type of a message from its row. A row does not store the type."""
    if is_committed_half:
        return TRANSACTION
    if has_delivery_time:
        return DELAY
    if has_group:
        return FIFO
    return MessageType.PRIORITY if has_priority else NORMAL


def _parse_priority(text: str | None) -> int | None:
    """Parse the property of the priority. Returns None if it is missing or no valid number."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < INT32_DIGITS):
        return None
    return int(text)


def _build_dead_letter_queue(row: _Row, properties: dict[str, str]) -> DeadLetterQueue | None:
    """Build the origin of a dead letter: its topic and message id. Returns None for any other message."""
    if not row.topic.startswith(DLQ_PREFIX):
        return None
    return DeadLetterQueue(
        topic=properties.get(DLQ_TOPIC) or properties.get(RETRY_TOPIC),
        message_id=properties.get(DLQ_MESSAGE_ID)
        or row.unique_key
        or properties.get(retry.ORIGIN_MESSAGE_ID),
    )


def _make_readable(body: bytes, sys_flag: int) -> tuple[bytes, Encoding]:
    """Convert the body to an encoding that every client can read. Returns the body and that encoding.

    A body that cannot be decompressed is returned as it is.
    """
    if not sys_flag & COMPRESSED_BIT:
        return body, IDENTITY
    if not body.startswith(GZIP_MAGIC):
        decompressed = decompressed_body(body, sys_flag)
        if decompressed is not None:
            return decompressed, IDENTITY
    return body, Encoding.GZIP
