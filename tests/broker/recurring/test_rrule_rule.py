"""Recurrence rules of RFC 5545: its examples, searches that begin anywhere, and forms that are refused."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import takewhile

import pytest
from dateutil.rrule import rrulestr
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.recurring.local_times import local_datetime, local_seconds
from timeball.broker.recurring.rrule_rule import parse_rrule
from timeball.broker.recurring.rule import Rule
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import instant_ms

naive = datetime.fromisoformat
BERLIN = "Europe/Berlin"


def local_times(text: str, number: int, first: str = "1970-01-01") -> list[str]:
    """Return the first local times of a rule from `first` on, with their hours."""
    times, texts = parse_rrule(text, BERLIN), []
    at = times.at_or_after(local_seconds(naive(first)))
    while at is not None and len(texts) < number:
        texts.append(local_datetime(at).strftime("%Y%m%dT%H"))
        at = times.at_or_after(at + 1)
    return texts


@pytest.mark.parametrize(
    ("rule", "first", "expected"),
    [
        # Examples of RFC 5545, section 3.8.5.3, that begin on 1997-09-02, a Tuesday, at 09:00.
        ("FREQ=DAILY;COUNT=3", "19970902T090000", "19970902T09 19970903T09 19970904T09"),
        ("FREQ=DAILY;INTERVAL=10;COUNT=3", "19970902T090000", "19970902T09 19970912T09 19970922T09"),
        ("FREQ=DAILY;UNTIL=19970903T090000", "19970902T090000", "19970902T09 19970903T09"),
        (
            "FREQ=WEEKLY;UNTIL=19970923T000000;WKST=SU;BYDAY=TU,TH",
            "19970902T090000",
            "19970902T09 19970904T09 19970909T09 19970911T09 19970916T09 19970918T09",
        ),
        (
            "FREQ=WEEKLY;INTERVAL=2;COUNT=5;WKST=SU;BYDAY=TU,TH",
            "19970902T090000",
            "19970902T09 19970904T09 19970916T09 19970918T09 19970930T09",
        ),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=1FR", "19970905T090000", "19970905T09 19971003T09 19971107T09"),
        ("FREQ=MONTHLY;BYMONTHDAY=-3", "19970928T090000", "19970928T09 19971029T09 19971128T09"),
        (
            "FREQ=MONTHLY;INTERVAL=18;COUNT=3;BYMONTHDAY=10",
            "19970910T090000",
            "19970910T09 19990310T09 20000910T09",
        ),
        ("FREQ=YEARLY;COUNT=3;BYMONTH=6,7", "19970610T090000", "19970610T09 19970710T09 19980610T09"),
        (
            "FREQ=YEARLY;INTERVAL=3;COUNT=3;BYYEARDAY=1,100",
            "19970101T090000",
            "19970101T09 19970410T09 20000101T09",
        ),
        ("FREQ=YEARLY;BYDAY=20MO", "19970519T090000", "19970519T09 19980518T09 19990517T09"),
        ("FREQ=YEARLY;BYWEEKNO=20;BYDAY=MO", "19970512T090000", "19970512T09 19980511T09 19990517T09"),
        (
            "FREQ=MONTHLY;COUNT=3;BYDAY=TU,WE,TH;BYSETPOS=3",
            "19970904T090000",
            "19970904T09 19971007T09 19971106T09",
        ),
        (
            "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2",
            "19970929T090000",
            "19970929T09 19971030T09 19971127T09",
        ),
        (
            "FREQ=HOURLY;INTERVAL=3;UNTIL=19970902T170000",
            "19970902T090000",
            "19970902T09 19970902T12 19970902T15",
        ),
        ("FREQ=MINUTELY;INTERVAL=90;COUNT=3", "19970902T090000", "19970902T09 19970902T10 19970902T12"),
        ("FREQ=MINUTELY;INTERVAL=20;BYHOUR=9,16", "19970902T094000", "19970902T09 19970902T16 19970902T16"),
        # Months without the day are left out.
        ("FREQ=MONTHLY", "20260131T090000", "20260131T09 20260331T09 20260531T09"),
        ("FREQ=YEARLY", "20240229T090000", "20240229T09 20280229T09 20320229T09"),
    ],
)
def test_a_rule_has_the_times_that_the_standard_gives(rule: str, first: str, expected: str) -> None:
    # A rule that ends is asked for one time more.
    number = len(expected.split()) + ("COUNT" in rule or "UNTIL" in rule)
    assert local_times(f"DTSTART:{first}\nRRULE:{rule}", number) == expected.split()


# Rules without an end, which dateutil can list from DTSTART on.
ENDLESS = [
    ("20260131T093015", "FREQ=YEARLY"),
    ("20260131T093015", "FREQ=YEARLY;INTERVAL=3"),
    ("20260525T090000", "FREQ=YEARLY;BYMONTH=5,11;BYDAY=-1MO"),
    ("20251229T120000", "FREQ=YEARLY;BYWEEKNO=1,53;BYDAY=MO"),
    ("20260131T090000", "FREQ=MONTHLY;INTERVAL=5"),
    ("20260130T090000", "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1"),
    ("20260107T090000", "FREQ=WEEKLY;INTERVAL=3;BYDAY=MO,WE,SU"),
    ("20260104T090000", "FREQ=WEEKLY;INTERVAL=2;WKST=SU;BYDAY=SU,SA"),
    ("20260107T090000", "FREQ=WEEKLY"),
    ("20260107T091500", "FREQ=DAILY;INTERVAL=11"),
    ("20260107T090000", "FREQ=DAILY;BYMONTH=1,7;BYHOUR=9,18;BYMINUTE=0,30"),
    ("20260107T091500", "FREQ=HOURLY;INTERVAL=7"),
    ("20260107T090000", "FREQ=HOURLY;INTERVAL=6;BYHOUR=3,9"),
    ("20260107T090700", "FREQ=MINUTELY;INTERVAL=1000"),
    ("20260107T090000", "FREQ=MINUTELY;INTERVAL=45;BYHOUR=9,10,11"),
]


@given(rule=st.sampled_from(ENDLESS), days=st.integers(0, 3_000), second=st.integers(0, 86_399))
def test_a_search_from_any_time_finds_the_times_that_dateutil_lists_from_dtstart(
    rule: tuple[str, str], days: int, second: int
) -> None:
    first, text = rule
    from_s = local_seconds(naive("2026-01-01")) + days * 86_400 + second
    until = local_datetime(from_s + 8 * 366 * 86_400)
    from_dtstart = takewhile(lambda time: time < until, iter(rrulestr(f"DTSTART:{first}\nRRULE:{text}")))
    expected = [local_s for local_s in map(local_seconds, from_dtstart) if local_s >= from_s][:40]
    times = parse_rrule(f"DTSTART:{first}\nRRULE:{text}", BERLIN)
    times_found = [times.at_or_after(from_s)]
    while len(times_found) < len(expected):
        times_found.append(times.at_or_after(times_found[-1] + 1))
    assert times_found == expected


def test_excluded_times_are_left_out_but_counted() -> None:
    text = "DTSTART:20260101T090000\nRRULE:FREQ=DAILY;COUNT=3\nEXDATE:20260102T090000,20270101T000000"
    assert local_times(text, 9) == ["20260101T09", "20260103T09"]


def test_folded_lines_time_zones_and_lower_case_are_read() -> None:
    text = (
        "DTSTART;TZID=Europe/Berlin:20260101T090000\r\nRRULE:FREQ=WEEKLY;BYDAY=TH\r\n"
        " ;COUNT=2\r\nEXDATE;TZID=Europe/Berlin:20260108T090000\r\n"
    )
    times = parse_rrule(text, BERLIN)
    assert times.text == (
        "DTSTART:20260101T090000\nRRULE:FREQ=WEEKLY;BYDAY=TH;COUNT=2\nEXDATE:20260108T090000"
    )
    assert parse_rrule("dtstart:20260101T090000\nfreq=daily", BERLIN).text.endswith("RRULE:FREQ=DAILY")
    assert parse_rrule("DTSTART:20260101T090000Z\nRRULE:FREQ=DAILY", "UTC").text.startswith(
        "DTSTART:20260101T090000\n"
    )


def test_until_is_a_local_time_or_an_instant() -> None:
    """On 25 October 2026, 02:30 is shown in Berlin at 00:30 and at 01:30 UTC."""
    for until, dues in [("20261025T023000", 1), ("20261025T003000Z", 1), ("20261025T002959Z", 0)]:
        text = f"DTSTART:20261024T023000\nRRULE:FREQ=DAILY;UNTIL={until}"
        rule = Rule.parse({"rrule": text, "zone": BERLIN})
        assert [run.due_ms for run in rule.after(instant_ms("2026-10-24T12:00:00Z"), 5)] == [
            instant_ms("2026-10-25T00:30:00Z")
        ][:dues]


@pytest.mark.parametrize(
    "until", ["20301225T085959", "20301225T090000", "20301226T085959", "20301226T090000"]
)
@pytest.mark.parametrize(("move", "excluded"), [("after", "2030-12-25"), ("before", "2030-12-26")])
def test_until_as_an_instant_or_a_local_time_applies_before_times_move(
    until: str, move: str, excluded: str
) -> None:
    runs = []
    for end in (until, f"{until}Z"):
        text = f"DTSTART:20301223T090000\nRRULE:FREQ=DAILY;UNTIL={end}"
        rule = Rule.parse({"rrule": text, "zone": "UTC", "exclude": [excluded], "move": move})
        runs.append([run.local for run in rule.after(0, 9)])
    assert runs[0] == runs[1]
    assert (runs[0][-1] == "2030-12-26T09:00:00") == (move == "after" and until > "20301225T085959")


# Seconds around the nights of 2026 in which clocks in Berlin change.
NEAR_CHANGES = st.sampled_from(["2026-03-29T01:00", "2026-10-25T01:00"]).flatmap(
    lambda change: st.integers(-100_000, 100_000).map(lambda s: naive(change) + timedelta(seconds=s))
)


@given(
    until=NEAR_CHANGES,
    fold=st.sampled_from(["first", "both"]),
    parts=st.sampled_from(["DAILY", "HOURLY", "DAILY;BYHOUR=1,2,3;BYMINUTE=0,30"]),
)
def test_until_as_an_instant_ends_a_rule_as_ends_at_does(until: datetime, fold: str, parts: str) -> None:
    rrule = f"DTSTART:{until:%Y%m}20T023000\nRRULE:FREQ={parts}"
    by_rule = {"rrule": f"{rrule};UNTIL={until:%Y%m%dT%H%M%SZ}"}
    by_end = {"rrule": rrule, "ends_at": f"{until.isoformat()}Z"}
    runs = [Rule.parse({**spec, "zone": BERLIN, "fold": fold}).after(0, 300) for spec in (by_rule, by_end)]
    assert runs[0] == runs[1]


def test_in_a_repeated_hour_an_hourly_rule_runs_twice_and_any_other_once() -> None:
    hourly = Rule.parse({"rrule": "DTSTART:20260101T003000\nRRULE:FREQ=HOURLY", "zone": BERLIN})
    assert [run.local[11:16] for run in hourly.after(instant_ms("2026-10-24T23:00:00Z"), 4)] == [
        "01:30",
        "02:30",
        "02:30",
        "03:30",
    ]
    half_daily = Rule.parse(
        {"rrule": "DTSTART:20260101T020000\nRRULE:FREQ=HOURLY;INTERVAL=12", "zone": BERLIN}
    )
    assert [run.due_ms for run in half_daily.after(instant_ms("2026-10-24T23:00:00Z"), 2)] == [
        instant_ms("2026-10-25T00:00:00Z"),
        instant_ms("2026-10-25T13:00:00Z"),
    ]


def test_rare_dates_are_found_far_ahead() -> None:
    text = "DTSTART:20280229T090000\nRRULE:FREQ=YEARLY;INTERVAL=100;BYMONTH=2;BYMONTHDAY=29"
    times = parse_rrule(text, BERLIN)
    assert times.at_or_after(0) == local_seconds(naive("2028-02-29T09:00"))
    assert local_times(text, 2, "2029-01-01") == ["21280229T09", "22280229T09"]
    assert times.at_or_after(local_seconds(naive("9970-01-01"))) is None


SIXTY = ",".join(map(str, range(60)))
REFUSED = [
    ("RRULE:FREQ=DAILY", "DTSTART:20300131T090000"),
    ("DTSTART:20300131T090000", "a line RRULE"),
    ("DTSTART:20300131\nRRULE:FREQ=DAILY", "no local time such as 20300131T090000"),
    ("DTSTART:20300131T090000Z\nRRULE:FREQ=DAILY", "without Z"),
    ("DTSTART:20300231T090000\nRRULE:FREQ=DAILY", "does not exist"),
    ("DTSTART;TZID=America/New_York:20300131T090000\nRRULE:FREQ=DAILY", "write the same zone"),
    ("DTSTART;X-A=1:20300131T090000\nRRULE:FREQ=DAILY", "X-A is not understood"),
    ("DTSTART:19690131T090000\nRRULE:FREQ=DAILY", "before 1970"),
    ("DTSTART:20300101T090000\nDTSTART:20300101T090000\nRRULE:FREQ=DAILY", "one DTSTART"),
    ("DTSTART:20300101T090000\nRRULE:FREQ=DAILY\nRDATE:20300103T090000", "a rule of their own"),
    ("DTSTART:20300101T090000\nnonsense", "is not understood"),
    ("DTSTART:20300101T090000\nRRULE:FREQ=DAILY\nEXDATE;VALUE=DATE:20300102", "write them as `exclude`"),
    # Parts.
    ("RRULE:COUNT=3", "FREQ is one of"),
    ("RRULE:FREQ=SECONDLY", "write the rule every"),
    ("RRULE:FREQ=DAILY;INTERVAL=0", "from 1 to 1000"),
    ("RRULE:FREQ=YEARLY;INTERVAL=200", "from 1 to 100"),
    ("RRULE:FREQ=DAILY;COUNT=100000", "from 1 to 1000"),
    ("RRULE:FREQ=MINUTELY;BYMONTH=2", "write FREQ=DAILY with BYHOUR"),
    ("RRULE:FREQ=HOURLY;BYDAY=MO", "write FREQ=DAILY with BYHOUR"),
    ("RRULE:FREQ=DAILY;BYMINUTE=" + SIXTY + ";BYSECOND=" + SIXTY, "more than 1440 times"),
    ("RRULE:FREQ=DAILY;COUNT=3;UNTIL=20300110T000000", "write one of them"),
    ("RRULE:FREQ=DAILY;UNTIL=20300110", "such as 20301231T235959"),
    ("RRULE:FREQ=DAILY;UNTIL=20300132T000000", "does not exist"),
    ("RRULE:FREQ=DAILY;UNTIL=20291231T235959", "UNTIL is before DTSTART"),
    ("RRULE:FREQ=DAILY;UNTIL=20291231T225959Z", "UNTIL is before DTSTART"),
    ("RRULE:FREQ=DAILY;FREQ=WEEKLY", "given twice"),
    ("RRULE:FREQ=DAILY;RSCALE=GREGORIAN;SKIP=FORWARD", "no part of a rule here"),
    ("RRULE:FREQ=YEARLY;BYEASTER=1", "no part of a rule here"),
    ("RRULE:FREQ=DAILY;BYHOUR=24", "numbers from 0 to 23"),
    ("RRULE:FREQ=DAILY;BYSECOND=60", "numbers from 0 to 59"),
    ("RRULE:FREQ=MONTHLY;BYMONTHDAY=0", "numbers from 1 to 31"),
    ("RRULE:FREQ=DAILY;BYHOUR=-1", "numbers from 0 to 23"),
    ("RRULE:FREQ=WEEKLY;BYDAY=XX", "-1FR"),
    ("RRULE:FREQ=WEEKLY;BYDAY=2MO", "write the day alone"),
    ("RRULE:FREQ=YEARLY;BYWEEKNO=20", "needs FREQ=YEARLY and BYDAY"),
    ("RRULE:FREQ=DAILY;BYYEARDAY=100", "write FREQ=YEARLY"),
    ("RRULE:FREQ=WEEKLY;BYMONTHDAY=1", "write FREQ=MONTHLY"),
    ("RRULE:FREQ=MONTHLY;BYSETPOS=1", "such as BYDAY"),
    ("RRULE:FREQ=DAILY;WKST=MONDAY", "WKST is one of"),
    ("RRULE:FREQ=MONTHLY;BYMONTH=2;BYMONTHDAY=30", "does not match BYMONTH, "),
    ("RRULE:FREQ=MINUTELY;INTERVAL=60;BYHOUR=10;BYMINUTE=1", "does not match BYHOUR, "),
    ("RRULE:FREQ=YEARLY;BYDAY=2TU", "does not match the numbers of days"),
    ("RRULE:FREQ=YEARLY;BYWEEKNO=2;BYDAY=TU", "does not match the numbers of days"),
    ("RRULE:FREQ=DAILY;BYHOUR=9;BYSETPOS=5", "does not match the numbers of days"),
    ("RRULE:FREQ=MONTHLY;BYDAY=5TU;BYMONTHDAY=1", "does not match the numbers of days"),
    ("RRULE:FREQ=MONTHLY;BYMONTHDAY=-1", "does not match BYMONTHDAY"),
    ("RRULE:FREQ=DAILY;INTERVAL=2;BYMONTHDAY=1", "write FREQ=MONTHLY"),
    # 1 January 2030 is a Tuesday.
    ("RRULE:FREQ=WEEKLY;BYDAY=MO", "does not match BYDAY, and programs disagree"),
]


@pytest.mark.parametrize(("text", "advice"), REFUSED)
def test_forms_that_programs_read_differently_are_refused(text: str, advice: str) -> None:
    if text.startswith("RRULE") and text != "RRULE:FREQ=DAILY":
        text = f"DTSTART:20300101T090000\n{text}"
    with pytest.raises(InvalidDelay) as error_info:
        parse_rrule(text, BERLIN)
    assert advice in str(error_info.value)
    assert str(error_info.value).startswith("rrule=")


def test_a_count_that_takes_too_long_to_find_is_refused() -> None:
    rule = "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;COUNT=1000"
    with pytest.raises(InvalidDelay, match="leave COUNT out"):
        parse_rrule(f"DTSTART:20280229T090000\nRRULE:{rule}", BERLIN)


def test_too_many_exdates_are_refused() -> None:
    days = ",".join(
        f"2030{month:02}{day:02}T{hour:02}0000"
        for hour in range(4)
        for month in range(1, 13)
        for day in range(1, 28)
    )
    with pytest.raises(InvalidDelay, match=f"at most {limits.RULE_LISTED_MAX}"):
        parse_rrule(f"DTSTART:20300101T090000\nRRULE:FREQ=DAILY\nEXDATE:{days}", BERLIN)
