"""Message records: the messages in the answer to a pull, and those in a producer's batch. Big-endian.

A stored message (`MessageDecoder` decodes it; version 2 only has a longer topic length):

    | total 4 | magic 4 | body crc 4 | queue id 4 | flag 4 | queue offset 8 | physical offset 8 | sys flag 4 |
    | born ms 8 | born host 4 or 16 + port 4 | store ms 8 | store host 4 or 16 + port 4 | reconsume times 4 |
    | prepared offset 8 | body: 4 + n | topic: 1 + n (version 2: 2 + n) | properties: 2 + n |

A record of a producer's batch (SEND_BATCH_MESSAGE), many of which make up one body:

    | total 4 | magic 0, 4 | crc 0, 4 | flag 4 | body: 4 + n | properties: 2 + n |

The physical offset of a message is its sequence number in the log of Timeball. An offsetMsgId is the store host
followed by that number, in hexadecimal. Clients connect to the host in it, so it must be an address that they can
reach.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from zlib import crc32

import msgspec
import pyarrow as pa

from timeball.edges.remoting.codec.codes import MessageFlag
from timeball.log import format as fmt
from timeball.log.queue_entry import EntryArray
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OutOfRange
from timeball.model.message import with_seq

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
TOPIC_BYTES_V1_MAX = 127
PART_ROWS = 64  # rows of a frame that are encoded at a time

_HEAD = struct.Struct(">iIIiiqqiq")  # total … born ms
_MIDDLE = struct.Struct(">iq")  # born port, store ms
_TAIL = struct.Struct(">iiqi")  # store port, reconsume times, prepared offset, body length
_BATCH = struct.Struct(">iiiii")  # total, magic, crc, flag, body length
_SHORT = struct.Struct(">h")
_USHORT = struct.Struct(">H")
_KEY_PREFIX = struct.Struct(">4sHI")  # address, process, run
_KEY_REST = struct.Struct(">IH")  # ms, counter


class Host(msgspec.Struct, frozen=True):
    """An address as RocketMQ stores it: 4 or 16 bytes, and a port."""

    address: bytes
    port: int

    @property
    def is_v6(self) -> bool:
        """Return whether the address takes 16 bytes."""
        return len(self.address) == 16


NO_HOST = Host(bytes(4), 0)


def encode_stored(rows: pa.RecordBatch, *, store_host: Host, born_host: Host = NO_HOST) -> bytes:
    """Encode visible READ_SCHEMA rows as stored messages, one behind the other. See `encode_each`."""
    return b"".join(encode_each(rows, store_host=store_host, born_host=born_host))


def encode_each(rows: pa.RecordBatch, *, store_host: Host, born_host: Host = NO_HOST) -> list[bytes]:
    """Encode each of these READ_SCHEMA rows as a stored message.

    RocketMQ stores hosts as bytes and Timeball as text. `born_host` is used for a row whose host is missing or no
    address. For a message from a client of another protocol, tag, keys and id are stored only in columns. They are
    added to the properties here, because RocketMQ's consumers look for them there.
    """
    columns = [rows.column(name).to_pylist() for name in _STORED]
    hosts: dict[str | None, Host] = {None: born_host}
    found: list[bytes] = []
    for (
        seq, topic, queue_id, offset, body, properties, tag, keys, unique_key, born_ms, born, store_ms, flag, sys_flag,
        times, source, due_ms, accepted_ms,
    ) in zip(*columns, strict=True):  # fmt: skip
        host = hosts.get(born)
        if host is None:
            host = hosts[born] = parse_host(born, born_host)
        text = _with_columns(properties or "", tag, keys, unique_key)
        told = text.encode()
        # Only the release of a scheduled message has the time at which that message was accepted.
        if due_ms is not None and accepted_ms is not None and _is_timers(text):
            told = _added(told, _timer_properties(topic, queue_id, due_ms, accepted_ms, store_ms or 0))
        found.append(
            _stored(
                seq, topic.encode(), queue_id, offset or 0, body or b"", _added(told, REGION),
                born_ms or 0, host,
                store_ms or 0, store_host, flag or 0, sys_flag or 0, times or 0, source or 0,
            )
        )  # fmt: skip
    return found


class StoredFrame:
    """The rows of one frame of the log, to be written as stored messages. See implementation.StoredFrame."""

    def __init__(self, segment: pa.Buffer, frame: fmt.Frame) -> None:
        self._rows = with_seq(fmt.decode_rows(segment, frame), frame.first_seq)
        self.first_seq, self.end_seq = frame.first_seq, frame.first_seq + frame.rows

    def put(
        self, out: bytearray, seqs: list[int] | EntryArray, at: int, store_host: Host, bytes_max: int
    ) -> int:
        """Append the messages `seqs[at:]` that are in this frame and fit, and return the position behind the last."""
        seqs = seqs if isinstance(seqs, list) else seqs["seq"].tolist()
        mine = itertools.takewhile(lambda seq: self.first_seq <= seq < self.end_seq, seqs[at:])
        places = [seq - self.first_seq for seq in mine]
        # Encode a few rows at a time: if messages are large, only a few of them fit.
        for begin in range(0, len(places), PART_ROWS):
            rows = self._rows.take(pa.array(places[begin : begin + PART_ROWS]))
            if rows.column("queue_offset").null_count:
                raise OutOfRange("one of these rows is no visible message")
            for record in encode_each(rows, store_host=store_host):
                if out and len(out) + len(record) > bytes_max:
                    return at
                out += record
                at += 1
        return at


def _with_columns(properties: str, tag: str | None, keys: str | None, unique_key: str | None) -> str:
    for name, value in (("UNIQ_KEY", unique_key), ("TAGS", tag), ("KEYS", keys)):
        if value and not properties.startswith(f"{name}\x01") and f"\x02{name}\x01" not in properties:
            end = "" if not properties or properties.endswith("\x02") else "\x02"
            properties = f"{properties}{end}{name}\x01{value}\x02"
    return properties


TIMER_PREFIX, TIMER_DONE, REAL_TOPIC = "TIMER_DE", "TIMER_OUT_MS\x01", "REAL_TOPIC\x01"


def _is_timers(properties: str) -> bool:
    """Return whether a released message was sent with one of RocketMQ's timers."""

    def has(beginning: str) -> bool:
        return properties.startswith(beginning) or f"\x02{beginning}" in properties

    return has(TIMER_PREFIX) and not has(TIMER_DONE) and not has(REAL_TOPIC)


