"""From a message's properties to when it is to be delivered: RocketMQ's rules, and Aliyun's one on top.

    strongest  DELAY               a level, n > 0: the nth item of the broker's table
               TIMER_OUT_MS        the timer is done with this message: deliver at once
               TIMER_DELAY_SEC     seconds from the broker's now
               TIMER_DELAY_MS      milliseconds from the broker's now
               TIMER_DELIVER_MS    an instant
               TIMING              the next 08:00:00, in a zone (timing.py)
    weakest    __STARTDELIVERTIME  an instant; Aliyun's clients send it, open-source RocketMQ does not act on it

Numbers are Java's: an optional sign and ASCII digits within the type's range, no blanks. What is no number is
refused, never taken for "now"; so is an instant beyond the maximum delay. An instant that has passed on the message's
way is due at once, and told of as a delayed message; no delay, or less, makes an ordinary one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from timeball import rules
from timeball.errors import InvalidDelay
from timeball.protocols.remoting.codec import timing

LEVEL = "DELAY"
TIMER_DONE = "TIMER_OUT_MS"
TIMER_DELETES = "TIMER_DEL_UNIQKEY"
TIMER_SECONDS, TIMER_MS, TIMER_INSTANT = "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"
START_DELIVER_TIME = "__STARTDELIVERTIME"

# A message with none of these is for now.
NAMES = frozenset(
    {
        LEVEL, TIMER_DONE, TIMER_DELETES, TIMER_SECONDS, TIMER_MS, TIMER_INSTANT, timing.NAME,
        START_DELIVER_TIME,
    }
)  # fmt: skip

_NUMBER = re.compile(r"[+-]?[0-9]+")
_INT_BITS, _LONG_BITS = 31, 63


class Plan(NamedTuple):
    """What a message wants: a level (0: none), or an instant (None: at once). Never both."""

    delay_level: int
    due_ms: int | None


AT_ONCE = Plan(0, None)


def plan(properties: dict[str, str], now_ms: int, delay_ms_max: int, timing_zone: str) -> Plan:
    """When a message with these properties is due; raises InvalidDelay with the remark of a MESSAGE_ILLEGAL answer.

    `timing_zone` is that of a TIMING which names none.

    A level above the table's last is not known here: the broker clamps it.
    """
    level = _level(properties.get(LEVEL))
    if level > 0:
        return Plan(level, None)
    if TIMER_DONE in properties:
        return AT_ONCE
    due_ms = _due_ms(properties, now_ms, delay_ms_max, timing_zone)
    if due_ms is None:
        return AT_ONCE
    if TIMER_DELETES in properties:
        # RocketMQ's own way of deleting, by a second message. Delivered to consumers it would be nonsense.
        raise InvalidDelay(
            _illegal(delay_ms_max)
            if due_ms <= now_ms
            else f"the property {TIMER_DELETES} is not taken from clients; recall the message by its handle"
        )
    if due_ms <= 0 or (due_ms <= now_ms and not _is_instant(properties)):
        return AT_ONCE
    if rules.is_too_far(due_ms, now_ms, delay_ms_max):
        raise InvalidDelay(_illegal(delay_ms_max))
    return Plan(0, due_ms)


def _is_instant(properties: dict[str, str]) -> bool:
    """Whether an instant is meant, and not a time from now on."""
    return TIMER_SECONDS not in properties and TIMER_MS not in properties


def _level(text: str | None) -> int:
    if text is None:
        return 0
    level = _number(text, _INT_BITS)
    if level is None:
        raise InvalidDelay(f"the property {LEVEL} is {text[:64]!r} and not a number")
    return level


def _due_ms(properties: dict[str, str], now_ms: int, delay_ms_max: int, timing_zone: str) -> int | None:
    for name, base_ms, unit_ms in (
        (TIMER_SECONDS, now_ms, 1000),
        (TIMER_MS, now_ms, 1),
        (TIMER_INSTANT, 0, 1),
        (timing.NAME, 0, 0),
        (START_DELIVER_TIME, 0, 1),
    ):
        text = properties.get(name)
        if text is None:
            continue
        if name == timing.NAME:
            return timing.next_instant_ms(text, now_ms, timing_zone)
        value = _number(text, _LONG_BITS)
        if value is None:
            raise InvalidDelay(_illegal(delay_ms_max))
        return base_ms + value * unit_ms
    return None


def _number(text: str, bits: int) -> int | None:
    if len(text) > 20 or not _NUMBER.fullmatch(text):
        return None
    value = int(text)
    return value if -(1 << bits) <= value < 1 << bits else None


def _illegal(delay_ms_max: int) -> str:
    return (
        f"timer message illegal, the delay time should not be bigger than the max delay {delay_ms_max}ms; "
        "or if set del msg, the delay time should be bigger than the current time"
    )
