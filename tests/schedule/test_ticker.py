"""The ticker over a real schedule: it hands out in time, sleeps as long as possible, and never loops without work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pyarrow as pa
import pytest
from tests.bounds import BOUND_S
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.io.clock import PROBATION_MS, SchedulerClock
from timeball.model import limits
from timeball.schedule import ticker
from timeball.schedule.locations import take_scheduled
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.ticker import IndexingTime, Ticker

TURNS = 50


class CountingScheduler(Scheduler):
    """A scheduler that counts its calls. `to_rewrite` contains messages to be rewritten."""

    calls = 0
    to_rewrite: pa.RecordBatch | None = None

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self.calls += 1
        return super().take_due(now_ms, limit)

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows, self.to_rewrite = self.to_rewrite, None
        return None if rows is None else rows.slice(0, limit)


class PendingOccurrences:
    """The number of pending occurrences of schedules."""

    count = 0


class TickedWorld(World):
    """A World in which a ticker hands out."""

    def __init__(self) -> None:
        super().__init__(HourLogRig(scheduler=CountingScheduler, gather_bytes=1 << 30))
        self.handed_out: list[tuple[int, int]] = []
        self.rewritten_seqs: list[int] = []
        self.release_ms = 0  # the time that a hand-out takes
        self.indexing = IndexingTime()
        self.occurrences = PendingOccurrences()
        self.ticker = Ticker(
            self.strategy, self.clock, self.hand_out, self.rewrite, self.indexing, self.occurrences
        )

    def hand_out(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        assert now_ms == self.now_ms
        self.manual.monotonic += self.release_ms
        self.handed_out += self.model.hand_out(scheduled_rows, now_ms, limits.FRAME_ROWS_MAX)

    def rewrite(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        self.rewritten_seqs += scheduled_rows["seq"].to_pylist()

    @property
    def calls(self) -> int:
        assert isinstance(self.strategy, CountingScheduler)
        return self.strategy.calls

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        self.task = asyncio.create_task(self.ticker.run())
        try:
            yield
        finally:
            self.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await self.task

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.001)


@pytest.fixture
def world() -> Iterator[TickedWorld]:
    world = TickedWorld()
    yield world
    world.close()


def test_tick_that_hands_out_returns_0(world: TickedWorld) -> None:
    world.drain()
    seqs = world.admit([world.now_ms] * 3)
    assert world.ticker.tick() == 0
    assert [seq for _, seq in world.handed_out] == seqs
    assert world.ticker.tick() is None, "no message is pending"


def test_tick_returns_the_ms_until_the_next_due_time(world: TickedWorld) -> None:
    world.drain()
    world.admit([world.now_ms + 70])
    assert world.ticker.tick() == 70
    world.advance(69)
    assert world.ticker.tick() == 1
    world.advance(1)
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == 1


def test_rewrites_wait_for_due_messages(world: TickedWorld) -> None:
    world.drain()
    seqs = world.admit([world.now_ms] * 3)
    assert isinstance(world.strategy, CountingScheduler)
    world.strategy.to_rewrite = take_scheduled(world.reader, np.array(seqs[:2]))
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == 3 and world.rewritten_seqs == []
    assert world.ticker.tick() == 0
    assert world.rewritten_seqs == seqs[:2]
    assert world.ticker.tick() is None
    assert world.strategy.in_flight_rows == 3


def test_due_messages_wait_for_a_few_rows_in_flight(world: TickedWorld) -> None:
    world.drain()
    world.admit([world.now_ms] + [world.now_ms + 1] * 2)
    assert world.ticker.tick() == 0
    world.advance(1)
    assert world.ticker.tick() == ticker.SHARE_MS - 1
    assert len(world.handed_out) == 1
    world.release()
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == 3


def test_due_messages_wait_for_rows_in_flight_at_most_5_ms(world: TickedWorld) -> None:
    world.drain()
    world.admit([world.now_ms, world.now_ms + 1])
    assert world.ticker.tick() == 0
    world.advance(ticker.SHARE_MS)
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == 2 and world.strategy.in_flight_rows == 2


def hand_out_often(world: TickedWorld, rows: int) -> None:
    """Hand out every 20 ms, until the mean time of the ticker is the time of one of these hand-outs."""
    for _ in range(100):
        world.admit([world.now_ms] * rows)
        assert world.ticker.tick() == 0
        make_durable(world)
        world.advance(20)


def make_durable(world: TickedWorld) -> None:
    """Make all hand-outs durable. Indexing one of them takes 0.84 ms."""
    world.release()
    world.indexing.total_ns += 840_000


def test_small_hand_outs_use_a_share_of_the_time(world: TickedWorld) -> None:
    world.drain()
    world.release_ms = 0
    hand_out_often(world, 1)  # each takes 0.84 ms, when it is durable
    interval_ms = world.ticker.interval_ms
    assert interval_ms == pytest.approx(0.84 / ticker.RELEASE_SHARE, rel=0.01)
    world.admit([world.now_ms + after_ms for after_ms in range(4)])
    before = len(world.handed_out)
    assert world.ticker.tick() == 0, "after an idle interval the next message need not wait"
    make_durable(world)
    world.advance(1)
    pause_ms = world.ticker.tick()
    assert pause_ms == round(interval_ms - 1)
    assert len(world.handed_out) == before + 2
    make_durable(world)
    world.advance(2)
    assert world.ticker.tick() == pause_ms - 2
    assert len(world.handed_out) == before + 2
    world.advance(pause_ms - 2)
    assert world.ticker.tick() == pytest.approx(interval_ms, abs=1)
    assert len(world.handed_out) == before + 4, (
        "the two wait for the end of the interval, and are handed out together"
    )


def test_small_hand_outs_are_at_least_6_ms_apart(world: TickedWorld) -> None:
    world.drain()
    world.ticker._mean_ns = 1.0  # hand-outs take nearly no time
    world.admit([world.now_ms + after_ms for after_ms in range(3)])
    assert world.ticker.tick() == 0
    world.release()
    world.advance(1)
    assert world.ticker.tick() == ticker.INTERVAL_MIN_MS - 1
    assert world.ticker.interval_ms == ticker.INTERVAL_MIN_MS
    world.advance(1)
    assert world.ticker.tick() == ticker.INTERVAL_MIN_MS - 2
    assert len(world.handed_out) == 2


async def make_all_durable(world: TickedWorld) -> None:
    """Make all hand-outs durable, on the loop."""
    while world.model.in_flight:
        await world._release(list(world.model.in_flight[0]))


def test_due_messages_join_a_commit_when_most_of_the_interval_has_passed(world: TickedWorld) -> None:
    world.drain()
    world.ticker._mean_ns = 1.0  # hand-outs take nearly no time

    async def main() -> None:
        world.ticker._sleeping = asyncio.get_running_loop().create_future()
        await world._admit([world.now_ms + after_ms for after_ms in (1, 1, 2, 3, 6, 7)])
        assert world.ticker.tick() == 1
        counts = []
        for _ in range(10):
            if world.strategy.loaded.wheel.first_due_ms <= world.now_ms:
                world.strategy.on_commit()
            counts.append(len(world.handed_out))
            await make_all_durable(world)
            world.advance(1)
        # At 1 ms, and at 2 ms because the interval before was idle. At 5 ms, 2 ms before the end of the interval. And
        # 4 ms later: 3.6 ms are 0.6 intervals.
        assert counts == [0, 2, 3, 3, 3, 4, 4, 4, 4, 6]

    world.run(main())


def test_due_messages_do_not_join_a_commit_while_others_are_in_flight(world: TickedWorld) -> None:
    world.drain()

    async def main() -> None:
        world.ticker._sleeping = asyncio.get_running_loop().create_future()
        await world._admit([world.now_ms])
        assert world.ticker.tick() == 0
        world.advance(1)
        await world._admit([world.now_ms])
        world.strategy.on_commit()
        assert len(world.handed_out) == 1

    world.run(main())


def test_a_hand_out_that_joins_a_commit_moves_the_next_tick(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            await world._admit([world.now_ms + 5_000, world.now_ms + 5_001])
            await world.wait_until(lambda: world.ticker._sleeping is not None)
            world.advance(5_000)
            world.strategy.on_commit()
            assert len(world.handed_out) == 1
            await make_all_durable(world)
            world.advance(1)
            await world.wait_until(lambda: len(world.handed_out) == 2)  # at once, not when the timer ends

    world.run(main())


def test_a_failure_of_a_joining_hand_out_ends_the_ticker(
    world: TickedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the release failed")

    async def main() -> None:
        async with asyncio.timeout(BOUND_S):
            task = asyncio.create_task(world.ticker.run())
            await world._admit([world.now_ms + 5_000])
            while world.ticker._sleeping is None:
                await asyncio.sleep(0)
            world.advance(5_000)
            monkeypatch.setattr(world.ticker, "_release", fail)
            world.strategy.on_commit()  # does not raise, because the send that began the commit has not failed
            with pytest.raises(RuntimeError, match="the release failed"):
                await task

    world.run(main())


def test_hand_outs_are_at_most_8_ms_apart(world: TickedWorld) -> None:
    world.drain()
    world.release_ms = 9
    hand_out_often(world, 1)
    assert world.ticker.interval_ms == ticker.INTERVAL_MAX_MS


def test_a_large_hand_out_delays_no_next_one(world: TickedWorld) -> None:
    world.drain()
    world.release_ms = 5
    hand_out_often(world, 1)
    world.admit([world.now_ms] * ticker.SHARED_ROWS + [world.now_ms + 1])
    before = len(world.handed_out)
    assert world.ticker.tick() == 0
    world.release()
    world.advance(1)
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == before + ticker.SHARED_ROWS + 1


def test_hand_outs_that_occurrences_limit_follow_each_other_at_once(world: TickedWorld) -> None:
    """A slow rule makes hand-outs small. The other messages that are due must not also wait between them."""
    world.drain()
    world.occurrences.count = 1_000
    world.indexing.occurrence_ns = ticker.HOLD_NS // 10
    world.release_ms = 4
    world.admit([world.now_ms] * 35)
    waits = [world.ticker.tick() for _ in range(4)]
    assert len(world.handed_out) == 35 and waits == [0, 0, 0, 0]


def test_durable_releases_wake_the_ticker(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            await world._admit([world.now_ms])
            await world.wait_until(lambda: len(world.handed_out) == 1)
            world.advance(1)
            await world._admit([world.now_ms])
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert len(world.handed_out) == 1
            await world._release([seq for _, seq in world.handed_out])
            await world.wait_until(lambda: len(world.handed_out) == 2)  # although no time passes

    world.run(main())


def test_due_messages_do_not_wait_for_many_rows_in_flight(world: TickedWorld) -> None:
    world.drain()
    world.admit([world.now_ms] * ticker.SHARED_ROWS + [world.now_ms + 1])
    assert world.ticker.tick() == 0
    world.advance(1)
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == ticker.SHARED_ROWS + 1


def test_rows_in_flight_are_bounded(world: TickedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELEASE_ROWS_IN_FLIGHT_MAX", 10)
    monkeypatch.setattr(limits, "FRAME_ROWS_MAX", 4)
    world.drain()
    world.admit([world.now_ms] * 25)
    in_flight_rows = []
    while world.ticker.tick() == 0:
        in_flight_rows.append(world.strategy.in_flight_rows)
    assert in_flight_rows == [4, 8, 10]
    assert world.ticker.tick() is None, "durable releases wake the ticker, not the clock"
    world.release_part(3)
    assert world.ticker.tick() == 0
    assert len(world.handed_out) == 13


def test_new_message_due_earlier_wakes_the_ticker(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            await world.wait_until(lambda: world.calls > 0)
            await world._admit([world.now_ms])
            await world.wait_until(lambda: len(world.handed_out) == 1)

    world.run(main())


def test_message_is_handed_out_at_its_due_time_and_not_before(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            calls = world.calls
            await world._admit([world.now_ms + 20])
            await world.wait_until(lambda: world.calls > calls)
            assert world.handed_out == []
            world.advance(20)
            await world.wait_until(lambda: len(world.handed_out) == 1)

    world.run(main())


def test_clock_set_forward_is_noticed_without_a_signal(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            await world._admit([world.now_ms + limits.HOUR_MS])
            await world.wait_until(lambda: world.calls > 1)
            world.manual.suspend(limits.HOUR_MS)  # no call of wake()
            await world.wait_until(lambda: len(world.handed_out) == 1)

    world.run(main())


class CountingClock(SchedulerClock):
    """A clock that counts its readings."""

    readings = 0

    def now_ms(self) -> int:
        self.readings += 1
        return super().now_ms()


@pytest.fixture
def clock(world: TickedWorld, monkeypatch: pytest.MonkeyPatch) -> CountingClock:
    """The clock of the ticker, which is read every millisecond."""
    monkeypatch.setattr(ticker, "CLOCK_READ_MS", 1)
    world.ticker._clock = CountingClock(world.manual)
    return world.ticker._clock


def test_between_far_due_times_only_the_clock_is_read(world: TickedWorld, clock: CountingClock) -> None:
    async def main() -> None:
        async with world.ticking():
            await world._admit([world.now_ms + 40 * limits.DAY_MS])
            await world.wait_until(lambda: clock.readings > TURNS)
            calls = world.calls
            for day in range(2, 5):
                world.advance(limits.DAY_MS)
                await world.wait_until(lambda day=day: clock.readings > day * TURNS)
            assert world.calls == calls
            world.advance(37 * limits.DAY_MS)
            await world.wait_until(lambda: len(world.handed_out) == 1)

    world.run(main())


def test_clock_set_back_is_reported_to_the_scheduler(world: TickedWorld, clock: CountingClock) -> None:
    async def main() -> None:
        async with world.ticking():
            await world._admit([world.now_ms + limits.HOUR_MS])
            await world.wait_until(lambda: clock.readings > TURNS)
            calls = world.calls
            world.manual.step_wall(-limits.HOUR_MS)
            await world.wait_until(lambda: world.calls > calls)

    world.run(main())


def test_ticker_sleeps_without_pending_messages(world: TickedWorld) -> None:
    async def main() -> None:
        async with world.ticking():
            await world.wait_until(lambda: world.calls > 0)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            calls = world.calls
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert world.calls == calls
            world.ticker.wake()
            await world.wait_until(lambda: world.calls > calls)

    world.run(main())


def test_clock_is_read_without_pending_messages(world: TickedWorld, clock: CountingClock) -> None:
    """A clock fault that has ended must not affect the next send, however long the broker was idle."""

    async def main() -> None:
        async with world.ticking():
            for step_ms in (-limits.DAY_MS, limits.DAY_MS):
                world.manual.step_wall(step_ms)
                readings = clock.readings
                await world.wait_until(lambda readings=readings: clock.readings > readings + 1)
                world.manual.advance(300)
            world.manual.advance(PROBATION_MS)
            readings = clock.readings
            await world.wait_until(lambda: clock.readings > readings + 1)
            assert clock.now_ms() == world.manual.wall

    world.run(main())


def test_event_loop_runs_other_tasks_between_hand_outs(
    world: TickedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAME_ROWS_MAX", 1)

    async def main() -> None:
        async with world.ticking():
            await world.wait_until(lambda: world.calls > 0)
            await world._admit([world.now_ms] * 20)
            counts = set()
            while len(world.handed_out) < 20:
                assert not world.task.done(), world.task.exception()
                counts.add(len(world.handed_out))
                await asyncio.sleep(0)
            assert len(counts) > 10, "the loop runs other tasks between hand-outs"

    world.run(main())
