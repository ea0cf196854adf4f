"""`hour_log` keeps the contract of a schedule, and what it promises besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from tests.schedule.contract import FAST, UNTIL_CAUGHT, Contract, Variant, sleep_through
from tests.schedule.machine import Machine
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.stage import Restart
from tests.schedule.world import World

from timeball import limits
from timeball.message import Kind, int64
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.strategy import Strategy
from timeball.schedule.tick import NOTHING_SENT, Tick

HOUR, DAY = limits.HOUR_MS, limits.DAY_MS


class TestContract(Contract):
    """Everything in tests/schedule/contract.py."""

    new_rig = HourLogRig


class TestContractWithRoomForAll(Variant):
    """No gather is ever cut."""

    new_rig = partial(HourLogRig, gather_bytes=1 << 30)


class TestContractWithRoomForOne(Variant):
    """A body is larger than the memory for bodies: it is loaded all the same, one at a time."""

    new_rig = partial(HourLogRig, gather_bytes=1)
    examples = 8  # each row is a gather of its own


# -- the state a successor starts from -------------------------------------------------------------------------


class TickRig(HourLogRig):
    """Saves the tick in a checkpoint, and computes it at a restart from the release records since."""

    def state(self, strategy: Strategy) -> object:
        assert isinstance(strategy, HourLog)
        return strategy.tick

    def start(self, world: World, restart: Restart) -> HourLog:
        strategy = super().start(world, restart)
        strategy._settling.tick = self.tick_now(world, restart)
        return strategy

    def tick_now(self, world: World, restart: Restart) -> Tick:
        tick = NOTHING_SENT if restart.state is None else restart.state
        assert isinstance(tick, Tick)
        saved_seq = world.checkpoints[-1].seq if world.checkpoints else 1
        for rows in world.reader.rows(saved_seq, world.reader.next_seq, [Kind.RELEASE]):
            tick = tick.after(int64(rows.column("due_ms")))
        return tick


class SavedOnly(TickRig):
    """Believes the checkpoint, and not the log behind it."""

    def tick_now(self, world: World, restart: Restart) -> Tick:
        return restart.state if isinstance(restart.state, Tick) else NOTHING_SENT


class CountsTwice(TickRig):
    """Begins too early, with records that the checkpoint has counted."""

    def tick_now(self, world: World, restart: Restart) -> Tick:
        tick = super().tick_now(world, restart)
        if world.checkpoints:
            for rows in world.reader.rows(world.reader.first_seq, world.checkpoints[-1].seq, [Kind.RELEASE]):
                tick = tick.after(int64(rows.column("due_ms")))
        return tick


DUES_MS = st.lists(st.integers(0, 2_500), min_size=1, max_size=6)


class TickMachine(Machine):
    """Whatever happens, the state is what a plain look at all that was ever sent says."""

    @rule(saved_ms=DUES_MS, newer_ms=DUES_MS)
    def die_with_a_newer_log(self, saved_ms: list[int], newer_ms: list[int]) -> None:
        self.send(saved_ms)
        self.world.save()
        self.send(newer_ms)
        self.restart(back=0, power_cut=None, unheard=False)

    def send(self, dues_ms: list[int]) -> None:
        self.world.admit([self.world.now_ms + ms for ms in dues_ms])
        self.world.advance(max(dues_ms))
        self.drain(1_000_000)
        self.world.release()

    @invariant()
    def knows_how_far_it_has_come(self) -> None:
        sent = np.array(list(self.world.model.released.values()), np.int64)
        assert tick_of(self.world) == NOTHING_SENT.after(sent)


def tick_of(world: World) -> Tick:
    assert isinstance(world.strategy, HourLog)
    return world.strategy.tick


def run_ticks(new_rig: Callable[[], TickRig], settings: hypothesis.settings) -> None:
    machine = type("Ticks", (TickMachine,), {"new_rig": staticmethod(new_rig)})
    run_state_machine_as_test(machine, settings=settings)


def test_the_tick_is_what_the_release_records_say() -> None:
    run_ticks(TickRig, FAST)


@pytest.mark.parametrize("wrong", [SavedOnly, CountsTwice])
def test_a_tick_that_is_not_is_caught(wrong: type[TickRig]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ticks(wrong, UNTIL_CAUGHT)
    assert caught.traceback[-1].name == "knows_how_far_it_has_come"


@pytest.fixture
def world() -> Iterator[World]:
    world = World(TickRig())
    yield world
    world.close()


def test_an_older_state_and_a_newer_log_repeat_nothing(world: World) -> None:
    """The second being sent has four messages; two are sent, one is on its way, when the machine dies."""
    second_ms = world.now_ms - world.now_ms % 1_000 + 2_000
    before = world.admit([second_ms - 700, second_ms - 600])
    of_second = world.admit([second_ms + ms for ms in (10, 20, 30, 900)])
    world.advance(second_ms - world.now_ms)
    assert [seq for _, seq in world.drain()] == before
    world.release()
    world.save()  # the older state
    saved = tick_of(world)
    assert saved == Tick(second_ms - 1_000, 2)
    world.advance(20)
    assert [seq for _, seq in world.drain()] == of_second[:2]
    world.release()
    assert tick_of(world) == Tick(second_ms, 2)
    world.advance(10)
    assert [seq for _, seq in world.drain()] == of_second[2:3]
    assert tick_of(world) == Tick(second_ms, 2), "handed out is not sent"
    world.restart()
    assert world.checkpoints[-1].state == saved
    assert tick_of(world) == Tick(second_ms, 2), "the newer log knows better"
    world.advance(1_000)
    assert [seq for _, seq in world.drain()] == of_second[2:]
    world.release()
    assert tick_of(world) == Tick(second_ms, 4)


def test_a_promise_that_came_too_late_is_sent_and_is_no_step_back(world: World) -> None:
    world.admit([world.now_ms])
    world.drain()
    world.release()
    world.save()
    tick = tick_of(world)
    (late,) = world.admit([world.now_ms - DAY])
    assert [seq for _, seq in world.drain()] == [late]
    world.release()
    assert tick_of(world) == tick
    world.restart()
    assert tick_of(world) == tick
    assert world.drain() == [], "named by its own record"


# -- started behind the clock, and ahead of it -----------------------------------------------------------------


@pytest.mark.parametrize("down_ms", [1_500, HOUR, 400 * DAY])
@pytest.mark.parametrize("compacted", [False, True])
def test_behind_the_clock_what_is_overdue_is_sent_at_once_and_in_order(
    world: World, down_ms: int, compacted: bool
) -> None:
    start_ms = world.now_ms
    world.admit([start_ms])
    world.drain()
    world.release()
    world.save()
    dues = sorted(start_ms + down_ms * i // 20 for i in range(1, 30))
    world.admit(dues[::-1])
    if compacted:
        world.attach_now(world.prepare_compact())
    world.advance(down_ms)
    world.restart()
    assert tick_of(world) <= Tick(start_ms, 1)
    overdue = [due for due in dues if due <= world.now_ms]
    assert [due for due, _ in world.drain(limit=7)] == overdue
    assert [due for due, _ in sleep_through(world)] == dues[len(overdue) :]


def started_ahead(world: World, ahead_ms: int) -> tuple[int, list[int]]:
    """The machine that sent until now dies; its successor's clock is `ahead_ms` behind. Returns the instant of the
    tick, and the instants of what waits still."""
    sent_ms = world.now_ms
    world.admit([sent_ms - 10, sent_ms - 10, sent_ms])
    left = [sent_ms + 1, sent_ms + AHEAD_MS // 2, sent_ms + AHEAD_MS + 500, sent_ms + 3 * DAY]
    world.admit(left)
    assert len(world.drain()) == 3
    world.release()
    world.save()
    world.manual.step_wall(-ahead_ms)
    world.restart()
    assert world.now_ms == sent_ms - ahead_ms
    return sent_ms, left


@pytest.mark.parametrize("ahead_ms", [1_500, HOUR, 40 * DAY])
def test_ahead_of_the_clock_it_sleeps_until_aligned(world: World, ahead_ms: int) -> None:
    sent_ms, left = started_ahead(world, ahead_ms)
    tick = tick_of(world)
    assert tick.tick_ms > world.now_ms - 1_000
    assert world.drain() == [], "nothing again, nothing early"
    world.check_sleep()
    world.advance(sent_ms - world.now_ms)
    assert world.drain() == [], "aligned, and what was sent stays sent"
    assert tick_of(world) == tick
    assert [due for due, _ in sleep_through(world)] == left


@pytest.mark.parametrize("ahead_ms", [1_500, HOUR, 40 * DAY])
def test_ahead_of_the_clock_what_is_promised_meanwhile_is_sent_at_its_instant(
    world: World, ahead_ms: int
) -> None:
    sent_ms, left = started_ahead(world, ahead_ms)
    tick = tick_of(world)
    between = [world.now_ms, world.now_ms + 1, sent_ms - ahead_ms // 3, sent_ms - 1]
    world.admit([*between, sent_ms + 2 * DAY])
    kept = [due for due, _ in sleep_through_to(world, sent_ms)]
    assert kept == between
    world.release()
    assert tick_of(world).tick_ms == tick.tick_ms, "how far the sending had come, it had come"
    assert [due for due, _ in sleep_through(world)] == sorted([*left, sent_ms + 2 * DAY])


def sleep_through_to(world: World, until_ms: int) -> list[tuple[int, int]]:
    """As a ticker, to the millisecond; stops at `until_ms`."""
    taken = []
    while True:
        taken += world.drain()
        world.check_sleep()
        upcoming = world.strategy.next_due_ms()
        if upcoming is None or upcoming >= until_ms:
            world.advance(until_ms - world.now_ms)
            return taken
        world.advance(upcoming - world.now_ms)


# -- who shares the mark ---------------------------------------------------------------------------------------


def test_who_keeps_nothing_holds_nobody_back(world: World) -> None:
    """Its horizon stands still while it sleeps, and another strategy's promises are settled all the same."""
    strategy = world.strategy
    assert isinstance(strategy, HourLog)
    world.drain()
    assert strategy.settled_before_ms > world.now_ms + 400 * DAY
    strategy._settling.move_mark(world.now_ms + DAY, world.reader.next_seq)
    assert strategy.settled().before_ms == world.now_ms + DAY
    world.admit([world.now_ms + 2 * DAY])
    strategy._settling.move_mark(world.now_ms + 3 * DAY, world.reader.next_seq)
    assert strategy.settled().before_ms == strategy.settled_before_ms == world.now_ms + 2 * DAY


def test_alone_it_marks_no_more_than_its_horizon(world: World) -> None:
    """A start begins at the mark: what is promised until then would be held in memory."""
    world.admit([world.now_ms, world.now_ms + DAY])
    world.drain()
    world.release()
    world.save()
    settled = world.checkpoints[-1].settled
    assert world.now_ms < settled.before_ms <= world.now_ms + AHEAD_MS
