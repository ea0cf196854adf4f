"""The arithmetic of hops: what `store` relies on when it opens queues by the ends of hops alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.limits import DAY_MS, DELAY_MS_MAX, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.schedule.level_cascade.levels import DURATION_MS, NAMES, first, plan, rest
from timeball.schedule.level_cascade.placement import (
    DRIFT_MS,
    LEAD_MS_MIN,
    NEAR,
    QUEUES,
    enter,
    first_due_ms,
    following,
    is_last,
    lead_ms_of,
)

NOW = 1_700_000_000_000
REMAINING = st.one_of(
    st.integers(-DAY_MS, 30 * SECOND_MS), st.integers(0, 3 * DAY_MS), st.integers(0, DELAY_MS_MAX)
)
LEADS = st.sampled_from([1, 1_000, 4_000, 10_000, 60_000]).map(lead_ms_of)
# A list made for a remaining time, and how long ago that was.
PROMISES = st.tuples(REMAINING, st.integers(0, 2 * HOUR_MS) | st.integers(0, 3_000), st.integers(0, 8))


def columns(promises: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(due_ms, what is left of a list that is as old as that, after so many of its levels)."""
    due = NOW + np.array([remaining for remaining, _, _ in promises])
    hops = plan(due - NOW + np.array([ago for _, ago, _ in promises]))
    for at, (_, _, taken) in enumerate(promises):
        for _ in range(taken):
            hops[at] = rest(hops[at : at + 1])[0]
    return due, hops


@given(promises=st.lists(PROMISES, min_size=1, max_size=20), lead_ms=LEADS)
def test_where_a_promise_waits(promises: list[tuple[int, int, int]], lead_ms: int) -> None:
    due, hops = columns(promises)
    entered = enter(due, hops, NOW, lead_ms)
    for due_ms, queue, hop_end_ms in zip(
        due.tolist(), entered.queue.tolist(), entered.hop_end_ms.tolist(), strict=True
    ):
        assert 0 <= queue < QUEUES
        assert (queue == NEAR) == (due_ms - NOW <= lead_ms)
        assert hop_end_ms == NOW + int(DURATION_MS[(queue + 1) // 2])
        if queue == NEAR:
            continue
        if is_last(queue):
            assert due_ms - lead_ms <= hop_end_ms <= due_ms + DRIFT_MS
            # Opened half the lead early at the latest, and then it is not late.
            assert hop_end_ms - lead_ms // 2 < due_ms
        else:
            assert hop_end_ms < due_ms - lead_ms
        assert due_ms >= first_due_ms(queue, hop_end_ms, lead_ms)


@given(promises=st.lists(PROMISES, min_size=1, max_size=20), lead_ms=LEADS)
def test_a_list_that_fits_is_kept(promises: list[tuple[int, int, int]], lead_ms: int) -> None:
    due, hops = columns(promises)
    found = following(due, hops, NOW)
    level = first(hops)
    kept = (level > 0) & (NOW + DURATION_MS[level] <= due + DRIFT_MS)
    assert np.array_equal(found[kept], hops[kept])
    assert np.array_equal(found[~kept], plan(due - NOW)[~kept])
    far = due - NOW > lead_ms
    assert np.array_equal(enter(due, hops, NOW, lead_ms).left[far], rest(found)[far])


@given(
    remaining_ms=st.integers(0, 2 * DAY_MS),
    late_ms=st.lists(st.integers(0, 400) | st.integers(0, HOUR_MS), min_size=1, max_size=12),
    lead_ms=LEADS,
)
def test_however_late_the_hops_are_the_last_is_opened_in_time(
    remaining_ms: int, late_ms: list[int], lead_ms: int
) -> None:
    """Each hop begins as late as it likes; the last one must be near before the instant, or when the hop was over."""
    now_ms, due_ms, turn = NOW, np.array([NOW + remaining_ms]), 0
    hops = plan(due_ms - now_ms)
    while True:
        entered = enter(due_ms, hops, now_ms, lead_ms)
        queue, hop_end_ms = int(entered.queue[0]), int(entered.hop_end_ms[0])
        if queue == NEAR:
            break
        hops = entered.left
        if is_last(queue):
            assert hop_end_ms - lead_ms // 2 <= due_ms[0] - DRIFT_MS
            break
        now_ms, turn = hop_end_ms + late_ms[turn % len(late_ms)], turn + 1
    assert turn <= 40


def test_a_list_is_used_up_as_it_was_made_when_hops_are_a_little_late() -> None:
    """2 h 59 min 59 s, each hop 100 ms late: 2h 50m 9m, and the seconds are near already."""
    now_ms, due_ms = NOW, np.array([NOW + 3 * HOUR_MS - SECOND_MS])
    hops, waited = plan(due_ms - now_ms), []
    while (entered := enter(due_ms, hops, now_ms, 10_000)).queue[0] != NEAR:
        waited.append(NAMES[(int(entered.queue[0]) - 1) // 2])
        if is_last(int(entered.queue[0])):
            break
        now_ms, hops = int(entered.hop_end_ms[0]) + 100, entered.left
    assert waited == ["2h", "50m", "9m", "50s"]


def test_after_a_long_stop_the_list_is_made_anew() -> None:
    """An hour was left as 50m 9m 50s 9s; half of it went by while nobody looked."""
    due_ms = np.array([NOW + 30 * MINUTE_MS])
    hops = plan(np.array([HOUR_MS - SECOND_MS]))
    entered = enter(due_ms, hops, NOW, 10_000)
    assert NAMES[(int(entered.queue[0]) - 1) // 2] == "30m"


@pytest.mark.parametrize("ahead_ms", [1_000, 4_000, 10_000])
def test_the_lead(ahead_ms: int) -> None:
    assert lead_ms_of(ahead_ms) == max(ahead_ms, LEAD_MS_MIN)
