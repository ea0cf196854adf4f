"""Tests of `delay_levels` beyond the contract and the random walk of questions.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from tests.schedule.contract import MANY
from tests.schedule.rigs import AHEAD_MS, LevelsRig
from tests.schedule.stage import Built, Restart
from tests.schedule.world import World

from timeball.log.checkpoint import LevelFacts
from timeball.model import limits
from timeball.model.limits import HOUR_MS
from timeball.model.message import SCHEDULE_TOPIC, Kind, build_rows, int64
from timeball.schedule.delay_levels import DelayLevels, LevelsState
from timeball.schedule.levels import LevelTable
from timeball.schedule.locations import NOTHING
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes


@pytest.fixture
def world() -> Iterator[World]:
    world_of_levels = World(LevelsRig())
    yield world_of_levels
    world_of_levels.close()


def levels_of(world: World) -> DelayLevels:
    assert isinstance(world.backlog, DelayLevels)
    return world.backlog


def offsets(world: World) -> dict[int, int]:
    return {number: facts.offset for number, facts in levels_of(world).state(0).levels.items()}


def test_pending_messages_take_no_memory(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS] * MANY)
    assert world.memory() == 0
    assert levels_of(world).statistics() == {"waiting_rows": MANY}
    world.advance(HOUR_MS)
    assert len(world.drain()) == MANY
    world.release()
    world.advance(1)
    world.drain()
    world.save()
    assert world.memory() == 0
    assert sum(offsets(world).values()) == MANY


def test_message_due_soon_is_loaded_without_a_second_read() -> None:
    world = World(LevelsRig(gather_bytes=1 << 30))
    world.admit([world.now_ms + 5_000] * 100)
    world.reader_thread.is_open = False
    world.advance(5_000)
    assert len(world.take() or []) == 100
    assert not len(world.reader_thread)
    world.close()


def test_more_messages_due_at_once_than_fit_into_memory_are_all_released(world: World) -> None:
    dues = sorted(world.now_ms + 1 + i % 7 for i in range(MANY))
    world.admit(dues)
    world.advance(7)
    assert [due for due, _ in world.drain()] == dues


def test_clock_step_during_a_read_of_bodies_keeps_each_message_once(world: World) -> None:
    now_ms = world.now_ms
    world.admit([now_ms + 20_000] * 200)
    world.reader_thread.is_open = False
    world.advance(19_000)
    world.take()
    assert world.strategy.is_busy
    world.manual.step_wall(-60_000)
    world.take()
    world.reader_thread.is_open = True
    assert world.drain() == []
    world.advance(61_000)
    assert len(world.drain()) == 200


class ShortRig(LevelsRig):
    """Levels of which the first is ten seconds long."""

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        built = super().build(world, restart, outcomes)
        assert isinstance(built.backlog, DelayLevels)
        built.backlog.table = LevelTable((10_000, 3 * limits.DELAY_MS_MAX, 3 * limits.DELAY_MS_MAX))
        return built


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_after_a_step_back_no_message_waits_longer_than_its_level(loaded: bool, restarts: bool) -> None:
    """Otherwise it would also wait for the length of the step."""
    world = World(ShortRig())
    due_ms = world.now_ms + 10_000
    (seq,) = world.admit([due_ms])  # queue 0
    if loaded:
        world.advance(9_000)
        assert world.drain() == []
    else:
        world.take()
    world.manual.step_wall(-limits.DAY_MS)
    world.take()
    world.advance(9_999)
    assert world.drain() == []
    world.advance(1)
    rows = handed_out(world)
    assert rows.column("seq").to_pylist() == [seq]
    assert rows.column("due_ms").to_pylist() == [world.now_ms], "the record says when it counted as due"
    assert rows.column("from_due_ms").to_pylist() == [due_ms]
    world.model.in_flight.append({seq: world.model.waiting.pop(seq)})
    world.run(released(world, rows))
    if restarts:
        world.restart()
    assert world.drain() == []
    world.advance(2 * limits.DAY_MS)
    assert world.drain() == [], "not at its own instant either"
    assert offsets(world)[0] == 1
    world.close()


def handed_out(world: World) -> pa.RecordBatch:
    for _ in range(100):
        rows = world.run(taken(world))
        world.settle()
        if rows is not None:
            return rows
    raise AssertionError("nothing is due")


async def taken(world: World) -> pa.RecordBatch | None:
    return world.strategy.take_due(world.now_ms, 1_000)


async def released(world: World, rows: pa.RecordBatch) -> None:
    """Build the release of a message as older records state it: with the time at which it counted as due."""
    seq, due = int64(rows.column("seq")), int64(rows.column("due_ms"))
    await world._settle_rows(Kind.RELEASE, due, seq, lambda: world.strategy.released(seq))
    world.model.released |= {one: batch[one][0] for batch in world.model.in_flight for one in batch}
    world.model.in_flight.clear()


def test_cancelled_message_is_not_released_after_a_step_back() -> None:
    world = World(ShortRig())
    (seq,) = world.admit([world.now_ms + 10_000])
    world.advance(9_000)
    world.drain()
    assert world.cancel([seq]) == [True]
    world.manual.step_wall(-limits.DAY_MS)
    assert world.drain() == []
    assert offsets(world)[0] == 1
    world.close()


def restarted(world: World, state: dict[int, LevelFacts], *durations_ms: int) -> DelayLevels:
    """Make a second backlog over the same log and queues."""
    rig = world.rig
    assert isinstance(rig, LevelsRig)
    table = LevelTable(durations_ms or (HOUR_MS,) * 3)
    levels = DelayLevels(world.reader, table, lambda: rig.indexes, world.strategy.outcomes, ahead_ms=AHEAD_MS)
    levels.restore(LevelsState(state), NOTHING_SETTLED, NOTHING, world.now_ms)
    return levels


def test_shorter_level_table_releases_no_message_earlier(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS])
    again = restarted(world, levels_of(world).state(0).levels, 1_000)
    assert again.first_due_ms == world.now_ms + HOUR_MS
    again.clock_stepped(world.now_ms, lambda seq: np.zeros(len(seq), np.int64))
    assert again.first_due_ms == world.now_ms + HOUR_MS


def test_saved_offset_outside_its_queue_is_moved_into_it(world: World) -> None:
    seqs = world.admit([world.now_ms + HOUR_MS] * 6)
    states = [{}, {0: LevelFacts(1), 1: LevelFacts(-4), 2: LevelFacts(99)}]
    for state, expected in zip(states, [seqs, [seqs[1], seqs[3], seqs[4]]], strict=True):
        again = restarted(world, state)
        assert again.needed_seq(0) == expected[0]
        assert again.statistics() == {"waiting_rows": len(expected)}


def test_message_sent_to_the_schedule_topic_is_not_delivered(world: World) -> None:
    """The topic existed before it was reserved. Its entries contain tag hashes, which look like due times in 1970."""
    rig = world.rig
    assert isinstance(rig, LevelsRig)

    async def append() -> int:
        rows = build_rows(
            1,
            kind=int(Kind.MESSAGE),
            topic=SCHEDULE_TOPIC,
            queue_id=0,
            queue_offset=0,
            body=b"old",
            store_ms=1,
        )
        seq, durable = world.writer.append(rows)
        await durable
        return seq

    seq = world.run(append())
    rig.indexes[0].append(np.array([seq]), np.array([91]), np.array([94_756_344]))
    rig._next[0] += 1
    world.save()
    world.restart()
    world.admit([world.now_ms + 5] * 3)
    world.advance(5)
    assert len(world.drain()) == 3
    world.release()
    assert offsets(world)[0] == 2, "and it keeps nothing from being forgotten"
