"""Topics that clients make: bounded in a request, in a second, and for each account; a topic costs no descriptor."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pyarrow as pa
import pytest
from tests.broker.on_node import on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import SECOND_MS, World
from tests.crash_files import CrashFiles
from tests.starving import no_descriptors

from timeball import limits
from timeball.access import Access, Account, Caller, Principal
from timeball.broker.registry.new_topics import NewTopics
from timeball.broker.registry.topics import Topics
from timeball.clock import ManualClock
from timeball.config import MIB, Settings
from timeball.errors import OverLimit
from timeball.node import Node


def messages(names: list[str]) -> pa.RecordBatch:
    return pa.record_batch({"topic": names, "body": [b"x"] * len(names)})


def names(first: int, count: int) -> list[str]:
    return [f"topic-{n}" for n in range(first, first + count)]


def quota() -> tuple[Topics, NewTopics, ManualClock]:
    clock = ManualClock()
    topics = StateRows().opened(lambda meta: Topics(CrashFiles(), meta, queues_per_topic=1))
    return topics, NewTopics(topics, clock), clock


def make(topics: Topics, new: NewTopics, wanted: list[str], account: str = "") -> None:
    new.admit(wanted, account)
    for name in wanted:
        topics.ensure(name, made_by=account)


def caller(name: str) -> Caller:
    account = Account(access_key=name, secret_key="secret 12", topics={"*": "PUB"})
    return Principal(Access({name: account}), account)


@pytest.mark.parametrize("delayed", [False, True])
@on_node()
async def test_a_request_that_names_too_many_new_topics_is_refused_whole(world: World, delayed: bool) -> None:
    wanted = names(0, limits.NEW_TOPICS_PER_REQUEST_MAX + 1)
    batch = messages(wanted)
    if delayed:
        batch = batch.append_column("delay_ms", pa.array([SECOND_MS] * len(wanted)))
    with pytest.raises(OverLimit, match="101 new topics in one request; at most 100"):
        await world.broker.send(batch)
    assert world.broker.topics() == {}
    await world.broker.send(batch.slice(1))
    await world.broker.send(batch)  # one new topic more
    assert len(world.broker.topics()) == len(wanted)


def test_new_topics_are_bounded_in_a_second_and_come_again() -> None:
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


def test_each_account_has_its_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_who_made_a_topic_is_known_after_a_restart(world: World) -> None:
    await world.broker.send(messages(names(0, 3)), caller("anna"))
    await world.broker.send(messages(["mine"]))
    await world.restart()
    assert world.broker.parts.topics.made_by == {"anna": 3, "": 1}


def test_a_broker_without_descriptors_goes_on(tmp_path: Path) -> None:
    """New topics, a checkpoint and the next segment are put off; what is sent is kept, and the next start is whole."""

    async def live() -> None:
        node = Node(Settings(data=tmp_path, segment_bytes=MIB))
        await node.start(listen=False)
        before = len(os.listdir("/proc/self/fd"))
        for first in range(0, 1_000, 100):
            await node.broker.send(messages(names(first, 100)))
        await node.upkeep.checkpoint()
        assert len(os.listdir("/proc/self/fd")) - before < 5, "a topic costs no descriptor"
        with no_descriptors():
            await node.broker.send(messages(names(0, 1_000)))
            with pytest.raises(OverLimit, match="too many open files while"):
                await node.upkeep.checkpoint()
            found = await node.broker.pull("topic-5", dict.fromkeys(range(8), 0), 10, 0)
            assert found.num_rows == 2
        assert node.broker.parts.writer.failed is None
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
