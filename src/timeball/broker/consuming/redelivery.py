"""Redelivery of messages whose leases in memory end: a task writes them to their group again at the earliest deadline.

The task voids the receipt of a position before anything is awaited, so that no acknowledgement counts while its message
is being written. The position is done when the new row is durable, never before. If the row cannot be written (the disk
is full), the task tries again after `AGAIN_MS`. Until then the receipt is valid again. A message whose frame in the log
is damaged can never be written again: the task reports it in the broker's log as lost to its group, and writes the
others. In order nothing is written: the positions are leased again before all others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming import redelivery_rows, retry
from timeball.broker.consuming.leases import NO_RECEIPT, Lease, Leases, OpenCount, QueueLeases
from timeball.broker.registry.lease_counts import LeaseCounts, topic_of
from timeball.broker.registry.tables import Tables
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, TimeballError
from timeball.model.message import Kind
from timeball.schedule.ticker import CLOCK_LOOK_MS

logger = logging.getLogger(__name__)

AGAIN_MS = 1_000
PART_ROWS, PART_BYTES = 4_096, 8 * 1024 * 1024  # bounds of one read and write
PARTS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Voided:
    """A position whose message is being written, and the `pop_ms` of its voided receipt."""

    offset: int
    lease: Lease
    pop_ms: int


SWEEP_ENTRIES_MIN = 1_024

_Entry = tuple[int, int, int, list[int], QueueLeases]  # deadline_ms, serial, pop_ms, offsets, queue


class Deadlines:
    """The ends of leases: a heap with one entry for each batch of positions that share a deadline.

    An acknowledgement leaves its entry in the heap, and the entry is skipped at its deadline. So that fast consumers
    with long leases do not fill the memory, the heap is swept when it has more than twice as many entries as there are
    open positions (`count`).
    """

    def __init__(self, count: OpenCount) -> None:
        self._heap: list[_Entry] = []
        self._serials = itertools.count()  # orders equal deadlines, because queues cannot be compared
        self._count = count

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, queue: QueueLeases, offsets: list[int], pop_ms: int, deadline_ms: int) -> bool:
        """Add positions that were leased together. True if theirs is now the earliest deadline."""
        entry = (deadline_ms, next(self._serials), pop_ms, offsets, queue)
        # One entry for all positions of a request: they end together, and most are acknowledged before.
        heapq.heappush(self._heap, entry)
        # Acknowledged leases leave their entries behind, until these are more than half of the heap.
        if len(self._heap) > SWEEP_ENTRIES_MIN + 2 * self._count.rows:
            self._heap = [e for e in self._heap if any(True for _ in _live(e))]
            heapq.heapify(self._heap)
        return bool(self._heap) and self._heap[0] is entry

    def next_ms(self) -> int | None:
        """Find the earliest deadline (ms). None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> list[tuple[QueueLeases, list[int]]]:
        """Remove the positions whose leases have ended by `now_ms`, and return them, each position once."""
        due = []
        seen: set[tuple[int, int]] = set()
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            queue = entry[4]
            # A deadline that was changed and changed back has two entries, and both are live.
            offsets = [offset for offset in _live(entry) if (id(queue), offset) not in seen]
            seen.update((id(queue), offset) for offset in offsets)
            if offsets:
                due.append((queue, offsets))
        return due


def _live(entry: _Entry) -> Iterator[int]:
    """Yield the positions whose lease still has this deadline. A lease whose end was changed has another entry."""
    deadline_ms, _, pop_ms, offsets, queue = entry
    for offset in offsets:
        lease = queue.lease_of(offset, pop_ms)
        if lease is not None and lease.deadline_ms == deadline_ms:
            yield offset


