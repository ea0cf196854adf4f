"""Held messages in outcomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.model.message import Int64Array
from timeball.schedule import due_index, outcomes
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.outcomes import Holds, Outcomes, SettledPairs


def numbers(*values: int) -> Int64Array:
    return np.array(values, np.int64)


@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.sets(st.integers(0, 9)), st.integers(0, 50))),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 130)), max_size=30),
)
def test_message_is_held_if_its_number_is_in_a_range_and_it_is_due_later(
    held: dict[str, tuple[set[int], int]], pairs: list[tuple[int, int]]
) -> None:
    holds, expected = Holds(), {}
    for index, (name, (tens, from_ms)) in enumerate(held.items()):
        # Ranges of four numbers, which differ from hold to hold.
        ranges = [(ten * 12 + index * 4, 4) for ten in tens]
        holds.add(name, ranges, from_ms)
        expected |= {first_seq + number: from_ms for first_seq, _ in ranges for number in range(4)}
    due_ms, seq = (np.array([pair[column] for pair in pairs], np.int64) for column in (0, 1))
    expected_mask = [number in expected and due >= expected[number] for due, number in pairs]
    assert holds.contains(due_ms, seq).tolist() == expected_mask
    assert holds.from_ms == min((from_ms for _, from_ms in held.values()), default=FAR_MS)
    for name in [*held, "of another name"]:
        holds.remove(name)
    assert not holds.contains(due_ms, seq).any() and not len(holds)


def test_mark_does_not_settle_held_messages_and_their_settled_pairs_stay() -> None:
    outcomes, far = Outcomes(), 1_000
    due, seq = numbers(100, 100, 100, 200), numbers(10, 11, 12, 50)
    outcomes.move_mark(90, 60)
    assert outcomes.hold("spring", [(10, 3)], 95) == 95
    assert outcomes.cancel(due[:1], seq[:1]).all()
    outcomes.move_mark(far, 60)
    assert outcomes.is_settled(due, seq).tolist() == [True, False, False, True]
    assert outcomes.was_cancelled(due, seq).tolist() == [True, False, False, False]
    assert outcomes.settled().seq.tolist() == [10]  # as a checkpoint contains them
    assert outcomes.cancel(due, seq).tolist() == [False, True, True, False]
    outcomes.holds.remove("spring")
    assert outcomes.is_settled(due, seq).all()
    outcomes.move_mark(far + 1, 60)
    assert len(outcomes) == 0


def test_messages_settled_before_the_hold_are_not_held() -> None:
    """The mark has replaced their pairs. All messages of a job that came after the mark are held."""
    outcomes = Outcomes()
    outcomes.move_mark(100, 60)
    assert (
        outcomes.hold("old", [(10, 3)], 40) == 100
    )  # the mark does not tell whether messages due before it are settled
    assert outcomes.hold("new", [(70, 3)], 40) == 40
    outcomes.exclude_from_mark([(20, 3)])
    assert outcomes.hold("late", [(20, 3)], 40) == 40
    due_ms = numbers(50, 50, 50)
    assert outcomes.is_settled(due_ms, numbers(11, 71, 21)).tolist() == [True, False, False]


def test_a_reader_in_another_thread_is_not_stopped_by_a_change() -> None:
    """An integer that adds a hold whenever it is compared simulates changes by the event loop."""
    holds = Holds()

    class ChangingInt(int):
        def __lt__(self, other: int) -> bool:
            if is_read:
                holds.add("new", [(90, 1)], 7)
            return int(self) < int(other)

    is_read = False
    holds.add("a", [(1, 2)], ChangingInt(30))
    holds.add("b", [(5, 2)], ChangingInt(20))
    is_read = True
    assert holds.from_ms == 20


# ---- settled pairs ------------------------------------------------------------------------------------------

NAMES = st.sampled_from([0, 1, 2])  # the hold with name n has the thousand numbers from 1,000 * n on
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.lists(st.integers(0, 30), min_size=1, max_size=30)),
        st.tuples(st.just("hold"), NAMES),
        st.tuples(st.just("end"), NAMES),
        st.tuples(st.just("drop"), st.integers(0, 12)),
    ),
    max_size=25,
)


@settings(max_examples=50)
@given(STEPS, st.sampled_from([1, 1 << 62]))
def test_settled_pairs_stay_while_they_are_due_later_or_held(steps: list[Any], rows_max: int) -> None:
    pairs, holds, kept, mark_ms, made_rows = SettledPairs(), Holds(), set[tuple[int, int]](), 0, 0
    held = dict[int, int]()  # from_ms by name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "HELD_ROWS_MAX", rows_max)
        patch.setattr(due_index, "MERGED_ROWS_MAX", 16)
        patch.setattr(due_index, "RUNS_MAX", 3)
        for step, value, *more in steps:
            if step == "add":
                # Only messages that the mark does not cover can be settled.
                late_ms = held.get(value, mark_ms)
                new = [
                    (late_ms + due, 1_000 * value + made_rows + index) for index, due in enumerate(more[0])
                ]
                made_rows += len(new)
                pairs.add(*(numbers(*column) for column in zip(*new, strict=True)))
                kept.update(new)
            elif step == "hold" and value not in held:
                held[value] = mark_ms
                holds.add(str(value), [(1_000 * value, 1_000)], mark_ms)
            elif step == "end":
                held.pop(value, None)
                holds.remove(str(value))
            elif step == "drop":
                mark_ms += value
                pairs.drop_before(mark_ms, holds)
                kept = {
                    (due, seq) for due, seq in kept if due >= mark_ms or due >= held.get(seq // 1_000, FAR_MS)
                }
            columns = [numbers(*(pair[column] for pair in sorted(kept))) for column in (0, 1)]
            assert pairs.contains(*columns).all() and all(pairs.has(*pair) for pair in kept)
            assert pairs.first_due_ms <= min((due for due, _ in kept), default=FAR_MS)
            stored = sorted(
                (due, seq) for run in pairs.runs() for due, seq in zip(*map(list, run), strict=True)
            )
            assert len(stored) == len(pairs)
            if step == "drop" and rows_max > 1:
                assert stored == sorted(kept)
    for name in held:
        holds.remove(str(name))
    pairs.drop_before(1 << 40, holds)
    assert len(pairs) == 0


def test_pairs_of_held_messages_are_compared_with_the_holds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each second of a pause would compare all of them again."""
    monkeypatch.setattr(outcomes, "HELD_ROWS_MAX", 100)
    compared_rows = []

    class RecordingHolds(Holds):
        def contains(self, due_ms: Int64Array, seq: Int64Array) -> Any:
            compared_rows.append(len(seq))
            return super().contains(due_ms, seq)

    pairs, holds = SettledPairs(), RecordingHolds()
    holds.add("spring", [(0, 1_000)], 0)
    holds.add("autumn", [(1_000, 1)], 0)
    for begin in range(0, 1_000, 50):
        pairs.add(np.arange(begin, begin + 50), np.arange(begin, begin + 50))
    for _ in range(15):
        pairs.drop_before(2_000, holds)
    assert (compared_rows, len(pairs)) == ([50] * 20, 1_000), "two runs in each step"
    holds.remove("autumn")
    for _ in range(15):
        pairs.drop_before(2_000, holds)
    assert (len(compared_rows), len(pairs)) == (40, 1_000)
    holds.remove("spring")
    pairs.drop_before(2_000, holds)
    assert (len(compared_rows), len(pairs)) == (40, 0)
