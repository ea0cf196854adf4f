"""Tests of timeball.table.merging: files are merged when they are many, and rewrites end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.tables.test_rewrite import rewritten
from tests.crash_files import CrashFiles
from tests.table.small_table import NOW_MS, table_rows, write

from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS
from timeball.table import layout, merging
from timeball.table.attachment import FileEntry
from timeball.table.merging import FILES_MIN, SIZE_RATIO, Merge

NOTHING = Merge("", [])
FULL = layout.FILE_ROWS


def entry(bucket: str, rows: int, due_ms: int, number: int = 0) -> FileEntry:
    return FileEntry(
        path=f"bucket={bucket}/{number}.parquet", bucket=bucket, rows=rows, size_bytes=rows * 50,
        min_due_ms=due_ms, max_due_ms=due_ms, min_seq=1, max_seq=rows,
    )  # fmt: skip


def choose(entries: list[FileEntry], now_ms: int) -> Merge:
    """Choose among files whose rows do not compress."""
    return merging.choose(entries, now_ms, lambda file: file.size_bytes)


def plan(entries: list[FileEntry], now_ms: int) -> list[Merge]:
    return merging.plan(entries, now_ms, lambda file: file.size_bytes)


def same_files(count: int, rows: int = 10, ahead_ms: int = HOUR_MS) -> list[FileEntry]:
    """Make entries of files with the same number of rows and the same due time."""
    due_ms = NOW_MS + ahead_ms
    bucket = layout.bucket_names(np.array([due_ms]), NOW_MS)[0]
    return [entry(bucket, rows, due_ms, number) for number in range(count)]


@pytest.mark.parametrize(("rows", "reason"), [(10, "small"), (FULL // 4, "small"), (FULL // 2, "overlap")])
def test_files_are_merged_when_they_are_many(rows: int, reason: str) -> None:
    assert choose(same_files(FILES_MIN - 1, rows), NOW_MS) == NOTHING
    assert choose(same_files(FILES_MIN, rows), NOW_MS) == (reason, same_files(FILES_MIN, rows))
    later = same_files(FILES_MIN - 1, rows, 40 * DAY_MS)
    assert choose([*same_files(FILES_MIN - 1, rows), *later], NOW_MS) == NOTHING


def test_small_files_of_different_days_of_a_month_are_merged_and_larger_ones_are_not() -> None:
    files = [entry(f"2023-12-{day:02}", 10, NOW_MS + (16 + day) * DAY_MS) for day in range(1, FILES_MIN + 1)]
    assert choose(files, NOW_MS).files == files
    large = [msgspec.structs.replace(file, rows=FULL // 2) for file in files]
    assert choose(large, NOW_MS) == NOTHING, "no due time is in two of them"


def test_a_large_file_is_not_merged_with_small_ones() -> None:
    """Otherwise each merge would rewrite all rows, instead of a row once for each multiple of its file's size."""
    large = entry(same_files(1)[0].bucket, 10 * SIZE_RATIO + 1, NOW_MS + HOUR_MS, 99)
    assert choose([*same_files(FILES_MIN - 1), large], NOW_MS) == NOTHING
    assert choose([large, *same_files(FILES_MIN)], NOW_MS).files == same_files(FILES_MIN)


def test_larger_files_are_merged_without_a_tiny_one() -> None:
    tiny = entry(same_files(1)[0].bucket, 1, NOW_MS + HOUR_MS, 99)
    assert choose([tiny, *same_files(FILES_MIN)], NOW_MS).files == same_files(FILES_MIN)


@pytest.mark.parametrize(
    ("bucket", "ahead_ms", "is_near"),
    [
        ("2023-11", 2 * HOUR_MS, True), ("2023-11-15", 2 * HOUR_MS, True), ("2023-11-14T23", HOUR_MS, False),
        ("2023-11-17", 3 * DAY_MS, False), ("2024-03", 120 * DAY_MS, False), ("2023-11-15", DAY_MS - 1, True),
        ("2023-11-15", DAY_MS, False),
    ],
)  # fmt: skip
def test_a_large_file_of_a_day_or_month_is_split_a_day_before_it_is_due(
    bucket: str, ahead_ms: int, is_near: bool
) -> None:
    file = entry(bucket, FULL + 1, NOW_MS + ahead_ms)
    assert choose([file], NOW_MS) == (Merge("split", [file]) if is_near else NOTHING)
    assert choose([msgspec.structs.replace(file, rows=FULL)], NOW_MS) == NOTHING, "a read of it is cheap"
    file_of_many_bytes = msgspec.structs.replace(file, rows=10, size_bytes=2 * layout.FILE_BYTES + 1)
    assert choose([file_of_many_bytes], NOW_MS) == (
        Merge("split", [file_of_many_bytes]) if is_near else NOTHING
    )


