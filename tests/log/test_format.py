"""The bytes of frames and segment headers: they are read back, equal the documented layout, and show damage."""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.small_log import batch

from timeball.log import format as fmt
from timeball.model import limits
from timeball.model.errors import Corrupt, SetupError
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Kind, build_rows, with_seq

# The first frame of a segment begins at byte 64, behind the header of the segment.
#
# Byte positions in the header of a frame.
VERSION_AT, FLAGS_AT, LENGTH_AT, ROWS_AT, SPAN_AT, PAYLOAD_AT, CRC_AT, SYNCED_TO_AT = (
    4,
    6,
    8,
    12,
    24,
    48,
    52,
    56,
)


def encode(rows: pa.RecordBatch, *, first_seq: int = 17, position: int = 64, synced_to: int = 64) -> bytes:
    """Encode a frame, by default the first of a segment that begins with row 17."""
    frame, parts = fmt.encode_frame(
        rows, first_seq=first_seq, span=rows.num_rows, append_ms=5, epoch=1, position=position, synced_to=synced_to
    )  # fmt: skip
    data = b"".join(bytes(part) for part in parts)
    assert len(data) == frame.length
    return data


def segment(*frames: bytes, blank_bytes: int = 256) -> pa.Buffer:
    """Build a segment: a header, the frames, and zeros."""
    return pa.py_buffer(fmt.encode_segment_header(17, 5) + b"".join(frames) + bytes(blank_bytes))


def sealed_again(frame: bytearray) -> bytes:
    """Give the frame a valid checksum, as its writer would have."""
    struct.pack_into("<I", frame, CRC_AT, 0)
    struct.pack_into("<I", frame, CRC_AT, google_crc32c.value(bytes(frame)))
    return bytes(frame)


# ---- frames ----------------------------------------------------------------------------------------------


def test_encoded_frame_is_read_back() -> None:
    rows = batch(1, 5)
    buffer = segment(encode(rows))
    frame = fmt.read_frame(buffer, 64)
    assert frame is not None
    assert (frame.first_seq, frame.next_seq, frame.rows, frame.position) == (17, 22, 5, 64)
    assert fmt.decode_rows(buffer, frame).equals(rows)
    assert fmt.read_frame(buffer, frame.end) is None, "zeros are the end"


def test_frame_bytes_equal_the_layout_of_the_docstring() -> None:
    data = encode(batch(1, 2), first_seq=17, synced_to=64)
    magic, version, flags, length, rows = struct.unpack_from("<IHHII", data, 0)
    assert (data[:4], magic, version, flags, length, rows) == (b"TBF1", fmt.FRAME_MAGIC, 1, 0, len(data), 2)
    assert struct.unpack_from("<qqqq", data, 16) == (17, 2, 5, 1)
    payload, crc, synced_to = struct.unpack_from("<IIQ", data, 48)
    assert synced_to == 64
    assert crc == google_crc32c.value(data[:CRC_AT] + bytes(4) + data[CRC_AT + 4 :])
    assert not any(data[64 + payload :])


@given(
    st.lists(
        st.tuples(st.none() | st.text(max_size=5), st.none() | st.binary(max_size=200), st.none() | st.integers(0, 9)),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 29),
    st.integers(1, 30),
)  # fmt: skip
def test_any_slice_of_rows_is_read_back_within_the_estimated_size(
    values: list[tuple[str | None, bytes | None, int | None]], begin: int, count: int
) -> None:
    tags, bodies, due = zip(*values, strict=True)
    whole = build_rows(
        len(values), kind=int(Kind.SCHEDULED), tag=list(tags), body=list(bodies), due_ms=list(due)
    )
    rows = whole.slice(min(begin, len(values) - 1), count)
    data = encode(rows)
    assert len(data) % fmt.ALIGN == 0
    # The writer uses this size to decide whether the frame fits into the current segment.
    assert len(data) <= pa.ipc.get_record_batch_size(rows) + 2 * fmt.ALIGN
    buffer = segment(data)
    frame = fmt.read_frame(buffer, 64)
    assert frame is not None and fmt.decode_rows(buffer, frame).equals(rows)


