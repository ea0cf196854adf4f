"""The queue index: the log position of the n-th message of every (topic, queue), in memory and in files.

The newest entries of a queue are in memory. Older ones are in files, each with the entries of *all* queues for one
range of the log. So a queue needs no file, descriptor or sync of its own: creating a topic at first use does no I/O,
and a checkpoint writes and syncs one file, regardless of the number of changed queues.

    queues/<first seq>.cq    sealed   |  sealed   |  the open range: written again with every checkpoint
    memory                                        |  its entries

The open range is sealed when it contains SEAL_ENTRIES entries. Then they are read from the file and their memory is
freed.

The index is a cache. `load` accepts the files that follow each other without a gap from the log's first row on, and
recovery replays the log after them. If entries do not match their checksum at a read, the file is rebuilt from its
range of the log during that read. A reader always gets the correct entries: never another row, and never fewer.

The bytes of a file:

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
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from timeball.io.files import Files
from timeball.log.format import ENTRY, EntryArray
from timeball.model.errors import Corrupt, OutOfRange, OverLimit
from timeball.model.message import Int64Array

logger = logging.getLogger(__name__)

FOLDER = "queues"
SUFFIX = ".cq"

# ---- the content of a file -----------------------------------------------------------------------------------

MAGIC = b"TBQUEUE1"
# Magic, crc32c, first_seq, next_seq, and the numbers of runs, blocks, bytes of the names, and entries.
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
    """Encode the file for the log's rows [first_seq, next_seq), with a run for each of the `parts`."""
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


class RunRange(NamedTuple):
    """The entries of one queue in a file: a run. `number` is the position of the run among the runs of the file."""

    number: int
    topic: str
    queue_id: int
    first_offset: int
    end_offset: int  # exclusive


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

    def run_ranges(self) -> Iterator[RunRange]:
        """Yield the queue and the offsets of each run."""
        for number, (name, queue_id, first, count) in enumerate(self.runs.tolist()):
            yield RunRange(number, self.names[name], queue_id, first, first + count)

    def read(self, run: int, begin: int, end: int) -> EntryArray:
        """Copy entries [begin, end) of run number `run`, counted from its first entry.

        Raises Corrupt if a block with one of them does not match its checksum.
        """
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
            Part(
                run.topic,
                run.queue_id,
                run.first_offset,
                self.read(run.number, 0, run.end_offset - run.first_offset),
            )
            for run in self.run_ranges()
        ]


# ---- the files of the index -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedFiles:
    """The usable files of the index, without gaps. The newest will grow, so its entries (`tail`) go to memory."""

    sealed: list[QueueFile]  # all usable files but the newest
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


def open_files(files: Files, first_seq: int, to_seq: int) -> OpenedFiles:
    """Open the files that contain entries of the log's rows [first_seq, to_seq).

    A file is removed if it does not continue the one before it, or begins at `to_seq` or later: its entries can be
    rebuilt from the log.
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
    # rebuilds its entries, and the file before it becomes the newest. Without any file there are no entries to read.
    while (tail := _read_newest(usable, to_seq)) is None:
        covered_seq = max(first_seq, usable.pop().first_seq)
    return OpenedFiles(usable[:-1], tail, usable[-1].first_seq if usable else first_seq, covered_seq)


def remove_all(files: Files) -> None:
    """Remove all files of the index."""
    for name in file_names(files):
        files.remove(name)


def file_names(files: Files) -> list[str]:
    """List the index's files, relative to the data folder."""
    # Without the one that a checkpoint may be writing under another name.
    return [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]


def _open_undamaged(files: Files) -> list[QueueFile]:
    """Open the files whose tables match their checksum, oldest first."""
    opened = []
    for name in file_names(files):
        try:
            opened.append(QueueFile(name, files.map_readonly(name)))
        except Corrupt as error:
            logger.warning("queue index is built from the log from here on reason=%s", error)
    return sorted(opened, key=lambda file: file.first_seq)


def _read_newest(usable: list[QueueFile], to_seq: int) -> list[Part] | None:
    """Read the entries of rows below `to_seq` in the newest file. Returns [] without files, None if it is damaged."""
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


# ---- one queue -----------------------------------------------------------------------------------------------


