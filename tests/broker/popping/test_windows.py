"""All windows: where a group begins, what is stored, and that idle ones are let go before there are too many."""

from __future__ import annotations

import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.popping.test_window import take
from tests.crash.world import World

from timeball import limits
from timeball.broker.popping.window import Window
from timeball.broker.popping.windows import Windows
from timeball.errors import OverLimit


async def opened(world: World, rows: int = 3) -> Windows:
    await world.broker.create_topic("orders", 1)
    if rows:
        await world.broker.send(batch(rows))
    return Windows(world.broker.parts)


def window(world: World, windows: Windows, group: str = "g", *, from_max: bool = False) -> Window:
    return windows.open(group, world.broker.parts.topics.get("orders"), 0, from_max=from_max)


@on_node()
async def test_a_new_group_begins_and_that_is_stored(world: World) -> None:
    windows = await opened(world)
    assert window(world, windows).next_offset == 0
    assert world.broker.offsets("g", "orders") == {0: 0}
    assert window(world, windows, "young", from_max=True).next_offset == 0
    index = world.broker.parts.topics.get("orders").queues[0].index
    index.hide(int(index.read(1, 1)["seq"][0]))
    assert window(world, windows, "h").next_offset == 1
    assert window(world, windows, "old", from_max=True).next_offset == 2


@on_node()
async def test_a_window_stays_until_somebody_else_stores_an_offset(world: World) -> None:
    windows = await opened(world)
    first = window(world, windows)
    take(first, [0, 1])
    assert window(world, windows) is first and windows.count.rows == 2
    await world.broker.commit_offsets("g", "orders", {0: 1})
    other = window(world, windows)
    assert other is not first and other.next_offset == 1 and windows.count.rows == 0
    first.done(0)
    windows.store(first)  # nobody's window any more: it must not undo what was stored
    assert world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_an_ack_does_not_undo_what_somebody_else_has_stored(world: World) -> None:
    windows = await opened(world)
    one = window(world, windows)
    take(one, [0, 1])
    await world.broker.commit_offsets("g", "orders", {0: 2})
    one.done(0)
    assert not windows.store(one)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert windows.find("g", "orders", 0) is None and windows.count.rows == 0


@on_node()
async def test_storing_says_when_the_open_stretch_is_too_wide(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "POP_SPAN_MAX", 1)
    windows = await opened(world)
    one = window(world, windows)
    take(one, [0])
    assert not windows.store(one)
    take(one, [1])
    assert windows.store(one)
    one.done(0)
    assert not windows.store(one) and world.broker.offsets("g", "orders") == {0: 1}


@on_node()
async def test_idle_windows_make_room_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POP_WINDOWS_MAX", 2)
    windows = await opened(world)
    take(window(world, windows, "a"), [0])
    window(world, windows, "b")
    take(window(world, windows, "c"), [0])
    assert {w.group for w in windows.all()} == {"a", "c"}
    with pytest.raises(OverLimit):
        window(world, windows, "d")


@on_node()
async def test_only_what_is_ahead_and_exists_is_done_ahead(world: World) -> None:
    windows = await opened(world)
    one = window(world, windows)
    take(one, [0])
    index = world.broker.parts.topics.get("orders").queues[0].index
    assert [windows.finish_ahead(one, index, offset) for offset in (-1, 0, 1, 2, 3)] == [
        False, False, True, True, False,
    ]  # fmt: skip


@on_node()
async def test_a_crash_is_told_what_is_done_of_live_windows_that_promises_speak_of(world: World) -> None:
    windows = await opened(world)
    for group in ("promised", "popped", "moved"):
        one = window(world, windows, group)
        one.promised = group != "popped"
        take(one, [0, 1, 2])
        one.done(1)
    await world.broker.commit_offsets("moved", "orders", {0: 2})
    assert windows.ahead() == {"promised": {"orders": {0: [(1, 2)]}}}
    live = {w.group for w in windows.all() if windows.is_live(w)}
    assert live == {"promised", "popped"}


@on_node()
async def test_positions_that_were_done_before_a_crash_move_the_group_on(world: World) -> None:
    windows = await opened(world, 5)
    topic = world.broker.parts.topics.get("orders")
    window(world, windows)
    windows.done_already("g", topic, 0, [0, 1, 3, 99])
    one = window(world, windows)
    assert world.broker.offsets("g", "orders") == {0: 2}
    assert (one.next_offset, one.done_ahead) == (2, {3}), "and what is not there is nobody's"


@on_node()
async def test_where_a_group_begins_is_fresh_until_somebody_has_saved_it(world: World) -> None:
    windows = await opened(world)
    assert not windows.fresh
    window(world, windows)
    assert windows.fresh
    windows.fresh = False
    window(world, windows)
    assert not windows.fresh
