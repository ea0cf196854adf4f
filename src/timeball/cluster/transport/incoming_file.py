"""A data file that arrives from another replica, piece by piece.

The pieces are written to a file with a temporary name. It is renamed when it is complete, its checksum is right, and
it is synced. So a file with its final name is always whole. An incomplete file keeps its temporary name and is
removed at the next start.
"""

from __future__ import annotations

import google_crc32c

from timeball.io.files import Files, no_room_to_sync
from timeball.model.errors import PeerError
from timeball.table.layout import FOLDER

SUFFIX = ".incoming"
# Sync in steps of this size: one sync of hundreds of megabytes would delay the log's syncs on the same disk.
SYNC_BYTES = 8 << 20


class IncomingFile:
    """One file being received. Blocking. Belongs to one thread."""

    def __init__(self, files: Files, path: str, size_bytes: int, crc32c: int) -> None:
        """Create the temporary file. `path` is relative to the table."""
        self.path, self.size_bytes, self.crc32c = path, size_bytes, crc32c
        self._files, self._name = files, f"{FOLDER}/{path}"
        self._folder, _, last = self._name.rpartition("/")
        # Delta Lake tools ignore files whose name begins with '_'.
        self._temporary = f"{self._folder}/_{last}{SUFFIX}"
        files.make_dir(self._folder)
        self._file = files.create(self._temporary)
        self.received_bytes = self._synced_bytes = 0
        self._crc = 0

    def add(self, position: int, crc32c: int, chunk: bytes) -> bool:
        """Write a piece. Return True when the file has its final name, durably. Raises PeerError for a wrong piece."""
        end = position + len(chunk)
        if (position, crc32c) != (self.received_bytes, self.crc32c) or not chunk or end > self.size_bytes:
            raise PeerError(
                f"{self.path}: a piece of {len(chunk)} bytes at {position}; expected one at {self.received_bytes}"
            )
        self._file.write_at(position, chunk)
        self._crc, self.received_bytes = google_crc32c.extend(self._crc, chunk), end
        if end < self.size_bytes:
            if end - self._synced_bytes >= SYNC_BYTES:
                self._sync()
                self._synced_bytes = end
            return False
        if self._crc != self.crc32c:
            raise PeerError(f"{self.path}: CRC-32C {self._crc:#010x}, expected {self.crc32c:#010x}")
        self._sync()
        self._file.close()
        self._files.rename(self._temporary, self._name)
        self._files.sync_dir(self._folder)
        return True

    def _sync(self) -> None:
        with no_room_to_sync(f"receiving {self.path}"):
            self._file.sync()

    def drop(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self._files.remove(self._temporary)


def sweep(files: Files) -> list[str]:
    """Remove incomplete files of an earlier run, and return the paths of all data files.

    The folders are synced before the return, because the names given by a killed process may be only in the page
    cache.
    """
    found: list[str] = []
    for bucket in files.list_dir(FOLDER):
        if not bucket.startswith("bucket="):
            continue
        for name in files.list_dir(f"{FOLDER}/{bucket}"):
            if name.endswith(SUFFIX):
                files.remove(f"{FOLDER}/{bucket}/{name}")
            else:
                found.append(f"{bucket}/{name}")
        files.sync_dir(f"{FOLDER}/{bucket}")
    return found
