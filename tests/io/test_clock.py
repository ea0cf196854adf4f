"""The scheduler's clock: every row of its table, and its invariants over any sequence of readings."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeball.io.clock import (
    BOUNDS_NS,
    JITTER_MS,
    PROBATION_MS,
    STEP_MS,
    Durations,
    ManualClock,
    SchedulerClock,
    SystemClock,
)

HOUR_MS = 3_600_000
TICK_MS = 50
DAYS_400_MS = 400 * 24 * HOUR_MS


def clocks() -> tuple[ManualClock, SchedulerClock]:
    """Make a manual clock, and a scheduler clock that reads it."""
    manual = ManualClock()
    return manual, SchedulerClock(manual)


def run(manual: ManualClock, clock: SchedulerClock, ms: int) -> int:
    """Let `ms` pass with a reading at every tick. Returns the last reading."""
    for _ in range(0, ms, TICK_MS):
        manual.advance(TICK_MS)
        now = clock.now_ms()
    return now


def test_scheduler_clock_starts_at_the_wall_and_follows_it() -> None:
    manual, clock = clocks()
    assert clock.now_ms() == manual.wall
    run(manual, clock, 10_000)
    assert clock.now_ms() == manual.wall and not clock.suspect


class InterruptedClock(ManualClock):
    """A clock whose reader is interrupted once, before it reads the boot clock."""

    interruption_ms = 0

    def boot_ms(self) -> int:
        """See Clock."""
        self.advance(self.interruption_ms)
        self.interruption_ms = 0
        return super().boot_ms()


def test_an_interruption_between_two_readings_changes_no_offset() -> None:
    manual, offsets = InterruptedClock(), list[int]()
    clock = SchedulerClock(manual)
    clock.on_offset = offsets.append
    manual.interruption_ms = 30
    clock.now_ms()
    assert run(manual, clock, 10 * TICK_MS) == manual.wall and not offsets
    manual.interruption_ms = 30
    manual.step_wall(HOUR_MS // 60)
    clock.now_ms()
    run(manual, clock, PROBATION_MS)
    assert len(offsets) == 1 and clock.now_ms() == manual.wall


@pytest.mark.parametrize("step_ms", [-HOUR_MS, HOUR_MS], ids=["back", "forward"])
def test_an_interruption_hides_no_step(step_ms: int) -> None:
    """The reading that follows the step is interrupted: durations must follow in the same reading, or end early."""
    manual, offsets = InterruptedClock(), list[int]()
    clock = SchedulerClock(manual)
    clock.on_offset = offsets.append
    manual.step_wall(step_ms)
    manual.interruption_ms = 30
    while abs(clock.now_ms() - manual.wall) > HOUR_MS // 2:  # until the probation ends
        assert not offsets
        manual.advance(TICK_MS)
        manual.interruption_ms = 30
    assert len(offsets) == 1 and abs(offsets[0] - (manual.wall - manual.boot)) <= 30


# ---- small steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [1, JITTER_MS, JITTER_MS + 1, STEP_MS])
def test_a_small_step_forward_is_followed_at_once(step_ms: int) -> None:
    manual, clock = clocks()
    manual.step_wall(step_ms)
    assert clock.now_ms() == manual.wall and not clock.suspect


@pytest.mark.parametrize("step_ms", [1, JITTER_MS, JITTER_MS + 1, STEP_MS])
def test_a_small_step_back_is_held_until_the_wall_catches_up(step_ms: int) -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(-step_ms)
    assert clock.now_ms() == before
    manual.advance(step_ms - 1)
    assert clock.now_ms() == before
    manual.advance(2)
    assert clock.now_ms() == manual.wall == before + 1


def test_slewing_is_followed() -> None:
    manual, clock = clocks()
    for _ in range(2_000):  # 500 ppm for 100 s of readings a second apart
        manual.advance(1_000)
        manual.step_wall(1)
        assert clock.now_ms() == manual.wall
    assert clock.steps_suspected == 0


# ---- a step forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [STEP_MS + 1, HOUR_MS, 24 * HOUR_MS, DAYS_400_MS])
def test_spike_forward_and_back_does_not_move_the_time(step_ms: int) -> None:
    manual, clock = clocks()
    manual.step_wall(step_ms)
    assert clock.now_ms() == manual.wall - step_ms and clock.suspect
    assert run(manual, clock, PROBATION_MS - TICK_MS) == manual.wall - step_ms
    manual.step_wall(-step_ms)
    assert clock.now_ms() == manual.wall and not clock.suspect
    assert run(manual, clock, 2 * PROBATION_MS) == manual.wall


def test_step_forward_is_accepted_after_the_probation() -> None:
    manual, clock = clocks()
    manual.step_wall(HOUR_MS)
    clock.now_ms()
    run(manual, clock, PROBATION_MS - TICK_MS)
    assert clock.suspect
    manual.advance(TICK_MS)
    assert clock.now_ms() == manual.wall and not clock.suspect
    assert clock.steps_suspected == 1


def test_time_goes_on_while_a_step_is_on_probation() -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(HOUR_MS)
    clock.now_ms()
    assert run(manual, clock, 3_000) == before + 3_000


def test_a_second_step_begins_a_new_probation() -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(HOUR_MS)
    clock.now_ms()
    run(manual, clock, 3_000)
    manual.step_wall(HOUR_MS)
    clock.now_ms()
    assert run(manual, clock, 3_000) == before + 6_000
    assert run(manual, clock, PROBATION_MS) == manual.wall
    assert clock.steps_suspected == 2


def test_suspect_step_undone_in_small_steps_ends_the_probation() -> None:
    manual, clock = clocks()
    manual.step_wall(1_500)
    clock.now_ms()
    for _ in range(2):
        manual.step_wall(-750)
        run(manual, clock, TICK_MS)
    assert not clock.suspect and clock.now_ms() == manual.wall


def test_partial_step_back_keeps_the_rest_of_a_spike_suspect() -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(2 * HOUR_MS)
    clock.now_ms()
    manual.step_wall(-HOUR_MS)  # the wall is still an hour ahead
    assert clock.now_ms() == before and clock.suspect
    assert run(manual, clock, PROBATION_MS - TICK_MS) == before + PROBATION_MS - TICK_MS
    manual.step_wall(-HOUR_MS)
    assert clock.now_ms() == manual.wall and not clock.suspect


def test_rest_of_a_spike_is_accepted_after_its_probation() -> None:
    manual, clock = clocks()
    manual.step_wall(2 * HOUR_MS)
    clock.now_ms()
    manual.step_wall(-HOUR_MS)
    clock.now_ms()
    assert run(manual, clock, PROBATION_MS) == manual.wall and not clock.suspect


# ---- a suspend -------------------------------------------------------------------------------------------


def test_a_suspend_is_no_step() -> None:
    manual, clock = clocks()
    manual.suspend(8 * HOUR_MS)
    assert clock.now_ms() == manual.wall and clock.steps_suspected == 0


def test_a_wall_set_during_a_suspend_is_accepted_at_once() -> None:
    manual, clock = clocks()
    manual.suspend(HOUR_MS)
    manual.step_wall(30_000)  # the hardware clock ran fast
    assert clock.now_ms() == manual.wall and not clock.suspect


def test_a_long_gap_between_readings_is_no_step() -> None:
    manual, clock = clocks()
    manual.advance(HOUR_MS)
    assert clock.now_ms() == manual.wall and clock.steps_suspected == 0


# ---- a step back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [STEP_MS + 1, HOUR_MS, DAYS_400_MS])
def test_large_step_back_sets_the_time_back(step_ms: int) -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(-step_ms)
    assert clock.now_ms() == manual.wall == before - step_ms
    assert run(manual, clock, 5_000) == manual.wall


def test_spike_that_ends_before_its_start_sets_the_time_back() -> None:
    manual, clock = clocks()
    before = clock.now_ms()
    manual.step_wall(HOUR_MS)
    clock.now_ms()
    manual.step_wall(-2 * HOUR_MS)
    assert clock.now_ms() == before - HOUR_MS and not clock.suspect


# ---- strobe ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [200, 1_000, 5_000, HOUR_MS])
def test_repeated_small_steps_move_the_time_by_at_most_one_step(step_ms: int) -> None:
    manual, clock = clocks()
    truth = manual.wall
    for turn in range(400):
        manual.step_wall(step_ms if turn % 2 == 0 else -step_ms)
        manual.advance(TICK_MS)
        truth += TICK_MS
        assert clock.now_ms() <= truth + (step_ms if step_ms <= STEP_MS else 0)
    assert run(manual, clock, PROBATION_MS + STEP_MS) == manual.wall == truth + PROBATION_MS + STEP_MS


# ---- over any sequence -----------------------------------------------------------------------------------

advance = st.tuples(st.just("advance"), st.integers(0, 20_000))
step = st.tuples(st.just("step"), st.integers(-5_000, 5_000) | st.integers(-DAYS_400_MS, DAYS_400_MS))
suspend = st.tuples(st.just("suspend"), st.integers(0, HOUR_MS))


@example([("step", -1), ("step", -1_000), ("step", 1_001)])  # the held steps are undone by a step forward
@given(st.lists(st.one_of(advance, step, suspend), max_size=60))
def test_invariants_hold_for_any_sequence_of_steps(events: list[tuple[str, int]]) -> None:
    manual, clock = clocks()
    now, wall, boot = clock.now_ms(), manual.wall, manual.boot
    last_step_boot_ms = -PROBATION_MS  # boot clock at the last large step of the wall
    for method, ms in events:
        {"advance": manual.advance, "step": manual.step_wall, "suspend": manual.suspend}[method](ms)
        before, now = now, clock.now_ms()
        elapsed_ms = manual.boot - boot
        step_ms = manual.wall - wall - elapsed_ms
        wall, boot = manual.wall, manual.boot
        if abs(step_ms) > STEP_MS:
            last_step_boot_ms = boot
        if now - before - elapsed_ms > STEP_MS:
            assert boot - last_step_boot_ms >= PROBATION_MS, (
                "a large step forward is accepted only after the probation"
            )
        if step_ms >= -STEP_MS:
            assert now >= before, "only a step back of more than a second sets the time back"
        # Only a small step back, which is held, may leave the time ahead of the wall.
        assert now <= max(wall, before + elapsed_ms)
        if not clock.suspect:
            assert now == max(wall, before) or step_ms < -STEP_MS
        else:
            assert now < wall, "the wall is ahead by the suspected step"


@given(st.lists(st.one_of(advance, step), max_size=30))
def test_time_ends_at_the_wall_after_any_sequence(events: list[tuple[str, int]]) -> None:
    manual, clock = clocks()
    for method, ms in events:
        {"advance": manual.advance, "step": manual.step_wall}[method](ms)
        clock.now_ms()
    held_ms = max(0, clock.now_ms() - manual.wall)
    manual.advance(PROBATION_MS + held_ms)
    assert clock.now_ms() == manual.wall


# A disturbance: the wall shows another time than the true one, for less than a probation each.
glitch = st.tuples(
    st.integers(-DAYS_400_MS, -STEP_MS - 1) | st.integers(STEP_MS + 1, DAYS_400_MS),
    st.integers(0, PROBATION_MS - 1),
)


@example([(-24 * HOUR_MS, 300)], 1_000)
@given(st.lists(glitch, max_size=8), st.integers(100, STEP_MS))
def test_true_time_is_reached_within_a_probation_after_any_glitches(
    glitches: list[tuple[int, int]], look_ms: int
) -> None:
    """A ticker reads the clock at least once a second. Meanwhile no message is due before its true time."""
    manual, clock = clocks()
    truth = manual.wall

    def let_pass(ms: int) -> None:
        """Let `ms` pass, with a reading every `look_ms`, and check each reading."""
        nonlocal truth
        while ms > 0:
            pause_ms = min(ms, look_ms)
            manual.advance(pause_ms)
            truth, ms = truth + pause_ms, ms - pause_ms
            assert clock.now_ms() <= truth, "ahead of the true time"

    for wrong_ms, lasting_ms in glitches:
        manual.step_wall(wrong_ms)
        clock.now_ms()
        let_pass(lasting_ms)
        manual.step_wall(-wrong_ms)
        let_pass(look_ms)
    let_pass(PROBATION_MS)
    assert clock.now_ms() == truth == manual.wall and not clock.suspect


# ---- the machine's own -----------------------------------------------------------------------------------


def test_system_clock_returns_milliseconds_and_nanoseconds() -> None:
    clock = SystemClock()
    assert clock.wall_ms() == pytest.approx(time.time() * 1000, rel=1e-3)  # milliseconds, and since 1970
    first, boot = clock.monotonic_ns(), clock.boot_ms()
    assert clock.monotonic_ns() >= first
    assert clock.boot_ms() >= boot
    # Unlike CLOCK_MONOTONIC, CLOCK_BOOTTIME also counts the time in suspend.
    assert clock.boot_ms() >= first // 1_000_000 - 1
    assert SchedulerClock(clock).now_ms() >= 1_700_000_000_000


def test_manual_clock_moves_only_by_its_methods() -> None:
    manual = ManualClock(wall=5, boot=7, monotonic=9)
    assert (manual.wall_ms(), manual.boot_ms(), manual.monotonic_ns()) == (5, 7, 9_000_000)
    manual.advance(1)
    manual.suspend(2)
    manual.step_wall(-3)
    assert (manual.wall_ms(), manual.boot_ms(), manual.monotonic_ns()) == (5, 10, 10_000_000)


# ---- durations -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**11) | st.sampled_from(BOUNDS_NS)))
def test_each_duration_is_counted_by_the_first_bound_that_it_does_not_exceed(values: list[int]) -> None:
    durations = Durations(ManualClock())
    for ns in values:
        durations.add(ns)
    assert durations.sum_ns == sum(values)
    bounds = [-1, *BOUNDS_NS, 1 << 62]
    assert durations.counts == [sum(low < ns <= high for ns in values) for low, high in pairwise(bounds)]


def test_a_call_is_timed_and_its_result_returned() -> None:
    manual = ManualClock()
    durations = Durations(manual)
    assert durations.time(lambda ms: manual.advance(ms) or ms, 3) == 3
    assert durations.sum_ns == 3_000_000
