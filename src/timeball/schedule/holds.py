"""Messages that paused campaigns hold: ranges of numbers, each from a due time on.

A held message is pending, even below the mark, and is not loaded. Messages due before the start of the hold had been
settled (released or cancelled) when it began. So a pause needs memory for its ranges but not for its rows, and the mark
moves on meanwhile.

This is a cache. The META rows of the campaigns contain the same data (broker/registry/campaigns.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from timeball.model.message import Int64Array
from timeball.schedule.due_index import FAR_MS

# (first_seq, rows) of each range, and the due time from which the hold applies.
Hold = tuple[Sequence[tuple[int, int]], int]

_NONE = np.empty(0, np.int64)


class Holds:
    """The current holds by name. Changed on the event loop. `contains` may be called in any thread."""

    def __init__(self) -> None:
        self._by_name: dict[str, Hold] = {}
        # (first_seq, end_seq, from_ms), sorted by first number. Each range is reserved once, so ranges do not overlap.
        self._bounds = (_NONE, _NONE, _NONE)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def from_ms(self) -> int:
        """The earliest due time from which messages are held. FAR_MS if there are no holds."""
        return min((from_ms for _, from_ms in self._by_name.values()), default=FAR_MS)

    def add(self, name: str, ranges: Sequence[tuple[int, int]], from_ms: int) -> None:
        """Hold the pending messages of these ranges that are due at `from_ms` or later."""
        self._by_name[name] = ranges, from_ms
        self._keep_bounds()

    def remove(self, name: str) -> None:
        """End the hold `name`. Does nothing if there is no such hold."""
        self._by_name.pop(name, None)
        self._keep_bounds()

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the messages that are held. A held message is still settled if its pair is stored."""
        # Read the tuple once: the event loop may replace it while another thread is here.
        first_seq, end_seq, from_ms = self._bounds
        if not len(first_seq):
            return np.zeros(len(seq), np.bool_)
        # Ranges do not overlap, so only the last range that begins at or before a number can contain it.
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
