"""The live data files in the data folder, each with a second name that the VACUUM of another program does not find.

The log decides which files are live. The Delta table is public: another program may OPTIMIZE it, which makes live files
look deleted, and a VACUUM then removes them. So each live file also has a hard link in `pending/_live`. Delta's readers
and VACUUM skip folders whose name begins with an underscore. A link costs one directory entry and no data.

    keep        an attach makes the links of its files
    map         a file whose name is missing gets its name back from the link, then it is read
    put_back    the same for all live files, after another program has committed to the table
    remove      a file that has left the table loses both names

A link is a precaution and not a part of the format. A start makes missing links and removes those of files that have
left. File systems without hard links and object stores have none. There a missing file raises `MissingFile`. Its
messages stay undelivered until an operator restores it, and all others are delivered.
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

LIVE = "_live"  # folder inside the table's
LIVE_FOLDER = f"{FOLDER}/{LIVE}"


class Linking(Protocol):
    """A folder in which a file may have a second name (`files.Files`)."""

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
    """The data files of a table (`data_file.DataFiles`). Any thread. `live` is replaced, never changed in place."""

    def __init__(self, files: Linking) -> None:
        self._files = files
        self.live: Mapping[str, FileEntry] = {}  # by path; the catalog sets it

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See DataFiles.

        Raises MissingFile for a live file that is missing, NotFound for one that has left the table.
        """
        try:
            return self._files.map_readonly(name, at_random=at_random)
        except NotFound:
            path = name.partition("/")[2]
            if self.put_back_one(path):
                return self._files.map_readonly(name, at_random=at_random)
            if (entry := self.live.get(path)) is not None:
                raise missing(entry) from None
            raise

    def keep(self, entries: Iterable[FileEntry]) -> None:
        """Link these files. A full disk is only logged, because links are optional."""
        if not self._files.has_links:
            return
        try:
            for entry in entries:
                if not self._files.exists(LIVE_FOLDER):
                    self._files.make_dir(LIVE_FOLDER)
                self._files.link(f"{FOLDER}/{entry.path}", live_name(entry.path))
        except OverLimit as error:
            logger.info("live data file not linked reason=%s", error)

    def keep_only(self, live: Mapping[str, FileEntry]) -> None:
        """Link all these files, and remove the links of others."""
        self.live = live
        linked = set(self._files.list_dir(LIVE_FOLDER)) if self._files.has_links else set()
        wanted = {live_name(path).rpartition("/")[2]: entry for path, entry in live.items()}
        for name in linked - wanted.keys():
            self._files.remove(f"{LIVE_FOLDER}/{name}")
        self.keep(entry for name, entry in wanted.items() if name not in linked)

    def put_back(self) -> list[FileEntry]:
        """Restore the names of live files from their links. Returns the files that cannot be restored."""
        buckets = {entry.path.partition("/")[0] for entry in self.live.values()}
        here = {
            f"{bucket}/{name}" for bucket in buckets for name in self._files.list_dir(f"{FOLDER}/{bucket}")
        }
        return [
            entry for path, entry in self.live.items() if path not in here and not self.put_back_one(path)
        ]

    def put_back_all(self, entries: Iterable[FileEntry]) -> None:
        """Restore the names of these files, if files have links."""
        if self._files.has_links:
            for entry in entries:
                self.put_back_one(entry.path)

    def put_back_one(self, path: str) -> bool:
        """Restore a file's name from its link. Returns whether the file exists now."""
        name, kept = f"{FOLDER}/{path}", live_name(path)
        if self._files.exists(name):
            return True
        entry = self.live.get(path)
        if not self._files.exists(kept) or (entry and self._files.size(kept) != entry.size_bytes):
            return False
        folder = name.rpartition("/")[0]
        self._files.make_dir(folder)
        self._files.link(kept, name)
        self._files.sync_dir(folder)
        logger.warning("data file was removed by another program and is put back file=%s", name)
        return self._files.exists(name)


def live_name(path: str) -> str:
    """Build the second name of a data file."""
    # Without its suffix: a reader of `pending/*/*.parquet` must not find the rows twice.
    return f"{LIVE_FOLDER}/{path.rpartition('/')[2].removesuffix('.parquet')}"


def remove(files: Linking, path: str) -> None:
    """Remove a data file under both its names."""
    files.remove(f"{FOLDER}/{path}")
    if files.has_links and files.exists(live_name(path)):
        files.remove(live_name(path))


def missing(entry: FileEntry) -> MissingFile:
    """Build the error for a missing live file."""
    return MissingFile(
        f"{FOLDER}/{entry.path} is missing: put this file back from a copy; its {entry.rows} messages are not "
        "delivered before, and all others are"
    )
