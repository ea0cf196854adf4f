"""Tests of `hour_log` beyond the contract and the random walk of questions.py, and of the release cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from tests.schedule.contract import FAST, UNTIL_CAUGHT
from tests.schedule.machine import Machine
from tests.schedule.moves import sleep_through
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.stage import Built, Restart
from tests.schedule.world import World

from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.key_hash import hash_text
from timeball.model.message import Kind, int64
from timeball.schedule import hour_log
from timeball.schedule.outcomes import NOTHING_SENT, Outcomes, ReleaseCursor
from timeball.schedule.scheduler import Scheduler
from timeball.table import layout
from timeball.table.key_index import TableKeys

HOUR, DAY = limits.HOUR_MS, limits.DAY_MS


# -- the release cursor after a restart -------------------------------------------------------------------------


class CursorRig(HourLogRig):
    """Saves the cursor in a checkpoint, and computes it at a restart from the release records since."""

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        self.outcomes = outcomes
        outcomes.cursor = self.compute_cursor(world, restart)
        return super().build(world, restart, outcomes)

    def state(self, state: Any) -> object:
        return self.outcomes.cursor

    def compute_cursor(self, world: World, restart: Restart) -> ReleaseCursor:
        cursor = NOTHING_SENT if restart.state is None else restart.state
        assert isinstance(cursor, ReleaseCursor)
        saved_seq = world.checkpoints[-1].seq if world.checkpoints else 1
        for rows in world.reader.rows(saved_seq, world.reader.next_seq, [Kind.RELEASE]):
            cursor = cursor.after(int64(rows.column("due_ms")))
        return cursor


class SavedOnly(CursorRig):
    """A wrong rig: it uses the checkpoint and ignores the later log."""

    def compute_cursor(self, world: World, restart: Restart) -> ReleaseCursor:
        return restart.state if isinstance(restart.state, ReleaseCursor) else NOTHING_SENT


class CountsTwice(CursorRig):
    """A wrong rig: it counts records again that the checkpoint has counted."""

    def compute_cursor(self, world: World, restart: Restart) -> ReleaseCursor:
        cursor = super().compute_cursor(world, restart)
        if world.checkpoints:
            for rows in world.reader.rows(world.reader.first_seq, world.checkpoints[-1].seq, [Kind.RELEASE]):
                cursor = cursor.after(int64(rows.column("due_ms")))
        return cursor


DUES_MS = st.lists(st.integers(0, 2_500), min_size=1, max_size=6)


class CursorMachine(Machine):
    """Random steps. The cursor must equal that computed from all releases so far."""

    @rule(saved_ms=DUES_MS, newer_ms=DUES_MS)
    def restart_with_a_newer_log(self, saved_ms: list[int], newer_ms: list[int]) -> None:
        self.send(saved_ms)
        self.world.save()
        self.send(newer_ms)
        self.restart(back=0, power_cut=None, unreported=False)

    def send(self, dues_ms: list[int]) -> None:
        self.world.admit([self.world.now_ms + ms for ms in dues_ms])
        self.world.advance(max(dues_ms))
        self.drain(1_000_000)
        self.world.release()

    @invariant()
    def cursor_counts_all_releases(self) -> None:
        sent = np.array(list(self.world.model.released.values()), np.int64)
        assert cursor_of(self.world) == NOTHING_SENT.after(sent)


def cursor_of(world: World) -> ReleaseCursor:
    return world.strategy.outcomes.cursor


def run_cursor_machine(new_rig: Callable[[], CursorRig], settings: hypothesis.settings) -> None:
    machine = type("Cursors", (CursorMachine,), {"new_rig": staticmethod(new_rig)})
    run_state_machine_as_test(machine, settings=settings)


def test_cursor_equals_that_of_all_release_rows() -> None:
    run_cursor_machine(CursorRig, FAST)


@pytest.mark.parametrize("wrong", [SavedOnly, CountsTwice])
def test_wrong_tick_is_caught(wrong: type[CursorRig]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_cursor_machine(wrong, UNTIL_CAUGHT)
    assert caught.traceback[-1].name == "cursor_counts_all_releases"


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows then make several files."""
    monkeypatch.setattr(layout, "FILE_ROWS", 1)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(CursorRig())
    yield world
    world.close()


