"""Waiting receives: which of them a change serves, in which order, and that other tasks run after each slice."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from tests.broker.consuming.consumer import engine
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.consuming.leases import Lease, OpenCount, QueueLeases
from timeball.broker.consuming.requests import ReceiveRequest
from timeball.broker.consuming.selection import Selection
from timeball.broker.consuming.waiting import QUEUES_AT_ONCE, SERVED_AT_ONCE, WaitingReceives
from timeball.log.queue_index import QueueIndexes
from timeball.model import limits
from timeball.model.errors import NotFound, OverLimit


class FakeQueues:
    """Messages by topic, which `WaitingReceives` hands out one by one to any group."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.unsearched: set[str] = set()  # topics with index entries that are not searched yet
        self.deleted: set[str] = set()  # deleted topics
        self.given_up = 0  # number of messages in selections that were given up
        self.selections = 0
        self.queues = 1  # number of queues that each selection examines
        index = QueueIndexes(CrashFiles()).queue("t", 0)
        self._queue = QueueLeases("g", "t", 0, index, 0, 0, OpenCount())
        self.waiting = WaitingReceives(self._select, self._give_up)

    def _select(self, request: ReceiveRequest) -> Selection:
        self.selections += 1
        if request.topic in self.deleted:
            raise NotFound(f"topic {request.topic}")
        selection = Selection(request.rows, 1, 2, now_ms=1, in_order=False, attempt_id="")
        selection.examined_queues = self.queues
        selection.has_unsearched = request.topic in self.unsearched
        if self.messages[request.topic]:
            self.messages[request.topic] -= 1
            selection.leased.append((self._queue, 0, Lease(0, 1, 1, 2, 1)))
            selection.has_more = bool(self.messages[request.topic])
        return selection

    def _give_up(self, selection: Selection) -> None:
        self.given_up += len(selection.leased)

    def begin(self, group: str, topic: str = "t", wait_s: float = 60) -> asyncio.Task[Selection | None]:
        """Let a consumer of a group wait for one message."""
        request, deadline_s = ReceiveRequest(group, topic, rows=1), asyncio.get_running_loop().time() + wait_s
        return asyncio.create_task(self.waiting.wait(request, {topic, f"%RETRY%{group}"}, deadline_s))

    def add(self, count: int, topic: str = "t") -> None:
        """Add messages to a topic, as a commit does."""
        self.messages[topic] += count
        self.waiting.mark(topic)

    @property
    def is_empty(self) -> bool:
        """True if no consumer waits, and nothing is left of earlier waits."""
        waiting = self.waiting
        return not (waiting.length or waiting._lines or waiting._by_topic or waiting._marked)


