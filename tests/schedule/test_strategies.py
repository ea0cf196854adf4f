"""The settings choose the strategy and a saved state that it can use, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.schedule.rigs import HourLogRig
from tests.schedule.world import World

from timeball.log.checkpoint import Checkpoint, Facts
from timeball.model import limits
from timeball.model.config import Settings
from timeball.schedule import strategies
from timeball.schedule.backlog import Backlog
from timeball.schedule.level_cascade import LevelCascade
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes
from timeball.schedule.timer_wheel import TimerWheel

NONE = np.empty(0, np.int64)
SETTINGS = Settings(data=Path("in-memory"), timer_wheel_ms=limits.HOUR_MS)
WHEEL, CASCADE = (replace(SETTINGS, strategy=name) for name in ("timer_wheel", "level_cascade"))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


def build(world: World, settings: Settings) -> Backlog | None:
    return strategies.build(settings, world.files, world.reader, world.reader_thread, Outcomes())


def make_checkpoint(world: World, settings: Settings) -> Checkpoint:
    """Build the checkpoint of a broker that has just started with these settings, with one scheduled message."""
    backlog = build(world, settings)
    assert backlog is not None
    waiting = Waiting(np.array([world.now_ms + limits.HOUR_MS // 2]), np.array([1]), np.array([1]))
    backlog.restore(None, NOTHING_SETTLED, waiting, world.now_ms)
    for _, files in backlog.files_to_sync():
        for file in files:
            file.sync()
    facts = Facts(schedule=settings.strategy, kept=msgspec.to_builtins(backlog.state(world.now_ms)))
    backlog.close()
    # Encoded and decoded, as if it was read from the disk.
    return Checkpoint(msgspec.json.decode(msgspec.json.encode(facts), type=Facts), NONE, NONE)


def test_settings_choose_the_strategy(world: World) -> None:
    assert build(world, SETTINGS) is None, "no other backlog: the hour log always exists"
    assert isinstance(build(world, WHEEL), TimerWheel)
    assert isinstance(build(world, CASCADE), LevelCascade)


@pytest.mark.parametrize("settings", [WHEEL, CASCADE], ids=lambda settings: settings.strategy)
def test_saved_state_of_the_chosen_strategy_is_used(world: World, settings: Settings) -> None:
    checkpoint = make_checkpoint(world, settings)
    state = strategies.saved_state(settings, world.files, checkpoint)
    assert msgspec.json.encode(state) == msgspec.json.encode(checkpoint.facts.kept)


@pytest.mark.parametrize(
    "other",
    [SETTINGS, CASCADE, replace(WHEEL, timer_precision_ms=100), replace(WHEEL, timer_wheel_ms=limits.DAY_MS)],
    ids=["hour log", "cascade", "another precision", "another reach"],
)
def test_saved_state_of_another_strategy_is_not_used(world: World, other: Settings) -> None:
    assert strategies.saved_state(other, world.files, make_checkpoint(world, WHEEL)) is None


def test_missing_and_invalid_states_are_not_used(world: World) -> None:
    assert strategies.saved_state(WHEEL, world.files, None) is None
    for facts in (Facts(), Facts(schedule="timer_wheel"), Facts(schedule="timer_wheel", kept={"low": "x"})):
        assert strategies.saved_state(WHEEL, world.files, Checkpoint(facts, NONE, NONE)) is None


@pytest.mark.parametrize("damage", ["missing", "flipped"])
@pytest.mark.parametrize("settings", [WHEEL, CASCADE], ids=lambda settings: settings.strategy)
def test_a_state_whose_files_are_damaged_is_not_used(
    world: World, settings: Settings, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint(world, settings)
    assert strategies.saved_state(settings, world.files, checkpoint) is not None
    folder = "timer_wheel/00000001" if settings is WHEEL else "cascade/00000001"
    name = f"{folder}/{world.files.list_dir(folder)[0]}/00000000.log"
    if damage == "missing":
        world.files.remove(name)
    else:
        world.files.open(name).write_at(1, bytes([world.files.content(name)[1] ^ 1]))
    assert strategies.saved_state(settings, world.files, checkpoint) is None
    assert f"reason={name}" in caplog.text
