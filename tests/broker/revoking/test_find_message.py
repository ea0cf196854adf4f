"""Look-up of a message by its id: the same answer wherever it is, and no change by the read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import PLACES, delivered
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, World

from timeball.broker.consuming.group_places import GroupPlaces
from timeball.broker.revoking import find_message as find_module
from timeball.broker.revoking import scheduled_lookup
from timeball.broker.revoking.find_message import MayRead, find_message
from timeball.broker.revoking.scheduled_lookup import Names
from timeball.model import limits
from timeball.model.access import Caller
from timeball.model.answers import MessagePlace


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_message_is_found_while_it_waits_after_a_move_and_after_its_release(
    world: World, place: Callable
) -> None:
    key = await place(world)
    (waiting,) = await world.broker.find(key)
    assert (waiting.state, waiting.topic, waiting.at_ms) == ("waiting", "a", None)
    assert waiting.due_ms is not None
    due_ms = waiting.due_ms + HOUR_MS
    await world.broker.reschedule(ids=[key], due_ms=due_ms)
    (moved,) = await world.broker.find(key)
    assert moved == msgspec.structs.replace(waiting, due_ms=due_ms)
    await world.advance(FAR_MS + HOUR_MS)
    assert await delivered(world) == [key]
    (visible,) = await world.broker.find(key)
    assert (visible.state, visible.seq, visible.due_ms) == ("visible", waiting.seq, due_ms)
    assert visible.at_ms is not None
    assert visible.at_ms >= due_ms
    assert visible.queue_offset == 0


def may_read_nothing(_: str) -> bool:
    return False


def all_groups(world: World) -> GroupPlaces:
    """The states in all consumer groups, without a check of permissions."""
    broker = world.broker
    return GroupPlaces(
        broker.consuming.leases,
        lambda _: True,
        clock=broker.clock,
        offsets=broker.tables.offsets,
        redeliveries=broker.redeliveries,
    )


async def find(world: World, names: Names, may_read: MayRead) -> list[MessagePlace]:
    """Call `find_message` for a caller who may read the bodies of some topics."""
    broker = world.broker
    return await find_message(
        broker.look_ups,
        names,
        may_read,
        all_groups(world),
        log=broker.log,
        scheduling=broker.scheduling,
        file_keys=broker.pending_table.file_keys,
        threads=broker.threads,
    )


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_content_is_shown_only_to_callers_who_may_receive_it(world: World, place: Callable) -> None:
    key = await place(world)
    (waiting,) = await world.broker.find(key)
    (hidden,) = await find(world, Names([key]), may_read_nothing)
    assert waiting.content is not None
    assert hidden == msgspec.structs.replace(waiting, content=None)
    await world.advance(FAR_MS + HOUR_MS)
    (visible,) = await world.broker.find(key)
    assert visible.content is not None
    assert visible.content.body == waiting.content.body
    (row,) = (await world.broker.read_queue("a", visible.queue_id, 0, 9)).to_pylist()
    assert (row["body"], len(row["body"])) == (waiting.content.body, waiting.content.size_bytes)


@pytest.mark.parametrize("place", PLACES)
@on_node()
async def test_a_cancelled_message_is_found_as_cancelled(world: World, place: Callable) -> None:
    key = await place(world)
    await world.broker.cancel(ids=[key])
    (message,) = await world.broker.find(key)
    assert (message.state, message.at_ms, message.by) == ("cancelled", world.clock.wall, None)


@on_node()
async def test_the_account_that_cancelled_a_message_is_reported(world: World) -> None:
    class Account(Caller):
        name = "billing"

    key = (await world.send("a", [FAR_MS]))[0]
    await world.broker.cancel(ids=[key], caller=Account())
    (message,) = await world.broker.find(key)
    assert (message.state, message.by) == ("cancelled", "billing")
    await world.restart()
    assert await world.broker.find(key) == [message]


@on_node()
async def test_messages_with_the_same_id_are_found_newest_first(world: World) -> None:
    for topic in ("a", "b"):
        await world.broker.send(batch(topic=[topic], unique_key=["same"]))
    newest, oldest = await world.broker.find("same")
    assert (newest.topic, oldest.topic) == ("b", "a")
    assert [place.state for place in (newest, oldest)] == ["visible", "visible"]
    assert await world.broker.find("same", topic="a") == [oldest]
    assert await world.broker.find("unknown") == []


def bodies_of(places: list[MessagePlace]) -> list[bytes | None]:
    """The bodies of these messages. None for a message without content."""
    return [None if place.content is None else place.content.body for place in places]


@pytest.mark.parametrize("is_visible", [True, False], ids=["visible", "waiting"])
@pytest.mark.parametrize("is_in_memory", [True, False], ids=["in memory", "in the log"])
@on_node()
async def test_only_the_newest_messages_with_an_id_are_found_and_their_bodies_are_limited(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_visible: bool, is_in_memory: bool
) -> None:
    monkeypatch.setattr(limits, "FOUND_MESSAGES_MAX", 3)
    monkeypatch.setattr(limits, "FOUND_BODY_BYTES_MAX", 5)
    monkeypatch.setattr(find_module, "READ_ROWS", 1)
    monkeypatch.setattr(find_module, "LOG_ROWS", 2)
    if not is_in_memory:
        monkeypatch.setattr(scheduled_lookup, "VALUES_ROWS", 1)
    count = 6
    bodies = [b"%d." % number for number in range(count)]
    await world.broker.send(
        batch(
            topic=["a"] * count, unique_key=["same"] * count, body=bodies,
            due_ms=[None if is_visible else world.clock.wall + FAR_MS] * count,
        )
    )  # fmt: skip
    places = await world.broker.find("same")
    assert [place.state for place in places] == ["visible" if is_visible else "waiting"] * 4
    assert [place.seq for place in places] == sorted((place.seq for place in places), reverse=True)
    # The bodies have two bytes each, so a third one would exceed the limit of five. The fourth message only shows that
    # there are more than three.
    assert bodies_of(places) == [b"5.", b"4.", None, None]
    assert [place.content_cut for place in places] == [False, False, True, True]
    hidden = await find(world, Names(["same"]), may_read_nothing)
    assert bodies_of(hidden) == [None] * 4
    assert not any(place.content_cut for place in hidden)


@on_node()
async def test_messages_of_topics_that_the_caller_may_not_see_are_not_found(world: World) -> None:
    await world.broker.send(batch(topic=["a"], unique_key=["now"]))
    key = (await world.send("a", [FAR_MS]))[0]
    for message_id in ("now", key):
        visible = Names([message_id], may=lambda topic: topic == "a")
        assert len(await find(world, visible, may_read_nothing)) == 1
        hidden = Names([message_id], may=lambda topic: topic == "b")
        assert await find(world, hidden, may_read_nothing) == []
