"""Convert a client's message to a row for the broker: each field is checked, and each fault has RocketMQ's code.

    message_group          FIFO         one queue per group, the same for all senders: by a hash of the group
    delivery_timestamp     DELAY        to the millisecond; a fraction is rounded up, since nothing is early
    priority               PRIORITY     the topic's queue for this priority
    none of these          NORMAL, TRANSACTION

The fields of a message are stored in columns and, under RocketMQ's names, in the properties, because its remoting
clients read them there. Type and fields must agree: a message whose delay was overlooked would be delivered at once.
Lite topics are refused, because a broker that only accepted them would scheduled message a behaviour that it does not
have.

Invariant: a message becomes a row, or Refused is raised. Its check never reads the bytes of another message.
"""

from __future__ import annotations

import hashlib
import re
from zlib import crc32

from timeball.edges.grpc._generated.definition_pb2 import (
    Code,
    DigestType,
    Encoding,
    Message,
    MessageType,
    SystemProperties,
)
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
from timeball.model.message import PRIORITY, SendRow

USER_PROPERTIES_MAX = 128  # RocketMQ's userPropertyMaxNum
USER_PROPERTIES_BYTES_MAX = 16 * 1024  # its maxUserPropertySize, which includes tag and keys
MESSAGE_GROUP_CHARACTERS_MAX = 64  # its maxMessageGroupSize
BORN_HOST_CHARACTERS_MAX = 255

COMPRESSED_BIT, PREPARED_BIT = 1, 4  # of RocketMQ's sysFlag
NEVER_SECONDS, ALWAYS_SECONDS = -62_135_596_800, 253_402_300_799  # protobuf's timestamps: years 1 to 9999

# Looked up once: each look-up by name in protobuf's enumeration costs as much as reading a field.
UNSPECIFIED, NORMAL, FIFO, DELAY, TRANSACTION, OF_PRIORITY = (
    MessageType.MESSAGE_TYPE_UNSPECIFIED, MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY,
    MessageType.TRANSACTION, MessageType.PRIORITY,
)  # fmt: skip
ILLEGAL_ID, ILLEGAL_TAG = Code.ILLEGAL_MESSAGE_ID, Code.ILLEGAL_MESSAGE_TAG

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ENCODING_BITS = {Encoding.ENCODING_UNSPECIFIED: 0, Encoding.IDENTITY: 0, Encoding.GZIP: COMPRESSED_BIT}
# type -> (has a message group, has a delivery timestamp, has a priority)
_FIELDS = {
    NORMAL: (False, False, False),
    FIFO: (True, False, False),
    DELAY: (False, True, False),
    TRANSACTION: (False, False, False),
    OF_PRIORITY: (False, False, True),
}
# By message type, the property that duplicates a field of the message.
_OF_FIELD = {FIFO: MESSAGE_GROUP, TRANSACTION: TRANSACTION_ID}


def type_of(system: SystemProperties) -> MessageType:
    """Return the message's type, derived from its fields if unspecified. Raises Refused if they do not agree."""
    kind = system.message_type
    fields = (
        bool(system.message_group), system.HasField("delivery_timestamp"), system.HasField("priority"),
    )  # fmt: skip
    if system.lite_topic:
        raise Refused(Code.UNSUPPORTED, "Timeball has no lite topics; send without one")
    if kind == UNSPECIFIED:
        group, instant, priority = fields
        kind = FIFO if group else DELAY if instant else OF_PRIORITY if priority else NORMAL
    wanted = _FIELDS.get(kind)
    if wanted is None:
        raise Refused(Code.UNSUPPORTED, f"message type {kind}: NORMAL, FIFO, DELAY, TRANSACTION or PRIORITY")
    if fields != wanted:
        of_group, of_instant, of_priority = ("a" if has else "no" for has in wanted)
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a {MessageType.Name(kind)} message has {of_group} message_group, {of_instant} delivery_timestamp and "
            f"{of_priority} priority",
        )
    return kind


