"""Cron expressions: each date and time against the definition, and the forms that programs read differently."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.recurring.cron_rule import parse_cron
from timeball.broker.recurring.local_times import local_datetime, local_seconds
from timeball.model.errors import InvalidDelay

local = datetime.fromisoformat
DAY = timedelta(days=1)
MONDAY, FRIDAY, SATURDAY, SUNDAY = 0, 4, 5, 6  # as Python counts


def is_in_last_week(day: date) -> bool:
    return (day + 7 * DAY).month != day.month


def is_last_day(day: date) -> bool:
    return (day + DAY).month != day.month


def is_nearest_weekday(day: date, day_number: int) -> bool:
    """Check a day against the weekday of its month that is nearest to day `day_number` of the month."""
    days = [day.replace(day=1) + n * DAY for n in range(31)]
    weekdays = [d for d in days if d.month == day.month and d.weekday() < SATURDAY]
    return day == min(weekdays, key=lambda d: abs(d.day - day_number))


def is_last_weekday(day: date) -> bool:
    later_days = [day + n * DAY for n in range(1, 7) if (day + n * DAY).month == day.month]
    return day.weekday() < SATURDAY and all(d.weekday() >= SATURDAY for d in later_days)


# The fields for day, month and weekday of an expression, and the definition of the dates that match.
DATES: list[tuple[str, Callable[[date], bool]]] = [
    ("* * *", lambda d: True),
    ("1 1 *", lambda d: (d.day, d.month) == (1, 1)),
    ("29 2 *", lambda d: (d.day, d.month) == (29, 2)),
    ("31 * *", lambda d: d.day == 31),
    ("1,15 JAN-JUN/2 *", lambda d: d.day in (1, 15) and d.month in (1, 3, 5)),
    ("*/2 * *", lambda d: d.day % 2 == 1),
    ("10-20/5 */6 *", lambda d: d.day in (10, 15, 20) and d.month in (1, 7)),
    ("* * MON-FRI", lambda d: d.weekday() < SATURDAY),
    ("* * 1-5", lambda d: d.weekday() < SATURDAY),
    ("* * 0", lambda d: d.weekday() == SUNDAY),
    ("* * 7", lambda d: d.weekday() == SUNDAY),
    ("* * 5-7", lambda d: d.weekday() >= FRIDAY),
    ("* feb sat,Sun", lambda d: d.month == 2 and d.weekday() >= SATURDAY),
    ("13 * FRI", lambda d: d.day == 13 or d.weekday() == FRIDAY),
    ("L 2 *", lambda d: d.month == 2 and is_last_day(d)),
    ("L * *", is_last_day),
    ("L-3 * *", lambda d: is_last_day(d + 3 * DAY)),
    ("1,L-27,L * *", lambda d: d.day == 1 or is_last_day(d + 27 * DAY) or is_last_day(d)),
    ("LW * *", is_last_weekday),
    ("1W * *", lambda d: is_nearest_weekday(d, 1)),
    ("15W * *", lambda d: is_nearest_weekday(d, 15)),
    ("28W,5 2,3 *", lambda d: d.month in (2, 3) and (is_nearest_weekday(d, 28) or d.day == 5)),
    ("* * MON#1", lambda d: d.weekday() == MONDAY and d.day <= 7),
    (
        "* * FRI#5,0#2",
        lambda d: (d.weekday() == FRIDAY and d.day > 28) or (d.weekday() == SUNDAY and 8 <= d.day <= 14),
    ),
    ("* * FRIL", lambda d: d.weekday() == FRIDAY and is_in_last_week(d)),
    ("* * 5L,7L", lambda d: d.weekday() in (FRIDAY, SUNDAY) and is_in_last_week(d)),
    ("* 2 MON#5", lambda d: d.month == 2 and d.weekday() == MONDAY and d.day > 28),
    ("1 * MONL", lambda d: d.day == 1 or (d.weekday() == MONDAY and is_in_last_week(d))),
]


def dates(fields: str, first: date, end: date) -> list[date]:
    """Return the matching dates from `first` on, before `end`."""
    times, matching_dates = parse_cron(f"30 12 {fields}"), []
    at = times.at_or_after(local_seconds(local(first.isoformat())))
    while at is not None and (day := local_datetime(at).date()) < end:
        assert local_datetime(at).time().isoformat() == "12:30:00"
        matching_dates.append(day)
        at = times.at_or_after(at + 1)
    return matching_dates


@pytest.mark.parametrize(("fields", "matches"), DATES)
@pytest.mark.parametrize("years", [(1999, 2009), (2096, 2105)])
def test_dates_match_their_definition(
    fields: str, matches: Callable[[date], bool], years: tuple[int, int]
) -> None:
    first, end = date(years[0], 1, 1), date(years[1], 1, 1)
    every = (first + n * DAY for n in range((end - first).days))
    assert dates(fields, first, end) == [day for day in every if matches(day)]


def test_another_definition_is_noticed() -> None:
    """The control: definitions without leap days, and with 1 as Tuesday, give other dates."""
    first, end = date(1999, 1, 1), date(2009, 1, 1)
    every = [first + n * DAY for n in range((end - first).days)]
    assert dates("L 2 *", first, end) != [d for d in every if d.month == 2 and d.day == 28]
    assert dates("* * 1", first, end) != [d for d in every if d.weekday() == 1]


@given(
    minutes=st.sets(st.integers(0, 59), min_size=1),
    hours=st.sets(st.integers(0, 23), min_size=1),
    seconds=st.sets(st.integers(0, 59), min_size=1),
    at=st.integers(0, 86_399),
)
def test_times_of_day_match_their_definition(
    minutes: set[int], hours: set[int], seconds: set[int], at: int
) -> None:
    lists = (",".join(str(value) for value in values) for values in (seconds, minutes, hours))
    times = parse_cron(f"{' '.join(lists)} * * *", seconds=True)
    every = (t for t in range(at, at + 86_400) if matches_time(t % 86_400, seconds, minutes, hours))
    assert times.at_or_after(at) == next(every)


def matches_time(second: int, seconds: set[int], minutes: set[int], hours: set[int]) -> bool:
    return second % 60 in seconds and second // 60 % 60 in minutes and second // 3_600 in hours


@pytest.mark.parametrize(
    ("alias", "fields"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * SUN"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        (" @Annually ", "0 0 1 JAN *"),
        ("05  09 * * mon", "5 9 * * 1"),
        ("0\t9 * * *", "0 9 * * *"),
    ],
)
def test_aliases_and_other_spellings_have_the_times_of_their_fields(alias: str, fields: str) -> None:
    by_alias, by_fields = parse_cron(alias), parse_cron(fields)
    local_s = 0
    for _ in range(20):
        found_s = by_alias.at_or_after(local_s)
        assert found_s is not None and found_s == by_fields.at_or_after(local_s)
        local_s = found_s + 1


def test_the_rarest_date_of_a_calendar_is_found() -> None:
    # 29 February 2000 was a Tuesday. The next such Tuesday follows after 28 years, or after 40 years around 2100.
    leap_days = dates("* 2 TUE#5", date(2000, 1, 1), date(2160, 1, 1))
    assert [day.year for day in leap_days] == [2000, 2028, 2056, 2084, 2124, 2152]


def test_nothing_is_found_after_the_year_9999() -> None:
    times = parse_cron("0 12 31 12 *")
    last = local_seconds(local("9999-12-31T12:00"))
    assert times.at_or_after(last - 5) == last
    assert times.at_or_after(last + 1) is times.at_or_after(10**15) is None
    assert times.at_or_after(-(10**15)) == local_seconds(local("0001-12-31T12:00"))


# Expressions that programs read differently, or not at all, and the advice of the error.
REFUSED = [
    # Weekdays: steps count from Sunday or from Monday, ranges wrap or not.
    ("0 0 * * */3", "SUN,WED,SAT"),
    ("0 0 * * 1/2", "MON,WED,FRI"),
    ("0 0 * * MON-FRI/2", "MON,WED,FRI"),
    ("0 0 * * 6-1", "SAT,SUN,MON"),
    ("0 0 * * FRI-MON", "FRI,SAT,SUN,MON"),
    ("0 0 * * 8", "values are 0 to 7 or SUN to SAT"),
    ("0 0 * * L", "SAT, or FRIL"),
    ("0 0 * * L5", "write the day first, such as 5L"),
    ("0 0 * * MON#6", "MON#1"),
    ("0 0 * * MONDAY", "SUN to SAT"),
    # Steps and ranges.
    ("5/20 * * * *", "write 5-59/20"),
    ("0 2/6 * * *", "write 2-23/6"),
    ("*/90 * * * *", "write longer ones as the rule every"),
    ("*/0 * * * *", "a step is from 1 to 59"),
    ("0 22-2 * * *", "write 22-23,0-2"),
    ("0 0 * NOV-FEB *", "write NOV-DEC,JAN-FEB"),
    ("0 22-2/2 * * *", "from the lower to the higher"),
    ("9-9/2 * * * *", "write 9"),
    ("*,5 * * * *", "write it alone"),
    # Days and weekdays together: one of them, or both.
    ("0 0 */2 * 1", "list the days"),
    ("0 0 10 * */2", "list the days"),
    ("0 0 10 * 0-6", "write * there"),
    ("0 0 1-31 * 5", "write * there"),
    ("0 0 1-7 * MON", "write * for the day and MON#1"),
    ("0 0 25-31 * FRI", "write * for the day and FRIL"),
    ("0 0 13 * ?", "write *"),
    # Days that some months do not have.
    ("0 12 31W * *", "write at most 28W, or LW"),
    ("0 12 L-28 * *", "write at most L-27"),
    ("0 0 30 2 *", "no date matches"),
    ("0 0 31 4,6 *", "no date matches"),
    # Numbers of fields.
    ("30 0 12 * * *", "set `seconds`"),
    ("0 0 12 1 1 * 2030", "7 fields are given"),
    ("* * * *", "4 fields are given"),
    ("", "1 fields are given"),
    # Other words.
    ("@reboot", "when your program starts"),
    ("@every 5m", "every: '5m'"),
    ("@dayly", "@daily"),
    ("H * * * *", "values are 0 to 59"),
    ("60 * * * *", "values are 0 to 59"),
    ("0 24 * * *", "values are 0 to 23"),
    ("0 0 0 * *", "values are 1 to 31"),
    ("0 0 * 13 *", "values are 1 to 12 or JAN to DEC"),
    ("0 0 ٣ * *", "is not understood"),
    ("1.5 * * * *", "is not understood"),
    ("1,,2 * * * *", "is not understood"),
    ("-5 * * * *", "is not understood"),
]


@pytest.mark.parametrize(("text", "advice"), REFUSED)
def test_forms_that_programs_read_differently_are_refused(text: str, advice: str) -> None:
    with pytest.raises(InvalidDelay) as error_info:
        parse_cron(text)
    assert advice in str(error_info.value)
    assert str(error_info.value).startswith(f"cron={text!r}: ")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("0 12 * * *", "there are six: second"),
        ("@daily", "no field for seconds"),
        ("0 0 12 1 1 * *", "7 fields are given"),
    ],
)
def test_with_seconds_other_than_six_fields_are_refused(text: str, advice: str) -> None:
    with pytest.raises(InvalidDelay, match=advice):
        parse_cron(text, seconds=True)


def test_with_seconds_the_first_field_is_for_seconds() -> None:
    times = parse_cron("15,45 0 12 * * *", seconds=True)
    assert times.at_or_after(12 * 3_600 + 16) == 12 * 3_600 + 45
    assert times.at_or_after(12 * 3_600 + 46) == 36 * 3_600 + 15


@given(st.text(max_size=40) | st.from_regex(r"[0-9*/,LW#\-]{1,6}( [0-9*/,LW#A-Z\-]{1,6}){4}", fullmatch=True))
def test_any_text_is_parsed_or_refused_with_invalid_delay(text: str) -> None:
    try:
        times = parse_cron(text)
    except InvalidDelay as error:
        assert ": " in str(error)
    else:
        assert times.at_or_after(0) is not None
        assert parse_cron(times.text).text == times.text
