"""Occurrences around every change of a clock, against the definition; and the table of docs/recurring-rules.md."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from tests.broker.recurring.clock_oracle import (
    FIXED_TIME,
    FIXED_TIME_SKIP_BOTH,
    HOURLY,
    Case,
    Clock,
    at_time,
    cases,
    clocks,
    expected,
)
from tests.local_time_oracle import CHANGED_ZONES, distinct_zones
from tests.rounds import rounds

from timeball.broker.recurring.cron_rule import parse_cron
from timeball.broker.recurring.occurrences import ClockTimetable
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.model import limits
from timeball.model.time_parsing import Period, Zone, instant_ms, load_zone

HOUR_MS = limits.HOUR_MS


def computed(case: Case, clock: Clock) -> list[tuple[int, str]]:
    """Compute the runs with `Rule`, in the form of `expected`."""
    rule = Rule.parse({**case.spec, "zone": clock.zone})
    runs = rule.between(clock.from_ms, clock.until_ms, 10_000)
    return [(run.due_ms // 1_000, run.local) for run in runs]


def differences(clock: Clock) -> list[str]:
    """List the cases whose runs around this change of the clock differ from the oracle."""
    return [
        f"{clock.zone} {clock.low} {case.spec}: {computed(case, clock)} in place of {expected(case, clock)}"
        for case in cases(clock)
        if computed(case, clock) != expected(case, clock)
    ]


def check_zone(zone: str, first_year: int = 1970, end_year: int = 2038) -> int:
    """Compare all cases at each change of a zone's clocks. Return the number of changes."""
    number = 0
    for clock in clocks(zone, first_year, end_year):
        assert not differences(clock)
        number += 1
    return number


@pytest.mark.parametrize(
    "zone",
    [
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Africa/Cairo",
        "America/Sao_Paulo",
        "Antarctica/Troll",
        "Pacific/Apia",
        "Africa/Monrovia",
        "Africa/Casablanca",
    ],
)
def test_runs_around_changes_of_some_zones_match_the_oracle(zone: str) -> None:
    assert check_zone(zone, 2009, 2013) + check_zone(zone, 1971, 1973) + check_zone(zone, 2026, 2027)


