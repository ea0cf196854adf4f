"""Frames and header blocks: the libraries of h2 (hpack, hyperframe) read what Timeball writes, and frames in pieces."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hpack import Decoder
from hyperframe.frame import Frame
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.http2.raw_client import ReceivedFrame

from timeball.edges.http2 import frames
from timeball.edges.http2.frames import BrokenRule, Fault

TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=300)
NAME = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30)


@given(NAME, TEXT)
def test_hpack_decodes_a_literal(name: str, value: str) -> None:
    assert Decoder().decode(frames.literal(name, value)) == [(name, value)]


@given(st.text(max_size=200), st.integers(0, 16))
def test_hpack_decodes_trailers(text: str, status: int) -> None:
    headers = dict(Decoder(2**20).decode(frames.trailers(status, text)))
    assert headers["grpc-status"] == str(status)
    assert headers["grpc-message"].isascii() and unquote(headers["grpc-message"]) == text


def test_hpack_decodes_the_header_blocks_of_successful_answers() -> None:
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
def test_hyperframe_decodes_each_kind_of_frame(data: bytes, text: str) -> None:
    decoded, size_bytes = Frame.parse_frame_header(memoryview(data[:9]))
    decoded.parse_body(memoryview(data[9:]))
    assert size_bytes == len(data) - 9 and repr(decoded).startswith(text)


def test_padding_and_priority_are_removed_or_refused() -> None:
    assert frames.strip_padding(frames.PADDED, b"\x02abcde") == b"abc"
    assert frames.strip_padding(frames.PRIORITISED, b"12345abc") == b"abc"
    assert frames.strip_padding(frames.PADDED | frames.PRIORITISED, b"\x0112345abc") == b"ab"
    for flags, payload in ((frames.PADDED, b""), (frames.PADDED, b"\x05abc"), (frames.PRIORITISED, b"1234")):
        with pytest.raises(BrokenRule):
            frames.strip_padding(flags, payload)


# ---- frames out of pieces --------------------------------------------------------------------------------

LARGE = 100_000
DATA_SIZES = st.integers(0, LARGE) | st.sampled_from([0, 16_384, 16_385, LARGE])


def read_pieces(pieces: list[bytes]) -> tuple[frames.FrameReader, list[ReceivedFrame]]:
    """Read these pieces, and return the reader and its frames. Raises the BrokenRule that the reader has noted."""
    reader, result = frames.FrameReader(LARGE), list[ReceivedFrame]()
    for piece in pieces:
        result += [
            ReceivedFrame(kind, flags, number, bytes(part))
            for kind, flags, number, part in reader.read(piece)
        ]
        if reader.broken is not None:
            raise reader.broken
    return reader, result


@given(
    st.lists(st.tuples(DATA_SIZES, st.booleans()), min_size=1, max_size=8),
    st.sampled_from([1_000, 16_393, 70_000, 10**6]),
)
def test_frames_that_arrive_in_pieces_are_read_completely(sent: list[tuple[int, bool]], piece: int) -> None:
    written, expected = frames.PREFACE, dict[int, tuple[int, int]]()
    for at, (size_bytes, ends) in enumerate(sent):
        number, flags = 2 * at + 1, frames.END_STREAM if ends else 0
        written += frames.frame(frames.DATA, flags, number, bytes(size_bytes)) + frames.frame(
            frames.PING, 0, 0
        )
        expected[number] = (size_bytes, flags)
    reader, received = read_pieces([written[at : at + piece] for at in range(0, len(written), piece)])
    sizes_and_flags = dict.fromkeys(expected, (0, 0))
    for kind, flags, number, part in received:
        if kind == frames.DATA:
            size_bytes, earlier_flags = sizes_and_flags[number]
            assert not earlier_flags, "no part follows the end of the stream"
            sizes_and_flags[number] = (size_bytes + len(part), flags)
    assert sizes_and_flags == expected
    assert reader.has_preface and [each.kind for each in received].count(frames.PING) == len(sent)


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
def test_a_frame_beyond_its_bound_breaks_a_rule_at_its_head(data: bytes) -> None:
    with pytest.raises(BrokenRule) as error:
        read_pieces([frames.PREFACE + data[:9]])
    assert error.value.fault == Fault.FRAME_SIZE_ERROR


@pytest.mark.parametrize("piece", [1, 5, 16_384, LARGE])
@pytest.mark.parametrize("flags", [frames.END_HEADERS, frames.END_HEADERS | frames.PRIORITISED, 0])
def test_large_headers_are_returned_in_parts(piece: int, flags: int) -> None:
    block = bytes(range(256)) * 200
    kind = frames.HEADERS if flags else frames.CONTINUATION
    sent = frames.frame(kind, flags, 3, block) + frames.frame(frames.PING, 0, 0)
    reader, received = read_pieces(
        [frames.PREFACE, *(sent[at : at + piece] for at in range(0, len(sent), piece))]
    )
    *parts, ping = received
    assert ping.kind == frames.PING
    assert [part.kind for part in parts] == [kind, *[frames.CONTINUATION] * (len(parts) - 1)]
    assert b"".join(part.payload for part in parts) == block
    assert len(parts[0].payload) >= frames.PRIORITY_BYTES, "the first part contains the priority"
    assert [part.flags & frames.END_HEADERS for part in parts[:-1]] == [0] * (len(parts) - 1)
    assert parts[-1].flags & frames.END_HEADERS == flags & frames.END_HEADERS
    assert {part.stream for part in parts} == {3} and reader.broken is None


def test_another_preface_breaks_a_rule_at_its_first_wrong_byte() -> None:
    assert not read_pieces([frames.PREFACE[:5]])[0].has_preface
    with pytest.raises(BrokenRule):
        read_pieces([b"P", b"O"])


@given(st.binary(max_size=300), st.integers(1, 2**30).map(lambda number: 2 * number - 1))
def test_answer_frames_equal_the_single_frames_of_an_answer(message: bytes, stream: int) -> None:
    assert frames.answer_frames(stream, message) == (
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream, frames.RESPONSE)
        + frames.frame(frames.DATA, 0, stream, frames.PREFIX.pack(0, len(message)) + message)
        + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, frames.TRAILERS_OK)
    )
