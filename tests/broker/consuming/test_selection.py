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
    """The index of a queue with messages of these sizes (bytes) and tags, by default the tag `a`."""
    queue_index = QueueIndexes(CrashFiles()).queue("t", 0)
    hashes = np.array([java_hash(tag) for tag in tags or ["a"] * len(sizes)], dtype=np.int64)
    queue_index.append(np.arange(len(sizes)), np.array(sizes, dtype=np.int64), hashes)
    return queue_index


def selection(rows: int = 32, pop_ms: int = 1, *, in_order: bool = False, attempt_id: str = "") -> Selection:
    """A selection of at most `rows` rows, whose leases end after 10 ms."""
    return Selection(rows, pop_ms, pop_ms + 10, now_ms=pop_ms, in_order=in_order, attempt_id=attempt_id)


@given(
    st.lists(st.integers(1, 6), max_size=8),
    st.lists(st.sampled_from(TAGS), max_size=40),
    st.sampled_from(TAGS),
)
def test_consecutive_selections_lease_each_match_once_in_order(
    rows: list[int], tags: list[str], tag: str
) -> None:
    queue_leases = leases_of_queue(index=index([10] * len(tags), tags))
    expected = [offset for offset, message_tag in enumerate(tags) if message_tag == tag]
    leased: list[int] = []
    for row_count in rows:
        offsets = selection(row_count).lease(queue_leases, compile_filter(tag))
        assert len(offsets) == min(row_count, len(expected) - len(leased))
        leased += offsets
    assert leased == expected[: len(leased)]
    assert queue_leases.first_open == (leased[0] if leased else queue_leases.next_offset)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_a_selection_is_limited_in_bytes_but_has_at_least_one_row(
    sizes: list[int], given_back: set[int]
) -> None:
    """New positions and positions that came back: 12 bytes, or one message of 4 to 36 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "POP_BYTES_MAX", 12)
        queue_leases = leases_of_queue(index=index([size * 4 for size in sizes]))

        def lease_all() -> list[int]:
            leased: list[int] = []
            while offsets := selection(64).lease(queue_leases, EVERYTHING):
                assert len(offsets) == 1 or sum(4 * sizes[offset] for offset in offsets) <= 12
                leased += offsets
            return leased

        assert lease_all() == list(range(len(sizes)))
        for offset in given_back & set(queue_leases.in_flight):
            queue_leases.give_back(offset)
        for offset in list(queue_leases.in_flight):
            queue_leases.mark_done(offset)
        returned = sorted(queue_leases.returned)
        assert lease_all() == returned


def test_returned_positions_are_leased_first_and_acknowledged_ones_are_skipped() -> None:
    queue_leases = leases_of_queue(index=index([10] * 6))
    selection(2).lease(queue_leases, EVERYTHING)
    queue_leases.give_back(1)
    queue_leases.ack_ahead(3)
    assert selection(3).lease(queue_leases, EVERYTHING) == [1, 2, 4]
    assert selection(3).lease(queue_leases, EVERYTHING) == [5]


class Walked(dict[int, Lease]):
    """Leases by position. Counts the iterations over all positions."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()


def test_rows_in_log_order_are_taken_without_a_walk_over_all_returned_positions() -> None:
    """After a restart, a queue may have 10,000 returned positions, and this selection takes them one by one."""
    queues, returned = [], []
    for first_seq in (0, 1):  # one queue has the even numbers, the other one the odd numbers
        queue_leases = leases_of_queue(next_offset=40, index=index([10] * 40))
        returned.append(
            Walked(
                (offset, Lease(first_seq + 2 * offset, 10, NO_RECEIPT, 0, 0)) for offset in range(39, -1, -1)
            )
        )
        queue_leases.restore({}, returned[-1], set(), set())
        queues.append(queue_leases)
    walks_before = [leases.walks for leases in returned]
    in_log_order = selection(31)
    in_log_order.lease_in_log_order(queues, EVERYTHING, only_returned=False)
    assert [lease.seq for _, _, lease in in_log_order.leased] == list(range(31))
    assert [leases.walks for leases in returned] == walks_before


def test_an_ordered_selection_leases_nothing_beside_a_lease_unless_it_repeats_the_attempt() -> None:
    queue_leases = leases_of_queue(index=index([10] * 4))
    assert selection(2, in_order=True, attempt_id="x").lease(queue_leases, EVERYTHING) == [0, 1]
    queue_leases.mark_done(0)
    assert selection(2, 2, in_order=True).lease(queue_leases, EVERYTHING) == []
    assert selection(2, 2, in_order=True, attempt_id="y").lease(queue_leases, EVERYTHING) == []
    assert selection(2, 2, in_order=True, attempt_id="x").lease(queue_leases, EVERYTHING) == [1, 2]
    assert queue_leases.in_flight[1].pop_ms == 2 and queue_leases.in_flight[1].times == 0


def test_a_selection_reports_entries_that_were_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeball.broker.consuming.selection.SCAN_ENTRIES", 2)
    queue_leases = leases_of_queue(index=index([10] * 3, ["a", "a", "b"]))
    first = selection()
    assert first.lease(queue_leases, compile_filter("b")) == [] and first.has_unsearched
    second = selection()
    assert second.lease(queue_leases, compile_filter("b")) == [2] and not second.has_unsearched


def test_a_selection_continues_at_the_first_offset_that_retention_left() -> None:
    queue_leases = leases_of_queue(index=index([10] * 5))
    queue_leases.index.hide(3)
    assert selection().lease(queue_leases, EVERYTHING) == [3, 4]


def test_a_full_queue_leases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_HELD_PER_QUEUE_MAX", 2)
    queue_leases = leases_of_queue(index=index([10] * 5))
    assert selection().lease(queue_leases, EVERYTHING) == [0, 1]
    assert selection().lease(queue_leases, EVERYTHING) == []
    queue_leases.give_back(0)
    assert selection().lease(queue_leases, EVERYTHING) == [0]
