"""Time as an argument: the only module that reads a clock.

Two readings matter. The *wall* says which instant it is, and may be stepped by an operator or by NTP; the
*boot* clock (CLOCK_BOOTTIME) only ever grows, counts suspend, and says nothing about the date. A scheduler
that trusts the wall alone fires everything early after a spike forward; one that never moves back stalls for
the length of a step back. `SchedulerClock` follows the wall but distrusts its steps:

    step = (wall - boot) - (the same at the previous reading)

    |step| <= 100 ms            now = max(now, wall)             slew and jitter
    forward, <= 1 s             now = max(now, wall)             too small to matter, too common to suspect
    forward, > 1 s              suspect: advance by boot only; accepted once it has stood for 5 s, or at once
                                when the boot clock ran ahead of the monotonic one (a real suspend)
    backward, <= 1 s            hold until the wall catches up
    backward, > 1 s             the past was wrong: now = wall; what was released is in the log and cannot
                                be released again. On probation it takes back what was suspected; if the wall
                                is still ahead after it, the rest is suspected anew

The rules, and the reasons for them, are those of the reliability study summed up in docs/decisions/0004-clock.md.
Invariant: between two readings without a backward step > 1 s, `now_ms` does not decrease.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Between two readings in whole milliseconds, the wall's and the boot clock's.
OFFSET_JITTER_MS = 2
JITTER_MS = 100
STEP_MS = 1_000
PROBATION_MS = 5_000


class Clock(Protocol):
    """A source of time."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, as the machine believes."""

    def boot_ms(self) -> int:
        """Milliseconds since some fixed point, growing through suspend."""

    def monotonic_ns(self) -> int:
        """Nanoseconds for measuring durations; stands still during suspend."""


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
    """A clock for tests: it moves only when told, so that a delay of 40 days costs nothing."""

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
        """Let real time pass: all three clocks move."""
        self.wall += ms
        self.boot += ms
        self.monotonic += ms

    def step_wall(self, ms: int) -> None:
        """Set the wall clock forward or back, as an operator or NTP would."""
        self.wall += ms

    def suspend(self, ms: int) -> None:
        """Sleep the machine: wall and boot go on, the monotonic clock does not."""
        self.wall += ms
        self.boot += ms


class SchedulerClock:
    """The instant by which promises are judged due. Not thread safe: owned by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._wall = clock.wall_ms()
        self._boot = clock.boot_ms()
        self._monotonic_ms = clock.monotonic_ns() // 1_000_000
        self._now = self._wall
        self._suspect_since_boot: int | None = None
        self.steps_suspected = 0
        # The instant minus the boot clock: it changes when the wall is set. Called within the reading that shows it.
        self.offset_ms = self._begun_offset_ms = self._now - self._boot
        self.read_elapsed_ms = self._now  # `elapsed_ms` at the last reading
        self.on_offset: Callable[[int], None] = lambda _: None

    @property
    def suspect(self) -> bool:
        """Return whether a forward step is on probation."""
        return self._suspect_since_boot is not None

    def now_ms(self) -> int:
        """Read the clocks, apply the table above, and return the scheduler's instant in milliseconds."""
        wall, boot = self.clock.wall_ms(), self.clock.boot_ms()
        monotonic_ms = self.clock.monotonic_ns() // 1_000_000
        passed = boot - self._boot
        slept = passed - (monotonic_ms - self._monotonic_ms)
        step = (wall - self._wall) - passed
        self._wall, self._boot, self._monotonic_ms = wall, boot, monotonic_ms
        if step < -STEP_MS:
            self._step_back(wall, boot, passed)
        elif step > STEP_MS and slept <= JITTER_MS and wall > self._now + passed:
            # A step that only leads back to where we are is nothing to distrust.
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
        """Return milliseconds that only elapse: for deadlines in memory. They begin at the wall and are never set."""
        return self.clock.boot_ms() + self._begun_offset_ms

    def as_wall(self, elapsed_ms: int) -> int:
        """Return which instant that will be, if no clock is set until then."""
        return elapsed_ms + self.now_ms() - self.elapsed_ms()

    def _step_back(self, wall: int, boot: int, passed: int) -> None:
        """A large step back undoes a suspected step forward, or a part of it, or shows that the past was wrong."""
        ahead = wall - (self._now + passed)
        if ahead > STEP_MS:
            # Still ahead, so a step was on probation. What is left of it is no truer for being smaller.
            self._suspect_since_boot = boot
            self._now += passed
        else:
            self._suspect_since_boot = None
            self._now = max(self._now, wall) if ahead >= -STEP_MS else wall

    def _on_probation(self, wall: int, boot: int, passed: int) -> None:
        assert self._suspect_since_boot is not None
        if wall <= self._now + passed + JITTER_MS:
            # The suspected step has gone away in small pieces: nothing is left to distrust.
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
    """How long something took, counted by bounds. One thread adds; any may read, and may miss the newest."""

    __slots__ = ("_clock", "counts", "sum_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.counts = [0] * (len(BOUNDS_NS) + 1)  # by the first bound that is not exceeded; the last has none
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_NS, ns)] += 1
        self.sum_ns += ns

    def time(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call, and count how long that took unless it fails."""
        began_ns = self._clock.monotonic_ns()
        result = call(*args, **kwargs)
        self.add(self._clock.monotonic_ns() - began_ns)
        return result
