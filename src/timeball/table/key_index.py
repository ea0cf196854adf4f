"""Look-ups of rows of the pending table by id, key or number, across any number of files.

    runs      sorted runs of the keys of files (file_keys.py), in `pending/_keys`; a look-up reads a block of each
    cover     runs left by writers are opened; files that no run lists are read, and their keys become a run
    merge     runs of similar size become one, without the pairs of files that have left the table

The runs are a cache: the log lists the live files, and the files contain the keys. A run is used as far as it lists
live files. If one is missing or damaged, it is rebuilt from the files. So the steps of a merge need no particular
order: if the new run, the old ones or all of them exist, the result is the same.

A look-up by key reads small blocks of the files (identities.py), and files that were read this way stay mapped. For
other look-ups the most recently used files stay open, because parsing a footer costs more than the look-up. These open
files are not shared, because Arrow's reader fails when two threads use it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.io.files import Files, no_room_to_sync
from timeball.model.errors import Corrupt, OverLimit
from timeball.model.key_hash import KeyRun, Pairs, UInt64Array, encode, merge
from timeball.model.message import Int64Array
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile, DataFiles
from timeball.table.file_cache import FileCache, Ranged
from timeball.table.file_keys import ROW_BITS, ROW_MASK, FileKeys, FileSet, run_path
from timeball.table.identities import ID_SCHEMA, Identities, Row
from timeball.table.layout import FOLDER, KEYS_FOLDER

logger = logging.getLogger(__name__)

RUNS_MIN = 6  # similar runs before they are merged: each pair is then written O(log n) times
RUNS_MAX = 256  # most runs merged at once
# Runs count as similar if the largest has at most this multiple of the smallest's pairs.
SIZE_RATIO = 8
SMALL_PAIRS = 65_536  # smaller runs count as having this size
# Files whose identities stay mapped, 1.5 KB each: mapping a file takes as long as reading two rows.
MAPPED_FILES_MAX = 16_384
OPEN_GROUPS_MAX = 1_024  # row groups of the files that stay open: 14 KB each

_NO_ROWS = ID_SCHEMA.empty_table()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A run on disk. `name` is relative to the data folder."""

    name: str
    run: KeyRun


