"""An append-only array of fixed records in mapped files: what a schedule keeps on disk instead of in memory.

    index      0 … n-1        n … 2n-1       2n …
             +-------------+ +-------------+ +---------- - - -
    file     | 00000000    | | 00000001    | | 00000002        n = `file_records`
             +-------------+ +-------------+ +---------- - - -
                     ^ begin                       ^ end

A record never moves: index i stands in file i // n for ever, so a look-up is one division. Records before `begin` have
been given up, and files wholly before it are removed; bytes at or behind `end` are no records.

Each record is followed by its CRC-32C, in eight bytes. It is compared whenever records are read, and for all of them
when a start asks (`check`): a flipped bit would otherwise hide a promise. A record is written once. What may become
of it later is that one field, never negative, is *marked*: turned into its complement. The checksum is that of the
field before, so that a mark which reached the disk alone leaves the record whole.

A cache, and only as far as its owner remembers how far it goes. Mapped pages reach the disk at any moment and
in any order, so that after a restart nothing counts but the [begin, end) of a checkpoint saved after its files
were synced: the owner keeps both numbers, gives them back when it opens the log, and everything behind is cut. To
that end a file is not removed before a checkpoint that needs it no more has been saved (`files_to_sync`); and one that
is missing all the same, too short or damaged is found by `check`, so that the owner can begin anew from the log.

The CRC-32C of many short records of one length is computed column by column. A checksum is linear but for a constant:
that of a record is that of as many zeros, with a number for each byte's value and position on top. So the records of
a block cost one look-up for each of their bytes, some 30 ns for 24 of them, and no Python for each record. The result
is that of `google_crc32c.value`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import google_crc32c
import numpy as np
import numpy.typing as npt

from timeball.errors import Corrupt, OutOfRange
from timeball.files import File, Files
from timeball.message import Int64Array

RecordArray = npt.NDArray[np.void]
Uint32Array = npt.NDArray[np.uint32]

FILE_RECORDS = 1 << 20  # 24 to 40 MB a file: a hundred files for a hundred million promises
FIRST_ALLOCATION = 4_096  # records; a log with few records should not cost a whole file
SUFFIX = ".log"
CHECKED = 1 << 18  # records checked in one go: some megabytes
BLOCK = (
    16_384  # checksums at a time: the records' bytes, turned, and the result stay in the processor's cache
)
FEW = 64  # up to so many are faster one by one than as columns


@dataclass(frozen=True)
class RecordType:
    """Records of a log: their fields, how many a file holds, and the field that `mark` may turn."""

    fields: np.dtype[np.void]
    file_records: int = FILE_RECORDS
    marked: str | None = None

    @cached_property
    def checked(self) -> np.dtype[np.void]:
        """Return the type of a record and its checksum, as they stand in a file."""
        # Eight bytes for four: so no field crosses a sector, and a power cut never leaves half a mark.
        return np.dtype([("record", self.fields), ("crc32c", "<u8")])


@dataclass(slots=True)
class _Chunk:
    """One file and its mapping."""

    file: File
    records: RecordArray  # of `RecordType.checked`


class MappedLog:
    """The records [begin, end), by index. One thread appends; `read`, `parts` and `at` may be called in any."""

    def __init__(
        self,
        files: Files,
        folder: str,
        record_type: RecordType,
        *,
        begin: int = 0,
        end: int = 0,
    ) -> None:
        """Open the records [begin, end) of the log in `folder`; files wholly outside are removed.

        The folder is made with its first file.
        """
        assert 0 <= begin <= end
        self._marked, self._checked = record_type.marked, record_type.checked
        self._files, self.folder, self._record = files, folder, record_type.fields
        self._file_records = file_records = record_type.file_records
        self.begin, self.end = begin, end
        self._vouched = self._offered = (
            begin  # of the last checkpoint known to be saved, and of the one after it
        )
        self._chunks: dict[int, _Chunk] = {}
        self._dirty: set[int] = set()
        self._lock = threading.Lock()
        for number in _numbers(files, folder):
            # Written behind the last checkpoint, or given up before it: no state vouches for them.
            if (number + 1) * file_records <= begin or number * file_records >= end:
                files.remove(self._name(number))

    def append(self, records: RecordArray) -> int:
        """Add records at `end`; returns the index of the first. On a full disk it adds none and raises OverLimit."""
        first, done = self.end, 0
        # All files are grown before any record is written: on a full disk none is added, and none must be taken back.
        fresh = np.empty(len(records), self._checked)
        fresh["record"], fresh["crc32c"] = records, _sums(records, self._marked)
        views = []
        while done < len(records):
            number, at = divmod(first + done, self._file_records)
            # A batch may reach over the end of a file: it is cut there.
            count = min(len(records) - done, self._file_records - at)
            views.append((number, self._view(number, at + count, grow=True)[at : at + count]))
            done += count
        done = 0
        for number, view in views:
            view[:] = fresh[done : done + len(view)]
            self._dirty.add(number)
            done += len(view)
        # Last: a reader in another thread checks its range against `end`.
        self.end += done
        return first

    def read(self, begin: int, end: int) -> RecordArray:
        """Return the records in [begin, end), copied; raise OutOfRange when some are not here, Corrupt when damaged."""
        if not self.begin <= begin <= end <= self.end:
            raise OutOfRange(f"records {begin} to {end}: {self.folder} keeps {self.begin} to {self.end}")
        parts = []
        while begin < end:
            number, at = divmod(begin, self._file_records)
            stop = min(end - number * self._file_records, self._file_records)
            parts.append(_verified(self._view(number, stop)[at:stop], self._marked, self._name(number)))
            begin = number * self._file_records + stop
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._record), *parts])

    def parts(self) -> Iterator[tuple[int, RecordArray]]:
        """Yield all records, some megabytes at a time, each with the index of its first."""
        for begin in range(self.begin, self.end, CHECKED):
            yield begin, self.read(begin, min(begin + CHECKED, self.end))

    def at(self, indexes: Int64Array) -> RecordArray:
        """Return the records at these indexes, copied; raise as `read` does."""
        if len(indexes) and not self.begin <= int(indexes.min()) <= int(indexes.max()) < self.end:
            raise OutOfRange(
                f"records {indexes.min()} to {indexes.max()}: {self.folder} keeps {self.begin} to {self.end}"
            )
        found = np.empty(len(indexes), self._record)
        for number, here, low in self._by_file(indexes):
            part = self._view(number, int(low.max()) + 1)[low]
            found[here] = _verified(part, self._marked, self._name(number))
        return found

    def mark(self, indexes: Int64Array) -> None:
        """Turn the marked field of the records at these indexes, in place; those that are turned stay so.

        Only for what stays true whether or not the pages reach the disk: a restart may see it, or not.
        """
        assert self._marked is not None
        for number, _, low in self._by_file(indexes):
            field = self._view(number, int(low.max()) + 1)["record"][self._marked]
            # The complement of a field that is never negative is negative: so the smaller one is the mark, set twice
            # or once.
            field[low] = np.minimum(field[low], ~field[low])
            self._dirty.add(number)

    def drop_below(self, index: int) -> None:
        """Give up records before `index`. Files are removed by a later `files_to_sync`."""
        self.begin = max(self.begin, min(index, self.end))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def files_to_sync(self) -> list[File]:
        """Return the files written since the last call, for a checkpoint that holds [begin, end) as they are now.

        The caller syncs them in a thread of its own, then the folder, then saves the checkpoint; so when it calls
        again, that one has been saved, and files that it does not need are removed.
        """
        # One call behind: the checkpoint of this call may not be saved, so its predecessor decides which files may
        # go.
        self._vouched, self._offered = self._offered, self.begin
        for number in [n for n in self._chunks if (n + 1) * self._file_records <= self._vouched]:
            self._chunks.pop(number).file.close()
            self._dirty.discard(number)
            self._files.remove(self._name(number))
        dirty = [self._chunks[number].file for number in self._dirty]
        self._dirty.clear()
        return dirty

    def sync_failed(self) -> None:
        """Count all open files as written: those of `files_to_sync` were not synced, or the checkpoint not saved."""
        self._offered = self._vouched
        self._dirty.update(self._chunks)

    def close(self) -> None:
        """Close the files."""
        for chunk in self._chunks.values():
            chunk.file.close()
        self._chunks = {}

    # -- inside ----------------------------------------------------------------------------------------------

    def _by_file(self, indexes: Int64Array) -> list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]]:
        """Return (file number, which of `indexes` stand in it, their positions there)."""
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
        """Return the mapping of file `number`, with at least so many records; a reader's view outlives a growth."""
        chunk = self._chunks.get(number)
        if chunk is not None and len(chunk.records) >= records:
            return chunk.records
        # A reader and the appending thread may both find a file not mapped yet: it is mapped once.
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
            chunk = self._chunks[number] = _Chunk(file, np.empty(0, self._checked))
        size = self._files.size(name) // self._checked.itemsize
        # Doubled up to a whole file, so that a small log is a small file and a large one is mapped few times.
        if size < records and grow:
            size = min(self._file_records, max(FIRST_ALLOCATION, records, 2 * size))
            chunk.file.allocate(size * self._checked.itemsize)
        # A growth maps anew. Views of the old mapping stay valid, and show the same file.
        chunk.records = np.frombuffer(chunk.file.map(), dtype=self._checked, count=size)
        return chunk.records

    def _name(self, number: int) -> str:
        return f"{self.folder}/{number:08d}{SUFFIX}"


