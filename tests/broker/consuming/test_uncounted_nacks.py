"""A message may be given back without an attempt, as often as its group allows."""

from __future__ import annotations

from tests.broker.on_node import batch, column, on_node
from tests.crash.world import SECOND_MS, World

from timeball.broker.consuming import redelivery_rows
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.model.message import encode_properties

ASK = ReceiveRequest("g", "orders")


async def attempts(world: World, nacks: int, *, counts: bool = False) -> list[int]:
    """Receive a message, and give it back for a second, again and again. Returns the attempts of each delivery."""
    numbers = []
    for _ in range(nacks):
        received = await world.broker.consuming.receive(ASK, 0)
        if not received.receipts:
            break
        numbers += [times + 1 for times in column(received.rows, "reconsume_times")]
        assert await world.broker.consuming.nack(received.receipts[0], SECOND_MS, "not yet", counts=counts)
        await world.advance(SECOND_MS)
    return numbers


async def begin(world: World, **attributes: str) -> None:
    """Send a message for a group with 3 attempts. `attributes` are the group's, with underscores in place of dots."""
    await world.broker.create_topic("orders", 1)
    names = {name.replace("_", "."): value for name, value in attributes.items()}
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_max_times=2, attributes=names))
    await world.broker.send(batch())


@on_node()
async def test_nacks_without_an_attempt_do_not_use_up_the_attempts(world: World) -> None:
    await begin(world)
    assert await attempts(world, 10) == [1] * 10
    assert await attempts(world, 10, counts=True) == [1, 2, 3]
    assert world.broker.queues("%DLQ%g")[0] == (0, 1)


@on_node()
async def test_the_group_limits_nacks_without_an_attempt(world: World) -> None:
    await begin(world, timeball_uncounted_max="4")
    assert await attempts(world, 4) == [1] * 4
    await world.restart()
    assert await attempts(world, 10) == [1, 2, 3]
    assert world.broker.queues("%DLQ%g")[0] == (0, 1)


@on_node()
async def test_a_limit_that_is_no_number_is_the_default(world: World) -> None:
    groups = world.broker.tables.groups
    for text, limit in (("7", 7), ("0", 0), ("", 1_000), ("-1", 1_000), ("many", 1_000)):
        groups.update(SubscriptionGroup("g", attributes={"timeball.uncounted.max": text}))
        assert groups.uncounted_max("g") == limit
    assert groups.uncounted_max("unknown") == 1_000


def test_the_number_of_nacks_without_an_attempt_is_a_property_of_the_message() -> None:
    text = encode_properties({"NACKS_UNCOUNTED": "3", "a": "b"})
    assert redelivery_rows.count_uncounted_nacks(text) == 3
    next_property = redelivery_rows.uncounted_nack_property(text)
    assert next_property == {"NACKS_UNCOUNTED": "4"}
    assert "NACKS_UNCOUNTED\x014\x02" in redelivery_rows.merge_properties(text, next_property)
    for without_number in (None, "", encode_properties({"NACKS_UNCOUNTED": "x"})):
        assert redelivery_rows.count_uncounted_nacks(without_number) == 0
