"""Encode and decode stored messages, the messages in a producer's batch, and POP's check points.

Numbers are big-endian. A stored message (RocketMQ's `MessageDecoder` decodes it, and version 2 only has a longer topic
length):

    | total 4 | magic 4 | body crc 4 | queue id 4 | flag 4 | queue offset 8 | physical offset 8 | sys flag 4 |
    | born ms 8 | born host 4 or 16 + port 4 | store ms 8 | store host 4 or 16 + port 4 | reconsume times 4 |
    | prepared offset 8 | body: 4 + n | topic: 1 + n (version 2: 2 + n) | properties: 2 + n |

A record of a producer's batch. The body of SEND_BATCH_MESSAGE is a sequence of them:

    | total 4 | magic 0, 4 | crc 0, 4 | flag 4 | body: 4 + n | properties: 2 + n |

The physical offset of a message is its sequence number in Timeball's log. An offsetMsgId is the store host followed by
that number, in hexadecimal. Clients connect to this host, so it must be an address that they can reach.

A check point identifies a popped message. The consumer sends it back to acknowledge the message (`CheckPoint`).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import ip_address
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa

from timeball.edges.remoting.codec.codes import MessageFlag
from timeball.log import format as fmt
from timeball.log.format import EntryArray
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OutOfRange
from timeball.model.message import RETRY_PREFIX, with_seq

# ---- stored messages, batches and ids ------------------------------------------------------------------------

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
TOPIC_BYTES_V1_MAX = 127
ROWS_AT_ONCE = 64  # rows of a frame that are encoded at a time

_HEAD = struct.Struct(">iIIiiqqiq")  # total … born ms
_MIDDLE = struct.Struct(">iq")  # born port, store ms
_TAIL = struct.Struct(">iiqi")  # store port, reconsume times, prepared offset, body length
_BATCH = struct.Struct(">iiiii")  # total, magic, crc, flag, body length
_SHORT = struct.Struct(">h")
_USHORT = struct.Struct(">H")
_KEY_PREFIX = struct.Struct(">4sHI")  # address, process id, run
_KEY_REST = struct.Struct(">IH")  # ms, counter


class Host(msgspec.Struct, frozen=True):
    """An address as RocketMQ stores it: 4 or 16 bytes, and a port."""

    address: bytes
    port: int

    @property
    def is_v6(self) -> bool:
        """True for an IPv6 address."""
        return len(self.address) == 16


NO_HOST = Host(bytes(4), 0)


def encode_stored(rows: pa.RecordBatch, *, store_host: Host, born_host: Host = NO_HOST) -> bytes:
    """Encode visible READ_SCHEMA rows as one sequence of stored messages. See `encode_each`."""
    return b"".join(encode_each(rows, store_host=store_host, born_host=born_host))


def encode_each(rows: pa.RecordBatch, *, store_host: Host, born_host: Host = NO_HOST) -> list[bytes]:
    """Encode each of these READ_SCHEMA rows as a stored message.

    `born_host` replaces a born host that is missing or not an IP address: RocketMQ stores hosts as bytes, Timeball as
    text. Tag, keys and unique key of messages from other protocols are stored only in columns. They are added to the
    properties, where RocketMQ's consumers read them.
    """
    columns = [rows.column(name).to_pylist() for name in _STORED_COLUMNS]
    hosts: dict[str | None, Host] = {None: born_host}
    encoded: list[bytes] = []
    for (
        seq, topic, queue_id, offset, body, properties, tag, keys, unique_key, born_ms, born_host_text, store_ms, flag,
        sys_flag, reconsume_times, source_seq, due_ms, accepted_ms,
    ) in zip(*columns, strict=True):  # fmt: skip
        host = hosts.get(born_host_text)
        if host is None:
            host = hosts[born_host_text] = parse_host(born_host_text, born_host)
        all_properties = _add_column_properties(properties or "", tag, keys, unique_key)
        properties_bytes = all_properties.encode()
        # Only released messages have `accepted_ms`, the time at which the scheduled message was accepted.
        if due_ms is not None and accepted_ms is not None and _has_timer(all_properties):
            properties_bytes = _append_properties(
                properties_bytes, _timer_properties(topic, queue_id, due_ms, accepted_ms, store_ms or 0)
            )
        encoded.append(
            _encode_message(
                seq, topic.encode(), queue_id, offset or 0, body or b"", _append_properties(properties_bytes, REGION),
                born_ms or 0, host,
                store_ms or 0, store_host, flag or 0, sys_flag or 0, reconsume_times or 0, source_seq or 0,
            )
        )  # fmt: skip
    return encoded


class StoredFrame:
    """An opened frame of the log, as Python's implementation of implementation.StoredFrame."""

    def __init__(self, segment: pa.Buffer, frame: fmt.Frame) -> None:
        self._rows = with_seq(fmt.decode_rows(segment, frame), frame.first_seq)
        self.first_seq, self.end_seq = frame.first_seq, frame.first_seq + frame.rows

    def append_messages(
        self, out: bytearray, seqs: list[int] | EntryArray, begin: int, store_host: Host, bytes_max: int
    ) -> int:
        """Append the messages `seqs[begin:]` that are in this frame and fit. Returns the index of the first left out.

        Raises OutOfRange for a row that is not visible.
        """
        seqs = seqs if isinstance(seqs, list) else seqs["seq"].tolist()
        seqs_in_frame = itertools.takewhile(lambda seq: self.first_seq <= seq < self.end_seq, seqs[begin:])
        row_indices = [seq - self.first_seq for seq in seqs_in_frame]
        end = begin
        # A few rows at a time: if messages are large, only a few of them fit, and the others are encoded in vain.
        for first_index in range(0, len(row_indices), ROWS_AT_ONCE):
            rows = self._rows.take(pa.array(row_indices[first_index : first_index + ROWS_AT_ONCE]))
            if rows.column("queue_offset").null_count:
                raise OutOfRange("one of these rows is no visible message")
            for record in encode_each(rows, store_host=store_host):
                if out and len(out) + len(record) > bytes_max:
                    return end
                out += record
                end += 1
        return end


