"""The level table: RocketMQ's text, and what RocketMQ does not start with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.config import Settings
from timeball.errors import SetupError
from timeball.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.schedule.delay_levels.levels import LevelTable


def test_the_default_is_rocketmqs() -> None:
    table = LevelTable.parse(Settings().delay_levels)
    minutes = [MINUTE_MS * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)]
    seconds = [SECOND_MS * n for n in (1, 5, 10, 30)]
    assert list(table.durations_ms) == [*seconds, *minutes, HOUR_MS, 2 * HOUR_MS]
    assert len(table) == table.queues == 18


UNITS = {"s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}


@given(st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from(sorted(UNITS))), min_size=1, max_size=30))
def test_level_n_is_the_nth_item_in_any_order(items: list[tuple[int, str]]) -> None:
    table = LevelTable.parse(" ".join(f"{count}{unit}" for count, unit in items))
    assert list(table.durations_ms) == [count * UNITS[unit] for count, unit in items]
    assert table.queues == max(18, len(items))
    levels = np.arange(1, len(items) + 1)
    assert table.delay_ms(levels).tolist() == list(table.durations_ms)


def test_levels_above_the_last_are_the_last() -> None:
    table = LevelTable.parse("1s +2m 3h ")
    assert table.clamp(np.array([0, 1, 3, 4, 1_959])).tolist() == [0, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1s",
        "1s  5s",
        "1s 5",
        "5ms",
        "s",
        "1S",
        "1.5s",
        "-1s",
        "1s,5s",
        "1s\t5s",
        "٣s",
        "3654d",
        "9" * 19 + "s",
    ],
)
def test_what_is_no_table_is_refused_by_name(text: str) -> None:
    with pytest.raises(SetupError, match="--delay-levels"):
        LevelTable.parse(text)


def test_more_levels_than_a_topic_has_queues_are_refused() -> None:
    LevelTable.parse("1s " * 1_024)
    with pytest.raises(SetupError, match="--delay-levels: 1025 levels"):
        LevelTable.parse("1s " * 1_025)
