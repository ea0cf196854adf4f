"""The ticker: sleep until the scheduler's next instant, hand out the promises that are due, sleep again.

Three steps, as in beanstalkd's loop: hand out, ask for the next instant, wait that long or until woken. Promises that
must be written again take their turn when none is due.

While a few rows are on their way to the disk, what is due meanwhile waits for them, as the disk begins with the next
ones only then; and for SHARE_MS at most, as it may be other rows that the disk is at. A frame costs the loop the same
for one row as for fifty.

There is no polling for due work: between two instants, however far apart, the scheduler is not asked. The one bound
on the wait is `CLOCK_LOOK_MS`: a wall clock that is set announces nothing, so it is read once a second, also when
nothing waits. Without these readings the probation of a step would begin with the next send, which would then get the
time before the step. The scheduler hears of it when its instant has come, or when time has gone back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pyarrow as pa

from timeball import limits
from timeball.clock import SchedulerClock
from timeball.log.few_rows import ReadRows
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.scheduler import Scheduler

CLOCK_LOOK_MS = 1_000
SHARE_MS = 5
SHARED_ROWS = 1_024  # on their way: with more the next ones are made ready while the disk is at these


# Append promises that are due, or must be written again, to the log; see broker/delivery.py.
Release = Callable[[ReadRows, int], object]
Rewrite = Callable[[pa.RecordBatch, int], object]


class Ticker:
    """Drives the scheduler. `wake` when something earlier has arrived, or when releases have become durable."""

    def __init__(
        self, scheduler: Scheduler, clock: SchedulerClock, release: Release, rewrite: Rewrite
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._release, self._rewrite = release, rewrite
        self._is_woken = False  # since the last tick began
        self._sleeping: asyncio.Future[None] | None = None
        self._ticked_ms = 0  # what the clock showed at the last tick
        self._shared_ms = 0  # until then what is due may wait for what was handed out last
        scheduler.on_earlier = self.wake

    def wake(self) -> None:
        """Look again now."""
        self._is_woken = True
        self._end_sleep()

    def tick(self) -> float | None:
        """Hand out due promises; return milliseconds until the next call, 0 for at once, None for when woken."""
        scheduler = self._scheduler
        now_ms = self._ticked_ms = self._clock.now_ms()
        in_flight_rows = scheduler.in_flight_rows
        # Bounded by the disk: what has been handed out cannot be cancelled any more, so no more of it than is being
        # written.
        room = min(limits.RELEASE_ROWS_IN_FLIGHT_MAX - in_flight_rows, limits.FRAME_ROWS_MAX)
        if room <= 0:
            return scheduler.fall_asleep(until_durable=True)
        # For so long what is due may wait for rows that are on their way, if these are few. More than SHARE_MS is left
        # when a clock was set back.
        share_ms = self._shared_ms - now_ms if 0 < in_flight_rows < SHARED_ROWS else 0
        share_ms = share_ms if 0 < share_ms <= SHARE_MS else 0
        promises = None if share_ms else scheduler.take_due(now_ms, room)
        if promises is not None:
            self._shared_ms = now_ms + SHARE_MS if promises.num_rows < room else now_ms
            self._release(promises, now_ms)
            return 0
        # Only now: what is due must not wait behind what is not.
        promises = scheduler.take_rewrites(room)
        if promises is not None:
            self._rewrite(promises, now_ms)
            return 0
        next_ms = scheduler.fall_asleep()
        if next_ms is None:
            return None
        if next_ms - now_ms < share_ms:
            scheduler.fall_asleep(until_durable=True)
            return share_ms
        return max(0, next_ms - now_ms)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            # Cleared before the tick: a wake that comes during it is not lost.
            self._is_woken = False
            wait_ms = self.tick()
            if wait_ms == 0:
                await asyncio.sleep(0)  # sockets and commits get their turn between two hand-outs
            else:
                await self._sleep(self._ticked_ms, wait_ms)

    async def _sleep(self, seen_ms: int, wait_ms: float | None) -> None:
        """Return when woken, or when the clock, last seen at `seen_ms`, has gone so far, or has gone back."""
        until_ms = seen_ms + (FAR_MS if wait_ms is None else wait_ms)
        while seen_ms < until_ms and not await self._sleep_for(min(until_ms - seen_ms, CLOCK_LOOK_MS) / 1000):
            before_ms, seen_ms = seen_ms, self._clock.now_ms()
            # The clock was set: the instant it waits for may be hours further away, or a duration due at once.
            if seen_ms < before_ms or self._scheduler.durations.has_changed:
                return

    async def _sleep_for(self, seconds: float) -> bool:
        """Sleep until woken, or for so long; return whether it was woken."""
        if not self._is_woken:
            loop = asyncio.get_running_loop()
            self._sleeping = loop.create_future()
            # Not `asyncio.timeout`, which cancels a task: it costs three times as much.
            over = loop.call_later(seconds, self._end_sleep)
            try:
                await self._sleeping
            finally:
                self._sleeping = None
                over.cancel()
        return self._is_woken

    def _end_sleep(self) -> None:
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)
