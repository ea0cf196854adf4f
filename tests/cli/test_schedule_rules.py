"""The options of a rule: JSON with further keys, and dates of a calendar."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeball.cli.schedule_rules import RuleOptions, read_dates
from timeball.model.errors import RequestError


def test_options_add_keys_to_the_json() -> None:
    options = RuleOptions(rule='{"cron": "@daily", "exclude": ["2030-12-25"]}', zone="UTC")
    assert options.build() == {"cron": "@daily", "exclude": ["2030-12-25"], "zone": "UTC"}
    assert RuleOptions(rrule=r"DTSTART:20300125T090000\nRRULE:FREQ=DAILY").build() == {
        "rrule": "DTSTART:20300125T090000\nRRULE:FREQ=DAILY"
    }


def test_a_file_of_dates_adds_to_the_excluded_ones(tmp_path: Path) -> None:
    file = tmp_path / "dates"
    file.write_text("2030-12-26  # a comment\n\n2031-01-01\n")
    assert RuleOptions(exclude=["2030-12-25"], exclude_file=file).build() == {
        "exclude": ["2030-12-25", "2030-12-26", "2031-01-01"]
    }


CALENDAR = """BEGIN:VCALENDAR
BEGIN:VEVENT
SUMMARY:Christmas
DTSTART;VALUE=DATE:20301225
DTEND;VALUE=DATE:20301227
END:VEVENT
BEGIN:VEVENT
SUMMARY:A name that is so long that its writer
  folded it
DTSTART;VALUE=DATE:20310101
END:VEVENT
END:VCALENDAR
"""


def test_days_of_a_calendar_are_read(tmp_path: Path) -> None:
    file = tmp_path / "holidays.ics"
    file.write_text(CALENDAR.replace("\n", "\r\n"), newline="")
    assert read_dates(file) == ["2030-12-25", "2030-12-26", "2031-01-01"]


@pytest.mark.parametrize(
    ("lines", "days"),
    [
        ("DURATION:P3D", ["2030-12-25", "2030-12-26", "2030-12-27"]),
        ("DURATION:+P1W", [f"2030-12-{day}" for day in range(25, 32)]),
        ("DURATION:P0D", ["2030-12-25"]),
        ("STATUS:CONFIRMED", ["2030-12-25"]),
        ("STATUS:CANCELLED", []),
        ("STATUS:CANCELLED\nRRULE:FREQ=YEARLY", []),
        # The fields of an alarm are not those of its event.
        ("BEGIN:VALARM\nTRIGGER:-PT15M\nREPEAT:2\nDURATION:PT5M\nSUMMARY:Wake\nEND:VALARM", ["2030-12-25"]),
    ],
)
def test_the_days_of_an_event_follow_from_its_duration_and_status(
    tmp_path: Path, lines: str, days: list[str]
) -> None:
    file = tmp_path / "holidays.ics"
    file.write_text(CALENDAR.replace("DTEND;VALUE=DATE:20301227", lines))
    assert read_dates(file) == [*days, "2031-01-01"]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("DURATION:PT36H", "Christmas is no event of whole days"),
        ("DURATION:P1DT12H", "Christmas is no event of whole days"),
        ("DURATION:-P1D", "Christmas is no event of whole days"),
        ("DURATION:P1D\nDTEND;VALUE=DATE:20301227", "Christmas has two ends"),
        ("DURATION:P1000D", "Christmas is no event of whole days"),
        ("DTSTART:99991231\nDURATION:P9D", "--exclude-file"),
    ],
)
def test_a_duration_that_is_no_days_is_refused(tmp_path: Path, lines: str, text: str) -> None:
    file = tmp_path / "holidays.ics"
    file.write_text(CALENDAR.replace("DTEND;VALUE=DATE:20301227", lines))
    with pytest.raises(RequestError, match=text):
        read_dates(file)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("RRULE:FREQ=YEARLY", "Christmas repeats"),
        ("DTSTART:20301225T090000Z", "Christmas is no event of whole days"),
    ],
)
def test_events_without_whole_days_and_a_missing_file_are_refused(
    tmp_path: Path, line: str, text: str
) -> None:
    file = tmp_path / "holidays.ics"
    # The line stands in the place of the day of the event, or before it if it is a repetition.
    file.write_text(
        CALENDAR.replace("SUMMARY:Christmas\nDTSTART;VALUE=DATE:20301225", f"SUMMARY:Christmas\n{line}")
    )
    if line.startswith("RRULE"):
        file.write_text(CALENDAR.replace("SUMMARY:Christmas", f"SUMMARY:Christmas\n{line}"))
    with pytest.raises(RequestError, match=text):
        read_dates(file)
    with pytest.raises(RequestError, match="--exclude-file"):
        read_dates(tmp_path / "none")
