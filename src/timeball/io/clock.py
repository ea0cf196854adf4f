"""Time, passed as an argument: only this module reads clocks.

Two readings matter. The *wall* clock gives the date and time, and may be stepped by an operator or by NTP. The *boot*
clock (CLOCK_BOOTTIME) only ever grows, counts suspend, and has no date. A scheduler that trusts the wall alone releases
everything early after a spike forward. One that never moves back stalls for the length of a step back. `SchedulerClock`
follows the wall but distrusts its steps:

    step = (wall - boot) - (the same at the previous reading)

    |step| <= 100 ms            now = max(now, wall)             slew and jitter
    forward, <= 1 s             now = max(now, wall)             too small to matter, too common to suspect
    forward, > 1 s              suspect: advance by boot only; accepted once it has stood for 5 s, or at once
                                when the boot clock ran ahead of the monotonic one (a real suspend)
    backward, <= 1 s            hold until the wall catches up
    backward, > 1 s             the past was wrong: now = wall; released messages are in the log and cannot be
                                released again. On probation this takes back the suspected step; if the wall is
                                still ahead after it, the rest is suspected anew

The rules and their reasons are those of the reliability study summarised in docs/decisions/0004-clock.md. Invariant:
between two readings without a backward step > 1 s, `now_ms` does not decrease.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# A change of (wall - boot) up to this many milliseconds is only rounding of the two readings.
OFFSET_JITTER_MS = 2
# Bounds of the table above: jitter, smallest suspicious step, and length of the probation.
JITTER_MS = 100
STEP_MS = 1_000
PROBATION_MS = 5_000


class Clock(Protocol):
    """A source of time."""

    def wall_ms(self) -> int:
        """Read the milliseconds since 1970-01-01 UTC according to the machine."""

    def boot_ms(self) -> int:
        """Read the milliseconds since a fixed point. They grow through suspend."""

    def monotonic_ns(self) -> int:
        """Read nanoseconds for measuring durations. They stand still during suspend."""


class SystemClock:
    """The machine's own clocks."""

    def wall_ms(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        """See Clock."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    def monotonic_ns(self) -> int:
        """See Clock."""
        return time.monotonic_ns()


@dataclass
class ManualClock:
    """A clock for tests: it moves only by its methods, so a delay of 40 days takes no time."""

    wall: int = 1_700_000_000_000
    boot: int = 1_000_000
    monotonic: int = 1_000_000

    def wall_ms(self) -> int:
        """See Clock."""
        return self.wall

    def boot_ms(self) -> int:
        """See Clock."""
        return self.boot

    def monotonic_ns(self) -> int:
        """See Clock."""
        return self.monotonic * 1_000_000

    def advance(self, ms: int) -> None:
        """Let real time pass: all three clocks move by `ms`."""
        self.wall += ms
        self.boot += ms
        self.monotonic += ms

    def step_wall(self, ms: int) -> None:
        """Set the wall clock forward or back, as an operator or NTP would."""
        self.wall += ms

    def suspend(self, ms: int) -> None:
        """Suspend the machine: wall and boot clock move by `ms`, the monotonic clock does not."""
        self.wall += ms
        self.boot += ms


class SchedulerClock:
    """The time by which messages are judged due. Not thread-safe: belongs to the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._wall = clock.wall_ms()
        self._boot = clock.boot_ms()
        self._monotonic_ms = clock.monotonic_ns() // 1_000_000
        self._now = self._wall
        self._suspect_since_boot: int | None = None
        self.steps_suspected = 0
        # Scheduler time minus boot clock. It changes when the wall is set. `on_offset` is called in the reading that
        # finds it.
        self.offset_ms = self._begun_offset_ms = self._now - self._boot
        self.read_elapsed_ms = self._now  # `elapsed_ms` at the last reading
        self.on_offset: Callable[[int], None] = lambda _: None

    @property
    def suspect(self) -> bool:
        """True while a forward step is on probation."""
        return self._suspect_since_boot is not None

    def now_ms(self) -> int:
        """Read the clocks, apply the table above, and return the scheduler's time in milliseconds since 1970."""
        wall, boot = self.clock.wall_ms(), self.clock.boot_ms()
        monotonic_ms = self.clock.monotonic_ns() // 1_000_000
        passed = boot - self._boot
        slept = passed - (monotonic_ms - self._monotonic_ms)
        step = (wall - self._wall) - passed
        self._wall, self._boot, self._monotonic_ms = wall, boot, monotonic_ms
        if step < -STEP_MS:
            self._step_back(wall, boot, passed)
        elif step > STEP_MS and slept <= JITTER_MS and wall > self._now + passed:
            # A step that only returns to the present scheduler time is not suspicious.
            self._suspect_since_boot = boot
            self.steps_suspected += 1
            self._now += passed
        elif self._suspect_since_boot is not None:
            self._on_probation(wall, boot, passed)
        else:
            self._now = max(self._now, wall)
        self.read_elapsed_ms = boot + self._begun_offset_ms
        offset_ms = self._now - boot
        if abs(offset_ms - self.offset_ms) > OFFSET_JITTER_MS:
            self.offset_ms = offset_ms
            self.on_offset(offset_ms)
        return self._now

    def elapsed_ms(self) -> int:
        """Read milliseconds for deadlines in memory: they begin at the wall time, only elapse, and are never set."""
        return self.clock.boot_ms() + self._begun_offset_ms

    def as_wall(self, elapsed_ms: int) -> int:
        """Convert `elapsed_ms` to scheduler time, provided that no clock is set until then."""
        return elapsed_ms + self.now_ms() - self.elapsed_ms()

    def _step_back(self, wall: int, boot: int, passed: int) -> None:
        """Handle a large step back: it undoes a suspected step, or a part of it, or shows that the past was wrong."""
        ahead = wall - (self._now + passed)
        if ahead > STEP_MS:
            # Still ahead, so a step was on probation. The rest of it stays suspected, although it is smaller.
            self._suspect_since_boot = boot
            self._now += passed
        else:
            self._suspect_since_boot = None
            self._now = max(self._now, wall) if ahead >= -STEP_MS else wall

    def _on_probation(self, wall: int, boot: int, passed: int) -> None:
        assert self._suspect_since_boot is not None
        if wall <= self._now + passed + JITTER_MS:
            # The suspected step has vanished in small pieces, so nothing is suspicious any more.
            self._suspect_since_boot = None
            self._now = max(self._now, wall)
        elif boot - self._suspect_since_boot >= PROBATION_MS:
            self._suspect_since_boot = None
            self._now = max(self._now, wall)
        else:
            self._now += passed


BOUNDS_NS = tuple(
    int(bound_ms * 1_000_000)
    for bound_ms in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000)
)


class Durations:
    """A histogram of durations. One thread adds. Any thread may read, and may miss the newest."""

    __slots__ = ("_clock", "counts", "sum_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # One count for each bound that is the first not exceeded, and a last one for longer durations.
        self.counts = [0] * (len(BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one duration, in nanoseconds."""
        self.counts[bisect_left(BOUNDS_NS, ns)] += 1
        self.sum_ns += ns

    def time(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function and count its duration, unless it raises."""
        began_ns = self._clock.monotonic_ns()
        result = call(*args, **kwargs)
        self.add(self._clock.monotonic_ns() - began_ns)
        return result
