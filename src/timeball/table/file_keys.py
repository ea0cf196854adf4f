"""The ids and keys of data files as key runs (key_hash.py): hash -> file << 32 | row.

The task that writes files collects their keys while it has the rows in memory. It then writes one run for all its files
into `_keys`, under a new name. The run names its files, so no attach need name the run.
"""

from __future__ import annotations

import uuid

import pyarrow as pa

from timeball.model.key_hash import KeyRun, Pairs, hash_keys, joined

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
