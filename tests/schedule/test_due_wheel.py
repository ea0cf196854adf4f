"""The due wheel, compared with a sorted list: in order, not early, complete, for rows that arrive in any batches."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from timeball.log import row_encoder
from timeball.log.row_encoder import Entry, NumberedRows, build, read_batch
from timeball.model.message import Kind, build_rows, with_seq
from timeball.schedule import due_wheel as wheel_module
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.due_wheel import SLOT_MS, DueWheel, EntrySlots, Run, slot_cuts

Pair = tuple[int, int]

SLOT_DUES = st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=60).map(sorted)
DUES = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5_000)), min_size=1, max_size=30)


def rows(due_times: list[int], first_seq: int) -> pa.RecordBatch:
    bodies = [f"{due} {first_seq + i}".encode() for i, due in enumerate(due_times)]
    return with_seq(
        build_rows(
            len(due_times), kind=int(Kind.SCHEDULED), topic="t", body=bodies, store_ms=0, due_ms=due_times
        ),
        first_seq,
    )


def as_values(batch: pa.RecordBatch) -> NumberedRows:
    return NumberedRows(list(zip(*(column.to_pylist() for column in batch.columns), strict=True)))


@given(SLOT_DUES)
def test_slot_cuts_put_each_row_into_the_slot_of_its_due_time(due_times: list[int]) -> None:
    slots, cuts = slot_cuts(np.array(due_times, np.int64))
    assert slots == sorted({due // SLOT_MS for due in due_times})
    assert cuts[0] == 0 and cuts[-1] == len(due_times) and len(cuts) == len(slots) + 1
    for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False):
        assert begin < end
        assert {due // SLOT_MS for due in due_times[begin:end]} == {slot}


class WheelMachine(RuleBasedStateMachine):
    """Random adds, hand-outs and reads."""

    @initialize(
        arrivals_max=st.sampled_from([1, 8, 4_096]),
        few_max=st.sampled_from([1, 8, 4_096]),
        of_slot_max=st.sampled_from([1, 8, 4_096]),
        small_bytes=st.sampled_from([1, 3_000, 1 << 20]),
    )
    def open(self, arrivals_max: int, few_max: int, of_slot_max: int, small_bytes: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(wheel_module, "ARRIVALS_MAX", arrivals_max)
        self.patch.setattr(wheel_module, "ENTRIES_MAX", few_max)
        self.patch.setattr(wheel_module, "ENTRIES_OF_SLOT_MAX", of_slot_max)
        self.patch.setattr(wheel_module, "SMALL_RUN_BYTES", small_bytes)
        self.patch.setattr(wheel_module, "ARRIVAL_BYTES_MAX", 2 * small_bytes)
        self.wheel = DueWheel()
        self.waiting: list[Pair] = []
        self.handed_out: list[Pair] = []
        self.next_seq = 1

    def teardown(self) -> None:
        self.patch.undo()

    def _new(self, due_times: list[int]) -> pa.RecordBatch:
        batch = rows(due_times, self.next_seq)
        self.waiting = sorted([*self.waiting, *((due, self.next_seq + i) for i, due in enumerate(due_times))])
        self.next_seq += len(due_times)
        return batch

    @rule(due_times=DUES)
    def add(self, due_times: list[int]) -> None:
        self.wheel.add(self._new(due_times))

    @rule(due_times=DUES)
    def add_as_values(self, due_times: list[int]) -> None:
        self.wheel.add(as_values(self._new(due_times)))

    @rule(due_times=DUES)
    def add_in_their_message(self, due_times: list[int]) -> None:
        batch = self._new(due_times)
        encoded = build([row[1:] for row in as_values(batch).values])
        self.wheel.add(row_encoder.numbered(encoded, batch["seq"].to_pylist(), list(range(len(due_times)))))

    @rule(first=DUES, second=DUES)
    def add_run(self, first: list[int], second: list[int]) -> None:
        self.wheel.add_run(Run.from_batches([self._new(first), self._new(second)]))

    @rule(
        before_ms=st.integers(0, 5_001),
        before_row=st.one_of(st.none(), st.integers(0, 30)),
        limit=st.sampled_from([1, 2, 7, 1_000]),
        bytes_max=st.sampled_from([1, 9, 40, wheel_module.UNLIMITED_BYTES]),
    )
    def take(self, before_ms: int, before_row: int | None, limit: int, bytes_max: int) -> None:
        before_seq = 0
        if before_row is not None and self.waiting:
            # At the due time of a row, so that the sequence number decides.
            before_ms, before_seq = self.waiting[before_row % len(self.waiting)]
        expected = [pair for pair in self.waiting if pair < (before_ms, before_seq)][:limit]
        assert self.wheel.has_before((before_ms, before_seq)) == bool(expected)
        run = self.wheel.take_due(before_ms, limit, bytes_max, before_seq=before_seq)
        if run is None:
            assert expected == []
            return
        if bytes_max < wheel_module.UNLIMITED_BYTES:
            # A part of them, which is not empty and not too large.
            expected = expected[: len(run.due_ms)]
            body_bytes = sum(len(f"{due} {seq}") for due, seq in expected)
            assert len(expected) == 1 or 0 < body_bytes <= bytes_max
            assert run.body_bytes == body_bytes
        assert list(zip(run.due_ms.tolist(), run.seq.tolist(), strict=True)) == expected
        assert run.original_due_ms.tolist() == [due for due, _ in expected]
        batch = read_batch(run.rows)
        assert batch["due_ms"].to_pylist() == [due for due, _ in expected]
        assert batch["body"].to_pylist() == [f"{due} {seq}".encode() for due, seq in expected]
        self.waiting = self.waiting[len(expected) :]
        self.handed_out += expected

    @invariant()
    def counts_and_knows_what_is_next(self) -> None:
        if hasattr(self, "wheel"):
            assert len(self.wheel) == len(self.waiting)
            assert self.wheel.first_due_ms == (self.waiting[0][0] if self.waiting else FAR_MS)
            assert self.wheel.size_bytes == sum(
                wheel_module.ROW_BYTES + len(f"{due} {seq}") for due, seq in self.waiting
            )


WheelMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWheel = WheelMachine.TestCase


@given(DUES, DUES)
def test_run_sorts_times_numbers_and_rows_together(first: list[int], second: list[int]) -> None:
    run = Run.from_batches([rows(first, 50), rows(second, 1)])
    pairs = list(zip(run.due_ms.tolist(), run.seq.tolist(), strict=True))
    assert pairs == sorted(pairs)
    assert run.rows["seq"].to_pylist() == run.seq.tolist()
    assert run.rows["body"].to_pylist() == [f"{due} {seq}".encode() for due, seq in pairs]
    part = run.part(1, 3)
    assert part.rows["seq"].to_pylist() == run.seq[1:3].tolist()


def test_empty_seconds_use_no_slot() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.from_batches([rows([0, 10**9], 1)]))
    assert wheel.take_due(1, 10) is not None
    assert len(wheel._slots) == len(wheel._used) == 1
    assert wheel.first_due_ms == 10**9
    assert wheel.take_due(10**9 + 1, 10) is not None
    assert (len(wheel), wheel._slots, wheel._used) == (0, {}, [])


def test_runs_of_a_slot_are_merged_at_its_first_hand_out() -> None:
    wheel = DueWheel()
    for seq in range(1, 20):
        wheel.add_run(Run.from_batches([rows([500 + seq % 7], seq)]))
    wheel.add_run(Run.from_batches([rows([500] * wheel_module.ARRIVALS_MAX, 100)]))
    assert len(wheel._slots[0]) == 20
    assert wheel.take_due(501, 10) is not None
    assert len(wheel._slots[0]) == 2, "small runs are merged, a large one is not"


def test_arrivals_are_in_their_slot_at_its_first_hand_out() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.from_batches([rows([1_000, 1_400], 1)]))
    wheel.add(rows([1_500, 2_500], 3))
    assert wheel.take_due(1_001, 10) is not None
    assert [len(runs) for runs in wheel._slots.values()] == [1, 1]
    wheel.add(rows([1_600], 5))
    assert wheel.take_due(1_401, 10) is not None
    assert len(wheel._slots[1]) == 1, "a later run is not merged before it is due"


@pytest.mark.parametrize("opens_ms", [0, 500])
def test_merged_runs_keep_due_times_that_differ_from_the_original_ones(opens_ms: int) -> None:
    """Messages of delay levels have these after a clock was set back."""
    wheel, due_times = DueWheel(), [500, 510, 505, 520, 515, 530]
    wheel.add(rows([opens_ms], 1))
    assert wheel.take_due(opens_ms + 1, 1) is not None, "the slot is in use, or will be"
    for seq, due in enumerate(due_times, 2):
        wheel.add_run(Run.with_due_times(np.array([due]), np.array([seq]), rows([due + 400], seq)))
    run = wheel.take_due(600, 10)
    assert run is not None
    assert run.due_ms.tolist() == sorted(due_times)
    assert run.original_due_ms.tolist() == [due + 400 for due in sorted(due_times)]
    assert read_batch(run.rows)["due_ms"].to_pylist() == run.original_due_ms.tolist()


def test_whole_slot_is_merged_only_at_its_first_hand_out() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.from_batches([rows([1_000, 1_500], 1)]))
    assert wheel.take_due(1_001, 10) is not None
    large_run = wheel._slots[1][0]
    for seq in range(3, 6):
        wheel.add_run(Run.from_batches([rows([999], seq)]))  # of the slot before, which comes into use again
        wheel.add_run(Run.from_batches([rows([1_600], 10 + seq)]))
        assert wheel.take_due(1_001, 10) is not None
    assert len(wheel._slots[1]) == 4 and wheel._slots[1][0] is large_run


def test_rows_added_one_by_one_are_kept_in_few_batches() -> None:
    """Each batch takes 10 KB of objects, however few its rows."""
    wheel, seq, batches_max = DueWheel(), 0, 0
    for now in range(0, 1_200, 2):
        seq += 1
        wheel.add(rows([now + 2_500 + seq % 2 * 500], seq))
        seq += 1
        wheel.add(rows([now], seq))  # due at once, so that arrivals are sorted into their slots
        taken = wheel.take_due(now + 1, 10)
        assert taken is not None and len(taken.due_ms) == 1
        batches_max = max(batches_max, len(wheel._arrivals) + sum(map(len, wheel._slots.values())))
    assert len(wheel) == 600
    assert batches_max <= 4 * (wheel_module.RUNS_MAX + 1)


def test_collected_batches_are_bounded_in_number() -> None:
    wheel, batches_max = DueWheel(), 0
    for seq in range(1, 1_000):
        wheel.add(rows([1_000_000], seq))
        batches_max = max(batches_max, len(wheel._arrivals))
    assert batches_max <= wheel_module.ARRIVAL_BATCHES_MAX


def test_size_returns_to_the_start_when_single_rows_are_handed_out_together() -> None:
    """A steady load never empties the wheel, so `size_bytes` must not grow with the rows that have passed."""
    wheel = DueWheel()
    wheel.add(rows([9_000], 1_000_000))
    alone_bytes = wheel.size_bytes
    for seq in range(1, 600):
        wheel.add(rows([seq], seq))
    assert wheel.size_bytes >= 600 * wheel_module.ROW_BYTES
    assert wheel.take_due(300, 1_000) is not None and wheel.take_due(8_000, 1_000) is not None
    assert (len(wheel), wheel.size_bytes) == (1, alone_bytes)


def test_size_bytes_counts_rows_until_they_are_handed_out() -> None:
    wheel = DueWheel()
    large = with_seq(
        build_rows(2, kind=int(Kind.SCHEDULED), topic="t", body=[b"x" * 100_000] * 2, due_ms=[5, 9]), 1
    )
    wheel.add(large)
    assert 200_000 <= wheel.size_bytes < 210_000
    assert wheel.take_due(6, 10) is not None
    assert 90_000 <= wheel.size_bytes < 110_000
    wheel.add_run(Run.from_batches([rows([5], 3)]))
    assert wheel.take_due(10, 10) is not None
    assert (len(wheel), wheel.size_bytes) == (0, 0)


def test_empty_batch_leaves_the_wheel_empty() -> None:
    wheel = DueWheel()
    wheel.add(rows([], 1))
    assert len(wheel) == 0
    assert wheel.first_due_ms == FAR_MS
    assert wheel.take_due(FAR_MS, 10) is None


# ---- large bodies ---------------------------------------------------------------------------------------------


def large_rows(count: int, first_seq: int, body_bytes: int, due_ms: int = 0) -> pa.RecordBatch:
    columns = {"topic": "t", "body": [b"x" * body_bytes] * count, "store_ms": 0, "due_ms": due_ms}
    return with_seq(build_rows(count, kind=int(Kind.SCHEDULED), **columns), first_seq)


def hand_outs(wheel: DueWheel, bytes_max: int, limit: int = 1_000) -> list[list[int]]:
    taken = list[list[int]]()
    while (run := wheel.take_due(SLOT_MS * 10, limit, bytes_max)) is not None:
        taken.append(run.seq.tolist())
    return taken


@pytest.mark.parametrize("batches", [[12], [1] * 12, [5, 7], [4, 1, 4, 3]])
def test_a_hand_out_ends_before_its_bodies_are_too_large(batches: list[int]) -> None:
    wheel, seq = DueWheel(), 1
    for count in batches:
        wheel.add(large_rows(count, seq, 1_000_000))
        seq += count
    assert hand_outs(wheel, 4_000_000) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert len(wheel) == wheel.size_bytes == 0


def test_a_body_larger_than_a_hand_out_is_a_hand_out_of_its_own() -> None:
    wheel = DueWheel()
    for first_seq, body_bytes in ((1, 10), (2, 5_000), (3, 5_000), (4, 10), (5, 10)):
        wheel.add(large_rows(1, first_seq, body_bytes))
    assert hand_outs(wheel, 1_000) == [[1], [2], [3], [4, 5]]


def test_a_hand_out_of_several_slots_is_limited_as_a_whole() -> None:
    wheel = DueWheel()
    for slot in range(4):
        wheel.add(large_rows(2, 1 + 2 * slot, 400, slot * SLOT_MS))
    assert hand_outs(wheel, 1_000) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_a_small_row_does_not_pass_a_large_one_that_has_stayed_behind() -> None:
    """Neither between entries and columns, nor between two runs."""
    wheel = DueWheel()
    wheel.add(large_rows(1, 6, 1_000))
    for first_seq, body_bytes in ((1, 500), (3, 900), (5, 10)):
        wheel.add(as_values(large_rows(1, first_seq, body_bytes)))
    for first_seq, body_bytes in ((2, 100), (4, 10)):
        wheel.add(large_rows(1, first_seq, body_bytes))
    assert hand_outs(wheel, 1_000) == [[1, 2], [3, 4, 5], [6]]


def test_large_bodies_are_not_copied_before_they_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    concat, thread = pa.concat_batches, threading.get_ident()

    def counted(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        # The function is replaced for all threads, also those that other tests have left behind.
        if threading.get_ident() == thread:
            joined.append(sum(batch.nbytes for batch in batches))
        return concat(batches)

    monkeypatch.setattr(wheel_module.pa, "concat_batches", counted)
    wheel, count = DueWheel(), 2 * wheel_module.RUNS_MAX
    for index in range(count):
        wheel.add(large_rows(4, 1 + 4 * index, wheel_module.SMALL_RUN_BYTES // 4))
    assert [len(seqs) for seqs in hand_outs(wheel, wheel_module.SMALL_RUN_BYTES)] == [4] * count
    assert joined == []


# ---- rows that are not columns -------------------------------------------------------------------------------


def test_entries_of_a_slot_are_sorted_once() -> None:
    """A hand-out of a few of them costs as much as their number."""
    sorts = 0

    class Counted(list[Entry]):
        def sort(self, **_: object) -> None:
            nonlocal sorts
            sorts += 1
            super().sort()

    slots = EntrySlots()
    slots.add([(due, seq, 0, (), -1) for seq, due in enumerate([90, 20, 70, 10, 80])])
    slots._slots[0] = Counted(slots._slots[0])
    slots.add([(30, 7, 0, (), -1)])
    assert [slots.take((before, 0), 10, 10) for before in (15, 25)] == [
        [(10, 3, 0, (), -1)],
        [(20, 1, 0, (), -1)],
    ]
    slots.add([(25, 8, 0, (), -1)])  # late
    assert [due for due, *_ in slots.take((75, 0), 10, 10)] == [25, 30, 70]
    assert (len(slots), slots.first, sorts) == (2, (80, 4), 1)
