"""A siege of each kind of state (kinds_of_state.py) whose broker loses the power of its disk.

A cut comes at a random moment after a number of answers to one kind of client. The kinds take turns, so each has an
equal part of the cuts. All other clients are in the middle of their work.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.crash.checker import Fault
from tests.crash.kinds_of_state import StatefulSiege
from tests.crash.loop_disk import LoopDisk
from tests.crash.siege import LATE_LOADING, BrokerProcess

MORE_EVENTS_MAX = 4  # of one kind, until the cut
MOMENT_S = 0.03  # and at most so long after the last of them

# `timeball` whose pushes are repeated within seconds after a cut.
SHORT_PUSHES = f"""
from timeball.edges.push import worker
worker.LEASE_SLACK_MS = 1_000
{LATE_LOADING}
"""
PROGRAM = [sys.executable, "-c", SHORT_PUSHES]


class PoweredBroker(BrokerProcess):
    """`timeball serve` on a disk whose power goes with the process."""

    def __init__(self, disk: LoopDisk, options: dict[str, str], program: Sequence[str]) -> None:
        super().__init__(disk.folder / "data", options, program)
        self._disk = disk
        self.on_power: Callable[[], None] = lambda: None  # called before it goes, and before it comes back

    def kill(self) -> None:
        """Cut the power, end the process, and mount the disk again.

        The process is stopped first: a sync that is under way during the ioctl may return without an error.
        """
        assert self._process is not None
        self.on_power()
        os.kill(self._process.pid, signal.SIGSTOP)
        self._disk.cut()
        super().kill()
        self.on_power()
        self._disk.restore()


class PowerSiege(StatefulSiege):
    """One broker, on one disk."""

    def __init__(
        self, disk: LoopDisk, seed: int, ack_save_ms: int = 0, program: Sequence[str] = PROGRAM
    ) -> None:
        super().__init__(disk.folder, seed, ack_save_ms)
        self.broker: PoweredBroker = PoweredBroker(disk, self.options, program)
        self.broker.on_power = self.change_life
        self.cuts: Counter[str] = Counter()
        self._copy = disk.folder.with_name("copy")

    def cut(self, kind: str) -> None:
        """Cut the power after some more events of a kind, and start again."""
        count, moment_s = int(self._rng.integers(MORE_EVENTS_MAX + 1)), float(self._rng.uniform(0, MOMENT_S))
        self.moments.append(f"{count} more of {kind}, and {moment_s:.3f} s")
        target = self.counts[kind] + count
        self.until(lambda: self.counts[kind] >= target, self.moments[-1])
        threading.Event().wait(moment_s)
        self.strike()
        self.cuts[kind] += 1

    def compared(self, data: Path, schedule: str = "hour_log") -> list[Fault]:
        """Compare a copy of the folder, because this process may keep a file that it opens mapped."""
        if data.exists():  # without syncs it does not
            shutil.copytree(data, self._copy)
        return super().compared(self._copy, schedule)
