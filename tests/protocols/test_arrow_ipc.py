"""IPC messages: what a header says is checked before a body is decoded; what is left comes back as it was."""

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import InvalidMessage, OverLimit
from timeball.protocols import arrow_ipc as ipc

SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])
ROWS = pa.RecordBatch.from_arrays([pa.array(["t", None]), pa.array([bytes(2_000), b"x"])], schema=SCHEMA)


def messages(batch: pa.RecordBatch, **options: object) -> list[tuple[memoryview, memoryview]]:
    """Header and body of each message of a stream with this batch, the schema first."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    found = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [
        (memoryview(bytes(memoryview(m.metadata))), memoryview(bytes(m.body or b""))) for m in list(found)
    ]


def test_a_plain_batch_comes_back() -> None:
    (head, _), (header, body) = messages(ROWS)
    schema = ipc.schema(head)
    assert schema == SCHEMA
    assert ipc.batch(header, body, schema).equals(ROWS)
    assert ipc.schema(memoryview(bytes(ipc.schema_header(SCHEMA)))) == SCHEMA


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_body_is_refused_before_it_is_decompressed(codec: str) -> None:
    _, (header, body) = messages(ROWS, compression=codec)
    for part in (body, memoryview(b"")):  # the body is not looked at
        with pytest.raises(InvalidMessage, match="without compression"):
            ipc.batch(header, part, SCHEMA)


def test_another_way_to_say_that_a_body_is_compressed_is_refused() -> None:
    _, (header, body) = messages(ROWS, metadata_version=pa.ipc.MetadataVersion.V4)
    with pytest.raises(InvalidMessage, match="version before"):
        ipc.batch(header, body, SCHEMA)


def test_a_dictionary_is_refused() -> None:
    coded = pa.RecordBatch.from_arrays([pa.array(["t"] * 9).dictionary_encode()], names=["topic"])
    _, (header, body), _ = messages(coded)
    with pytest.raises(InvalidMessage, match="dictionary"):
        ipc.batch(header, body, coded.schema)


def test_a_long_schema_is_refused_unread() -> None:
    wide = pa.schema([pa.field("topic", pa.string(), metadata={"x": "y" * ipc.SCHEMA_BYTES_MAX})])
    with pytest.raises(OverLimit, match="metadata"):
        ipc.schema(ipc.schema_header(wide))
    with pytest.raises(OverLimit, match="header"):
        ipc.batch(memoryview(bytes(ipc.HEADER_BYTES_MAX + 1)), memoryview(b""), SCHEMA)


def test_a_message_of_another_kind_is_refused() -> None:
    (head, _), (header, body) = messages(ROWS)
    with pytest.raises(InvalidMessage, match="schema"):
        ipc.schema(header)
    with pytest.raises(InvalidMessage, match="not a record batch"):
        ipc.batch(head, body, SCHEMA)


@given(st.data())
def test_a_damaged_header_is_refused_or_read(data: st.DataObject) -> None:
    _, (header, body) = messages(ROWS)
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = ipc.batch(memoryview(bytes(damaged)), body, SCHEMA)
        found.validate(full=True)
    except (InvalidMessage, pa.ArrowException):
        pass


@given(st.binary(max_size=40))
def test_any_bytes_are_a_header_or_refused(junk: bytes) -> None:
    with pytest.raises(InvalidMessage):
        ipc.schema(memoryview(junk))


@given(st.integers(0, 40), st.integers(1, 60_000))
def test_parts_hold_all_rows_and_are_small(rows: int, size_bytes_max: int) -> None:
    batch = pa.RecordBatch.from_arrays([["t"] * rows, [bytes(1_000)] * rows], schema=SCHEMA)
    parts = [(bytes(h), bytes(b)) for h, b in ipc.parts(batch, size_bytes_max)]
    read = [ipc.batch(memoryview(h), memoryview(b), SCHEMA) for h, b in parts]
    assert pa.Table.from_batches(read, SCHEMA).equals(pa.Table.from_batches([batch], SCHEMA))
    assert all(part.num_rows == 1 or part.nbytes <= size_bytes_max for part in read if rows)


def test_a_header_that_points_elsewhere_is_refused() -> None:
    _, (header, body) = messages(ROWS)
    away = bytearray(header)
    struct.pack_into("<I", away, 0, 0xFFFF_FFF0)
    with pytest.raises(InvalidMessage, match="cut off"):
        ipc.batch(memoryview(bytes(away)), body, SCHEMA)


def test_a_name_that_is_no_text_is_refused() -> None:
    header = bytes(ipc.schema_header(SCHEMA)).replace(b"topic", b"t\x80pic")
    with pytest.raises(InvalidMessage, match="does not begin with an Arrow schema"):
        ipc.schema(memoryview(header))


def test_a_stream_is_its_messages_and_a_cut_one_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(ROWS)
    stream = sink.getvalue().to_pybytes()
    assert [(bytes(header), bytes(body)) for header, body in ipc.messages(stream)] == [
        (bytes(header), bytes(body)) for header, body in messages(ROWS)
    ]
    for cut in range(1, len(stream) - 8, 7):
        with pytest.raises(InvalidMessage, match="cut off"):
            list(ipc.messages(stream[:cut]))