def row_of(
    message: Message, kind: MessageType, topic: str, queues: int, now_ms: int, delay_ms_max: int, peer: str
) -> SendRow:
    """Return the values of SEND_NAMES for a message of type `kind`. Raises Refused.

    `queues`: the number of queues of the topic that can be written. `peer`: the born host of a message that has none.
    """
    system, body = message.system_properties, message.body
    sys_flag = _check_body(body, system)
    message_id = _checked(system.message_id, ILLEGAL_ID, "message_id", "unique_key")
    tag, keys = _tag(system.tag), _keys(system)
    properties, queue_id, due_ms = _user_properties(message, kind, tag, keys), -1, None
    properties.append(f"{UNIQ_KEY}\x01{message_id}\x02")
    if kind == FIFO:
        group = _message_group(system.message_group)
        properties.append(f"{MESSAGE_GROUP}\x01{group}\x02")
        queue_id = crc32(group.encode()) % queues
    elif kind == DELAY:
        instant_ms = _delivery_ms(system, now_ms, delay_ms_max)
        properties.append(f"{DELIVER_MS}\x01{instant_ms}\x02")
        # A due time that has passed on the way still makes a scheduled message, which is due at once.
        due_ms = instant_ms if instant_ms > 0 else None
    elif kind == OF_PRIORITY:
        if system.priority < 0:
            raise Refused(Code.BAD_REQUEST, f"priority {system.priority}: 0, the lowest, or more")
        properties.append(f"{PRIORITY}\x01{system.priority}\x02")
        queue_id = rules.queue_of_priority(system.priority, queues)
    elif kind == TRANSACTION:
        sys_flag |= PREPARED_BIT
        properties.append(_transaction_properties(system, topic, message_id))
    if system.trace_context:
        context = _checked(
            system.trace_context,
            Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
            "trace_context",
            "properties",
        )
        properties.append(f"{TRACE_CONTEXT}\x01{context}\x02")
    text = "".join(properties)
    if (wrong := rules.fault("properties", text)) is not None:
        raise Refused(Code.MESSAGE_PROPERTIES_TOO_LARGE, wrong)
    born_host = system.born_host
    if not 0 < len(born_host) <= BORN_HOST_CHARACTERS_MAX:
        born_host = peer
    return (
        topic, body, tag or None, keys or None, message_id, text, queue_id, _born_ms(system, now_ms), born_host, 0,
        sys_flag, 0, due_ms, None,
    )  # fmt: skip


def _check_body(body: bytes, system: SystemProperties) -> int:
    """Check the body and return the bits of sysFlag for its encoding."""
    if not body:
        raise Refused(Code.MESSAGE_BODY_EMPTY, "the message has no body")
    if (wrong := rules.fault("body", body)) is not None:
        raise Refused(Code.MESSAGE_BODY_TOO_LARGE, f"{wrong}: send a reference to it instead")
    bits = _ENCODING_BITS.get(system.body_encoding)
    if bits is None:
        raise Refused(Code.BAD_REQUEST, f"body_encoding {system.body_encoding}: IDENTITY or GZIP")
    if system.HasField("body_digest"):
        _check_digest(body, system.body_digest.type, system.body_digest.checksum)
    return bits


def _check_digest(body: bytes, kind: DigestType, checksum: str) -> None:
    if kind == DigestType.DIGEST_TYPE_UNSPECIFIED:
        return
    given = checksum.upper().lstrip("0")  # some clients leave out the leading zeros
    if kind == DigestType.CRC32:
        found = f"{crc32(body):08X}"
        if given == str(crc32(body)):
            return  # Node's client writes the checksum in decimal
    elif kind == DigestType.MD5:
        found = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    elif kind == DigestType.SHA1:
        found = hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
    else:
        raise Refused(Code.BAD_REQUEST, f"body_digest of type {kind}: CRC32, MD5 or SHA1")
    if given != found.lstrip("0"):
        raise Refused(
            Code.MESSAGE_CORRUPTED,
            f"the body's {DigestType.Name(kind)} is {found} and not {checksum[:64]!r}: send it again",
        )


def _has_control(text: str) -> bool:
    # Nearly every text is printable, and that check is many times faster.
    return not text.isprintable() and _CONTROL.search(text) is not None


def _checked(text: str, code: Code, what: str, column: str) -> str:
    """Return a text that fits its column. Raises Refused if it is empty, blank, too long or has control characters."""
    bytes_max = rules.BYTES_MAX[column]
    if text and len(text) <= bytes_max and text.isascii() and text.isprintable() and not text.isspace():
        return text  # the usual case
    if rules.size_bytes(text) > bytes_max or not text.strip() or _has_control(text):
        raise Refused(code, f"{what} {text[:80]!r}: 1 to {bytes_max} bytes, not blank, no control characters")
    return text


def _tag(tag: str) -> str:
    if not tag:
        return tag
    _checked(tag, ILLEGAL_TAG, "tag", "tag")
    if "|" in tag:
        raise Refused(ILLEGAL_TAG, f"tag {tag[:80]!r}: | stands between tags that a consumer wants")
    return tag