class Redelivery:
    """Writes messages to their groups again. Belongs to the event loop.

    The task starts with the first deadline, and `close` ends it.
    """

    def __init__(
        self,
        appender: Appender,
        waiters: Waiters,
        leases: Leases,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        lease_counts: LeaseCounts,
        reader_thread: Executor,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._appender, self._waiters, self._leases = appender, waiters, leases
        self._settings, self._clock, self._log = settings, clock, log
        self._tables, self._lease_counts = tables, lease_counts
        self._reader_thread, self._on_failure = reader_thread, on_failure
        self._deadlines = Deadlines(leases.count)
        self._wake = asyncio.Event()
        self._too_wide: set[QueueLeases] = set()
        self._slots = asyncio.Semaphore(PARTS_AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        leases.on_too_wide = self.narrow

    def wake(self) -> None:
        """Make the task read the clock again, and process the leases that have ended."""
        self._wake.set()

    def expect(self, queue: QueueLeases, offsets: list[int], pop_ms: int, deadline_ms: int) -> None:
        """Bring these positions back at `deadline_ms` unless they are acknowledged before."""
        if self._deadlines.add(queue, offsets, pop_ms, deadline_ms):
            self._wake.set()
        if self._task is None:
            # Started late, because a broker whose consumers only pull never needs this task.
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_task_end)

    def narrow(self, queue: QueueLeases) -> None:
        """Write a queue's oldest leases to the log as messages, because they keep its stored offset too far back."""
        self._too_wide.add(queue)
        self._wake.set()

    async def close(self) -> None:
        """End the task. A write that has begun is completed."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def write(
        self, queue: QueueLeases, offsets: list[int], *, later: bool = False, dead: bool = False
    ) -> None:
        """Write these messages to the group again, durably. When this raises, they are leased as before.

        They become scheduled messages due at the ends of their leases (`later`), dead letters (`dead`), or visible
        messages.
        """
        await self._write(queue, _void(queue, offsets), later=later, dead=dead)

    # -- the task ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            now_ms = self._clock.elapsed_ms()
            jobs = [job for due in self._deadlines.pop_due(now_ms) for job in self._expired(*due)]
            # As scheduled messages, these positions are done, so the group's stored offset can move on.
            jobs += [(queue, _void(queue, _oldest(queue)), True) for queue in self._too_wide]
            self._too_wide.clear()
            if jobs:
                # Each job has another queue, so a failed job must not hold back the others.
                await asyncio.gather(*(self._try_write(*job) for job in jobs))
                continue
            next_ms = self._deadlines.next_ms()
            # A machine gives no notice when it resumes from suspension, so the clock is read regularly (see ticker.py).
            timeout = None if next_ms is None else min(max(0, next_ms - now_ms), CLOCK_LOOK_MS) / 1000
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _expired(
        self, queue: QueueLeases, offsets: list[int]
    ) -> Iterator[tuple[QueueLeases, list[_Voided], bool]]:
        in_order = [offset for offset in offsets if queue.in_flight[offset].in_order]
        for offset in in_order:
            queue.in_flight[offset].times += 1
            # In order, a message goes back to its own queue: a copy in the retry topic would come after later messages.
            queue.give_back(offset)
        if in_order:
            self._waiters.wake([queue.topic])
        others = _void(queue, [offset for offset in offsets if offset in queue.in_flight])
        if others:
            yield queue, others, False

    async def _try_write(self, queue: QueueLeases, voided: list[_Voided], later: bool) -> None:
        try:
            await self._write(queue, voided, later=later)
        except TimeballError as error:
            logger.warning(
                "messages come back later group=%s topic=%s messages=%d reason=%s",
                queue.group,
                queue.topic,
                len(voided),
                error,
            )

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)  # without the task, no lease would end any more

    # -- writing -----------------------------------------------------------------------------------------------

    async def _write(
        self, queue: QueueLeases, voided: list[_Voided], *, later: bool, dead: bool = False
    ) -> None:
        was_full = queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX
        try:
            for chunk in _chunks(voided):
                # Bounds the bodies in memory: in a queue of large messages, thousands of leases may end at once.
                async with self._slots:
                    await self._write_chunk(queue, chunk, later=later, dead=dead)
                for position in chunk:
                    # Not earlier: while the copy is not durable, a crash must find the position open.
                    queue.done(position.offset)
        finally:
            for position in voided:
                # Not written, or the write failed: the lease is valid as before, and the task soon tries again.
                if queue.in_flight.get(position.offset) is position.lease:
                    self._restore(queue, position)
            # Also after an error: some parts may have been written before, and their positions are done.
            self._leases.store(queue)
        if was_full or dead:
            self._waiters.wake([queue.topic])

    def _restore(self, queue: QueueLeases, position: _Voided) -> None:
        lease = position.lease
        lease.pop_ms = position.pop_ms
        # Not at once, because the reason of the failure, for example a full disk, seldom ends within a millisecond.
        lease.deadline_ms = max(lease.deadline_ms, self._clock.elapsed_ms() + AGAIN_MS)
        self.expect(queue, [position.offset], lease.pop_ms, lease.deadline_ms)

    async def _write_chunk(
        self, queue: QueueLeases, chunk: list[_Voided], *, later: bool, dead: bool
    ) -> None:
        # Retention may have removed rows, and leases are forgotten when the group's offset was changed.
        kept_positions = [
            position
            for position in chunk
            if position.lease.seq >= self._log.reader.first_seq
            and queue.in_flight.get(position.offset) is position.lease
        ]
        rows, kept_positions = await self._read(queue, kept_positions)
        if not kept_positions:
            return
        self._log.writer.check_admission()
        now_ms = self._clock.now_ms()
        times = redelivery_rows.times_after(rows)
        # -1: any number of attempts is too many, so all messages go to the dead letters.
        times_max = -1 if dead else self._tables.groups.times_max(queue.group)
        retry_name = redelivery_rows.retry_topic(queue.group, queue.topic)
        topics = redelivery_rows.topics_after(
            retry_name, retry.dead_letter_topic(queue.group), times, times_max
        )
        for name in set(topics):
            self._tables.topics.ensure(name, 1)
        due_ms = np.array(
            [self._clock.as_wall(position.lease.deadline_ms) for position in kept_positions], dtype=np.int64
        )
        batch = redelivery_rows.build(
            rows,
            kind=Kind.SCHEDULED if later else Kind.MESSAGE,
            topics=topics,
            properties=_properties(rows, queue, kept_positions),
            times=times,
            due_ms=due_ms if later else None,
            source_seq=rows.column("seq") if later else None,
            now_ms=now_ms,
            host=self._settings.host,
        )

        def on_durable() -> None:
            if later:  # the consumer still holds these messages
                numbers = np.arange(appended.first_seq, appended.first_seq + len(kept_positions))
                self._lease_counts.add(queue.group, topic_of(queue.group, queue.topic), numbers)

        appended = self._appender.append(self._appender.prepare(batch, now_ms), on_durable)
        await appended.durable

    async def _read(self, queue: QueueLeases, voided: list[_Voided]) -> tuple[pa.RecordBatch, list[_Voided]]:
        """Read the rows of these positions. Returns the rows, and the positions without those in damaged frames."""
        reader = self._log.reader
        seqs = np.array([position.lease.seq for position in voided], dtype=np.int64)
        try:
            return await in_thread(self._reader_thread, reader.read_rows, seqs), voided
        except Corrupt as error:
            if len(voided) == 1:
                logger.error(
                    "message lost group=%s topic=%s queue=%d offset=%d seq=%d reason=%s",
                    queue.group,
                    queue.topic,
                    queue.queue_id,
                    voided[0].offset,
                    seqs[0],
                    error,
                )
                return await in_thread(self._reader_thread, reader.read_rows, seqs[:0]), []
        # A read fails as a whole, so it is halved until the damaged rows are separated from the others.
        middle = len(voided) // 2
        halves = [await self._read(queue, half) for half in (voided[:middle], voided[middle:])]
        return pa.concat_batches([rows for rows, _ in halves]), [
            position for _, half_positions in halves for position in half_positions
        ]


def _properties(rows: pa.RecordBatch, queue: QueueLeases, positions: list[_Voided]) -> pa.Array:
    texts, first_ms = rows.column("properties"), positions[0].pop_ms
    if all(position.pop_ms == first_ms and not position.lease.nack_reason for position in positions):
        return redelivery_rows.properties_for(texts, queue.group, queue.topic, first_ms)
    adding = [
        redelivery_rows.added(queue.group, queue.topic, position.pop_ms)
        | redelivery_rows.given_up(position.lease.nack_reason)
        for position in positions
    ]
    return redelivery_rows.properties_of_each(texts, adding)


def _void(queue: QueueLeases, offsets: Collection[int]) -> list[_Voided]:
    """Void the receipts of these positions, whose messages are about to be written."""
    voided = [_Voided(offset, queue.in_flight[offset], queue.in_flight[offset].pop_ms) for offset in offsets]
    for position in voided:
        position.lease.pop_ms = NO_RECEIPT
    return voided


def _oldest(queue: QueueLeases) -> list[int]:
    """List the leased offsets in the older half of a queue whose open positions span too much."""
    # Leaves half of the allowed span, so that the next message does not make it too wide again.
    end = queue.next_offset - limits.POP_SPAN_MAX // 2
    return [
        offset
        for offset, lease in queue.in_flight.items()
        if offset < end and not lease.in_order and lease.pop_ms != NO_RECEIPT
    ]


def _chunks(voided: list[_Voided]) -> Iterator[list[_Voided]]:
    chunk: list[_Voided] = []
    size_bytes = 0
    for position in voided:
        if chunk and (len(chunk) == PART_ROWS or size_bytes + position.lease.size_bytes > PART_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(position)
        size_bytes += position.lease.size_bytes
    if chunk:
        yield chunk
