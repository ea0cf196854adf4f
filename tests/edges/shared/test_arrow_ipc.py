"""Arrow IPC messages: headers are checked before a body is decoded, and valid batches are decoded unchanged."""

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.arrow_types import STORED, TYPES, column

from timeball.edges.shared import arrow_ipc as ipc
from timeball.model import flatbuffer as fb
from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit

SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])
ROWS = pa.RecordBatch.from_arrays([pa.array(["t", None]), pa.array([bytes(2_000), b"x"])], schema=SCHEMA)


def messages(batch: pa.RecordBatch, **options: object) -> list[tuple[memoryview, memoryview]]:
    """Return header and body of each message of a stream with this batch, the schema first."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    result = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [
        (memoryview(bytes(memoryview(m.metadata))), memoryview(bytes(m.body or b""))) for m in list(result)
    ]


def test_an_encoded_batch_is_decoded_to_the_same() -> None:
    (head, _), (header, body) = messages(ROWS)
    schema = ipc.read_schema(head)
    assert schema == SCHEMA
    assert ipc.read_batch(header, body, schema).equals(ROWS)
    assert ipc.read_schema(memoryview(bytes(ipc.schema_header(SCHEMA)))) == SCHEMA


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_body_is_refused_before_it_is_decompressed(codec: str) -> None:
    _, (header, body) = messages(ROWS, compression=codec)
    for given_body in (body, memoryview(b"")):  # the error does not depend on the body
        with pytest.raises(InvalidMessage, match="without compression"):
            ipc.read_batch(header, given_body, SCHEMA)


def test_a_message_before_metadata_version_5_is_refused() -> None:
    _, (header, body) = messages(ROWS, metadata_version=pa.ipc.MetadataVersion.V4)
    with pytest.raises(InvalidMessage, match="version before"):
        ipc.read_batch(header, body, SCHEMA)


def test_a_dictionary_is_refused() -> None:
    coded = pa.RecordBatch.from_arrays([pa.array(["t"] * 9).dictionary_encode()], names=["topic"])
    _, (header, body), _ = messages(coded)
    with pytest.raises(InvalidMessage, match="dictionary"):
        ipc.read_batch(header, body, coded.schema)


READ = {
    "null", "string", "large_string", "binary", "large_binary", "fixed_size_binary[3]", "fixed_size_binary[16]",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip


def test_every_type_of_pyarrow_is_tested() -> None:
    known = {getattr(pa.lib, name) for name in dir(pa.lib) if name.startswith("Type_")}
    # pyarrow can read these types, but not write them.
    read_only = {pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME}
    assert known - {kind.id for kind in TYPES.values()} == read_only


@pytest.mark.parametrize("name", TYPES)
def test_only_accepted_types_are_read(name: str) -> None:
    rows = pa.RecordBatch.from_arrays([column(TYPES[name])], names=["body"])
    header, _ = messages(rows)[0]
    # The name of an extension type is in the metadata, which is not read: the result has the type of its storage.
    stored = STORED.get(name, TYPES[name])
    if str(stored) in READ:
        assert ipc.read_schema(header) == pa.schema([("body", stored)])
        return
    with pytest.raises(InvalidMessage, match=r"column 'body' is .*; cast it to string, large_string"):
        ipc.read_schema(header)


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("string_view", "string_view"),
        ("binary_view", "binary_view"),
        ("list_view<item: string>", "list_view"),
    ],
)
def test_a_refused_type_is_named_in_the_error(name: str, type_name: str) -> None:
    header = ipc.schema_header(pa.schema([("body", TYPES[name])]))
    with pytest.raises(InvalidMessage, match=f"column 'body' is {type_name};"):
        ipc.read_schema(header)


@given(
    st.lists(
        st.tuples(st.text(max_size=8), st.sampled_from(sorted(READ & TYPES.keys()))), max_size=ipc.COLUMNS_MAX
    )
)
def test_a_schema_is_read_as_arrow_reads_it(columns: list[tuple[str, str]]) -> None:
    given = pa.schema([(name, TYPES[kind]) for name, kind in columns])
    assert ipc.read_schema(ipc.schema_header(given)) == given
    with_metadata = given.with_metadata({"pandas": "{}"})
    assert ipc.read_schema(ipc.schema_header(with_metadata)).equals(given, check_metadata=True)


@given(st.data())
def test_a_damaged_schema_is_refused_or_read(data: st.DataObject) -> None:
    header = bytearray(ipc.schema_header(pa.schema([("topic", pa.string()), ("due_ms", pa.int32())])))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = ipc.read_schema(memoryview(bytes(header)))
    except InvalidMessage:
        return
    assert {str(kind).partition("[")[0] for kind in result.types} <= {kind.partition("[")[0] for kind in READ}


def test_a_big_endian_schema_is_refused() -> None:
    header = bytearray(ipc.schema_header(pa.schema([("due_ms", pa.int64())])))
    table = fb.target(header, fb.present_field(header, fb.target(header, 0), fb.MESSAGE_HEADER))
    # The header has no endianness, because it is the default. So the field gets the position of another field, whose
    # value is not zero.
    vtable = table - struct.unpack_from("<i", header, table)[0]
    fields_at = struct.unpack_from("<H", header, vtable + 4 + 2 * fb.SCHEMA_FIELDS)
    struct.pack_into("<H", header, vtable + 4 + 2 * fb.SCHEMA_ENDIANNESS, *fields_at)
    with pytest.raises(InvalidMessage, match="big-endian"):
        ipc.read_schema(memoryview(bytes(header)))


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="more than 64 columns"):
        ipc.read_schema(ipc.schema_header(pa.schema([(str(at), pa.null()) for at in range(65)])))


@pytest.mark.parametrize("rows", [-1, -(2**63), limits.ROWS_PER_REQUEST_MAX + 1, 2**62])
def test_too_many_rows_are_refused_before_decoding(rows: int) -> None:
    (head, _), (header, body) = messages(pa.record_batch({"topic": pa.nulls(3)}))
    claimed = bytes(header).replace(struct.pack("<q", 3), struct.pack("<q", rows))
    with pytest.raises((InvalidMessage, OverLimit), match=f"{rows} rows"):
        ipc.read_batch(memoryview(claimed), body, ipc.read_schema(head))


def test_a_schema_that_is_too_long_is_refused_before_decoding() -> None:
    wide = pa.schema([pa.field("topic", pa.string(), metadata={"x": "y" * ipc.SCHEMA_BYTES_MAX})])
    with pytest.raises(OverLimit, match="metadata"):
        ipc.read_schema(ipc.schema_header(wide))
    with pytest.raises(OverLimit, match="header"):
        ipc.read_batch(memoryview(bytes(ipc.HEADER_BYTES_MAX + 1)), memoryview(b""), SCHEMA)


def test_a_message_of_another_type_is_refused() -> None:
    (head, _), (header, body) = messages(ROWS)
    with pytest.raises(InvalidMessage, match="schema"):
        ipc.read_schema(header)
    with pytest.raises(InvalidMessage, match="not a record batch"):
        ipc.read_batch(head, body, SCHEMA)


@given(st.data())
def test_a_damaged_header_is_refused_or_read(data: st.DataObject) -> None:
    _, (header, body) = messages(ROWS)
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = ipc.read_batch(memoryview(bytes(damaged)), body, SCHEMA)
        result.validate(full=True)
    except (InvalidMessage, OverLimit, pa.ArrowException):
        pass


@given(st.binary(max_size=40))
def test_random_bytes_are_refused_as_a_schema(junk: bytes) -> None:
    with pytest.raises(InvalidMessage):
        ipc.read_schema(memoryview(junk))


@given(st.integers(0, 40), st.integers(1, 60_000))
def test_parts_of_a_batch_have_all_rows_and_the_maximum_size(rows: int, size_bytes_max: int) -> None:
    batch = pa.RecordBatch.from_arrays([["t"] * rows, [bytes(1_000)] * rows], schema=SCHEMA)
    parts = [(bytes(h), bytes(b)) for h, b in ipc.split_batch(batch, size_bytes_max)]
    read = [ipc.read_batch(memoryview(h), memoryview(b), SCHEMA) for h, b in parts]
    assert pa.Table.from_batches(read, SCHEMA).equals(pa.Table.from_batches([batch], SCHEMA))
    assert all(part.num_rows == 1 or part.nbytes <= size_bytes_max for part in read if rows)


def test_a_header_with_an_offset_after_its_end_is_refused() -> None:
    _, (header, body) = messages(ROWS)
    damaged = bytearray(header)
    struct.pack_into("<I", damaged, 0, 0xFFFF_FFF0)
    with pytest.raises(InvalidMessage, match="cut off"):
        ipc.read_batch(memoryview(bytes(damaged)), body, SCHEMA)


def test_a_column_name_that_is_not_utf8_is_refused() -> None:
    header = bytes(ipc.schema_header(SCHEMA)).replace(b"topic", b"t\x80pic")
    with pytest.raises(InvalidMessage, match="does not begin with an Arrow schema"):
        ipc.read_schema(memoryview(header))


def test_a_stream_is_split_into_messages_and_a_truncated_one_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(ROWS)
    stream = sink.getvalue().to_pybytes()
    assert [(bytes(header), bytes(body)) for header, body in ipc.read_messages(stream)] == [
        (bytes(header), bytes(body)) for header, body in messages(ROWS)
    ]
    for cut in range(1, len(stream) - 8, 7):
        with pytest.raises(InvalidMessage, match="cut off"):
            list(ipc.read_messages(stream[:cut]))
