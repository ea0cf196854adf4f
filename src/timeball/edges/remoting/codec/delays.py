"""Compute the due time of a message from its properties: RocketMQ's rules, plus three user properties.

    strongest  DELAY               a level, n > 0: the nth item of the broker's table
               TIMER_OUT_MS        the timer is done with this message: deliver at once
               TIMEBALL_LOCAL_TIME a local time and its zone, as in 2030-01-31T09:00:00 Europe/Berlin
               TIMER_DELAY_SEC     seconds from the broker's now
               TIMER_DELAY_MS      milliseconds from the broker's now
               TIMER_DELIVER_MS    a due time (ms since the epoch)
               TIMING              the next 08:00:00, in a zone (below)
    weakest    __STARTDELIVERTIME  a due time (ms since the epoch), sent by Aliyun's clients

RocketMQ ignores the last two properties, and applications may use these names for other purposes. They delay a message
only when `--delay-properties` names them. Otherwise they are ordinary properties. The local time stays in the message,
so that its due time follows changes of the zone's rules.

Numbers follow Java: an optional sign and ASCII digits within the range of the type, without spaces. Any other text is
refused: it must not mean "now". A due time beyond the maximum delay is refused too. A message with an absolute due time
in the past is a scheduled message that is due at once. A message with a relative delay of zero or less is an ordinary
message.

A TIMING is a time of day. The message is due when a clock in the zone shows it next, today or tomorrow:

    08:00:00                  in UTC
    08:00:00 Europe/Berlin    in a time zone of the IANA database
    08:00:00+02:00            at an offset from UTC, at most 18 hours as in Java

If clocks are set forward past that time, the message is due at the first moment after the gap. If clocks are set back
and show the time twice, the first occurrence counts. So each day has exactly one such time, and a message sent a
millisecond later is due tomorrow. An unknown zone is refused, because a guess could deliver at the wrong time.
model/time_parsing.py contains the rules of the zones.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from timeball.model import limits, rules
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import (
    DAY_US,
    LOCAL_TIME,
    Zone,
    fixed_offset,
    load_zone,
    local_due_ms,
    stored_local_time,
)

LEVEL = "DELAY"
TIMER_DONE = "TIMER_OUT_MS"
TIMER_DELETES = "TIMER_DEL_UNIQKEY"
TIMER_SECONDS, TIMER_MS, TIMER_INSTANT = "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"
TIMING, START_DELIVER_TIME = "TIMING", "__STARTDELIVERTIME"

# A message with none of these properties is ordinary: it is not delayed.
NAMES = frozenset(
    {
        LEVEL, TIMER_DONE, TIMER_DELETES, TIMER_SECONDS, TIMER_MS, TIMER_INSTANT, TIMING,
        START_DELIVER_TIME, LOCAL_TIME,
    }
)  # fmt: skip

_USER_PROPERTIES = frozenset({TIMING, START_DELIVER_TIME})
_TIMER_PROPERTIES = NAMES - _USER_PROPERTIES - {LEVEL, TIMER_DONE}

_NUMBER = re.compile(r"[+-]?[0-9]+")
_INT_BITS, _LONG_BITS = 31, 63
_TIME_OF_DAY = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])"
    r"(?: ?([+-])(0[0-9]|1[0-8]):([0-5][0-9])| ([A-Za-z][A-Za-z0-9_+/-]{0,63}))?"
)
_OFFSET_S_MAX = 18 * 3_600
_DAYS = 3  # today, and two days more: a clock set forward over midnight can skip one calendar day, never two


class Plan(NamedTuple):
    """The delay of a message: a level (0: none) or a due time (None: at once), never both."""

    delay_level: int
    due_ms: int | None


AT_ONCE = Plan(0, None)


def plan(properties: dict[str, str], now_ms: int, delay_ms_max: int, user_names: frozenset[str]) -> Plan:
    """Compute the delay of a message from its properties. `user_names` are the enabled user properties.

    A level above the last of the table is returned unchanged, because only the broker knows the table and lowers it.
    Raises InvalidDelay, whose text is the remark of a MESSAGE_ILLEGAL answer.
    """
    level = _parse_level(properties.get(LEVEL))
    if level > 0:
        return Plan(level, None)
    if TIMER_DONE in properties:
        return AT_ONCE
    due_ms = _due_ms(properties, now_ms, delay_ms_max, user_names)
    if due_ms is None:
        return AT_ONCE
    if TIMER_DELETES in properties:
        # In RocketMQ, such a message deletes a timer. As a normal message, it would make no sense to consumers.
        raise InvalidDelay(
            _illegal_timer_text(delay_ms_max, properties, user_names)
            if due_ms <= now_ms
            else f"the property {TIMER_DELETES} is not accepted from clients; recall the message by its handle"
        )
    if due_ms <= 0 or (due_ms <= now_ms and not _is_absolute(properties)):
        return AT_ONCE
    if rules.is_too_far(due_ms, now_ms, delay_ms_max):
        raise InvalidDelay(_illegal_timer_text(delay_ms_max, properties, user_names))
    return Plan(0, due_ms)


def names_delay(properties: dict[str, str], user_names: frozenset[str]) -> bool:
    """Return whether the properties request a delay of any length. Raises InvalidDelay for an invalid level."""
    if _parse_level(properties.get(LEVEL)) > 0:
        return True
    return TIMER_DONE not in properties and not (_TIMER_PROPERTIES | user_names).isdisjoint(properties)


def _is_absolute(properties: dict[str, str]) -> bool:
    """Return whether the strongest timer property has an absolute due time, not one relative to now."""
    return LOCAL_TIME in properties or (TIMER_SECONDS not in properties and TIMER_MS not in properties)


def _parse_level(text: str | None) -> int:
    """Parse the DELAY property. 0 if it is missing. Raises InvalidDelay."""
    if text is None:
        return 0
    level = _parse_number(text, _INT_BITS)
    if level is None:
        raise InvalidDelay(f"the property {LEVEL} is {text[:64]!r} and not a number")
    return level


def _due_ms(
    properties: dict[str, str], now_ms: int, delay_ms_max: int, user_names: frozenset[str]
) -> int | None:
    """Compute the due time from the strongest timer property. None without one. Raises InvalidDelay."""
    name = _strongest_timer(properties, user_names)
    if name is None:
        return None
    text = properties[name]
    if name == TIMING:
        return next_timing_ms(text, now_ms)
    if name == LOCAL_TIME:
        return local_due_ms(*stored_local_time(text))[0]
    value = _parse_number(text, _LONG_BITS)
    if value is None:
        raise InvalidDelay(_illegal_timer_text(delay_ms_max, properties, user_names))
    if name == TIMER_SECONDS:
        return now_ms + value * 1_000
    return now_ms + value if name == TIMER_MS else value


def _strongest_timer(properties: dict[str, str], user_names: frozenset[str]) -> str | None:
    """Return the name of the strongest enabled timer property, or None."""
    for name in (LOCAL_TIME, TIMER_SECONDS, TIMER_MS, TIMER_INSTANT, TIMING, START_DELIVER_TIME):
        if name in properties and (name not in _USER_PROPERTIES or name in user_names):
            return name
    return None


def _parse_number(text: str, bits: int) -> int | None:
    """Parse a Java number of `bits` bits and a sign. Returns None for any other text."""
    if len(text) > 20 or not _NUMBER.fullmatch(text):
        return None
    value = int(text)
    return value if -(1 << bits) <= value < 1 << bits else None


def _illegal_timer_text(delay_ms_max: int, properties: dict[str, str], user_names: frozenset[str]) -> str:
    """Build RocketMQ's error text, followed by the refused value."""
    name = _strongest_timer(properties, user_names)
    refused_value = f" ({name}: {properties[name][:64]!r})" if name else ""
    return (
        f"timer message illegal, the delay time should not be bigger than the max delay {delay_ms_max}ms; "
        f"or if set del msg, the delay time should be bigger than the current time{refused_value}"
    )


