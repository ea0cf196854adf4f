"""Horizons and budgets: arithmetic that must not be off by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from timeball.schedule.hour_log.placement import (
    FIRST,
    cut_to_budget,
    next_horizon,
)

DUES = st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=60).map(sorted)


@given(st.integers(0, 10**13), st.integers(-20_000, 20_000), st.integers(1_000, 60_000))
def test_the_horizon_moves_in_half_leads_and_never_back(now_ms: int, lead_ms: int, ahead_ms: int) -> None:
    current = (now_ms + lead_ms, 7)
    target = next_horizon(current, now_ms, ahead_ms)
    if lead_ms > ahead_ms // 2:
        assert target == current
    else:
        assert target == (now_ms + ahead_ms, 0)
        assert target > current


def test_the_first_horizon_is_below_everything() -> None:
    assert next_horizon(FIRST, 0, 10_000) == (10_000, 0)


@given(DUES, st.integers(1, 70))
def test_the_budget_is_used_and_kept(dues: list[int], rows_max: int) -> None:
    pairs = list(zip(dues, range(len(dues)), strict=True))
    high = (dues[-1] + 1, 0)
    cut = cut_to_budget(np.array(dues, np.int64), np.arange(len(dues)), high, rows_max)
    assert cut <= high
    assert sum(pair < cut for pair in pairs) == min(rows_max, len(pairs))


def test_a_budget_cuts_within_an_instant() -> None:
    assert cut_to_budget(np.full(10, 5), np.arange(20, 30), (6, 0), 4) == (5, 24)
