"""Local copies of the data files of a table in an object store, under the same names.

A copy is in the data folder at the path of a local table's file, so all code that reads data files reads copies. A copy
is *local* when this run of the broker has written, fetched or completely read it, including every checksum. A copy from
an earlier run is read completely before its use, and fetched again if it is damaged.

    fetch     make a file local
    put       copy a file that this broker wrote to the store; it is then local
    check     compare a file of another writer with its claim, by its footer alone, which is fetched by range
    pin       keep these files, even beyond the bound: a release must not depend on the store
    map       for a rewrite: a file that is not local is fetched first
    ranged    for a look-up or a forecast: of a large file that is not local, the needed columns are read by range

Above the bound, other copies are removed, the least recently used first. After a failure, look-ups are refused
immediately, so that they do not wait for one time-out after another, until `probe` or a fetch gets an answer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pyarrow as pa

from timeball.io.files import Files, no_room_to_sync
from timeball.model.errors import Corrupt, NotFound, Unavailable
from timeball.table.attachment import PATH, FileEntry
from timeball.table.data_file import DataFile, check_all
from timeball.table.file_keys import SUFFIX
from timeball.table.layout import FOLDER, KEYS_FOLDER
from timeball.table.live_files import LIVE
from timeball.table.object_store import ObjectStore, RangedFile

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADS = 4  # concurrent requests
RANGED_BYTES_MIN = 1024 * 1024  # smaller files are fetched: a look-up takes some ten range reads
_LOCKS = 64
_FRESH = ".fetched"  # suffix of a copy that is still being fetched


class FileCache:
    """The copies. Blocking, any thread. The reader thread, on which releases depend, maps only local files."""

    def __init__(self, files: Files, store: ObjectStore, size_bytes_max: int, problem: str = "") -> None:
        """`problem`: the error because of which the store has not answered yet, or ""."""
        self._files, self._store = files, store
        self._size_bytes_max = size_bytes_max
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self.table_thread = ThreadPoolExecutor(1, thread_name_prefix="table")  # for the Delta log
        self._lock = threading.Lock()  # protects the fields below
        self._local: OrderedDict[str, int] = OrderedDict()  # path -> bytes; the most recently used last
        self._left: dict[str, int] = {}  # path -> bytes of copies from an earlier run, not checked yet
        # Files known to be in the store as described by their entries.
        self._stored: dict[str, FileEntry] = {}
        self._pinned: frozenset[str] = frozenset()
        self.size_bytes = 0
        self.problem = problem  # error of the last request, for display; "" if it succeeded
        self.fetched_files = self.fetched_bytes = self.failures = 0
        # Files with messages due soon that are not local, at the last check (broker/tables/stored_table.py).
        self.missing_files = 0
        # One thread at a time fetches a file. Two files seldom share a lock.
        self._busy = [threading.Lock() for _ in range(_LOCKS)]
        self._files.make_dir(KEYS_FOLDER)
        self._find_left()

    def leave_store(self) -> None:
        """Stop using the store. Requests that wait for an answer fail."""
        self._store.requests.close()

    def close(self) -> None:
        """End the threads."""
        self.leave_store()
        for pool in (self.table_thread, self.threads):
            pool.shutdown(wait=True, cancel_futures=True)

    def _find_left(self) -> None:
        """Register the copies of an earlier run, and remove its incomplete ones."""
        for folder in self._files.list_dir(FOLDER):
            for name in self._files.list_dir(f"{FOLDER}/{folder}"):
                path = f"{folder}/{name}"
                if PATH.fullmatch(path):
                    self._left[path] = self._files.size(f"{FOLDER}/{path}")
                elif name.endswith(_FRESH) or folder == LIVE:
                    self._files.remove(f"{FOLDER}/{path}")
        self.size_bytes = sum(self._left.values())

    # -- reading -------------------------------------------------------------------------------------------------

    def is_local(self, path: str) -> bool:
        """Check whether a file can be mapped without the store."""
        return path in self._local

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Map a data file by its name in the data folder, fetching it if needed.

        Raises Unavailable, Corrupt, NotFound.
        """
        path = name.partition("/")[2]
        for _ in range(3):
            self.fetch(path, patiently=False)
            try:
                return self._files.map_readonly(name, at_random=at_random)
            except NotFound:
                self._forget(path)  # it was evicted meanwhile
        raise Unavailable(f"{name} is fetched and evicted in turn: raise --table-cache-bytes")

    def open_ranged(
        self, name: str, size_bytes_min: int, *, at_random: bool = False
    ) -> pa.Buffer | pa.NativeFile:
        """Map the copy if there is one or the file is small. Otherwise open the file in the store, read by ranges."""
        path = name.partition("/")[2]
        if path in self._local or path in self._left:
            return self.map_readonly(name, at_random=at_random)
        self.check_answers()
        file = self._ask(partial(self._store.open, name))
        size_bytes = file.size()
        if size_bytes < size_bytes_min:
            return self.map_readonly(name)
        return pa.PythonFile(RangedFile(partial(self._read_range, file), size_bytes), "r")

    def _read_range(self, file: pa.NativeFile, begin: int, size_bytes: int) -> bytes:
        self.check_answers()
        return self._ask(partial(self._store.read_range, file, begin, size_bytes))

    def fetch(self, path: str, *, patiently: bool = True) -> None:
        """Make a file local. Raises Unavailable, Corrupt, and NotFound when the store has no such file.

        `patiently` false: fail at once if the store did not answer the last request.
        """
        with self._busy[hash(path) % _LOCKS]:
            with self._lock:
                if path in self._local:
                    self._local.move_to_end(path)
                    return
            if not self._use_left(path):
                if not patiently:
                    self.check_answers()
                self._fetch(path)
        self._make_room(path)

    def fetch_all(self, paths: Iterable[str]) -> None:
        """Make files local, several at a time. Raises the first error of `fetch`, after all have ended."""
        futures = [self.threads.submit(self.fetch, path) for path in paths]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _use_left(self, path: str) -> bool:
        """Use the copy of an earlier run, if it exists and is undamaged."""
        name = f"{FOLDER}/{path}"
        if not self._files.exists(name):
            self._forget(path)
            return False
        try:
            data = self._files.map_readonly(name)
            check_all(data)
        except Corrupt as error:
            logger.warning("local copy fetched again file=%s reason=%s", name, error)
            self._files.remove(name)
            self._forget(path)
            return False
        self._keep(path, data.size)
        return True

    def _fetch(self, path: str) -> None:
        name = f"{FOLDER}/{path}"
        fresh = name + _FRESH
        self._files.make_dir(name.rpartition("/")[0])
        file, size_bytes = self._files.create(fresh), 0
        try:
            for piece in self._asked(self._store.pieces(name)):
                file.write_at(size_bytes, piece)
                size_bytes += len(piece)
            # Synced before it gets its name: a copy must survive a power cut while the store is unavailable.
            with no_room_to_sync(f"writing {fresh}"):
                file.sync()
            check_all(self._files.map_readonly(fresh))
        except Corrupt as error:
            self._files.remove(fresh)
            raise Corrupt(f"{name} at {self._store.uri}: {error}; restore this file from a copy") from error
        except BaseException:  # of any kind: a partial file is useless
            self._files.remove(fresh)
            raise
        finally:
            file.close()
        self._files.rename(fresh, name)
        self._keep(path, size_bytes)
        with self._lock:
            self.fetched_files += 1
            self.fetched_bytes += size_bytes

    # -- writing -------------------------------------------------------------------------------------------------

    def check(self, entries: Sequence[FileEntry]) -> None:
        """Raise Corrupt unless each file matches its entry, NotFound for a missing file, or Unavailable."""
        list(self.threads.map(self._check, entries))

    def _check(self, entry: FileEntry) -> None:
        name = f"{FOLDER}/{entry.path}"
        if self._stored.get(entry.path) == entry:
            return
        is_ours = self._files.exists(name)
        file = DataFile(self._files if is_ours else Ranged(self, 0), entry)
        file.check()
        file.close()
        if not is_ours:
            self._stored[entry.path] = entry

    def put(self, entries: Sequence[FileEntry]) -> None:
        """Copy those of these files that this broker wrote to the store. They are then durable and local."""
        list(self.threads.map(self._put, entries))

    def _put(self, entry: FileEntry) -> None:
        if self._stored.get(entry.path) == entry:
            return
        name = f"{FOLDER}/{entry.path}"
        data = self._files.map_readonly(name)
        # Synced as the attach of a local table does: the copy may be pinned, and a power cut may come while the store
        # is unavailable.
        self._files.sync_file(name)
        self._ask(partial(self._store.put, name, data))
        self._stored[entry.path] = entry
        self._keep(entry.path, data.size)

    def bring(self, live: Sequence[FileEntry]) -> None:
        """Raise Corrupt unless the store has these files. Files that are only in the data folder are put there."""
        sizes = self._ask(self._store.sizes)
        missing = []
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            size_bytes = sizes.get(entry.path)
            if size_bytes is None and self._files.exists(name):
                missing.append(entry)
                continue
            if size_bytes is None and self._ask(partial(self._store.exists, name)):
                size_bytes = self._ask(partial(self._store.size, name))  # the listing lacked it
            if size_bytes != entry.size_bytes:
                found = (
                    "is missing" if size_bytes is None else f"has {size_bytes} bytes, not {entry.size_bytes}"
                )
                raise Corrupt(f"{entry.path} {found} at {self._store.uri}: restore this file from a copy")
            self._stored[entry.path] = entry
        for entry in missing:
            DataFile(self._files, entry).check()
        self.put(missing)
        # Copies of files that have left the table are removed. No attach that could bring them back is under way.
        gone = self._left.keys() - {entry.path for entry in live}
        for path in gone:
            self._remove(path)

    def put_back(self, live: Sequence[FileEntry]) -> list[FileEntry]:
        """Put live files that another program has removed back to the store from local copies.

        Returns the lost files.
        """
        sizes = self._ask(self._store.sizes)
        gone = []
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            if entry.path in sizes or self._ask(partial(self._store.exists, name)):  # the listing may lack it
                continue
            self._stored.pop(entry.path, None)
            if not self._files.exists(name):
                gone.append(entry)
                continue
            self._put(entry)
            logger.warning("data file was removed by another program and is put back file=%s", name)
        return gone

    def fetch_keys(self) -> None:
        """Move the key runs that executors left in the store to the data folder."""
        self.check_answers()  # a look-up or the compaction thread is waiting
        for run in self._ask(partial(self._store.list_dir, KEYS_FOLDER)):
            if not run.endswith(SUFFIX):
                continue
            name = f"{KEYS_FOLDER}/{run}"
            self._files.replace(name, self._ask(partial(self._store.map_readonly, name)).to_pybytes())
            self._ask(partial(self._store.remove, name))

    # -- room ----------------------------------------------------------------------------------------------------

    def pin(self, paths: Iterable[str], *, besides: bool = False) -> None:
        """Protect these files from eviction when they are local. `besides` also keeps the files pinned before."""
        pinned = frozenset(paths)
        with self._lock:
            self._pinned = self._pinned | pinned if besides else pinned

    def keep_near(self, entries: Iterable[FileEntry], soon_ms: int) -> None:
        """Fetch and pin the files with messages due before `soon_ms`."""
        near = [entry.path for entry in entries if entry.min_due_ms < soon_ms]
        self.pin(near, besides=True)
        self.fetch_all(near)

    def forget(self, paths: Iterable[str]) -> None:
        """Remove the copies of files that are no longer in the store."""
        for path in paths:
            self._stored.pop(path, None)
            self._remove(path)

    def _make_room(self, used: str) -> None:
        with self._lock:
            over = self.size_bytes - self._size_bytes_max
            gone: list[str] = []
            for path, size_bytes in (*self._left.items(), *self._local.items()):
                if over <= 0:
                    break
                # A file that the store may lack is kept, because its copy is the only one.
                if path != used and path not in self._pinned and path in self._stored:
                    gone.append(path)
                    over -= size_bytes
        for path in gone:
            self._remove(path, unless_pinned=True)

    def _remove(self, path: str, *, unless_pinned: bool = False) -> None:
        # Not during a fetch: the name would be removed, but the file would count as local.
        with self._busy[hash(path) % _LOCKS]:
            with self._lock:
                if unless_pinned and path in self._pinned:
                    return  # pinned since it was chosen
                # Dropped first, so that it is no longer mapped. Existing mappings stay readable.
                self._drop(path)
            self._files.remove(f"{FOLDER}/{path}")

    def _keep(self, path: str, size_bytes: int) -> None:
        with self._lock:
            was = self._left.pop(path, None)
            self.size_bytes += size_bytes - (self._local.get(path, 0) if was is None else was)
            self._local[path] = size_bytes

    def _forget(self, path: str) -> None:
        with self._lock:
            self._drop(path)

    def _drop(self, path: str) -> None:
        self.size_bytes -= self._left.pop(path, 0) + self._local.pop(path, 0)

    # -- how the store is ----------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Send a request to a store that did not answer the last one. Raises Unavailable."""
        if self.problem:
            self._ask(partial(self._store.list_dir, KEYS_FOLDER))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except Unavailable as error:
            self._note_failure(error)
            raise
        self.problem = ""
        return answer

    def _asked(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        while (piece := self._ask(lambda: next(pieces, b""))) != b"":
            yield piece

    def _note_failure(self, error: Unavailable) -> None:
        with self._lock:
            self.failures += 1
            if not self.problem:
                logger.warning("object store does not answer reason=%s", error)
            self.problem = str(error)

    def check_answers(self) -> None:
        """Raise Unavailable if the store did not answer the last request."""
        if problem := self.problem:
            raise Unavailable(problem)


class Ranged:
    """The files of a table in an object store, for look-ups and forecasts (`data_file.DataFiles`)."""

    def __init__(self, cache: FileCache, size_bytes_min: int = RANGED_BYTES_MIN) -> None:
        self._cache, self._size_bytes_min = cache, size_bytes_min

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer | pa.NativeFile:
        """See FileCache.open_ranged."""
        return self._cache.open_ranged(name, self._size_bytes_min, at_random=at_random)
