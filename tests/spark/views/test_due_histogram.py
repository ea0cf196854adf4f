"""Tests of timeball.spark.views.due_histogram."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.spark.views import due_histogram
from timeball.spark.views.due_histogram import (
    Load,
    LoadSum,
    Peak,
    Unit,
    bar_name,
    from_due_ms,
    merge,
    share_of_difference,
)

DUE = st.lists(st.tuples(st.integers(0, 400_000), st.sampled_from("abc")), max_size=60)


def load_of(rows: list[tuple[int, str]]) -> Load:
    """Build the load of rows (due time in ms, topic)."""
    due_ms = np.array([due for due, _ in rows], np.int64)
    return from_due_ms(due_ms, pa.array([topic for _, topic in rows], pa.string()))


def cells_of(load: Load) -> dict[tuple[str, int], int]:
    """Get {(topic, second): rows}."""
    names = [load.topics[code] for code in load.topic.tolist()]
    return dict(zip(zip(names, load.second.tolist()), load.rows.tolist(), strict=True))


@given(DUE)
def test_each_row_is_counted_in_its_second_and_topic(rows: list[tuple[int, str]]) -> None:
    load = load_of(rows)
    assert cells_of(load) == Counter((topic, due // 1_000) for due, topic in rows)
    assert load.total == len(rows)
    assert np.all(np.diff(load.second) >= 0)


@given(DUE, st.integers(1, 9))
def test_a_load_that_is_added_in_parts_equals_the_load_of_all_rows(
    rows: list[tuple[int, str]], step: int
) -> None:
    counting = LoadSum()
    for begin in range(0, len(rows), step):
        counting.add(load_of(rows[begin : begin + step]))
    assert cells_of(counting.result()) == cells_of(load_of(rows))
    assert cells_of(merge([load_of(rows), load_of(rows)])) == {
        cell: 2 * count for cell, count in cells_of(load_of(rows)).items()
    }


@given(DUE, st.sampled_from([Unit.SECOND, Unit.MINUTE, Unit.HOUR, Unit.DAY]))
def test_a_curve_counts_the_rows_of_each_bar(rows: list[tuple[int, str]], unit: Unit) -> None:
    curve = load_of(rows).curve(unit)
    width_ms = due_histogram.UNIT_S[unit] * 1_000
    expected = Counter(due // width_ms * width_ms // 1_000 for due, _ in rows)
    assert dict(zip(curve.start_s.tolist(), curve.rows.tolist(), strict=True)) == expected
    assert curve.start_s.tolist() == sorted(expected)


@pytest.mark.parametrize(
    ("unit", "name"),
    [
        (Unit.SECOND, "1970-01-02T01:01:01"),
        (Unit.MINUTE, "1970-01-02T01:01"),
        (Unit.HOUR, "1970-01-02T01"),
        (Unit.DAY, "1970-01-02"),
    ],
)
def test_a_bar_is_named_by_its_beginning_in_utc(unit: Unit, name: str) -> None:
    assert bar_name(90_061_000, unit) == name


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(48, Unit.SECOND), (49, Unit.MINUTE), (3_000, Unit.HOUR), (60 * 3_600, Unit.DAY)],
)
def test_auto_chooses_the_finest_unit_with_at_most_48_bars(seconds: int, unit: Unit) -> None:
    assert from_due_ms(np.arange(seconds) * 1_000).curve().unit is unit
    assert from_due_ms(np.array([], np.int64)).curve().unit is Unit.SECOND


@given(DUE, st.integers(1, 5))
def test_peaks_are_the_largest_seconds_of_different_minutes(rows: list[tuple[int, str]], count: int) -> None:
    rows_of_second = Counter(due // 1_000 for due, _ in rows)
    rows_of_minute = Counter(due // 60_000 for due, _ in rows)
    largest_of_minute: dict[int, int] = {}
    for second in sorted(rows_of_second):
        largest = largest_of_minute.get(second // 60)
        if largest is None or rows_of_second[second] > rows_of_second[largest]:
            largest_of_minute[second // 60] = second
    expected = sorted(largest_of_minute.values(), key=lambda second: (-rows_of_second[second], second))
    assert load_of(rows).peaks(count) == [
        Peak(second * 1_000, rows_of_second[second], rows_of_minute[second // 60])
        for second in expected[:count]
    ]


def test_a_load_is_split_by_topic_the_largest_first() -> None:
    load = load_of([(1_000, "a"), (1_500, "b"), (2_000, "b")])
    assert {name: part.total for name, part in load.by_topic().items()} == {"b": 2, "a": 1}
    assert list(load.by_topic()) == ["b", "a"]
    assert cells_of(load.select_topics(["a", "nobody"])) == {("a", 1): 1}
    assert load.select_topics([]).total == 0


def test_a_load_of_a_hundred_thousand_topics_is_split_by_topic() -> None:
    names = [f"t{number}" for number in range(100_000)]
    load = from_due_ms(np.tile(np.arange(5) * 1_000, 100_000), pa.array(np.repeat(names, 5)))
    parts = load.by_topic()
    assert len(parts) == 100_000
    assert all(part.second.tolist() == [0, 1, 2, 3, 4] for part in list(parts.values())[::9_999])


def test_between_includes_its_first_second_and_excludes_its_last() -> None:
    load = from_due_ms(np.arange(10) * 1_000)
    assert load.between(3, 7).second.tolist() == [3, 4, 5, 6]
    assert load.between(from_s=8).total == 2
    assert load.between(until_s=1).total == 1


def test_too_many_seconds_become_minutes_and_no_row_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_histogram, "CELLS_MAX", 100)
    counting = LoadSum()
    for begin in range(0, 5_000, 50):
        counting.add(from_due_ms(np.arange(begin, begin + 50) * 1_000))
    load = counting.result()
    assert (load.width_s, load.total, load.cells) == (60, 5_000, 84)
    assert load.curve(Unit.SECOND).unit is Unit.MINUTE, "not finer than the cells"
    assert from_due_ms(np.arange(200) * 60_000).width_s == 3_600


def test_the_share_of_difference_is_0_for_equal_curves_and_1_if_one_is_empty() -> None:
    forecast = from_due_ms(np.array([0, 1_000, 1_000, 60_000]))
    assert share_of_difference(forecast, forecast, Unit.SECOND) == 0
    actual = from_due_ms(np.array([0, 1_000, 2_000, 61_000]))
    # 4 of 8 rows: one row each at 1, 2, 60 and 61 s.
    assert share_of_difference(forecast, actual, Unit.SECOND) == 0.5
    assert share_of_difference(forecast, actual, Unit.MINUTE) == 0
    assert share_of_difference(forecast, Load(), Unit.DAY) == 1
    assert share_of_difference(Load(), Load(), Unit.DAY) == 0
