"""One data file of the pending table: reads rows between two positions (due_ms, seq), and rows by number or key.

The file is sorted, so the rows between two positions are one contiguous run. Row-group statistics select the groups
that may contain them, and only these groups are read. An open file keeps only its parsed footer and its mapping in
memory, and `close` drops both. A closed file costs only its `FileEntry`, so pending messages take almost no memory. A
reader that goes through a file leaves it open between calls and closes it at the end. A look-up closes the file again
if it was closed before, because it may visit thousands of files, whose footers would take more memory than the messages
themselves. The key index (key_index.py) finds the rows that have a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from timeball.io.files import check_readable
from timeball.model.errors import Corrupt
from timeball.model.message import TABLE_SCHEMA, Int64Array, int64
from timeball.table.attachment import FileEntry, Ranges, overlap
from timeball.table.identities import ID_COLUMNS, ID_SCHEMA, Identities, Row, has_identities
from timeball.table.layout import FOLDER, TRAILER, check_seal, sealed_bytes

Position = tuple[int, int]  # (due_ms, seq)

# Fields of a FileEntry that `_check` compares with the file, in this order.
_CHECKED_FIELDS = ["rows", "size_bytes", "min_due_ms", "max_due_ms", "min_seq", "max_seq"]
_TOPIC = TABLE_SCHEMA.get_field_index("topic")
END_BYTES = 64 * 1024  # of a file's end, read first; enough for the footer of a file with a million rows
_BATCH_ROWS = 4_096  # rows decoded at a time when bodies are among the columns
_NO_GROUPS: Int64Array = np.empty(0, np.int64)
_NO_ROWS = ID_SCHEMA.empty_table()


class DataFiles(Protocol):
    """The source of data files: the data folder, or copies of files in an object store (object_store.py)."""

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer | pa.NativeFile:
        """Map a file by its name in the data folder. The mapping stays valid when the file is removed.

        Returns an open file instead if the data is in an object store and read by range requests.
        """


class DataFile:
    """A live data file. Blocking, for one thread at a time.

    Methods that read the file raise Corrupt if it is damaged, and the errors of `DataFiles`. They open it if needed.
    """

    def __init__(self, files: DataFiles, entry: FileEntry) -> None:
        self._files = files
        self.entry = entry
        self._parquet: pq.ParquetFile | None = None
        # If a bulk write or a resume added the file with overdue rows: the time of the attach, from which their
        # lateness counts. Otherwise 0.
        self.lateness_from_ms = 0
        self._mapped: pa.Buffer | None = None  # the bytes of an open file, unless it is read by ranges
        # While open: True if the file is read by range requests from the object store, False if it is mapped.
        self.is_ranged = False
        # `_group_starts`: the first row of each row group, then the total (n + 1 values). `_group_min`, `_group_max`:
        # the smallest and largest due time (ms) of each group.
        self._group_starts = self._group_min = self._group_max = _NO_GROUPS
        self._group_seqs = _NO_GROUPS, _NO_GROUPS  # smallest and largest number of each group

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

    def rows_of(
        self, due_ms: Int64Array, seq: Int64Array, columns: Sequence[str] = TABLE_SCHEMA.names
    ) -> pa.Table:
        """Read these columns, `seq` among them, of the rows with these due times and numbers, in the file's order.

        Pairs (due_ms, seq) that the file does not have are ignored.
        """
        with self._reclosing():
            groups = sorted({group for due in np.unique(due_ms).tolist() for group in self._groups(due, due)})
            rows = self._read(groups, list(columns)) if groups else TABLE_SCHEMA.empty_table().select(columns)
        return rows.filter(pa.array(np.isin(rows.column("seq").to_numpy(), seq)))

    def max_rows_due_between(self, low_due_ms: int, high_due_ms: int) -> int:
        """Compute an upper bound of the number of rows due in [low, high] from the row groups' statistics."""
        self._open()
        return sum(
            int(self._group_starts[g + 1] - self._group_starts[g])
            for g in self._groups(low_due_ms, high_due_ms)
        )

    def first_due_at_or_after(self, due_ms: int) -> int | None:
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

    def identities_at(self, row_numbers: list[int], mapped: dict[str, Identities] | None = None) -> list[Row]:
        """Read ID_COLUMNS of these rows. Reads the footer only if the file has no identity blocks.

        `row_numbers`: indexes in the file, ascending and distinct. `mapped`: a cache of mapped identities by file path,
        to which this file's identities are added. Raises Corrupt for a damaged file.
        """
        path = self.entry.path
        try:
            identities = None if mapped is None else mapped.get(path)
            if identities is None:
                identities = self._map_identities()
                if identities is not None and mapped is not None:
                    mapped[path] = identities
            if identities is not None:
                return identities.rows_at(row_numbers)
        except Corrupt as error:
            if mapped is not None:
                mapped.pop(path, None)  # an operator may replace the file by a copy
            raise Corrupt(f"{FOLDER}/{path}: {error}; restore this file from a copy") from error
        return self._identities_from_groups(np.unique(row_numbers))

    def _map_identities(self) -> Identities | None:
        """Map the identity blocks of the file. Returns None if it has none. Raises Corrupt if some are missing."""
        # Mapped for random access: otherwise the system may read megabytes ahead from a file that is not in the page
        # cache, although only some pages are needed.
        data = self._files.map_readonly(f"{FOLDER}/{self.entry.path}", at_random=True)
        identities = _open_identities(data, self.entry.size_bytes)
        if identities is not None and identities.rows != self.entry.rows:
            raise Corrupt(f"it has {identities.rows} identities, its attach says {self.entry.rows} rows")
        return identities

    def _identities_from_groups(self, row_numbers: Int64Array) -> list[Row]:
        """Read ID_COLUMNS of rows from the row groups, for a file without identity blocks.

        `row_numbers`: ascending and distinct.
        """
        rows = []
        with self._reclosing():
            self._open()
            groups = np.searchsorted(self._group_starts, row_numbers, side="right") - 1
            for group in np.unique(groups).tolist():
                rows_in_group = row_numbers[groups == group] - self._group_starts[group]
                rows += self._read([group], ID_COLUMNS).take(pa.array(rows_in_group)).to_pylist()
        return rows

    def find_seqs(self, seqs: Int64Array) -> pa.Table:
        """Read ID_COLUMNS of the rows with these sequence numbers, in the file's order.

        Reads only row groups that may contain one of the numbers, by their statistics.
        """
        tables = [_NO_ROWS]
        with self._reclosing():
            self._open()
            low, high = self._group_seqs
            sorted_seqs = np.sort(seqs)
            begin, end = (
                np.searchsorted(sorted_seqs, low, side="left"),
                np.searchsorted(sorted_seqs, high, side="right"),
            )
            for group in np.flatnonzero(end > begin).tolist():
                matches = np.isin(self._read([group], ["seq"]).column("seq").to_numpy(), sorted_seqs)
                if matches.any():
                    tables.append(self._read([group], ID_COLUMNS).filter(pa.array(matches)))
        return pa.concat_tables(tables)

    def key_columns(self) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Read the columns `unique_key` and `keys` of all rows."""
        with self._reclosing():
            rows = self._read(list(range(self._open().num_row_groups)), ["unique_key", "keys"])
        return rows.column("unique_key"), rows.column("keys")

    def raw_bytes(self) -> int:
        """Read the uncompressed size of all row groups from the footer."""
        with self._reclosing():
            metadata = self._open().metadata
            return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))

    def group_count(self) -> int:
        """Count the row groups."""
        with self._reclosing():
            return int(self._open().num_row_groups)

    def identities(self, group: int) -> pa.RecordBatch:
        """Read ID_COLUMNS of one row group, sorted by (due_ms, seq)."""
        with self._reclosing():
            rows = self._read([group], ID_COLUMNS).combine_chunks()
        return pa.RecordBatch.from_arrays([column.chunk(0) for column in rows.columns], schema=rows.schema)

    # -- row group by row group, for reads outside the schedule that need only part of a file ----------------------

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
        statistics = self._open().metadata.row_group(group).column(_TOPIC).statistics
        return None if statistics is None or not statistics.has_min_max else (statistics.min, statistics.max)

    def may_have_topic(self, group: int, topic: str) -> bool:
        """Check whether a row group may contain rows of a topic."""
        first_and_last = self.group_topics(group)
        return first_and_last is None or first_and_last[0] <= topic <= first_and_last[1]

    def group_rows(self, group: int) -> int:
        """Count the rows in a row group."""
        self._open()
        return int(self._group_starts[group + 1] - self._group_starts[group])

    def read_group(self, group: int, columns: list[str]) -> pa.Table:
        """Read these columns of all rows of a row group."""
        return self._read([group], columns)

    def read_group_rows(self, group: int, rows: Int64Array, columns: list[str]) -> pa.Table:
        """Read these columns of some rows of a row group. `rows`: ascending indexes in the group.

        Pages after the last of these rows are not read.
        """
        self._load_columns([group], columns)
        batches, begin = [], 0
        try:
            for batch in self._open().iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                rows_in_batch = rows[(rows >= begin) & (rows < begin + batch.num_rows)] - begin
                batches.append(batch.take(pa.array(rows_in_batch)))
                begin += batch.num_rows
                if begin > rows[-1]:
                    break
        except (OSError, pa.ArrowInvalid) as error:
            raise Corrupt(f"{self.entry.path}: {error}; restore this file from a copy") from error
        return pa.Table.from_batches(batches)

    def check(self) -> None:
        """Raise Corrupt unless the file opens and its footer agrees with its entry."""
        self._open()

    def close(self) -> None:
        """Drop the footer and the mapping. The next read opens the file again."""
        self._parquet = self._mapped = None
        self._group_starts = self._group_min = self._group_max = _NO_GROUPS
        self._group_seqs = _NO_GROUPS, _NO_GROUPS

    @contextmanager
    def _reclosing(self) -> Iterator[None]:
        """Close the file after the block if it was closed before."""
        was_open = self.is_open
        try:
            yield
        finally:
            if not was_open:
                self.close()

    def _open(self) -> pq.ParquetFile:
        """Open and check the file, unless it is open. Raises Corrupt."""
        if self._parquet is None:
            data = self._files.map_readonly(f"{FOLDER}/{self.entry.path}")
            parquet = self._parse_file(data)
            self.is_ranged = not isinstance(data, pa.Buffer)
            self._check(parquet, data.size() if self.is_ranged else data.size)
            self._parquet, self._mapped = parquet, None if self.is_ranged else data
        return self._parquet

    def _parse_file(self, data: pa.Buffer | pa.NativeFile) -> pq.ParquetFile:
        """Check the seal and parse the footer. Raises Corrupt with the file's name."""
        try:
            return _parse(data)
        except (OSError, pa.ArrowInvalid, Corrupt) as error:
            name = f"{FOLDER}/{self.entry.path}"
            raise Corrupt(f"{name}: {error}; restore this file from a copy") from error

    def _check(self, parquet: pq.ParquetFile, size_bytes: int) -> None:
        """Compare the footer with the file's entry, and load the bounds of the row groups. Raises Corrupt."""
        metadata = parquet.metadata
        # `metadata.schema` would make a reference cycle, which keeps both in memory until the garbage collector runs.
        if parquet.schema_arrow.names != TABLE_SCHEMA.names:
            raise Corrupt(f"{self.entry.path} has other columns than the pending table")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self._group_starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._group_min, self._group_max = _group_bounds(groups, "due_ms")
        seq_min, seq_max = self._group_seqs = _group_bounds(groups, "seq")
        # Readers skip files by the entry's bounds: with bounds narrower than the file they would miss messages.
        actual = (
            metadata.num_rows, size_bytes, self._group_min[0], self._group_max[-1], seq_min.min(), seq_max.max(),
        )  # fmt: skip
        entry = self.entry
        expected = (
            entry.rows, entry.size_bytes, entry.min_due_ms, entry.max_due_ms, entry.min_seq, entry.max_seq,
        )  # fmt: skip
        for name, actual_value, expected_value in zip(_CHECKED_FIELDS, actual, expected, strict=True):
            if actual_value != expected_value:
                raise Corrupt(f"{entry.path} has {name} {actual_value}, its attach says {expected_value}")
        if np.any(self._group_min[1:] < self._group_max[:-1]) or self._group_starts[-1] != metadata.num_rows:
            raise Corrupt(f"{entry.path}: its row groups are not sorted by due_ms, or not all there")

    def _groups(self, low_due_ms: int, high_due_ms: int) -> list[int]:
        """List the row groups that may contain rows due in [low, high]."""
        self._open()
        begin = int(np.searchsorted(self._group_max, low_due_ms, side="left"))
        end = int(np.searchsorted(self._group_min, high_due_ms, side="right"))
        return list(range(begin, end))

    def _groups_between(self, low: Position, high: Position) -> list[int]:
        """List the row groups that may contain rows with low <= (due_ms, seq) < high."""
        groups = self._groups(low[0], high[0])
        seq_min, seq_max = self._group_seqs
        # Many row groups may have the same due time, and a caller reads them in several calls. The sequence numbers
        # limit each call to the groups that it needs.
        while groups and self._group_max[groups[0]] == low[0] and seq_max[groups[0]] < low[1]:
            del groups[0]
        while groups and self._group_min[groups[-1]] == high[0] and seq_min[groups[-1]] >= high[1]:
            del groups[-1]
        return groups

    def _read(self, groups: list[int], columns: list[str]) -> pa.Table:
        """Read these columns of all rows of some row groups. Raises Corrupt."""
        self._load_columns(groups, columns)
        try:
            # One thread for a single group: waking other threads for its columns costs more than it saves.
            return self._open().read_row_groups(groups, columns=columns, use_threads=len(groups) > 1)
        except (OSError, pa.ArrowInvalid) as error:
            raise Corrupt(f"{self.entry.path}: {error}; restore this file from a copy") from error

    def _load_columns(self, groups: list[int], columns: list[str]) -> None:
        """Load these columns of row groups of a mapped file from the disk. Raises Corrupt if the disk cannot read them.

        Without this, an unreadable page of a mapping would end the process (SIGBUS).
        """
        metadata = self._open().metadata
        if self._mapped is None:
            return
        column_numbers = sorted(map(TABLE_SCHEMA.get_field_index, columns))
        spans: list[tuple[int, int]] = []
        for chunk in (
            metadata.row_group(group).column(number) for group in groups for number in column_numbers
        ):
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page:
                begin = min(begin, chunk.dictionary_page_offset)
            end = begin + chunk.total_compressed_size
            if spans and spans[-1][1] == begin:  # adjacent chunks are loaded at once
                begin = spans.pop()[0]
            spans.append((begin, end))
        try:
            for begin, end in spans:
                check_readable(self._mapped, begin, end)
        except Corrupt as error:
            raise Corrupt(f"{self.entry.path}: {error}; restore this file from a copy") from error


