"""Messages between replicas: a header of 45 bytes and a payload. Bytes only, no I/O.

    byte  0       4    5       13        17         25        33          41       45
          +-------+----+-------+---------+----------+---------+-----------+--------+---- … --+
          | magic |type| epoch | ordinal | position | end_seq | committed | length | payload |
          +-------+----+-------+---------+----------+---------+-----------+--------+---- … --+

Little-endian. A leader or candidate opens the connection and sends types 1 to 8; the replica answers with 11 to 17,
with BEGIN where a FETCH crosses into another segment, and with FILE and WANT. A message has one form: where its type
has no ordinal the header says 0, and another number there is refused.

Refuses: another magic, an unknown type, a payload beyond its type's bound, numbers below zero, bytes behind a payload.
Each raises PeerError, and the connection must end: behind a bad message nothing can be told apart.
"""

from __future__ import annotations

from struct import Struct
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from timeball import limits
from timeball.cluster.positions import EpochEnd, are_in_order
from timeball.errors import PeerError

MAGIC = 0x31524254  # "TBR1" in a hex dump
VERSION = 1  # of this protocol, told in HELLO and PROMISE

HEADER = Struct(
    "<"
    "I"  # magic
    "B"  # type
    "q"  # epoch: of the leader or candidate; an answer repeats it
    "I"  # ordinal of a segment
    "q"  # position: a byte in that segment
    "q"  # end_seq: sequence number after the last row of the frames, or of the log up to the position
    "q"  # committed: sequence number after the last committed row
    "I"  # length of the payload
)
assert HEADER.size == 45

TEXT_BYTES_MAX = 1 << 20  # of a JSON payload: a log has one entry an epoch, some 40 bytes
# A commit: frames of at most half of FRAME_BYTES_MAX together, or a single one of FRAME_BYTES_MAX (log/writer.py).
FRAMES_BYTES_MAX = limits.FRAME_BYTES_MAX
CHUNK_BYTES_MAX = 4 << 20  # of a data file
PATH_BYTES_MAX = 1_024
SEGMENT_HEADER_BYTES = 64

Text = TypeVar("Text", bound=msgspec.Struct)


class Message(msgspec.Struct, frozen=True):
    """One message. `HEADED` names the fields that the header carries, in its order; None where it says 0."""

    TYPE: ClassVar[int] = 0
    HEADED: ClassVar[tuple[str | None, str | None, str | None, str | None]] = (None, None, None, None)
    PAYLOAD_BYTES: ClassVar[tuple[int, int]] = (0, 0)  # least and most

    epoch: int

    def payload(self) -> bytes:
        """Return the bytes behind the header."""
        return b""

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Return the fields that `payload` carries."""
        return {}


class OfPath(Message, frozen=True):
    """A message whose payload is the path of a data file."""

    PAYLOAD_BYTES = (1, PATH_BYTES_MAX)

    def payload(self) -> bytes:
        """Return the path."""
        return self.path.encode()  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Take the payload as the path."""
        return {"path": _text(payload)}


class OfFrames(Message, frozen=True):
    """A message whose payload is frames."""

    PAYLOAD_BYTES = (1, FRAMES_BYTES_MAX)

    def payload(self) -> bytes:
        """Return the frames."""
        return self.frames  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Take the payload as frames."""
        return {"frames": payload}


class Hello(Message, frozen=True):
    """Promise this epoch, and end what you accept from lower ones."""

    TYPE, PAYLOAD_BYTES = 1, (1, TEXT_BYTES_MAX)
    group: str
    replica: str  # the sender's
    version: int = VERSION

    def payload(self) -> bytes:
        """Return the fields as JSON."""
        return msgspec.json.encode(HelloText(self.group, self.replica, self.version))

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Read the JSON."""
        return _fields(_read_json(payload, HelloText))


class Begin(Message, frozen=True):
    """Begin this segment: the log goes on in it."""

    TYPE, HEADED = 2, ("ordinal", "size_bytes", "first_seq", None)
    PAYLOAD_BYTES = (SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES)
    ordinal: int
    size_bytes: int
    first_seq: int
    header: bytes  # the segment's own, as the leader has it

    def payload(self) -> bytes:
        """Return the segment's header."""
        return self.header

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Take the payload as the segment's header."""
        return {"header": payload}


class Data(OfFrames, frozen=True):
    """Write these frames at exactly this position."""

    TYPE, HEADED = 3, ("ordinal", "position", "end_seq", "committed")
    ordinal: int
    position: int
    end_seq: int
    committed: int
    frames: bytes


class Cut(Message, frozen=True):
    """Remove what stands behind this position: it is of a lost epoch."""

    TYPE, HEADED = 4, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Fetch(Message, frozen=True):
    """Send your log from this position on: the candidate lacks it."""

    TYPE, HEADED = 5, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Ping(Message, frozen=True):
    """Tell the end of the committed log, and ask for the replica's clock."""

    TYPE, HEADED = 6, ("off_ms", "wall_ms", "boot_ms", "committed")
    wall_ms: int
    boot_ms: int
    committed: int
    off_ms: int = 0  # by how much the replica's clock is off the majority's, either way, as far as known


