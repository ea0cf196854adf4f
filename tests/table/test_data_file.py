"""Tests of timeball.table.data_file: a file yields exactly the requested rows, or raises Corrupt."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bad_disk import PAGE, BadDisk
from tests.crash_files import CrashFiles
from tests.table.small_table import GROUP_ROWS, ONE_BUCKET, small_groups, table_rows, write
from tests.table.test_layout import order

from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import TABLE_SCHEMA
from timeball.table import data_file, identities
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile, Position
from timeball.table.identities import ID_COLUMNS
from timeball.table.layout import FOLDER, KEYS_FOLDER

EVERYTHING: tuple[Position, Position] = ((-(1 << 62), 0), (1 << 62, 0))
BEGIN_MS = ONE_BUCKET[0]
# Few due times for many rows, so that rows with the same due time are in several row groups.
DUES = st.lists(st.integers(BEGIN_MS, BEGIN_MS + 12), min_size=1, max_size=5 * GROUP_ROWS)
POSITIONS = st.tuples(st.integers(BEGIN_MS - 2, BEGIN_MS + 14), st.integers(-1, 5 * GROUP_ROWS + 2))


def one_file(rows: pa.Table) -> DataFile:
    """Write rows to a file with small row groups."""
    files = CrashFiles()
    files.make_dir(KEYS_FOLDER)
    with small_groups():
        [entry] = write(files, rows)
    return DataFile(files, entry)


def ids(rows: pa.Table) -> list[str]:
    return list(rows.column("unique_key").to_pylist())


# ---- windows ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(DUES, st.lists(st.tuples(POSITIONS, POSITIONS), min_size=1, max_size=6))
def test_rows_between_positions_equal_a_filter_of_all_rows(
    dues: list[int], windows: list[tuple[Position, Position]]
) -> None:
    rows = table_rows(dues)
    file = one_file(rows)
    all_positions = sorted(order(rows))
    for low, high in [*windows, EVERYTHING]:
        expected = [position for position in all_positions if low <= position < high]
        result = file.rows_between(low, high)
        assert order(result) == expected
        assert result.schema == TABLE_SCHEMA
        assert result.column("body").to_pylist() == [b"body %d" % seq for _, seq in expected]
        due, seq = file.positions_between(low, high)
        assert list(zip(due.tolist(), seq.tolist(), strict=True)) == expected
        due_between = [due_ms for due_ms, _ in all_positions if low[0] <= due_ms <= high[0]]
        assert len(due_between) <= file.max_rows_due_between(low[0], high[0]) <= len(all_positions)


@given(DUES)
def test_adjacent_ranges_contain_every_row_once(dues: list[int]) -> None:
    """The schedule reads a file in this way. A range may end between rows with the same due time."""
    rows = table_rows(dues)
    file, all_positions = one_file(rows), sorted(order(rows))
    cuts: list[Position] = [EVERYTHING[0], *all_positions[::5], EVERYTHING[1]]
    parts = [file.rows_between(low, high) for low, high in pairwise(cuts)]
    assert [position for part in parts for position in order(part)] == all_positions


@given(DUES, st.data())
def test_rows_of_finds_rows_by_due_time_and_number(dues: list[int], data: st.DataObject) -> None:
    file, all_positions = one_file(table_rows(dues)), sorted(order(table_rows(dues)))
    expected = data.draw(st.lists(st.sampled_from(all_positions), unique=True))
    # Two more that the file does not have: an unknown number, and the number 1 with a wrong due time.
    requested = [*expected, (BEGIN_MS + 3, 10**9), (BEGIN_MS - 50, 1)]
    due, seq = (np.array(values, dtype=np.int64) for values in zip(*requested, strict=True))
    result = set(order(file.rows_of(due, seq)))
    # The row 1 may be found nevertheless: only numbers are compared within a row group.
    assert set(expected) <= result <= {*expected, *(each for each in all_positions if each[1] == 1)}
    assert not file.is_open


def test_raw_bytes_are_the_uncompressed_size_of_all_row_groups() -> None:
    count, body = 3 * GROUP_ROWS, b"the same body" * 1_000
    file = one_file(table_rows([BEGIN_MS] * count, body=[body] * count))
    assert file.entry.size_bytes < count * len(body) < file.raw_bytes() < 1.1 * count * len(body)
    assert not file.is_open


def test_range_reads_only_row_groups_that_may_contain_it() -> None:
    file = one_file(table_rows([BEGIN_MS + i for i in range(10 * GROUP_ROWS)]))
    assert file.max_rows_due_between(BEGIN_MS, BEGIN_MS) == GROUP_ROWS
    assert file.max_rows_due_between(BEGIN_MS + 70, BEGIN_MS + 72) == 2 * GROUP_ROWS
    assert file.max_rows_due_between(BEGIN_MS - 9, BEGIN_MS - 1) == 0
    assert file.max_rows_due_between(BEGIN_MS, BEGIN_MS + 1_000) == 10 * GROUP_ROWS


def test_range_within_one_due_time_reads_only_its_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows with one due time are read in several calls, which must not read all of these rows each time."""
    file, read_groups = one_file(table_rows([BEGIN_MS] * (10 * GROUP_ROWS))), []
    read_row_groups = pq.ParquetFile.read_row_groups

    def record_and_read(parquet: pq.ParquetFile, groups: list[int], **options: Any) -> pa.Table:
        read_groups.append(groups)
        return read_row_groups(parquet, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", record_and_read)
    seqs = [seq for _, seq in order(file.rows_between((BEGIN_MS, 0), (BEGIN_MS + 1, 0)))]
    for begin, end, groups in (
        (0, 1, [0]),
        (GROUP_ROWS, 2 * GROUP_ROWS, [1]),
        (3 * GROUP_ROWS - 1, 4 * GROUP_ROWS + 1, [2, 3, 4]),
        (10 * GROUP_ROWS - 1, 10 * GROUP_ROWS, [9]),
    ):
        result = file.rows_between((BEGIN_MS, seqs[begin]), (BEGIN_MS, seqs[end - 1] + 1))
        assert [seq for _, seq in order(result)] == seqs[begin:end]
        assert read_groups.pop() == groups


@given(DUES, POSITIONS)
def test_search_counts_rows_before_the_position(dues: list[int], position: Position) -> None:
    all_positions = sorted(order(table_rows(dues)))
    due, seq = (np.array(values, dtype=np.int64) for values in zip(*all_positions, strict=True))
    assert data_file.search(due, seq, position) == sum(each < position for each in all_positions)


@given(DUES, st.lists(st.integers(BEGIN_MS - 2, BEGIN_MS + 14), min_size=1, max_size=5))
def test_first_due_at_or_after_finds_the_next_due_time(dues: list[int], times_ms: list[int]) -> None:
    file = one_file(table_rows(dues))
    for time_ms in times_ms:
        expected = min((due for due in dues if due >= time_ms), default=None)
        assert file.first_due_at_or_after(time_ms) == expected


def test_a_range_read_leaves_the_file_open_and_a_look_up_leaves_it_as_it_was() -> None:
    file = one_file(table_rows([BEGIN_MS + i for i in range(3 * GROUP_ROWS)]))
    range_reads = [
        lambda: file.positions_between(*EVERYTHING), lambda: file.rows_between(*EVERYTHING),
        lambda: file.max_rows_due_between(BEGIN_MS, BEGIN_MS), lambda: file.first_due_at_or_after(BEGIN_MS), file.check,
    ]  # fmt: skip
    look_ups = [
        lambda: file.identities_at([7]),
        file.key_columns,
        lambda: file.find_seqs(np.array([7])),
    ]
    assert not file.is_open
    for read in range_reads:
        file.close()
        read()
        assert file.is_open
    for look_up in look_ups:
        look_up()
        assert file.is_open, "it was open before"
        file.close()
        look_up()
        assert not file.is_open, "it was closed before"
        file.check()


def footers() -> int:
    """Count the footers in memory that the garbage collector knows."""
    return sum(type(each) is pq.FileMetaData for each in gc.get_objects())


def test_closed_file_leaves_no_reference_cycle() -> None:
    """A footer may be larger than the rows, and a cycle would keep it until the garbage collector runs."""
    file = one_file(table_rows([1, 2, 3]))
    gc.collect()
    of_other_tests = footers()  # other tests still use them
    gc.disable()
    try:
        file.check()
        assert footers() > of_other_tests, "an open file has its footer"
        file.key_columns()
        file.close()
        assert footers() == of_other_tests
    finally:
        gc.enable()


def test_failed_look_up_leaves_the_file_closed(sound_file: tuple[FileEntry, bytes, list[pa.Table]]) -> None:
    entry, data, _ = sound_file
    seq_column = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0).column(0)
    begin = seq_column.dictionary_page_offset or seq_column.data_page_offset
    file = DataFile(OneFile(damaged(data, begin + seq_column.total_compressed_size - 1, 0)), entry)
    with pytest.raises(Corrupt):
        file.find_seqs(np.arange(3 * GROUP_ROWS))
    assert not file.is_open


