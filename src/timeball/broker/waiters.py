"""Consumers that wait for something visible, by topic and by queue.

A consumer that finds nothing waits on its topic and is woken by the commit that makes something visible: no polling
interval stands between a release and its consumer. Waiting is bounded in time and in number.

Consumers that wait for the same messages stand in one line: the first one watches and passes the turn on. A thousand
consumers of a group may wait for one topic. If each were woken by each message, each message would cost a thousand
looks to serve one of them; in a line it costs two: by the one that gets it, and by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Hashable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from timeball import limits
from timeball.errors import OverLimit


class Waiters:
    """Consumers that wait, by topic, and by queue where they say which.

    A consumer of RocketMQ's waits once for each queue it reads, so a topic may have hundreds of pulls waiting, and a
    message concerns one of them. A cancelled consumer leaves by itself: each has a future of its own.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[int | None, set[asyncio.Future[bool]]]] = {}
        self._count = 0

    async def wait(self, topic: str, timeout_s: float, queue: int | None = None) -> bool:
        """Wait for something new in `topic`, or in one queue of it; false when the time is up."""
        return await self._wait([(topic, queue)], timeout_s)

    async def wait_any(self, topics: Collection[str], timeout_s: float) -> bool:
        """Wait for something new in one of `topics`; false when the time is up."""
        return await self._wait([(topic, None) for topic in topics], timeout_s)

    async def _wait(self, places: list[tuple[str, int | None]], timeout_s: float) -> bool:
        # A bound on futures: a client may open any number of long polls.
        if self._count >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self._count} consumers wait already; pull without waiting, or try again")
        # One future for all its topics: when the first of them wakes it, the consumer looks at each again.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        for topic, queue in places:
            self._by_topic.setdefault(topic, {}).setdefault(queue, set()).add(future)
        self._count += 1
        # Not `asyncio.timeout`, which cancels a task: it costs three times as much.
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
        """Wake all that wait for one of these topics: something about it has changed."""
        # Mostly no consumer waits, and then a commit pays one comparison here.
        for topic in topics if self._count else ():
            # Taken out whole: those that look in vain come back as new waiters.
            for waiting in self._by_topic.pop(topic, {}).values():
                _finish(waiting)

    def wake_queues(self, places: Iterable[tuple[str, int]]) -> None:
        """Wake those that wait for one of these queues: rows have become visible in it."""
        for topic, queue in places if self._count else ():
            queues = self._by_topic.get(topic)
            if queues is not None:
                _finish(queues.pop(queue, ()))
                # Also those that wait for any queue of the topic.
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
    """One line for each key. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self.length = 0

    @asynccontextmanager
    async def turn(self, key: Hashable, until_s: float) -> AsyncIterator[bool]:
        """Wait for the turn until `until_s` on the loop's clock; false when the time is up. Raise OverLimit."""
        # Over all lines: each who waits holds a task and a connection.
        if self.length >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self.length} consumers wait already; ask without waiting, or try again")
        line = self._lines.setdefault(key, _Line())
        line.length += 1
        self.length += 1
        has_turn = False
        try:
            if line.length == 1:
                has_turn = await line.turn.acquire()  # at once
            else:
                # The wait for the turn counts too: a consumer is answered in time even if its turn never comes.
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
                # Keys hold names that clients choose, so a line lives only while a consumer waits in it.
                del self._lines[key]
