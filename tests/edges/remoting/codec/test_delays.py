"""Delays from message properties: precedence, Java's number format, and refusals."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime, time, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.local_time_oracle import (
    CHANGED_ZONES,
    EPOCH,
    US,
    changes,
    first_instant,
    local_times_around,
)
from tests.local_time_oracle import clock as clock_of

from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.delays import AT_ONCE, Plan, next_timing_ms
from timeball.model.config import DELAY_PROPERTIES
from timeball.model.errors import InvalidDelay
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS

NOW = 1_700_000_000_000
DELAY_MS_MAX = 3 * DAY_MS
REMARK = (
    "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; "
    "or if set del msg, the delay time should be bigger than the current time"
)
NUMBERS = ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME"]
TIMERS = [*NUMBERS[:3], "TIMING", NUMBERS[3]]
MIDNIGHT = 1_700_006_400_000  # the next one in UTC; NOW is 22:13:20
USER_NAMES = frozenset(DELAY_PROPERTIES)


def plan(properties: dict[str, str], now_ms: int, delay_ms_max: int) -> Plan:
    """Plan the delay with all user properties enabled."""
    return delays.plan(properties, now_ms, delay_ms_max, USER_NAMES)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, AT_ONCE),
        ({"KEYS": "a b", "TAGS": "t"}, AT_ONCE),
        ({"DELAY": "3"}, Plan(3, None)),
        ({"DELAY": "+3"}, Plan(3, None)),
        ({"DELAY": "1959"}, Plan(1959, None)),
        ({"DELAY": "0"}, AT_ONCE),
        ({"DELAY": "-1"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "5"}, Plan(0, NOW + 5_000)),
        ({"TIMER_DELAY_MS": "5"}, Plan(0, NOW + 5)),
        ({"TIMER_DELIVER_MS": str(NOW + 7)}, Plan(0, NOW + 7)),
        ({"__STARTDELIVERTIME": str(NOW + 9)}, Plan(0, NOW + 9)),
        ({"TIMING": "00:00:00"}, Plan(0, MIDNIGHT)),
        ({"TIMING": "22:13:20"}, Plan(0, NOW + DAY_MS)),
        ({"TIMING": "01:00:00 Europe/Berlin"}, Plan(0, MIDNIGHT)),
        ({"TIMING": "01:00:00+01:00", "TIMING-LIST": "1"}, Plan(0, MIDNIGHT)),
        ({"TIMING-LIST": "1"}, AT_ONCE),
        ({"TIMING": "00:00:00", "TIMER_OUT_MS": ""}, AT_ONCE),
        ({"TIMEBALL_LOCAL_TIME": "2023-11-15T01:00 Europe/Berlin"}, Plan(0, MIDNIGHT)),
        (
            {"TIMEBALL_LOCAL_TIME": "2023-11-15T01:00:00 Europe/Berlin", "TIMER_DELAY_MS": "5"},
            Plan(0, MIDNIGHT),
        ),
        ({"TIMEBALL_LOCAL_TIME": "2023-11-14T01:00:00 Europe/Berlin"}, Plan(0, MIDNIGHT - DAY_MS)),
        ({"TIMER_DELIVER_MS": str(NOW)}, Plan(0, NOW)),
        ({"TIMER_DELIVER_MS": "1"}, Plan(0, 1)),
        ({"__STARTDELIVERTIME": str(NOW - 7)}, Plan(0, NOW - 7)),
        ({"TIMER_DELIVER_MS": "-1"}, AT_ONCE),
        ({"TIMER_DELIVER_MS": "0"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "0"}, AT_ONCE),
        ({"TIMER_DELAY_MS": "-5"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "-9223372036854775808"}, AT_ONCE),
        ({"TIMER_DELIVER_MS": str(NOW + DELAY_MS_MAX)}, Plan(0, NOW + DELAY_MS_MAX)),
        ({"TIMER_OUT_MS": str(NOW), "TIMER_DELIVER_MS": str(NOW + 7)}, AT_ONCE),
        ({"TIMER_OUT_MS": "", "TIMER_DELAY_SEC": "x", "__STARTDELIVERTIME": str(NOW + 7)}, AT_ONCE),
    ],
)
def test_properties_give_the_planned_delay(properties: dict[str, str], expected: Plan) -> None:
    assert plan(properties, NOW, DELAY_MS_MAX) == expected


@pytest.mark.parametrize(
    "names", [frozenset[str](), frozenset({"TIMING"}), frozenset({"__STARTDELIVERTIME"}), USER_NAMES]
)
@pytest.mark.parametrize(
    ("name", "text", "due_ms"),
    [("TIMING", "00:00:00", MIDNIGHT), ("__STARTDELIVERTIME", str(NOW + 9), NOW + 9)],
)
def test_user_properties_delay_only_if_they_are_enabled(
    name: str, text: str, due_ms: int, names: frozenset[str]
) -> None:
    expected = Plan(0, due_ms) if name in names else AT_ONCE
    assert delays.plan({name: text}, NOW, DELAY_MS_MAX, names) == expected
    assert delays.names_delay({name: text}, names) == (name in names)
    if name not in names:
        assert delays.plan({name: "any text"}, NOW, DELAY_MS_MAX, names) == AT_ONCE
    assert delays.plan({name: text, "TIMER_DELAY_MS": "5"}, NOW, DELAY_MS_MAX, names) == Plan(0, NOW + 5)


@pytest.mark.parametrize("text", ["", "2023-11-15T01:00", "tomorrow Europe/Berlin", "2023-11-15T01:00 CEST"])
def test_a_local_time_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidDelay):
        plan({"TIMEBALL_LOCAL_TIME": text}, NOW, DELAY_MS_MAX)


def test_a_level_has_precedence_over_all_timers() -> None:
    properties = {"DELAY": "2", **dict.fromkeys(TIMERS, "no number"), "TIMER_OUT_MS": "1"}
    assert plan(properties, NOW, DELAY_MS_MAX) == Plan(2, None)
    assert plan({"DELAY": "0", "TIMER_DELAY_MS": "1"}, NOW, DELAY_MS_MAX) == Plan(0, NOW + 1)


@given(present=st.sets(st.sampled_from(TIMERS), min_size=1))
def test_timer_properties_have_the_documented_precedence(present: set[str]) -> None:
    values = dict(zip(TIMERS, ["1", "2", str(NOW + 3), "22:13:24", str(NOW + 5)], strict=True))
    due = dict(zip(TIMERS, [NOW + 1_000, NOW + 2, NOW + 3, NOW + 4_000, NOW + 5], strict=True))
    first = next(name for name in TIMERS if name in present)
    assert plan({name: values[name] for name in present}, NOW, DELAY_MS_MAX) == Plan(0, due[first])


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["", " 5", "5 ", "1_000", "0x5", "five", "5.0", "٥", "9223372036854775808"])
def test_a_text_that_is_not_a_java_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidDelay) as refused:
        plan({name: text}, NOW, DELAY_MS_MAX)
    assert str(refused.value) == f"{REMARK} ({name}: {text!r})"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TIMER_DELIVER_MS", "253402300800000"),  # the year 10000
        ("TIMER_DELIVER_MS", "9223372036854775807"),
        ("TIMER_DELIVER_MS", "-9223372036854775809"),
        ("TIMER_DELAY_MS", "9223372036854775807"),
        ("TIMER_DELAY_SEC", "9223372036854775807"),
        ("__STARTDELIVERTIME", "253402300800000"),
    ],
)
def test_a_due_time_out_of_range_is_refused_with_its_value(name: str, text: str) -> None:
    with pytest.raises(InvalidDelay) as refused:
        plan({name: text}, NOW, DELAY_MS_MAX)
    assert str(refused.value) == f"{REMARK} ({name}: {text!r})"


@pytest.mark.parametrize("text", ["", "x", "2147483648", "1.5"])
def test_a_level_that_is_not_a_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidDelay, match="DELAY"):
        plan({"DELAY": text}, NOW, DELAY_MS_MAX)


def test_a_time_of_day_without_a_zone_is_in_utc() -> None:
    assert plan({"TIMING": "00:00:00"}, NOW, DELAY_MS_MAX) == Plan(0, MIDNIGHT)


def test_an_invalid_time_of_day_is_refused_with_the_format() -> None:
    with pytest.raises(InvalidDelay, match="the property TIMING is '8 am'; write HH:MM:SS"):
        plan({"TIMING": "8 am"}, NOW, DELAY_MS_MAX)


def test_a_time_of_day_beyond_the_maximum_is_refused() -> None:
    assert plan({"TIMING": "22:13:19"}, NOW, DAY_MS) == Plan(0, NOW + DAY_MS - 1_000)
    with pytest.raises(InvalidDelay, match="timer message illegal"):
        plan({"TIMING": "22:13:19"}, NOW, DAY_MS - 1_001)


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELIVER_MS": str(NOW + DELAY_MS_MAX + 1)},
        {"__STARTDELIVERTIME": str(NOW + DELAY_MS_MAX + 1)},
        {"TIMER_DELAY_MS": str(DELAY_MS_MAX + 1)},
        {"TIMER_DELAY_SEC": str(DELAY_MS_MAX // 1000 + 1)},
        {"TIMER_DELAY_SEC": "9223372036854775807"},  # Java's multiplication would overflow
        {"TIMER_DEL_UNIQKEY": "t+k", "TIMER_DELIVER_MS": str(NOW)},
    ],
)
def test_a_delay_beyond_the_maximum_is_refused_with_rocketmqs_remark(properties: dict[str, str]) -> None:
    with pytest.raises(InvalidDelay) as refused:
        plan(properties, NOW, DELAY_MS_MAX)
    name, text = list(properties.items())[-1]
    assert str(refused.value) == f"{REMARK} ({name}: {text!r})"


def test_a_timer_deletion_is_refused_and_names_the_recall_request() -> None:
    with pytest.raises(InvalidDelay, match="recall"):
        plan({delays.TIMER_DELETES: "t+k", "TIMER_DELAY_SEC": "5"}, NOW, DELAY_MS_MAX)


@given(properties=st.dictionaries(st.sampled_from(["DELAY", "TIMER_OUT_MS", *TIMERS]), st.text(max_size=24)))
def test_any_text_gives_a_plan_in_range_or_a_refusal(properties: dict[str, str]) -> None:
    try:
        result = plan(properties, NOW, DELAY_MS_MAX)
    except InvalidDelay:
        return
    assert result.delay_level >= 0
    assert result.due_ms is None or (result.delay_level == 0 and 0 < result.due_ms <= NOW + DELAY_MS_MAX)


ZONES = [
    "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "America/Havana", "Asia/Beirut",
    "America/Nuuk", "Africa/Casablanca", "Asia/Kathmandu", "Pacific/Apia", "Antarctica/Troll", "Etc/GMT+12", "UTC",
]  # fmt: skip

QUARTER_MS = 15 * MINUTE_MS


def ms(text: str) -> int:
    """Convert 2024-03-31T01:30:00+00:00 to milliseconds since the epoch."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def local_time(at_ms: int, zone: str) -> datetime:
    """Return the local time of a zone at an instant (ms since 1970), as a naive datetime."""
    return (
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms))
        .astimezone(clock_of(zone))
        .replace(tzinfo=None)
    )


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("08:00:00", "2024-06-01T07:00:00+00:00", "2024-06-01T08:00:00+00:00"),
        ("08:00:00", "2024-06-01T09:00:00+00:00", "2024-06-02T08:00:00+00:00"),
        ("08:00:00", "2024-06-01T07:59:59.999+00:00", "2024-06-01T08:00:00+00:00"),
        ("08:00:00", "2024-06-01T08:00:00+00:00", "2024-06-02T08:00:00+00:00"),
        ("00:00:00", "2024-12-31T23:59:59.999+00:00", "2025-01-01T00:00:00+00:00"),
        ("23:59:59", "2024-02-28T23:59:59.500+00:00", "2024-02-29T23:59:59+00:00"),
        ("08:00:00 Europe/Berlin", "2024-06-01T05:59:00+00:00", "2024-06-01T06:00:00+00:00"),
        ("08:00:00 Europe/Berlin", "2024-01-01T06:59:00+00:00", "2024-01-01T07:00:00+00:00"),
        ("00:30:00 Asia/Kathmandu", "2024-06-01T18:00:00+00:00", "2024-06-01T18:45:00+00:00"),
        ("08:00:00+02:00", "2024-06-01T05:59:00+00:00", "2024-06-01T06:00:00+00:00"),
        ("08:00:00 +02:00", "2024-06-01T06:00:00+00:00", "2024-06-02T06:00:00+00:00"),
        ("08:00:00-18:00", "2024-06-01T00:00:00+00:00", "2024-06-01T02:00:00+00:00"),
        ("08:00:00+18:00", "2024-06-01T00:00:00+00:00", "2024-06-01T14:00:00+00:00"),
    ],
)
def test_a_time_of_day_is_due_at_its_next_occurrence(text: str, now: str, expected: str) -> None:
    assert next_timing_ms(text, ms(now)) == ms(expected)


