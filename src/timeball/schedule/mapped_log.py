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
in any order. So after a restart only the [begin, end) of a checkpoint is valid, which was saved after its files were
synced. The owner saves both numbers and passes them in when it opens the log. All later records are cut off. A file is
removed only after a checkpoint that does not need it has been saved (`files_to_sync`). If a file is missing
nevertheless, or too short or damaged, `check` reports it, and the owner rebuilds the records from the commit log.

The CRC-32C of many short records of one length is computed column by column. Except for a constant, a checksum is
linear: it is the exclusive or of the checksum of a record of zeros, and of one number for each byte, which depends on
the byte's value and position. So a block of records costs one table look-up per byte, about 30 ns for a record of 24
bytes, and no Python code per record. The result equals that of `google_crc32c.value`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from timeball.io.files import File, Files
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Backlog, Opened
from timeball.schedule.locations import Waiting

RecordArray = npt.NDArray[np.void]
Uint32Array = npt.NDArray[np.uint32]

FILE_RECORDS = 1 << 20  # 24 to 40 MB per file, so a hundred files for a hundred million messages
FIRST_ALLOCATION = 4_096  # records; a log with few records should not take a whole file
SUFFIX = ".log"
CHECK_ROWS = 1 << 18  # records that `check` reads at a time, a few MB
# Records whose checksums are computed at a time: their transposed bytes and the result fit into the processor's cache.
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
        """Open the records [begin, end) of the log in `folder`. Remove its other files.

        The folder is made together with its first file.
        """
        assert 0 <= begin <= end
        self._marked, self._checked = record_type.marked, record_type.checked
        self._files, self.folder, self._record = files, folder, record_type.fields
        self._file_records = file_records = record_type.file_records
        self.begin, self.end = begin, end
        # The `begin` of the last checkpoint that is known to be saved, and of the checkpoint after it.
        self._saved_begin = self._unsaved_begin = begin
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
        first, done_rows = self.end, 0
        stored = np.empty(len(records), self._checked)
        stored["record"], stored["crc32c"] = records, _checksums(records, self._marked)
        # All files grow before any record is written, so that a full disk leaves no part of a batch to be taken back.
        views = []
        while done_rows < len(records):
            number, position = divmod(first + done_rows, self._file_records)
            # A batch may extend beyond the end of a file, where it is cut.
            count = min(len(records) - done_rows, self._file_records - position)
            views.append(
                (number, self._view(number, position + count, grow=True)[position : position + count])
            )
            done_rows += count
        done_rows = 0
        for number, view in views:
            view[:] = stored[done_rows : done_rows + len(view)]
            self._dirty.add(number)
            done_rows += len(view)
        # This comes last, because readers in other threads check their range against `end`.
        self.end += done_rows
        return first

    def read(self, begin: int, end: int) -> RecordArray:
        """Copy the records in [begin, end). Raise OutOfRange if some are outside the log, Corrupt if one is damaged."""
        if not self.begin <= begin <= end <= self.end:
            raise OutOfRange(f"records {begin} to {end}: {self.folder} keeps {self.begin} to {self.end}")
        chunks = []
        while begin < end:
            number, position = divmod(begin, self._file_records)
            end_position = min(end - number * self._file_records, self._file_records)
            chunks.append(
                _verified(
                    self._view(number, end_position)[position:end_position], self._marked, self._name(number)
                )
            )
            begin = number * self._file_records + end_position
        return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, self._record), *chunks])

    def parts(self) -> Iterator[tuple[int, RecordArray]]:
        """Yield all records, a few MB at a time, each part with the index of its first record."""
        for begin in range(self.begin, self.end, CHECK_ROWS):
            yield begin, self.read(begin, min(begin + CHECK_ROWS, self.end))

    def at(self, indexes: Int64Array) -> RecordArray:
        """Copy the records at these indexes. Raise the errors of `read`."""
        if len(indexes) and not self.begin <= int(indexes.min()) <= int(indexes.max()) < self.end:
            raise OutOfRange(
                f"records {indexes.min()} to {indexes.max()}: {self.folder} keeps {self.begin} to {self.end}"
            )
        records = np.empty(len(indexes), self._record)
        for number, mask, positions in self._by_file(indexes):
            chunk = self._view(number, int(positions.max()) + 1)[positions]
            records[mask] = _verified(chunk, self._marked, self._name(number))
        return records

    def expect_marks(self, indexes: Int64Array) -> None:
        """Include the files of these records in the next `files_to_sync`: `mark` changes them before the sync."""
        self._dirty.update(number for number, _, _ in self._by_file(indexes))

    def mark(self, indexes: Int64Array) -> None:
        """Mark the records at these indexes, in place: replace the marked field by its complement.

        A second mark has no effect. A mark may reach the disk at any time. So mark a record only for a reason that no
        power cut undoes. Until the file is synced the mark may be lost, so a restart must find the reason without it.
        """
        assert self._marked is not None
        for number, _, positions in self._by_file(indexes):
            field = self._view(number, int(positions.max()) + 1)["record"][self._marked]
            # The field is never negative, so its complement is. The minimum of both is the mark, set once or twice.
            field[positions] = np.minimum(field[positions], ~field[positions])
            self._dirty.add(number)

    def drop_below(self, index: int) -> None:
        """Drop the records before `index`. A later `files_to_sync` removes their files."""
        self.begin = max(self.begin, min(index, self.end))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def files_to_sync(self) -> list[File]:
        """List the files written since the last call, for a checkpoint with the current [begin, end).

        The caller syncs them in a thread of its own, then syncs the folder, then saves the checkpoint. The next call
        takes this checkpoint as saved, unless `sync_failed` was called, and removes the files that it does not need.
        """
        # The checkpoint of this call may never be saved, so the one before it decides which files are removed.
        self._saved_begin, self._unsaved_begin = self._unsaved_begin, self.begin
        for number in [n for n in self._chunks if (n + 1) * self._file_records <= self._saved_begin]:
            self._chunks.pop(number).file.close()
            self._dirty.discard(number)
            self._files.remove(self._name(number))
        dirty = [self._chunks[number].file for number in self._dirty]
        self._dirty.clear()
        return dirty

    def sync_failed(self) -> None:
        """Include all open files in the next `files_to_sync`: the sync failed, or the checkpoint was not saved."""
        self._unsaved_begin = self._saved_begin
        self._dirty.update(self._chunks)

    def close(self) -> None:
        """Close the files."""
        for chunk in self._chunks.values():
            chunk.file.close()
        self._chunks = {}

    # -- internals -------------------------------------------------------------------------------------------

    def _by_file(self, indexes: Int64Array) -> list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]]:
        """Group indexes by file. Returns (file number, mask of the `indexes` in it, their positions in the file).

        The mask is `slice(None)` if all indexes are in one file.
        """
        if len(indexes) == 0:
            return []
        numbers = indexes // self._file_records
        first_number = int(numbers[0])
        if bool((numbers == first_number).all()):
            return [(first_number, slice(None), indexes - first_number * self._file_records)]
        groups: list[tuple[int, npt.NDArray[np.bool_] | slice, Int64Array]] = []
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            groups.append((number, mask, indexes[mask] - number * self._file_records))
        return groups

    def _view(self, number: int, records: int, *, grow: bool = False) -> RecordArray:
        """Map file `number` with at least `records` records, which it must have unless `grow`.

        Views stay valid when the file grows.
        """
        chunk = self._chunks.get(number)
        if chunk is not None and len(chunk.records) >= records:
            return chunk.records
        # A reader and the appending thread may both find a file that is not mapped yet. The lock lets only one of them
        # map it.
        with self._lock:
            return self._map(number, records, grow)

    def _map(self, number: int, records: int, grow: bool) -> RecordArray:
        """Open file `number` if needed, let it grow to `records` records if `grow`, and map it (lock held)."""
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
        # A file that has grown is mapped again. Views of the old mapping stay valid and show the same file.
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
    """Read all records in [begin, end). Raise Corrupt with the file's name if it is missing, too short or damaged."""
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
        for position in range(first, needed, CHECK_ROWS):
            _verified(records[position : min(position + CHECK_ROWS, needed)], record_type.marked, name)