async def turns(count: int = 8) -> None:
    """Let the event loop run for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_pass_serves_each_line_in_its_order() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        first, second, third = (fake.begin("a") for _ in range(3))
        other = fake.begin("b", "u")
        await turns()
        fake.add(2)
        await turns()
        assert first.done() and second.done() and not third.done() and not other.done()
        assert fake.selections == 2, "nothing was selected for the third consumer"
        fake.add(1)
        fake.add(1, "u")
        for served in (first, second, third, other):
            selection = await served
            assert selection is not None and len(selection.leased) == 1
        assert fake.is_empty

    asyncio.run(scene())


def test_lines_of_one_group_take_turns() -> None:
    """Consumers whose requests differ share the messages, also when each message comes by itself."""

    async def scene() -> None:
        fake, served = FakeQueues(), Counter[int]()

        async def consume(lease_ms: int) -> None:
            request, loop = (
                ReceiveRequest("a", "t", rows=1, invisible_ms=lease_ms),
                asyncio.get_running_loop(),
            )
            while await fake.waiting.wait(request, {"t"}, loop.time() + 60) is not None:
                served[lease_ms] += 1

        consumers = [asyncio.create_task(consume(lease_ms)) for lease_ms in (1_000, 1_000, 2_000, 2_000)]
        await turns()
        for _ in range(20):
            fake.add(1)
            await turns()
        assert served == {1_000: 10, 2_000: 10}
        fake.add(2)
        await turns()
        assert served == {1_000: 11, 2_000: 11}
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
        assert fake.is_empty

    asyncio.run(scene())


def test_all_groups_of_a_topic_are_served_in_slices() -> None:
    async def scene() -> None:
        fake, groups = FakeQueues(), 3 * SERVED_AT_ONCE
        waiting = [fake.begin(f"group-{number}") for number in range(groups)]
        await turns()
        fake.add(groups)
        served_before = [0]
        while not all(consumer.done() for consumer in waiting):
            await asyncio.sleep(0)
            served_before.append(groups - fake.messages["t"])
        # Between two turns of another task, at most one slice was served.
        steps = [after - before for before, after in pairwise(served_before)]
        assert max(steps) == SERVED_AT_ONCE and sum(steps) == groups
        assert fake.is_empty

    asyncio.run(scene())


@pytest.mark.parametrize("messages", [0, 6])
def test_a_slice_ends_when_it_has_examined_many_queues(messages: int) -> None:
    async def scene() -> None:
        fake, groups = FakeQueues(), 6
        fake.queues = QUEUES_AT_ONCE // 2
        waiting = [fake.begin(f"group-{number}") for number in range(groups)]
        await turns()
        fake.add(messages)
        selections = [0]
        while fake.selections < groups:
            await asyncio.sleep(0)
            selections.append(fake.selections)
        assert [after - before for before, after in pairwise(selections) if after > before] == [2, 2, 2]
        fake.add(groups - messages)
        await asyncio.gather(*waiting)
        assert fake.is_empty

    asyncio.run(scene())


@on_node(queues_per_topic=5)
async def test_a_selection_counts_examined_queues_without_new_messages(world: World) -> None:
    await world.broker.send(batch(1, topic=["t"]))
    assert engine(world)._select_now(ReceiveRequest("g", "t", rows=1)).examined_queues == 5


def test_a_change_during_a_pass_is_not_missed() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        consumer = fake.begin("a")
        await turns()
        fake.waiting.mark("t")  # before there is a message
        fake.add(1)  # before the pass begins, in the same turn
        assert await consumer is not None
        again = fake.begin("a")
        await turns()
        fake.waiting.mark("t")
        await turns()
        fake.add(1)
        assert await again is not None

    asyncio.run(scene())


def test_a_consumer_whose_wait_has_ended_gets_none_and_the_next_one_is_served() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        assert await fake.begin("a", wait_s=0) is None
        assert fake.is_empty
        late, patient = fake.begin("a", wait_s=0), fake.begin("a")
        assert await late is None
        fake.add(1)
        assert await patient is not None
        assert fake.is_empty

    asyncio.run(scene())


def test_a_selection_whose_consumer_has_gone_is_given_up() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        waits, served = fake.begin("a"), fake.begin("b")
        await turns()
        waits.cancel()  # before there is a message
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert fake.given_up == 0
        fake.add(1)
        await asyncio.sleep(0)  # the pass has served the consumer, whose task has not run since
        assert not fake.messages["t"]
        served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await served
        assert fake.given_up == 1 and fake.is_empty

    asyncio.run(scene())


def test_each_consumer_of_a_deleted_topic_gets_the_error() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        waiting = [fake.begin("a"), fake.begin("a"), fake.begin("b")]
        await turns()
        fake.deleted.add("t")
        fake.waiting.mark("t")
        for consumer in waiting:
            with pytest.raises(NotFound):
                await consumer
        assert fake.is_empty

    asyncio.run(scene())


def test_a_selection_with_unsearched_entries_is_handed_over_without_leases() -> None:
    async def scene() -> None:
        fake = FakeQueues()
        consumer = fake.begin("a")
        await turns()
        fake.unsearched.add("t")
        fake.waiting.mark("t")
        selection = await consumer
        assert selection is not None and not selection.leased and selection.has_unsearched

    asyncio.run(scene())


def test_too_many_waiting_consumers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 1)

    async def scene() -> None:
        fake = FakeQueues()
        staying = fake.begin("a")
        await turns()
        with pytest.raises(OverLimit, match="1 consumers wait"):
            await fake.begin("b")
        fake.add(1)
        assert await staying is not None

    asyncio.run(scene())
