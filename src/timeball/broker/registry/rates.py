"""Counters of messages and bytes per topic and group, in memory only, and loops over many topics or groups.

`Rates` counts, and computes sums and rates per minute, hour and day. A counter only grows. Copies of all counters
(states) are saved periodically for three windows:

    minute   every 10 s, 6 intervals back
    hour     every 10 min, 6 intervals back
    day      every hour, 24 intervals back

The value of a window is the difference between the current counter and the window's oldest state. So counting costs one
addition, and a counter needs 39 pairs of numbers, independent of the load. There are at most COUNTERS_MAX counters. If
there are more topics and groups, counters that were idle for an hour are removed. If that is not enough, the new ones
are not counted.

Names and keys are those of RocketMQ's BrokerStatsManager, because its tools ask for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from timeball.model import limits
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, RETRY_TOPIC, Int64Array, decode_properties

COUNTERS_MAX = 20_000  # about 900 bytes each
# RocketMQ's topic for its pending timers. Messages with a due time are counted here.
TIMER_TOPIC = "rmq_sys_wheel_timer"


class Stat:
    """The names of counters. Keys: a topic, "topic@group", or "" for the whole broker.

    The names are plain strings, because each count looks one up, and the hash of an Enum is a slow call in Python.
    """

    TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
    TOPIC_PUT_SIZE = "TOPIC_PUT_SIZE"
    GROUP_GET_NUMS = "GROUP_GET_NUMS"
    GROUP_GET_SIZE = "GROUP_GET_SIZE"
    GROUP_ACK_NUMS = "GROUP_ACK_NUMS"
    SNDBCK_PUT_NUMS = "SNDBCK_PUT_NUMS"
    BROKER_PUT_NUMS = "BROKER_PUT_NUMS"
    BROKER_GET_NUMS = "BROKER_GET_NUMS"
    # Timeball's own counters of scheduled messages by topic. No tool of RocketMQ asks for them.
    RELEASED_NUMS = "RELEASED_NUMS"
    CANCELLED_NUMS = "CANCELLED_NUMS"
    RESCHEDULED_NUMS = "RESCHEDULED_NUMS"
    EXPIRED_NUMS = "EXPIRED_NUMS"
    DEAD_NUMS = "DEAD_NUMS"  # dead letters by "topic@group"


STATS = frozenset(value for name, value in vars(Stat).items() if name.isupper())


class Rate(NamedTuple):
    """A counter over a window: the sum, the sum per second, and the average added per call of `add`."""

    sum: int = 0
    per_second: float = 0.0
    average_per_add: float = 0.0


class Rates:
    """All counters. Belongs to the event loop. The caller passes times, in monotonic milliseconds."""

    def __init__(self) -> None:
        # Maps (stat, key) to a position in `_sums` and `_additions`. These are lists, so that a window copies each of
        # them as one array.
        self._positions: dict[tuple[str, str], int] = {}
        self._sums: list[int] = []
        self._additions: list[int] = []
        self._free: list[int] = []  # positions of removed counters, which are reused first
        # (topic, group) -> the positions of the three counters of `got`
        self._got_counters: dict[tuple[str, str], tuple[int, int, int]] = {}
        # All counters are in use. No counter can become idle before `hour` saves its next state.
        self._is_full = False
        self.minute = Window(10 * limits.SECOND_MS, 6)
        self.hour = Window(10 * limits.MINUTE_MS, 6)
        self.day = Window(limits.HOUR_MS, 24)

    # -- counting ----------------------------------------------------------------------------------------------

    def count_arrived(self, topic: str, rows: int, size_bytes: int) -> None:
        """Count messages that arrived in a topic."""
        self.add(Stat.TOPIC_PUT_NUMS, topic, rows)
        self.add(Stat.TOPIC_PUT_SIZE, topic, size_bytes)
        self.add(Stat.BROKER_PUT_NUMS, "", rows)

    def count_received(self, topic: str, group: str, rows: int, size_bytes: int) -> None:
        """Count messages that were delivered to a group, with their size in bytes."""
        if not rows:
            return
        counters = self._got_counters.get((topic, group))
        if counters is None:
            key = of_group(topic, group)
            names = (Stat.GROUP_GET_NUMS, key), (Stat.GROUP_GET_SIZE, key), (Stat.BROKER_GET_NUMS, "")
            for (stat, counter_key), count in zip(names, (rows, size_bytes, rows), strict=True):
                self.add(stat, counter_key, count)
            # Cached only if all three have a counter, because the others may get one later.
            if all(name in self._positions for name in names):
                nums, sizes, broker_nums = (self._positions[name] for name in names)
                self._got_counters[topic, group] = nums, sizes, broker_nums
            return
        # Unrolled: a loop over the three counters takes as long as all other lines of this function.
        nums, sizes, broker_nums = counters
        sums, additions = self._sums, self._additions
        sums[nums] += rows
        sums[sizes] += size_bytes
        sums[broker_nums] += rows
        additions[nums] += 1
        additions[sizes] += 1
        additions[broker_nums] += 1

    def add_each(self, stat: str, keys: Iterable[str]) -> None:
        """Count each key once per occurrence."""
        keys = list(keys)
        if len(keys) == 1:
            self.add(stat, keys[0], 1)
            return
        for key, count in Counter(keys).items():
            self.add(stat, key, count)

    def add(self, stat: str, key: str, count: int) -> None:
        """Add `count` to a counter."""
        position = self._positions.get((stat, key))
        if position is None:
            position = self._create_counter(stat, key)
        if position >= 0:  # otherwise there are too many counters, and nothing is counted
            self._sums[position] += count
            # The number of additions, for the average per call.
            self._additions[position] += 1

    def sample(self, now_ms: int) -> None:
        """Save the state in each window whose interval has passed. Called about once a second."""
        for window in (self.minute, self.hour, self.day):
            if window.is_due(now_ms):
                window.keep(now_ms, self._sums, self._additions)
                # The hour's states determine which counters are idle, so space may have become free.
                if window is self.hour:
                    self._is_full = False

    # -- queries ----------------------------------------------------------------------------------------------

    def total(self, stat: str, key: str = "") -> int:
        """Read the total of a counter since the start. 0 for a missing counter."""
        position = self._positions.get((stat, key))
        return 0 if position is None else self._sums[position]

    def totals(self, stat: str) -> dict[str, int]:
        """Read the totals of one kind of counter since the start, by key."""
        return {
            key: self._sums[position] for (name, key), position in self._positions.items() if name == stat
        }

    def rate(self, stat: str, key: str, window: Window, now_ms: int) -> Rate | None:
        """Compute the rate of a counter over one of the windows. None for a missing counter."""
        position = self._positions.get((stat, key))
        if position is None:
            return None
        return window.rate(position, self._sums[position], self._additions[position], now_ms)

    # -- inside -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._positions)

    def _create_counter(self, stat: str, key: str) -> int:
        """Create a counter and return its position. -1 if there are too many counters."""
        if len(self._positions) >= COUNTERS_MAX:
            if not self._is_full:
                self._drop_idle()
            if len(self._positions) >= COUNTERS_MAX:
                self._is_full = True
                return -1
        if self._free:
            position = self._free.pop()
        else:
            position = len(self._sums)
            self._sums.append(0)
            self._additions.append(0)
        self._positions[stat, key] = position
        return position

    def _drop_idle(self) -> None:
        """Remove the counters that were idle during the window `hour`."""
        # The cache may contain counters that are removed below.
        self._got_counters.clear()
        idle = self.hour.idle(self._additions)
        for name, position in list(self._positions.items()):
            if idle[position]:
                del self._positions[name]
                # The position will be reused, so the windows must forget the old counter.
                self._sums[position] = self._additions[position] = 0
                self._free.append(position)
        for window in (self.minute, self.hour, self.day):
            window.clear(np.array(self._free, dtype=np.int64))


class _State(NamedTuple):
    """A copy of all counters at one time, by position. Counters beyond its end did not exist yet."""

    at_ms: int
    sums: Int64Array
    additions: Int64Array


class Window:
    """Saved states of the counters, one every `interval_ms`. Keeps `intervals` + 1 states."""

    def __init__(self, interval_ms: int, intervals: int) -> None:
        """The window is `interval_ms` times `intervals` long."""
        self._interval_ms = interval_ms
        self._states: deque[_State] = deque(maxlen=intervals + 1)

    def is_due(self, now_ms: int) -> bool:
        """Check whether an interval has passed since the last state."""
        return not self._states or now_ms - self._states[-1].at_ms >= self._interval_ms

    def keep(self, now_ms: int, sums: list[int], additions: list[int]) -> None:
        """Save the current counters as a state. The oldest state is dropped if the window is full."""
        self._states.append(
            _State(now_ms, np.array(sums, dtype=np.int64), np.array(additions, dtype=np.int64))
        )

    def rate(self, position: int, total: int, additions: int, now_ms: int) -> Rate:
        """Compute the additions to a counter since the oldest state."""
        if not self._states:
            return Rate()
        at_ms, sums_before, additions_before = self._states[0]
        # Otherwise the counter is newer than the state, and its whole count is new.
        if position < len(sums_before):
            total, additions = total - int(sums_before[position]), additions - int(additions_before[position])
        passed_ms = now_ms - at_ms
        per_second = total * limits.SECOND_MS / passed_ms if passed_ms > 0 else 0.0
        return Rate(total, per_second, total / additions if additions else 0.0)

    def idle(self, additions: list[int]) -> list[bool]:
        """Tell for each position whether nothing was added to it since the oldest state.

        While the window is not full, no position is idle.
        """
        # The oldest state of a window that is not full is younger than the window.
        if len(self._states) < (self._states.maxlen or 0):
            return [False] * len(additions)
        oldest_additions = self._states[0].additions
        is_unchanged = np.array(additions[: len(oldest_additions)], dtype=np.int64) == oldest_additions
        return [*is_unchanged.tolist(), *[False] * (len(additions) - len(oldest_additions))]

    def clear(self, rows: Int64Array) -> None:
        """Set the saved counts of these positions to 0, because other counters will use them."""
        for _, sums, additions in self._states:
            saved_rows = rows[rows < len(sums)]
            sums[saved_rows] = additions[saved_rows] = 0


def of_group(topic: str, group: str) -> str:
    """Build the key of a group's counter."""
    return f"{topic}@{group}"


