"""Placement: pure functions that compute the next queue of a message from its due time and its list of levels.

    queue 0            near messages: no hop any more
    queue 2·level - 1  messages in a hop of this level, with more hops after it
    queue 2·level      messages in their last hop, of this level: near when it is over

A hop begins when the message is added to the queue, and ends one level's duration later, so that each queue is sorted.
Delays between hops (a scan every 100 ms, a commit, a restart) add up and are not compensated for each hop: the list is
followed while its next level ends at most `DRIFT_MS` after the due time. Otherwise a new list is made for the remaining
time. Last hops are opened early, by up to `lead_ms`, so that these delays are not visible in a delivery.

    not the last:  end of the hop <  due - lead          opened at its end
    the last:      end of the hop <= due + DRIFT_MS      opened up to lead_ms before its end

A remaining time is split into levels of a table of 32:

    1s 5s 10s 30s 1m … 2h                                levels 1 to 18 are RocketMQ's: a number means the same
    3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h     levels 19 to 32 are the digits that RocketMQ lacks

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
from timeball.schedule.levels import LevelTable

ROCKETMQ = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
NAMES = tuple(f"{ROCKETMQ} 3s 7s 9s 20s 40s 50s 40m 50m 3h 5h 7h 9h 10h 20h".split())
LEVELS = len(NAMES)
assert LEVELS == 32

# The most levels in a list, and the bits of one level.
HOPS_MAX = 8
HOP_BITS = 6
REACH_MS = DAY_MS  # the longest time that one list covers
# The level of times beyond that.
BEYOND_REACH = NAMES.index("20h") + 1

# Level n is at index n. There is no level 0: its duration is 0.
DURATION_MS: Int64Array = np.array((0, *LevelTable.parse(" ".join(NAMES)).durations_ms), dtype=np.int64)

DRIFT_MS = SECOND_MS  # eight hops, each delayed by a scan and a commit
LEAD_MS_MIN = 4 * DRIFT_MS  # half of it, the latest time to open a queue, is still twice the drift
# The queue of near messages, and the number of all queues.
NEAR = 0
QUEUES = 1 + 2 * LEVELS
SCAN_MS = 100  # the interval of RocketMQ's scan


def _levels_of(count: int, unit: str) -> list[int]:
    """Split a number of hours, minutes or seconds into levels, largest first."""
    names = []
    tens, ones = divmod(count, 10)
    for digit, zeros in ((tens, "0"), (ones, "")):
        name = f"{digit}{zeros}{unit}"
        if digit and name in NAMES:
            names.append(name)
        elif digit:
            names += [f"{digit - 1}{zeros}{unit}", f"1{zeros}{unit}"]
    return [NAMES.index(name) + 1 for name in names]


def _packed(levels: list[int]) -> int:
    return sum(level << (HOP_BITS * index) for index, level in enumerate(levels))


def _table(values: int, unit: str) -> tuple[Int64Array, Int64Array]:
    """Build the packed levels of 0 to values - 1, and the number of bits of each."""
    lists = [_levels_of(value, unit) for value in range(values)]
    bits = [HOP_BITS * len(levels) for levels in lists]
    return np.array([_packed(levels) for levels in lists]), np.array(bits)


_HOURS, _HOUR_BITS = _table(25, "h")
_MINUTES, _MINUTE_BITS = _table(60, "m")
_SECONDS, _ = _table(60, "s")


def plan(remaining_ms: Int64Array) -> Int64Array:
    """Split each remaining time (ms) into a list of levels. The list is 0 (empty) for less than a second."""
    within = np.clip(remaining_ms, 0, REACH_MS)
    hours, minutes, seconds = within // HOUR_MS, within // MINUTE_MS % 60, within // SECOND_MS % 60
    hour_bits = _HOUR_BITS[hours]
    hops = _HOURS[hours] | _MINUTES[minutes] << hour_bits
    hops |= _SECONDS[seconds] << (hour_bits + _MINUTE_BITS[minutes])
    return np.where(remaining_ms > REACH_MS, BEYOND_REACH, hops)


def first(hops: Int64Array) -> Int64Array:
    """Extract the first level of each list. 0 for an empty list."""
    return np.asarray(hops & ((1 << HOP_BITS) - 1))


def rest(hops: Int64Array) -> Int64Array:
    """Remove the first level of each list."""
    return np.asarray(hops >> HOP_BITS)


def lead_ms_of(ahead_ms: int) -> int:
    """Compute the lead time: how many ms before its due time a message is near. Bodies are loaded `ahead_ms` ahead."""
    return max(ahead_ms, LEAD_MS_MIN)


def is_last(queue: int) -> bool:
    """Check whether the hops of this queue are the last ones of their messages."""
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


def next_hops(due_ms: Int64Array, hops: Int64Array, now_ms: int) -> Int64Array:
    """Choose the list for the time after a hop: `hops`, or a new list if its first level ends too late."""
    level = first(hops)
    fits = (level > 0) & (now_ms + DURATION_MS[level] <= due_ms + DRIFT_MS)
    return hops if fits.all() else np.where(fits, hops, plan(due_ms - now_ms))


def enter(due_ms: Int64Array, hops: Int64Array, entry_ms: int, lead_ms: int) -> Entered:
    """Place messages in the queues of their first hops, which begin at `entry_ms`. Near messages have no hop."""
    is_near = due_ms - entry_ms <= lead_ms
    hops = next_hops(due_ms, hops, entry_ms)
    level = np.where(is_near, 0, first(hops))
    hop_end = entry_ms + DURATION_MS[level]
    is_last_hop = hop_end >= due_ms - lead_ms
    return Entered(np.where(is_near, NEAR, 2 * level - 1 + is_last_hop), hop_end, rest(hops))