class File(Message, frozen=True):
    """A piece of a data file. Without a piece: this file is to be had; and with a size of 0: I do not have it."""

    TYPE, HEADED = 7, (None, "position", "size_bytes", None)
    PAYLOAD_BYTES = (6, 6 + PATH_BYTES_MAX + CHUNK_BYTES_MAX)
    LEAD: ClassVar[Struct] = Struct("<HI")  # bytes of the path, CRC-32C of the whole file
    position: int  # of the piece
    size_bytes: int  # of the file
    path: str
    crc32c: int
    chunk: bytes

    def payload(self) -> bytes:
        """Return the path, the file's checksum, and the piece."""
        path = self.path.encode()
        return self.LEAD.pack(len(path), self.crc32c) + path + self.chunk

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Read path, checksum and piece."""
        length, crc32c = cls.LEAD.unpack_from(payload)
        begin = cls.LEAD.size + length
        if begin > len(payload) or not 0 < length <= PATH_BYTES_MAX:
            raise PeerError(f"FILE names a path of {length} bytes in a payload of {len(payload)}")
        return {
            "path": _text(payload[cls.LEAD.size : begin]),
            "crc32c": crc32c,
            "chunk": payload[begin:],
        }


class Want(OfPath, frozen=True):
    """Send a piece of this data file, from this byte on."""

    TYPE, HEADED = 8, (None, "position", None, None)
    position: int
    path: str


class Promise(Message, frozen=True):
    """The epoch is promised on my disk, and this is how far my log goes, epoch by epoch."""

    TYPE, PAYLOAD_BYTES = 11, (1, TEXT_BYTES_MAX)
    replica: str  # node and incarnation
    ends: tuple[EpochEnd, ...]
    version: int = VERSION
    first_seq: int = 0  # the first row that is kept: retention has let go what stood before

    def payload(self) -> bytes:
        """Return the fields as JSON."""
        return msgspec.json.encode(PromiseText(self.replica, self.ends, self.version, self.first_seq))

    @classmethod
    def fields_of(cls, payload: bytes) -> dict[str, object]:
        """Read the JSON, and refuse ends that are not in order."""
        text = _read_json(payload, PromiseText)
        if any(min(end) < 0 for end in text.ends) or text.first_seq < 0 or not are_in_order(text.ends):
            raise PeerError("PROMISE lists epochs that are not in the order of a log")
        return _fields(text)


class Refuse(Message, frozen=True):
    """A later epoch is promised here, namely this one: stop leading."""

    TYPE = 12


class Ack(Message, frozen=True):
    """All before this position is on my disk."""

    TYPE, HEADED = 13, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Bytes(OfFrames, frozen=True):
    """Frames that a candidate has fetched: as DATA, in the other direction."""

    TYPE, HEADED = 14, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int
    frames: bytes


class Have(OfPath, frozen=True):
    """This data file, and its name in the folder, are on my disk."""

    TYPE, HEADED = 15, (None, None, "size_bytes", None)
    size_bytes: int
    path: str


class Pong(Message, frozen=True):
    """Answer a PING: my clock, and the sender's as it was told."""

    TYPE, HEADED = 16, (None, "wall_ms", "boot_ms", None)
    wall_ms: int
    boot_ms: int


class Complete(Message, frozen=True):
    """All data files that the committed rows below this one name are on my disk."""

    TYPE, HEADED = 17, (None, None, "end_seq", None)
    end_seq: int


class HelloText(msgspec.Struct, frozen=True):
    """The JSON of HELLO."""

    group: str
    replica: str
    version: int


class PromiseText(msgspec.Struct, frozen=True):
    """The JSON of PROMISE."""

    replica: str
    ends: tuple[EpochEnd, ...]
    version: int
    first_seq: int = 0


_ALL = (
    Hello, Begin, Data, Cut, Fetch, Ping, File, Want, Promise, Refuse, Ack, Bytes, Have, Pong, Complete,
)  # fmt: skip
KINDS: dict[int, type[Message]] = {kind.TYPE: kind for kind in _ALL}


class Header(NamedTuple):
    """A checked header: the payload of `length` bytes follows it."""

    kind: type[Message]
    epoch: int
    headed: dict[str, int]
    length: int


def encode(message: Message) -> tuple[bytes, bytes]:
    """Return header and payload, apart so that frames are not copied."""
    payload = message.payload()
    least, most = message.PAYLOAD_BYTES
    assert least <= len(payload) <= most, f"{type(message).__name__} of {len(payload)} bytes"
    values = (0 if name is None else getattr(message, name) for name in message.HEADED)
    return HEADER.pack(MAGIC, message.TYPE, message.epoch, *values, len(payload)), payload


def read_header(raw: bytes | memoryview) -> Header:
    """Return what 45 bytes say; raises PeerError."""
    magic, number, epoch, *values, length = HEADER.unpack(raw)
    kind = KINDS.get(number)
    if magic != MAGIC or kind is None:
        raise PeerError(
            f"no message of the replication protocol (magic {magic:#x}, type {number}): is the port right, and does "
            "every node run the same version?"
        )
    least, most = kind.PAYLOAD_BYTES
    if not least <= length <= most:
        raise PeerError(f"{kind.__name__} with a payload of {length} bytes, {least} to {most} are allowed")
    if epoch < 0 or min(values) < 0:
        raise PeerError(f"{kind.__name__} with a number below zero")
    if any(value for name, value in zip(kind.HEADED, values, strict=True) if name is None):
        raise PeerError(f"{kind.__name__} with a number in a field that it does not have")
    headed = {name: value for name, value in zip(kind.HEADED, values, strict=True) if name is not None}
    return Header(kind, epoch, headed, length)


def read_message(header: Header, payload: bytes) -> Message:
    """Return the message of a header and its whole payload; raises PeerError."""
    assert len(payload) == header.length
    return header.kind(epoch=header.epoch, **header.headed, **header.kind.fields_of(payload))


def _read_json(payload: bytes, kind: type[Text]) -> Text:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"{kind.__name__} cannot be read: {error}") from error


def _fields(text: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(text, name) for name in text.__struct_fields__}


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise PeerError("a path that is not UTF-8") from error