def test_a_time_of_day_is_in_utc_only_if_it_names_no_zone() -> None:
    now_ms = ms("2024-06-01T00:00:00+00:00")
    assert next_timing_ms("08:00:00", now_ms) == ms("2024-06-01T08:00:00+00:00")
    assert next_timing_ms("08:00:00 Europe/Berlin", now_ms) == ms("2024-06-01T06:00:00+00:00")


@pytest.mark.parametrize(
    ("text", "now", "gap_ends"),
    [
        ("02:30:00 Europe/Berlin", "2024-03-30T12:00:00+00:00", "2024-03-31T01:00:00+00:00"),
        ("02:00:00 Europe/Berlin", "2024-03-30T12:00:00+00:00", "2024-03-31T01:00:00+00:00"),
        ("02:59:59 America/New_York", "2024-03-09T12:00:00+00:00", "2024-03-10T07:00:00+00:00"),
        ("02:15:00 Australia/Lord_Howe", "2024-10-05T12:00:00+00:00", "2024-10-05T15:30:00+00:00"),
        ("00:30:00 Asia/Beirut", "2024-03-30T12:00:00+00:00", "2024-03-30T22:00:00+00:00"),
        ("23:30:00 America/Nuuk", "2024-03-30T12:00:00+00:00", "2024-03-31T01:00:00+00:00"),  # to midnight
        # Apia skipped a whole day.
        ("08:00:00 Pacific/Apia", "2011-12-30T03:00:00+00:00", "2011-12-30T10:00:00+00:00"),
    ],
)
def test_a_skipped_time_of_day_is_due_at_the_end_of_the_gap(text: str, now: str, gap_ends: str) -> None:
    assert next_timing_ms(text, ms(now)) == ms(gap_ends)
    # One millisecond before the end of the gap it is due at this end, and at the end only on the next day.
    assert next_timing_ms(text, ms(gap_ends) - 1) == ms(gap_ends)
    assert next_timing_ms(text, ms(gap_ends)) >= ms(gap_ends) + 8 * HOUR_MS