# ---- rows by index and number ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.sets(st.integers(0, 3 * GROUP_ROWS - 1), min_size=1), st.booleans())
def test_identities_at_reads_rows_by_index_with_and_without_identity_blocks(
    indexes: set[int], has_blocks: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identities, "BLOCK_ROWS", 4)
        if not has_blocks:
            patch.setattr(identities.Encoder, "finish", lambda _: b"")
        rows = table_rows(
            [BEGIN_MS + i for i in range(3 * GROUP_ROWS)], number=[None, 7] * (3 * GROUP_ROWS // 2)
        )
        file = one_file(rows)
    assert (file._map_identities() is not None) == has_blocks
    all_identities = rows.select(ID_COLUMNS).to_pylist()
    assert file.identities_at(sorted(indexes)) == [all_identities[index] for index in sorted(indexes)]
    assert not file.is_open


@settings(max_examples=40)
@given(st.lists(st.integers(-2, 3 * GROUP_ROWS + 2), max_size=9))
def test_find_seqs_reads_the_rows_with_these_numbers(seqs: list[int]) -> None:
    file = one_file(table_rows([BEGIN_MS + i // 2 for i in range(2 * GROUP_ROWS)], first_seq=5))
    result = file.find_seqs(np.array(seqs, dtype=np.int64)).column("seq").to_pylist()
    assert result == sorted(set(seqs) & set(range(5, 5 + 2 * GROUP_ROWS)))


# ---- damage -------------------------------------------------------------------------------------------------


class OneFile(CrashFiles):
    """A disk on which every name has these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = pa.py_buffer(data)

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        return self._data


@pytest.fixture(scope="module")
def sound_file() -> tuple[FileEntry, bytes, list[pa.Table]]:
    """A file of several row groups: its entry, its bytes, and the results of `read_all_ways`."""
    file = one_file(table_rows([BEGIN_MS + i // 3 for i in range(3 * GROUP_ROWS)]))
    return file.entry, file._files.content(f"{FOLDER}/{file.entry.path}"), read_all_ways(file)


def read_all_ways(file: DataFile) -> list[pa.Table]:
    """Read rows of the file in all ways: by position, by index, and by number."""
    windows = [EVERYTHING, ((BEGIN_MS + 1, 4), (BEGIN_MS + 6, 0))]
    result = [file.rows_between(low, high) for low, high in windows]
    by_index = pa.Table.from_pylist(
        file.identities_at([index for index in (0, 9, 20) if index < file.entry.rows]), identities.ID_SCHEMA
    )
    return [*result, file.find_seqs(np.array([9, 20])), by_index]


def damaged(data: bytes, position: int, bit: int) -> bytes:
    """Flip one bit."""
    copy = bytearray(data)
    copy[position] ^= 1 << bit
    return bytes(copy)


def test_flipped_bit_raises_or_changes_no_row(sound_file: tuple[FileEntry, bytes, list[pa.Table]]) -> None:
    """Each read returns the expected rows, or raises an error that names the file. Most flipped bits are noticed."""
    entry, data, expected = sound_file
    noticed, positions = 0, range(0, len(data), 3)
    for position in positions:
        file = DataFile(OneFile(damaged(data, position, position % 8)), entry)
        try:
            assert read_all_ways(file) == expected, f"byte {position}"
        except Corrupt as error:
            assert entry.path in str(error)
            assert "restore this file from a copy" in str(error)
            noticed += 1
    assert noticed > 0.8 * len(positions)


def test_damaged_footer_loses_rows_without_the_seal_check(
    sound_file: tuple[FileEntry, bytes, list[pa.Table]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above, and the reason for the seal: wrong statistics make a row group begin later."""
    entry, data, expected = sound_file
    monkeypatch.setattr(data_file, "check_seal", lambda data: None)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    begin, later = (value.to_bytes(8, "little") for value in (BEGIN_MS + 5, BEGIN_MS + 7))
    assert begin in data[footer:], "the first due time of the last row group"
    with_wrong_footer = data[:footer] + data[footer:].replace(begin, later)
    result = read_all_ways(DataFile(OneFile(with_wrong_footer), entry))
    assert result[1].num_rows < expected[1].num_rows


def test_truncated_file_raises_corrupt(sound_file: tuple[FileEntry, bytes, list[pa.Table]]) -> None:
    entry, data, _ = sound_file
    for size in [0, 1, 11, *range(16, len(data), 97), len(data) - 1]:
        with pytest.raises(Corrupt, match="restore this file"):
            DataFile(OneFile(data[:size]), entry).check()


def wrong_entries(entry: FileEntry) -> Iterator[tuple[str, FileEntry]]:
    """Yield (field, entry): each entry has one wrong field."""
    for name in ("rows", "size_bytes", "min_due_ms", "max_due_ms", "min_seq", "max_seq"):
        for difference in (-1, 1):
            changed: dict[str, Any] = {name: getattr(entry, name) + difference}
            yield name, msgspec.structs.replace(entry, **changed)


def test_entry_that_differs_from_the_footer_is_refused(
    sound_file: tuple[FileEntry, bytes, list[pa.Table]],
) -> None:
    """With a range of due times that is too narrow, the schedule would not read some scheduled messages."""
    entry, data, _ = sound_file
    DataFile(OneFile(data), entry).check()
    for name, wrong_entry in wrong_entries(entry):
        with pytest.raises(Corrupt, match=f"has {name} .*, its attach says"):
            DataFile(OneFile(data), wrong_entry).check()


def test_unsorted_file_is_refused() -> None:
    rows = table_rows([BEGIN_MS + 50 - i for i in range(3 * GROUP_ROWS)])
    files = CrashFiles()
    with small_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("timeball.table.layout.sort_rows", lambda rows: rows)
        [entry] = write(files, rows)
    with pytest.raises(Corrupt):
        DataFile(files, entry).check()


def test_check_of_a_missing_file_raises_not_found() -> None:
    file = one_file(table_rows([BEGIN_MS]))
    file._files.remove(f"{FOLDER}/{file.entry.path}")
    with pytest.raises(NotFound):
        file.check()


def test_a_closed_file_is_opened_again_by_a_read() -> None:
    file = one_file(table_rows([BEGIN_MS, BEGIN_MS + 1]))
    before = read_all_ways(file)
    file.close()
    assert read_all_ways(file) == before


def test_pages_that_the_disk_cannot_read_raise_corrupt(tmp_path: Path) -> None:
    files = BadDisk(tmp_path)
    files.make_dir(KEYS_FOLDER)
    dues = [BEGIN_MS + number for number in range(4_000)]
    [entry] = write(files, table_rows(dues))
    name = f"{FOLDER}/{entry.path}"
    assert entry.size_bytes > 10 * PAGE
    for bad_page in range(0, entry.size_bytes, PAGE):
        files.bad = {name: [bad_page]}
        file = DataFile(files, entry)
        errors = []
        for read in (
            lambda file=file: file.rows_between(*EVERYTHING),
            lambda file=file: file.read_group_rows(0, np.array([1]), TABLE_SCHEMA.names),
            lambda file=file: file.identities_at(list(range(0, 4_000, 100))),
            lambda: data_file.check_all(files.map_readonly(name)),
        ):
            try:
                read()
            except Corrupt as error:
                errors.append(str(error))
        assert errors, "each page is needed by one of these reads"
        assert all("the disk cannot read byte" in text for text in errors)