def test_one_rewrite_takes_files_up_to_the_limits_of_rows_and_bytes() -> None:
    rows = merging.ROWS_MAX // 4
    assert len(choose(same_files(FILES_MIN, rows), NOW_MS).files) == 4
    alone = entry("2023-11", 5 * merging.ROWS_MAX, NOW_MS + HOUR_MS)
    assert choose([alone], NOW_MS).files == [alone]
    files_of_many_bytes = [
        msgspec.structs.replace(file, size_bytes=merging.BYTES_MAX // 3) for file in same_files(FILES_MIN)
    ]
    assert len(choose(files_of_many_bytes, NOW_MS).files) == 3


def test_rows_that_compress_well_are_bounded_by_their_size_in_memory() -> None:
    """16 MiB of small files may have gigabytes of bodies."""
    files = same_files(FILES_MIN)
    merge = merging.choose(files, NOW_MS, lambda file: merging.RAW_BYTES_MAX // 4)
    assert merge == ("small", files[:4])
    merge = merging.choose(files, NOW_MS, lambda file: merging.RAW_BYTES_MAX // 2 + 1)
    assert merge == NOTHING, "single files would be rewritten for ever"
    later = same_files(FILES_MIN, 10 * SIZE_RATIO + 1)
    sizes = {10: merging.RAW_BYTES_MAX, later[0].rows: 1}
    assert merging.choose([*files, *later], NOW_MS, lambda file: sizes[file.rows]).files == later


def test_sizes_are_read_for_files_within_the_other_limits_only() -> None:
    assert merging.choose(same_files(FILES_MIN - 1), NOW_MS, refuse_read) == NOTHING
    assert merging.choose(same_files(FILES_MIN, merging.ROWS_MAX), NOW_MS, refuse_read) == NOTHING


def refuse_read(file: FileEntry) -> int:
    """Fail, in place of reading the uncompressed size of a file."""
    raise AssertionError(file)


def test_files_that_reach_the_limits_alone_are_not_rewritten() -> None:
    assert choose(same_files(FILES_MIN, merging.ROWS_MAX), NOW_MS) == NOTHING


def test_a_plan_lists_all_rewrites_and_their_cost() -> None:
    merges = plan(
        [*same_files(FILES_MIN), *same_files(FILES_MIN, ahead_ms=40 * DAY_MS), *same_files(1, FULL)], NOW_MS
    )
    assert [(merge.reason, len(merge.files), merge.files_after) for merge in merges] == [
        ("small", FILES_MIN, 1)
    ] * 2
    [file] = same_files(1)
    whole_budget = msgspec.structs.replace(file, size_bytes=merging.BYTES_PER_MINUTE // 2)
    assert Merge("small", [whole_budget]).cost_ms == MINUTE_MS, "of reads and writes"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 90 * 24), min_size=1, max_size=40), st.integers(1, 9))
def test_rewritten_files_are_not_chosen_again(hours: list[int], file_rows: int) -> None:
    """Rewrites must end while nothing else changes the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "FILE_ROWS", file_rows)
        patch.setattr(merging, "FILES_MIN", 3)
        patch.setattr(merging, "SMALL_PART", 6)
        files = CrashFiles()
        written_ms = (
            NOW_MS - 61 * DAY_MS
        )  # at this time, all rows were due so late that their buckets are months
        entries = [
            file for hour in hours for file in write(files, table_rows([NOW_MS + hour * HOUR_MS]), written_ms)
        ]
        for _ in range(2 * len(hours) + 1):
            if not (chosen := choose(entries, NOW_MS).files):
                break
            entries = [file for file in entries if file not in chosen] + rewritten(files, chosen).files
        assert choose(entries, NOW_MS) == NOTHING
        assert sum(file.rows for file in entries) == len(hours)
