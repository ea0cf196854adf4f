"""The folder of a table in an object store: files are put whole, and read whole or by range.

Callers use the names of the data folder (`pending/bucket=…/….parquet`). The store's URI stands for the folder
`pending`. A put is atomic, and durable when it is answered, so no sync is needed. Names are never reused, except in the
Delta log, whose entries delta-rs puts on condition that they do not exist.

The store may be unavailable for hours, or accept requests and answer none. A request without an answer raises
`Unavailable` after ANSWER_S, and the caller tries again. Only refused access keys or a missing bucket at the start are
errors for the operator.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from timeball.model import storage_uris
from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.table.layout import FOLDER

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
    """Run a request in its thread, and set the result unless the request was abandoned."""
    try:
        try:
            future.set_result(request())
        except InvalidStateError:
            raise
        except BaseException as error:  # of any type: `ask` raises it
            future.set_exception(error)
    except InvalidStateError:
        return  # `close` has set an error: the request was abandoned


def _stopping_error() -> Unavailable:
    return Unavailable("the broker stops and sends no more requests to the object store")


T = TypeVar("T")

PIECE_BYTES = 8 * 1024 * 1024
# Wait for the answer to a request. A put of a file waits this long for each of its pieces.
ANSWER_S = 10.0
# Retry limits for delta-rs, whose default is three minutes: an attach waits for the commit, and further attaches wait
# for the attach.
_RETRY_OPTIONS = {"max_retries": "3", "retry_timeout": "15s", "timeout": "20s", "connect_timeout": "5s"}
# Codes in Arrow's error texts: a refused access does not succeed later.
_ACCESS_ERRORS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")


class ObjectStore:
    """A folder in an object store. Has the methods of `files.Files` that catalog.py and file_cache.py use.

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
        """Test the access to the store. Raises SetupError if it is refused, Unavailable when there is no answer."""

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
        """Yield the bytes of a file, piece by piece. Raises NotFound."""
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

        # As one request: if it were abandoned between two pieces, the file would be truncated.
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