def test_times_of_day_directly_before_and_after_a_gap_are_not_skipped() -> None:
    now_ms = ms("2024-10-05T12:00:00+00:00")
    assert next_timing_ms("01:59:59 Australia/Lord_Howe", now_ms) == ms("2024-10-05T15:29:59+00:00")
    assert next_timing_ms("02:30:00 Australia/Lord_Howe", now_ms) == ms("2024-10-05T15:30:00+00:00")


@pytest.mark.parametrize(
    ("text", "now", "first", "second"),
    [
        (
            "02:30:00 Europe/Berlin", "2024-10-26T12:00:00+00:00", "2024-10-27T00:30:00+00:00",
            "2024-10-27T01:30:00+00:00",
        ),
        (
            "01:30:00 America/New_York", "2024-11-02T12:00:00+00:00", "2024-11-03T05:30:00+00:00",
            "2024-11-03T06:30:00+00:00",
        ),
        (
            "01:45:00 Australia/Lord_Howe", "2024-04-06T12:00:00+00:00", "2024-04-06T14:45:00+00:00",
            "2024-04-06T15:15:00+00:00",
        ),
        (
            "23:30:00 Asia/Beirut", "2024-10-26T12:00:00+00:00", "2024-10-26T20:30:00+00:00",
            "2024-10-26T21:30:00+00:00",
        ),
    ],
)  # fmt: skip
def test_a_time_of_day_that_occurs_twice_is_due_at_the_first(
    text: str, now: str, first: str, second: str
) -> None:
    assert next_timing_ms(text, ms(now)) == ms(first)
    assert local_time(ms(second), text.split()[1]) == local_time(ms(first), text.split()[1])
    for now_ms in (ms(first), ms(second) - 1, ms(second)):
        assert next_timing_ms(text, now_ms) > ms(second) + 22 * HOUR_MS


