"""Tests of timeball.spark.source.pushdown."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from timeball.spark.source.pushdown import Bounds, RowFilter, bounds, kinds, row_filter, topics

SEQ = ("seq",)
COMPARE = {
    EqualTo: int.__eq__,
    GreaterThan: int.__gt__,
    GreaterThanOrEqual: int.__ge__,
    LessThan: int.__lt__,
    LessThanOrEqual: int.__le__,
}


@given(st.lists(st.tuples(st.sampled_from(list(COMPARE)), st.integers(-20, 20))), st.integers(-25, 25))
def test_bounds_keep_exactly_what_the_filters_keep(chosen: list[tuple[type, int]], value: int) -> None:
    filters: list[Filter] = [kind(SEQ, limit) for kind, limit in chosen]
    kept = all(COMPARE[kind](value, limit) for kind, limit in chosen)
    begin, end = bounds(filters, "seq").clip(-100, 100)
    assert (begin <= value < end) == kept


def test_other_columns_and_filters_narrow_nothing() -> None:
    filters: list[Filter] = [
        EqualTo(("topic",), 5),
        Not(EqualTo(SEQ, 5)),
        EqualTo(SEQ, True),
        EqualTo(("a", "seq"), 5),
        GreaterThanOrEqual(SEQ, datetime(2030, 1, 1, tzinfo=UTC)),  # Spark's form of a timestamp
        LessThan(("due",), datetime(2030, 1, 1, tzinfo=UTC)),
    ]
    assert bounds(filters, "seq") == Bounds()


@pytest.mark.parametrize(
    ("limits", "file", "kept"),
    [
        (Bounds(), (1, 2), True),
        (Bounds(low=3), (1, 2), False),
        (Bounds(low=2), (1, 2), True),
        (Bounds(high=0), (1, 2), False),
        (Bounds(high=1), (1, 2), True),
        (Bounds(low=3, high=4), (None, None), True),
    ],
)
def test_a_file_is_left_out_only_if_no_row_can_match(
    limits: Bounds, file: tuple[int | None, int | None], kept: bool
) -> None:
    assert limits.may_hold(*file) is kept


def test_kinds_are_what_option_and_filters_share() -> None:
    assert kinds(None, []) is None
    assert kinds(None, [EqualTo(("kind",), 2)]) == (2,)
    assert kinds((2, 3), [In(("kind",), (3, 4))]) == (3,)
    assert kinds((2,), [EqualTo(("kind",), 3)]) == ()
    assert kinds((2,), [GreaterThan(("kind",), 1)]) == (2,)


def test_topics_are_what_option_and_filters_share() -> None:
    topic = ("topic",)
    assert topics(None, []) is None
    assert topics(None, [EqualTo(SEQ, 5), GreaterThan(topic, "a")]) is None
    assert topics("a", [In(topic, ("a", "b"))]) == {"a"}
    assert topics(None, [EqualTo(topic, "a"), EqualTo(topic, "b")]) == frozenset()


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.sampled_from([None, "a", "b"]))),
    st.lists(st.tuples(st.sampled_from(list(COMPARE)), st.integers(0, 9)), max_size=3),
    st.sampled_from([None, "a"]),
)
def test_rows_are_kept_exactly_if_all_filters_hold(
    rows: list[tuple[int | None, str | None]], chosen: list[tuple[type, int]], topic: str | None
) -> None:
    filters: list[Filter] = [kind(("due_ms",), limit) for kind, limit in chosen]
    batch = pa.record_batch(
        {
            "due_ms": pa.array([due for due, _ in rows], pa.int64()),
            "topic": pa.array([name for _, name in rows], pa.string()),
        }
    )
    result = row_filter(("due_ms", "seq"), topic, filters).apply(batch)
    kept = [
        (due, name)
        for due, name in rows
        if (not chosen or (due is not None and all(COMPARE[kind](due, limit) for kind, limit in chosen)))
        and topic in (None, name)
    ]
    assert [(row["due_ms"], row["topic"]) for row in result.to_pylist()] == kept


def test_only_columns_with_a_bound_are_looked_at() -> None:
    assert row_filter(("due_ms", "seq"), None, []).columns == []
    assert row_filter(("due_ms", "seq"), "t", [EqualTo(SEQ, 5)]).columns == ["seq", "topic"]
    assert RowFilter().range("seq") == Bounds()
