"""Local times as numbers: lists of them, and their text."""

from __future__ import annotations

from datetime import datetime

import pytest

from timeball.broker.recurring.local_times import (
    LAST_S,
    ListedTimes,
    instant_text,
    local_datetime,
    local_seconds,
    local_text,
)


def test_the_first_listed_time_that_is_not_earlier_is_found() -> None:
    times = ListedTimes((5, 9))
    assert [times.at_or_after(at) for at in (-1, 5, 6, 9, 10)] == [5, 5, 9, 9, None]
    assert ListedTimes(()).at_or_after(0) is None


@pytest.mark.parametrize(
    "text", ["1970-01-01T00:00:00", "1969-12-31T23:59:59", "2026-10-25T02:30:00", "9999-12-31T23:59:59"]
)
def test_a_local_time_is_converted_to_the_text_and_the_datetime_and_back(text: str) -> None:
    local = datetime.fromisoformat(text)
    assert local_text(local_seconds(local)) == text
    assert local_datetime(local_seconds(local)) == local
    assert local_seconds(local) <= LAST_S


def test_an_instant_has_milliseconds_only_if_there_are_some() -> None:
    assert instant_text(1_767_225_600_000) == "2026-01-01T00:00:00Z"
    assert instant_text(1_767_225_600_250) == "2026-01-01T00:00:00.250Z"