@given(
    zone=st.sampled_from(ZONES),
    now_ms=st.integers(ms("2000-01-01T00:00:00+00:00"), ms("2045-01-01T00:00:00+00:00")),
    second_of_day=st.integers(0, 86_399),
)
def test_next_due_times_equal_the_oracle_in_any_zone_at_any_time(
    zone: str, now_ms: int, second_of_day: int
) -> None:
    check(zone, now_ms, second_of_day)


@given(
    zone=st.sampled_from(
        [z for z in ZONES if z not in ("Pacific/Apia", "Etc/GMT+12", "UTC", "Asia/Kathmandu")]
    ),
    year=st.integers(2001, 2037),
    number=st.integers(0, 20),
    now_offset_ms=st.integers(-26 * HOUR_MS, 26 * HOUR_MS),
    time_offset_ms=st.integers(-3 * HOUR_MS, 3 * HOUR_MS),
)
def test_next_due_times_equal_the_oracle_around_clock_changes(
    zone: str, year: int, number: int, now_offset_ms: int, time_offset_ms: int
) -> None:
    transitions_ms = transitions(zone, year)
    if transitions_ms:
        at_ms = transitions_ms[number % len(transitions_ms)]
        # The local time before the change is counted on without the change, so that it can be in a gap.
        time_of_day = local_time(at_ms - 1000, zone) + timedelta(milliseconds=time_offset_ms)
        second_of_day = (time_of_day.hour * 60 + time_of_day.minute) * 60 + time_of_day.second
        check(zone, at_ms + now_offset_ms, second_of_day)


