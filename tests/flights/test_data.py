"""The table of real flights as columns, a compressed day, and due times moved to the coming year."""

from __future__ import annotations

import json

import numpy as np
import pytest
from examples.flights.data import HOUR_MS, CompressedDay, Flights, coming_year, read_year
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.errors import SetupError


@pytest.fixture(scope="module")
def year() -> Flights:
    """The flights of the year 2013 from New York."""
    return read_year()


def test_the_year_has_all_flights_and_each_flight_has_another_id(year: Flights) -> None:
    assert len(year) == 336_776
    assert int(year.cancelled.sum()) == 8_255
    assert len(year.id.unique()) == len(year)


def test_each_flight_belongs_to_one_day_of_new_york(year: Flights) -> None:
    """By UTC, a flight in the evening would belong to the next day."""
    storm = year.on(2, 8)
    assert (len(storm), int(storm.cancelled.sum())) == (930, 472)
    assert len(year.on(1, 1)) == 842
    days = np.arange("2013-01-01", "2014-01-01", dtype="datetime64[D]")
    dates = [(int(str(day)[5:7]), int(str(day)[8:10])) for day in days]
    assert sum(len(year.on(*date)) for date in dates) == len(year)


def test_a_date_that_does_not_exist_is_refused_by_name(year: Flights) -> None:
    with pytest.raises(SetupError, match=r"30\.2"):
        year.on(2, 30)


def test_messages_have_ids_instants_and_json_bodies(year: Flights) -> None:
    """These are the columns that the client and the writer of Spark take."""
    storm = year.on(2, 8)
    batch = storm.messages("departures", storm.departs_ms, "x-")
    first = batch.slice(0, 1).to_pylist()[0]
    assert first["unique_key"] == "x-" + storm.id[0].as_py()
    assert first["due_ms"] == storm.departs_ms[0]
    assert json.loads(first["body"])["flight"] == first["keys"]
    assert batch.num_rows == len(storm)


DAY = CompressedDay(start_ms=1_700_000_000_000, length_ms=60_000)


def _ms(text: str) -> int:
    """A time in UTC as Unix milliseconds."""
    return int(np.datetime64(text, "ms").astype(np.int64))


def test_minute_0_is_due_at_the_start_and_minute_720_in_the_middle_of_a_compressed_day() -> None:
    assert DAY.due_ms(np.array([0, 720])).tolist() == [DAY.start_ms, DAY.start_ms + 30_000]


@given(st.lists(st.integers(0, 1_439), min_size=1), st.integers(2_000, 10**8))
def test_due_times_keep_the_order_of_minutes_and_give_the_minutes_back(
    minutes: list[int], length_ms: int
) -> None:
    """The minutes are inexact only by the rounding of a due time to a millisecond."""
    day = CompressedDay(start_ms=10**12, length_ms=length_ms)
    sorted_minutes = np.array(sorted(minutes))
    due = day.due_ms(sorted_minutes)
    assert (np.diff(due) >= 0).all()
    assert (due >= day.start_ms).all() and (due < day.end_ms).all()
    assert (np.abs(day.minutes(due) - sorted_minutes) <= 1_440 / length_ms + 1e-6).all()


def test_the_clock_shows_the_time_of_day_and_stays_within_it() -> None:
    """Before the start it shows midnight, and after the end the last minute."""
    assert DAY.clock(DAY.start_ms + 30_000) == "12:00"
    assert DAY.clock(DAY.start_ms - 5_000) == "00:00"
    assert DAY.clock(DAY.end_ms + 5_000) == "23:59"


@pytest.mark.parametrize(
    ("old", "now", "new"),
    [
        ("2013-02-08T10:30", "2026-01-01T00:00", "2026-02-08T10:30"),
        ("2013-02-08T10:30", "2026-06-01T00:00", "2027-02-08T10:30"),
        (
            "2013-12-31T23:59",
            "2026-12-31T23:30",
            "2027-12-31T23:59",
        ),  # less than an hour ahead, so a year later
        ("2013-01-01T00:30", "2026-12-31T23:40", "2028-01-01T00:30"),
        ("2012-02-29T12:00", "2026-01-01T00:00", "2026-03-01T12:00"),
        ("2013-03-01T12:00", "2028-01-01T00:00", "2028-03-01T12:00"),
    ],
)
def test_the_coming_year_is_the_first_with_the_same_date_at_least_an_hour_ahead(
    old: str, now: str, new: str
) -> None:
    """Month, day and time stay, except that February 29 becomes March 1 in a year without it."""
    assert coming_year(np.array([_ms(old)]), _ms(now)).tolist() == [_ms(new)]


@given(
    st.integers(_ms("2013-01-01"), _ms("2014-01-01") - 1), st.integers(_ms("2020-01-01"), _ms("2090-01-01"))
)
def test_each_time_of_the_coming_year_is_between_an_hour_and_a_year_ahead(old_ms: int, now_ms: int) -> None:
    """So no message becomes due while the demo runs."""
    due = coming_year(np.array([old_ms]), now_ms)[0]
    assert HOUR_MS <= due - now_ms <= 366 * 24 * HOUR_MS + HOUR_MS
