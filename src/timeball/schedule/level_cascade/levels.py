"""The table of 32 levels, and the list of levels that a remaining time is broken into.

    1s 5s 10s 30s 1m … 2h                                levels 1 to 18 are RocketMQ's: a number means the same
    3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h     levels 19 to 32 are the digits that were missing

A *list* is digits of a clock, largest first: tens and ones of hours, minutes and seconds. A digit that is in the
table is one level, another is two, the one below it and 1. The table has all tens, all minutes and all odd
digits, so 24 hours are eight levels at most. Seconds are rounded down: the sum never exceeds the time, and lacks
less than a second of it.

Beyond 24 hours the list is 20h alone, and the rest is broken up when it is over.

A list is an int64: six bits a level, the first one lowest, 0 behind the last. Everything here is by the column.
"""

from __future__ import annotations

import numpy as np

from timeball.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.message import Int64Array
from timeball.schedule.delay_levels.levels import LevelTable

ROCKETMQ = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
NAMES = tuple(f"{ROCKETMQ} 3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h".split())
LEVELS = len(NAMES)
assert LEVELS == 32

HOPS_MAX = 8
HOP_BITS = 6
REACH_MS = DAY_MS  # of one list
FARTHER = NAMES.index("20h") + 1

# Level n at index n; there is no level 0, and no promise waits for it.
DURATION_MS: Int64Array = np.array((0, *LevelTable.parse(" ".join(NAMES)).durations_ms), dtype=np.int64)


def _levels_of(count: int, unit: str) -> list[int]:
    """Return the levels of a number of hours, minutes or seconds, largest first."""
    found = []
    tens, ones = divmod(count, 10)
    for digit, places in ((tens, "0"), (ones, "")):
        name = f"{digit}{places}{unit}"
        if digit and name in NAMES:
            found.append(name)
        elif digit:
            found += [f"{digit - 1}{places}{unit}", f"1{places}{unit}"]
    return [NAMES.index(name) + 1 for name in found]


def _packed(levels: list[int]) -> int:
    return sum(level << (HOP_BITS * place) for place, level in enumerate(levels))


def _table(values: int, unit: str) -> tuple[Int64Array, Int64Array]:
    """Return the packed levels of 0 to values - 1, and the bits each takes."""
    lists = [_levels_of(value, unit) for value in range(values)]
    bits = [HOP_BITS * len(levels) for levels in lists]
    return np.array([_packed(levels) for levels in lists]), np.array(bits)


_HOURS, _HOUR_BITS = _table(25, "h")
_MINUTES, _MINUTE_BITS = _table(60, "m")
_SECONDS, _ = _table(60, "s")


def plan(remaining_ms: Int64Array) -> Int64Array:
    """Return the list for each remaining time; 0, no level at all, below a second."""
    within = np.clip(remaining_ms, 0, REACH_MS)
    hours, minutes, seconds = (
        within // HOUR_MS, within // MINUTE_MS % 60, within // SECOND_MS % 60,
    )  # fmt: skip
    hour_bits = _HOUR_BITS[hours]
    hops = _HOURS[hours] | _MINUTES[minutes] << hour_bits
    hops |= _SECONDS[seconds] << (hour_bits + _MINUTE_BITS[minutes])
    return np.where(remaining_ms > REACH_MS, FARTHER, hops)


def first(hops: Int64Array) -> Int64Array:
    """Return the level that each list begins with; 0 when it is used up."""
    return np.asarray(hops & ((1 << HOP_BITS) - 1))


def rest(hops: Int64Array) -> Int64Array:
    """Return each list without its first level."""
    return np.asarray(hops >> HOP_BITS)
