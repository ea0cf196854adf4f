"""Find rows of the pending table by id, key or sequence number, across any number of data files.

    key runs    sorted (key hash, row position) pairs of files (file_keys.py), in `pending/_keys`; a look-up reads one
                block of each run
    cover       makes the runs list all live files: opens the runs of other writers, and reads the keys of files that
                no run lists
    merge       replaces several runs of similar size by one, without the pairs of files that have left the table

The runs are a cache: the log lists the live files, and the files contain the keys. Pairs of other files in a run are
ignored. A missing or damaged run is rebuilt from the files. So the steps of a merge need no particular order: with the
new run, the old runs or all of them, a look-up has the same result.

A look-up by key reads small blocks of the files (identities.py), and these files stay mapped. For other look-ups the
most recently used files stay open, because parsing a footer costs more than the look-up. A lock protects the open
files, because Arrow's reader fails when two threads use it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.io.files import Files, full_disk_as_over_limit
from timeball.model.errors import Corrupt, OverLimit
from timeball.model.key_hash import KeyRun, Pairs, UInt64Array, encode, merge
from timeball.model.message import TABLE_SCHEMA, Int64Array
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile, DataFiles
from timeball.table.file_keys import ROW_BITS, ROW_MASK, FileKeys, FileSet, run_path
from timeball.table.identities import ID_SCHEMA, Identities, Row
from timeball.table.layout import FOLDER, KEYS_FOLDER
from timeball.table.object_store import FileCache, RangedFiles

logger = logging.getLogger(__name__)

RUNS_MIN = 6  # runs of similar size that start a merge; each pair is then rewritten O(log n) times
RUNS_MAX = 256  # runs merged at once, at most
# Runs have a similar size if the largest has at most SIZE_RATIO times as many pairs as the smallest.
SIZE_RATIO = 8
SMALL_PAIRS = 65_536  # smaller runs count as this size
# Files whose identities stay mapped (1.5 KB each), because mapping a file takes as long as reading two rows.
MAPPED_FILES_MAX = 16_384
OPEN_GROUPS_MAX = 1_024  # row groups of the files that stay open: 14 KB each

_NO_ROWS = ID_SCHEMA.empty_table()


@dataclass(frozen=True, slots=True)
class _StoredRun:
    """A key run on disk. `name` is relative to the data folder."""

    name: str
    run: KeyRun


class TableKeys:
    """The key index of the live files. Blocking, any thread.

    A merge and reads of identities run at the same time as other calls. A lock serialises everything else.
    """

    def __init__(self, files: Files, cache: FileCache | None = None, data: DataFiles | None = None) -> None:
        """`cache`: the local copies, if the data files and the runs of other writers are in an object store.

        `data`: maps the data files, by default `files`.
        """
        self._files, self._cache = files, cache
        self._data: DataFiles = (data or files) if cache is None else RangedFiles(cache)
        self._lock = threading.RLock()
        self._runs: tuple[_StoredRun, ...] = ()
        self._covered_files: FileSet | None = None  # the runs are known to list all these files
        self._unreadable: set[str] = set()  # files whose read error has been logged
        self._open_files: OrderedDict[str, DataFile] = OrderedDict()  # the most recently used last
        self._open_groups = 0
        self._mapped: dict[str, Identities] = {}  # path -> identities of the files read by key

    # -- look-ups ------------------------------------------------------------------------------------------------

    def find_keys(self, live: FileSet, hashes: UInt64Array) -> list[Row]:
        """Read ID_COLUMNS of the rows of live files that have an id or a key with one of these hashes.

        The caller compares the keys themselves, because different keys may have the same hash. Raises Corrupt for an
        unreadable file, NotFound for a file that has left the table and was deleted meanwhile, and Unavailable.
        """
        with self._lock:
            row_numbers_by_file = self._find_rows(live, hashes)
        # Copies of files in an object store may be evicted, so they do not stay mapped.
        mapped = self._mapped if self._cache is None else None
        rows = list[Row]()
        for entry, row_numbers in row_numbers_by_file:
            # Checked before each file, because one key may be in more files than may stay mapped. An eighth is dropped
            # at once, so that this is rare.
            if len(self._mapped) >= MAPPED_FILES_MAX and entry.path not in self._mapped:
                for path in list(self._mapped)[: max(1, MAPPED_FILES_MAX // 8)]:
                    self._mapped.pop(path, None)
            rows += DataFile(self._data, entry).identities_at(sorted(set(row_numbers)), mapped)
        return rows

    def find_seqs(self, live: FileSet, seq: Int64Array) -> pa.Table:
        """Read ID_COLUMNS of the rows of live files with these sequence numbers, in any order.

        Raises the errors of `find_keys`.
        """
        with self._lock:
            tables = [self._open_file(entry).find_seqs(seq) for entry in live.with_seqs(seq)]
        return pa.concat_tables(tables) if tables else _NO_ROWS

    def rows_of(
        self,
        live: FileSet,
        due_ms: Int64Array,
        seq: Int64Array,
        columns: Sequence[str] = TABLE_SCHEMA.names,
    ) -> list[pa.Table]:
        """Read these columns, `seq` among them, of the rows with these due times and numbers: one table per file.

        Raises the errors of `find_keys`.
        """
        with self._lock:
            return [
                self._open_file(entry).rows_of(due_ms[pair_indexes], seq[pair_indexes], columns)
                for entry, pair_indexes in live.with_pairs(due_ms, seq)
            ]

    def _find_rows(self, live: FileSet, hashes: UInt64Array) -> list[tuple[FileEntry, list[int]]]:
        """Find the indexes of the rows with these key hashes in each live file, in any order, maybe repeated.

        Deletes a damaged run, and reads the keys of its files again.
        """
        while True:
            runs, rows_by_path = self._cover_files(live), defaultdict[str, list[int]](list)
            for stored in runs:
                try:
                    positions = stored.run.find_numbers(hashes).tolist()
                except Corrupt as error:
                    logger.warning("keys of data files rebuilt run=%s reason=%s", stored.name, error)
                    self._remove_run(stored)
                    break
                for position in positions:
                    rows_by_path[stored.run.names[position >> ROW_BITS]].append(position & ROW_MASK)
            else:
                # A run may list files that have left the table, or that are not attached yet.
                return [
                    (entry, rows_by_path[path])
                    for path in rows_by_path
                    if (entry := live.get(path)) is not None
                ]

    def _open_file(self, entry: FileEntry) -> DataFile:
        """Open a file, or take it from the open files. Closes the least recently used files beyond OPEN_GROUPS_MAX."""
        # Since the file was opened for range requests, a local copy may have been fetched. It is faster.
        if (file := self._open_files.get(entry.path)) and file.is_ranged and self._is_local(entry.path):
            self._close(entry.path)
        file = self._open_files.pop(entry.path, None)
        if file is None:
            file = DataFile(self._data, entry)
            file.check()
            self._open_groups += file.group_count()
        self._open_files[entry.path] = file
        while self._open_groups > OPEN_GROUPS_MAX and len(self._open_files) > 1:
            self._close(next(iter(self._open_files)))
        return file

    def _is_local(self, path: str) -> bool:
        return self._cache is not None and self._cache.is_local(path)

    def _close(self, path: str) -> None:
        file = self._open_files.pop(path)
        self._open_groups -= file.group_count()
        file.close()

    # -- covering the live files -----------------------------------------------------------------------------------

    def bring_up(self, live: FileSet) -> None:
        """Make the runs list all live files in advance. Otherwise the next look-up might read thousands of files.

        Also closes files that have left the table, and removes runs that list no live file.
        """
        with self._lock:
            for path in [path for path in self._open_files if live.get(path) is None]:
                self._close(path)
            # A mapping keeps the disk space of a deleted file.
            for path in [path for path in list(self._mapped) if live.get(path) is None]:
                self._mapped.pop(path, None)
            try:
                self._cover_files(live)
            except Corrupt:
                # Logged already. The other files are covered. A look-up gets the error.
                return
            for stored in self._runs:
                if not any(live.get(path) for path in stored.run.names):
                    self._remove_run(stored, covered=live)

    def _cover_files(self, live: FileSet) -> tuple[_StoredRun, ...]:
        """Make the runs list all these files. Returns the runs.

        Raises Corrupt for an unreadable file, after the others are covered.
        """
        if self._covered_files is live:
            return self._runs
        unlisted = self._unlisted(live)
        if unlisted:
            self._open_written_runs(unlisted)
            unlisted = self._unlisted(live)
        error = self._index_files(unlisted)
        if error is not None:
            raise error
        self._covered_files = live
        return self._runs

    def _unlisted(self, live: FileSet) -> dict[str, FileEntry]:
        """List the live files that no run lists, by path."""
        listed = set[str]().union(*(stored.run.names for stored in self._runs))
        return {entry.path: entry for entry in live.entries if entry.path not in listed}

    def _open_written_runs(self, entries: dict[str, FileEntry]) -> None:
        """Open the runs of other writers in the folder `_keys` that list some of these files."""
        if self._cache is not None:
            self._cache.fetch_keys()
        open_names = {stored.name for stored in self._runs}
        new_runs = []
        for name in (f"{KEYS_FOLDER}/{name}" for name in self._files.list_dir(KEYS_FOLDER)):
            if name not in open_names:
                try:
                    new_runs.append(_StoredRun(name, KeyRun(self._files.map_readonly(name))))
                except Corrupt as error:
                    # Its writer has not finished yet or has died. `sweep` removes the file.
                    logger.info("keys of data files not used run=%s reason=%s", name, error)
        # The largest first: it lists all files of the runs that were merged into it, so these old runs are not opened.
        unlisted = set(entries)
        for stored in sorted(new_runs, key=lambda stored: -stored.run.pairs):
            if not unlisted.isdisjoint(stored.run.names):
                unlisted.difference_update(stored.run.names)
                self._runs = (*self._runs, stored)

    def _index_files(self, unlisted: dict[str, FileEntry]) -> Corrupt | None:
        """Read the keys of these files (path -> entry) and write them as runs.

        Returns the error of the last unreadable file, or None.
        """
        keys, failed = FileKeys(), None
        for path, entry in unlisted.items():
            try:
                # Not from `_open_files`, because each of these files is read only once.
                keys.add(path, *DataFile(self._data, entry).key_columns())
            except Corrupt as error:
                failed = error
                if path not in self._unreadable:
                    logger.error("keys not indexed file=%s reason=%s", path, error)
                    self._unreadable.add(path)
            if keys.is_full:
                self._runs = (*self._runs, self._write_run([keys.run().data]))
                keys = FileKeys()
        if keys.has_files:
            self._runs = (*self._runs, self._write_run([keys.run().data]))
        return failed

    def _write_run(self, pieces: Iterable[pa.Buffer | bytes]) -> _StoredRun:
        """Write a run to disk, and map it."""
        name = f"{FOLDER}/{run_path()}"
        # Written under its final name: an incomplete run is recognised, because its end is missing.
        write_pieces(self._files, name, pieces)
        return _StoredRun(name, KeyRun(self._files.map_readonly(name)))

    def _remove_run(self, stored: _StoredRun, *, covered: FileSet | None = None) -> None:
        """Delete a run. `covered`: the live files that the other runs list, if they are known to list all of them."""
        self._runs = tuple(other for other in self._runs if other is not stored)
        self._covered_files = covered
        self._files.remove(stored.name)

    # -- maintenance ---------------------------------------------------------------------------------------------

    def merge(self, live: FileSet) -> bool:
        """Merge runs once, if there are enough of similar size. Returns whether there were.

        Takes seconds for ten million keys.
        """
        with self._lock:
            selected = self._select_runs(live)
        if not selected:
            return False
        try:
            merged = self._merge_runs(selected, live)
        except Corrupt as error:
            logger.warning("keys of data files not merged reason=%s", error)
            merged = None
        with self._lock:
            # If a run turns out to be damaged, all selected runs are removed, and their files are read again later.
            for stored in selected:
                self._remove_run(stored)
            if merged is not None:
                self._runs = (*self._runs, merged)
        return True

    def sweep(self) -> None:
        """Delete run files that are not in use (left by failed jobs or earlier runs of the broker).

        Also stops using runs whose file is lost.
        """
        with self._lock:
            existing = {f"{KEYS_FOLDER}/{name}" for name in self._files.list_dir(KEYS_FOLDER)}
            # A mapped run stays readable after its file was deleted. It is dropped now, so that this process rebuilds
            # it, and not the next start.
            for stored in [run for run in self._runs if run.name not in existing]:
                self._remove_run(stored)
            # This may delete the run of files that are not attached yet. Their keys are then read from the files.
            for name in existing - {stored.name for stored in self._runs}:
                self._files.remove(name)

    def _select_runs(self, live: FileSet) -> list[_StoredRun]:
        """Select runs to merge: several of similar size, or a single one if most of its files have left the table."""
        runs = sorted(self._runs, key=lambda stored: stored.run.pairs)
        for index, stored in enumerate(runs):
            largest = SIZE_RATIO * max(SMALL_PAIRS, stored.run.pairs)
            similar = [other for other in runs[index:] if other.run.pairs <= largest]
            if len(similar) >= RUNS_MIN:
                return similar[:RUNS_MAX]
        # Files are counted, because a run does not record how many pairs each file has.
        for stored in runs:
            if 2 * sum(live.get(path) is not None for path in stored.run.names) < len(stored.run.names):
                return [stored]
        return []

    def _merge_runs(self, selected: Sequence[_StoredRun], live: FileSet) -> _StoredRun:
        """Write one run with the pairs of the live files of these runs. Gives the files new numbers."""
        new_indexes: dict[str, int] = {}
        index_maps = []
        for stored in selected:
            index_map = np.full(len(stored.run.names), -1, np.int64)
            for index, path in enumerate(stored.run.names):
                if live.get(path) is not None and path not in new_indexes:  # two runs may list the same file
                    index_map[index] = new_indexes[path] = len(new_indexes)
            index_maps.append(index_map)

        def renumber(index: int, pairs: Pairs) -> Pairs:
            """Give positions the new indexes of their files, and drop the pairs of files that get none."""
            hashes, positions = pairs
            index_map = index_maps[index][positions >> ROW_BITS]
            is_live = index_map >= 0
            return hashes[is_live], (index_map[is_live] << ROW_BITS) | (positions[is_live] & ROW_MASK)

        return self._write_run(
            encode(merge([stored.run for stored in selected], renumber), list(new_indexes))
        )

    def statistics(self) -> dict[str, int]:
        """Count the runs and their pairs, for display."""
        runs = self._runs
        return {"key_runs": len(runs), "key_pairs": sum(stored.run.pairs for stored in runs)}


def write_pieces(files: Files, name: str, pieces: Iterable[pa.Buffer | bytes]) -> None:
    """Write a new file in KEYS_FOLDER piece by piece. Durable on return. Removes the file if that fails."""
    files.make_dir(KEYS_FOLDER)
    file, offset = files.create(name), 0
    try:
        for piece in pieces:
            file.write_at(offset, piece)
            offset += len(piece)
        with full_disk_as_over_limit(f"writing {name}"):
            file.sync()
    except (Corrupt, OverLimit):
        files.remove(name)
        raise
    finally:
        file.close()
    files.sync_dir(KEYS_FOLDER)
