"""Columns, compared with plain lists: select, join, find runs, and read the first records of sorted ones."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.message import Int64Array
from timeball.schedule import locations
from timeball.schedule.locations import Waiting, leading, runs_of, with_column


def waiting(numbers: list[int]) -> Waiting:
    column = np.array(numbers, np.int64)
    return Waiting(column * 10, column, column * 2)


def test_part_and_joined_select_and_join_all_columns() -> None:
    part = waiting([1, 2, 3]).part(np.array([True, False, True]))
    both = Waiting.joined([part, waiting([4])])
    assert len(both) == 3
    assert [both.due_ms.tolist(), both.seq.tolist(), both.row_seq.tolist()] == [
        [10, 30, 40],
        [1, 3, 4],
        [2, 6, 8],
    ]
    assert Waiting.joined([part]) is part


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_runs_of_finds_runs_of_equal_values(values: list[int]) -> None:
    begins, counts = runs_of(np.array(values, np.int64))
    assert counts.tolist() == [len(list(group)) for _, group in groupby(values)]
    assert begins.tolist() == [0, *np.cumsum(counts)[:-1].tolist()]


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(0, 21), st.integers(1, 9), st.integers(0, 40))
def test_leading_finds_the_first_records_in_few_reads(
    due_times: list[int], before_ms: int, probe: int, begin: int
) -> None:
    records = np.zeros(len(due_times), np.dtype([("due_ms", "<i8")]))
    records["due_ms"] = sorted(due_times)
    begin, reads = min(begin, len(due_times)), list[int]()

    def read(low: int, high: int) -> Int64Array:
        reads.append(high - low)
        return records[low:high]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locations, "PROBE", probe)
        first_due_times = leading(read, "due_ms", begin, len(due_times), before_ms)["due_ms"].tolist()
    assert first_due_times == [due for due in sorted(due_times)[begin:] if due < before_ms]
    assert len(reads) <= 3, "an empty read, the probe, and one read of the other records"


def test_with_column_keeps_the_position_of_the_column() -> None:
    rows = pa.RecordBatch.from_pydict({"a": [1], "b": [2]})
    assert with_column(rows, "a", pa.array([7])).to_pydict() == {"a": [7], "b": [2]}


@given(
    st.lists(st.lists(st.integers(-5, 5), max_size=7), max_size=20),
    st.lists(st.integers(0, 30), min_size=20, max_size=20),
)
def test_growing_columns_contain_copies_of_added_rows(
    batches: list[list[int]], reserved_rows: list[int]
) -> None:
    growing, expected = locations.GrowingColumns(2), []
    for batch, rows_max in zip(batches, reserved_rows, strict=False):
        growing.reserve(rows_max)
        values = np.array(batch, np.int64)
        growing.add(values, values % 2 == 1)
        values[:] = 99
        expected += batch
    first, second = growing.columns()
    assert (first.tolist(), second.tolist()) == (expected, [value % 2 for value in expected])
    assert len(growing) == len(expected)
    growing.replace(first[:1], second[:1])
    growing.add(np.array([7]), np.array([8]))
    assert [column.tolist() for column in growing.columns()] == [
        [*expected[:1], 7],
        [*[value % 2 for value in expected[:1]], 8],
    ]
