"""The folder of a table in an object store: bytes by name, and no more.

Names are those of the data folder (`pending/bucket=…/….parquet`); below the store's URI the first part is left out. A
put is whole or not there at all, and durable when it is answered, so there is nothing to sync. Names are never used
twice, except in the Delta log, whose entries delta-rs puts on condition that they are not there.

The store may be away for hours, or take requests and answer none. That is `Unavailable` after ANSWER_S, for a caller to
try again; only a refusal at the start, of the keys or the bucket, is for the operator.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as fs

from timeball import places
from timeball.errors import NotFound, SetupError, Unavailable
from timeball.table.layout import FOLDER
from timeball.table.store_requests import StoreRequests

T = TypeVar("T")

PIECE_BYTES = 8 * 1024 * 1024
ANSWER_S = 10.0  # for a request; for as many of them as a file that is put has pieces
# Of delta-rs, which would try for three minutes: an attach and all that comes behind it wait for a commit.
_PATIENCE = {"max_retries": "3", "retry_timeout": "15s", "timeout": "20s", "connect_timeout": "5s"}
# What Arrow says of an answer that will be the same tomorrow.
_REFUSALS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")


class ObjectStore:
    """What catalog.py and file_cache.py ask of a folder (`files.Files`), of one in an object store. Any thread."""

    has_links = False

    def __init__(self, uri: str) -> None:
        """Raise SetupError for a place that is in no object store, or that no library reaches."""
        if not places.in_object_store(uri):
            raise SetupError(
                f"--table {uri}: a place in an object store, as s3://bucket/path; without --table the pending table "
                "is in the data folder"
            )
        self.uri, options = places.delta(uri.rstrip("/"))
        self.storage_options = {**(options or {}), **_PATIENCE}
        self._store, self._root = places.arrow(self.uri)
        self.requests = StoreRequests()

    def check(self, answer_s: float) -> None:
        """Raise SetupError when the store refuses us, Unavailable when it does not answer."""

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
        """Return the sorted names in a folder; empty when it does not exist."""
        selector = fs.FileSelector(self._at(name), allow_not_found=True)
        found = self._ask(lambda: self._store.get_file_info(selector))
        return sorted(info.base_name for info in found)

    def sizes(self) -> dict[str, int]:
        """Return the size of each data file, by its path in the table. A list may lack the newest of them."""
        selector = fs.FileSelector(self._root, allow_not_found=True, recursive=True)
        everything = self._ask(lambda: self._store.get_file_info(selector))
        files = [info for info in everything if info.type == fs.FileType.File]
        return {info.path[len(self._root) + 1 :]: info.size for info in files}

    def exists(self, name: str) -> bool:
        """Return whether a file has this name, or is in a folder of this name."""
        return bool(self._info(name).type != fs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Return the length of a file in bytes; raise NotFound."""
        info = self._info(name)
        if info.type != fs.FileType.File:
            raise NotFound(f"{name} is not at {self.uri}")
        return int(info.size)

    def external(self, name: str) -> str:
        """Return the URI by which other processes find a folder of the table, or the table."""
        below = name.partition("/")[2]
        return f"{self.uri}/{below}" if below else self.uri

    # -- reading -------------------------------------------------------------------------------------------------

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Return a whole file, small enough for memory; raise NotFound."""
        return pa.py_buffer(b"".join(self.pieces(name)))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield a file, piece by piece; raise NotFound."""
        stream = self._ask(lambda: self._store.open_input_stream(self._at(name)))
        while piece := self._ask(lambda: stream.read(PIECE_BYTES)):
            yield piece
        stream.close()  # else a read may be under way, which closes it when it ends

    def open(self, name: str) -> pa.NativeFile:
        """Return a file to be read by `read_range`; raise NotFound."""
        return self._ask(lambda: self._store.open_input_file(self._at(name)))

    def read_range(self, file: pa.NativeFile, begin: int, size_bytes: int) -> bytes:
        """Return bytes of an open file."""
        return bytes(self._ask(lambda: file.read_at(size_bytes, begin)))

    # -- changing ------------------------------------------------------------------------------------------------

    def put(self, name: str, data: pa.Buffer) -> None:
        """Put a file; durable on return."""
        begins = range(0, data.size, PIECE_BYTES)

        def write() -> None:
            # Written by one put, or by several that become a file together: no reader sees half of it.
            with self._store.open_output_stream(self._at(name)) as stream:
                for begin in begins:
                    stream.write(data.slice(begin, min(PIECE_BYTES, data.size - begin)))

        # As one request: one that is left behind amid the pieces would end as a file that is cut.
        self._ask(write, ANSWER_S * max(1, len(begins)))

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is removed."""
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
    """A file as Python has them, for Arrow, which passes on what `read_range` raises: each read is one range."""

    closed = False

    def __init__(self, read_range: Callable[[int, int], bytes], size_bytes: int) -> None:
        """`read_range`: returns bytes by where they begin and how many they are."""
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
