"""TIMING: a time of day as a property, and the instant it means.

    08:00:00                  in the broker's zone (--timing-zone)
    08:00:00 Europe/Berlin    in a zone of the IANA's list
    08:00:00+02:00            at an offset from UTC, at most 18 hours as in Java

It means the next time after now that a clock on the wall there shows this, today or tomorrow. Where clocks are set
forward over it, the first instant after the gap; where they are set back and show it twice, the first time only. So
every day has one such instant, and a message that missed it by a millisecond is for tomorrow.

What is written in another way is refused, and so is a zone nobody knows: a guess would be a message at the wrong
time. Zones come from the `tzdata` package and never from the host, whose rules may be years old; the same text
means the same instant on each broker.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from functools import cache
from importlib import resources
from zoneinfo import ZoneInfo

from timeball.errors import InvalidDelay

NAME = "TIMING"

_TEXT = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])"
    r"(?: ?([+-])(0[0-9]|1[0-8]):([0-5][0-9])| ([A-Za-z][A-Za-z0-9_+/-]{0,63}))?"
)
_OFFSET_MAX = timedelta(hours=18)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_DAYS = 3  # a day may be left out by a clock that is set forward over midnight, never two


def next_instant_ms(text: str, now_ms: int, default_zone: str) -> int:
    """The first instant after now that this names; raises InvalidDelay saying how to write it."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidDelay(
            f"the property {NAME} is {text[:64]!r}; write HH:MM:SS, and behind it the zone if it is not "
            f"{default_zone}: '08:00:00 Europe/Berlin' or '08:00:00+02:00'"
        )
    hour, minute, second, sign, hours, minutes, name = found.groups()
    zone = _offset(sign, hours, minutes) if sign else zone_named(name or default_zone)
    wall = time(int(hour), int(minute), int(second))
    try:
        today = (_EPOCH + now_ms * _MS).astimezone(zone).date()
        return min(
            at_ms
            for at_ms in (_instant_ms(today + timedelta(days=days), wall, zone) for days in range(_DAYS))
            if at_ms > now_ms
        )
    except OverflowError as error:
        raise InvalidDelay(f"the property {NAME}: the calendar ends before {text}") from error


@cache
def _names() -> frozenset[str]:
    with resources.files("tzdata").joinpath("zones").open("r", encoding="ascii") as listed:
        return frozenset(listed.read().split())


def zone_named(name: str) -> ZoneInfo:
    """A zone of the IANA's list; raises InvalidDelay for any other name."""
    if name not in _names():  # only what is listed is ever looked for in a folder
        raise InvalidDelay(f"{name[:64]!r} is no time zone of the IANA's list, such as Europe/Berlin")
    return _zone(name)


@cache
def _zone(name: str) -> ZoneInfo:
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as rules:
        return ZoneInfo.from_file(rules, key=name)


def _offset(sign: str, hours: str, minutes: str) -> timezone:
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    if offset > _OFFSET_MAX:
        raise InvalidDelay(f"the property {NAME}: {sign}{hours}:{minutes} is more than 18 hours from UTC")
    return timezone(offset if sign == "+" else -offset)


def _instant_ms(day: date, wall: time, zone: tzinfo) -> int:
    """When a wall clock shows this for the first time on that day, or when the gap ends that swallowed it."""
    shown = datetime.combine(day, wall)
    at = shown.replace(tzinfo=zone).astimezone(UTC)
    if at.astimezone(zone).replace(tzinfo=None) != shown:
        at = _end_of_gap(shown, zone)
    return (at - _EPOCH) // _MS


def _end_of_gap(shown: datetime, zone: tzinfo) -> datetime:
    # Read with the offset from after the gap it lies before the gap, and the other way round (PEP 495).
    before = shown.replace(tzinfo=zone, fold=1).astimezone(UTC)
    behind = shown.replace(tzinfo=zone, fold=0).astimezone(UTC)
    second = timedelta(seconds=1)  # the transition is at a whole one
    while behind - before > second:
        middle = before + (behind - before) // second // 2 * second
        if middle.astimezone(zone).replace(tzinfo=None) < shown:
            before = middle
        else:
            behind = middle
    return behind
