"""How often a fault is repeated: some times by CI, and as often as docs/ and the bars say by `make siege`.

A test that takes minutes, and whose fault a shorter test of CI finds too, runs in a siege alone.
"""

from __future__ import annotations

import os

import pytest

IS_SIEGE = bool(os.environ.get("TIMEBALL_SIEGE"))  # set by the Makefile

only_in_a_siege = pytest.mark.skipif(not IS_SIEGE, reason="only in a siege")  # beside the marker `siege`


def rounds(some: int, every: int) -> int:
    """Return `some`, or `every` in a siege; a test that asks carries the marker `siege`."""
    return every if IS_SIEGE else some
