"""Queue index: where the n-th message of every (topic, queue) stands in the log.

The newest entries of a queue are in memory; older ones lie in files that hold the entries of *all* queues for one
stretch of the log (queue_file.py). So a queue costs neither a file nor a descriptor nor a sync of its own: a topic that
is made on first use does no I/O, and a checkpoint writes and syncs one file however many queues got something.

    queues/<first seq>.cq    sealed   |  sealed   |  the open stretch: written again with every checkpoint
    memory                                        |  its entries

The open stretch is sealed when it holds SEAL_ENTRIES: then its entries are read from the file and memory is free again.

A cache. `load` uses files as far as they follow each other without a hole from the log's first row on; recovery
replays the log behind them. A file whose entries do not match their checksums when they are read is built again from
its stretch of the log, there and then: a reader gets what the log says, never another row and never fewer.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from timeball.errors import Corrupt, OutOfRange, OverLimit
from timeball.files import Files
from timeball.log import queue_file
from timeball.log.queue_entry import ENTRY, EntryArray
from timeball.log.queue_file import BLOCK_ENTRIES, Part, QueueFile
from timeball.message import Int64Array

logger = logging.getLogger(__name__)

SEAL_ENTRIES = 524_288  # 10 MB: what a checkpoint writes again at most, and what stays in memory
FIRST_ALLOCATION = 8  # entries; a queue that is hardly used costs 160 bytes

Lengths = dict[str, dict[int, tuple[int, int]]]  # topic -> queue -> (min_offset, max_offset)
Rebuild = Callable[[int, int], list[Part]]  # what the log's rows of [first_seq, next_seq) put into the queues


class _Run(NamedTuple):
    """Entries [first, end) of a queue, and where they stand."""

    first: int
    end: int
    file: QueueFile
    number: int


class _State(NamedTuple):
    """The places of a queue's entries; replaced whole, so that other threads always see a consistent one."""

    runs: tuple[_Run, ...]
    tail_first: int
    tail: EntryArray  # from `tail_first` to the queue's end, and room behind


_NO_ENTRIES = np.empty(0, ENTRY)
_EMPTY = _State((), 0, _NO_ENTRIES)


