"""The state a successor starts from, against a plain count of what has been sent."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from timeball.schedule.release_cursor import ReleaseCursor

# Few seconds, so that many promises share one; instants in any order, as after a clock that was set back.
DUES = st.lists(st.integers(0, 5_500), max_size=40)


def counted(dues: list[int]) -> ReleaseCursor:
    seconds = Counter(due // 1_000 for due in dues)
    last = max(seconds, default=0)
    return ReleaseCursor(last * 1_000, seconds[last])


def after(tick: ReleaseCursor, dues: list[int]) -> ReleaseCursor:
    return tick.after(np.array(dues, np.int64))


@given(DUES, st.lists(st.integers(0, 40), max_size=5))
def test_it_is_the_last_second_and_its_count_however_records_are_parted(
    dues: list[int], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), len(dues)]
    tick = ReleaseCursor()
    for begin, end in pairwise(bounds):
        before, tick = tick, after(tick, dues[begin:end])
        assert tick >= before, "it never goes back"
    assert tick == counted(dues)


@given(DUES, DUES)
def test_the_order_of_the_records_does_not_matter(first: list[int], then: list[int]) -> None:
    assert after(after(ReleaseCursor(), first), then) == after(after(ReleaseCursor(), then), first)


def test_what_came_too_late_leaves_it_as_it_is() -> None:
    tick = after(ReleaseCursor(), [7_100, 7_200, 8_000, 8_999])
    assert tick == ReleaseCursor(8_000, 2)
    assert after(tick, [7_999, 3]) == tick
    assert after(tick, [7_999, 8_500]) == ReleaseCursor(8_000, 3), (
        "late by milliseconds is of this second still"
    )


def test_a_state_that_counts_a_record_twice_is_another() -> None:
    """Its control: the checkpoint's place in the log matters, to the row."""
    dues = [1_000, 2_000, 2_500, 2_999]
    saved = after(ReleaseCursor(), dues[:2])
    assert after(saved, dues[2:]) == counted(dues)
    assert after(saved, dues[1:]) != counted(dues)
    assert after(saved, dues[3:]) != counted(dues)


def test_before_anything_is_sent() -> None:
    assert after(ReleaseCursor(), []) == ReleaseCursor(0, 0)
    assert after(ReleaseCursor(), [0]) == ReleaseCursor(0, 1)
