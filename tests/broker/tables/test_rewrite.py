"""Rewriting keeps the table in few files, in buckets that fit their distance in time, and loses no pending row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import on_node
from tests.crash.checker import check
from tests.crash.world import HOUR_MS, World
from tests.crash_files import CrashFiles
from tests.table.small_table import NOW_MS, table_rows, write
from tests.table.test_layout import order

from timeball.broker.tables import compact as module
from timeball.broker.tables.compact import FILES_MIN, SIZE_RATIO, choose, rewrite
from timeball.model.limits import DAY_MS
from timeball.schedule.outcomes import Holds
from timeball.table import layout
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

EVERYTHING: Any = ((-1, 0), (1 << 62, 0))


def entry(bucket: str, rows: int, due_ms: int, number: int = 0) -> FileEntry:
    return FileEntry(
        path=f"bucket={bucket}/{number}.parquet", bucket=bucket, rows=rows, size_bytes=rows * 50,
        min_due_ms=due_ms, max_due_ms=due_ms, min_seq=1, max_seq=rows,
    )  # fmt: skip


def alike(count: int, rows: int = 10, ahead_ms: int = HOUR_MS) -> list[FileEntry]:
    due_ms = NOW_MS + ahead_ms
    bucket = layout.bucket_names(np.array([due_ms]), NOW_MS)[0]
    return [entry(bucket, rows, due_ms, number) for number in range(count)]


# ---- what is worth it ---------------------------------------------------------------------------------------


def test_files_of_one_bucket_are_merged_when_they_are_many() -> None:
    assert choose(alike(FILES_MIN - 1), NOW_MS) == []
    assert choose(alike(FILES_MIN), NOW_MS) == alike(FILES_MIN)
    mixed = [*alike(FILES_MIN - 1), *alike(FILES_MIN - 1, ahead_ms=3 * HOUR_MS)]
    assert choose(mixed, NOW_MS) == []


def test_a_large_file_is_not_written_again_for_the_sake_of_small_ones() -> None:
    """Otherwise each row would be rewritten once for each run, instead of once for each doubling."""
    large = entry(alike(1)[0].bucket, 10 * SIZE_RATIO + 1, NOW_MS + HOUR_MS, 99)
    assert choose([*alike(FILES_MIN - 1), large], NOW_MS) == []
    assert choose([large, *alike(FILES_MIN)], NOW_MS) == alike(FILES_MIN)


@pytest.mark.parametrize(
    ("bucket", "ahead_ms", "is_near"),
    [
        ("2023-11", 2 * HOUR_MS, True), ("2023-11-15", 2 * HOUR_MS, True), ("2023-11-14T23", HOUR_MS, False),
        ("2023-11-17", 3 * DAY_MS, False), ("2024-03", 120 * DAY_MS, False), ("2023-11-15", DAY_MS - 1, True),
        ("2023-11-15", DAY_MS, False),
    ],
)  # fmt: skip
def test_a_coarse_bucket_is_split_when_it_comes_near(bucket: str, ahead_ms: int, is_near: bool) -> None:
    file = entry(bucket, 5, NOW_MS + ahead_ms)
    assert choose([file], NOW_MS) == ([file] if is_near else [])


def test_one_run_takes_no_more_rows_than_memory_holds() -> None:
    rows = module.ROWS_MAX // 4
    assert len(choose(alike(FILES_MIN, rows), NOW_MS)) == 4
    alone = entry("2023-11", 5 * module.ROWS_MAX, NOW_MS + HOUR_MS)
    assert choose([alone], NOW_MS) == [alone]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 90 * 24), min_size=1, max_size=40))
def test_rewritten_files_are_not_chosen_again(hours: list[int]) -> None:
    """Rewriting ends: it must not repeat for ever while nothing changes."""
    files = CrashFiles()
    early = NOW_MS - 61 * DAY_MS  # seen from here, all of it was far
    entries = [e for h in hours for e in write(files, table_rows([NOW_MS + h * HOUR_MS]), early)]
    for _ in range(len(hours) + 1):
        chosen = choose(entries, NOW_MS)
        if not chosen:
            break
        made = rewritten(files, chosen)
        entries = [e for e in entries if e not in chosen] + made.files
    assert choose(entries, NOW_MS) == []
    assert sum(e.rows for e in entries) == len(hours)


# ---- what is written ----------------------------------------------------------------------------------------


def rewritten(
    files: CrashFiles, entries: list[FileEntry], settled: list[int] | None = None, **how: Any
) -> Any:
    how = {"settled_before_ms": -1, "now_ms": NOW_MS, "epoch": 7, **how}
    return rewrite(files, files, entries, np.array(settled or [], dtype=np.int64), holds=Holds(), **how)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_the_new_files_hold_what_still_waits_and_nothing_else(
    dues: list[list[int]], data: st.DataObject
) -> None:
    files, entries, every = CrashFiles(), [], []
    for part in dues:
        rows = table_rows([NOW_MS + due for due in part], first_seq=1 + len(every))
        every += order(rows)
        entries += write(files, rows)
    settled = data.draw(st.lists(st.integers(1, len(every)), unique=True))
    before_ms = NOW_MS + data.draw(st.integers(-1, 51))
    made = rewritten(files, entries, settled, settled_before_ms=before_ms)
    found = [row for one in made.files for row in order(DataFile(files, one).rows_between(*EVERYTHING))]
    assert found == sorted((due, seq) for due, seq in every if due >= before_ms and seq not in settled)
    assert (made.job, made.epoch, made.removes) == ("rewrite", 7, [one.path for one in entries])


@on_node()
async def test_a_broker_merges_and_splits_and_everything_still_comes(world: World) -> None:
    for number in range(FILES_MIN):
        await world.send("a", [2 * HOUR_MS + number, 100 * 24 * HOUR_MS + number])
        await world.compact()
    await world.cancel(["k00000", "k00003"])
    for expected in (FILES_MIN + 1, 2):
        await world.merge()
        assert world.broker.status()["schedule"]["table_files"] == expected
    assert world.broker.status()["schedule"]["table_rows"] == 2 * FILES_MIN - 2
    await world.merge()
    assert world.broker.status()["table"]["version"] == FILES_MIN + 2, "there was nothing more to do"
    for _ in range(101):
        await world.advance(24 * HOUR_MS)
        await world.merge()
    await world.consume()
    assert check(world.observed, await world.outcome()) == []