class QueueIndex:
    """Entries of one queue. Positions are dense from `min_offset` to `max_offset` (exclusive)."""

    __slots__ = ("_indexes", "_state", "max_offset", "min_offset", "queue_id", "topic")

    def __init__(self, indexes: QueueIndexes, topic: str, queue_id: int) -> None:
        """Make an empty queue; QueueIndexes.queue does, which knows those that are not."""
        self._indexes, self.topic, self.queue_id = indexes, topic, queue_id
        self.min_offset = self.max_offset = 0
        self._state = _EMPTY

    def append(self, seqs: Int64Array, sizes: Int64Array, tags: Int64Array) -> None:
        """Add entries behind `max_offset`. In memory alone: it cannot fail for want of a disk or a descriptor."""
        entries = np.empty(len(seqs), ENTRY)
        entries["seq"], entries["size"], entries["tag"] = seqs, sizes, tags
        self.extend(entries)

    def extend(self, entries: EntryArray) -> None:
        """`append` for entries as they are, (seq, size, tag)."""
        count, begin = len(entries), self.max_offset - self._state.tail_first
        self._room(begin + count)[begin : begin + count] = entries
        self.max_offset += count
        self._indexes.unsealed += count

    def start_at(self, offset: int) -> None:
        """Begin an empty queue at `offset`: what came before has been let go by retention."""
        assert self.min_offset == self.max_offset <= offset
        self.min_offset = self.max_offset = offset
        self._state = _State((), offset, _NO_ENTRIES)
        self._indexes.note_used(self)

    def read(self, offset: int, count: int, *, is_kept: bool = True) -> EntryArray:
        """Return up to `count` entries from `offset` on, copied if they are to be kept; raises OutOfRange."""
        low, high = self.min_offset, self.max_offset
        if not low <= offset <= high:
            raise OutOfRange(f"offset {offset}: this queue keeps {low} to {high}")
        end = min(offset + count, high)
        state = self._state
        # One look at `_state`: the loop may seal between two, and then the tail begins elsewhere.
        if offset >= state.tail_first:
            found = state.tail[offset - state.tail_first : end - state.tail_first]
            return found.copy() if is_kept else found
        parts = []
        # Read anew in each round: a repair replaces the file, and a seal moves the tail's start further on.
        while offset < min(end, self._state.tail_first):
            part = self._from_file(offset, end)
            parts.append(part)
            offset += len(part)
        state = self._state
        if offset < end:
            parts.append(state.tail[offset - state.tail_first : end - state.tail_first])
        return np.concatenate(parts) if parts else _NO_ENTRIES.copy()

    def at(self, offsets: Int64Array) -> EntryArray:
        """Return the entries at these offsets, each between `min_offset` and `max_offset`, copied."""
        found = np.empty(len(offsets), ENTRY)
        _, tail_first, tail = self._state
        in_tail = offsets >= tail_first
        found[in_tail] = tail[offsets[in_tail] - tail_first]
        left = np.flatnonzero(~in_tail)
        left = left[np.argsort(offsets[left], kind="stable")]
        while len(left):  # a block is checked once, however many of its entries are wanted
            offset = int(offsets[left[0]])
            first = offset - (offset - self._run(offset).first) % BLOCK_ENTRIES
            block = self._from_file(first, first + BLOCK_ENTRIES)
            count = int(np.searchsorted(offsets[left], first + len(block)))
            found[left[:count]] = block[offsets[left[:count]] - first]
            left = left[count:]
        return found

    def hide(self, first_seq: int) -> None:
        """Forget entries of rows before `first_seq`."""
        self.min_offset = self.first_at(first_seq)

    def first_at(self, seq: int, from_offset: int = 0) -> int:
        """Return the first offset, from `from_offset` on, whose row is `seq` or a later one; else the queue's end."""
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

    def _from_file(self, offset: int, end: int) -> EntryArray:
        """Return entries from `offset` on as far as their file goes; a file that is damaged is built again."""
        run = self._run(offset)
        try:
            return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)
        except Corrupt as error:
            self._indexes.repair(run.file, error)
        run = self._run(offset)
        return run.file.read(run.number, offset - run.first, min(end, run.end) - run.first)

    def _run(self, offset: int) -> _Run:
        runs = self._state.runs
        at = bisect_right(runs, offset, key=lambda run: run.first) - 1
        if at < 0 or offset >= runs[at].end:
            raise Corrupt(f"queue {self.queue_id} of {self.topic!r} has no entry for offset {offset}")
        return runs[at]

    def _room(self, entries: int) -> EntryArray:
        """Return the tail, grown to hold `entries`."""
        tail = self._state.tail
        if len(tail) < entries:
            # Doubled, so that n appends copy O(n). A new array, never resized in place: readers slice the old one.
            grown = np.empty(max(FIRST_ALLOCATION, entries, 2 * len(tail)), ENTRY)
            with self._indexes.changing:
                runs, first, tail = self._state
                grown[: len(tail)] = tail
                self._state = _State(runs, first, grown)
            self._indexes.note_open(self)
            tail = grown
        return tail

    # -- for QueueIndexes, with `changing` held ------------------------------------------------------------

    @property
    def tail_first(self) -> int:
        """The offset of the first entry in memory, or the next one."""
        return self._state.tail_first

    def tail_part(self, end: int) -> Part:
        """Return the entries in memory up to an offset."""
        _, first, tail = self._state
        return Part(self.topic, self.queue_id, first, tail[: end - first])

    def seal(self, run: _Run) -> bool:
        """Read the entries of `run` from its file from now on; false when none are left in memory."""
        runs, first, tail = self._state
        rest = tail[run.end - first : self.max_offset - first]
        # Copied, or the view would keep the whole sealed array in memory.
        self._state = _State((*runs, run), run.end, rest.copy() if len(rest) else _NO_ENTRIES)
        return bool(len(rest))

    def loaded(self, run: _Run) -> None:
        """Add a run of a file that was there at the start; raises Corrupt when it does not follow."""
        if not self._state.runs:
            self.min_offset = self.max_offset = run.first
        _check_follows(self, run.first)
        self._state = _State((*self._state.runs, run), run.end, _NO_ENTRIES)
        self.max_offset = run.end

    def clear(self) -> None:
        """Forget everything."""
        self.min_offset = self.max_offset = 0
        self._state = _EMPTY

    def replace_runs(self, file: QueueFile, fresh: _Run | None) -> None:
        """Replace the run in `file` with `fresh`."""
        runs, first, tail = self._state
        kept = tuple(fresh if run.file is file else run for run in runs)
        self._state = _State(tuple(run for run in kept if run is not None), first, tail)

    def forget_runs(self, gone: set[str]) -> None:
        """Forget the entries in these files, the oldest."""
        runs, first, tail = self._state
        kept = tuple(run for run in runs if run.file.name not in gone)
        self._state = _State(kept, first, tail)
        self.min_offset = max(self.min_offset, kept[0].first if kept else first)


