"""An occurrence is skipped while a group has not finished the previous occurrence, and only then."""

from __future__ import annotations

from typing import Any

import pytest
from tests.broker.consuming.consumer import pass_time
from tests.broker.on_node import batch, on_node
from tests.broker.recurring.schedule_lives import (
    EVERY_MS,
    NAME,
    SETTINGS,
    TOPIC,
    id_of,
    progress,
    put,
    released,
)
from tests.crash.lives import run
from tests.crash.world import HOUR_MS, SECOND_MS, CutFiles, World

from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.schedules import State
from timeball.broker.registry.selections import SelectionFacts
from timeball.io.clock import ManualClock
from timeball.model.access import ANONYMOUS
from timeball.model.errors import InvalidMessage, InvalidName
from timeball.model.message import Kind

GROUP = "makers"
# The facts of a schedule that skips an occurrence while the group has not finished the previous occurrence.
SKIP: dict[str, Any] = {"overlap": "skip", "group": GROUP}


async def receive(world: World, group: str = GROUP, invisible_ms: int = 5 * EVERY_MS) -> Received:
    received: Received = await world.broker.consuming.receive(
        ReceiveRequest(group, TOPIC, invisible_ms=invisible_ms), 0
    )
    return received


async def acknowledge(world: World, received: Received) -> None:
    assert await world.broker.consuming.acknowledge(received.receipts) == [True] * len(received.receipts)


async def next_is_skipped(world: World) -> bool:
    """Let the next occurrence become due. Return whether it is skipped, and check that the schedule continues."""
    before = progress(world)
    await world.advance(before.due_ms - world.clock.wall)
    [place] = [each for each in await world.broker.find(id_of(before.due_ms)) if each.seq == before.number]
    is_skipped: bool = place.state == "cancelled"
    assert place.reason == ("overlap" if is_skipped else None)
    after = progress(world)
    assert after.runs == before.runs + (not is_skipped) and after.state == State.ACTIVE
    assert after.due_ms == before.due_ms + EVERY_MS, "the schedule continues in each case"
    return is_skipped


@pytest.mark.parametrize("strategy", SETTINGS)
def test_an_occurrence_is_skipped_until_the_previous_one_is_acknowledged(strategy: str) -> None:
    async def main() -> None:
        world = World(CutFiles(), ManualClock(), **SETTINGS[strategy])
        await world.start()
        await put(world, **SKIP)
        assert not await next_is_skipped(world), "there is no previous occurrence"
        assert await next_is_skipped(world), "the group has not begun"
        received = await receive(world)
        assert await next_is_skipped(world), "the previous occurrence is leased"
        await world.restart()
        assert await next_is_skipped(world), "the lease holds after a restart"
        await acknowledge(world, received)
        assert not await next_is_skipped(world)
        assert len(await released(world)) == 2 and world.broker.pending_messages == 1
        await world.stop()

    run(main())


@on_node()
async def test_without_skip_nothing_is_skipped(world: World) -> None:
    await put(world)
    for _ in range(3):
        assert not await next_is_skipped(world)


