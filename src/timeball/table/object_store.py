"""The folder of a table in an object store: named files, read and written whole or by range.

Names are those of the data folder (`pending/bucket=…/….parquet`). Below the store's URI the first part is omitted. A
put is atomic, and durable when it is answered, so no sync is needed. Names are never reused, except in the Delta log,
whose entries delta-rs puts on condition that they do not exist.

The store may be unavailable for hours, or accept requests and answer none. After ANSWER_S this raises `Unavailable`, so
that the caller tries again. Only a refusal of the keys or the bucket at the start is an error for the operator.
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

# Requests to an object store that may accept connections and never answer.
#
# The libraries give up such a request after a minute, and cannot be stopped earlier. So each request has a thread of
# its own, and the caller waits for a stated time. After that the request counts as failed, and its thread is left
# behind. A broker that stops waits briefly for requests under way, but not for those left behind.
#
# A request that was left behind may still take effect, as after a lost answer. So each request is one whole step that
# may be repeated: a file is put under its own name, and never a part of it.

LAST_ANSWERS_S = 1.0  # wait for requests under way when the broker stops


class StoreRequests:
    """Runs requests with a time limit. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the fields below
        self._under_way: set[Future[Any]] = set()
        self._is_closed = False

    def ask(self, call: Callable[[], T], answer_s: float | None) -> T:
        """Run a request. Returns its result, raises its error, or Unavailable after `answer_s` seconds.

        `answer_s` None: no limit, for a request that gives up by itself.
        """
        asked = Future[T]()
        with self._lock:
            if self._is_closed:
                raise _stops()
            self._under_way.add(asked)
        # No thread pool, because a pool's threads are joined when the process ends.
        threading.Thread(target=_answer, args=(asked, call), name="store-request", daemon=True).start()
        try:
            if not wait([asked], answer_s).done:
                raise Unavailable(f"no answer within {answer_s:g} s")
            return asked.result()
        finally:
            with self._lock:
                self._under_way.discard(asked)

    def close(self) -> None:
        """Refuse further requests, and leave behind those without an answer after LAST_ANSWERS_S."""
        with self._lock:
            self._is_closed = True
            left = list(self._under_way)
        for each in wait(left, LAST_ANSWERS_S).not_done:
            try:
                each.set_exception(_stops())
            except InvalidStateError:
                continue  # answered at this moment


def _answer(asked: Future[T], call: Callable[[], T]) -> None:
    try:
        try:
            asked.set_result(call())
        except InvalidStateError:
            raise
        except BaseException as error:  # of any kind: `ask` raises it
            asked.set_exception(error)
    except InvalidStateError:
        return  # left behind


def _stops() -> Unavailable:
    return Unavailable("the broker stops, and asks the object store no more")


T = TypeVar("T")

PIECE_BYTES = 8 * 1024 * 1024
# Seconds to wait for the answer to a request. Putting a file waits this long for each of its pieces.
ANSWER_S = 10.0
# Retry limits for delta-rs, which would try for three minutes by default: an attach, and everything after it, waits for
# a commit.
_PATIENCE = {"max_retries": "3", "retry_timeout": "15s", "timeout": "20s", "connect_timeout": "5s"}
# Parts of Arrow's messages for errors that a later try does not fix.
_REFUSALS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")