def _add_column_properties(properties: str, tag: str | None, keys: str | None, unique_key: str | None) -> str:
    """Add unique key, tag and keys to encoded properties where they are missing."""
    for name, value in (("UNIQ_KEY", unique_key), ("TAGS", tag), ("KEYS", keys)):
        if value and not properties.startswith(f"{name}\x01") and f"\x02{name}\x01" not in properties:
            separator = "" if not properties or properties.endswith("\x02") else "\x02"
            properties = f"{properties}{separator}{name}\x01{value}\x02"
    return properties


TIMER_PREFIX, TIMER_DONE, REAL_TOPIC = "TIMER_DE", "TIMER_OUT_MS\x01", "REAL_TOPIC\x01"


def _has_timer(properties: str) -> bool:
    """Return whether a released message was sent with one of RocketMQ's timer properties."""

    def has(prefix: str) -> bool:
        return properties.startswith(prefix) or f"\x02{prefix}" in properties

    return has(TIMER_PREFIX) and not has(TIMER_DONE) and not has(REAL_TOPIC)


def _timer_properties(topic: str, queue_id: int, due_ms: int, accepted_ms: int, store_ms: int) -> bytes:
    """Encode the properties that RocketMQ's timer adds to a message when it delivers it."""
    # Due time, destination (topic and queue), and the times at which the message entered and left the timer wheel.
    timer_values = {
        "TIMER_OUT_MS": due_ms, "REAL_TOPIC": topic, "REAL_QID": queue_id, "TIMER_ENQUEUE_MS": accepted_ms,
        "TIMER_DEQUEUE_MS": store_ms,
    }  # fmt: skip
    return "".join(f"{name}\x01{value}\x02" for name, value in timer_values.items()).encode()


# RocketMQ's broker adds its region to each message, and consumers of 5.x only trace messages with a region. It is
# appended, because clients use the last property of a name. So it replaces a region from the sender, as in RocketMQ.
REGION = b"MSG_REGION\x01DefaultRegion\x02"
PROPERTIES_JAVA_MAX = (
    32767  # Java reads the size as a signed number, and ignores the properties if it is negative
)


def _append_properties(properties: bytes, more_properties: bytes) -> bytes:
    """Append `more_properties` to the properties, unless the result would be too long for Java's clients."""
    separator = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
    result = properties + separator + more_properties
    return result if len(result) <= PROPERTIES_JAVA_MAX else properties


