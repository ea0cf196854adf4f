"""HTTP/2's bytes: what is written here is read by h2's libraries, and the other way round."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hpack import Decoder
from hyperframe.frame import Frame
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.http2 import frames
from timeball.edges.http2.frames import BrokenRule, Fault

TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=300)
NAME = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30)


@given(NAME, TEXT)
def test_a_literal_is_read_by_others(name: str, value: str) -> None:
    assert Decoder().decode(frames.literal(name, value)) == [(name, value)]


@given(st.text(max_size=200), st.integers(0, 16))
def test_trailers_are_read_by_others(text: str, status: int) -> None:
    found = dict(Decoder(2**20).decode(frames.trailers(status, text)))
    assert found["grpc-status"] == str(status)
    assert found["grpc-message"].isascii() and unquote(found["grpc-message"]) == text


def test_the_blocks_of_most_answers() -> None:
    assert Decoder().decode(frames.RESPONSE) == [(":status", "200"), ("content-type", "application/grpc")]
    assert Decoder().decode(frames.TRAILERS_OK) == [("grpc-status", "0")]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            frames.frame(frames.DATA, frames.END_STREAM, 7, b"abc"),
            "DataFrame(stream_id=7, flags=['END_STREAM'])",
        ),
        (frames.settings({frames.MAX_STREAMS: 9}), "SettingsFrame(stream_id=0, flags=[])"),
        (frames.window_update(3, 77), "WindowUpdateFrame(stream_id=3, flags=[]): window_increment=77"),
        (frames.rst_stream(5, Fault.REFUSED_STREAM), "RstStreamFrame(stream_id=5, flags=[]): error_code=7"),
        (
            frames.goaway(9, Fault.ENHANCE_YOUR_CALM, "calm"),
            "GoAwayFrame(stream_id=0, flags=[]): last_stream_id=9",
        ),
    ],
)
def test_frames_are_read_by_others(data: bytes, text: str) -> None:
    found, size_bytes = Frame.parse_frame_header(memoryview(data[:9]))
    found.parse_body(memoryview(data[9:]))
    assert size_bytes == len(data) - 9 and repr(found).startswith(text)


def test_padding_and_priority_are_cut_off() -> None:
    assert frames.unpadded(frames.PADDED, b"\x02abcde") == b"abc"
    assert frames.unpadded(frames.PRIORITISED, b"12345abc") == b"abc"
    assert frames.unpadded(frames.PADDED | frames.PRIORITISED, b"\x0112345abc") == b"ab"
    for flags, payload in ((frames.PADDED, b""), (frames.PADDED, b"\x05abc"), (frames.PRIORITISED, b"1234")):
        with pytest.raises(BrokenRule):
            frames.unpadded(flags, payload)


# ---- frames out of pieces --------------------------------------------------------------------------------

LARGE = 100_000
DATA_SIZES = st.integers(0, LARGE) | st.sampled_from([0, 16_384, 16_385, LARGE])


def read_in(pieces: list[bytes]) -> tuple[frames.FrameReader, list[tuple[int, int, int, bytes]]]:
    """The frames of these pieces; parts of one frame of DATA are put together again."""
    reader, found = frames.FrameReader(LARGE), list[tuple[int, int, int, bytes]]()
    for piece in pieces:
        found += [(kind, flags, number, bytes(part)) for kind, flags, number, part in reader.read(piece)]
        if reader.broken is not None:
            raise reader.broken
    return reader, found


@given(
    st.lists(st.tuples(DATA_SIZES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from([1_000, 16_393, 70_000, 10**6]),
)
def test_frames_in_pieces_are_what_was_written(sent: list[tuple[int, bool]], piece: int) -> None:
    written, expected = frames.PREFACE, dict[int, tuple[int, int]]()
    for at, (size_bytes, ends) in enumerate(sent):
        number, flags = 2 * at + 1, frames.END_STREAM if ends else 0
        written += frames.frame(frames.DATA, flags, number, bytes(size_bytes)) + frames.frame(
            frames.PING, 0, 0
        )
        expected[number] = (size_bytes, flags)
    reader, found = read_in([written[at : at + piece] for at in range(0, len(written), piece)])
    got = dict.fromkeys(expected, (0, 0))
    for kind, flags, number, part in found:
        if kind == frames.DATA:
            assert not got[number][1], "nothing comes behind the end"
            got[number] = (got[number][0] + len(part), flags)
    assert got == expected
    assert reader.is_greeted and [each[0] for each in found].count(frames.PING) == len(sent)


@pytest.mark.parametrize(
    "data",
    [
        frames.frame(frames.DATA, 0, 1, bytes(LARGE + 1)),
        frames.frame(frames.HEADERS, 0, 1, bytes(LARGE + 1)),
        frames.frame(frames.HEADERS, frames.PADDED, 1, bytes(frames.FRAME_BYTES_MAX + 1)),
        frames.frame(frames.PING, 0, 0, bytes(frames.FRAME_BYTES_MAX + 1)),
        frames.frame(frames.DATA, frames.PADDED, 1, bytes(frames.FRAME_BYTES_MAX + 1)),
    ],
    ids=["data", "headers", "padded headers", "ping", "padded"],
)
def test_a_frame_beyond_its_bound_breaks_a_rule_before_it_has_come(data: bytes) -> None:
    with pytest.raises(BrokenRule) as error:
        read_in([frames.PREFACE + data[:9]])
    assert error.value.fault == Fault.FRAME_SIZE_ERROR


@pytest.mark.parametrize("piece", [1, 5, 16_384, LARGE])
@pytest.mark.parametrize("flags", [frames.END_HEADERS, frames.END_HEADERS | frames.PRIORITISED, 0])
def test_large_headers_come_in_parts(piece: int, flags: int) -> None:
    block = bytes(range(256)) * 200
    kind = frames.HEADERS if flags else frames.CONTINUATION
    sent = frames.frame(kind, flags, 3, block) + frames.frame(frames.PING, 0, 0)
    reader, found = read_in([frames.PREFACE, *(sent[at : at + piece] for at in range(0, len(sent), piece))])
    *parts, ping = found
    assert ping[0] == frames.PING
    assert [each[0] for each in parts] == [kind, *[frames.CONTINUATION] * (len(parts) - 1)]
    assert b"".join(each[3] for each in parts) == block
    assert len(parts[0][3]) >= frames.PRIORITY_BYTES, "the priority is in the first"
    assert [each[1] & frames.END_HEADERS for each in parts[:-1]] == [0] * (len(parts) - 1)
    assert parts[-1][1] & frames.END_HEADERS == flags & frames.END_HEADERS
    assert {each[2] for each in parts} == {3} and reader.broken is None


def test_what_is_no_preface_breaks_a_rule_at_its_first_byte() -> None:
    assert not read_in([frames.PREFACE[:5]])[0].is_greeted
    with pytest.raises(BrokenRule):
        read_in([b"P", b"O"])


@given(st.binary(max_size=300), st.integers(1, 2**30).map(lambda number: 2 * number - 1))
def test_a_whole_answer_is_the_frames_that_it_is_made_of(message: bytes, stream: int) -> None:
    assert frames.answer(stream, message) == (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, frames.RESPONSE)
        + frames.frame(frames.DATA, 0, stream, frames.PREFIX.pack(0, len(message)) + message)
        + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, frames.TRAILERS_OK)
    )
