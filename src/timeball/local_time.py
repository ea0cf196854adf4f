"""Local times: a date and a time of day in a time zone, as instants.

Every edge and Spark resolve local times here, so one text means one instant on every machine. The rules of the zones
are those of the `tzdata` package that Timeball is installed with. The files of the host, of Java and of DuckDB are
never read, because they can be years older.

    local time             instant
    shown once             that one
    in a gap               the first instant after the gap
    shown twice            the first one

One definition covers all three: the first instant at which a clock there has reached the local time. Of each stretch
with one offset from UTC, `_reached` is the latest local time that has been shown when the stretch ends. These numbers
never decrease, so one binary search finds the stretch, for one value and for a column.

Times are microseconds since 1970, as numbers without bounds of a calendar. Local times are counted as if they were UTC.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from datetime import date, datetime, timedelta
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import tzdata  # type: ignore[import-untyped]

from timeball.errors import InvalidDelay

if TYPE_CHECKING:
    from timeball.message import Int64Array

VERSION: str = tzdata.__version__

_SECOND_US = 1_000_000
DAY_US = 86_400 * _SECOND_US
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time
_EPOCH_DAY = date(1970, 1, 1).toordinal()
# The Gregorian calendar repeats after 400 years, which are whole weeks: so do rules such as "last Sunday of March".
_CYCLE_YEARS = 400
_CYCLE_US = 146_097 * DAY_US
_ALWAYS_US = 1 << 62  # beyond any instant
_FAR_US = 1 << 60  # 36,000 years: what lies beyond is cut off here, so that no sum overflows

# RFC 9636, section 3: a header, the counts of what follows, and the data with times of 4 bytes; both again with 8.
_HEADER_BYTES = 44
_COUNTS = slice(20, 44)
_NAME = r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]{3,}>)"
_TIME = r"([+-]?)(\d{1,3})(?::(\d\d))?(?::(\d\d))?"
_FOOTER = re.compile(rf"{_NAME}{_TIME}(?:{_NAME}(?:{_TIME})?,(.+),(.+))?")
_DAY = re.compile(rf"(?:M(\d+)\.(\d)\.(\d)|J(\d+)|(\d+))(?:/{_TIME})?")


class _Data(NamedTuple):
    """Data of a TZif file: when offsets change, and those that follow; `first_s` is the offset before all changes."""

    changes_s: list[int]
    offsets_s: list[int]
    first_s: int
    footer: str


class Zone:
    """A time zone as stretches with one offset from UTC each."""

    def __init__(self, name: str, changes_s: list[int], offsets_s: list[int], *, repeats: bool) -> None:
        """`offsets_s` has one more than `changes_s`; with `repeats` the last 400 years of them come again."""
        self.name = name
        self._starts = [-_ALWAYS_US, *(change * _SECOND_US for change in changes_s)]
        self._offsets = [offset * _SECOND_US for offset in offsets_s]
        self._end_us = self._starts[-1] if repeats else _ALWAYS_US
        self._reached: list[int] = []
        latest = -_ALWAYS_US
        for (_, end), offset in zip(pairwise([*self._starts, _ALWAYS_US]), self._offsets, strict=True):
            latest = max(latest, end + offset)
            self._reached.append(latest)

    def offset_us(self, instant_us: int) -> int:
        """Return how far a clock there is ahead of UTC."""
        cycles = max(0, -((self._end_us - instant_us) // _CYCLE_US))
        return self._offsets[bisect_right(self._starts, instant_us - cycles * _CYCLE_US) - 1]

    def instant_us(self, local_us: int) -> int:
        """Return the first instant at which a clock there has reached this local time."""
        # A day more: local time is less than a day ahead of UTC, or behind it.
        cycles = max(0, -((self._end_us - DAY_US - local_us) // _CYCLE_US))
        local_us -= cycles * _CYCLE_US
        at = bisect_right(self._reached, local_us)
        return max(self._starts[at], local_us - self._offsets[at]) + cycles * _CYCLE_US

    def instants_us(self, local_us: Int64Array) -> Int64Array:
        """Return what `instant_us` returns for each; far outside of any calendar, an instant that is as far."""
        import numpy as np

        local = np.clip(local_us, -_FAR_US, _FAR_US)
        cycles = np.maximum(0, -((self._end_us - DAY_US - local) // _CYCLE_US)) * _CYCLE_US
        local -= cycles
        at = np.searchsorted(np.array(self._reached, np.int64), local, side="right")
        starts, offsets = np.array(self._starts, np.int64), np.array(self._offsets, np.int64)
        found: Int64Array = np.maximum(starts[at], local - offsets[at]) + cycles
        return found

    def is_shown(self, local_us: int) -> bool:
        """Return whether a clock there ever shows this local time; False within a gap."""
        instant_us = self.instant_us(local_us)
        return instant_us + self.offset_us(instant_us) == local_us


def zone_named(name: str) -> Zone:
    """Return a zone of the IANA's list; raise InvalidDelay for any other name."""
    if name not in _names():  # only listed names are ever looked for in a folder
        raise InvalidDelay(
            f"{name[:64]!r} is no time zone of the IANA's list (tzdata {VERSION}); write it as Europe/Berlin or UTC"
        )
    return _zone(name)


