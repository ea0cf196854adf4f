"""`timeball` on a disk that can hang: `python -m tests.cluster.stalled serve …`.

While the file that STALLED names exists, no fdatasync returns. Threads that do not sync go on, as with a real disk.
"""

from __future__ import annotations

import os
import time

from timeball.cli.main import main

STALLED = "STALLED"
POLL_S = 0.01


def hang(path: str) -> None:
    """Let each fdatasync of this process wait while the file exists."""
    sync = os.fdatasync

    def wait_and_sync(fd: int) -> None:
        while os.path.exists(path):
            time.sleep(POLL_S)
        sync(fd)

    os.fdatasync = wait_and_sync


if __name__ == "__main__":
    hang(os.environ[STALLED])
    main()
