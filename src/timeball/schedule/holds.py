"""Promises that paused campaigns hold: ranges of numbers, each from an instant on.

A held promise waits, even below the mark, and is not loaded. Promises due before the instant of the
hold had been settled when it began. So a pause costs its ranges and no row, and the mark moves on meanwhile.

A cache: the META rows of the campaigns say it all (broker/registry/campaigns.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from timeball.message import Int64Array
from timeball.schedule.due_index import FAR_MS

Hold = tuple[Sequence[tuple[int, int]], int]  # (first_seq, rows) of each range, and the instant

_NONE = np.empty(0, np.int64)


class Holds:
    """Changed on the event loop; `contains` may be asked in any thread, as it reads the bounds once."""

    def __init__(self) -> None:
        self._by_name: dict[str, Hold] = {}
        # Sorted by first number: (first_seq, end_seq, from_ms). Ranges are given out once, so none overlaps another.
        self._bounds = (_NONE, _NONE, _NONE)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def from_ms(self) -> int:
        """Return the earliest instant from which promises are held; FAR_MS without any."""
        return min((from_ms for _, from_ms in self._by_name.values()), default=FAR_MS)

    def add(self, name: str, ranges: Sequence[tuple[int, int]], from_ms: int) -> None:
        """Hold promises of these ranges that wait and are due at `from_ms` or later."""
        self._by_name[name] = ranges, from_ms
        self._keep_bounds()

    def remove(self, name: str) -> None:
        """Hold the promises of this name no longer; nothing happens when none are held."""
        self._by_name.pop(name, None)
        self._keep_bounds()

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these promises are held, unless they are settled by name."""
        # One read of the tuple: another thread may ask while the loop replaces it.
        first_seq, end_seq, from_ms = self._bounds
        if not len(first_seq):
            return np.zeros(len(seq), np.bool_)
        # Ranges do not overlap, so only the one that begins last before a number can hold it.
        at = np.searchsorted(first_seq, seq, side="right") - 1
        return np.asarray((at >= 0) & (seq < end_seq[at]) & (due_ms >= from_ms[at]))

    def _keep_bounds(self) -> None:
        rows = sorted(
            (first_seq, first_seq + rows, from_ms)
            for ranges, from_ms in self._by_name.values()
            for first_seq, rows in ranges
        )
        first_seq, end_seq, from_ms = np.array(rows, np.int64).reshape(-1, 3).T
        self._bounds = first_seq, end_seq, from_ms
