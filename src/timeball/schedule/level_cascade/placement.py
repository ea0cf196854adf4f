"""Where a promise waits next: the pure arithmetic between an instant, a list of levels and a queue.

    queue 0            its turn is near: no hop any more
    queue 2·level - 1  this hop, and more behind it
    queue 2·level      this hop is the last that matters: the promise is near when it is over

A hop begins when the promise is entered and is over one level's duration later, so that each queue is sorted by
itself. Delays between hops (a scan every tenth of a second, a commit, a restart) add up, and are not made good on the
way: the list stays as it was as long as its next level ends at most `DRIFT_MS` behind the instant. Otherwise it is made
anew of the time that remains. The last hop is opened `lead_ms` early, so that no drift is ever seen in a delivery.

    more behind it:  end of the hop <  due - lead          opened at its end
    last:            end of the hop <= due + DRIFT_MS      opened lead_ms before its end

A remaining time is broken into levels of a table of 32:

    1s 5s 10s 30s 1m … 2h                                levels 1 to 18 are RocketMQ's: a number means the same
    3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h     levels 19 to 32 are the digits that were missing

A *list* is digits of a clock, largest first: tens and ones of hours, minutes and seconds. A digit that is in the
table is one level, another is two, the one below it and 1. The table has all tens, all minutes and all odd digits, so
24 hours are eight levels at most. Seconds are rounded down: the sum lacks less than a second of the time. Beyond 24
hours the list is 20h alone, and the rest is broken up when it is over. A list is an int64: six bits a level, the first
one lowest, 0 behind the last.
"""

from __future__ import annotations

from dataclasses import dataclass

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

DRIFT_MS = SECOND_MS  # eight hops, each a scan and a commit late
LEAD_MS_MIN = 4 * DRIFT_MS  # half of it, when queues are opened at the latest, is still twice the drift
NEAR = 0
QUEUES = 1 + 2 * LEVELS
SCAN_MS = 100  # RocketMQ's


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
    hours, minutes, seconds = within // HOUR_MS, within // MINUTE_MS % 60, within // SECOND_MS % 60
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


def lead_ms_of(ahead_ms: int) -> int:
    """Return how long before its instant a promise is near, for bodies loaded this long ahead."""
    return max(ahead_ms, LEAD_MS_MIN)


def is_last(queue: int) -> bool:
    """Return whether a hop in this queue is the last."""
    return queue % 2 == 0


def opens_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Return when a queue is opened whose first hop ends at `head_ms`: in a batch, or the whole lead before."""
    return head_ms - DRIFT_MS - lead_ms // 2 if is_last(queue) else -(-head_ms // SCAN_MS) * SCAN_MS


def first_due_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Return a lower bound of the instants in a queue, half the lead behind its opening."""
    return opens_ms(queue, head_ms, lead_ms) + lead_ms // 2


@dataclass(frozen=True, slots=True)
class Entered:
    """The queue that each promise enters, the end of its hop, and the levels left when that is over."""

    queue: Int64Array
    hop_end_ms: Int64Array
    left: Int64Array


def following(due_ms: Int64Array, left: Int64Array, now_ms: int) -> Int64Array:
    """Return the list to go on with when a hop is over: the rest of it, or a new one where that does not fit."""
    level = first(left)
    fits = (level > 0) & (now_ms + DURATION_MS[level] <= due_ms + DRIFT_MS)
    return left if fits.all() else np.where(fits, left, plan(due_ms - now_ms))


def enter(due_ms: Int64Array, hops: Int64Array, entry_ms: int, lead_ms: int) -> Entered:
    """Begin with the first level of each list, or of a new one where it does not fit; near promises have no hop."""
    near = due_ms - entry_ms <= lead_ms
    hops = following(due_ms, hops, entry_ms)
    level = np.where(near, 0, first(hops))
    hop_end = entry_ms + DURATION_MS[level]
    last = hop_end >= due_ms - lead_ms
    return Entered(np.where(near, NEAR, 2 * level - 1 + last), hop_end, rest(hops))
