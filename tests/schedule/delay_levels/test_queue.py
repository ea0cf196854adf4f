"""The queue of one level, compared with a list: opened entries, look-ups, clocks that are set back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.log.queue_index import QueueIndexes
from timeball.schedule import locations
from timeball.schedule.delay_levels import LevelQueue
from timeball.schedule.outcomes import Outcomes

WAIT_MS = 100
FAR_MS = 1 << 40


def queue_of(dues: list[int], duration_ms: int | None = WAIT_MS, first_seq: int = 10) -> LevelQueue:
    """Make a queue whose entry n has the sequence number first_seq + 3 n."""
    index = QueueIndexes(CrashFiles()).queue("t", 0)
    count = len(dues)
    index.append(first_seq + 3 * np.arange(count), np.full(count, 91), np.array(dues, np.int64))
    queue = LevelQueue(2, index, duration_ms)
    queue.rebuild()
    return queue


def stretches(queue: LevelQueue) -> list[tuple[int, int, bool]]:
    return [(s.next, s.end, s.shift_ms != 0) for s in queue.stretches]


DUES = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(DUES)
def test_stretches_are_sorted_and_cover_the_queue(dues: list[int]) -> None:
    queue = queue_of(dues)
    ends = [0]
    for stretch in queue.stretches:
        assert stretch.next == ends[-1] and stretch.end > stretch.next
        part = dues[stretch.next : stretch.end]
        assert part == sorted(part)
        assert (stretch.head_ms, stretch.last_ms) == (part[0], part[-1])
        ends.append(stretch.end)
    assert ends[-1] == len(dues)
    assert len(queue.stretches) == 1 + sum(b < a for a, b in pairwise(dues))
    assert queue.first_due_ms() == min(dues)


@given(DUES, st.lists(st.integers(1, 7), max_size=10), st.integers(-1, 51))
def test_new_entries_are_opened_or_extend_the_last_stretch_or_begin_another(
    dues: list[int], cuts: list[int], near_ms: int
) -> None:
    queue, index = queue_of([]), QueueIndexes(CrashFiles()).queue("t", 0)
    queue.index, opened, begin = index, 0, 0
    for step in [*cuts, len(dues)]:
        part = np.array(dues[begin : begin + step], np.int64)
        seq = 10 + 3 * np.arange(begin, begin + len(part))
        index.append(seq, np.full(len(part), 91), part)
        begin += len(part)
        near = queue.add_new(near_ms)
        assert (near is None or not near.tolist()) or near.tolist() == [
            10 + 3 * at for at in range(opened, opened + len(near))
        ]
        opened += 0 if near is None else len(near)
    assert all(due <= near_ms for due in dues[:opened]), "only near entries are opened"
    assert opened == len(dues) or dues[opened] > near_ms, "and all of it that nothing waits before"
    whole = queue_of(dues[opened:])
    assert stretches(queue) == [(b + opened, e + opened, once) for b, e, once in stretches(whole)]


@given(DUES, st.integers(0, 52), st.integers(1, 50), st.sampled_from([1, 3, 4_096]))
def test_open_returns_due_entries_in_order_up_to_the_limit(
    dues: list[int], until_ms: int, rows_max: int, probe: int
) -> None:
    queue = queue_of(dues)
    expected, left = [], []
    for begin, end, _ in stretches(queue):
        due = [at for at in range(begin, end) if dues[at] < until_ms][:rows_max]
        if due:
            expected.append(([dues[at] for at in due], [10 + 3 * at for at in due]))
        if begin + len(due) < end:
            left.append((begin + len(due), end, False))
    was, locations.PROBE = locations.PROBE, probe
    try:
        opened_columns = queue.open(until_ms, rows_max)
    finally:
        locations.PROBE = was
    assert [(due.tolist(), seq.tolist()) for _, due, seq in opened_columns] == expected
    assert stretches(queue) == left
    assert queue.first_due_ms() == min((dues[begin] for begin, _, _ in left), default=None)


@given(DUES, st.integers(0, 40), st.lists(st.integers(0, 140), max_size=12))
def test_find_entries_finds_numbers_from_the_offset_on(dues: list[int], low: int, wanted: list[int]) -> None:
    queue = queue_of(dues)
    queue.low = min(low, len(dues))
    seqs = [10 + 3 * at for at in range(len(dues))]
    expected = [dues[seqs.index(seq)] if seq in seqs[queue.low :] else -1 for seq in wanted]
    assert queue.find_entries(np.array(wanted, np.int64)).tolist() == expected


@given(dues=st.lists(st.integers(0, 500), min_size=1, max_size=30).map(sorted), now_ms=st.integers(0, 500))
def test_no_entry_waits_longer_than_its_level(dues: list[int], now_ms: int) -> None:
    queue = queue_of(dues)
    queue.shorten_long_waits(now_ms)
    shift_ms = min(0, now_ms + WAIT_MS - dues[-1])
    picked = {
        seq: due
        for released, _, seqs in queue.open(now_ms + 1, 1_000)
        for due, seq in zip(released.tolist(), seqs.tolist(), strict=True)
    }
    assert picked == {10 + 3 * at: due + shift_ms for at, due in enumerate(dues) if due + shift_ms <= now_ms}


@given(
    dues=st.lists(st.integers(0, 500), min_size=1, max_size=30),
    cut=st.integers(0, 30),
    now_ms=st.integers(0, 500),
)
def test_entries_are_due_at_their_shifted_times(dues: list[int], cut: int, now_ms: int) -> None:
    queue = queue_of(dues, duration_ms=None)
    shifts = [-40 if at < cut else 7 for at in range(len(dues))]
    queue.rebuild(lambda seq: np.array([shifts[(one - 10) // 3] for one in seq.tolist()], np.int64))
    picked = {
        seq: (released, due)
        for parts in queue.open(now_ms + 1, 1_000)
        for released, due, seq in zip(*(column.tolist() for column in parts), strict=True)
    }
    assert picked.keys() <= {10 + 3 * at for at in range(len(dues))}
    for at, (due, shift_ms) in enumerate(zip(dues, shifts, strict=True)):
        # Behind an entry of its stretch that is not due it waits for that one.
        if (found := picked.get(10 + 3 * at)) is not None:
            assert found == (due + shift_ms, due) and due + shift_ms <= now_ms
        else:
            assert due + shift_ms > now_ms
    assert queue.first_late_ms() >= min(
        due for due, shift_ms in zip([*dues, 999], [*shifts, 1], strict=True) if shift_ms > 0
    )


def test_entries_added_after_a_clock_step_are_not_shifted() -> None:
    queue = queue_of([1_000, 1_001])
    queue.shorten_long_waits(10)
    queue.shorten_long_waits(10)
    assert stretches(queue) == [(0, 2, True)]
    queue.index.append(np.array([90, 91]), np.full(2, 91), np.array([110, 1_200]))
    queue.add_new(0)
    assert stretches(queue) == [(0, 2, True), (2, 4, False)]


def test_entries_of_a_removed_level_keep_their_due_times() -> None:
    queue = queue_of([FAR_MS], duration_ms=None)
    queue.shorten_long_waits(0)
    assert queue.open(FAR_MS, 9) == []
    assert queue.open(FAR_MS + 1, 9)[0][0].tolist() == [FAR_MS]


def test_extended_duration_is_kept_with_a_shorter_table() -> None:
    queue = queue_of([500])
    queue.extend_duration(600)
    queue.shorten_long_waits(0)
    assert stretches(queue) == [(0, 1, False)]


def test_needed_seq_is_the_row_at_the_offset() -> None:
    queue = queue_of([5, 6])
    assert (queue.needed_seq(), queue.waiting_rows) == (10, 2)
    queue.low = 1
    assert (queue.needed_seq(), queue.waiting_rows) == (13, 1)
    queue.low = 2
    assert (queue.needed_seq(), queue.waiting_rows) == (None, 0)


def test_offset_advances_to_the_first_unsettled_entry() -> None:
    queue, outcomes = queue_of([5, 6, 7, 8]), Outcomes()
    queue.open(8, 9)
    outcomes.add_settled(np.array([6, 7]), np.array([13, 16]))
    queue.advance(outcomes)
    assert queue.low == 0
    outcomes.add_settled(np.array([5, 8]), np.array([10, 19]))
    queue.advance(outcomes)
    assert queue.low == 3, "unopened entries are not checked"
    queue.open(9, 9)
    queue.advance(outcomes)
    assert queue.low == 4
