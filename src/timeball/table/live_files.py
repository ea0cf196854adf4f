"""The live data files in the data folder, each with a hard link that protects it from the VACUUM of another program.

The broker's log decides which files are live. The Delta table is public: another program may OPTIMIZE it, which makes
live files look deleted, and a VACUUM then removes them. So each live file also has a hard link in `pending/_live`.
Delta's readers and VACUUM skip folders whose name begins with an underscore. A link costs one directory entry and no
data.

    link_files        an attach makes the links of its files
    map_readonly      restores a file whose name is missing from its link, and maps it
    restore_missing   the same for all live files, after another program has committed to the table
    remove            deletes a file that has left the table, with its link

A link is a precaution and not a part of the format. A start makes missing links and removes the links of files that
have left. Object stores and some file systems have no hard links. There a missing file raises `MissingFile`: its
messages are not delivered until an operator restores the file, and all others are delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import pyarrow as pa

from timeball.model.errors import MissingFile, NotFound, OverLimit
from timeball.table.attachment import FileEntry
from timeball.table.layout import FOLDER

logger = logging.getLogger(__name__)

LIVE = "_live"  # folder of the links, inside the table's folder
LIVE_FOLDER = f"{FOLDER}/{LIVE}"


class Linking(Protocol):
    """The file operations used here (`files.Files`). `has_links` is false where files cannot have hard links."""

    has_links: bool

    def make_dir(self, name: str) -> None: ...
    def list_dir(self, name: str) -> list[str]: ...
    def exists(self, name: str) -> bool: ...
    def size(self, name: str) -> int: ...
    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer: ...
    def link(self, name: str, to: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def sync_dir(self, name: str) -> None: ...


class LiveFiles:
    """Maps and restores the data files of a table (`data_file.DataFiles`). Any thread.

    `live` is replaced and never changed in place, so other threads may iterate over it.
    """

    def __init__(self, files: Linking) -> None:
        self._files = files
        self.live: Mapping[str, FileEntry] = {}  # by path; set by the catalog

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See DataFiles. Restores the file from its link if its name is missing.

        Raises MissingFile for a lost live file, NotFound for a file that has left the table.
        """
        try:
            return self._files.map_readonly(name, at_random=at_random)
        except NotFound:
            path = name.partition("/")[2]
            if self.restore_file(path):
                return self._files.map_readonly(name, at_random=at_random)
            if (entry := self.live.get(path)) is not None:
                raise missing(entry) from None
            raise

    def link_files(self, entries: Iterable[FileEntry]) -> None:
        """Make the links of these files. A full disk is only logged, because links are optional."""
        if not self._files.has_links:
            return
        try:
            for entry in entries:
                if not self._files.exists(LIVE_FOLDER):
                    self._files.make_dir(LIVE_FOLDER)
                self._files.link(f"{FOLDER}/{entry.path}", live_name(entry.path))
        except OverLimit as error:
            logger.info("live data file not linked reason=%s", error)

    def link_only(self, live: Mapping[str, FileEntry]) -> None:
        """Set the live files, make their missing links, and remove all other links."""
        self.live = live
        existing_links = set(self._files.list_dir(LIVE_FOLDER)) if self._files.has_links else set()
        entries_by_link = {live_name(path).rpartition("/")[2]: entry for path, entry in live.items()}
        for name in existing_links - entries_by_link.keys():
            self._files.remove(f"{LIVE_FOLDER}/{name}")
        self.link_files(entry for name, entry in entries_by_link.items() if name not in existing_links)

    def restore_missing(self) -> list[FileEntry]:
        """Restore missing live files from their links. Returns the files that cannot be restored."""
        buckets = {entry.path.partition("/")[0] for entry in self.live.values()}
        existing_paths = {
            f"{bucket}/{name}" for bucket in buckets for name in self._files.list_dir(f"{FOLDER}/{bucket}")
        }
        return [
            entry
            for path, entry in self.live.items()
            if path not in existing_paths and not self.restore_file(path)
        ]

    def restore_files(self, entries: Iterable[FileEntry]) -> None:
        """Restore the missing ones of these files, if the folder has links."""
        if self._files.has_links:
            for entry in entries:
                self.restore_file(entry.path)

    def restore_file(self, path: str) -> bool:
        """Restore a file from its link if its name is missing. Returns whether the file exists now."""
        name, link = f"{FOLDER}/{path}", live_name(path)
        if self._files.exists(name):
            return True
        entry = self.live.get(path)
        if not self._files.exists(link) or (entry and self._files.size(link) != entry.size_bytes):
            return False
        folder = name.rpartition("/")[0]
        self._files.make_dir(folder)
        self._files.link(link, name)
        self._files.sync_dir(folder)
        logger.warning("data file was removed by another program and is restored file=%s", name)
        return self._files.exists(name)


def live_name(path: str) -> str:
    """Build the name of a data file's link."""
    # Without the suffix, because a reader of `pending/*/*.parquet` must not find the rows twice.
    return f"{LIVE_FOLDER}/{path.rpartition('/')[2].removesuffix('.parquet')}"


def remove(files: Linking, path: str) -> None:
    """Remove a data file and its link."""
    files.remove(f"{FOLDER}/{path}")
    if files.has_links and files.exists(live_name(path)):
        files.remove(live_name(path))


def missing(entry: FileEntry) -> MissingFile:
    """Build the error for a missing live file."""
    return MissingFile(
        f"{FOLDER}/{entry.path} is missing: put this file back from a copy; its {entry.rows} messages are not "
        "delivered before, and all others are"
    )
