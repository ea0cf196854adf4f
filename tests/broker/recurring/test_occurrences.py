"""Occurrences around every change of a clock, against the definition; and the table of docs/recurring-rules.md."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from tests.broker.recurring.clock_oracle import Case, Clock, at_time, cases, clocks, expected
from tests.local_time_oracle import CHANGED_ZONES, distinct_zones
from tests.rounds import rounds

from timeball.broker.recurring.cron_rule import parse_cron
from timeball.broker.recurring.occurrences import ClockTimetable
from timeball.broker.recurring.rule import Occurrence, Rule
from timeball.model import limits
from timeball.model.time_parsing import Period, Zone, instant_ms, load_zone

HOUR_MS = limits.HOUR_MS


def found(case: Case, clock: Clock) -> list[tuple[int, str]]:
    rule = Rule.parse({**case.spec, "zone": clock.zone})
    runs = rule.between(clock.from_ms, clock.until_ms, 10_000)
    return [(run.due_ms // 1_000, run.local) for run in runs]


def differences(clock: Clock) -> list[str]:
    return [
        f"{clock.zone} {clock.low} {case.spec}: {found(case, clock)} in place of {expected(case, clock)}"
        for case in cases(clock)
        if found(case, clock) != expected(case, clock)
    ]


def check_zone(zone: str, first_year: int = 1970, end_year: int = 2038) -> int:
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
def test_around_changes_of_some_zones(zone: str) -> None:
    assert check_zone(zone, 2009, 2013) + check_zone(zone, 1971, 1973) + check_zone(zone, 2026, 2027)


def test_around_one_change_of_every_third_zone() -> None:
    choice = random.Random(20261129)
    zones = choice.sample(distinct_zones(), len(distinct_zones()) // 3)
    for zone in zones:
        year = choice.randrange(1970, 2030)
        for clock in list(clocks(zone, year, year + 8))[:1]:
            assert not differences(clock)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.parametrize("part", range(rounds(3, 16)))
def test_around_each_change_of_every_zone(part: int) -> None:
    assert sum(check_zone(zone) for zone in distinct_zones()[part::16]) > 700


def test_other_gaps_and_folds_are_noticed() -> None:
    """The control: an oracle with another rule for one thing differs where clocks change."""
    spring, autumn = clocks("Europe/Berlin", 2026, 2027)
    fixed = cases(spring)[3], cases(autumn)[3]
    hourly = cases(autumn)[2]
    assert not differences(spring) and not differences(autumn)
    for case, clock, wrong in [
        (fixed[0], spring, {"gap": "skip"}),
        (fixed[1], autumn, {"fold": "both"}),
        (cases(spring)[4], spring, {"gap": "after"}),
        (cases(autumn)[4], autumn, {"fold": "first"}),
    ]:
        assert found(case, clock) != expected(Case({**case.spec, **wrong}, case.matches), clock)
    assert found(hourly, autumn) != expected(replace(hourly, follows_clock=False), autumn)
    late = Case(fixed[0].spec, at_time(datetime.fromisoformat("2026-03-29T02:31")))
    assert found(late, spring) != expected(late, spring)


class ForgetfulZone(Zone):
    """A zone whose periods begin as if no local time was shown or skipped before them."""

    def __init__(self, zone: Zone) -> None:
        vars(self).update(vars(zone))

    def period(self, instant_us: int) -> Period:
        period = super().period(instant_us)
        return period._replace(reached_us=period.start_us + period.offset_us)


def test_a_timetable_that_forgets_what_was_shown_is_noticed() -> None:
    zone = ForgetfulZone(load_zone("Europe/Berlin"))
    for clock in clocks("Europe/Berlin", 2026, 2027):
        case = cases(clock)[3]
        wrong = ClockTimetable(
            parse_cron(case.spec["cron"]), zone, starts_ms=0, ends_ms=limits.INSTANT_MS_MAX
        )
        runs = wrong.occurrences(clock.from_ms, clock.until_ms, 10_000)
        assert (
            [(run.due_ms // 1_000, run.local) for run in runs] != expected(case, clock) == found(case, clock)
        )


# ---- the table of docs/recurring-rules.md -----------------------------------------------------------------------

SPRING, AUTUMN = "2026-03-29", "2026-10-25"  # in Europe/Berlin


def runs(spec: dict[str, object], day: str, zone: str = "Europe/Berlin") -> list[str]:
    """Return the occurrences of a day in UTC, each with its local time if that is another than expected."""
    rule = Rule.parse({"zone": zone, **spec})
    midnight = Rule.parse({"at": [f"{day}T00:00", f"{next_day(day)}T00:00"], "zone": zone}).after(0, 2)
    found = rule.between(midnight[0].due_ms - 1, midnight[1].due_ms - 1, 1_000)
    return [f"{utc(run)} {run.local[11:16]}" for run in found]


def next_day(day: str) -> str:
    return (datetime.fromisoformat(day) + timedelta(days=1)).date().isoformat()


def utc(run: Occurrence) -> str:
    minutes = run.due_ms // limits.MINUTE_MS
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


@pytest.mark.parametrize(
    ("spec", "day", "wanted"),
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
def test_a_fixed_time_runs_once(spec: dict[str, object], day: str, wanted: list[str]) -> None:
    assert runs(spec, day) == wanted


@pytest.mark.parametrize(
    ("zone", "day", "cron", "wanted"),
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
def test_the_days_of_other_zones(zone: str, day: str, cron: str, wanted: list[str]) -> None:
    """Apia skipped 30 December 2011: the run of that day takes place as the next one begins."""
    assert runs({"cron": cron}, day, zone) == wanted


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
def test_a_rule_of_each_hour_runs_each_hour(spec: dict[str, object], zone: str) -> None:
    """Clocks of these zones are changed by whole hours."""
    rule = Rule.parse({**spec, "zone": zone})
    dues = [run.due_ms for run in rule.after(instant_ms("2026-01-01T00:00:00Z"), 8_760)]
    assert {later - earlier for earlier, later in pairwise(dues)} == {HOUR_MS}


def test_half_an_hour_of_lord_howe() -> None:
    """A change by half an hour: a rule of each hour follows the clock, so one distance is longer."""
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


def dues(rule: Rule, after: str, number: int) -> list[str]:
    return [run.local for run in rule.after(instant_ms(after), number)]


def test_an_interval_is_elapsed_time() -> None:
    rule = Rule.parse({"every": "12h", "anchor": "2026-03-28T07:00:00+01:00"})
    assert dues(rule, "2026-01-01T00:00:00Z", 3) == [
        "2026-03-28T06:00:00Z",
        "2026-03-28T18:00:00Z",
        "2026-03-29T06:00:00Z",
    ]
    assert dues(rule, "2026-03-28T06:00:00Z", 1) == ["2026-03-28T18:00:00Z"]
    assert dues(rule, "2026-03-28T05:59:59.999Z", 1) == ["2026-03-28T06:00:00Z"]


def test_an_interval_without_an_anchor_begins_at_whole_hours() -> None:
    assert dues(Rule.parse({"every": "15m"}), "2026-01-01T00:01:00Z", 2) == [
        "2026-01-01T00:15:00Z",
        "2026-01-01T00:30:00Z",
    ]
    assert dues(Rule.parse({"every": "1500ms"}), "2026-01-01T00:00:00Z", 1) == ["2026-01-01T00:00:01.500Z"]


def test_an_interval_leaves_out_excluded_days_of_its_zone() -> None:
    rule = Rule.parse({"every": "6h", "zone": "Europe/Berlin", "exclude": ["2026-10-25", "2026-10-27"]})
    assert dues(rule, "2026-10-24T12:00:00Z", 6) == [
        "2026-10-24T18:00:00Z",
        "2026-10-26T00:00:00Z",
        "2026-10-26T06:00:00Z",
        "2026-10-26T12:00:00Z",
        "2026-10-26T18:00:00Z",
        "2026-10-28T00:00:00Z",
    ]


# ---- the ends of time -------------------------------------------------------------------------------------------


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
