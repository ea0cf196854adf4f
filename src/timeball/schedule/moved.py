"""Which promises are due at another instant than their first: number -> (due_ms, version), the newest.

The schedule knows a promise by its instant and its version, a caller by its number. Of most promises version and number
are the same; the others are here, each with its newest version. The log says so in MOVED rows, but retention lets go
of these, while the promise may lie in a file of the pending table for months. A promise is forgotten when the last of
all its instants has passed: until then an old row of it may lie in a file, and must not be taken for the promise.

A cache: the log and the checkpoint say it all. It costs 32 bytes a promise; the latest ones are held as objects,
because a move must not cost a walk through all that came before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from timeball.message import Int64Array

RECENT_MAX = 16_384
FAR_MS = 1 << 62

_NONE = np.empty(0, np.int64)
# number, due_ms, version, until_ms; sorted by number, each number once
Columns = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


class Moved:
    """The moves that are remembered. Belongs to the event loop; `newest` may be asked in any thread."""

    def __init__(self) -> None:
        # Replaced whole and never changed, so that a thread which reads its columns reads them of one length.
        self._older: Columns = (_NONE, _NONE, _NONE, _NONE)
        self._recent: dict[int, tuple[int, int, int]] = {}  # number -> (due_ms, version, until_ms)
        self._first_until_ms = FAR_MS

    def __len__(self) -> int:
        self._merge()
        return len(self._older[0])

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Remember these moves, (due_ms, number, version, from_due_ms): the last one of a number counts."""
        for due_ms, number, version, from_due_ms in rows:
            known = self._find(number)
            until_ms = max(due_ms, from_due_ms, -FAR_MS if known is None else known[2])
            self._recent[number] = (due_ms, version, until_ms)
            self._first_until_ms = min(self._first_until_ms, until_ms)
        if len(self._recent) > RECENT_MAX:
            self._merge()

    def newest(self, number: int) -> tuple[int, int] | None:
        """Return the newest (due_ms, version) of a promise; None for one that was not moved, or is forgotten."""
        known = self._find(number)
        return None if known is None else known[:2]

    def last_due_ms(self, first: int, rows: int) -> int:
        """Return the latest newest instant of the promises first, first + 1, …; 0 when none of them was moved."""
        numbers, due_ms, *_ = self._older
        begin, end = np.searchsorted(numbers, [first, first + rows])
        last_ms = int(due_ms[begin:end].max()) if begin < end else 0
        recent = self._recent
        moved = range(first, first + rows) if rows < len(recent) else recent
        return max([last_ms, *(recent[n][0] for n in moved if n in recent and first <= n < first + rows)])

    def newest_of(self, due_ms: Int64Array, number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (due_ms, version) of many promises, of which these are the first instants."""
        due_ms, version = due_ms.copy(), number.copy()
        numbers, *newest, _ = self._older
        if len(numbers):
            at = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
            was_moved = numbers[at] == number
            due_ms[was_moved], version[was_moved] = (column[at[was_moved]] for column in newest)
        for at_row, each in enumerate(number.tolist()) if self._recent else ():
            if each in self._recent:
                due_ms[at_row], version[at_row], _ = self._recent[each]
        return due_ms, version

    def forget_before(self, due_ms: int) -> None:
        """Forget those of which no instant is left at or after this one: they are settled."""
        # Asked at every step of the mark, so the usual answer, nothing to forget, must cost one comparison.
        if self._first_until_ms >= due_ms:
            return
        self._merge()
        kept = self._older[3] >= due_ms
        numbers, due, versions, until = (column[kept] for column in self._older)
        self._older = numbers, due, versions, until
        self._first_until_ms = int(until.min()) if len(until) else FAR_MS

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return all as `add` takes them, for the checkpoint; the last instant of each stands for the one before."""
        self._merge()
        numbers, due, versions, until = (column.tolist() for column in self._older)
        return list(zip(due, numbers, versions, until, strict=True))

    def _find(self, number: int) -> tuple[int, int, int] | None:
        recent = self._recent.get(number)
        if recent is not None:
            return recent
        numbers, due_ms, versions, until_ms = self._older
        at = int(np.searchsorted(numbers, number))
        if at == len(numbers) or numbers[at] != number:
            return None
        return int(due_ms[at]), int(versions[at]), int(until_ms[at])

    def _merge(self) -> None:
        if not self._recent:
            return
        fresh = [(number, *found) for number, found in self._recent.items()]
        # The fresh ones first: of a number that is there twice `unique` takes the first.
        rows = np.concatenate([np.array(fresh, dtype=np.int64), np.stack(self._older, axis=1)])
        _, at = np.unique(rows[:, 0], return_index=True)
        rows = rows[at]
        # In this order: a thread that asks meanwhile finds them in one place or in both.
        self._older = (rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), rows[:, 3].copy())
        self._recent = {}
