"""Queue index: the log position of the n-th message of every (topic, queue).

The newest entries of a queue are in memory. Older ones are in files, each with the entries of *all* queues for one
range of the log (queue_file.py). So a queue needs no file, descriptor or sync of its own: creating a topic at first use
does no I/O, and a checkpoint writes and syncs one file, regardless of the number of changed queues.

    queues/<first seq>.cq    sealed   |  sealed   |  the open range: written again with every checkpoint
    memory                                        |  its entries

The open range is sealed when it contains SEAL_ENTRIES entries. Then they are read from the file and their memory is
freed.

The index is a cache. `load` accepts the files that follow each other without a gap from the log's first row on, and
recovery replays the log after them. If entries do not match their checksum at a read, the file is rebuilt from its
range of the log during that read. A reader always gets the correct entries: never another row, and never fewer.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from timeball.io.files import Files
from timeball.log import queue_file
from timeball.log.queue_entry import ENTRY, EntryArray
from timeball.log.queue_file import BLOCK_ENTRIES, Part, QueueFile
from timeball.model.errors import Corrupt, OutOfRange, OverLimit
from timeball.model.message import Int64Array

logger = logging.getLogger(__name__)

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


class QueueIndex:
    """Entries of one queue. Offsets are dense from `min_offset` to `max_offset` (exclusive)."""

    __slots__ = ("_indexes", "_state", "max_offset", "min_offset", "queue_id", "topic")

    def __init__(self, indexes: QueueIndexes, topic: str, queue_id: int) -> None:
        """Make an empty queue. Use QueueIndexes.queue instead, which also finds queues that are not empty."""
        self._indexes, self.topic, self.queue_id = indexes, topic, queue_id
        self.min_offset = self.max_offset = 0
        self._state = _EMPTY

    def append(self, seqs: Int64Array, sizes: Int64Array, tags: Int64Array) -> None:
        """Add entries at `max_offset`, in memory only. So it needs neither disk space nor a descriptor."""
        entries = np.empty(len(seqs), ENTRY)
        entries["seq"], entries["size"], entries["tag"] = seqs, sizes, tags
        self.extend(entries)

    def extend(self, entries: EntryArray) -> None:
        """Add entries of type ENTRY as `append` does."""
        count, begin = len(entries), self.max_offset - self._state.tail_first
        self._reserve_tail(begin + count)[begin : begin + count] = entries
        self.max_offset += count
        self._indexes.unsealed += count

    def start_at(self, offset: int) -> None:
        """Begin an empty queue at `offset`, because retention removed the entries before it."""
        assert self.min_offset == self.max_offset <= offset
        self.min_offset = self.max_offset = offset
        self._state = _State((), offset, _NO_ENTRIES)
        self._indexes.register_used(self)

    def read(self, offset: int, count: int, *, is_kept: bool = True) -> EntryArray:
        """Read up to `count` entries from `offset` on. Raises OutOfRange.

        With `is_kept` the result is a copy. Otherwise it may be a view of the entries in memory.
        """
        low, high = self.min_offset, self.max_offset
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
        return np.concatenate(chunks) if chunks else _NO_ENTRIES.copy()

    def at(self, offsets: Int64Array) -> EntryArray:
        """Copy the entries at these offsets, each from `min_offset` up to but not including `max_offset`."""
        entries = np.empty(len(offsets), ENTRY)
        _, tail_first, tail = self._state
        in_tail = offsets >= tail_first
        entries[in_tail] = tail[offsets[in_tail] - tail_first]
        remaining = np.flatnonzero(~in_tail)
        remaining = remaining[np.argsort(offsets[remaining], kind="stable")]
        # `remaining` are the indexes of offsets whose entries are in files, by ascending offset. Each round reads and
        # checks one block, and takes all entries in it.
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
        self.min_offset = self.first_offset_from_seq(first_seq)

    def first_offset_from_seq(self, seq: int, from_offset: int = 0) -> int:
        """Find the first offset from `from_offset` on whose row is `seq` or later. If there is none, `max_offset`."""
        low, high = max(from_offset, self.min_offset), self.max_offset
        if low >= high or int(self.read(low, 1, is_kept=False)["seq"][0]) >= seq:
            return min(low, high)
        while low < high:
            middle = (low + high) // 2
            if int(self.read(middle, 1, is_kept=False)["seq"][0]) < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def _read_sealed(self, offset: int, end: int) -> EntryArray:
        """Read entries from `offset` to `end` or to the end of their file. Rebuilds a damaged file."""
        run = self._find_run(offset)
        try:
            return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)
        except Corrupt as error:
            self._indexes.repair(run.file, error)
        run = self._find_run(offset)
        return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)

    def _find_run(self, offset: int) -> _Run:
        """Find the sealed run that contains `offset`. Raises Corrupt if there is none."""
        runs = self._state.runs
        index = bisect_right(runs, offset, key=lambda run: run.first) - 1
        if index < 0 or offset >= runs[index].end:
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
        """The entries in memory before offset `end`."""
        _, tail_first, tail = self._state
        return Part(self.topic, self.queue_id, tail_first, tail[: end - tail_first])

    def seal(self, run: _Run) -> bool:
        """Read the entries of `run` from its file from now on. Returns false when none are left in memory."""
        runs, tail_first, tail = self._state
        unsealed = tail[run.end - tail_first : self.max_offset - tail_first]
        # Copied, because a view would keep the whole sealed array in memory.
        self._state = _State((*runs, run), run.end, unsealed.copy() if len(unsealed) else _NO_ENTRIES)
        return bool(len(unsealed))

    def add_sealed_run(self, run: _Run) -> None:
        """Add a run of a file that exists at the start. Raises Corrupt if it leaves a gap."""
        if not self._state.runs:
            self.min_offset = self.max_offset = run.first
        _check_follows(self, run.first)
        self._state = _State((*self._state.runs, run), run.end, _NO_ENTRIES)
        self.max_offset = run.end

    def clear(self) -> None:
        """Drop all entries."""
        self.min_offset = self.max_offset = 0
        self._state = _EMPTY

    def replace_runs(self, file: QueueFile, replacement: _Run | None) -> None:
        """Replace the run in `file` with `fresh`, or remove it if `fresh` is None."""
        runs, tail_first, tail = self._state
        kept = tuple(replacement if run.file is file else run for run in runs)
        self._state = _State(tuple(run for run in kept if run is not None), tail_first, tail)

    def forget_runs(self, removed_names: set[str]) -> None:
        """Drop the entries in these files, which are the oldest."""
        runs, tail_first, tail = self._state
        kept = tuple(run for run in runs if run.file.name not in removed_names)
        self._state = _State(kept, tail_first, tail)
        self.min_offset = max(self.min_offset, kept[0].first if kept else tail_first)


def _check_follows(index: QueueIndex, first_offset: int) -> None:
    """Raise Corrupt unless `first_offset` continues the entries of `index`."""
    if index.max_offset != first_offset:
        raise Corrupt(
            f"queue {index.queue_id} of {index.topic!r} has no entry for offset {index.max_offset} in its files"
        )


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
        name = queue_file.write(self.files, self.first_seq, self.next_seq, self.parts)
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

        The log is kept from `first_seq` on, and the checkpoint covers the rows below `to_seq`. A file that does not
        continue the one before it is removed, because its entries can be rebuilt from the log.
        """
        opened = queue_file.open_files(self._files, first_seq, to_seq)
        self._sealed, self._first_seq = opened.sealed, opened.open_seq
        for file in self._sealed:
            for number, topic, queue_id, first, end in file.queues():
                index = self._used.setdefault((topic, queue_id), QueueIndex(self, topic, queue_id))
                index.add_sealed_run(_Run(first, end, file, number))
        for part in opened.tail:
            index = self.queue(part.topic, part.queue_id)
            if index.max_offset == 0:
                index.start_at(part.first_offset)
            _check_follows(index, part.first_offset)
            index.append(part.entries["seq"], part.entries["size"], part.entries["tag"])
        return opened.covered_seq

    def clear(self, first_seq: int) -> None:
        """Drop all entries in memory and on disk, before a replay of the whole log from `first_seq` on."""
        queue_file.remove_all(self._files)
        for index in self._used.values():
            index.clear()
        self._sealed, self._open, self.unsealed = [], {}, 0
        self._first_seq = first_seq

    # -- writing -------------------------------------------------------------------------------------------

    def flush(self, next_seq: int) -> Flush:
        """Collect the entries that must be written before a checkpoint may cover the rows below `next_seq`."""
        seals = self.unsealed >= SEAL_ENTRIES
        ends = [index.max_offset for index in self._open]
        used = list(self._used.values())
        return Flush(self._files, self._first_seq, next_seq, list(self._open), ends, used, seals)

    def finish(self, flush: Flush) -> None:
        """Finish a written flush. If it seals the range, read it from its file from now on and free its memory."""
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
        """Write and seal the open range when it is large enough. Blocking: for recovery."""
        if self.unsealed >= SEAL_ENTRIES:
            flush = self.flush(next_seq)
            flush.write()
            self.finish(flush)

    # -- retention and damage ------------------------------------------------------------------------------

    def forget(self, first_seq: int) -> list[str]:
        """Drop the entries of rows before `first_seq`. Returns the names of the files that the caller must remove."""
        expired_files = [file for file in self._sealed if file.next_seq <= first_seq]
        expired_names = {file.name for file in expired_files}
        affected = {(topic, queue) for file in expired_files for _, topic, queue, _, _ in file.queues()}
        with self.changing:
            for key in affected:
                self._used[key].forget_runs(expired_names)
            self._sealed = self._sealed[len(expired_files) :]
        # Only whole files are dropped. In the file that contains `first_seq`, and in memory, the earlier offsets are
        # hidden.
        boundary_file = self._sealed[0] if self._sealed and self._sealed[0].first_seq < first_seq else None
        keys = [(topic, queue) for _, topic, queue, _, _ in boundary_file.queues()] if boundary_file else []
        trimmed = [self._used[key] for key in keys]
        trimmed += list(self._open) if self._first_seq < first_seq else []
        for index in trimmed:
            index.hide(first_seq)
        return sorted(expired_names)

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
            data = queue_file.encode(first_seq, next_seq, self.rebuild(first_seq, next_seq))
            try:
                self._files.replace(damaged.name, data)
            except OverLimit as full:
                logger.warning("queue index file kept in memory alone file=%s reason=%s", damaged.name, full)
            rebuilt = QueueFile(damaged.name, data)
            runs = {
                (topic, queue): _Run(first, end, rebuilt, number)
                for number, topic, queue, first, end in rebuilt.queues()
            }
            with self.changing:
                for _, topic, queue, _, _ in damaged.queues():
                    self._used[topic, queue].replace_runs(damaged, runs.get((topic, queue)))
                self._sealed = [rebuilt if file is damaged else file for file in self._sealed]
