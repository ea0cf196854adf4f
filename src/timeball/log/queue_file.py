"""The files of the queue index. Each file contains the entries of all queues for one range of the log.

    byte  0           8        16          24         32      40       48      56
          +-----------+--------+-----------+----------+-------+--------+-------+---------+
          | "TBQUEUE1"| crc32c | first_seq | next_seq | runs  | blocks | names | entries |   little-endian
          +-----------+--------+-----------+----------+-------+--------+-------+---------+
          | runs: number of the name, queue, first offset, count                          |   24 bytes each
          | blocks: the crc32c of every 256 entries of a run                              |   4 bytes each
          | names of the topics, JSON                                                     |
          | entries, run after run: seq, size, tag                                        |   20 bytes each, big-endian
          +-------------------------------------------------------------------------------+

The first checksum covers the bytes after it up to the entries, and is checked when the file is opened. The entries of a
block are checked at *every* read, so an entry with a flipped bit is never used: it could direct a reader to another
row, or make a filter skip a message.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from timeball.io.files import Files
from timeball.log.queue_entry import ENTRY, EntryArray
from timeball.model.errors import Corrupt

logger = logging.getLogger(__name__)

FOLDER = "queues"
SUFFIX = ".cq"

MAGIC = b"TBQUEUE1"
HEADER = struct.Struct("<8sQ6q")
RUN = np.dtype([("name", "<u4"), ("queue", "<u4"), ("first_offset", "<i8"), ("count", "<i8")])
BLOCK_ENTRIES = 256  # 5 KB: the unit of checking, 1 us for a read of one entry


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive entries of one queue."""

    topic: str
    queue_id: int
    first_offset: int
    entries: EntryArray


def encode(first_seq: int, next_seq: int, parts: list[Part]) -> bytes:
    """Encode the file for the log's rows [first_seq, next_seq)."""
    # Converted to the file's byte order, because numpy's concatenate returns the native one.
    entry_bytes = [part.entries.astype(ENTRY, copy=False).tobytes() for part in parts]
    names: dict[str, int] = {}
    runs = np.empty(len(parts), RUN)
    for run_number, part in enumerate(parts):
        name_number = names.setdefault(part.topic, len(names))
        runs[run_number] = (name_number, part.queue_id, part.first_offset, len(part.entries))
    block_crcs: list[int] = []
    for entries in entry_bytes:
        block_crcs += _checksums(entries)
    names_json = msgspec.json.encode(list(names))
    tables = b"".join([runs.tobytes(), np.array(block_crcs, "<u4").tobytes(), names_json])
    # The checksum covers the counts too: with a wrong count, a reader would look for the tables among the entries.
    counts = struct.pack(
        "<6q",
        first_seq,
        next_seq,
        len(runs),
        len(block_crcs),
        len(names_json),
        sum(map(len, entry_bytes)) // ENTRY.itemsize,
    )
    crc = google_crc32c.value(counts + tables)
    return b"".join([struct.pack("<8sQ", MAGIC, crc), counts, tables, *entry_bytes])


def _checksums(entries: bytes) -> Iterator[int]:
    """Yield the checksum of each block of a run's entries."""
    step = BLOCK_ENTRIES * ENTRY.itemsize
    for position in range(0, len(entries), step):
        yield google_crc32c.value(entries[position : position + step])


