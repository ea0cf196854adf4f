"""Live tails of a topic on a whole node: from the end, from a position, with a filter, and many at once."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from tests.broker.admin.test_push_changes import principal
from tests.broker.on_node import batch, column, on_node
from tests.crash.world import HOUR_MS, World

from timeball.broker.consuming.pull import Offsets
from timeball.model.access import ANONYMOUS
from timeball.model.errors import Forbidden, NotFound

LONG_S = 30.0


def ids(rows: pa.RecordBatch, offsets: Offsets) -> tuple[bytes, None]:
    """An encoding that identifies the messages, and leaves none out."""
    return " ".join(column(rows, "unique_key")).encode(), None


async def read(
    world: World, offsets: Offsets, tags: str = "", wait_s: float = LONG_S
) -> tuple[bytes, Offsets] | None:
    found: tuple[bytes, Offsets] | None
    found = await world.broker.live_tail.read("orders", tags, offsets, wait_s, ids, ANONYMOUS)
    return found


async def begin(world: World, tags: str = "", offsets: list[int] | None = None) -> Offsets:
    begun: Offsets = world.broker.live_tail.begin("orders", tags, offsets, ANONYMOUS)
    return begun


@on_node()
async def test_a_tail_shows_only_messages_that_become_visible_after_its_begin(world: World) -> None:
    await world.broker.send(batch(unique_key=["before"]))
    at = await begin(world)
    assert await read(world, at, wait_s=0) is None
    waiting = asyncio.ensure_future(read(world, at))
    await asyncio.sleep(0)
    await world.broker.send(batch(unique_key=["one"], delay_ms=[HOUR_MS]))
    assert not waiting.done()
    await world.advance(HOUR_MS)
    found = await waiting
    assert found is not None
    assert found[0] == b"one"
    assert await read(world, found[1], wait_s=0) is None


@on_node()
async def test_a_tail_continues_at_its_position(world: World) -> None:
    at = await create_topic_and_begin(world)
    await world.broker.send(batch(600, unique_key=[f"k{i:03d}" for i in range(600)]))
    seen: list[str] = []
    while (found := await read(world, at, wait_s=0)) is not None:
        data, at = found
        seen += data.decode().split()
    assert sorted(seen) == [f"k{i:03d}" for i in range(600)]
    assert await begin(world, offsets=list(at)) == at
    assert await begin(world, offsets=[10**9] * 5) == at  # beyond the end, of a topic that was made anew
    # Queues that the position does not know.
    again = await read(world, await begin(world, offsets=[]), wait_s=0)
    assert again is not None
    assert len(again[0].split()) > 1


async def create_topic_and_begin(world: World) -> Offsets:
    await world.broker.create_topic("orders", 2)
    return await begin(world)


@on_node()
async def test_a_tail_skips_messages_that_the_filter_excludes(world: World) -> None:
    at = await create_topic_and_begin(world)
    await world.broker.send(batch(4, unique_key=["a", "b", "c", "d"], tag=["x", "y", "x", None]))
    found = await read(world, at, "x || z")
    assert found is not None
    assert sorted(found[0].split()) == [b"a", b"c"]
    assert await read(world, found[1], "x || z", wait_s=0) is None
    none = await read(world, at, "z")
    assert none == (b"", found[1])


@on_node()
async def test_a_thousand_tails_at_one_position_share_one_read(world: World) -> None:
    at = await create_topic_and_begin(world)
    tails = [asyncio.ensure_future(read(world, at)) for _ in range(1_000)]
    await asyncio.sleep(0)
    tails[0].cancel()
    await world.broker.send(batch(unique_key=["one"]))
    found = await asyncio.gather(*tails, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert {one[0] for one in found[1:] if not isinstance(one, BaseException) and one is not None} == {b"one"}
    assert world.broker.live_tail.reads == 1


@on_node()
async def test_a_tail_ends_when_its_topic_or_permission_is_removed(world: World) -> None:
    at = await create_topic_and_begin(world)
    may = principal(topics={"orders": "SUB"})
    for caller in (principal(topics={"orders": "PUB"}), principal(topics={"news": "SUB"})):
        with pytest.raises(Forbidden):
            world.broker.live_tail.begin("orders", "", None, caller)
    assert world.broker.live_tail.begin("orders", "", None, may) == at
    waiting = asyncio.ensure_future(read(world, at))
    await asyncio.sleep(0)
    await world.broker.administration.delete_topic("orders", ANONYMOUS)
    with pytest.raises(NotFound):
        await waiting
