"""A Kafka record as a message of Timeball, and back, and the local file for records that Kafka does not accept.

The body of the message is the value of the record, byte for byte. One property contains the rest of the record and its
destination: base64 of `Envelope` in MessagePack. A Kafka key or header may be any bytes, and a header may occur twice.

    at           header: the due time, RFC 3339 with a zone or milliseconds since 1970
    after        header: the delay after the record's timestamp, "30m" or "PT30M"
    deliver-to   header: the destination topic, if it differs from the bridge's
    cancel       header, of any value: cancel all pending messages with the key of this record

A record that cannot be accepted becomes a message that is due now, addressed to the dead letter topic. So it takes the
same path, exactly once. Its headers then contain the reason. A record that Kafka accepts neither unchanged nor as a
dead letter is written to the local file.

Only `UndeliverableFile` does I/O.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from timeball.edges.kafka.options import Counts
from timeball.model import limits
from timeball.model.errors import InvalidDelay, SetupError
from timeball.model.message import PROPERTY_END, PROPERTY_NAME_END
from timeball.model.time_parsing import due_ms as parse_due_ms
from timeball.model.time_parsing import duration_ms

logger = logging.getLogger(__name__)

# ---- records and messages ------------------------------------------------------------------------------------

AT, AFTER, TO, CANCEL = "at", "after", "deliver-to", "cancel"
RENAMED_HEADERS = {"deliver-at": AT, "delay": AFTER}
RESERVED_PREFIXES = ("deliver-", "timeball-")  # only Timeball's headers may begin like this
# The headers of a dead letter, in the order of the values in `reason_headers`.
REASONS = ("timeball-reason", "timeball-topic", "timeball-partition", "timeball-offset")
PROPERTY = "kafka"
KEY_BYTES_MAX = 200  # up to this size, a Kafka key is used as it is, and above by its hash
VALUE_BYTES_MAX = limits.BODY_BYTES_MAX
REASON_CHARACTERS_MAX = 500
VALUE_LEFT_OUT = "the value is left where it was"
# The default name of a bridge's position topic (`--position-topic`).
DEFAULT_POSITION_TOPIC = re.compile(r"timeball\..+\.position")

Headers = list[tuple[str, bytes | None]]


class RecordLocation(NamedTuple):
    """The topic, partition and offset of a record in Kafka."""

    topic: str
    partition: int
    offset: int

    @property
    def id(self) -> str:
        """The id of the message that is made of this record."""
        return f"{self.topic}-{self.partition}-{self.offset}"

    @classmethod
    def of(cls, message_id: str) -> RecordLocation:
        """Parse an id. Raises ValueError for an id of another form."""
        topic, partition, offset = message_id.rsplit("-", 2)
        return cls(topic, int(partition), int(offset))


class Record(NamedTuple):
    """One record, as Kafka's client returns it.

    If `fault` is not empty, the client could not read the headers, and `fault` is the reason. `headers` is empty then,
    although the record may have headers, such as `cancel`.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    fault: str = ""

    @property
    def location(self) -> RecordLocation:
        """The location of the record in Kafka."""
        return RecordLocation(self.topic, self.partition, self.offset)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a record that are stored in a property of its message: all but the value."""

    topic: str  # the destination
    partition: int | None  # None: the key chooses a partition
    key: bytes | None
    headers: Headers
    is_null: bool = False  # the value is null, which differs from an empty value: a tombstone


class BridgeMessage(NamedTuple):
    """A message for Timeball, made of a record. A dead letter has `due_ms` None, which means that it is due now."""

    id: str
    body: bytes
    keys: str | None
    properties: str
    born_ms: int
    due_ms: int | None
    is_dead: bool = False


class Refused(Exception):
    """A record that cannot be accepted. The text contains the reason."""


class TopicRules(NamedTuple):
    """The bridge's topics in Kafka, and which topics a record may be delivered to.

    own            the topic that the bridge reads
    out            the destination of records that name none, or None
    dead           the dead letter topic
    position       the topic with the bridge's position
    topic_exists   returns whether Kafka has a topic
    """

    own: str
    out: str | None
    dead: str
    position: str
    topic_exists: Callable[[str], bool]

    def refusal(self, topic: str) -> str | None:
        """Explain why no record may be delivered to a topic. None if records may be delivered."""
        if topic == self.own:
            return f"{topic!r} is the topic it came from"
        # A record there would be read as the position of a bridge, or by Kafka itself.
        if topic == self.position or DEFAULT_POSITION_TOPIC.fullmatch(topic) or topic.startswith("__"):
            return f"{topic!r} is a topic for positions or of Kafka itself"
        return None


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Envelope)


def is_cancel(record: Record) -> bool:
    """Check whether the record cancels the pending messages with its key."""
    # A plain loop, because this runs for every record. For most records, a generator would cost as much as the rest.
    for name, _ in record.headers:  # noqa: SIM110
        if name == CANCEL:
            return True
    return False


def timeball_key(topic: str, key: bytes) -> str:
    """Build the message key in Timeball for records of `topic` with this Kafka key.

    A cancel finds the pending messages by it. The Kafka key is replaced by its hash if it is long or not plain text.
    """
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    # A key in Timeball contains no blanks, and isprintable() only accepts the space among them. Control characters end
    # the properties in the log.
    if 0 < len(key) <= KEY_BYTES_MAX and text and text.isprintable() and " " not in text:
        return f"{topic}/{text}"
    return f"{topic}/sha256:{hashlib.sha256(key).hexdigest()}"


def message_of(record: Record, rules: TopicRules, now_ms: int) -> BridgeMessage:
    """Build the message of a record, or its dead letter (with the text of Refused) if the record cannot be accepted."""
    try:
        _check_header_names(record.headers)
        due_ms = _due_ms(record, now_ms)
        topic = _destination(record, rules)
        properties = _properties(
            Envelope(topic, record.partition, record.key, record.headers, record.value is None)
        )
        if len(record.value or b"") > VALUE_BYTES_MAX:
            raise Refused(f"the value has {len(record.value or b'')} bytes; at most {VALUE_BYTES_MAX}")
    except Refused as refused:
        return dead_letter(record, rules.dead, str(refused))
    keys = None if record.key is None else timeball_key(record.topic, record.key)
    return BridgeMessage(
        record.location.id, record.value or b"", keys, properties, record.timestamp_ms, due_ms
    )


def dead_letter(record: Record, dead_letter_topic: str, reason: str) -> BridgeMessage:
    """Build the dead letter of a record: a message that is due now, for the dead letter topic.

    Its headers contain the reason and the location of the record. A value, or key and headers, that do not fit into a
    message are left out, and the reason says so. The record itself is still in Kafka.
    """
    location, value = record.location, record.value
    if value is not None and len(value) > VALUE_BYTES_MAX:
        value, reason = b"", f"{reason}; {VALUE_LEFT_OUT}"
    try:
        envelope = Envelope(
            dead_letter_topic,
            None,
            record.key,
            record.headers + reason_headers(location, reason),
            value is None,
        )
        text = _properties(envelope)
    except Refused:
        # Key and headers do not fit, so the dead letter only keeps the headers that identify the record.
        headers = reason_headers(location, f"{reason}; key and headers are left where they were")
        text = _properties(Envelope(dead_letter_topic, None, None, headers, value is None))
    return BridgeMessage(location.id, value or b"", None, text, record.timestamp_ms, None, is_dead=True)


def reason_headers(location: RecordLocation, reason: str) -> Headers:
    """Build the headers that state why a record is a dead letter, and where the record is in Kafka."""
    values = (reason[:REASON_CHARACTERS_MAX], *location)
    return [(name, str(value).encode()) for name, value in zip(REASONS, values, strict=True)]


def size_bytes(message: BridgeMessage) -> int:
    """Estimate the number of bytes that a message takes in a batch."""
    return len(message.body) + len(message.properties) + len(message.keys or "") + len(message.id) + 64


def envelope_of(properties: str | None) -> Envelope | None:
    """Decode the envelope in the properties of a message. None for a message that was not made of a record."""
    for pair in (properties or "").split(PROPERTY_END):
        name, separator, text = pair.partition(PROPERTY_NAME_END)
        if separator and name == PROPERTY:
            try:
                return _decoder.decode(a2b_base64(text, strict_mode=True))
            except ValueError:  # of base64, and of msgspec
                return None
    return None


def _properties(envelope: Envelope) -> str:
    """Encode an envelope as the properties of a message. Raises Refused if they are too large."""
    encoded = b2a_base64(_encode(envelope), newline=False).decode()
    text = f"{PROPERTY}{PROPERTY_NAME_END}{encoded}{PROPERTY_END}"
    if len(text) > limits.PROPERTIES_BYTES_MAX:
        raise Refused(
            f"key and headers take {len(text)} bytes, in base64; at most {limits.PROPERTIES_BYTES_MAX}"
        )
    return text


def _check_header_names(headers: Headers) -> None:
    """Raise Refused for an unknown header whose name begins with one of RESERVED_PREFIXES.

    A record with such a misspelled header would be delivered to the wrong topic. The headers of a dead letter are
    known, so that it can be sent again.
    """
    for name, _ in headers:
        if name.lower().startswith(RESERVED_PREFIXES) and name != TO and name not in REASONS:
            if name in RENAMED_HEADERS:
                raise Refused(f"header {name} is called {RENAMED_HEADERS[name]}")
            raise Refused(f"header {name[:80]!r} is not known; valid are {AT}, {AFTER}, {TO} and {CANCEL}")


def _due_ms(record: Record, now_ms: int) -> int:
    """Read the due time from the headers of a record. Raises Refused."""
    time_headers = [(name, value) for name, value in record.headers if name in (AT, AFTER)]
    if len(time_headers) != 1:
        for name, _ in record.headers:
            if name in RENAMED_HEADERS:
                raise Refused(f"header {name} is called {RENAMED_HEADERS[name]}")
        raise Refused(f"exactly one header {AT} or {AFTER} is required; there are {len(time_headers)}")
    name, value = time_headers[0]
    try:
        text = (value or b"").decode()
        due_ms = parse_due_ms(text) if name == AT else record.timestamp_ms + duration_ms(text)
    except (InvalidDelay, UnicodeDecodeError) as error:
        raise Refused(f"header {name}: {error}") from None
    if due_ms - now_ms > limits.DELAY_MS_MAX:
        raise Refused(f"header {name}: more than {limits.DELAY_MS_MAX // limits.DAY_MS} days ahead")
    return due_ms


def _destination(record: Record, rules: TopicRules) -> str:
    """Read the destination topic from the headers of a record, or use `rules.out`. Raises Refused."""
    topic = rules.out
    for name, value in record.headers:
        if name == TO:  # the last of these headers counts
            topic = rules.out if value is None else value.decode(errors="replace")
    if not topic:
        raise Refused(f"the record has no header {TO}, and the bridge no --out")
    if (reason := rules.refusal(topic)) is not None:
        raise Refused(f"header {TO}: {reason}")
    if not rules.topic_exists(topic):
        raise Refused(f"Kafka has no topic {topic[:100]!r}")
    return topic


# ---- the local file of undeliverable records -----------------------------------------------------------------
# Each line is a JSON document, synced before the bridge goes on. A bridge that is killed between the line and the
# commit of its position writes the line again. So a line may occur twice, with the same `id`. Bytes are in base64,
# because a key, a value or a header of Kafka may be any bytes.


class Undeliverable(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file.

    `topic`, `partition` and `offset` identify the record that was read, `to` is the topic to which it was to be
    written.
    """

    id: str
    reason: str
    to: str
    topic: str
    partition: int
    offset: int
    due_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class UndeliverableFile:
    """Appends lines to one file. The first line creates the file."""

    # One lock per process, because both threads of its bridge write to the file and to `counts.filed`.
    _lock = threading.Lock()

    def __init__(self, path: Path, counts: Counts) -> None:
        self.path, self._counts = path, counts

    def check(self) -> None:
        """Raise SetupError if the file cannot be written."""
        existing_path = self.path if self.path.exists() else self.path.absolute().parent
        if not os.access(existing_path, os.W_OK):
            raise SetupError(
                f"--undeliverable {self.path}: cannot be written; name a file that this process may write"
            )

    def add(self, line: Undeliverable) -> None:
        """Append a line and sync the file. Raises SetupError."""
        try:
            with self._lock, self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._counts.filed += 1
        except OSError as error:
            raise SetupError(
                f"--undeliverable {self.path}: {error.strerror}; free space, or name a file that this process may write"
            ) from error
        logger.error("record filed away file=%s id=%s reason=%s", self.path, line.id, line.reason)
