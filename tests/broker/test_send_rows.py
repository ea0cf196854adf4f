"""Rows of sends as one batch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.admission import SEND_COLUMNS
from timeball.broker.send_rows import COLUMNS, NAMES, Row, batch_of

NUMBER = st.one_of(st.none(), st.integers(0, 2**31 - 1))
TEXT = st.one_of(st.none(), st.text(max_size=3))


def values_of(name: str) -> st.SearchStrategy[Any]:
    if name == "body":
        return st.binary(max_size=3)
    return NUMBER if pa.types.is_integer(COLUMNS[name]) else TEXT


ROWS = st.lists(st.tuples(*(values_of(name) for name in NAMES)), min_size=1, max_size=5)


def test_the_columns_are_the_brokers() -> None:
    assert {name: SEND_COLUMNS[name] for name in COLUMNS} == COLUMNS


@given(rows=ROWS)
def test_a_batch_says_what_its_rows_said(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert batch.num_rows == len(rows)
    for at, name in enumerate(NAMES):
        given = [row[at] for row in rows]
        if name in batch.schema.names:
            assert batch.column(name).type == COLUMNS[name]
            assert batch.column(name).to_pylist() == given
        else:
            assert given == [None] * len(rows)


def test_a_number_out_of_range_is_no_batch() -> None:
    row = tuple(
        2**40 if name == "queue_id" else "x" if COLUMNS[name] == pa.string() else None for name in NAMES
    )
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        batch_of([row])
