"""The live files between two changes of the table, with their bounds as columns.

A look-up by number must find the files, among thousands, that may contain it. With columns this takes microseconds,
file by file milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry


class FileSet:
    """An immutable set of live files. An attach makes a new one."""

    def __init__(self, entries: Iterable[FileEntry]) -> None:
        self.entries = tuple(entries)
        self._by_path = {entry.path: entry for entry in self.entries}
        bounds = [(e.min_seq, e.max_seq, e.min_due_ms, e.max_due_ms) for e in self.entries]
        self._min_seq, self._max_seq, self._min_due, self._max_due = (
            np.array(bounds, np.int64).reshape(-1, 4).T
        )

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, path: str) -> FileEntry | None:
        """Get the live file with this path, or None."""
        return self._by_path.get(path)

    def with_seqs(self, seq: Int64Array) -> list[FileEntry]:
        """List the files that may contain one of these numbers."""
        seq = np.sort(seq)
        low = np.searchsorted(seq, self._min_seq, side="left")
        high = np.searchsorted(seq, self._max_seq, side="right")
        return [self.entries[at] for at in np.flatnonzero(high > low).tolist()]

    def with_pairs(self, due_ms: Int64Array, seq: Int64Array) -> list[tuple[FileEntry, Int64Array]]:
        """List the files that may contain some of these (due time, number) pairs, each with its pairs' indexes."""
        found: dict[int, list[int]] = {}
        for place, (due, number) in enumerate(zip(due_ms.tolist(), seq.tolist(), strict=True)):
            may = (self._min_seq <= number) & (number <= self._max_seq)
            may &= (self._min_due <= due) & (due <= self._max_due)
            for at in np.flatnonzero(may).tolist():
                found.setdefault(at, []).append(place)
        return [(self.entries[at], np.array(places, np.int64)) for at, places in found.items()]
