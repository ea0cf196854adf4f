"""Counters by topic and group: the values of the windows, and counters beyond the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash.lives import run
from tests.loop_turns import LoopTurns

from timeball.broker.registry import rates as module
from timeball.broker.registry.rates import Rate, Rates, Stat, shares
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

NUMS = Stat.TOPIC_PUT_NUMS


def sample_each_second(rates: Rates, begin_ms: int, end_ms: int) -> None:
    """Let time pass, and sample the counters each second."""
    for now_ms in range(begin_ms, end_ms + 1, SECOND_MS):
        rates.sample(now_ms)


def started_rates() -> Rates:
    """Counters whose windows begin at 0 ms."""
    rates = Rates()
    rates.sample(0)
    return rates


def test_added_counts_are_in_every_window_at_once() -> None:
    rates = started_rates()
    rates.count_arrived("t", 3, 300)
    rates.count_arrived("t", 1, 100)
    assert rates.rate(NUMS, "t", rates.minute, 2_000) == Rate(4, 2.0, 2.0)
    assert rates.rate(Stat.TOPIC_PUT_SIZE, "t", rates.day, 4_000) == Rate(400, 100.0, 200.0)
    assert rates.rate(Stat.BROKER_PUT_NUMS, "", rates.minute, 0) == Rate(4, 0.0, 2.0), "no time has passed"
    assert rates.rate(NUMS, "nobody", rates.minute, 0) is None
    assert (rates.total(NUMS, "t"), rates.total(NUMS, "nobody")) == (4, 0)


def test_each_window_excludes_additions_that_are_older_than_it() -> None:
    rates = started_rates()
    rates.count_received("t", "g", 60, 600)

    def sums(now_ms: int) -> list[int]:
        rates.sample(now_ms)
        windows = (rates.minute, rates.hour, rates.day)
        window_rates = [rates.rate(Stat.GROUP_GET_NUMS, "t@g", window, now_ms) for window in windows]
        return [rate.sum for rate in window_rates if rate is not None]

    sample_each_second(rates, 1_000, MINUTE_MS)
    assert sums(MINUTE_MS) == [60, 60, 60]
    sample_each_second(rates, MINUTE_MS, 2 * MINUTE_MS)
    assert sums(2 * MINUTE_MS) == [0, 60, 60]
    for minute in range(2, 80):
        rates.sample(minute * MINUTE_MS)
    assert sums(80 * MINUTE_MS) == [0, 0, 60]
    for hour in range(2, 27):
        rates.sample(hour * HOUR_MS)
    assert sums(DAY_MS + 3 * HOUR_MS) == [0, 0, 0]


def test_a_counter_that_begins_within_a_window_counts_from_zero() -> None:
    rates = started_rates()
    rates.count_arrived("old", 1, 1)
    sample_each_second(rates, 1_000, 40_000)
    rates.count_arrived("new", 8, 1)
    assert rates.rate(NUMS, "new", rates.minute, 40_000) == Rate(8, 0.2, 8.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 30_000)), max_size=60))
def test_the_rate_of_the_minute_counts_additions_since_its_oldest_state(
    steps: list[tuple[str, int, int]],
) -> None:
    rates, now_ms, totals = started_rates(), 0, dict.fromkeys("abc", 0)
    states = [(0, dict.fromkeys("abc", 0))]  # the window's states: (time, totals), the oldest one first
    for topic, count, pause_ms in steps:
        rates.count_arrived(topic, count, 1)
        totals[topic] += count
        now_ms += pause_ms
        rates.sample(now_ms)
        if now_ms - states[-1][0] >= 10 * SECOND_MS:
            states = [*states, (now_ms, dict(totals))][-7:]
        _, oldest_totals = states[0]
        for name, total in totals.items():
            rate = rates.rate(NUMS, name, rates.minute, now_ms)
            assert (rate.sum if rate else 0) == total - oldest_totals[name]


# ---- the bound ------------------------------------------------------------------------------------------------


def test_at_the_limit_a_new_counter_is_not_counted_until_idle_ones_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNTERS_MAX", 4)
    rates = started_rates()
    for name in ("a", "b", "c", "d", "one too many"):
        rates.add(NUMS, name, 1)
    assert (len(rates), rates.rate(NUMS, "one too many", rates.minute, 0)) == (4, None)
    for minute in range(130):
        rates.sample(minute * MINUTE_MS)
        rates.add(NUMS, "a", 1)
        if minute == 60:
            rates.add(NUMS, "too early", 1)
    assert rates.total(NUMS, "too early") == 0
    now_ms = 130 * MINUTE_MS
    rates.sample(now_ms)
    for name in ("e", "f"):
        rates.add(NUMS, name, 5)
    assert (rates.total(NUMS, "a"), len(rates)) == (131, 3)
    for window in (rates.minute, rates.hour, rates.day):
        rate = rates.rate(NUMS, "f", window, now_ms)
        assert rate is not None and rate.sum == 5, (
            "nothing is left of the counter that had this position before"
        )


def test_at_the_limit_idle_counters_are_searched_once_and_not_for_each_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNTERS_MAX", 2)
    rates = started_rates()
    searches = []
    monkeypatch.setattr(rates.hour, "idle", lambda times: searches.append(1) or [False] * len(times))
    for number in range(100):
        rates.add(NUMS, str(number), 1)
    assert (len(searches), len(rates)) == (1, 2)


def test_counters_keep_their_values_after_others_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNTERS_MAX", 6)
    rates = started_rates()

    def got(group: str) -> tuple[int, int, int]:
        key = module.of_group("t", group)
        nums, sizes = rates.total(Stat.GROUP_GET_NUMS, key), rates.total(Stat.GROUP_GET_SIZE, key)
        return nums, sizes, rates.total(Stat.BROKER_GET_NUMS)

    for _ in range(3):
        rates.count_received("t", "a", 2, 100)
        rates.count_received("t", "a", 0, 0)
    assert got("a") == (6, 300, 6)
    assert rates.rate(Stat.GROUP_GET_SIZE, "t@a", rates.minute, 0) == Rate(300, 0.0, 100.0)
    rates.count_received("t", "b", 1, 10)
    rates.count_received("t", "c", 1, 10)
    assert got("c") == (1, 0, 8), "the seventh counter is over the limit"
    for minute in range(130):
        rates.sample(minute * MINUTE_MS)
        rates.count_received("t", "a", 1, 50)
    for _ in range(2):
        rates.count_received("t", "d", 3, 30)
    rates.count_received("t", "a", 1, 50)
    assert (got("b"), got("d"), got("a")) == ((0, 0, 145), (6, 60, 145), (137, 6_850, 145))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1_000])
def test_shares_yield_all_items_in_order_with_at_most_one_share_per_turn(count: int) -> None:
    turns = LoopTurns()

    async def walk() -> list[int]:
        items = []
        async for share in shares(range(count), 64):
            for item in share:
                turns.count()
                items.append(item)
        return items

    assert run(turns.most(walk())) == (list(range(count)), min(count, 64))


def test_items_added_during_the_loop_are_not_included() -> None:
    table = dict.fromkeys(range(5))

    async def walk() -> list[int]:
        items = []
        async for share in shares(table, 2):
            table[max(table) + 1] = None
            items += share
        return items

    assert run(walk()) == [0, 1, 2, 3, 4]
