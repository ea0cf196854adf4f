"""The live files of the table, compared with a list of all their rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.schedule.table_files import table_rows

from timeball.broker.tables.compact import write_files
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Int64Array, Kind
from timeball.schedule import hour_log
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.hour_log import OPEN_MS, PendingFiles, close_far, read_rows_between, read_window
from timeball.schedule.outcomes import Settled
from timeball.table import layout
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile
from timeball.table.file_keys import FileSet

Pair = tuple[int, int]

NOW_MS = 1_700_000_000_000
FIRST, LAST = (-(1 << 62), 0), (1 << 62, 0)
# Hours, days and months away, and some at the same time: few rows, many files.
DUES = st.lists(
    st.one_of(st.integers(0, 50), st.integers(0, 100 * limits.DAY_MS)).map(lambda ms: NOW_MS + ms),
    min_size=1,
    max_size=25,
)
NEAR_DUES = st.lists(st.integers(NOW_MS, NOW_MS + 40), min_size=1, max_size=25)
BATCHES = st.lists(DUES, min_size=1, max_size=3)


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows then make several files."""
    monkeypatch.setattr(layout, "FILE_ROWS", 1)


def write(files: CrashFiles, due_times: list[int], first_seq: int = 0) -> list[FileEntry]:
    return write_files(
        files, table_rows(due_times, range(first_seq, first_seq + len(due_times)), NOW_MS), NOW_MS
    )


def table(batches: list[list[int]]) -> tuple[PendingFiles, list[Pair]]:
    """Write files for each batch. Returns the table and all (due_ms, seq) in it."""
    files, entries, pairs = CrashFiles(), [], []
    for due_times in batches:
        entries += write(files, due_times, len(pairs))
        pairs += [(due, len(pairs) + index) for index, due in enumerate(due_times)]
    return PendingFiles(files, entries), sorted(pairs)


def to_pairs(columns: tuple[Int64Array, Int64Array]) -> list[Pair]:
    return list(zip(columns[0].tolist(), columns[1].tolist(), strict=True))


def open_rows(live: PendingFiles, until_ms: int) -> list[Pair]:
    """Open once, as the backlog does."""
    files, until_ms = live.to_open(until_ms)
    window = read_window(files, until_ms)
    live.set_opened(window.next_ms)
    return sorted(to_pairs((window.due_ms, window.seq)))


@given(BATCHES, DUES)
def test_openings_return_every_row_before_the_time_once(
    batches: list[list[int]], open_times_ms: list[int]
) -> None:
    live, pairs = table(batches)
    opened_pairs: list[Pair] = []
    for until_ms in sorted(open_times_ms):
        opening = open_rows(live, until_ms)
        assert opening == [pair for pair in pairs if pair[0] < until_ms and pair not in opened_pairs]
        opened_pairs += opening
        later_due_times = [due for due, _ in pairs if due >= until_ms]
        assert not later_due_times or live.first_due_ms <= min(later_due_times)


@given(BATCHES, st.integers(0, 5), st.integers(1, 40 * limits.DAY_MS))
def test_read_rows_between_returns_the_rows_of_a_window(
    batches: list[list[int]], first_index: int, width_ms: int
) -> None:
    live, pairs = table(batches)
    first_pair = pairs[min(first_index, len(pairs) - 1)]
    end_pair = (first_pair[0] + width_ms, 0)
    rows = read_rows_between(live.overlapping(first_pair[0], end_pair[0]), first_pair, end_pair)
    assert rows is not None
    assert sorted(zip(rows["due_ms"].to_pylist(), rows["seq"].to_pylist(), strict=True)) == [
        pair for pair in pairs if first_pair <= pair < end_pair
    ]


@given(BATCHES, st.integers(NOW_MS - 1, NOW_MS + 101 * limits.DAY_MS))
def test_ending_before_returns_files_without_later_rows(batches: list[list[int]], due_ms: int) -> None:
    live, pairs = table(batches)
    ended_paths = {entry.path for entry in live.ending_before(due_ms)}
    for file in live.all():
        assert (file.entry.path in ended_paths) == (file.entry.max_due_ms < due_ms)
    rows_left = sum(file.entry.rows for file in live.all() if file.entry.path not in ended_paths)
    assert rows_left >= sum(due >= due_ms for due, _ in pairs)


