"""Policy: who may do what is asked when a message is accepted, and never again.

The answers themselves, over every edge, are in tests/protocols/test_one_policy.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.broker.on_node import batch, column, on_node
from tests.crash.world import World

import timeball
from timeball.broker.policy import queues_to_read, queues_to_write
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topic_config import READ, WRITE, TopicConfig
from timeball.errors import Forbidden, GroupNotFound, InvalidName, NotFound, OutOfRange

SECOND_MS = 1_000


def close_to_writers(world: World, topic: str = "orders") -> None:
    world.broker.parts.topics.configure(topic, TopicConfig(2, 2, perm=READ))


def delete(world: World, topic: str = "orders") -> None:
    world.broker.parts.topics.delete(topic, world.broker.parts.writer.next_seq)


def visible(world: World, topic: str = "orders") -> int:
    return sum(high - low for low, high in world.broker.queues(topic).values())


@pytest.mark.parametrize("change", [close_to_writers, delete])
@pytest.mark.parametrize(
    "delay",
    [{"delay_ms": [SECOND_MS]}, {"delay_level": np.array([1], dtype=np.int32)}],
    ids=["instant", "level"],
)
@on_node()
async def test_a_promise_is_kept_though_its_topic_takes_nothing_any_more(
    world: World, change: object, delay: dict[str, object]
) -> None:
    await world.broker.send(batch(1, **delay))
    change(world)  # type: ignore[operator]
    await world.restart(auto_create_topics=False)
    with pytest.raises((Forbidden, NotFound)):
        await world.broker.send(batch(1))
    await world.advance(SECOND_MS)
    assert visible(world) == 1


@pytest.mark.parametrize("change", [close_to_writers, delete])
@on_node()
async def test_a_transaction_ends_as_its_producer_says_though_its_topic_is_closed(
    world: World, change: object
) -> None:
    half, durable = world.broker.prepare_nowait(batch(1, properties=["PGROUP\x01p\x02"]))
    await durable
    change(world)  # type: ignore[operator]
    await world.broker.transactions.end(half.first_seq, "p", commit=True)
    assert visible(world) == 1


@on_node()
async def test_a_batch_makes_no_topic_unless_all_of_them_may_be_sent_to(world: World) -> None:
    await world.broker.create_topic("orders")
    close_to_writers(world)
    before = world.broker.topics()
    for sends in (world.broker.send_nowait, world.broker.prepare_nowait):
        with pytest.raises(Forbidden, match="'orders' is not to be written to"):
            sends(batch(2, topic=["new", "orders"]))
    assert world.broker.topics() == before


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "é", "a\n", "x" * 128])
@on_node()
async def test_a_topic_has_a_name_that_stock_clients_know(world: World, name: str) -> None:
    with pytest.raises(InvalidName, match="topic"):
        await world.broker.send(batch(2, topic=["orders", name]))


@on_node()
async def test_what_has_changed_is_seen_at_once(world: World) -> None:
    """The answers are remembered, for as long as no topic changes."""
    policy, topics = world.broker.policy, world.broker.parts.topics
    await world.broker.send(batch(1))
    assert policy.destination("orders") is topics.get("orders") is policy.destination("orders")
    close_to_writers(world)
    with pytest.raises(Forbidden):
        policy.destination("orders")
    topics.configure("orders", TopicConfig(2, 2, perm=WRITE))
    assert policy.destination("orders") is not None
    with pytest.raises(Forbidden, match="not for reading"):
        policy.readable("orders")
    delete(world)
    assert policy.destination("orders") is None, "the next message makes it"


@on_node(queues_per_topic=4)
async def test_a_new_topic_has_as_many_queues_as_its_producer_wants_and_no_more_than_are_usual(
    world: World,
) -> None:
    policy, topics = world.broker.policy, world.broker.parts.topics
    for name, wanted, given in (("a", None, 4), ("b", 2, 2), ("c", 99, 4), ("d", 0, 4), ("e", -1, 1)):
        policy.admit([name], wanted)
        assert len(topics.get(name).queues) == given


@on_node(auto_create_topics=False)
async def test_a_retry_topic_is_made_for_its_group_and_for_no_other(world: World) -> None:
    world.broker.parts.groups.update(SubscriptionGroup("g", retry_queue_nums=3))
    await world.broker.send(batch(1, topic=["%RETRY%g"]))
    assert len(world.broker.queues("%RETRY%g")) == 3
    with pytest.raises(GroupNotFound, match="'nobody'"):
        await world.broker.send(batch(1, topic=["%RETRY%nobody"]))


@on_node()
async def test_a_group_may_be_switched_off_and_may_be_kept_from_broadcasting(world: World) -> None:
    policy, groups = world.broker.policy, world.broker.parts.groups
    assert policy.joined("g", broadcasting=True) == SubscriptionGroup("g")
    groups.update(SubscriptionGroup("g", consume_broadcast_enable=False))
    policy.joined("g")
    with pytest.raises(Forbidden, match="may not broadcast"):
        policy.joined("g", broadcasting=True)
    groups.update(SubscriptionGroup("g", consume_enable=False))
    for ask in (policy.joined, policy.check_group, lambda name: world.broker.offsets(name, "orders")):
        with pytest.raises(Forbidden, match="switched off"):
            ask("g")
    policy.check_group("unknown")
    assert groups.find("unknown") is None


@on_node()
async def test_the_brokers_own_topics_are_not_made_by_operators(world: World) -> None:
    for name in ("RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_anything", "TBW102"):
        with pytest.raises(InvalidName, match="conflict with system topic"):
            await world.broker.create_topic(name)
    with pytest.raises(OutOfRange):
        await world.broker.create_topic("orders", 0)


@on_node()
async def test_queues_that_nobody_may_use_are_not_counted(world: World) -> None:
    configure = world.broker.parts.topics.configure
    shown = {
        perm: (queues_to_read(topic), queues_to_write(topic))
        for perm in (0, READ, WRITE, READ | WRITE)
        for topic in [configure("orders", TopicConfig(3, 2, perm=perm))]
    }
    assert shown == {0: (0, 0), READ: (3, 0), WRITE: (0, 2), READ | WRITE: (3, 2)}


@on_node()
async def test_a_copy_that_comes_back_asks_nobody(world: World) -> None:
    """A message that was handed out is not lost because its group's retry topic was closed meanwhile."""
    world.broker.parts.topics.configure("%RETRY%g", TopicConfig(1, 1, perm=READ))
    await world.broker.send_again(batch(1, topic=["%RETRY%g"]))
    assert column(await world.broker.pull("%RETRY%g", {0: 0}, 1, 0), "topic") == ["%RETRY%g"]


ASKS = re.compile(
    r"perm\s*&|&\s*(READ|WRITE)\b|\.consume_enable|\.consume_broadcast_enable|\bforbidden\(|\bconflict\("
    r"|if .*auto_create_topics"
)


def test_no_edge_asks_by_itself() -> None:
    edges = Path(timeball.__file__).parent / "protocols"
    found = [
        f"{path.relative_to(edges)}:{number}: {line.strip()}"
        for path in sorted(edges.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ASKS.search(line)
    ]
    assert found == [], "what a client may do is decided in broker/policy.py"


@pytest.mark.parametrize(
    "line", ["if not topic.perm & READ:", "if not group.consume_enable:", "if forbidden(name):"]
)
def test_that_test_sees_an_edge_that_does(line: str) -> None:
    assert ASKS.search(line)
