"""One data file of the pending table: reads rows between two positions (due_ms, seq), and rows by number or key.

The file is sorted, so the rows between two positions are one contiguous run. Row-group statistics select the groups
that may contain them, and only these groups are read. Between calls only the parsed footer and its mapping are kept,
and `close` drops them: so a pending message takes only its share of a `FileEntry` in memory. A reader that goes through
a file leaves it open, and closes it when it has moved on. A look-up by number restores the previous state, because it
may visit thousands of files, whose footers would take more memory than their messages. The key index finds the rows
that have a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timeball.model.errors import Corrupt
from timeball.model.message import TABLE_SCHEMA, Int64Array, int64
from timeball.table.attachment import FileEntry, Ranges, overlap
from timeball.table.identities import ID_COLUMNS, ID_SCHEMA, Identities, Row, is_there
from timeball.table.layout import FOLDER, check_seal, sealed_bytes

Position = tuple[int, int]  # (due_ms, seq)

# Fields of a FileEntry that `_check` compares.
_CLAIMS = ["rows", "size_bytes", "min_due_ms", "max_due_ms", "min_seq", "max_seq"]
_TOPIC = TABLE_SCHEMA.get_field_index("topic")
END_BYTES = 64 * 1024  # contains the footer of a file of a million rows
_SOME_ROWS = 4_096  # rows decoded at a time when bodies are among the columns
_NO_GROUPS: Int64Array = np.empty(0, np.int64)
_NO_ROWS = ID_SCHEMA.empty_table()


class DataFiles(Protocol):
    """The data folder, or copies of files in an object store (file_cache.py)."""

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer | pa.NativeFile:
        """Map a file of the data folder by its name. The mapping stays valid when the name is removed.

        A file in an object store may instead be returned as a file that is read by ranges.
        """


class DataFile:
    """A live data file. Blocking. Belongs to the reader thread."""

    def __init__(self, files: DataFiles, entry: FileEntry) -> None:
        self._files = files
        self.entry = entry
        self._parquet: pq.ParquetFile | None = None
        # The time (ms) at which a bulk write or a resume added the file with overdue rows: their lateness counts from
        # this time. Otherwise 0.
        self.joined_ms = 0
        # While open: True if it is read by ranges from the object store, False if it is mapped.
        self.is_ranged = False
        # The first row of each row group, then the total (n + 1 values). Smallest and largest due time of each group.
        self._group_starts = self._group_min = self._group_max = _NO_GROUPS
        self._group_seqs = _NO_GROUPS, _NO_GROUPS  # smallest and largest of each row group

    @property
    def is_open(self) -> bool:
        """True while the footer is in memory and the file is mapped."""
        return self._parquet is not None

    def positions_between(self, low: Position, high: Position) -> tuple[Int64Array, Int64Array]:
        """Read (due_ms, seq) of the rows with low <= (due_ms, seq) < high, in that order."""
        groups = self._groups_between(low, high)
        if not groups:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        due, seq = _due_and_seq(self._read(groups, ["due_ms", "seq"]))
        begin, end = search(due, seq, low), search(due, seq, high)
        return due[begin:end], seq[begin:end]

    def rows_between(self, low: Position, high: Position) -> pa.Table:
        """Read all columns of the rows with low <= (due_ms, seq) < high, in TABLE_SCHEMA."""
        groups = self._groups_between(low, high)
        if not groups:
            return TABLE_SCHEMA.empty_table()
        rows = self._read(groups, TABLE_SCHEMA.names)
        due, seq = _due_and_seq(rows)
        begin, end = search(due, seq, low), search(due, seq, high)
        return rows.slice(begin, end - begin)

    def rows_of(self, due_ms: Int64Array, seq: Int64Array) -> pa.Table:
        """Read all columns of the rows with these due times and numbers, in TABLE_SCHEMA. Skips those it lacks."""
        with self._briefly():
            groups = sorted({group for due in np.unique(due_ms).tolist() for group in self._groups(due, due)})
            rows = self._read(groups, TABLE_SCHEMA.names) if groups else TABLE_SCHEMA.empty_table()
        return rows.filter(pa.array(np.isin(rows.column("seq").to_numpy(), seq)))

    def row_count_up_to(self, low_due_ms: int, high_due_ms: int) -> int:
        """Compute an upper bound of the rows due in [low, high], from statistics alone."""
        self._open()
        return sum(
            int(self._group_starts[g + 1] - self._group_starts[g])
            for g in self._groups(low_due_ms, high_due_ms)
        )

    def first_due_from(self, due_ms: int) -> int | None:
        """Find the due time of the first row due at or after `due_ms`, or None when there is none."""
        self._open()
        group = int(np.searchsorted(self._group_max, due_ms, side="left"))
        if group == len(self._group_max):
            return None
        first = int(self._group_min[group])
        if first < due_ms:
            due = self._read([group], ["due_ms"]).column("due_ms").to_numpy()
            first = int(due[np.searchsorted(due, due_ms, side="left")])
        return first

    def identities_at(self, places: list[int], kept: dict[str, Identities] | None = None) -> list[Row]:
        """Read the identifying columns of the rows at these indexes. Needs the footer only if the file has no blocks.

        `kept`: the identities of files that stay mapped, by path. This file's are added to it.
        """
        path = self.entry.path
        try:
            found = None if kept is None else kept.get(path)
            if found is None:
                found = self._mapped_identities()
                if found is not None and kept is not None:
                    kept[path] = found
            if found is not None:
                return found.rows_at(places)
        except Corrupt as error:
            if kept is not None:
                kept.pop(path, None)  # a restored copy may replace the file
            raise Corrupt(f"{FOLDER}/{path}: {error}; restore this file from a copy") from error
        return self._rows_at(np.unique(places))

    def _mapped_identities(self) -> Identities | None:
        # Mapped for random access: only some pages are read of a file that is not in the page cache. Otherwise the
        # system may read megabytes ahead.
        data = self._files.map_readonly(f"{FOLDER}/{self.entry.path}", at_random=True)
        found = _identities(data, self.entry.size_bytes)
        if found is not None and found.rows != self.entry.rows:
            raise Corrupt(f"it has {found.rows} identities, its attach says {self.entry.rows} rows")
        return found

    def _rows_at(self, places: Int64Array) -> list[Row]:
        """Read the same columns from the row groups. The rows come in the order of the file."""
        found = []
        with self._briefly():
            self._open()
            groups = np.searchsorted(self._group_starts, places, side="right") - 1
            for group in np.unique(groups).tolist():
                inside = places[groups == group] - self._group_starts[group]
                found += self._read([group], ID_COLUMNS).take(pa.array(inside)).to_pylist()
        return found

    def find_seqs(self, seqs: Int64Array) -> pa.Table:
        """Read the identifying columns of the rows with these numbers.

        It reads the numbers of the row groups whose statistics admit one of them.
        """
        parts = [_NO_ROWS]
        with self._briefly():
            self._open()
            low, high = self._group_seqs
            wanted = np.sort(seqs)
            begin, end = (
                np.searchsorted(wanted, low, side="left"),
                np.searchsorted(wanted, high, side="right"),
            )
            for group in np.flatnonzero(end > begin).tolist():
                inside = np.isin(self._read([group], ["seq"]).column("seq").to_numpy(), wanted)
                if inside.any():
                    parts.append(self._read([group], ID_COLUMNS).filter(pa.array(inside)))
        return pa.concat_tables(parts)

    def key_columns(self) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Read the ids and the keys of all rows."""
        with self._briefly():
            rows = self._read(list(range(self._open().num_row_groups)), ["unique_key", "keys"])
        return rows.column("unique_key"), rows.column("keys")

    def group_count(self) -> int:
        """Count the row groups."""
        with self._briefly():
            return int(self._open().num_row_groups)

    def identities(self, group: int) -> pa.RecordBatch:
        """Read the identifying columns of one row group, sorted by (due_ms, seq)."""
        with self._briefly():
            rows = self._read([group], ID_COLUMNS).combine_chunks()
        return pa.RecordBatch.from_arrays([column.chunk(0) for column in rows.columns], schema=rows.schema)

    # -- row group by row group, for reads that come to a part of a file and no schedule's -----------------------

    @property
    def group_min_ms(self) -> Int64Array:
        """The first due time of each row group."""
        self._open()
        return self._group_min

    @property
    def group_max_ms(self) -> Int64Array:
        """The last due time of each row group."""
        self._open()
        return self._group_max

    def groups_between(self, low: Position, high: Position) -> list[int]:
        """List the row groups that may contain rows with low <= (due_ms, seq) < high."""
        self._open()
        return self._groups_between(low, high)

    def group_topics(self, group: int) -> tuple[str, str] | None:
        """Read the first and last topic of a row group from its statistics.

        Returns None for a file without topic statistics.
        """
        column = self._open().metadata.row_group(group).column(_TOPIC).statistics
        return None if column is None or not column.has_min_max else (column.min, column.max)

    def may_have_topic(self, group: int, topic: str) -> bool:
        """Check whether a row group may contain rows of a topic."""
        span = self.group_topics(group)
        return span is None or span[0] <= topic <= span[1]

    def group_rows(self, group: int) -> int:
        """Count the rows in a row group."""
        self._open()
        return int(self._group_starts[group + 1] - self._group_starts[group])

    def read_group(self, group: int, columns: list[str]) -> pa.Table:
        """Read these columns of all rows of a row group."""
        return self._read([group], columns)

    def read_group_rows(self, group: int, rows: Int64Array, columns: list[str]) -> pa.Table:
        """Read these columns of some rows of a row group (ascending indexes).

        Pages after the last of them are not read.
        """
        parts, begin = [], 0
        try:
            for batch in self._open().iter_batches(_SOME_ROWS, row_groups=[group], columns=columns):
                inside = rows[(rows >= begin) & (rows < begin + batch.num_rows)] - begin
                parts.append(batch.take(pa.array(inside)))
                begin += batch.num_rows
                if begin > rows[-1]:
                    break
        except (OSError, pa.ArrowInvalid) as error:
            raise Corrupt(f"{self.entry.path}: {error}; restore this file from a copy") from error
        return pa.Table.from_batches(parts)

    def check(self) -> None:
        """Raise Corrupt unless the file opens and its footer agrees with its entry."""
        self._open()

    def close(self) -> None:
        """Drop the footer and its mapping. The next read parses it again."""
        self._parquet = None
        self._group_starts = self._group_min = self._group_max = _NO_GROUPS
        self._group_seqs = _NO_GROUPS, _NO_GROUPS

    @contextmanager
    def _briefly(self) -> Iterator[None]:
        """Allow the block to open the file, and close it afterwards if it was closed before."""
        was_open = self.is_open
        try:
            yield
        finally:
            if not was_open:
                self.close()

    def _open(self) -> pq.ParquetFile:
        if self._parquet is None:
            data = self._files.map_readonly(f"{FOLDER}/{self.entry.path}")
            parquet = self._parsed(data)
            self.is_ranged = not isinstance(data, pa.Buffer)
            self._check(parquet, data.size() if self.is_ranged else data.size)
            self._parquet = parquet
        return self._parquet

    def _parsed(self, data: pa.Buffer | pa.NativeFile) -> pq.ParquetFile:
        try:
            return _parse(data)
        except (OSError, pa.ArrowInvalid, Corrupt) as error:
            name = f"{FOLDER}/{self.entry.path}"
            raise Corrupt(f"{name}: {error}; restore this file from a copy") from error

    def _check(self, parquet: pq.ParquetFile, size_bytes: int) -> None:
        metadata = parquet.metadata
        # Not from `metadata.schema`: schema and metadata refer to each other, so they would stay in memory until the
        # cycle collector runs.
        if parquet.schema_arrow.names != TABLE_SCHEMA.names:
            raise Corrupt(f"{self.entry.path} has other columns than the pending table")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._group_starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._group_min, self._group_max = _ranges(groups, "due_ms")
        seq_min, seq_max = self._group_seqs = _ranges(groups, "seq")
        # Reads rely on these values: a claim that is narrower than the file would leave messages unread.
        found = (
            metadata.num_rows, size_bytes, self._group_min[0], self._group_max[-1], seq_min.min(), seq_max.max(),
        )  # fmt: skip
        entry = self.entry
        claimed = (
            entry.rows, entry.size_bytes, entry.min_due_ms, entry.max_due_ms, entry.min_seq, entry.max_seq,
        )  # fmt: skip
        for name, is_value, value in zip(_CLAIMS, found, claimed, strict=True):
            if is_value != value:
                raise Corrupt(f"{entry.path} has {name} {is_value}, its attach says {value}")
        if np.any(self._group_min[1:] < self._group_max[:-1]) or self._group_starts[-1] != metadata.num_rows:
            raise Corrupt(f"{entry.path}: its row groups are not sorted by due_ms, or not all there")

    def _groups(self, low_due_ms: int, high_due_ms: int) -> list[int]:
        self._open()
        begin = int(np.searchsorted(self._group_max, low_due_ms, side="left"))
        end = int(np.searchsorted(self._group_min, high_due_ms, side="right"))
        return list(range(begin, end))

    def _groups_between(self, low: Position, high: Position) -> list[int]:
        """List the row groups that may contain rows with low <= (due_ms, seq) < high."""
        found = self._groups(low[0], high[0])
        seq_min, seq_max = self._group_seqs
        # A million messages may have the same due time and be read in ten parts. Each part then reads only its own
        # groups.
        while found and self._group_max[found[0]] == low[0] and seq_max[found[0]] < low[1]:
            del found[0]
        while found and self._group_min[found[-1]] == high[0] and seq_min[found[-1]] >= high[1]:
            del found[-1]
        return found

    def _read(self, groups: list[int], columns: list[str]) -> pa.Table:
        try:
            # One thread for one group: waking other threads for its columns costs more.
            return self._open().read_row_groups(groups, columns=columns, use_threads=len(groups) > 1)
        except (OSError, pa.ArrowInvalid) as error:
            raise Corrupt(f"{self.entry.path}: {error}; restore this file from a copy") from error