def test_columns_of_a_frame_are_views_of_the_segment() -> None:
    buffer = segment(encode(batch(1, 100)))
    frame = fmt.read_frame(buffer, 64)
    assert frame is not None
    born = fmt.decode_rows(buffer, frame).column("born_ms").buffers()[1]
    assert buffer.address <= born.address < buffer.address + buffer.size


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    undamaged = segment(encode(batch(1, 2)), blank_bytes=64).to_pybytes()
    for position in range(64, len(undamaged) - 64):
        for bit in range(8):
            damaged = bytearray(undamaged)
            damaged[position] ^= 1 << bit
            with pytest.raises((Corrupt, SetupError)):
                fmt.read_frame(pa.py_buffer(bytes(damaged)), 64)


def test_every_cut_of_a_frame_behind_its_header_is_noticed() -> None:
    data = segment(encode(batch(1, 2)), blank_bytes=0).to_pybytes()
    for length in range(64 + fmt.FRAME.size, len(data)):
        with pytest.raises(Corrupt):
            fmt.read_frame(pa.py_buffer(data[:length]), 64)


def test_an_error_names_the_position_in_the_segment() -> None:
    """Also if the buffer contains only the part of the segment from `origin` on."""
    data = bytearray(encode(batch(1, 2)))
    buffer = pa.py_buffer(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match=r"frame at byte 640 .* checksum"):
        fmt.read_frame(buffer, 0, origin=640)
    for at, value, text in (
        (0, 1, "no frame at byte 640"),
        (LENGTH_AT, 1, "frame header at byte 640 contradicts itself"),
        (VERSION_AT, 2, r"frame at byte 640 \(version 2\)"),
    ):
        damaged = data.copy()
        damaged[at] = value
        with pytest.raises(Corrupt, match=text):
            fmt.read_frame_header(pa.py_buffer(bytes(damaged)), 0, origin=640)
    half_written = pa.py_buffer(bytes(63) + b"\1")
    with pytest.raises(Corrupt, match="frame header at byte 640 is half written"):
        fmt.read_frame_header(half_written, 0, origin=640)


def test_truncated_header_at_the_end_of_a_segment_is_no_frame() -> None:
    data = segment(encode(batch(1, 2)), blank_bytes=0).to_pybytes()
    assert fmt.read_frame(pa.py_buffer(data[: 64 + fmt.FRAME.size - 1]), 64) is None


def test_header_with_one_nonzero_byte_is_corrupt() -> None:
    for position in range(4, 64):  # behind the magic
        blank = bytearray(segment().to_pybytes())
        blank[64 + position] = 1
        with pytest.raises(Corrupt, match="half written"):
            fmt.read_frame(pa.py_buffer(bytes(blank)), 64)


def test_frame_of_a_newer_version_raises_setup_error() -> None:
    data = bytearray(encode(batch(1, 2)))
    struct.pack_into("<H", data, VERSION_AT, 2)
    with pytest.raises(SetupError, match="version 2"):
        fmt.read_frame(segment(sealed_again(data)), 64)


def test_unknown_flags_are_refused() -> None:
    data = bytearray(encode(batch(1, 2)))
    struct.pack_into("<H", data, FLAGS_AT, 2)
    with pytest.raises(Corrupt):
        fmt.read_frame(segment(sealed_again(data)), 64)


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        pytest.param(LENGTH_AT, "<I", 0, id="no length"),
        pytest.param(LENGTH_AT, "<I", 63, id="shorter than a header"),
        pytest.param(LENGTH_AT, "<I", 2**31, id="longer than the segment"),
        pytest.param(LENGTH_AT, "<I", limits.FRAME_BYTES_MAX + 64, id="longer than a frame may be"),
        pytest.param(ROWS_AT, "<I", 0, id="no rows"),
        pytest.param(ROWS_AT, "<I", 3, id="more rows than sequence numbers"),
        pytest.param(SPAN_AT, "<q", 1, id="fewer sequence numbers than rows"),
        pytest.param(SPAN_AT, "<q", -1, id="negative span"),
        pytest.param(PAYLOAD_AT, "<I", 2**31, id="payload longer than the frame"),
        pytest.param(SYNCED_TO_AT, "<Q", 128, id="synced behind the frame's begin"),
    ],
)
def test_inconsistent_header_with_a_valid_checksum_is_refused(field: int, form: str, value: int) -> None:
    data = bytearray(encode(batch(1, 2)))
    struct.pack_into(form, data, field, value)
    with pytest.raises(Corrupt, match="contradicts itself"):
        fmt.read_frame(segment(sealed_again(data)), 64)


