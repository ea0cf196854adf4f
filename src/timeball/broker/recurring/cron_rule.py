"""Cron expressions: local times that match five fields, or six with seconds first.

    field     values                  special values
    second    0-59
    minute    0-59
    hour      0-23
    day       1-31                    L, L-n: the last day, n days before it. nW: the weekday (Monday to Friday) nearest
                                      to day n of the month. LW: the last weekday
    month     1-12, JAN-DEC
    weekday   0-7, SUN-SAT, 0 and 7   d#n: the n-th d of the month. dL: the last d of the month
              are Sunday

A field is `*`, or a list of values, ranges `a-b` and steps `*/n` and `a-b/n`, separated by commas. `@hourly`, `@daily`,
`@midnight`, `@weekly`, `@monthly`, `@yearly` and `@annually` stand for five fields. If both day and weekday are given,
one of them has to match, as in POSIX.

Programs that read cron expressions disagree about some forms. These forms are refused, and the error names a form that
all programs read alike. docs/recurring-rules.md lists the refused forms.
"""

from __future__ import annotations

import re
from datetime import date
from typing import NamedTuple, NoReturn

from timeball.broker.recurring.kept_results import cached
from timeball.broker.recurring.local_times import DAY_S, EPOCH_ORDINAL
from timeball.model.errors import InvalidDelay

_ALIASES = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_SHORTEST_MONTH = 28
_LAST_ORDINAL = date.max.toordinal()

_TERM = re.compile(r"(?:(\*)|(\w+)(?:-(\w+))?)(?:/(\w+))?", re.ASCII)
_BEFORE_LAST = re.compile(r"L(?:-(\d{1,2}))?", re.ASCII)
_NEAREST_WEEKDAY = re.compile(r"(\d{1,2})W", re.ASCII)
_NTH_WEEKDAY = re.compile(r"(\w+)#(\d)", re.ASCII)
_LAST_WEEKDAY = re.compile(r"(\w+)L", re.ASCII)
_ALL_HOURS = (1 << 24) - 1


