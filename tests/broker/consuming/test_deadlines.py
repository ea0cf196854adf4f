"""When what is in hand comes back: in time, once, only what is still in hand, and in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.broker.consuming.test_queue_leases import leases_of_queue, take

from timeball.broker.consuming.deadlines import SWEEP_ENTRIES_MIN, Deadlines


def test_the_earliest_deadline_is_told_to_whoever_adds_it() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0], 10)
    take(w, [1], 5)
    assert deadlines.next_ms() is None
    assert deadlines.add(w, [0], 10, 20)
    assert deadlines.add(w, [1], 5, 15)
    assert not deadlines.add(w, [1], 5, 15)
    assert deadlines.next_ms() == 15


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=20), st.integers(0, 50))
def test_what_is_due_is_told_once_unless_it_is_done(pops: list[tuple[int, bool]], now_ms: int) -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    for offset, (pop_ms, _) in enumerate(pops):
        take(w, [offset], pop_ms)
        deadlines.add(w, [offset], pop_ms, pop_ms + 10)
    for offset, (_, is_done) in enumerate(pops):
        if is_done:
            w.done(offset)
    due = [offset for of, offsets in deadlines.pop_due(now_ms) if of is w for offset in offsets]
    expected = [o for o, (pop_ms, is_done) in enumerate(pops) if not is_done and pop_ms + 10 <= now_ms]
    assert sorted(due) == expected
    assert deadlines.pop_due(now_ms) == []


def test_a_time_that_was_changed_to_what_it_had_been_is_told_once() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0, 1], 1)
    deadlines.add(w, [0, 1], 1, 11)
    deadlines.add(w, [0], 1, 11)
    assert [(of is w, offsets) for of, offsets in deadlines.pop_due(11)] == [(True, [0, 1])]
    assert deadlines.pop_due(11) == []


def test_more_time_makes_the_earlier_deadline_void() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    take(w, [0], 1)
    deadlines.add(w, [0], 1, 11)
    w.in_flight[0].deadline_ms = 30
    deadlines.add(w, [0], 1, 30)
    assert deadlines.pop_due(11) == []
    assert deadlines.pop_due(30) == [(w, [0])]


def test_what_comes_back_early_does_not_fill_the_memory() -> None:
    w = leases_of_queue()
    deadlines = Deadlines(w.count)
    for offset in range(5 * SWEEP_ENTRIES_MIN):
        take(w, [offset], 1)
        deadlines.add(w, [offset], 1, 11)
        assert len(deadlines) <= SWEEP_ENTRIES_MIN + 2 * w.count.rows
        if offset % 10:
            w.done(offset)
    assert sum(len(offsets) for _, offsets in deadlines.pop_due(11)) == w.count.rows