def transitions(zone: str, year: int) -> list[int]:
    """Return the instants of a year (ms since 1970) at which the UTC offset changes. All are quarters of an hour."""
    info = clock_of(zone)
    start = datetime(year, 1, 1, tzinfo=UTC)
    days = [start + timedelta(days=n) for n in range(367)]
    result = []
    for begin, end in itertools.pairwise(days):
        if begin.astimezone(info).utcoffset() != end.astimezone(info).utcoffset():
            quarters = [begin + timedelta(minutes=15 * n) for n in range(97)]
            offsets = [quarter.astimezone(info).utcoffset() for quarter in quarters]
            result += [
                ms(q.isoformat())
                for q, a, b in zip(quarters[1:], offsets, offsets[1:], strict=False)
                if a != b
            ]
    return result


def check(zone: str, now_ms: int, second_of_day: int) -> None:
    """Assert that the next due time is right: the local time is shown or skipped then, and not at an earlier instant.

    The search goes through all quarters of an hour from now until the due time. The clock changes only at a quarter.
    """
    clock = time(second_of_day // 3600, second_of_day // 60 % 60, second_of_day % 60)
    at_ms = next_timing_ms(f"{clock} {zone}", now_ms)
    assert now_ms < at_ms <= now_ms + 50 * HOUR_MS and at_ms % 1000 == 0
    assert local_time(at_ms, zone).time() == clock or clock in skipped_at(at_ms, zone)
    quarter_ms = now_ms // QUARTER_MS * QUARTER_MS
    while quarter_ms <= at_ms:
        if now_ms < quarter_ms < at_ms:
            assert clock not in skipped_at(quarter_ms, zone), f"{clock} was skipped at {quarter_ms}"
        begin = local_time(quarter_ms, zone)
        for day in (begin.date(), begin.date() + timedelta(days=1)):
            distance = datetime.combine(day, clock) - begin
            found_ms = quarter_ms + distance // timedelta(milliseconds=1)
            if distance // timedelta(milliseconds=QUARTER_MS) == 0 and now_ms < found_ms < at_ms:
                found = datetime.fromtimestamp(found_ms // 1000, clock_of(zone))
                assert found.fold == 1, f"{clock} was shown at {found_ms} for the first time"
        quarter_ms += QUARTER_MS


class Skipped:
    """The times of day in a range of local times, which a clock change skips."""

    def __init__(self, low: datetime, high: datetime) -> None:
        self.low, self.high = low, high

    def __contains__(self, clock: time) -> bool:
        days = (self.low.date() + timedelta(days=n) for n in (0, 1))
        return any(self.low <= datetime.combine(day, clock) < self.high for day in days)


def skipped_at(at_ms: int, zone: str) -> Skipped:
    """Return the times of day that the clock change at an instant skips. None are skipped if there is no change."""
    return Skipped(local_time(at_ms - 1000, zone) + timedelta(seconds=1), local_time(at_ms, zone))


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "8:00:00", "08:00", "24:00:00", "08:60:00", "08:00:60", "08:00:00.5", " 08:00:00", "08:00:00 ",
        "08-00-00", "٠٨:00:00", "08:00:00Z", "08:00:00+2", "08:00:00+0200", "08:00:00+19:00", "08:00:00+18:01",
        "08:00:00  Europe/Berlin", "08:00:00Europe/Berlin", "08:00:00 Europe/Atlantis", "08:00:00 ../zones",
        "08:00:00 Europe", "08:00:00 europe/berlin", "08:00:00 CET; drop", "08:00:00 " + "A" * 5_000, "08:00:00\n",
    ],
)  # fmt: skip
def test_other_formats_of_a_time_of_day_are_refused(text: str) -> None:
    with pytest.raises(InvalidDelay) as refused:
        next_timing_ms(text, ms("2024-06-01T00:00:00+00:00"))
    assert len(str(refused.value)) < 250


