"""Topics with a limit: at most so many messages become visible to consumers in a second (decision 0131).

A row of a limited topic gets its queue and offset as in other topics. But consumers see each queue only up to an offset
that the META row `shown/<topic>` contains. A step appends this row with greater offsets, and shows the messages when it
is durable. So the state survives a crash, never goes back, and a follower has it too.

Messages are shown in the order of the log, over all queues of the topic. Their number costs no memory: a step reads the
next entries of the queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.registry.meta import MetaTable
from timeball.broker.registry.topics import Topic, Topics
from timeball.io.clock import SchedulerClock
from timeball.log.queue_index import QueueIndex
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.errors import Unavailable

# No second has more messages than the limit, also if two readings of the clock round a millisecond away.
WINDOW_MS = limits.SECOND_MS + 1
STEPS_PER_SECOND = 50
# The messages of so many steps may be shown at once, to make up for late steps.
STEPS_AT_ONCE = 3
ENTRIES_MERGED = 4_096  # of all queues in one step: with 1,024 queues it takes some 3 ms
CLOCK_READ_MS = 1_000  # see ticker.py
TOPICS_AT_ONCE = 16  # steps of topics between two turns of the loop, about three milliseconds


@dataclass(slots=True, eq=False)
class Limited:
    """A topic with a limit. Times are of `SchedulerClock.elapsed_ms`."""

    topic: Topic
    rate: int  # messages in a second
    read_ms: int  # when `credit` was computed
    credit: float = 1.0  # messages that may be shown
    recent: deque[tuple[int, int]] = field(default_factory=deque)  # (time, messages) shown in the last second
    is_writing: bool = False  # a step is not durable yet

    @property
    def indexes(self) -> list[QueueIndex]:
        """The queues."""
        return [queue.index for queue in self.topic.queues]

    @property
    def hidden_rows(self) -> int:
        """The number of messages that consumers do not see yet."""
        return sum(index.end_offset - index.max_offset for index in self.indexes)

    @property
    def _step_rows(self) -> int:
        return max(1, self.rate // STEPS_PER_SECOND)

    def free_rows(self, now_ms: int) -> int:
        """Compute how many messages may be shown now."""
        while self.recent and self.recent[0][0] <= now_ms - WINDOW_MS:
            self.recent.popleft()
        earned = max(0, now_ms - self.read_ms) * self.rate / limits.SECOND_MS
        self.credit = min(float(self._step_rows * STEPS_AT_ONCE), self.credit + earned)
        self.read_ms = now_ms
        free_rows = min(int(self.credit), self.rate - sum(rows for _, rows in self.recent))
        # Fewer than a step only if they are all: each step costs a row of the log.
        return free_rows if free_rows >= min(self._step_rows, self.hidden_rows) else 0

    def wait_ms(self, now_ms: int) -> int:
        """Compute the time until messages may be shown, after `free_rows` was 0."""
        missing = min(self._step_rows, self.hidden_rows) - self.credit
        credit_ms = int(missing * limits.SECOND_MS / self.rate) + 1 if missing > 0 else 1
        window_ms = self.recent[0][0] + WINDOW_MS - now_ms if self.recent else 0
        is_full = self.rate - sum(rows for _, rows in self.recent) < min(self._step_rows, self.hidden_rows)
        return max(1, window_ms if is_full else credit_ms)


class Pacing:
    """Shows the messages of limited topics. Belongs to the event loop."""

    def __init__(
        self,
        waiters: Waiters,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        topics: Topics,
        shown: MetaTable[dict[int, int]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Limit the topics as they were before the start. `shown` may be written already."""
        self._waiters, self._clock, self._writer = waiters, clock, writer
        self._topics, self._shown, self._on_failure = topics, shown, on_failure
        self._limited: dict[str, Limited] = {}
        self._active: dict[str, Limited] = {}  # those that may have hidden messages
        self._wake = asyncio.Event()
        self._is_stepping = False
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        topics.on_change = self._follow
        topics.indexes.on_hidden = self._on_hidden
        for topic in topics.all():
            if topic.max_per_second is not None and topic.name in shown.values:
                self._restore(topic, topic.max_per_second)
            else:
                self._follow(topic)
        self._shown.put((name, None) for name in shown.values.keys() - self._limited.keys())

    def held(self) -> dict[str, int]:
        """Count the messages that wait for their topic's limit, by limited topic."""
        return {name: limited.hidden_rows for name, limited in self._limited.items()}

    async def close(self) -> None:
        """End the task."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # -- a manual clock (broker/virtual_time.py) ---------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while a step of the present time is not done."""
        is_woken = self._task is not None and self._wake.is_set()
        return is_woken or self._is_stepping or any(limited.is_writing for limited in self._active.values())

    def wait_ms(self) -> int | None:
        """Compute the time until the next step. None without hidden messages."""
        now_ms = self._clock.elapsed_ms()
        return min(
            (
                0 if limited.free_rows(now_ms) else limited.wait_ms(now_ms)
                for limited in self._active.values()
                if limited.hidden_rows and not limited.is_writing
            ),
            default=None,
        )

    def wake(self) -> None:
        """Read the clock again, because it has moved."""
        if self._active:
            self._wake.set()

    # -- inside ------------------------------------------------------------------------------------------------

    def _restore(self, topic: Topic, rate: int) -> None:
        now_ms = self._clock.elapsed_ms()
        # The messages of the last second before the start are not known, so it counts as full.
        limited = Limited(topic, rate, now_ms, recent=deque([(now_ms, rate)]))
        self._limited[topic.name] = limited
        self._topics.indexes.limited.add(topic.name)
        shown = self._shown.values[topic.name]
        for index in limited.indexes:
            index.show(shown.get(index.queue_id, 0))
        self._on_hidden(topic.name)

    def _follow(self, topic: Topic) -> None:
        """Follow a change of a topic, whose row was appended just now."""
        name, rate = topic.name, topic.max_per_second
        limited = self._limited.get(name)
        if rate is None:
            if limited is not None:
                self._end(name, limited)
        elif limited is None:
            # The end of an earlier limit may not be durable yet. Then its messages wait for this one.
            now_ms, is_again = self._clock.elapsed_ms(), name in self._topics.indexes.limited
            recent = deque([(now_ms, rate)] if is_again else [])
            self._limited[name] = limited = Limited(topic, rate, now_ms, recent=recent)
            # No row of the topic may come between its own row and this one, so there is no await before.
            self._shown.put([(name, {index.queue_id: index.max_offset for index in limited.indexes})])
            self._topics.indexes.limited.add(name)
            if is_again:
                self._on_hidden(name)
        else:
            limited.rate = rate
            self._wake.set()

    def _end(self, name: str, limited: Limited) -> None:
        del self._limited[name]
        self._active.pop(name, None)
        change = self._shown.changed([(name, None)])
        self._writer.append(change.rows, on_durable=partial(self._show_all, limited))
        change.keep()

    def _show_all(self, limited: Limited) -> None:
        name = limited.topic.name
        if name in self._limited:  # again
            return
        self._topics.indexes.limited.discard(name)
        for index in limited.indexes:
            index.show(index.end_offset)
        self._waiters.wake([name])

    def _on_hidden(self, name: str) -> None:
        if name not in self._limited:  # the end of the limit is being written
            return
        self._active[name] = self._limited[name]
        self._wake.set()
        if self._task is None:  # a broker without limits needs no task
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                self._is_stepping = True
                waits_ms = await self._step_all()
            except Unavailable:  # the broker is stopping
                return
            finally:
                self._is_stepping = False
            # A machine gives no notice when it resumes from suspension, so the clock is read regularly.
            timeout_s = min(*waits_ms, CLOCK_READ_MS) / 1000 if waits_ms else None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _step_all(self) -> list[int]:
        """Step the active topics. Returns the ms until the next steps of those that must wait."""
        waits_ms: list[int] = []
        for number, limited in enumerate([*self._active.values()], 1):
            # Another task may have ended this limit meanwhile.
            if self._active.get(limited.topic.name) is limited:
                wait_ms = self._step(limited)
                if wait_ms is not None:
                    waits_ms.append(wait_ms)
            if number % TOPICS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return waits_ms

    def _step(self, limited: Limited) -> int | None:
        """Show the next messages of a topic, if it may. Returns the ms until the next step. None: until woken."""
        if limited.is_writing:
            return None
        if not limited.hidden_rows:
            self._active.pop(limited.topic.name, None)
            return None
        now_ms = self._clock.elapsed_ms()
        rows = limited.free_rows(now_ms)
        if not rows:
            return limited.wait_ms(now_ms)
        indexes = limited.indexes
        ends, rows = next_ends([each for each in indexes if each.max_offset < each.end_offset], rows)
        shown = {index.queue_id: ends.get(index.queue_id, index.max_offset) for index in indexes}
        change = self._shown.changed([(limited.topic.name, shown)])
        self._writer.append(change.rows, on_durable=partial(self._on_durable, limited, ends, rows))
        change.keep()
        limited.is_writing = True
        limited.credit -= rows
        return None

    def _on_durable(self, limited: Limited, ends: dict[int, int], rows: int) -> None:
        limited.is_writing = False
        limited.recent.append((self._clock.elapsed_ms(), rows))
        name = limited.topic.name
        if self._limited.get(name) is limited:  # else the limit was removed, or the topic
            for queue_id, offset in ends.items():
                limited.topic.queues[queue_id].index.show(offset)
            self._waiters.wake_queues([(name, queue_id) for queue_id in ends])
        self._wake.set()


def next_ends(indexes: Sequence[QueueIndex], rows: int) -> tuple[dict[int, int], int]:
    """Find the next hidden messages of a topic by sequence number: at most `rows`, and at least one.

    `indexes` are the queues with hidden messages. Returns the offset after them in each queue, and their number.
    """
    count = min(rows, max(1, ENTRIES_MERGED // len(indexes)))
    parts = [index.read(index.max_offset, count, is_kept=False, hidden=True)["seq"] for index in indexes]
    lengths = np.array([len(part) for part in parts])
    seqs, owner = np.concatenate(parts).astype(np.int64), np.repeat(np.arange(len(parts)), lengths)
    order = np.argsort(seqs)
    # A message that was not read may precede those after the last one read in its queue.
    has_more = lengths < np.array([index.end_offset - index.max_offset for index in indexes])
    if has_more.any():
        bound_seq = seqs[np.cumsum(lengths) - 1][has_more].min()
        order = order[seqs[order] <= bound_seq]
    shown = np.bincount(owner[order[:rows]], minlength=len(parts)).tolist()
    ends = {
        index.queue_id: index.max_offset + number
        for index, number in zip(indexes, shown, strict=True)
        if number
    }
    return ends, sum(shown)