def check_all(data: pa.Buffer) -> None:
    """Check all checksums of a data file, which reads the whole file. Raises Corrupt."""
    check_readable(data, 0, data.size)
    try:
        parquet = _parse(data)
        for group in range(parquet.num_row_groups):
            parquet.read_row_group(group, use_threads=False)
        identities = _open_identities(data, data.size)
        if identities is not None:
            identities.check()
    except (OSError, pa.ArrowInvalid) as error:
        raise Corrupt(str(error)) from error


def _open_identities(data: pa.Buffer | pa.NativeFile, size_bytes: int) -> Identities | None:
    """Open the identities of a file, or return None if it has none. Raises Corrupt unless it has `size_bytes` bytes.

    `data`: the mapped file, or a file that is read by range requests.
    """
    if isinstance(data, pa.Buffer):
        actual_bytes = data.size

        def read_at(begin: int, size: int) -> pa.Buffer:
            check_readable(data, begin, begin + size)
            return data.slice(begin, size)

        end = read_at(max(0, data.size - TRAILER.size), min(data.size, TRAILER.size))
    else:
        # One request reads the end of the file, which also has the trailer of the identities.
        actual_bytes, end = data.size(), _read_end(data)

        def read_at(begin: int, size: int) -> pa.Buffer:
            offset_in_end = begin - (actual_bytes - end.size)
            return (
                end.slice(offset_in_end, size)
                if offset_in_end >= 0
                else pa.py_buffer(data.read_at(size, begin))
            )

    if actual_bytes != size_bytes:
        raise Corrupt(f"it has size_bytes {actual_bytes}, its attach says {size_bytes}")
    identities_end = actual_bytes - sealed_bytes(end)
    return Identities(read_at, identities_end) if has_identities(read_at, identities_end) else None


