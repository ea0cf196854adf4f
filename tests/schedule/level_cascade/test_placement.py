"""The arithmetic of hops: the bounds that allow the backlog to open queues by the ends of hops alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.config import Settings
from timeball.model.limits import DAY_MS, DELAY_MS_MAX, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.schedule.delay_levels import LevelTable
from timeball.schedule.level_cascade import (
    DRIFT_MS,
    DURATION_MS,
    HOPS_MAX,
    LEAD_MS_MIN,
    NAMES,
    NEAR,
    QUEUES,
    first_due_ms,
    first_level,
    fitting_lists,
    holds_last_hops,
    lead_ms_of,
    levels_after_first,
    place,
    plan,
)

NOW = 1_700_000_000_000
REMAINING = st.one_of(
    st.integers(-DAY_MS, 30 * SECOND_MS), st.integers(0, 3 * DAY_MS), st.integers(0, DELAY_MS_MAX)
)
LEADS = st.sampled_from([1, 1_000, 4_000, 10_000, 60_000]).map(lead_ms_of)
# The remaining time of a message, how many ms ago its list was planned, and how many levels were taken since.
SCHEDULED_ROWS = st.tuples(REMAINING, st.integers(0, 2 * HOUR_MS) | st.integers(0, 3_000), st.integers(0, 8))


def columns(scheduled_rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Build the columns of due times and lists: a list is planned some ms ago, and its first levels are removed."""
    due = NOW + np.array([remaining for remaining, _, _ in scheduled_rows])
    hops = plan(due - NOW + np.array([ago for _, ago, _ in scheduled_rows]))
    for index, (_, _, levels) in enumerate(scheduled_rows):
        for _ in range(levels):
            hops[index] = levels_after_first(hops[index : index + 1])[0]
    return due, hops


