"""A data file that comes from another replica, piece by piece.

Its pieces go to a temporary name; it gets its own when its checksum is right and it is on the disk. So a file that has
its name is whole, and one that was cut off is worth nothing and harms nothing: its temporary name is swept.
"""

from __future__ import annotations

import google_crc32c

from timeball.errors import PeerError
from timeball.files import Files, no_room_to_sync
from timeball.table.layout import FOLDER

SUFFIX = ".incoming"
SYNC_BYTES = 8 << 20  # a sync of hundreds of megabytes at once would hold up the log's on the same disk


class IncomingFile:
    """One file on its way. Blocking; belongs to one thread."""

    def __init__(self, files: Files, path: str, size_bytes: int, crc32c: int) -> None:
        """Begin with nothing; `path` is relative to the table."""
        self.path, self.size_bytes, self.crc32c = path, size_bytes, crc32c
        self._files, self._name = files, f"{FOLDER}/{path}"
        self._folder, _, last = self._name.rpartition("/")
        # Delta tools leave files that begin with '_' alone.
        self._temporary = f"{self._folder}/_{last}{SUFFIX}"
        files.make_dir(self._folder)
        self._file = files.create(self._temporary)
        self.received_bytes = self._synced_bytes = 0
        self._crc = 0

    def add(self, position: int, crc32c: int, chunk: bytes) -> bool:
        """Write a piece; return whether the file has its name now, durably. Raises PeerError for a wrong piece."""
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
        """Remove what has come."""
        self._file.close()
        self._files.remove(self._temporary)


def sweep(files: Files) -> list[str]:
    """Remove what was on its way at the last stop; return the paths of all data files.

    Their names are durable on return: a process that was killed may have left one in the system's cache alone.
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
