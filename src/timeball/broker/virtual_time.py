"""Moves a manual clock (`serve --clock manual`) from one deadline to the next.

With a manual clock, time stands still until a client advances it. An advance stops at each deadline on its way: the due
time of a message, or the end of a lease. The next step begins when all work of this deadline is done and durable. So
messages are released in the order of their due times, at exactly these times, and each run gives the same result.

Only deadlines of the clock are virtual. Limits of connections and requests follow real time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from timeball.broker.accepting.delivery import Delivery
from timeball.broker.consuming.engine import Consuming
from timeball.io.clock import ManualClock, SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.errors import OutOfRange
from timeball.model.limits import DELAY_MS_MAX
from timeball.model.message import RETRY_PREFIX
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.ticker import Ticker

# Tasks that were woken get this many turns of the event loop before they are asked whether they have work.
_TURNS = 4
# Rounds of turns before a pause: work of the event loop alone is done by then.
_ROUNDS_WITHOUT_PAUSE = 4
_PAUSE_S = 0.0005  # while another thread or a receiver of pushes works


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step.

    `released` has the released messages (READ_SCHEMA) in order, without redeliveries of consumer groups.
    """

    now_ms: int
    released: list[pa.RecordBatch]
    is_last: bool


class Activity(Protocol):
    """Work of an edge that follows the broker's clock, such as pushes."""

    @property
    def is_busy(self) -> bool:
        """True while work of the present time is not done."""

    def wait_ms(self) -> int | None:
        """Compute the time until the next work may begin. None if none waits for the clock."""

    def wake(self) -> None:
        """Read the clock again, because it has moved."""


class VirtualTime:
    """The time of one broker with a manual clock. Belongs to the event loop."""

    def __init__(
        self,
        manual: ManualClock,
        *,
        clock: SchedulerClock,
        scheduler: Scheduler,
        ticker: Ticker,
        writer: LogWriter,
        delivery: Delivery,
        consuming: Consuming,
        wake: Callable[[int], Awaitable[None]],
    ) -> None:
        """`wake` writes the wake-ups of selections that are needed within the given milliseconds (Wakers.wake)."""
        self._manual, self._clock, self._scheduler = manual, clock, scheduler
        self._ticker, self._writer, self._consuming, self._wake = ticker, writer, consuming, wake
        self.activities: list[Activity] = []
        self._released: list[pa.RecordBatch] = []
        self._lock = asyncio.Lock()  # one step at a time
        delivery.observers.append(self._on_released)

    @property
    def now_ms(self) -> int:
        """The time of the broker in milliseconds since 1970."""
        return self._clock.now_ms()

    def _on_released(self, rows: pa.RecordBatch, _now_ms: int) -> None:
        """Add released messages to the result of the current step, without redeliveries."""
        # As values: with one row, which is usual, each call of pyarrow.compute costs more.
        is_new = [not topic.startswith(RETRY_PREFIX) for topic in rows.column("topic").to_pylist()]
        if not all(is_new):
            rows = rows.filter(pa.array(is_new))
        if rows.num_rows:
            self._released.append(rows)

    async def step(self, target_ms: int) -> Step:
        """Advance to the next deadline, at most to `target_ms`, and do all work of this time.

        If messages are due at the present time, the step releases them, and time stands still. Raises OutOfRange for a
        target in the past or too far away, and OverLimit if the disk is full.
        """
        async with self._lock:
            now_ms = self.now_ms
            if not now_ms <= target_ms <= now_ms + DELAY_MS_MAX:
                raise OutOfRange(
                    f"the clock is at {now_ms}: advance to a time from then on, at most {DELAY_MS_MAX} ms away"
                )
            self._released.clear()
            # A request may have made messages due now, or earlier than the scheduler knows.
            await self._wake(target_ms - now_ms)
            if self._is_busy():
                await self._finish_work()
            if self._released:
                return Step(now_ms, self._released.copy(), now_ms == target_ms)
            lease_end_ms = self._lease_end_ms()
            deadline_ms = _earliest(self._scheduler.next_deadline_ms(), lease_end_ms, self._activity_ms())
            reached_ms = min(target_ms, max(now_ms, deadline_ms))
            self._manual.advance(reached_ms - now_ms)
            self._ticker.wake()
            if lease_end_ms is not None and lease_end_ms <= reached_ms:
                self._consuming.wake()
            for activity in self.activities:
                activity.wake()
            await self._finish_work()
            return Step(reached_ms, self._released.copy(), reached_ms == target_ms)

    def _lease_end_ms(self) -> int | None:
        """Find the earliest end of a lease (ms since 1970). None without leases."""
        elapsed_ms = self._consuming.next_lease_end_ms
        return None if elapsed_ms is None else self._clock.as_wall(elapsed_ms)

    def _activity_ms(self) -> int | None:
        """Find the earliest time at which an edge has work (ms since 1970). None if none waits for the clock."""
        waits_ms = [wait_ms for each in self.activities if (wait_ms := each.wait_ms()) is not None]
        return self.now_ms + min(waits_ms) if waits_ms else None

    async def _finish_work(self) -> None:
        """Wait until nothing is left to do at the present time."""
        rounds = 0
        while True:
            await self._writer.flushed()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not self._is_busy():
                return
            self._writer.check_admission()
            rounds += 1
            if rounds > _ROUNDS_WITHOUT_PAUSE:
                await asyncio.sleep(_PAUSE_S)

    def _is_busy(self) -> bool:
        """Check whether work of the present time, or work ahead of the next deadline, is left."""
        # Work ahead of the next deadline, such as loading bodies, must end too, so that each run gives the same result.
        return (
            _earliest(self._scheduler.next_due_ms(), self._lease_end_ms(), self._activity_ms()) <= self.now_ms
            or self._scheduler.is_busy
            or self._scheduler.in_flight_rows > 0
            or self._consuming.is_busy
            or self._writer.is_writing
            or any(activity.is_busy for activity in self.activities)
        )


def _earliest(*times_ms: int | None) -> int:
    """Find the earliest of these times. FAR_MS if there is none."""
    return min((time_ms for time_ms in times_ms if time_ms is not None), default=FAR_MS)
