"""Topics with a limit: `max_per_second` messages become visible to consumers in a second at most (decision 0131).

A row of a limited topic gets its queue and offset as in other topics. But consumers see each queue only up to an offset
that the META row `shown/<topic>` contains. The messages after it are *hidden*. A step appends this row with greater
offsets, and shows the messages when it is durable. So the state survives a crash, never goes back, and a follower has
it too.

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

# A second and a millisecond, because two readings of the clock may be rounded: no second has more than the limit.
WINDOW_MS = limits.SECOND_MS + 1
STEPS_PER_SECOND = 50
# The messages of this many steps may be shown at once, to make up for late steps.
STEPS_AT_ONCE = 3
ENTRIES_MERGED = 4_096  # entries of all queues read in one step: with 1,024 queues it takes some 3 ms
CLOCK_READ_MS = 1_000  # see ticker.py
TOPICS_AT_ONCE = 16  # topics that are stepped between two turns of the event loop, about three milliseconds


@dataclass(slots=True, eq=False)
class Limited:
    """A topic with a limit. Times are of `SchedulerClock.elapsed_ms`."""

    topic: Topic
    rate: int  # messages in a second
    read_ms: int  # when `credit` was computed
    credit: float = 1.0  # the messages that the rate has allowed and that were not shown
    recent: deque[tuple[int, int]] = field(default_factory=deque)  # (time, messages) shown in the last second
    is_writing: bool = False  # a step is not durable yet

    @property
    def indexes(self) -> list[QueueIndex]:
        """The indexes of the topic's queues."""
        return [queue.index for queue in self.topic.queues]

    @property
    def hidden_rows(self) -> int:
        """The number of messages that consumers do not see yet."""
        return sum(index.end_offset - index.max_offset for index in self.indexes)

    @property
    def _full_step_rows(self) -> int:
        return max(1, self.rate // STEPS_PER_SECOND)

    @property
    def _step_rows(self) -> int:
        """The number of messages that a step shows at least: a full step, or all hidden messages if they are fewer."""
        return min(self._full_step_rows, self.hidden_rows)

    @property
    def _window_rows(self) -> int:
        """The number of messages that the limit still allows in the last second."""
        return self.rate - sum(rows for _, rows in self.recent)

    def free_rows(self, now_ms: int) -> int:
        """Compute how many messages may be shown now. 0 if they are fewer than a step."""
        while self.recent and self.recent[0][0] <= now_ms - WINDOW_MS:
            self.recent.popleft()
        earned = max(0, now_ms - self.read_ms) * self.rate / limits.SECOND_MS
        self.credit = min(float(self._full_step_rows * STEPS_AT_ONCE), self.credit + earned)
        self.read_ms = now_ms
        free_rows = min(int(self.credit), self._window_rows)
        # No smaller steps, because each step costs a row of the log.
        return free_rows if free_rows >= self._step_rows else 0

    def wait_ms(self, now_ms: int) -> int:
        """Compute the time until messages may be shown, in ms. Call it only after `free_rows` returned 0."""
        missing = self._step_rows - self.credit
        credit_ms = int(missing * limits.SECOND_MS / self.rate) + 1 if missing > 0 else 1
        window_ms = self.recent[0][0] + WINDOW_MS - now_ms if self.recent else 0
        return max(1, window_ms if self._window_rows < self._step_rows else credit_ms)


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
        """Restore the limits from before the start. `shown` is the table of the META rows, and may be written already.

        `on_failure` is called with the exception if the task fails.
        """
        self._waiters, self._clock, self._writer = waiters, clock, writer
        self._topics, self._shown, self._on_failure = topics, shown, on_failure
        self._limited: dict[str, Limited] = {}
        self._active: dict[str, Limited] = {}  # limited topics that may have hidden messages
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
        """Count the hidden messages of each limited topic, by name."""
        return {name: limited.hidden_rows for name, limited in self._limited.items()}

    async def close(self) -> None:
        """End the task, and wait for its end."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # -- a manual clock (broker/virtual_time.py) ---------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while a step may be due now or is not durable yet."""
        is_woken = self._task is not None and self._wake.is_set()
        return is_woken or self._is_stepping or any(limited.is_writing for limited in self._active.values())

    def wait_ms(self) -> int | None:
        """Compute the time until the next step, in ms. None without hidden messages."""
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
        """Limit a topic as before the start: show its messages up to the offsets of its META row."""
        now_ms = self._clock.elapsed_ms()
        # The messages of the last second before the start are not known, so it counts as full.
        limited = Limited(topic, rate, now_ms, recent=deque([(now_ms, rate)]))
        self._limited[topic.name] = limited
        self._topics.indexes.limited_topics.add(topic.name)
        shown = self._shown.values[topic.name]
        for index in limited.indexes:
            index.show(shown.get(index.queue_id, 0))
        self._on_hidden(topic.name)

    def _follow(self, topic: Topic) -> None:
        """Begin, change or end the limit of a topic. Called when the row of the topic's change was just appended."""
        name, rate = topic.name, topic.max_per_second
        limited = self._limited.get(name)
        if rate is None:
            if limited is not None:
                self._end(name, limited)
        elif limited is None:
            # The end of an earlier limit may not be durable yet. Then its hidden messages wait for this limit, and the
            # last second counts as full.
            now_ms, was_limited = self._clock.elapsed_ms(), name in self._topics.indexes.limited_topics
            recent = deque([(now_ms, rate)] if was_limited else [])
            self._limited[name] = limited = Limited(topic, rate, now_ms, recent=recent)
            # No row of the topic may come between its own row and this one, so there is no await before.
            self._shown.put([(name, {index.queue_id: index.max_offset for index in limited.indexes})])
            self._topics.indexes.limited_topics.add(name)
            if was_limited:
                self._on_hidden(name)
        else:
            limited.rate = rate
            self._wake.set()

    def _end(self, name: str, limited: Limited) -> None:
        """End a limit: delete its META row, and show all messages when that is durable."""
        del self._limited[name]
        self._active.pop(name, None)
        change = self._shown.build_change([(name, None)])
        self._writer.append(change.rows, on_durable=partial(self._show_all, limited))
        change.apply()

    def _show_all(self, limited: Limited) -> None:
        """Show all messages of a topic whose limit has ended, unless it has a limit again."""
        name = limited.topic.name
        if name in self._limited:
            return
        self._topics.indexes.limited_topics.discard(name)
        for index in limited.indexes:
            index.show(index.end_offset)
        self._waiters.wake([name])

    def _on_hidden(self, name: str) -> None:
        """Let the task show the hidden messages of a topic. The first call starts the task."""
        if name not in self._limited:  # the end of the limit is being written
            return
        self._active[name] = self._limited[name]
        self._wake.set()
        if self._task is None:  # a broker without limits needs no task
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Report the exception with which the task has failed, if any."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _run(self) -> None:
        """Step the active topics when their time has come, until `close`."""
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
        """Step the active topics. Returns the times in ms until the next steps of the topics that must wait."""
        waits_ms: list[int] = []
        for number, limited in enumerate([*self._active.values()], 1):
            # The limit may have ended during the sleep below.
            if self._active.get(limited.topic.name) is limited:
                wait_ms = self._step(limited)
                if wait_ms is not None:
                    waits_ms.append(wait_ms)
            if number % TOPICS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return waits_ms

    def _step(self, limited: Limited) -> int | None:
        """Append the META row that shows the next messages of a topic, if its limit allows it.

        Returns the ms until the next step. None if the topic waits for a call of `_on_durable` or `_on_hidden`.
        """
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
        hidden_indexes = [index for index in indexes if index.max_offset < index.end_offset]
        ends, rows = next_ends(hidden_indexes, rows)
        shown = {index.queue_id: ends.get(index.queue_id, index.max_offset) for index in indexes}
        change = self._shown.build_change([(limited.topic.name, shown)])
        self._writer.append(change.rows, on_durable=partial(self._on_durable, limited, ends, rows))
        change.apply()
        limited.is_writing = True
        limited.credit -= rows
        return None

    def _on_durable(self, limited: Limited, ends: dict[int, int], rows: int) -> None:
        """Show the messages of a step, whose META row is durable. `ends` contains the new offset of each queue."""
        limited.is_writing = False
        limited.recent.append((self._clock.elapsed_ms(), rows))
        name = limited.topic.name
        if self._limited.get(name) is limited:  # else the limit or the topic was removed
            for queue_id, offset in ends.items():
                limited.topic.queues[queue_id].index.show(offset)
            self._waiters.wake_queues([(name, queue_id) for queue_id in ends])
        self._wake.set()


def next_ends(indexes: Sequence[QueueIndex], rows: int) -> tuple[dict[int, int], int]:
    """Find the next hidden messages of a topic in the order of the log: at most `rows`, and at least one.

    `indexes` are the queues with hidden messages. At most about ENTRIES_MERGED entries are read. Returns the offset
    after the messages in each queue that has some, by queue number, and the number of messages.
    """
    # The entries of each queue are sorted, so the first `count` of each are merged.
    count = min(rows, max(1, ENTRIES_MERGED // len(indexes)))
    parts = [index.read(index.max_offset, count, is_kept=False, hidden=True)["seq"] for index in indexes]
    lengths = np.array([len(part) for part in parts])
    seqs, owner = np.concatenate(parts).astype(np.int64), np.repeat(np.arange(len(parts)), lengths)
    order = np.argsort(seqs)
    # An entry that was not read comes after the last entry that was read in its queue. So only entries up to the
    # earliest of these last entries are certain to be the next entries of the topic.
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
