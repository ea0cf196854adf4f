"""One queue of one group: what is done is done, what is open is known, and the first open position is never passed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming.queue_leases import NO_RECEIPT, SWEEP_POSITIONS_MIN, OpenCount, QueueLeases
from timeball.log.queue_file import ENTRY, EntryArray


def entries(offsets: list[int]) -> EntryArray:
    found = np.zeros(len(offsets), ENTRY)
    found["seq"], found["size"] = [100 + offset for offset in offsets], 10
    return found


def leases_of_queue(next_offset: int = 0) -> QueueLeases:
    return QueueLeases("g", "t", 0, next_offset, next_offset, OpenCount())


def take(into: QueueLeases, offsets: list[int], pop_ms: int = 1) -> None:
    into.lease_next(offsets, entries(offsets), pop_ms, pop_ms + 10, in_order=False)
    into.advance(offsets[-1] + 1)


def test_a_receipt_is_found_by_place_and_time() -> None:
    w = leases_of_queue()
    take(w, [0, 1], pop_ms=5)
    held = w.lease_of(1, 5)
    assert held is not None and (held.seq, held.size_bytes, held.deadline_ms) == (101, 10, 15)
    assert w.lease_of(1, 6) is None and w.lease_of(2, 5) is None
    w.done(1)
    assert w.lease_of(1, 5) is None


def test_what_is_given_back_is_open_has_no_receipt_and_goes_out_again_lowest_first() -> None:
    w = leases_of_queue()
    take(w, [0, 1, 2])
    for offset in (2, 0):
        w.give_back(offset)
    assert w.lease_of(0, 1) is None and w.lease_of(0, NO_RECEIPT) is None
    assert w.first_open == 0 and w.open_rows == 3
    assert w.lease_returned(1, 7, 17, in_order=True) == [0]
    assert w.lease_of(0, 7) is w.in_flight[0] and w.in_flight[0].in_order
    assert w.lease_returned(9, 8, 18, in_order=True) == [2]


def test_what_is_done_ahead_is_counted_until_it_is_passed() -> None:
    w = leases_of_queue(5)
    for offset in (6, 6, 9):
        w.ack_ahead(offset)
    assert w.count.rows == 2 and not w.idle and w.first_open == 5
    w.advance(8)
    assert w.acked_ahead == {9} and w.count.rows == 1
    w.advance(10)
    assert w.idle and w.count.rows == 0


def test_forgetting_forgets_all_and_counts_it() -> None:
    w = leases_of_queue()
    take(w, [0, 1, 2])
    w.give_back(1)
    w.ack_ahead(9)
    w.forget()
    assert w.idle and w.count.rows == 0 and w.lease_of(0, 1) is None


@given(
    st.lists(st.tuples(st.sampled_from(["take", "done", "back", "again"]), st.integers(0, 9)), max_size=60)
)
def test_the_first_open_position_is_the_least_that_is_neither_done_nor_unseen(
    steps: list[tuple[str, int]],
) -> None:
    w, done = leases_of_queue(), set()
    for step, n in steps:
        if step == "take":
            take(w, list(range(w.next_offset, w.next_offset + n + 1, 2)))
        elif step == "again":
            w.lease_returned(n, 1, 11, in_order=False)
        elif w.in_flight:
            offset = sorted(w.in_flight)[n % len(w.in_flight)]
            if step == "done":
                w.done(offset)
                done.add(offset)
            else:
                w.give_back(offset)
        open_ones = [*w.in_flight, *w.returned]
        assert w.first_open == min([*open_ones, w.next_offset])
        assert not done & set(open_ones)
        assert w.open_rows == w.count.rows == len(open_ones)


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sets(st.integers(10, 19)))
def test_what_is_done_behind_the_first_open_position_is_told_in_stretches(
    held: set[int], again: set[int], ahead: set[int]
) -> None:
    w = leases_of_queue()
    take(w, list(range(10)))
    for offset in range(10):
        if offset in again - held:
            w.give_back(offset)
        elif offset not in held:
            w.done(offset)
    for offset in ahead:
        w.ack_ahead(offset)
    told = [offset for begin, end in w.ahead() for offset in range(begin, end)]
    open_ = held | again
    first = min(open_, default=10)
    assert told == [o for o in range(first, 10) if o not in open_] + sorted(ahead)
    assert all(begin < end for begin, end in w.ahead())


@given(st.sets(st.integers(0, 20)), st.integers(0, 20))
def test_after_a_crash_a_window_goes_on_behind_what_was_done(done: set[int], begin: int) -> None:
    w = leases_of_queue(begin)
    w.skip_done(done)
    left = [offset for offset in range(begin, 40) if offset not in done]
    assert w.next_offset == w.first_open == left[0]
    assert w.acked_ahead == {offset for offset in done if offset > left[0]}
    assert w.count.rows == len(w.acked_ahead)


def test_one_that_is_never_given_back_does_not_keep_the_places_of_all_behind_it() -> None:
    w = leases_of_queue()
    take(w, [0])
    for offset in range(1, 5_000):
        take(w, [offset])
        w.done(offset)
    assert (w.first_open, w.open_rows) == (0, 1)
    assert len(w._order) <= SWEEP_POSITIONS_MIN + 4
    w.done(0)
    assert w.first_open == w.next_offset == 5_000
