"""An append-only array of fixed records in mapped files: what a schedule keeps on disk instead of in memory.

    index      0 … n-1        n … 2n-1       2n …
             +-------------+ +-------------+ +---------- - - -
    file     | 00000000    | | 00000001    | | 00000002        n = `file_records`
             +-------------+ +-------------+ +---------- - - -
                     ^ begin                       ^ end

A record never moves: index i stands in file i // n for ever, so a look-up is one division. What stands before `begin`
has been let go, and files wholly before it are removed; what stands at or behind `end` is not there, whatever
the bytes say.

A cache, and only as far as somebody else remembers how far it goes. Mapped pages reach the disk at any moment and
in any order, so that after a restart nothing counts but the [begin, end) of a checkpoint saved after its files
were synced: the owner keeps both numbers, gives them back when it opens the log, and everything behind is cut. To
that end a file is not removed before a checkpoint that needs it no more has been saved (`take_dirty`); and one that
is missing all the same, or too short, is found by `is_whole`, so that the owner can begin anew from the log.

One thread appends; `read` and `at` may be called in any.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timeball.errors import OutOfRange
from timeball.files import File, Files
from timeball.message import Int64Array

RecordArray = npt.NDArray[np.void]

FILE_RECORDS = 1 << 20  # 24 to 40 MB a file: a hundred files for a hundred million promises
FIRST_ALLOCATION = 4_096  # records; a log nobody uses much should not cost a whole file
SUFFIX = ".log"


@dataclass(slots=True)
class _Chunk:
    """One file and its mapping."""

    file: File
    records: RecordArray


class MappedLog:
    """See the module. Records in [begin, end), by index."""

    def __init__(
        self,
        files: Files,
        folder: str,
        record: np.dtype[np.void],
        *,
        begin: int = 0,
        end: int = 0,
        file_records: int = FILE_RECORDS,
    ) -> None:
        """Open what is durable of the log in `folder`; whatever lies outside of [begin, end) is forgotten.

        The folder is made with its first file.
        """
        assert 0 <= begin <= end
        self._files, self.folder, self._record, self._file_records = files, folder, record, file_records
        self.begin, self.end = begin, end
        self._vouched = self._offered = (
            begin  # of the last checkpoint known to be saved, and of the one after it
        )
        self._chunks: dict[int, _Chunk] = {}
        self._dirty: set[int] = set()
        self._lock = threading.Lock()
        for number in _numbers(files, folder):
            if (number + 1) * file_records <= begin or number * file_records >= end:
                files.remove(self._name(number))

    def append(self, records: RecordArray) -> int:
        """Add records at `end`; returns the index of the first. On a full disk it adds none and raises OverLimit."""
        first, done = self.end, 0
        views = []
        while done < len(records):
            number, at = divmod(first + done, self._file_records)
            count = min(len(records) - done, self._file_records - at)
            views.append((number, self._view(number, at + count, grow=True)[at : at + count]))
            done += count
        done = 0
        for number, view in views:
            view[:] = records[done : done + len(view)]
            self._dirty.add(number)
            done += len(view)
        self.end += done
        return first

    def read(self, begin: int, end: int) -> RecordArray:
        """The records in [begin, end), copied; raises OutOfRange when some of them are not here."""
        if not self.begin <= begin <= end <= self.end:
            raise OutOfRange(f"records {begin} to {end}: {self.folder} keeps {self.begin} to {self.end}")
        parts = []
        while begin < end:
            number, at = divmod(begin, self._file_records)
            stop = min(end - number * self._file_records, self._file_records)
            parts.append(np.array(self._view(number, stop)[at:stop]))
            begin = number * self._file_records + stop
        return np.concatenate(parts) if parts else np.empty(0, self._record)

    def at(self, indexes: Int64Array) -> RecordArray:
        """The records at these indexes, copied; raises OutOfRange when some of them are not here."""
        if len(indexes) and not self.begin <= int(indexes.min()) <= int(indexes.max()) < self.end:
            raise OutOfRange(
                f"records {indexes.min()} to {indexes.max()}: {self.folder} keeps {self.begin} to {self.end}"
            )
        found = np.empty(len(indexes), self._record)
        for number, here, low in self._by_file(indexes):
            found[here] = self._view(number, int(low.max()) + 1)[low]
        return found

    def put(self, indexes: Int64Array, field: str, value: int) -> None:
        """Set one field of the records at these indexes, in place.

        Only for what stays true whether or not the pages reach the disk: a restart may see it, or not.
        """
        for number, _, low in self._by_file(indexes):
            self._view(number, int(low.max()) + 1)[field][low] = value
            self._dirty.add(number)

    def drop_below(self, index: int) -> None:
        """Let go of records before `index`. Files go with a later `take_dirty`."""
        self.begin = max(self.begin, min(index, self.end))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def take_dirty(self) -> list[File]:
        """Files written since the last call, for a checkpoint that is to hold [begin, end) as they are now.

        The caller syncs them in a thread of its own, then the folder, then saves the checkpoint; so when it calls
        again, that one has been saved, and files that it does not need are removed.
        """
        self._vouched, self._offered = self._offered, self.begin
        for number in [n for n in self._chunks if (n + 1) * self._file_records <= self._vouched]:
            self._chunks.pop(number).file.close()
            self._dirty.discard(number)
            self._files.remove(self._name(number))
        dirty = [self._chunks[number].file for number in self._dirty]
        self._dirty.clear()
        return dirty

    def unsynced(self) -> None:
        """What `take_dirty` gave out was not synced, or the checkpoint not saved: all that is open is dirty."""
        self._offered = self._vouched
        self._dirty.update(self._chunks)

    def close(self) -> None:
        """Let go of the files."""
        for chunk in self._chunks.values():
            chunk.file.close()
        self._chunks = {}

    # -- inside ----------------------------------------------------------------------------------------------

    def _by_file(self, indexes: Int64Array) -> list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]]:
        """(file number, which of `indexes` stand in it, their positions there)."""
        if len(indexes) == 0:
            return []
        numbers = indexes // self._file_records
        first = int(numbers[0])
        if bool((numbers == first).all()):
            return [(first, slice(None), indexes - first * self._file_records)]
        found: list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]] = []
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found.append((number, here, indexes[here] - number * self._file_records))
        return found

    def _view(self, number: int, records: int, *, grow: bool = False) -> RecordArray:
        """The mapping of file `number`, with at least so many records; a reader's view outlives a growth."""
        chunk = self._chunks.get(number)
        if chunk is not None and len(chunk.records) >= records:
            return chunk.records
        with self._lock:
            return self._map(number, records, grow)

    def _map(self, number: int, records: int, grow: bool) -> RecordArray:
        name = self._name(number)
        chunk = self._chunks.get(number)
        if chunk is None:
            if grow and not self._files.exists(name):
                self._files.make_dir(self.folder)
                file = self._files.create(name)
            else:
                file = self._files.open(name)
            chunk = self._chunks[number] = _Chunk(file, np.empty(0, self._record))
        size = self._files.size(name) // self._record.itemsize
        if size < records and grow:
            size = min(self._file_records, max(FIRST_ALLOCATION, records, 2 * size))
            chunk.file.allocate(size * self._record.itemsize)
        chunk.records = np.frombuffer(chunk.file.map(), dtype=self._record, count=size)
        return chunk.records

    def _name(self, number: int) -> str:
        return f"{self.folder}/{number:08d}{SUFFIX}"


def is_whole(
    files: Files,
    folder: str,
    record: np.dtype[np.void],
    *,
    begin: int,
    end: int,
    file_records: int = FILE_RECORDS,
) -> bool:
    """Whether every file that holds a part of [begin, end) is there, and long enough."""
    for number in range(begin // file_records, -(-end // file_records) if end > begin else 0):
        name = f"{folder}/{number:08d}{SUFFIX}"
        needed = min(end - number * file_records, file_records) * record.itemsize
        if not files.exists(name) or files.size(name) < needed:
            return False
    return True


def _numbers(files: Files, folder: str) -> list[int]:
    return [int(name.removesuffix(SUFFIX)) for name in files.list_dir(folder) if name.endswith(SUFFIX)]
