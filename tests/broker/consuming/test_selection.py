"""The messages of one pop: in queue order, within the limits of rows, bytes and leased messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.consuming.test_leases import leases_of_queue
from tests.crash_files import CrashFiles

from timeball.broker.consuming.leases import NO_RECEIPT, Lease
from timeball.broker.consuming.selection import Selection
from timeball.broker.filters import EVERYTHING, compile_filter, java_hash
from timeball.log.queue_index import QueueIndex, QueueIndexes
from timeball.model import limits

TAGS = ["a", "b", "c"]


def index(sizes: list[int], tags: list[str] | None = None) -> QueueIndex:
    made = QueueIndexes(CrashFiles()).queue("t", 0)
    hashes = np.array([java_hash(tag) for tag in tags or ["a"] * len(sizes)], dtype=np.int64)
    made.append(np.arange(len(sizes)), np.array(sizes, dtype=np.int64), hashes)
    return made


def selection(rows: int = 32, pop_ms: int = 1, *, in_order: bool = False, attempt_id: str = "") -> Selection:
    return Selection(rows, pop_ms, pop_ms + 10, now_ms=pop_ms, in_order=in_order, attempt_id=attempt_id)


@given(
    st.lists(st.integers(1, 6), max_size=8),
    st.lists(st.sampled_from(TAGS), max_size=40),
    st.sampled_from(TAGS),
)
def test_pop_after_pop_takes_what_matches_in_order_and_once(
    rows: list[int], tags: list[str], tag: str
) -> None:
    w = leases_of_queue(index=index([10] * len(tags), tags))
    expected = [offset for offset, of in enumerate(tags) if of == tag]
    taken: list[int] = []
    for n in rows:
        offsets = selection(n).lease(w, compile_filter(tag))
        assert len(offsets) == min(n, len(expected) - len(taken))
        taken += offsets
    assert taken == expected[: len(taken)]
    assert w.first_open == (taken[0] if taken else w.next_offset)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_bytes_are_bounded_but_the_first_row_always_goes(sizes: list[int], back: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "POP_BYTES_MAX", 12)
        w = leases_of_queue(index=index([size * 4 for size in sizes]))
        everything = selection(64)
        while selection(64).lease(w, EVERYTHING):
            pass
        for offset in back & set(w.in_flight):
            w.give_back(offset)
        for offset in list(w.in_flight):
            w.done(offset)
        again = sorted(w.returned)
        got: list[int] = []
        while offsets := selection(64).lease(w, EVERYTHING):
            assert len(offsets) == 1 or sum(4 * sizes[o] for o in offsets) <= 12
            got += offsets
        assert got == again and everything.leased == []


def test_returned_positions_go_first_and_done_ones_are_skipped() -> None:
    w = leases_of_queue(index=index([10] * 6))
    selection(2).lease(w, EVERYTHING)
    w.give_back(1)
    w.ack_ahead(3)
    assert selection(3).lease(w, EVERYTHING) == [1, 2, 4]
    assert selection(3).lease(w, EVERYTHING) == [5]


class Walked(dict[int, Lease]):
    """Counts how often somebody walks over all positions."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()


def test_rows_in_log_order_are_taken_without_a_walk_over_all_returned_positions() -> None:
    """After a restart, a queue may have 10,000 returned positions, and this selection takes them one by one."""
    queues, returned = [], []
    for first_seq in (0, 1):
        w = leases_of_queue(next_offset=40, index=index([10] * 40))
        leases = {offset: Lease(first_seq + 2 * offset, 10, NO_RECEIPT, 0, 0) for offset in range(39, -1, -1)}
        returned.append(Walked(leases))
        w.restore({}, returned[-1], set(), set())
        queues.append(w)
    before = [each.walks for each in returned]
    taken = selection(31)
    taken.lease_in_log_order(queues, EVERYTHING, only_returned=False)
    assert [lease.seq for _, _, lease in taken.leased] == list(range(31))
    assert [each.walks for each in returned] == before


def test_in_order_nothing_while_something_is_in_hand_unless_it_is_the_same_attempt() -> None:
    w = leases_of_queue(index=index([10] * 4))
    assert selection(2, in_order=True, attempt_id="x").lease(w, EVERYTHING) == [0, 1]
    w.done(0)
    assert selection(2, 2, in_order=True).lease(w, EVERYTHING) == []
    assert selection(2, 2, in_order=True, attempt_id="y").lease(w, EVERYTHING) == []
    assert selection(2, 2, in_order=True, attempt_id="x").lease(w, EVERYTHING) == [1, 2]
    assert w.in_flight[1].pop_ms == 2 and w.in_flight[1].times == 0


def test_a_selection_reports_entries_that_were_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeball.broker.consuming.selection.SCAN_ENTRIES", 2)
    w = leases_of_queue(index=index([10] * 3, ["a", "a", "b"]))
    first = selection()
    assert first.lease(w, compile_filter("b")) == [] and first.has_unsearched
    second = selection()
    assert second.lease(w, compile_filter("b")) == [2] and not second.has_unsearched


def test_a_queue_whose_beginning_is_gone_goes_on_where_it_begins() -> None:
    w = leases_of_queue(index=index([10] * 5))
    w.index.hide(3)
    assert selection().lease(w, EVERYTHING) == [3, 4]


def test_a_full_queue_leases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 2)
    w = leases_of_queue(index=index([10] * 5))
    assert selection().lease(w, EVERYTHING) == [0, 1]
    assert selection().lease(w, EVERYTHING) == []
    w.give_back(0)
    assert selection().lease(w, EVERYTHING) == [0]
