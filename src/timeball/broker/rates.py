"""How many messages and bytes go through each topic and group: sums by the minute, the hour and the day, in memory.

A counter only grows. From time to time the state of all counters is kept, for three windows:

    minute   every 10 s, 6 intervals back
    hour     every 10 min, 6 intervals back
    day      every hour, 24 intervals back

and what a window says is the difference between now and its oldest state. So counting costs an addition, and a
counter 39 pairs of numbers, whatever happens. At most COUNTERS_MAX are kept: when there are more topics and groups than
that, those that nothing has gone through for an hour give way, and those that find no room are not counted.

Names and keys are those of RocketMQ's BrokerStatsManager, as its tools ask for them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from timeball import limits
from timeball.message import DLQ_PREFIX, RETRY_PREFIX, RETRY_TOPIC, Int64Array, decode_properties

COUNTERS_MAX = 20_000  # some 900 bytes each
TIMER_TOPIC = (
    "rmq_sys_wheel_timer"  # RocketMQ's, where its timers wait: what is delayed to an instant is counted here
)


class Stat:
    """The names of counters. Keys: a topic, "topic@group", or "" for the broker as a whole.

    Plain texts, since each count looks one up, and an Enum's hash is a call in Python.
    """

    TOPIC_PUT_NUMS = "TOPIC_PUT_NUMS"
    TOPIC_PUT_SIZE = "TOPIC_PUT_SIZE"
    GROUP_GET_NUMS = "GROUP_GET_NUMS"
    GROUP_GET_SIZE = "GROUP_GET_SIZE"
    GROUP_ACK_NUMS = "GROUP_ACK_NUMS"
    SNDBCK_PUT_NUMS = "SNDBCK_PUT_NUMS"
    BROKER_PUT_NUMS = "BROKER_PUT_NUMS"
    BROKER_GET_NUMS = "BROKER_GET_NUMS"
    # Our own, of scheduled messages by topic: no tool of RocketMQ's asks for them.
    RELEASED_NUMS = "RELEASED_NUMS"
    CANCELLED_NUMS = "CANCELLED_NUMS"
    RESCHEDULED_NUMS = "RESCHEDULED_NUMS"
    DEAD_NUMS = "DEAD_NUMS"  # of dead letters by "topic@group"


STATS = frozenset(value for name, value in vars(Stat).items() if name.isupper())


class Rate(NamedTuple):
    """A counter over a window: the sum, the sum a second, and the sum for each time something was added."""

    sum: int = 0
    per_second: float = 0.0
    per_time: float = 0.0


class Rates:
    """All counters. Belongs to the event loop; times are monotonic milliseconds that the caller reads."""

    def __init__(self) -> None:
        # (stat, key) -> place. Sums stand in lists by place, so that a window copies them all as one array.
        self._rows: dict[tuple[str, str], int] = {}
        self._sums: list[int] = []
        self._times: list[int] = []
        self._free: list[int] = []  # places of dropped counters, given out again first
        self._got: dict[
            tuple[str, str], tuple[int, int, int]
        ] = {}  # topic and group -> places of what `got` counts
        self._no_room = False  # until the next state of the hour: nothing falls idle before
        self.minute = Window(10 * limits.SECOND_MS, 6)
        self.hour = Window(10 * limits.MINUTE_MS, 6)
        self.day = Window(limits.HOUR_MS, 24)

    # -- what happens -----------------------------------------------------------------------------------------

    def put(self, topic: str, rows: int, size_bytes: int) -> None:
        """Count messages that came into a topic."""
        self.add(Stat.TOPIC_PUT_NUMS, topic, rows)
        self.add(Stat.TOPIC_PUT_SIZE, topic, size_bytes)
        self.add(Stat.BROKER_PUT_NUMS, "", rows)

    def got(self, topic: str, group: str, rows: int, size_bytes: int) -> None:
        """Count messages that were handed to a group."""
        if not rows:
            return
        places = self._got.get((topic, group))
        if places is None:
            key = of_group(topic, group)
            names = (Stat.GROUP_GET_NUMS, key), (Stat.GROUP_GET_SIZE, key), (Stat.BROKER_GET_NUMS, "")
            for (stat, of), count in zip(names, (rows, size_bytes, rows), strict=True):
                self.add(stat, of, count)
            # Kept when all have a place: room for the others may become free.
            if all(name in self._rows for name in names):
                nums, sizes, broker_nums = (self._rows[name] for name in names)
                self._got[topic, group] = nums, sizes, broker_nums
            return
        # Written out: a loop over the three takes as long as all the rest.
        nums, sizes, broker_nums = places
        sums, times = self._sums, self._times
        sums[nums] += rows
        sums[sizes] += size_bytes
        sums[broker_nums] += rows
        times[nums] += 1
        times[sizes] += 1
        times[broker_nums] += 1

    def add_each(self, stat: str, keys: Iterable[str]) -> None:
        """Count one for each key as often as it is there."""
        for key, count in Counter(keys).items():
            self.add(stat, key, count)

    def add(self, stat: str, key: str, count: int) -> None:
        """Count."""
        row = self._rows.get((stat, key))
        if row is None:
            row = self._new_row(stat, key)
        if row >= 0:
            self._sums[row] += count
            # How often something was added, for the average size of a call.
            self._times[row] += 1

    def sample(self, now_ms: int) -> None:
        """Keep the state where it is time for that; called about once a second."""
        for window in (self.minute, self.hour, self.day):
            if window.is_due(now_ms):
                window.keep(now_ms, self._sums, self._times)
                # A state of the hour is what idleness is told by, so room may have become free.
                if window is self.hour:
                    self._no_room = False

    # -- what is asked ----------------------------------------------------------------------------------------

    def total(self, stat: str, key: str = "") -> int:
        """Return the whole count; 0 for a counter that is not kept."""
        row = self._rows.get((stat, key))
        return 0 if row is None else self._sums[row]

    def totals(self, stat: str) -> dict[str, int]:
        """Return the whole counts of one kind that are kept, by key."""
        return {key: self._sums[row] for (name, key), row in self._rows.items() if name == stat}

    def rate(self, stat: str, key: str, window: Window, now_ms: int) -> Rate | None:
        """Return a counter over one of the windows; None for a counter that is not kept."""
        row = self._rows.get((stat, key))
        return None if row is None else window.rate(row, self._sums[row], self._times[row], now_ms)

    # -- inside -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def _new_row(self, stat: str, key: str) -> int:
        """Return the place of a new counter; -1 when there is no room."""
        if len(self._rows) >= COUNTERS_MAX:
            if not self._no_room:
                self._drop_idle()
            if len(self._rows) >= COUNTERS_MAX:
                self._no_room = True
                return -1
        if self._free:
            row = self._free.pop()
        else:
            row = len(self._sums)
            self._sums.append(0)
            self._times.append(0)
        self._rows[stat, key] = row
        return row

    def _drop_idle(self) -> None:
        self._got.clear()
        idle = self.hour.idle(self._times)
        for name, row in list(self._rows.items()):
            if idle[row]:
                del self._rows[name]
                # The place is given to another counter later: the windows must not show it the old one's past.
                self._sums[row] = self._times[row] = 0
                self._free.append(row)
        for window in (self.minute, self.hour, self.day):
            window.clear(np.array(self._free, dtype=np.int64))


class _State(NamedTuple):
    """All counters at an instant, by their places; those of later are beyond its end, and were 0."""

    at_ms: int
    sums: Int64Array
    times: Int64Array


class Window:
    """States of the counters, one every `interval_ms`, as many as there are `intervals` and one."""

    def __init__(self, interval_ms: int, intervals: int) -> None:
        self._interval_ms = interval_ms
        self._states: deque[_State] = deque(maxlen=intervals + 1)

    def is_due(self, now_ms: int) -> bool:
        """Return whether an interval has passed since the last state."""
        return not self._states or now_ms - self._states[-1].at_ms >= self._interval_ms

    def keep(self, now_ms: int, sums: list[int], times: list[int]) -> None:
        """Keep a state; the oldest one falls out."""
        self._states.append(_State(now_ms, np.array(sums, dtype=np.int64), np.array(times, dtype=np.int64)))

    def rate(self, row: int, total: int, times: int, now_ms: int) -> Rate:
        """Return what has come to a counter since the oldest state."""
        if not self._states:
            return Rate()
        at_ms, sums_before, times_before = self._states[0]
        # A counter that is younger than the state stands behind its end: all of it is new.
        if row < len(sums_before):
            total, times = total - int(sums_before[row]), times - int(times_before[row])
        passed_ms = now_ms - at_ms
        per_second = total * limits.SECOND_MS / passed_ms if passed_ms > 0 else 0.0
        return Rate(total, per_second, total / times if times else 0.0)

    def idle(self, times: list[int]) -> list[bool]:
        """Return for each place whether nothing has been added since the oldest state, and the window is full."""
        # In the first hour nothing counts as idle: it may have been busy before the oldest state.
        if len(self._states) < (self._states.maxlen or 0):
            return [False] * len(times)
        before = self._states[0].times
        same = np.array(times[: len(before)], dtype=np.int64) == before
        return [*same.tolist(), *[False] * (len(times) - len(before))]

    def clear(self, rows: Int64Array) -> None:
        """Forget what was counted in these places, which others get."""
        for _, sums, times in self._states:
            mine = rows[rows < len(sums)]
            sums[mine] = times[mine] = 0


def of_group(topic: str, group: str) -> str:
    """Return the key of a group's counter."""
    return f"{topic}@{group}"


def of_dead_letter(topic: str, properties: str | None) -> str:
    """Return the key of the counter of a row of `%DLQ%<group>`: that group, and the topic it had the message from.

    >>> of_dead_letter("%DLQ%g", None)  # without a word of its origin, as a client may send one
    '%DLQ%g@g'
    """
    group = topic.removeprefix(DLQ_PREFIX)
    origin = decode_properties(properties or "").get(RETRY_TOPIC, topic)
    return of_group(origin.removeprefix(f"{RETRY_PREFIX}{group}_"), group)
