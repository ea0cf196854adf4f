"""The event loop's lag: a loop that was held up is seen, and one that was not is counted all the same."""

from __future__ import annotations

import asyncio

import pytest

from timeball.io.clock import BOUNDS_NS, SystemClock
from timeball.monitoring import loop_lag
from timeball.monitoring.loop_lag import LoopLag

HELD_NS = 20_000_000


def test_a_loop_that_is_held_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL_S", 0.001)
    clock = SystemClock()

    async def main() -> LoopLag:
        lag = LoopLag(clock)
        task = asyncio.create_task(lag.run())
        while not sum(lag.durations.counts):
            await asyncio.sleep(0)
        until_ns = clock.monotonic_ns() + HELD_NS
        while clock.monotonic_ns() < until_ns:
            pass
        before = sum(lag.durations.counts)
        while sum(lag.durations.counts) == before:
            await asyncio.sleep(0)
        task.cancel()
        return lag

    lag = asyncio.run(main())
    assert lag.durations.sum_ns >= HELD_NS // 2
    late = sum(
        count for bound, count in zip((*BOUNDS_NS, 1 << 62), lag.durations.counts) if bound >= HELD_NS // 2
    )
    assert late >= 1