_STORED_COLUMNS = [
    "seq", "topic", "queue_id", "queue_offset", "body", "properties", "tag", "keys", "unique_key", "born_ms",
    "born_host", "store_ms", "flag", "sys_flag", "reconsume_times", "source_seq", "due_ms", "accepted_ms",
]  # fmt: skip


# Plain numbers: arithmetic with an IntFlag creates an object per result, which costs 3 us per message.
_BORN_HOST_V6, _STORE_HOST_V6 = int(MessageFlag.BORN_HOST_V6), int(MessageFlag.STORE_HOST_V6)
_TRANSACTION_BITS, _COMMITTED = int(MessageFlag.TRANSACTION_ROLLBACK), int(MessageFlag.TRANSACTION_COMMIT)
_NO_HOST_V6 = ~(_BORN_HOST_V6 | _STORE_HOST_V6)


def _encode_message(
    seq: int, topic: bytes, queue_id: int, offset: int, body: bytes, properties: bytes, born_ms: int, born_host: Host,
    store_ms: int, store_host: Host, flag: int, sys_flag: int, reconsume_times: int, source_seq: int,
) -> bytes:  # fmt: skip
    """Encode one stored message. The module docstring shows its layout."""
    # For a message from a transaction: the sequence number of its half message.
    prepared_offset = source_seq if sys_flag & _TRANSACTION_BITS == _COMMITTED else 0
    sys_flag &= _NO_HOST_V6
    if born_host.is_v6:
        sys_flag |= _BORN_HOST_V6
    if store_host.is_v6:
        sys_flag |= _STORE_HOST_V6
    is_v1 = len(topic) <= TOPIC_BYTES_V1_MAX
    topic_size = bytes([len(topic)]) if is_v1 else _SHORT.pack(len(topic))
    total_bytes = (
        _HEAD.size + _MIDDLE.size + _TAIL.size + len(born_host.address) + len(store_host.address)
        + len(body) + len(topic_size) + len(topic) + 2 + len(properties)
    )  # fmt: skip
    return b"".join(
        [
            _HEAD.pack(
                total_bytes, MAGIC_V1 if is_v1 else MAGIC_V2, crc32(body) & 0x7FFFFFFF, queue_id, flag, offset, seq,
                sys_flag, born_ms,
            ),
            born_host.address, _MIDDLE.pack(born_host.port, store_ms), store_host.address,
            _TAIL.pack(store_host.port, reconsume_times, prepared_offset, len(body)), body,
            topic_size, topic, _USHORT.pack(len(properties)), properties,
        ]
    )  # fmt: skip


def parse_host(text: str, otherwise: Host) -> Host:
    """Parse `address:port`, `[v6]:port` or an address without a port. Returns `otherwise` for a host name."""
    address, _, port = text.rpartition(":")
    if text.startswith("["):
        address = address.strip("[]")
    elif not address or ":" in address:
        address, port = text, "0"
    try:
        return Host(ip_address(address).packed, int(port))
    except ValueError:
        return otherwise


class BatchRecord(msgspec.Struct, frozen=True):
    """One message of a producer's batch."""

    flag: int
    body: bytes
    properties: str


def decode_batch(data: bytes, rows_max: int = limits.ROWS_PER_REQUEST_MAX) -> list[BatchRecord]:
    """Decode the records of a SEND_BATCH_MESSAGE body. Raises InvalidMessage."""
    records: list[BatchRecord] = []
    for position in _record_positions(data):
        if len(records) == rows_max:
            raise InvalidMessage(f"more than {rows_max} messages in one batch; split it")
        record_bytes, _, _, flag, body_bytes = _BATCH.unpack_from(data, position)
        body_position, end = position + _BATCH.size, position + record_bytes
        properties_position = body_position + body_bytes + 2
        if body_bytes < 0 or properties_position > end:
            raise InvalidMessage(
                f"the batch record at byte {position} has a body of {body_bytes} bytes in {record_bytes}"
            )
        (properties_bytes,) = _USHORT.unpack_from(data, properties_position - 2)
        if properties_position + properties_bytes != end:
            raise InvalidMessage(f"the batch record at byte {position} does not end at its stated length")
        try:
            properties = data[properties_position:end].decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage(
                f"the properties of the batch record at byte {position} are not UTF-8"
            ) from error
        records.append(BatchRecord(flag, data[body_position : body_position + body_bytes], properties))
    return records


