"""Data files to be sent: pieces of memory-mapped files, and the checksum of each whole file."""

from __future__ import annotations

from typing import TypeVar

import google_crc32c
import pyarrow as pa

from timeball.cluster.protocol.messages import File, Want
from timeball.io.files import Files
from timeball.model import limits
from timeball.model.errors import NotFound
from timeball.table.layout import FOLDER

PIECE_BYTES = 256 << 10  # a commit may wait for one piece to be sent, which takes 2 ms at 1 Gbit/s
MAPPED_MAX = 16  # files that stay mapped
DESCRIBED_MAX = 2 * limits.ATTACH_FILES_MAX  # checksums that are kept: enough for two of the largest attaches
CRC_STEP_BYTES = 1 << 20

T = TypeVar("T")


class OutgoingFiles:
    """Reads the files of one replica. Blocking. Belongs to one thread."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._mapped: dict[str, pa.Buffer] = {}
        self._described: dict[str, tuple[int, int]] = {}  # path -> size, CRC-32C

    def describe(self, path: str) -> tuple[int, int]:
        """Return a file's size and the CRC-32C of the whole file. Raises NotFound."""
        if path not in self._described:
            content, crc = self._map(path), 0
            # Compute in steps, so that other threads run in between.
            for begin in range(0, content.size, CRC_STEP_BYTES):
                crc = google_crc32c.extend(crc, bytes(content[begin : begin + CRC_STEP_BYTES]))
            self._described[path] = content.size, crc
            _shorten(self._described, DESCRIBED_MAX)
        return self._described[path]

    def piece(self, want: Want) -> File:
        """Read the piece that was requested. The size is 0 when the file is not on this disk."""
        try:
            size_bytes, crc32c = self.describe(want.path)
            content = self._map(want.path)
        except NotFound:
            return File(want.epoch, want.position, 0, want.path, 0, b"")
        chunk = bytes(content[want.position : want.position + PIECE_BYTES])
        return File(want.epoch, want.position, size_bytes, want.path, crc32c, chunk)

    def _map(self, path: str) -> pa.Buffer:
        if path not in self._mapped:
            self._mapped[path] = self._files.map_readonly(f"{FOLDER}/{path}")
            _shorten(self._mapped, MAPPED_MAX)
        return self._mapped[path]


def _shorten(kept: dict[str, T], count_max: int) -> None:
    """Remove the oldest entries until at most `count_max` are left."""
    while len(kept) > count_max:
        del kept[next(iter(kept))]
