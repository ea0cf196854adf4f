"""The compiled codec reads and answers plain pulls as the Python code (the reference) does."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.remoting.codec.codes import BROKER_VERSION, CommandFlag, RequestCode
from timeball.edges.remoting.codec.frame import (
    BINARY,
    FRAME_BYTES_MAX,
    JSON,
    BadFrame,
    Command,
    Frame,
    cut,
    decode,
    encode,
)
from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON, PlainPull
from timeball.edges.remoting.codec.records import pull_fields
from timeball.edges.remoting.handlers.pulls import PullFields

GOLDEN = Path(__file__).resolve().parents[3] / "golden/remoting"
PULLS = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
NAMES = [name for name in PullFields.__struct_fields__ if name != "suspend_timeout_millis"]
PLAIN = {
    "consumerGroup": "group", "topic": "orders", "queueId": "3", "queueOffset": "17", "maxMsgNums": "32",
    "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "15000", "subscription": "A || B",
    "subVersion": "1761000000000", "expressionType": "TAG", "maxMsgBytes": "2147483647", "bname": "b0", "ReqT": "0",
}  # fmt: skip

needs_compiled = pytest.mark.skipif(
    COMPILED is None,
    reason="the codec is not compiled here: no Cython, or no C compiler with Python's headers",
)

Read = Callable[[Frame], PlainPull | None]


def read_compiled(frame: Frame) -> PlainPull | None:
    """Split the frame between two other frames with the compiled codec, and return its plain pull."""
    assert COMPILED is not None
    word = frame.serialisation << 24 | len(frame.header)
    other = encode(Command(code=RequestCode.HEART_BEAT))
    data = struct.pack(">iI", 4 + len(frame.header) + len(frame.body), word) + frame.header + frame.body
    result = COMPILED.cut(other + data + other, FRAME_BYTES_MAX)[0]
    assert len(result) == 3 and [type(piece) for piece in result[::2]] == [Frame, Frame]
    if type(result[1]) is not COMPILED.pull:
        return None
    assert result[1].frame() == frame
    return cast(PlainPull, result[1])


def pull(ext: dict[str, str] = PLAIN, form: int = JSON, **more: Any) -> Frame:
    """Return the frame of a pull with these fields."""
    command = Command(code=RequestCode.PULL_MESSAGE, opaque=5, ext=ext, version=409, serialisation=form)
    return cut(encode(msgspec.structs.replace(command, **more)), FRAME_BYTES_MAX)[0][0]


def agree(frame: Frame, read: Read = read_compiled) -> bool:
    """Return whether the frame is a plain pull. Assert that its fields and answers are those of the reference then."""
    result = read(frame)
    if result is None:
        return False
    command = decode(frame)
    assert command.code in PULLS and not command.is_response and not command.is_one_way
    fields = msgspec.convert(command.ext, PullFields, strict=False)
    assert [getattr(result, name) for name in NAMES] == [getattr(fields, name) for name in NAMES]
    for numbers, body in (((18, 0, 400), b"stored"), ((1 << 62, -1, 9), b""), ((7, 7, 7), bytes(100_000))):
        answer = Command(
            0, command.opaque, int(CommandFlag.RESPONSE), pull_fields(*numbers), body, version=BROKER_VERSION
        )
        written = result.begin_answer(*numbers) + body
        result.end_answer(written)
        assert written == encode(answer)
    return True


@needs_compiled
@pytest.mark.parametrize("name", ["java-4.9.8.bin", "java-5.3.3.bin"])
def test_pulls_of_stock_consumers_are_plain(name: str) -> None:
    frames = [frame for frame in cut((GOLDEN / name).read_bytes(), FRAME_BYTES_MAX)[0] if is_pull(frame)]
    assert frames and all(map(agree, frames))


def is_pull(frame: Frame) -> bool:
    return decode(frame).code in PULLS


@needs_compiled
def test_all_recorded_frames_are_read_as_by_the_reference() -> None:
    for path in GOLDEN.glob("*.bin"):
        for frame in cut(path.read_bytes(), FRAME_BYTES_MAX)[0]:
            assert not agree(frame) or is_pull(frame)


@needs_compiled
@pytest.mark.parametrize(
    "other",
    [
        {"form": BINARY}, {"flag": int(CommandFlag.ONE_WAY)}, {"flag": int(CommandFlag.RESPONSE)}, {"code": 10},
        {"code": 12}, {"ext": {**PLAIN, "queueId": "03"}}, {"ext": {**PLAIN, "queueId": ""}},
        {"ext": {**PLAIN, "queueOffset": "9" * 19}}, {"ext": {**PLAIN, "suspendTimeoutMillis": "x"}},
        {"ext": {**PLAIN, "topic": "ä"}}, {"ext": {**PLAIN, "bname": 'quo"ted'}}, {"ext": {}},
        {"ext": {name: value for name, value in PLAIN.items() if name != "topic"}},
        {"ext": PLAIN | {f"more{n}": "" for n in range(60)}}, {"ext": {**PLAIN, "subscription": "A" * 5_000}},
    ],
)  # fmt: skip
def test_an_unusual_pull_is_left_to_the_reference(other: dict[str, Any]) -> None:
    assert agree(pull()) and agree(pull(code=RequestCode.LITE_PULL_MESSAGE))
    assert not agree(pull(**other))


@needs_compiled
@pytest.mark.parametrize("repeated", [b'"topic":"other"', b'"queueId":"4"'])
def test_a_pull_with_a_repeated_field_is_not_plain(repeated: bytes) -> None:
    frame = pull()
    header = frame.header.replace(b'"consumerGroup"', repeated + b',"consumerGroup"', 1)
    assert header != frame.header and not agree(Frame(JSON, header, b""))


@needs_compiled
def test_a_pull_with_one_changed_byte_is_read_as_by_the_reference_or_left_to_it() -> None:
    header = pull().header
    for at in range(len(header)):
        for value in b'\x00 "\\,:{}09-nN\x7f\x80\xff' + bytes([header[at] ^ 1]):
            changed = header[:at] + bytes([value]) + header[at + 1 :]
            agree(Frame(JSON, changed, b""))
        agree(Frame(JSON, header[:at], b""))


numbers = st.one_of(
    st.integers(-3, 40).map(str), st.integers(-(1 << 65), 1 << 65).map(str), st.text(max_size=3)
)
texts = st.one_of(
    st.sampled_from(["*", "", "TAG", "SQL92"]), st.text(st.characters(codec="utf-8"), max_size=9)
)
WORDS = ["consumerGroup", "topic", "subscription", "expressionType", "bname"]
values = st.fixed_dictionaries(
    {}, optional={name: texts if name in WORDS else numbers for name in PLAIN if name != "ReqT"}
)


@needs_compiled
@given(values, st.sampled_from([*PULLS, 10]), st.integers(0, 3), st.integers(-(1 << 31), (1 << 31) - 1))
def test_any_fields_are_read_as_by_the_reference(
    ext: dict[str, str], code: int, flag: int, opaque: int
) -> None:
    agree(pull(PLAIN | ext, code=code, flag=flag, opaque=opaque))
    agree(pull(ext, code=code, flag=flag, opaque=opaque))


def test_the_python_codec_returns_pulls_as_frames() -> None:
    data = encode(Command(code=PULLS[0], ext=PLAIN))
    assert PYTHON.cut(data, FRAME_BYTES_MAX)[0] == [pull(opaque=0, version=0)]


@needs_compiled
def test_a_pull_that_is_read_otherwise_is_noticed() -> None:
    other = read_compiled(pull(PLAIN | {"queueOffset": "18"}))
    with pytest.raises(AssertionError):
        agree(pull(), lambda _: other)
    with pytest.raises((AssertionError, BadFrame)):
        agree(Frame(JSON, b"{}", b""), lambda _: other)