def check_all(data: pa.Buffer) -> None:
    """Raise Corrupt unless every checksum of a data file is right. It reads the whole file."""
    try:
        parquet = _parse(data)
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group, use_threads=False)
        found = _identities(data, data.size)
        if found is not None:
            found.check()
    except (OSError, pa.ArrowInvalid) as error:
        raise Corrupt(str(error)) from error


def _identities(data: pa.Buffer | pa.NativeFile, size_bytes: int) -> Identities | None:
    """Open the identities of a file of `size_bytes` bytes, or None when it has none. Raises Corrupt."""
    if isinstance(data, pa.Buffer):
        found_bytes, end, read_at = data.size, data.slice(max(0, data.size - END_BYTES)), data.slice
    else:
        found_bytes, end = data.size(), _end_of(data)

        def read_at(begin: int, size: int) -> pa.Buffer:
            inside = begin - (found_bytes - end.size)
            return end.slice(inside, size) if inside >= 0 else pa.py_buffer(data.read_at(size, begin))

    if found_bytes != size_bytes:
        raise Corrupt(f"it has size_bytes {found_bytes}, its attach says {size_bytes}")
    at = found_bytes - sealed_bytes(end)
    return Identities(read_at, at) if is_there(read_at, at) else None


def _parse(data: pa.Buffer | pa.NativeFile) -> pq.ParquetFile:
    # The seal is checked first, because Arrow may abort the process on a damaged footer.
    if isinstance(data, pa.Buffer):
        check_seal(data)
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    check_seal(_end_of(data))
    return pq.ParquetFile(data, page_checksum_verification=True)


