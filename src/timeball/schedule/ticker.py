"""The heartbeat that is not one: sleep until the schedule's next instant, hand out what is due, sleep again.

Three steps, as in beanstalkd's loop: hand out, ask for the next instant, wait that long or until woken. With
nothing to hand out, what a strategy wants written again is.

There is no polling for due work: between two instants, however far apart, the strategy is not asked. The one bound
on the wait is `CLOCK_LOOK_MS`: a wall clock that is set announces nothing, so somebody has to look at it, once a
second. The strategy hears of it when its instant has come, or when time has gone back.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import pyarrow as pa

from timeball import limits
from timeball.clock import SchedulerClock
from timeball.schedule.strategy import Strategy

CLOCK_LOOK_MS = 1_000


class Append(Protocol):
    """Takes what is due, or is to be written again, into the log; see broker/delivery.py."""

    def __call__(self, promises: pa.RecordBatch, now_ms: int) -> object:
        """Append records for these promises."""


class Ticker:
    """Drives one schedule. `wake` when something earlier has arrived, or when releases have become durable."""

    def __init__(self, schedule: Strategy, clock: SchedulerClock, release: Append, move: Append) -> None:
        self._schedule, self._clock = schedule, clock
        self._release, self._move = release, move
        self._wake = asyncio.Event()
        self._ticked_ms = 0  # what the clock showed at the last tick
        self.in_flight_rows = 0

    def wake(self) -> None:
        """Look again now."""
        self._wake.set()

    def tick(self) -> float | None:
        """Hand out what is due; returns milliseconds until the next call, 0 for at once, None for when woken."""
        room = limits.RELEASE_ROWS_IN_FLIGHT_MAX - self.in_flight_rows
        if room <= 0:
            return None
        now_ms = self._ticked_ms = self._clock.now_ms()
        promises = self._schedule.due(now_ms, min(room, limits.FRAME_ROWS_MAX))
        if promises is not None:
            self._release(promises, now_ms)
            return 0
        # Only now: what is due must not wait behind what is not.
        promises = self._schedule.moving(now_ms, min(room, limits.FRAME_ROWS_MAX))
        if promises is not None:
            self._move(promises, now_ms)
            return 0
        next_ms = self._schedule.next_due_ms()
        return None if next_ms is None else max(0, next_ms - now_ms)

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self._wake.clear()
            wait_ms = self.tick()
            if wait_ms == 0:
                await asyncio.sleep(0)  # sockets and commits get their turn between two hand-outs
            else:
                await self._sleep(self._ticked_ms, wait_ms)

    async def _sleep(self, seen_ms: int, wait_ms: float | None) -> None:
        """Until woken, or until the clock, last seen at `seen_ms`, has gone so far, or has gone back."""
        if wait_ms is None:
            # With nothing to wait for, no step of the clock can matter either.
            await self._wake.wait()
            return
        until_ms = seen_ms + wait_ms
        while seen_ms < until_ms:
            try:
                async with asyncio.timeout(min(until_ms - seen_ms, CLOCK_LOOK_MS) / 1000):
                    await self._wake.wait()
                return
            except TimeoutError:
                before_ms, seen_ms = seen_ms, self._clock.now_ms()
                if seen_ms < before_ms:
                    return
