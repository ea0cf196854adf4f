"""The manifest of a backup, `BACKUP.json`. It is written last, so a folder without it is not a complete backup.

During a backup, `BACKUP.partial` contains a line of JSON for the source, and a line for each file that is copied and
synced. An interrupted backup that is started again does not copy these files again.
"""

from __future__ import annotations

import google_crc32c
import msgspec
import pyarrow as pa

from timeball.io.files import Files
from timeball.model.errors import Corrupt, NotFound, SetupError

NAME = "BACKUP.json"
PARTIAL = "BACKUP.partial"
FORMAT = 1  # version of the manifest's format
CHUNK_BYTES = 8 * 1024 * 1024  # size of a write, and of a step of a checksum


class CopiedFile(msgspec.Struct, frozen=True):
    """A copied file: its name and size in the data folder, the number of copied bytes, and their CRC-32C.

    The rest of a segment consists of zeros, which are not copied.
    """

    name: str
    size_bytes: int
    used_bytes: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a complete backup, with the rows first_row <= number < row."""

    product: str = "timeball"
    format: int = FORMAT
    row: int
    first_row: int
    made_ms: int
    source: str
    files: list[CopiedFile]

    @property
    def used_bytes(self) -> int:
        """The number of copied bytes of all files."""
        return sum(file.used_bytes for file in self.files)


class _BackupStart(msgspec.Struct, frozen=True):
    source: str


def load(files: Files) -> Manifest:
    """Read the manifest of a backup. Raises SetupError for a folder without a complete backup, and Corrupt."""
    try:
        data = bytes(files.map_readonly(NAME))
    except NotFound:
        unfinished = files.exists(PARTIAL)
        text = (
            "was not finished: run `timeball backup` again with it"
            if unfinished
            else "is no backup of Timeball's"
        )
        raise SetupError(f"{files.external('.')} {text}") from None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{NAME} cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise SetupError(f"this backup has format {manifest.format}; this Timeball reads up to {FORMAT}")
    return manifest


def save(files: Files, manifest: Manifest) -> None:
    """Write the manifest, which completes a backup. Durable on return."""
    files.replace(NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    files.remove(PARTIAL)
    files.sync_dir(".")


class Progress:
    """The record of copied files in the target folder (BACKUP.partial).

    The constructor raises SetupError if the folder has other files or belongs to another backup.
    """

    def __init__(self, files: Files, source: str) -> None:
        self._files = files
        self._lines: list[bytes] = []  # the lines of BACKUP.partial
        self.copied: dict[str, CopiedFile] = {}  # by name
        if files.exists(NAME):
            raise SetupError(f"{files.external('.')} holds a whole backup: name another folder")
        if not files.exists(PARTIAL):
            if files.list_dir("."):
                raise SetupError(
                    f"{files.external('.')} is not empty and holds no unfinished backup: name another folder"
                )
            self._add(_BackupStart(source))
            return
        lines = bytes(files.map_readonly(PARTIAL)).splitlines()
        start = msgspec.json.decode(lines[0], type=_BackupStart)
        if start.source != source:
            raise SetupError(
                f"{files.external('.')} is an unfinished backup of {start.source}: name another folder"
            )
        self._lines = lines
        copied_files = [msgspec.json.decode(line, type=CopiedFile) for line in lines[1:]]
        self.copied = {file.name: file for file in copied_files}

    def add(self, file: CopiedFile) -> None:
        """Record a file that was copied and synced."""
        self._add(file)
        self.copied[file.name] = file

    def _add(self, line: msgspec.Struct) -> None:
        self._lines.append(msgspec.json.encode(line))
        self._files.replace(PARTIAL, b"\n".join(self._lines))


def crc32c(buffer: pa.Buffer, used_bytes: int) -> int:
    """Compute the CRC-32C of the first bytes of a file, in steps, so that other threads can run in between."""
    crc = 0
    for begin in range(0, used_bytes, CHUNK_BYTES):
        crc = google_crc32c.extend(crc, bytes(buffer[begin : min(begin + CHUNK_BYTES, used_bytes)]))
    return crc
