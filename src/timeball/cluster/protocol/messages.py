"""Messages between replicas, without I/O: their encoding, and the positions in a log that they name.

A message is a header of 45 bytes and a payload:

    byte  0       4    5       13        17         25        33          41       45
          +-------+----+-------+---------+----------+---------+-----------+--------+---- … --+
          | magic |type| epoch | ordinal | position | end_seq | committed | length | payload |
          +-------+----+-------+---------+----------+---------+-----------+--------+---- … --+

Numbers are little-endian. A leader or candidate opens the connection and sends types 1 to 8. The replica answers with
types 11 to 17, with BEGIN where the answer to a FETCH crosses into another segment, and with FILE and WANT. Each
message has exactly one encoding: a header field that its type does not use is 0, and any other value is refused.

These inputs are refused with PeerError: another magic, an unknown type, a payload outside its type's bounds, negative
numbers, and a payload that cannot be decoded. The caller must then close the connection, because the start of the
next message cannot be found after a bad one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from struct import Struct
from typing import ClassVar, NamedTuple, TypeVar

import msgspec

from timeball.model import limits
from timeball.model.errors import UNDECODABLE, PeerError

# ---- positions in a log, and the comparison of two logs ------------------------------------------------------
# A position is the ordinal of a segment and a byte in it, together with `seq`, the sequence number after the rows
# before it. Only ends of frames are positions. The `ends` of a log are the positions at which its epochs end, in order.


class Position(NamedTuple):
    """The end of a frame. Positions of the same log are compared like tuples."""

    ordinal: int
    end: int
    seq: int


BEGINNING = Position(0, 0, 0)  # before the first frame


class EpochEnd(NamedTuple):
    """The end of an epoch's last frame."""

    epoch: int
    ordinal: int
    end: int
    seq: int

    @property
    def position(self) -> Position:
        """The end of the epoch as a position."""
        return Position(self.ordinal, self.end, self.seq)


Ends = tuple[EpochEnd, ...]


def last_position(ends: Ends) -> Position:
    """Find the end of the last frame in a log with these ends."""
    return ends[-1].position if ends else BEGINNING


def log_order_key(ends: Ends) -> tuple[int, Position]:
    """Build the key by which logs are compared: the log with the greater key is the more complete one.

    It has the later last epoch or, with the same last epoch, the later end.
    """
    return (ends[-1].epoch, ends[-1].position) if ends else (0, BEGINNING)


def are_in_order(ends: Ends) -> bool:
    """Check that epochs and positions both grow, as they do in every log."""
    return all(
        earlier.epoch < later.epoch
        and (earlier.ordinal, earlier.end) < (later.ordinal, later.end)
        and earlier.seq <= later.seq
        for earlier, later in itertools.pairwise(ends)
    )


def common_end(own_ends: Ends, other_ends: Ends) -> Position:
    """Find the position up to which both logs, given by their ends, are equal.

    Each epoch has one writer, which ships its frames in order (invariant I3). So two logs that both contain frames of
    an epoch are equal up to the smaller of the two ends of this epoch. The greatest epoch that both logs have
    determines the common part.
    """
    own_ends_by_epoch = {end.epoch: end.position for end in own_ends}
    for end in reversed(other_ends):
        if end.epoch in own_ends_by_epoch:
            return min(own_ends_by_epoch[end.epoch], end.position)
    return BEGINNING


def find_resume_position(sender: Ends, receiver: Ends, sender_first_seq: int) -> Position:
    """Find the position from which the sender's log continues the receiver's log. Both logs are given by their ends.

    The position is the end of the common log, or BEGINNING if the sender has deleted the next rows (its log begins with
    row `sender_first_seq`). In the second case the receiver's rows are not needed any more: the sender has a committed
    snapshot that contains all of their state that still counts.
    """
    end = common_end(sender, receiver)
    return end if end.seq >= sender_first_seq else BEGINNING


def cut(ends: Ends, cut_at: Position) -> Ends:
    """Compute the ends of the log after a cut at `cut_at`, which is the end of a frame of this log."""
    remaining = [end for end in ends if end.position <= cut_at]
    if cut_at > last_position(tuple(remaining)):
        # `cut_at` lies within the first epoch that was removed, which now ends there.
        remaining.append(EpochEnd(ends[len(remaining)].epoch, *cut_at))
    return tuple(remaining)


def extend(ends: Ends, epoch: int, position: Position) -> Ends:
    """Compute the ends of the log after a frame of `epoch` was added, which ends at `position`."""
    if ends and ends[-1].epoch == epoch:
        return (*ends[:-1], EpochEnd(epoch, *position))
    assert not ends or ends[-1].epoch < epoch, f"a frame of epoch {epoch} behind one of {ends[-1].epoch}"
    return (*ends, EpochEnd(epoch, *position))


