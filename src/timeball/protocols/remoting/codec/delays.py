"""From a message's properties to when it is to be delivered: RocketMQ's rules, and two user properties on top.

    strongest  DELAY               a level, n > 0: the nth item of the broker's table
               TIMER_OUT_MS        the timer is done with this message: deliver at once
               TIMER_DELAY_SEC     seconds from the broker's now
               TIMER_DELAY_MS      milliseconds from the broker's now
               TIMER_DELIVER_MS    an instant
               TIMING              the next 08:00:00, in a zone (below)
    weakest    __STARTDELIVERTIME  an instant, sent by Aliyun's clients

RocketMQ does not act on the last two, and applications may use these names for themselves. They delay a message only
when `--delay-properties` names them. Otherwise they are properties like any other.

Numbers are Java's: an optional sign and ASCII digits within the type's range, no blanks. Another text is
refused, never taken for "now"; so is an instant beyond the maximum delay. An instant that has passed on the message's
way is due at once, and told of as a delayed message; no delay, or less, makes an ordinary one.

A TIMING is a time of day, and means the next time after now that a clock on the wall there shows it, today or tomorrow:

    08:00:00                  in the broker's zone (--timing-zone)
    08:00:00 Europe/Berlin    in a zone of the IANA's list
    08:00:00+02:00            at an offset from UTC, at most 18 hours as in Java

Where clocks are set forward over it, it is the first instant after the gap; where they are set back and show it twice,
the first time only. So every day has one such instant, and a message that missed it by a millisecond is for tomorrow.
An unknown zone is refused: a guess would be a message at the wrong time. The rules of the zones are local_time.py's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from timeball import limits, rules
from timeball.errors import InvalidDelay
from timeball.local_time import DAY_US, Zone, fixed_offset, zone_named

LEVEL = "DELAY"
TIMER_DONE = "TIMER_OUT_MS"
TIMER_DELETES = "TIMER_DEL_UNIQKEY"
TIMER_SECONDS, TIMER_MS, TIMER_INSTANT = "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"
TIMING, START_DELIVER_TIME = "TIMING", "__STARTDELIVERTIME"

# A message with none of these is for now.
NAMES = frozenset(
    {
        LEVEL, TIMER_DONE, TIMER_DELETES, TIMER_SECONDS, TIMER_MS, TIMER_INSTANT, TIMING,
        START_DELIVER_TIME,
    }
)  # fmt: skip

_USERS = frozenset({TIMING, START_DELIVER_TIME})
_TIMERS = NAMES - _USERS - {LEVEL, TIMER_DONE}

_NUMBER = re.compile(r"[+-]?[0-9]+")
_INT_BITS, _LONG_BITS = 31, 63
_TEXT = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])"
    r"(?: ?([+-])(0[0-9]|1[0-8]):([0-5][0-9])| ([A-Za-z][A-Za-z0-9_+/-]{0,63}))?"
)
_OFFSET_S_MAX = 18 * 3_600
_DAYS = 3  # a day may be left out by a clock that is set forward over midnight, never two


class Plan(NamedTuple):
    """The delay of a message: a level (0: none), or an instant (None: at once). Never both."""

    delay_level: int
    due_ms: int | None


AT_ONCE = Plan(0, None)


def plan(
    properties: dict[str, str], now_ms: int, delay_ms_max: int, timing_zone: str, user_names: frozenset[str]
) -> Plan:
    """When a message with these properties is due; raises InvalidDelay with the remark of a MESSAGE_ILLEGAL answer.

    `timing_zone` is that of a TIMING which names none. `user_names`: the user properties that delay a message.

    A level above the table's last is not known here: the broker clamps it.
    """
    level = _level(properties.get(LEVEL))
    if level > 0:
        return Plan(level, None)
    if TIMER_DONE in properties:
        return AT_ONCE
    due_ms = _due_ms(properties, now_ms, delay_ms_max, timing_zone, user_names)
    if due_ms is None:
        return AT_ONCE
    if TIMER_DELETES in properties:
        # RocketMQ's own way of deleting, by a second message. Delivered to consumers it would be nonsense.
        raise InvalidDelay(
            _illegal(delay_ms_max, properties, user_names)
            if due_ms <= now_ms
            else f"the property {TIMER_DELETES} is not taken from clients; recall the message by its handle"
        )
    if due_ms <= 0 or (due_ms <= now_ms and not _is_instant(properties)):
        return AT_ONCE
    if rules.is_too_far(due_ms, now_ms, delay_ms_max):
        raise InvalidDelay(_illegal(delay_ms_max, properties, user_names))
    return Plan(0, due_ms)


def names_delay(properties: dict[str, str], user_names: frozenset[str]) -> bool:
    """Return whether these properties ask for a later delivery, whatever the value; raises InvalidDelay."""
    if _level(properties.get(LEVEL)) > 0:
        return True
    return TIMER_DONE not in properties and not (_TIMERS | user_names).isdisjoint(properties)


def _is_instant(properties: dict[str, str]) -> bool:
    """Return whether an instant is meant, and not a time from now on."""
    return TIMER_SECONDS not in properties and TIMER_MS not in properties


def _level(text: str | None) -> int:
    if text is None:
        return 0
    level = _number(text, _INT_BITS)
    if level is None:
        raise InvalidDelay(f"the property {LEVEL} is {text[:64]!r} and not a number")
    return level


def _due_ms(
    properties: dict[str, str], now_ms: int, delay_ms_max: int, timing_zone: str, user_names: frozenset[str]
) -> int | None:
    name = _timer(properties, user_names)
    if name is None:
        return None
    text = properties[name]
    if name == TIMING:
        return next_instant_ms(text, now_ms, timing_zone)
    value = _number(text, _LONG_BITS)
    if value is None:
        raise InvalidDelay(_illegal(delay_ms_max, properties, user_names))
    if name == TIMER_SECONDS:
        return now_ms + value * 1_000
    return now_ms + value if name == TIMER_MS else value


def _timer(properties: dict[str, str], user_names: frozenset[str]) -> str | None:
    """Return the name of the strongest timer, None when there is none."""
    for name in (TIMER_SECONDS, TIMER_MS, TIMER_INSTANT, TIMING, START_DELIVER_TIME):
        if name in properties and (name not in _USERS or name in user_names):
            return name
    return None


def _number(text: str, bits: int) -> int | None:
    if len(text) > 20 or not _NUMBER.fullmatch(text):
        return None
    value = int(text)
    return value if -(1 << bits) <= value < 1 << bits else None


def _illegal(delay_ms_max: int, properties: dict[str, str], user_names: frozenset[str]) -> str:
    """Return RocketMQ's sentence, and the value that it is about."""
    name = _timer(properties, user_names)
    said = f" ({name}: {properties[name][:64]!r})" if name else ""
    return (
        f"timer message illegal, the delay time should not be bigger than the max delay {delay_ms_max}ms; "
        f"or if set del msg, the delay time should be bigger than the current time{said}"
    )


