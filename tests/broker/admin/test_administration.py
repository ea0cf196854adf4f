"""Operators' changes are complete and durable when the call returns, or absent. Only operators may make them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.broker.admin.administration import TopicChange
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import READ, TopicConfig
from timeball.model.access import ANONYMOUS, Access, Caller, parse
from timeball.model.errors import Forbidden, InvalidName, RequestError


@on_node()
async def test_topics_are_created_and_changed(world: World) -> None:
    admin, topics = world.broker.administration, world.broker.tables.topics
    change = TopicChange("a", TopicConfig(3, 2), "+message.type=DELAY", "MULTI_TAG")
    await admin.configure_topics([change, TopicChange("b", TopicConfig(1, 1))], ANONYMOUS)
    a = topics.get("a")
    assert (a.read_queues, a.write_queues, a.filter_type) == (3, 2, "MULTI_TAG")
    assert a.config.attributes == {"message.type": "DELAY"} and topics.get("b").read_queues == 1
    # New attributes are added to the present attributes. All other settings are replaced.
    await admin.configure_topics(
        [TopicChange("a", TopicConfig(3, 3, READ), "+queue.type=SimpleCQ")], ANONYMOUS
    )
    assert a.perm == READ and a.config.attributes == {"message.type": "DELAY", "queue.type": "SimpleCQ"}


@pytest.mark.parametrize(
    "bad",
    [
        TopicChange("bad name", TopicConfig(1, 1)),
        TopicChange("TBW102", TopicConfig(1, 1)),
        TopicChange("c", TopicConfig(0, 0)),
        TopicChange("c", TopicConfig(1, 1), "+no.such=thing"),
    ],
)
def test_an_invalid_topic_in_a_request_creates_no_topic(bad: TopicChange) -> None:
    @on_node()
    async def check(world: World) -> None:
        with pytest.raises((RequestError, InvalidName)):
            await world.broker.administration.configure_topics(
                [TopicChange("a", TopicConfig(1, 1)), bad], ANONYMOUS
            )
        assert world.broker.topics() == {}

    check()


@on_node()
async def test_set_order_marks_a_topic_as_ordered(world: World) -> None:
    await world.broker.create_topic("a")
    for order in (True, False):
        await world.broker.administration.set_order("a", ANONYMOUS, order=order)
        await world.broker.administration.set_order("missing", ANONYMOUS, order=order)
        assert world.broker.tables.topics.get("a").config.order is order
    assert list(world.broker.topics()) == ["a"]


@on_node()
async def test_a_deleted_topic_leaves_no_offsets(world: World) -> None:
    await world.broker.send(batch(1))
    await world.broker.commit_offsets("g", "orders", {0: 0})
    await world.broker.administration.delete_topic("orders", ANONYMOUS)
    await world.broker.administration.delete_topic("orders", ANONYMOUS)
    assert world.broker.topics() == {} and world.broker.tables.offsets.get("g", "orders") == {}


@on_node()
async def test_a_group_is_deleted_with_its_offsets_or_without(world: World) -> None:
    await world.broker.send(batch(1))
    groups = world.broker.tables.groups
    for with_offsets in (False, True):
        await world.broker.administration.configure_groups(
            [SubscriptionGroup("g", retry_max_times=3)], ANONYMOUS
        )
        assert groups.get("g").retry_max_times == 3
        await world.broker.commit_offsets("g", "orders", {0: 1})
        await world.broker.administration.delete_group("g", ANONYMOUS, with_offsets=with_offsets)
        assert groups.find_group("g") is None
        assert world.broker.offsets("g", "orders") == ({} if with_offsets else {0: 1})


ACCOUNT = (
    b'[[accounts]]\naccess_key = "shop"\nsecret_key = "secret of shop"\n[accounts.topics]\n"*" = "PUB|SUB"\n'
)


@on_node()
async def test_changes_without_the_admin_permission_are_refused(world: World) -> None:
    shop = Access(parse(ACCOUNT, "access.toml")).authenticate(
        {"authorization": "Bearer shop:secret of shop"}, 0
    )
    admin = world.broker.administration
    operations: list[Callable[[Caller], Awaitable[None]]] = [
        lambda caller: admin.configure_topics([TopicChange("a", TopicConfig(1, 1))], caller),
        lambda caller: admin.set_order("a", caller, order=True),
        lambda caller: admin.delete_topic("a", caller),
        lambda caller: admin.configure_groups([SubscriptionGroup("g")], caller),
        lambda caller: admin.delete_group("g", caller, with_offsets=True),
    ]
    for operation in operations:
        with pytest.raises(Forbidden):
            await operation(shop)
    assert world.broker.topics() == {} and world.broker.tables.groups.all() == []
