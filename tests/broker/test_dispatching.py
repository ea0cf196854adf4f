"""What a dispatcher brings is released once and never early; what he does not bring is released all the same."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.broker.on_node import on_node
from tests.broker.revoking.test_cancel import delivered, said
from tests.crash.world import SECOND_MS, World

from timeball import limits
from timeball.broker.dispatching import Brought
from timeball.errors import InvalidMessage, OutOfRange
from timeball.message import TABLE_SCHEMA

LEAD_MS = 30 * SECOND_MS
GRACE_MS = 2 * SECOND_MS
LEASE_MS = 600 * SECOND_MS


async def near(world: World, delays_ms: list[int]) -> tuple[list[str], pa.RecordBatch]:
    """Ids of promises that a dispatcher is to bring, half a minute on and then so many ms, and their rows."""
    world.broker.dispatching.lease(LEASE_MS)
    keys = await world.bulk("a", [LEAD_MS + ms for ms in delays_ms], 1)
    await pass_by(world, LEAD_MS - SECOND_MS)
    await world.until(lambda: dispatched(world) == len(keys), "all are left to the dispatcher")
    (file,) = world.broker.parts.hour_log.pending.all()
    rows = file.rows_between((0, 0), (1 << 62, 0)).combine_chunks().to_batches()[0]
    return keys, pa.RecordBatch.from_arrays(rows.select(TABLE_SCHEMA.names).columns, schema=TABLE_SCHEMA)


async def pass_by(world: World, ms: int) -> None:
    """Time passes, and the ticker looks at the clock."""
    world.clock.advance(ms)
    world.broker.ticker.wake()
    await asyncio.sleep(0)


def dispatched(world: World) -> int:
    return world.broker.schedule_statistics()["dispatched_rows"]


@on_node()
async def test_what_is_brought_is_released_once(world: World) -> None:
    keys, rows = await near(world, [0, 1, 2, 5_000])
    await pass_by(world, SECOND_MS + 2)
    release = world.broker.dispatching.release
    assert await release(rows.slice(1, 2)) == Brought(2, 0)
    assert await release(rows.slice(0, 3)) == Brought(1, 2)
    assert await release(pa.concat_batches([rows.slice(0, 3)] * 2)) == Brought(0, 6)
    assert sorted(await delivered(world)) == sorted(keys[:3])
    assert world.broker.status()["lateness"]["released"] == 3
    assert dispatched(world) == 1


@on_node()
async def test_what_is_brought_too_early_is_refused_whole(world: World) -> None:
    keys, rows = await near(world, [0, 1])
    await pass_by(world, SECOND_MS)
    with pytest.raises(OutOfRange, match="bring it then"):
        await world.broker.dispatching.release(rows)
    assert await delivered(world) == []
    await pass_by(world, 1)
    assert await world.broker.dispatching.release(rows) == Brought(2, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_what_he_does_not_bring_is_late_by_the_grace(world: World) -> None:
    keys, rows = await near(world, [0])
    await pass_by(world, SECOND_MS + GRACE_MS - 1)
    assert await delivered(world) == []
    await pass_by(world, 1)
    await world.settled()
    assert await delivered(world) == keys
    assert await world.broker.dispatching.release(rows) == Brought(0, 1)


@on_node()
async def test_rows_of_nobody_are_left(world: World) -> None:
    keys, rows = await near(world, [0, 0, 0])
    await pass_by(world, SECOND_MS)
    for name, change in (("seq", 1_000), ("due_ms", -1)):
        at = rows.schema.get_field_index(name)
        strange = rows.set_column(at, rows.schema.field(name), pc.add(rows[name], change))
        assert await world.broker.dispatching.release(strange) == Brought(0, 3)
    assert await delivered(world) == []
    assert await world.broker.dispatching.release(rows) == Brought(3, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_cancel_and_release_have_one_winner(world: World) -> None:
    keys, rows = await near(world, [0, 0, 0])
    await pass_by(world, SECOND_MS)
    assert await said(world, ids=keys[:1]) == ["cancelled"]
    brought, verdicts = await asyncio.gather(
        world.broker.dispatching.release(rows), said(world, ids=keys[1:])
    )
    assert brought.released == verdicts.count("released")
    assert brought.left == 1 + verdicts.count("cancelled")
    assert await said(world, ids=keys[:1]) == ["already_cancelled"]
    assert len(await delivered(world)) == brought.released


@on_node()
async def test_a_restart_repeats_nothing_and_loses_nothing(world: World) -> None:
    keys, rows = await near(world, [0, 0, 0])
    await pass_by(world, SECOND_MS)
    assert await world.broker.dispatching.release(rows.slice(1, 1)) == Brought(1, 0)
    await world.stop()
    await world.start()
    assert await world.broker.dispatching.release(rows.slice(1, 1)) == Brought(0, 1)
    await world.settled()
    assert sorted(await delivered(world)) == sorted(keys)
    assert await world.broker.dispatching.release(rows) == Brought(0, 3)


@on_node()
async def test_what_is_brought_waits_while_the_disk_is_behind(
    world: World,
) -> None:
    keys, rows = await near(world, [0] * 50)
    await pass_by(world, SECOND_MS)
    before, limits.RELEASE_ROWS_IN_FLIGHT_MAX = limits.RELEASE_ROWS_IN_FLIGHT_MAX, 10
    most = 0
    try:
        release = world.broker.dispatching.release
        tasks = [asyncio.create_task(release(rows.slice(at, 5))) for at in range(0, 50, 5)]
        while not all(task.done() for task in tasks):
            most = max(most, world.broker.parts.scheduler.in_flight_rows)
            await asyncio.sleep(0)
    finally:
        limits.RELEASE_ROWS_IN_FLIGHT_MAX = before
    assert 0 < most <= 15
    assert sum(task.result().released for task in tasks) == len(await delivered(world)) == len(keys)


@on_node()
async def test_a_topic_that_cannot_be_costs_nothing(world: World) -> None:
    keys, rows = await near(world, [0])
    await pass_by(world, SECOND_MS)
    strange = rows.set_column(
        rows.schema.get_field_index("topic"), "topic", pa.array(["no/topic"] * len(keys))
    )
    with pytest.raises(InvalidMessage, match="no/topic"):
        await world.broker.dispatching.release(strange)
    assert await world.broker.dispatching.release(rows) == Brought(1, 0)


@on_node(strategy="timer_wheel")
async def test_with_another_schedule_what_lies_in_files_is_brought(world: World) -> None:
    keys, rows = await near(world, [0, 1])
    await pass_by(world, SECOND_MS + 1)
    assert await world.broker.dispatching.release(rows) == Brought(2, 0)
    assert sorted(await delivered(world)) == sorted(keys)


@on_node()
async def test_a_lease_ends_by_a_word(world: World) -> None:
    keys, _ = await near(world, [0])
    world.broker.dispatching.lease(0)
    assert dispatched(world) == 0
    await world.until(lambda: world.broker.schedule_statistics()["wheel_rows"] == 1, "it is loaded")
    await world.advance(SECOND_MS)
    assert await delivered(world) == keys
    assert world.broker.schedule_statistics()["fetched_rows"] == 0


@on_node()
async def test_what_comes_back_to_a_group_is_brought_however_long_its_names_are(world: World) -> None:
    """What a group has received waits for its retry topic, whose name may be longer than a user's."""
    _, rows = await near(world, [0])
    await pass_by(world, SECOND_MS)
    name = f"%RETRY%{'g' * limits.GROUP_BYTES_MAX}_{'t' * limits.TOPIC_BYTES_MAX}"
    for topic, allowed in ((name + "x", False), (name, True)):
        renamed = rows.set_column(
            rows.schema.get_field_index("topic"), "topic", pa.array([topic], rows.schema.field("topic").type)
        )
        if allowed:
            assert await world.broker.dispatching.release(renamed) == Brought(1, 0)
        else:
            with pytest.raises(InvalidMessage, match="topic"):
                await world.broker.dispatching.release(renamed)
    assert name in world.broker.topics()