# ---- a time of day -------------------------------------------------------------------------------------------


def next_instant_ms(text: str, now_ms: int, default_zone: str) -> int:
    """The first instant after now that this names; raises InvalidDelay saying how to write it."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise InvalidDelay(
            f"the property {TIMING} is {text[:64]!r}; write HH:MM:SS, and behind it the zone if it is not "
            f"{default_zone}: '08:00:00 Europe/Berlin' or '08:00:00+02:00'"
        )
    hour, minute, second, sign, hours, minutes, name = found.groups()
    zone = _offset(sign, hours, minutes) if sign else zone_named(name or default_zone)
    now_us, time_of_day_us = now_ms * 1_000, ((int(hour) * 60 + int(minute)) * 60 + int(second)) * 1_000_000
    today_us = (now_us + zone.offset_us(now_us)) // DAY_US * DAY_US
    days = (zone.instant_us(today_us + day * DAY_US + time_of_day_us) for day in range(_DAYS))
    at_ms = min(at_us for at_us in days if at_us > now_us) // 1_000
    if at_ms > limits.INSTANT_MS_MAX:
        raise InvalidDelay(f"the property {TIMING}: the calendar ends before {text}")
    return at_ms


def _offset(sign: str, hours: str, minutes: str) -> Zone:
    offset_s = (int(hours) * 60 + int(minutes)) * 60
    if offset_s > _OFFSET_S_MAX:
        raise InvalidDelay(f"the property {TIMING}: {sign}{hours}:{minutes} is more than 18 hours from UTC")
    return fixed_offset(offset_s if sign == "+" else -offset_s)