SEAL_ENTRIES = 524_288  # 10 MB: bounds the entries in memory, and the bytes that each checkpoint writes again
FIRST_ALLOCATION = 8  # entries: a rarely used queue costs 160 bytes

Lengths = dict[str, dict[int, tuple[int, int]]]  # topic -> queue -> (min_offset, max_offset)
# Rebuilds the queue entries of the log's rows [first_seq, next_seq).
Rebuild = Callable[[int, int], list[Part]]


class _Run(NamedTuple):
    """Entries [first, end) of a queue, and the file and run that contain them."""

    first: int
    end: int
    file: QueueFile
    number: int


class _State(NamedTuple):
    """The locations of a queue's entries. It is replaced whole, so that other threads always see a consistent state."""

    runs: tuple[_Run, ...]
    tail_first: int
    tail: EntryArray  # from `tail_first` to the queue's end, then spare capacity


_NO_ENTRIES = np.empty(0, ENTRY)
_EMPTY = _State((), 0, _NO_ENTRIES)
# Offset, sequence numbers and sizes, as `read_numbers` caches them. No offset is -1.
_NO_NUMBERS: tuple[int, list[int], list[int]] = (-1, [], [])
_CACHED_NUMBERS_MAX = 64  # of each queue


class QueueIndex:
    """Entries of one queue. Offsets are dense from `min_offset` to `end_offset` (exclusive).

    Consumers see them up to `max_offset`. It is less than `end_offset` only in a topic of
    `QueueIndexes.limited_topics`.
    """

    __slots__ = (
        "_indexes", "_last_numbers", "_state", "end_offset", "max_offset", "min_offset", "queue_id", "topic",
    )  # fmt: skip

    def __init__(self, indexes: QueueIndexes, topic: str, queue_id: int) -> None:
        """Make an empty queue. Use QueueIndexes.queue instead, which also finds queues that are not empty."""
        self._indexes, self.topic, self.queue_id = indexes, topic, queue_id
        self.min_offset = self.max_offset = self.end_offset = 0
        self._state = _EMPTY
        # The last result of `read_numbers`, and its offset: groups that keep up with the queue all read the same.
        self._last_numbers = _NO_NUMBERS

    def append(self, seqs: Int64Array, sizes: Int64Array, tags: Int64Array) -> None:
        """Add entries at `end_offset`, in memory only. So it needs neither disk space nor a descriptor."""
        entries = self._next_entries(len(seqs))
        entries["seq"], entries["size"], entries["tag"] = seqs, sizes, tags
        self._count_entries(len(seqs))

    def extend(self, entries: EntryArray) -> None:
        """Add entries of type ENTRY as `append` does."""
        self._next_entries(len(entries))[:] = entries
        self._count_entries(len(entries))

    def _next_entries(self, count: int) -> EntryArray:
        """Return a view of the tail where the next `count` entries will be, which readers do not see yet."""
        begin = self.end_offset - self._state.tail_first
        return self._reserve_tail(begin + count)[begin : begin + count]

    def _count_entries(self, count: int) -> None:
        """Move `end_offset` behind `count` new entries, and `max_offset` unless the topic is limited."""
        self.end_offset += count
        self._indexes.unsealed += count
        if self.topic in self._indexes.limited_topics:
            self._indexes.on_hidden(self.topic)
        else:
            self.max_offset = self.end_offset

    def show(self, offset: int) -> None:
        """Let consumers see the entries before `offset`."""
        self.max_offset = min(max(offset, self.min_offset), self.end_offset)

    def start_at(self, offset: int) -> None:
        """Begin an empty queue at `offset`, because retention removed the entries before it."""
        assert self.min_offset == self.end_offset <= offset
        self.min_offset = self.max_offset = self.end_offset = offset
        self._state = _State((), offset, _NO_ENTRIES)
        self._indexes.register_used(self)

    def read(self, offset: int, count: int, *, is_kept: bool = True, hidden: bool = False) -> EntryArray:
        """Read up to `count` entries from `offset` on. Raises OutOfRange, Corrupt.

        With `is_kept` the result is a copy. Otherwise it may be a view of the entries in memory. With `hidden`, also
        entries that consumers do not see yet.
        """
        low, high = self.min_offset, self.end_offset if hidden else self.max_offset
        if not low <= offset <= high:
            raise OutOfRange(f"offset {offset}: this queue keeps {low} to {high}")
        end = min(offset + count, high)
        state = self._state
        # `_state` is read once: the event loop may seal between two reads, which changes where the tail begins.
        if offset >= state.tail_first:
            entries = state.tail[offset - state.tail_first : end - state.tail_first]
            return entries.copy() if is_kept else entries
        chunks = []
        # Read again in each round: a repair replaces the file, and a seal moves the tail's start forward.
        while offset < min(end, self._state.tail_first):
            chunk = self._read_sealed(offset, end)
            chunks.append(chunk)
            offset += len(chunk)
        state = self._state
        if offset < end:
            chunks.append(state.tail[offset - state.tail_first : end - state.tail_first])
        # With its type, because numpy would return the native byte order, which compiled readers do not understand.
        return np.concatenate(chunks, dtype=ENTRY) if chunks else _NO_ENTRIES.copy()

    def read_numbers(self, offset: int, count: int) -> tuple[list[int], list[int]]:
        """Read the sequence numbers and sizes of up to `count` entries from `offset` on.

        The lists must not be changed. Raises OutOfRange, Corrupt.
        """
        length = min(offset + count, self.max_offset) - offset
        last_offset, seqs, sizes_bytes = self._last_numbers
        if offset != last_offset or length != len(seqs) or offset < self.min_offset:
            entries = self.read(offset, count, is_kept=False)
            seqs, sizes_bytes = entries["seq"].tolist(), entries["size"].tolist()
            if length <= _CACHED_NUMBERS_MAX:
                self._last_numbers = offset, seqs, sizes_bytes
        return seqs, sizes_bytes

    def at(self, offsets: Int64Array) -> EntryArray:
        """Copy the entries at these offsets, in their order.

        Each offset must be in [min_offset, end_offset). Raises OutOfRange if one of them has just been hidden, and
        Corrupt.
        """
        entries = np.empty(len(offsets), ENTRY)
        _, tail_first, tail = self._state
        in_tail = offsets >= tail_first
        entries[in_tail] = tail[offsets[in_tail] - tail_first]
        # The indexes of the offsets whose entries are in files, by ascending offset.
        remaining = np.flatnonzero(~in_tail)
        remaining = remaining[np.argsort(offsets[remaining], kind="stable")]
        # Each round reads and checks one block, and takes all entries in it.
        while len(remaining):
            offset = int(offsets[remaining[0]])
            first = offset - (offset - self._find_run(offset).first) % BLOCK_ENTRIES
            block = self._read_sealed(first, first + BLOCK_ENTRIES)
            count = int(np.searchsorted(offsets[remaining], first + len(block)))
            entries[remaining[:count]] = block[offsets[remaining[:count]] - first]
            remaining = remaining[count:]
        return entries

    def hide(self, first_seq: int) -> None:
        """Hide the entries of rows before `first_seq`: `min_offset` moves past them."""
        self.hide_before(self.first_offset_from_seq(first_seq, hidden=True))

    def hide_before(self, offset: int) -> None:
        """Hide the entries before `offset`, and drop the runs that contain only such entries."""
        # First the offset, then the runs: a reader that misses its run must get OutOfRange.
        self.min_offset = max(self.min_offset, offset)
        self.max_offset = max(self.min_offset, self.max_offset)
        if self._state.runs and self._state.runs[0].end <= self.min_offset:
            with self._indexes.changing:
                runs, tail_first, tail = self._state
                self._state = _State(
                    tuple(run for run in runs if run.end > self.min_offset), tail_first, tail
                )

    def first_offset_from_seq(self, seq: int, from_offset: int = 0, *, hidden: bool = False) -> int:
        """Find the first offset from `from_offset` on whose row is `seq` or later. If there is none, `max_offset`.

        With `hidden`, also among the entries from `max_offset` on, and `end_offset` if there is none. Raises OutOfRange
        if retention removes the entries meanwhile, and Corrupt.
        """
        low, high = max(from_offset, self.min_offset), self.end_offset if hidden else self.max_offset
        if low >= high or int(self.read(low, 1, is_kept=False, hidden=hidden)["seq"][0]) >= seq:
            return min(low, high)
        while low < high:
            middle = (low + high) // 2
            if int(self.read(middle, 1, is_kept=False, hidden=hidden)["seq"][0]) < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def _read_sealed(self, offset: int, end: int) -> EntryArray:
        """Read entries from `offset` to `end`, or to the end of their file. Rebuilds a damaged file.

        Raises OutOfRange if the entries are hidden, and Corrupt if the file cannot be rebuilt.
        """
        run = self._find_run(offset)
        try:
            return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)
        except Corrupt as error:
            self._indexes.repair(run.file, error)
        run = self._find_run(offset)
        return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)

    def _find_run(self, offset: int) -> _Run:
        """Find the sealed run that contains `offset`. Raises OutOfRange if it is hidden, Corrupt if there is none."""
        runs = self._state.runs
        index = bisect_right(runs, offset, key=lambda run: run.first) - 1
        if index < 0 or offset >= runs[index].end:
            if offset < self.min_offset:
                raise OutOfRange(f"offset {offset}: this queue keeps {self.min_offset} to {self.max_offset}")
            raise Corrupt(f"queue {self.queue_id} of {self.topic!r} has no entry for offset {offset}")
        return runs[index]

    def _reserve_tail(self, entry_count: int) -> EntryArray:
        """Enlarge the tail to at least `entry_count` entries and return it."""
        tail = self._state.tail
        if len(tail) < entry_count:
            # Doubled, so that n appends copy O(n) entries. A new array instead of a resize in place: readers slice the
            # old one.
            grown = np.empty(max(FIRST_ALLOCATION, entry_count, 2 * len(tail)), ENTRY)
            with self._indexes.changing:
                runs, tail_first, tail = self._state
                grown[: len(tail)] = tail
                self._state = _State(runs, tail_first, grown)
            self._indexes.register_open(self)
            tail = grown
        return tail

    # -- for QueueIndexes, with `changing` held ------------------------------------------------------------

    @property
    def tail_first(self) -> int:
        """The offset of the first entry in memory, or the next one."""
        return self._state.tail_first

    def tail_part(self, end: int) -> Part:
        """Select the entries in memory before offset `end`."""
        _, tail_first, tail = self._state
        return Part(self.topic, self.queue_id, tail_first, tail[: end - tail_first])

    def seal(self, run: _Run) -> bool:
        """Read the entries of `run` from its file from now on. Returns false if no entries are left in memory."""
        runs, tail_first, tail = self._state
        unsealed = tail[run.end - tail_first : self.end_offset - tail_first]
        # Copied, because a view would keep the whole sealed array in memory.
        self._state = _State((*runs, run), run.end, unsealed.copy() if len(unsealed) else _NO_ENTRIES)
        return bool(len(unsealed))

    def add_sealed_run(self, run: _Run) -> None:
        """Add a run of a file that exists at the start. Raises Corrupt if it leaves a gap."""
        if not self._state.runs:
            self.min_offset = self.end_offset = run.first
        _check_follows(self, run.first)
        self._state = _State((*self._state.runs, run), run.end, _NO_ENTRIES)
        self.max_offset = self.end_offset = run.end

    def clear(self) -> None:
        """Drop all entries."""
        self.min_offset = self.max_offset = self.end_offset = 0
        self._state = _EMPTY
        self._last_numbers = _NO_NUMBERS

    def replace_runs(self, file: QueueFile, replacement: _Run | None) -> None:
        """Replace the run in `file` with `replacement`, or remove it if that is None."""
        runs, tail_first, tail = self._state
        replaced = tuple(replacement if run.file is file else run for run in runs)
        self._state = _State(tuple(run for run in replaced if run is not None), tail_first, tail)


