"""Memory that is in use while brokers are measured, as on a machine that has served for a while.

A virtual machine may report its free memory to the host, which takes it back. Whoever touches the next page of it pays
for that: 11 us in place of 2.4 for 4 KiB on Firecracker (docs/decisions/0077). That is the broker that happens to grow:
the CPU of one row moved by three times from round to round. Where the page cache has all memory, a page that is needed
is taken from there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil

FREE_BYTES = 512 * 1024 * 1024  # left free: the kernel begins to reclaim at less
STEP_BYTES = 64 * 1024 * 1024


class PageCache:
    """Pages of a file that has no blocks on the disk: reading it fills memory, and nothing else."""

    def __init__(
        self, folder: Path, free_bytes: Callable[[], int] = lambda: psutil.virtual_memory().free
    ) -> None:
        """`free_bytes` says how much memory is in no use now."""
        self._free_bytes = free_bytes
        self._file = os.open(folder / "page-cache", os.O_RDWR | os.O_CREAT)
        self._steps = psutil.virtual_memory().available // STEP_BYTES
        os.truncate(self._file, self._steps * STEP_BYTES)
        self._buffer = bytearray(STEP_BYTES)
        # The kernel drops the pages that were read first, so these are the next to be read again.
        self._step = 0

    def fill(self) -> int:
        """Have memory in use, but for FREE_BYTES; return how many bytes were read for it."""
        for steps in range(self._steps):
            if self._free_bytes() <= FREE_BYTES:
                return steps * STEP_BYTES
            os.preadv(self._file, [self._buffer], self._step * STEP_BYTES)
            self._step = (self._step + 1) % self._steps
        return self._steps * STEP_BYTES

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)
