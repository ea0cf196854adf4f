"""Rewritten and merged data files contain the pending rows of the files that they replace."""

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

from timeball.broker.tables import compact, table_changes
from timeball.broker.tables.compact import rewrite
from timeball.log import writer
from timeball.schedule.outcomes import Holds
from timeball.table import merging
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.merging import FILES_MIN

EVERYTHING: Any = ((-1, 0), (1 << 62, 0))  # the range of all rows, for `rows_between`


def rewritten(
    files: CrashFiles, entries: list[FileEntry], settled: list[int] | None = None, **arguments: Any
) -> Any:
    """The attachment of a rewrite of these files without the messages `settled`."""
    arguments = {"settled_before_ms": -1, "now_ms": NOW_MS, "epoch": 7, **arguments}
    return rewrite(files, files, entries, np.array(settled or [], dtype=np.int64), holds=Holds(), **arguments)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_rewritten_files_contain_exactly_the_pending_rows(
    due_lists: list[list[int]], data: st.DataObject
) -> None:
    files, entries, all_keys = CrashFiles(), [], []
    for dues in due_lists:
        rows = table_rows([NOW_MS + due for due in dues], first_seq=1 + len(all_keys))
        all_keys += order(rows)
        entries += write(files, rows)
    settled = data.draw(st.lists(st.integers(1, len(all_keys)), unique=True))
    before_ms = NOW_MS + data.draw(st.integers(-1, 51))
    attachment = rewritten(files, entries, settled, settled_before_ms=before_ms)
    keys = [
        key for entry in attachment.files for key in order(DataFile(files, entry).rows_between(*EVERYTHING))
    ]
    assert keys == sorted((due, seq) for due, seq in all_keys if due >= before_ms and seq not in settled)
    assert (attachment.job, attachment.epoch, attachment.removes) == (
        "rewrite",
        7,
        [entry.path for entry in entries],
    )


@on_node()
async def test_messages_are_released_after_their_files_were_merged_and_split(world: World) -> None:
    for number in range(FILES_MIN):
        await world.send("a", [2 * HOUR_MS + number, 100 * 24 * HOUR_MS + number])
        await world.compact()
    await world.cancel(["k00000", "k00003"])
    files = 2 * FILES_MIN
    assert world.broker.status()["schedule"]["table_files"] == files, (
        "each compaction makes two, of two months"
    )
    for expected in (FILES_MIN + 1, 2):
        await world.merge()
        assert world.broker.status()["schedule"]["table_files"] == expected
    assert world.broker.status()["schedule"]["table_rows"] == 2 * FILES_MIN - 2
    await world.merge()
    assert world.broker.status()["table"]["version"] == FILES_MIN + 2, "the last merge had nothing to do"
    for _ in range(101):
        await world.advance(24 * HOUR_MS)
        await world.merge()
    await world.consume()
    assert check(world.observed, await world.outcome()) == []


@on_node()
async def test_a_merge_takes_no_more_files_than_memory_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bodies compress well, so the files on disk are much smaller."""
    for _ in range(FILES_MIN):
        await world.send("a", [2 * HOUR_MS], body_bytes=100_000)
        await world.compact()
    pending = world.broker.scheduling.hour_log.pending
    monkeypatch.setattr(merging, "RAW_BYTES_MAX", 500_000)
    assert sum(entry.size_bytes for entry in pending.live_entries()) < merging.RAW_BYTES_MAX
    await world.merge()
    files = pending.all()
    assert [file.entry.rows for file in files if file.entry.rows > 1] == [4]
    assert all(file.raw_bytes() <= merging.RAW_BYTES_MAX for file in files)


def test_a_run_of_a_resume_takes_no_more_files_than_memory_holds() -> None:
    files = CrashFiles()
    entries = [entry for n in range(4) for entry in write(files, table_rows([NOW_MS + n * HOUR_MS]))]
    raw_bytes = {entry.path: compact.REWRITE_RAW_BYTES_MAX // 2 for entry in entries}
    assert compact.runs(entries, lambda entry: raw_bytes[entry.path]) == [entries[:2], entries[2:]]
    raw_bytes[entries[1].path] += 1
    assert [len(run) for run in compact.runs(entries, lambda entry: raw_bytes[entry.path])] == [1, 1, 2]


@on_node()
async def test_merges_stay_within_their_budget_and_wait_for_the_end_of_a_burst(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FILES_MIN", 2)
    monkeypatch.setattr(merging, "BYTES_PER_MINUTE", 1_000)

    async def add_and_merge() -> bool:
        for _ in range(2):
            await world.send("a", [HOUR_MS])
            await world.broker.mover.compact()
        return await world.broker.mover.merge_in_background() is not None

    assert await add_and_merge()
    assert not await add_and_merge(), "the budget of bytes per minute is used up"
    await world.advance(30 * 60_000)
    assert await world.broker.mover.merge_in_background() is not None
    await world.advance(25 * 60_000)
    monkeypatch.setattr(table_changes, "BURST_ROWS_MIN", 0)
    assert not await add_and_merge(), "it waits for the end of the burst"
    await world.advance(table_changes.POSTPONED_MS_MAX - 1)
    assert not await add_and_merge()
    world.clock.advance(1)
    assert await add_and_merge(), "a burst postpones it by at most POSTPONED_MS_MAX"


@on_node()
async def test_merges_wait_while_the_disk_is_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced files stay for a day, so merges would use up the space that is kept for releases."""
    monkeypatch.setattr(merging, "FILES_MIN", 2)
    for _ in range(2):
        await world.send("a", [HOUR_MS])
        await world.broker.mover.compact()
    log_writer = world.broker.log.writer
    monkeypatch.setattr(writer, "DISK_FULL_RETRY_S", 0.001)
    with monkeypatch.context() as patch:
        patch.setattr(world.files, "free_bytes", lambda: 0)
        log_writer.next_segment.start_reserving()
        await world.until(lambda: log_writer.no_room, "the disk is full")
        assert await world.broker.mover.merge_in_background() is None
    await world.until(lambda: not log_writer.no_room, "the disk has room")
    assert await world.broker.mover.merge_in_background() is not None