def test_older_state_with_a_newer_log_repeats_no_release(world: World) -> None:
    """Four messages are due in one second. Two are released and one is in flight when the machine crashes."""
    second_ms = world.now_ms - world.now_ms % 1_000 + 2_000
    before = world.admit([second_ms - 700, second_ms - 600])
    of_second = world.admit([second_ms + ms for ms in (10, 20, 30, 900)])
    world.advance(second_ms - world.now_ms)
    assert [seq for _, seq in world.drain()] == before
    world.release()
    world.save()  # the older state
    saved = cursor_of(world)
    assert saved == ReleaseCursor(second_ms - 1_000, 2)
    world.advance(20)
    assert [seq for _, seq in world.drain()] == of_second[:2]
    world.release()
    assert cursor_of(world) == ReleaseCursor(second_ms, 2)
    world.advance(10)
    assert [seq for _, seq in world.drain()] == of_second[2:3]
    assert cursor_of(world) == ReleaseCursor(second_ms, 2), "handed out, not released"
    world.restart()
    assert world.checkpoints[-1].state == saved
    assert cursor_of(world) == ReleaseCursor(second_ms, 2), "computed from the log after the checkpoint"
    world.advance(1_000)
    assert [seq for _, seq in world.drain()] == of_second[2:]
    world.release()
    assert cursor_of(world) == ReleaseCursor(second_ms, 4)


def test_late_message_is_released_and_does_not_change_the_cursor(world: World) -> None:
    world.admit([world.now_ms])
    world.drain()
    world.release()
    world.save()
    cursor = cursor_of(world)
    (late,) = world.admit([world.now_ms - DAY])
    assert [seq for _, seq in world.drain()] == [late]
    world.release()
    assert cursor_of(world) == cursor
    world.restart()
    assert cursor_of(world) == cursor
    assert world.drain() == [], "its RELEASE row settles it"


# -- a restart after a pause, or with a clock that was set back ------------------------------------------------


