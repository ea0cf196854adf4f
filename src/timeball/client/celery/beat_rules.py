"""Schedules of celery beat as rules of Timeball (docs/recurring-rules.md). No I/O.

    crontab                            a cron expression. With a day of the month and a day of the week, both of which
                                       have to match in Celery, a recurrence rule
    a number of seconds, a timedelta   an interval, counted from 1970
    the same with `relative`           a cron expression for round times of the clock

Everything else is refused, with a text that names an alternative.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date, timedelta
from itertools import count
from typing import Any, TypeAlias

from celery.schedules import crontab, schedule, solar

from timeball.model.errors import InvalidDelay

Rule: TypeAlias = dict[str, object]

_WEEKDAYS = ("SU", "MO", "TU", "WE", "TH", "FR", "SA")
_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_SHORTEST = timedelta(seconds=1)
_MILLISECOND = timedelta(milliseconds=1)


def rule_of(given: Any) -> Rule:
    """Build the rule of a schedule of celery beat. Raises InvalidDelay for one that the broker cannot store."""
    if isinstance(given, solar):
        raise InvalidDelay(
            f"solar event {given.event}: the broker does not know the sun; use a crontab, or run this entry by "
            "Celery's own scheduler in a beat of an app of its own"
        )
    if type(given) not in (crontab, schedule):
        raise InvalidDelay(
            f"{type(given).__name__}: the broker stores a crontab, a number of seconds and a timedelta"
        )
    if given.nowfun is not None:
        raise InvalidDelay("nowfun: the clock of the broker counts; leave it out")
    return _crontab_rule(given) if isinstance(given, crontab) else _interval_rule(given)


def _zone(given: crontab | schedule) -> str:
    """The IANA name of the zone of the app."""
    zone = given.tz
    name = getattr(zone, "key", None) or ("UTC" if str(zone) == "UTC" else None)
    if name is None:
        raise InvalidDelay(
            f"the time zone {zone} has no name: set `timezone` of the app, for example to 'Europe/Berlin'"
        )
    return str(name)


def _crontab_rule(given: crontab) -> Rule:
    if len(given.day_of_month) < 31 and len(given.day_of_week) < 7:
        return {"rrule": _both_days(given), "zone": _zone(given)}
    fields = (
        _field(given.minute, 0, 59), _field(given.hour, 0, 23), _field(given.day_of_month, 1, 31),
        _field(given.month_of_year, 1, 12), _field(given.day_of_week, 0, 6, may_step=False),
    )  # fmt: skip
    return {"cron": " ".join(fields), "zone": _zone(given)}


def _field(values: Collection[int], low: int, high: int, *, may_step: bool = True) -> str:
    """Write the values of a field: `*`, a step such as `*/15`, or a list with ranges."""
    ordered = sorted(values)
    if len(ordered) == high - low + 1:
        return "*"
    step = ordered[1] - ordered[0] if len(ordered) > 2 else 0
    if may_step and step > 1 and ordered == list(range(low, high + 1, step)):
        return f"*/{step}"
    parts: list[list[int]] = []
    for value in ordered:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def _both_days(given: crontab) -> str:
    """Write a crontab whose two fields for days both have to match. In a cron expression, one of them is enough."""
    days = map(date.fromordinal, count(date(1970, 1, 1).toordinal()))
    # The calendar repeats after 400 years, and Celery refuses a crontab without a date.
    first = next(
        day
        for day in days
        if day.month in given.month_of_year
        and day.day in given.day_of_month
        and day.isoweekday() % 7 in given.day_of_week
    )
    parts = {
        "FREQ": "MONTHLY",
        "BYMONTH": _listed(given.month_of_year),
        "BYMONTHDAY": _listed(given.day_of_month),
        "BYDAY": ",".join(_WEEKDAYS[number] for number in sorted(given.day_of_week)),
        "BYHOUR": _listed(given.hour),
        "BYMINUTE": _listed(given.minute),
    }
    start = f"{first:%Y%m%d}T{min(given.hour):02}{min(given.minute):02}00"
    return f"DTSTART:{start}\nRRULE:" + ";".join(f"{name}={value}" for name, value in parts.items())


def _listed(numbers: Collection[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def _interval_rule(given: schedule) -> Rule:
    every: timedelta = given.run_every
    if every < _SHORTEST:
        raise InvalidDelay(f"an interval of {every.total_seconds():g} s: the shortest of the broker is 1 s")
    if given.relative and every >= _MINUTE:
        return _round_times(every, _zone(given))
    whole_s, rest = divmod(every, _SHORTEST)
    return {"every": f"{whole_s}s" if not rest else f"{every // _MILLISECOND}ms"}


def _round_times(every: timedelta, zone: str) -> Rule:
    """Write an interval with `relative`: Celery rounds its times down to whole days, hours or minutes."""
    rule: Any = None
    if every % _DAY == timedelta(0):
        days = every // _DAY
        rule = {"rrule": f"DTSTART:19700101T000000\nRRULE:FREQ=DAILY;INTERVAL={days}"}
        if days == 1:
            rule = {"cron": "0 0 * * *"}
    elif _DAY % every == timedelta(0) and every % _HOUR == timedelta(0):
        rule = {"cron": f"0 {_step(every // _HOUR)} * * *"}
    elif _HOUR % every == timedelta(0) and every % _MINUTE == timedelta(0):
        rule = {"cron": f"{_step(every // _MINUTE)} * * * *"}
    if rule is None:
        raise InvalidDelay(
            f"relative with an interval of {every}: it has no round times of the clock, because it neither divides an "
            "hour or a day nor is whole days; leave `relative` out, or write a crontab"
        )
    return {**rule, "zone": zone}


def _step(number: int) -> str:
    return "*" if number == 1 else f"*/{number}"
