"""A `DueIndex` is a set of pairs: it behaves as a Python set does, however its pairs are split into runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.model.message import Int64Array
from timeball.schedule import due_index
from timeball.schedule.due_index import FAR_MS, DueIndex

Pair = tuple[int, int]

# Each sequence number once, as in a log. Few due times, so that many messages share one.
PAIRS = st.lists(st.integers(-5, 30), max_size=120).map(
    lambda due_times: [(due, i) for i, due in enumerate(due_times)]
)
POSITIONS = st.tuples(st.integers(-6, 31), st.integers(0, 120))


def columns(pairs: Iterable[Pair]) -> tuple[Int64Array, Int64Array]:
    pair_list = list(pairs)
    return np.array([d for d, _ in pair_list], np.int64), np.array([s for _, s in pair_list], np.int64)


def to_pairs(columns: tuple[Int64Array, Int64Array]) -> list[Pair]:
    return list(zip(columns[0].tolist(), columns[1].tolist(), strict=True))


def index_of(pairs: list[Pair], batch: int) -> DueIndex:
    index = DueIndex()
    for begin in range(0, len(pairs), batch):
        index.add(*columns(pairs[begin : begin + batch]))
    return index


@given(PAIRS, st.integers(1, 130))
def test_pairs_returns_all_pairs_sorted(pairs: list[Pair], batch: int) -> None:
    index = index_of(pairs, batch)
    assert to_pairs(index.pairs()) == sorted(pairs)
    assert len(index) == len(pairs)
    assert index.first() == min(pairs, default=(FAR_MS, 0))
    assert index.first_due_ms == min((due for due, _ in pairs), default=FAR_MS)


@given(PAIRS, st.integers(1, 20), POSITIONS)
def test_pop_before_removes_and_returns_earlier_pairs(pairs: list[Pair], batch: int, high: Pair) -> None:
    index = index_of(pairs, batch)
    assert index.count_before(high[0]) == sum(due < high[0] for due, _ in pairs)
    assert to_pairs(index.pop_before(*high)) == sorted(pair for pair in pairs if pair < high)
    later_pairs = sorted(pair for pair in pairs if pair >= high)
    assert to_pairs(index.pairs()) == later_pairs
    assert len(index) == len(later_pairs)


@given(PAIRS, st.integers(1, 20), POSITIONS, POSITIONS)
def test_between_removes_nothing(pairs: list[Pair], batch: int, low: Pair, high: Pair) -> None:
    low, high = sorted((low, high))
    index = index_of(pairs, batch)
    assert to_pairs(index.between(low, high)) == sorted(pair for pair in pairs if low <= pair < high)
    assert len(index) == len(pairs)


@given(PAIRS, st.integers(1, 20), PAIRS)
def test_contains_compares_due_time_and_number(pairs: list[Pair], batch: int, looked_up: list[Pair]) -> None:
    """A number may have several due times."""
    index = index_of(pairs, batch)
    again = sorted({(due + 1, seq) for due, seq in pairs[::3]} - set(pairs))
    index.add(*columns(again))
    looked_up = [*looked_up, *pairs, *again, *((due + 2, seq) for due, seq in pairs)]
    assert index.contains(*columns(looked_up)).tolist() == [
        pair in pairs or pair in again for pair in looked_up
    ]


@given(PAIRS, st.integers(1, 20), PAIRS, st.lists(POSITIONS, max_size=2))
def test_has_agrees_with_contains(
    pairs: list[Pair], batch: int, looked_up: list[Pair], highs: list[Pair]
) -> None:
    """Before and after the newest pairs become a run, and after pairs were cut off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due_index, "NEWEST_MAX", 8)
        index = index_of(pairs, batch)
        again = sorted({(due + 1, seq) for due, seq in pairs[::3]} - set(pairs))
        index.add(*columns(again))
        held = {*pairs, *again}
        for high in [(-100, 0), *sorted(highs)]:
            index.pop_before(*high)
            looked_up = [*looked_up, *held]
            expected = [pair in held and pair >= high for pair in looked_up]
            assert [index.has(*pair) for pair in looked_up] == expected
            assert [index.contains(*columns([pair])).tolist() for pair in looked_up] == [
                [is_contained] for is_contained in expected
            ]
            assert index.contains(*columns(looked_up)).tolist() == expected


