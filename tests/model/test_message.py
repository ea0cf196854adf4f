"""The kinds, schemas and properties of rows, and the constructors of log rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model import message
from timeball.model.message import (
    LOG_SCHEMA,
    READ_SCHEMA,
    SCHEMA_VERSION,
    TABLE_SCHEMA,
    Kind,
    alike,
    build_rows,
    cancel_row,
    codes_of,
    decode_properties,
    encode_properties,
    filled,
    int64,
    meta_row,
    meta_rows,
    pairs_of,
    repeated,
    with_seq,
    without_secrets,
)

# These numbers and columns are in every log that was ever written.
KINDS_ON_DISK = {
    "INVALID": 0,
    "MESSAGE": 1,
    "SCHEDULED": 2,
    "MOVED": 3,
    "RELEASE": 4,
    "CANCEL": 5,
    "TABLE": 6,
    "META": 7,
}
COLUMNS_ON_DISK = (
    "kind:int8 topic:string queue_id:int32 queue_offset:int64 tag:string keys:string unique_key:string "
    "body:binary properties:string born_ms:int64 born_host:string store_ms:int64 store_host:string flag:int32 "
    "sys_flag:int32 reconsume_times:int32 due_ms:int64 accepted_ms:int64 source_seq:int64 "
    "version_seq:int64 from_due_ms:int64"
)


def test_kinds_keep_their_numbers() -> None:
    assert {kind.name: int(kind) for kind in Kind} == KINDS_ON_DISK


def test_the_columns_of_schema_version_1_do_not_change() -> None:
    columns = " ".join(f"{field.name}:{field.type}" for field in LOG_SCHEMA)
    assert (SCHEMA_VERSION, columns) == (1, COLUMNS_ON_DISK), (
        "readers of version 1 expect these columns: see log/format.py before changing them"
    )


def test_the_read_schema_is_the_number_and_the_columns_of_the_log() -> None:
    assert READ_SCHEMA.names == ["seq", *LOG_SCHEMA.names]


def test_the_columns_of_the_table_have_the_types_of_the_log() -> None:
    for field in TABLE_SCHEMA.remove(TABLE_SCHEMA.get_field_index("number")):
        assert READ_SCHEMA.field(field.name).type == field.type


# ---- properties ------------------------------------------------------------------------------------------


def test_properties_have_rocketmq_s_text_form() -> None:
    assert encode_properties({"a": "1", "b": ""}) == "a\x011\x02b\x01\x02"
    assert decode_properties("a\x011\x02b\x01\x02") == {"a": "1", "b": ""}


def test_entries_without_a_separator_are_ignored_as_rocketmq_does() -> None:
    assert decode_properties("lonely\x02a\x011\x02\x02") == {"a": "1"}
    assert decode_properties("") == {}


def test_a_last_property_without_its_end_is_decoded() -> None:
    assert decode_properties("a\x011") == {"a": "1"}


plain = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]))


@given(st.dictionaries(plain, plain))
def test_encoded_properties_are_decoded_to_equal_ones(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


# ---- build_rows ------------------------------------------------------------------------------------------


def test_omitted_columns_are_null() -> None:
    rows = build_rows(3, kind=Kind.MESSAGE)
    assert rows.schema == LOG_SCHEMA and rows.num_rows == 3
    assert rows.column("kind").to_pylist() == [1, 1, 1]
    assert all(rows.column(name).null_count == 3 for name in LOG_SCHEMA.names if name != "kind")


@pytest.mark.parametrize(
    "value",
    [
        [5, None, 7],
        pa.array([5, None, 7], pa.int32()),
        pa.array([5, None, 7], pa.int64()),
        pa.chunked_array([[5], [None, 7]], pa.int64()),
    ],
    ids=["sequence", "narrower", "same type", "chunks"],
)
def test_build_rows_accepts_columns_in_several_forms(value: object) -> None:
    assert build_rows(3, due_ms=value).column("due_ms").to_pylist() == [5, None, 7]


def test_build_rows_accepts_a_numpy_column_and_scalars() -> None:
    rows = build_rows(2, due_ms=np.array([1, 2]), topic="orders", body=b"x", flag=3)
    assert rows.column("due_ms").to_pylist() == [1, 2]
    assert (
        rows.select(["topic", "body", "flag"]).to_pylist()
        == [{"topic": "orders", "body": b"x", "flag": 3}] * 2
    )


def test_an_unknown_column_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="dew_ms"):
        build_rows(1, dew_ms=1)


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError):
        build_rows(2, due_ms=[1, 2, 3])


def test_a_value_that_does_not_fit_into_its_column_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid):
        build_rows(1, flag=pa.array([1 << 40]))


def test_int64_views_the_column_without_a_copy() -> None:
    column = pa.array([1, 2, 3], pa.int64())
    values = int64(column)
    assert values.dtype == np.int64 and values.tolist() == [1, 2, 3]
    assert values.ctypes.data == column.buffers()[1].address


def test_int64_refuses_nulls() -> None:
    with pytest.raises(pa.ArrowInvalid):
        int64(pa.array([1, None], pa.int64()))


# ---- codes, repeated values and groups: Python code for small batches and kernels agree --------------------------

VALUES = st.lists(st.sampled_from("abcd"), max_size=20)


@pytest.mark.parametrize("small_rows", [0, 256])
@given(values=VALUES)
def test_codes_are_indexes_of_distinct_values(values: list[str], small_rows: int) -> None:
    previous, message.SMALL_ROWS = message.SMALL_ROWS, small_rows
    try:
        codes, names = codes_of(pa.array(values, pa.string()))
    finally:
        message.SMALL_ROWS = previous
    assert [names[code] for code in codes] == values
    assert len(set(names)) == len(names) == len(set(values))


@given(
    values=st.lists(st.sampled_from(["", "a", "b", "ab", "aba", "bab"]), min_size=1, max_size=3),
    times=st.integers(1, 3 * message.ALIKE_ROWS),
    cut=st.integers(0, 5),
    has_null=st.booleans(),
)
def test_codes_of_repeated_rows_slices_and_nulls_decode_to_the_column(
    values: list[str], times: int, cut: int, has_null: bool
) -> None:
    rows: list[str | None] = [*values * times, *([None] if has_null else [])]
    column = pa.array(rows, pa.string()).slice(min(cut, len(rows)))
    if column.null_count:
        column = filled(column, "b")
    codes, names = codes_of(column)
    assert [names[code] for code in codes] == column.to_pylist()
    assert len(set(names)) == len(names) == len(set(column.to_pylist()))


@pytest.mark.parametrize("count", [1, 2, 256, 257, 5_000])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("orders", pa.string()), ("", pa.string()), ("ö", pa.string()), (b"body", pa.binary()), (b"", pa.binary()),
        (0, pa.int8()), (-1, pa.int32()), (1_761_000_000_000, pa.int64()), ("wide", pa.large_string()),
    ],
)  # fmt: skip
def test_repeated_equals_arrows_repeat(value: str | bytes | int, kind: pa.DataType, count: int) -> None:
    array = repeated(value, kind, count)
    array.validate(full=True)
    assert array.equals(pa.repeat(pa.scalar(value, kind), count))
    with pytest.raises(pa.ArrowInvalid):
        repeated(1 << 40, pa.int32(), count)


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=20)
    | st.lists(st.sampled_from([0, 7, 32_767]), min_size=300, max_size=310)
    | st.lists(st.sampled_from([0, -1, 32_768, 1 << 40]), min_size=300, max_size=310)
)
def test_alike_groups_each_row_number_once_in_order(values: list[int]) -> None:
    groups = alike(np.array(values, dtype=np.int64))
    assert [values[group[0]] for group in groups] == sorted(set(values))
    assert sorted(row for group in groups for row in group.tolist()) == list(range(len(values)))
    for group in groups:
        assert len({values[row] for row in group}) == 1
        assert group.tolist() == sorted(group.tolist())
    assert len(groups) == len(set(values))


def test_filled_replaces_nulls_and_returns_other_columns_unchanged() -> None:
    column = pa.array([1, 2])
    assert filled(column, 0) is column
    assert filled(pa.array([1, None]), 7).to_pylist() == [1, 7]


PAIRS = [("topic/a", b'{"queues":1}'), ("secret/receipts", b'"c2VjcmV0"'), ("group/g", b"")]


def test_meta_rows_are_read_as_the_written_pairs() -> None:
    rows = meta_rows(PAIRS, 7)
    assert list(pairs_of(rows)) == PAIRS
    assert set(rows.column("kind").to_pylist()) == {Kind.META}
    assert set(rows.column("store_ms").to_pylist()) == {7}


def test_a_meta_row_equals_the_row_of_meta_rows() -> None:
    rows = [tuple(row.values()) for row in meta_rows(PAIRS, 7).to_pylist()]
    assert [meta_row(key, value, 7) for key, value in PAIRS] == rows


def test_without_secrets_replaces_only_secret_bodies_by_null() -> None:
    message = build_rows(1, kind=int(Kind.MESSAGE), topic="a", body=b"body", unique_key="secret/of a user")
    rows = with_seq(pa.concat_batches([meta_rows(PAIRS, 7), message]), 1)
    public_rows = without_secrets(rows)
    assert public_rows.column("body").to_pylist() == [PAIRS[0][1], None, b"", b"body"]
    assert public_rows.drop_columns(["body"]).equals(rows.drop_columns(["body"]))
    messages = rows.slice(3)
    assert without_secrets(messages) is messages


@pytest.mark.parametrize(("due_seq", "version_seq"), [(7, None), (9, 9)])
def test_a_cancel_row_has_each_value_in_its_column(due_seq: int, version_seq: int | None) -> None:
    row = cancel_row(
        topic="orders", source_seq=7, due_seq=due_seq, due_ms=5_000, store_ms=1_000,
        keys="k", unique_key="id", properties="p", accepted_ms=500,
    )  # fmt: skip
    values = dict(zip(LOG_SCHEMA.names, row, strict=True))
    assert {name: value for name, value in values.items() if value is not None} == {
        "kind": Kind.CANCEL, "topic": "orders", "queue_id": -1, "keys": "k", "unique_key": "id", "properties": "p",
        "store_ms": 1_000, "due_ms": 5_000, "accepted_ms": 500, "source_seq": 7,
        **({} if version_seq is None else {"version_seq": version_seq}),
    }  # fmt: skip