@settings(max_examples=30)
@given(st.lists(NEAR_DUES, min_size=1, max_size=3), st.integers(1, 40))
def test_window_is_bounded_and_advances(batches: list[list[int]], rows_max: int) -> None:
    live, pairs = table(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hour_log, "WINDOW_ROWS_MAX", rows_max)
        opened_pairs: list[Pair] = []
        for _ in range(1_000):
            if live.first_due_ms == FAR_MS:
                break
            before_ms = live.first_due_ms
            opened_pairs += open_rows(live, NOW_MS + 1_000)
            assert live.first_due_ms > before_ms
    assert sorted(opened_pairs) == pairs


@given(BATCHES, st.integers(1, 6), st.integers(1, 40 * limits.DAY_MS))
def test_openings_of_few_files_at_a_time_find_every_row(
    batches: list[list[int]], files_max: int, step_ms: int
) -> None:
    """The next due times that an opening reads are not later than any unopened row."""
    live, pairs = table(batches)
    opened_pairs: list[Pair] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hour_log, "WINDOW_FILES_MAX", files_max)
        while (upcoming := live.first_due_ms) < FAR_MS:
            files, until_ms = live.to_open(upcoming + step_ms)
            assert upcoming < until_ms <= upcoming + step_ms
            assert len(files) <= files_max or until_ms == upcoming + 1, (
                "only files with the same due time may be more"
            )
            later_pairs = [pair for pair in pairs if pair not in opened_pairs]
            assert not later_pairs or upcoming <= later_pairs[0][0]
            opened_pairs += open_rows(live, upcoming + step_ms)
    assert sorted(opened_pairs) == pairs


def test_file_with_few_rows_is_opened_once_per_row() -> None:
    """One row a week for a month. The file is not opened for the time between two rows."""
    due_times = [NOW_MS + 100 * limits.DAY_MS + week * 7 * limits.DAY_MS for week in range(4)]
    files = CrashFiles()
    live = PendingFiles(files, write(files, due_times))
    openings = 0
    while (upcoming := live.first_due_ms) < FAR_MS:
        open_rows(live, upcoming + limits.HOUR_MS)
        openings += 1
    assert openings <= 2 * len(due_times) + len(live)


def test_overdue_new_rows_are_opened_and_moved_rows_are_not_opened_again() -> None:
    """A bulk job's file has not been opened before. A compaction's rows were opened from the tail."""
    files = CrashFiles()
    live = PendingFiles(files, write(files, [NOW_MS, NOW_MS + 100]))
    assert len(open_rows(live, NOW_MS + 50)) == 1
    late = write(files, [NOW_MS + 10, NOW_MS + 60], first_seq=10)
    live.attach(Attachment(job="bulk", job_id="b", epoch=1, files=late, removes=[]), NOW_MS + 50)
    assert live.first_due_ms == NOW_MS + 10
    assert live.has_unopened([late[0].path], NOW_MS + 50)
    assert open_rows(live, NOW_MS + 50) == [(NOW_MS + 10, 10)]
    assert not live.has_unopened([late[0].path], NOW_MS + 50)
    moved = write(files, [NOW_MS + 20, NOW_MS + 70], first_seq=20)
    live.attach(Attachment(job="compact", job_id="c", epoch=1, files=moved, removes=[]), NOW_MS + 50)
    assert open_rows(live, NOW_MS + 200) == [(NOW_MS + 60, 11), (NOW_MS + 70, 21), (NOW_MS + 100, 1)]
    assert live.first_due_ms == FAR_MS


def test_start_skips_rows_that_the_mark_covers_except_in_later_files() -> None:
    files = CrashFiles()
    old = write(files, [NOW_MS, NOW_MS + 100], first_seq=1)
    bulk = write(files, [NOW_MS + 1, NOW_MS + 101], first_seq=50)
    live = PendingFiles(files, [*old, *bulk])
    live.skip_settled(Settled(NOW_MS + 50, before_seq=90, late=((50, 2),)))
    assert live.first_due_ms == NOW_MS + 1
    assert [seq for _, seq in open_rows(live, NOW_MS + 500)] == [50, 2, 51]


