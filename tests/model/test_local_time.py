"""Local times: every zone and every change of an offset, compared with an oracle that only reads clocks."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.local_time_oracle import (
    CHANGED_ZONES,
    EPOCH,
    US,
    changes,
    clock,
    distinct_zones,
    first_instant_us,
    local_times_around,
    zone_names,
)
from tests.rounds import only_in_a_siege

from timeball.model import time_parsing
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import DAY_US, fixed_offset, load_zone, local_us

naive = datetime.fromisoformat
NAIVE_EPOCH = EPOCH.replace(tzinfo=None)


def us(text: str) -> int:
    """Convert text in ISO 8601 with an offset to us since 1970."""
    return (datetime.fromisoformat(text) - EPOCH) // US


@pytest.mark.parametrize(
    ("zone", "local", "instant"),
    [
        ("Europe/Berlin", "2026-03-29T01:59:59.999999", "2026-03-29T01:59:59.999999+01:00"),
        ("Europe/Berlin", "2026-03-29T02:00:00", "2026-03-29T03:00:00+02:00"),
        ("Europe/Berlin", "2026-03-29T02:30:00", "2026-03-29T03:00:00+02:00"),
        ("Europe/Berlin", "2026-03-29T03:00:00", "2026-03-29T03:00:00+02:00"),
        ("Europe/Berlin", "2026-10-25T02:30:00", "2026-10-25T02:30:00+02:00"),
        ("Europe/Berlin", "2026-10-25T02:59:59.999999", "2026-10-25T02:59:59.999999+02:00"),
        ("Europe/Berlin", "2026-10-25T03:00:00", "2026-10-25T03:00:00+01:00"),
        ("Australia/Lord_Howe", "2026-10-04T02:15:00", "2026-10-04T02:30:00+11:00"),
        ("Africa/Cairo", "2026-04-24T00:30:00", "2026-04-24T01:00:00+03:00"),
        ("America/Havana", "2026-03-08T00:00:00", "2026-03-08T01:00:00-04:00"),
        ("Pacific/Apia", "2011-12-30T12:00:00", "2011-12-31T00:00:00+14:00"),
        ("Asia/Manila", "1844-12-31T12:00:00", "1845-01-01T00:00:00+08:03:52"),
        # Decided in 2026: British Columbia, Alberta and Manitoba keep summer time, Morocco keeps UTC.
        ("America/Vancouver", "2026-12-01T08:00:00", "2026-12-01T15:00:00+00:00"),
        ("Canada/Pacific", "2027-01-15T08:00:00", "2027-01-15T15:00:00+00:00"),
        ("America/Edmonton", "2026-12-01T08:00:00", "2026-12-01T14:00:00+00:00"),
        ("America/Inuvik", "2026-12-01T08:00:00", "2026-12-01T14:00:00+00:00"),
        ("America/Yellowknife", "2026-12-01T08:00:00", "2026-12-01T14:00:00+00:00"),
        ("Canada/Mountain", "2026-12-01T08:00:00", "2026-12-01T14:00:00+00:00"),
        ("America/Winnipeg", "2026-12-01T08:00:00", "2026-12-01T13:00:00+00:00"),
        ("America/Rainy_River", "2026-12-01T08:00:00", "2026-12-01T13:00:00+00:00"),
        ("Canada/Central", "2026-12-01T08:00:00", "2026-12-01T13:00:00+00:00"),
        ("Africa/Casablanca", "2026-12-01T08:00:00", "2026-12-01T08:00:00+00:00"),
        ("Africa/El_Aaiun", "2026-12-01T08:00:00", "2026-12-01T08:00:00+00:00"),
        ("America/Havana", "2026-12-01T08:00:00", "2026-12-01T12:00:00+00:00"),
        ("Cuba", "2026-12-01T08:00:00", "2026-12-01T12:00:00+00:00"),
        # Moldova changes with the European Union since 2022: at 03:00 there, not at 02:00.
        ("Europe/Chisinau", "2027-03-28T02:30:00", "2027-03-28T02:30:00+02:00"),
        # Zones whose names or rules Java lacks.
        ("Factory", "2027-01-01T00:00:00", "2027-01-01T00:00:00+00:00"),
        ("ROC", "2027-01-01T00:00:00", "2027-01-01T00:00:00+08:00"),
        ("America/Coyhaique", "2027-07-01T00:00:00", "2027-07-01T00:00:00-03:00"),
    ],
)
def test_a_local_time_is_converted_by_the_rules_of_its_zone(zone: str, local: str, instant: str) -> None:
    assert load_zone(zone).instant_us(local_us(datetime.fromisoformat(local))) == us(instant)


def test_the_changed_zones_have_cases_above() -> None:
    [mark] = test_a_local_time_is_converted_by_the_rules_of_its_zone.pytestmark  # type: ignore[attr-defined]
    assert set(CHANGED_ZONES) <= {zone for zone, *_ in mark.args[1]}


@pytest.mark.parametrize("zone", [*CHANGED_ZONES, "Europe/Berlin", "America/Sao_Paulo", "Pacific/Kwajalein"])
def test_local_times_around_each_change_of_some_zones_equal_the_oracles(zone: str) -> None:
    check_zone(zone)


def test_local_times_around_one_change_of_every_zone_equal_the_oracles() -> None:
    for number, zone in enumerate(distinct_zones()):
        zone_changes = list(changes(zone, 1970 + number % 60, 1978 + number % 60))[:1]
        check_changes(zone, zone_changes)


@pytest.mark.siege
@only_in_a_siege
@pytest.mark.slow
def test_local_times_around_each_change_of_every_zone_equal_the_oracles() -> None:
    assert sum(check_zone(zone) for zone in distinct_zones()) > 15_000


def check_zone(zone: str) -> int:
    """Check all changes of a zone. Returns their number."""
    zone_changes = list(changes(zone))
    check_changes(zone, zone_changes)
    return len(zone_changes)


def check_changes(zone: str, zone_changes: list[datetime]) -> None:
    """Compare local times and offsets around these changes with the oracle."""
    rules = load_zone(zone)
    locals_ = [local for change in zone_changes for local in local_times_around(change, zone)]
    wanted = [first_instant_us(local, zone) for local in locals_]
    numbers = [local_us(local) for local in locals_]
    assert [rules.instant_us(number) for number in numbers] == wanted
    assert rules.instants_us(np.array(numbers, np.int64)).tolist() == wanted
    for change in zone_changes:
        at_us = (change - EPOCH) // US
        for at in (at_us - 1, at_us):
            assert rules.offset_us(at) == (EPOCH + at * US).astimezone(clock(zone)).utcoffset() // US


@given(
    zone=st.sampled_from(distinct_zones()),
    local=st.datetimes(naive("1890-01-01"), naive("9998-01-01")),
)
@example("Europe/Dublin", naive("2399-07-01"))  # the footer's standard time is the summer's
@example("America/Nuuk", naive("2826-03-28T23:00"))
@example("America/Havana", naive("9997-11-02T00:30"))
@example("Antarctica/Troll", naive("2440-03-27T01:30"))
def test_any_local_time_is_converted_to_the_first_instant(zone: str, local: datetime) -> None:
    rules, number = load_zone(zone), local_us(local)
    wanted = first_instant_us(local, zone)
    assert rules.instant_us(number) == wanted
    assert rules.instants_us(np.array([number], np.int64)).tolist() == [wanted]
    assert rules.is_shown(number) == (
        (EPOCH + wanted * US).astimezone(clock(zone)).replace(tzinfo=None) == local
    )


@pytest.mark.parametrize(
    "zone", ["Europe/Berlin", "Africa/Cairo", "Australia/Lord_Howe", "Pacific/Apia", "Etc/GMT+5"]
)
def test_periods_have_one_offset_and_follow_each_other(zone: str) -> None:
    rules = load_zone(zone)
    # The tables end in 2037 or with the last change. The last of these years follows by the rules of the calendar.
    for first_year in (1970, 2009, 2026, 2830):
        at_us = us(f"{first_year}-06-01T00:00:00+00:00")
        for change in changes(zone, first_year, first_year + 4):
            change_us = (change - EPOCH) // US
            before, after = rules.period(change_us - 1), rules.period(change_us)
            assert before.end_us == after.start_us == change_us
            assert (before.offset_us, after.offset_us) == (
                rules.offset_us(change_us - 1),
                rules.offset_us(change_us),
            )
            assert rules.instant_us(after.reached_us - 1) < change_us <= rules.instant_us(after.reached_us)
        period = rules.period(at_us)
        assert period.start_us <= at_us < period.end_us
        assert rules.period(period.start_us) == period


def test_instants_beyond_the_years_of_a_calendar_are_computed() -> None:
    """The conversion is not limited. Its callers check the range of instants."""
    berlin = load_zone("Europe/Berlin")
    far = (naive("9999-07-01") - NAIVE_EPOCH) // US + 400 * 365 * DAY_US
    assert berlin.instant_us(far) == berlin.instants_us(np.array([far]))[0] > far - 3 * 3_600_000_000
    ends = np.array([-(2**63), 2**63 - 1], np.int64)
    early, late = berlin.instants_us(ends).tolist()
    assert early < us("0001-01-02T00:00:00+00:00") and late > us("9999-12-31T00:00:00+00:00")
    assert berlin.instant_us(-(2**63)) < early and berlin.instant_us(2**63) > late


@pytest.mark.parametrize(
    "name", ["", "Europe", "europe/berlin", "../zones", "Mars/Olympus", "EST4", "x" * 500, "UTC\n"]
)
def test_an_unknown_name_of_a_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidDelay, match=r"no time zone of the IANA's list \(tzdata 20\d\d"):
        load_zone(name)


def test_every_zone_of_tzdata_can_be_loaded() -> None:
    assert len(zone_names()) >= 598
    for name in zone_names():
        assert load_zone(name).name == name


def test_the_hosts_rules_of_zones_are_not_used(tmp_path: Path) -> None:
    wrong = tmp_path / "Europe/Berlin"
    wrong.parent.mkdir()
    wrong.write_bytes((resources.files("tzdata") / "zoneinfo/Asia/Tokyo").read_bytes())
    try:
        zoneinfo.reset_tzpath([str(tmp_path)])
        hosts = zoneinfo.ZoneInfo.no_cache("Europe/Berlin")
        rules = time_parsing._zone.__wrapped__("Europe/Berlin")
    finally:
        zoneinfo.reset_tzpath()
    noon = datetime(2024, 1, 1, 12, tzinfo=UTC)
    assert noon.astimezone(hosts).utcoffset() == timedelta(hours=9), "the control"
    assert rules.offset_us((noon - EPOCH) // US) == 3_600_000_000


def test_other_libraries_read_a_repeated_time_differently() -> None:
    """So they are not used for conversions (docs/times.md). A release that changes this fails here."""
    import duckdb
    import pyarrow as pa

    with duckdb.connect() as database:
        try:
            database.execute("set timezone = 'Europe/Berlin'")
        except duckdb.Error:
            pytest.skip("DuckDB's time zones are an extension that is not installed")
        [row] = database.execute("select epoch_us('2026-10-25 02:30:00'::timestamptz)").fetchall()
    assert row[0] == us("2026-10-25T02:30:00+01:00") == us("2026-10-25T02:30:00+02:00") + 3_600_000_000
    berlin = clock("Europe/Berlin")
    first, second = (datetime(2026, 10, 25, 2, 30, tzinfo=berlin, fold=fold) for fold in (0, 1))
    assert len({first, second}) == 1 and first.utcoffset() != second.utcoffset()
    mixed = pa.array([first, naive("2026-10-25T02:30")])
    assert mixed.cast(pa.int64()).to_pylist() == [
        us("2026-10-25T02:30:00+02:00"),
        us("2026-10-25T02:30:00+00:00"),
    ]


def test_a_fixed_offset_is_added_to_each_instant() -> None:
    assert fixed_offset(-5_400).instant_us(0) == 5_400_000_000
    assert fixed_offset(5_400).offset_us(10**18) == 5_400_000_000


@pytest.mark.parametrize(
    ("rule", "year", "local"),
    [
        ("M3.5.0", 2026, "2026-03-29T02:00:00"),
        ("M3.5.0/-1", 2026, "2026-03-28T23:00:00"),
        ("M10.1.0/3:30:15", 2026, "2026-10-04T03:30:15"),
        ("M3.4.4/50", 2026, "2026-03-28T02:00:00"),
        ("M12.5.6", 2026, "2026-12-26T02:00:00"),
        ("J60", 2024, "2024-03-01T02:00:00"),  # the leap day is not counted
        ("J60", 2026, "2026-03-01T02:00:00"),
        ("J59", 2024, "2024-02-28T02:00:00"),
        ("59", 2024, "2024-02-29T02:00:00"),
        ("0/0", 2026, "2026-01-01T00:00:00"),
    ],
)
def test_a_footers_rule_gives_the_time_of_the_change(rule: str, year: int, local: str) -> None:
    local_s = time_parsing._YearlyChange.read(rule).local_s(year)
    assert NAIVE_EPOCH + timedelta(seconds=local_s) == datetime.fromisoformat(local)


@pytest.mark.parametrize("data", [b"", b"TZif1" + bytes(60), b"TZnn2" + bytes(60)])
def test_a_file_of_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="TZif"):
        time_parsing._decode_tzif(data)


@pytest.mark.parametrize("footer", ["EST", "EST5EDT,M3.2.0", "CET-1CEST,M3.5.0,X1"])
def test_a_footer_that_is_not_understood_is_refused(footer: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        time_parsing._build_zone("Test/Zone", time_parsing._TzifData([], [], 0, footer))


def test_the_version_is_that_of_the_installed_tzdata() -> None:
    assert time_parsing.VERSION.count(".") >= 1 and int(time_parsing.VERSION.partition(".")[0]) >= 2026
    assert datetime(2026, 12, 1, 15, tzinfo=UTC).astimezone(clock("America/Vancouver")).hour == 8, (
        "the control"
    )
