"""`timeball` on a disk that can hang or fail: `python -m tests.cluster.stalled serve …`.

While the file that STALLED names exists, no fdatasync returns. Threads that do not sync go on, as with a real disk. If
the file contains FAILS, each fdatasync fails instead.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from timeball.cli.main import main

STALLED = "STALLED"
FAILS = "fails"
POLL_S = 0.01


def hang(path: str) -> None:
    """Let each fdatasync of this process wait, or fail, while the file exists."""
    sync = os.fdatasync

    def wait_and_sync(fd: int) -> None:
        while os.path.exists(path):
            if Path(path).read_text() == FAILS:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(POLL_S)
        sync(fd)

    os.fdatasync = wait_and_sync


if __name__ == "__main__":
    hang(os.environ[STALLED])
    main()
