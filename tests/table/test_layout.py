"""Tests of timeball.table.layout: every row in one file, every file in one bucket, and seals that protect footers."""

from __future__ import annotations

import io
import itertools

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.table.small_table import ALL_ZONES, GROUP_ROWS, NOW_MS, small_groups, table_rows

from timeball.model.errors import Corrupt
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import TABLE_SCHEMA
from timeball.table import layout
from timeball.table.file_keys import FileKeys
from timeball.table.layout import SEAL, check_seal, encode_file, seal

DUES = st.lists(st.integers(*ALL_ZONES), min_size=1, max_size=60)
NOWS = st.integers(NOW_MS - 40 * DAY_MS, NOW_MS + 40 * DAY_MS)


def order(rows: pa.Table) -> list[tuple[int, int]]:
    """List (due_ms, seq) of all rows, in their order."""
    return list(zip(rows.column("due_ms").to_pylist(), rows.column("seq").to_pylist(), strict=True))


@pytest.mark.parametrize(
    ("ahead_ms", "bucket"),
    [
        (-3 * DAY_MS, "2023-11-11T22"),  # overdue
        (0, "2023-11-14T22"),
        (HOUR_MS, "2023-11-14T23"),
        (48 * HOUR_MS - 1, "2023-11-16T22"),
        (48 * HOUR_MS, "2023-11-16"),
        (60 * DAY_MS - 1, "2024-01-13"),
        (60 * DAY_MS, "2024-01"),
        (3_653 * DAY_MS, "2033-11"),
    ],
)
def test_a_bucket_is_an_hour_below_48_hours_a_day_below_60_days_and_else_a_month(
    ahead_ms: int, bucket: str
) -> None:
    assert layout.bucket_names(np.array([NOW_MS + ahead_ms]), NOW_MS) == [bucket]


@given(DUES, NOWS)
def test_full_files_have_one_bucket_each_and_every_row_once(dues: list[int], now_ms: int) -> None:
    rows = layout.sort_rows(table_rows(dues))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FILE_ROWS", 1)
        files = list(layout.cut_files(rows, now_ms))
    read = [pq.read_table(io.BytesIO(data), schema=TABLE_SCHEMA) for _, data in files]
    assert pa.concat_tables(read).equals(rows)
    for (entry, _), file_rows in zip(files, read, strict=True):
        due = file_rows.column("due_ms").to_numpy()
        assert set(layout.bucket_names(due, now_ms)) == {entry.bucket}
        assert len(set(layout.bucket_starts(due, now_ms).tolist())) == 1
    assert len({entry.bucket for entry, _ in files}) == len(files)


@given(DUES, NOWS, st.integers(1, 30))
def test_small_buckets_of_a_month_share_a_file(dues: list[int], now_ms: int, file_rows: int) -> None:
    """The bucket of a file contains all its due times, and two adjacent files of a month exceed the size of one."""
    rows = layout.sort_rows(table_rows(dues))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FILE_ROWS", file_rows)
        files = list(layout.split_by_file(rows, now_ms))
    assert pa.concat_tables([part for _, part in files]).equals(rows)
    for bucket, part in files:
        unit = {len("2026-12"): "M", len("2026-12-24"): "D", len("2026-12-24T13"): "h"}[len(bucket)]
        due = part.column("due_ms").to_numpy().astype("datetime64[ms]")
        assert set(due.astype(f"datetime64[{unit}]").astype(str)) == {bucket}
        starts = layout.bucket_starts(due.astype(np.int64), now_ms)
        assert part.num_rows <= file_rows or len(set(starts.tolist())) == 1
    for (bucket, part), (next_bucket, next_part) in itertools.pairwise(files):
        if bucket[:7] == next_bucket[:7]:
            assert part.num_rows + next_part.num_rows > file_rows


