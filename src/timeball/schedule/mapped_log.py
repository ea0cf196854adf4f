"""An append-only array of fixed-size records in mapped files: the part of a schedule that is on disk, not in memory.

    index      0 … n-1        n … 2n-1       2n …
             +-------------+ +-------------+ +---------- - - -
    file     | 00000000    | | 00000001    | | 00000002        n = `file_records`
             +-------------+ +-------------+ +---------- - - -
                     ^ begin                       ^ end

A record never moves: index i is always in file i // n, so a look-up is one division. Records before `begin` are
dropped, and files that end before it are removed. Bytes at or after `end` contain no records.

Each record is followed by its CRC-32C in eight bytes. Every read compares it, and `check` compares all of them at a
start, because a flipped bit could hide a message. A record is written once. The only later change is that one field,
never negative, is *marked*: it is replaced by its complement. The checksum is computed before the mark, so the record
stays valid whether or not the mark has reached the disk.

The log is a cache, valid only within the bounds that its owner has saved. Mapped pages reach the disk at any time and
in any order. So after a restart only the [begin, end) of a checkpoint counts that was saved after its files were
synced. The owner saves both numbers and passes them in when it opens the log. Everything behind is cut off. For this a
file is removed only after a checkpoint that does not need it has been saved (`files_to_sync`). If a file is missing all
the same, or too short or damaged, `check` reports it, and the owner starts anew from the log.

The CRC-32C of many short records of one length is computed column by column. Except for a constant, a checksum is
linear: that of a record is that of as many zeros, combined by exclusive or with one number per byte value and position.
So a block of records costs one table look-up per byte, about 30 ns for a record of 24 bytes, and no Python code per
record. The result equals that of `google_crc32c.value`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import google_crc32c
import numpy as np
import numpy.typing as npt

from timeball.io.files import File, Files
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import Int64Array

RecordArray = npt.NDArray[np.void]
Uint32Array = npt.NDArray[np.uint32]

FILE_RECORDS = 1 << 20  # 24 to 40 MB per file, so a hundred files for a hundred million messages
FIRST_ALLOCATION = 4_096  # records; a log with few records should not take a whole file
SUFFIX = ".log"
CHECKED = 1 << 18  # records that are checked at a time, a few MB
# Checksums at a time: the transposed bytes of the records and the result fit into the cache of the processor.
BLOCK = 16_384
FEW = 64  # up to this many records are faster one by one than as columns


@dataclass(frozen=True)
class RecordType:
    """The type of a log's records: the fields, the number of records per file, and the field that `mark` changes."""

    fields: np.dtype[np.void]
    file_records: int = FILE_RECORDS
    marked: str | None = None

    @cached_property
    def checked(self) -> np.dtype[np.void]:
        """The type of a record with its checksum, as stored in a file."""
        # The checksum takes eight bytes, not four: so no field crosses a sector, and a power cut never leaves half a
        # mark.
        return np.dtype([("record", self.fields), ("crc32c", "<u8")])


@dataclass(slots=True)
class _Chunk:
    """One file of the log and its mapping."""

    file: File
    records: RecordArray  # with checksums: of the type `RecordType.checked`