def _checksums(records: RecordArray, marked: str | None) -> Uint32Array:
    """Compute the checksum of each record, as it was before a mark."""
    records = np.ascontiguousarray(records)
    if marked is not None and bool((records[marked] < 0).any()):
        # The checksum was computed before the mark, so the mark is undone first.
        records = records.copy()
        records[marked] = np.maximum(records[marked], ~records[marked])
    return checksums_of(records)


def _verified(stored: RecordArray, marked: str | None, name: str) -> RecordArray:
    """Copy stored records without their checksums. Raise Corrupt if a checksum does not match."""
    records = stored["record"].copy()
    if bool((_checksums(records, marked) != stored["crc32c"]).any()):
        raise Corrupt(
            f"{name} does not match its checksums: start the broker again, and it is rebuilt from the commit log"
        )
    return records


def _numbers(files: Files, folder: str) -> list[int]:
    return [int(name.removesuffix(SUFFIX)) for name in files.list_dir(folder) if name.endswith(SUFFIX)]


# ---- checksums of many records --------------------------------------------------------------------------------


def checksums_of(records: npt.NDArray[np.void]) -> Uint32Array:
    """Compute the CRC-32C of each record of a contiguous array (see the module docstring)."""
    size = records.dtype.itemsize
    record_bytes = records.view(np.uint8).reshape(len(records), size)
    if len(record_bytes) <= FEW:
        return np.array([google_crc32c.value(row.tobytes()) for row in record_bytes], np.uint32)
    zeros_crc, tables = _crc_tables(size)
    sums = np.full(len(record_bytes), zeros_crc, np.uint32)
    for begin in range(0, len(record_bytes), BLOCK):
        # Transposed, so that the bytes at one position of all records are contiguous.
        columns = np.ascontiguousarray(record_bytes[begin : begin + BLOCK].T)
        block_sums = sums[begin : begin + BLOCK]
        for table, column in zip(tables, columns, strict=True):
            block_sums ^= table.take(column)  # in place: a view of `sums`
    return sums


