"""Durations alone: the shift of each after clock steps, and the due time that the mark must not pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.io.clock import OFFSET_JITTER_MS, STEP_MS, ManualClock, SchedulerClock
from timeball.model.message import Int64Array
from timeball.schedule import durations as module
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.durations import FOLLOW_MS, Durations, StoredDurations, is_in
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Outcomes

HOUR_MS = 3_600_000


def column(*values: int) -> Int64Array:
    return np.array(values, np.int64)


class Rig:
    """The durations of a log whose next number the test sets, with a clock that the test sets."""

    def __init__(self) -> None:
        self.manual = ManualClock()
        self.clock, self.outcomes, self.next_seq = SchedulerClock(self.manual), Outcomes(), 1
        self.durations = Durations(self.outcomes, lambda: self.next_seq, self.clock)

    def add(self, delay_ms: int) -> int:
        """Add a duration that begins now. Returns its number."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.durations.newest.append((column(self.clock.now_ms() + delay_ms), column(seq)))
        return seq

    def step(self, ms: int) -> None:
        self.manual.step_wall(ms)
        self.clock.now_ms()

    def remaining_ms(self) -> dict[int, int]:
        """Compute the remaining ms of each shifted duration."""
        self.durations.apply()
        shifted = self.durations.shifted()
        now_ms = self.clock.now_ms()
        return {
            seq: due - now_ms for due, seq in zip(shifted.due_ms.tolist(), shifted.seq.tolist(), strict=True)
        }


def test_each_duration_is_shifted_by_the_steps_since_it_was_accepted() -> None:
    rig = Rig()
    first = rig.add(60_000)
    rig.step(-HOUR_MS)
    second = rig.add(60_000)
    rig.manual.advance(10_000)
    assert rig.remaining_ms() == {first: 50_000}
    rig.step(-HOUR_MS)
    assert rig.remaining_ms() == {first: 50_000, second: 50_000}


@given(st.lists(st.tuples(st.integers(-(10**9), -STEP_MS - 1), st.integers(0, 9_000)), max_size=8))
def test_remaining_time_is_the_duration_minus_the_elapsed_time(steps: list[tuple[int, int]]) -> None:
    rig, end_boot_ms = Rig(), dict[int, int]()
    for step_ms, passing_ms in steps:
        end_boot_ms[rig.add(100_000)] = rig.manual.boot + 100_000
        rig.step(step_ms)
        rig.manual.advance(passing_ms)
        rig.clock.now_ms()
    assert rig.remaining_ms() == {seq: boot_ms - rig.manual.boot for seq, boot_ms in end_boot_ms.items()}


def test_merged_epochs_make_no_duration_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCHS_MAX", 3)
    rig = Rig()
    seqs = []
    for _ in range(6):
        seqs.append(rig.add(60_000))
        rig.step(-HOUR_MS)
    remaining_ms = rig.remaining_ms()
    assert all(remaining_ms[seq] >= 60_000 for seq in seqs)
    assert remaining_ms[seqs[-1]] == 60_000


def test_step_forward_is_applied_at_once_and_a_small_step_back_every_second() -> None:
    rig = Rig()
    assert not rig.durations.is_off
    rig.step(OFFSET_JITTER_MS)
    assert not rig.durations.is_off, "two readings in whole milliseconds may differ by it"
    rig.step(200)
    assert rig.durations.is_off
    rig.durations.apply()
    assert not rig.durations.is_off
    rig.step(-100)
    rig.manual.advance(100)
    rig.clock.now_ms()
    assert not rig.durations.is_off
    rig.manual.advance(FOLLOW_MS)
    assert rig.durations.is_off
    rig.durations.apply()
    rig.step(-HOUR_MS)
    assert rig.durations.is_off


def test_mark_does_not_pass_the_original_due_time_of_a_postponed_duration() -> None:
    rig = Rig()
    first, second = rig.add(1_000), rig.add(2_000)
    due_ms = rig.clock.now_ms() + 1_000
    assert rig.durations.first_original_due_ms() == FAR_MS
    rig.step(500)
    rig.remaining_ms()
    assert rig.durations.first_original_due_ms() == due_ms
    assert rig.outcomes.cancel(column(due_ms), column(first)).all()
    assert rig.durations.first_original_due_ms() == due_ms + 1_000
    rig.durations.forget_before(due_ms + 1)
    assert len(rig.durations) == 1 and rig.durations.contains(column(second)).all()


def test_settled_duration_is_not_shifted() -> None:
    rig = Rig()
    cancelled, remaining = rig.add(60_000), rig.add(60_000)
    assert rig.outcomes.cancel(column(rig.clock.now_ms() + 60_000), column(cancelled)).all()
    rig.step(-HOUR_MS)
    assert rig.remaining_ms().keys() == {remaining}


def test_duration_stored_in_the_future_counts_from_the_start() -> None:
    """Its row was stored before the clock was set back, while no broker ran."""
    rig = Rig()
    now_ms = rig.clock.now_ms()
    rig.durations.begin(now_ms + HOUR_MS, 0)
    assert rig.durations.is_off
    due_ms, seq = column(now_ms + HOUR_MS + 60_000, now_ms + 30_000), column(5, 6)
    rig.durations.add_stored(
        StoredDurations(Waiting(due_ms, seq, seq + 10), column(now_ms + HOUR_MS, now_ms - 30_000))
    )
    assert rig.remaining_ms() == {5: 60_000}
    assert rig.durations.rows_of(column(5)).tolist() == [15]
    assert rig.durations.original_due_times(column(5)).tolist() == [now_ms + HOUR_MS + 60_000]


def test_without_a_clock_no_shift_is_applied() -> None:
    durations = Durations(Outcomes(), lambda: 1)
    assert not durations.is_off and not len(durations.shifted().seq)
    assert durations.shift_of(column(1, 2)).tolist() == [0, 0]


@given(st.sets(st.integers(0, 30)).map(sorted), st.lists(st.integers(-1, 31)))
def test_is_in_marks_the_numbers_in_a_sorted_column(sorted_numbers: list[int], wanted: list[int]) -> None:
    assert is_in(column(*sorted_numbers), column(*wanted)).tolist() == [
        seq in sorted_numbers for seq in wanted
    ]
