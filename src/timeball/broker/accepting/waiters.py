"""Waiting on the event loop: consumers wait for visible messages, and cancels and reschedules for a campaign's resume.

A consumer that finds no message waits for its topic (`Waiters`). The commit that makes a message visible wakes it, so a
consumer gets a released message without a polling interval. The waiting time and the number of waiting consumers are
limited. Consumers that lease messages wait in lines instead (consuming/waiting.py), which learn of changes here.

`Gate` is a lock that cancels and reschedules share. The resume of a campaign excludes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable
from contextlib import asynccontextmanager

from timeball.model import limits
from timeball.model.errors import OverLimit


class Waiters:
    """The waiting consumers by topic, and optionally by queue of the topic.

    A RocketMQ consumer waits once for each queue that it reads. So a topic may have hundreds of waiting pulls, and a
    message concerns only one of them. Each waiting consumer has its own future, so a cancel removes no other consumer.
    """

    def __init__(self) -> None:
        self._watched: Container[str] = ()
        self._on_change: Callable[[str], None] = lambda topic: None
        # By topic and queue. The queue None: the consumers that wait for any queue of the topic.
        self._by_topic: dict[str, dict[int | None, set[asyncio.Future[bool]]]] = {}
        self._count = 0

    def watch(self, topics: Container[str], on_change: Callable[[str], None]) -> None:
        """Call `on_change` with each topic that changes while it is in `topics`."""
        self._watched, self._on_change = topics, on_change

    async def wait(self, topic: str, timeout_s: float, queue: int | None = None) -> bool:
        """Wait for a change in a topic, or only in one of its queues. False if the time is up.

        Raises OverLimit if too many consumers wait.
        """
        return await self._wait([(topic, queue)], timeout_s)

    async def wait_any(self, topics: Collection[str], timeout_s: float) -> bool:
        """Wait for a change in one of `topics`. Result and errors as for `wait`."""
        return await self._wait([(topic, None) for topic in topics], timeout_s)

    async def _wait(self, watched: list[tuple[str, int | None]], timeout_s: float) -> bool:
        """Wait for a change in one of these (topic, queue). The queue None stands for any queue."""
        # Limit the number of futures, because a client may open any number of long polls.
        if self._count >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self._count} consumers wait already; pull without waiting, or try again")
        # One future for all topics: when one of them wakes the consumer, it reads all of them again.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        for topic, queue in watched:
            self._by_topic.setdefault(topic, {}).setdefault(queue, set()).add(future)
        self._count += 1
        # Not `asyncio.timeout`, which cancels a task and costs three times as much.
        timer = loop.call_later(timeout_s, _set_results, [future], False)
        try:
            return await future
        finally:
            timer.cancel()
            self._count -= 1
            for topic, queue in watched:
                self._unregister(topic, queue, future)

    def _unregister(self, topic: str, queue: int | None, future: asyncio.Future[bool]) -> None:
        """Remove the future of a consumer, if a wake-up has not removed it."""
        queues = self._by_topic.get(topic)
        futures = queues.get(queue) if queues is not None else None
        if queues is not None and futures is not None:
            futures.discard(future)
            if not futures:
                del queues[queue]
            if not queues:
                del self._by_topic[topic]

    def wake(self, topics: Iterable[str]) -> None:
        """Wake all consumers that wait for one of these topics, because the topic has changed."""
        for topic in topics:
            if topic in self._watched:
                self._on_change(topic)
            # All of them are removed. Consumers that find no message wait again.
            for futures in self._by_topic.pop(topic, {}).values():
                _set_results(futures)

    def wake_queues(self, changed_queues: Iterable[tuple[str, int]]) -> None:
        """Wake consumers that wait for one of these queues, because rows have become visible in it."""
        for topic, queue in changed_queues:
            if topic in self._watched:
                self._on_change(topic)
            queues = self._by_topic.get(topic)
            if queues is not None:
                _set_results(queues.pop(queue, ()))
                # Also wake consumers that wait for any queue of the topic.
                _set_results(queues.pop(None, ()))
                if not queues:
                    del self._by_topic[topic]


def _set_results(futures: Iterable[asyncio.Future[bool]], is_woken: bool = True) -> None:
    """Wake these consumers with a result. A consumer that has ended meanwhile is skipped."""
    for future in futures:
        if not future.done():
            future.set_result(is_woken)


# ---- a shared and exclusive lock -----------------------------------------------------------------------------


class Gate:
    """A lock that requests share (`passing`) and a resume holds exclusively (`alone`). Belongs to the event loop.

    A request that cancels or reschedules messages finds a message, waits for the disk, and then decides by the due time
    and number that it found. A resume changes due times, so no request may be between these steps while it does.
    `passing` does not yield to the event loop, unless a caller of `alone` holds the lock or waits for it.
    """

    def __init__(self) -> None:
        self._exclusive = asyncio.Lock()
        self._holders = 0
        self._no_holders = asyncio.Event()
        self._no_holders.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Hold the lock together with other requests."""
        async with self._exclusive:
            # Under `_exclusive`: while a caller of `alone` waits, no request can enter, so its wait ends.
            self._holders += 1
            self._no_holders.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._no_holders.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the lock exclusively. Waits until all requests have released it, and keeps new requests waiting."""
        async with self._exclusive:
            await self._no_holders.wait()
            yield
