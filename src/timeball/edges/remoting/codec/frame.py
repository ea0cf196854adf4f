"""Encode and decode frames and command headers, in both of RocketMQ's serialisations.

    byte  0          4      5             8                  8 + h           4 + length
          +----------+------+-------------+-------- … -------+----- … -------+
          | length   | type | header len h| header           | body          |     big-endian
          +----------+------+-------------+-------- … -------+----- … -------+
           4          1      3

`length` is the number of bytes after it. Type 0 is a JSON header. Its extFields may contain numbers and booleans as
well as strings (the C++ and Node clients send them). Type 1 is RocketMQ's binary header:

    | code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark: 4 + n | extFields: 4 + m |
    extFields are m bytes: a sequence of | key: 2 + n | value: 4 + n |

Lengths are checked before any byte of the frame is stored, so a frame with false lengths takes no memory. A header is
decoded into a typed structure, which refuses JSON that would expand to gigabytes. A client that sends a bad frame loses
its connection. There is one exception: if the lengths of a frame are valid and its header identifies the request (code,
opaque, flag), other faults of the header are answered with an error. The connection stays open, because the position of
the next frame is known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from timeball.edges.remoting.codec.codes import CommandFlag, Language, ResponseCode
from timeball.model.errors import UNDECODABLE, RequestError

HEADER_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = 4 * 1024 * 1024 + 64 * 1024
EXT_FIELDS_MAX = 256

JSON, BINARY = 0, 1

_PREFIX = struct.Struct(">iI")
_FIXED = struct.Struct(">hBhii")  # code, language, version, opaque, flag
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")

# Plain numbers and dicts: arithmetic with an IntFlag, or a look-up in an Enum, costs 1 us per request.
_RESPONSE, _ONE_WAY = int(CommandFlag.RESPONSE), int(CommandFlag.ONE_WAY)
_LANGUAGE_CODES = {language.name: int(language) for language in Language}
_LANGUAGE_NAMES = {int(language): language.name for language in Language}


class BadFrame(RequestError):
    """Bytes that are not a RocketMQ command. The connection is closed."""

    code = "bad_frame"


class Command(msgspec.Struct):
    """A request or a response. In both forms of the header, the values of `ext` are text."""

    code: int
    opaque: int = 0
    flag: int = 0
    ext: dict[str, str] = {}
    body: bytes = b""
    remark: str | None = None
    language: int = Language.JAVA
    version: int = 0
    serialisation: int = JSON

    @property
    def is_response(self) -> bool:
        """True for the answer to a request from the broker."""
        return self.flag & _RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        """True if the client expects no answer."""
        return self.flag & _ONE_WAY != 0


class BadHeader(BadFrame):
    """A request with a bad header that still identifies the request, so that it can be answered.

    `request` has the fields that the answer needs. The connection stays open.
    """

    def __init__(self, text: str, request: Command, response_code: int) -> None:
        super().__init__(text)
        self.request, self.response_code = request, response_code


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame, not decoded yet."""

    serialisation: int
    header: bytes
    body: bytes


# A function that splits bytes into frames, given the maximum size of a frame. It returns three values: the frames (the
# compiled codec also returns runs of sends and plain pulls), the start position of the incomplete frame at the end, and
# the size of that frame in bytes (while unknown: size of its prefix). Raises BadFrame.
Cut = Callable[[bytes, int], tuple[list[Any], int, int]]


def cut(data: bytes, frame_bytes_max: int) -> tuple[list[Frame], int, int]:
    """Split bytes into frames. See `Cut`. Raises BadFrame."""
    frames: list[Frame] = []
    position, size_bytes = 0, len(data)
    awaited_bytes = _PREFIX.size
    unpack = _PREFIX.unpack_from
    while size_bytes - position >= 8:
        length, type_and_header_bytes = unpack(data, position)
        header_bytes = type_and_header_bytes & 0xFFFFFF
        if not 4 <= length <= frame_bytes_max or header_bytes > length - 4:
            raise length_error(length, header_bytes, frame_bytes_max)
        end = position + 4 + length
        if end > size_bytes:
            awaited_bytes = end - position
            break
        body_position = position + 8 + header_bytes
        frames.append(
            Frame(type_and_header_bytes >> 24, data[position + 8 : body_position], data[body_position:end])
        )
        position = end
    return frames, position, awaited_bytes


def length_error(length: int, header_bytes: int, frame_bytes_max: int) -> BadFrame:
    """Create the error for a frame with invalid lengths."""
    if not 4 <= length <= frame_bytes_max:
        return BadFrame(f"a frame of {length} bytes; between 4 and {frame_bytes_max}")
    return BadFrame(f"a header of {header_bytes} bytes in a frame of {length}")