class Members(msgspec.Struct, frozen=True):
    """A set of replicas of the group, as it was in the record. The sets are numbered in their order."""

    generation: int = 0  # 0: no set is known
    replicas: tuple[str, ...] = ()


NO_MEMBERS = Members()


# ---- the messages --------------------------------------------------------------------------------------------

MAGIC = 0x31524254  # "TBR1" in a hex dump
VERSION = 1  # of this protocol, sent in HELLO and PROMISE

HEADER = Struct(
    "<"
    "I"  # magic
    "B"  # type
    "q"  # epoch of the leader or candidate, repeated by an answer
    "I"  # ordinal of a segment
    "q"  # position: a byte in that segment
    "q"  # end_seq: sequence number after the last row of the frames, or of the log up to the position
    "q"  # committed: sequence number after the last committed row
    "I"  # length of the payload
)
assert HEADER.size == 45

TEXT_BYTES_MAX = 1 << 20  # of a JSON payload: a PROMISE lists one entry of about 40 bytes per epoch
# A commit holds frames of at most FRAME_BYTES_MAX / 2 together, or one frame of FRAME_BYTES_MAX (log/writer.py).
FRAMES_BYTES_MAX = limits.FRAME_BYTES_MAX
CHUNK_BYTES_MAX = 4 << 20  # of a data file
PATH_BYTES_MAX = 1_024
SEGMENT_HEADER_BYTES = 64

JsonPayload = TypeVar("JsonPayload", bound=msgspec.Struct)


class Message(msgspec.Struct, frozen=True):
    """One message. A subclass declares which of its fields are sent in the header, and encodes the others as payload.

    `HEADER_FIELDS` names the fields that are sent as the header's ordinal, position, end_seq and committed, in this
    order. None stands for a header field that the type does not use: it is sent as 0.
    """

    TYPE: ClassVar[int] = 0
    HEADER_FIELDS: ClassVar[tuple[str | None, str | None, str | None, str | None]] = (None, None, None, None)
    PAYLOAD_BYTES: ClassVar[tuple[int, int]] = (0, 0)  # minimum and maximum

    epoch: int

    def payload(self) -> bytes:
        """Encode the fields that are not in the header."""
        return b""

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Decode the fields in `payload`, by name. Raises PeerError."""
        return {}


class PathMessage(Message, frozen=True):
    """A message whose payload is the path of a data file."""

    PAYLOAD_BYTES = (1, PATH_BYTES_MAX)

    def payload(self) -> bytes:
        """Encode the path as UTF-8."""
        return self.path.encode()  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Decode the path."""
        return {"path": _decode_path(payload)}


class FramesMessage(Message, frozen=True):
    """A message whose payload is frames of the log."""

    PAYLOAD_BYTES = (1, FRAMES_BYTES_MAX)

    def payload(self) -> bytes:
        """Pass the frames on unchanged."""
        return self.frames  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Take the payload as frames, unchecked (following.py checks them)."""
        return {"frames": payload}


class Hello(Message, frozen=True):
    """Request to promise this epoch: the receiver then accepts no message of a lower epoch."""

    TYPE, PAYLOAD_BYTES = 1, (1, TEXT_BYTES_MAX)
    group: str
    replica: str  # the sender's
    version: int = VERSION
    members: Members = NO_MEMBERS  # the set in the record by which the sender leads or is a candidate
    is_elected: bool = False  # a majority of the set has promised the epoch

    def payload(self) -> bytes:
        """Encode the fields as JSON."""
        # msgspec omits a default by its identity, so an equal set is replaced by the default itself.
        members = NO_MEMBERS if self.members == NO_MEMBERS else self.members
        return msgspec.json.encode(
            HelloJson(self.group, self.replica, self.version, members, self.is_elected)
        )

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Decode the JSON."""
        return _as_dict(_read_json(payload, HelloJson))


class Begin(Message, frozen=True):
    """Request to begin this segment, in which the log continues."""

    TYPE, HEADER_FIELDS = 2, ("ordinal", "size_bytes", "first_seq", None)
    PAYLOAD_BYTES = (SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES)
    ordinal: int
    size_bytes: int
    first_seq: int
    header: bytes  # copy of the header in the leader's segment file

    def payload(self) -> bytes:
        """Pass the segment's header on unchanged."""
        return self.header

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Take the payload as the segment's header."""
        return {"header": payload}


class Data(FramesMessage, frozen=True):
    """Request to write these frames at exactly this position."""

    TYPE, HEADER_FIELDS = 3, ("ordinal", "position", "end_seq", "committed")
    ordinal: int
    position: int
    end_seq: int
    committed: int
    frames: bytes


