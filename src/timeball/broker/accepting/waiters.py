"""Consumers that wait for visible messages, by topic and by queue.

A consumer that finds no message waits for its topic. The commit that makes a message visible wakes it, so a consumer
gets a released message without a polling interval. The waiting time and the number of waiting consumers are limited.

Consumers that wait for the same messages form a line: the first one watches, and then passes the turn on. A thousand
consumers of a group may wait for one topic. If each message woke all of them, it would cost a thousand reads to serve
one consumer. With a line it costs two reads: by the consumer that gets it, and by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Hashable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from timeball.model import limits
from timeball.model.errors import OverLimit


class Waiters:
    """Waiting consumers by topic, and optionally by queue.

    A RocketMQ consumer waits once for each queue that it reads. So a topic may have hundreds of waiting pulls, and a
    message concerns only one of them. Each waiting consumer has its own future, so a cancelled one removes only itself.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[int | None, set[asyncio.Future[bool]]]] = {}
        self._count = 0

    async def wait(self, topic: str, timeout_s: float, queue: int | None = None) -> bool:
        """Wait for a change in `topic`, or in one of its queues. False if the time is up. Raises OverLimit."""
        return await self._wait([(topic, queue)], timeout_s)

    async def wait_any(self, topics: Collection[str], timeout_s: float) -> bool:
        """Wait for a change in one of `topics`. False if the time is up. Raises OverLimit."""
        return await self._wait([(topic, None) for topic in topics], timeout_s)

    async def _wait(self, places: list[tuple[str, int | None]], timeout_s: float) -> bool:
        # Limit the number of futures, because a client may open any number of long polls.
        if self._count >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self._count} consumers wait already; pull without waiting, or try again")
        # One future for all topics: when one of them wakes the consumer, it reads all of them again.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        for topic, queue in places:
            self._by_topic.setdefault(topic, {}).setdefault(queue, set()).add(future)
        self._count += 1
        # Not `asyncio.timeout`, which cancels a task and costs three times as much.
        over = loop.call_later(timeout_s, _finish, [future], False)
        try:
            return await future
        finally:
            over.cancel()
            self._count -= 1
            for topic, queue in places:
                self._forget(topic, queue, future)

    def _forget(self, topic: str, queue: int | None, future: asyncio.Future[bool]) -> None:
        queues = self._by_topic.get(topic)
        waiting = queues.get(queue) if queues is not None else None
        if queues is not None and waiting is not None:
            waiting.discard(future)
            if not waiting:
                del queues[queue]
            if not queues:
                del self._by_topic[topic]

    def wake(self, topics: Iterable[str]) -> None:
        """Wake all consumers that wait for one of these topics, because the topic has changed."""
        # Usually no consumer waits. Then a commit pays only for this comparison.
        for topic in topics if self._count else ():
            # Remove all waiters at once: consumers that find nothing register again.
            for waiting in self._by_topic.pop(topic, {}).values():
                _finish(waiting)

    def wake_queues(self, places: Iterable[tuple[str, int]]) -> None:
        """Wake consumers that wait for one of these queues, because rows have become visible in it."""
        for topic, queue in places if self._count else ():
            queues = self._by_topic.get(topic)
            if queues is not None:
                _finish(queues.pop(queue, ()))
                # Also wake consumers that wait for any queue of the topic.
                _finish(queues.pop(None, ()))
                if not queues:
                    del self._by_topic[topic]


def _finish(waiting: Iterable[asyncio.Future[bool]], is_woken: bool = True) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(is_woken)


@dataclass(slots=True)
class _Line:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class WaitQueue:
    """One line of consumers per key. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self.length = 0

    @asynccontextmanager
    async def turn(self, key: Hashable, until_s: float) -> AsyncIterator[bool]:
        """Wait for the turn until `until_s` on the loop's clock. Yields False if the time is up. Raises OverLimit."""
        # The limit covers all lines, because each waiting consumer holds a task and a connection.
        if self.length >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self.length} consumers wait already; ask without waiting, or try again")
        line = self._lines.setdefault(key, _Line())
        line.length += 1
        self.length += 1
        has_turn = False
        try:
            if line.length == 1:
                has_turn = await line.turn.acquire()  # never blocks: the line was empty
            else:
                # The wait for the turn counts as waiting time: a consumer is answered in time even if its turn never
                # comes.
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until_s):
                        has_turn = await line.turn.acquire()
            yield has_turn
        finally:
            if has_turn:
                line.turn.release()
            line.length -= 1
            self.length -= 1
            if not line.length:
                # Keys contain names that clients choose, so remove a line when no consumer waits in it.
                del self._lines[key]
