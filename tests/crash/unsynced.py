"""`timeball` on a disk that syncs nothing: `python -m tests.crash.unsynced serve …`.

Each fsync and fdatasync returns at once. The bytes stay in the page cache until the kernel writes them.
"""

from __future__ import annotations

import os

from timeball.cli.main import main


def check_descriptor(descriptor: int) -> None:
    """Return, or raise for a descriptor that is closed, as a sync would."""
    os.fstat(descriptor)


if __name__ == "__main__":
    os.fsync = os.fdatasync = check_descriptor
    main()
