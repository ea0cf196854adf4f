"""Pulling: what is visible from each offset on, fairly, within bounds; or a place to wait for it."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, column, on_node
from tests.broker.registry.test_topics import fresh, visible
from tests.crash.world import SECOND_MS, World

from timeball import limits
from timeball.broker.consuming import pull
from timeball.broker.consuming.pull import Waiters, locate
from timeball.broker.registry.topics import Topic
from timeball.errors import NotFound, OutOfRange, OverLimit


def topic_with(lengths: list[int]) -> Topic:
    """Queue q holds the numbers 1000 q, 1000 q + 1, …"""
    topics = fresh()
    topic = topics.ensure("a", len(lengths))
    for at, length in enumerate(lengths):
        if length:
            topics.place(visible(["a"] * length, [at] * length)).index(1_000 * at)
    return topic


# ---- what is taken ------------------------------------------------------------------------------------------


@settings(max_examples=60)
async def _waits(waiters: Waiters, *places: tuple[str, int | None]) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.ensure_future(waiters.wait(topic, 60, queue)) for topic, queue in places]
    await asyncio.sleep(0)
    return tasks


def test_a_queue_wakes_those_who_wait_for_it_and_no_others() -> None:
    async def scene() -> None:
        waiters = Waiters()
        mine, another, any_queue, elsewhere = await _waits(waiters, ("a", 1), ("a", 2), ("a", None), ("b", 1))
        waiters.wake_queues([("a", 1), ("c", 1)])
        assert await mine and await any_queue
        await asyncio.sleep(0)
        assert not another.done() and not elsewhere.done()
        waiters.wake(["a"])
        assert await another
        waiters.wake_queues([("b", 1)])
        assert await elsewhere
        assert not waiters._by_topic and not waiters._count

    asyncio.run(scene())


@given(st.data())
def test_rows_come_from_each_offset_on_in_order_and_as_many_as_asked(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    offsets = {q: data.draw(st.integers(0, n)) for q, n in enumerate(lengths) if data.draw(st.booleans())}
    rows = data.draw(st.integers(1, 40))
    taken = locate(topic_with(lengths), offsets, rows).tolist()
    available = {q: lengths[q] - offset for q, offset in offsets.items()}
    assert len(taken) == min(rows, sum(available.values()))
    for queue, offset in offsets.items():
        mine = [seq - 1_000 * queue for seq in taken if seq // 1_000 == queue]
        assert mine == list(range(offset, offset + len(mine)))
        # Fair: a queue gets its share, whatever the others hold.
        assert len(mine) >= min(available[queue], rows // len(offsets))


@pytest.mark.parametrize("rows", [0, -5])
def test_nothing_asked_is_nothing_taken(rows: int) -> None:
    assert len(locate(topic_with([3]), {0: 0}, rows)) == 0


def test_more_than_a_pull_holds_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULL_ROWS_MAX", 4)
    assert len(locate(topic_with([9]), {0: 0}, 1 << 40)) == 4


@pytest.mark.parametrize("offset", [-1, 4])
def test_an_offset_outside_is_told_what_is_kept(offset: int) -> None:
    with pytest.raises(OutOfRange, match=r"keeps offsets 0 to 3, not"):
        locate(topic_with([3]), {0: offset}, 1)


@pytest.mark.parametrize("queue", [-1, 1, 99])
def test_a_queue_that_is_not_there(queue: int) -> None:
    with pytest.raises(NotFound, match="it has 1"):
        locate(topic_with([3]), {queue: 0}, 1)


@on_node()
async def test_an_answer_has_a_size_and_at_least_one_row(world: World) -> None:
    await world.broker.send(batch(8, body=[bytes(1_000)] * 8, queue_id=pa.array([0] * 8, pa.int32())))
    with pytest.MonkeyPatch.context() as patch:
        for bytes_max, expected in ((1 << 20, 8), (5_000, 4), (1, 1)):
            patch.setattr(limits, "PULL_BYTES_MAX", bytes_max)
            rows = pull.read(world.broker.parts.reader, np.arange(1, 9))
            assert column(rows, "seq") == list(range(1, expected + 1))


# ---- waiting ------------------------------------------------------------------------------------------------


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_who_waits_is_woken_by_their_topic_alone() -> None:
    async def main() -> None:
        waiters = Waiters()
        first, second, other = (asyncio.ensure_future(waiters.wait(name, 60)) for name in "aab")
        await turns()
        waiters.wake(["a", "c"])
        assert await first and await second
        await turns()
        assert not other.done()
        waiters.wake(["b"])
        assert await other

    asyncio.run(main())


def test_who_waits_for_either_of_two_is_woken_by_the_first_and_gone_from_both() -> None:
    async def main() -> None:
        waiters = Waiters()
        either = asyncio.ensure_future(waiters.wait_any(["a", "b"], 60))
        await turns()
        waiters.wake(["b"])
        assert await either
        assert not waiters._by_topic and not waiters._count

    asyncio.run(main())


def test_who_waits_too_long_or_goes_away_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 2)

    async def main() -> None:
        waiters = Waiters()
        assert await waiters.wait("a", 0) is False
        for _ in range(3):  # or the third would find no room
            gone = asyncio.ensure_future(waiters.wait("a", 60))
            await turns()
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        staying = [asyncio.ensure_future(waiters.wait("a", 60)) for _ in range(2)]
        await turns()
        with pytest.raises(OverLimit, match="2 consumers wait already"):
            await waiters.wait("b", 60)
        waiters.wake("a")
        assert await asyncio.gather(*staying) == [True, True]

    asyncio.run(main())


@on_node()
async def test_a_long_pull_ends_with_the_release(world: World) -> None:
    """Without a poll in between: it is the commit that wakes."""
    key = (await world.send("a", [SECOND_MS]))[0]
    waiting = asyncio.ensure_future(world.broker.pull("a", {0: 0, 1: 0}, 10, 60_000))
    await turns()
    assert not waiting.done()
    await world.advance(SECOND_MS)
    assert column(await waiting, "unique_key") == [key]


@on_node()
async def test_a_pull_that_does_not_wait_says_that_there_is_nothing(world: World) -> None:
    await world.broker.create_topic("new")
    assert (await world.broker.pull("new", {0: 0}, 10, 0)).num_rows == 0


@on_node()
async def test_a_pull_makes_no_topic(world: World) -> None:
    with pytest.raises(NotFound, match="'mistyped' does not exist"):
        await world.broker.pull("mistyped", {0: 0}, 10, 0)
    assert (await world.broker.pull("mistyped", {0: 0}, 10, 1)).num_rows == 0
    assert "mistyped" not in world.broker.topics()


@on_node()
async def test_a_pull_that_comes_first_waits_for_the_message_that_makes_the_topic(world: World) -> None:
    waiting = asyncio.ensure_future(world.broker.pull("new", {0: 0}, 10, 60_000))
    await turns()
    await world.broker.send(batch(1, topic=["new"], queue_id=pa.array([1], pa.int32())))
    assert (await waiting).num_rows == 0, "told at once, so that it may ask for all queues"
    assert (await world.broker.pull("new", {0: 0, 1: 0}, 10, 0)).num_rows == 1


@on_node()
async def test_waiting_does_not_bring_a_deleted_topic_back(world: World) -> None:
    await world.broker.create_topic("a")
    waiting = asyncio.ensure_future(world.broker.pull("a", {0: 0}, 10, 60_000))
    await turns()
    world.broker.parts.topics.delete("a", world.broker.parts.writer.next_seq)
    world.broker.waiters.wake(["a"])
    with pytest.raises(NotFound, match="'a' does not exist"):
        await waiting
    assert world.broker.topics() == {}
