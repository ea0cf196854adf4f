"""The files of the queue index on the disk: their names, and which of them a start can use."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.log.queue_file import Part, QueueFile

logger = logging.getLogger(__name__)

FOLDER = "queues"
SUFFIX = ".cq"


@dataclass(frozen=True, slots=True)
class Opened:
    """Files that follow each other without a hole, and the entries of the newest one, for memory."""

    sealed: list[QueueFile]
    tail: list[Part]
    open_seq: int  # the row that the newest one begins with
    covered_seq: int  # they hold what the rows below put into the queues


def file_name(first_seq: int) -> str:
    """Return the name of the file that begins with this row."""
    return f"{FOLDER}/{first_seq:020d}{SUFFIX}"


def open_files(files: Files, first_seq: int, to_seq: int) -> Opened:
    """Open what is there for the rows [first_seq, to_seq) of the log.

    A file that does not follow the one before it is removed: the log says what was in it.
    """
    covered = first_seq
    usable: list[QueueFile] = []
    for file in _whole(files):
        follows = file.first_seq == covered if usable else file.first_seq <= covered
        if follows and covered < file.next_seq and covered < to_seq:
            usable.append(file)
            covered = min(file.next_seq, to_seq)
        else:
            files.remove(file.name)
    while (tail := _newest(usable, to_seq)) is None:
        covered = max(first_seq, usable.pop().first_seq)
    return Opened(usable[:-1], tail, usable[-1].first_seq if usable else first_seq, covered)


def remove_all(files: Files) -> None:
    """Remove every file of the index."""
    for name in _names(files):
        files.remove(name)


def _names(files: Files) -> list[str]:
    return [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]


def _whole(files: Files) -> list[QueueFile]:
    """Return the files whose tables match their checksum, oldest first."""
    found = []
    for name in _names(files):
        try:
            found.append(QueueFile(name, files.map_readonly(name)))
        except Corrupt as error:
            logger.warning("queue index is built from the log from here on reason=%s", error)
    return sorted(found, key=lambda file: file.first_seq)


def _newest(usable: list[QueueFile], to_seq: int) -> list[Part] | None:
    """Return what the newest file holds of rows below `to_seq`; None when it is damaged."""
    try:
        parts = usable[-1].parts() if usable else []
    except Corrupt as error:
        logger.warning("queue index is built from the log from here on reason=%s", error)
        return None
    cut = [
        Part(p.topic, p.queue_id, p.first_offset, p.entries[: np.searchsorted(p.entries["seq"], to_seq)])
        for p in parts
    ]
    return [part for part in cut if len(part.entries)]
