"""Placement: pure functions that compute the next queue of a message from its due time and its list of levels.

    queue 0            its turn is near: no hop any more
    queue 2·level - 1  this hop, and more behind it
    queue 2·level      this hop is the last that matters: the message is near when it is over

A hop begins when the message is entered, and ends one level's duration later, so that each queue is sorted. Delays
between hops (a scan every 100 ms, a commit, a restart) add up and are not compensated on the way: the list stays as it
is while its next level ends at most `DRIFT_MS` after the due time. Otherwise a new list is made for the remaining time.
The last hop is opened `lead_ms` early, so that no drift is visible in a delivery.

    more behind it:  end of the hop <  due - lead          opened at its end
    last:            end of the hop <= due + DRIFT_MS      opened lead_ms before its end

A remaining time is split into levels of a table of 32:

    1s 5s 10s 30s 1m … 2h                                levels 1 to 18 are RocketMQ's: a number means the same
    3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h     levels 19 to 32 are the digits that were missing

A *list* contains the digits of the time, largest first: tens and ones of hours, minutes and seconds. A digit that is in
the table is one level. Another digit is two levels, the digit below it and 1. The table has all tens, all minutes and
all odd digits, so 24 hours take eight levels at most. Seconds are rounded down: the sum is less than a second below the
time. Beyond 24 hours the list is 20h alone, and the rest is split when that is over. A list is an int64 with six bits
per level, the first level in the lowest bits, and 0 after the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import Int64Array
from timeball.schedule.delay_levels.levels import LevelTable

ROCKETMQ = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
NAMES = tuple(f"{ROCKETMQ} 3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h".split())
LEVELS = len(NAMES)
assert LEVELS == 32

# The most levels in a list, and the bits of one level.
HOPS_MAX = 8
HOP_BITS = 6
REACH_MS = DAY_MS  # the longest time that one list covers
# The level of times beyond that.
FARTHER = NAMES.index("20h") + 1

# Level n is at index n. There is no level 0, and no message waits for it.
DURATION_MS: Int64Array = np.array((0, *LevelTable.parse(" ".join(NAMES)).durations_ms), dtype=np.int64)

DRIFT_MS = SECOND_MS  # eight hops, each delayed by a scan and a commit
LEAD_MS_MIN = 4 * DRIFT_MS  # half of it, the latest time to open a queue, is still twice the drift
# The queue of near messages, and the number of all queues.
NEAR = 0
QUEUES = 1 + 2 * LEVELS
SCAN_MS = 100  # the interval of RocketMQ's scan


def _levels_of(count: int, unit: str) -> list[int]:
    """Find the levels of a number of hours, minutes or seconds, largest first."""
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
    """Build the packed levels of 0 to values - 1, and the number of bits of each."""
    lists = [_levels_of(value, unit) for value in range(values)]
    bits = [HOP_BITS * len(levels) for levels in lists]
    return np.array([_packed(levels) for levels in lists]), np.array(bits)


_HOURS, _HOUR_BITS = _table(25, "h")
_MINUTES, _MINUTE_BITS = _table(60, "m")
_SECONDS, _ = _table(60, "s")


def plan(remaining_ms: Int64Array) -> Int64Array:
    """Compute the list for each remaining time in ms. 0, an empty list, below a second."""
    within = np.clip(remaining_ms, 0, REACH_MS)
    hours, minutes, seconds = within // HOUR_MS, within // MINUTE_MS % 60, within // SECOND_MS % 60
    hour_bits = _HOUR_BITS[hours]
    hops = _HOURS[hours] | _MINUTES[minutes] << hour_bits
    hops |= _SECONDS[seconds] << (hour_bits + _MINUTE_BITS[minutes])
    return np.where(remaining_ms > REACH_MS, FARTHER, hops)


def first(hops: Int64Array) -> Int64Array:
    """Return the first level of each list. 0 for an empty list."""
    return np.asarray(hops & ((1 << HOP_BITS) - 1))


def rest(hops: Int64Array) -> Int64Array:
    """Return each list without its first level."""
    return np.asarray(hops >> HOP_BITS)


def lead_ms_of(ahead_ms: int) -> int:
    """Compute how many ms before its due time a message is near, if bodies are loaded `ahead_ms` ahead."""
    return max(ahead_ms, LEAD_MS_MIN)


def is_last(queue: int) -> bool:
    """Check whether a hop in this queue is the last."""
    return queue % 2 == 0


def opens_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Compute when to open a queue whose first hop ends at `head_ms`. Queues of last hops open ahead of that."""
    # Hops that are not the last are opened together with others, at the next multiple of SCAN_MS.
    return head_ms - DRIFT_MS - lead_ms // 2 if is_last(queue) else -(-head_ms // SCAN_MS) * SCAN_MS


def first_due_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Compute a lower bound of the due times in a queue, half the lead time after its opening."""
    return opens_ms(queue, head_ms, lead_ms) + lead_ms // 2


@dataclass(frozen=True, slots=True)
class Entered:
    """The queue of each message, the end of its hop, and the levels left after that."""

    queue: Int64Array
    hop_end_ms: Int64Array
    left: Int64Array


def following(due_ms: Int64Array, left: Int64Array, now_ms: int) -> Int64Array:
    """Return the list to go on with after a hop: the rest of the old one, or a new one if the rest does not fit."""
    level = first(left)
    fits = (level > 0) & (now_ms + DURATION_MS[level] <= due_ms + DRIFT_MS)
    return left if fits.all() else np.where(fits, left, plan(due_ms - now_ms))


def enter(due_ms: Int64Array, hops: Int64Array, entry_ms: int, lead_ms: int) -> Entered:
    """Begin the first level of each list, or of a new list if it does not fit. Near messages have no hop."""
    near = due_ms - entry_ms <= lead_ms
    hops = following(due_ms, hops, entry_ms)
    level = np.where(near, 0, first(hops))
    hop_end = entry_ms + DURATION_MS[level]
    last = hop_end >= due_ms - lead_ms
    return Entered(np.where(near, NEAR, 2 * level - 1 + last), hop_end, rest(hops))