@given(PAIRS, st.integers(1, 20), st.lists(POSITIONS, max_size=4))
def test_popped_pairs_are_not_contained(pairs: list[Pair], batch: int, highs: list[Pair]) -> None:
    index = index_of(pairs, batch)
    for high in sorted(highs):
        assert index.contains(*columns(pairs)).tolist() == [pair in to_pairs(index.pairs()) for pair in pairs]
        index.pop_before(*high)
        assert index.contains(*columns(pairs)).tolist() == [pair >= high for pair in pairs]


@given(PAIRS, st.integers(1, 20), st.integers(0, 130))
def test_drop_removes_pairs_by_number(pairs: list[Pair], batch: int, seq: int) -> None:
    index = index_of(pairs, batch)
    index.drop_seqs_below(seq)
    assert to_pairs(index.pairs()) == sorted(pair for pair in pairs if pair[1] >= seq)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(-5, 30), min_size=1, max_size=90), st.booleans()),
        st.tuples(st.just("restore"), st.lists(st.integers(-5, 30), max_size=90), st.booleans()),
        st.tuples(st.just("take"), POSITIONS, st.sampled_from([1, 40, 1 << 62])),
        st.tuples(st.just("give"), st.booleans()),
        st.tuples(st.just("drop"), st.integers(2, 5)),
    ),
    max_size=20,
)


@settings(max_examples=40)
@given(STEPS)
def test_any_history_leaves_the_pairs_of_a_set(steps: list[tuple[str, Any, Any]]) -> None:
    """Pairs that one index gives up are added to another one, and back."""
    index, other = DueIndex(), DueIndex()
    pairs, others, next_seq = set[Pair](), set[Pair](), 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MERGED_ROWS_MAX", 32), ("RUNS_MAX", 4), ("NEWEST_MAX", 20)):
            patch.setattr(due_index, name, value)
        for name, *arguments in steps:
            if name in ("add", "restore"):
                due_times, ascend = arguments
                new_pairs = [(due, next_seq + number) for number, due in enumerate(due_times)]
                next_seq += len(due_times)
                getattr(index, name)(*columns(new_pairs if ascend else new_pairs[::-1]))
                pairs.update(new_pairs)
            elif name == "take":
                position, rows = arguments
                runs = index.take_before(*position, rows)
                taken = [pair for run in runs for pair in to_pairs((run.due_ms, run.seq))]
                assert set(taken) <= {pair for pair in pairs if pair < position}
                assert len(taken) >= min(rows, sum(pair < position for pair in pairs))
                other.add_runs(runs)
                pairs.difference_update(taken)
                others.update(taken)
            elif name == "give":
                index.add_runs(other.take_before(FAR_MS, 0))
                pairs, others = pairs | others, set()
            else:
                (divisor,) = arguments
                index.drop(lambda seqs, divisor=divisor: seqs % divisor == 0)
                pairs = {pair for pair in pairs if pair[1] % divisor}
            looked_up = sorted(pairs | others) + [(due + 1, seq) for due, seq in pairs]
            for each, held in ((index, pairs), (other, others)):
                assert (len(each), to_pairs(each.pairs())) == (len(held), sorted(held))
                assert each.first_due_ms == min((due for due, _ in held), default=FAR_MS)
                assert each.contains(*columns(looked_up)).tolist() == [pair in held for pair in looked_up]
                assert [each.has(*pair) for pair in looked_up[:9]] == [pair in held for pair in looked_up[:9]]


