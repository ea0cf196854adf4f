"""The state of a message for each group, from its first delivery to its end."""

from __future__ import annotations

from tests.broker.consuming.subscriber import (
    DEAD,
    GROUP,
    MINUTE_MS,
    acknowledge,
    engine,
    in_queue,
    pass_time,
    receive,
    send,
    try_at_most,
)
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball.broker.consuming.group_places import Copy, copies_by_message
from timeball.model.answers import GroupPlace, MessagePlace
from timeball.model.message import Kind

ID = "id-1"


async def place(world: World, message_id: str = ID) -> GroupPlace | None:
    """The state of the message in its only group. None if no group has begun in the topic."""
    (message,) = await world.broker.find(message_id)
    return next(iter(message.groups), None)


@on_node()
async def test_the_state_of_a_message_is_leased_waiting_and_done_in_turn_also_after_restarts(
    world: World,
) -> None:
    await send(world, [b"a"], unique_key=[ID])
    assert await place(world) is None, "no group yet"
    received = await receive(world)
    until_ms = world.clock.wall + MINUTE_MS
    assert await place(world) == GroupPlace(GROUP, "leased", 1, until_ms)
    await world.restart()
    assert await place(world) == GroupPlace(GROUP, "leased", 1, until_ms)
    await engine(world).nack(received.receipts[0], 2 * MINUTE_MS, "no")
    until_ms = world.clock.wall + 2 * MINUTE_MS
    assert await place(world) == GroupPlace(GROUP, "waiting", 1, until_ms)
    await world.restart()
    assert await place(world) == GroupPlace(GROUP, "waiting", 1, until_ms)
    await pass_time(world, 2 * MINUTE_MS)
    again = await receive(world)
    second_lease = await place(world)
    assert second_lease is not None
    assert (second_lease.state, second_lease.attempts) == ("leased", 2)
    assert await acknowledge(world, again) == [True]
    assert await place(world) == GroupPlace(GROUP, "done", 2)
    await world.restart()
    assert await place(world) == GroupPlace(GROUP, "done", 2)


@on_node()
async def test_a_lease_without_an_answer_has_the_state_waiting_after_its_prolonged_end(world: World) -> None:
    await send(world, [b"a"], unique_key=[ID])
    received = await receive(world)
    (receipt,) = received.receipts
    await engine(world).change_invisible_time(receipt, 3 * MINUTE_MS)
    assert await place(world) == GroupPlace(GROUP, "leased", 1, world.clock.wall + 3 * MINUTE_MS)
    await pass_time(world, 3 * MINUTE_MS)
    assert await place(world) == GroupPlace(GROUP, "waiting", 1)


@on_node()
async def test_a_dead_letter_has_the_state_dead(world: World) -> None:
    try_at_most(world, 1)
    await send(world, [b"a", b"b"], unique_key=[ID, "id-2"])
    first = await receive(world)
    (given_up, other) = first.receipts
    await engine(world).dead_letter(given_up, "no such order")
    assert await place(world) == GroupPlace(GROUP, "dead", 1)
    await engine(world).nack(other, MINUTE_MS)
    await pass_time(world, MINUTE_MS)
    await receive(world)
    await pass_time(world, MINUTE_MS)
    assert len(await in_queue(world, DEAD)) == 2
    assert await place(world, "id-2") == GroupPlace(GROUP, "dead", 2)


@on_node()
async def test_the_state_in_a_group_without_leases_follows_its_stored_offset(world: World) -> None:
    await send(world, [b"a"], unique_key=[ID])
    (message,) = await world.broker.find(ID)
    assert message.queue_id is not None
    await world.broker.commit_offsets("reader", "orders", {message.queue_id: 1})
    await world.broker.commit_offsets("slow", "orders", {message.queue_id: 0})
    (message,) = await world.broker.find(ID)
    assert message.groups == [GroupPlace("reader", "done"), GroupPlace("slow", "waiting")]


@on_node()
async def test_messages_with_the_same_id_have_separate_states(world: World) -> None:
    await send(world, [b"a"], unique_key=[ID])
    assert await acknowledge(world, await receive(world)) == [True]
    await send(world, [b"b"], unique_key=[ID])
    await receive(world)
    newest, oldest = await world.broker.find(ID)
    assert [group.state for group in (*newest.groups, *oldest.groups)] == ["leased", "done"]


def test_a_copy_that_names_no_row_belongs_to_the_newest_message_of_its_topic() -> None:
    def copy(seq: int, source_seq: int | None, origin: str | None = "a") -> Copy:
        return Copy(Kind.SCHEDULED, seq, source_seq, "%RETRY%g_a", 0, 0, 9, 1, "g", origin)

    # The messages 1, 3 and 5, whose visible rows are 2, 4 and 6.
    places = {row: MessagePlace("visible", row - 1, topic) for row, topic in ((2, "a"), (4, "a"), (6, "b"))}
    chain = [copy(10, 2), copy(11, 10), copy(12, 11)]  # each names the row before
    copies = copies_by_message(
        [*reversed(chain), copy(20, None), copy(21, None, "b"), copy(22, None, None)], places
    )
    assert copies == {1: chain, 3: [copy(20, None)], 5: [copy(21, None, "b")]}
