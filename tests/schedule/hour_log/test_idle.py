"""What waiting costs while nothing is near: files that are open, and calls that find nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.schedule.moves import sleep_through
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.world import World

from timeball import limits
from timeball.clock import ManualClock
from timeball.key_hash import hash_text
from timeball.schedule.hour_log import pending
from timeball.schedule.hour_log.store import HourLog
from timeball.schedule.wheel import Run
from timeball.table.layout import KEYS_FOLDER

HOUR, DAY = limits.HOUR_MS, limits.DAY_MS


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


# -- open files ------------------------------------------------------------------------------------------------

WINDOW_HOURS = 5  # those before the horizon's, its own, and those after it


def open_files(world: World) -> int:
    return world.strategy.statistics()["open_files"]


def hourly(world: World, hours: int) -> list[int]:
    """A file an hour, three promises in each; returns their instants."""
    start_ms = world.now_ms - world.now_ms % HOUR + HOUR
    dues = [start_ms + hour * HOUR + ms for hour in range(hours) for ms in (0, HOUR // 2, HOUR - 1)]
    world.admit(dues)
    world.attach_now(world.prepare_compact())
    assert len(world.live_files()) == hours
    return dues


def test_a_walk_through_many_hours_keeps_few_files_open(world: World) -> None:
    dues = hourly(world, 40)
    assert open_files(world) == 0, "far away, and written by others"
    seen, taken = set(), []
    while (upcoming := world.strategy.next_due_ms()) is not None:
        world.advance(upcoming - world.now_ms)
        taken += world.drain()
        seen.add(open_files(world))
        is_far = [
            pending.is_far(file, world.now_ms + AHEAD_MS) for file in world.live_files() if file.is_open
        ]
        assert not any(is_far)
    assert [due for due, _ in taken] == dues
    assert 0 < max(seen) <= WINDOW_HOURS


def test_look_ups_leave_no_file_open(world: World) -> None:
    hourly(world, 40)
    world.files.make_dir(KEYS_FOLDER)
    for number in range(0, 120, 7):
        hashes = hash_text(pa.array([f"body {number}"]))
        found = [file.find(hashes) for file in world.live_files()]
        assert sum(rows.num_rows for rows in found) == 1
    seq = world.live_files()[9].entry.min_seq
    assert sum(file.find_seqs(np.array([seq])).num_rows for file in world.live_files()) == 1
    assert open_files(world) == 0


@pytest.mark.parametrize("new_rig", [HourLogRig, partial(HourLogRig, gather_bytes=1 << 30)])
def test_after_a_year_down_files_are_opened_a_few_at_a_time(
    new_rig: Callable[[], HourLogRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "WINDOW_FILES_MAX", 4)
    most = 0
    load = HourLog._load

    def watched(self: HourLog, *args: Any) -> list[Run]:
        nonlocal most
        most = max(most, self.pending.open_files)  # what has just been surveyed is open still
        return load(self, *args)

    monkeypatch.setattr(HourLog, "_load", watched)
    world = World(new_rig())
    dues = hourly(world, 40)
    world.advance(365 * DAY)
    world.restart()
    assert [due for due, _ in world.drain()] == dues
    assert 0 < most <= 4 + WINDOW_HOURS
    world.drain()
    assert open_files(world) == 0
    world.close()


def test_without_closing_they_would_all_be_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the three above."""
    monkeypatch.setattr(pending, "OPEN_MS", 400 * DAY)
    hourly(world, 40)
    world.advance(50 * HOUR)
    world.drain()
    assert open_files(world) == 40


# -- no idle turning -------------------------------------------------------------------------------------------


class Counted(HourLog):
    """Writes down when it is asked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked_ms: list[int] = []

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self.asked_ms.append(now_ms)
        return super().due(now_ms, limit)


def asked_through(dues: list[int], compacted: bool) -> tuple[list[int], list[int]]:
    """Sleep through these delays as a ticker does; the instants promised, and those at which `due` was called."""
    world = World(HourLogRig(Counted))
    strategy = world.strategy
    assert isinstance(strategy, Counted)
    instants = sorted(world.now_ms + ms for ms in dues)
    world.admit(instants)
    if compacted:
        world.attach_now(world.prepare_compact())
    assert [due for due, _ in sleep_through(world)] == instants
    world.close()
    return instants, strategy.asked_ms


SPARSE = [
    [90 * DAY, 5 * 365 * DAY],
    [10 * DAY + day * 7 * DAY + day for day in range(50)],
    [30 * DAY + i for i in range(500)],
    [minute * 60_000 for minute in range(1, 200)],
]


@pytest.mark.parametrize("dues", SPARSE)
@pytest.mark.parametrize("compacted", [False, True])
def test_it_is_asked_for_what_it_keeps_and_not_for_the_time_between(dues: list[int], compacted: bool) -> None:
    instants, asked_ms = asked_through(dues, compacted)
    begin_ms, near_ms = asked_ms[0], 2 * AHEAD_MS
    for now_ms in asked_ms:
        assert now_ms <= begin_ms + near_ms or any(abs(now_ms - due) <= near_ms for due in instants), (
            f"asked {(now_ms - begin_ms) / HOUR:.3f} hours after the start, with nothing near"
        )
    # Each instant is asked for, and a gather goes ahead of it and one behind it; the budget cuts what is many.
    assert len(asked_ms) <= 2 * len(set(instants)) + 6 * len({due // 10_000 for due in instants}) + 20


def test_twice_the_time_is_no_more_ticks() -> None:
    counts = [len(asked_through([days * DAY * i for i in range(1, 20)], True)[1]) for days in (1, 10, 100)]
    assert max(counts) <= 1.5 * min(counts)


def test_without_what_was_learnt_it_turns_for_a_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: two promises in the file of one hour."""
    hour_ms = 30 * HOUR - ManualClock.wall % HOUR
    dues = [hour_ms + 60_000, hour_ms + 50 * 60_000]
    learnt = len(asked_through(dues, True)[1])
    monkeypatch.setattr(pending.PendingFiles, "learn", lambda *args: None)
    assert len(asked_through(dues, True)[1]) > 10 * learnt