class _Field(NamedTuple):
    """A field of an expression: its name, its least and greatest value, and the names of its values from `low` on."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


_SECOND, _MINUTE, _HOUR = _Field("second", 0, 59), _Field("minute", 0, 59), _Field("hour", 0, 23)
_DAY, _MONTH = _Field("day", 1, 31), _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("weekday", 0, 7, _WEEKDAYS)


class _Days(NamedTuple):
    """The two fields for days. None stands for `*`."""

    days: frozenset[int] | None
    before_last: frozenset[int]  # L and L-n: the n (0 for L), counted back from the last day of the month
    nearest_weekdays: frozenset[int]  # nW: the n
    last_weekday: bool  # LW
    weekdays: frozenset[int] | None  # 0 is Sunday
    nth_weekdays: frozenset[tuple[int, int]]  # d#n: the weekday and the n. dL: the weekday and 0

    def mask(self, length: int, first_weekday: int) -> int:
        """Compute the matching days of a month: bit n is set if day n matches.

        `length`: the number of days of the month. `first_weekday`: of its first day, 0 is Sunday.
        """

        def weekday(day: int) -> int:
            return (first_weekday + day - 1) % 7

        by_day = by_weekday = 0
        for day in range(1, length + 1):
            week = (day - 1) // 7 + 1
            if self.days is not None and (day in self.days or length - day in self.before_last):
                by_day |= 1 << day
            if self.weekdays is not None and (
                weekday(day) in self.weekdays
                or (weekday(day), week) in self.nth_weekdays
                # The last of its weekdays in the month, because a week later is another month.
                or (day + 7 > length and (weekday(day), 0) in self.nth_weekdays)
            ):
                by_weekday |= 1 << day
        workdays = [day for day in range(1, length + 1) if weekday(day) not in (0, 6)]
        # The nearest weekday never leaves the month. Of two at the same distance, the key chooses the earlier one.
        for nearest_day in self.nearest_weekdays:
            by_day |= 1 << min(workdays, key=lambda day: (abs(day - nearest_day), day))
        if self.last_weekday:
            by_day |= 1 << workdays[-1]
        if self.days is None and self.weekdays is None:
            return (2 << length) - 2  # all days: bits 1 to `length`
        # POSIX: if both fields are given, a day that matches one field is enough.
        return by_day | by_weekday


class CronTimes:
    """The local times of a cron expression (`LocalTimes`).

    A field is a number in which bit n is set if the value n matches. So a search takes some additions and shifts.
    """

    __slots__ = (
        "_days", "_first_time_s", "_hours", "_masks", "_minutes", "_months", "_seconds", "runs_every_hour", "text",
    )  # fmt: skip

    def __init__(self, text: str, seconds: int, minutes: int, hours: int, months: int, days: _Days) -> None:
        """`text`: the canonical expression. The other arguments are its fields."""
        self.text = text
        self._seconds, self._minutes, self._hours, self._months = seconds, minutes, hours, months
        self._days = days
        # The result of `_Days.mask` for each kind of month: 28 to 31 days, seven weekdays of the first day. Computed
        # when it is first needed.
        self._masks: list[int | None] = [None] * 28
        self._first_time_s = 3_600 * _lowest(hours) + 60 * _lowest(minutes) + _lowest(seconds)
        self.runs_every_hour = hours == _ALL_HOURS

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier than `local_s`. None after the year 9999."""
        day, second = divmod(local_s, DAY_S)
        ordinal = max(1, day + EPOCH_ORDINAL)
        found_ordinal = self._day_at_or_after(ordinal)
        # On the day of `local_s`, times before `second` do not count. On a later day, the first time is the result.
        if found_ordinal == day + EPOCH_ORDINAL:
            time_s = self._time_at_or_after(second)
            if time_s is not None:
                return day * DAY_S + time_s
            found_ordinal = self._day_at_or_after(ordinal + 1)
        return None if found_ordinal is None else (found_ordinal - EPOCH_ORDINAL) * DAY_S + self._first_time_s

    def occurs(self) -> bool:
        """Check whether any date matches."""
        # Every length of a month occurs with each weekday as its first day, so 28 kinds of months stand for all.
        lengths = {
            length + leap
            for month, length in enumerate(_MONTH_LENGTHS, 1)
            for leap in ((0, 1) if month == 2 else (0,))
            if self._months >> month & 1
        }
        return any(self._mask(length, weekday) for length in lengths for weekday in range(7))

    def _day_at_or_after(self, ordinal: int) -> int | None:
        """Find the first matching date that is not earlier. Dates are ordinals of `datetime.date`. None after 9999."""
        if ordinal > _LAST_ORDINAL:
            return None
        start = date.fromordinal(ordinal)
        year, month, day = start.year, start.month, start.day
        first = ordinal - day + 1
        # The Gregorian calendar repeats after 400 years, so an expression that `occurs` has a match within them.
        while first <= _LAST_ORDINAL:
            length = _MONTH_LENGTHS[month - 1]
            if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
                length = 29
            if self._months >> month & 1:
                # Ordinal 1 is a Monday, so the remainder is 0 for a Sunday, as in the field for weekdays.
                matching = self._mask(length, first % 7) >> day
                if matching:
                    return first + day - 1 + _lowest(matching)
            first, day, month = first + length, 1, month + 1
            if month > 12:
                year, month = year + 1, 1
        return None

    def _mask(self, length: int, first_weekday: int) -> int:
        """Return the result of `_Days.mask`, computed once for each kind of month."""
        kind = (length - _SHORTEST_MONTH) * 7 + first_weekday
        mask = self._masks[kind]
        if mask is None:
            mask = self._masks[kind] = self._days.mask(length, first_weekday)
        return mask

    def _time_at_or_after(self, second: int) -> int | None:
        """Find the first time of day that is not earlier. Times are seconds since midnight. None if there is none."""
        hour, second = divmod(second, 3_600)
        minute, second = divmod(second, 60)
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1:
                seconds = self._seconds >> second
                if seconds:
                    return hour * 3_600 + minute * 60 + second + _lowest(seconds)
            minutes = self._minutes >> minute + 1
            if minutes:
                return hour * 3_600 + (minute + 1 + _lowest(minutes)) * 60 + _lowest(self._seconds)
        hours = self._hours >> hour + 1
        if not hours:
            return None
        # The remainder is the first minute and second of an hour that matches.
        return (hour + 1 + _lowest(hours)) * 3_600 + self._first_time_s % 3_600


