"""Waiting requests: the events that wake each, the time limit, and the maximum number of waiting requests."""

from __future__ import annotations

import asyncio

import pytest

from timeball.broker.accepting.waiters import Waiters
from timeball.model import limits
from timeball.model.errors import OverLimit


async def start_waits(waiters: Waiters, *queues: tuple[str, int | None]) -> list[asyncio.Task[bool]]:
    """Let a consumer wait for each (topic, queue). The queue None: for any queue."""
    tasks = [asyncio.ensure_future(waiters.wait(topic, 60, queue)) for topic, queue in queues]
    await asyncio.sleep(0)
    return tasks


def test_a_queue_wakes_only_its_own_waiters() -> None:
    async def main() -> None:
        waiters = Waiters()
        this_queue, other_queue, any_queue, other_topic = await start_waits(
            waiters, ("a", 1), ("a", 2), ("a", None), ("b", 1)
        )
        waiters.wake_queues([("a", 1), ("c", 1)])
        assert await this_queue and await any_queue
        await asyncio.sleep(0)
        assert not other_queue.done() and not other_topic.done()
        waiters.wake(["a"])
        assert await other_queue
        waiters.wake_queues([("b", 1)])
        assert await other_topic
        assert not waiters._by_topic and not waiters._count

    asyncio.run(main())


async def turns(count: int = 5) -> None:
    """Let the event loop run this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_waiter_is_woken_only_by_its_topic() -> None:
    async def main() -> None:
        waiters = Waiters()
        first, second, other = (asyncio.ensure_future(waiters.wait(name, 60)) for name in "aab")
        await turns()
        waiters.wake(["a", "c"])
        assert await first and await second
        await turns()
        assert not other.done()
        waiters.wake(["b"])
        assert await other

    asyncio.run(main())


def test_a_waiter_for_two_topics_is_woken_once_and_removed_from_both() -> None:
    async def main() -> None:
        waiters = Waiters()
        waiter = asyncio.ensure_future(waiters.wait_any(["a", "b"], 60))
        await turns()
        waiters.wake(["b"])
        assert await waiter
        assert not waiters._by_topic and not waiters._count

    asyncio.run(main())


def test_a_timed_out_or_cancelled_waiter_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 2)

    async def main() -> None:
        waiters = Waiters()
        assert await waiters.wait("a", 0) is False
        for _ in range(3):  # if a cancelled waiter stayed, the third would exceed the limit
            cancelled = asyncio.ensure_future(waiters.wait("a", 60))
            await turns()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        staying = [asyncio.ensure_future(waiters.wait("a", 60)) for _ in range(2)]
        await turns()
        with pytest.raises(OverLimit, match="2 consumers wait already"):
            await waiters.wait("b", 60)
        waiters.wake("a")
        assert await asyncio.gather(*staying) == [True, True]

    asyncio.run(main())


def test_a_watcher_is_called_for_each_change_of_a_watched_topic() -> None:
    waiters, topics, changed_topics = Waiters(), {"a", "c"}, list[str]()
    waiters.watch(topics, changed_topics.append)
    waiters.wake(["a", "b"])
    waiters.wake_queues([("c", 1), ("d", 1)])
    topics.add("d")
    waiters.wake_queues([("d", 1)])
    assert changed_topics == ["a", "c", "d"]