def test_taking_pairs_sorts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of ten million pairs of one due time would hold the event loop for a second."""
    index = index_of([(due, due * 7 % 1_000) for due in range(1_000)], 100)
    monkeypatch.setattr(due_index, "_sorted", lambda *_: pytest.fail("was sorted"))
    assert sum(len(run) for run in index.take_before(500, 0)) == 500
    assert sum(len(run) for run in index.take_before(1_000, 0, 150)) == 200, "complete runs are taken"
    index.take_before(1_000, 0)
    assert len(index) == 0


def test_restored_pairs_are_small_runs_that_no_look_up_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_index, "MERGED_ROWS_MAX", 100)
    pairs = [(seq * 7_919 % 1_000, seq) for seq in range(1_050)]
    for ordered_pairs in (pairs, pairs[::-1]):
        index = DueIndex()
        index.restore(*columns(ordered_pairs))
        assert sorted(len(run) for run in index._runs) == [50] + [100] * 10
        for due_ms in (0, 400, 600):
            index.take_before(due_ms, 0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(due_index, "_sorted", lambda *_: pytest.fail("was sorted"))
                assert [index.has(*pair) for pair in pairs] == [due >= due_ms for due, _ in pairs]
                assert index.contains(*columns(pairs)).tolist() == [due >= due_ms for due, _ in pairs]


def test_few_runs_are_copied_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart the runs have due times in the same span, so all become wasteful at the same time."""
    monkeypatch.setattr(due_index, "MERGED_ROWS_MAX", 100)
    index = DueIndex()
    index.restore(*columns([(seq % 100, seq) for seq in range(1_000)]))
    wasteful = []
    for due_ms in range(51, 61):
        index.take_before(due_ms, 0)
        wasteful.append(sum(run.is_wasteful for run in index._runs))
    # A step copies runs of 49 or fewer pairs until it has copied 100 pairs: three of ten runs at first.
    assert wasteful == [7, 4, 1, 0, 0, 0, 0, 0, 0, 0]


def test_number_of_runs_is_bounded() -> None:
    index = DueIndex()
    added = 10_000
    for seq in range(added):
        index.add(*columns([((seq * 7_919) % 1_000, seq)]))
        assert len(index._runs) <= due_index.RUNS_MAX
    assert len(index) == added


def test_large_runs_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the sort of ten million pairs would hold the event loop for a second."""
    monkeypatch.setattr(due_index, "MERGED_ROWS_MAX", 1_000)
    index, added = DueIndex(), list[Pair]()
    for begin in range(0, 20_000, 50):
        pairs = [((seq * 7_919) % 1_000, seq) for seq in range(begin, begin + 50)]
        index.add(*columns(pairs))
        added += pairs
    sizes = [len(run) for run in index._runs]
    assert max(sizes) < 2 * 1_000 and len(sizes) <= due_index.RUNS_MAX + 20_000 // 500
    assert to_pairs(index.pairs()) == sorted(added)
    assert index.contains(*columns(added)).all()


def test_empty_index_has_no_pairs_and_no_due_time() -> None:
    index = DueIndex()
    index.add(*columns([]))
    assert len(index) == 0
    assert index.first_due_ms == FAR_MS
    assert to_pairs(index.pop_before(10, 0)) == []
    assert index.contains(*columns([(1, 1)])).tolist() == [False]
    assert index.contains(*columns([])).tolist() == []


def test_memory_is_at_most_twice_that_of_the_remaining_pairs() -> None:
    index, rows = DueIndex(), 100_000
    index.add(np.arange(rows, dtype=np.int64), np.arange(rows, dtype=np.int64))
    for due_ms in range(10_000, rows, 10_000):
        index.pop_before(due_ms, 0)
        for run in index._runs:
            for part in (run.due_ms, run.seq):
                held = part if part.base is None else part.base
                assert held.nbytes <= 2 * part.nbytes
    assert len(index) == 10_000


FAR_AND_NEAR = st.sampled_from([-(1 << 61), -3, 0, 0, 1, 5, 1 << 40, 1 << 61])


@given(st.lists(st.tuples(FAR_AND_NEAR, FAR_AND_NEAR), min_size=1, max_size=40, unique=True))
def test_packed_sort_equals_lexsort(pairs: list[Pair]) -> None:
    """Pairs that cannot be packed are sorted by lexsort."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due_index, "PACK_ROWS_MIN", 1)
        index = index_of(pairs, len(pairs))
        assert to_pairs(index.pairs()) == sorted(pairs)
        assert index.contains(*columns(pairs)).all()


def test_large_runs_are_sorted_by_packed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in any order of their numbers, as a bulk release leaves them."""
    monkeypatch.setattr(np, "lexsort", lambda *_: pytest.fail("an order was computed"))
    seq = np.arange(1 << 24, (1 << 24) + 8_192 * 7_919, 7_919) * 5 % (1 << 26)
    due_ms = np.arange(8_192) * 7_919 % 864_000_000
    index = DueIndex()
    index.add(due_ms, seq)
    assert index.contains(due_ms, seq).all() and (np.diff(index.pairs()[0]) >= 0).all()