@on_node()
async def test_an_acknowledgement_of_another_group_does_not_count(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    await acknowledge(world, await receive(world, "others"))
    assert await next_is_skipped(world)


@on_node()
async def test_the_frame_of_a_skipped_occurrence_has_its_successor(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    await next_is_skipped(world)
    reader = world.broker.log.reader
    *_, (_, rows) = reader.frames(1, reader.next_seq)
    assert rows.column("kind").to_pylist() == [Kind.CANCEL, Kind.SCHEDULED, Kind.META]
    past = await world.broker.schedules.history(NAME, ANONYMOUS)
    assert [(each.places[0].state, each.places[0].reason) for each in past[:2]] == [
        ("cancelled", "overlap"), ("visible", None),
    ]  # fmt: skip


@on_node()
async def test_schedules_of_one_hand_out_are_skipped_by_their_own_previous_message(world: World) -> None:
    """Each schedule stores the position of its own message. s3 has no group."""
    names = [f"s{number}" for number in range(6)]
    for name in names:
        await put(world, name, **(SKIP if name != "s3" else {}))
    await world.advance(EVERY_MS)
    received = await receive(world)
    by_name = {row["unique_key"].split(".")[0]: at for at, row in enumerate(received.rows.to_pylist())}
    done = {"s1", "s4"}
    receipts = [received.receipts[by_name[name]] for name in done]
    assert await world.broker.consuming.acknowledge(receipts) == [True, True]
    await world.send("others", [EVERY_MS])
    await world.advance(EVERY_MS)
    assert {name: progress(world, name).runs for name in names} == {
        name: 2 if name in done or name == "s3" else 1 for name in names
    }
    assert progress(world, "s3").last_queue == -1, "a schedule without a group stores no position"
    rows = {(row["queue_id"], row["queue_offset"]): row["unique_key"] for row in await released(world)}
    for name in set(names) - {"s3"}:
        after = progress(world, name)
        assert rows[after.last_queue, after.last_offset] == f"{name}.{after.last_due_ms}"


# ---- other ends of the previous occurrence ---------------------------------------------------------------------


@on_node()
async def test_a_message_that_returns_to_the_group_is_not_finished(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    [receipt] = (await receive(world)).receipts
    await world.broker.consuming.nack(receipt, 3 * EVERY_MS)
    assert await next_is_skipped(world), "the message waits for its redelivery"
    await pass_time(world, 3 * EVERY_MS)
    await world.settled()
    before = progress(world)
    assert before.runs == 1
    assert await next_is_skipped(world), "the message is in the retry topic"
    again = await receive(world)
    assert await next_is_skipped(world), "the message is leased again"
    await acknowledge(world, again)
    assert not await next_is_skipped(world)


@on_node()
async def test_a_message_that_waits_for_the_limit_of_the_retry_topic_is_not_finished(world: World) -> None:
    await world.broker.create_topic(pop_retry_topic(GROUP, TOPIC), 1, max_per_second=1)
    await put(world, **SKIP)
    await next_is_skipped(world)
    await world.restart()  # nothing becomes visible in the first second
    [receipt] = (await receive(world)).receipts
    await world.broker.consuming.nack(receipt, 0)
    assert world.broker.pacing.held() == {pop_retry_topic(GROUP, TOPIC): 1}
    assert await next_is_skipped(world)


@on_node()
async def test_the_check_for_an_overlap_does_not_count_all_redeliveries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs for each occurrence, and a broker may have a hundred thousand groups with redeliveries."""
    await put(world, **SKIP)
    assert not await next_is_skipped(world)
    await acknowledge(world, await receive(world))
    monkeypatch.setattr(Redeliveries, "counts", None)  # so a call of it fails
    assert not await next_is_skipped(world)


@on_node()
async def test_a_message_whose_lease_ended_is_not_finished(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    await receive(world, invisible_ms=SECOND_MS)
    await pass_time(world, 2 * SECOND_MS)
    assert await next_is_skipped(world)
    await acknowledge(world, await receive(world))
    assert not await next_is_skipped(world)


@on_node()
async def test_a_dead_letter_is_finished(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    [receipt] = (await receive(world)).receipts
    assert await world.broker.consuming.dead_letter(receipt, "broken")
    assert not await next_is_skipped(world)


@on_node()
async def test_a_cancelled_or_rescheduled_occurrence_is_no_previous_run(world: World) -> None:
    await put(world, **SKIP)
    await world.broker.cancel(ids=[id_of(progress(world).due_ms)])
    assert not await next_is_skipped(world), "a cancelled occurrence was never delivered"
    await world.broker.cancel(ids=[id_of(progress(world).due_ms)])
    assert await next_is_skipped(world), "the last delivered occurrence counts"
    await world.broker.reschedule(ids=[id_of(progress(world).due_ms)], due_ms=world.clock.wall + 9 * EVERY_MS)
    await acknowledge(world, await receive(world))
    assert not await next_is_skipped(world)


@on_node(retention_ms=1, unread_retention_ms=1)
async def test_an_expired_message_is_finished(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    for _ in range(3):
        await world.send("others", [None])
        await world.compact()
        await world.advance(SECOND_MS)
        await world.checkpoint()
        await world.apply_retention()
    assert not await next_is_skipped(world), "no consumer can receive the expired message any more"


@on_node()
async def test_a_message_of_a_deleted_topic_is_finished(world: World) -> None:
    """Also if the topic was created again: the new topic continues the offsets of the old one."""
    await put(world, **SKIP)
    assert not await next_is_skipped(world)
    assert await next_is_skipped(world)
    await world.broker.administration.delete_topic(TOPIC, ANONYMOUS)
    await world.broker.create_topic(TOPIC, 2)
    assert not await next_is_skipped(world)
    assert await next_is_skipped(world), "the message in the new topic is not finished"


@on_node()
async def test_a_missed_occurrence_is_missed_and_not_skipped(world: World) -> None:
    await put(world, **SKIP, catch_up="none")
    await next_is_skipped(world)
    before = progress(world)
    await world.stop()
    world.clock.advance(HOUR_MS)
    await world.start()
    await world.settled()
    [place] = await world.broker.find(id_of(before.due_ms))
    assert (place.state, place.reason) == ("cancelled", "missed")
    assert await next_is_skipped(world), "the last delivered occurrence is not finished"


@on_node()
async def test_a_replaced_or_paused_schedule_keeps_its_last_run(world: World) -> None:
    await put(world, **SKIP)
    await next_is_skipped(world)
    await put(world, **SKIP, body=b"new")
    await world.broker.schedules.pause(NAME, ANONYMOUS)
    await world.broker.schedules.resume(NAME, ANONYMOUS)
    assert await next_is_skipped(world)
    await put(world, **SKIP, topic="others")
    assert not await next_is_skipped(world), "the last run is a message of the former topic"
    await put(world)
    assert not await next_is_skipped(world), "the schedule allows overlaps from now on"


@pytest.mark.parametrize("other_messages", [1, 51])
@on_node()
async def test_a_run_that_a_selection_moved_to_another_topic_does_not_overlap(
    world: World, other_messages: int
) -> None:
    """The other topic may have no message at the position of the run, or a message that the group has finished."""
    topics, delays_ms = ["others"] * other_messages, [0] * other_messages
    await world.broker.send(batch(other_messages, topic=topics, delay_ms=delays_ms))
    await put(world, **SKIP)
    assert not await next_is_skipped(world)
    assert await next_is_skipped(world)
    await acknowledge(world, await receive(world))
    facts = SelectionFacts(seq=0, at_ms=0, topics=[TOPIC], action="move", to_topic="others")
    await world.broker.selections.select(facts, ANONYMOUS)
    assert not await next_is_skipped(world)
    assert progress(world).last_queue == -1
    assert not await next_is_skipped(world), "the group has not received the run in the other topic"
    assert await next_is_skipped(world), "the previous run was released into the topic of the schedule"


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (InvalidMessage, {"overlap": "skip"}), (InvalidMessage, {"group": "g"}),
        (InvalidName, {"overlap": "skip", "group": "a b"}),
    ],
)  # fmt: skip
@on_node()
async def test_skip_needs_a_group(world: World, error: type[Exception], changes: dict[str, Any]) -> None:
    with pytest.raises(error):
        await put(world, **changes)
