"""Recurrence rules of RFC 5545: local times by the lines DTSTART, RRULE and EXDATE.

    DTSTART:20300131T090000
    RRULE:FREQ=MONTHLY;BYDAY=-1FR;COUNT=12
    EXDATE:20300426T090000

DTSTART is the first occurrence, a local time in the rule's zone. UNTIL is a local time or, with Z, an instant. COUNT
includes the occurrences that EXDATE then leaves out. UNTIL and COUNT apply before excluded dates move occurrences.
`dateutil` expands the rules. Forms about which programs disagree are refused: a DTSTART that the rule does not match,
an UNTIL that is a date, and the forms in `_check_parts`.

`dateutil` can only begin at DTSTART. A search here begins at the last period of the rule before the requested time, so
it takes as long in the tenth year as in the first.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from calendar import isleap, monthrange
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from timeball.broker.recurring.kept_results import cached
from timeball.broker.recurring.local_times import DAY_S, LAST_S, local_datetime, local_seconds
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import instant_ms, load_zone

_FREQUENCIES = ("YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY")  # dateutil's numbers, from 0 on
_YEARLY, _MONTHLY, _WEEKLY, _DAILY, _HOURLY, _MINUTELY = range(6)
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_INTERVAL_MAX = 1_000
# Name of a part: the least and greatest absolute value, and whether it may be negative (counted from the end).
_NUMBERS = {
    "BYMONTH": (1, 12, False), "BYWEEKNO": (1, 53, True), "BYYEARDAY": (1, 366, True), "BYMONTHDAY": (1, 31, True),
    "BYHOUR": (0, 23, False), "BYMINUTE": (0, 59, False), "BYSECOND": (0, 59, False), "BYSETPOS": (1, 366, True),
}  # fmt: skip
_PARTS = (
    "FREQ", "INTERVAL", "WKST", "BYMONTH", "BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY", "BYHOUR", "BYMINUTE",
    "BYSECOND", "BYSETPOS", "COUNT", "UNTIL",
)  # fmt: skip
_LINE = re.compile(r"([A-Z-]+)((?:;[A-Z-]+=[^:;]*)*):(.*)")
_LOCAL_TIME = re.compile(r"(\d{8}T\d{6})(Z?)", re.ASCII)
_BYDAY = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)", re.ASCII)

# Years of a search. The rarest date that an ordinary rule names is a 29 February on one weekday: it can take 40 years,
# and longer with an interval.
_SEARCHED_YEARS = 50
_SEARCHED_YEARS_MAX = 400
# An interval of a million days and more, so that the second period is after the year 9999.
_ONE_PERIOD = {
    _YEARLY: 10_000,
    _MONTHLY: 120_000,
    _WEEKLY: 600_000,
    _DAILY: 4_000_000,
    _HOURLY: 96_000_000,
    _MINUTELY: 5_760_000_000,
}
# Local times that are computed at once, because a search mostly takes as long as some tens of them. A rare rule has
# fewer: a search ends with the first one that is more than a year later.
_TIMES_AT_ONCE = 32
_TIMES_OF_DAY_MAX = 1_440  # dateutil makes a list of them for each search


class _Expansion(NamedTuple):
    """The first local times of a rule from `from_s` on, without a gap. Empty if there are none from `from_s` on."""

    from_s: int
    times: tuple[int, ...]

    @property
    def until_s(self) -> int:
        """The local time up to which `times` is complete."""
        return self.times[-1] if self.times else LAST_S


class RruleTimes:
    """The local times of a recurrence rule (`LocalTimes`).

    Searches are fast if each search begins later than the previous search.
    """

    __slots__ = (
        "_arguments", "_excluded", "_expansion", "_first_s", "_frequency", "_interval", "_last_s", "_years",
        "ends_ms", "runs_every_hour", "text",
    )  # fmt: skip

    def __init__(
        self, text: str, first_s: int, parts: Mapping[str, str], excluded: frozenset[int], zone: str
    ) -> None:
        """Check the rule, and prepare its expansion. Raises InvalidDelay, ValueError or OverflowError.

        `text`: its canonical form. `first_s`: DTSTART. `parts`: of RRULE, checked by `_read_parts`. `excluded`: EXDATE.
        `ends_ms` becomes the last instant of an occurrence, if UNTIL is an instant.
        """
        self.text, self._first_s = text, first_s
        # Empty until the end of this method, because COUNT includes excluded occurrences.
        self._excluded: frozenset[int] = frozenset()
        self._frequency = _FREQUENCIES.index(parts["FREQ"])
        self._interval = int(parts.get("INTERVAL", 1))
        self._years = _SEARCHED_YEARS_MAX
        if self._frequency > _MONTHLY:
            self._years = min(_SEARCHED_YEARS * self._interval, _SEARCHED_YEARS_MAX)
        self._arguments = _build_arguments(parts, local_datetime(first_s))
        self.runs_every_hour = _runs_every_hour(parts, self._interval)
        until = parts.get("UNTIL", "")
        self.ends_ms, self._last_s = limits.INSTANT_MS_MAX, LAST_S
        if until.endswith("Z"):
            self.ends_ms = instant_ms(until)
            self._last_s = _last_reached_s(self.ends_ms, zone)
        elif until:
            self._last_s = local_seconds(datetime.fromisoformat(until))
        self._expansion: _Expansion | None = None
        # Checked before `_check_first`, which would refuse a rule without an occurrence for another reason.
        if self._last_s < first_s:
            _refuse("UNTIL is before DTSTART, so there is no occurrence")
        self._check_first(parts)
        if "COUNT" in parts:
            count = int(parts["COUNT"])
            # The last occurrence is computed once, so that later searches need not begin at DTSTART.
            first_times = tuple(islice(self._expand(first_s, self._years), count))
            if len(first_times) < count:
                _refuse(
                    f"COUNT: only {len(first_times)} occurrences are found in the next centuries; leave COUNT out"
                )
            self._last_s = first_times[-1]
        self._excluded, self._expansion = excluded, None

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier than `local_s`. None if `_years` from there on have none."""
        local_s = max(local_s, self._first_s)
        if local_s > self._last_s:
            return None
        expansion = self._expansion
        # Most calls ask for later and later times, and the times of the last expansion answer them.
        if expansion is None or local_s < expansion.from_s or local_s > expansion.until_s:
            expansion = self._expansion = _Expansion(local_s, tuple(self._next_times(local_s)))
        at = bisect_left(expansion.times, local_s)
        return expansion.times[at] if at < len(expansion.times) else None

    def _next_times(self, from_s: int) -> Iterator[int]:
        """Yield the local times from `from_s` on: at most _TIMES_AT_ONCE, until one is more than a year later."""
        for local_s in islice(self._expand(from_s, self._years), _TIMES_AT_ONCE):
            yield local_s
            if local_s > from_s + 366 * DAY_S:
                break

    def _expand(self, from_s: int, years: int) -> Iterator[int]:
        """Yield the local times of the given number of years from `from_s` on."""
        last_s = min(self._last_s, from_s + years * 366 * DAY_S)
        begin = self._period_before(local_datetime(from_s))
        for local in self._rrule(begin, self._interval, last_s):
            local_s = local_seconds(local)
            if local_s >= from_s and local_s not in self._excluded:
                yield local_s

    def _rrule(self, begin: datetime, interval: int, last_s: int) -> Iterable[datetime]:
        """Expand the rule with `dateutil`, from the beginning of a period on, up to and including `last_s`."""
        from dateutil.rrule import rrule  # slow to import, and few brokers have such rules

        until = local_datetime(last_s)
        expanded: Iterable[datetime] = rrule(
            self._frequency, begin, interval, until=until, cache=False, **self._arguments
        )
        return expanded

    def _check_first(self, parts: Mapping[str, str]) -> None:
        """Refuse a rule for which DTSTART is not an occurrence. Raises InvalidDelay.

        A rule that matches DTSTART has later occurrences, too, so no search goes on for centuries without a result.
        """
        first = local_datetime(self._first_s)
        year_day, days = first.timetuple().tm_yday, 366 if isleap(first.year) else 365
        values_of_first = {
            "BYMONTH": {first.month}, "BYMONTHDAY": {first.day, first.day - monthrange(first.year, first.month)[1] - 1},
            "BYYEARDAY": {year_day, year_day - days - 1}, "BYHOUR": {first.hour}, "BYMINUTE": {first.minute},
            "BYSECOND": {first.second},
        }  # fmt: skip
        for name, values in values_of_first.items():
            if name in parts and not values.intersection(_numbers(parts[name])):
                _refuse_first(name)
        weekdays = [day[-2:] for day in parts["BYDAY"].split(",")] if "BYDAY" in parts else _WEEKDAYS
        if _WEEKDAYS[first.weekday()] not in weekdays:
            _refuse_first("BYDAY")
        # Numbered weekdays, weeks and BYSETPOS depend on the period, so the period of DTSTART is expanded alone.
        if self._frequency in (_YEARLY, _MONTHLY) or "BYSETPOS" in parts:
            period = self._rrule(self._period_before(first), _ONE_PERIOD[self._frequency], self._first_s)
            if first not in list(period):
                _refuse_first("the numbers of days and weeks")
        if next(self._expand(self._first_s, self._years), None) != self._first_s:
            _refuse_first("INTERVAL")

    def _period_before(self, local: datetime) -> datetime:
        """Find the begin of the last period of the rule (a year, a month, …) that begins at or before a local time.

        With an interval of n, only every n-th period, counted from that of DTSTART, is a period of the rule.
        """
        first, interval = local_datetime(self._first_s), self._interval
        midnight = first.replace(hour=0, minute=0, second=0)
        if self._frequency == _YEARLY:
            year = first.year + (local.year - first.year) // interval * interval
            return midnight.replace(year=year, month=1, day=1)
        if self._frequency == _MONTHLY:
            months = (local.year - first.year) * 12 + local.month - first.month
            year, month = divmod(first.year * 12 + first.month - 1 + months // interval * interval, 12)
            return midnight.replace(year=year, month=month + 1, day=1)
        if self._frequency == _WEEKLY:
            midnight -= timedelta(days=(first.weekday() - self._arguments["wkst"]) % 7)
        unit = {_WEEKLY: timedelta(weeks=1), _DAILY: timedelta(days=1), _HOURLY: timedelta(hours=1)}
        step = unit.get(self._frequency, timedelta(minutes=1)) * interval
        begin = {_HOURLY: first.replace(minute=0, second=0), _MINUTELY: first.replace(second=0)}
        start = begin.get(self._frequency, midnight)
        return start + (local - start) // step * step


def _last_reached_s(until_ms: int, zone: str) -> int:
    """Find the last local time that clocks in a zone have shown, or skipped, by an instant."""
    period = load_zone(zone).period(until_ms * 1_000)
    # While clocks repeat an hour, they have already shown later times.
    return min(max(until_ms * 1_000 + period.offset_us, period.reached_us - 1) // 1_000_000, LAST_S)


def _build_arguments(parts: Mapping[str, str], first: datetime) -> dict[str, Any]:
    """Build the arguments of `dateutil.rrule`. For parts that are missing, it has the values of DTSTART (`first`)."""
    from dateutil.rrule import weekdays

    names = {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"}
    frequency = _FREQUENCIES.index(parts["FREQ"])
    arguments: dict[str, Any] = {name.lower(): _numbers(parts[name]) for name in _NUMBERS if name in parts}
    arguments["wkst"] = _WEEKDAYS.index(parts.get("WKST", "MO"))
    if "BYDAY" in parts:
        matches = (_BYDAY.fullmatch(day) for day in parts["BYDAY"].split(","))
        arguments["byweekday"] = [
            weekdays[_WEEKDAYS.index(match[2])](int(match[1]) if match[1] else None)
            for match in matches
            if match
        ]
    # `dateutil` would take these values from its start, which here is the beginning of a period and not DTSTART.
    if not names & parts.keys():
        if frequency == _YEARLY:
            arguments.setdefault("bymonth", [first.month])
        if frequency in (_YEARLY, _MONTHLY):
            arguments["bymonthday"] = [first.day]
        if frequency == _WEEKLY:
            arguments["byweekday"] = [first.weekday()]
    if frequency < _HOURLY:
        arguments.setdefault("byhour", [first.hour])
    if frequency < _MINUTELY:
        arguments.setdefault("byminute", [first.minute])
    arguments.setdefault("bysecond", [first.second])
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _runs_every_hour(parts: Mapping[str, str], interval: int) -> bool:
    """Check whether the rule has times in each hour of its days (`LocalTimes.runs_every_hour`)."""
    # BYSETPOS selects among the times of a period, so some hours may have none.
    if "BYSETPOS" in parts:
        return False
    if "BYHOUR" in parts and len(set(_numbers(parts["BYHOUR"]))) < 24:
        return False
    if parts["FREQ"] == "HOURLY":
        return interval == 1
    if parts["FREQ"] == "MINUTELY":
        return interval == 1 or (interval <= 60 and "BYMINUTE" not in parts)
    return "BYHOUR" in parts


# ---- parsing ----------------------------------------------------------------------------------------------------


@cached()
def parse_rrule(text: str, zone: str) -> RruleTimes:
    """Parse a rule whose local times are in the zone with this IANA name. Raises InvalidDelay."""
    try:
        return _parse(text, zone)
    except InvalidDelay as error:
        raise InvalidDelay(f"rrule={text[:200]!r}: {error}") from None


def _parse(text: str, zone: str) -> RruleTimes:
    """Parse a rule, as `parse_rrule` does, with errors that do not name the rule."""
    first_s: int | None = None
    parts: dict[str, str] | None = None
    excluded: set[int] = set()
    # RFC 5545 folds long lines: a line that begins with a blank continues the previous line.
    for line in re.sub(r"\r?\n[ \t]", "", text.strip()).splitlines():
        # Names of zones depend on upper and lower case, all other parts do not.
        line = line.strip().upper() if "TZID" not in line.upper() else line.strip()
        match = _LINE.fullmatch(f"RRULE:{line}" if line.startswith("FREQ=") else line)
        if match is None:
            _refuse(f"the line {line[:60]!r} is not understood; write DTSTART:…, RRULE:… and EXDATE:…")
        name, parameters, value = match.groups()
        if name == "RRULE" and parts is None:
            parts = _read_parts(value)
        elif name == "DTSTART" and first_s is None:
            first_s = _read_local_time(name, parameters, value, zone)
        elif name == "EXDATE":
            excluded.update(_read_local_time(name, parameters, part, zone) for part in value.split(","))
        else:
            _refuse(
                f"{name}: a rule has one DTSTART, one RRULE, and EXDATE; write other times as a rule of their own"
            )
    if parts is None or first_s is None:
        _refuse("needs a line DTSTART, such as DTSTART:20300131T090000, and a line RRULE")
    if len(excluded) > limits.RULE_LISTED_MAX:
        _refuse(f"has {len(excluded)} EXDATEs, at most {limits.RULE_LISTED_MAX} are allowed")
    lines = [
        f"DTSTART:{_ical(first_s)}",
        "RRULE:" + ";".join(f"{name}={parts[name]}" for name in _PARTS if name in parts),
    ]
    if excluded:
        lines.append("EXDATE:" + ",".join(_ical(local_s) for local_s in sorted(excluded)))
    try:
        return RruleTimes("\n".join(lines), first_s, parts, frozenset(excluded), zone)
    except (ValueError, OverflowError) as error:
        _refuse(f"has no occurrence ({error})")


def _ical(local_s: int) -> str:
    return local_datetime(local_s).strftime("%Y%m%dT%H%M%S")


def _read_local_time(name: str, parameters: str, value: str, zone: str) -> int:
    """Read a local time of the line `name`, and check the line's parameters (";TZID=…"). Raises InvalidDelay."""
    match = _LOCAL_TIME.fullmatch(value)
    if match is None:
        advice = "; for whole days, write them as `exclude`" if name == "EXDATE" else ""
        _refuse(f"{name}: {value[:30]!r} is no local time such as 20300131T090000{advice}")
    for parameter in parameters.split(";")[1:]:
        key, _, value_text = parameter.partition("=")
        if key.upper() == "TZID" and value_text != zone:
            _refuse(f"{name}: TZID is {value_text}, but the zone of the rule is {zone}; write the same zone")
        if key.upper() not in ("TZID", "VALUE"):
            _refuse(f"{name}: the parameter {key} is not understood; leave it out")
    if match[2] and zone != "UTC":
        _refuse(f"{name}: {value} is an instant; write the local time in {zone}, without Z")
    return _parse_time(name, match[1])


def _parse_time(name: str, value: str) -> int:
    """Convert a local time such as 20300131T090000 to seconds. Raises InvalidDelay, also for years before 1970."""
    try:
        local_s = local_seconds(datetime.fromisoformat(value))
    except ValueError:
        _refuse(f"{name}: {value} does not exist")
    if not local_s >= 0:
        _refuse(f"{name}: {value} is before 1970")
    return local_s


def _read_parts(text: str) -> dict[str, str]:
    """Read the parts of RRULE, and check each part and their combination. Raises InvalidDelay."""
    parts: dict[str, str] = {}
    for part in text.upper().strip(";").split(";"):
        name, _, value = part.partition("=")
        if name not in _PARTS:
            _refuse(f"{name or part}: is no part of a rule here; the parts are {', '.join(_PARTS)}")
        if name in parts:
            _refuse(f"{name} is given twice")
        parts[name] = value
    if parts.get("FREQ") not in _FREQUENCIES:
        seconds = (
            "; for seconds, write the rule every, such as '10s'" if parts.get("FREQ") == "SECONDLY" else ""
        )
        _refuse(f"FREQ is one of {', '.join(_FREQUENCIES)}{seconds}")
    for name, maximum in (("INTERVAL", _INTERVAL_MAX), ("COUNT", limits.RULE_COUNT_MAX)):
        if name in parts and not (
            re.fullmatch(r"[0-9]{1,5}", parts[name]) and 1 <= int(parts[name]) <= maximum
        ):
            _refuse(f"{name} is a number from 1 to {maximum}")
    for name, (low, high, is_signed) in _NUMBERS.items():
        for number in parts[name].split(",") if name in parts else ():
            sign = "[+-]?" if is_signed else ""
            if not re.fullmatch(sign + "[0-9]{1,3}", number) or not low <= abs(int(number)) <= high:
                _refuse(
                    f"{name}={number[:20]}: numbers from {low} to {high}{' or negative ones' if is_signed else ''}"
                )
    for day in parts["BYDAY"].split(",") if "BYDAY" in parts else ():
        match = _BYDAY.fullmatch(day)
        if match is None or (match[1] is not None and not 1 <= abs(int(match[1])) <= 53):
            _refuse(f"BYDAY={day[:20]}: write MO to SU, or 1MO, -1FR for the first Monday, the last Friday")
    if parts.get("WKST", "MO") not in _WEEKDAYS:
        _refuse(f"WKST is one of {', '.join(_WEEKDAYS)}")
    _check_parts(parts)
    return parts


def _check_parts(parts: dict[str, str]) -> None:
    """Refuse combinations of parts that RFC 5545 forbids or leaves open. Raises InvalidDelay."""
    frequency = parts["FREQ"]
    if "COUNT" in parts and "UNTIL" in parts:
        _refuse("COUNT and UNTIL are two ends; write one of them")
    if "UNTIL" in parts:
        match = _LOCAL_TIME.fullmatch(parts["UNTIL"])
        if match is None:
            _refuse(
                f"UNTIL={parts['UNTIL'][:20]}: programs disagree about the last day of a date; "
                "write a time, such as 20301231T235959"
            )
        _parse_time("UNTIL", match[1])
    is_numbered = any(day[0] not in "MTWFS" for day in parts.get("BYDAY", "MO").split(","))
    if is_numbered and (frequency not in ("MONTHLY", "YEARLY") or "BYWEEKNO" in parts):
        _refuse("BYDAY has numbers only in a MONTHLY or YEARLY rule without BYWEEKNO; write the day alone")
    if "BYWEEKNO" in parts and (frequency != "YEARLY" or "BYDAY" not in parts):
        _refuse("BYWEEKNO needs FREQ=YEARLY and BYDAY, because programs disagree about the day")
    if "BYYEARDAY" in parts and frequency in ("DAILY", "WEEKLY", "MONTHLY"):
        _refuse(f"BYYEARDAY is not for {frequency} rules; write FREQ=YEARLY")
    if "BYMONTHDAY" in parts and frequency == "WEEKLY":
        _refuse("BYMONTHDAY is not for WEEKLY rules; write FREQ=MONTHLY")
    if "BYMONTHDAY" in parts and frequency == "DAILY" and parts.get("INTERVAL", "1") != "1":
        _refuse("BYMONTHDAY is not for DAILY rules with INTERVAL; write FREQ=MONTHLY")
    if "BYSETPOS" in parts and not any(name.startswith("BY") and name != "BYSETPOS" for name in parts):
        _refuse("BYSETPOS selects from other BY parts; write one of them, such as BYDAY")
    if frequency in ("HOURLY", "MINUTELY") and {"BYMONTH", "BYMONTHDAY", "BYYEARDAY", "BYDAY"} & parts.keys():
        _refuse(f"{frequency} rules have no parts for dates; write FREQ=DAILY with BYHOUR and BYMINUTE")
    times = (set(parts[name].split(",")) for name in ("BYHOUR", "BYMINUTE", "BYSECOND") if name in parts)
    if math.prod(len(values) for values in times) > _TIMES_OF_DAY_MAX:
        _refuse(f"names more than {_TIMES_OF_DAY_MAX} times of a day; write the rule every, such as '10s'")
    if frequency == "YEARLY" and int(parts.get("INTERVAL", 1)) > 100:
        _refuse("INTERVAL of a YEARLY rule is a number from 1 to 100")


def _refuse_first(part: str) -> NoReturn:
    """Raise InvalidDelay, because DTSTART does not match a part of the rule."""
    _refuse(
        f"DTSTART does not match {part}, and programs disagree whether it is an occurrence; "
        "write the first time that matches"
    )


def _refuse(advice: str) -> NoReturn:
    raise InvalidDelay(advice)
