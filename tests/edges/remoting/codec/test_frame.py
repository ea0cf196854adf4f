"""Frames and headers: any split of the bytes gives the same commands, and false lengths are refused."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.remoting.codec.codes import CommandFlag, Language, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import (
    BINARY,
    EXT_FIELDS_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    JSON,
    BadFrame,
    BadHeader,
    Command,
    Frame,
    Splitter,
    decode,
    encode,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
commands = st.builds(
    Command,
    code=st.integers(0, (1 << 15) - 1),
    opaque=int32,
    flag=int32,
    ext=st.dictionaries(texts, texts, max_size=6),
    body=st.binary(max_size=60),
    remark=st.none() | texts.filter(bool),
    language=st.sampled_from(Language),
    version=st.integers(0, 479),
    serialisation=st.sampled_from([JSON, BINARY]),
)


def frame_of(header: bytes, body: bytes = b"", serialisation: int = JSON) -> bytes:
    """Return the bytes of a frame with this header and body."""
    word = serialisation << 24 | len(header)
    return struct.pack(">iI", 4 + len(header) + len(body), word) + header + body


def decode_one(data: bytes) -> Command:
    """Return the command of the only frame."""
    [frame] = Splitter().feed(data)
    return decode(frame)


# ---- encoded commands are decoded to the same ----------------------------------------------------------------


@given(commands)
def test_an_encoded_command_is_decoded_to_the_same(command: Command) -> None:
    assert decode_one(encode(command)) == command


@given(st.lists(commands, max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_bytes_split_anywhere_give_the_same_commands(sent: list[Command], cuts: list[int]) -> None:
    data = b"".join(map(encode, sent))
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    splitter = Splitter()
    result: list[Command] = []
    for begin, end in itertools.pairwise(ends):
        result += map(decode, splitter.feed(data[begin:end]))
    assert result == sent
    assert splitter.held_bytes == 0


def test_frames_are_found_byte_by_byte_and_before_an_incomplete_frame() -> None:
    first, second = encode(Command(code=34, opaque=1, body=b"abc")), encode(Command(code=11, opaque=2))
    splitter = Splitter()
    result: list[Frame] = []
    for at in range(len(first)):
        result += splitter.feed(first[at : at + 1])
    assert [decode(frame).opaque for frame in result] == [1]
    assert splitter.feed(second[:-1]) == []
    assert splitter.held_bytes == len(second) - 1
    assert [decode(frame).opaque for frame in splitter.feed(second[-1:])] == [2]


# ---- headers of clients ----------------------------------------------------------------------------------------


def test_ext_fields_may_be_numbers_and_booleans() -> None:
    header = {
        "code": 11, "language": "CPP", "version": 63, "opaque": 7, "flag": 0, "unknown": [1, {"x": 2}],
        "extFields": {"queueId": 3, "topic": "a", "m": True, "n": False, "offset": "12", "nothing": None},
        "serializeTypeCurrentRPC": "JSON",
    }  # fmt: skip
    command = decode_one(frame_of(json.dumps(header).encode()))
    assert command.code == RequestCode.PULL_MESSAGE
    assert command.ext == {"queueId": "3", "topic": "a", "m": "true", "n": "false", "offset": "12"}
    assert (command.language, command.version, command.opaque) == (Language.CPP, 63, 7)


def test_a_binary_header_is_decoded() -> None:
    # code, language, version, opaque, flag, remark length, length of the fields, then one field: name, value
    header = bytes.fromhex("0136 00 0199 0000002a 00000002 00000000 0000000a 0001 62 00000003 666f6f")
    command = decode_one(frame_of(header, b"body", BINARY))
    assert (command.code, command.language, command.version) == (310, Language.JAVA, 409)
    assert (command.opaque, command.ext, command.body) == (42, {"b": "foo"}, b"body")
    assert command.is_one_way and not command.is_response
    assert encode(command) == frame_of(header, b"body", BINARY)


def test_an_answer_has_the_response_flag_and_an_ext_fields_object() -> None:
    data = encode(Command(code=0, opaque=5, flag=CommandFlag.RESPONSE))
    assert json.loads(data[8:])["extFields"] == {}
    assert decode_one(data).is_response


# ---- invalid lengths and headers are refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "word"),
    [
        (-1, 0), (0, 0), (3, 0), (FRAME_BYTES_MAX + 1, 10), (1 << 31 - 1, 0), (100, 97),
    ],
)  # fmt: skip
def test_a_frame_with_false_lengths_is_refused_as_soon_as_they_are_received(length: int, word: int) -> None:
    splitter = Splitter()
    with pytest.raises(BadFrame):
        splitter.feed(struct.pack(">iI", length, word))


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{}", b"[]", b"null", b'{"code": "10"}', b'{"code": 1e400}', b'{"code": NaN}',
        b'{"code": 99999999999999999999}', b'{"code": 4294967296}', b'{"code": 1, "extFields": {"a": [1]}}',
        b'{"code": 1, "extFields": {"a": {"b": 1}}}', b'{"code": 1, "extFields": []}', b'{"code": 1',
        b'{"code": 1, "x": ' + b"[" * 20_000, b'{"code": 1, "remark": "\xff"}',
        json.dumps({"code": 1, "extFields": {str(i): i for i in range(EXT_FIELDS_MAX + 1)}}).encode(),
    ],
)  # fmt: skip
def test_an_invalid_json_header_is_refused(header: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_one(frame_of(header))


@pytest.mark.parametrize(
    ("header", "serialisation", "response_code"),
    [
        (b'{"code": 34, "opaque": 7, "flag": 2, "extFields": {"a": [1]}}', JSON, 29),
        (b'{"code": 34, "opaque": 7, "flag": 2, "version": "v"}', JSON, 29),
        (b'{"extFields": {}, "flag": 2, "opaque": 7, "code": 34, "remark": 1}', JSON, 29),
        (b'{"code": 34, "opaque": 7, "flag": 2, "x": "' + b"x" * HEADER_BYTES_MAX + b'"}', JSON, 13),
        (bytes.fromhex("0022 00 0199 00000007 00000002 00000000 000000ff"), BINARY, 29),
        (bytes.fromhex("0022 00 0199 00000007 00000002") + bytes(HEADER_BYTES_MAX), BINARY, 13),
    ],
)
def test_the_error_of_an_invalid_header_has_the_request_to_answer(
    header: bytes, serialisation: int, response_code: int
) -> None:
    with pytest.raises(BadHeader) as caught:
        decode_one(frame_of(header, b"", serialisation))
    request = caught.value.request
    assert (request.code, request.opaque, request.is_one_way) == (34, 7, True)
    assert (request.serialisation, caught.value.response_code) == (serialisation, ResponseCode(response_code))


@pytest.mark.parametrize(
    "header",
    [
        b'{"code": 0, "opaque": 7, "flag": 1, "extFields": {"a": [1]}}',
        b'{"code": 0, "opaque": 7, "flag": 1, "x": "' + b"x" * HEADER_BYTES_MAX + b'"}',
        b'{"code": 34, "opaque": 99999999999, "extFields": {"a": [1]}}',
        b'{"opaque": 7, "extFields": {"a": "' + b"x" * HEADER_BYTES_MAX + b'"}',
    ],
)
def test_an_invalid_header_that_cannot_be_answered_is_a_bad_frame(header: bytes) -> None:
    with pytest.raises(BadFrame) as caught:
        decode_one(frame_of(header))
    assert not isinstance(caught.value, BadHeader)


@pytest.mark.parametrize("serialisation", [2, 3, 255])
def test_an_unknown_serialisation_is_refused(serialisation: int) -> None:
    with pytest.raises(BadFrame, match="serialisation"):
        decode_one(frame_of(b"{}", b"", serialisation))


@given(st.binary(max_size=200), st.sampled_from([JSON, BINARY]))
def test_any_header_is_a_command_or_refused(header: bytes, serialisation: int) -> None:
    try:
        command = decode(Frame(serialisation, header, b""))
    except BadFrame:
        return
    assert isinstance(command, Command)


@given(commands.filter(lambda c: c.serialisation == BINARY), st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_binary_header_is_a_command_or_refused(command: Command, at: int, value: int) -> None:
    [frame] = Splitter().feed(encode(command))
    header = bytearray(frame.header)
    header[at % len(header)] = value
    try:
        decode(Frame(BINARY, bytes(header), b""))
    except BadFrame:
        return


def test_a_code_beyond_16_bits_cannot_be_encoded_in_binary() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        encode(Command(code=RequestCode.POP_MESSAGE, serialisation=BINARY))
