"""Tests of timeball.pipeline.narrow."""

from __future__ import annotations

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

from timeball.pipeline.narrow import Bounds, bounds, kinds

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