def test_another_number_of_rows_than_in_the_header_is_corrupt() -> None:
    data = bytearray(encode(batch(1, 3)))
    struct.pack_into("<I", data, ROWS_AT, 2)
    buffer = segment(sealed_again(data))
    frame = fmt.read_frame(buffer, 64)
    assert frame is not None
    with pytest.raises(Corrupt, match="3 rows"):
        fmt.decode_rows(buffer, frame)


def test_a_payload_that_holds_no_rows_is_corrupt() -> None:
    data = bytearray(encode(batch(1, 3)))
    struct.pack_into("<I", data, 64 + 4, 2**31 - 1)  # bytes of the metadata
    buffer = segment(sealed_again(data))
    frame = fmt.read_frame(buffer, 64)
    assert frame is not None
    with pytest.raises(Corrupt, match="holds no rows"):
        fmt.decode_rows(buffer, frame)


def test_a_span_may_be_longer_than_its_rows() -> None:
    row = build_rows(1, kind=int(Kind.TABLE), body=b"99")
    frame, parts = fmt.encode_frame(
        row, first_seq=5, span=100, append_ms=0, epoch=1, position=64, synced_to=64
    )
    decoded_frame = fmt.read_frame(segment(b"".join(bytes(part) for part in parts)), 64)
    assert decoded_frame == frame and frame.next_seq == 105


def test_a_frame_without_rows_is_not_written() -> None:
    with pytest.raises(AssertionError):
        encode(build_rows(0))


def test_with_seq_adds_the_sequence_numbers() -> None:
    rows = with_seq(batch(1, 3), 40)
    assert rows.schema == READ_SCHEMA
    assert rows.column("seq").to_pylist() == [40, 41, 42]
    assert rows.drop_columns(["seq"]).schema.equals(LOG_SCHEMA)


# ---- segment headers -------------------------------------------------------------------------------------


def test_encoded_segment_header_is_read_back() -> None:
    data = fmt.encode_segment_header(17, 5)
    assert data[:8] == b"TIMEBALL" and len(data) == 64
    assert struct.unpack_from("<IIqq", data, 8) == (1, 0, 17, 5)
    assert fmt.read_segment_header(pa.py_buffer(data)) == 17


def test_blank_or_short_segment_has_no_first_seq() -> None:
    assert fmt.read_segment_header(pa.py_buffer(bytes(200))) is None
    assert fmt.read_segment_header(pa.py_buffer(b"TIME")) is None
    assert fmt.read_segment_header(pa.py_buffer(b"")) is None


def test_every_flipped_bit_of_a_segment_header_is_noticed() -> None:
    undamaged = fmt.encode_segment_header(17, 5)
    for position in range(64):
        for bit in range(8):
            damaged = bytearray(undamaged)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                fmt.read_segment_header(pa.py_buffer(bytes(damaged)))


def test_segment_of_a_newer_format_raises_setup_error() -> None:
    raw = bytearray(fmt.encode_segment_header(17, 5))
    struct.pack_into("<I", raw, 8, 2)
    struct.pack_into("<I", raw, 60, google_crc32c.value(bytes(raw[:60])))
    with pytest.raises(SetupError, match="format 2"):
        fmt.read_segment_header(pa.py_buffer(bytes(raw)))


@given(st.binary(min_size=0, max_size=400))
def test_random_bytes_are_no_frame_and_raise_only_corrupt_or_setup_error(data: bytes) -> None:
    for position in range(0, 256, 64):
        try:
            assert fmt.read_frame(pa.py_buffer(data), position) is None
        except (Corrupt, SetupError):
            pass
    try:
        assert fmt.read_segment_header(pa.py_buffer(data)) is None
    except (Corrupt, SetupError):
        pass


def test_a_damaged_payload_does_not_matter_when_only_the_header_is_read() -> None:
    data = bytearray(encode(batch(1, 2)))
    data[-1] ^= 1
    buffer = segment(bytes(data))
    assert fmt.read_frame_header(buffer, 64) is not None
    with pytest.raises(Corrupt):
        fmt.read_frame(buffer, 64)


def test_numbers_are_little_endian_on_every_machine() -> None:
    assert np.frombuffer(encode(batch(1, 1), first_seq=258)[16:24], "<i8")[0] == 258