def _end_of(file: pa.NativeFile) -> pa.Buffer:
    size_bytes = file.size()
    end = pa.py_buffer(file.read_at(min(END_BYTES, size_bytes), max(0, size_bytes - END_BYTES)))
    needed = min(sealed_bytes(end), size_bytes)
    return end if needed <= end.size else pa.py_buffer(file.read_at(needed, size_bytes - needed))


def overlapping(files: Sequence[DataFile], ranges: Ranges) -> list[DataFile]:
    """List the files that may contain numbers of these ranges, by their first due time."""
    spans = np.array([(file.entry.min_seq, file.entry.max_seq + 1) for file in files], np.int64)
    begin, end = spans.reshape(-1, 2).T
    found = [files[at] for at in np.flatnonzero(overlap(begin, end, ranges)).tolist()]
    return sorted(found, key=lambda file: file.entry.min_due_ms)


def search(due: Int64Array, seq: Int64Array, position: Position) -> int:
    """Count the rows of a (due_ms, seq)-sorted run that are before `position`."""
    begin = int(np.searchsorted(due, position[0], side="left"))
    end = int(np.searchsorted(due, position[0], side="right"))
    return begin + int(np.searchsorted(seq[begin:end], position[1], side="left"))


def _ranges(groups: list[pq.RowGroupMetaData], name: str) -> tuple[Int64Array, Int64Array]:
    """Read (min, max) of a column in each row group, from the statistics that all our files have."""
    column = TABLE_SCHEMA.get_field_index(name)
    statistics = [group.column(column).statistics for group in groups]
    if not statistics or any(s is None or not s.has_min_max for s in statistics):
        raise Corrupt(f"a file without rows, or without statistics of {name}: write it with layout.cut_files")
    low, high = ([getattr(s, end) for s in statistics] for end in ("min", "max"))
    return np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)


def _due_and_seq(rows: pa.Table) -> tuple[Int64Array, Int64Array]:
    flat = rows.select(["due_ms", "seq"]).combine_chunks()
    if flat.num_rows == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return int64(flat.column("due_ms").chunk(0)), int64(flat.column("seq").chunk(0))
