"""Positions of sources: whose they are, and what they refuse."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.registry.idempotency import SourcePositions
from timeball.model import limits
from timeball.model.errors import Conflict, OverLimit
from timeball.model.wire import SourceStep


def move(world: World, caller: str, begin: dict[int, int], end: dict[int, int], source: str = "s") -> None:
    change = positions(world).moved(caller, SourceStep(source=source, begin=begin, end=end))
    world.broker.log.writer.append(change.rows)
    change.keep()


def positions(world: World) -> SourcePositions:
    return world.broker.tables.source_positions


@on_node()
async def test_a_step_that_does_not_begin_at_the_current_position_is_refused(world: World) -> None:
    move(world, "", {0: 5}, {0: 9})  # the first step begins anywhere
    move(world, "", {0: 9, 3: 100}, {0: 9, 3: 101})
    assert positions(world).of("", "s") == {0: 9, 3: 101}
    with pytest.raises(Conflict, match="stands at 101 in partition 3, this batch begins at 100"):
        move(world, "", {0: 9, 3: 100}, {0: 10, 3: 101})
    assert positions(world).of("", "s") == {0: 9, 3: 101}


@on_node()
async def test_sources_of_two_accounts_are_independent(world: World) -> None:
    move(world, "one", {0: 0}, {0: 9})
    assert positions(world).of("two", "s") == {} and positions(world).of("one", "other") == {}
    move(world, "two", {0: 0}, {0: 1})
    assert len(positions(world)) == 2 and positions(world).of("one", "s") == {0: 9}


@on_node()
async def test_too_many_sources_or_partitions_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SOURCES_MAX", 1)
    monkeypatch.setattr(limits, "SOURCE_PARTITIONS_MAX", 2)
    move(world, "", {0: 0}, {0: 9})
    with pytest.raises(OverLimit, match="1 sources are known"):
        move(world, "", {0: 0}, {0: 1}, "other")
    with pytest.raises(OverLimit, match="at most 2 partitions"):
        move(world, "", {1: 0, 2: 0}, {1: 1, 2: 1})


@on_node()
async def test_positions_survive_a_restart_from_a_snapshot(world: World) -> None:
    move(world, "", {0: 0}, {0: 9})
    await world.broker.log.writer.flushed()
    assert await asyncio.wait_for(world.node.maintenance.snapshot(), 60)  # type: ignore[union-attr]
    await world.stop()
    world.files.remove("checkpoint")
    await world.start()
    assert positions(world).of("", "s") == {0: 9}
