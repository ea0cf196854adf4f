"""The folder of a table in an object store, and the local copies of its files (`FileCache`).

Files are put whole, and read whole or by range.

Callers use the names of the data folder (`pending/bucket=…/….parquet`). The store's URI stands for the folder
`pending`. A put is atomic, and durable when it is answered, so no sync is needed. Names are never reused, except in the
Delta log, whose entries delta-rs puts on condition that they do not exist.

The store may be unavailable for hours, or accept requests and answer none. A request without an answer raises
`Unavailable` after ANSWER_S, and the caller tries again. Only refused access keys or a missing bucket at the start are
errors for the operator.
"""

from __future__ import annotations

import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from timeball.io.files import Files, full_disk_as_over_limit
from timeball.model import storage_uris
from timeball.model.errors import Corrupt, NotFound, SetupError, Unavailable
from timeball.table.attachment import PATH, FileEntry
from timeball.table.data_file import DataFile, check_all
from timeball.table.file_keys import SUFFIX
from timeball.table.layout import FOLDER, KEYS_FOLDER
from timeball.table.live_files import LIVE

logger = logging.getLogger(__name__)

T = TypeVar("T")

# ---- requests with a time limit ------------------------------------------------------------------------------
# A store may accept a connection and never answer. The libraries give up only after a minute, and cannot be stopped
# earlier. So each request has its own thread, and the caller waits for a limited time. After that the request counts as
# failed and is abandoned: its thread goes on, and nobody waits for it. A broker that stops waits briefly for pending
# requests, but not for abandoned ones.

LAST_ANSWERS_S = 1.0  # wait for pending requests when the broker stops


