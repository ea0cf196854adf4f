"""What files bring behind the horizon is loaded at once, and until then nobody calls it settled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.world import World

from timeball.schedule.hour_log.store import HourLog


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


def hour_log(world: World) -> HourLog:
    assert isinstance(world.strategy, HourLog)
    return world.strategy


def test_what_comes_behind_the_horizon_is_not_settled_before_it_is_loaded(world: World) -> None:
    world.drain()
    due_ms = world.now_ms - 1_000
    bulk = world.prepare_bulk([due_ms, world.now_ms + AHEAD_MS * 3])
    world.reader_thread.is_open = False
    world.run(world.rig.attach(world.strategy, bulk))
    world.turn()
    assert len(hour_log(world)._behind) == 1
    assert hour_log(world).settled_before_ms == hour_log(world)._behind.first_due_ms == due_ms
    world.reader_thread.is_open = True
    world.settle()
    assert len(hour_log(world)._behind) == 0
    assert hour_log(world)._behind.first_due_ms is None
    assert [row.as_py() for row in world.strategy.due(world.now_ms, 10)["due_ms"]] == [due_ms]


def test_files_ahead_of_the_horizon_are_not_looked_into(world: World) -> None:
    world.drain()
    world.run(world.rig.attach(world.strategy, world.prepare_bulk([world.now_ms + AHEAD_MS * 3])))
    assert len(hour_log(world)._behind) == 0


def test_a_load_that_fails_is_told(world: World) -> None:
    world.drain()
    bulk = world.prepare_bulk([world.now_ms])
    world.reader_thread.is_open = False
    world.run(world.rig.attach(world.strategy, bulk))
    world.turn()
    file = hour_log(world).pending.all()[0]
    file.rows_between = lambda low, high: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    world.reader_thread.step()
    world.run(hour_log(world).quiet())
    world.reader_thread.is_open = True
    assert isinstance(world.failures.pop(), ZeroDivisionError)
