"""The ticker: wait for the scheduler's next due time, hand out the due messages, and repeat.

Each round has three steps, as in beanstalkd's loop: hand out, ask for the next due time, wait that long or until woken.
Messages that must be rewritten get their turn when none is due.

While a few rows are being written to disk, messages that become due wait for this write, because the disk starts on the
next rows only then. They share one frame, which costs the event loop the same for 50 rows as for one. They wait for
SHARE_MS at most, since the disk may be busy with other rows.

There is no polling for due messages: between two due times the scheduler is not asked. The wait has one bound,
`CLOCK_LOOK_MS`. A wall clock that is set sends no signal, so the clock is read once a second, even if no messages are
pending. Without these readings the probation of a step (clock.py) would begin with the next send, which would then get
the time before the step. The scheduler is only called at the next due time, or when a reading shows that the clock was
set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pyarrow as pa

from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import ReadRows
from timeball.model import limits
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.scheduler import Scheduler

# Time between two readings of the clock while the ticker sleeps.
CLOCK_LOOK_MS = 1_000
# The longest time that due messages wait for a write in progress.
SHARE_MS = 5
SHARED_ROWS = 1_024  # from this many rows in flight the next ones are prepared while the disk is busy


# Append due messages, or messages that must be rewritten, to the log (broker/accepting/delivery.py).
Release = Callable[[ReadRows, int], object]
Rewrite = Callable[[pa.RecordBatch, int], object]


class Ticker:
    """Drives the scheduler. Call `wake` when a message with an earlier due time arrives, or releases are durable."""

    def __init__(
        self, scheduler: Scheduler, clock: SchedulerClock, release: Release, rewrite: Rewrite
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._release, self._rewrite = release, rewrite
        self._is_woken = False  # set by `wake` since the last tick began
        self._sleeping: asyncio.Future[None] | None = None
        self._ticked_ms = 0  # the time of the last tick
        self._shared_ms = 0  # due messages may wait for the previous hand-out until this time
        scheduler.on_earlier = self.wake

    def wake(self) -> None:
        """End the sleep and tick now."""
        self._is_woken = True
        self._end_sleep()

    def tick(self) -> float | None:
        """Hand out due messages. Return the ms until the next call: 0 for at once, None for "when woken"."""
        scheduler = self._scheduler
        now_ms = self._ticked_ms = self._clock.now_ms()
        in_flight_rows = scheduler.in_flight_rows
        # Handed-out messages cannot be cancelled any more, so no more are handed out than the disk can take.
        room = min(limits.RELEASE_ROWS_IN_FLIGHT_MAX - in_flight_rows, limits.FRAME_ROWS_MAX)
        if room <= 0:
            return scheduler.fall_asleep(until_durable=True)
        # The ms that due messages may wait for the few rows in flight. After a clock was set back, more than SHARE_MS
        # is left.
        share_ms = self._shared_ms - now_ms if 0 < in_flight_rows < SHARED_ROWS else 0
        share_ms = share_ms if 0 < share_ms <= SHARE_MS else 0
        scheduled_rows = None if share_ms else scheduler.take_due(now_ms, room)
        if scheduled_rows is not None:
            self._shared_ms = now_ms + SHARE_MS if scheduled_rows.num_rows < room else now_ms
            self._release(scheduled_rows, now_ms)
            return 0
        # Rewrites come second, so that due messages never wait for messages that are not due.
        scheduled_rows = scheduler.take_rewrites(room)
        if scheduled_rows is not None:
            self._rewrite(scheduled_rows, now_ms)
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
            # Cleared before the tick, so that a wake during the tick is not lost.
            self._is_woken = False
            wait_ms = self.tick()
            if wait_ms == 0:
                await asyncio.sleep(0)  # sockets and commits get their turn between two hand-outs
            else:
                await self._sleep(self._ticked_ms, wait_ms)

    async def _sleep(self, seen_ms: int, wait_ms: float | None) -> None:
        """Sleep until woken, until `wait_ms` after `seen_ms` on the clock, or until the clock has been set."""
        until_ms = seen_ms + (FAR_MS if wait_ms is None else wait_ms)
        while seen_ms < until_ms and not await self._sleep_for(min(until_ms - seen_ms, CLOCK_LOOK_MS) / 1000):
            before_ms, seen_ms = seen_ms, self._clock.now_ms()
            # The clock was set: the awaited due time may be hours further away, or a duration may be due now.
            if seen_ms < before_ms or self._scheduler.durations.has_changed:
                return

    async def _sleep_for(self, seconds: float) -> bool:
        """Sleep for `seconds` or until woken. Return whether it was woken."""
        if not self._is_woken:
            loop = asyncio.get_running_loop()
            self._sleeping = loop.create_future()
            # `asyncio.timeout` is not used: it cancels a task, which costs three times as much.
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
