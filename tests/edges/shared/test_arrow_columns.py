"""The columns of a send stream: accepted types, and the checks of a batch before it is used."""

import io
import struct
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.accounts import ACCESS_FILE
from tests.edges.arrow_types import TYPES

from timeball.broker.accepting.admission import rows_in
from timeball.broker.policy import Policy
from timeball.edges.shared import arrow_ipc as ipc
from timeball.edges.shared.arrow_ipc import SEND_SCHEMA, SendColumns
from timeball.log.row_encoder import MessageEncoder
from timeball.model import limits
from timeball.model.access import Access, parse
from timeball.model.errors import Forbidden, InvalidDelay, InvalidMessage, OverLimit
from timeball.model.message import SendRow


def adopt(batch: pa.RecordBatch) -> pa.RecordBatch:
    return SendColumns(batch.schema).adopt(batch, None)


def batch(**columns: object) -> pa.RecordBatch:
    given = {"topic": ["t"], "body": [b"x"], **columns}
    return pa.RecordBatch.from_arrays([pa.array(c) for c in given.values()], names=list(given))


def test_a_batch_with_exact_types_is_returned_unchanged() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([b"x"]), pa.array(["t"])], names=["body", "topic"])
    assert adopt(rows) is rows


@given(st.permutations(SEND_SCHEMA.names), st.integers(2, len(SEND_SCHEMA.names)))
def test_columns_in_any_order_with_topic_and_body_are_accepted(names: list[str], count: int) -> None:
    chosen = dict.fromkeys([*names[:count], "body", "topic"])
    values = {"topic": "t", "body": b"x"}
    arrays = [pa.array([values.get(name)], SEND_SCHEMA.field(name).type) for name in chosen]
    rows = pa.RecordBatch.from_arrays(arrays, names=list(chosen))
    assert adopt(rows).schema.names == list(chosen)


def test_unknown_columns_are_refused_by_name() -> None:
    with pytest.raises(InvalidMessage, match=r"unknown column 'delay'.*delay_ms"):
        adopt(batch(delay=[5]))


@pytest.mark.parametrize("name", ["topic", "body"])
def test_a_missing_required_column_is_refused(name: str) -> None:
    rows = batch().drop_columns([name])
    with pytest.raises(InvalidMessage, match=f"'{name}' is missing"):
        adopt(rows)
    with pytest.raises(InvalidMessage, match=f"'{name}' has rows without a value"):
        adopt(batch(**{name: pa.array([None], SEND_SCHEMA.field(name).type)}))


def test_a_repeated_column_is_refused() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array(["t"]), pa.array([b"x"]), pa.array(["u"])], names=["topic", "body", "topic"]
    )
    with pytest.raises(InvalidMessage, match="'topic' appears 2 times"):
        adopt(rows)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("topic", pa.array([1])),
        ("tag", pa.array([b"t"])),
        ("body", pa.array([1.5])),
        ("due_ms", pa.array([1.5])),
        ("due_ms", pa.array([0], pa.timestamp("ms"))),
        ("keys", pa.array([["a", "b"]])),
        ("properties", pa.array([{"a": "b"}])),
        ("flag", pa.array([True])),
        ("topic", pa.array(["t"]).dictionary_encode()),
    ],
)
def test_types_with_another_meaning_are_refused(name: str, column: pa.Array) -> None:
    with pytest.raises(InvalidMessage, match=rf"column '{name}' is .*; it must be"):
        adopt(batch(**{name: column}))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("topic", pa.array(["t"], pa.large_string())),
        ("body", pa.array(["x"])),
        ("body", pa.array([b"x"], pa.large_binary())),
        ("body", pa.array([b"x"], pa.binary(1))),
        ("delay_ms", pa.array([5], pa.int32())),
        ("due_ms", pa.array([100_000_000_000], pa.uint64())),
        ("queue_id", pa.array([5], pa.int64())),
        ("tag", pa.nulls(1)),
    ],
)
def test_types_with_the_same_meaning_are_converted(name: str, column: pa.Array) -> None:
    adopted = adopt(batch(**{name: column})).column(name)
    assert adopted.type == SEND_SCHEMA.field(name).type
    values = column.to_pylist()
    assert adopted.to_pylist() == ([b"x"] if name == "body" else values)


INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
TEXTS = {"string", "large_string"}


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
def test_only_accepted_types_are_accepted(kind: pa.DataType) -> None:
    listed = {
        "string": {*TEXTS, "null"},
        "binary": {*TEXTS, "binary", "large_binary", "fixed_size_binary[3]", "null"},
        "int32": {*INTEGERS, "null"},
        "int64": {*INTEGERS, "null"},
    }
    for field in SEND_SCHEMA:
        others = [SEND_SCHEMA.field(other) for other in ("topic", "body") if other != field.name]
        given = pa.schema([*others, (field.name, kind)])
        if str(kind) in listed[str(field.type)]:
            SendColumns(given)
            continue
        with pytest.raises(InvalidMessage, match=f"column {field.name!r} is "):
            SendColumns(given)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_topics_are_checked_before_other_columns_are_read(kind: pa.DataType) -> None:
    access = Access(parse(ACCESS_FILE.encode(), "access.toml"))
    allow = partial(Policy.allow, access.named("shop"))  # who may send to `orders`
    offsets = pa.py_buffer(struct.pack("<3i", 0, 9, 1))  # not sound: the second text runs backwards
    unsound = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"lying-one"))
    for topics, error in ((["orders", "news"], Forbidden), (["orders", "orders"], InvalidMessage)):
        columns = {"topic": pa.array(topics, kind), "body": [b"x"] * 2, "tag": unsound}
        with pytest.raises(error, match="topic 'news'" if error is Forbidden else "not a sound"):
            rows = batch(**columns)
            SendColumns(rows.schema).adopt(rows, allow)
    sound = batch(topic=pa.array(["orders"], kind))
    assert SendColumns(sound.schema).adopt(sound, allow).num_rows == 1


@pytest.mark.parametrize("due_ms", [1_800_000_000, 20_300_131, 0, -5])
def test_a_due_time_that_is_not_in_milliseconds_is_refused(due_ms: int) -> None:
    """Seconds, or a date as a number, would be delivered at once. Also for small batches, which are read in C."""
    rows = batch(topic=["t"] * 3, body=[b"x"] * 3, due_ms=[None, limits.DUE_MS_MIN, due_ms])
    with pytest.raises(InvalidDelay, match=f"due_ms {due_ms} of row 2: milliseconds since 1970 are meant"):
        adopt(rows)
    assert read(*message(rows), rows.schema) is None


def test_a_value_that_does_not_fit_refuses_the_batch() -> None:
    with pytest.raises(InvalidMessage, match="not a sound record batch"):
        adopt(batch(queue_id=pa.array([2**40])))


def test_empty_and_oversized_batches_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="empty batch"):
        adopt(batch().slice(1))
    rows = limits.ROWS_PER_REQUEST_MAX + 1
    many = pa.RecordBatch.from_arrays(
        [pa.repeat("t", rows), pa.repeat(pa.scalar(b"", pa.binary()), rows)], names=["topic", "body"]
    )
    with pytest.raises(OverLimit, match="smaller batches"):
        adopt(many)


