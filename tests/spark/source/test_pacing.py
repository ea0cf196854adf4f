"""Tests of timeball.spark.source.streams: when an epoch starts, its pieces, and the share of each group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from timeball.io.clock import ManualClock
from timeball.spark.source.options import read_options
from timeball.spark.source.pacing import Pace, divide_rows, split_range


def test_a_few_rows_wait_for_their_time_and_many_do_not() -> None:
    clock = ManualClock()
    options = {"min_rows_per_batch": "100", "max_trigger_delay_ms": "1000", "few_rows": "10"}
    pace = Pace(read_options(options), clock)
    assert pace.is_worth_a_batch(100) and not pace.is_worth_a_batch(99)
    clock.advance(1_000)
    assert pace.is_worth_a_batch(10) and not pace.is_worth_a_batch(9)
    pace.begin_batch()
    assert not pace.is_worth_a_batch(10)


@given(st.integers(0, 1000), st.integers(-5, 1000), st.integers(1, 300))
def test_pieces_cover_the_range_once(begin: int, span: int, rows: int) -> None:
    parts = split_range(begin, begin + span, rows)
    covered = [seq for low, high in parts for seq in range(low, high)]
    assert covered == list(range(begin, begin + span))
    assert all(0 < high - low <= rows for low, high in parts)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 10**6)), st.integers(0, 10**6))
def test_shares_use_the_limit_and_no_part_gives_more_than_it_has(lag: dict[int, int], rows: int) -> None:
    taken = divide_rows(lag, rows)
    assert sum(taken.values()) == min(rows, sum(lag.values()))
    assert all(0 <= taken[queue] <= lag[queue] for queue in lag)


def test_shares_are_fair() -> None:
    assert divide_rows({0: 900, 1: 100, 2: 0}, 100) == {0: 90, 1: 10, 2: 0}
    assert divide_rows({("g1", 0): 10, ("g2", 0): 30}, 4) == {("g1", 0): 1, ("g2", 0): 3}
