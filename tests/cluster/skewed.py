"""`timeball` with a wrong wall clock: `python -m tests.cluster.skewed serve …`. SKEW_MS is the error.

For tests only: a node whose clock is ahead of the others' takes over.
"""

from __future__ import annotations

import os

from timeball.cli.main import main
from timeball.io.clock import SystemClock

SKEW_MS = "SKEW_MS"


def skew(ms: int) -> None:
    """Set this process's wall clock ahead by so much. The clocks for durations stay right."""
    wall_ms = SystemClock.wall_ms

    def ahead_ms(clock: SystemClock) -> int:
        return wall_ms(clock) + ms

    SystemClock.wall_ms = ahead_ms  # type: ignore[method-assign]


if __name__ == "__main__":
    skew(int(os.environ[SKEW_MS]))
    main()