def of_dead_letter(topic: str, properties: str | None) -> str:
    """Build the key of the counter for a row of `%DLQ%<group>`: the original topic of the message, and the group.

    >>> of_dead_letter("%DLQ%g", None)  # a client has sent it to this topic, without properties
    '%DLQ%g@g'
    """
    group = topic.removeprefix(DLQ_PREFIX)
    origin = decode_properties(properties or "").get(RETRY_TOPIC, topic)
    return of_group(origin.removeprefix(f"{RETRY_PREFIX}{group}_"), group)


# ---- loops over many topics or groups, in small shares -------------------------------------------------------
# There may be a hundred thousand groups or topics. A loop over all of them would delay every message for seconds. In
# shares the loop takes a little longer, and delays a message by one share at most.

T = TypeVar("T")

GROUPS_AT_ONCE = 64  # groups or topics in a share; about 20 us each with eight queues, more with more queues


async def shares(items: Iterable[T], rows: int = GROUPS_AT_ONCE) -> AsyncIterator[list[T]]:
    """Yield the items in lists of `rows`. Items that are added after the first step are not included."""
    listed = list(items)
    for begin in range(0, len(listed), rows):
        if begin:
            # Let every ready task run before the next share.
            await asyncio.sleep(0)
        yield listed[begin : begin + rows]
