"""`delay_levels` keeps the contract of all strategies; what is its own is tested besides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from tests.schedule.contract import MANY, Contract, Variant
from tests.schedule.level_rigs import LevelsRig, TrustsTheWheel
from tests.schedule.world import World

from timeball import limits
from timeball.limits import HOUR_MS
from timeball.log.checkpoint import LevelFacts
from timeball.message import SCHEDULE_TOPIC, Kind, build_rows, int64
from timeball.schedule.delay_levels.fifo import DelayLevels
from timeball.schedule.delay_levels.levels import LevelTable


class TestDelayLevels(Contract):
    """The suite, with memory for few bodies."""

    new_rig = LevelsRig


class TestDelayLevelsWithMemory(Variant):
    """The suite, with memory for all bodies: what is accepted for soon never leaves it."""

    new_rig = staticmethod(lambda: LevelsRig(gather_bytes=1 << 30))
    examples = 20


def test_who_trusts_old_bodies_after_a_step_back_is_caught() -> None:
    """A control by itself: chance seldom sets the clock back while something is near."""
    world = World(LevelsRig(TrustsTheWheel))
    with contextlib.closing(world), pytest.raises(AssertionError, match="out of order, or twice"):
        TestDelayLevels().test_the_wall_clock_is_set_back_while_something_is_near(world)


# -- its own ------------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    made = World(LevelsRig())
    yield made
    made.close()


def strategy_of(world: World) -> DelayLevels:
    assert isinstance(world.strategy, DelayLevels)
    return world.strategy


def test_what_waits_costs_no_memory(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS] * MANY)
    assert world.memory() == 0
    assert strategy_of(world).statistics()["waiting_rows"] == MANY
    world.advance(HOUR_MS - 1_000)
    world.drain()
    assert 0 < world.memory() < MANY // 10, "as many bodies as there is memory for"
    world.advance(1_000)
    assert len(world.drain()) == MANY
    world.release()
    assert world.memory() == 0
    assert {n: facts.settled for n, facts in strategy_of(world).state().items()} == {0: (), 1: (), 2: ()}


def test_what_is_accepted_for_soon_is_not_read_again() -> None:
    world = World(LevelsRig(gather_bytes=1 << 30))
    world.admit([world.now_ms + 5_000] * 100)
    world.reader_thread.is_open = False
    world.advance(5_000)
    assert len(world.take() or []) == 100
    assert not len(world.reader_thread)
    world.close()


def test_more_than_memory_is_due_at_once(world: World) -> None:
    dues = sorted(world.now_ms + 1 + i % 7 for i in range(MANY))
    world.admit(dues)
    world.advance(7)
    assert [due for due, _ in world.drain()] == dues


def test_a_clock_set_back_while_bodies_are_read(world: World) -> None:
    now_ms = world.now_ms
    world.admit([now_ms + 20_000] * 200)
    world.reader_thread.is_open = False
    world.advance(19_000)
    world.take()
    assert world.rig.is_busy(world.strategy)
    world.manual.step_wall(-60_000)
    world.take()
    world.reader_thread.is_open = True
    assert world.drain() == []
    world.advance(61_000)
    assert len(world.drain()) == 200


def test_after_a_step_back_what_was_accepted_later_than_now_is_due(world: World) -> None:
    """RocketMQ's correction: else it would wait for the length of the step besides."""
    strategy = strategy_of(world)
    short = LevelTable((10_000, 3 * limits.DELAY_MS_MAX, 3 * limits.DELAY_MS_MAX))
    strategy.table = short
    now_ms = world.now_ms
    world.admit([now_ms + 10_000])  # queue 0
    world.manual.step_wall(-limits.DAY_MS)
    rows = next(iter(_drained(world)))
    assert rows.column("seq").to_pylist() == [1]
    assert rows.column("due_ms").to_pylist() == [world.now_ms], "the record says when it counted as due"
    strategy.released(int64(rows.column("due_ms")), int64(rows.column("seq")))
    assert strategy.state()[0] == LevelFacts(1)
    world.model.waiting.clear()


def _drained(world: World) -> Iterator[pa.RecordBatch]:
    for _ in range(100):
        world.settle()
        rows = world.run(_due(world))
        if rows is not None:
            yield rows


async def _due(world: World) -> pa.RecordBatch | None:
    return world.strategy.due(world.now_ms, 1_000)


def restarted(world: World, state: dict[int, LevelFacts], *durations_ms: int) -> DelayLevels:
    """Another strategy over the same log and queues."""
    rig = world.rig
    assert isinstance(rig, LevelsRig)
    strategy = DelayLevels(
        world.reader, world.reader_thread, LevelTable(durations_ms or (HOUR_MS,) * 3), lambda: rig.indexes,
        ahead_ms=1_000, gather_bytes=1 << 20, on_change=world.wake, on_failure=world.failures.append,
    )  # fmt: skip
    strategy.restore(state, np.empty(0, np.int64))
    return strategy


def test_a_shorter_table_lets_nobody_wait_less(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS])
    world.strategy = restarted(world, strategy_of(world).state(), 1_000)
    assert world.drain() == []
    world.advance(HOUR_MS)
    assert len(world.drain()) == 1


def test_an_offset_outside_its_queue_is_put_right(world: World) -> None:
    seqs = world.admit([world.now_ms + HOUR_MS] * 6)
    states = [{}, {0: LevelFacts(1, ((0, 1), (9, 5))), 1: LevelFacts(-4), 2: LevelFacts(99)}]
    for state, expected in zip(states, [seqs, [seqs[1], seqs[3], seqs[4]]], strict=True):
        again = restarted(world, state)
        assert again.first_waiting_seq == expected[0]
        assert again.statistics()["waiting_rows"] == len(expected)


def test_somebodys_message_in_the_schedule_topic_is_not_delivered(world: World) -> None:
    """A topic of that name from before it was ours: its entries hold hashes of tags, which are instants of 1970."""
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
    world.strategy = again = restarted(world, {})
    world.admit([world.now_ms + 5] * 3)
    world.advance(5)
    assert len(world.drain()) == 3
    world.release()
    assert again.state()[0] == LevelFacts(2), "and it keeps nobody from being forgotten"


def test_it_closes_when_the_reader_is_done_also_with_what_nobody_wants(world: World) -> None:
    world.admit([world.now_ms + 20_000] * 10)
    world.reader_thread.is_open = False
    world.advance(19_000)
    world.take()
    world.manual.step_wall(-60_000)
    world.take()

    async def close() -> None:
        task = asyncio.ensure_future(strategy_of(world).close())
        await asyncio.sleep(0)
        assert not task.done()
        world.reader_thread.is_open = True
        while world.reader_thread.step():
            pass
        await task

    world.run(close())