class ObjectStore:
    """A folder in an object store, with the methods of `files.Files` that catalog.py and file_cache.py use.

    Any thread.
    """

    has_links = False

    def __init__(self, uri: str) -> None:
        """Raise SetupError for a URI that is not in an object store, or that no library supports."""
        if not storage_uris.in_object_store(uri):
            raise SetupError(
                f"--table {uri}: a place in an object store, as s3://bucket/path; without --table the pending table "
                "is in the data folder"
            )
        self.uri, options = storage_uris.delta(uri.rstrip("/"))
        self.storage_options = {**(options or {}), **_PATIENCE}
        self._store, self._root = storage_uris.arrow(self.uri)
        self.requests = StoreRequests()

    def check(self, answer_s: float) -> None:
        """Raise SetupError when the store refuses access, Unavailable when it does not answer."""

        def look() -> fs.FileInfo:
            bucket = self._store.get_file_info(self._root.partition("/")[0])
            self._store.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
            return bucket

        try:
            bucket = self._ask(look, answer_s)
        except Unavailable as error:
            if any(refusal in str(error) for refusal in _REFUSALS):
                raise SetupError(f"--table {self.uri}: {error.__cause__}") from error
            raise
        if bucket.type == fs.FileType.NotFound:
            raise SetupError(f"--table {self.uri}: there is no bucket {bucket.path}")

    # -- what is there -------------------------------------------------------------------------------------------

    def list_dir(self, name: str) -> list[str]:
        """List the sorted names in a folder, or empty when it does not exist."""
        selector = fs.FileSelector(self._at(name), allow_not_found=True)
        found = self._ask(lambda: self._store.get_file_info(selector))
        return sorted(info.base_name for info in found)

    def sizes(self) -> dict[str, int]:
        """Read the size in bytes of each data file, by its path in the table. The newest files may be missing."""
        selector = fs.FileSelector(self._root, allow_not_found=True, recursive=True)
        everything = self._ask(lambda: self._store.get_file_info(selector))
        files = [info for info in everything if info.type == fs.FileType.File]
        return {info.path[len(self._root) + 1 :]: info.size for info in files}

    def exists(self, name: str) -> bool:
        """Check whether a file or a folder has this name."""
        return bool(self._info(name).type != fs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Read the length of a file in bytes. Raises NotFound."""
        info = self._info(name)
        if info.type != fs.FileType.File:
            raise NotFound(f"{name} is not at {self.uri}")
        return int(info.size)

    def external(self, name: str) -> str:
        """Build the URI of the table, or of a folder in it, for other processes."""
        below = name.partition("/")[2]
        return f"{self.uri}/{below}" if below else self.uri

    # -- reading -------------------------------------------------------------------------------------------------

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Read a whole file into memory. Raises NotFound."""
        return pa.py_buffer(b"".join(self.pieces(name)))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, piece by piece. Raises NotFound."""
        stream = self._ask(lambda: self._store.open_input_stream(self._at(name)))
        while piece := self._ask(lambda: stream.read(PIECE_BYTES)):
            yield piece
        stream.close()  # skipped after an error: a read under way closes the stream when it ends

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for `read_range`. Raises NotFound."""
        return self._ask(lambda: self._store.open_input_file(self._at(name)))

    def read_range(self, file: pa.NativeFile, begin: int, size_bytes: int) -> bytes:
        """Read `size_bytes` bytes from `begin` of an open file."""
        return bytes(self._ask(lambda: file.read_at(size_bytes, begin)))

    # -- changing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: pa.Buffer) -> None:
        """Put a file. Durable on return."""
        begins = range(0, data.size, PIECE_BYTES)

        def write() -> None:
            # Written by one put, or by several that become a file together, so no reader sees a part of it.
            with self._store.open_output_stream(self._at(name)) as stream:
                for begin in begins:
                    stream.write(data.slice(begin, min(PIECE_BYTES, data.size - begin)))

        # As one request: if it were left behind between pieces, the file would end up truncated.
        self._ask(write, ANSWER_S * max(1, len(begins)))

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._ask(lambda: self._store.delete_file(self._at(name)))
        except NotFound:
            return

    # -- what has no meaning here: a store has no folders, and an answer means that it is durable ------------------

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

    def _at(self, name: str) -> str:
        folder, _, below = name.partition("/")
        assert folder == FOLDER, "names are those of the data folder"
        return f"{self._root}/{below}" if below else self._root

    def _info(self, name: str) -> fs.FileInfo:
        return self._ask(lambda: self._store.get_file_info(self._at(name)))

    def _ask(self, call: Callable[[], T], answer_s: float | None = None) -> T:
        try:
            return self.requests.ask(call, ANSWER_S if answer_s is None else answer_s)
        except FileNotFoundError as error:
            raise NotFound(f"{self.uri}: {error}") from error
        except (OSError, Unavailable) as error:
            raise Unavailable(
                f"the object store of {self.uri} does not answer: {' '.join(str(error).split())}; ask again later"
            ) from error


class RangedFile:
    """A Python file object for Arrow, which passes on errors of `read_range`. Each read is one range request."""

    closed = False

    def __init__(self, read_range: Callable[[int, int], bytes], size_bytes: int) -> None:
        """`read_range(begin, size_bytes)` returns these bytes of the file."""
        self._read_range, self._size_bytes, self._at = read_range, size_bytes, 0

    def read(self, size_bytes: int = -1) -> bytes:
        """See io.RawIOBase."""
        left = self._size_bytes - self._at
        wanted = left if size_bytes < 0 else min(size_bytes, left)
        found = self._read_range(self._at, wanted) if wanted else b""
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io.RawIOBase."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}
        self._at = begin[whence] + offset
        return self._at

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._at

    def close(self) -> None:
        """See io.RawIOBase."""
        self.closed = True