def _lowest(bits: int) -> int:
    """Return the index of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


# ---- parsing ----------------------------------------------------------------------------------------------------


@cached()
def parse_cron(text: str, seconds: bool = False) -> CronTimes:
    """Parse an expression. `seconds` allows a sixth field, before the others. Raises InvalidDelay."""
    canonical = " ".join(text.split())
    # The canonical text keeps the alias, so that users find the rule that they have written.
    if canonical.startswith("@"):
        canonical = canonical.lower()
        if canonical not in _ALIASES or seconds:
            _refuse(text, _alias_advice(canonical, seconds))
    else:
        canonical = canonical.upper()
    fields = _ALIASES.get(canonical, canonical).split(" ")
    if len(fields) != 5 + seconds:
        _refuse(text, _fields_advice(len(fields), seconds))
    second = fields.pop(0) if seconds else "0"
    minute, hour, day, month, weekday = fields
    times = CronTimes(
        canonical,
        _bits(_parse_values(text, _SECOND, second)),
        _bits(_parse_values(text, _MINUTE, minute)),
        _bits(_parse_values(text, _HOUR, hour)),
        _bits(_parse_values(text, _MONTH, month)),
        _parse_days(text, day, weekday),
    )
    # Each search of a rule without a date would go through all years up to 9999.
    if not times.occurs():
        _refuse(text, "no date matches it; a month of those given has to have the day")
    return times


def _alias_advice(alias: str, seconds: bool) -> str:
    """Explain why an expression that begins with @ is refused, and what to write instead."""
    if seconds:
        return "has no field for seconds; leave out `seconds`"
    if alias.startswith("@every"):
        return f"write the rule every: {alias.removeprefix('@every').strip() or '15m'!r} instead"
    if alias == "@reboot":
        return "a schedule has no start of a machine; send a message when your program starts"
    return f"write five fields, or one of {', '.join(_ALIASES)}"


def _fields_advice(number: int, seconds: bool) -> str:
    """Explain why an expression with this number of fields is refused, and what to write instead."""
    if seconds:
        return (
            f"{number} fields are given; with `seconds` there are six: second minute hour day month weekday"
        )
    if number == 6:
        return (
            "has six fields; some programs read the first as seconds, others the last as seconds or years: "
            "write five fields, or set `seconds` if the first is for seconds"
        )
    return f"{number} fields are given; an expression has five: minute hour day month weekday"


def _parse_values(text: str, field: _Field, field_text: str) -> frozenset[int]:
    """Parse a field without special values. `text`: the whole expression, for the error. Raises InvalidDelay."""
    if field_text == "*":
        return frozenset(range(field.low, field.high + 1))
    values: set[int] = set()
    for term in field_text.split(","):
        values.update(_parse_term(text, field, term))
    return frozenset(values)


def _parse_term(text: str, field: _Field, term: str) -> range:
    """Parse a value, a range, or a step. Raises InvalidDelay, also for forms about which programs disagree."""
    match = _TERM.fullmatch(term)
    if match is None or term == "*":
        _refuse(text, _term_advice(field, term))
    star, first, last, step_text = match.groups()
    low = field.low if star else _parse_value(text, field, first)
    high = field.high if star else _parse_value(text, field, last or first)
    if step_text is None:
        if low > high:
            _refuse(
                text,
                f"{field.name} {term}: programs disagree whether a range may wrap; write {_unwrap(field, low, high)}",
            )
        return range(low, high + 1)
    step = int(step_text) if step_text.isdecimal() else 0
    # A longer step would match one value only, and is usually meant as an interval across hours or days.
    if not 1 <= step <= field.high - field.low:
        _refuse(
            text,
            f"{field.name} {term}: a step is from 1 to {field.high - field.low}; write longer ones as the rule every",
        )
    if not star and last is None:
        # `a/n` is refused below. The range up to the greatest value is needed for the advice.
        high = 6 if field is _WEEKDAY else field.high
    values = range(low, high + 1, step)
    if field is _WEEKDAY:
        listed = ",".join(_WEEKDAYS[value] for value in values if value < 7)
        _refuse(
            text,
            f"weekday {term}: programs count steps from Sunday or from Monday; list the days, such as {listed}",
        )
    if not star and last is None:
        _refuse(
            text,
            f"{field.name} {term}: programs disagree about a step without a range; write {first}-{high}/{step}",
        )
    if low > high:
        _refuse(text, f"{field.name} {term}: a range goes from the lower to the higher value")
    if low == high:
        _refuse(
            text,
            f"{field.name} {term}: programs disagree about a step in a range of one value; write {first}",
        )
    return values


def _term_advice(field: _Field, term: str) -> str:
    """Explain why a term that is no value, range or step is refused, and what to write instead."""
    if term == "*":
        return f"{field.name}: * matches each value; write it alone, not in a list"
    if "?" in term:
        return f"{field.name} {term}: programs disagree about ?; write *"
    return f"{field.name} {term!r} is not understood; write {_examples(field)}"


def _examples(field: _Field) -> str:
    """Build the examples of a field for an error text."""
    examples = (
        f"*, a list such as {field.low + 1},{field.low + 4}, a range such as {field.low + 1}-{field.low + 4}"
    )
    if field is _WEEKDAY:
        return "*, names such as MON,FRI or MON-FRI, MON#1 for the first Monday, or FRIL for the last Friday of a month"
    return examples + (
        ", or */2" if field is not _DAY else ", */2, L for the last day, 15W or LW for a weekday"
    )


def _parse_value(text: str, field: _Field, value_text: str) -> int:
    """Parse a number or a name of a field. Raises InvalidDelay."""
    if value_text in field.names:
        return field.names.index(value_text) + field.low
    if value_text.isdecimal() and len(value_text) <= 2 and field.low <= int(value_text) <= field.high:
        return int(value_text)
    names = f" or {field.names[0]} to {field.names[-1]}" if field.names else ""
    _refuse(text, f"{field.name} {value_text}: values are {field.low} to {field.high}{names}")


def _unwrap(field: _Field, low: int, high: int) -> str:
    """Write a range from the higher value `low` to the lower value `high` as a list that does not wrap."""
    if field is _WEEKDAY:
        return ",".join(_WEEKDAYS[value % 7] for value in range(low, high + 8))
    names = field.names or tuple(str(value) for value in range(field.low, field.high + 1))
    parts = [(low, field.high), (field.low, high)]
    return ",".join(
        names[first - field.low] + ("" if first == last else f"-{names[last - field.low]}")
        for first, last in parts
    )


def _parse_days(text: str, day: str, weekday: str) -> _Days:
    """Parse the fields for days and weekdays, with their special values. Raises InvalidDelay."""
    days: set[int] = set()
    before_last: set[int] = set()
    nearest: set[int] = set()
    last_weekday = False
    for term in day.split(",") if day != "*" else ():
        if match := _BEFORE_LAST.fullmatch(term):
            before_last.add(int(match[1] or 0))
        elif term == "LW":
            last_weekday = True
        elif match := _NEAREST_WEEKDAY.fullmatch(term):
            nearest.add(_parse_value(text, _DAY, match[1]))
        else:
            days.update(_parse_term(text, _DAY, term))
    if max(before_last, default=0) >= _SHORTEST_MONTH:
        _refuse(text, f"day {day}: not each month has such a day; write at most L-{_SHORTEST_MONTH - 1}")
    if max(nearest, default=0) > _SHORTEST_MONTH:
        _refuse(text, f"day {day}: programs disagree about months without this day; write at most 28W, or LW")
    weekdays: set[int] = set()
    nth: set[tuple[int, int]] = set()
    for term in weekday.split(",") if weekday != "*" else ():
        if match := _NTH_WEEKDAY.fullmatch(term):
            if not 1 <= int(match[2]) <= 5:
                _refuse(
                    text, f"weekday {term}: a month has a first to fifth {match[1]}, such as {match[1]}#1"
                )
            # Modulo 7, because 0 and 7 are Sunday.
            nth.add((_parse_value(text, _WEEKDAY, match[1]) % 7, int(match[2])))
        elif match := _LAST_WEEKDAY.fullmatch(term):
            nth.add((_parse_value(text, _WEEKDAY, match[1]) % 7, 0))
        elif term.startswith("L"):
            _refuse(text, f"weekday {term}: write the day first, such as {_last_weekday(term)}")
        else:
            weekdays.update(value % 7 for value in _parse_term(text, _WEEKDAY, term))
    if day != "*" and weekday != "*":
        _check_both(text, day, weekday, days, weekdays)
    return _Days(
        None if day == "*" else frozenset(days), frozenset(before_last), frozenset(nearest), last_weekday,
        None if weekday == "*" else frozenset(weekdays), frozenset(nth),
    )  # fmt: skip


def _last_weekday(term: str) -> str:
    """Correct a term such as LFRI for an error text."""
    return f"{term[1:]}L" if term[1:] else "SAT, or FRIL for the last Friday"


def _check_both(text: str, day: str, weekday: str, days: set[int], weekdays: set[int]) -> None:
    """Refuse a day with a weekday if programs disagree whether one or both have to match. Raises InvalidDelay.

    `days`, `weekdays`: the values of the two fields, without special values.
    """
    if "*" in day + weekday:
        _refuse(
            text,
            "programs disagree about a step * with another day field; list the days, or write the rule as rrule",
        )
    if len(days) == 31 or len(weekdays) == 7:
        _refuse(
            text, "one of the fields for days matches each day; write * there, so that the other one decides"
        )
    first = min(days, default=0)
    if first in (1, 8, 15, 22, 25) and days == set(range(first, first + 7)):
        # A usual mistake: `1-7 * MON` is meant as the first Monday, but one matching field is enough.
        number = "L" if first == 25 else f"#{(first - 1) // 7 + 1}"
        listed = ",".join(f"{_WEEKDAYS[value]}{number}" for value in sorted(weekdays)) or weekday
        _refuse(
            text,
            f"day {day} or weekday {weekday} is enough; if both have to match, write * for the day and {listed}",
        )


def _bits(values: frozenset[int]) -> int:
    return sum(1 << value for value in values)


def _refuse(text: str, advice: str) -> NoReturn:
    raise InvalidDelay(f"cron={text[:100]!r}: {advice}")
