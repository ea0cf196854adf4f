"""Convert times as users write them: delays and due times to milliseconds, and local times to instants.

Delays and due times are `after=` and `at=` in Python, and options of the command line.

`after` is relative to now. It stays relative until the broker admits the message, so a wrong clock on the client's
machine does not shift the due time. `at` is absolute. Fractions of a millisecond are rounded up, because a message must
never be early.

These values are refused, with the reason: a number without a unit, a negative delay, one longer than the broker's
limit, a datetime without a time zone (its meaning would depend on the machine), and a number that is probably in
seconds instead of milliseconds.

A local time is a date and a time of day in a time zone. An instant is a point in time, independent of zones:

    local time                                   instant
    shown once by clocks in the zone             that instant
    never shown (clocks are put forward)         the first instant after the gap
    shown twice (clocks are put back)            the earlier instant

All edges and Spark convert local times here, so one text means one instant on every machine. The rules of time zones
come from the package `tzdata`, which the extras `broker` and `spark` install. The rules of the host, of Java and of
DuckDB are never used, because they can be years older. A program that only has the client converts no local times but
those of its own datetimes: without `tzdata`, these mean the instant that Python computes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsIndex
from zlib import crc32

from timeball.model import limits
from timeball.model.errors import InvalidDelay

try:
    import tzdata  # type: ignore[import-untyped]
except ModuleNotFoundError:  # a client alone
    tzdata = None

# Instead of a time from which a consumer group reads: the position after the last message.
END = -1
# The property of a message whose due time was given as a local time, such as "2030-01-31T09:00:00 Europe/Berlin". The
# broker computes the due time again when the rules of the zone change (broker/pending/zone_updates.py).
LOCAL_TIME = "TIMEBALL_LOCAL_TIME"

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
# The form in which programs usually write an instant.
_UTC_WITH_MS = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z")
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
    elif isinstance(after, int | float | SupportsIndex) and not isinstance(after, bool):
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


def due_ms(at: At, name: str = "at") -> int:
    """Convert a due time to ms since 1970 UTC: an aware datetime, text in RFC 3339, or a number of ms.

    The number may be text, because all values on a command line are text. Raises InvalidDelay, which names the argument
    `name`.

    >>> due_ms("2026-01-01T01:00:00+01:00")
    1767225600000
    >>> due_ms(datetime(2026, 1, 1, tzinfo=UTC))
    1767225600000
    """
    if type(at) is int and limits.DUE_MS_MIN <= at <= limits.INSTANT_MS_MAX:
        return at  # usually: the checks below cost four times as much
    if isinstance(at, str | datetime):
        try:
            due = instant_ms(at) if isinstance(at, str) else _datetime_ms(at)
        except InvalidDelay as error:
            raise InvalidDelay(f"{name}={error}") from None
    # An int first: a check against the protocol costs ten times as much.
    elif isinstance(at, int | SupportsIndex) and not isinstance(at, bool):
        due = index(at)
    else:
        raise InvalidDelay(f"{name}={at!r}: an aware datetime, or milliseconds since 1970 as an int")
    is_number = at.strip().isdecimal() if isinstance(at, str) else not isinstance(at, datetime)
    if is_number and 0 <= due < limits.DUE_MS_MIN:
        raise InvalidDelay(f"{name}={at}: {limits.NOT_MILLISECONDS_TEXT}")
    if not 0 <= due <= limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"{name}={_shortened(at)}: a due time is between 1970 and 9999")
    return due


def when(after: After | None, at: At | None) -> tuple[int | None, int | None]:
    """Convert `after` and `at` of a message to (delay_ms, due_ms). Raises InvalidDelay if both are given."""
    if after is not None and at is not None:
        raise InvalidDelay("after= and at= name two due times; give one of them")
    return (
        None if after is None else delay_ms(after),
        None if at is None else due_ms(at),
    )


def local_due_ms(at: datetime | str, zone: str) -> tuple[int, str]:
    """Convert a local time in an IANA zone to its due time (ms since 1970), and to the text that is stored beside it.

    `at` is a datetime without tzinfo, or text in ISO 8601 without an offset. Raises InvalidDelay.

    >>> local_due_ms("2030-01-31T09:00", "Europe/Berlin")
    (1896076800000, '2030-01-31T09:00:00 Europe/Berlin')
    """
    local = at
    if isinstance(at, str):
        try:
            local = datetime.fromisoformat(at) if len(at) <= _TEXT_CHARACTERS_MAX and "T" in at else at
        except ValueError:  # refused below, because `local` is still text
            pass
    if not isinstance(local, datetime) or local.tzinfo is not None:
        raise InvalidDelay(
            f"at={_shortened(at)}: with a zone, write a local time such as '2030-01-31T09:00', without an offset"
        )
    due = -(-load_zone(zone).instant_us(local_us(local)) // 1_000)
    if not 0 <= due <= limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"at={_shortened(at)}: a due time is between 1970 and 9999")
    return due, f"{local.isoformat()} {zone}"


def stored_local_time(text: str) -> tuple[str, str]:
    """Split the value of `LOCAL_TIME` into local time and zone. The zone may be missing, and then is empty."""
    local, _, zone = text.partition(" ")
    return local, zone


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


def signed_duration_ms(by: timedelta | str, name: str = "by") -> int:
    """Convert a duration that may be negative to ms. Raises InvalidDelay, which names the argument `name`.

    >>> signed_duration_ms("-30m")
    -1800000
    """
    if isinstance(by, timedelta):
        return math.ceil(by / timedelta(milliseconds=1))
    if not isinstance(by, str):
        raise InvalidDelay(f"{name}={_shortened(by)}: a timedelta, or text such as '30m' or '-30m'")
    text = by.strip()
    try:
        return -duration_ms(text[1:]) if text.startswith("-") else duration_ms(text.removeprefix("+"))
    except InvalidDelay as error:
        raise InvalidDelay(f"{name}={error}") from None


def duration_text(duration: int) -> str:
    """Convert ms to text that `signed_duration_ms` reads.

    >>> duration_text(-5_400_000), duration_text(0)
    ('-1h30m', '0')
    """
    rest, parts = abs(duration), []
    for unit in ("d", "h", "m", "s", "ms"):
        number, rest = divmod(rest, _UNIT_MS[unit])
        if number:
            parts.append(f"{number}{unit}")
    return ("-" if duration < 0 else "") + "".join(parts) if parts else "0"


def instant_ms(text: str) -> int:
    """Convert RFC 3339 with a time zone, or a whole number of ms, to ms since 1970. Raises InvalidDelay."""
    stripped = text.strip()
    try:
        if len(text) > _TEXT_CHARACTERS_MAX:
            raise ValueError
        if stripped.isdecimal():
            return int(stripped)
        if _UTC_WITH_MS.fullmatch(stripped):
            # Messages that are sent together are often due in the same second.
            return _utc_second_ms(stripped[:19]) + int(stripped[20:23])
        instant = datetime.fromisoformat(stripped)
    except ValueError:
        raise InvalidDelay(
            f"{_shortened(text)}: an instant as in '2030-01-31T09:00:00Z', or an aware datetime"
        ) from None
    return _datetime_ms(instant)


@lru_cache(1_024)
def _utc_second_ms(text: str) -> int:
    return _datetime_ms(datetime.fromisoformat(text + "Z"))


def _datetime_ms(at: datetime) -> int:
    """Convert a datetime into ms since 1970, rounded up. Raises InvalidDelay if it has no time zone."""
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidDelay(
            f"{at.isoformat()}: without a time zone it names a different instant on each machine; end it with Z or "
            "an offset such as +01:00; a datetime needs a tzinfo"
        )
    instant_us = -((_EPOCH - at) // _MICROSECOND)
    zone = getattr(at.tzinfo, "key", None)
    if isinstance(zone, str) and 0 <= instant_us < _LAST_INSTANT_US:
        instant_us = _in_zone_us(at, instant_us, zone)
    return -(-instant_us // 1000)


def _in_zone_us(at: datetime, instant_us: int, zone: str) -> int:
    """Check the instant (us since 1970) that Python computed for a datetime in a zone of `zoneinfo`.

    For a local time in a gap, the end of the gap is returned. Otherwise it is Python's instant, also for the second
    pass of a repeated local time (`fold=1`).

    Python may have read the zone's rules from files of the host, so the rules of tzdata are compared if it is
    installed. Raises InvalidDelay if they differ.
    """
    if tzdata is None:
        return instant_us if _shown(at, instant_us) == at.replace(tzinfo=None) else _end_of_gap_us(at)
    zone_rules, wanted_us = load_zone(zone), local_us(at)
    if instant_us + zone_rules.offset_us(instant_us) == wanted_us:
        return instant_us
    # In a gap of Python's rules the round trip gives another local time.
    if not zone_rules.is_shown(wanted_us) and _shown(at, instant_us) != at.replace(tzinfo=None):
        return zone_rules.instant_us(wanted_us)
    raise InvalidDelay(
        f"{at.isoformat()}: this machine's rules of {zone} differ from those of tzdata {VERSION}; write the "
        "offset from UTC, or set PYTHONTZPATH= so that Python reads the installed tzdata"
    )


def _shown(at: datetime, instant_us: int) -> datetime:
    """Compute the local time of an instant in the zone of `at`, by Python's rules."""
    return (_EPOCH + instant_us * _MICROSECOND).astimezone(at.tzinfo).replace(tzinfo=None)