def _timer_properties(topic: str, queue_id: int, due_ms: int, accepted_ms: int, store_ms: int) -> bytes:
    """Return the properties that RocketMQ's timers add to a message when they deliver it."""
    # Due time, destination (topic and queue), and the times when the message entered and left RocketMQ's timer wheel.
    added = {
        "TIMER_OUT_MS": due_ms, "REAL_TOPIC": topic, "REAL_QID": queue_id, "TIMER_ENQUEUE_MS": accepted_ms,
        "TIMER_DEQUEUE_MS": store_ms,
    }  # fmt: skip
    return "".join(f"{name}\x01{value}\x02" for name, value in added.items()).encode()


# RocketMQ's broker adds its region to each message, and consumers of 5.x trace no message without a region. Clients use
# the last property of a name. So this region counts even if the sender has set one, as with RocketMQ.
REGION = b"MSG_REGION\x01DefaultRegion\x02"
PROPERTIES_JAVA_MAX = 32767  # Java reads the size as a signed number, and no properties if it is negative


def _added(properties: bytes, more: bytes) -> bytes:
    """Append `more` to the properties, unless the result would be too long for Java's clients."""
    end = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
    found = properties + end + more
    return found if len(found) <= PROPERTIES_JAVA_MAX else properties


_STORED = [
    "seq", "topic", "queue_id", "queue_offset", "body", "properties", "tag", "keys", "unique_key", "born_ms",
    "born_host", "store_ms", "flag", "sys_flag", "reconsume_times", "source_seq", "due_ms", "accepted_ms",
]  # fmt: skip


# Plain numbers: arithmetic with an IntFlag creates an object per result, which costs 3 us per message.
_BORN_HOST_V6, _STORE_HOST_V6 = int(MessageFlag.BORN_HOST_V6), int(MessageFlag.STORE_HOST_V6)
_ENDED, _COMMITTED = int(MessageFlag.TRANSACTION_ROLLBACK), int(MessageFlag.TRANSACTION_COMMIT)
_NO_HOST_V6 = ~(_BORN_HOST_V6 | _STORE_HOST_V6)