def test_large_rows_make_files_of_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table_rows([NOW_MS + hour * HOUR_MS for hour in range(8)])
    assert len(list(layout.cut_files(rows, NOW_MS))) == 1
    monkeypatch.setattr(layout, "FILE_BYTES", rows.nbytes // 2)
    by_size = list(layout.cut_files(rows, NOW_MS))
    assert len(by_size) > 1
    assert max(entry.rows for entry, _ in by_size) <= 4
    assert len(list(layout.sorted_files(rows, NOW_MS, size_bytes=1))) == 1, "the caller estimates few bytes"


@given(DUES, NOWS)
def test_entry_describes_the_rows_of_its_file(dues: list[int], now_ms: int) -> None:
    for entry, data in layout.cut_files(layout.sort_rows(table_rows(dues, first_seq=50)), now_ms):
        file_rows = pq.read_table(io.BytesIO(data))
        dues_of_file, seqs = (file_rows.column(name).to_pylist() for name in ("due_ms", "seq"))
        assert (entry.rows, entry.size_bytes) == (file_rows.num_rows, len(data))
        assert (entry.min_due_ms, entry.max_due_ms) == (dues_of_file[0], dues_of_file[-1])
        assert (entry.min_seq, entry.max_seq) == (min(seqs), max(seqs))
        assert entry.path.startswith(f"bucket={entry.bucket}/")
        assert entry.path.endswith(".parquet")


@given(st.lists(st.integers(NOW_MS, NOW_MS + 20), min_size=1, max_size=60))
def test_rows_are_sorted_by_due_time_and_number(dues: list[int]) -> None:
    rows = table_rows(dues)
    shuffled = rows.take(np.random.default_rng(len(dues)).permutation(len(dues)))
    expected = sorted(order(rows))
    assert order(layout.sort_rows(shuffled)) == expected
    in_two_chunks = pa.concat_tables([shuffled.slice(3), shuffled.slice(0, 3)])
    assert order(layout.sort_rows(in_two_chunks)) == expected
    assert order(layout.sort_rows(rows.combine_chunks().to_batches()[0])) == expected


def test_no_rows_make_no_files() -> None:
    assert list(layout.cut_files(table_rows([]), NOW_MS)) == []


@given(
    st.lists(st.integers(NOW_MS, NOW_MS + 90 * DAY_MS), max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.integers(1, 70),
)
def test_sorted_files_equal_the_files_of_sorted_rows(
    dues: list[int], cuts: list[int], part_rows: int
) -> None:
    """For any chunks of the rows (`cuts`), and any number of rows that are copied at a time."""
    rows = table_rows(dues, first_seq=7)
    bounds = [0, *sorted(cuts), len(dues)]
    chunked = pa.concat_tables(
        [rows.slice(low, max(0, high - low)) for low, high in itertools.pairwise(bounds)]
    )
    keys, expected_keys = FileKeys(), FileKeys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_ROWS", part_rows)
        patch.setattr(layout, "FILE_ROWS", 20)
        files = list(layout.sorted_files(chunked, NOW_MS, keys))
        expected = list(layout.cut_files(layout.sort_rows(chunked), NOW_MS, expected_keys))
    for (entry, data), (expected_entry, expected_data) in zip(files, expected, strict=True):
        check_seal(pa.py_buffer(data))
        result = pq.read_table(io.BytesIO(data), schema=TABLE_SCHEMA)
        assert result.equals(pq.read_table(io.BytesIO(expected_data), schema=TABLE_SCHEMA))
        # Names are random, and the sizes depend on the division into row groups.
        without_size = msgspec.structs.replace(entry, path="", size_bytes=0)
        assert without_size == msgspec.structs.replace(expected_entry, path="", size_bytes=0)
        assert entry.size_bytes == len(data)
    assert keys.pairs == expected_keys.pairs


def test_repeated_task_writes_files_with_new_names() -> None:
    rows = table_rows([NOW_MS + HOUR_MS])
    [(first, data)], [(second, repeated)] = (list(layout.cut_files(rows, NOW_MS)) for _ in range(2))
    assert first.path != second.path
    assert data == repeated


def test_two_years_with_a_row_in_each_hour_need_few_buckets() -> None:
    """As many as the docstring of layout.py says, and one more for each of the two borders that cut a bucket."""
    dues = [NOW_MS + hour * HOUR_MS for hour in range(2 * 365 * 24)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FILE_ROWS", 1)
        names = [name for name, _ in layout.split_by_file(table_rows(dues), NOW_MS)]
    assert len(names) == len(set(names)) <= 48 + 60 + 24 + 2
    lengths = [len(name) for name in names]
    assert sorted(lengths, reverse=True) == lengths, "hours, then days, then months"


@given(st.integers(1, 3 * GROUP_ROWS))
def test_row_group_statistics_contain_the_due_times(count: int) -> None:
    with small_groups():
        data = layout.encode_file(table_rows([NOW_MS + i for i in range(count)]))
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups[:-1]] == [GROUP_ROWS] * (len(groups) - 1)
    columns = [groups[0].column(index) for index in range(metadata.num_columns)]
    with_statistics = {column.path_in_schema for column in columns if column.statistics is not None}
    assert with_statistics == {"due_ms", "seq", "topic"}
    begins = [group.column(metadata.schema.names.index("due_ms")).statistics.min for group in groups]
    assert begins == [NOW_MS + GROUP_ROWS * i for i in range(len(groups))]


ROWS = table_rows([NOW_MS, NOW_MS + 1])


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(ROWS, sink)
    return sink.getvalue()


def footer_position(data: bytes) -> int:
    """Find the position of the footer in a Parquet file, whose last 8 bytes are its length and the magic."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def test_parquet_readers_ignore_the_seal() -> None:
    sealed = seal(parquet())
    assert len(sealed) == len(parquet()) + SEAL.size
    assert pq.read_table(io.BytesIO(sealed)).equals(pq.read_table(io.BytesIO(parquet())))
    check_seal(pa.py_buffer(sealed))


def test_a_file_of_the_table_is_sealed() -> None:
    check_seal(pa.py_buffer(encode_file(ROWS)))


def test_every_flipped_bit_of_seal_and_footer_is_detected() -> None:
    sealed = seal(parquet())
    for position in range(footer_position(sealed) - SEAL.size, len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                check_seal(pa.py_buffer(bytes(damaged)))


def test_truncated_data_is_refused() -> None:
    sealed = seal(parquet())
    for size in range(len(sealed)):
        with pytest.raises(Corrupt):
            check_seal(pa.py_buffer(sealed[:size]))


def test_file_of_another_writer_is_refused() -> None:
    with pytest.raises(Corrupt, match="has no seal"):
        check_seal(pa.py_buffer(parquet()))


def test_truncated_file_cannot_be_sealed() -> None:
    with pytest.raises(AssertionError, match="whole Parquet file"):
        seal(parquet()[:-1])


@pytest.mark.parametrize(("rows", "group_rows"), [(5_000, 2_048), (65_536, 2_048), (65_537, 8_192)])
def test_a_large_file_has_larger_row_groups(rows: int, group_rows: int) -> None:
    data = layout.encode_file(table_rows([NOW_MS] * rows))
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    assert set(groups[:-1]) == {group_rows} and sum(groups) == rows