@cache
def _crc_tables(size: int) -> tuple[int, Uint32Array]:
    """Compute the checksum of `size` zeros, and a table of the number that each byte contributes: [position, value]."""
    zeros_crc = google_crc32c.value(bytes(size))
    tables = np.empty((size, 256), np.uint32)
    for position in range(size):
        for value in range(256):
            # The checksum of zeros and this one byte, without the constant. A few thousand calls, once per size.
            tables[position, value] = (
                google_crc32c.value(bytes(position) + bytes([value]) + bytes(size - position - 1)) ^ zeros_crc
            )
    return zeros_crc, tables


# ---- the logs of a backlog ------------------------------------------------------------------------------------
# The logs of a backlog belong to one generation, which is a folder: timer_wheel/00000003/…, cascade/00000001/…. A start
# that cannot use the saved state begins a new generation. So the files of an older state never change: after a power
# cut its files may be missing, but they never contain records that were written later under the same names.

LogBounds = tuple[str, RecordType, int, int]  # the name of a log, its record type, and its `begin` and `end`


class StateOfGeneration(Protocol):
    """The saved state of a backlog with files. It belongs to one generation."""

    @property
    def generation(self) -> int:
        """The number of the generation, which names the folder of its files."""


class BacklogInFiles(Backlog):
    """A backlog that stores its messages in mapped logs. All of them belong to one generation."""

    logs: list[MappedLog]
    _generation: int

    def _begin_generation(self, files: Files, folder: str, state: StateOfGeneration | None) -> str:
        """Continue the generation of a state, or begin a new one if there is no state. Return its folder."""
        self._generation = begin_generation(files, folder, None if state is None else state.generation)
        return folder_of(folder, self._generation)

    def _add_in_log_order(self, waiting: Waiting, now_ms: int) -> Opened:
        """Add messages in the order of their rows, so that files and log rows can be dropped together.

        Returns the messages that count as opened.
        """
        waiting = waiting.part(np.argsort(waiting.row_seq, kind="stable"))
        near = waiting.part(self.add(waiting, now_ms))
        return Opened.near(near.due_ms, near.seq, near.row_seq)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List the files of all logs that were written since the last call."""
        return [(log.folder, log.files_to_sync()) for log in self.logs]

    def sync_failed(self) -> None:
        """Undo the last `files_to_sync`, whose files were not synced."""
        for log in self.logs:
            log.sync_failed()

    def close(self) -> None:
        """Close the files."""
        for log in self.logs:
            log.close()


def begin_generation(files: Files, folder: str, saved: int | None) -> int:
    """Choose the generation `saved`, or a new one for None. Make its folder. Remove the logs of other generations."""
    present = [int(name) for name in files.list_dir(folder) if name.isdigit()]
    generation = max(present, default=0) + 1 if saved is None else saved
    for other in present:
        if other != generation:
            # The empty folders stay, so that no later generation gets their numbers.
            _remove_logs(files, folder_of(folder, other))
    # The folder is made at once, so that the next start without a state cannot take the same number.
    files.make_dir(folder_of(folder, generation))
    return generation


def folder_of(folder: str, generation: int) -> str:
    """Build the name of a generation's folder."""
    return f"{folder}/{generation:08d}"


def open_logs(files: Files, folder: str, logs: Iterable[LogBounds]) -> list[MappedLog]:
    """Open the logs of a generation, within the bounds of a saved state."""
    return [
        MappedLog(files, f"{folder}/{name}", record_type, begin=begin, end=end)
        for name, record_type, begin, end in logs
    ]


def check_generation(files: Files, folder: str, logs: Iterable[LogBounds]) -> None:
    """Raise Corrupt with the file's name if a record within the bounds of a saved state is missing or damaged."""
    for name, record_type, begin, end in logs:
        check(files, f"{folder}/{name}", record_type, begin=begin, end=end)


def _remove_logs(files: Files, folder: str) -> None:
    """Remove the files of all logs of a generation."""
    for log_name in files.list_dir(folder):
        for file_name in files.list_dir(f"{folder}/{log_name}"):
            files.remove(f"{folder}/{log_name}/{file_name}")
