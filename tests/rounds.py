"""The number of repetitions of a fault: some by CI, and as many as docs/ and the bars name by `make siege`.

A test that takes minutes, and whose fault a shorter test of CI finds too, runs in a siege alone.
"""

from __future__ import annotations

import os

import pytest

IS_SIEGE = bool(os.environ.get("TIMEBALL_SIEGE"))  # set by the Makefile

only_in_a_siege = pytest.mark.skipif(not IS_SIEGE, reason="only in a siege")  # beside the marker `siege`


def rounds(some: int, every: int) -> int:
    """Return `some`, or `every` in a siege. A test that calls this has the marker `siege`."""
    return every if IS_SIEGE else some
