"""Encode and decode HTTP/2 frames (RFC 9113), and encode the header blocks of gRPC's answers. No I/O.

    frame      length (3 bytes), kind (1), flags (1), stream (4), payload
    message    compressed or not (1 byte), length (4), a protobuf message: gRPC's, within the DATA of a stream

connection.py decodes the header blocks of requests. Answers need no HPACK encoder with state: each of their header
fields is a literal without indexing (RFC 7541, 6.2.2). So nearly all answers have the same header blocks, which are
encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from urllib.parse import quote

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16_384  # of a payload: every peer accepts this size. Also the default maximum of the server
# From this size on, a payload is a view of the bytes read, which saves a copy. A view keeps all bytes of that read in
# memory, so smaller payloads are copied.
VIEW_BYTES_MIN = 64 * 1024
WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MAX = 65_535, 2**31 - 1
LAST_STREAM = 2**31 - 1
PING_BYTES, PRIORITY_BYTES = 8, 5

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
_MAY_BE_LARGE = (DATA, HEADERS, CONTINUATION)  # kinds of frames that may be larger than FRAME_BYTES_MAX
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = 2, 3, 4, 5, 6  # identifiers of settings

HEAD = Struct(">HBBBI")  # the length is two fields: its upper 16 bits, and its lower 8
PREFIX = Struct(">BI")  # in front of each gRPC message: 1 if compressed, and the length
_SETTING = Struct(">HI")
_GOAWAY = Struct(">II")
_STATUS_200 = b"\x88"  # from HPACK's static table


Payload = bytes | bytearray | memoryview
Frame = tuple[int, int, int, Payload]  # kind, flags, stream number, payload


class Fault(IntEnum):
    """The HTTP/2 error codes that the server sends."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class GrpcStatus(IntEnum):
    """The gRPC statuses that the server sends."""

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
    """Splits the bytes of one connection, which arrive in pieces of any size, into frames.

    A DATA or header frame larger than FRAME_BYTES_MAX is returned in parts as it arrives. To collect it first would
    copy all earlier bytes again with each piece. Each part looks like a frame of its own: the further parts of a
    HEADERS frame are returned as CONTINUATION, and only the last part has the flags that end the frame.
    """

    def __init__(self, data_bytes_max: int) -> None:
        """Start a connection, whose first bytes must be the client's preface.

        `data_bytes_max` bounds DATA and headers without padding. Every other frame is bounded by FRAME_BYTES_MAX.
        """
        self._data_bytes_max = data_bytes_max
        self._held = b""  # the incomplete frame at the end of the bytes read
        # The rest of a large frame: its kind, stream number, flags, and the number of bytes that have not arrived yet.
        self._rest: tuple[int, int, int, int] | None = None
        self.has_preface = False  # the client's preface has arrived completely
        # The rule that the peer has broken. The connection then ends, so `read` is not called again.
        self.broken: BrokenRule | None = None

    def read(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. If the bytes behind them break a rule, set `broken`."""
        frames: list[Frame] = []
        try:
            self._read(data, frames)
        except BrokenRule as error:
            self.broken = error
        return frames

    def _read(self, data: bytes, frames: list[Frame]) -> None:
        """Append the frames that `data` completes to `frames`.

        Raises BrokenRule for invalid bytes. The frames in front of them have been appended then.
        """
        at = 0  # where the next frame begins in `data`
        if self._rest is not None:
            at = self._read_rest(self._rest, data, frames)
        elif self._held:
            data, self._held = self._held + data, b""
        size_bytes = len(data)
        if not self.has_preface:
            if data[: len(PREFACE)] != PREFACE[:size_bytes]:
                raise BrokenRule(Fault.PROTOCOL_ERROR, "no preface of HTTP/2")
            if size_bytes >= len(PREFACE):
                at, self.has_preface = len(PREFACE), True
        while self.has_preface and size_bytes - at >= HEAD.size:
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            payload_bytes, begin = high << 8 | low, at + HEAD.size
            end = begin + payload_bytes
            if payload_bytes > FRAME_BYTES_MAX:
                if kind not in _MAY_BE_LARGE or flags & PADDED or payload_bytes > self._data_bytes_max:
                    raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"a frame of {payload_bytes} bytes")
                # The first part of HEADERS must contain the whole priority, because `strip_padding` looks for it there.
                if end > size_bytes > begin + (0 if kind == DATA else PRIORITY_BYTES):
                    number &= LAST_STREAM
                    first_flags = 0 if kind == DATA else flags & ~END_HEADERS
                    frames.append((kind, first_flags, number, _slice(data, begin, size_bytes)))
                    self._rest = (DATA if kind == DATA else CONTINUATION, number, flags, end - size_bytes)
                    return
            if end > size_bytes:
                break
            frames.append((kind, flags, number & LAST_STREAM, _slice(data, begin, end)))
            at = end
        self._held = data[at:]

    def _read_rest(self, rest: tuple[int, int, int, int], data: bytes, frames: list[Frame]) -> int:
        """Append the part of `data` that belongs to the large frame `rest`, and return the size of that part."""
        kind, number, flags, rest_bytes = rest
        size_bytes = min(rest_bytes, len(data))
        is_last = size_bytes == rest_bytes
        self._rest = None if is_last else (kind, number, flags, rest_bytes - size_bytes)
        frames.append((kind, flags if is_last else 0, number, _slice(data, 0, size_bytes)))
        return size_bytes


def _slice(data: bytes, begin: int, end: int) -> Payload:
    """Copy a part of `data`, or make a view of it if it is large."""
    return data[begin:end] if end - begin < VIEW_BYTES_MIN else memoryview(data)[begin:end]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    size_bytes = len(payload)
    return HEAD.pack(size_bytes >> 8, size_bytes & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame from values by setting."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in values.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Return an iterator over (setting, value) in the payload of a SETTINGS frame. Raises BrokenRule at the call."""
    if len(payload) % _SETTING.size:
        raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    return _SETTING.iter_unpack(payload)


def window_update(stream: int, size_bytes: int) -> bytes:
    """Encode a WINDOW_UPDATE, which allows the peer to send `size_bytes` more. `stream` 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, size_bytes.to_bytes(4, "big"))


def rst_stream(stream: int, fault: Fault) -> bytes:
    """Encode a RST_STREAM, which ends one stream with an error code."""
    return frame(RST_STREAM, 0, stream, fault.to_bytes(4, "big"))


def goaway(last_stream: int, fault: Fault, reason: str = "") -> bytes:
    """Encode a GOAWAY, which ends the connection. The peer may repeat calls on streams above `last_stream`."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, fault) + reason.encode())


def read_31_bits(payload: bytes) -> int:
    """Decode the number in a RST_STREAM or WINDOW_UPDATE, without its highest bit. Raises BrokenRule."""
    if len(payload) != 4:
        raise BrokenRule(Fault.FRAME_SIZE_ERROR, f"a payload of {len(payload)} bytes instead of 4")
    return int.from_bytes(payload, "big") & 0x7FFF_FFFF


def stream_dependency(flags: int, payload: bytes) -> int:
    """Decode the number of the stream on which the stream of a PRIORITY, or of HEADERS with a priority, depends."""
    at = 1 if flags & PADDED else 0
    return int.from_bytes(payload[at : at + 4], "big") & LAST_STREAM


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Remove padding and priority from the payload of DATA or HEADERS. Raises BrokenRule if it is too short."""
    at, end = 0, len(payload)
    if flags & PADDED:
        at, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITISED:
        at += PRIORITY_BYTES
    if at > end:
        raise BrokenRule(Fault.PROTOCOL_ERROR, "more padding than payload")
    return payload[at:end]


# ---- gRPC's answers ------------------------------------------------------------------------------------------

# The characters of grpc-message that are not percent-encoded.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def literal(name: str, value: str) -> bytes:
    """Encode a header field as an HPACK literal that the peer does not add to its dynamic table.

    Layout: a byte 0, then name and value as texts (RFC 7541, 6.2.2).
    """
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    """Encode an HPACK string without Huffman coding (RFC 7541, 5.1 and 5.2): the length in bytes, then the text.

    A length below 127 is one byte. Otherwise, the byte 127 comes first, then the length minus 127 in bytes of 7 bits
    each, the lowest first. The highest bit of each byte but the last is set.
    """
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
    """Encode the header block of the trailers of a call that ends with this gRPC status and message."""
    return literal("grpc-status", str(status)) + literal("grpc-message", quote(message, safe=_PRINTABLE))


# The bytes of an answer in front of its one message (HEADERS, the head of DATA, gRPC's prefix), and those behind it
# (trailers).
_BEFORE = Struct(f">HBBBI{len(RESPONSE)}sHBBBIBI")
_BEHIND = Struct(f">HBBBI{len(TRAILERS_OK)}s")


def answer_frames(stream: int, message: bytes) -> bytes:
    """Encode all frames of an answer with one message. The message must fit into one DATA frame."""
    size_bytes = len(message)
    data_bytes = size_bytes + PREFIX.size
    before = _BEFORE.pack(
        0, len(RESPONSE), HEADERS, END_HEADERS, stream, RESPONSE,
        data_bytes >> 8, data_bytes & 0xFF, DATA, 0, stream, 0, size_bytes,
    )  # fmt: skip
    behind = _BEHIND.pack(0, len(TRAILERS_OK), HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS_OK)
    return b"".join((before, message, behind))