class TableKeys:
    """The keys of the live files. Blocking, any thread. `merge` runs beside look-ups.

    Other methods wait for each other.
    """

    def __init__(self, files: Files, cache: FileCache | None = None, data: DataFiles | None = None) -> None:
        """`cache`: set if the files, and the runs that their writers leave, are in an object store.

        `data`: reads the data files, if they are not read directly from `files`.
        """
        self._files, self._cache = files, cache
        self._data: DataFiles = (data or files) if cache is None else Ranged(cache)
        self._lock = threading.RLock()
        self._runs: tuple[_Stored, ...] = ()
        self._covered: FileSet | None = None  # the live files that the runs are known to list
        self._unreadable: set[str] = set()  # files with unreadable keys that are logged already
        self._open: OrderedDict[str, DataFile] = OrderedDict()  # the most recently used last
        self._open_groups = 0
        self._mapped: dict[str, Identities] = {}  # path -> identities of the files read by key

    # -- look-ups ------------------------------------------------------------------------------------------------

    def find_keys(self, live: FileSet, hashes: UInt64Array) -> list[Row]:
        """Find the identities of rows with a key whose hash is among `hashes`. The caller compares the texts.

        Raises Corrupt when a file cannot be read, NotFound when a file has left the table and is removed.
        """
        with self._lock:
            hits = self._hits(live, hashes)
        # Not for copies of a store's files, which are evicted.
        kept = self._mapped if self._cache is None else None
        found = list[Row]()
        for entry, places in hits:
            # Checked before each file, because a key may be in more files than may stay mapped. Several are dropped at
            # once.
            if len(self._mapped) >= MAPPED_FILES_MAX and entry.path not in self._mapped:
                for path in list(self._mapped)[: max(1, MAPPED_FILES_MAX // 8)]:
                    self._mapped.pop(path, None)
            found += DataFile(self._data, entry).identities_at(sorted(set(places)), kept)
        return found

    def find_seqs(self, live: FileSet, seq: Int64Array) -> pa.Table:
        """Find the identities of rows with these numbers. Reads the numbers of the files whose bounds admit them."""
        with self._lock:
            parts = [self._file(entry).find_seqs(seq) for entry in live.with_seqs(seq)]
        return pa.concat_tables(parts) if parts else _NO_ROWS

    def rows_of(self, live: FileSet, due_ms: Int64Array, seq: Int64Array) -> list[pa.Table]:
        """Read all columns of the rows with these due times and numbers: one table per file, in TABLE_SCHEMA."""
        with self._lock:
            return [
                self._file(entry).rows_of(due_ms[places], seq[places])
                for entry, places in live.with_pairs(due_ms, seq)
            ]

    def _hits(self, live: FileSet, hashes: UInt64Array) -> list[tuple[FileEntry, list[int]]]:
        while True:
            runs, hits = self._cover(live), defaultdict[str, list[int]](list)
            for stored in runs:
                try:
                    numbers = stored.run.find_numbers(hashes).tolist()
                except Corrupt as error:
                    logger.warning("keys of data files made again run=%s reason=%s", stored.name, error)
                    self._drop(stored)
                    break
                for number in numbers:
                    hits[stored.run.names[number >> ROW_BITS]].append(number & ROW_MASK)
            else:
                # A run may list files that have left, or that are not attached yet.
                return [(entry, hits[path]) for path in hits if (entry := live.get(path)) is not None]

    def _file(self, entry: FileEntry) -> DataFile:
        """Get a file, opened. Closes the least recently used ones."""
        if (file := self._open.get(entry.path)) and file.is_ranged and self._is_local(entry.path):
            self._close(entry.path)
        file = self._open.pop(entry.path, None)
        if file is None:
            file = DataFile(self._data, entry)
            file.check()
            self._open_groups += file.group_count()
        self._open[entry.path] = file
        while self._open_groups > OPEN_GROUPS_MAX and len(self._open) > 1:
            self._close(next(iter(self._open)))
        return file

    def _is_local(self, path: str) -> bool:
        return self._cache is not None and self._cache.is_local(path)

    def _close(self, path: str) -> None:
        file = self._open.pop(path)
        self._open_groups -= file.group_count()
        file.close()

    # -- covering the live files -----------------------------------------------------------------------------------

    def bring_up(self, live: FileSet) -> None:
        """Cover the live files ahead of look-ups: otherwise the first look-up might read thousands of files."""
        with self._lock:
            for path in [path for path in self._open if live.get(path) is None]:
                self._close(path)
            # A mapping keeps the disk space of a file that has left.
            for path in [path for path in list(self._mapped) if live.get(path) is None]:
                self._mapped.pop(path, None)
            try:
                self._cover(live)
            except Corrupt:
                # Logged already. A request that needs this file gets the error, and the other files are covered.
                return
            for stored in self._runs:
                if not any(live.get(path) for path in stored.run.names):
                    self._drop(stored, covered=live)

    def _cover(self, live: FileSet) -> tuple[_Stored, ...]:
        """Make the runs list all these files, and return them. Raises Corrupt for a file that cannot be read."""
        if self._covered is live:
            return self._runs
        missing = self._missing(live)
        if missing:
            self._open_new(missing)
            missing = self._missing(live)
        error = self._build(missing)
        if error is not None:
            raise error
        self._covered = live
        return self._runs

    def _missing(self, live: FileSet) -> dict[str, FileEntry]:
        spoken_of = set[str]().union(*(stored.run.names for stored in self._runs))
        return {entry.path: entry for entry in live.entries if entry.path not in spoken_of}

    def _open_new(self, missing: dict[str, FileEntry]) -> None:
        """Use the runs in the folder that list missing files."""
        if self._cache is not None:
            self._cache.fetch_keys()
        known = {stored.name for stored in self._runs}
        found = []
        for name in (f"{KEYS_FOLDER}/{name}" for name in self._files.list_dir(KEYS_FOLDER)):
            if name not in known:
                try:
                    found.append(_Stored(name, KeyRun(self._files.map_readonly(name))))
                except Corrupt as error:
                    # Its writer has not finished, or never will. `sweep` removes it.
                    logger.info("keys of data files not used run=%s reason=%s", name, error)
        # The largest first: leftover runs that were merged into it then add no files.
        left = set(missing)
        for stored in sorted(found, key=lambda stored: -stored.run.pairs):
            if not left.isdisjoint(stored.run.names):
                left.difference_update(stored.run.names)
                self._runs = (*self._runs, stored)

    def _build(self, missing: dict[str, FileEntry]) -> Corrupt | None:
        """Read the keys of these files into runs. Returns the error of the last file that cannot be read."""
        keys, failed = FileKeys(), None
        for path, entry in missing.items():
            try:
                # Not through the files kept open, because each of these is read only once.
                keys.add(path, *DataFile(self._data, entry).key_columns())
            except Corrupt as error:
                failed = error
                if path not in self._unreadable:
                    logger.error("keys not indexed file=%s reason=%s", path, error)
                    self._unreadable.add(path)
            if keys.is_full:
                self._runs = (*self._runs, self._store([keys.run().data]))
                keys = FileKeys()
        if keys.has_files:
            self._runs = (*self._runs, self._store([keys.run().data]))
        return failed

    def _store(self, pieces: Iterable[pa.Buffer | bytes]) -> _Stored:
        """Write a run to disk, and map it."""
        name = f"{FOLDER}/{run_path()}"
        # Written under its final name: an incomplete run is recognised by its missing end.
        write_pieces(self._files, name, pieces)
        return _Stored(name, KeyRun(self._files.map_readonly(name)))

    def _drop(self, stored: _Stored, *, covered: FileSet | None = None) -> None:
        self._runs = tuple(each for each in self._runs if each is not stored)
        self._covered = covered
        self._files.remove(stored.name)

    # -- maintenance
    # ----------------------------------------------------------------------------------------------------

    def merge(self, live: FileSet) -> bool:
        """Merge runs if worthwhile. Returns whether any were. Takes seconds for ten million keys."""
        with self._lock:
            chosen = self._choose(live)
        if not chosen:
            return False
        try:
            merged = self._merged(chosen, live)
        except Corrupt as error:
            logger.warning("keys of data files not merged reason=%s", error)
            merged = None
        with self._lock:
            # A damaged run is found only during the merge. Then all of them are dropped and their files are read again.
            for stored in chosen:
                self._drop(stored)
            if merged is not None:
                self._runs = (*self._runs, merged)
        return True

    def sweep(self) -> None:
        """Remove key runs that are not in use (left by failed jobs or earlier runs of the broker).

        Also drop used runs whose file is lost.
        """
        with self._lock:
            there = {f"{KEYS_FOLDER}/{name}" for name in self._files.list_dir(KEYS_FOLDER)}
            # The file of a mapped run was removed. Dropped now, because otherwise the next start would have to rebuild
            # it.
            for stored in [each for each in self._runs if each.name not in there]:
                self._drop(stored)
            # This may remove the run of an attach still to come. Its files are then read once more.
            for name in there - {stored.name for stored in self._runs}:
                self._files.remove(name)

    def _choose(self, live: FileSet) -> list[_Stored]:
        runs = sorted(self._runs, key=lambda stored: stored.run.pairs)
        for at, stored in enumerate(runs):
            largest = SIZE_RATIO * max(SMALL_PAIRS, stored.run.pairs)
            alike = [each for each in runs[at:] if each.run.pairs <= largest]
            if len(alike) >= RUNS_MIN:
                return alike[:RUNS_MAX]
        # Counted in files, because a run does not record how many pairs each file has.
        for stored in runs:
            if 2 * sum(live.get(path) is not None for path in stored.run.names) < len(stored.run.names):
                return [stored]
        return []

    def _merged(self, chosen: Sequence[_Stored], live: FileSet) -> _Stored:
        places: dict[str, int] = {}
        changes = []
        for stored in chosen:
            to = np.full(len(stored.run.names), -1, np.int64)
            for at, path in enumerate(stored.run.names):
                if live.get(path) is not None and path not in places:  # once: two runs may list the same file
                    to[at] = places[path] = len(places)
            changes.append(to)

        def changed(at: int, pairs: Pairs) -> Pairs:
            hashes, numbers = pairs
            to = changes[at][numbers >> ROW_BITS]
            kept = to >= 0
            return hashes[kept], (to[kept] << ROW_BITS) | (numbers[kept] & ROW_MASK)

        return self._store(encode(merge([stored.run for stored in chosen], changed), list(places)))

    def statistics(self) -> dict[str, int]:
        """Count the runs and their pairs, for display."""
        runs = self._runs
        return {"key_runs": len(runs), "key_pairs": sum(stored.run.pairs for stored in runs)}


def write_pieces(files: Files, name: str, pieces: Iterable[pa.Buffer | bytes]) -> None:
    """Write a new file piece by piece. Durable on return. The file is removed again if that fails."""
    files.make_dir(KEYS_FOLDER)
    file, at = files.create(name), 0
    try:
        for piece in pieces:
            file.write_at(at, piece)
            at += len(piece)
        with no_room_to_sync(f"writing {name}"):
            file.sync()
    except (Corrupt, OverLimit):
        files.remove(name)
        raise
    finally:
        file.close()
    files.sync_dir(KEYS_FOLDER)
