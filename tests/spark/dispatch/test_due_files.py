"""Tests of timeball.spark.dispatch: each due row is planned once, the earliest first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from hypothesis import example, given
from hypothesis import strategies as st

from timeball.model.message import TABLE_SCHEMA
from timeball.spark import dispatch
from timeball.spark.dispatch import (
    POINTER_SCHEMA,
    DueFiles,
    Span,
    count_rows,
    cut_into_tasks,
    encode_pointers,
    read_rows,
    window_end,
)

DUES = st.lists(st.integers(0, 40), max_size=30).map(sorted)
FILES = st.lists(DUES, max_size=4)


def spans(files: Sequence[Sequence[int]]) -> list[Span]:
    """The due rows of each file that has some. File i is called `f{i}`, and its rows begin at 100 * i."""
    return [Span(f"f{i}", 100 * i, np.array(dues, np.int64)) for i, dues in enumerate(files) if dues]


def positions(found: Sequence[Span]) -> list[tuple[str, int, int]]:
    """The (file, row, due time) of each row, sorted."""
    return sorted((s.uri, s.first_row + i, int(due)) for s in found for i, due in enumerate(s.due_ms))


@example([[0, 1], [0, 0]], 2)  # more rows than a task has at one instant, and a row after it
@given(FILES, st.integers(1, 20))
def test_tasks_have_each_row_once_in_order_of_due_time(files: list[list[int]], rows: int) -> None:
    planned = cut_into_tasks(spans(files), rows)
    assert positions([span for task in planned for span in task]) == positions(spans(files))
    ends = [(min(int(s.due_ms[0]) for s in task), max(int(s.due_ms[-1]) for s in task)) for task in planned]
    for (_, last), (first, _) in itertools.pairwise(ends):
        assert last <= first
    assert all(0 < count_rows(task) <= 1.5 * rows for task in planned)


def test_due_time_with_too_many_rows_is_cut_by_rows() -> None:
    planned = cut_into_tasks(spans([[5] * 100, [5] * 30]), 40)
    assert sorted(count_rows(task) for task in planned) == [20, 30, 40, 40]


@pytest.mark.parametrize(
    ("first_row", "rows", "expected"),
    [
        (0, 100, [100, 100, 50]),
        (170, 100, [30, 100, 100, 20]),
        (170, 250, [30, 200, 20]),
        (0, 30, [30] * 8 + [10]),
    ],
)
def test_one_file_is_cut_where_its_row_groups_begin(
    first_row: int, rows: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ROW_GROUP_ROWS", 100)
    span = Span("f", first_row, np.repeat(np.int64(5), 250))
    planned = cut_into_tasks([span], rows)
    assert [count_rows(task) for task in planned] == expected
    assert positions([part for task in planned for part in task]) == positions([span])


@given(FILES, st.integers(1, 20))
def test_window_ends_before_too_many_rows(files: list[list[int]], rows: int) -> None:
    result, high_ms = spans(files), 41
    end_ms = window_end(result, rows, high_ms)
    due = sorted(due for dues in files for due in dues)
    before = sum(1 for one in due if one < end_ms)
    assert end_ms <= high_ms
    assert before == len(due) if end_ms == high_ms else before > 0
    assert before <= rows or len(set(due[:before])) == 1, "but never cut within an instant"


def test_pointers_name_file_first_row_and_rows() -> None:
    batch = encode_pointers(spans([[1, 2], [], [3]]))
    assert batch.schema == POINTER_SCHEMA
    assert batch.to_pylist() == [
        {"uri": "f0", "first_row": 0, "rows": 2},
        {"uri": "f2", "first_row": 200, "rows": 1},
    ]


# ---- files --------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Version 1 has a file of 10,000 rows in row groups of 1,000, three rows for each ms.

    Version 2 has a second file, whose rows are due later.
    """
    uri = str(tmp_path / "pending")
    DeltaTable.create(uri, TABLE_SCHEMA)
    for first_ms in (1_000, 50_000):
        due = first_ms + np.arange(10_000) // 3
        columns = {"due_ms": due, "seq": np.arange(10_000), "topic": ["t"] * 10_000, "body": [b"b"] * 10_000}
        rows = [pa.array(columns.get(f.name, [None] * 10_000), f.type) for f in TABLE_SCHEMA]
        write_deltalake(
            uri,
            pa.table(rows, TABLE_SCHEMA),
            mode="append",
            writer_properties=WriterProperties(max_row_group_size=1_000),
        )
    return uri


@pytest.mark.parametrize(
    ("low_ms", "high_ms"), [(1_000, 1_001), (1_999, 2_500), (0, 1 << 40), (4_333, 4_334)]
)
def test_rows_due_in_a_window_are_found(table: str, low_ms: int, high_ms: int) -> None:
    files = DueFiles(table)
    files.use_version(1)
    due = 1_000 + np.arange(10_000) // 3
    expected = np.flatnonzero((due >= low_ms) & (due < high_ms))
    (span,) = files.between(low_ms, high_ms)
    assert span.first_row == expected[0]
    assert span.due_ms.tolist() == due[expected].tolist()
    rows = read_rows(span.uri, span.first_row, len(span.due_ms), ["seq", "due_ms"])
    assert rows.column("seq").to_pylist() == expected.tolist()
    assert rows.column("due_ms").to_pylist() == due[expected].tolist()


def test_window_between_files_finds_no_rows(table: str) -> None:
    files = DueFiles(table)
    files.use_version(2)
    assert files.between(10_000, 40_000) == []
    assert files.between(4_400, 50_000) == []
    assert len(files.between(0, 1 << 40)) == 2


def test_newer_version_is_used_after_use_version(table: str) -> None:
    files = DueFiles(table)
    files.use_version(1)
    assert files.between(50_000, 50_100) == []
    files.use_version(2)
    assert count_rows(files.between(50_000, 50_100)) == 300


def test_columns_of_earlier_row_groups_are_dropped(table: str) -> None:
    files = DueFiles(table)
    files.use_version(2)
    files.between(1_000, 1_100)
    (known,) = files._columns.values()
    assert known.due_ms
    files.between(2_000, 2_100)
    assert not [group for group in known.due_ms if known.high[group] < 2_000]
    files.between(10_000, 60_000)
    assert len(files._columns) == 1