class Cut(Message, frozen=True):
    """Request to remove the log after this position: that part belongs to an abandoned epoch."""

    TYPE, HEADER_FIELDS = 4, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Fetch(Message, frozen=True):
    """A candidate's request for the log from this position on, which the candidate lacks."""

    TYPE, HEADER_FIELDS = 5, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Ping(Message, frozen=True):
    """Report the end of the committed log and ask for the replica's clock."""

    TYPE, HEADER_FIELDS = 6, ("deviation_ms", "wall_ms", "boot_ms", "committed")
    wall_ms: int
    boot_ms: int
    committed: int
    # Deviation of the replica's clock from the median of the group, as an absolute value. 0 also if it is not known.
    deviation_ms: int = 0


class File(Message, frozen=True):
    """A piece of a data file, or an announcement about the file.

    Without a piece the message announces that the sender has the file. A size of 0 means that it does not.
    """

    TYPE, HEADER_FIELDS = 7, (None, "position", "size_bytes", None)
    PAYLOAD_BYTES = (6, 6 + PATH_BYTES_MAX + CHUNK_BYTES_MAX)
    PREFIX: ClassVar[Struct] = Struct("<HI")  # bytes of the path, CRC-32C of the whole file
    position: int  # of the piece
    size_bytes: int  # of the file
    path: str
    crc32c: int
    chunk: bytes

    def payload(self) -> bytes:
        """Encode the path, the checksum of the whole file, and the piece."""
        path = self.path.encode()
        return self.PREFIX.pack(len(path), self.crc32c) + path + self.chunk

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Decode path, checksum and piece."""
        length, crc32c = cls.PREFIX.unpack_from(payload)
        begin = cls.PREFIX.size + length
        if begin > len(payload) or not 0 < length <= PATH_BYTES_MAX:
            raise PeerError(f"FILE names a path of {length} bytes in a payload of {len(payload)}")
        return {
            "path": _decode_path(payload[cls.PREFIX.size : begin]),
            "crc32c": crc32c,
            "chunk": payload[begin:],
        }


class Want(PathMessage, frozen=True):
    """Request for a piece of this data file, from this byte on."""

    TYPE, HEADER_FIELDS = 8, (None, "position", None, None)
    position: int
    path: str


class Promise(Message, frozen=True):
    """Promise of an epoch, synced to the sender's disk, with the end of each epoch in the sender's log."""

    TYPE, PAYLOAD_BYTES = 11, (1, TEXT_BYTES_MAX)
    replica: str  # node and incarnation
    ends: tuple[EpochEnd, ...]
    version: int = VERSION
    first_seq: int = 0  # first row in the log: retention has deleted the rows before it
    generation: int = 0  # of the set of replicas that the sender has stored

    def payload(self) -> bytes:
        """Encode the fields as JSON."""
        return msgspec.json.encode(
            PromiseJson(self.replica, self.ends, self.version, self.first_seq, self.generation)
        )

    @classmethod
    def decode_payload(cls, payload: bytes) -> dict[str, object]:
        """Decode the JSON and check that the epoch ends are in order."""
        text = _read_json(payload, PromiseJson)
        if any(min(end) < 0 for end in text.ends) or text.first_seq < 0 or not are_in_order(text.ends):
            raise PeerError("PROMISE lists epochs that are not in the order of a log")
        return _as_dict(text)


class Refuse(Message, frozen=True):
    """Refusal: the sender has promised this later epoch, so the receiver must not lead.

    With a generation: the sender knows this newer set of replicas, so the receiver must not be elected by its set.
    """

    TYPE, HEADER_FIELDS = 12, (None, None, "generation", None)
    generation: int = 0


class Ack(Message, frozen=True):
    """Acknowledgement: the log up to this position is synced to the sender's disk."""

    TYPE, HEADER_FIELDS = 13, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int


class Bytes(FramesMessage, frozen=True):
    """Frames that answer a FETCH: like DATA, in the other direction."""

    TYPE, HEADER_FIELDS = 14, ("ordinal", "position", "end_seq", None)
    ordinal: int
    position: int
    end_seq: int
    frames: bytes


class Have(PathMessage, frozen=True):
    """Confirmation that this data file and its directory entry are synced to the sender's disk."""

    TYPE, HEADER_FIELDS = 15, (None, None, "size_bytes", None)
    size_bytes: int
    path: str


class Pong(Message, frozen=True):
    """Answer to a PING: the sender's wall clock, and the boot clock copied from the PING."""

    TYPE, HEADER_FIELDS = 16, (None, "wall_ms", "boot_ms", None)
    wall_ms: int
    boot_ms: int


