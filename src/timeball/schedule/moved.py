"""Messages that got another due time after they were accepted: number -> newest (due_ms, version).

The schedule identifies a message by due time and version, a caller by its number. For most messages version and number
are equal. All others are stored here, each with its newest version. MOVED rows in the log contain the same data, but
retention removes them, while the message may stay in a file of the pending table for months. An entry is removed when
the last of all its due times has passed. Until then a file may contain an old row of the message, which only the entry
shows to be outdated.

This is a cache of the log and the checkpoint. It takes 32 bytes per message. The latest entries are Python objects,
because a move must not cost a pass over all earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from timeball.model.message import Int64Array
from timeball.schedule.due_index import FAR_MS

# Recent moves that are kept as Python objects before they are merged into the columns.
RECENT_MAX = 16_384

_NONE = np.empty(0, np.int64)
# number, due_ms, version, until_ms. Sorted by number, each number once.
Columns = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


class Moved:
    """All stored moves. Belongs to the event loop. `newest` may be called in any thread."""

    def __init__(self) -> None:
        # Replaced as a whole and never changed, so that another thread always reads columns of equal length.
        self._older: Columns = (_NONE, _NONE, _NONE, _NONE)
        self._recent: dict[int, tuple[int, int, int]] = {}  # number -> (due_ms, version, until_ms)
        # The earliest `until_ms`, the time from which an entry can be removed.
        self._first_until_ms = FAR_MS

    def __len__(self) -> int:
        self._merge()
        return len(self._older[0])

    def add(self, rows: Iterable[tuple[int, int, int, int]]) -> None:
        """Store moves (due_ms, number, version, from_due_ms). The last move of a number replaces earlier ones."""
        for due_ms, number, version, from_due_ms in rows:
            entry = self._find(number)
            # An old row may have any of the message's due times, so the entry is needed until the latest of them.
            until_ms = max(due_ms, from_due_ms, -FAR_MS if entry is None else entry[2])
            self._recent[number] = (due_ms, version, until_ms)
            self._first_until_ms = min(self._first_until_ms, until_ms)
        if len(self._recent) > RECENT_MAX:
            self._merge()

    def newest(self, number: int) -> tuple[int, int] | None:
        """Find the newest (due_ms, version) of a message. None if it was not moved, or if its entry was removed."""
        entry = self._find(number)
        return None if entry is None else entry[:2]

    def last_due_ms(self, first: int, rows: int) -> int:
        """Find the latest current due time of the moved messages among first, first + 1, …. 0 if there are none."""
        numbers, due_ms, *_ = self._older
        begin, end = np.searchsorted(numbers, [first, first + rows])
        last_ms = int(due_ms[begin:end].max()) if begin < end else 0
        recent = self._recent
        # The shorter of the range and the recent moves is scanned.
        moved = range(first, first + rows) if rows < len(recent) else recent
        return max(
            [
                last_ms,
                *(
                    recent[number][0]
                    for number in moved
                    if number in recent and first <= number < first + rows
                ),
            ]
        )

    def newest_of(self, due_ms: Int64Array, number: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Find the current (due_ms, version) of many messages, given their numbers and first due times."""
        due_ms, version = due_ms.copy(), number.copy()
        numbers, *newest, _ = self._older
        if len(numbers):
            indexes = np.minimum(np.searchsorted(numbers, number), len(numbers) - 1)
            was_moved = numbers[indexes] == number
            due_ms[was_moved], version[was_moved] = (column[indexes[was_moved]] for column in newest)
        for index, seq in enumerate(number.tolist()) if self._recent else ():
            if seq in self._recent:
                due_ms[index], version[index], _ = self._recent[seq]
        return due_ms, version

    def forget_before(self, due_ms: int) -> None:
        """Remove the entries whose due times are all before `due_ms`: they are settled (released or cancelled)."""
        # Called at every step of the mark. In the usual case, with nothing to remove, it must cost one comparison.
        if self._first_until_ms >= due_ms:
            return
        self._merge()
        kept = self._older[3] >= due_ms
        numbers, due, versions, until = (column[kept] for column in self._older)
        self._older = numbers, due, versions, until
        self._first_until_ms = int(until.min()) if len(until) else FAR_MS

    def rows(self) -> list[tuple[int, int, int, int]]:
        """List all entries in the form of `add`, for the checkpoint. `until_ms` takes the place of `from_due_ms`."""
        self._merge()
        numbers, due, versions, until = (column.tolist() for column in self._older)
        return list(zip(due, numbers, versions, until, strict=True))

    def _find(self, number: int) -> tuple[int, int, int] | None:
        """Find the (due_ms, version, until_ms) of a number. None if it was not moved."""
        recent = self._recent.get(number)
        if recent is not None:
            return recent
        numbers, due_ms, versions, until_ms = self._older
        index = int(np.searchsorted(numbers, number))
        if index == len(numbers) or numbers[index] != number:
            return None
        return int(due_ms[index]), int(versions[index]), int(until_ms[index])

    def _merge(self) -> None:
        """Merge the recent moves into the columns."""
        if not self._recent:
            return
        recent_rows = [(number, *entry) for number, entry in self._recent.items()]
        # The new entries come first, because `unique` takes the first of equal numbers.
        rows = np.concatenate([np.array(recent_rows, dtype=np.int64), np.stack(self._older, axis=1)])
        _, first_indexes = np.unique(rows[:, 0], return_index=True)
        rows = rows[first_indexes]
        # In this order, so that another thread finds an entry in one of the two or in both, but never in neither.
        self._older = (rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), rows[:, 3].copy())
        self._recent = {}