def fixed_offset(offset_s: int) -> Zone:
    """Return a zone that has always had this offset from UTC."""
    return Zone("", [], [offset_s], repeats=False)


def local_us(shown: datetime) -> int:
    """Return a local time as a number; its tzinfo is not looked at."""
    return (shown.replace(tzinfo=None) - _EPOCH) // timedelta(microseconds=1)


# ---- the tables of tzdata -----------------------------------------------------------------------------------


@cache
def _names() -> frozenset[str]:
    return frozenset(resources.files("tzdata").joinpath("zones").read_text("ascii").split())


@cache
def _zone(name: str) -> Zone:
    return _made(name, _read(resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()))


def _read(data: bytes) -> _Data:
    """Return the part of a file that has times of 8 bytes: version 2 or later of the format."""
    if data[:4] != b"TZif" or data[4:5] < b"2":
        raise ValueError("not a TZif file of version 2 or later")
    utc, standard, leaps, times, types, chars = _counts(data)
    data = data[_HEADER_BYTES + times * 5 + types * 6 + chars + leaps * 8 + standard + utc :]
    utc, standard, leaps, times, types, chars = _counts(data)
    at = _HEADER_BYTES
    changes = [int.from_bytes(data[at + 8 * n : at + 8 * n + 8], "big", signed=True) for n in range(times)]
    at += 8 * times
    kinds, at = data[at : at + times], at + times
    offsets = [int.from_bytes(data[at + 6 * n : at + 6 * n + 4], "big", signed=True) for n in range(types)]
    footer = data[at + 6 * types + chars + leaps * 12 + standard + utc :].strip(b"\n").decode("ascii")
    return _Data(changes, [offsets[kind] for kind in kinds], offsets[0], footer)


def _counts(data: bytes) -> tuple[int, ...]:
    counts = data[_COUNTS]
    return tuple(int.from_bytes(counts[at : at + 4], "big") for at in range(0, 24, 4))


def _made(name: str, data: _Data) -> Zone:
    """Return the zone of a file, whose footer says how it goes on behind the last change."""
    changes, offsets = list(data.changes_s), [data.first_s, *data.offsets_s]
    rule = _FOOTER.fullmatch(data.footer)
    if rule is None:
        raise ValueError(f"zone {name}: the rule {data.footer!r} is not understood")
    if rule[9] is None:  # no summer time, so the last offset stays
        return Zone(name, changes, offsets, repeats=False)
    standard = -_seconds(*rule.groups()[:4])
    summer = -_seconds(*rule.groups()[4:8]) if rule[6] is not None else standard + 3_600
    begins, ends = _Rule.read(rule[9]), _Rule.read(rule[10])
    last = changes[-1] if changes else 0
    first_year = (_EPOCH + timedelta(seconds=last)).year
    for year in range(first_year, first_year + _CYCLE_YEARS + 2):
        switches = [(begins.local_s(year) - standard, summer), (ends.local_s(year) - summer, standard)]
        for at, offset in sorted(switches):
            if at > last:
                changes.append(at)
                offsets.append(offset)
    return Zone(name, changes, offsets, repeats=True)


class _Rule(NamedTuple):
    """The day of each year at which clocks change, in POSIX's three forms, and the second of that day."""

    month: int  # 0: no month, but the day of the year
    week: int
    day: int  # of the week from Sunday (0) on; without a month of the year
    skips_leap_day: bool
    second: int

    @classmethod
    def read(cls, text: str) -> _Rule:
        found = _DAY.fullmatch(text)
        if found is None:
            raise ValueError(f"the rule {text!r} is not understood")
        second = 7_200 if found[7] is None else _seconds(*found.groups()[5:9])
        if found[1] is not None:
            return cls(int(found[1]), int(found[2]), int(found[3]), False, second)
        if found[4] is not None:
            return cls(0, 0, int(found[4]) - 1, True, second)
        return cls(0, 0, int(found[5]), False, second)

    def local_s(self, year: int) -> int:
        """Return the second since 1970, in local time."""
        first = date(year, self.month or 1, 1).toordinal()
        day = first + self.day
        if self.month:
            behind = date(year + self.month // 12, self.month % 12 + 1, 1).toordinal()
            day = first + (self.day - first) % 7 + 7 * (self.week - 1)
            day -= 7 if day >= behind else 0  # the fifth week is the last one
        elif self.skips_leap_day and self.day >= 59 and date(year, 12, 31).toordinal() - first == 365:
            day += 1
        return (day - _EPOCH_DAY) * 86_400 + self.second


def _seconds(sign: str | None, hours: str | None, minutes: str | None, seconds: str | None) -> int:
    total = int(hours or 0) * 3_600 + int(minutes or 0) * 60 + int(seconds or 0)
    return -total if sign == "-" else total
