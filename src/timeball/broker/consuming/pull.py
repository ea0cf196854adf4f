"""Reading by offset: visible rows of some queues, or a place to wait for them.

A consumer that finds nothing waits on its topic and is woken by the commit that makes something visible: no
polling interval stands between a release and its consumer. Waiting is bounded in time and in number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.registry.topics import Topic
from timeball.errors import NotFound, OutOfRange, OverLimit
from timeball.log.reader import LogReader
from timeball.message import Int64Array


class Waiters:
    """Consumers that wait, by topic, and by queue where they say which.

    A consumer of RocketMQ's waits once for each queue it reads, so a topic may have hundreds of pulls waiting, and a
    message concerns one of them. A cancelled consumer leaves by itself: each has a future of its own.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[int | None, set[asyncio.Future[None]]]] = {}
        self._count = 0

    async def wait(self, topic: str, timeout_s: float, queue: int | None = None) -> bool:
        """Wait for something new in `topic`, or in one queue of it; false when the time is up."""
        return await self._wait([(topic, queue)], timeout_s)

    async def wait_any(self, topics: Collection[str], timeout_s: float) -> bool:
        """Wait for something new in one of `topics`; false when the time is up."""
        return await self._wait([(topic, None) for topic in topics], timeout_s)

    async def _wait(self, places: list[tuple[str, int | None]], timeout_s: float) -> bool:
        if self._count >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self._count} consumers wait already; pull without waiting, or try again")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic, queue in places:
            self._by_topic.setdefault(topic, {}).setdefault(queue, set()).add(future)
        self._count += 1
        try:
            async with asyncio.timeout(timeout_s):
                await future
            return True
        except TimeoutError:
            return False
        finally:
            self._count -= 1
            for topic, queue in places:
                self._forget(topic, queue, future)

    def _forget(self, topic: str, queue: int | None, future: asyncio.Future[None]) -> None:
        queues = self._by_topic.get(topic)
        waiting = queues.get(queue) if queues is not None else None
        if queues is not None and waiting is not None:
            waiting.discard(future)
            if not waiting:
                del queues[queue]
            if not queues:
                del self._by_topic[topic]

    def wake(self, topics: Iterable[str]) -> None:
        """Something about these topics has changed: whoever waits for them looks again."""
        for topic in topics if self._count else ():
            for waiting in self._by_topic.pop(topic, {}).values():
                _finish(waiting)

    def wake_queues(self, places: Iterable[tuple[str, int]]) -> None:
        """Something has become visible in these queues."""
        for topic, queue in places if self._count else ():
            queues = self._by_topic.get(topic)
            if queues is not None:
                _finish(queues.pop(queue, ()))
                _finish(queues.pop(None, ()))
                if not queues:
                    del self._by_topic[topic]


def _finish(waiting: Iterable[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def locate(topic: Topic, offsets: dict[int, int], rows: int) -> Int64Array:
    """Sequence numbers of up to `rows` visible rows from each queue's offset on; fair between the queues."""
    rows = min(rows, limits.PULL_ROWS_MAX)
    left = {queue: offset for queue, offset in offsets.items() if _available(topic, queue, offset)}
    taken = []
    while left and rows > 0:
        share = max(1, rows // len(left))
        for queue, offset in sorted(left.items()):
            entries = topic.queues[queue].index.read(offset, min(share, rows))
            taken.append(entries["seq"].astype(np.int64))
            rows -= len(entries)
            if len(entries) < share or rows == 0:
                del left[queue]
            else:
                left[queue] = offset + len(entries)
            if rows == 0:
                break
    return np.concatenate(taken) if taken else np.empty(0, np.int64)


def _available(topic: Topic, queue: int, offset: int) -> bool:
    if not 0 <= queue < len(topic.queues):
        raise NotFound(f"topic {topic.name!r} has no queue {queue}; it has {len(topic.queues)}")
    index = topic.queues[queue].index
    if not index.min_offset <= offset <= index.max_offset:
        raise OutOfRange(
            f"queue {queue} of {topic.name!r} keeps offsets {index.min_offset} to {index.max_offset}, not {offset}"
        )
    return offset < index.max_offset


def read(reader: LogReader, seqs: Int64Array) -> pa.RecordBatch:
    """The rows, as many as fit into one answer, at least one (reader thread)."""
    rows = reader.take(seqs)
    while rows.num_rows > 1 and rows.nbytes > limits.PULL_BYTES_MAX:
        rows = rows.slice(0, rows.num_rows // 2)
    return rows
