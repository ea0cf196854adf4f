"""The memory that this process has taken from malloc and not returned. Only this includes Arrow's objects."""

from __future__ import annotations

import ctypes
import gc

import pytest

_NAMES = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]


class _Counts(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def allocated_bytes() -> int:
    """Return the used bytes of all arenas. Skips the test if the C library does not count them."""
    counts = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if counts is None:
        pytest.skip("the C library has no mallinfo2")
    gc.collect()
    counts.restype = _Counts
    used = counts()
    return int(used.uordblks) + int(used.hblkhd)