def _parse(data: pa.Buffer | pa.NativeFile) -> pq.ParquetFile:
    """Check the seal and parse the footer. Raises Corrupt and errors of Arrow."""
    # The seal is checked first, because Arrow may abort the process on a damaged footer.
    if isinstance(data, pa.Buffer):
        check_readable(data, max(0, data.size - TRAILER.size), data.size)
        check_readable(data, max(0, data.size - sealed_bytes(data)), data.size)
        check_seal(data)
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    check_seal(_read_end(data))
    return pq.ParquetFile(data, page_checksum_verification=True)


def _read_end(file: pa.NativeFile) -> pa.Buffer:
    """Read the last END_BYTES of a file, or more if its footer is longer."""
    size_bytes = file.size()
    end = pa.py_buffer(file.read_at(min(END_BYTES, size_bytes), max(0, size_bytes - END_BYTES)))
    needed = min(sealed_bytes(end), size_bytes)
    return end if needed <= end.size else pa.py_buffer(file.read_at(needed, size_bytes - needed))


def overlapping(files: Sequence[DataFile], ranges: Ranges) -> list[DataFile]:
    """List the files that may contain sequence numbers of these ranges, sorted by their first due time."""
    spans = np.array([(file.entry.min_seq, file.entry.max_seq + 1) for file in files], np.int64)
    begin, end = spans.reshape(-1, 2).T
    matches = [files[index] for index in np.flatnonzero(overlap(begin, end, ranges)).tolist()]
    return sorted(matches, key=lambda file: file.entry.min_due_ms)


