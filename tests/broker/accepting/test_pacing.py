"""A topic with a limit shows its messages one after another: never too many in a second, in order, none early."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.lives import run
from tests.crash.world import SECOND_MS, World
from tests.crash_files import CrashFiles

from timeball import InvalidName, OutOfRange, RequestError
from timeball.broker.accepting import pacing
from timeball.broker.accepting.pacing import TOPICS_AT_ONCE
from timeball.broker.admin.administration import TopicChange
from timeball.broker.registry.topics import MAX_PER_SECOND, TopicConfig
from timeball.io.clock import ManualClock
from timeball.log.queue_index import QueueIndex
from timeball.model.access import ANONYMOUS
from timeball.model.config import STRATEGIES

TOPIC, OTHER = "limited", "free"


class Watched:
    """The messages of a topic that consumers see. `look` checks their number and order after each step of the clock."""

    def __init__(self, world: World, rate: int) -> None:
        self.world, self.rate = world, rate
        self.shown: list[tuple[int, int]] = []  # (time, messages)

    def seqs(self, *, hidden: bool = False) -> list[int]:
        """List the numbers of the messages that consumers see. With `hidden`, also of hidden messages."""
        seqs = []
        for queue in self.world.broker.tables.topics.get(TOPIC).queues:
            index = queue.index
            count = (index.end_offset if hidden else index.max_offset) - index.min_offset
            seqs += index.read(index.min_offset, count, hidden=hidden)["seq"].tolist()
        return sorted(seqs)

    def look(self) -> None:
        """Check that the messages are shown in the order of the log, and not more than `rate` in a second."""
        seen = self.seqs()
        before = sum(rows for _, rows in self.shown)
        if len(seen) > before:
            self.shown.append((self.world.clock.wall, len(seen) - before))
        released = self.seqs(hidden=True)
        assert seen == released[: len(seen)], "the messages are not shown in their order"
        for end_ms, _ in self.shown:
            rows = sum(rows for ms, rows in self.shown if end_ms - SECOND_MS < ms <= end_ms)
            assert rows <= self.rate, f"{rows} messages in the second before {end_ms}"

    async def advance(self, ms: int) -> None:
        time, is_last = self.world.broker.virtual_time, False
        target_ms = time.now_ms + ms
        while not is_last:
            is_last = (await time.step(target_ms)).is_last
            self.look()


async def limited(world: World, rate: int, queues: int = 3) -> Watched:
    """Create the topic with a limit of `rate` messages in a second."""
    await world.broker.create_topic(TOPIC, queues, max_per_second=rate)
    return Watched(world, rate)


async def send(world: World, delays_ms: list[int], topic: str = TOPIC, **columns: Any) -> None:
    rows = len(delays_ms)
    await world.broker.send(batch(rows, topic=[topic] * rows, delay_ms=delays_ms, **columns))


async def keep_the_limit(world: World, rate: int, bursts: list[tuple[int, int, int]]) -> None:
    """Send bursts (delay in ms, messages, queue) to the topic, and check it while they become due."""
    watched, sent, begin_ms = await limited(world, rate), 0, world.clock.wall
    await world.broker.create_topic(OTHER, 1)
    for after_ms, rows, queue in bursts:
        await send(world, [after_ms] * rows, queue_id=[queue] * rows)
        await send(world, [after_ms], OTHER)
        sent += rows
    other = world.broker.tables.topics.get(OTHER).queues[0].index
    for last_ms in sorted({after_ms for after_ms, _, _ in bursts}):
        await watched.advance(begin_ms + last_ms - world.clock.wall)
        assert other.max_offset == sum(after_ms <= last_ms for after_ms, _, _ in bursts), (
            "a topic without a limit does not wait"
        )
        # No message is early: all shown messages have been released.
        assert len(watched.seqs(hidden=True)) == sum(rows for ms, rows, _ in bursts if ms <= last_ms)
    await watched.advance(sent * 1_010 // rate + 2 * SECOND_MS)
    assert len(watched.seqs()) == sent and not world.broker.pacing.held()[TOPIC]


BURSTS = st.lists(
    st.tuples(st.integers(100, 5_000), st.integers(1, 60), st.integers(-1, 2)), min_size=1, max_size=6
)


@given(rate=st.integers(1, 300), bursts=BURSTS)
@settings(max_examples=8, deadline=None)
def test_no_second_has_more_messages_than_the_limit(rate: int, bursts: list[tuple[int, int, int]]) -> None:
    on_node()(keep_the_limit)(rate, bursts)


def test_a_limit_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing.Limited, "free_rows", lambda limited, now_ms: limited.hidden_rows)
    with pytest.raises(AssertionError, match="messages in the second"):
        on_node()(keep_the_limit)(5, [(1_000, 20, -1)])


def test_an_order_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_queue(indexes: Any, rows: int) -> tuple[dict[int, int], int]:
        index = indexes[0]
        rows = min(rows, index.end_offset - index.max_offset)
        return {index.queue_id: index.max_offset + rows}, rows

    monkeypatch.setattr(pacing, "next_ends", by_queue)
    with pytest.raises(AssertionError, match="in their order"):
        on_node()(keep_the_limit)(5, [(1_000, 20, -1)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_keeps_the_limit(strategy: Any) -> None:
    on_node(strategy=strategy)(keep_the_limit)(20, [(1_000, 50, -1), (3_000, 5, 0)])


@pytest.mark.parametrize("way", ["stop", "kill", "without checkpoint"])
def test_a_restart_shows_the_same_messages_as_before(way: str) -> None:
    """The hidden messages are shown later, within the limit (`Watched.look`)."""

    async def main() -> None:
        world = World(CrashFiles(), ManualClock())
        await world.start()
        watched = await limited(world, 10)
        await send(world, [SECOND_MS] * 60)
        await watched.advance(2_500)
        before = watched.seqs()
        assert 10 <= len(before) < 60
        if way == "stop":
            await world.restart()
        else:
            await world.abandon()
            if way == "without checkpoint":
                for name in [name for name in world.files.list_dir("") if name.startswith("checkpoint")]:
                    world.files.remove(name)
            await world.start()
        assert watched.seqs() == before
        for _ in range(20):
            await watched.advance(500)
        assert len(watched.seqs()) == 60
        await world.stop()

    run(main())


@on_node()
async def test_a_limit_begins_and_ends_while_messages_wait(world: World) -> None:
    await world.broker.create_topic(TOPIC, 2)
    watched = Watched(world, 1_000)
    await send(world, [SECOND_MS] * 20)
    await watched.advance(SECOND_MS)
    assert len(watched.seqs()) == 20
    await world.broker.create_topic(TOPIC, None, max_per_second=4)
    assert len(world.broker.tables.topics.get(TOPIC).queues) == 2
    await send(world, [SECOND_MS] * 20)
    await watched.advance(SECOND_MS)
    assert 20 < len(watched.seqs()) <= 24 and world.broker.status()["held_messages"] >= 16
    # Messages without a due time wait like all others, and a new queue is limited from its first message on.
    await world.broker.create_topic(TOPIC, 4)
    await world.broker.send(batch(2, topic=[TOPIC] * 2, queue_id=[3, 3]))
    assert world.broker.queues(TOPIC)[3] == (0, 0)
    await world.restart()
    assert world.broker.pacing.held()[TOPIC] >= 18
    await world.broker.create_topic(TOPIC, None, max_per_second=0)
    assert len(watched.seqs()) == 42 and world.broker.queues(TOPIC)[3] == (0, 2)
    assert world.broker.pacing.held() == {} and world.broker.tables.shown.values == {}
    await world.restart()
    assert len(watched.seqs()) == 42


@pytest.mark.parametrize("is_limited_again", [False, True])
@on_node()
async def test_the_end_of_a_limit_shows_messages_when_it_is_durable(
    world: World, is_limited_again: bool
) -> None:
    """If the topic gets another limit before that, its messages wait for the new limit."""
    watched = await limited(world, 1)
    await send(world, [SECOND_MS] * 20)
    await watched.advance(SECOND_MS)
    hidden, topics = world.broker.pacing.held()[TOPIC], world.broker.tables.topics
    before = watched.seqs()
    assert hidden > 15
    topics.set_attribute(topics.get(TOPIC), MAX_PER_SECOND, None)
    durable = world.broker.send(batch(3, topic=[TOPIC] * 3))
    assert watched.seqs() == before, "the end of the limit is not durable, so a crash would hide them again"
    if is_limited_again:
        topics.set_attribute(topics.get(TOPIC), MAX_PER_SECOND, "1")
    await durable
    all_rows = 20 + 3
    assert len(watched.seqs()) == (len(before) if is_limited_again else all_rows)
    for _ in range(2 * all_rows if is_limited_again else 0):
        await watched.advance(500)  # checks the limit
    await world.restart()
    assert len(watched.seqs()) == all_rows


@on_node()
async def test_a_deleted_topic_has_no_limit_and_no_hidden_messages(world: World) -> None:
    watched = await limited(world, 5)
    await send(world, [SECOND_MS] * 20)
    await watched.advance(SECOND_MS)
    await world.broker.administration.delete_topic(TOPIC, ANONYMOUS)
    assert world.broker.pacing.held() == {} and world.broker.tables.shown.values == {}
    await world.broker.create_topic(TOPIC, 3)
    assert watched.seqs(hidden=True) == []
    await world.broker.send(batch(3, topic=[TOPIC] * 3))
    assert len(watched.seqs()) == 3
    await world.restart()
    assert len(watched.seqs()) == 3


@on_node()
async def test_the_tools_of_rocketmq_set_and_keep_the_limit(world: World) -> None:
    async def change(attributes: str) -> dict[str, str]:
        await world.broker.administration.configure_topics(
            [TopicChange(TOPIC, TopicConfig(4, 4), attributes)], ANONYMOUS
        )
        config_attributes: dict[str, str] = world.broker.tables.topics.get(TOPIC).config.attributes
        return config_attributes

    assert await change(f"+{MAX_PER_SECOND}=7") == {MAX_PER_SECOND: "7"}
    assert await change("") == {MAX_PER_SECOND: "7"} and world.broker.pacing.held() == {TOPIC: 0}
    for wrong in ("0", "100001", "-1", "1.5", "٣", "1 to 100000", "0x1"):
        with pytest.raises(RequestError, match="1 to 100000"):
            await change(f"+{MAX_PER_SECOND}={wrong}")
    assert await change(f"-{MAX_PER_SECOND}") == {} and world.broker.pacing.held() == {}
    with pytest.raises(OutOfRange, match="max_per_second"):
        await world.broker.create_topic(TOPIC, None, max_per_second=100_001)
    with pytest.raises(InvalidName):
        await world.broker.create_topic("SCHEDULE_TOPIC_XXXX", None, max_per_second=1)


@on_node(queues_per_topic=64)
async def test_a_step_with_many_queues_reads_a_bounded_number_of_entries(world: World) -> None:
    """All messages are shown in order nevertheless (`Watched.look`)."""
    entries_max, queues, rows = 512, 64, 20_000
    watched = await limited(world, 100_000, queues=queues)
    queue_ids = np.random.default_rng(1).integers(0, queues, rows).tolist()
    await send(world, [SECOND_MS] * rows, queue_id=queue_ids)
    next_ends, read_entries = pacing.next_ends, QueueIndex.read
    entries_of_steps = list[int]()

    def count_entries(indexes: Any, rows: int) -> Any:
        entries_of_steps.append(0)

        def read(index: QueueIndex, offset: int, count: int, **options: Any) -> Any:
            entries_of_steps[-1] += count
            return read_entries(index, offset, count, **options)

        with pytest.MonkeyPatch.context() as reading:
            reading.setattr(QueueIndex, "read", read)
            return next_ends(indexes, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "ENTRIES_MERGED", entries_max)
        patch.setattr(pacing, "next_ends", count_entries)
        await watched.advance(2 * SECOND_MS)
    assert len(watched.seqs()) == rows
    assert 0 < max(entries_of_steps) <= entries_max


@on_node()
async def test_other_tasks_run_between_the_steps_of_many_topics(world: World) -> None:
    names = [f"{TOPIC}{number}" for number in range(3 * TOPICS_AT_ONCE)]
    for name in names:
        await world.broker.create_topic(name, 1, max_per_second=1)
    for _ in range(3):
        await world.broker.send(batch(len(names), topic=names))
    pacing, writer = world.broker.pacing, world.broker.log.writer
    await world.until(lambda: not pacing.is_busy, "the first steps are done")
    assert set(pacing.held().values()) == {2}
    world.clock.advance(2 * SECOND_MS)
    pacing.wake()
    steps_of_turns, previous_seq = [], writer.next_seq
    while pacing.is_busy:
        await asyncio.sleep(0)
        steps_of_turns.append(writer.next_seq - previous_seq)  # each step appends one row
        previous_seq = writer.next_seq
        if sum(steps_of_turns) == 2 * TOPICS_AT_ONCE:
            # The limit of the last topic ends between two turns, so it gets no further step.
            topics = world.broker.tables.topics
            topics.set_attribute(topics.get(names[-1]), MAX_PER_SECOND, None)
            previous_seq = writer.next_seq
    assert max(steps_of_turns) <= TOPICS_AT_ONCE and sum(steps_of_turns) >= len(names) - 1
    assert world.broker.queues(names[-1])[0] == (0, 3)
    assert set(pacing.held()) == set(names[:-1]) == set(world.broker.tables.shown.values)