class Splitter:
    """Splits the received bytes of a connection into frames, and buffers the incomplete frame at the end."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX, cut: Cut = cut) -> None:
        self._held = bytearray()
        self.held_bytes = 0  # bytes of the incomplete frame at the end
        # Full size of that frame (while unknown: size of its prefix). 0 without an incomplete frame.
        self.awaited_bytes = 0
        self._frame_bytes_max, self._cut = frame_bytes_max, cut

    def feed(self, data: bytes) -> list[Any]:
        """Return the frames that `data` completes, or the other objects that `cut` creates. Raises BadFrame."""
        if self._held:
            self._held += data
            self.held_bytes = len(self._held)
            if self.held_bytes < self.awaited_bytes:
                return []
            data = bytes(self._held)
        frames, end, awaited_bytes = self._cut(data, self._frame_bytes_max)
        self.held_bytes = len(data) - end
        if self.held_bytes or self._held:  # usually false: most reads end at the end of a frame
            self._held = bytearray(data[end:])
        self.awaited_bytes = awaited_bytes if self.held_bytes else 0
        return frames


# ---- headers ------------------------------------------------------------------------------------------------


Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _PlainHeader(msgspec.Struct):
    """The header as Java clients write it, with text in all extFields. It is decoded in one step."""

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    remark: str | None = None
    language: str | int | None = None
    version: Int32 = 0
    extFields: dict[str, str] = {}  # noqa: N815


class _JsonHeader(msgspec.Struct):
    code: int
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str | int | None = None
    version: int = 0
    extFields: dict[str, str | int | float | bool | None] | None = None  # noqa: N815  RocketMQ's name


class _Envelope(msgspec.Struct):
    """The fields of a request that its answer needs."""

    code: int
    opaque: int = 0
    flag: int = 0


_plain_header = msgspec.json.Decoder(_PlainHeader)
_json_header = msgspec.json.Decoder(_JsonHeader)
_json_envelope = msgspec.json.Decoder(_Envelope)


def decode(frame: Frame) -> Command:
    """Decode the command in a frame. Raises BadHeader, or BadFrame if the header does not identify a request."""
    if len(frame.header) > HEADER_BYTES_MAX:
        raise header_too_large(frame)
    try:
        command = _decode(frame)
    except BadFrame as error:
        raise bad_header(frame, str(error)) from error
    command.body = frame.body
    command.serialisation = frame.serialisation
    return command


def header_too_large(frame: Frame) -> BadFrame:
    """Create the error for a header of more than HEADER_BYTES_MAX bytes."""
    text = f"the header is over the maximum: {len(frame.header)} bytes, at most {HEADER_BYTES_MAX}"
    return bad_header(frame, text, ResponseCode.MESSAGE_ILLEGAL)


def bad_header(frame: Frame, text: str, code: int = ResponseCode.INVALID_PARAMETER) -> BadFrame:
    """Create the error for an invalid header: BadHeader if the request can be answered, otherwise BadFrame."""
    envelope = _read_envelope(frame)
    if envelope is None or envelope.flag & _RESPONSE:
        return BadFrame(text)
    request = Command(envelope.code, envelope.opaque, envelope.flag, serialisation=frame.serialisation)
    return BadHeader(text, request, code)


def _read_envelope(frame: Frame) -> _Envelope | None:
    """Read the fields that identify a request. Returns None if they cannot be read."""
    try:
        if frame.serialisation == JSON:
            envelope = _json_envelope.decode(frame.header)
        elif frame.serialisation == BINARY:
            code, _, _, opaque, flag = _FIXED.unpack_from(frame.header)
            envelope = _Envelope(code, opaque, flag)
        else:
            return None
    except (*UNDECODABLE, struct.error):
        return None
    return envelope if all(map(_is_int32, (envelope.code, envelope.opaque, envelope.flag))) else None


def _is_int32(number: int) -> bool:
    return -(1 << 31) <= number < 1 << 31


def _decode(frame: Frame) -> Command:
    """Decode the header of a frame to a command without a body. Raises BadFrame."""
    if frame.serialisation == JSON:
        return _decode_json(frame.header)
    if frame.serialisation == BINARY:
        return _decode_binary(frame.header)
    raise BadFrame(f"serialisation {frame.serialisation}: 0 is JSON and 1 is RocketMQ's own")


def _decode_json(header: bytes) -> Command:
    """Decode a JSON header: first with the fast decoder for Java's form, then with the general one. Raises BadFrame."""
    try:
        plain = _plain_header.decode(header)
    except UNDECODABLE:
        # extFields of other types, or a fault, which the general decoder names.
        return _decode_general_json(header)
    if len(plain.extFields) > EXT_FIELDS_MAX:
        raise BadFrame(f"{len(plain.extFields)} extFields; at most {EXT_FIELDS_MAX}")
    language = _language_code(plain.language)
    return Command(
        plain.code, plain.opaque, plain.flag, plain.extFields, b"", plain.remark, language, plain.version
    )


