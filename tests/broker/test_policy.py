"""Policy: permissions are checked when a message is accepted, and never again.

The answers themselves, over every edge, are in tests/edges/test_one_policy.py.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, column, on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.starving import no_descriptors

import timeball
from timeball.broker.policy import NewTopics, queues_to_read
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import READ, WRITE, TopicConfig, Topics
from timeball.io.clock import ManualClock
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Access, Account, Caller, Principal
from timeball.model.config import MIB, Settings
from timeball.model.errors import Forbidden, GroupNotFound, InvalidName, NotFound, OutOfRange, OverLimit
from timeball.node.node import Node


def close_to_writers(world: World, topic: str = "orders") -> None:
    """Take away the write permission of a topic."""
    world.broker.tables.topics.configure(topic, TopicConfig(2, 2, perm=READ))


def delete(world: World, topic: str = "orders") -> None:
    world.broker.tables.topics.delete(topic, world.broker.log.writer.next_seq)


def visible(world: World, topic: str = "orders") -> int:
    """Count the visible messages of a topic."""
    return sum(high - low for low, high in world.broker.queues(topic).values())


@pytest.mark.parametrize("change", [close_to_writers, delete])
@pytest.mark.parametrize(
    "delay",
    [{"delay_ms": [SECOND_MS]}, {"delay_level": np.array([1], dtype=np.int32)}],
    ids=["instant", "level"],
)
@on_node()
async def test_an_accepted_message_is_delivered_although_its_topic_was_closed_to_writers(
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
async def test_a_transaction_can_be_committed_although_its_topic_was_closed(
    world: World, change: object
) -> None:
    half, durable = world.broker.prepare_nowait(batch(1, properties=["PGROUP\x01p\x02"]))
    await durable
    change(world)  # type: ignore[operator]
    await world.broker.transactions.end(half.first_seq, "p", commit=True)
    assert visible(world) == 1


@on_node()
async def test_a_batch_with_a_refused_topic_creates_no_topic(world: World) -> None:
    await world.broker.create_topic("orders")
    close_to_writers(world)
    before = world.broker.topics()
    for sends in (world.broker.appender.send, world.broker.prepare_nowait):
        with pytest.raises(Forbidden, match="'orders' is not to be written to"):
            sends(batch(2, topic=["new", "orders"]))
    assert world.broker.topics() == before


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "é", "a\n", "x" * 128])
@on_node()
async def test_a_topic_name_that_rocketmqs_clients_refuse_is_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidName, match="topic"):
        await world.broker.send(batch(2, topic=["orders", name]))


@on_node()
async def test_topic_changes_take_effect_at_once(world: World) -> None:
    """The policy caches its answers until a topic changes."""
    policy, topics = world.broker.policy, world.broker.tables.topics
    await world.broker.send(batch(1))
    assert (
        policy.find_destination("orders", ANONYMOUS)
        is topics.get("orders")
        is policy.find_destination("orders", ANONYMOUS)
    )
    close_to_writers(world)
    with pytest.raises(Forbidden):
        policy.find_destination("orders", ANONYMOUS)
    topics.configure("orders", TopicConfig(2, 2, perm=WRITE))
    assert policy.find_destination("orders", ANONYMOUS) is not None
    with pytest.raises(Forbidden, match="not for reading"):
        policy.find_readable_topic("orders", ANONYMOUS)
    delete(world)
    assert policy.find_destination("orders", ANONYMOUS) is None, "the next message creates the topic"


@on_node(queues_per_topic=4)
async def test_a_new_topic_has_the_requested_queues_up_to_the_default_number(
    world: World,
) -> None:
    policy, topics = world.broker.policy, world.broker.tables.topics
    for name, requested, queues in (("a", None, 4), ("b", 2, 2), ("c", 99, 4), ("d", 0, 4), ("e", -1, 1)):
        policy.ensure_topics([name], ANONYMOUS, requested)
        assert len(topics.get(name).queues) == queues


@on_node(auto_create_topics=False)
async def test_a_retry_topic_is_created_only_for_an_existing_group(world: World) -> None:
    world.broker.tables.groups.update(SubscriptionGroup("g", retry_queue_nums=3))
    await world.broker.send(batch(1, topic=["%RETRY%g"]))
    assert len(world.broker.queues("%RETRY%g")) == 3
    with pytest.raises(GroupNotFound, match="'nobody'"):
        await world.broker.send(batch(1, topic=["%RETRY%nobody"]))


@on_node()
async def test_a_group_that_is_switched_off_or_may_not_broadcast_is_refused(world: World) -> None:
    policy, groups = world.broker.policy, world.broker.tables.groups
    assert policy.ensure_group("g", ANONYMOUS, broadcasting=True) == SubscriptionGroup("g")
    groups.update(SubscriptionGroup("g", consume_broadcast_enable=False))
    policy.ensure_group("g", ANONYMOUS)
    with pytest.raises(Forbidden, match="may not broadcast"):
        policy.ensure_group("g", ANONYMOUS, broadcasting=True)
    groups.update(SubscriptionGroup("g", consume_enable=False))
    requests = (
        lambda: policy.ensure_group("g", ANONYMOUS),
        lambda: policy.check_group("g"),
        lambda: world.broker.offsets("g", "orders"),
    )
    for request in requests:
        with pytest.raises(Forbidden, match="switched off"):
            request()
    policy.check_group("unknown")
    assert groups.find_group("unknown") is None


@on_node()
async def test_operators_cannot_create_the_brokers_own_topics(world: World) -> None:
    for name in ("RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_anything", "TBW102"):
        with pytest.raises(InvalidName, match="conflict with system topic"):
            await world.broker.create_topic(name)
    with pytest.raises(OutOfRange):
        await world.broker.create_topic("orders", 0)


@on_node()
async def test_queues_of_a_topic_without_the_permission_are_not_counted(world: World) -> None:
    configure = world.broker.tables.topics.configure
    shown = {
        perm: (queues_to_read(topic), world.broker.policy.queues_to_write(topic))
        for perm in (0, READ, WRITE, READ | WRITE)
        for topic in [configure("orders", TopicConfig(3, 2, perm=perm))]
    }
    assert shown == {0: (0, 0), READ: (3, 0), WRITE: (0, 2), READ | WRITE: (3, 2)}


@on_node()
async def test_a_returned_copy_needs_no_permission(world: World) -> None:
    """A message that a group returns is not lost if its retry topic was closed to writers meanwhile."""
    world.broker.tables.topics.configure("%RETRY%g", TopicConfig(1, 1, perm=READ))
    await world.broker.send_again(batch(1, topic=["%RETRY%g"]))
    assert column(await world.broker.pull("%RETRY%g", {0: 0}, 1, 0), "topic") == ["%RETRY%g"]


PERMISSION_CHECKS = re.compile(
    r"perm\s*&|&\s*(READ|WRITE)\b|\.consume_enable|\.consume_broadcast_enable|\bforbidden\(|\bconflict\("
    r"|if .*auto_create_topics"
)


def test_no_edge_checks_permissions_of_topics_itself() -> None:
    edges = Path(timeball.__file__).parent / "edges"
    lines = [
        f"{path.relative_to(edges)}:{number}: {line.strip()}"
        for path in sorted(edges.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PERMISSION_CHECKS.search(line)
    ]
    assert lines == [], "permissions are decided in broker/policy.py"


@pytest.mark.parametrize(
    "line", ["if not topic.perm & READ:", "if not group.consume_enable:", "if forbidden(name):"]
)
def test_the_pattern_finds_an_edge_that_checks_permissions(line: str) -> None:
    assert PERMISSION_CHECKS.search(line)


def messages(names: list[str]) -> pa.RecordBatch:
    """Build a send of one message to each of these topics."""
    return pa.record_batch({"topic": names, "body": [b"x"] * len(names)})


def names(first: int, count: int) -> list[str]:
    """List `count` names of topics, which are numbered from `first` on."""
    return [f"topic-{n}" for n in range(first, first + count)]


def quota() -> tuple[Topics, NewTopics, ManualClock]:
    """Create the limits of new topics, with their topics and their clock."""
    clock = ManualClock()
    topics = StateRows().opened(lambda meta: Topics(CrashFiles(), meta, queues_per_topic=1))
    return topics, NewTopics(topics, clock), clock


def make(topics: Topics, new: NewTopics, topic_names: list[str], account: str = "") -> None:
    """Create topics for an account, if the limits admit them."""
    new.check_and_count(topic_names, account)
    for name in topic_names:
        topics.ensure(name, made_by=account)


def caller(name: str) -> Caller:
    """Build a caller whose account may send to all topics."""
    account = Account(access_key=name, secret_key="secret 12", topics={"*": "PUB"})
    return Principal(Access({name: account}), account)


@pytest.mark.parametrize("delayed", [False, True])
@on_node()
async def test_a_request_that_names_too_many_new_topics_is_refused_whole(world: World, delayed: bool) -> None:
    topic_names = names(0, limits.NEW_TOPICS_PER_REQUEST_MAX + 1)
    batch = messages(topic_names)
    if delayed:
        batch = batch.append_column("delay_ms", pa.array([SECOND_MS] * len(topic_names)))
    with pytest.raises(OverLimit, match="101 new topics in one request; at most 100"):
        await world.broker.send(batch)
    assert world.broker.topics() == {}
    await world.broker.send(batch.slice(1))
    await world.broker.send(batch)  # one of its topics is new
    assert len(world.broker.topics()) == len(topic_names)


def test_new_topics_per_second_are_limited_and_the_limit_recovers() -> None:
    topics, new, clock = quota()
    for first in range(0, limits.NEW_TOPICS_BURST, 100):
        make(topics, new, names(first, 100))
    with pytest.raises(OverLimit, match="100 new topics a second; try again in a moment"):
        make(topics, new, ["another"])
    make(topics, new, ["topic-1", "topic-2"])
    clock.advance(500)
    make(topics, new, names(5_000, 50))
    with pytest.raises(OverLimit):
        make(topics, new, ["another"])
    clock.advance(3_600_000)
    make(topics, new, ["another"])


def test_each_account_has_its_own_limit_of_new_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NEW_TOPICS_PER_ACCOUNT_MAX", 3)
    topics, new, _ = quota()
    make(topics, new, names(0, 3), "anna")
    with pytest.raises(OverLimit, match="account 'anna' has made 3 topics; at most 3"):
        make(topics, new, names(3, 1), "anna")
    make(topics, new, names(3, 1), "ben")
    with pytest.raises(OverLimit):
        make(topics, new, names(4, 3), "ben")
    assert topics.made_by == {"anna": 3, "ben": 1}


@on_node()
async def test_the_creator_of_a_topic_is_known_after_a_restart(world: World) -> None:
    await world.broker.send(messages(names(0, 3)), caller("anna"))
    await world.broker.send(messages(["mine"]))
    await world.restart()
    assert world.broker.tables.topics.made_by == {"anna": 3, "": 1}


def test_without_free_descriptors_sends_are_accepted_and_the_next_start_succeeds(tmp_path: Path) -> None:
    """New topics, a checkpoint and the next segment wait. Accepted messages are kept, and the next start succeeds."""

    async def live() -> None:
        node = Node(Settings(data=tmp_path, segment_bytes=MIB))
        await node.start(listen=False)
        before = len(os.listdir("/proc/self/fd"))
        for first in range(0, 1_000, 100):
            await node.broker.send(messages(names(first, 100)))
        await node.maintenance.checkpoint()
        assert len(os.listdir("/proc/self/fd")) - before < 5, "a topic costs no descriptor"
        with no_descriptors():
            await node.broker.send(messages(names(0, 1_000)))
            with pytest.raises(OverLimit, match="too many open files while"):
                await node.maintenance.checkpoint()
            rows = await node.broker.pull("topic-5", dict.fromkeys(range(8), 0), 10, 0)
            assert rows.num_rows == 2
        assert node.broker.log.writer.failed is None
        await node.broker.send(messages(names(0, 1)))
        await node.stop()

    async def again() -> None:
        node = Node(Settings(data=tmp_path, segment_bytes=MIB))
        await node.start(listen=False)
        ends = [high for name in names(0, 1_000) for _, high in node.broker.queues(name).values()]
        assert sum(ends) == 2_001
        await node.stop()

    asyncio.run(live())
    asyncio.run(again())