def _record_positions(data: bytes) -> Iterator[int]:
    """Yield the start of each record, whose length is checked. Raises InvalidMessage."""
    position = 0
    while position < len(data):
        if len(data) - position < _BATCH.size + 2:
            raise InvalidMessage(f"the batch ends within the record at byte {position}")
        (record_bytes,) = struct.unpack_from(">i", data, position)
        if not _BATCH.size + 2 <= record_bytes <= len(data) - position:
            raise InvalidMessage(
                f"the batch record at byte {position} states a length of {record_bytes} bytes"
            )
        yield position
        position += record_bytes


def encode_batch(records: Sequence[BatchRecord]) -> bytes:
    """Encode a batch as a producer does. Used by tests and benchmarks."""
    pieces = []
    for record in records:
        properties = record.properties.encode()
        record_bytes = _BATCH.size + len(record.body) + 2 + len(properties)
        pieces += [_BATCH.pack(record_bytes, 0, 0, record.flag, len(record.body)), record.body]
        pieces += [_USHORT.pack(len(properties)), properties]
    return b"".join(pieces)


def offset_msg_id(store_host: Host, seq: int) -> str:
    """Encode an offsetMsgId, with which a client can ask this broker for the message at `seq`."""
    return (store_host.address + struct.pack(">iq", store_host.port, seq)).hex().upper()


