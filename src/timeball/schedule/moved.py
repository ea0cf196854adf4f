"""Which promises go on under another number, until their old instants have passed: (instant, number, next number).

The log says so in a CANCEL row, but retention lets go of rows, while the old promise may lie in a file of the pending
table for months. Whoever names it then must not be told that it was cancelled, and no more. Of a chain of moves
the numbers in between may be forgotten first, so each of the others leads past them before they are.

A cache: the log and the checkpoint say it all. It costs 24 bytes a move; the latest ones are held as objects, because a
move must not cost a walk through all that came before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from timeball.message import Int64Array

RECENT_MAX = 16_384
FAR_MS = 1 << 62

_NONE = np.empty(0, np.int64)
Columns = tuple[Int64Array, Int64Array, Int64Array]  # due_ms, seq, next_seq, sorted by seq


class Moved:
    """The moves that are remembered. Belongs to the event loop; `next_of` may be asked in any thread."""

    def __init__(self) -> None:
        self._older: Columns = (_NONE, _NONE, _NONE)
        self._recent: dict[int, tuple[int, int]] = {}  # seq -> (due_ms, next_seq)
        self._first_due_ms = FAR_MS

    def __len__(self) -> int:
        return len(self._older[1]) + len(self._recent)

    def add(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Remember these moves, (due_ms, seq, next_seq)."""
        for due_ms, seq, next_seq in rows:
            self._recent[seq] = (due_ms, next_seq)
            self._first_due_ms = min(self._first_due_ms, due_ms)
        if len(self._recent) > RECENT_MAX:
            self._merge()

    def next_of(self, seq: int) -> int | None:
        """Return the number that it goes on under; None for what was not moved, or is forgotten."""
        recent = self._recent.get(seq)
        if recent is not None:
            return recent[1]
        _, known, leads_to = self._older
        at = int(np.searchsorted(known, seq))
        return int(leads_to[at]) if at < len(known) and known[at] == seq else None

    def forget_before(self, due_ms: int) -> None:
        """Forget the moves whose old instants have passed."""
        if self._first_due_ms >= due_ms:
            return
        self._merge()
        due, known, leads_to = self._older
        kept = due >= due_ms
        self._older = (due[kept], known[kept], _past_them_all(known, leads_to)[kept])
        self._first_due_ms = int(due[kept].min()) if kept.any() else FAR_MS

    def rows(self) -> list[tuple[int, int, int]]:
        """Return all moves, for the checkpoint."""
        self._merge()
        return list(zip(*(column.tolist() for column in self._older), strict=True))

    def _merge(self) -> None:
        if not self._recent:
            return
        fresh = [(due_ms, seq, next_seq) for seq, (due_ms, next_seq) in self._recent.items()]
        columns = np.concatenate([np.stack(self._older, axis=1), np.array(fresh, dtype=np.int64)])
        columns = columns[np.argsort(columns[:, 1], kind="stable")]
        # In this order: whoever asks meanwhile finds them in one place or in both.
        self._older = (columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())
        self._recent = {}


def _past_them_all(seq: Int64Array, next_seq: Int64Array) -> Int64Array:
    """Return where each chain ends, as far as these know; a step is twice as long as the one before it."""
    while len(seq):
        at = np.minimum(np.searchsorted(seq, next_seq), len(seq) - 1)
        goes_on = seq[at] == next_seq
        if not goes_on.any():
            break
        next_seq = np.where(goes_on, next_seq[at], next_seq)
    return next_seq