def test_runs_around_one_change_of_every_third_zone_match_the_oracle() -> None:
    rng = random.Random(20261129)
    zones = rng.sample(distinct_zones(), len(distinct_zones()) // 3)
    for zone in zones:
        year = rng.randrange(1970, 2030)
        for clock in list(clocks(zone, year, year + 8))[:1]:
            assert not differences(clock)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("part", range(rounds(3, 16)))
def test_runs_around_each_change_of_every_zone_match_the_oracle(part: int) -> None:
    assert sum(check_zone(zone) for zone in distinct_zones()[part::16]) > 700


def test_other_gaps_and_folds_are_noticed() -> None:
    """The control: an oracle with another `gap`, `fold`, kind or time of the rule differs where clocks change."""
    spring, autumn = clocks("Europe/Berlin", 2026, 2027)
    assert not differences(spring) and not differences(autumn)
    for index, clock, options in [
        (FIXED_TIME, spring, {"gap": "skip"}),
        (FIXED_TIME, autumn, {"fold": "both"}),
        (FIXED_TIME_SKIP_BOTH, spring, {"gap": "after"}),
        (FIXED_TIME_SKIP_BOTH, autumn, {"fold": "first"}),
    ]:
        case = cases(clock)[index]
        assert computed(case, clock) != expected(Case({**case.spec, **options}, case.matches), clock)
    hourly = cases(autumn)[HOURLY]
    assert computed(hourly, autumn) != expected(replace(hourly, follows_clock=False), autumn)
    a_minute_late = at_time(datetime.fromisoformat("2026-03-29T02:31"))
    late = Case(cases(spring)[FIXED_TIME].spec, a_minute_late)
    assert computed(late, spring) != expected(late, spring)


class ForgetfulZone(Zone):
    """A zone whose periods do not tell which local times clocks have shown or skipped before them."""

    def __init__(self, zone: Zone) -> None:
        vars(self).update(vars(zone))

    def period(self, instant_us: int) -> Period:
        period = super().period(instant_us)
        return period._replace(reached_us=period.start_us + period.offset_us)


def test_a_timetable_that_forgets_what_was_shown_is_noticed() -> None:
    """The control: without `Period.reached_us`, a skipped time does not run, and a repeated time runs twice."""
    zone = ForgetfulZone(load_zone("Europe/Berlin"))
    for clock in clocks("Europe/Berlin", 2026, 2027):
        case = cases(clock)[FIXED_TIME]
        forgetful = ClockTimetable(
            parse_cron(case.spec["cron"]), zone, starts_ms=0, ends_ms=limits.INSTANT_MS_MAX
        )
        runs = forgetful.occurrences(clock.from_ms, clock.until_ms, 10_000)
        assert computed(case, clock) == expected(case, clock)
        assert [(run.due_ms // 1_000, run.local) for run in runs] != expected(case, clock)


# ---- the table of docs/recurring-rules.md -----------------------------------------------------------------------

SPRING, AUTUMN = "2026-03-29", "2026-10-25"  # in Europe/Berlin


def runs(spec: dict[str, object], day: str, zone: str = "Europe/Berlin") -> list[str]:
    """Return the occurrences of a local day: the time in UTC and the local time of each."""
    rule = Rule.parse({"zone": zone, **spec})
    midnights = Rule.parse({"at": [f"{day}T00:00", f"{next_day(day)}T00:00"], "zone": zone}).after(0, 2)
    occurrences = rule.between(midnights[0].due_ms - 1, midnights[1].due_ms - 1, 1_000)
    return [f"{utc(run)} {run.local[11:16]}" for run in occurrences]


def next_day(day: str) -> str:
    return (datetime.fromisoformat(day) + timedelta(days=1)).date().isoformat()


def utc(run: Occurrence) -> str:
    minutes = run.due_ms // limits.MINUTE_MS
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


@pytest.mark.parametrize(
    ("spec", "day", "expected_runs"),
    [
        ({"cron": "30 2 * * *"}, SPRING, ["01:00 02:30"]),
        ({"cron": "30 2 * * *", "gap": "skip"}, SPRING, []),
        ({"cron": "0,30 2 * * *"}, SPRING, ["01:00 02:00"]),
        ({"cron": "0 2,3 * * *"}, SPRING, ["01:00 02:00"]),
        ({"cron": "30 2,3 * * *"}, SPRING, ["01:00 02:30", "01:30 03:30"]),
        ({"cron": "30 2 * * *"}, AUTUMN, ["00:30 02:30"]),
        ({"cron": "30 2 * * *", "fold": "both"}, AUTUMN, ["00:30 02:30", "01:30 02:30"]),
        (
            {"cron": "0,30 2 * * *", "fold": "both"},
            AUTUMN,
            ["00:00 02:00", "00:30 02:30", "01:00 02:00", "01:30 02:30"],
        ),
        (
            {"at": ["2026-03-29T02:30", "2026-03-29T03:00", "2026-03-29T09:00"]},
            SPRING,
            ["01:00 02:30", "07:00 09:00"],
        ),
        ({"rrule": "DTSTART:20260301T023000\nRRULE:FREQ=DAILY"}, SPRING, ["01:00 02:30"]),
        ({"rrule": "DTSTART:20260301T023000\nRRULE:FREQ=DAILY"}, AUTUMN, ["00:30 02:30"]),
    ],
)
def test_gap_and_fold_decide_about_a_fixed_time_on_the_day_of_a_clock_change(
    spec: dict[str, object], day: str, expected_runs: list[str]
) -> None:
    assert runs(spec, day) == expected_runs


@pytest.mark.parametrize(
    ("zone", "day", "cron", "expected_runs"),
    [
        ("America/New_York", "2026-03-08", "30 2 * * *", ["07:00 02:30"]),
        ("America/New_York", "2026-03-08", "0 */12 * * *", ["05:00 00:00", "16:00 12:00"]),
        ("America/New_York", "2026-11-01", "30 1 * * *", ["05:30 01:30"]),
        ("Australia/Lord_Howe", "2026-10-04", "15 2 * * *", ["15:30 02:15"]),
        ("Australia/Lord_Howe", "2026-04-05", "45 1 * * *", ["14:45 01:45"]),
        ("Africa/Cairo", "2026-04-24", "0 0 * * *", ["22:00 00:00"]),
        ("Africa/Cairo", "2026-10-29", "30 23 * * *", ["20:30 23:30"]),
        ("America/Sao_Paulo", "2018-11-04", "0 0 * * *", ["03:00 00:00"]),
        ("Antarctica/Troll", "2026-03-29", "30 2 * * *", ["01:00 02:30"]),
        ("Pacific/Apia", "2011-12-31", "0 12 * * *", ["10:00 12:00", "22:00 12:00"]),
    ],
)
def test_a_time_that_clocks_of_other_zones_skip_or_repeat_runs_once(
    zone: str, day: str, cron: str, expected_runs: list[str]
) -> None:
    """Apia skipped 30 December 2011: the run of that day takes place when the next day begins.

    The cron expression "0 */12 * * *" names times that no clock skips.
    """
    assert runs({"cron": cron}, day, zone) == expected_runs


@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "America/New_York", "Africa/Cairo", "Antarctica/Troll", *CHANGED_ZONES]
)
@pytest.mark.parametrize(
    "spec",
    [
        {"cron": "30 * * * *"},
        {"cron": "@hourly"},
        {"cron": "0 0-23 * * *"},
        {"rrule": "DTSTART:20250101T000000\nRRULE:FREQ=HOURLY"},
        {"rrule": "DTSTART:20250101T000000\nRRULE:FREQ=DAILY;BYHOUR=" + ",".join(map(str, range(24)))},
    ],
)
def test_a_rule_of_each_hour_runs_each_hour_if_clocks_change_by_whole_hours(
    spec: dict[str, object], zone: str
) -> None:
    rule = Rule.parse({**spec, "zone": zone})
    dues = [run.due_ms for run in rule.after(instant_ms("2026-01-01T00:00:00Z"), 8_760)]
    assert {later - earlier for earlier, later in pairwise(dues)} == {HOUR_MS}


def test_an_hourly_rule_has_one_longer_distance_if_clocks_change_by_half_an_hour() -> None:
    """The rule follows the clock: in Lord Howe, one distance is an hour and a half."""
    rule = Rule.parse({"cron": "0 * * * *", "zone": "Australia/Lord_Howe"})
    for day in ("2026-04-04T12:00:00Z", "2026-10-03T12:00:00Z"):
        dues = [run.due_ms for run in rule.after(instant_ms(day), 8)]
        assert sorted({later - earlier for earlier, later in pairwise(dues)}) == [
            HOUR_MS,
            3 * HOUR_MS // 2,
        ]


def test_rare_local_times_are_found_far_ahead() -> None:
    rule = Rule.parse({"cron": "30 2 29 2 *", "zone": "Europe/Berlin"})
    assert [run.local[:10] for run in rule.after(instant_ms("2095-01-01T00:00:00Z"), 3)] == [
        "2096-02-29",
        "2104-02-29",
        "2108-02-29",
    ]


# ---- elapsed time -----------------------------------------------------------------------------------------------


def texts_after(rule: Rule, after: str, number: int) -> list[str]:
    """Return the first occurrences later than an instant, as texts."""
    return [run.local for run in rule.after(instant_ms(after), number)]


def test_an_interval_counts_elapsed_time_also_over_a_clock_change() -> None:
    rule = Rule.parse({"every": "12h", "anchor": "2026-03-28T07:00:00+01:00"})
    assert texts_after(rule, "2026-01-01T00:00:00Z", 3) == [
        "2026-03-28T06:00:00Z",
        "2026-03-28T18:00:00Z",
        "2026-03-29T06:00:00Z",
    ]
    assert texts_after(rule, "2026-03-28T06:00:00Z", 1) == ["2026-03-28T18:00:00Z"]
    assert texts_after(rule, "2026-03-28T05:59:59.999Z", 1) == ["2026-03-28T06:00:00Z"]


def test_an_interval_without_an_anchor_counts_from_1970() -> None:
    quarters, seconds = Rule.parse({"every": "15m"}), Rule.parse({"every": "1500ms"})
    assert texts_after(quarters, "2026-01-01T00:01:00Z", 2) == [
        "2026-01-01T00:15:00Z",
        "2026-01-01T00:30:00Z",
    ]
    assert texts_after(seconds, "2026-01-01T00:00:00Z", 1) == ["2026-01-01T00:00:01.500Z"]


def test_an_interval_leaves_out_excluded_days_of_its_zone() -> None:
    rule = Rule.parse({"every": "6h", "zone": "Europe/Berlin", "exclude": ["2026-10-25", "2026-10-27"]})
    assert texts_after(rule, "2026-10-24T12:00:00Z", 6) == [
        "2026-10-24T18:00:00Z",
        "2026-10-26T00:00:00Z",
        "2026-10-26T06:00:00Z",
        "2026-10-26T12:00:00Z",
        "2026-10-26T18:00:00Z",
        "2026-10-28T00:00:00Z",
    ]


# ---- the first and the last time --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [{"cron": "0 * * * *", "zone": "Pacific/Auckland"}, {"every": "1h"}])
def test_occurrences_lie_between_1970_and_9999(spec: dict[str, object]) -> None:
    rule = Rule.parse(spec)
    assert rule.after(-(10**18))[0].due_ms == 0
    assert rule.after(-1)[0].due_ms == 0
    assert rule.after(instant_ms("2262-04-12T00:00:00Z"))[0].due_ms == instant_ms("2262-04-12T01:00:00Z")
    assert rule.after(limits.INSTANT_MS_MAX) == rule.after(10**18) == []
    last = rule.after(limits.INSTANT_MS_MAX - 24 * HOUR_MS, 100)
    assert last and last[-1].due_ms <= limits.INSTANT_MS_MAX
    assert rule.between(0, -5, 10) == rule.between(5, 5, 10) == rule.after(0, 0) == []
