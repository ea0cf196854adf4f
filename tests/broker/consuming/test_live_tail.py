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
    """Read from a position as `LiveTail.read` does. The data are the ids of the messages (`ids`)."""
    data_and_next: tuple[bytes, Offsets] | None
    data_and_next = await world.broker.live_tail.read("orders", tags, offsets, wait_s, ids, ANONYMOUS)
    return data_and_next


async def begin(world: World, tags: str = "", offsets: list[int] | None = None) -> Offsets:
    """The position from which a tail reads: the ends of the queues, or `offsets`."""
    position: Offsets = world.broker.live_tail.begin("orders", tags, offsets, ANONYMOUS)
    return position


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
    data_and_next = await waiting
    assert data_and_next is not None
    data, next_position = data_and_next
    assert data == b"one"
    assert await read(world, next_position, wait_s=0) is None


@on_node()
async def test_a_tail_continues_at_its_position(world: World) -> None:
    at = await create_topic_and_begin(world)
    await world.broker.send(batch(600, unique_key=[f"k{i:03d}" for i in range(600)]))
    seen: list[str] = []
    while (data_and_next := await read(world, at, wait_s=0)) is not None:
        data, at = data_and_next
        seen += data.decode().split()
    assert sorted(seen) == [f"k{i:03d}" for i in range(600)]
    assert await begin(world, offsets=list(at)) == at
    assert await begin(world, offsets=[10**9] * 5) == at, "offsets beyond the ends, and of too many queues"
    # Queues that the position does not contain are read from their beginning.
    again = await read(world, await begin(world, offsets=[]), wait_s=0)
    assert again is not None
    assert len(again[0].split()) > 1


async def create_topic_and_begin(world: World) -> Offsets:
    """Create the topic with two queues. Returns the position at their ends."""
    await world.broker.create_topic("orders", 2)
    return await begin(world)


@on_node()
async def test_a_tail_skips_messages_that_the_filter_excludes(world: World) -> None:
    at = await create_topic_and_begin(world)
    await world.broker.send(batch(4, unique_key=["a", "b", "c", "d"], tag=["x", "y", "x", None]))
    data_and_next = await read(world, at, "x || z")
    assert data_and_next is not None
    data, next_position = data_and_next
    assert sorted(data.split()) == [b"a", b"c"]
    assert await read(world, next_position, "x || z", wait_s=0) is None
    assert await read(world, at, "z") == (b"", next_position), "no match, but the tail advances"


@on_node()
async def test_a_thousand_tails_at_one_position_share_one_read(world: World) -> None:
    at = await create_topic_and_begin(world)
    tails = [asyncio.ensure_future(read(world, at)) for _ in range(1_000)]
    await asyncio.sleep(0)
    tails[0].cancel()
    await world.broker.send(batch(unique_key=["one"]))
    cancelled, *results = await asyncio.gather(*tails, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    data = {result[0] for result in results if not isinstance(result, BaseException) and result is not None}
    assert data == {b"one"}
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