# ---- a time of day -------------------------------------------------------------------------------------------


def next_timing_ms(text: str, now_ms: int) -> int:
    """Compute the first time after now, in ms, at which a clock shows the time of day `text`. Raises InvalidDelay."""
    match = _TIME_OF_DAY.fullmatch(text)
    if match is None:
        raise InvalidDelay(
            f"the property {TIMING} is {text[:64]!r}; write HH:MM:SS, and after it the zone if it is not UTC: "
            "'08:00:00 Europe/Berlin' or '08:00:00+02:00'"
        )
    hour, minute, second, sign, hours, minutes, name = match.groups()
    zone = _parse_offset(sign, hours, minutes) if sign else load_zone(name or "UTC")
    now_us, time_of_day_us = now_ms * 1_000, ((int(hour) * 60 + int(minute)) * 60 + int(second)) * 1_000_000
    # Midnight of today, as local time.
    today_us = (now_us + zone.offset_us(now_us)) // DAY_US * DAY_US
    times_us = (zone.instant_us(today_us + day * DAY_US + time_of_day_us) for day in range(_DAYS))
    next_ms = min(time_us for time_us in times_us if time_us > now_us) // 1_000
    if next_ms > limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"the property {TIMING}: the calendar ends before {text}")
    return next_ms


def _parse_offset(sign: str, hours: str, minutes: str) -> Zone:
    """Create the zone with this offset from UTC. Raises InvalidDelay if the offset is more than 18 hours."""
    offset_s = (int(hours) * 60 + int(minutes)) * 60
    if offset_s > _OFFSET_S_MAX:
        raise InvalidDelay(f"the property {TIMING}: {sign}{hours}:{minutes} is more than 18 hours from UTC")
    return fixed_offset(offset_s if sign == "+" else -offset_s)