def test_file_that_is_not_local_delays_no_other_file_and_is_opened_later() -> None:
    """A file in an object store. None of its rows may count as settled."""
    files, local = CrashFiles(), set[str]()
    [missing] = write(files, [NOW_MS + 1, NOW_MS + 2])
    [local_file] = write(files, [NOW_MS + 5, NOW_MS + 200], first_seq=10)
    local.add(local_file.path)
    live = PendingFiles(files, [missing, local_file], local.__contains__)
    assert (live.first_due_ms, live.missing_due_ms) == (NOW_MS + 5, NOW_MS + 1)
    assert open_rows(live, NOW_MS + 100) == [(NOW_MS + 5, 10)]
    assert [file.entry for file in live.overlapping(NOW_MS, NOW_MS + 100)] == [local_file]
    assert live.due_between(NOW_MS, NOW_MS + 100) == [missing, local_file]
    local.add(missing.path)
    live.refresh_local_files()
    assert (live.first_due_ms, live.missing_due_ms) == (NOW_MS + 1, FAR_MS)
    assert open_rows(live, NOW_MS + 100) == [(NOW_MS + 1, 0), (NOW_MS + 2, 1)]
    # A missing file of which rows were opened is not skipped: reading it fails instead of returning no rows.
    local.clear()
    assert [file.entry for file in live.overlapping(NOW_MS, NOW_MS + 100)] == [missing, local_file]
    # After a start no rows are opened, also none of files whose first rows are settled.
    live = PendingFiles(files, [missing, local_file], [local_file.path].__contains__)
    live.skip_settled(Settled(NOW_MS + 2))
    assert (live.first_due_ms, live.missing_due_ms) == (NOW_MS + 5, NOW_MS + 2)
    assert [file.entry for file in live.overlapping(NOW_MS, NOW_MS + 100)] == [local_file]


def test_files_two_hours_away_are_closed() -> None:
    files = CrashFiles()
    hour_ms = limits.HOUR_MS
    entries = write(files, [NOW_MS - NOW_MS % hour_ms + number * hour_ms for number in range(10)])
    live = PendingFiles(files, entries)
    for file in live.all():
        file.check()
    assert live.open_files == 10
    now_ms = entries[5].min_due_ms
    close_far(live.all(), now_ms)
    assert [file.is_open for file in live.all()] == [3 <= number <= 7 for number in range(10)]
    close_far(live.all(), entries[5].max_due_ms + OPEN_MS)
    assert live.all()[5].is_open
    close_far(live.all(), entries[5].max_due_ms + OPEN_MS + 1)
    assert not live.all()[5].is_open


def test_an_attach_replaces_files_at_once() -> None:
    files = CrashFiles()
    old = write(files, [NOW_MS, NOW_MS + limits.DAY_MS])
    new = write(files, [NOW_MS + 5], first_seq=7)
    live = PendingFiles(files, old)
    before = live.all()
    removed_path = old[0].path
    live.attach(
        Attachment(job="rewrite", job_id="j", epoch=1, files=new, removes=[removed_path, "unknown"]), 0
    )
    assert live.live_entries() == [old[1], *new]
    assert live.entries([removed_path, new[0].path]) == new
    assert (len(live), live.rows) == (2, 2)
    # A gather that began before the attach works on the old files.
    assert sum(len(file.positions_between(FIRST, LAST)[0]) for file in before) == 2


def test_rows_of_the_table_equal_those_of_the_log() -> None:
    files = CrashFiles()
    (entry,) = write(files, [NOW_MS + 5, NOW_MS + 6], first_seq=70)
    rows = read_rows_between([DataFile(files, entry)], FIRST, LAST)
    assert rows is not None
    assert rows.schema == READ_SCHEMA
    assert rows["kind"].to_pylist() == [Kind.SCHEDULED] * 2
    assert rows["body"].to_pylist() == [b"bulk 70", b"bulk 71"]
    assert rows["store_ms"].to_pylist() == [NOW_MS] * 2, "`accepted_ms` of the table"
    assert np.array_equal(rows["due_ms"], [NOW_MS + 5, NOW_MS + 6])


def test_empty_table_has_no_files_and_no_due_time() -> None:
    live = PendingFiles(CrashFiles(), [])
    assert live.first_due_ms == FAR_MS
    assert live.to_open(NOW_MS) == ([], NOW_MS)
    assert len(read_window([], NOW_MS).seq) == 0
    assert read_rows_between([], FIRST, LAST) is None


def test_attach_during_a_look_up_is_seen_by_the_next_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    files = CrashFiles()
    first, second = write(files, [NOW_MS]), write(files, [NOW_MS + 1], 1)
    live = PendingFiles(files, first)
    attachments = [Attachment(job="bulk", job_id="b", epoch=1, files=second)]

    def file_set_after_attach(entries: list[FileEntry]) -> FileSet:
        while attachments:  # simulates an attach by the event loop
            live.attach(attachments.pop(), NOW_MS)
        return FileSet(entries)

    monkeypatch.setattr(hour_log, "FileSet", file_set_after_attach)
    assert live.live.entries == tuple(first)
    assert live.live.entries == (*first, *second) and live.live is live.live