def _stored(
    seq: int, topic: bytes, queue_id: int, offset: int, body: bytes, properties: bytes, born_ms: int, born: Host,
    store_ms: int, store: Host, flag: int, sys_flag: int, times: int, source: int,
) -> bytes:  # fmt: skip
    prepared = source if sys_flag & _ENDED == _COMMITTED else 0  # seq of the half message that was committed
    sys_flag &= _NO_HOST_V6
    if born.is_v6:
        sys_flag |= _BORN_HOST_V6
    if store.is_v6:
        sys_flag |= _STORE_HOST_V6
    is_v1 = len(topic) <= TOPIC_BYTES_V1_MAX
    topic_size = bytes([len(topic)]) if is_v1 else _SHORT.pack(len(topic))
    total = (
        _HEAD.size + _MIDDLE.size + _TAIL.size + len(born.address) + len(store.address)
        + len(body) + len(topic_size) + len(topic) + 2 + len(properties)
    )  # fmt: skip
    return b"".join(
        [
            _HEAD.pack(
                total, MAGIC_V1 if is_v1 else MAGIC_V2, crc32(body) & 0x7FFFFFFF, queue_id, flag, offset, seq,
                sys_flag, born_ms,
            ),
            born.address, _MIDDLE.pack(born.port, store_ms), store.address,
            _TAIL.pack(store.port, times, prepared, len(body)), body,
            topic_size, topic, _USHORT.pack(len(properties)), properties,
        ]
    )  # fmt: skip


def parse_host(text: str, otherwise: Host) -> Host:
    """Parse `address:port`, `[v6]:port` or a bare address, or return `otherwise` for a host name."""
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
    found: list[BatchRecord] = []
    for at in _record_positions(data):
        if len(found) == rows_max:
            raise InvalidMessage(f"more than {rows_max} messages in one batch; split it")
        total, _, _, flag, body_size = _BATCH.unpack_from(data, at)
        body_at, end = at + _BATCH.size, at + total
        properties_at = body_at + body_size + 2
        if body_size < 0 or properties_at > end:
            raise InvalidMessage(f"the batch record at byte {at} has a body of {body_size} bytes in {total}")
        (properties_size,) = _USHORT.unpack_from(data, properties_at - 2)
        if properties_at + properties_size != end:
            raise InvalidMessage(f"the batch record at byte {at} does not end where it says")
        try:
            properties = data[properties_at:end].decode()
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"the properties of the batch record at byte {at} are no text") from error
        found.append(BatchRecord(flag, data[body_at : body_at + body_size], properties))
    return found


def _record_positions(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        if len(data) - at < _BATCH.size + 2:
            raise InvalidMessage(f"the batch ends within the record at byte {at}")
        (total,) = struct.unpack_from(">i", data, at)
        if not _BATCH.size + 2 <= total <= len(data) - at:
            raise InvalidMessage(f"the batch record at byte {at} says it has {total} bytes")
        yield at
        at += total


def encode_batch(records: Sequence[BatchRecord]) -> bytes:
    """Encode a batch as a producer sends it, for tests and load."""
    parts = []
    for record in records:
        properties = record.properties.encode()
        total = _BATCH.size + len(record.body) + 2 + len(properties)
        parts += [_BATCH.pack(total, 0, 0, record.flag, len(record.body)), record.body]
        parts += [_USHORT.pack(len(properties)), properties]
    return b"".join(parts)


def offset_msg_id(store_host: Host, seq: int) -> str:
    """Return the id with which a client can ask this broker for the message at `seq`."""
    return (store_host.address + struct.pack(">iq", store_host.port, seq)).hex().upper()


def parse_offset_msg_id(text: str) -> tuple[Host, int]:
    """Split an offsetMsgId into store host and sequence number. Raises InvalidMessage."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) not in (16, 28):
        raise InvalidMessage(f"{text[:64]!r} is no offsetMsgId: 32 or 56 hexadecimal digits")
    port, seq = struct.unpack(">iq", data[-12:])
    return Host(data[:-12], port), seq


class UniqueKeys:
    """Creates ids for messages of clients that send none (ali-ons): RocketMQ's 32 hexadecimal digits.

        | address 4 | process 2 | of this run 4 | ms since the month began 4 | counter 2 |      bytes, as hexadecimal

    The counter distinguishes ids of one millisecond. Ids repeat only if one process creates more than 65,536 in a
    millisecond.
    """

    def __init__(self, address: bytes, process_id: int, run: int) -> None:
        self._prefix = _KEY_PREFIX.pack(address[-4:].rjust(4, b"\0"), process_id & 0xFFFF, run & 0xFFFFFFFF)
        self._counter = itertools.count()

    def next(self, now_ms: int) -> str:
        """Return a new id.

        RocketMQ counts ms from the beginning of the month, because 32 bits cannot hold more. The low 32 bits of
        `now_ms` serve the same purpose.
        """
        return (
            (self._prefix + _KEY_REST.pack(now_ms & 0xFFFFFFFF, next(self._counter) & 0xFFFF)).hex().upper()
        )


# ---- answers to pulls -----------------------------------------------------------------------------------------


def pull_fields(next_offset: int, min_offset: int, max_offset: int) -> dict[str, str]:
    """Return the extFields of an answer to a pull."""
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": str(min_offset),
        "maxOffset": str(max_offset),
    }