def search(due: Int64Array, seq: Int64Array, position: Position) -> int:
    """Count the rows before `position` in columns sorted by (due_ms, seq)."""
    begin = int(np.searchsorted(due, position[0], side="left"))
    end = int(np.searchsorted(due, position[0], side="right"))
    return begin + int(np.searchsorted(seq[begin:end], position[1], side="left"))


def _group_bounds(groups: list[pq.RowGroupMetaData], name: str) -> tuple[Int64Array, Int64Array]:
    """Read the (min, max) of a column in each row group from its statistics. Raises Corrupt if there are none."""
    column = TABLE_SCHEMA.get_field_index(name)
    statistics = [group.column(column).statistics for group in groups]
    if not statistics or any(s is None or not s.has_min_max for s in statistics):
        raise Corrupt(f"a file without rows, or without statistics of {name}: write it with layout.cut_files")
    low, high = ([getattr(s, end) for s in statistics] for end in ("min", "max"))
    return np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)


def _due_and_seq(rows: pa.Table) -> tuple[Int64Array, Int64Array]:
    """Read the columns due_ms and seq of rows, which may have several chunks."""
    flat = rows.select(["due_ms", "seq"]).combine_chunks()
    if flat.num_rows == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return int64(flat.column("due_ms").chunk(0)), int64(flat.column("seq").chunk(0))
