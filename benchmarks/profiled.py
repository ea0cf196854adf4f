"""`timeball serve` that counts where its CPU time goes; the harness starts it for `timeball bench --profile ROW`.

The kernel's profiling timer ticks with the CPU time of the whole process, and its handler runs in the main thread, the
one of the event loop: each tick is put down to the innermost function of the package that the loop was in. A tick that
meets none is the loop's own work, or another thread's while the loop waits: the disk thread's, a reader's. uvloop has
no frame that would tell them apart.

SIGUSR1 begins to count. SIGUSR2 writes the counts, as one JSON object, to the file that the first argument names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import timeball
from timeball.cli.main import main

TICK_S = 0.001
OUTSIDE = "the event loop itself, and other threads"
PACKAGE = os.path.join(os.path.dirname(timeball.__file__), "")


def stage_of(frame: FrameType | None) -> str:
    """Return the innermost function of the package that the event loop has called, as `file function`."""
    while frame is not None and frame.f_code is not asyncio.Runner.run.__code__:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            return f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"
        frame = frame.f_back
    return OUTSIDE


def count_into(path: Path) -> None:
    """Count from SIGUSR1 on, and write to `path` at SIGUSR2."""
    counts: Counter[str] = Counter()

    def tick(_: int, frame: FrameType | None) -> None:
        counts[stage_of(frame)] += 1

    def begin_counting(*_: object) -> None:
        counts.clear()
        signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)

    def write(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(counts))
        unfinished.rename(path)

    signal.signal(signal.SIGPROF, tick)
    signal.signal(signal.SIGUSR1, begin_counting)
    signal.signal(signal.SIGUSR2, write)


if __name__ == "__main__":
    count_into(Path(sys.argv.pop(1)))
    main()
