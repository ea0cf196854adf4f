"""Convert delays and due times as users write them to milliseconds: `after=` and `at=` in Python, and CLI options.

`after` is relative to now. It stays relative until the broker admits the message, so a wrong clock on the client's
machine does not shift the due time. `at` is absolute. Fractions of a millisecond are rounded up, because a message must
never be early.

These values are refused, with the reason: a number without a unit, a negative delay, one longer than the broker's
limit, a datetime without a time zone (its meaning would depend on the machine), and a number that is probably in
seconds instead of milliseconds.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from operator import index
from typing import Literal, SupportsIndex

from timeball.model import limits, local_time
from timeball.model.errors import InvalidDelay

# Instead of a time from which a consumer group reads: the position after the last message.
END = -1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_INSTANT_US = limits.INSTANT_MS_MAX * 1_000

_UNIT_MS = {
    "ms": 1,
    "s": limits.SECOND_MS,
    "m": limits.MINUTE_MS,
    "h": limits.HOUR_MS,
    "d": limits.DAY_MS,
    "w": 7 * limits.DAY_MS,
}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(ms|[smhdw])")
_TEXT_CHARACTERS_MAX = 100

After = timedelta | str | Literal[0]
At = datetime | SupportsIndex | str

# Durations of ISO 8601, without years and months, because these have no fixed length.
_ISO_DURATION = re.compile(
    r"p(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)w|(?=[0-9t])(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)d)?"
    r"(?:t(?=[0-9])(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)h)?(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)m)?"
    r"(?:([0-9]{1,15}(?:\.[0-9]{1,9})?)s)?)?)"
)


def delay_ms(after: After, name: str = "after") -> int:
    """Convert a delay to ms: a timedelta, or text with units such as "250ms", "30m", "1h30m", "1.5d", "PT30M".

    A number without a unit is refused, because some libraries mean seconds by it and others milliseconds. Only 0 needs
    no unit. Raises InvalidDelay, which names the argument `name`.

    >>> delay_ms("1h30m"), delay_ms("2.5s"), delay_ms(timedelta(days=40)), delay_ms(0)
    (5400000, 2500, 3456000000, 0)
    """
    if isinstance(after, str):
        try:
            delay = duration_ms(after)
        except InvalidDelay as error:
            raise InvalidDelay(f"{name}={error}") from None
    elif isinstance(after, timedelta):
        delay = -(-(after // _MICROSECOND) // 1000)
    elif isinstance(after, float | SupportsIndex) and not isinstance(after, bool):
        if after != 0:
            raise InvalidDelay(
                f"{name}={_shortened(after)}: a number has no unit; write text such as '5s' or '30m', or a timedelta"
            )
        delay = 0
    else:
        raise InvalidDelay(f"{name}={_shortened(after)}: a timedelta, or text such as '5s' or '30m'")
    if delay < 0:
        raise InvalidDelay(f"{name}={_shortened(after)}: negative; leave it out to deliver at once")
    if delay > limits.DELAY_MS_MAX:
        days = limits.DELAY_MS_MAX // limits.DAY_MS
        raise InvalidDelay(
            f"{name}={_shortened(after)}: further away than {days} days, the most a broker takes"
        )
    return delay


def due_ms(at: At) -> int:
    """Convert a due time to ms since 1970 UTC: an aware datetime, text in RFC 3339, or a number of ms.

    The number may be text, because all values on a command line are text. Raises InvalidDelay.

    >>> due_ms("2026-01-01T01:00:00+01:00")
    1767225600000
    >>> due_ms(datetime(2026, 1, 1, tzinfo=UTC))
    1767225600000
    """
    if isinstance(at, str | datetime):
        try:
            due = instant_ms(at) if isinstance(at, str) else _datetime_ms(at)
        except InvalidDelay as error:
            raise InvalidDelay(f"at={error}") from None
    elif isinstance(at, SupportsIndex) and not isinstance(at, bool):
        due = index(at)
    else:
        raise InvalidDelay(f"at={at!r}: an aware datetime, or milliseconds since 1970 as an int")
    is_number = at.strip().isdecimal() if isinstance(at, str) else not isinstance(at, datetime)
    if is_number and 0 <= due < limits.DUE_MS_MIN:
        raise InvalidDelay(f"at={at}: {limits.NOT_MILLISECONDS_TEXT}")
    if not 0 <= due <= limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"at={_shortened(at)}: an instant lies between 1970 and 9999")
    return due


def when(after: After | None, at: At | None) -> tuple[int | None, int | None]:
    """Convert `after` and `at` of a message to (delay_ms, due_ms). Raises InvalidDelay if both are given."""
    if after is not None and at is not None:
        raise InvalidDelay("after= and at= name two due times; give one of them")
    return (
        None if after is None else delay_ms(after),
        None if at is None else due_ms(at),
    )


@lru_cache(1_024)  # an application uses few delays, and uses each of them again and again
def duration_ms(text: str, advice: str = "numbers with units, as in '30m', '1h30m', '250ms', '2d'") -> int:
    """Convert a duration with units, or in ISO 8601, to ms. Raises InvalidDelay, whose text ends with `advice`.

    >>> duration_ms("1h 30m"), duration_ms("PT1.5S")
    (5400000, 1500)
    """
    compact = text.strip().lower()
    total, end = Fraction(0), 0
    if compact == "0":
        return 0
    if len(compact) <= _TEXT_CHARACTERS_MAX and (iso := _ISO_DURATION.fullmatch(compact)):
        terms = zip(iso.groups(), "wdhms", strict=True)
        return math.ceil(sum(Fraction(number) * _UNIT_MS[unit] for number, unit in terms if number))
    if len(compact) <= _TEXT_CHARACTERS_MAX:
        for term in _NUMBER_AND_UNIT.finditer(compact):
            if term.start() != end:
                break
            total += Fraction(term[1]) * _UNIT_MS[term[2]]
            end = term.end()
    if not compact or end != len(compact):
        raise InvalidDelay(f"{_shortened(text)}: {advice}")
    return math.ceil(total)


def instant_ms(text: str) -> int:
    """Convert RFC 3339 with a time zone, or a whole number of ms, to ms since 1970. Raises InvalidDelay."""
    stripped = text.strip()
    try:
        if len(text) > _TEXT_CHARACTERS_MAX:
            raise ValueError
        if stripped.isdecimal():
            return int(stripped)
        instant = datetime.fromisoformat(stripped)
    except ValueError:
        raise InvalidDelay(
            f"{_shortened(text)}: an instant as in '2030-01-31T09:00:00Z', or an aware datetime"
        ) from None
    return _datetime_ms(instant)


def _datetime_ms(at: datetime) -> int:
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidDelay(
            f"{at.isoformat()}: without a time zone it names a different instant on each machine; end it with Z or "
            "an offset such as +01:00; a datetime needs a tzinfo"
        )
    instant_us = -((_EPOCH - at) // _MICROSECOND)
    zone = getattr(at.tzinfo, "key", None)
    return -(-(_checked_by_tzdata(at, instant_us, zone) if isinstance(zone, str) else instant_us) // 1000)


def _checked_by_tzdata(at: datetime, instant_us: int, zone: str) -> int:
    """Check the instant (us since 1970) that Python computed for a datetime in a zone of `zoneinfo`.

    Python may have read the zone's rules from files of the host, so the rules of the installed tzdata are compared. If
    they agree, Python's instant is returned, also for the second pass of a repeated local time (`fold=1`). For a local
    time in a gap, the end of the gap is returned. Otherwise the rules differ: raises InvalidDelay.
    """
    ours, shown_us = local_time.load_zone(zone), local_time.local_us(at)
    if instant_us + ours.offset_us(instant_us) == shown_us or not 0 <= instant_us < _LAST_INSTANT_US:
        return instant_us
    round_trip = (_EPOCH + instant_us * _MICROSECOND).astimezone(at.tzinfo)
    # In a gap of Python's rules the round trip gives another local time.
    if not ours.is_shown(shown_us) and round_trip.replace(tzinfo=None) != at.replace(tzinfo=None):
        return ours.instant_us(shown_us)
    raise InvalidDelay(
        f"{at.isoformat()}: this machine's rules of {zone} differ from those of tzdata {local_time.VERSION}; write the "
        "offset from UTC, or set PYTHONTZPATH= so that Python reads the installed tzdata"
    )


def _shortened(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