def _check_follows(index: QueueIndex, first_offset: int) -> None:
    if index.max_offset != first_offset:
        raise Corrupt(
            f"queue {index.queue_id} of {index.topic!r} has no entry for offset {index.max_offset} in its files"
        )


@dataclass(slots=True)
class Flush:
    """The part of the open stretch that a checkpoint writes: made on the loop, written in a thread."""

    files: Files
    first_seq: int
    next_seq: int
    indexes: list[QueueIndex]  # that have entries in memory
    ends: list[int]  # where each of them ended then
    used: list[QueueIndex]  # all that have, or have had, entries
    seals: bool
    written: QueueFile | None = None

    @property
    def parts(self) -> list[Part]:
        """The entries in memory as they were then (any thread)."""
        return [index.tail_part(end) for index, end in zip(self.indexes, self.ends, strict=True)]

    def lengths(self) -> Lengths:
        """Return where every queue began and ended then, for the checkpoint (any thread)."""
        found: Lengths = {}
        ends = dict(zip(self.indexes, self.ends, strict=True))
        for index in self.used:
            # One that had nothing in memory then ended where its files end, even if entries have come since.
            end = ends.get(index, index.tail_first)
            if end:
                found.setdefault(index.topic, {})[index.queue_id] = (min(index.min_offset, end), end)
        return found

    def write(self) -> None:
        """Write and sync the file (any thread)."""
        name = queue_file.write(self.files, self.first_seq, self.next_seq, self.parts)
        if self.seals:
            self.written = QueueFile(name, self.files.map_readonly(name))


