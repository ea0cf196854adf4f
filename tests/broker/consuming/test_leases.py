"""All leases: where a group begins, what is stored, and that idle ones are let go before there are too many."""

from __future__ import annotations

import pytest
from tests.broker.consuming.test_queue_leases import take
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball import limits
from timeball.broker.consuming.leases import Leases
from timeball.broker.consuming.queue_leases import QueueLeases
from timeball.errors import OverLimit


async def opened(world: World, rows: int = 3) -> Leases:
    await world.broker.create_topic("orders", 1)
    if rows:
        await world.broker.send(batch(rows))
    return Leases(world.broker.parts)


def queue(world: World, leases: Leases, group: str = "g", *, from_max: bool = False) -> QueueLeases:
    return leases.open(group, world.broker.parts.topics.get("orders"), 0, from_max=from_max)


@on_node()
async def test_a_new_group_begins_and_that_is_stored(world: World) -> None:
    leases = await opened(world)
    assert queue(world, leases).next_offset == 0
    assert world.broker.offsets("g", "orders") == {0: 0}
    assert queue(world, leases, "young", from_max=True).next_offset == 0
    index = world.broker.parts.topics.get("orders").queues[0].index
    index.hide(int(index.read(1, 1)["seq"][0]))
    assert queue(world, leases, "h").next_offset == 1
    assert queue(world, leases, "old", from_max=True).next_offset == 2


@on_node()
async def test_a_window_stays_until_somebody_else_stores_an_offset(world: World) -> None:
    leases = await opened(world)
    first = queue(world, leases)
    take(first, [0, 1])
    assert queue(world, leases) is first and leases.count.rows == 2
    await world.broker.commit_offsets("g", "orders", {0: 1})
    other = queue(world, leases)
    assert other is not first and other.next_offset == 1 and leases.count.rows == 0
    first.done(0)
    leases.store(first)  # nobody's queue any more: it must not undo what was stored
    assert world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_an_ack_does_not_undo_what_somebody_else_has_stored(world: World) -> None:
    leases = await opened(world)
    one = queue(world, leases)
    take(one, [0, 1])
    await world.broker.commit_offsets("g", "orders", {0: 2})
    one.done(0)
    assert not leases.store(one)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert leases.get("g", "orders", 0) is None and leases.count.rows == 0


@on_node()
async def test_storing_says_when_the_open_stretch_is_too_wide(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_SPAN_MAX", 1)
    leases = await opened(world)
    one = queue(world, leases)
    take(one, [0])
    assert not leases.store(one)
    take(one, [1])
    assert leases.store(one)
    one.done(0)
    assert not leases.store(one) and world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_idle_windows_make_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 2)
    leases = await opened(world)
    take(queue(world, leases, "a"), [0])
    queue(world, leases, "b")
    take(queue(world, leases, "c"), [0])
    assert {w.group for w in leases.all()} == {"a", "c"}
    with pytest.raises(OverLimit):
        queue(world, leases, "d")


@on_node()
async def test_only_what_is_ahead_and_exists_is_done_ahead(world: World) -> None:
    leases = await opened(world)
    one = queue(world, leases)
    take(one, [0])
    index = world.broker.parts.topics.get("orders").queues[0].index
    assert [leases.ack_ahead(one, index, offset) for offset in (-1, 0, 1, 2, 3)] == [
        False, False, True, True, False,
    ]  # fmt: skip


@on_node()
async def test_a_crash_is_told_what_is_done_of_live_windows_that_promises_speak_of(world: World) -> None:
    leases = await opened(world)
    for group in ("promised", "popped", "moved"):
        one = queue(world, leases, group)
        one.in_log = group != "popped"
        take(one, [0, 1, 2])
        one.done(1)
    await world.broker.commit_offsets("moved", "orders", {0: 2})
    assert leases.ahead() == {"promised": {"orders": {0: [(1, 2)]}}}
    live = {w.group for w in leases.all() if leases.is_live(w)}
    assert live == {"promised", "popped"}


@on_node()
async def test_positions_that_were_done_before_a_crash_move_the_group_on(world: World) -> None:
    leases = await opened(world, 5)
    topic = world.broker.parts.topics.get("orders")
    queue(world, leases)
    leases.skip_done("g", topic, 0, [0, 1, 3, 99])
    one = queue(world, leases)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert (one.next_offset, one.acked_ahead) == (2, {3}), "and what is not there is nobody's"


@on_node()
async def test_where_a_group_begins_is_fresh_until_somebody_has_saved_it(world: World) -> None:
    leases = await opened(world)
    assert not leases.has_new_groups
    queue(world, leases)
    assert leases.has_new_groups
    leases.has_new_groups = False
    queue(world, leases)
    assert not leases.has_new_groups