def test_a_refused_time_of_day_names_the_format() -> None:
    examples = re.escape("'08:00:00 Europe/Berlin' or '08:00:00+02:00'")
    with pytest.raises(InvalidDelay, match=f"HH:MM:SS.*UTC: {examples}"):
        next_timing_ms("8 o'clock", 0)


def test_a_time_of_day_after_the_end_of_the_calendar_is_refused() -> None:
    assert next_timing_ms("00:00:00", ms("9999-12-28T23:00:00+00:00")) == ms("9999-12-29T00:00:00+00:00")
    with pytest.raises(InvalidDelay, match="calendar"):
        next_timing_ms("00:00:00", ms("9999-12-31T23:00:00+00:00"))


@pytest.mark.parametrize("zone", [*CHANGED_ZONES, "Europe/Berlin", "America/Santiago"])
def test_a_time_of_day_is_due_at_the_first_instant_of_a_local_time_around_a_change(zone: str) -> None:
    """Now is one millisecond before that instant, because TIMING has no date."""
    for change in changes(zone, 2024, 2029):
        for local in local_times_around(change, zone):
            at = first_instant(local.replace(microsecond=0), zone)
            now_ms = (at - EPOCH) // US // 1_000 - 1
            assert next_timing_ms(f"{local.time():%H:%M:%S} {zone}", now_ms) == now_ms + 1


@given(st.text(max_size=40))
def test_any_text_is_due_within_two_days_or_refused(text: str) -> None:
    now_ms = ms("2024-06-01T12:00:00+00:00")
    try:
        at_ms = next_timing_ms(text, now_ms)
    except InvalidDelay:
        return
    assert now_ms < at_ms <= now_ms + 2 * DAY_MS
