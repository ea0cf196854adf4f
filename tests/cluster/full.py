"""`timeball` on a disk that can be full: `python -m tests.cluster.full serve …`.

While the file that FULL names exists, no file gets longer and no more blocks are allocated. Blocks that a file has can
be overwritten, as on a real disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

from timeball.cli.main import main

FULL = "FULL"
BLOCK_BYTES = 512  # of st_blocks


class Usage(NamedTuple):
    """As of shutil.disk_usage."""

    total: int
    used: int
    free: int


def fill(is_full: Callable[[int], bool]) -> list[tuple[object, str, Any]]:
    """Return the functions to replace, so that the disk of each file descriptor for which `is_full` holds is full."""
    allocate, write, usage = os.posix_fallocate, os.pwrite, shutil.disk_usage

    def posix_fallocate(fd: int, offset: int, size_bytes: int) -> None:
        if is_full(fd) and os.fstat(fd).st_blocks * BLOCK_BYTES < offset + size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, size_bytes)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if is_full(fd) and os.fstat(fd).st_size < offset + len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    def disk_usage(path: Any) -> Any:
        fd = os.open(path, os.O_RDONLY)
        try:
            return Usage(1, 1, 0) if is_full(fd) else usage(path)
        finally:
            os.close(fd)

    return [
        (os, "posix_fallocate", posix_fallocate),
        (os, "pwrite", pwrite),
        (shutil, "disk_usage", disk_usage),
    ]


if __name__ == "__main__":
    path = os.environ[FULL]
    for module, name, function in fill(lambda fd: os.path.exists(path)):
        setattr(module, name, function)
    main()
