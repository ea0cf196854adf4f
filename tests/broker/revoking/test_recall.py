"""Recall: what each way to answer says of what waits, was too late, moved, unknown, or is long forgotten."""

from __future__ import annotations

import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.revoking.test_cancel import delivered, let_go_of_all
from tests.crash.scenarios import FAR_MS
from tests.crash.world import HOUR_MS, World

from timeball.broker.revoking.recall import RecallRefused, recall
from timeball.broker.revoking.recall_handle import encode_handle
from timeball.errors import InvalidMessage, NotFound

SOON_MS = 2_000
BOTH = pytest.mark.parametrize("answers", ["definite", "rocketmq"])


async def sent(world: World, delay_ms: int, key: str = "x", topic: str = "a") -> str:
    """The handle of a promise."""
    due_ms = world.clock.wall + delay_ms
    await world.broker.send(batch(1, unique_key=[key], due_ms=[due_ms], topic=[topic]))
    return encode_handle(topic, "timeball", due_ms, key)


async def refused(world: World, handle: str) -> tuple[str, int | None]:
    with pytest.raises(RecallRefused) as refusal:
        await recall(world.broker.parts, "a", handle)
    assert refusal.value.sentence == str(refusal.value)
    return refusal.value.verdict, refusal.value.at_ms


@BOTH
@on_node()
async def test_what_waits_is_taken_back_and_twice_is_success_twice(world: World, answers: str) -> None:
    await world.restart(recall_answers=answers)
    handle = await sent(world, FAR_MS)
    for _ in range(2):
        assert await recall(world.broker.parts, "a", handle) == "x"
    await world.advance(HOUR_MS)
    assert await delivered(world) == []


@BOTH
@on_node()
async def test_what_is_of_another_topic_stays(world: World, answers: str) -> None:
    await world.restart(recall_answers=answers)
    mine, _ = await sent(world, FAR_MS), await sent(world, FAR_MS, topic="b")
    await recall(world.broker.parts, "a", mine)
    await world.advance(HOUR_MS)
    assert [row.place.topic for row in (await world.outcome()).rows] == ["b"]


@BOTH
@on_node()
async def test_what_has_come_is_refused(world: World, answers: str) -> None:
    await world.restart(recall_answers=answers)
    handle = await sent(world, SOON_MS)
    await world.advance(SOON_MS)
    instant_ms = world.clock.wall
    await world.advance(SOON_MS)
    told = ("released", instant_ms if answers == "definite" else None)
    assert await refused(world, handle) == told
    assert await delivered(world) == ["x"]


@on_node()
async def test_what_was_moved_is_found_by_its_old_handle(world: World) -> None:
    handle = await sent(world, SOON_MS)
    await world.broker.reschedule(ids=["x"], delay_ms=HOUR_MS)
    await world.advance(FAR_MS)
    assert await recall(world.broker.parts, "a", handle) == "x"
    await world.advance(HOUR_MS)
    assert await delivered(world) == []


@on_node()
async def test_what_was_moved_to_sooner_may_have_come(world: World) -> None:
    handle = await sent(world, HOUR_MS)
    await world.broker.reschedule(ids=["x"], delay_ms=SOON_MS)
    await world.advance(SOON_MS)
    assert await refused(world, handle) == ("released", world.clock.wall)


@on_node()
async def test_what_was_never_there(world: World) -> None:
    await sent(world, FAR_MS)
    forged = encode_handle("a", "timeball", world.clock.wall + FAR_MS, "nobody")
    assert await refused(world, forged) == ("not_found", None)
    assert await refused(world, encode_handle("a", "timeball", 5, "nobody")) == ("not_found", None)
    await world.restart(recall_answers="rocketmq")
    assert await recall(world.broker.parts, "a", forged) == "nobody", (
        "as RocketMQ: any handle of an instant ahead"
    )


@on_node(retention_ms=1)
async def test_what_is_older_than_the_log_is_not_known_any_more(world: World) -> None:
    old = await sent(world, SOON_MS)
    await world.advance(SOON_MS)
    await let_go_of_all(world)
    assert await refused(world, old) == ("expired", None)
    ahead = encode_handle("a", "timeball", world.clock.wall + FAR_MS, "nobody")
    assert await refused(world, ahead) == ("not_found", None)


@BOTH
@on_node()
async def test_what_is_no_handle_of_ours(world: World, answers: str) -> None:
    await world.restart(recall_answers=answers)
    handle = await sent(world, FAR_MS)
    await sent(world, FAR_MS, topic="b")
    for topic, text, sentence in (
        ("a", "@@@", "is invalid"),
        ("b", handle, "another topic"),
        ("a", encode_handle("a", "elsewhere", world.clock.wall + FAR_MS, "x"), "another broker"),
    ):
        with pytest.raises(InvalidMessage, match=sentence):
            await recall(world.broker.parts, topic, text)
    with pytest.raises(NotFound, match="not exist"):
        await recall(world.broker.parts, "nobody", handle)
    await world.advance(HOUR_MS)
    assert await delivered(world) == ["x", "x"]
