"""The ticker: wait for the scheduler's next due time, hand out the due messages, and repeat.

Each round has three steps, as in beanstalkd's loop: hand out, compute the next due time, wait that long or until woken.
Messages that must be rewritten are handled when none is due.

While a few rows are being written to disk, messages that become due wait for this write, because the disk starts on the
next rows only then. They share one frame, which costs the event loop the same for 50 rows as for one. They wait for
SHARE_MS at most, since the disk may be busy with other rows.

A hand-out costs about as much for one message as for thirty, and so do the commit, the receives and the
acknowledgements that follow it. So under load the ticker waits for an interval between two hand-outs, in which messages
gather. The interval is chosen so that hand-outs use at most about RELEASE_SHARE of a core, by the mean time of the last
ones, but it is between INTERVAL_MIN_MS and INTERVAL_MAX_MS. After an interval without a hand-out, two may follow each
other at once, so two messages that happen to be due in short succession are not delayed. After a large hand-out, or one
that the limit of rows has ended, the next one begins at once.

If JOIN_SHARE of the interval has passed when a commit of sends begins, due messages join this commit (`join`). Such a
hand-out needs no timer and no commit of its own, which cost more than its messages.

A hand-out is limited in bytes, and so are the hand-outs in flight: one that is being written, and the next one. So the
first message of a burst of large bodies is visible after a few milliseconds, and others can use the disk in between.

There is no polling for due messages: the scheduler is only called at the next due time, or when the clock was set.
Setting a wall clock sends no signal, so the ticker reads the clock once a second (`CLOCK_READ_MS`), even if no messages
are pending. Without these readings the probation of a step (clock.py) would begin with the next send, which would then
get the time before the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from timeball.io.clock import SchedulerClock
from timeball.log.row_encoder import ReadRows
from timeball.model import limits
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.due_wheel import SMALL_RUN_BYTES
from timeball.schedule.scheduler import Scheduler

# Time between two readings of the clock while the ticker sleeps.
CLOCK_READ_MS = 1_000
# The longest time that due messages wait for a write in progress.
SHARE_MS = 5
SHARED_ROWS = 1_024  # from this many rows in flight the next ones are prepared while the disk is busy
RELEASE_SHARE = 0.12  # the share of a core that small hand-outs may use
INTERVAL_MIN_MS, INTERVAL_MAX_MS = 6.0, 8.0
JOIN_SHARE = 0.6  # the share of the interval after which a hand-out may join a commit of sends
PAUSE_MIN_NS = 500_000  # no shorter waits, because the timers of the event loop have whole milliseconds
# The rules of schedules may hold the event loop for this time at once. More would delay other releases.
HOLD_NS = 4_000_000
OCCURRENCE_NS_MIN = HOLD_NS // limits.SCHEDULE_ROWS_AT_ONCE
WEIGHT = 0.1  # the weight of the newest hand-out in the mean of their times


# Append due messages, or messages that must be rewritten, to the log (broker/accepting/delivery.py).
Release = Callable[[ReadRows, int], object]
Rewrite = Callable[[pa.RecordBatch, int], object]


@dataclass(slots=True)
class IndexingTime:
    """Times that delivery.py measures for the ticker."""

    # The time used since the start for releases that became durable: to index and count them, and to wake consumers.
    total_ns: int = 0
    # The time that the rule of one occurrence took in the last hand-outs. A high estimate until it is measured.
    occurrence_ns: int = HOLD_NS // 16


class Occurrences(Protocol):
    """The pending occurrences of schedules. Their release costs more, because a schedule continues."""

    count: int


class Ticker:
    """Calls the scheduler when it has work. Call `wake` when an earlier message arrives, or releases become durable."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: SchedulerClock,
        release: Release,
        rewrite: Rewrite,
        indexing: IndexingTime,
        occurrences: Occurrences | None = None,
    ) -> None:
        """Create the ticker. Without `occurrences` there are no schedules."""
        self._scheduler, self._clock = scheduler, clock
        self._release, self._rewrite, self._occurrences = release, rewrite, occurrences
        self._indexing, self._indexed_ns = indexing, indexing.total_ns  # the second: at the last hand-out
        self._mean_ns = 0.0  # the weighted mean time of a hand-out, with the indexing of earlier ones
        self._paused_until_ns = 0  # on the monotonic clock
        self.interval_ms = 0.0  # the time between two hand-outs under load
        self._is_woken = False  # set by `wake` since the last tick began
        self._sleeping: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # ends the sleep
        self._failure: Exception | None = None  # of a hand-out in `join`, which ends `run`
        self._ticked_ms = 0  # the time of the last tick
        self._share_until_ms = 0  # due messages may wait for the previous hand-out until this time
        scheduler.on_earlier, scheduler.on_commit = self.wake, self.join

    def wake(self) -> None:
        """End the sleep and tick now."""
        self._is_woken = True
        self._end_sleep()

    def join(self) -> None:
        """Hand out the messages that are due, because a commit of other rows begins anyway.

        Does nothing while rows are in flight, during a tick, and before JOIN_SHARE of the interval has passed.
        """
        if self._scheduler.in_flight_rows or self._sleeping is None:
            return
        began_ns = self._clock.clock.monotonic_ns()
        if self._paused_until_ns - began_ns > (1 - JOIN_SHARE) * self.interval_ms * 1e6:
            return
        # The interval ends now. Otherwise the next one would begin at its end.
        self._paused_until_ns = min(self._paused_until_ns, began_ns)
        try:
            wait_ms = self.tick()
        # Not raised here, because the send did not cause it. The messages are in flight without a row, so the broker
        # must stop: `run` raises the error.
        except Exception as error:
            self._failure = error
            self.wake()
            return
        if wait_ms is not None and self._timer is not None:
            self._timer.cancel()
            seconds = min(wait_ms, CLOCK_READ_MS) / 1000
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_sleep)

    def tick(self) -> float | None:
        """Hand out due messages, or write messages that must be rewritten.

        Returns the ms until the next call. None: call again when woken.
        """
        scheduler = self._scheduler
        now_ms = self._ticked_ms = self._clock.now_ms()
        began_ns = self._clock.clock.monotonic_ns()
        if self._paused_until_ns - began_ns >= PAUSE_MIN_NS:
            return round((self._paused_until_ns - began_ns) / 1e6)
        in_flight_rows = scheduler.in_flight_rows
        # Handed-out messages cannot be cancelled any more, so no more are handed out than the disk can take.
        rows_max, occurrence_ns = limits.FRAME_ROWS_MAX, self._indexing.occurrence_ns
        occurrences = 0 if self._occurrences is None else self._occurrences.count
        # The rules of schedules may hold the event loop for `HOLD_NS` at once.
        if occurrences > limits.SCHEDULE_ROWS_AT_ONCE or occurrences * occurrence_ns > HOLD_NS:
            rows_max = min(limits.SCHEDULE_ROWS_AT_ONCE, HOLD_NS // occurrence_ns)
        free_rows = min(limits.RELEASE_ROWS_IN_FLIGHT_MAX - in_flight_rows, rows_max)
        # `is_full`: too many bytes of bodies are in flight.
        if free_rows <= 0 or scheduler.is_full:
            return scheduler.fall_asleep(until_durable=True)
        # The ms that due messages may still wait for the few rows in flight. If it is more than SHARE_MS, the clock was
        # set back: do not wait.
        share_ms = self._share_until_ms - now_ms if 0 < in_flight_rows < SHARED_ROWS else 0
        share_ms = share_ms if 0 < share_ms <= SHARE_MS else 0
        scheduled_rows = None if share_ms else scheduler.take_due(now_ms, free_rows)
        if scheduled_rows is not None:
            self._share_until_ms = now_ms + SHARE_MS if scheduled_rows.num_rows < free_rows else now_ms
            self._release(scheduled_rows, now_ms)
            # With large bodies, a hand-out is large although its rows are few. If the limit of rows has ended it, more
            # are due, and these must not wait.
            is_small = (
                scheduled_rows.num_rows < min(SHARED_ROWS, free_rows)
                and scheduler.outcomes.in_flight_bytes < SMALL_RUN_BYTES
            )
            return self._pause(began_ns, is_small=is_small)
        # Rewrites come second, so that due messages never wait for messages that are not due.
        scheduled_rows = scheduler.take_rewrites(free_rows)
        if scheduled_rows is not None:
            self._rewrite(scheduled_rows, now_ms)
            return 0
        next_ms = scheduler.fall_asleep()
        if next_ms is None:
            return None
        if share_ms and next_ms - now_ms < share_ms:
            scheduler.fall_asleep(until_durable=True)
            return share_ms
        return max(0, next_ms - now_ms)

    def _pause(self, began_ns: int, *, is_small: bool) -> int:
        """Set the end of the pause after a hand-out that began at `began_ns` and has just ended.

        Updates the mean time and the interval. Returns the ms from `began_ns` to the end of the pause.
        """
        indexed_ns = self._indexing.total_ns
        spent_ns = self._clock.clock.monotonic_ns() - began_ns + indexed_ns - self._indexed_ns
        self._mean_ns += WEIGHT * (spent_ns - self._mean_ns)
        self._indexed_ns = indexed_ns
        # The mean is 0 if a test moves the clock. Then there is no interval.
        interval_min_ms = INTERVAL_MIN_MS if self._mean_ns else 0.0
        self.interval_ms = min(INTERVAL_MAX_MS, max(interval_min_ms, self._mean_ns / 1e6 / RELEASE_SHARE))
        interval_ns = int(self.interval_ms * 1e6)
        # After a large hand-out the next one must not wait. After a small one, the pause ends one interval after the
        # last pause, but not before now: so a hand-out after an idle interval has no pause.
        self._paused_until_ns = (
            max(self._paused_until_ns, began_ns - interval_ns) + interval_ns if is_small else 0
        )
        return max(0, round((self._paused_until_ns - began_ns) / 1e6))

    async def run(self) -> None:
        """Tick until cancelled. Raises the error of a tick or of a hand-out in `join`."""
        while True:
            # Cleared before the tick, so that a wake during the tick is not lost.
            self._is_woken = False
            if self._failure is not None:
                raise self._failure
            wait_ms = self.tick()
            if wait_ms == 0:
                await asyncio.sleep(0)  # sockets and commits get their turn between two hand-outs
            else:
                await self._sleep(self._ticked_ms, wait_ms)

    async def _sleep(self, last_ms: int, wait_ms: float | None) -> None:
        """Sleep until woken, until `wait_ms` after `last_ms` on the clock, or until the clock has been set.

        `last_ms` is the last reading of the clock. Without `wait_ms` the sleep has no limit.
        """
        if wait_ms is not None and wait_ms <= INTERVAL_MAX_MS:
            await self._sleep_for(wait_ms / 1000)  # the next tick reads the clock soon enough
            return
        until_ms = last_ms + (FAR_MS if wait_ms is None else wait_ms)
        while last_ms < until_ms and not await self._sleep_for(min(until_ms - last_ms, CLOCK_READ_MS) / 1000):
            previous_ms, last_ms = last_ms, self._clock.now_ms()
            # The clock was set: the awaited due time may be hours further away, or a duration may be due now.
            if last_ms < previous_ms or self._scheduler.durations.has_changed:
                return

    async def _sleep_for(self, seconds: float) -> bool:
        """Sleep for `seconds` or until woken. Returns true if it was woken."""
        if not self._is_woken:
            loop = asyncio.get_running_loop()
            self._sleeping = loop.create_future()
            # `asyncio.timeout` is not used: it cancels a task, which costs three times as much.
            self._timer = loop.call_later(seconds, self._end_sleep)
            try:
                await self._sleeping
            finally:
                self._sleeping = None
                self._timer.cancel()
        return self._is_woken

    def _end_sleep(self) -> None:
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)
