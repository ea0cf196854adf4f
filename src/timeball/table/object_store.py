"""The folder of a table in an object store: named files, read and written whole or by range.

Names are those of the data folder (`pending/bucket=…/….parquet`). Below the store's URI the first part is omitted. A
put is atomic, and durable when it is answered, so no sync is needed. Names are never reused, except in the Delta log,
whose entries delta-rs puts on condition that they do not exist.

The store may be unavailable for hours, or accept requests and answer none. After ANSWER_S this raises `Unavailable`, so
that the caller tries again. Only a refusal of the keys or the bucket at the start is an error for the operator.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from timeball.model import storage_uris
from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.table.layout import FOLDER
from timeball.table.store_requests import StoreRequests

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
