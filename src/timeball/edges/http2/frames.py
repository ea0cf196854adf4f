"""HTTP/2's frames (RFC 9113) and the header blocks of gRPC's answers: bytes only.

    frame      length (3 bytes), kind (1), flags (1), stream (4), payload
    message    compressed or not (1 byte), length (4), a protobuf message: gRPC's, within the DATA of a stream

header_blocks.py reads the header blocks of requests. Answers need no encoder: each field is a literal without indexing
(RFC 7541, 6.2.2), so nearly all answers have the same header blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from urllib.parse import quote

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # of a payload: the size that every peer accepts, and the maximum here by default
# From this size on, a part of the bytes read is kept as a view instead of a copy. A view keeps all the bytes of its
# read in memory.
VIEW_BYTES_MIN = 64 * 1024
WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MAX = 65_535, 2**31 - 1
LAST_STREAM = 2**31 - 1
PING_BYTES, PRIORITY_BYTES = 8, 5

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
_LARGE = (DATA, HEADERS, CONTINUATION)  # kinds of frames that may be larger than FRAME_BYTES_MAX
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = 2, 3, 4, 5, 6  # settings

HEAD = Struct(">HBBBI")  # the length is two fields: its upper 16 bits, and its lower 8
PREFIX = Struct(">BI")
_SETTING = Struct(">HI")
_GOAWAY = Struct(">II")
_STATUS_200 = b"\x88"  # from HPACK's static table


Payload = bytes | memoryview
Frame = tuple[int, int, int, Payload]  # kind, flags, stream, payload


class Fault(IntEnum):
    """The HTTP/2 error codes that are sent."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class GrpcStatus(IntEnum):
    """The gRPC statuses that are sent."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class BrokenRule(Exception):
    """The peer has broken a rule of HTTP/2 or a bound of Timeball. Its connection ends with this code."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


