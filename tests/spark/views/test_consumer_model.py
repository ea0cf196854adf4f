"""Tests of timeball.spark.views.forecast against consumers that take one row at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.errors import RequestError
from timeball.spark.views import forecast
from timeball.spark.views.due_histogram import Load, from_due_ms
from timeball.spark.views.forecast import (
    OTHER_TOPICS,
    Outcome,
    queue,
    rate_needed,
    serve,
    spread,
)

DUE = st.lists(st.integers(0, 30_000), min_size=1, max_size=80)
RATES = st.sampled_from([0.5, 1.0, 3.0, 10.0, 200.0])


def one_by_one(due_ms: list[int], rate: float) -> list[float]:
    """Compute the lateness in seconds of each row for a consumer that needs 1/rate seconds per row."""
    free_s, late_s = 0.0, []
    for due in sorted(due_ms):
        free_s = max(free_s, due / 1_000) + 1 / rate
        late_s.append(free_s - due / 1_000)
    return late_s


@given(DUE, RATES)
def test_lateness_is_right_to_a_second(due_ms: list[int], rate: float) -> None:
    outcome = queue(from_due_ms(np.array(due_ms)), rate).outcome()
    late_s = one_by_one(due_ms, rate)
    assert outcome.lateness_max_ms / 1_000 == pytest.approx(max(late_s), abs=1.001)
    assert outcome.lateness_p50_ms / 1_000 == pytest.approx(float(np.median(late_s)), abs=1.001 + 1 / rate)
    assert outcome.rows == len(due_ms)


@given(DUE, RATES)
def test_rows_due_on_whole_seconds_are_right_exactly(due_ms: list[int], rate: float) -> None:
    whole = [due // 1_000 * 1_000 for due in due_ms]
    outcome = queue(from_due_ms(np.array(whole)), rate).outcome()
    assert outcome.lateness_max_ms == pytest.approx(max(one_by_one(whole, rate)) * 1_000, abs=1)


@given(DUE, RATES)
def test_more_consumers_are_never_later(due_ms: list[int], rate: float) -> None:
    load = from_due_ms(np.array(due_ms))
    slow, fast = queue(load, rate).outcome(), queue(load, rate * 1.5).outcome()
    assert fast.lateness_max_ms <= slow.lateness_max_ms
    assert fast.backlog_max <= slow.backlog_max
    assert slow.lateness_p50_ms <= slow.lateness_p99_ms <= slow.lateness_max_ms


def test_million_rows_due_at_once_need_rows_divided_by_rate() -> None:
    """At 5,000 a second: 200 s for the last of them, half of them within 100 s, all gone 200 s after nine."""
    nine_ms = 9 * 3_600_000
    outcome = queue(spread(1_000_000, nine_ms), 5_000).outcome()
    assert outcome == Outcome(
        rate=5_000,
        rows=1_000_000,
        backlog_max=1_000_000,
        backlog_max_at_ms=nine_ms,
        lateness_max_ms=200_000,
        lateness_p50_ms=100_000,
        lateness_p99_ms=198_000,
        caught_up_ms=nine_ms + 200_000,
    )


def test_the_largest_backlog_ends_when_nothing_is_left_of_it() -> None:
    """10 rows at 0 s, at 2 a second, end at 5 s; 2 more at 4 s make that 6 s; those at 100 s are another matter."""
    load = from_due_ms(np.array([0] * 10 + [4_000] * 2 + [100_000] * 3))
    outcome = queue(load, 2).outcome()
    assert (outcome.backlog_max, outcome.backlog_max_at_ms, outcome.caught_up_ms) == (10, 0, 6_000)


def test_empty_load_has_no_lateness() -> None:
    assert queue(Load(), 5).outcome() == Outcome(5, 0, 0, None, 0, 0, 0, None)
    assert serve(Load(), {OTHER_TOPICS: 5}).lateness_max_ms == 0
    assert queue(Load(), 5).backlog()[0].tolist() == []


def test_initial_backlog_is_processed_first() -> None:
    load = from_due_ms(np.array([10_000]))
    assert queue(load, 1, backlog=20, from_s=0).outcome().lateness_max_ms == 20_000
    assert queue(load, 1, backlog=20, from_s=0).outcome().caught_up_ms == 21_000
    assert queue(Load(), 1, backlog=20, from_s=7).outcome().caught_up_ms == 27_000
    assert (
        queue(load, 1, backlog=20).outcome().backlog_max == 21
    )  # nobody said since when: it is there by then


@given(DUE, RATES)
def test_the_drawn_backlog_begins_and_ends_with_nothing_and_has_the_same_top(
    due_ms: list[int], rate: float
) -> None:
    made = queue(from_due_ms(np.array(due_ms)), rate)
    at, rows = made.backlog()
    assert np.all(np.diff(at) >= 0)
    assert rows[0] == 0 and rows[-1] == pytest.approx(0, abs=1e-6)
    assert round(float(rows.max())) == made.outcome().backlog_max


def by_topic() -> Load:
    due_ms = np.array([0] * 6 + [0] * 4 + [5_000] * 2)
    return from_due_ms(due_ms, pa.array(["a"] * 6 + ["b"] * 4 + ["c"] * 2))


def test_a_topic_with_consumers_of_its_own_leaves_the_others_alone() -> None:
    result = serve(by_topic(), {"a": 1, OTHER_TOPICS: 2})
    assert result.queues["a"].lateness_max_ms == 6_000
    assert (result.queues[OTHER_TOPICS].rows, result.queues[OTHER_TOPICS].lateness_max_ms) == (6, 2_000)
    assert (result.lateness_max_ms, result.unserved) == (6_000, {})
    # In the first second of lateness end 5 rows (of a, b, c: 1, 2, 2), then 3 a second: the sixth of twelve at 4/3.
    assert result.lateness_p50_ms == 1_333


def test_topics_that_nobody_consumes_are_named() -> None:
    result = serve(by_topic(), {"a": 10, "nobody sent": 3})
    assert result.unserved == {"b": 4, "c": 2}
    assert result.queues["nobody sent"].rows == 0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_rate_that_is_not_positive_is_refused(rate: float) -> None:
    with pytest.raises(RequestError, match="topic a: it must be above 0"):
        serve(by_topic(), {"a": rate})


def test_backlog_without_a_single_queue_is_refused() -> None:
    with pytest.raises(RequestError, match="a backlog belongs to one queue"):
        serve(by_topic(), {"a": 1, "b": 1}, backlog=3)
    assert serve(by_topic(), {"a": 1, OTHER_TOPICS: 1}, backlog=3).queues["a"].rows == 6


@given(DUE, st.integers(100, 20_000))
def test_the_rate_that_is_needed_is_enough_and_less_is_not(due_ms: list[int], most_ms: int) -> None:
    load = from_due_ms(np.array(due_ms))
    rate = rate_needed(load, most_ms)
    assert queue(load, rate).outcome().lateness_max_ms <= most_ms + 1
    assert queue(load, rate * 0.99).outcome().lateness_max_ms >= most_ms - 1
    assert rate_needed(Load(), most_ms) == 0


@given(st.integers(0, 5_000), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_extra_load_is_all_there_and_even(rows: int, at_ms: int, over_ms: int) -> None:
    load = spread(rows, at_ms, over_ms)
    assert load.total == rows
    if rows:
        seconds = load.second * 1_000
        assert at_ms - 1_000 < seconds.min() and seconds.max() <= max(at_ms, at_ms + over_ms)
    if over_ms and rows:
        middle = load.between(until_s=(at_ms + over_ms // 2) // 1_000)
        assert abs(middle.total - rows / 2) <= rows * 1_000 / over_ms + 2


def test_an_extra_load_over_years_has_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "CELLS_MAX", 1_000)
    load = spread(10**12, 0, 3_600_000 * 24 * 3_650)
    assert (load.total, load.cells) == (10**12, 1_000)
    with pytest.raises(RequestError):
        spread(-1, 0)
