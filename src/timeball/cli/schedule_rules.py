"""The options of a recurring rule: each key of a rule is an option of `timeball schedules put` and `preview`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from timeball.cli.options import with_options
from timeball.model.errors import RequestError

_EVENT = re.compile(r"^BEGIN:VEVENT$(.*?)^END:VEVENT$", re.DOTALL | re.MULTILINE)
_ALARM = re.compile(r"^BEGIN:VALARM$.*?^END:VALARM$", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(
    r"^(DTSTART|DTEND|DURATION|RRULE|RDATE|STATUS|SUMMARY)((?:;[^:\n]*)?):(.*)$", re.MULTILINE
)
_DURATION = re.compile(r"\+?P(\d{1,3})([DW])", re.ASCII)
_NO_KEYS = ("times", "exclude_file", "rule")  # fields of RuleOptions that `build` converts by itself


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The options of a rule. An option with a value sets the key of the same name, and `times` the key `count`."""

    cron: Annotated[
        str | None, typer.Option("--cron", metavar="EXPRESSION", help="Five fields, as in '0 9 * * 1-5'.")
    ] = None
    seconds: Annotated[bool, typer.Option("--seconds", help="--cron has six fields, seconds first.")] = False
    every: Annotated[
        str | None, typer.Option("--every", metavar="DURATION", help="A fixed distance, as in 15m.")
    ] = None
    anchor: Annotated[
        str | None, typer.Option("--anchor", metavar="INSTANT", help="The instant from which --every counts.")
    ] = None
    rrule: Annotated[
        str | None,
        typer.Option(
            "--rrule", metavar="TEXT", help="RFC 5545, as in 'DTSTART:20300125T090000\\nRRULE:FREQ=DAILY'."
        ),
    ] = None
    at: Annotated[
        list[str] | None, typer.Option("--at", metavar="LOCAL", help="A local time; may be repeated.")
    ] = None
    zone: Annotated[
        str | None,
        typer.Option("--zone", metavar="ZONE", help="The zone of local times, as in Europe/Berlin."),
    ] = None
    gap: Annotated[
        str | None, typer.Option("--gap", help="A local time that clocks skip: runs after the gap, or skip.")
    ] = None
    fold: Annotated[
        str | None,
        typer.Option("--fold", help="A local time that clocks show twice: runs first, or both times."),
    ] = None
    starts_at: Annotated[
        str | None,
        typer.Option("--starts-at", metavar="TIME", help="No time is earlier: an instant or a local time."),
    ] = None
    ends_at: Annotated[
        str | None,
        typer.Option("--ends-at", metavar="TIME", help="No time is later: an instant or a local time."),
    ] = None
    times: Annotated[int | None, typer.Option("--times", help="End after this many times.")] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="DATE", help="A date without times; may be repeated."),
    ] = None
    exclude_file: Annotated[
        Path | None,
        typer.Option(
            "--exclude-file", metavar="FILE", help="Dates to exclude: an .ics file, or a date per line."
        ),
    ] = None
    move: Annotated[
        str | None,
        typer.Option("--move", help="Times on an excluded date: skip, or move before or after it."),
    ] = None
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="JSON", help="The rule as JSON. Options add keys to it.")
    ] = None

    def build(self) -> dict[str, Any]:
        """Build a rule from the JSON of --rule and the options with a value. Dates of a file are added to `exclude`.

        Raises RequestError for text that is no JSON object, and for a file that cannot be read.
        """
        keys = vars(self) | {"count": self.times}
        built: dict[str, Any] = {}
        if self.rule is not None:
            try:
                built = json.loads(self.rule)
            except ValueError as error:
                raise RequestError(f"--rule: {error}") from error
            if not isinstance(built, dict):
                raise RequestError('--rule: a JSON object, as in \'{"rrule": "…"}\'')
        built |= {name: value for name, value in keys.items() if value and name not in _NO_KEYS}
        if isinstance(text := built.get("rrule"), str):
            built["rrule"] = text.replace("\\n", "\n")  # a shell passes the two characters
        if self.exclude_file is not None:
            built["exclude"] = [*built.get("exclude", []), *read_dates(self.exclude_file)]
        return built


# Gives `command(…, rule, …)` the options of a rule in place of the parameter `rule`, which receives RuleOptions.
rule_options = with_options("rule", RuleOptions)


def read_dates(file: Path) -> list[str]:
    """Read dates from an iCalendar file with all-day events, or from a text with a date in each line.

    Cancelled events are left out. Raises RequestError for a file that cannot be read, an event that repeats, and one
    with a time of day.
    """
    try:
        text = file.read_text("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--exclude-file {file}: {error}") from error
    if "BEGIN:VCALENDAR" not in text:
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return [line for line in lines if line]
    unfolded = re.sub(r"\n[ \t]", "", text)
    try:
        return sorted({day for event in _EVENT.findall(unfolded) for day in _days_of(event)})
    except (ValueError, OverflowError) as error:
        raise RequestError(f"--exclude-file {file}: {error}") from error


def _days_of(event: str) -> list[str]:
    """List the days of an event: none if it is cancelled. Raises ValueError, and OverflowError after the year 9999."""
    # An alarm has fields of the same names.
    fields = {name: value.strip() for name, _, value in _FIELD.findall(_ALARM.sub("", event))}
    name = fields.get("SUMMARY", "an event")
    if fields.get("STATUS", "").upper() == "CANCELLED":
        return []
    if "RRULE" in fields or "RDATE" in fields:
        raise ValueError(f"{name} repeats; list its dates instead")
    if "DTEND" in fields and "DURATION" in fields:
        raise ValueError(f"{name} has two ends; write DTEND or DURATION")
    start, end = fields.get("DTSTART", ""), fields.get("DTEND", "")
    duration = _DURATION.fullmatch(fields.get("DURATION", "P1D"))
    if not re.fullmatch(r"\d{8}", start) or not re.fullmatch(r"\d{8}|", end) or duration is None:
        raise ValueError(f"{name} is no event of whole days")
    first = date.fromisoformat(start)
    # DTEND is the day after the last one.
    count = (
        (date.fromisoformat(end) - first).days if end else int(duration[1]) * (7 if duration[2] == "W" else 1)
    )
    return [(first + timedelta(days=day)).isoformat() for day in range(max(count, 1))]