class FrameReader:
    """The frames of one connection, from bytes that arrive in pieces of any size.

    A large frame of DATA or headers is passed on in parts as it arrives. So no part of it is copied again with each
    further piece. The further parts of headers are passed on as CONTINUATION.
    """

    def __init__(self, data_bytes_max: int) -> None:
        """Begin before the preface.

        `data_bytes_max` bounds DATA and headers without padding. Every other frame is bounded by FRAME_BYTES_MAX.
        """
        self._data_bytes_max = data_bytes_max
        self._held = b""  # the incomplete frame at the end of the bytes read
        # Of a large frame: kind, stream, flags, bytes that have not arrived yet.
        self._rest: tuple[int, int, int, int] | None = None
        self.is_greeted = False  # the preface has arrived
        self.broken: BrokenRule | None = None  # the rule that the peer has broken. Nothing is read afterwards

    def read(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete. If the bytes behind them break a rule, set `broken`."""
        found: list[Frame] = []
        try:
            self._read(data, found)
        except BrokenRule as error:
            self.broken = error
        return found

    def _read(self, data: bytes, found: list[Frame]) -> None:
        at = 0
        if self._rest is not None:
            at = self._read_rest(self._rest, data, found)
        elif self._held:
            data, self._held = self._held + data, b""
        size_bytes = len(data)
        if not self.is_greeted:
            if data[: len(PREFACE)] != PREFACE[:size_bytes]:
                raise BrokenRule(Fault.PROTOCOL_ERROR, "no preface of HTTP/2")
            if size_bytes >= len(PREFACE):
                at, self.is_greeted = len(PREFACE), True
        while self.is_greeted and size_bytes - at >= HEAD.size:
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            payload_bytes, begin = high << 8 | low, at + HEAD.size
            end = begin + payload_bytes
            if payload_bytes > FRAME_BYTES_MAX:
                if kind not in _LARGE or flags & PADDED or payload_bytes > self._data_bytes_max:
                    raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"a frame of {payload_bytes} bytes")
                # The first part of HEADERS must contain the priority, because `unpadded` removes it from that part.
                if end > size_bytes > begin + (0 if kind == DATA else PRIORITY_BYTES):
                    number &= LAST_STREAM
                    first_flags = 0 if kind == DATA else flags & ~END_HEADERS
                    found.append((kind, first_flags, number, _part(data, begin, size_bytes)))
                    self._rest = (DATA if kind == DATA else CONTINUATION, number, flags, end - size_bytes)
                    return
            if end > size_bytes:
                break
            found.append((kind, flags, number & LAST_STREAM, _part(data, begin, end)))
            at = end
        self._held = data[at:]

    def _read_rest(self, rest: tuple[int, int, int, int], data: bytes, found: list[Frame]) -> int:
        """Take the part of `data` that belongs to the begun frame, and return its size."""
        kind, number, flags, rest_bytes = rest
        size_bytes = min(rest_bytes, len(data))
        is_last = size_bytes == rest_bytes
        self._rest = None if is_last else (kind, number, flags, rest_bytes - size_bytes)
        found.append((kind, flags if is_last else 0, number, _part(data, 0, size_bytes)))
        return size_bytes


def _part(data: bytes, begin: int, end: int) -> Payload:
    return data[begin:end] if end - begin < VIEW_BYTES_MIN else memoryview(data)[begin:end]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    size_bytes = len(payload)
    return HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in values.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return the settings of a peer. Raises BrokenRule."""
    if len(payload) % _SETTING.size:
        raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    return _SETTING.iter_unpack(payload)


def window_update(stream: int, size_bytes: int) -> bytes:
    """Return a WINDOW_UPDATE, which allows the peer to send `size_bytes` more."""
    return frame(WINDOW_UPDATE, 0, stream, size_bytes.to_bytes(4, "big"))


def rst_stream(stream: int, fault: Fault) -> bytes:
    """Return a RST_STREAM."""
    return frame(RST_STREAM, 0, stream, fault.to_bytes(4, "big"))


def goaway(last_stream: int, fault: Fault, reason: str = "") -> bytes:
    """Return a GOAWAY."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, fault) + reason.encode())


def number_of(payload: bytes) -> int:
    """Return the 31 bits of a RST_STREAM or WINDOW_UPDATE. Raises BrokenRule."""
    if len(payload) != 4:
        raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"{len(payload)} bytes where 4 belong")
    return int.from_bytes(payload, "big") & 0x7FFF_FFFF


def depends_on(flags: int, payload: bytes) -> int:
    """Return the stream on which a PRIORITY, or HEADERS with a priority, makes its own stream depend."""
    at = 1 if flags & PADDED else 0
    return int.from_bytes(payload[at : at + 4], "big") & LAST_STREAM


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority. Raises BrokenRule."""
    at, end = 0, len(payload)
    if flags & PADDED:
        at, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITISED:
        at += 5
    if at > end:
        raise BrokenRule(Fault.PROTOCOL_ERROR, "more padding than payload")
    return payload[at:end]


# ---- gRPC's answers ------------------------------------------------------------------------------------------

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # all other characters are written as %XX


def literal(name: str, value: str) -> bytes:
    """Return a header field that is not added to a table."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    """Return an HPACK string without Huffman coding. Its length takes 7 bits, or more bytes of 7 bits each."""
    data = text.encode("latin-1")
    rest, size = len(data) - 127, b""
    if rest < 0:
        return bytes([len(data)]) + data
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return b"\x7f" + size + bytes([rest]) + data


RESPONSE = _STATUS_200 + literal("content-type", "application/grpc")
TRAILERS_OK = literal("grpc-status", "0")


def trailers(status: int, message: str) -> bytes:
    """Return the trailers of a call that ends with this gRPC status."""
    return literal("grpc-status", str(status)) + literal("grpc-message", quote(message, safe=_PRINTABLE))


# An answer with one message: HEADERS, the head of DATA and gRPC's prefix in front of the message, and the trailers
# behind.
_BEFORE = Struct(f">HBBBI{len(RESPONSE)}sHBBBIBI")
_BEHIND = Struct(f">HBBBI{len(TRAILERS_OK)}s")


def answer(stream: int, message: bytes) -> bytes:
    """Return all frames of an answer whose one message fits into a frame."""
    size_bytes = len(message)
    data_bytes = size_bytes + PREFIX.size
    before = _BEFORE.pack(
        0, len(RESPONSE), HEADERS, END_HEADERS, stream, RESPONSE,
        data_bytes >> 8, data_bytes & 0xFF, DATA, 0, stream, 0, size_bytes,
    )  # fmt: skip
    behind = _BEHIND.pack(0, len(TRAILERS_OK), HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS_OK)
    return b"".join((before, message, behind))
