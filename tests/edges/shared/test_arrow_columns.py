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

from timeball.broker.policy import Policy
from timeball.edges.shared.arrow_ipc import SEND_SCHEMA, SendColumns
from timeball.model import limits
from timeball.model.access import Access, parse
from timeball.model.errors import Forbidden, InvalidDelay, InvalidMessage, OverLimit


def adopt(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with the types of sends. Raise an error as `SendColumns.check_and_convert` does."""
    return SendColumns(batch.schema).check_and_convert(batch, None)


def batch(**columns: object) -> pa.RecordBatch:
    """Return one row with these columns."""
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
    allow = partial(Policy.allow, access.named("shop"))  # this account may only send to `orders`
    decreasing_offsets = pa.py_buffer(struct.pack("<3i", 0, 9, 1))
    invalid_tag = pa.StringArray.from_buffers(2, decreasing_offsets, pa.py_buffer(b"lying-one"))
    for topics, error, text in (
        (["orders", "news"], Forbidden, "topic 'news'"),
        (["orders", "orders"], InvalidMessage, "not a sound"),
    ):
        rows = batch(topic=pa.array(topics, kind), body=[b"x"] * 2, tag=invalid_tag)
        with pytest.raises(error, match=text):
            SendColumns(rows.schema).check_and_convert(rows, allow)
    valid = batch(topic=pa.array(["orders"], kind))
    assert SendColumns(valid.schema).check_and_convert(valid, allow).num_rows == 1


@pytest.mark.parametrize("due_ms", [1_800_000_000, 20_300_131, 0, -5])
def test_a_due_time_that_is_not_in_milliseconds_is_refused(due_ms: int) -> None:
    """Seconds, or a date as a number, would be delivered at once. Also for small batches, which are read in C."""
    rows = batch(topic=["t"] * 3, body=[b"x"] * 3, due_ms=[None, limits.DUE_MS_MIN, due_ms])
    with pytest.raises(InvalidDelay, match=f"due_ms {due_ms} of row 2: milliseconds since 1970 are meant"):
        adopt(rows)


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


VALID = struct.pack("<2i", 0, 9) + b"lying-one"  # the two offsets of the topic, and its characters


def batch_with_topic(topic: bytes) -> pa.RecordBatch:
    """Build a batch as received from a socket, with these bytes as offsets and characters of the topic."""
    sink = io.BytesIO()
    valid = batch(topic=["lying-one"])
    with pa.ipc.new_stream(sink, valid.schema) as writer:
        writer.write_batch(valid)
    stream = sink.getvalue()
    assert stream.count(VALID) == 1 and len(topic) == len(VALID)
    return pa.ipc.open_stream(stream.replace(VALID, topic)).read_next_batch()


@pytest.mark.parametrize(
    "topic",
    [
        struct.pack("<2i", 0, 1_000_000) + VALID[8:],
        struct.pack("<2i", 5, 1) + VALID[8:],
        struct.pack("<2i", -4, 1) + VALID[8:],
        VALID[:8] + b"\xff\xfe no UTF",
    ],
    ids=["after the end", "decreasing", "negative", "not-utf8"],
)
def test_batches_with_invalid_offsets_or_characters_are_refused(topic: bytes) -> None:
    assert batch_with_topic(VALID).column("topic").to_pylist() == ["lying-one"]
    with pytest.raises(InvalidMessage, match="not a sound record batch"):
        adopt(batch_with_topic(topic))