def first_offsets(indexes: list[QueueIndex], first_seq: int) -> list[int]:
    """Find, for each queue, the offset of the first row from `first_seq` on, hidden or not (any thread).

    Each offset takes some reads of files with checksums, so the event loop must not do this for many queues.
    """
    offsets = list[int]()
    while len(offsets) < len(indexes):
        # Tried again: the event loop may have emptied the topic between two reads, and its offsets begin later.
        with suppress(OutOfRange):
            offsets.append(indexes[len(offsets)].first_offset_from_seq(first_seq, hidden=True))
    return offsets


def _check_follows(index: QueueIndex, first_offset: int) -> None:
    """Raise Corrupt unless `first_offset` continues the entries of `index`."""
    if index.end_offset != first_offset:
        raise Corrupt(
            f"queue {index.queue_id} of {index.topic!r} has no entry for offset {index.end_offset} in its files"
        )


# ---- all queues, and the flush at a checkpoint ---------------------------------------------------------------


@dataclass(slots=True)
class Flush:
    """The entries of the open range that a checkpoint writes. Made on the event loop, written in another thread."""

    files: Files
    first_seq: int
    next_seq: int
    indexes: list[QueueIndex]  # queues with entries in memory
    ends: list[int]  # the end offset of each of them when this was made
    used: list[QueueIndex]  # all queues that have, or have had, entries
    seals: bool  # True if `finish` will seal the range, because it has SEAL_ENTRIES entries
    written: QueueFile | None = None

    @property
    def parts(self) -> list[Part]:
        """The entries in memory at the time of `flush` (any thread)."""
        return [index.tail_part(end) for index, end in zip(self.indexes, self.ends, strict=True)]

    def lengths(self) -> Lengths:
        """Compute the first and end offset of every queue at the time of `flush`, for the checkpoint (any thread)."""
        lengths: Lengths = {}
        ends = dict(zip(self.indexes, self.ends, strict=True))
        for index in self.used:
            # A queue without entries in memory at that time ended where its files end, even if entries have been added
            # since.
            end = ends.get(index, index.tail_first)
            if end:
                lengths.setdefault(index.topic, {})[index.queue_id] = (min(index.min_offset, end), end)
        return lengths

    def write(self) -> None:
        """Write and sync the file (any thread)."""
        name = write(self.files, self.first_seq, self.next_seq, self.parts)
        if self.seals:
            self.written = QueueFile(name, self.files.map_readonly(name))


