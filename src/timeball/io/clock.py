"""Time, passed as an argument: only this module reads clocks.

Two clocks matter. The *wall* clock gives the date and time, and may be stepped by an operator or by NTP. The *boot*
clock (CLOCK_BOOTTIME) only ever grows, counts suspend, and has no date. A scheduler that trusts only the wall clock
releases everything early after a spike forward. A scheduler whose time never moves back stalls for the length of a step
back. `SchedulerClock` follows the wall clock but distrusts its steps:

    step = (wall - boot) - (the same at the previous reading)

    |step| <= 100 ms            now = max(now, wall)             slew and jitter
    forward, <= 1 s             now = max(now, wall)             too small to matter, too common to suspect
    forward, > 1 s              suspect: advance by boot only during a probation of 5 s, then accept the step;
                                accept it at once if the boot clock ran ahead of the monotonic one (a real suspend)
    backward, <= 1 s            hold until the wall catches up
    backward, > 1 s             the earlier time was wrong: now = wall. Released messages are in the log and cannot
                                be released again. During a probation this cancels the suspected step. If the wall
                                is still ahead, a new probation begins for the rest of the step

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

    # See Clock. Without a call in between, because each release reads it several times.
    monotonic_ns = staticmethod(time.monotonic_ns)


def process_cpu_ns() -> int:
    """Read the CPU time of this process in nanoseconds, with all its threads."""
    return time.process_time_ns()


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
        self._last_wall_ms = clock.wall_ms()
        self._last_boot_ms = clock.boot_ms()
        self._last_monotonic_ms = clock.monotonic_ns() // 1_000_000
        self._now_ms = self._last_wall_ms
        self._suspect_since_boot_ms: int | None = None
        self.steps_suspected = 0
        # Scheduler time minus boot clock. It changes when the wall clock is set. `now_ms` then calls `on_offset`.
        self.offset_ms = self._start_offset_ms = self._now_ms - self._last_boot_ms
        self.read_elapsed_ms = self._now_ms  # `elapsed_ms` at the last reading
        self.on_offset: Callable[[int], None] = lambda _: None

    @property
    def suspect(self) -> bool:
        """True while a forward step is on probation."""
        return self._suspect_since_boot_ms is not None

    def now_ms(self) -> int:
        """Read the clocks, apply the table in the module docstring, and return the time in milliseconds since 1970."""
        wall_ms, boot_ms = self.clock.wall_ms(), self.clock.boot_ms()
        monotonic_ms = self.clock.monotonic_ns() // 1_000_000
        elapsed_ms = boot_ms - self._last_boot_ms
        suspended_ms = elapsed_ms - (monotonic_ms - self._last_monotonic_ms)
        step_ms = (wall_ms - self._last_wall_ms) - elapsed_ms
        self._last_wall_ms, self._last_boot_ms, self._last_monotonic_ms = wall_ms, boot_ms, monotonic_ms
        if step_ms < -STEP_MS:
            self._handle_step_back(wall_ms, boot_ms, elapsed_ms)
        elif step_ms > STEP_MS and suspended_ms <= JITTER_MS and wall_ms > self._now_ms + elapsed_ms:
            # The last condition excludes steps that only return to the present scheduler time.
            self._suspect_since_boot_ms = boot_ms
            self.steps_suspected += 1
            self._now_ms += elapsed_ms
        elif self._suspect_since_boot_ms is not None:
            self._continue_probation(wall_ms, boot_ms, elapsed_ms)
        else:
            self._now_ms = max(self._now_ms, wall_ms)
        self.read_elapsed_ms = boot_ms + self._start_offset_ms
        offset_ms = self._now_ms - boot_ms
        change_ms = offset_ms - self.offset_ms
        if abs(change_ms) > OFFSET_JITTER_MS and not self._is_interruption(change_ms, wall_ms):
            self.offset_ms = offset_ms
            self.on_offset(offset_ms)
        return self._now_ms

    def _is_interruption(self, change_ms: int, wall_ms: int) -> bool:
        """Tell whether this thread was interrupted between the readings of the wall clock and of the boot clock.

        Following such a change would load all messages in memory again. An interruption only lowers the offset, by not
        more than a third reading shows. Any other change is a step, even if the thread was interrupted, too.
        """
        return change_ms < 0 and -change_ms <= self.clock.wall_ms() - wall_ms + OFFSET_JITTER_MS

    def elapsed_ms(self) -> int:
        """Read a clock for deadlines in memory, in ms. It starts at the wall time and then follows the boot clock."""
        return self.clock.boot_ms() + self._start_offset_ms

    def as_wall(self, elapsed_ms: int) -> int:
        """Convert a time of `elapsed_ms()` to scheduler time. Correct only if no clock is set until that time."""
        return elapsed_ms + self.now_ms() - self.elapsed_ms()

    def _handle_step_back(self, wall_ms: int, boot_ms: int, elapsed_ms: int) -> None:
        """Handle a step back > 1 s: it undoes all or a part of a suspected step, or the earlier time was wrong."""
        ahead_ms = wall_ms - (self._now_ms + elapsed_ms)
        if ahead_ms > STEP_MS:
            # The wall is still ahead, so a step was on probation. Its rest stays suspected, even if it is now < 1 s.
            self._suspect_since_boot_ms = boot_ms
            self._now_ms += elapsed_ms
        else:
            self._suspect_since_boot_ms = None
            self._now_ms = max(self._now_ms, wall_ms) if ahead_ms >= -STEP_MS else wall_ms

    def _continue_probation(self, wall_ms: int, boot_ms: int, elapsed_ms: int) -> None:
        """Advance by the boot clock. End the probation if the step has vanished or has lasted long enough."""
        assert self._suspect_since_boot_ms is not None
        if wall_ms <= self._now_ms + elapsed_ms + JITTER_MS:
            # The suspected step has vanished in small pieces, so nothing is suspicious any more.
            self._suspect_since_boot_ms = None
            self._now_ms = max(self._now_ms, wall_ms)
        elif boot_ms - self._suspect_since_boot_ms >= PROBATION_MS:
            self._suspect_since_boot_ms = None
            self._now_ms = max(self._now_ms, wall_ms)
        else:
            self._now_ms += elapsed_ms


BOUNDS_NS = tuple(
    int(bound_ms * 1_000_000)
    for bound_ms in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000)
)


class Durations:
    """A histogram of durations. One thread adds. Any thread may read, and may miss the newest."""

    __slots__ = ("_clock", "counts", "sum_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Count i: durations up to BOUNDS_NS[i] and above the bound before it. The last count has no upper bound.
        self.counts = [0] * (len(BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one duration, in nanoseconds."""
        self.counts[bisect_left(BOUNDS_NS, ns)] += 1
        self.sum_ns += ns

    def time(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function and count its duration, unless it raises."""
        start_ns = self._clock.monotonic_ns()
        result = call(*args, **kwargs)
        self.add(self._clock.monotonic_ns() - start_ns)
        return result
