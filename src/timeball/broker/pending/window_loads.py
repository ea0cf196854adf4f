"""Delivery windows with the spread `level`: each message is due in the second of its window with the fewest messages.

The counts of the pending messages by second come from `Forecast`, which reads log and table. They are counted again
after `FRESH_S`. Meanwhile each choice is added to them in memory. So the counts are a cache: after a restart they are
counted again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from timeball.broker.pending.forecast import Forecast
from timeball.io.clock import SchedulerClock
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.limits import SECOND_MS
from timeball.model.message import Int64Array

FRESH_S = 30.0
RANGES_MAX = 16  # counted ranges in memory, of at most FORECAST_BUCKETS_MAX numbers each
# The nth message of a second is due n times this many ms (modulo 1,000) after its begin, so that they are not due at
# once. Coprime to 1,000.
_STEP_MS = 617


class DeliveryWindow(NamedTuple):
    """The times at which a message may become due, in ms since 1970: from `begin_ms` to `end_ms`, both included."""

    begin_ms: int
    end_ms: int


class _Range(msgspec.Struct, eq=False):
    """Counted seconds. A second is a number of seconds since 1970."""

    first: int
    loads: Int64Array  # the number of messages of each second from `first` on
    until_s: float  # reused until this time on the loop's clock

    @property
    def end(self) -> int:
        return self.first + len(self.loads)


class WindowLoads:
    """Chooses due times in delivery windows. Belongs to the event loop."""

    def __init__(self, forecast: Forecast, *, clock: SchedulerClock) -> None:
        self._forecast, self._clock = forecast, clock
        self._loop = asyncio.get_running_loop()
        self._ranges: list[_Range] = []
        self._counting = asyncio.Lock()

    async def choose(self, windows: Sequence[DeliveryWindow]) -> list[int]:
        """Choose a due time (ms since 1970) in each window.

        Raises InvalidDelay for a window of too many seconds, and OverLimit if counting costs too much.
        """
        chosen = list[int]()
        for window in windows:
            # A window that has begun is used from now on, because messages in its past would all be due at once.
            begin_ms = max(window.begin_ms, self._clock.now_ms())
            # The first and the last whole second of the window: the begin is rounded up.
            first, last = -(-begin_ms // SECOND_MS), (window.end_ms + 1) // SECOND_MS - 1
            if last < first:  # no whole second
                chosen.append(max(window.begin_ms, min(begin_ms, window.end_ms)))
                continue
            chosen.append(self._choose_second(await self._find_range(first, last), first, last))
        return chosen

    def _choose_second(self, range_: _Range, first: int, last: int) -> int:
        """Choose the second in [first, last] with the fewest messages, and return a due time in it (ms since 1970).

        The message is counted in this second.
        """
        second = first + int(range_.loads[first - range_.first : last + 1 - range_.first].argmin())
        load = int(range_.loads[second - range_.first])
        # In all ranges, because another range may serve the next window.
        for counted_range in self._ranges:
            if counted_range.first <= second < counted_range.end:
                counted_range.loads[second - counted_range.first] += 1
        return second * SECOND_MS + load * _STEP_MS % SECOND_MS

    async def _find_range(self, first: int, last: int) -> _Range:
        """Find a counted range that contains [first, last], or count one. Raises InvalidDelay, OverLimit."""
        fresh = self._find_fresh(first, last)
        if fresh is not None:
            return fresh
        width = last + 1 - first
        if width > limits.FORECAST_BUCKETS_MAX:
            raise InvalidDelay(
                f"a level window of {width} seconds: at most {limits.FORECAST_BUCKETS_MAX}, or use the spread even"
            )
        async with self._counting:
            # Another send may have counted while this one was waiting for the lock.
            fresh = self._find_fresh(first, last)
            if fresh is not None:
                return fresh
            # Longer than the window, so that it also contains the windows of later sends, which begin later.
            end = first + min(2 * width + 60, limits.FORECAST_BUCKETS_MAX)
            due_counts = await self._forecast.counted("second", first * SECOND_MS, end * SECOND_MS)
            loads = np.zeros(end - first, np.int64)
            for begin_ms, rows in due_counts.buckets:
                loads[begin_ms // SECOND_MS - first] = rows
            # The other ranges include choices whose messages may not be in the new counts yet.
            for earlier in self._ranges:
                begin, until = max(first, earlier.first), min(end, earlier.end)
                if begin < until:
                    overlap = loads[begin - first : until - first]
                    np.maximum(
                        overlap, earlier.loads[begin - earlier.first : until - earlier.first], out=overlap
                    )
            new_range = _Range(first, loads, self._loop.time() + FRESH_S)
            self._ranges = [new_range, *self._ranges[: RANGES_MAX - 1]]
            return new_range

    def _find_fresh(self, first: int, last: int) -> _Range | None:
        """Find a counted range that contains the seconds [first, last]. Expired ranges are removed."""
        now_s = self._loop.time()
        self._ranges = [counted for counted in self._ranges if now_s < counted.until_s]
        return next(
            (counted for counted in self._ranges if counted.first <= first and last < counted.end), None
        )