class QueueFile:
    """An opened file. Every read of its runs is checked."""

    def __init__(self, name: str, buffer: pa.Buffer | bytes) -> None:
        """Open the file in `buffer`. Raises Corrupt if its tables do not match their checksum or the file's length."""
        self.name = name
        data = memoryview(buffer)
        try:
            magic, crc, self.first_seq, self.next_seq, *counts = HEADER.unpack_from(data)
            runs, blocks, names, entries = counts
            # Checked before any count is used, because numpy takes a negative count to mean "all".
            if min(counts) < 0 or magic != MAGIC:
                raise ValueError("not a queue file: bad magic or counts")
            blocks_at = HEADER.size + runs * RUN.itemsize
            names_at = blocks_at + 4 * blocks
            entries_at = names_at + names
            if entries_at + entries * ENTRY.itemsize != len(data):
                raise ValueError(f"{len(data)} bytes, not as many as its header says")
            if crc != google_crc32c.value(bytes(data[16:entries_at])):
                raise ValueError("wrong checksum over its tables")
        except (ValueError, struct.error) as error:
            raise Corrupt(f"{name}: {error}") from error
        self.runs = np.frombuffer(data, RUN, runs, HEADER.size)
        self.names: list[str] = msgspec.json.decode(data[names_at:entries_at], type=list[str])
        self._crcs = np.frombuffer(data, "<u4", blocks, blocks_at)
        self._entries = np.frombuffer(data, ENTRY, entries, entries_at)
        counts_of_runs = self.runs["count"].astype(np.int64)
        # The start of each run is computed from the counts alone: stored positions could contradict them.
        self._first_entry = np.cumsum(counts_of_runs) - counts_of_runs
        blocks_of_runs = -(-counts_of_runs // BLOCK_ENTRIES)
        self._first_block = np.cumsum(blocks_of_runs) - blocks_of_runs

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def queues(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield (number, topic, queue id, first offset, end offset) of each run. The end is exclusive."""
        for number, (name, queue_id, first, count) in enumerate(self.runs.tolist()):
            yield number, self.names[name], queue_id, first, first + count

    def read(self, run: int, begin: int, end: int) -> EntryArray:
        """Copy entries [begin, end) of a run, counted from its first entry. Raises Corrupt."""
        first, count = int(self._first_entry[run]), int(self.runs["count"][run])
        for block in range(begin // BLOCK_ENTRIES, -(-end // BLOCK_ENTRIES)):
            block_begin, block_end = block * BLOCK_ENTRIES, min(count, (block + 1) * BLOCK_ENTRIES)
            crc = google_crc32c.value(self._entries[first + block_begin : first + block_end].tobytes())
            if crc != self._crcs[int(self._first_block[run]) + block]:
                raise Corrupt(
                    f"{self.name}: entries {first + block_begin} to {first + block_end - 1} do not match their checksum"
                )
        return np.array(self._entries[first + begin : first + end])

    def parts(self) -> list[Part]:
        """Read the entries of all runs. Raises Corrupt."""
        return [
            Part(topic, queue_id, first, self.read(number, 0, end - first))
            for number, topic, queue_id, first, end in self.queues()
        ]


# ---- the files of the index -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The usable files of the index, without gaps. The newest will grow, so its entries (`tail`) go to memory."""

    sealed: list[QueueFile]
    tail: list[Part]
    open_seq: int  # first row that the newest file covers
    covered_seq: int  # the files and `tail` contain all entries of rows below it


def file_name(first_seq: int) -> str:
    """Build the name of the file whose range begins with row `first_seq`."""
    return f"{FOLDER}/{first_seq:020d}{SUFFIX}"


def write(files: Files, first_seq: int, next_seq: int, parts: list[Part]) -> str:
    """Write and sync the file for the log's rows [first_seq, next_seq). Returns its name."""
    name = file_name(first_seq)
    if not files.exists(FOLDER):
        files.make_dir(FOLDER)
    files.replace(name, encode(first_seq, next_seq, parts))
    return name


def open_files(files: Files, first_seq: int, to_seq: int) -> Opened:
    """Open the files that contain entries of the log's rows [first_seq, to_seq).

    A file that does not continue the one before it is removed: its entries can be rebuilt from the log.
    """
    covered_seq = first_seq
    usable: list[QueueFile] = []
    for file in _open_undamaged(files):
        # The first file may begin before the log's first row, because retention removes only whole files.
        continues = file.first_seq == covered_seq if usable else file.first_seq <= covered_seq
        if continues and covered_seq < file.next_seq and covered_seq < to_seq:
            usable.append(file)
            covered_seq = min(file.next_seq, to_seq)
        else:
            files.remove(file.name)
    # The newest file is read now, because its entries go to memory. A damaged one is not used: the replay of the log
    # rebuilds its entries, and the file before it becomes the newest.
    while (tail := _read_newest(usable, to_seq)) is None:
        covered_seq = max(first_seq, usable.pop().first_seq)
    return Opened(usable[:-1], tail, usable[-1].first_seq if usable else first_seq, covered_seq)


def remove_all(files: Files) -> None:
    """Remove all files of the index."""
    for name in _file_names(files):
        files.remove(name)


def _file_names(files: Files) -> list[str]:
    return [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]


def _open_undamaged(files: Files) -> list[QueueFile]:
    """Open the files whose tables match their checksum, oldest first."""
    opened = []
    for name in _file_names(files):
        try:
            opened.append(QueueFile(name, files.map_readonly(name)))
        except Corrupt as error:
            logger.warning("queue index is built from the log from here on reason=%s", error)
    return sorted(opened, key=lambda file: file.first_seq)


def _read_newest(usable: list[QueueFile], to_seq: int) -> list[Part] | None:
    """Read the newest file's entries of rows below `to_seq`, or None when the file is damaged."""
    try:
        parts = usable[-1].parts() if usable else []
    except Corrupt as error:
        logger.warning("queue index is built from the log from here on reason=%s", error)
        return None
    truncated = [
        Part(
            part.topic,
            part.queue_id,
            part.first_offset,
            part.entries[: np.searchsorted(part.entries["seq"], to_seq)],
        )
        for part in parts
    ]
    return [part for part in truncated if len(part.entries)]