class MappedLog:
    """The records [begin, end), by index. One thread appends. `read`, `parts` and `at` may be called in any thread."""

    def __init__(
        self,
        files: Files,
        folder: str,
        record_type: RecordType,
        *,
        begin: int = 0,
        end: int = 0,
    ) -> None:
        """Open the records [begin, end) of the log in `folder`. Remove files without any of them.

        The folder is made together with its first file.
        """
        assert 0 <= begin <= end
        self._marked, self._checked = record_type.marked, record_type.checked
        self._files, self.folder, self._record = files, folder, record_type.fields
        self._file_records = file_records = record_type.file_records
        self.begin, self.end = begin, end
        # The `begin` of the last checkpoint that is known to be saved, and the one of the checkpoint after it.
        self._vouched = self._offered = begin
        self._chunks: dict[int, _Chunk] = {}
        # Files written since the last `files_to_sync`.
        self._dirty: set[int] = set()
        self._lock = threading.Lock()
        for number in _numbers(files, folder):
            # Written after the last checkpoint, or dropped before it: no state refers to these files.
            if (number + 1) * file_records <= begin or number * file_records >= end:
                files.remove(self._name(number))

    def append(self, records: RecordArray) -> int:
        """Append records. Return the index of the first. On a full disk, append none and raise OverLimit."""
        first, done = self.end, 0
        # All files grow before any record is written, so that a full disk leaves no part of a batch to be taken back.
        fresh = np.empty(len(records), self._checked)
        fresh["record"], fresh["crc32c"] = records, _sums(records, self._marked)
        views = []
        while done < len(records):
            number, at = divmod(first + done, self._file_records)
            # A batch may extend beyond the end of a file, where it is cut.
            count = min(len(records) - done, self._file_records - at)
            views.append((number, self._view(number, at + count, grow=True)[at : at + count]))
            done += count
        done = 0
        for number, view in views:
            view[:] = fresh[done : done + len(view)]
            self._dirty.add(number)
            done += len(view)
        # This comes last, because readers in other threads check their range against `end`.
        self.end += done
        return first

    def read(self, begin: int, end: int) -> RecordArray:
        """Copy the records in [begin, end). Raise OutOfRange if some are outside the log, Corrupt if one is damaged."""
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
        """Yield all records, a few MB at a time, each part with the index of its first record."""
        for begin in range(self.begin, self.end, CHECKED):
            yield begin, self.read(begin, min(begin + CHECKED, self.end))

    def at(self, indexes: Int64Array) -> RecordArray:
        """Copy the records at these indexes. Raise the errors of `read`."""
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
        """Mark the records at these indexes, in place: replace the marked field by its complement.

        A second mark has no effect. Use this only for facts that hold whether or not the pages reach the disk. A
        restart may see the mark or not.
        """
        assert self._marked is not None
        for number, _, low in self._by_file(indexes):
            field = self._view(number, int(low.max()) + 1)["record"][self._marked]
            # The field is never negative, so its complement is. The minimum of both is the mark, set once or twice.
            field[low] = np.minimum(field[low], ~field[low])
            self._dirty.add(number)

    def drop_below(self, index: int) -> None:
        """Drop the records before `index`. A later `files_to_sync` removes their files."""
        self.begin = max(self.begin, min(index, self.end))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def files_to_sync(self) -> list[File]:
        """List the files written since the last call, for a checkpoint with the current [begin, end).

        The caller syncs them in a thread of its own, then syncs the folder, then saves the checkpoint. So the next call
        means that this checkpoint has been saved, and files that it does not need are removed.
        """
        # One call behind: the checkpoint of this call may not be saved, so the one before it decides which files may be
        # removed.
        self._vouched, self._offered = self._offered, self.begin
        for number in [n for n in self._chunks if (n + 1) * self._file_records <= self._vouched]:
            self._chunks.pop(number).file.close()
            self._dirty.discard(number)
            self._files.remove(self._name(number))
        dirty = [self._chunks[number].file for number in self._dirty]
        self._dirty.clear()
        return dirty

    def sync_failed(self) -> None:
        """Count all open files as written, because the files were not synced or the checkpoint was not saved."""
        self._offered = self._vouched
        self._dirty.update(self._chunks)

    def close(self) -> None:
        """Close the files."""
        for chunk in self._chunks.values():
            chunk.file.close()
        self._chunks = {}

    # -- inside ----------------------------------------------------------------------------------------------

    def _by_file(self, indexes: Int64Array) -> list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]]:
        """Group indexes by file. Return (file number, mask of `indexes` in it, their positions there)."""
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
        """Map file `number` with at least `records` records. Views stay valid when the file grows."""
        chunk = self._chunks.get(number)
        if chunk is not None and len(chunk.records) >= records:
            return chunk.records
        # A reader and the appending thread may both find a file that is not mapped yet. The lock lets only one of them
        # map it.
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
        # The size is doubled up to a whole file, so that a small log is a small file and a large one is mapped only a
        # few times.
        if size < records and grow:
            size = min(self._file_records, max(FIRST_ALLOCATION, records, 2 * size))
            chunk.file.allocate(size * self._checked.itemsize)
        # A file that has grown is mapped anew. Views of the old mapping stay valid and show the same file.
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
    """Read all records in [begin, end). Raise Corrupt with the file's name if one is missing or damaged."""
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
    """Compute the checksum of each record, as it was before a mark."""
    records = np.ascontiguousarray(records)
    if marked is not None and bool((records[marked] < 0).any()):
        # The checksum was computed before the mark, so the mark is undone first.
        records = records.copy()
        records[marked] = np.maximum(records[marked], ~records[marked])
    return checksums_of(records)


def _verified(found: RecordArray, marked: str | None, name: str) -> RecordArray:
    """Copy records without their checksums. Raise Corrupt if one does not match."""
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
    """Compute the checksum of each record of a contiguous array."""
    size = records.dtype.itemsize
    raw = records.view(np.uint8).reshape(len(records), size)
    if len(raw) <= FEW:
        return np.array([google_crc32c.value(row.tobytes()) for row in raw], np.uint32)
    zeros, tables = _tables(size)
    sums = np.full(len(raw), zeros, np.uint32)
    for begin in range(0, len(raw), BLOCK):
        # Transposed, so that the bytes at one position of all records are contiguous.
        columns = np.ascontiguousarray(raw[begin : begin + BLOCK].T)
        of_block = sums[begin : begin + BLOCK]
        for table, column in zip(tables, columns, strict=True):
            # A view of `sums`, into which the exclusive or of all bytes' numbers is collected.
            of_block ^= table.take(column)
    return sums


@cache
def _tables(size: int) -> tuple[int, Uint32Array]:
    """Compute the checksum of `size` zeros, and the change of it by each value of each byte."""
    zeros = google_crc32c.value(bytes(size))
    tables = np.empty((size, 256), np.uint32)
    for at in range(size):
        for value in range(256):
            # By definition of the change. A few thousand calls of the library, once per size (`cache`).
            tables[at, value] = google_crc32c.value(bytes(at) + bytes([value]) + bytes(size - at - 1)) ^ zeros
    return zeros, tables