def _keys(system: SystemProperties) -> str:
    # Counted first: a request may have a million keys, and checking each would delay all other calls.
    if len(system.keys) > limits.KEYS_PER_MESSAGE_MAX:
        raise _too_many_keys()
    given = [key for key in system.keys if key]
    if not given:
        return ""
    for key in given:
        _checked(key, Code.ILLEGAL_MESSAGE_KEY, "key", "keys")
    keys = " ".join(given)  # a blank within a key makes two keys of it, as in RocketMQ
    if rules.fault("keys", keys) is not None:
        raise _too_many_keys()
    return keys


def _too_many_keys() -> Refused:
    return Refused(
        Code.ILLEGAL_MESSAGE_KEY,
        f"at most {limits.KEYS_PER_MESSAGE_MAX} keys of {limits.KEYS_BYTES_MAX} bytes together",
    )


def _user_properties(message: Message, kind: MessageType, tag: str, keys: str) -> list[str]:
    """Return the texts of the properties, followed by tag and keys, but without a property that a field duplicates."""
    given = message.user_properties
    if len(given) > USER_PROPERTIES_MAX:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE, f"{len(given)} properties, at most {USER_PROPERTIES_MAX}"
        )
    texts, size = [], rules.size_bytes(tag) + rules.size_bytes(keys)
    for name, value in given.items():
        if not name or name in RESERVED:
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r}: RocketMQ's own; take another name"
            )
        if _has_control(name) or _has_control(value):
            raise Refused(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {name[:80]!r}: a name or value has a control character; encode it, say in base64",
            )
        if name == _OF_FIELD.get(kind):
            continue  # left from an earlier delivery, if a received message is sent on
        size += rules.size_bytes(name) + rules.size_bytes(value)
        texts.append(f"{name}\x01{value}\x02")
    if size > USER_PROPERTIES_BYTES_MAX:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"properties, tag and keys have {size} bytes, at most {USER_PROPERTIES_BYTES_MAX}",
        )
    if tag:
        texts.append(f"{TAGS}\x01{tag}\x02")
    if keys:
        texts.append(f"{KEYS}\x01{keys}\x02")
    return texts


def _message_group(group: str) -> str:
    if len(group) > MESSAGE_GROUP_CHARACTERS_MAX or not group.strip() or _has_control(group):
        raise Refused(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message_group {group[:80]!r}: 1 to {MESSAGE_GROUP_CHARACTERS_MAX} characters, not blank, none of control",
        )
    return group


def _delivery_ms(system: SystemProperties, now_ms: int, delay_ms_max: int) -> int:
    at = system.delivery_timestamp
    if not (NEVER_SECONDS <= at.seconds <= ALWAYS_SECONDS and 0 <= at.nanos < 1_000_000_000):
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"delivery_timestamp of {at.seconds} s and {at.nanos} ns: no instant of the years 1 to 9999",
        )
    # The double negation rounds a fraction of a millisecond up, since no message is early.
    instant_ms = int(at.seconds * 1_000 - (-at.nanos // 1_000_000))
    check_instant(instant_ms, now_ms, delay_ms_max)
    return instant_ms


def check_instant(instant_ms: int, now_ms: int, delay_ms_max: int) -> None:
    """Raise Refused for a due time that is too far ahead."""
    if rules.is_too_far(instant_ms, now_ms, delay_ms_max):
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"delivery_timestamp of {instant_ms} ms since 1970 is {instant_ms - now_ms} ms ahead, at most "
            f"{delay_ms_max} ms ({delay_ms_max // limits.DAY_MS} days): send it nearer to its time",
        )


def _born_ms(system: SystemProperties, now_ms: int) -> int:
    at = system.born_timestamp
    if 0 < at.seconds <= ALWAYS_SECONDS and 0 <= at.nanos < 1_000_000_000:
        return int(at.seconds * 1_000 + at.nanos // 1_000_000)
    return now_ms


def _transaction_properties(system: SystemProperties, topic: str, message_id: str) -> str:
    """Return the properties of a half message. Its topic is the producer group, as producers have none over gRPC."""
    text = f"{PREPARED}\x01true\x02{PRODUCER_GROUP}\x01{topic}\x02"
    text += f"{TRANSACTION_ID}\x01{message_id}\x02"
    if system.HasField("orphaned_transaction_recovery_duration"):
        after = system.orphaned_transaction_recovery_duration
        if not 0 <= after.seconds * limits.SECOND_MS <= limits.DAY_MS:
            raise Refused(
                Code.BAD_REQUEST,
                f"orphaned_transaction_recovery_duration of {after.seconds} s: a day at most",
            )
        if after.seconds:
            text += f"{CHECK_IMMUNITY}\x01{after.seconds}\x02"
    return text
