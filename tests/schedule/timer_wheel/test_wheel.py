"""The wheel beside a dictionary: each promise found once, in time, whatever was saved, cut, or done twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.crash_files import CrashFiles
from tests.schedule.contract import one_now

from timeball.errors import Corrupt, OutOfRange, OverLimit, SetupError
from timeball.files import RealFiles
from timeball.message import Int64Array
from timeball.schedule.timer_wheel.slots import Slots
from timeball.schedule.timer_wheel.timer_log import Entries
from timeball.schedule.timer_wheel.wheel import FOLDER, RING, Wheel, WheelState, check

SLOTS = Slots(10, reach=30, count=36)
START = 1_000
ALL = 1 << 40


def ints(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def sync(wheel: Wheel, files: CrashFiles) -> None:
    for folder, dirty in wheel.take_dirty():
        for file in dirty:
            file.sync()
        if dirty:
            files.sync_dir(folder)


class Machine(RuleBasedStateMachine):
    """A strategy reduced to what it does with its wheel.

    What is opened is held (`near`) or placed anew (`roll`), settled or not; a slot is delivered when nothing of it is
    held. After a crash all that waits is found again: in the wheel, or because it came after the checkpoint.
    """

    @initialize(arrivals_max=st.sampled_from([1, 5, 1_000]))
    def begin(self, arrivals_max: int) -> None:
        self.files = CrashFiles()
        self.arrivals_max = arrivals_max
        self.wheel = self._open(None)
        self.waiting: dict[int, tuple[int, int]] = {}  # seq -> (due_ms, at): in slots that are not open
        self.near: dict[int, tuple[int, int, int]] = {}  # seq -> (due_ms, at, slot that is held)
        self.settled: set[int] = set()
        self.next_at = 1
        self.saved: WheelState | None = None
        self.saved_at = 1

    def _open(self, state: WheelState | None) -> Wheel:
        return Wheel(self.files, SLOTS, state, first_slot=START, arrivals_max=self.arrivals_max)

    @rule(ahead=st.lists(st.one_of(st.integers(-50, 400), st.integers(0, 5_000)), min_size=1, max_size=12))
    def admit(self, ahead: list[int]) -> None:
        dues = [max(0, self.wheel.bound * SLOTS.precision_ms + each) for each in ahead]
        seqs = list(range(self.next_at, self.next_at + len(dues)))
        self.next_at += len(dues)
        self._keep([(due, seq, seq) for due, seq in zip(dues, seqs, strict=True)])

    def _keep(self, promises: list[tuple[int, int, int]]) -> None:
        due, seq, at = (
            (ints(list(column)) for column in zip(*promises, strict=True)) if promises else [ints([])] * 3
        )
        for is_open, (each_due, each_seq, each_at) in zip(
            self.wheel.is_open(due).tolist(), promises, strict=True
        ):
            if is_open:
                slot = max(each_due // SLOTS.precision_ms, self.wheel.low)
                self.near[each_seq] = (each_due, each_at, slot)
            else:
                self.waiting[each_seq] = (each_due, each_at)
        self.wheel.keep(due, seq, at)

    @rule(slots=st.integers(0, 50), rows_max=st.sampled_from([1, 5, ALL]))
    def open(self, slots: int, rows_max: int) -> None:
        found = self.wheel.walk(self.wheel.open(self.wheel.bound + slots, rows_max))
        self._sort_out(found)

    def _sort_out(self, found: Entries) -> None:
        columns = (getattr(found, name).tolist() for name in ("index", "slot", "due_ms", "seq", "at"))
        rolled = []
        for index, slot, due, seq, at in zip(*columns, strict=True):
            if seq in self.settled:
                continue
            assert self.waiting.pop(seq, None) == (due, at), f"seq {seq} is found and does not wait there"
            if self.wheel.is_open(ints([due]))[0]:
                self.near[seq] = (due, at, slot)
            else:
                rolled.append((due, seq, self.next_at))
                self.next_at += 1
                self.wheel.gone(ints([index]))
        self._keep(rolled)

    @precondition(lambda self: self.near or self.waiting)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.near | self.waiting)))
        self.near.pop(seq, None)
        self.waiting.pop(seq, None)
        self.settled.add(seq)

    @rule()
    def release_all(self) -> None:
        self.settled |= set(self.near)
        self.near.clear()

    @rule()
    def deliver(self) -> None:
        self.wheel.deliver(min([slot for _, _, slot in self.near.values()], default=self.wheel.bound))

    @rule()
    def save(self) -> None:
        sync(self.wheel, self.files)
        self.saved, self.saved_at = self.wheel.state(), self.next_at
        assert self.wheel.arrival_rows == 0

    @rule()
    def fail_to_save(self) -> None:
        self.wheel.take_dirty()
        self.wheel.unsynced()

    @precondition(lambda self: self.saved is not None)
    @rule(seed=st.none() | st.integers(0, 1_000), ahead=st.integers(0, 100))
    def crash(self, seed: int | None, ahead: int) -> None:
        assert self.saved is not None
        self.wheel.close()
        if seed is not None:
            self.files = self.files.crash(seed)
        check(self.files, SLOTS, self.saved)
        self.wheel = self._open(self.saved)
        open_ = self.waiting | {seq: (due, at) for seq, (due, at, _) in self.near.items()}
        since = {seq: place for seq, place in open_.items() if place[1] >= self.saved_at}
        self.wheel.gone_by_seq(ints([seq for seq, (_, at) in since.items() if at != seq]))
        self.waiting = {seq: place for seq, place in open_.items() if seq not in since}
        self.near = {}
        self._sort_out(self.wheel.reopen())
        self._keep([(due, seq, at) for seq, (due, at) in sorted(since.items(), key=lambda item: item[1][1])])

    @rule(slots=st.integers(0, 50))
    def crash_after_a_roll(self, slots: int) -> None:
        """What chance would hit too seldom: it stands in two places, and only one of them counts."""
        self.admit([2 * SLOTS.reach * SLOTS.precision_ms])
        self.save()
        self.open(SLOTS.reach, ALL)
        self.crash(None, 0)
        self.open(slots, ALL)

    @rule()
    def begin_anew(self) -> None:
        """As with another precision: all that waits is told, and the old files are gone."""
        self.wheel.close()
        open_ = self.waiting | {seq: (due, at) for seq, (due, at, _) in self.near.items()}
        self.wheel = self._open(None)
        self.waiting, self.near, self.saved = {}, {}, None
        self._keep([(due, seq, at) for seq, (due, at) in sorted(open_.items(), key=lambda item: item[1][1])])

    @invariant()
    def wakes_in_time(self) -> None:
        if not hasattr(self, "wheel"):
            return
        first, due = self.wheel.first_slot(), [due for due, _ in self.waiting.values()]
        assert not due or (first is not None and first <= min(due) // SLOTS.precision_ms)
        assert self.wheel.rows >= len(self.waiting)

    @invariant()
    def the_log_keeps_what_is_needed(self) -> None:
        if hasattr(self, "wheel"):
            places = [at for _, at in self.waiting.values()] + [at for _, at, _ in self.near.values()]
            first = self.wheel.first_at
            assert not places or (first is not None and first <= min(places))


FAST = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
# Nothing is shrunk: that it fails is all we want to know.
UNTIL_CAUGHT = settings(
    FAST,
    max_examples=400,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
)


def test_each_promise_is_found_once() -> None:
    run_state_machine_as_test(Machine, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_each_promise_is_found_once_at_length() -> None:
    run_state_machine_as_test(Machine, settings=settings(FAST, max_examples=1_500))


class NotPushed(Machine):
    """The control: the ring of before is missed."""

    def crash(self, seed: int | None, ahead: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wheel, "_push_links", lambda self: None)
            super().crash(seed, ahead)


class NotMarked(Machine):
    """The control: what was moved after the checkpoint is found where it was."""

    def crash(self, seed: int | None, ahead: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wheel, "gone_by_seq", lambda self, seq: 0)
            super().crash(seed, ahead)


class NotReopened(Machine):
    """The control: what was opened and not delivered is forgotten."""

    def crash(self, seed: int | None, ahead: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wheel, "reopen", lambda self: self._log.in_slots(0, 0))
            super().crash(seed, ahead)


# A rule is found by its name in the class: the overriding method must be one as well.
for control in (NotPushed, NotMarked, NotReopened):
    control.crash = precondition(lambda self: self.saved is not None)(  # type: ignore[method-assign]
        rule(seed=st.none() | st.integers(0, 1_000), ahead=st.integers(0, 100))(control.crash)
    )


@pytest.mark.parametrize("control", one_now([NotPushed, NotMarked, NotReopened]), ids=lambda c: c.__name__)
def test_a_wheel_that_believes_its_files_is_noticed(control: type[Machine]) -> None:
    # Whatever lies behind the durable links may be no link at all.
    with pytest.raises((AssertionError, OutOfRange, Corrupt)):
        run_state_machine_as_test(control, settings=UNTIL_CAUGHT)


# ---- one by one --------------------------------------------------------------------------------------------


def test_arrivals_wait_in_memory_and_are_saved_with_the_next_checkpoint() -> None:
    files = CrashFiles()
    wheel = Wheel(files, SLOTS, None, first_slot=START)
    for seq in range(1, 101):
        wheel.keep(ints([START * 10 + 50]), ints([seq]), ints([seq]))
    assert (wheel.arrival_rows, wheel.rows, wheel.first_slot()) == (100, 100, START + 5)
    assert wheel.rows_in(ints([START + 4, START + 5])).tolist() == [0, 100]
    sync(wheel, files)
    assert (wheel.arrival_rows, wheel.rows, wheel.first_slot()) == (0, 100, START + 5)
    assert wheel.rows_in(ints([START + 4, START + 5])).tolist() == [0, 100]
    assert wheel.state().log.links == (0, 1), "one link for all that came alone"


@pytest.mark.parametrize("call", range(1, 12))
def test_on_a_full_disk_arrivals_wait_in_memory(call: int) -> None:
    files = CrashFiles()
    wheel = Wheel(files, SLOTS, None, first_slot=START)
    wheel.keep(ints([START * 10 + 50] * 3), ints([1, 2, 3]), ints([1, 2, 3]))
    files.fail_at(files.calls + call, OverLimit("disk full"), forever=True)
    try:
        wheel.take_dirty()
    except OverLimit:
        assert (wheel.arrival_rows, wheel.rows, wheel.first_slot()) == (3, 3, START + 5)
        files.heal()
    sync(wheel, files)
    again = Wheel(files, SLOTS, wheel.state(), first_slot=START)
    assert (again.reopen().seq.tolist(), again.rows) == ([], 3)
    assert again.walk(again.open(START + 6, ALL)).seq.tolist() == [1, 2, 3]
    assert again._log.in_slots(0, ALL).seq.tolist() == [1, 2, 3], "once"


def test_a_state_and_the_files_of_another_shape_do_not_fit() -> None:
    files = CrashFiles()
    wheel = Wheel(files, SLOTS, None, first_slot=START)
    wheel.keep(ints([START * 10]), ints([1]), ints([1]))
    state = wheel.state()
    check(files, SLOTS, state)
    for other in (Slots(1, 30, 36), Slots(10, 31, 36), Slots(10, 30, 37)):
        with pytest.raises(SetupError, match=r"--timer-wheel-ms .* has changed"):
            check(files, other, state)


def test_each_start_makes_the_ring() -> None:
    """So whatever has become of it, it hides no promise."""
    files = CrashFiles()
    wheel = Wheel(files, SLOTS, None, first_slot=START)
    wheel.keep(ints([START * 10, START * 10 + 50]), ints([1, 2]), ints([1, 2]))
    sync(wheel, files)
    files.open(RING).write_at(0, bytes(SLOTS.count * 16))
    again = Wheel(files, SLOTS, wheel.state(), first_slot=START)
    assert again.walk(again.open(START + 6, ALL)).seq.tolist() == [1, 2]


def test_a_new_generation_removes_the_old_one_and_is_never_taken_for_it() -> None:
    files = CrashFiles()
    first = Wheel(files, SLOTS, None, first_slot=START)
    first.keep(ints([START * 10]), ints([1]), ints([1]))
    sync(first, files)
    state = first.state()
    second = Wheel(files, SLOTS, None, first_slot=START)
    second.keep(ints([START * 10]), ints([2]), ints([2]))
    with pytest.raises(Corrupt, match=r"links/00000000\.log is missing"):
        check(files, SLOTS, state)
    assert second.state().generation == state.generation + 1
    assert files.list_dir(f"{FOLDER}/00000001/links") == []


def test_strange_names_beside_it_are_left_alone(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    files.make_dir(f"{FOLDER}/lost+found")
    Wheel(files, SLOTS, None, first_slot=START).close()
    assert files.list_dir(FOLDER) == ["00000001", "lost+found", "ring"]


def test_a_slot_lost_to_a_later_one_is_found_without_the_ring() -> None:
    """The latch is stuck while the ring turns: the record of a slot that is not delivered is overwritten."""
    files = CrashFiles()
    wheel = Wheel(files, SLOTS, None, first_slot=START)
    stuck = START + 1
    wheel.keep(ints([stuck * 10]), ints([1]), ints([1]))
    wheel.walk(wheel.open(START + SLOTS.reach, ALL))
    wheel.deliver(stuck)
    wheel.keep(ints([(stuck + SLOTS.count) * 10]), ints([2]), ints([2]))
    sync(wheel, files)
    state = wheel.state()
    again = Wheel(files.crash(1), SLOTS, state, first_slot=START)
    assert again.reopen().seq.tolist() == [1]
    assert again.first_slot() == stuck + SLOTS.count
