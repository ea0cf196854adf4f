"""What a person writes for a delay and an instant, as milliseconds: in Python's `after=` and `at=`, as in options.

`after` is relative and stays relative until the broker admits the message, so that a wrong clock on this
machine does not move it. `at` is absolute. Fractions of a millisecond are rounded up: never early.

Refused, with the reason: a number without a unit, negative, further away than the broker's limit, a datetime without a
zone (whose noon?), and whole seconds where milliseconds are meant.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from operator import index
from typing import Literal, SupportsIndex

from timeball import limits, local_time
from timeball.errors import InvalidDelay

END = -1  # in the place of an instant at which a group begins: behind the last message

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_US = limits.INSTANT_MS_MAX * 1_000

_UNIT_MS = {
    "ms": 1,
    "s": limits.SECOND_MS,
    "m": limits.MINUTE_MS,
    "h": limits.HOUR_MS,
    "d": limits.DAY_MS,
    "w": 7 * limits.DAY_MS,
}
_PART = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(ms|[smhdw])")
_TEXT_MAX = 100

After = timedelta | str | Literal[0]
At = datetime | SupportsIndex | str

# ISO 8601, of which years and months have no length of their own.
_ISO = re.compile(
    r"p(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)w|(?=[0-9t])(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)d)?"
    r"(?:t(?=[0-9])(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)h)?(?:([0-9]{1,9}(?:\.[0-9]{1,9})?)m)?"
    r"(?:([0-9]{1,15}(?:\.[0-9]{1,9})?)s)?)?)"
)


def delay_ms(after: After, name: str = "after") -> int:
    """Milliseconds of a delay: a timedelta, or text with units such as "250ms", "30m", "1h30m", "1.5d", "PT30M".

    A bare number is refused, because it would be seconds here and milliseconds there; 0 alone needs no unit.

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
                f"{name}={_shown(after)}: a number has no unit; write text such as '5s' or '30m', or a timedelta"
            )
        delay = 0
    else:
        raise InvalidDelay(f"{name}={_shown(after)}: a timedelta, or text such as '5s' or '30m'")
    if delay < 0:
        raise InvalidDelay(f"{name}={_shown(after)}: negative; leave it out to deliver at once")
    if delay > limits.DELAY_MS_MAX:
        days = limits.DELAY_MS_MAX // limits.DAY_MS
        raise InvalidDelay(f"{name}={_shown(after)}: further away than {days} days, the most a broker takes")
    return delay


def due_ms(at: At) -> int:
    """Milliseconds since 1970 UTC of an instant: an aware datetime, RFC 3339, or that number itself.

    A number may be text, as everything on a command line is.

    >>> due_ms("2026-01-01T01:00:00+01:00")
    1767225600000
    >>> due_ms(datetime(2026, 1, 1, tzinfo=UTC))
    1767225600000
    """
    if isinstance(at, str | datetime):
        try:
            due = instant_ms(at) if isinstance(at, str) else _of_datetime(at)
        except InvalidDelay as error:
            raise InvalidDelay(f"at={error}") from None
    elif isinstance(at, SupportsIndex) and not isinstance(at, bool):
        due = index(at)
    else:
        raise InvalidDelay(f"at={at!r}: an aware datetime, or milliseconds since 1970 as an int")
    is_number = at.strip().isdecimal() if isinstance(at, str) else not isinstance(at, datetime)
    if is_number and 0 <= due < limits.DUE_MS_MIN:
        raise InvalidDelay(f"at={at}: {limits.NO_MILLISECONDS}")
    if not 0 <= due <= limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"at={_shown(at)}: an instant lies between 1970 and 9999")
    return due


def when(after: After | None, at: At | None) -> tuple[int | None, int | None]:
    """(delay_ms, due_ms) of a message: at most one of them is not None."""
    if after is not None and at is not None:
        raise InvalidDelay("after= and at= name two instants; give one of them")
    return (
        None if after is None else delay_ms(after),
        None if at is None else due_ms(at),
    )


@lru_cache(1_024)  # an application has a few delays, and sends each again and again
def duration_ms(text: str, advice: str = "numbers with units, as in '30m', '1h30m', '250ms', '2d'") -> int:
    """Return the milliseconds of a duration with units, or of one in ISO 8601; raise InvalidDelay with the advice.

    >>> duration_ms("1h 30m"), duration_ms("PT1.5S")
    (5400000, 1500)
    """
    compact = text.strip().lower()
    total, end = Fraction(0), 0
    if compact == "0":
        return 0
    if len(compact) <= _TEXT_MAX and (iso := _ISO.fullmatch(compact)):
        parts = zip(iso.groups(), "wdhms", strict=True)
        return math.ceil(sum(Fraction(number) * _UNIT_MS[unit] for number, unit in parts if number))
    if len(compact) <= _TEXT_MAX:
        for part in _PART.finditer(compact):
            if part.start() != end:
                break
            total += Fraction(part[1]) * _UNIT_MS[part[2]]
            end = part.end()
    if not compact or end != len(compact):
        raise InvalidDelay(f"{_shown(text)}: {advice}")
    return math.ceil(total)


def instant_ms(text: str) -> int:
    """Return the milliseconds since 1970 of RFC 3339 with a zone, or of a whole number of them; raise InvalidDelay."""
    stripped = text.strip()
    try:
        if len(text) > _TEXT_MAX:
            raise ValueError
        if stripped.isdecimal():
            return int(stripped)
        instant = datetime.fromisoformat(stripped)
    except ValueError:
        raise InvalidDelay(
            f"{_shown(text)}: an instant as in '2030-01-31T09:00:00Z', or an aware datetime"
        ) from None
    return _of_datetime(instant)


def _of_datetime(at: datetime) -> int:
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidDelay(
            f"{at.isoformat()}: without a time zone it names a different instant on each machine; end it with Z or "
            "an offset such as +01:00; a datetime needs a tzinfo"
        )
    instant_us = -((_EPOCH - at) // _MICROSECOND)
    zone = getattr(at.tzinfo, "key", None)
    return -(-(_by_our_rules(at, instant_us, zone) if isinstance(zone, str) else instant_us) // 1000)


def _by_our_rules(at: datetime, instant_us: int, zone: str) -> int:
    """Return the instant of a datetime in a zone of `zoneinfo`, which may have read the files of the host.

    It is taken as Python reads it, also the second pass of a repeated time (`fold=1`), if our rules agree. Within a gap
    it is the end of the gap.
    """
    ours, local_us = local_time.zone_named(zone), local_time.local_us(at)
    if instant_us + ours.offset_us(instant_us) == local_us or not 0 <= instant_us < _LAST_US:
        return instant_us
    again = (_EPOCH + instant_us * _MICROSECOND).astimezone(at.tzinfo)
    if not ours.is_shown(local_us) and again.replace(tzinfo=None) != at.replace(tzinfo=None):
        return ours.instant_us(local_us)
    raise InvalidDelay(
        f"{at.isoformat()}: this machine's rules of {zone} differ from those of tzdata {local_time.VERSION}; write the "
        "offset from UTC, or set PYTHONTZPATH= so that Python reads the installed tzdata"
    )


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