@given(scheduled_rows=st.lists(SCHEDULED_ROWS, min_size=1, max_size=20), lead_ms=LEADS)
def test_message_is_placed_by_its_due_time_and_list(
    scheduled_rows: list[tuple[int, int, int]], lead_ms: int
) -> None:
    due, hops = columns(scheduled_rows)
    placed = place(due, hops, NOW, lead_ms)
    for due_ms, queue, hop_end_ms in zip(
        due.tolist(), placed.queue.tolist(), placed.hop_end_ms.tolist(), strict=True
    ):
        assert 0 <= queue < QUEUES
        assert (queue == NEAR) == (due_ms - NOW <= lead_ms)
        assert hop_end_ms == NOW + int(DURATION_MS[(queue + 1) // 2])
        if queue == NEAR:
            continue
        if holds_last_hops(queue):
            assert due_ms - lead_ms <= hop_end_ms <= due_ms + DRIFT_MS
            # Opened half the lead early at the latest, and then it is not late.
            assert hop_end_ms - lead_ms // 2 < due_ms
        else:
            assert hop_end_ms < due_ms - lead_ms
        assert due_ms >= first_due_ms(queue, hop_end_ms, lead_ms)


@given(scheduled_rows=st.lists(SCHEDULED_ROWS, min_size=1, max_size=20), lead_ms=LEADS)
def test_list_is_kept_if_it_fits_and_planned_anew_otherwise(
    scheduled_rows: list[tuple[int, int, int]], lead_ms: int
) -> None:
    due, hops = columns(scheduled_rows)
    lists = fitting_lists(due, hops, NOW)
    level = first_level(hops)
    fits = (level > 0) & (NOW + DURATION_MS[level] <= due + DRIFT_MS)
    assert np.array_equal(lists[fits], hops[fits])
    assert np.array_equal(lists[~fits], plan(due - NOW)[~fits])
    far = due - NOW > lead_ms
    assert np.array_equal(place(due, hops, NOW, lead_ms).left[far], levels_after_first(lists)[far])


@given(
    remaining_ms=st.integers(0, 2 * DAY_MS),
    late_ms=st.lists(st.integers(0, 400) | st.integers(0, HOUR_MS), min_size=1, max_size=12),
    lead_ms=LEADS,
)
def test_last_hop_is_opened_in_time_however_late_the_hops_are(
    remaining_ms: int, late_ms: list[int], lead_ms: int
) -> None:
    """Each hop begins late by any time. The message must be near before its due time, or when the late hop is over."""
    now_ms, due_ms, turn = NOW, np.array([NOW + remaining_ms]), 0
    hops = plan(due_ms - now_ms)
    while True:
        placed = place(due_ms, hops, now_ms, lead_ms)
        queue, hop_end_ms = int(placed.queue[0]), int(placed.hop_end_ms[0])
        if queue == NEAR:
            break
        hops = placed.left
        if holds_last_hops(queue):
            assert hop_end_ms - lead_ms // 2 <= due_ms[0] - DRIFT_MS
            break
        now_ms, turn = hop_end_ms + late_ms[turn % len(late_ms)], turn + 1
    assert turn <= 40


def test_list_is_followed_when_hops_are_slightly_late() -> None:
    """2 h 59 min 59 s, each hop 100 ms late: 2h 50m 9m, then the message is near."""
    now_ms, due_ms = NOW, np.array([NOW + 3 * HOUR_MS - SECOND_MS])
    hops, waited = plan(due_ms - now_ms), []
    while (placed := place(due_ms, hops, now_ms, 10_000)).queue[0] != NEAR:
        waited.append(NAMES[(int(placed.queue[0]) - 1) // 2])
        if holds_last_hops(int(placed.queue[0])):
            break
        now_ms, hops = int(placed.hop_end_ms[0]) + 100, placed.left
    assert waited == ["2h", "50m", "9m", "50s"]


def test_long_stop_replaces_the_list() -> None:
    """The list for the last hour is 50m 9m 50s 9s. Half of the hour passed while no broker ran."""
    due_ms = np.array([NOW + 30 * MINUTE_MS])
    hops = plan(np.array([HOUR_MS - SECOND_MS]))
    placed = place(due_ms, hops, NOW, 10_000)
    assert NAMES[(int(placed.queue[0]) - 1) // 2] == "30m"


@pytest.mark.parametrize("ahead_ms", [1_000, 4_000, 10_000])
def test_lead_time_is_at_least_its_minimum(ahead_ms: int) -> None:
    assert lead_ms_of(ahead_ms) == max(ahead_ms, LEAD_MS_MIN)


# ---- the table of levels, and the lists made of it -------------------------------------------------------------

WITHIN = st.integers(0, DAY_MS)
# Tens and ones of each unit that are two levels: neither odd nor in the table.
TWO = {"h": {4, 6, 8}, "m": set[int](), "s": {2, 4, 6, 8}}


def unpacked(hops: int) -> list[int]:
    """List the levels of a packed list: six bits each, the first level lowest."""
    levels = []
    while hops:
        levels.append(hops & 63)
        hops >>= 6
    return levels


def names(remaining_ms: int) -> list[str]:
    """List the names of the levels into which `plan` splits a time."""
    return [NAMES[level - 1] for level in unpacked(int(plan(np.array([remaining_ms]))[0]))]


def test_levels_1_to_18_equal_rocketmqs() -> None:
    table = LevelTable.parse(Settings().delay_levels)
    assert len(set(NAMES)) == len(NAMES) == 32
    assert DURATION_MS[1:19].tolist() == list(table.durations_ms)
    assert DURATION_MS.tolist() == [0, *LevelTable.parse(" ".join(NAMES)).durations_ms]


@pytest.mark.parametrize(
    ("remaining_ms", "expected"),
    [
        (0, []),
        (-1, []),
        (999, []),
        (1_000, ["1s"]),
        (1_999, ["1s"]),
        (2 * SECOND_MS, ["1s", "1s"]),
        (8 * SECOND_MS, ["7s", "1s"]),
        (2 * HOUR_MS, ["2h"]),
        (4 * HOUR_MS, ["3h", "1h"]),
        (
            18 * HOUR_MS + 47 * MINUTE_MS + 36 * SECOND_MS,
            ["10h", "7h", "1h", "40m", "7m", "30s", "5s", "1s"],
        ),
        (DAY_MS - 1, ["20h", "3h", "50m", "9m", "50s", "9s"]),
        (DAY_MS, ["20h", "3h", "1h"]),
        (DAY_MS + 1, ["20h"]),
        (DELAY_MS_MAX, ["20h"]),
    ],
)
def test_plan_splits_times_into_the_expected_levels(remaining_ms: int, expected: list[str]) -> None:
    assert names(remaining_ms) == expected


@given(st.lists(WITHIN, min_size=1, max_size=50))
def test_levels_sum_to_less_than_a_second_below_the_time(remaining: list[int]) -> None:
    lists = [unpacked(hops) for hops in plan(np.array(remaining)).tolist()]
    for remaining_ms, hops in zip(remaining, lists, strict=True):
        assert remaining_ms - SECOND_MS < sum(int(DURATION_MS[level]) for level in hops) <= remaining_ms
        assert len(hops) <= HOPS_MAX


def test_the_longest_list_has_eight_levels() -> None:
    every_second = plan(np.arange(0, DAY_MS + 1, SECOND_MS))
    hops = np.zeros(len(every_second), dtype=np.int64)
    while every_second.any():
        hops += first_level(every_second) > 0
        every_second = levels_after_first(every_second)
    assert hops.max() == HOPS_MAX


@pytest.mark.parametrize(
    ("unit", "unit_ms", "count"), [("h", HOUR_MS, 25), ("m", MINUTE_MS, 60), ("s", SECOND_MS, 60)]
)
def test_each_digit_takes_one_or_two_levels(unit: str, unit_ms: int, count: int) -> None:
    for value in range(count):
        tens, ones = divmod(value, 10)
        expected = (tens > 0) + (0 if not ones else 2 if ones in TWO[unit] else 1)
        assert len(names(value * unit_ms)) == expected, f"{value}{unit}"


@given(WITHIN)
def test_levels_are_sorted_largest_first(remaining_ms: int) -> None:
    durations = [int(DURATION_MS[level]) for level in unpacked(int(plan(np.array([remaining_ms]))[0]))]
    assert durations == sorted(durations, reverse=True)


@given(remaining_ms=st.integers(0, DELAY_MS_MAX))
def test_successive_lists_end_within_a_second_before_the_time(remaining_ms: int) -> None:
    """A cascade without any delays. A year takes a little more than 438 hops."""
    left, hops = remaining_ms, 0
    while left >= SECOND_MS:
        for level in unpacked(int(plan(np.array([left]))[0])):
            left, hops = left - int(DURATION_MS[level]), hops + 1
            assert left >= 0
    assert hops <= remaining_ms // (20 * HOUR_MS) + HOPS_MAX


@given(WITHIN)
def test_first_level_and_levels_after_first_give_the_complete_list(remaining_ms: int) -> None:
    hops = plan(np.array([remaining_ms]))
    expected = unpacked(int(hops[0]))
    levels = []
    while first_level(hops)[0]:
        levels.append(int(first_level(hops)[0]))
        hops = levels_after_first(hops)
    assert levels == expected
    assert first_level(hops).tolist() == [0]
