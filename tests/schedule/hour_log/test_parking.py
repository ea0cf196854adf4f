"""The clock is set back, again and again, around what is near, what lies in files and what has been sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from tests.schedule.contract import FAST, UNTIL_CAUGHT, one_now
from tests.schedule.machine import Machine
from tests.schedule.moves import sleep_through
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.world import World

from timeball import limits
from timeball.schedule.hour_log.parking import Parking
from timeball.schedule.hour_log.pending import PendingFiles
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.wheel import Run, SecondWheel
from timeball.table.data_file import Position

DAY = limits.DAY_MS
# Enough to move the horizon back, and little enough to come back to it soon.
BACK_MS = st.integers(2 * AHEAD_MS, 10 * AHEAD_MS)
COMPACTS = st.sampled_from(["before", "after", "never"])
DUES_MS = st.lists(st.integers(0, 10 * AHEAD_MS), min_size=1, max_size=20)
MANY = 1_000


class SetBackMachine(Machine):
    """What any machine does, and between it the clock goes back around promises that have just been near."""

    @rule(dues_ms=DUES_MS, compacts=COMPACTS, releases=st.booleans(), back_ms=BACK_MS, on_ms=BACK_MS)
    def set_back(self, dues_ms: list[int], compacts: str, releases: bool, back_ms: int, on_ms: int) -> None:
        world = self.world
        world.admit([world.now_ms + ms for ms in dues_ms])
        if compacts == "before":
            self.compact()
        self.drain(1_000_000)
        world.advance(on_ms)
        self.drain(1_000_000)
        if releases:
            world.release()
        world.manual.step_wall(-back_ms)
        world.take()
        if compacts == "after":
            self.compact()

    def compact(self) -> None:
        attachment = self.world.prepare_compact()
        if attachment is not None:
            self.world.attach(attachment)
            self.written = None  # of a time before this compaction

    @rule(dues_ms=DUES_MS)
    def admit_near(self, dues_ms: list[int]) -> None:
        self.world.admit([self.world.now_ms + ms for ms in dues_ms])


def run(new_rig: Callable[[], HourLogRig], settings: hypothesis.settings) -> None:
    machine = type("SetBack", (SetBackMachine,), {"new_rig": staticmethod(new_rig)})
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.parametrize("gather_bytes", one_now([64 * 512, 1 << 30]))
def test_a_clock_that_goes_back_changes_nothing(gather_bytes: int) -> None:
    run(partial(HourLogRig, gather_bytes=gather_bytes), FAST)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_a_clock_that_goes_back_for_long() -> None:
    run(HourLogRig, hypothesis.settings(FAST, max_examples=1_000, stateful_step_count=50))


# -- negative controls -----------------------------------------------------------------------------------------


class SendsAgain(Parking):
    """Believes that nothing in the files has been sent."""

    def not_seen(self, run: Run, low: Position) -> Run:
        return run


class LosesThem(Parking):
    """Lets go of what is not near any more."""

    def park(self, wheel: SecondWheel, horizon: Position, was: Position) -> None:
        super().park(wheel, horizon, was)
        self._parked = SecondWheel()


class ParksForEver(Parking):
    """Leaves what is parked where it is."""

    def unpark(self, wheel: SecondWheel, horizon: Position) -> None:
        pass


class Forgets(Parking):
    """Forgets how far the horizon had been when it moves back once more."""

    def park(self, wheel: SecondWheel, horizon: Position, was: Position) -> None:
        super().park(wheel, horizon, was)
        self.highest = was


class PassesTooMuch(PendingFiles):
    """Believes that the files were looked through farther than they were."""

    def passed(self, due_ms: int) -> None:
        super().passed(due_ms + AHEAD_MS)


class WrongRig(HourLogRig):
    """A strategy with one wrong part."""

    def __init__(self, attribute: str, wrong: type[Parking] | type[PendingFiles]) -> None:
        class Wrong(HourLog):
            def __setattr__(self, name: str, value: object) -> None:
                if name == attribute:
                    value.__class__ = wrong
                super().__setattr__(name, value)

        super().__init__(Wrong)


WRONG: list[tuple[str, type[Parking] | type[PendingFiles]]] = [
    ("_parking", SendsAgain), ("_parking", LosesThem), ("_parking", ParksForEver),
    ("pending", PassesTooMuch),
]  # fmt: skip


@pytest.mark.parametrize("wrong_part", one_now(WRONG), ids=lambda part: part[1].__name__)
def test_a_wrong_part_is_caught(wrong_part: tuple[str, type[Parking] | type[PendingFiles]]) -> None:
    attribute, wrong = wrong_part
    with pytest.raises(AssertionError) as caught:
        run(partial(WrongRig, attribute, wrong), hypothesis.settings(UNTIL_CAUGHT, max_examples=2_000))
    assert caught.traceback[-1].path.name in ("stage.py", "world.py")


# -- what it is for --------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_promised_until_the_clock_has_caught_up_is_not_held_in_memory(
    world: World, restarts: bool
) -> None:
    world.admit([world.now_ms, world.now_ms + AHEAD_MS // 2])
    world.drain()
    world.release()
    world.save()
    world.manual.step_wall(-DAY)
    if restarts:
        world.restart()
    world.drain()
    world.admit([world.now_ms + AHEAD_MS * 2 + i * 10 for i in range(MANY)])
    world.drain()
    assert isinstance(world.strategy, HourLog)
    assert world.strategy.statistics()["wheel_rows"] <= 1, "near when the clock was ahead"
    if restarts:
        world.save()
        world.restart()
        world.drain()
        assert world.strategy.statistics()["wheel_rows"] < MANY // 10
    assert len(sleep_through(world)) == MANY + 1


def test_what_was_sent_from_a_file_before_the_clock_went_back_is_not_sent_again(world: World) -> None:
    start_ms = world.now_ms
    dues = [start_ms + ms for ms in range(0, 12 * AHEAD_MS, AHEAD_MS // 4)]
    world.admit(dues)
    world.attach_now(world.prepare_compact())
    world.advance(6 * AHEAD_MS)
    sent = world.drain()
    assert [due for due, _ in sent] == [due for due in dues if due <= world.now_ms]
    world.release(1)
    world.manual.step_wall(-5 * AHEAD_MS)
    assert world.drain() == []
    assert [due for due, _ in sleep_through(world)] == dues[len(sent) :]


def goes_back_twice(rig: HourLogRig) -> None:
    """The second time from lower down, while what was near the first time is parked, and lies in a file besides."""
    world = World(rig)
    (seq,) = world.admit([world.now_ms + 45_000])
    world.drain()
    world.advance(40_000)
    assert world.drain() == []
    world.manual.step_wall(-60_000)
    assert world.drain() == []
    world.attach_now(world.prepare_compact())
    world.advance(35_000)
    assert world.drain() == []
    world.manual.step_wall(-30_000)
    try:
        assert [kept for _, kept in sleep_through(world)] == [seq]
    finally:
        world.close()


def test_the_clock_goes_back_twice() -> None:
    goes_back_twice(HourLogRig())
    with pytest.raises(AssertionError, match=r"handed out while|twice"):
        goes_back_twice(WrongRig("_parking", Forgets))
