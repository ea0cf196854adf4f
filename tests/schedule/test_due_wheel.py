"""The second wheel, against a sorted list: in order, nothing early, nothing lost, whatever came in which pieces."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from timeball.log import row_encoder
from timeball.log.row_encoder import NumberedRows, builder_of, read_batch
from timeball.model.message import Kind, build_rows, with_seq
from timeball.schedule import due_wheel as wheel_module
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.due_wheel import SLOT_MS, DueWheel, Run, slot_cuts

Pair = tuple[int, int]

build = builder_of("auto")
SLOT_DUES = st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=60).map(sorted)
DUES = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5_000)), min_size=1, max_size=30)


def rows(dues: list[int], first_seq: int) -> pa.RecordBatch:
    bodies = [f"{due} {first_seq + i}".encode() for i, due in enumerate(dues)]
    return with_seq(
        build_rows(len(dues), kind=int(Kind.SCHEDULED), topic="t", body=bodies, store_ms=0, due_ms=dues),
        first_seq,
    )


def as_values(batch: pa.RecordBatch) -> NumberedRows:
    return NumberedRows(list(zip(*(column.to_pylist() for column in batch.columns), strict=True)))


@given(SLOT_DUES)
def test_each_row_is_in_one_slot_and_it_is_its_own(dues: list[int]) -> None:
    slots, cuts = slot_cuts(np.array(dues, np.int64))
    assert slots == sorted({due // SLOT_MS for due in dues})
    assert cuts[0] == 0 and cuts[-1] == len(dues) and len(cuts) == len(slots) + 1
    for slot, begin, end in zip(slots, cuts, cuts[1:], strict=False):
        assert begin < end
        assert {due // SLOT_MS for due in dues[begin:end]} == {slot}


class WheelMachine(RuleBasedStateMachine):
    """Adds, takes and asks in any order."""

    @initialize(
        arrivals_max=st.sampled_from([1, 8, 4_096]),
        few_max=st.sampled_from([1, 8, 4_096]),
        of_slot_max=st.sampled_from([1, 8, 4_096]),
    )
    def open(self, arrivals_max: int, few_max: int, of_slot_max: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(wheel_module, "ARRIVALS_MAX", arrivals_max)
        self.patch.setattr(wheel_module, "FEW_MAX", few_max)
        self.patch.setattr(wheel_module, "FEW_OF_SLOT_MAX", of_slot_max)
        self.wheel = DueWheel()
        self.waiting: list[Pair] = []
        self.gone: list[Pair] = []
        self.next_seq = 1

    def teardown(self) -> None:
        self.patch.undo()

    def _new(self, dues: list[int]) -> pa.RecordBatch:
        batch = rows(dues, self.next_seq)
        self.waiting = sorted([*self.waiting, *((due, self.next_seq + i) for i, due in enumerate(dues))])
        self.next_seq += len(dues)
        return batch

    @rule(dues=DUES)
    def add(self, dues: list[int]) -> None:
        self.wheel.add(self._new(dues))

    @rule(dues=DUES)
    def add_as_values(self, dues: list[int]) -> None:
        self.wheel.add(as_values(self._new(dues)))

    @rule(dues=DUES)
    def add_in_their_message(self, dues: list[int]) -> None:
        batch = self._new(dues)
        encoded = build([row[1:] for row in as_values(batch).values])
        self.wheel.add(row_encoder.numbered(encoded, batch["seq"].to_pylist(), list(range(len(dues)))))

    @rule(first=DUES, second=DUES)
    def add_run(self, first: list[int], second: list[int]) -> None:
        self.wheel.add_run(Run.of([self._new(first), self._new(second)]))

    @rule(before_ms=st.integers(0, 5_001), limit=st.sampled_from([1, 2, 7, 1_000]))
    def take(self, before_ms: int, limit: int) -> None:
        wanted = [pair for pair in self.waiting if pair[0] < before_ms][:limit]
        run = self.wheel.take_due(before_ms, limit)
        if run is None:
            assert wanted == []
            return
        assert list(zip(run.due.tolist(), run.seq.tolist(), strict=True)) == wanted
        assert run.promised_ms.tolist() == [due for due, _ in wanted]
        batch = read_batch(run.rows)
        assert batch["due_ms"].to_pylist() == [due for due, _ in wanted]
        assert batch["body"].to_pylist() == [f"{due} {seq}".encode() for due, seq in wanted]
        self.waiting = self.waiting[len(wanted) :]
        self.gone += wanted

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
def test_a_run_is_sorted_and_keeps_its_rows_together(first: list[int], second: list[int]) -> None:
    run = Run.of([rows(first, 50), rows(second, 1)])
    pairs = list(zip(run.due.tolist(), run.seq.tolist(), strict=True))
    assert pairs == sorted(pairs)
    assert run.rows["seq"].to_pylist() == run.seq.tolist()
    assert run.rows["body"].to_pylist() == [f"{due} {seq}".encode() for due, seq in pairs]
    part = run.part(1, 3)
    assert part.rows["seq"].to_pylist() == run.seq[1:3].tolist()


def test_an_empty_second_costs_nothing() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.of([rows([0, 10**9], 1)]))
    assert wheel.take_due(1, 10) is not None
    assert len(wheel._slots) == len(wheel._used) == 1
    assert wheel.first_due_ms == 10**9
    assert wheel.take_due(10**9 + 1, 10) is not None
    assert (len(wheel), wheel._slots, wheel._used) == (0, {}, [])


def test_runs_of_a_slot_are_merged_when_it_is_opened() -> None:
    wheel = DueWheel()
    for seq in range(1, 20):
        wheel.add_run(Run.of([rows([500 + seq % 7], seq)]))
    wheel.add_run(Run.of([rows([500] * wheel_module.ARRIVALS_MAX, 100)]))
    assert len(wheel._slots[0]) == 20
    assert wheel.take_due(501, 10) is not None
    assert len(wheel._slots[0]) == 2, "the small ones as one, and a large one as it is"


def test_what_has_come_for_a_slot_is_in_it_when_it_is_first_in_use() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.of([rows([1_000, 1_400], 1)]))
    wheel.add(rows([1_500, 2_500], 3))
    assert wheel.take_due(1_001, 10) is not None
    assert [len(runs) for runs in wheel._slots.values()] == [1, 1]
    wheel.add(rows([1_600], 5))
    assert wheel.take_due(1_401, 10) is not None
    assert len(wheel._slots[1]) == 1, "it has come later, and waits until it is due"


@pytest.mark.parametrize("opens_ms", [0, 500])
def test_rows_that_count_as_due_before_they_were_promised_do_so_in_merged_runs(opens_ms: int) -> None:
    """As those of a delay level do when the clock was set back."""
    wheel, dues = DueWheel(), [500, 510, 505, 520, 515, 530]
    wheel.add(rows([opens_ms], 1))
    assert wheel.take_due(opens_ms + 1, 1) is not None, "the slot is in use, or will be"
    for seq, due in enumerate(dues, 2):
        wheel.add_run(Run.at(np.array([due]), np.array([seq]), rows([due + 400], seq)))
    run = wheel.take_due(600, 10)
    assert run is not None
    assert run.due.tolist() == sorted(dues)
    assert run.promised_ms.tolist() == [due + 400 for due in sorted(dues)]
    assert read_batch(run.rows)["due_ms"].to_pylist() == run.promised_ms.tolist()


def test_a_slot_is_merged_whole_only_when_it_is_first_in_use() -> None:
    wheel = DueWheel()
    wheel.add_run(Run.of([rows([1_000, 1_500], 1)]))
    assert wheel.take_due(1_001, 10) is not None
    whole = wheel._slots[1][0]
    for seq in range(3, 6):
        wheel.add_run(Run.of([rows([999], seq)]))  # of the slot before, which comes into use again
        wheel.add_run(Run.of([rows([1_600], 10 + seq)]))
        assert wheel.take_due(1_001, 10) is not None
    assert len(wheel._slots[1]) == 4 and wheel._slots[1][0] is whole


def test_rows_that_come_one_by_one_are_held_in_few_batches() -> None:
    """Each batch is 10 KB of objects, however few its rows."""
    wheel, seq, most = DueWheel(), 0, 0
    for now in range(0, 1_200, 2):
        seq += 1
        wheel.add(rows([now + 2_500 + seq % 2 * 500], seq))
        seq += 1
        wheel.add(rows([now], seq))  # due at once, so that what has arrived is sorted into its slots
        taken = wheel.take_due(now + 1, 10)
        assert taken is not None and len(taken.due) == 1
        most = max(most, len(wheel._arrivals) + sum(map(len, wheel._slots.values())))
    assert len(wheel) == 600
    assert most <= 4 * (wheel_module.RUNS_MAX + 1)


def test_batches_of_one_row_are_not_held_back_by_the_thousand() -> None:
    wheel, most = DueWheel(), 0
    for seq in range(1, 1_000):
        wheel.add(rows([1_000_000], seq))
        most = max(most, len(wheel._arrivals))
    assert most <= wheel_module.ARRIVAL_BATCHES_MAX


def test_rows_that_come_alone_and_go_together_leave_nothing_behind() -> None:
    """A steady load never empties the wheel: what it believes to hold must not grow with each row that has passed."""
    wheel = DueWheel()
    wheel.add(rows([9_000], 1_000_000))
    alone_bytes = wheel.size_bytes
    for seq in range(1, 600):
        wheel.add(rows([seq], seq))
    assert wheel.size_bytes >= 600 * wheel_module.ROW_BYTES
    assert wheel.take_due(300, 1_000) is not None and wheel.take_due(8_000, 1_000) is not None
    assert (len(wheel), wheel.size_bytes) == (1, alone_bytes)


def test_what_rows_take_is_known_until_they_are_handed_out() -> None:
    wheel = DueWheel()
    large = with_seq(
        build_rows(2, kind=int(Kind.SCHEDULED), topic="t", body=[b"x" * 100_000] * 2, due_ms=[5, 9]), 1
    )
    wheel.add(large)
    assert 200_000 <= wheel.size_bytes < 210_000
    assert wheel.take_due(6, 10) is not None
    assert 90_000 <= wheel.size_bytes < 110_000
    wheel.add_run(Run.of([rows([5], 3)]))
    assert wheel.take_due(10, 10) is not None
    assert (len(wheel), wheel.size_bytes) == (0, 0)


def test_nothing_in_nothing_out() -> None:
    wheel = DueWheel()
    wheel.add(rows([], 1))
    assert len(wheel) == 0
    assert wheel.first_due_ms == FAR_MS
    assert wheel.take_due(FAR_MS, 10) is None