def test_a_shared_buffer_counts_for_each_of_its_columns() -> None:
    text = pa.array(["x" * (limits.BATCH_BYTES_MAX // 3)])
    rows = pa.RecordBatch.from_arrays([text] * 4, names=["topic", "body", "tag", "keys"])
    assert rows.get_total_buffer_size() < limits.BATCH_BYTES_MAX // 2
    with pytest.raises(OverLimit, match="smaller batches"):
        adopt(rows)
    assert adopt(rows.select(["topic", "body"])).num_rows == 1


HONEST = struct.pack("<2i", 0, 9) + b"lying-one"  # offsets, characters


def received(topic: bytes) -> pa.RecordBatch:
    """Build a batch as received from a socket, with these bytes as the topic."""
    sink = io.BytesIO()
    honest = batch(topic=["lying-one"])
    with pa.ipc.new_stream(sink, honest.schema) as writer:
        writer.write_batch(honest)
    wire = sink.getvalue()
    assert wire.count(HONEST) == 1 and len(topic) == len(HONEST)
    return pa.ipc.open_stream(wire.replace(HONEST, topic)).read_next_batch()


@pytest.mark.parametrize(
    "topic",
    [
        struct.pack("<2i", 0, 1_000_000) + HONEST[8:],  # reads far behind its data
        struct.pack("<2i", 5, 1) + HONEST[8:],  # runs backwards
        struct.pack("<2i", -4, 1) + HONEST[8:],
        HONEST[:8] + b"\xff\xfe no UTF",
    ],
    ids=["beyond", "backwards", "negative", "not-utf8"],
)
def test_batches_with_false_offsets_are_refused(topic: bytes) -> None:
    assert received(HONEST).column("topic").to_pylist() == ["lying-one"]
    with pytest.raises(InvalidMessage, match="not a sound record batch"):
        adopt(received(topic))


# ---- a few rows, read in C -------------------------------------------------------------------------------------

compiled = pytest.mark.skipif(MessageEncoder is None, reason="built without a compiler")
OF_ROWS = [name for name in SEND_SCHEMA.names if name != "delay_ms"]
VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(max_size=6),
    pa.binary(): st.binary(max_size=6),
}


DUE_TIMES = st.none() | st.integers(limits.DUE_MS_MIN, 2**63 - 1)


@st.composite
def few_rows(draw: st.DrawFn) -> pa.RecordBatch:
    count, columns = draw(st.integers(1, 16)), {}
    for name in dict.fromkeys([*draw(st.lists(st.sampled_from(OF_ROWS))), "body", "topic"]):
        kind = SEND_SCHEMA.field(name).type
        if name == "due_ms":  # a smaller number is refused, by a test of its own
            columns[name] = pa.array(draw(st.lists(DUE_TIMES, min_size=count, max_size=count)), kind)
            continue
        value = VALUES[kind] if name in ("topic", "body") else st.none() | VALUES[kind]
        columns[name] = pa.array(draw(st.lists(value, min_size=count, max_size=count)), kind)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def message(rows: pa.RecordBatch) -> tuple[bytes, bytes]:
    ((header, body),) = ipc.parts(rows, 1 << 20)
    return bytes(header), bytes(body)


def read(header: bytes, body: bytes, schema: pa.Schema) -> list[SendRow] | None:
    return SendColumns(schema).rows(memoryview(header), [body[:3], body[3:]])


def reference(header: bytes, body: bytes, schema: pa.Schema) -> list[SendRow] | None:
    return rows_in(SendColumns(schema).adopt(ipc.batch(memoryview(header), memoryview(body), schema), None))


@compiled
@given(few_rows())
def test_rows_of_a_small_batch_equal_those_of_pyarrow(rows: pa.RecordBatch) -> None:
    header, body = message(rows)
    result = read(header, body, rows.schema)
    assert result is not None and result == reference(header, body, rows.schema)


@compiled
@given(few_rows(), st.data())
def test_any_bytes_give_the_rows_of_pyarrow_or_none(rows: pa.RecordBatch, data: st.DataObject) -> None:
    parts = [bytearray(part) for part in message(rows)]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from(parts))
        at = data.draw(st.integers(0, len(part) - 1))
        if data.draw(st.booleans()):
            part[at] = data.draw(st.integers(0, 255))
        else:  # a number of the header, or an end of a text
            at -= at % 4
            part[at : at + 4] = data.draw(st.integers(-2, 90)).to_bytes(4, "little", signed=True)
    header, body = map(bytes, parts)
    result = read(header, body, rows.schema)
    assert result is None or result == reference(header, body, rows.schema)


@compiled
@pytest.mark.parametrize(
    "rows",
    [
        pa.record_batch({"topic": ["t"] * 17, "body": [b"x"] * 17}),
        pa.record_batch({"topic": ["t"], "body": [b"x" * 70_000]}),
        pa.record_batch({"topic": ["t"], "body": [b"x"], "delay_ms": [5]}),
        pa.record_batch({"topic": ["t"], "body": ["text"]}),
        pa.record_batch({"topic": pa.array([None], pa.string()), "body": [b"x"]}),
        pa.record_batch({"topic": pa.array(["t"], pa.large_string()), "body": [b"x"]}),
    ],
    ids=["many", "large", "of a relative delay", "converted", "without a topic", "of large texts"],
)
def test_unusual_batches_are_left_to_pyarrow(rows: pa.RecordBatch) -> None:
    assert read(*message(rows), rows.schema) is None


@compiled
def test_invalid_utf8_is_left_to_pyarrow() -> None:
    raw = pa.record_batch({"topic": pa.array([b"\xff\xfe"]), "body": [b"x"]})
    schema = pa.schema([("topic", pa.string()), ("body", pa.binary())])
    assert read(*message(raw), schema) is None
    with pytest.raises(InvalidMessage, match="not a sound record batch"):
        reference(*message(raw), schema)
