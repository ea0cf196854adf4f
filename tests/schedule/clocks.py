"""The contract for clocks: clocks that are set, run fast or slow, or are not read for a while, and far due times.

The cases are those of the reliability study in docs/decisions/0004-clock.md. The model checks each step: no message is
released early by the scheduler's clock, no overdue message is left, and the ticker wakes in time. Temporary faults are
also checked against the true time: a message may be early or late by a bounded time. Summer time needs no test, because
due times are UTC.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import pytest
from tests.rounds import rounds
from tests.schedule.moves import release_all_pending
from tests.schedule.stage import Rig
from tests.schedule.world import World

from timeball.io.clock import PROBATION_MS, STEP_MS
from timeball.model import limits
from timeball.schedule.ticker import CLOCK_READ_MS

SECOND, HOUR, DAY = limits.SECOND_MS, limits.HOUR_MS, limits.DAY_MS
AROUND_2038_MS = (1 << 31) * SECOND  # one second more than a signed 32-bit integer can store
LAST_MS = limits.INSTANT_MS_MAX
# Distances of scheduled messages that wait when a script begins.
WAITING_MS = [
    0,
    1,
    49,
    50,
    51,
    700,
    1_000,
    1_001,
    4_999,
    9_000,
    12_345,
    29_999,
    31_000,
    HOUR,
    HOUR + 1,
    DAY,
    5 * DAY,
]

Script = list[tuple[int, int]]  # (step of the wall clock in ms, ms that pass after it)


@dataclass(frozen=True)
class TemporaryFault:
    """A temporary fault of the wall clock. By true time, messages are at most `early_ms` early and `late_ms` late."""

    script: Script
    early_ms: int
    late_ms: int


TEMPORARY_FAULTS = {
    # Each step is undone before the end of its probation.
    "spikes": TemporaryFault([(HOUR, 3_000), (-HOUR, 1_000)] * 8, 0, 0),
    # The step is undone in two parts. After the first part the clock is still wrong.
    "spike in pieces": TemporaryFault([(HOUR, 1_000), (-HOUR // 2, 3_000), (-HOUR // 2, 3_000)], 0, 0),
    "strobe": TemporaryFault([(200, 50), *([(-400, 50), (400, 50)] * 300), (-200, 1_000)], 200, 200),
    # A millisecond in two seconds is 500 ppm.
    "fast": TemporaryFault([(1, 2_000)] * 60, 60, 0),
    "slow": TemporaryFault([(-1, 2_000)] * 60, 0, 60),
    "second forth and back": TemporaryFault([(STEP_MS, 500), (-STEP_MS, 2_000)] * 5, STEP_MS, STEP_MS),
    "second back and forth": TemporaryFault([(-STEP_MS, 500), (STEP_MS, 2_000)] * 5, STEP_MS, STEP_MS),
}


class Clocks:
    """Tests that set and stop the clock and send it far ahead. A part of `contract.Contract`."""

    new_rig: ClassVar[Callable[[], Rig]]

    @pytest.mark.parametrize("restarts", [False, True])
    @pytest.mark.parametrize("step_ms", [-400 * DAY, -HOUR, -SECOND, SECOND, HOUR, DAY])
    def test_wall_clock_step_is_waited_for_or_followed(
        self, world: World, step_ms: int, restarts: bool
    ) -> None:
        """Small steps back are waited for, large ones followed. Steps forward > 1 s pass a probation."""
        admitted = world.admit([world.now_ms + ms for ms in WAITING_MS])
        release_due(world)
        before_ms = world.now_ms
        world.manual.step_wall(step_ms)
        release_due(world)
        if step_ms > STEP_MS:
            assert world.now_ms == before_ms, "a large step forward is not followed at once"
        if restarts:
            world.save()
            world.restart(power_cut=1)
            assert world.now_ms == world.manual.wall, "a new process reads the wall clock"
        for delay_ms in (1, 100, 2_000):
            (new_seq,) = world.admit([world.now_ms + delay_ms])
            waited_ms = wait_for(world, new_seq)
            held_ms = -step_ms if -STEP_MS <= step_ms < 0 else 0
            assert waited_ms <= delay_ms + held_ms, "no message waits for the length of a large step"
        release_during(world, PROBATION_MS + 2 * CLOCK_READ_MS)
        assert abs(world.now_ms - world.manual.wall) <= STEP_MS, "the step was followed"
        release_all_pending(world)
        world.release()
        assert world.model.released.keys() >= set(admitted)

    def test_wall_clock_set_forward_by_an_hour_and_back_releases_only_what_it_made_due(
        self, world: World
    ) -> None:
        """The messages that were due in the 30 s of the wrong time are released. All others keep their times."""
        start_ms = world.now_ms
        due_times = [start_ms + ms for ms in (10_000, HOUR - 1, HOUR + 60_000, 2 * HOUR, DAY)]
        world.admit(due_times)
        release_due(world)
        world.manual.step_wall(HOUR)
        assert release_during(world, PROBATION_MS - 1) == []
        assert release_during(world, 30_000 - PROBATION_MS + 1) == due_times[:2]
        world.manual.step_wall(-HOUR)
        release_due(world)
        assert world.now_ms == start_ms + 30_000
        (new_seq,) = world.admit([world.now_ms + 50])
        assert wait_for(world, new_seq) == 50
        assert [due for due, _ in release_all_pending(world)] == due_times[2:]

    @pytest.mark.parametrize("name", TEMPORARY_FAULTS)
    def test_temporary_clock_faults_shift_releases_by_bounded_times(self, world: World, name: str) -> None:
        fault, start_ms, start_boot = TEMPORARY_FAULTS[name], world.now_ms, world.manual.boot
        seqs = world.admit([start_ms + ms for ms in WAITING_MS])
        release_due(world)
        released_after_ms = dict.fromkeys(world.model.released, 0)
        for step_ms, ms in fault.script:
            world.manual.step_wall(step_ms)
            for _ in pass_time(world, ms):
                for seq in world.model.released.keys() - released_after_ms.keys():
                    released_after_ms[seq] = world.manual.boot - start_boot
        for seq, delay_ms in zip(seqs, WAITING_MS, strict=True):
            if seq in released_after_ms:
                late_ms = released_after_ms[seq] - delay_ms
                assert -fault.early_ms <= late_ms <= fault.late_ms, f"due after {delay_ms} ms: {late_ms} late"
        release_all_pending(world)
        world.release()
        assert world.model.released.keys() == set(seqs)

    @pytest.mark.parametrize("ms", [30_000, 40 * DAY])
    @pytest.mark.parametrize("suspends", [False, True])
    def test_paused_process_releases_overdue_messages_at_once_and_in_order(
        self, world: World, ms: int, suspends: bool
    ) -> None:
        """A stopped process or a suspended machine."""
        start_ms = world.now_ms
        due_times = sorted(start_ms + 1 + (i * 7_919) % (2 * ms) for i in range(200))
        world.admit(due_times[::-1])
        release_due(world)
        (world.manual.suspend if suspends else world.manual.advance)(ms)
        overdue = [due for due in due_times if due <= start_ms + ms]
        assert [due for due, _ in world.drain(limit=7)] == overdue
        assert [due for due, _ in release_all_pending(world)] == due_times[len(overdue) :]

    @pytest.mark.parametrize("around_ms", [AROUND_2038_MS, LAST_MS - 400 * DAY, LAST_MS - DAY, LAST_MS])
    def test_far_due_times_survive_compaction_and_a_power_cut(self, around_ms: int) -> None:
        distances = [-4 * HOUR, -1_001, -1_000, -1, 0, 1, 999, 1_000, HOUR, 5 * DAY]
        due_times = [around_ms + ms for ms in distances if around_ms + ms <= LAST_MS]
        with closing(World(type(self).new_rig(), wall_ms=around_ms - 5 * HOUR)) as world:
            world.admit(due_times[::-1])
            if world.rig.has_table:
                world.attach_now(world.prepare_compact())
            world.drain()
            world.save()
            world.restart(power_cut=1)
            assert [due for due, _ in release_all_pending(world)] == due_times

    def test_message_due_in_ten_years_is_released_on_time(self, world: World) -> None:
        pass_ten_years(world, random.Random(1), steps=40)

    @pytest.mark.slow
    @pytest.mark.siege
    @pytest.mark.timeout(1_200)
    def test_message_due_in_ten_years_is_released_on_time_after_many_steps(self, world: World) -> None:
        pass_ten_years(world, random.Random(0), steps=rounds(60, 200))


def pass_ten_years(world: World, chance: random.Random, *, steps: int) -> None:
    """Pass ten years in irregular steps with restarts in between. Nothing is released before the end."""
    begin_ms = world.now_ms
    due_ms = begin_ms + limits.DELAY_MS_MAX
    first, second, cancelled, later = world.admit([due_ms - 1, due_ms, due_ms, due_ms])
    instants = {
        due_ms - 2,
        *(begin_ms + int(limits.DELAY_MS_MAX * chance.random() ** 2) for _ in range(steps)),
    }
    for number, instant_ms in enumerate(sorted(instants)):
        world.advance(instant_ms - world.now_ms)
        assert world.drain() == []
        if number == steps // 2:
            assert world.cancel([cancelled]) == [True]
        if chance.random() < 0.5:
            world.save()
        if chance.random() < 0.5:
            back = int(chance.random() < 0.2)
            world.restart(back=back, power_cut=chance.randrange(100), unreported=chance.random() < 0.5)
    assert world.drain() == []
    world.advance(1)
    assert world.drain() == [(due_ms - 1, first)]
    world.advance(1)
    assert world.drain() == [(due_ms, second), (due_ms, later)]


# -- time passes, with the sleeps of a ticker ------------------------------------------------------------------


def release_due(world: World) -> list[int]:
    """Release all due messages. Returns their due times."""
    taken = world.drain()
    world.release()
    world.check_sleep()
    return [due for due, _ in taken]


def release_during(world: World, ms: int) -> list[int]:
    """Pass `ms` and return the due times of the messages that are released meanwhile."""
    return [due for taken in pass_time(world, ms) for due in taken]


def pass_time(world: World, ms: int) -> Iterator[list[int]]:
    """Pass `ms` with the sleeps of a ticker, at most 1 s each. Yields the due times released after each sleep."""
    while ms > 0:
        upcoming = world.strategy.next_due_ms()
        sleep_ms = CLOCK_READ_MS if upcoming is None else max(1, min(upcoming - world.now_ms, CLOCK_READ_MS))
        sleep_ms = min(sleep_ms, ms)
        world.advance(sleep_ms)
        ms -= sleep_ms
        yield release_due(world)


def wait_for(world: World, seq: int) -> int:
    """Measure the ms until a message is released. Fails after two minutes."""
    begin = world.manual.boot
    for _ in pass_time(world, 120_000):
        if seq in world.model.released:
            return world.manual.boot - begin
    raise AssertionError(f"seq {seq} was not released")
