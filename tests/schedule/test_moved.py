"""The newest due time and version of a number, until the last of its due times has passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.model.message import Int64Array
from timeball.schedule import outcomes
from timeball.schedule.outcomes import Moved

MOVES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=24)  # due_ms, number


def entries_of(moved: Moved) -> Int64Array:
    """The columns of all entries, in the form of `restore`."""
    return np.concatenate([np.empty((4, 0), np.int64), *moved.copied()], axis=1)


def size(moved: Moved) -> int:
    return int(entries_of(moved).shape[1])


@given(MOVES, st.integers(0, 10), st.booleans(), st.integers(0, 5), st.sampled_from([0, 8, 1_000]))
def test_newest_pair_of_each_number_is_kept_until_it_has_passed(
    moves: list[tuple[int, int]], before_ms: int, forgets_twice: bool, recent_max: int, merged_rows_max: int
) -> None:
    moved, newest, until = Moved(), dict[int, tuple[int, int]](), dict[int, int]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outcomes, "RECENT_MAX", recent_max)
        patched.setattr(outcomes, "MERGED_ROWS_MAX", merged_rows_max)
        for version, (due_ms, number) in enumerate(moves, 100):
            before_due_ms = newest.get(number, (3, 0))[0]  # each message was sent with due time 3
            moved.add([(due_ms, number, version, before_due_ms)])
            newest[number] = due_ms, version
            until[number] = max(until.get(number, 3), due_ms)
    if forgets_twice:
        moved.forget_before(before_ms // 2)
    moved.forget_before(before_ms)
    restored = Moved()
    restored.restore(entries_of(moved))
    kept = {number: pair for number, pair in newest.items() if until[number] >= before_ms}
    for each in (moved, restored):
        assert size(each) == len(kept)
        assert {number: each.newest(number) for number in range(10)} == {
            number: kept.get(number) for number in range(10)
        }
        for first, rows in ((0, 10), (2, 1), (3, 4), (8, 9)):
            due_times = [pair[0] for number, pair in kept.items() if first <= number < first + rows]
            assert each.last_due_ms(first, rows) == max([0, *due_times])


STEPS = st.lists(
    st.one_of(
        # Numbers, and ms that are added to `now_ms` as the due time.
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=40)),
        st.tuples(st.just("forget"), st.integers(0, 15)),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=40)
@given(STEPS, st.sampled_from([(3, 8), (8, 64), (20, 30)]))
def test_any_history_leaves_the_entries_of_a_dict(
    steps: list[tuple[str, Any]], maxima: tuple[int, int]
) -> None:
    recent_max, merged_rows_max = maxima
    moved, entries, now_ms, version = Moved(), dict[int, tuple[int, int, int]](), 0, 1_000
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outcomes, "RECENT_MAX", recent_max)
        patched.setattr(outcomes, "MERGED_ROWS_MAX", merged_rows_max)
        patched.setattr(outcomes, "PART_ROWS", 12)
        patched.setattr(outcomes, "SAMPLE_ROWS", 3)
        for step, value in steps:
            if step == "add":
                rows = list[tuple[int, int, int, int]]()
                for number, later_ms in value:
                    before_ms, _, until_ms = entries.get(number, (now_ms, 0, 0))
                    rows.append((now_ms + later_ms, number, version, before_ms))
                    entries[number] = now_ms + later_ms, version, max(now_ms + later_ms, before_ms, until_ms)
                    version += 1
                moved.add(rows)
            elif step == "forget":
                now_ms += value
                moved.forget_before(now_ms)
                entries = {number: entry for number, entry in entries.items() if entry[2] >= now_ms}
            else:
                saved, moved = entries_of(moved), Moved()
                moved.restore(saved)
            expected = [[due, number, *rest] for number, (due, *rest) in sorted(entries.items())]
            assert entries_of(moved).T.tolist() == expected
            newest = [entries[number][:2] if number in entries else None for number in range(62)]
            assert [moved.newest(number) for number in range(62)] == newest
            due_ms, versions = moved.newest_of(np.full(62, -5), np.arange(62))
            pairs = zip(due_ms.tolist(), versions.tolist(), strict=True)
            assert list(pairs) == [pair or (-5, number) for number, pair in enumerate(newest)]
            due_times = [entries[number][0] for number in range(10, 30) if number in entries]
            assert moved.last_due_ms(10, 20) == max(due_times, default=0)
            # A run is within the limit of a merge, or contains the recent moves of one fold: one `add` has up to 40.
            assert all(0 < len(run) <= merged_rows_max or len(run) <= recent_max + 41 for run in moved._runs)


def test_messages_that_are_moved_again_and_again_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that moves a timeout: memory grew with each move, until the last of the due times had passed."""
    monkeypatch.setattr(outcomes, "RECENT_MAX", 20)
    monkeypatch.setattr(outcomes, "MERGED_ROWS_MAX", 100)
    moved = Moved()
    for version in range(0, 6_000, 10):
        moved.add([(1 << 40, (version + at) % 600, version + at, 0) for at in range(10)])
        assert sum(len(run) for run in moved._runs) <= 2 * 600
        assert len(moved._runs) <= 2 * 600 // 100 + 5
    assert size(moved) == 600


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_step_of_the_mark_builds_few_runs_again(is_restored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second after a release of ten million messages copied all of their moves."""
    monkeypatch.setattr(outcomes, "RECENT_MAX", 20)
    monkeypatch.setattr(outcomes, "MERGED_ROWS_MAX", 100)
    moved = Moved()
    for number in range(1_000):
        moved.add([(number * 7_919 % 1_000, number, 5_000 + number, 0)])
    if is_restored:
        saved, moved = entries_of(moved), Moved()
        moved.restore(saved)
        assert [len(run) for run in moved._runs] == [100] * 10
    for before_ms in range(0, 1_000, 10):
        runs = {id(run): run for run in moved._runs}
        moved.forget_before(before_ms)
        assert size(moved) == 1_000 - before_ms
        # One of the merged runs may be small, so a step may build two or three.
        assert sum(len(run) for run in moved._runs if id(run) not in runs) <= 3 * 100
    for before_ms in range(1_001, 1_011):
        moved.forget_before(before_ms)
    assert (size(moved), moved._runs) == (0, ())


def test_many_moves_are_merged_into_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "RECENT_MAX", 10)
    moved = Moved()
    for number in range(0, 100, 2):
        moved.add([(number, number, 1_000 + number, 0)])
    assert size(moved) == 50
    assert [moved.newest(n) for n in (0, 1, 42, 99)] == [(0, 1_000), None, (42, 1_042), None]
    moved.forget_before(90)
    assert entries_of(moved).T.tolist() == [[n, n, 1_000 + n, n] for n in (90, 92, 94, 96, 98)]


def test_large_runs_of_moves_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a merge would copy ten million moves on the event loop."""
    monkeypatch.setattr(outcomes, "RECENT_MAX", 10)
    monkeypatch.setattr(outcomes, "MERGED_ROWS_MAX", 100)
    moved = Moved()
    for version in range(1_000):
        moved.add([(5, version * 7 % 500, version, 0)])
    assert size(moved) == 500 and max(len(run) for run in moved._runs) <= 100
    due_ms, newest = moved.newest_of(np.full(500, 3), np.arange(500))
    assert due_ms.tolist() == [5] * 500
    assert newest.tolist() == [max(v for v in range(1_000) if v * 7 % 500 == n) for n in range(500)]


def test_a_checkpoint_merges_moves_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases wait for the thread that merges them, which took two seconds for ten million."""
    values = (("RECENT_MAX", 20), ("MERGED_ROWS_MAX", 100), ("PART_ROWS", 80), ("SAMPLE_ROWS", 4))
    for name, value in values:
        monkeypatch.setattr(outcomes, name, value)
    moved = Moved()
    for number in range(1_000):
        moved.add([(5, number * 7_919 % 1_000, number, 0)])
    sizes = [part.shape[1] for part in moved.copied()]
    # A sample of each run may miss up to three rows at both ends of a part.
    assert sum(sizes) == 1_000 and max(sizes) <= 80 + 2 * 3 * (len(moved._runs) + 1)


def test_empty_moved_finds_nothing() -> None:
    moved = Moved()
    moved.forget_before(1 << 40)
    assert (size(moved), moved.newest(5)) == (0, None)


def test_a_copy_is_as_of_now() -> None:
    moved = Moved()
    moved.add([(5, 1, 100, 3)])
    copied = moved.copied()
    moved.add([(7, 1, 101, 5), (8, 2, 102, 3)])
    assert np.concatenate(list(copied), axis=1).T.tolist() == [[5, 1, 100, 5]]
    assert entries_of(moved).T.tolist() == [[7, 1, 101, 7], [8, 2, 102, 8]]
