"""Who waits, as two int64 a promise: sorted runs of (due_ms, seq), merged as they grow.

The tail of `hour_log` and the cancelled set are both this. New pairs form small runs; when there are too many
the smaller half is merged, so that each pair is sorted O(log n) times in its life, always as a column.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from timeball.message import Int64Array
from timeball.table.data_file import search

RUNS_MAX = 24

_EMPTY = np.empty(0, np.int64)


class DueIndex:
    """A set of (due_ms, seq) pairs."""

    def __init__(self) -> None:
        self._runs: list[tuple[Int64Array, Int64Array]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Add pairs in any order; they must not be present."""
        if len(due_ms) == 0:
            return
        self._runs.append(_sorted(due_ms, seq))
        self._size += len(due_ms)
        if len(self._runs) > RUNS_MAX:
            self._merge()

    def min_due_ms(self) -> int | None:
        """The earliest instant."""
        return min((int(due[0]) for due, _ in self._runs), default=None)

    def count_before(self, due_ms: int) -> int:
        """Pairs with an instant before `due_ms`."""
        return sum(int(np.searchsorted(due, due_ms)) for due, _ in self._runs)

    def pop_before(self, due_ms: int, seq: int) -> tuple[Int64Array, Int64Array]:
        """Take out all pairs < (due_ms, seq), sorted."""
        parts = []
        kept = []
        for due, seqs in self._runs:
            cut = search(due, seqs, (due_ms, seq))
            if cut:
                parts.append((due[:cut], seqs[:cut]))
            if cut < len(due):
                kept.append((due[cut:], seqs[cut:]))
        self._runs = kept
        popped = _concat(parts)
        self._size -= len(popped[0])
        return popped

    def between(self, low: tuple[int, int], high: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
        """Pairs in [low, high), sorted, left in place."""
        parts = []
        for due, seqs in self._runs:
            begin, end = search(due, seqs, low), search(due, seqs, high)
            parts.append((due[begin:end], seqs[begin:end]))
        return _concat(parts)

    def drop_seqs_below(self, seq: int) -> None:
        """Forget pairs of sequence numbers below `seq`."""
        self._filter(-(1 << 62), 1 << 62, lambda seqs: seqs >= seq)

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these pairs are present."""
        found = np.zeros(len(seq), dtype=np.bool_)
        if self._size == 0 or len(seq) == 0:
            return found
        low, high = int(due_ms.min()), int(due_ms.max())
        for due, seqs in self._runs:
            begin, end = np.searchsorted(due, low), np.searchsorted(due, high, side="right")
            if end > begin:
                found |= np.isin(seq, seqs[begin:end])
        return found

    def remove(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """Forget these pairs, present or not."""
        if self._size and len(seq):
            self._filter(int(due_ms.min()), int(due_ms.max()), lambda seqs: ~np.isin(seqs, seq))

    def pairs(self) -> tuple[Int64Array, Int64Array]:
        """All pairs, sorted."""
        return _concat(self._runs)

    def _filter(self, low: int, high: int, keep: Callable[[Int64Array], npt.NDArray[np.bool_]]) -> None:
        """Keep of the runs that touch the instants [low, high] only what `keep` says of their seqs."""
        runs = []
        for due, seqs in self._runs:
            if due[0] <= high and due[-1] >= low:
                mask = keep(seqs)
                due, seqs = due[mask], seqs[mask]
            if len(due):
                runs.append((due, seqs))
        self._runs = runs
        self._size = sum(len(due) for due, _ in runs)

    def _merge(self) -> None:
        self._runs.sort(key=lambda run: len(run[0]))
        half = len(self._runs) - RUNS_MAX // 4
        self._runs = [_concat(self._runs[:half]), *self._runs[half:]]


def _sorted(due: Int64Array, seq: Int64Array) -> tuple[Int64Array, Int64Array]:
    order = np.lexsort((seq, due))
    return due[order], seq[order]


def _concat(runs: list[tuple[Int64Array, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    if not runs:
        return _EMPTY, _EMPTY
    if len(runs) == 1:
        return runs[0]
    return _sorted(np.concatenate([due for due, _ in runs]), np.concatenate([seq for _, seq in runs]))
