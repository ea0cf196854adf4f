"""The ids and keys of data files as key runs (key_hash.py): hash -> file << 32 | row.

The task that writes files collects their keys while it has the rows in memory. It then writes one run for all its files
into `_keys`, under a new name. The run names its files, so no attach need name the run.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from timeball.model.key_hash import KeyRun, Pairs, hash_keys, joined
from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry

KEYS = "_keys"  # folder inside the table's; Delta tools ignore names that begin with '_'
SUFFIX = ".keys"
RUN_PAIRS = 1 << 20  # a writer begins another run after so many pairs, because they are sorted in memory
HASHED_ROWS = 65_536
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


class FileKeys:
    """Collects the keys of files, one file after the other."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._parts: list[Pairs] = []
        self.pairs = 0

    def add(self, path: str, unique_key: pa.ChunkedArray, keys: pa.ChunkedArray) -> None:
        """Add the keys of all rows of a file, in the order of its rows."""
        # In slices: hashing a key takes several times its memory.
        for at in range(0, len(unique_key), HASHED_ROWS):
            some = (_one_chunk(column.slice(at, HASHED_ROWS)) for column in (unique_key, keys))
            hashes, rows = hash_keys(*some)
            self._parts.append((hashes, rows + at | len(self._paths) << ROW_BITS))
            self.pairs += len(rows)
        self._paths.append(path)

    @property
    def is_full(self) -> bool:
        """True when the next file should go to another run."""
        return self.pairs >= RUN_PAIRS

    @property
    def has_files(self) -> bool:
        """True when there is anything to write. Files without keys are also listed in a run."""
        return bool(self._paths)

    def run(self) -> KeyRun:
        """Build the run of all pairs added."""
        return KeyRun.build(*joined(self._parts), self._paths)

    def clear(self) -> None:
        """Begin another run."""
        self._paths, self._parts, self.pairs = [], [], 0


def run_path() -> str:
    """Make a new path for a run, relative to the table. It is random, so a repeated task overwrites nothing."""
    return f"{KEYS}/{uuid.uuid4().hex}{SUFFIX}"


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)


# The live files between two changes of the table, with their bounds as columns.
#
# A look-up by number must find the files, among thousands, that may contain it. With columns this takes microseconds,
# file by file milliseconds.


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
