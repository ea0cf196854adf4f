"""Rows by value: the short way and the kernels' way say the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker import grouping
from timeball.broker.grouping import alike, codes_of, filled

VALUES = st.lists(st.sampled_from("abcd"), max_size=20)


@pytest.mark.parametrize("small_rows", [0, 256])
@given(values=VALUES)
def test_codes_name_distinct_values(values: list[str], small_rows: int) -> None:
    before, grouping.SMALL_ROWS = grouping.SMALL_ROWS, small_rows
    try:
        codes, names = codes_of(pa.array(values, pa.string()))
    finally:
        grouping.SMALL_ROWS = before
    assert [names[code] for code in codes] == values
    assert len(set(names)) == len(names) == len(set(values))


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_groups_hold_every_position_once_in_order(values: list[int]) -> None:
    groups = alike(np.array(values, dtype=np.int64))
    assert sorted(at for group in groups for at in group.tolist()) == list(range(len(values)))
    for group in groups:
        assert len({values[at] for at in group}) == 1
        assert group.tolist() == sorted(group.tolist())
    assert len(groups) == len(set(values))


def test_what_has_no_nulls_stays_what_it_is() -> None:
    column = pa.array([1, 2])
    assert filled(column, 0) is column
    assert filled(pa.array([1, None]), 7).to_pylist() == [1, 7]
