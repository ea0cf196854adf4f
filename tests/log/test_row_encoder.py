"""A few rows: the compiled encoder writes the same bytes as pyarrow, or leaves the rows to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.log import row_encoder
from timeball.log.row_encoder import Build, build_by_pyarrow, build_compiled, rows_of
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, LogRow

IS_COMPILED = row_encoder.MessageEncoder is not None
compiled = pytest.mark.skipif(not IS_COMPILED, reason="built without a compiler")

FITTING: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(max_size=12),
    pa.binary(): st.binary(max_size=12),
}
ANY = st.one_of(
    st.none(), st.integers(-(2**65), 2**65), st.booleans(), st.floats(), st.binary(max_size=3),
    st.text(st.characters(exclude_categories=[]), max_size=3),
)  # fmt: skip
ROW = st.tuples(*(st.one_of(st.none(), FITTING[field.type]) for field in LOG_SCHEMA))
ROWS = st.lists(ROW, min_size=1, max_size=20)


@compiled
@given(ROWS)
def test_the_compiled_encoder_writes_the_bytes_of_pyarrow(values: list[LogRow]) -> None:
    encoded = build_compiled(values)
    reference = rows_of(values)
    assert bytes(encoded.message) == bytes(row_encoder.encode(reference))
    encoded.batch.validate(full=True)
    assert encoded.batch.equals(reference) and encoded.num_rows == len(values)


@compiled
@given(ROWS, st.integers(0, len(LOG_SCHEMA) - 1), ANY)
def test_any_value_in_any_column_gives_the_message_or_the_error_of_pyarrow(
    values: list[LogRow], column: int, value: object
) -> None:
    rows = [*values[:-1], (*values[-1][:column], value, *values[-1][column + 1 :])]

    def outcome(build: Build) -> object:
        try:
            return bytes(build(rows).message)
        except (pa.ArrowException, OverflowError, UnicodeError, TypeError, ValueError) as error:
            return type(error), str(error)

    assert outcome(build_compiled) == outcome(build_by_pyarrow)


@compiled
def test_rows_that_are_no_tuples_of_all_columns_are_left_to_pyarrow() -> None:
    encoder = row_encoder.LOG_ENCODER
    row = (None,) * len(LOG_SCHEMA)
    assert encoder.encode([row]) is not None
    for wrong in (row[:-1], [*row], None):
        assert encoder.encode([wrong]) is None


def test_the_compiled_builder_is_used_if_it_is_installed() -> None:
    assert row_encoder.build is (build_by_pyarrow if row_encoder.MessageEncoder is None else build_compiled)


@given(st.lists(ROWS, min_size=2, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_joining_values_equals_joining_columns(parts: list[list[LogRow]], are_columns: list[bool]) -> None:
    mixed_parts = [
        rows_of(part) if as_rows else row_encoder.build(part)
        for part, as_rows in zip(parts, are_columns, strict=False)
    ]
    reference = rows_of([row for part in parts for row in part])
    joined = row_encoder.joined(mixed_parts)
    assert row_encoder.as_batch(joined).equals(reference)
    assert len(row_encoder.encode(reference)) <= row_encoder.message_bytes(joined)
    assert row_encoder.message_bytes(joined) <= pa.ipc.get_record_batch_size(reference)


@compiled
def test_few_joined_rows_are_encoded_again_and_many_are_not() -> None:
    row: LogRow = (None,) * len(LOG_SCHEMA)
    few, many = build_compiled([row]), build_compiled([row] * (4 * row_encoder.JOINED_ROWS))
    assert isinstance(row_encoder.joined([few, few]), row_encoder.EncodedRows)
    assert isinstance(row_encoder.joined([few, many]), pa.RecordBatch)


@given(ROWS, st.lists(st.integers(1, 2**40), min_size=20, max_size=20), st.data())
def test_numbered_rows_are_the_same_as_values_and_as_a_batch(
    values: list[LogRow], seqs: list[int], data: st.DataObject
) -> None:
    indexes = data.draw(st.lists(st.integers(0, len(values) - 1), unique=True, min_size=1).map(sorted))
    seqs = seqs[: len(indexes)]
    as_values = row_encoder.numbered(row_encoder.build(values), seqs, indexes)
    as_batch = row_encoder.numbered(build_by_pyarrow(values), seqs, indexes)
    assert isinstance(as_values, row_encoder.NumberedRows) == IS_COMPILED
    assert isinstance(as_batch, pa.RecordBatch)
    expected = [
        dict(zip(READ_SCHEMA.names, (seq, *values[index]), strict=True))
        for seq, index in zip(seqs, indexes, strict=True)
    ]
    keep = np.array([seq % 2 == 0 for seq in seqs], dtype=np.bool_)
    for rows in (as_values, as_batch):
        assert row_encoder.read_batch(rows).to_pylist() == expected
        kept_rows = row_encoder.read_batch(row_encoder.filtered(rows, keep)).to_pylist()
        assert kept_rows == [row for row, is_kept in zip(expected, keep, strict=True) if is_kept]


@compiled
@given(ROWS, st.data())
def test_rows_read_from_a_message_equal_its_values(values: list[LogRow], data: st.DataObject) -> None:
    due_ms_column = LOG_SCHEMA.get_field_index("due_ms")
    all_due_ms = data.draw(st.lists(FITTING[pa.int64()], min_size=len(values), max_size=len(values)))
    values = [
        (*row[:due_ms_column], due_ms, *row[due_ms_column + 1 :])
        for row, due_ms in zip(values, all_due_ms, strict=True)
    ]
    seqs = list(range(100, 100 + len(values)))
    in_message = row_encoder.numbered(build_compiled(values), seqs, list(range(len(values))))
    assert isinstance(in_message, row_encoder.NumberedRows)
    as_values = row_encoder.NumberedRows([(seq, *row) for seq, row in zip(seqs, values, strict=True)])
    assert [column.tolist() for column in in_message.pairs] == [all_due_ms, seqs]
    assert [column.tolist() for column in as_values.pairs] == [all_due_ms, seqs]
    large_texts = [LOG_SCHEMA.get_field_index(name) for name in ("body", "properties", "keys")]
    sizes = [
        sum(
            len(text if isinstance(text, bytes) else text.encode())
            for text in (row[column] for column in large_texts)
            if text
        )
        for row in values
    ]
    entries = [(due_ms, seq, size_bytes) for due_ms, seq, size_bytes, _, _ in in_message.entries()]
    assert entries == list(zip(all_due_ms, seqs, sizes, strict=True))
    assert in_message.values == as_values.values
    for rows in (in_message, as_values):
        assert row_encoder.NumberedRows.gathered(rows.entries(), rows.pairs).values == as_values.values


@compiled
def test_many_rows_and_long_messages_become_columns() -> None:
    """Each row that stays in its message keeps the whole message in memory."""
    row: LogRow = (1, "t", *[None] * (len(LOG_SCHEMA) - 2))
    many = build_compiled([row] * (row_encoder.HELD_ROWS_MAX + 1))
    body = LOG_SCHEMA.get_field_index("body")
    long = build_compiled([(*row[:body], b"x" * row_encoder.HELD_BYTES_MAX, *row[body + 1 :])])
    for rows in (many, long):
        indexes = list(range(rows.num_rows))
        assert isinstance(row_encoder.numbered(rows, indexes, indexes), pa.RecordBatch)
    assert isinstance(row_encoder.numbered(many, [1], [7]), row_encoder.NumberedRows), "one row of many"


def test_a_message_of_another_layout_is_read_as_columns() -> None:
    other = pa.record_batch([pa.array([1])], names=["other"]).serialize()
    assert row_encoder.readable(pa.py_buffer(other)) is None


@compiled
def test_single_rows_are_read_from_a_readable_message() -> None:
    values: list[LogRow] = [(0, "t", 0, 0, *[None] * (len(LOG_SCHEMA) - 4))]
    message = row_encoder.readable(pa.py_buffer(build_by_pyarrow(values).message))
    assert message is not None
    assert row_encoder.read_numbered_row(message, 0, 7) == (7, *values[0])