class QueueIndexes:
    """All queues' entries, and the files they are in. Methods belong to the event loop unless they say otherwise."""

    def __init__(self, files: Files, rebuild: Rebuild | None = None) -> None:
        """`rebuild` reads a stretch of the log; without one damage is Corrupt for the reader."""
        self._files, self.rebuild = files, rebuild
        self._sealed: list[QueueFile] = []
        self._used: dict[tuple[str, int], QueueIndex] = {}
        self._open: dict[QueueIndex, None] = {}  # have entries in memory
        self._first_seq = 1  # where the open stretch begins
        self.unsealed = 0  # entries in memory
        self.changing = threading.Lock()  # around every change of a queue's state
        self._repairing = threading.Lock()

    def queue(self, topic: str, queue_id: int) -> QueueIndex:
        """Return the queue as it was loaded, or an empty one."""
        return self._used.get((topic, queue_id)) or QueueIndex(self, topic, queue_id)

    def used(self) -> Iterator[QueueIndex]:
        """Yield the queues that have, or have had, entries."""
        yield from self._used.values()

    def note_used(self, index: QueueIndex) -> None:
        """Remember that this queue has, or has had, entries."""
        self._used[index.topic, index.queue_id] = index

    def note_open(self, index: QueueIndex) -> None:
        """Remember that this queue has entries in memory."""
        self.note_used(index)
        self._open[index] = None

    def load(self, first_seq: int, to_seq: int) -> int:
        """Open the files, before anything is appended; returns the row up to which they hold everything.

        The log is kept from `first_seq` on, and the checkpoint knows of the rows below `to_seq`. A file that does
        not follow the one before it is removed: the log says what was in it.
        """
        found = queue_file.open_files(self._files, first_seq, to_seq)
        self._sealed, self._first_seq = found.sealed, found.open_seq
        for file in self._sealed:
            for number, topic, queue_id, first, end in file.queues():
                index = self._used.setdefault((topic, queue_id), QueueIndex(self, topic, queue_id))
                index.loaded(_Run(first, end, file, number))
        for part in found.tail:
            index = self.queue(part.topic, part.queue_id)
            if index.max_offset == 0:
                index.start_at(part.first_offset)
            _check_follows(index, part.first_offset)
            index.append(part.entries["seq"], part.entries["size"], part.entries["tag"])
        return found.covered_seq

    def clear(self, first_seq: int) -> None:
        """Forget everything, in memory and on the disk: the whole log follows, from `first_seq` on."""
        queue_file.remove_all(self._files)
        for index in self._used.values():
            index.clear()
        self._sealed, self._open, self.unsealed = [], {}, 0
        self._first_seq = first_seq

    # -- writing -------------------------------------------------------------------------------------------

    def flush(self, next_seq: int) -> Flush:
        """Return the entries to be written before a checkpoint may vouch for the rows below `next_seq`."""
        seals = self.unsealed >= SEAL_ENTRIES
        ends = [index.max_offset for index in self._open]
        used = list(self._used.values())
        return Flush(self._files, self._first_seq, next_seq, list(self._open), ends, used, seals)

    def finish(self, flush: Flush) -> None:
        """Read a stretch that was sealed from its file from now on, and free its memory."""
        # The stretch was sealed or cleared while this flush was being written: its entries are elsewhere now.
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
        """Write and seal the open stretch when it is large enough. Blocking: for recovery."""
        if self.unsealed >= SEAL_ENTRIES:
            flush = self.flush(next_seq)
            flush.write()
            self.finish(flush)

    # -- retention and damage ------------------------------------------------------------------------------

    def forget(self, first_seq: int) -> list[str]:
        """Forget entries of rows before `first_seq`; returns the files that are no longer needed, to be removed."""
        gone = [file for file in self._sealed if file.next_seq <= first_seq]
        names = {file.name for file in gone}
        touched = {(topic, queue) for file in gone for _, topic, queue, _, _ in file.queues()}
        with self.changing:
            for key in touched:
                self._used[key].forget_runs(names)
            self._sealed = self._sealed[len(gone) :]
        # Files go whole. In the one that reaches across `first_seq`, and in memory, the offsets before it are hidden.
        partly = self._sealed[0] if self._sealed and self._sealed[0].first_seq < first_seq else None
        keys = [(topic, queue) for _, topic, queue, _, _ in partly.queues()] if partly else []
        behind = [self._used[key] for key in keys]
        behind += list(self._open) if self._first_seq < first_seq else []
        for index in behind:
            index.hide(first_seq)
        return sorted(names)

    def repair(self, damaged: QueueFile, error: Corrupt) -> None:
        """Build a file again from its stretch of the log; raises Corrupt without a log (any thread)."""
        if self.rebuild is None:
            raise error
        with self._repairing:
            if damaged not in self._sealed:
                return  # another reader has found the same
            logger.warning("queue index file built again from the log reason=%s", error)
            # From the log, which checks its own frames; the rest of the damaged file is not trusted either.
            first_seq, next_seq = damaged.first_seq, damaged.next_seq
            data = queue_file.encode(first_seq, next_seq, self.rebuild(first_seq, next_seq))
            try:
                self._files.replace(damaged.name, data)
            except OverLimit as full:
                logger.warning("queue index file kept in memory alone file=%s reason=%s", damaged.name, full)
            fresh = QueueFile(damaged.name, data)
            runs = {
                (topic, queue): _Run(first, end, fresh, n) for n, topic, queue, first, end in fresh.queues()
            }
            with self.changing:
                for _, topic, queue, _, _ in damaged.queues():
                    self._used[topic, queue].replace_runs(damaged, runs.get((topic, queue)))
                self._sealed = [fresh if file is damaged else file for file in self._sealed]
