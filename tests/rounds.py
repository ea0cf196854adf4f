"""How often a fault is repeated: some times by CI, and as often as docs/ and the bars say by `make siege`."""

from __future__ import annotations

import os

IS_SIEGE = bool(os.environ.get("TIMEBALL_SIEGE"))  # set by the Makefile


def rounds(some: int, every: int) -> int:
    """Return `some`, or `every` in a siege; a test that asks carries the marker `siege`."""
    return every if IS_SIEGE else some