class StoreRequests:
    """Runs requests to a store with a time limit. Any thread.

    An abandoned request may still take effect, like one whose answer was lost. So each request is one whole step
    that may be repeated. For example, a put writes a whole file and never a part of one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the fields below
        self._pending: set[Future[Any]] = set()
        self._is_closed = False

    def ask(self, request: Callable[[], T], answer_s: float | None) -> T:
        """Run a request, and return its result or raise its error. Raises Unavailable after `answer_s` seconds.

        `answer_s` None: no limit, for a request that gives up by itself.
        """
        future = Future[T]()
        with self._lock:
            if self._is_closed:
                raise _stopping_error()
            self._pending.add(future)
        # No thread pool: a process that ends joins the threads of its pools, and would wait for abandoned requests.
        threading.Thread(
            target=_run_request, args=(future, request), name="store-request", daemon=True
        ).start()
        try:
            if not wait([future], answer_s).done:
                raise Unavailable(f"no answer within {answer_s:g} s")
            return future.result()
        finally:
            with self._lock:
                self._pending.discard(future)

    def close(self) -> None:
        """Refuse further requests. Pending requests fail if they have no answer after LAST_ANSWERS_S."""
        with self._lock:
            self._is_closed = True
            pending = list(self._pending)
        for future in wait(pending, LAST_ANSWERS_S).not_done:
            try:
                future.set_exception(_stopping_error())
            except InvalidStateError:
                continue  # it was answered at this moment


def _run_request(future: Future[T], request: Callable[[], T]) -> None:
    """Run a request in its thread, and set its result or error in `future`, unless `close` has set an error before."""
    try:
        try:
            future.set_result(request())
        except InvalidStateError:
            raise
        except BaseException as error:  # of any type: `ask` raises it
            future.set_exception(error)
    except InvalidStateError:
        return  # `close` has abandoned this request


def _stopping_error() -> Unavailable:
    return Unavailable("the broker stops and sends no more requests to the object store")


PIECE_BYTES = 8 * 1024 * 1024
# Wait for the answer to a request. A put of a file waits this long for each of its pieces.
ANSWER_S = 10.0
# Retry limits for delta-rs, whose default is three minutes: an attach waits for the commit, and further attaches wait
# for the attach.
_RETRY_OPTIONS = {"max_retries": "3", "retry_timeout": "15s", "timeout": "20s", "connect_timeout": "5s"}
# Codes in Arrow's error texts: a refused access does not succeed later.
_ACCESS_ERRORS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")


class ObjectStore:
    """A folder in an object store. Has the methods of `files.Files` that catalog.py and `FileCache` use.

    Any thread. All methods raise Unavailable when the store does not answer.
    """

    has_links = False

    def __init__(self, uri: str) -> None:
        """`uri`: of the table's folder. Raises SetupError if it is in no object store, or if no library supports it."""
        if not storage_uris.in_object_store(uri):
            raise SetupError(
                f"--table {uri}: must be in an object store, as s3://bucket/path; without --table the pending table "
                "is in the data folder"
            )
        self.uri, options = storage_uris.delta(uri.rstrip("/"))
        self.storage_options = {**(options or {}), **_RETRY_OPTIONS}
        self._store, self._root = storage_uris.arrow(self.uri)
        self.requests = StoreRequests()

    def check(self, answer_s: float) -> None:
        """Test the access to the store.

        Raises SetupError for refused access or a missing bucket, Unavailable without an answer within `answer_s` s.
        """

        def query_bucket() -> fs.FileInfo:
            bucket = self._store.get_file_info(self._root.partition("/")[0])
            self._store.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
            return bucket

        try:
            bucket = self._ask(query_bucket, answer_s)
        except Unavailable as error:
            if any(code in str(error) for code in _ACCESS_ERRORS):
                raise SetupError(f"--table {self.uri}: {error.__cause__}") from error
            raise
        if bucket.type == fs.FileType.NotFound:
            raise SetupError(f"--table {self.uri}: there is no bucket {bucket.path}")

    # -- listing -------------------------------------------------------------------------------------------------

    def list_dir(self, name: str) -> list[str]:
        """List the names in a folder, sorted. The list is empty when the folder does not exist."""
        selector = fs.FileSelector(self._store_path(name), allow_not_found=True)
        infos = self._ask(lambda: self._store.get_file_info(selector))
        return sorted(info.base_name for info in infos)

    def sizes(self) -> dict[str, int]:
        """List the size in bytes of each file, by its path in the table. Listings may lack the newest files."""
        selector = fs.FileSelector(self._root, allow_not_found=True, recursive=True)
        infos = self._ask(lambda: self._store.get_file_info(selector))
        files = [info for info in infos if info.type == fs.FileType.File]
        return {info.path[len(self._root) + 1 :]: info.size for info in files}

    def exists(self, name: str) -> bool:
        """Check whether a file or a folder with this name exists."""
        return bool(self._info(name).type != fs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Read the size of a file in bytes. Raises NotFound."""
        info = self._info(name)
        if info.type != fs.FileType.File:
            raise NotFound(f"{name} is not at {self.uri}")
        return int(info.size)

    def external(self, name: str) -> str:
        """Build the URI of the table, or of a folder in it, for delta-rs and for other processes."""
        relative = name.partition("/")[2]
        return f"{self.uri}/{relative}" if relative else self.uri

    # -- reading -------------------------------------------------------------------------------------------------

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Read a whole file into memory. Raises NotFound."""
        return pa.py_buffer(b"".join(self.pieces(name)))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file in pieces of at most PIECE_BYTES. Raises NotFound."""
        stream = self._ask(lambda: self._store.open_input_stream(self._store_path(name)))
        while piece := self._ask(lambda: stream.read(PIECE_BYTES)):
            yield piece
        stream.close()  # not after an error: the abandoned read closes the stream when it ends

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for `read_range`. Raises NotFound."""
        return self._ask(lambda: self._store.open_input_file(self._store_path(name)))

    def read_range(self, file: pa.NativeFile, begin: int, size_bytes: int) -> bytes:
        """Read `size_bytes` bytes from `begin` of an open file."""
        return bytes(self._ask(lambda: file.read_at(size_bytes, begin)))

    # -- changing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: pa.Buffer) -> None:
        """Write a whole file. Durable on return."""
        begins = range(0, data.size, PIECE_BYTES)

        def write() -> None:
            # Arrow uses one put, or a multipart upload that becomes a file at its end, so no reader sees an incomplete
            # file.
            with self._store.open_output_stream(self._store_path(name)) as stream:
                for begin in begins:
                    stream.write(data.slice(begin, min(PIECE_BYTES, data.size - begin)))

        # As one request: a request that is abandoned between two pieces would leave a truncated file.
        self._ask(write, ANSWER_S * max(1, len(begins)))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._ask(lambda: self._store.delete_file(self._store_path(name)))
        except NotFound:
            return

    # -- no-ops: a store has no folders and no links, and an answered put is durable -------------------------------

    def make_dir(self, name: str) -> None:
        """Do nothing."""

    def link(self, name: str, to: str) -> None:
        """Do nothing."""

    def sync_file(self, name: str) -> None:
        """Do nothing."""

    def sync_dir(self, name: str) -> None:
        """Do nothing."""

    def absorb(self, name: str) -> None:
        """Do nothing."""

    def _store_path(self, name: str) -> str:
        """Convert a name in the data folder to a path in Arrow's file system."""
        folder, _, relative = name.partition("/")
        assert folder == FOLDER, "names are those of the data folder"
        return f"{self._root}/{relative}" if relative else self._root

    def _info(self, name: str) -> fs.FileInfo:
        return self._ask(lambda: self._store.get_file_info(self._store_path(name)))

    def _ask(self, call: Callable[[], T], answer_s: float | None = None) -> T:
        """Run a request with a time limit, by default ANSWER_S. Raises NotFound, Unavailable."""
        try:
            return self.requests.ask(call, ANSWER_S if answer_s is None else answer_s)
        except FileNotFoundError as error:
            raise NotFound(f"{self.uri}: {error}") from error
        except (OSError, Unavailable) as error:
            raise Unavailable(
                f"the object store of {self.uri} does not answer: {' '.join(str(error).split())}; ask again later"
            ) from error


class RangedFile:
    """A read-only file object for Arrow that reads by range requests. Errors of `read_range` reach the caller."""

    closed = False

    def __init__(self, read_range: Callable[[int, int], bytes], size_bytes: int) -> None:
        """`read_range(begin, size_bytes)` returns these bytes of the file. `size_bytes`: the size of the file."""
        self._read_range, self._size_bytes, self._position = read_range, size_bytes, 0

    def read(self, size_bytes: int = -1) -> bytes:
        """See io.RawIOBase."""
        remaining_bytes = self._size_bytes - self._position
        read_bytes = remaining_bytes if size_bytes < 0 else min(size_bytes, remaining_bytes)
        data = self._read_range(self._position, read_bytes) if read_bytes else b""
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = origins[whence] + offset
        return self._position

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._position

    def close(self) -> None:
        """See io.RawIOBase."""
        self.closed = True


# ---- the local copies of its data files, under the same names -------------------------------------------------
# A copy has the path in the data folder that the file of a local table would have, so all code that reads data files
# reads the copies. A copy is *local* when this run of the broker has written or fetched it, or has checked all its
# checksums. A copy from an earlier run is checked before its first use, and fetched again if it is damaged.
#
#     fetch           make a file local
#     put             upload a file that this broker wrote; it is then local
#     check           compare a file of another writer with its entry; only its footer is read, by a range request
#     pin             protect files from eviction: a release of due messages must not depend on the store
#     map_readonly    for a rewrite: a file that is not local is fetched first
#     open_ranged     for a look-up or a forecast: a large file that is not local is read by range requests
#
# Above the size limit, unpinned copies are evicted, the least recently used first. After a failed request, look-ups are
# refused immediately, until `probe` or a fetch gets an answer. Otherwise each look-up would wait for a time-out.


THREADS = 4  # concurrent requests
RANGED_BYTES_MIN = 1024 * 1024  # smaller files are fetched whole: a look-up needs about ten range requests
_LOCKS = 64
_FETCH_SUFFIX = ".fetched"  # suffix of an incomplete copy


class FileCache:
    """The local copies of data files, and the requests to the store. Blocking, any thread.

    The reader thread maps only local files, because releases of due messages depend on it.
    """

    def __init__(self, files: Files, store: ObjectStore, size_bytes_max: int, problem: str = "") -> None:
        """`size_bytes_max`: the size limit of all copies.

        `problem`: the error of the first request to the store, or "" if it succeeded.
        """
        self._files, self._store = files, store
        self._size_bytes_max = size_bytes_max
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self.table_thread = ThreadPoolExecutor(1, thread_name_prefix="table")  # for the Delta log
        self._lock = threading.Lock()  # protects the fields below
        self._local: OrderedDict[str, int] = OrderedDict()  # path -> size; the most recently used last
        self._unchecked: dict[str, int] = {}  # path -> size of copies from an earlier run
        # Files known to be in the store with the properties in their entries.
        self._in_store: dict[str, FileEntry] = {}
        self._pinned: frozenset[str] = frozenset()
        self.size_bytes = 0
        self.problem = problem  # error of the last request; "" if it succeeded
        self.fetched_files = self.fetched_bytes = self.failures = 0
        # Files with messages due soon that are not local, at the last check (broker/tables/table_changes.py).
        self.missing_files = 0
        # Only one thread at a time fetches or removes a file. Files with the same hash share a lock.
        self._file_locks = [threading.Lock() for _ in range(_LOCKS)]
        self._files.make_dir(KEYS_FOLDER)
        self._register_old_copies()

    def leave_store(self) -> None:
        """Refuse further requests to the store. Requests without an answer fail."""
        self._store.requests.close()

    def close(self) -> None:
        """Stop using the store, and wait until the threads have ended."""
        self.leave_store()
        for pool in (self.table_thread, self.threads):
            pool.shutdown(wait=True, cancel_futures=True)

    def _register_old_copies(self) -> None:
        """Register the copies of an earlier run. Remove incomplete copies and the links of a local table."""
        for folder in self._files.list_dir(FOLDER):
            for name in self._files.list_dir(f"{FOLDER}/{folder}"):
                path = f"{folder}/{name}"
                if PATH.fullmatch(path):
                    self._unchecked[path] = self._files.size(f"{FOLDER}/{path}")
                elif name.endswith(_FETCH_SUFFIX) or folder == LIVE:
                    self._files.remove(f"{FOLDER}/{path}")
        self.size_bytes = sum(self._unchecked.values())

    # -- reading -------------------------------------------------------------------------------------------------

    def is_local(self, path: str) -> bool:
        """Check whether a file can be mapped without the store."""
        return path in self._local

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Map a data file by its name in the data folder. Fetches a file that is not local.

        Raises Unavailable, Corrupt, NotFound.
        """
        path = name.partition("/")[2]
        for _ in range(3):
            self.fetch(path, is_patient=False)
            try:
                return self._files.map_readonly(name, at_random=at_random)
            except NotFound:
                self._unregister(path)  # it was evicted meanwhile
        raise Unavailable(f"{name} is fetched and evicted in turn: raise --table-cache-bytes")

    def open_ranged(
        self, name: str, size_bytes_min: int, *, at_random: bool = False
    ) -> pa.Buffer | pa.NativeFile:
        """Map the copy of a file, or open the file for range requests if it has no copy and `size_bytes_min` or more.

        A smaller file is fetched. Raises Unavailable, Corrupt, NotFound.
        """
        path = name.partition("/")[2]
        if path in self._local or path in self._unchecked:
            return self.map_readonly(name, at_random=at_random)
        self.check_answers()
        file = self._ask(partial(self._store.open, name))
        size_bytes = file.size()
        if size_bytes < size_bytes_min:
            return self.map_readonly(name)
        return pa.PythonFile(RangedFile(partial(self._read_range, file), size_bytes), "r")

    def _read_range(self, file: pa.NativeFile, begin: int, size_bytes: int) -> bytes:
        """Read `size_bytes` bytes from `begin` of a file in the store. Raises Unavailable, at once after a failure."""
        self.check_answers()
        return self._ask(partial(self._store.read_range, file, begin, size_bytes))

    def fetch(self, path: str, *, is_patient: bool = True) -> None:
        """Make a file local, and evict others beyond the size limit.

        `is_patient` false: raise Unavailable immediately if the last request to the store failed. Raises Unavailable,
        Corrupt for a damaged file, NotFound when the store does not have it, and OverLimit when the disk is full.
        """
        with self._file_locks[hash(path) % _LOCKS]:
            with self._lock:
                if path in self._local:
                    self._local.move_to_end(path)
                    return
            if not self._use_old_copy(path):
                if not is_patient:
                    self.check_answers()
                self._fetch(path)
        self._evict(path)

    def fetch_all(self, paths: Iterable[str]) -> None:
        """Make files local, THREADS at a time. If some `fetch` failed, raises the first error when all have ended."""
        futures = [self.threads.submit(self.fetch, path) for path in paths]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _use_old_copy(self, path: str) -> bool:
        """Make the copy of an earlier run local if it exists and is undamaged. Returns whether it is local now."""
        name = f"{FOLDER}/{path}"
        if not self._files.exists(name):
            self._unregister(path)
            return False
        try:
            data = self._files.map_readonly(name)
            check_all(data)
        except Corrupt as error:
            logger.warning("local copy fetched again file=%s reason=%s", name, error)
            self._files.remove(name)
            self._unregister(path)
            return False
        self._add_local(path, data.size)
        return True

    def _fetch(self, path: str) -> None:
        """Download a file, check it and make it local. Raises the errors of `fetch`."""
        name = f"{FOLDER}/{path}"
        partial_name = name + _FETCH_SUFFIX
        self._files.make_dir(name.rpartition("/")[0])
        file, size_bytes = self._files.create(partial_name), 0
        try:
            for piece in self._ask_for_pieces(self._store.pieces(name)):
                file.write_at(size_bytes, piece)
                size_bytes += len(piece)
            # Synced before the rename: after a power cut the copy may be needed while the store is unavailable.
            with full_disk_as_over_limit(f"writing {partial_name}"):
                file.sync()
            check_all(self._files.map_readonly(partial_name))
        except Corrupt as error:
            self._files.remove(partial_name)
            raise Corrupt(f"{name} at {self._store.uri}: {error}; restore this file from a copy") from error
        except BaseException:  # of any type: a partial file is useless
            self._files.remove(partial_name)
            raise
        finally:
            file.close()
        self._files.rename(partial_name, name)
        self._add_local(path, size_bytes)
        with self._lock:
            self.fetched_files += 1
            self.fetched_bytes += size_bytes

    # -- writing -------------------------------------------------------------------------------------------------

    def check(self, entries: Sequence[FileEntry]) -> None:
        """Compare files with their entries, THREADS at a time.

        Raises Corrupt for a difference, NotFound for a missing file, Unavailable.
        """
        list(self.threads.map(self._check, entries))  # `list` raises the first error

    def _check(self, entry: FileEntry) -> None:
        """Compare a file with its entry. Reads only the footer if the file is in the store."""
        name = f"{FOLDER}/{entry.path}"
        if self._in_store.get(entry.path) == entry:
            return
        is_ours = self._files.exists(name)
        file = DataFile(self._files if is_ours else RangedFiles(self, 0), entry)
        file.check()
        file.close()
        if not is_ours:
            self._in_store[entry.path] = entry

    def put(self, entries: Sequence[FileEntry]) -> None:
        """Upload the files that are not in the store yet, THREADS at a time. They are then durable and local.

        Raises Unavailable.
        """
        list(self.threads.map(self._put, entries))  # `list` raises the first error

    def _put(self, entry: FileEntry) -> None:
        """Upload a file of the data folder, unless it is known to be in the store."""
        if self._in_store.get(entry.path) == entry:
            return
        name = f"{FOLDER}/{entry.path}"
        data = self._files.map_readonly(name)
        # Synced as in the attach of a local table: after a power cut the copy may be needed while the store is
        # unavailable.
        self._files.sync_file(name)
        self._ask(partial(self._store.put, name, data))
        self._in_store[entry.path] = entry
        self._add_local(entry.path, data.size)

    def upload_missing(self, live: Sequence[FileEntry]) -> None:
        """Upload live files that are only in the data folder. Delete copies from an earlier run that are not live.

        Raises Corrupt for a live file that is missing in both, or whose size in the store is wrong, and Unavailable.
        """
        sizes_by_path = self._ask(self._store.sizes)
        missing = []
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            size_bytes = sizes_by_path.get(entry.path)
            if size_bytes is None and self._files.exists(name):
                missing.append(entry)
                continue
            if size_bytes is None and self._ask(partial(self._store.exists, name)):
                size_bytes = self._ask(partial(self._store.size, name))  # listings may lack the newest files
            if size_bytes != entry.size_bytes:
                problem = (
                    "is missing" if size_bytes is None else f"has {size_bytes} bytes, not {entry.size_bytes}"
                )
                raise Corrupt(f"{entry.path} {problem} at {self._store.uri}: restore this file from a copy")
            self._in_store[entry.path] = entry
        for entry in missing:
            DataFile(self._files, entry).check()
        self.put(missing)
        # No attach is under way that could need these copies.
        detached_paths = self._unchecked.keys() - {entry.path for entry in live}
        for path in detached_paths:
            self._remove(path)

    def restore_missing(self, live: Sequence[FileEntry]) -> list[FileEntry]:
        """Upload the local copies of live files that another program has removed from the store.

        Returns the removed files that have no local copy: they are lost. Raises Unavailable.
        """
        sizes = self._ask(self._store.sizes)
        lost = []
        for entry in live:
            name = f"{FOLDER}/{entry.path}"
            # Listings may lack the newest files.
            if entry.path in sizes or self._ask(partial(self._store.exists, name)):
                continue
            self._in_store.pop(entry.path, None)
            if not self._files.exists(name):
                lost.append(entry)
                continue
            self._put(entry)
            logger.warning("data file was removed by another program and is restored file=%s", name)
        return lost

    def fetch_keys(self) -> None:
        """Move the key runs that executors wrote to the store into the data folder. Raises Unavailable."""
        self.check_answers()  # a look-up or the compaction waits for this call
        for run in self._ask(partial(self._store.list_dir, KEYS_FOLDER)):
            if not run.endswith(SUFFIX):
                continue
            name = f"{KEYS_FOLDER}/{run}"
            self._files.replace(name, self._ask(partial(self._store.map_readonly, name)).to_pybytes())
            self._ask(partial(self._store.remove, name))

    # -- eviction ------------------------------------------------------------------------------------------------

    def pin(self, paths: Iterable[str], *, keep_old: bool = False) -> None:
        """Protect these files from eviction. Replaces the earlier pins, or with `keep_old` adds to them."""
        pinned = frozenset(paths)
        with self._lock:
            self._pinned = self._pinned | pinned if keep_old else pinned

    def fetch_and_pin_due_soon(self, entries: Iterable[FileEntry], soon_ms: int) -> None:
        """Fetch and pin the files with messages due before `soon_ms`."""
        due_soon = [entry.path for entry in entries if entry.min_due_ms < soon_ms]
        self.pin(due_soon, keep_old=True)
        self.fetch_all(due_soon)

    def forget(self, paths: Iterable[str]) -> None:
        """Remove the copies of files that have been removed from the store."""
        for path in paths:
            self._in_store.pop(path, None)
            self._remove(path)

    def _evict(self, just_used: str) -> None:
        """Remove copies until their size is within the limit. Never removes `just_used` or a pinned file."""
        with self._lock:
            excess_bytes = self.size_bytes - self._size_bytes_max
            evicted: list[str] = []
            for path, size_bytes in (*self._unchecked.items(), *self._local.items()):
                if excess_bytes <= 0:
                    break
                # A file that may be missing in the store is kept, because its copy may be the only one.
                if path != just_used and path not in self._pinned and path in self._in_store:
                    evicted.append(path)
                    excess_bytes -= size_bytes
        for path in evicted:
            self._remove(path, unless_pinned=True)

    def _remove(self, path: str, *, unless_pinned: bool = False) -> None:
        """Delete the local copy of a file."""
        # The lock excludes a fetch of this file, which would register a copy that is then removed.
        with self._file_locks[hash(path) % _LOCKS]:
            with self._lock:
                if unless_pinned and path in self._pinned:
                    return  # pinned after it was selected for eviction
                # Before the removal, so that no reader maps the copy any more. Existing mappings stay readable.
                self._unregister_locked(path)
            self._files.remove(f"{FOLDER}/{path}")

    def _add_local(self, path: str, size_bytes: int) -> None:
        """Register a copy as local, the most recently used."""
        with self._lock:
            self._unregister_locked(path)
            self.size_bytes += size_bytes
            self._local[path] = size_bytes

    def _unregister(self, path: str) -> None:
        with self._lock:
            self._unregister_locked(path)

    def _unregister_locked(self, path: str) -> None:
        self.size_bytes -= self._unchecked.pop(path, 0) + self._local.pop(path, 0)

    # -- whether the store answers -------------------------------------------------------------------------------

    def probe(self) -> None:
        """Send a request if the last one failed, to find out whether the store answers again. Raises Unavailable."""
        if self.problem:
            self._ask(partial(self._store.list_dir, KEYS_FOLDER))

    def _ask(self, call: Callable[[], T]) -> T:
        """Run a request, and record in `problem` whether the store answered. Raises Unavailable, NotFound."""
        try:
            answer = call()
        except Unavailable as error:
            self._record_failure(error)
            raise
        self.problem = ""
        return answer

    def _ask_for_pieces(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield all pieces. Each is a separate request."""
        while (piece := self._ask(lambda: next(pieces, b""))) != b"":
            yield piece

    def _record_failure(self, error: Unavailable) -> None:
        """Count a failed request, and log the first one after a success."""
        with self._lock:
            self.failures += 1
            if not self.problem:
                logger.warning("object store does not answer reason=%s", error)
            self.problem = str(error)

    def check_answers(self) -> None:
        """Raise Unavailable if the last request failed."""
        if problem := self.problem:
            raise Unavailable(problem)


class RangedFiles:
    """Opens files of a table in an object store for look-ups and forecasts (`data_file.DataFiles`)."""

    def __init__(self, cache: FileCache, size_bytes_min: int = RANGED_BYTES_MIN) -> None:
        self._cache, self._size_bytes_min = cache, size_bytes_min

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer | pa.NativeFile:
        """See FileCache.open_ranged."""
        return self._cache.open_ranged(name, self._size_bytes_min, at_random=at_random)
