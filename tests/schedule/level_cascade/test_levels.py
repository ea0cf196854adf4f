"""The table of 32 and the lists made of it: as long as what remains to the second, and as short as they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.config import Settings
from timeball.limits import DAY_MS, DELAY_MS_MAX, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.schedule.delay_levels.levels import LevelTable
from timeball.schedule.level_cascade import levels
from timeball.schedule.level_cascade.levels import DURATION_MS, HOPS_MAX, NAMES, first, plan, rest

WITHIN = st.integers(0, DAY_MS)
# Tens and ones of each unit that are two levels: neither odd nor in the table.
TWO = {"h": {4, 6, 8}, "m": set[int](), "s": {2, 4, 6, 8}}


def unpacked(hops: int) -> list[int]:
    found = []
    while hops:
        found.append(hops & 63)
        hops >>= 6
    return found


def names(remaining_ms: int) -> list[str]:
    return [NAMES[level - 1] for level in unpacked(int(plan(np.array([remaining_ms]))[0]))]


def test_a_number_means_what_it_means_to_rocketmq() -> None:
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
def test_read_off_a_clock(remaining_ms: int, expected: list[str]) -> None:
    assert names(remaining_ms) == expected


@given(st.lists(WITHIN, min_size=1, max_size=50))
def test_the_sum_never_exceeds_what_remains_and_lacks_less_than_a_second(remaining: list[int]) -> None:
    lists = [unpacked(hops) for hops in plan(np.array(remaining)).tolist()]
    for remaining_ms, hops in zip(remaining, lists, strict=True):
        assert remaining_ms - SECOND_MS < sum(int(DURATION_MS[level]) for level in hops) <= remaining_ms
        assert len(hops) <= HOPS_MAX


def test_the_longest_list_has_eight_levels() -> None:
    every_second = plan(np.arange(0, DAY_MS + 1, SECOND_MS))
    hops = np.zeros(len(every_second), dtype=np.int64)
    while every_second.any():
        hops += first(every_second) > 0
        every_second = rest(every_second)
    assert hops.max() == HOPS_MAX


@pytest.mark.parametrize(
    ("unit", "unit_ms", "count"), [("h", HOUR_MS, 25), ("m", MINUTE_MS, 60), ("s", SECOND_MS, 60)]
)
def test_one_level_a_digit_or_two(unit: str, unit_ms: int, count: int) -> None:
    for value in range(count):
        tens, ones = divmod(value, 10)
        expected = (tens > 0) + (0 if not ones else 2 if ones in TWO[unit] else 1)
        assert len(names(value * unit_ms)) == expected, f"{value}{unit}"


@given(WITHIN)
def test_largest_first(remaining_ms: int) -> None:
    durations = [int(DURATION_MS[level]) for level in unpacked(int(plan(np.array([remaining_ms]))[0]))]
    assert durations == sorted(durations, reverse=True)


@given(remaining_ms=st.integers(0, DELAY_MS_MAX))
def test_list_after_list_comes_within_a_second_and_never_beyond(remaining_ms: int) -> None:
    """What a cascade without any drift does; a year is 438 hops and then some."""
    left, hops = remaining_ms, 0
    while left >= SECOND_MS:
        for level in unpacked(int(plan(np.array([left]))[0])):
            left, hops = left - int(DURATION_MS[level]), hops + 1
            assert left >= 0
    assert hops <= remaining_ms // (20 * HOUR_MS) + HOPS_MAX


@given(WITHIN)
def test_first_and_rest_are_the_list(remaining_ms: int) -> None:
    hops = plan(np.array([remaining_ms]))
    expected = unpacked(int(hops[0]))
    found = []
    while first(hops)[0]:
        found.append(int(first(hops)[0]))
        hops = rest(hops)
    assert found == expected
    assert levels.first(hops).tolist() == [0]
