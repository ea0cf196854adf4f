"""Consume queue: where the n-th message of a (topic, queue) stands in the log.

    byte  0              8       12               20
          +--------------+-------+----------------+
          | seq          | size  | tag            |   big-endian, 20 bytes, as RocketMQ has it
          +--------------+-------+----------------+

Entry n stands at byte n * 20 of its queue, cut into files of 300,000 entries (RocketMQ's own number), so a
look-up is one division and no search. `seq` is what RocketMQ calls the commit-log offset. `tag` is the tag's hash
(Java's String.hashCode) or bits, as the topic's filter type says, or the due time in a delay-level queue, so that
filters and the level scan need not open the message. `size` is the length of the message in RocketMQ's stored form.

A cache: recovery truncates every queue to what the checkpoint knows and replays the log from there; without a
checkpoint it replays everything, because each visible row of the log carries its own queue offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timeball.errors import OutOfRange
from timeball.files import File, Files
from timeball.message import Int64Array

ENTRY = np.dtype(
    [
        ("seq", ">i8"),  # sequence number in the log
        ("size", ">i4"),  # bytes of the message as RocketMQ stores it
        ("tag", ">i8"),  # tag hash or bits, or due time (ms) in a delay-level queue
    ]
)
assert ENTRY.itemsize == 20  # RocketMQ clients and tools count on it.
EntryArray = npt.NDArray[np.void]

FILE_ENTRIES = 300_000  # RocketMQ's mappedFileSizeConsumeQueue
FIRST_ALLOCATION = 4_096  # entries; a topic nobody uses much should not cost 6 MB a queue
FOLDER = "queues"


@dataclass(slots=True)
class _Chunk:
    """One file of a queue and its mapping."""

    file: File
    entries: EntryArray


class QueueIndex:
    """Entries of one queue. Positions are dense from `min_offset` to `max_offset` (exclusive)."""

    def __init__(self, files: Files, folder: str, *, min_offset: int = 0, max_offset: int = 0) -> None:
        """Open the queue below `folder`, whose entries in [min_offset, max_offset) are known to be durable.

        The folder is made with its first file: it takes three syncs, and a heartbeat may make a thousand queues.
        """
        self._files, self.folder = files, folder
        self.min_offset, self.max_offset = min_offset, max_offset
        self._chunks: dict[int, _Chunk] = {}
        self._dirty: set[int] = set()

    def append(self, seqs: Int64Array, sizes: Int64Array, tags: Int64Array) -> None:
        """Add entries behind `max_offset`."""
        done = 0
        while done < len(seqs):
            number, at = divmod(self.max_offset, FILE_ENTRIES)
            count = min(len(seqs) - done, FILE_ENTRIES - at)
            entries = self._room(number, at + count)[at : at + count]
            part = slice(done, done + count)
            entries["seq"], entries["size"], entries["tag"] = seqs[part], sizes[part], tags[part]
            self._dirty.add(number)
            self.max_offset += count
            done += count

    def start_at(self, offset: int) -> None:
        """Begin an empty queue at `offset`: what came before has been let go by retention."""
        assert self.max_offset == 0
        self.min_offset = self.max_offset = offset

    def read(self, offset: int, count: int) -> EntryArray:
        """Up to `count` entries from `offset` on, copied; raises OutOfRange with what is kept."""
        if not self.min_offset <= offset <= self.max_offset:
            raise OutOfRange(f"offset {offset}: this queue keeps {self.min_offset} to {self.max_offset}")
        end = min(offset + count, self.max_offset)
        parts = []
        while offset < end:
            number, at = divmod(offset, FILE_ENTRIES)
            stop = min(end - number * FILE_ENTRIES, FILE_ENTRIES)
            parts.append(np.array(self._room(number, stop)[at:stop]))
            offset = number * FILE_ENTRIES + stop
        return np.concatenate(parts) if parts else np.empty(0, ENTRY)

    def at(self, offsets: Int64Array) -> EntryArray:
        """The entries at these offsets, each between `min_offset` and `max_offset`, copied."""
        found = np.empty(len(offsets), ENTRY)
        numbers = offsets // FILE_ENTRIES
        for number in np.unique(numbers).tolist():
            here = numbers == number
            low = offsets[here] - number * FILE_ENTRIES
            found[here] = self._room(number, int(low.max()) + 1)[low]
        return found

    def hide(self, first_seq: int) -> None:
        """Forget entries of rows before `first_seq`; no file is touched."""
        low, high = self.min_offset, self.max_offset
        while low < high:
            middle = (low + high) // 2
            if int(self.read(middle, 1)["seq"][0]) < first_seq:
                low = middle + 1
            else:
                high = middle
        self.min_offset = low

    def trim(self, first_seq: int) -> None:
        """Forget entries of rows before `first_seq`, which retention has let go; removes files wholly behind it."""
        self.hide(first_seq)
        low = self.min_offset
        for number in [n for n in self._chunks if (n + 1) * FILE_ENTRIES <= low]:
            self._chunks.pop(number).file.close()
            self._dirty.discard(number)
        for name in self._files.list_dir(self.folder):
            if (int(name.removesuffix(".cq")) + 1) * FILE_ENTRIES <= low:
                self._files.remove(f"{self.folder}/{name}")

    def take_dirty(self) -> list[File]:
        """Files written since the last call; a checkpoint may count on the entries once these are synced.

        The caller syncs them in a thread of its own and the folder (`folder`) after them.
        """
        files = [self._chunks[number].file for number in self._dirty]
        self._dirty.clear()
        return files

    def unsynced(self) -> None:
        """What `take_dirty` gave out was not synced: all that is open counts as written since."""
        self._dirty.update(self._chunks)

    def close(self) -> None:
        """Let go of the files."""
        for chunk in self._chunks.values():
            chunk.file.close()
        self._chunks = {}

    def _room(self, number: int, entries: int) -> EntryArray:
        """The mapping of file `number`, grown to hold `entries`."""
        chunk = self._chunks.get(number)
        if chunk is not None and len(chunk.entries) >= entries:
            return chunk.entries
        name = f"{self.folder}/{number:08d}.cq"
        if chunk is None:
            if self._files.exists(name):
                file = self._files.open(name)
            else:
                self._files.make_dir(self.folder)
                file = self._files.create(name)
            chunk = self._chunks[number] = _Chunk(file, np.empty(0, ENTRY))
        size = self._files.size(name) // ENTRY.itemsize
        if size < entries:
            size = min(FILE_ENTRIES, max(FIRST_ALLOCATION, entries, 2 * size))
            chunk.file.allocate(size * ENTRY.itemsize)
        chunk.entries = np.frombuffer(chunk.file.map(), dtype=ENTRY, count=size)
        return chunk.entries