def check(
    files: Files,
    folder: str,
    record_type: RecordType,
    *,
    begin: int,
    end: int,
) -> None:
    """Read all records in [begin, end), and raise Corrupt with the file's name when one is missing or damaged."""
    checked, file_records = record_type.checked, record_type.file_records
    for number in range(begin // file_records, -(-end // file_records) if end > begin else 0):
        name = f"{folder}/{number:08d}{SUFFIX}"
        first = max(0, begin - number * file_records)
        needed = min(end - number * file_records, file_records)
        if not files.exists(name):
            raise Corrupt(f"{name} is missing")
        if files.size(name) < needed * checked.itemsize:
            raise Corrupt(f"{name} is too short")
        records = np.frombuffer(files.map_readonly(name), checked, count=needed)
        for at in range(first, needed, CHECKED):
            _verified(records[at : min(at + CHECKED, needed)], record_type.marked, name)


def _sums(records: RecordArray, marked: str | None) -> Uint32Array:
    """Return the checksum of each record as it was before it was marked."""
    records = np.ascontiguousarray(records)
    if marked is not None and bool((records[marked] < 0).any()):
        records = records.copy()
        records[marked] = np.maximum(records[marked], ~records[marked])
    return checksums_of(records)


def _verified(found: RecordArray, marked: str | None, name: str) -> RecordArray:
    """Return a copy of records without their checksums; raise Corrupt when one does not match."""
    records = found["record"].copy()
    if bool((_sums(records, marked) != found["crc32c"]).any()):
        raise Corrupt(
            f"{name} does not match its checksums: start the broker again, and what waits is read from the log"
        )
    return records


def _numbers(files: Files, folder: str) -> list[int]:
    return [int(name.removesuffix(SUFFIX)) for name in files.list_dir(folder) if name.endswith(SUFFIX)]


# ---- checksums of many records --------------------------------------------------------------------------------


def checksums_of(records: npt.NDArray[np.void]) -> Uint32Array:
    """Return the checksum of each record of a contiguous array."""
    size = records.dtype.itemsize
    raw = records.view(np.uint8).reshape(len(records), size)
    if len(raw) <= FEW:
        return np.array([google_crc32c.value(row.tobytes()) for row in raw], np.uint32)
    zeros, tables = _tables(size)
    sums = np.full(len(raw), zeros, np.uint32)
    for begin in range(0, len(raw), BLOCK):
        columns = np.ascontiguousarray(raw[begin : begin + BLOCK].T)
        of_block = sums[begin : begin + BLOCK]
        for table, column in zip(tables, columns, strict=True):
            # A view: the exclusive or of all bytes' numbers is collected in place.
            of_block ^= table.take(column)
    return sums


@cache
def _tables(size: int) -> tuple[int, Uint32Array]:
    """Return the checksum of `size` zeros, and what each value of each byte changes of it."""
    zeros = google_crc32c.value(bytes(size))
    tables = np.empty((size, 256), np.uint32)
    for at in range(size):
        for value in range(256):
            # By definition, once for each size and for good (`cache`): some thousand calls of the library.
            tables[at, value] = google_crc32c.value(bytes(at) + bytes([value]) + bytes(size - at - 1)) ^ zeros
    return zeros, tables
