"""The live files of the table, against a list of all their rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.schedule.table_files import table_rows

from timeball import limits
from timeball.broker.tables.compact import write_files
from timeball.message import READ_SCHEMA, Int64Array, Kind
from timeball.schedule.hour_log import pending
from timeball.schedule.hour_log.pending import (
    OPEN_MS,
    PendingFiles,
    bounded_window,
    close_far,
    is_far,
    load,
    survey,
)
from timeball.schedule.hour_log.placement import FIRST
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile

Pair = tuple[int, int]

NOW_MS = 1_700_000_000_000
LAST = (1 << 62, 0)
# Hours, days and months away, and several for one instant: few rows, many files.
DUES = st.lists(
    st.one_of(st.integers(0, 50), st.integers(0, 100 * limits.DAY_MS)).map(lambda ms: NOW_MS + ms),
    min_size=1,
    max_size=25,
)
NEAR_DUES = st.lists(st.integers(NOW_MS, NOW_MS + 40), min_size=1, max_size=25)
BATCHES = st.lists(DUES, min_size=1, max_size=3)
POSITIONS = st.tuples(DUES.map(lambda dues: dues[0]), st.integers(0, 80))


def write(files: CrashFiles, dues: list[int], first_seq: int = 0) -> list[FileEntry]:
    return write_files(files, table_rows(dues, range(first_seq, first_seq + len(dues)), NOW_MS), NOW_MS)


def table(batches: list[list[int]]) -> tuple[PendingFiles, list[Pair]]:
    """A table with files of each batch, and all (due_ms, seq) in it."""
    files, entries, pairs = CrashFiles(), [], []
    for dues in batches:
        entries += write(files, dues, len(pairs))
        pairs += [(due, len(pairs) + i) for i, due in enumerate(dues)]
    return PendingFiles(files, entries), sorted(pairs)


def listed(columns: tuple[Int64Array, Int64Array]) -> list[Pair]:
    return list(zip(columns[0].tolist(), columns[1].tolist(), strict=True))


@given(BATCHES, POSITIONS, POSITIONS)
def test_what_is_near_holds_every_row_of_the_window(batches: list[list[int]], low: Pair, high: Pair) -> None:
    low, high = sorted((low, high))
    live, pairs = table(batches)
    wanted = [pair for pair in pairs if low <= pair < high]
    near, bound = live.near(low, high)
    assert bound == high, "few files are not too many"
    found = survey(near, low, high)
    assert (found.high, listed((found.due_ms, found.seq))) == (high, wanted)
    rows = load(near, low, high)
    if rows is None:
        assert not wanted
    else:
        assert sorted(zip(rows["due_ms"].to_pylist(), rows["seq"].to_pylist(), strict=True)) == wanted


@given(BATCHES, st.integers(NOW_MS - 1, NOW_MS + 101 * limits.DAY_MS))
def test_the_next_instant_is_never_after_the_first_row(batches: list[list[int]], from_ms: int) -> None:
    live, pairs = table(batches)
    ahead = [due for due, _ in pairs if due >= from_ms]
    answer = live.next_due_ms(from_ms)
    if answer is None:
        assert not ahead
    else:
        assert from_ms <= answer <= min(ahead)


@given(BATCHES, st.integers(NOW_MS - 1, NOW_MS + 101 * limits.DAY_MS))
def test_behind_are_files_with_nothing_ahead(batches: list[list[int]], due_ms: int) -> None:
    live, pairs = table(batches)
    behind = {entry.path for entry in live.behind(due_ms)}
    for file in live.all():
        assert (file.entry.path in behind) == (file.entry.max_due_ms < due_ms)
    left = sum(file.entry.rows for file in live.all() if file.entry.path not in behind)
    assert left >= sum(due >= due_ms for due, _ in pairs)


@settings(max_examples=30)
@given(st.lists(NEAR_DUES, min_size=1, max_size=3), st.integers(1, 40))
def test_a_window_is_bounded_and_moves(batches: list[list[int]], rows_max: int) -> None:
    live, pairs = table(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "WINDOW_ROWS_MAX", rows_max)
        seen: list[Pair] = []
        low = (NOW_MS - 1, 0)
        for _ in range(1_000):
            high = bounded_window(live.all(), low, LAST)
            assert low < high <= LAST
            found = survey(live.all(), low, LAST)
            assert found.high == high
            seen += listed((found.due_ms, found.seq))
            if high == LAST:
                break
            low = high
    assert seen == pairs


@given(BATCHES, st.integers(1, 6), st.integers(1, 40 * limits.DAY_MS))
def test_a_walk_through_a_few_files_at_a_time_finds_every_row(
    batches: list[list[int]], files_max: int, step_ms: int
) -> None:
    """And what has been learnt on the way hides nothing: it says when to look again, exactly."""
    live, pairs = table(batches)
    seen: list[Pair] = []
    low = FIRST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "WINDOW_FILES_MAX", files_max)
        while (upcoming := live.next_due_ms(low[0])) is not None:
            left = [pair for pair in pairs if pair >= low]
            assert not left or upcoming <= left[0][0]
            near, high = live.near(low, (upcoming + step_ms, 0))
            assert low < high <= (upcoming + step_ms, 0)
            assert len(near) <= files_max or high[0] == upcoming + 1, "only those of one instant are more"
            found = survey(near, low, high)
            here = listed((found.due_ms, found.seq))
            assert here == [pair for pair in pairs if low <= pair < found.high]
            live.learn(found.next_due_ms)
            seen, low = seen + here, found.high
    assert seen == pairs


def test_a_file_with_few_rows_is_looked_into_for_each_and_no_more() -> None:
    """A month with a row a week: an hour at a time, whatever lies in between is skipped."""
    dues = [NOW_MS + 100 * limits.DAY_MS + week * 7 * limits.DAY_MS for week in range(4)]
    files = CrashFiles()
    live = PendingFiles(files, write(files, dues))
    looks, low = 0, FIRST
    while (upcoming := live.next_due_ms(low[0])) is not None:
        near, high = live.near(low, (upcoming + limits.HOUR_MS, 0))
        live.learn(survey(near, low, high).next_due_ms)
        looks, low = looks + 1, high
    assert looks <= 2 * len(dues) + len(live)


def test_what_was_learnt_is_forgotten_with_its_file() -> None:
    files = CrashFiles()
    (entry,) = write(files, [NOW_MS, NOW_MS + limits.HOUR_MS - NOW_MS % limits.HOUR_MS - 1])
    live = PendingFiles(files, [entry])
    live.learn({entry.path: entry.max_due_ms, "unknown": 0})
    assert live.next_due_ms(NOW_MS) == entry.max_due_ms
    assert live.near((NOW_MS, 0), (entry.max_due_ms - 1, 0))[0] == []
    attachment = Attachment(job="rewrite", job_id="j", epoch=1, files=[], removes=[entry.path])
    live.apply(attachment)
    live.apply(Attachment(job="bulk", job_id="k", epoch=1, files=[entry], removes=[]))
    assert live.next_due_ms(NOW_MS) == NOW_MS


def test_what_is_two_hours_away_is_closed() -> None:
    files = CrashFiles()
    hour = limits.HOUR_MS
    entries = write(files, [NOW_MS - NOW_MS % hour + n * hour for n in range(10)])
    live = PendingFiles(files, entries)
    for file in live.all():
        file.check()
    assert live.open_files == 10
    horizon_ms = entries[5].min_due_ms
    assert live.any_far(horizon_ms)
    close_far(live.all(), horizon_ms)
    assert [file.is_open for file in live.all()] == [3 <= n <= 7 for n in range(10)]
    assert not live.any_far(horizon_ms)
    assert not is_far(live.all()[5], entries[5].max_due_ms + OPEN_MS)
    assert is_far(live.all()[5], entries[5].max_due_ms + OPEN_MS + 1)


def test_an_attach_replaces_files_at_once() -> None:
    files = CrashFiles()
    old = write(files, [NOW_MS, NOW_MS + limits.DAY_MS])
    new = write(files, [NOW_MS + 5], first_seq=7)
    live = PendingFiles(files, old)
    before = live.all()
    gone = old[0].path
    fresh = live.apply(Attachment(job="rewrite", job_id="j", epoch=1, files=new, removes=[gone, "unknown"]))
    assert [file.entry for file in fresh] == new
    assert live.live_entries() == [old[1], *new]
    assert live.entries([gone, new[0].path]) == new
    assert (len(live), live.rows) == (2, 2)
    # A gather that began before works on what it took.
    assert sum(len(file.positions_between(FIRST, LAST)[0]) for file in before) == 2


def test_rows_of_the_table_look_like_rows_of_the_log() -> None:
    files = CrashFiles()
    (entry,) = write(files, [NOW_MS + 5, NOW_MS + 6], first_seq=70)
    rows = load([DataFile(files, entry)], FIRST, LAST)
    assert rows is not None
    assert rows.schema == READ_SCHEMA
    assert rows["kind"].to_pylist() == [Kind.PROMISE] * 2
    assert rows["body"].to_pylist() == [b"bulk 70", b"bulk 71"]
    assert rows["store_ms"].to_pylist() == [NOW_MS] * 2, "accepted when the table says so"
    assert np.array_equal(rows["due_ms"], [NOW_MS + 5, NOW_MS + 6])


def test_an_empty_table_answers() -> None:
    live = PendingFiles(CrashFiles(), [])
    assert live.next_due_ms(0) is None
    assert live.near(FIRST, LAST) == ([], LAST)
    assert len(survey([], FIRST, LAST).seq) == 0
    assert load([], FIRST, LAST) is None
    assert bounded_window([], FIRST, LAST) == LAST