def parse_offset_msg_id(text: str) -> tuple[Host, int]:
    """Split an offsetMsgId into store host and sequence number. Raises InvalidMessage."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) not in (16, 28):
        raise InvalidMessage(f"{text[:64]!r} is not an offsetMsgId of 32 or 56 hexadecimal digits")
    port, seq = struct.unpack(">iq", data[-12:])
    return Host(data[:-12], port), seq


class UniqueKeys:
    """Creates unique keys for messages without UNIQ_KEY (of ali-ons clients): 32 hexadecimal digits, as in RocketMQ.

        | address 4 | process id 2 | run 4 | time 4 | counter 2 |      bytes, each as two hexadecimal digits

    `run` distinguishes processes that have the same id one after the other. The time is the low 32 bits of the time in
    ms since 1970. (RocketMQ counts ms from the beginning of the month.) The counter distinguishes the keys of one
    millisecond. A process repeats keys only if it creates more than 65,536 in a millisecond, or by chance after 49
    days, when the 32 bits of the time repeat.
    """

    def __init__(self, address: bytes, process_id: int, run: int) -> None:
        self._prefix = _KEY_PREFIX.pack(address[-4:].rjust(4, b"\0"), process_id & 0xFFFF, run & 0xFFFFFFFF)
        self._counter = itertools.count()

    def next(self, now_ms: int) -> str:
        """Create a new unique key. `now_ms` is the time in ms since 1970."""
        return (
            (self._prefix + _KEY_REST.pack(now_ms & 0xFFFFFFFF, next(self._counter) & 0xFFFF)).hex().upper()
        )


# ---- answers to pulls ----------------------------------------------------------------------------------------


def pull_fields(next_offset: int, min_offset: int, max_offset: int) -> dict[str, str]:
    """Build the extFields of an answer to a pull."""
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": str(min_offset),
        "maxOffset": str(max_offset),
    }


# ---- POP's check points --------------------------------------------------------------------------------------
# An answer does not repeat all words of a check point for every message. Its header has lists by queue, from which the
# client builds the check points:
#
#     startOffsetInfo   retry queue first;…          msgOffsetInfo   retry queue offset,offset,…;…
#     orderCountInfo    retry queue least times;…  and for single messages  retry qo<queue>%<offset> times;…

NORMAL, RETRY_V1, RETRY_V2 = "0", "1", "2"
REVIVE_QUEUE, REVIVE_QUEUE_IN_ORDER = 0, 999
WORDS = 8
BITS_MAX = 1 << 16  # of all bit sets in a batch acknowledgement

POP_CK = "POP_CK"


class CheckPoint(msgspec.Struct, frozen=True):
    """The check point of a popped message. Clients use its text as the receipt handle.

    As the property POP_CK of a message, it has eight words, separated by spaces:

        first offset · pop time · invisible time · revive queue · retry · broker · queue · offset

    `retry` states the topic of the queue: 0 is the requested topic, 1 is `%RETRY%<group>_<topic>`, and 2 is the same
    with "+" instead of "_". The revive queue is an internal queue of RocketMQ's broker, and 999 means an orderly group.
    """

    first_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    retry: str
    broker_name: str
    queue_id: int
    offset: int

    def encode(self) -> str:
        """Encode the check point as its eight words."""
        return " ".join(str(word) for word in msgspec.structs.astuple(self))


def parse_check_point(text: str) -> CheckPoint:
    """Parse the text of a check point. Raises InvalidMessage."""
    words = text.split(" ")
    if len(words) == WORDS:
        first_offset, pop_ms, invisible_ms, revive_queue_id, retry, broker_name, queue_id, offset = words
        if retry in (NORMAL, RETRY_V1, RETRY_V2):
            try:
                return CheckPoint(
                    int(first_offset), int(pop_ms), int(invisible_ms), int(revive_queue_id), retry, broker_name,
                    int(queue_id), int(offset),
                )  # fmt: skip
            except ValueError:
                pass  # a word is no number
    raise InvalidMessage(f"{text[:200]!r} is not a check point of a popped message, which has {WORDS} words")


def retry_word(topic: str) -> str:
    """Return the word `retry` of the check points for queues of this topic."""
    if not topic.startswith(RETRY_PREFIX):
        return NORMAL
    return RETRY_V2 if "+" in topic else RETRY_V1


def real_topic(topic: str, group: str, retry: str) -> str:
    """Return the topic of a queue, from the topic that the consumer requested and the word `retry`."""
    if retry == NORMAL or topic.startswith(RETRY_PREFIX):
        return topic
    return f"{RETRY_PREFIX}{group}{'+' if retry == RETRY_V2 else '_'}{topic}"


Position = tuple[str, int, int]  # retry word, queue, offset


def start_offset_info(positions: Iterable[Position]) -> str:
    """Encode the first offset of each queue. `positions` are in the order of the messages in the answer."""
    first_offsets: dict[tuple[str, int], int] = {}
    for retry, queue_id, offset in positions:
        first_offsets.setdefault((retry, queue_id), offset)
    return ";".join(
        f"{retry} {queue_id} {first_offset}" for (retry, queue_id), first_offset in first_offsets.items()
    )


def msg_offset_info(positions: Iterable[Position]) -> str:
    """Encode all offsets, grouped by queue."""
    offsets: dict[tuple[str, int], list[str]] = {}
    for retry, queue_id, offset in positions:
        offsets.setdefault((retry, queue_id), []).append(str(offset))
    return ";".join(
        f"{retry} {queue_id} {','.join(offsets_of_queue)}"
        for (retry, queue_id), offsets_of_queue in offsets.items()
    )


def order_count_info(positions: Iterable[Position], pop_counts: Iterable[int]) -> str:
    """Encode how often each ordered message was popped before, and per queue the least count, for old clients.

    A message that is left out was never popped before.
    """
    items, least_counts = [], dict[tuple[str, int], int]()
    for (retry, queue_id, offset), count in zip(positions, pop_counts, strict=True):
        if count:
            items.append(f"{retry} qo{queue_id}%{offset} {count}")
        least_counts[retry, queue_id] = min(count, least_counts.get((retry, queue_id), count))
    items += [f"{retry} {queue_id} {count}" for (retry, queue_id), count in least_counts.items()]
    return ";".join(items)


def decode_bit_set(text: str) -> list[int]:
    """Return the positions of the set bits in a Java BitSet, given as base64. Raises InvalidMessage."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage("bits of a batch acknowledgement: not base64") from error
    if len(data) * 8 > BITS_MAX:
        raise InvalidMessage(f"bits of a batch acknowledgement: more than {BITS_MAX}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    set_bits: list[int] = np.flatnonzero(bits).tolist()
    return set_bits


def bit_count(text: str) -> int:
    """Compute the number of bits of a Java BitSet from the length of its base64, without decoding it."""
    return 8 * (len(text) * 3 // 4 - text.count("=", -2))
