"""The ids and keys of data files as key runs (key_hash.py): hash -> file << 32 | row.

The task that writes files gathers their keys while it has the rows, and puts a run of them into `_keys`: of all its
files one, under a name of its own. The run names the files it speaks of, so no attach need name the run.
"""

from __future__ import annotations

import uuid

import pyarrow as pa

from timeball.key_hash import KeyRun, Pairs, hash_keys, joined

KEYS = "_keys"  # the folder, in the table's; Delta tools leave those that begin with '_' alone
SUFFIX = ".keys"
RUN_PAIRS = 1 << 20  # a writer begins another run behind so many: they are sorted in memory
HASHED_ROWS = 65_536
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


class FileKeys:
    """Gathers the keys of files, one after the other."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._parts: list[Pairs] = []
        self.pairs = 0

    def add(self, path: str, unique_key: pa.ChunkedArray, keys: pa.ChunkedArray) -> None:
        """Add the keys of all rows of a file, in the order of its rows."""
        # Some at a time: to hash a key takes several times its memory.
        for at in range(0, len(unique_key), HASHED_ROWS):
            some = (_one_chunk(column.slice(at, HASHED_ROWS)) for column in (unique_key, keys))
            hashes, rows = hash_keys(*some)
            self._parts.append((hashes, rows + at | len(self._paths) << ROW_BITS))
            self.pairs += len(rows)
        self._paths.append(path)

    @property
    def is_full(self) -> bool:
        """Return whether what comes next should go to another run."""
        return self.pairs >= RUN_PAIRS

    @property
    def has_files(self) -> bool:
        """Return whether there is anything to write; a file without keys is spoken of, too."""
        return bool(self._paths)

    def run(self) -> KeyRun:
        """Return the run of all that was added."""
        return KeyRun.build(*joined(self._parts), self._paths)

    def clear(self) -> None:
        """Begin another run."""
        self._paths, self._parts, self.pairs = [], [], 0


def run_path() -> str:
    """Return a fresh path for a run, relative to the table: a task that is repeated overwrites nothing."""
    return f"{KEYS}/{uuid.uuid4().hex}{SUFFIX}"


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)
