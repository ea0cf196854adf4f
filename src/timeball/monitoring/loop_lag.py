"""The lag of the event loop behind its timers: the first sign of an overloaded broker."""

from __future__ import annotations

import asyncio

from timeball.io.clock import Clock, Durations

INTERVAL_S = 0.25


class LoopLag:
    """Measures the lag: sleeps again and again, and records how much longer than planned each sleep took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.durations = Durations(clock)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began_ns = self._clock.monotonic_ns()
            await asyncio.sleep(INTERVAL_S)
            self.durations.add(max(0, self._clock.monotonic_ns() - began_ns - int(INTERVAL_S * 1e9)))
