"""Decode SendMessage requests to rows for the broker, and encode their answers. Every error has RocketMQ's code.

Every field of a message is checked. The system properties of a message determine its type:

    message_group          FIFO         one queue per group, the same for all senders: by a hash of the group
    delivery_timestamp     DELAY        to the millisecond; a fraction is rounded up, since nothing is early
    priority               PRIORITY     the topic's queue for this priority
    none of these          NORMAL, TRANSACTION

The fields of a message are stored in columns. They are also stored in the properties under RocketMQ's names, because
RocketMQ's remoting clients read them there. Type and fields must agree: if a delay were ignored because of the type,
the message would be delivered at once. Messages to lite topics are refused, because Timeball does not implement the
behaviour that their senders expect.

Invariant: each message either becomes a row or raises Refused, independently of other messages.

If the build had a compiler, plain_sends.pyx decodes requests of the usual form ("plain sends") in C. protobuf decodes
all others. protobuf and the checks of this module are the reference: for the same bytes, plain_sends.pyx gives the same
row at a tenth of the cost. Without a compiler, protobuf decodes all requests.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from zlib import crc32

from timeball.edges.grpc._generated.definition_pb2 import (
    Code,
    DigestType,
    Encoding,
    Message,
    MessageType,
    Resource,
    Status,
    SystemProperties,
)
from timeball.edges.grpc._generated.service_pb2 import SendMessageRequest
from timeball.edges.grpc.codec.messages_out import (
    CHECK_IMMUNITY,
    DELIVER_MS,
    KEYS,
    MESSAGE_GROUP,
    PREPARED,
    PRODUCER_GROUP,
    RESERVED,
    TAGS,
    TRACE_CONTEXT,
    TRANSACTION_ID,
    UNIQ_KEY,
)
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits, rules
from timeball.model.bodies import COMPRESSED_BIT
from timeball.model.message import PRIORITY, SendRow, send_row
from timeball.model.send_options import EXPIRY_NAMES, UNIQUE_KEY, check_expiry, unique_key, with_unique_key
from timeball.model.time_parsing import LOCAL_TIME, local_due_ms, stored_local_time

# ---- from a message to a row ---------------------------------------------------------------------------------

USER_PROPERTIES_MAX = 128  # RocketMQ's userPropertyMaxNum
USER_PROPERTIES_BYTES_MAX = 16 * 1024  # RocketMQ's maxUserPropertySize, which includes tag and keys
MESSAGE_GROUP_CHARACTERS_MAX = 64  # RocketMQ's maxMessageGroupSize
BORN_HOST_CHARACTERS_MAX = 255

PREPARED_BIT = 4  # of RocketMQ's sysFlag: a half message
# The bounds of google.protobuf.Timestamp: the years 1 to 9999.
TIMESTAMP_SECONDS_MIN, TIMESTAMP_SECONDS_MAX = -62_135_596_800, 253_402_300_799

# Looked up once, because each look-up in protobuf's enumeration costs as much as reading a field.
UNSPECIFIED, NORMAL, FIFO, DELAY, TRANSACTION, WITH_PRIORITY = (
    MessageType.MESSAGE_TYPE_UNSPECIFIED, MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY,
    MessageType.TRANSACTION, MessageType.PRIORITY,
)  # fmt: skip
ILLEGAL_ID, ILLEGAL_TAG = Code.ILLEGAL_MESSAGE_ID, Code.ILLEGAL_MESSAGE_TAG

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ENCODINGS = (Encoding.ENCODING_UNSPECIFIED, Encoding.IDENTITY, Encoding.GZIP)
_GZIP = 16 + zlib.MAX_WBITS
# Of gzip (RFC 1952) and zlib (RFC 1950): the bytes around the same compressed data.
_GZIP_HEADER_BYTES, _GZIP_TRAILER_BYTES, _ZLIB_HEADER = 10, 8, b"\x78\x9c"
# Flags of optional parts of the header of gzip.
_GZIP_HEADER_CRC, _GZIP_EXTRA, _GZIP_NAME, _GZIP_COMMENT = 2, 4, 8, 16
# message type -> whether it has a message group, a delivery timestamp, a priority
_FIELDS_OF_TYPE = {
    NORMAL: (False, False, False),
    FIFO: (True, False, False),
    DELAY: (False, True, False),
    TRANSACTION: (False, False, False),
    WITH_PRIORITY: (False, False, True),
}
# message type -> the property that duplicates a field of the message
_DUPLICATE_PROPERTY = {FIFO: MESSAGE_GROUP, TRANSACTION: TRANSACTION_ID}


def message_type_of(system: SystemProperties) -> MessageType:
    """Determine a message's type, from its fields if it is unspecified.

    Raises Refused for an unknown type, a lite topic, or fields that disagree with the type.
    """
    message_type = system.message_type
    fields = (
        bool(system.message_group), system.HasField("delivery_timestamp"), system.HasField("priority"),
    )  # fmt: skip
    if system.lite_topic:
        raise Refused(Code.UNSUPPORTED, "Timeball has no lite topics; send without one")
    if message_type == UNSPECIFIED:
        has_group, has_delivery_time, has_priority = fields
        message_type = (
            FIFO if has_group else DELAY if has_delivery_time else WITH_PRIORITY if has_priority else NORMAL
        )
    expected_fields = _FIELDS_OF_TYPE.get(message_type)
    if expected_fields is None:
        raise Refused(
            Code.UNSUPPORTED, f"message type {message_type}: NORMAL, FIFO, DELAY, TRANSACTION or PRIORITY"
        )
    if fields != expected_fields:
        a_group, a_timestamp, a_priority = ("a" if is_present else "no" for is_present in expected_fields)
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a {MessageType.Name(message_type)} message has {a_group} message_group, {a_timestamp} delivery_timestamp "
            f"and {a_priority} priority",
        )
    return message_type


def encode_row(
    message: Message,
    message_type: MessageType,
    topic: str,
    queues: int,
    now_ms: int,
    delay_ms_max: int,
    peer: str,
) -> SendRow:
    """Convert a message to a row with the values of SEND_NAMES. Raises Refused, InvalidDelay, InvalidMessage.

    `message_type` is from `message_type_of`. `queues` is the number of queues of the topic that can be written. `peer`
    replaces a born host that is missing or too long. A due time may be at most `delay_ms_max` after `now_ms`.
    """
    system = message.system_properties
    _check_body(message.body, system)
    body, sys_flag = message.body, 0
    if system.body_encoding == Encoding.GZIP:
        body, sys_flag = _gzip_to_zlib(body), COMPRESSED_BIT
    message_id = _check_text(system.message_id, ILLEGAL_ID, "message_id", "unique_key")
    tag, keys = _check_tag(system.tag), _join_keys(system)
    properties, queue_id, due_ms = _encode_user_properties(message, message_type, tag, keys), -1, None
    if UNIQUE_KEY in message.user_properties:
        keys = with_unique_key(keys, unique_key(message.user_properties[UNIQUE_KEY]))
    properties.append(f"{UNIQ_KEY}\x01{message_id}\x02")
    if message_type == FIFO:
        group = _check_message_group(system.message_group)
        properties.append(f"{MESSAGE_GROUP}\x01{group}\x02")
        queue_id = crc32(group.encode()) % queues
    elif message_type == DELAY:
        delivery_ms = _read_delivery_ms(system, now_ms, delay_ms_max)
        properties.append(f"{DELIVER_MS}\x01{delivery_ms}\x02")
        # A message whose due time has passed on the way is also a scheduled message. It is due at once.
        due_ms = delivery_ms if delivery_ms > 0 else None
    elif message_type == WITH_PRIORITY:
        if system.priority < 0:
            raise Refused(Code.BAD_REQUEST, f"priority {system.priority}: 0, the lowest, or more")
        properties.append(f"{PRIORITY}\x01{system.priority}\x02")
        queue_id = rules.queue_of_priority(system.priority, queues)
    elif message_type == TRANSACTION:
        sys_flag |= PREPARED_BIT
        properties.append(_encode_transaction_properties(system, topic, message_id))
    if any(name in message.user_properties for name in EXPIRY_NAMES):
        check_expiry(message.user_properties, due_ms)
    if system.trace_context:
        trace_context = _check_text(
            system.trace_context,
            Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
            "trace_context",
            "properties",
        )
        properties.append(f"{TRACE_CONTEXT}\x01{trace_context}\x02")
    properties_text = "".join(properties)
    if (fault := rules.fault("properties", properties_text)) is not None:
        raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, fault)
    born_host = system.born_host
    if not 0 < len(born_host) <= BORN_HOST_CHARACTERS_MAX:
        born_host = peer
    return send_row(
        topic=topic, body=body, tag=tag or None, keys=keys or None, unique_key=message_id, properties=properties_text,
        queue_id=queue_id, born_ms=_read_born_ms(system, now_ms), born_host=born_host, flag=0, sys_flag=sys_flag,
        reconsume_times=0, due_ms=due_ms,
    )  # fmt: skip


def _check_body(body: bytes, system: SystemProperties) -> None:
    """Check the body, its encoding and its digest. Raises Refused."""
    if not body:
        raise Refused(Code.MESSAGE_BODY_EMPTY, "the message has no body")
    if (fault := rules.fault("body", body)) is not None:
        raise Refused(Code.MESSAGE_BODY_TOO_LARGE, f"{fault}: send a reference to it instead")
    if system.body_encoding not in _ENCODINGS:
        raise Refused(Code.BAD_REQUEST, f"body_encoding {system.body_encoding}: IDENTITY or GZIP")
    if system.HasField("body_digest"):
        _check_digest(body, system.body_digest.type, system.body_digest.checksum)


def _gzip_to_zlib(body: bytes) -> bytes:
    """Convert a gzip body to zlib, which remoting's consumers expect of a compressed body. Raises Refused.

    The compressed data stays as it is. Only its header and its checksum differ in the two formats.
    """
    decompressor = zlib.decompressobj(_GZIP)
    try:
        data = decompressor.decompress(body, limits.BODY_BYTES_MAX)
        is_larger = not decompressor.eof and bool(decompressor.decompress(decompressor.unconsumed_tail, 1))
    except zlib.error:
        raise _no_gzip() from None
    if is_larger:
        raise Refused(
            Code.MESSAGE_BODY_TOO_LARGE,
            f"the body decompresses to more than {limits.BODY_BYTES_MAX} bytes: send a reference to it instead",
        )
    if not decompressor.eof or decompressor.unused_data:
        raise _no_gzip()
    deflated = body[_gzip_header_bytes(body) : -_GZIP_TRAILER_BYTES]
    return _ZLIB_HEADER + deflated + zlib.adler32(data).to_bytes(4, "big")


def _no_gzip() -> Refused:
    """Create the error for a body that is not exactly one complete gzip stream."""
    return Refused(
        Code.BAD_REQUEST, "body_encoding GZIP: the body is no gzip, or not exactly one complete stream"
    )


def _gzip_header_bytes(body: bytes) -> int:
    """Find the size of the header of a valid gzip stream. Its byte 3 tells which optional fields it has (RFC 1952)."""
    flags, at = body[3], _GZIP_HEADER_BYTES
    if flags & _GZIP_EXTRA:
        at += 2 + int.from_bytes(body[at : at + 2], "little")
    for flag in (_GZIP_NAME, _GZIP_COMMENT):
        if flags & flag:
            at = body.index(0, at) + 1
    return at + 2 if flags & _GZIP_HEADER_CRC else at


def _check_digest(body: bytes, digest_type: DigestType, checksum: str) -> None:
    """Raise Refused if the body does not have this checksum, or if the type of the digest is not supported.

    A digest of unspecified type is ignored.
    """
    if digest_type == DigestType.DIGEST_TYPE_UNSPECIFIED:
        return
    claimed_checksum = checksum.upper().lstrip("0")  # some clients leave out the leading zeros
    if digest_type == DigestType.CRC32:
        computed_checksum = f"{crc32(body):08X}"
        if claimed_checksum == str(crc32(body)):
            return  # Node's client writes the checksum in decimal
    elif digest_type == DigestType.MD5:
        computed_checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    elif digest_type == DigestType.SHA1:
        computed_checksum = hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
    else:
        raise Refused(Code.BAD_REQUEST, f"body_digest of type {digest_type}: CRC32, MD5 or SHA1")
    if claimed_checksum != computed_checksum.lstrip("0"):
        raise Refused(
            Code.MESSAGE_CORRUPTED,
            f"the body's {DigestType.Name(digest_type)} is {computed_checksum} and not "
            f"{checksum[:64]!r}: send it again",
        )


def _has_control(text: str) -> bool:
    # `isprintable` is many times faster than the search, and true for nearly every text.
    return not text.isprintable() and _CONTROL_CHARACTER.search(text) is not None


def _check_text(text: str, code: Code, field: str, column: str) -> str:
    """Check the text of a field whose value is stored in `column`, and return it.

    Raises Refused with this code if it is empty, blank, too long, or has control characters.
    """
    bytes_max = rules.BYTES_MAX[column]
    if text and len(text) <= bytes_max and text.isascii() and text.isprintable() and not text.isspace():
        return text  # the usual case
    if rules.size_bytes(text) > bytes_max or not text.strip() or _has_control(text):
        raise Refused(
            code, f"{field} {text[:80]!r}: 1 to {bytes_max} bytes, not blank, no control characters"
        )
    return text


def _check_tag(tag: str) -> str:
    """Return the tag if it is valid or empty. Raises Refused."""
    if not tag:
        return tag
    _check_text(tag, ILLEGAL_TAG, "tag", "tag")
    if "|" in tag:
        raise Refused(
            ILLEGAL_TAG, f"tag {tag[:80]!r}: | separates the tags in a filter, so a tag must not contain it"
        )
    return tag


def _join_keys(system: SystemProperties) -> str:
    """Check the keys and join them with blanks. Raises Refused."""
    # The number is checked first: a request may have a million keys, and to check each would delay all other calls.
    if len(system.keys) > limits.KEYS_PER_MESSAGE_MAX:
        raise _too_many_keys()
    nonempty_keys = [key for key in system.keys if key]
    if not nonempty_keys:
        return ""
    for key in nonempty_keys:
        _check_text(key, Code.ILLEGAL_MESSAGE_KEY, "key", "keys")
    keys = " ".join(nonempty_keys)  # so a key with a blank becomes two keys, as in RocketMQ
    if rules.fault("keys", keys) is not None:
        raise _too_many_keys()
    return keys


def _too_many_keys() -> Refused:
    """Create the error for keys that are too many, or too long together."""
    return Refused(
        Code.ILLEGAL_MESSAGE_KEY,
        f"at most {limits.KEYS_PER_MESSAGE_MAX} keys of {limits.KEYS_BYTES_MAX} bytes together",
    )


def _encode_user_properties(message: Message, message_type: MessageType, tag: str, keys: str) -> list[str]:
    """Encode the user properties, followed by tag and keys, each as `name \\x01 value \\x02`.

    A property that duplicates a field of the message is left out, because the field is encoded later. Raises Refused
    and InvalidDelay.
    """
    user_properties = message.user_properties
    if len(user_properties) > USER_PROPERTIES_MAX:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"{len(user_properties)} properties, at most {USER_PROPERTIES_MAX}",
        )
    encoded, size_bytes = [], rules.size_bytes(tag) + rules.size_bytes(keys)
    for name, value in user_properties.items():
        if not name or name in RESERVED:
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r}: RocketMQ's own; take another name"
            )
        if _has_control(name) or _has_control(value):
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {name[:80]!r}: a name or value has a control character; encode it, say in base64",
            )
        if name == _DUPLICATE_PROPERTY.get(message_type):
            continue  # the client forwards a message that it has received with this property
        if name == LOCAL_TIME:
            value = _check_local_time(value, message_type)
        size_bytes += rules.size_bytes(name) + rules.size_bytes(value)
        encoded.append(f"{name}\x01{value}\x02")
    if size_bytes > USER_PROPERTIES_BYTES_MAX:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"properties, tag and keys have {size_bytes} bytes, at most {USER_PROPERTIES_BYTES_MAX}",
        )
    if tag:
        encoded.append(f"{TAGS}\x01{tag}\x02")
    if keys:
        encoded.append(f"{KEYS}\x01{keys}\x02")
    return encoded


def _check_local_time(text: str, message_type: MessageType) -> str:
    """Convert a local time and its zone to the form that is stored.

    Raises Refused for a message without a delivery timestamp, or InvalidDelay if the text cannot be read.
    """
    if message_type != DELAY:
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"property {LOCAL_TIME!r}: set the delivery_timestamp, too, which the local time has now",
        )
    return local_due_ms(*stored_local_time(text))[1]


def _check_message_group(group: str) -> str:
    """Return the message group if it is valid. Raises Refused."""
    if len(group) > MESSAGE_GROUP_CHARACTERS_MAX or not group.strip() or _has_control(group):
        raise Refused(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message_group {group[:80]!r}: 1 to {MESSAGE_GROUP_CHARACTERS_MAX} characters, not blank, none of control",
        )
    return group


def _read_delivery_ms(system: SystemProperties, now_ms: int, delay_ms_max: int) -> int:
    """Convert the delivery timestamp to ms since 1970, rounded up. Raises Refused if it is invalid or too far ahead."""
    time = system.delivery_timestamp
    if not (
        TIMESTAMP_SECONDS_MIN <= time.seconds <= TIMESTAMP_SECONDS_MAX and 0 <= time.nanos < 1_000_000_000
    ):
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"delivery_timestamp of {time.seconds} s and {time.nanos} ns: no time of the years 1 to 9999",
        )
    # The double negation rounds a fraction of a millisecond up, since no message is early.
    delivery_ms = int(time.seconds * 1_000 - (-time.nanos // 1_000_000))
    check_delivery_time(delivery_ms, now_ms, delay_ms_max)
    return delivery_ms


def check_delivery_time(delivery_ms: int, now_ms: int, delay_ms_max: int) -> None:
    """Raise Refused if a due time is more than `delay_ms_max` ahead."""
    if rules.is_too_far(delivery_ms, now_ms, delay_ms_max):
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"delivery_timestamp of {delivery_ms} ms since 1970 is {delivery_ms - now_ms} ms ahead, at most "
            f"{delay_ms_max} ms ({delay_ms_max // limits.DAY_MS} days): send it nearer to its time",
        )


def _read_born_ms(system: SystemProperties, now_ms: int) -> int:
    """Convert the born timestamp to ms since 1970, rounded down. A missing or invalid timestamp becomes `now_ms`."""
    time = system.born_timestamp
    if 0 < time.seconds <= TIMESTAMP_SECONDS_MAX and 0 <= time.nanos < 1_000_000_000:
        return int(time.seconds * 1_000 + time.nanos // 1_000_000)
    return now_ms


def _encode_transaction_properties(system: SystemProperties, topic: str, message_id: str) -> str:
    """Encode the properties that a half message has in addition. Raises Refused for an invalid recovery duration.

    The topic is used as the producer group, because producers have no group over gRPC.
    """
    text = f"{PREPARED}\x01true\x02{PRODUCER_GROUP}\x01{topic}\x02"
    text += f"{TRANSACTION_ID}\x01{message_id}\x02"
    if system.HasField("orphaned_transaction_recovery_duration"):
        delay = system.orphaned_transaction_recovery_duration
        if not 0 <= delay.seconds * limits.SECOND_MS <= limits.DAY_MS:
            raise Refused(
                Code.BAD_REQUEST,
                f"orphaned_transaction_recovery_duration of {delay.seconds} s: a day at most",
            )
        if delay.seconds:
            text += f"{CHECK_IMMUNITY}\x01{delay.seconds}\x02"
    return text


# ---- the decoder of requests ---------------------------------------------------------------------------------

try:
    from timeball.edges.grpc.codec.plain_sends import read_plain  # type: ignore[import-not-found]
except ImportError:  # The build had no compiler.
    read_plain = None


class PlainSend(Protocol):
    """A request with one message of the usual form. The handler only has to check topic, due time and caller."""

    topic: tuple[str, str]  # namespace and name
    message_type: MessageType  # NORMAL, or DELAY with a due time
    due_ms: int | None
    needs_now: bool  # `row` or the check of the due time needs the current time
    size_bytes: int  # of body and properties

    def row(self, topic: str, now_ms: int, peer: str) -> SendRow:
        """Create the row with the values of SEND_NAMES.

        `now_ms` and `peer` are used as born time and born host if the producer did not set them.
        """


def decode_compiled(data: bytes) -> Any:
    """Decode a request to a PlainSend if it has the usual form, else to a SendMessageRequest. Raises DecodeError."""
    plain = read_plain(data)
    return SendMessageRequest.FromString(data) if plain is None else plain


# The decoder of SendMessage requests.
decode_send: Callable[[bytes], Any] = SendMessageRequest.FromString if read_plain is None else decode_compiled


def topics_in_send(request: Any) -> list[Resource]:
    """List the topics of a request from `decode_send`, each once. The handler refuses a request with several topics."""
    if isinstance(request, SendMessageRequest):
        topics = [message.topic for message in request.messages]
        return list({(topic.resource_namespace, topic.name): topic for topic in topics}.values())
    namespace, name = request.topic
    return [Resource(resource_namespace=namespace, name=name)]


# ---- answers -------------------------------------------------------------------------------------------------
# Encoded by hand, because every send gets one. protobuf's objects for an answer (one for the answer, and two for each
# message) would cost more than all other work for a send at this edge. The bytes equal those that protobuf writes
# (tests/edges/grpc/codec/test_send_answers.py):
#
#     SendMessageResponse   1 status, 2 an entry for each message
#     SendResultEntry       1 status, 2 message_id, 3 transaction_id, 4 offset, 5 recall_handle; empty ones are left out

# Keys of protobuf fields (number and wire type).
_ENTRY, _MESSAGE_ID, _TRANSACTION_ID, _OFFSET, _RECALL_HANDLE = b"\x12", b"\x12", b"\x1a", b"\x20", b"\x2a"
_SMALL = [bytes([number]) for number in range(128)]  # the varints of one byte


def encode_answer(entries: Iterable[bytes]) -> bytes:
    """Encode a SendMessageResponse with the status OK and these entries."""
    return _STATUS + b"".join(entries)


def encode_entry(message_id: str, transaction_id: str, offset: int, recall_handle: str) -> bytes:
    """Encode a SendResultEntry with the status OK, with its key and length as a field of the answer."""
    encoded_id = _encode_text(message_id)
    # Only half messages have a transaction id that differs from the message id.
    encoded_transaction = encoded_id if transaction_id == message_id else _encode_text(transaction_id)
    entry = _STATUS
    if encoded_id:
        entry += _MESSAGE_ID + encoded_id
    if encoded_transaction:
        entry += _TRANSACTION_ID + encoded_transaction
    if offset:
        entry += _OFFSET + _encode_varint(offset)
    if recall_handle:
        entry += _RECALL_HANDLE + _encode_text(recall_handle)
    return _ENTRY + _encode_varint(len(entry)) + entry


def _encode_text(text: str) -> bytes:
    """Encode a text with its length in front. An empty text is no bytes, because protobuf omits its field."""
    data = text.encode()
    size_bytes = len(data)
    if not size_bytes:
        return data
    return (_SMALL[size_bytes] if size_bytes < 128 else _encode_varint(size_bytes)) + data


def _encode_varint(number: int) -> bytes:
    """Encode a non-negative number as protobuf's varint: seven bits per byte, the lowest first."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    return bytes((number & 127 | 128, number >> 7 & 127 | 128)) + _encode_varint(number >> 14)


_OK = Status(code=Code.OK, message=Code.Name(Code.OK)).SerializeToString()
_STATUS = b"\x0a" + _encode_varint(len(_OK)) + _OK
