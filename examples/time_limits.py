"""Time limits of the examples, as multiples of a start that is measured on this machine.

A fixed limit in seconds fails on a machine that is slow or busy, although nothing is wrong there. A Python process that
imports the client slows down as everything else does, so its start scales all limits.
"""

from __future__ import annotations

import functools
import subprocess
import sys

from timeball.io.clock import Clock, SystemClock

START = [sys.executable, "-c", "import timeball.client"]
QUIET_START_S = 1.0  # of START on two idle cores: 0.6 to 0.9 s; the limits of the examples are made for this


@functools.cache
def slowness() -> float:
    """Return the measured slowness of this machine. It is measured once."""
    return measure(SystemClock())


def measure(clock: Clock) -> float:
    """Return how many times longer a start takes here than on an idle machine: at least 1."""
    began_ns = clock.monotonic_ns()
    subprocess.run(START, check=True)
    return max(1.0, (clock.monotonic_ns() - began_ns) / 1e9 / QUIET_START_S)


def limit_s(idle_s: float) -> float:
    """Return the time limit of a step, in seconds, from the limit that suits an idle machine."""
    return idle_s * slowness()