class Complete(Message, frozen=True):
    """Confirmation that all data files that the committed rows below `end_seq` name are on the sender's disk."""

    TYPE, HEADER_FIELDS = 17, (None, None, "end_seq", None)
    end_seq: int


# ---- encoding ------------------------------------------------------------------------------------------------


# The fields of the first version have no default values, because a field with a damaged name would be taken for a
# missing one.


class HelloJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON payload of HELLO."""

    group: str
    replica: str
    version: int
    members: Members = NO_MEMBERS
    is_elected: bool = False


class PromiseJson(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON payload of PROMISE."""

    replica: str
    ends: tuple[EpochEnd, ...]
    version: int
    first_seq: int = 0
    generation: int = 0


_TYPES = (
    Hello, Begin, Data, Cut, Fetch, Ping, File, Want, Promise, Refuse, Ack, Bytes, Have, Pong, Complete,
)  # fmt: skip
KINDS: dict[int, type[Message]] = {kind.TYPE: kind for kind in _TYPES}


class Header(NamedTuple):
    """A checked header, which a payload of `length` bytes follows."""

    kind: type[Message]
    epoch: int
    fields: dict[str, int]
    length: int


def encode(message: Message) -> tuple[bytes, bytes]:
    """Encode a message as header and payload. They stay separate, so that frames are not copied."""
    payload = message.payload()
    bytes_min, bytes_max = message.PAYLOAD_BYTES
    assert bytes_min <= len(payload) <= bytes_max, f"{type(message).__name__} of {len(payload)} bytes"
    values = (0 if name is None else getattr(message, name) for name in message.HEADER_FIELDS)
    return HEADER.pack(MAGIC, message.TYPE, message.epoch, *values, len(payload)), payload


def read_header(raw: bytes | memoryview) -> Header:
    """Decode and check a header of 45 bytes. Raises PeerError."""
    magic, type_number, epoch, *values, length = HEADER.unpack(raw)
    kind = KINDS.get(type_number)
    if magic != MAGIC or kind is None:
        raise PeerError(
            f"no message of the replication protocol (magic {magic:#x}, type {type_number}): is the port right, and "
            "does every node run the same version?"
        )
    bytes_min, bytes_max = kind.PAYLOAD_BYTES
    if not bytes_min <= length <= bytes_max:
        raise PeerError(
            f"{kind.__name__} with a payload of {length} bytes, {bytes_min} to {bytes_max} are allowed"
        )
    if epoch < 0 or min(values) < 0:
        raise PeerError(f"{kind.__name__} with a number below zero")
    if any(value for name, value in zip(kind.HEADER_FIELDS, values, strict=True) if name is None):
        raise PeerError(f"{kind.__name__} with a number in a field that it does not have")
    fields = {name: value for name, value in zip(kind.HEADER_FIELDS, values, strict=True) if name is not None}
    return Header(kind, epoch, fields, length)


def read_message(header: Header, payload: bytes) -> Message:
    """Build the message from its header and its whole payload, of `header.length` bytes. Raises PeerError."""
    assert len(payload) == header.length
    return header.kind(epoch=header.epoch, **header.fields, **header.kind.decode_payload(payload))


def _read_json(payload: bytes, kind: type[JsonPayload]) -> JsonPayload:
    """Decode a JSON payload as this struct. Raises PeerError."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except UNDECODABLE as error:
        raise PeerError(f"{kind.__name__} cannot be read: {error}") from error


def _as_dict(text: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(text, name) for name in text.__struct_fields__}


def _decode_path(raw: bytes) -> str:
    """Decode the path of a data file. Raises PeerError."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise PeerError("a path that is not UTF-8") from error


# ---- the decoder of a connection's byte stream ---------------------------------------------------------------


class Receiver:
    """Converts the bytes of one connection into messages. It buffers at most one incomplete message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None  # of the message whose payload has not arrived completely

    def receive(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take bytes from the socket and yield the messages that are complete now. Raises PeerError.

        The caller may overwrite `data` once the iterator is exhausted.
        """
        # The buffer is nearly always empty. Then each payload is copied only once, out of `data`.
        buffer, offset = self._buffer, 0
        if buffer:
            buffer += data
        with memoryview(buffer or data) as view:
            while True:
                if self._header is None:
                    if len(view) - offset < HEADER.size:
                        break
                    # Check the header before its payload has arrived: a bad length must not make the buffer grow.
                    self._header = read_header(view[offset : offset + HEADER.size])
                    offset += HEADER.size
                header = self._header
                if len(view) - offset < header.length:
                    break
                payload = bytes(view[offset : offset + header.length])
                offset += header.length
                self._header = None
                yield read_message(header, payload)
        if buffer:
            del buffer[:offset]
        else:
            buffer += data[offset:]