class QueueIndexes:
    """The entries of all queues and their files. Methods belong to the event loop unless they state otherwise."""

    def __init__(self, files: Files, rebuild: Rebuild | None = None) -> None:
        """`rebuild` reads a range of the log. Without it, damage raises Corrupt for the reader."""
        self._files, self.rebuild = files, rebuild
        self._sealed: list[QueueFile] = []
        self._used: dict[tuple[str, int], QueueIndex] = {}
        self._open: dict[QueueIndex, None] = {}  # queues with entries in memory, in order
        self._first_seq = 1  # first row of the open range
        self.unsealed = 0  # number of entries in memory
        self.changing = threading.Lock()  # held during every change of a queue's state
        # One repair at a time: other readers of the damaged file wait, and then find it repaired.
        self._repairing = threading.Lock()
        # Topics whose new entries consumers do not see before `QueueIndex.show`. Each new entry calls `on_hidden`.
        self.limited_topics: set[str] = set()
        self.on_hidden: Callable[[str], None] = lambda topic: None

    def queue(self, topic: str, queue_id: int) -> QueueIndex:
        """Get the queue, or a new empty one."""
        return self._used.get((topic, queue_id)) or QueueIndex(self, topic, queue_id)

    def used(self) -> Iterator[QueueIndex]:
        """Yield the queues that have, or have had, entries."""
        yield from self._used.values()

    def register_used(self, index: QueueIndex) -> None:
        """Record that this queue has, or has had, entries."""
        self._used[index.topic, index.queue_id] = index

    def register_open(self, index: QueueIndex) -> None:
        """Record that this queue has entries in memory."""
        self.register_used(index)
        self._open[index] = None

    def load(self, first_seq: int, to_seq: int) -> int:
        """Open the files, before anything is appended. Returns the row up to which they are complete.

        The log is kept from `first_seq` on, and the checkpoint covers the rows below `to_seq`. Removes files as
        `open_files` does. Raises Corrupt if a queue lacks entries between two files.
        """
        opened = open_files(self._files, first_seq, to_seq)
        self._sealed, self._first_seq = opened.sealed, opened.open_seq
        for file in self._sealed:
            for run in file.run_ranges():
                key = run.topic, run.queue_id
                index = self._used.setdefault(key, QueueIndex(self, *key))
                index.add_sealed_run(_Run(run.first_offset, run.end_offset, file, run.number))
        for part in opened.tail:
            index = self.queue(part.topic, part.queue_id)
            if index.end_offset == 0:
                index.start_at(part.first_offset)
            _check_follows(index, part.first_offset)
            index.extend(part.entries)
        return opened.covered_seq

    def clear(self, first_seq: int) -> None:
        """Drop all entries in memory and on disk, before a replay of the whole log from `first_seq` on."""
        remove_all(self._files)
        for index in self._used.values():
            index.clear()
        self._sealed, self._open, self.unsealed = [], {}, 0
        self._first_seq = first_seq

    # -- writing -------------------------------------------------------------------------------------------

    def flush(self, next_seq: int) -> Flush:
        """Collect the entries that must be written before a checkpoint may cover the rows below `next_seq`."""
        seals = self.unsealed >= SEAL_ENTRIES
        ends = [index.end_offset for index in self._open]
        used = list(self._used.values())
        return Flush(self._files, self._first_seq, next_seq, list(self._open), ends, used, seals)

    def finish(self, flush: Flush) -> None:
        """Finish a written flush. If it seals the range, its entries are read from the file from now on."""
        # Either the flush does not seal, or the range was sealed or cleared while this flush was being written.
        if flush.written is None or flush.first_seq != self._first_seq:
            return
        with self.changing:
            for number, (index, end) in enumerate(zip(flush.indexes, flush.ends, strict=True)):
                run = _Run(index.tail_first, end, flush.written, number)
                if not index.seal(run):
                    self._open.pop(index, None)
                self.unsealed -= run.end - run.first
            self._sealed.append(flush.written)
            self._first_seq = flush.next_seq

    def seal_if_large(self, next_seq: int) -> None:
        """Write and seal the open range, which ends before row `next_seq`, if it is large.

        Blocks, so only a recovery calls it.
        """
        if self.unsealed >= SEAL_ENTRIES:
            flush = self.flush(next_seq)
            flush.write()
            self.finish(flush)

    # -- retention and damage ------------------------------------------------------------------------------

    def forget(self, first_seq: int) -> list[str]:
        """Hide the entries of rows before `first_seq`, and forget the files that contain only such entries.

        Returns the names of these files, which the caller must remove. Reads files, so it blocks: only a recovery calls
        it.
        """
        indexes = self.find_queues_before(first_seq)
        for index, offset in zip(indexes, first_offsets(indexes, first_seq), strict=True):
            index.hide_before(offset)
        return self.forget_files(first_seq)

    def find_queues_before(self, first_seq: int) -> list[QueueIndex]:
        """List the queues that may have entries of rows before `first_seq` (any thread)."""
        files = [file for file in self._sealed if file.first_seq < first_seq]
        keys = dict.fromkeys((run.topic, run.queue_id) for file in files for run in file.run_ranges())
        indexes = dict.fromkeys(self._used[key] for key in keys)
        return list(indexes | self._open if self._first_seq < first_seq else indexes)

    def forget_files(self, first_seq: int) -> list[str]:
        """Forget files with only rows before `first_seq`. Returns their names: the caller must remove them.

        The entries of these rows must be hidden. In the file that contains `first_seq`, they stay.
        """
        expired_count = sum(file.next_seq <= first_seq for file in self._sealed)
        with self.changing:
            expired_names = [file.name for file in self._sealed[:expired_count]]
            self._sealed = self._sealed[expired_count:]
        return expired_names

    def repair(self, damaged: QueueFile, error: Corrupt) -> None:
        """Rebuild a damaged file from its range of the log. Raises Corrupt without a log to read (any thread)."""
        if self.rebuild is None:
            raise error
        with self._repairing:
            if damaged not in self._sealed:
                return  # another reader has repaired it
            logger.warning("queue index file built again from the log reason=%s", error)
            # The whole file is rebuilt: its undamaged parts are not trusted either, while the log checks its own
            # frames.
            first_seq, next_seq = damaged.first_seq, damaged.next_seq
            data = encode(first_seq, next_seq, self.rebuild(first_seq, next_seq))
            try:
                self._files.replace(damaged.name, data)
            except OverLimit as full:
                logger.warning("queue index file kept in memory alone file=%s reason=%s", damaged.name, full)
            rebuilt = QueueFile(damaged.name, data)
            runs = {
                (run.topic, run.queue_id): _Run(run.first_offset, run.end_offset, rebuilt, run.number)
                for run in rebuilt.run_ranges()
            }
            with self.changing:
                for run in damaged.run_ranges():
                    key = run.topic, run.queue_id
                    self._used[key].replace_runs(damaged, runs.get(key))
                self._sealed = [rebuilt if file is damaged else file for file in self._sealed]
