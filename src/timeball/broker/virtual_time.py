"""Moves a manual clock (`serve --clock manual`) from one deadline to the next.

With a manual clock, time stands still until a client advances it. An advance stops at each deadline on its way: the due
time of a message, or the end of a lease. The next step begins when all work of this deadline is done and durable. So
messages are released in the order of their due times, at exactly these times, and each run gives the same result.

Only deadlines of the clock are virtual. Limits of connections and requests follow real time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.delivery import Delivery
from timeball.broker.consuming.engine import Consuming
from timeball.io.clock import ManualClock, SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.errors import OutOfRange
from timeball.model.limits import DELAY_MS_MAX
from timeball.model.message import RETRY_PREFIX
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.ticker import Ticker

# Tasks that were woken get this many turns of the event loop before they are asked whether they have work.
_TURNS = 8
_PAUSE_S = 0.0005  # while the disk or a receiver of pushes works


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
    ) -> None:
        self._manual, self._clock, self._scheduler = manual, clock, scheduler
        self._ticker, self._writer, self._consuming = ticker, writer, consuming
        self.activities: list[Activity] = []
        self._released: list[pa.RecordBatch] = []
        self._lock = asyncio.Lock()  # one step at a time
        delivery.observers.append(self._on_released)

    @property
    def now_ms(self) -> int:
        """The time of the broker in milliseconds since 1970."""
        return self._clock.now_ms()

    def _on_released(self, rows: pa.RecordBatch, _now_ms: int) -> None:
        is_retry = pc.starts_with(rows.column("topic"), RETRY_PREFIX)
        rows = rows.filter(pc.invert(is_retry))
        if rows.num_rows:
            self._released.append(rows)

    async def step(self, target_ms: int) -> Step:
        """Advance to the next deadline, at most to `target_ms`, and do all work of this time.

        Raises OutOfRange for a target in the past or too far away, and OverLimit if the disk is full.
        """
        async with self._lock:
            now_ms = self.now_ms
            if not now_ms <= target_ms <= now_ms + DELAY_MS_MAX:
                raise OutOfRange(
                    f"the clock is at {now_ms}: advance to a time from then on, at most {DELAY_MS_MAX} ms away"
                )
            self._released.clear()
            deadline_ms = self._next_ms()
            reached_ms = target_ms if deadline_ms is None else min(target_ms, max(now_ms, deadline_ms))
            self._manual.advance(reached_ms - now_ms)
            self._ticker.wake()
            self._consuming.wake()
            for activity in self.activities:
                activity.wake()
            await self._finish_work()
            return Step(reached_ms, self._released.copy(), reached_ms == target_ms)

    def _next_ms(self) -> int | None:
        """Find the next deadline, or None if there is none."""
        lease_end_ms, waits_ms = (
            self._consuming.next_lease_end_ms,
            (each.wait_ms() for each in self.activities),
        )
        deadlines_ms = [
            self._scheduler.next_due_ms(),
            None if lease_end_ms is None else self._clock.as_wall(lease_end_ms),
            *(None if wait_ms is None else self.now_ms + wait_ms for wait_ms in waits_ms),
        ]
        return min((deadline_ms for deadline_ms in deadlines_ms if deadline_ms is not None), default=None)

    async def _finish_work(self) -> None:
        """Wait until nothing is left to do at the present time."""
        while True:
            await self._writer.flushed()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            next_ms = self._next_ms()
            is_due = next_ms is not None and next_ms <= self.now_ms
            if not (
                is_due
                or self._scheduler.is_busy
                or self._scheduler.in_flight_rows
                or self._consuming.is_busy
                or self._writer.is_writing
                or any(activity.is_busy for activity in self.activities)
            ):
                return
            self._writer.check_admission()
            await asyncio.sleep(_PAUSE_S)
