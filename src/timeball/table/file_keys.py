"""Index the ids and keys of data files as key runs (key_hash.py), and find files by their bounds.

A key run is a sorted list of pairs: the hash of a key, and the position of its row as `file << 32 | row`. The task that
writes data files collects their keys while it has the rows in memory. It then writes one run for all its files into
`_keys`, under a new name. The run lists the names of its files, so an attach does not have to name the run.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from timeball.model.key_hash import KeyRun, Pairs, hash_keys, joined
from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry

KEYS = "_keys"  # folder inside the table's folder; Delta tools ignore names that begin with '_'
SUFFIX = ".keys"
RUN_PAIRS = 1 << 20  # a writer ends a run at this size, because its pairs are sorted in memory
HASHED_ROWS = 65_536  # rows hashed at a time
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


class FileKeys:
    """Collects the (hash, position) pairs of data files, one file after the other, for one key run."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._pairs_of_files: list[Pairs] = []
        self.pairs = 0

    def add(self, path: str, unique_key: pa.ChunkedArray, keys: pa.ChunkedArray) -> None:
        """Add the keys of all rows of a file. `unique_key`, `keys`: its columns, in the order of its rows."""
        # In slices, because hashing needs several times the memory of the keys.
        for begin in range(0, len(unique_key), HASHED_ROWS):
            columns = (_one_chunk(column.slice(begin, HASHED_ROWS)) for column in (unique_key, keys))
            hashes, rows = hash_keys(*columns)
            # The index of the file is in the high bits, the index of the row in the low bits.
            self._pairs_of_files.append((hashes, rows + begin | len(self._paths) << ROW_BITS))
            self.pairs += len(rows)
        self._paths.append(path)

    @property
    def is_full(self) -> bool:
        """True when the next file should go to another run."""
        return self.pairs >= RUN_PAIRS

    @property
    def has_files(self) -> bool:
        """True when there is a run to write. A run also lists files without keys."""
        return bool(self._paths)

    def run(self) -> KeyRun:
        """Build the key run of all files added."""
        return KeyRun.build(*joined(self._pairs_of_files), self._paths)

    def clear(self) -> None:
        """Begin another run."""
        self._paths, self._pairs_of_files, self.pairs = [], [], 0


def run_path() -> str:
    """Make a random path for a run, relative to the table. A repeated task overwrites nothing."""
    return f"{KEYS}/{uuid.uuid4().hex}{SUFFIX}"


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


# ---- the live files, searched by their bounds ----------------------------------------------------------------
# A look-up by sequence number must find, among thousands of files, those that may contain it. With the bounds in
# columns this takes microseconds, file by file milliseconds.


class FileSet:
    """An immutable set of live files, with their bounds as columns. Each attach makes a new set."""

    def __init__(self, entries: Iterable[FileEntry]) -> None:
        self.entries = tuple(entries)
        self._by_path = {entry.path: entry for entry in self.entries}
        bounds = [(file.min_seq, file.max_seq, file.min_due_ms, file.max_due_ms) for file in self.entries]
        self._min_seq, self._max_seq, self._min_due, self._max_due = (
            np.array(bounds, np.int64).reshape(-1, 4).T
        )

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, path: str) -> FileEntry | None:
        """Get the live file with this path, or None."""
        return self._by_path.get(path)

    def with_seqs(self, seq: Int64Array) -> list[FileEntry]:
        """List the files that may contain at least one of these sequence numbers, by their bounds."""
        seq = np.sort(seq)
        first_match = np.searchsorted(seq, self._min_seq, side="left")
        matches_end = np.searchsorted(seq, self._max_seq, side="right")
        return [self.entries[index] for index in np.flatnonzero(matches_end > first_match).tolist()]

    def with_pairs(self, due_ms: Int64Array, seq: Int64Array) -> list[tuple[FileEntry, Int64Array]]:
        """List the files that may contain some of these (due time, sequence number) pairs, by their bounds.

        Returns (file, indexes of the pairs that it may contain).
        """
        matches: dict[int, list[int]] = {}
        for pair_index, (due, number) in enumerate(zip(due_ms.tolist(), seq.tolist(), strict=True)):
            may_contain = (self._min_seq <= number) & (number <= self._max_seq)
            may_contain &= (self._min_due <= due) & (due <= self._max_due)
            for file_index in np.flatnonzero(may_contain).tolist():
                matches.setdefault(file_index, []).append(pair_index)
        return [
            (self.entries[file_index], np.array(pair_indexes, np.int64))
            for file_index, pair_indexes in matches.items()
        ]
