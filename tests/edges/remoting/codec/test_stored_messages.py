"""Opened frames of both codecs encode the same stored messages from the same bytes of the log."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.remoting.codec.test_implementation import V4, V6, needs_compiled, stored_rows

from timeball.edges.remoting.codec.implementation import COMPILED, PYTHON, Codec
from timeball.edges.remoting.codec.records import Host
from timeball.log import format as fmt
from timeball.log.format import ENTRY
from timeball.model.errors import OutOfRange
from timeball.model.message import LOG_SCHEMA

FIRST = 900  # sequence number of a frame's first row
ANY = 1 << 40  # an answer may be as long as its messages are
RIGHT = {"kind": 1, "topic": "orders", "queue_id": 0, "queue_offset": 7}


def segment_of(rows: list[dict[str, Any]], before: int = 64) -> tuple[pa.Buffer, fmt.Frame]:
    """Build a segment with one frame of these rows behind `before` bytes. Return its bytes and the frame."""
    batch = pa.RecordBatch.from_pylist(rows, LOG_SCHEMA)
    frame, parts = fmt.encode_frame(
        batch, first_seq=FIRST, span=len(rows), append_ms=0, epoch=1, position=before, synced_to=0
    )
    data = b"".join([bytes(before), *map(bytes, parts)])
    segment = pa.allocate_buffer(len(data))  # aligned as a mapping is
    memoryview(segment).cast("B")[:] = data
    return segment, frame


def put(
    codec: Codec | None,
    segment: pa.Buffer,
    frame: fmt.Frame,
    picks: list[int],
    bytes_max: int,
    host: Host = V4,
) -> tuple[int, bytes]:
    """Encode the picked rows of a frame, numbered from 0, and return the number of rows and the bytes.

    They are encoded twice, from sequence numbers and from queue entries. Both must give the same.
    """
    assert codec is not None
    out, again = bytearray(), bytearray()
    seqs, entries = [FIRST + pick for pick in picks], np.zeros(len(picks), ENTRY)
    entries["seq"] = seqs
    count = codec.open_frame(segment, frame).append_messages(out, seqs, 0, host, bytes_max)
    assert codec.open_frame(segment, frame).append_messages(again, entries, 0, host, bytes_max) == count
    assert again == out
    return count, bytes(out)


@needs_compiled
@given(st.lists(stored_rows, min_size=1, max_size=15), st.data())
def test_an_opened_frame_encodes_the_same_in_both_codecs(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    """META rows, which have no topic, may be between the messages, and the answer may be too small for all."""
    rows = [{**row, "kind": 1, "queue_offset": row["queue_offset"] or 0} for row in rows]
    meta = data.draw(st.sets(st.integers(0, len(rows))))
    frame_rows: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        frame_rows += [{"kind": 7, "unique_key": "k"}] if number in meta else []
        frame_rows.append(row)
    visible = [at for at, row in enumerate(frame_rows) if row["kind"] == 1]
    picks = sorted(data.draw(st.sets(st.sampled_from(visible))))
    bytes_max, host = data.draw(st.sampled_from([1, 500, ANY])), data.draw(st.sampled_from([V4, V6]))
    segment, frame = segment_of(frame_rows)
    result = put(COMPILED, segment, frame, picks, bytes_max, host)
    assert result == put(PYTHON, segment, frame, picks, bytes_max, host)
    assert result[0] == len(picks) or bytes_max < ANY


texts = st.lists(
    st.sampled_from(["UNIQ_KEY", "TAGS", "KEYS", "TAG", "UNIQ", "\x01", "\x02", "a"]), max_size=9
).map("".join)


@needs_compiled
@given(st.lists(st.tuples(texts, texts, texts, texts), min_size=1, max_size=4))
def test_a_value_only_in_a_column_becomes_the_same_property(rows: list[tuple[str, ...]]) -> None:
    """The texts may look like properties."""
    names = ("properties", "unique_key", "tag", "keys")
    segment, frame = segment_of([{**RIGHT, **dict(zip(names, row, strict=True))} for row in rows])
    picks = list(range(len(rows)))
    assert put(COMPILED, segment, frame, picks, ANY) == put(PYTHON, segment, frame, picks, ANY)


@needs_compiled
def test_bodies_of_any_length_have_the_same_checksum() -> None:
    source = random.Random(1)
    segment, frame = segment_of([{**RIGHT, "body": source.randbytes(size)} for size in range(100)])
    picks = list(range(100))
    assert put(COMPILED, segment, frame, picks, ANY) == put(PYTHON, segment, frame, picks, ANY)


@needs_compiled
def test_a_freed_frame_does_not_affect_the_next_pull() -> None:
    for born in ["10.0.0.7:1", "10.0.0.8:2", None, "10.0.0.7:1"] * 5:
        for host in (V4, V4, V6):
            segment, frame = segment_of([{**RIGHT, "born_host": born}] * 2)
            assert put(COMPILED, segment, frame, [0, 1], ANY, host) == put(
                PYTHON, segment, frame, [0, 1], ANY, host
            )


@needs_compiled
@pytest.mark.parametrize("codec", [COMPILED, PYTHON])
@pytest.mark.parametrize("wrong", [{"queue_offset": None}, {"kind": 7, "topic": None, "queue_offset": None}])
def test_a_row_that_is_not_visible_is_refused(codec: Codec | None, wrong: dict[str, Any]) -> None:
    segment, frame = segment_of([RIGHT, {**RIGHT, **wrong}, RIGHT])
    with pytest.raises(OutOfRange, match="no visible message"):
        put(codec, segment, frame, [0, 1, 2], ANY)
    assert put(codec, segment, frame, [0, 2], ANY)[0] == 2


@needs_compiled
@pytest.mark.parametrize(
    "wrong",
    [{"properties": "p" * 65_536}, {"topic": "t" * 40_000}, {"born_host": "1.2.3.4:99999999999"}],
)
def test_a_row_that_no_stored_message_can_hold_gives_the_same_error(wrong: dict[str, Any]) -> None:
    segment, frame = segment_of([RIGHT, {**RIGHT, **wrong}])
    errors = []
    for codec in (COMPILED, PYTHON):
        with pytest.raises(Exception) as caught:  # both codecs must raise the same one, whatever it is
            put(codec, segment, frame, [0, 1], ANY)
        errors.append(f"{caught.type} {caught.value}")
    assert errors[0] == errors[1]


@needs_compiled
@pytest.mark.parametrize("codec", [COMPILED, PYTHON])
def test_a_frame_encodes_only_its_own_rows(codec: Codec | None) -> None:
    segment, frame = segment_of([RIGHT] * 4)
    assert put(codec, segment, frame, [1, 3, 4, 5], ANY)[0] == 2
    assert put(codec, segment, frame, [-1, 0], ANY) == (0, b"")


@needs_compiled
def test_a_compressed_message_is_left_to_the_reference() -> None:
    """Timeball writes none, but a reader that took compressed bytes for columns would deliver garbage."""
    batch = pa.RecordBatch.from_pylist([{**RIGHT, "body": b"x" * 900}] * 40, LOG_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, LOG_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()  # the schema
    payload = messages.read_next_message().serialize()
    segment = pa.py_buffer(bytes(128) + payload.to_pybytes())
    frame = fmt.Frame(64, 64 + payload.size, 40, FIRST, 40, 0, 1, payload.size, 0)
    picks = list(range(0, 40, 3))
    assert put(COMPILED, segment, frame, picks, ANY) == put(PYTHON, segment, frame, picks, ANY)


@needs_compiled
@given(st.integers(64, 64 + 1_400), st.binary(min_size=1, max_size=8))
def test_damaged_metadata_is_never_read_beyond_the_message(at: int, damage: bytes) -> None:
    """The checksum is verified before, but even damaged metadata must not crash the broker."""
    segment, frame = segment_of([RIGHT] * 3, before=64)
    metadata_end = 64 + 64 + 8 + int.from_bytes(bytes(segment.slice(132, 4)), "little")
    place = 128 + at % (metadata_end - 128)
    data = memoryview(segment).cast("B")
    end = min(place + len(damage), metadata_end)
    data[place:end] = damage[: end - place]
    result = []
    for codec in (COMPILED, PYTHON):
        try:
            result.append(put(codec, segment, frame, [0, 2], ANY)[0])
        except Exception as error:  # any error is right, for example one of pyarrow
            result.append(type(error))
    assert len(result) == 2