@pytest.mark.parametrize("down_ms", [1_500, HOUR, 400 * DAY])
@pytest.mark.parametrize("compacted", [False, True])
def test_start_after_a_pause_releases_overdue_messages_at_once_and_in_order(
    world: World, down_ms: int, compacted: bool
) -> None:
    start_ms = world.now_ms
    world.admit([start_ms])
    world.drain()
    world.release()
    world.save()
    due_times = sorted(start_ms + down_ms * i // 20 for i in range(1, 30))
    world.admit(due_times[::-1])
    if compacted:
        world.attach_now(world.prepare_compact())
    world.advance(down_ms)
    world.restart()
    assert cursor_of(world) <= ReleaseCursor(start_ms, 1)
    overdue = [due for due in due_times if due <= world.now_ms]
    assert [due for due, _ in world.drain(limit=7)] == overdue
    assert [due for due, _ in sleep_through(world)] == due_times[len(overdue) :]


def restart_with_clock_behind(world: World, ahead_ms: int) -> tuple[int, list[int]]:
    """Restart on a node whose clock is `ahead_ms` behind. Returns the time before and the pending due times."""
    begin_ms = world.now_ms
    world.admit([begin_ms - 10, begin_ms - 10, begin_ms])
    pending = [begin_ms + 1, begin_ms + AHEAD_MS // 2, begin_ms + AHEAD_MS + 500, begin_ms + 3 * DAY]
    world.admit(pending)
    assert len(world.drain()) == 3
    world.release()
    world.save()
    world.manual.step_wall(-ahead_ms)
    world.restart()
    assert world.now_ms == begin_ms - ahead_ms
    return begin_ms, pending


@pytest.mark.parametrize("ahead_ms", [1_500, HOUR, 40 * DAY])
def test_start_with_a_cursor_ahead_of_the_clock_repeats_no_release(world: World, ahead_ms: int) -> None:
    begin_ms, pending = restart_with_clock_behind(world, ahead_ms)
    cursor = cursor_of(world)
    assert cursor.tick_ms > world.now_ms - 1_000
    assert world.drain() == [], "no message is repeated or early"
    world.check_sleep()
    world.advance(begin_ms - world.now_ms)
    assert world.drain() == [], "no release is repeated"
    assert cursor_of(world) == cursor
    assert [due for due, _ in sleep_through(world)] == pending


@pytest.mark.parametrize("ahead_ms", [1_500, HOUR, 40 * DAY])
def test_with_a_cursor_ahead_of_the_clock_new_messages_are_released_on_time(
    world: World, ahead_ms: int
) -> None:
    begin_ms, pending = restart_with_clock_behind(world, ahead_ms)
    cursor = cursor_of(world)
    new_due_times = [world.now_ms, world.now_ms + 1, begin_ms - ahead_ms // 3, begin_ms - 1]
    world.admit([*new_due_times, begin_ms + 2 * DAY])
    released = [due for due, _ in sleep_through_to(world, begin_ms)]
    assert released == new_due_times
    world.release()
    assert cursor_of(world).tick_ms == cursor.tick_ms, "the cursor does not move back"
    assert [due for due, _ in sleep_through(world)] == sorted([*pending, begin_ms + 2 * DAY])


def sleep_through_to(world: World, until_ms: int) -> list[tuple[int, int]]:
    """Sleep and drain as a ticker does, to the millisecond, until `until_ms`."""
    taken = []
    while True:
        taken += world.drain()
        world.check_sleep()
        upcoming = world.strategy.next_due_ms()
        if upcoming is None or upcoming >= until_ms:
            world.advance(until_ms - world.now_ms)
            return taken
        world.advance(upcoming - world.now_ms)


# -- files with overdue messages -------------------------------------------------------------------------------


def test_overdue_messages_of_a_new_file_are_not_settled_before_it_is_opened(world: World) -> None:
    world.drain()
    due_ms = world.now_ms - 1_000
    world.reader_thread.is_open = False
    world.attach_now(world.prepare_bulk([due_ms, world.now_ms + AHEAD_MS * 3]))
    world.take()
    world.turn()
    assert world.strategy.settled_before_ms == due_ms
    world.reader_thread.is_open = True
    assert [due for due, _ in world.drain()] == [due_ms]


def test_files_due_far_ahead_are_not_opened(world: World) -> None:
    world.drain()
    world.attach_now(world.prepare_bulk([world.now_ms + AHEAD_MS * 3]))
    world.take()
    world.turn()
    assert not world.strategy.is_busy


def test_file_is_not_removed_before_its_overdue_messages_are_opened(world: World) -> None:
    world.drain()
    world.attach_now(world.prepare_bulk([world.now_ms - 5, world.now_ms + DAY]))
    world.attach_now(world.prepare_rewrite())
    assert len(world.drain()) == 1
    world.advance(DAY)
    assert len(world.drain()) == 1


def test_failed_opening_is_reported(world: World) -> None:
    world.drain()
    world.attach_now(world.prepare_bulk([world.now_ms]))
    world.live_files()[0].positions_between = lambda low, high: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    world.reader_thread.is_open = False
    world.take()
    world.turn()
    world.reader_thread.is_open = True
    world.reader_thread.step()
    for _ in range(3):
        world.turn()
    assert isinstance(world.failures.pop(), ZeroDivisionError)


# -- open files ------------------------------------------------------------------------------------------------

WINDOW_HOURS = 5  # files within two hours of the present one, and that one


def open_files(world: World) -> int:
    return world.backlog.statistics()["open_files"]


def attach_hourly_files(world: World, hours: int) -> list[int]:
    """Attach one file per hour with three scheduled messages each. Returns their due times."""
    start_ms = world.now_ms - world.now_ms % HOUR + HOUR
    due_times = [start_ms + hour * HOUR + ms for hour in range(hours) for ms in (0, HOUR // 2, HOUR - 1)]
    world.admit(due_times)
    world.attach_now(world.prepare_compact())
    assert len(world.live_files()) == hours
    return due_times


def test_passing_many_hours_keeps_few_files_open(world: World) -> None:
    due_times = attach_hourly_files(world, 40)
    assert open_files(world) == 0, "the files are due far ahead"
    counts, taken = set(), []
    while (upcoming := world.strategy.next_due_ms()) is not None:
        world.advance(upcoming - world.now_ms)
        taken += world.drain()
        counts.add(open_files(world))
    assert [due for due, _ in taken] == due_times
    assert 0 < max(counts) <= WINDOW_HOURS


def test_look_ups_leave_no_file_open(world: World) -> None:
    attach_hourly_files(world, 40)
    keys, live = TableKeys(world.files), world.backlog.pending.live
    for number in range(0, 120, 7):
        assert len(keys.find_keys(live, hash_text(pa.array([f"body {number}"])))) == 1
    seq = world.live_files()[9].entry.min_seq
    assert sum(file.find_seqs(np.array([seq])).num_rows for file in world.live_files()) == 1
    assert open_files(world) == 0


def test_without_closing_all_files_would_be_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests of open files above."""
    monkeypatch.setattr(hour_log, "OPEN_MS", 400 * DAY)
    attach_hourly_files(world, 40)
    world.advance(50 * HOUR)
    world.drain()
    assert open_files(world) == 40


# -- no calls without work -------------------------------------------------------------------------------------------


class CallRecorder(Scheduler):
    """A scheduler that records when `take_due` is called."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.call_times_ms: list[int] = []

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self.call_times_ms.append(now_ms)
        return super().take_due(now_ms, limit)


def sleep_and_record_calls(due_times: list[int], compacted: bool) -> tuple[list[int], list[int]]:
    """Sleep through these delays as a ticker does. Returns the due times, and the times of the calls."""
    world = World(HourLogRig(scheduler=CallRecorder))
    strategy = world.strategy
    assert isinstance(strategy, CallRecorder)
    due_times_ms = sorted(world.now_ms + ms for ms in due_times)
    world.admit(due_times_ms)
    if compacted:
        world.attach_now(world.prepare_compact())
    assert [due for due, _ in sleep_through(world)] == due_times_ms
    world.close()
    return due_times_ms, strategy.call_times_ms


SPARSE = [
    [90 * DAY, 5 * 365 * DAY],
    [10 * DAY + day * 7 * DAY + day for day in range(50)],
    [30 * DAY + i for i in range(500)],
    [minute * 60_000 for minute in range(1, 200)],
]


@pytest.mark.parametrize("due_times", SPARSE)
@pytest.mark.parametrize("compacted", [False, True])
def test_scheduler_works_only_near_due_times(due_times: list[int], compacted: bool) -> None:
    due_times_ms, call_times_ms = sleep_and_record_calls(due_times, compacted)
    begin_ms, near_ms = call_times_ms[0], 2 * AHEAD_MS
    for now_ms in call_times_ms:
        assert now_ms <= begin_ms + near_ms or any(abs(now_ms - due) <= near_ms for due in due_times_ms), (
            f"called {(now_ms - begin_ms) / HOUR:.3f} hours after the start, with nothing near"
        )
    # Each due time needs a call, with a gather before it and one after it. Many messages need several gathers.
    assert (
        len(call_times_ms)
        <= 2 * len(set(due_times_ms)) + 6 * len({due // 10_000 for due in due_times_ms}) + 20
    )


def test_ticks_do_not_grow_with_the_time_between_messages() -> None:
    counts = [
        len(sleep_and_record_calls([days * DAY * number for number in range(1, 20)], True)[1])
        for days in (1, 10, 100)
    ]
    assert max(counts) <= 1.5 * min(counts)


def test_without_the_next_due_time_of_files_ticks_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: two scheduled messages in the file of one hour."""
    hour_ms = 30 * HOUR - ManualClock.wall % HOUR
    due_times = [hour_ms + 60_000, hour_ms + 50 * 60_000]
    calls = len(sleep_and_record_calls(due_times, True)[1])
    monkeypatch.setattr("timeball.table.data_file.DataFile.first_due_at_or_after", lambda *args: None)
    assert len(sleep_and_record_calls(due_times, True)[1]) > 10 * calls