def _decode_general_json(header: bytes) -> Command:
    """Decode a JSON header whose extFields are not all text. Raises BadFrame."""
    try:
        header_fields = _json_header.decode(header)
    except UNDECODABLE as error:
        raise BadFrame(f"the header is no command: {error}") from error
    for number in (header_fields.code, header_fields.opaque, header_fields.flag, header_fields.version):
        if not _is_int32(number):
            raise BadFrame(f"{number} does not fit a header's field")
    ext = header_fields.extFields or {}
    if len(ext) > EXT_FIELDS_MAX:
        raise BadFrame(f"{len(ext)} extFields; at most {EXT_FIELDS_MAX}")
    return Command(
        code=header_fields.code,
        opaque=header_fields.opaque,
        flag=header_fields.flag,
        ext={
            name: value if type(value) is str else text(value)
            for name, value in ext.items()
            if value is not None
        },
        remark=header_fields.remark,
        language=_language_code(header_fields.language),
        version=header_fields.version,
    )


def text(value: object) -> str:
    """Format a value for a header field or a Java properties file: booleans in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _language_code(value: str | int | None) -> int:
    if isinstance(value, str):
        return _LANGUAGE_CODES.get(value, Language.OTHER)
    return Language.OTHER if value is None else value


def _decode_binary(header: bytes) -> Command:
    """Decode RocketMQ's binary header. Raises BadFrame."""
    try:
        code, language, version, opaque, flag = _FIXED.unpack_from(header)
        remark, position = _read_long_text(header, _FIXED.size)
        (ext_bytes,) = _INT.unpack_from(header, position)
        position += 4
        if ext_bytes < 0 or position + ext_bytes != len(header):
            raise BadFrame(f"extFields of {ext_bytes} bytes in a header of {len(header)}")
        ext = dict(_read_ext_fields(header, position))
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"the header is no command: {error}") from error
    return Command(
        code=code,
        opaque=opaque,
        flag=flag,
        ext=ext,
        remark=remark or None,
        language=language,
        version=version,
    )


def _read_ext_fields(header: bytes, position: int) -> Iterator[tuple[str, str]]:
    """Yield name and value of each extField, from this position to the end of the header. Raises BadFrame.

    Raises struct.error or UnicodeDecodeError for lengths or texts that cannot be read.
    """
    count = 0
    while position < len(header):
        (key_bytes,) = _SHORT.unpack_from(header, position)
        name, position = _read_text(header, position + 2, key_bytes)
        value, position = _read_long_text(header, position)
        count += 1
        if count > EXT_FIELDS_MAX:
            raise BadFrame(f"more than {EXT_FIELDS_MAX} extFields")
        yield name, value


def _read_long_text(header: bytes, position: int) -> tuple[str, int]:
    """Read a text with a length of 4 bytes. Returns it and the position after it. Raises BadFrame and struct.error."""
    (size_bytes,) = _INT.unpack_from(header, position)
    return _read_text(header, position + 4, size_bytes)


def _read_text(header: bytes, position: int, size_bytes: int) -> tuple[str, int]:
    """Read a text of this size. Returns the text and the position after it. Raises BadFrame."""
    if size_bytes < 0 or position + size_bytes > len(header):
        raise BadFrame(f"a text of {size_bytes} bytes at byte {position} of a header of {len(header)}")
    return header[position : position + size_bytes].decode("utf-8"), position + size_bytes


# ---- encoding -----------------------------------------------------------------------------------------------


class _JsonOut(msgspec.Struct, omit_defaults=False):
    code: int
    language: str
    version: int
    opaque: int
    flag: int
    remark: str | None
    extFields: dict[str, str]  # noqa: N815
    serializeTypeCurrentRPC: str = "JSON"  # noqa: N815


_encoder = msgspec.json.Encoder()


def encode(command: Command) -> bytes:
    """Encode a command as a frame, in its serialisation.

    Raises ValueError for an unknown language in JSON, and the errors of `_encode_binary`.
    """
    if command.serialisation == BINARY:
        header = _encode_binary(command)
    else:
        header = _encoder.encode(
            _JsonOut(
                code=command.code,
                language=_LANGUAGE_NAMES.get(command.language) or Language(command.language).name,
                version=command.version,
                opaque=command.opaque,
                flag=command.flag,
                remark=command.remark,
                extFields=command.ext,
            )
        )
    type_and_header_bytes = command.serialisation << 24 | len(header)
    return b"".join(
        [_PREFIX.pack(4 + len(header) + len(command.body), type_and_header_bytes), header, command.body]
    )


def _encode_binary(command: Command) -> bytes:
    """Encode RocketMQ's binary header. Raises ValueError or struct.error if a number or a length does not fit."""
    if not -(1 << 15) <= command.code < 1 << 15:
        raise ValueError(f"code {command.code} does not fit the binary header's 16 bits")
    remark = (command.remark or "").encode()
    ext_fields: list[bytes] = []
    for name, value in command.ext.items():
        name_bytes, value_bytes = name.encode(), value.encode()
        ext_fields += [_SHORT.pack(len(name_bytes)), name_bytes, _INT.pack(len(value_bytes)), value_bytes]
    ext = b"".join(ext_fields)
    return b"".join(
        [
            _FIXED.pack(command.code, command.language, command.version, command.opaque, command.flag),
            _INT.pack(len(remark)),
            remark,
            _INT.pack(len(ext)),
            ext,
        ]
    )