def _end_of_gap_us(at: datetime) -> int:
    """Find the end of the gap that contains the local time of `at`, in us since 1970.

    It is the first instant whose local time is later than that of `at`. By PEP 495, fold=0 applies the offset before
    the gap, and fold=1 the one after it. The end of the gap lies between these two instants.
    """
    instants_us = [-((_EPOCH - at.replace(fold=fold)) // _MICROSECOND) for fold in (0, 1)]
    candidates_us = range(min(instants_us), max(instants_us))
    return candidates_us.start + bisect_left(
        candidates_us, True, key=lambda instant_us: _shown(at, instant_us) > at.replace(tzinfo=None)
    )


def _shortened(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


# ---- local times and time zones ------------------------------------------------------------------------------
# Times are numbers of microseconds since 1970, not limited to the years of a calendar. Local times are counted as if
# they were in UTC.

if TYPE_CHECKING:
    from timeball.model.message import Int64Array

VERSION: str = tzdata.__version__ if tzdata else ""  # of tzdata

_SECOND_US = 1_000_000
DAY_US = 86_400 * _SECOND_US
_LOCAL_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time
_EPOCH_DAY = date(1970, 1, 1).toordinal()
# The Gregorian calendar repeats every 400 years. These are whole weeks, so rules such as "last Sunday of March" repeat
# as well.
_CYCLE_YEARS = 400
_CYCLE_US = 146_097 * DAY_US
_FOREVER_US = 1 << 62  # beyond any instant
_FAR_US = 1 << 60  # 36,000 years: columns are clipped to this, so that no sum overflows

# A TZif file (RFC 9636, section 3) has two parts: a header and data with times of 4 bytes, then a header and data with
# times of 8 bytes. A header contains counts.
_HEADER_BYTES = 44
_COUNTS = slice(20, 44)
_NAME = r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]{3,}>)"
_TIME = r"([+-]?)(\d{1,3})(?::(\d\d))?(?::(\d\d))?"
_FOOTER = re.compile(rf"{_NAME}{_TIME}(?:{_NAME}(?:{_TIME})?,(.+),(.+))?")
_DAY = re.compile(rf"(?:M(\d+)\.(\d)\.(\d)|J(\d+)|(\d+))(?:/{_TIME})?")


class _TzifData(NamedTuple):
    """The decoded content of a TZif file. Times are seconds since 1970, offsets are seconds ahead of UTC."""

    changes_s: list[int]  # the times at which the offset changes
    offsets_s: list[int]  # the offset after each change
    first_s: int  # the offset before the first change
    footer: str  # the rule for the time after the last change, in the format of POSIX's TZ


class Period(NamedTuple):
    """A stretch of time in which clocks have one offset from UTC. In microseconds."""

    start_us: int
    end_us: int  # exclusive
    offset_us: int
    reached_us: int  # clocks have shown or skipped all earlier local times before the period


class Zone:
    """A time zone: a sequence of periods with one offset from UTC each.

    One definition covers all local times: the first instant at which a clock in the zone has reached the local time.
    For each period, `_latest_shown` is the latest local time that clocks have shown by the end of the period. These
    numbers never decrease, so a binary search finds the period of a local time.
    """

    def __init__(self, name: str, changes_s: list[int], offsets_s: list[int], *, repeats: bool) -> None:
        """`offsets_s` has one more entry than `changes_s`, the offset before the first change.

        With `repeats`, the last 400 years before the last change repeat for ever.
        """
        self.name = name
        self._starts = [-_FOREVER_US, *(change * _SECOND_US for change in changes_s)]
        self._offsets = [offset * _SECOND_US for offset in offsets_s]
        self._end_us = self._starts[-1] if repeats else _FOREVER_US
        self._period = Period(0, 0, 0, 0)  # that was found last
        self._latest_shown: list[int] = []
        latest = -_FOREVER_US
        for (_, end), offset in zip(pairwise([*self._starts, _FOREVER_US]), self._offsets, strict=True):
            latest = max(latest, end + offset)
            self._latest_shown.append(latest)

    def offset_us(self, instant_us: int) -> int:
        """Compute by how much a clock in the zone is ahead of UTC at this instant."""
        # Instants after the last change are moved back by whole cycles of 400 years into the known range.
        cycles = max(0, -((self._end_us - instant_us) // _CYCLE_US))
        return self._offsets[bisect_right(self._starts, instant_us - cycles * _CYCLE_US) - 1]

    def instant_us(self, local_us: int) -> int:
        """Compute the first instant at which a clock in the zone has reached this local time."""
        # `_end_us` is in UTC. One day less, because local time may be up to a day ahead of UTC.
        cycles = max(0, -((self._end_us - DAY_US - local_us) // _CYCLE_US))
        local_us -= cycles * _CYCLE_US
        period = bisect_right(self._latest_shown, local_us)
        return max(self._starts[period], local_us - self._offsets[period]) + cycles * _CYCLE_US

    def instants_us(self, local_us: Int64Array) -> Int64Array:
        """Compute `instant_us` for each value of a column. Values are first clipped to 36,000 years from 1970."""
        import numpy as np

        local = np.clip(local_us, -_FAR_US, _FAR_US)
        cycles = np.maximum(0, -((self._end_us - DAY_US - local) // _CYCLE_US)) * _CYCLE_US
        local -= cycles
        periods = np.searchsorted(np.array(self._latest_shown, np.int64), local, side="right")
        starts, offsets = np.array(self._starts, np.int64), np.array(self._offsets, np.int64)
        instants: Int64Array = np.maximum(starts[periods], local - offsets[periods]) + cycles
        return instants

    def is_shown(self, local_us: int) -> bool:
        """Check whether a clock in the zone ever shows this local time. False for a local time in a gap."""
        instant_us = self.instant_us(local_us)
        return instant_us + self.offset_us(instant_us) == local_us

    def period(self, instant_us: int) -> Period:
        """Find the period with one offset from UTC that contains this instant."""
        last = self._period  # most instants are near the last one
        if last.start_us <= instant_us < last.end_us:
            return last
        # Instants from the last change on are moved back by whole cycles, so that a next change is known.
        shift = max(0, (instant_us - self._end_us) // _CYCLE_US + 1) * _CYCLE_US
        number = bisect_right(self._starts, instant_us - shift) - 1
        self._period = Period(
            self._starts[number] + shift,
            (self._starts[number + 1] if number + 1 < len(self._starts) else _FOREVER_US) + shift,
            self._offsets[number],
            (self._latest_shown[number - 1] if number else -_FOREVER_US) + shift,
        )
        return self._period


def load_zone(name: str) -> Zone:
    """Load a zone by its IANA name. Raises InvalidDelay for any other name."""
    if name not in _names():  # security: only listed names may become paths of files
        raise InvalidDelay(
            f"{name[:64]!r} is no time zone of the IANA's list (tzdata {VERSION}); write it as Europe/Berlin or UTC"
        )
    return _zone(name)


def fixed_offset(offset_s: int) -> Zone:
    """Build a zone that always has this offset from UTC."""
    return Zone("", [], [offset_s], repeats=False)


def local_us(local: datetime) -> int:
    """Convert a local time to microseconds, counted as if it were UTC. Its tzinfo is ignored."""
    return (local.replace(tzinfo=None) - _LOCAL_EPOCH) // timedelta(microseconds=1)


# ---- the tables of tzdata -----------------------------------------------------------------------------------


def _tzdata_file(*names: str) -> bytes:
    """Read a file of the installed tzdata."""
    from importlib import resources  # slow to import, and few programs name a time zone

    return resources.files("tzdata").joinpath(*names).read_bytes()


@cache
def _names() -> frozenset[str]:
    return frozenset(_tzdata_file("zones").decode("ascii").split())


@cache
def _zone(name: str) -> Zone:
    return _build_zone(name, _decode_tzif(_tzdata_file("zoneinfo", *name.split("/"))))


def rules_hash(name: str) -> str:
    """Compute a hash of the rules of a zone: 8 hexadecimal characters, or "" for a zone that tzdata does not have.

    Equal hashes mean equal rules. Equal rules may have different hashes, if tzdata wrote them in another form.
    """
    if name not in _names():
        return ""
    return f"{crc32(_tzdata_file('zoneinfo', *name.split('/'))):08x}"


def _decode_tzif(data: bytes) -> _TzifData:
    """Decode the second part of a TZif file, with times of 8 bytes. Raises ValueError before version 2."""
    if data[:4] != b"TZif" or data[4:5] < b"2":
        raise ValueError("not a TZif file of version 2 or later")
    # A part has per change its time and one byte for its type, then 6 bytes per type, of which the first four are the
    # offset, then names, leap seconds, and two kinds of flags. In the first part a time has 4 bytes, a leap second 8.
    utc, standard, leaps, times, types, chars = _header_counts(data)
    data = data[_HEADER_BYTES + times * 5 + types * 6 + chars + leaps * 8 + standard + utc :]
    utc, standard, leaps, times, types, chars = _header_counts(data)
    at = _HEADER_BYTES
    changes = [int.from_bytes(data[at + 8 * n : at + 8 * n + 8], "big", signed=True) for n in range(times)]
    at += 8 * times
    type_numbers, at = data[at : at + times], at + times
    offsets = [int.from_bytes(data[at + 6 * n : at + 6 * n + 4], "big", signed=True) for n in range(types)]
    footer = data[at + 6 * types + chars + leaps * 12 + standard + utc :].strip(b"\n").decode("ascii")
    return _TzifData(changes, [offsets[number] for number in type_numbers], offsets[0], footer)


def _header_counts(data: bytes) -> tuple[int, ...]:
    """Read the six counts of a header: UTC flags, standard time flags, leap seconds, changes, types, name bytes."""
    counts = data[_COUNTS]
    return tuple(int.from_bytes(counts[at : at + 4], "big") for at in range(0, 24, 4))


def _build_zone(name: str, data: _TzifData) -> Zone:
    """Build the zone of a file. After the last change in the file, the rule in its footer applies.

    Raises ValueError for a rule in another form than POSIX's.
    """
    changes, offsets = list(data.changes_s), [data.first_s, *data.offsets_s]
    rule = _FOOTER.fullmatch(data.footer)
    if rule is None:
        raise ValueError(f"zone {name}: the rule {data.footer!r} is not understood")
    if rule[9] is None:  # no summer time, so the last offset stays
        return Zone(name, changes, offsets, repeats=False)
    # Groups of the rule: 1 to 4 are the standard offset, 5 to 8 the offset in summer, 9 and 10 its begin and end.
    # The signs of the rule are the opposite of an offset: "UTC-1" is one hour ahead of UTC.
    standard = -_seconds(*rule.groups()[:4])
    summer = -_seconds(*rule.groups()[4:8]) if rule[6] is not None else standard + 3_600
    summer_begin, summer_end = _YearlyChange.read(rule[9]), _YearlyChange.read(rule[10])
    last = changes[-1] if changes else 0
    first_year = (_LOCAL_EPOCH + timedelta(seconds=last)).year
    # Two years more than a cycle, so that the last 400 years consist of changes by the rule.
    for year in range(first_year, first_year + _CYCLE_YEARS + 2):
        switches = [
            (summer_begin.local_s(year) - standard, summer),
            (summer_end.local_s(year) - summer, standard),
        ]
        for switch_s, offset in sorted(switches):
            if switch_s > last:
                changes.append(switch_s)
                offsets.append(offset)
    return Zone(name, changes, offsets, repeats=True)


class _YearlyChange(NamedTuple):
    """The yearly time at which clocks change: a day in one of POSIX's three forms, and the second of that day."""

    month: int  # 0 if `day` is a day of the year
    week: int  # of the month, 1 to 5; 5 is the last one
    day: int  # of the week, from Sunday (0) on; without a month: of the year, from 0 on
    skips_leap_day: bool  # the day of the year is counted without 29 February
    second: int

    @classmethod
    def read(cls, text: str) -> _YearlyChange:
        """Parse a day of a POSIX rule: Mm.w.d, Jn or n, and perhaps /time. Raises ValueError for any other text."""
        match = _DAY.fullmatch(text)
        if match is None:
            raise ValueError(f"the rule {text!r} is not understood")
        second = 7_200 if match[7] is None else _seconds(*match.groups()[5:9])
        if match[1] is not None:
            return cls(int(match[1]), int(match[2]), int(match[3]), False, second)
        if match[4] is not None:
            return cls(0, 0, int(match[4]) - 1, True, second)
        return cls(0, 0, int(match[5]), False, second)

    def local_s(self, year: int) -> int:
        """Compute the time of the change in a year: seconds since 1970, in local time."""
        first = date(year, self.month or 1, 1).toordinal()
        day = first + self.day
        if self.month:
            next_month = date(year + self.month // 12, self.month % 12 + 1, 1).toordinal()
            day = first + (self.day - first) % 7 + 7 * (self.week - 1)
            day -= 7 if day >= next_month else 0  # week 5 means the last week, which may be the fourth
        elif self.skips_leap_day and self.day >= 59 and date(year, 12, 31).toordinal() - first == 365:
            day += 1
        return (day - _EPOCH_DAY) * 86_400 + self.second


def _seconds(sign: str | None, hours: str | None, minutes: str | None, seconds: str | None) -> int:
    """Convert the groups of `_TIME` to seconds."""
    total = int(hours or 0) * 3_600 + int(minutes or 0) * 60 + int(seconds or 0)
    return -total if sign == "-" else total
