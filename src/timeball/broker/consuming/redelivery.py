"""Redelivery: a task writes messages to their group again when their leases end, and consumers give messages back.

    the lease ends     the message becomes visible in the group's retry topic
    given back         the same, or with a delay a scheduled message for the retry topic
    attempts used up   the message goes to the group's dead letters

The receipt of a position becomes void before anything is awaited, so that no acknowledgement counts while its message
is being written. The new row and the saved state of its queue are one frame: after a crash, the log has both or none,
so the message is neither lost nor delivered twice. If the row cannot be written (the disk is full), the task tries
again after `AGAIN_MS`. Until then the receipt is valid again. A message whose frame in the log is damaged can never be
written again: the task reports it in the broker's log as lost to its group, and writes the others. For an ordered
group nothing is written: the positions are leased again before all others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming import redelivery_rows, retry
from timeball.broker.consuming.lease_saver import QUEUES_AT_ONCE, LeaseSaver
from timeball.broker.consuming.leases import Lease, Leases, OpenCount, QueueLeases
from timeball.broker.consuming.selection import Selection
from timeball.broker.filters.tags import BoolArray
from timeball.broker.registry import groups
from timeball.broker.registry.redeliveries import Redeliveries, topic_of
from timeball.broker.registry.tables import Tables
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, TimeballError
from timeball.model.message import Int64Array, Kind
from timeball.schedule.ticker import CLOCK_READ_MS

logger = logging.getLogger(__name__)

AGAIN_MS = 1_000
PART_ROWS, PART_BYTES = 4_096, 8 * 1024 * 1024  # limits of one read and write


class Return(NamedTuple):
    """How a message returns to its group.

    delay_ms   the time until the next delivery, or None for the delay of the group's retry policy
    first      the index at which the list of the retry policy begins (see `retry_delay_ms`)
    reason     why a member gives the message back. None: its lease has ended
    is_dead    True: to the dead letters, although it has attempts left
    """

    delay_ms: int | None = 0
    first: int = groups.FIRST_RETRY_INDEX
    reason: str | None = None
    is_dead: bool = False


EXPIRED = Return()


@dataclass(frozen=True, slots=True)
class Returning:
    """A position whose message is being written to its group again."""

    queue: QueueLeases
    offset: int
    lease: Lease
    how: Return = EXPIRED
    since_ms: int = 0  # `lease.since_ms` when its receipt became void

    @property
    def is_current(self) -> bool:
        """False if the group's offset was changed meanwhile, and the lease was forgotten."""
        return self.queue.in_flight.get(self.offset) is self.lease

    @property
    def is_uncounted_nack(self) -> bool:
        """True if a member gives the message back, and this is no attempt."""
        return self.how.reason is not None and not (self.how.is_dead or self.lease.counts)


SWEEP_ENTRIES_MIN = 1_024
SWEPT_AT_ONCE = 8  # entries: a sweep ends before the entries are more than twice the open positions

_Entry = tuple[int, int, int, list[int], QueueLeases]  # deadline_ms, serial, pop_ms, offsets, queue


class Deadlines:
    """The ends of leases: one entry for each batch of positions that share a deadline.

    An acknowledgement leaves its entry behind, and the entry is skipped at its deadline. So that fast consumers with
    long leases do not fill the memory, a sweep removes stale entries before there are more than twice as many entries
    as open positions (`count`). A sweep of all entries in one step would block the event loop for a second. So each
    `add` sweeps a few entries: it moves them from the heap `_unswept` to `_heap` unless they are stale.
    """

    def __init__(self, count: OpenCount) -> None:
        self._heap: list[_Entry] = []
        self._unswept: list[_Entry] = []  # a heap too, and empty between two sweeps
        self._serials = itertools.count()  # orders equal deadlines, because queues cannot be compared
        self._count = count

    def __len__(self) -> int:
        return len(self._heap) + len(self._unswept)

    def add(self, queue: QueueLeases, offsets: list[int], pop_ms: int, deadline_ms: int) -> bool:
        """Add positions that were leased together. True if their deadline is now the earliest one."""
        entry = (deadline_ms, next(self._serials), pop_ms, offsets, queue)
        # One entry for all positions of a request: they end together, and most are acknowledged before.
        heapq.heappush(self._heap, entry)
        if not self._unswept and len(self._heap) > SWEEP_ENTRIES_MIN // 2 + self._count.rows * 7 // 4:
            self._heap, self._unswept = [], self._heap
        for _ in range(min(SWEPT_AT_ONCE, len(self._unswept))):
            old_entry = self._unswept.pop()  # the last entry of a heap is a leaf, so a heap remains
            if any(True for _ in _live(old_entry)):
                heapq.heappush(self._heap, old_entry)
        heap = self._first_heap()
        return bool(heap) and heap[0] is entry

    def next_ms(self) -> int | None:
        """Find the earliest deadline (ms). None if there is none."""
        heap = self._first_heap()
        return heap[0][0] if heap else None

    def first_lease_end_ms(self) -> int | None:
        """Find the earliest end of a lease (ms), and remove stale entries before it. None if there is none."""
        # The task uses `next_ms` instead: if stale entries were removed, the heap would often be empty, and then each
        # receive of a fast consumer would wake the task.
        while (heap := self._first_heap()) and next(_live(heap[0]), None) is None:
            heapq.heappop(heap)
        return self.next_ms()

    def pop_due(self, now_ms: int) -> list[tuple[QueueLeases, list[int]]]:
        """Remove the positions whose leases have ended by `now_ms`. Returns (queue, offsets) for each entry.

        Each position is returned once.
        """
        due = []
        seen: set[tuple[int, int]] = set()
        while (heap := self._first_heap()) and heap[0][0] <= now_ms:
            entry = heapq.heappop(heap)
            _, _, _, _, queue = entry
            # A deadline that was changed and changed back has two entries, and both are live.
            offsets = [offset for offset in _live(entry) if (id(queue), offset) not in seen]
            seen.update((id(queue), offset) for offset in offsets)
            if offsets:
                due.append((queue, offsets))
        return due

    def _first_heap(self) -> list[_Entry]:
        """Find the heap with the earliest entry. It is empty if there are no entries."""
        heap, unswept = self._heap, self._unswept
        return unswept if unswept and not (heap and heap[0] < unswept[0]) else heap


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
        saver: LeaseSaver,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        redeliveries: Redeliveries,
        reader_thread: Executor,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._appender, self._waiters, self._leases, self._saver = appender, waiters, leases, saver
        self._settings, self._clock, self._log = settings, clock, log
        self._tables, self._redeliveries = tables, redeliveries
        self._reader_thread, self._on_failure = reader_thread, on_failure
        self._deadlines = Deadlines(leases.count)
        self._wake = asyncio.Event()
        self.is_writing = False  # messages whose leases have ended are being written again
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def next_lease_end_ms(self) -> int | None:
        """Find the earliest end of a lease (ms). None if there is none."""
        return self._deadlines.first_lease_end_ms()

    def wake(self) -> None:
        """Make the task read the clock again, and process the leases that have ended."""
        self._wake.set()

    def add_deadlines(self, selection: Selection) -> None:
        """Let the positions of a selection come back at its deadline, unless they are acknowledged before."""
        for queue, offsets in selection.offsets().items():
            self.add_deadline(queue, offsets, selection.pop_ms, selection.deadline_ms)

    def add_deadline(self, queue: QueueLeases, offsets: list[int], pop_ms: int, deadline_ms: int) -> None:
        """Let these positions come back at `deadline_ms` (elapsed time), unless they are acknowledged before."""
        if self._deadlines.add(queue, offsets, pop_ms, deadline_ms):
            self._wake.set()
        if self._task is None:
            # Started late, because a broker whose consumers only pull never needs this task.
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """End the task. A write that has begun is completed."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def begin_return(self, queue: QueueLeases, offset: int, how: Return) -> Returning:
        """Void the receipt of a leased position whose message returns. The caller passes the result to `write`."""
        lease = queue.in_flight[offset]
        lease.is_void = True
        return Returning(queue, offset, lease, how, lease.since_ms)

    async def write(self, returning: Sequence[Returning]) -> None:
        """Write these messages to their groups again, durably. Raises OverLimit, and the errors of the log.

        On an error, the messages that are not written are leased as before.
        """
        # Consumers may wait for the end of these leases: for space in a full queue, or for an ordered queue.
        awaited_ends = {
            position.queue.ends
            for position in returning
            if position.how.is_dead or position.queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX
        }
        try:
            for chunk in _chunks(returning):
                await self._write_chunk(chunk)
                for position in chunk:
                    # Not earlier: a position is done when its new row is durable.
                    if position.is_current:
                        position.queue.mark_done(position.offset)
        finally:
            for position in returning:
                # Not written: the lease is valid as before, and the task soon tries again.
                if position.is_current:
                    self._restore(position)
            self._leases.store_all({position.queue for position in returning})
        self._waiters.wake(awaited_ends)

    async def write_apart(self, returning: Sequence[Returning]) -> list[bool | TimeballError]:
        """Write like `write`, but an error of one queue's messages holds back no messages of other queues.

        The result for each position is True, its error, or False if the position was settled elsewhere meanwhile.
        """
        try:
            await self.write(returning)
        except TimeballError as error:
            by_queue: dict[QueueLeases, list[int]] = {}
            for index, position in enumerate(returning):
                by_queue.setdefault(position.queue, []).append(index)
            # The messages of earlier chunks may be written already.
            results: list[bool | TimeballError] = [position.lease.is_written for position in returning]
            if len(by_queue) == 1:
                return [
                    error if position.is_current else result
                    for position, result in zip(returning, results, strict=True)
                ]
            # The reason may be one group's, for example too many topics, and must not hold back the others.
            for indexes in by_queue.values():
                retried = [index for index in indexes if self._void_again(returning[index])]
                retried_results = await self.write_apart([returning[index] for index in retried])
                for index, result in zip(retried, retried_results, strict=True):
                    results[index] = result
            return results
        return [True] * len(returning)

    # -- the task ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Bring back the positions whose leases end, until `close`."""
        while not self._closing:
            self._wake.clear()
            now_ms = self._clock.elapsed_ms()
            ended = [
                position
                for queue, offsets in self._deadlines.pop_due(now_ms)
                for position in self._end(queue, offsets)
            ]
            if ended:
                self.is_writing = True
                await self._try_write(ended)
                self.is_writing = False
                continue
            next_ms = self._deadlines.next_ms()
            # A machine gives no notice when it resumes from suspension, so the clock is read regularly (see ticker.py).
            timeout_s = None if next_ms is None else min(max(0, next_ms - now_ms), CLOCK_READ_MS) / 1000
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _end(self, queue: QueueLeases, offsets: list[int]) -> Iterator[Returning]:
        """End these leases. Yields the positions whose messages are to be written again."""
        in_order = [offset for offset in offsets if queue.in_flight[offset].in_order]
        for offset in in_order:
            queue.in_flight[offset].times += 1
            # An ordered group's message stays in its queue: a copy in the retry topic would follow later messages.
            queue.give_back(offset)
        if in_order:
            self._waiters.wake([queue.ends])
        for offset in offsets:
            if offset in queue.in_flight:
                yield self.begin_return(queue, offset, EXPIRED)

    async def _try_write(self, ended: list[Returning]) -> None:
        """Write these messages again. Errors are logged, one line for each queue, and the task tries again later."""
        failed: dict[QueueLeases, list[TimeballError]] = {}
        for position, result in zip(ended, await self.write_apart(ended), strict=True):
            if isinstance(result, TimeballError):
                failed.setdefault(position.queue, []).append(result)
        for queue, errors in failed.items():
            logger.warning(
                "messages come back later group=%s topic=%s messages=%d reason=%s",
                queue.group,
                queue.topic,
                len(errors),
                errors[0],
            )

    def _void_again(self, position: Returning) -> bool:
        """Void the receipt of a position that `write` has restored. False if it is written, or answered meanwhile."""
        if not position.is_current or position.lease.is_void or position.lease.since_ms != position.since_ms:
            return False
        position.lease.is_void = True
        return True

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Report the error of the task, if it has ended with one."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)  # without the task, no lease would end any more

    def _restore(self, position: Returning) -> None:
        """Make the receipt of a position valid again, because its message was not written."""
        lease = position.lease
        lease.is_void = lease.is_written = False
        # Not at once, because the reason of the failure, for example a full disk, seldom ends within a millisecond.
        lease.deadline_ms = max(lease.deadline_ms, self._clock.elapsed_ms() + AGAIN_MS)
        self.add_deadline(position.queue, [position.offset], lease.pop_ms, lease.deadline_ms)

    # -- writing -----------------------------------------------------------------------------------------------

    async def _write_chunk(self, chunk: Sequence[Returning]) -> None:
        """Append the new rows of these messages, in one frame with the leases of their queues. Durable on return."""
        # Retention may have removed rows. Their messages have expired, so nothing is written for them.
        first_seq = self._log.reader.first_seq
        rows, returning = await self._read(
            [position for position in chunk if position.is_current and position.lease.seq >= first_seq]
        )
        if not returning:
            return
        self._log.writer.check_admission()
        now_ms = self._clock.now_ms()
        copies = self._copies(rows, returning, now_ms)
        # A limit of the backlog is for sends. These messages have been sent before.
        prepared = self._appender.prepare_accepted(copies, now_ms)
        # A group that was moved during the read begins again elsewhere, and gets no copies.
        for group, topic in {(position.queue.group, position.queue.topic) for position in returning}:
            self._leases.forget_moved(group, topic)
        current = np.array([position.is_current for position in returning])
        if not current.all():
            prepared = prepared.filter(pa.array(current))
            returning = [position for position in returning if position.is_current]
            if not returning:
                return
        for position in returning:
            position.lease.is_written = True
            position.queue.mark_changed(position.offset, position.offset)
        change = self._saver.build_change(list({position.queue: None for position in returning}))
        scheduled = np.flatnonzero(prepared.column("kind").to_numpy() == Kind.SCHEDULED)
        # The group and the original topic of each scheduled copy.
        units = [
            (position.queue.group, topic_of(position.queue.group, position.queue.topic))
            for position in (returning[index] for index in scheduled.tolist())
        ]

        def on_durable() -> None:
            self._redeliveries.add(units, appended.first_seq + scheduled)

        appended = self._appender.append(
            pa.concat_batches([prepared, change.rows]), on_durable if units else None, is_duration=True
        )
        change.apply()
        await appended.durable

    async def _read(self, returning: list[Returning]) -> tuple[pa.RecordBatch, list[Returning]]:
        """Read the rows of these positions. Returns the rows, and the positions that they belong to.

        A position whose frame is damaged is left out, and logged as lost.
        """
        reader = self._log.reader
        seqs = np.array([position.lease.seq for position in returning], dtype=np.int64)
        try:
            return await in_thread(self._reader_thread, reader.read_rows, seqs), returning
        except Corrupt as error:
            if len(returning) == 1:
                queue, offset = returning[0].queue, returning[0].offset
                logger.error(
                    "message lost group=%s topic=%s queue=%d offset=%d seq=%d reason=%s",
                    queue.group,
                    queue.topic,
                    queue.queue_id,
                    offset,
                    seqs[0],
                    error,
                )
                return await in_thread(self._reader_thread, reader.read_rows, seqs[:0]), []
        # A read fails as a whole, so it is halved until the damaged rows are separated from the others.
        middle = len(returning) // 2
        halves = [await self._read(half) for half in (returning[:middle], returning[middle:])]
        return pa.concat_batches([rows for rows, _ in halves]), [
            position for _, half_positions in halves for position in half_positions
        ]

    def _copies(self, rows: pa.RecordBatch, returning: Sequence[Returning], now_ms: int) -> pa.RecordBatch:
        """Build the LOG_SCHEMA rows that bring these messages back, and create their topics. Raises OverLimit.

        `rows` (READ_SCHEMA) are parallel to `returning`.
        """
        self._limit_uncounted(rows, returning)
        counts = np.array([position.lease.counts for position in returning], dtype=np.int64)
        times = np.minimum(redelivery_rows.times_of(rows) + counts, retry.INT_MAX)
        topics, delays_ms = [], []
        for position, attempts in zip(returning, times.tolist(), strict=True):
            group = position.queue.group
            is_dead = position.how.is_dead or attempts > self._tables.groups.times_max(group)
            topics.append(
                retry.dead_letter_topic(group)
                if is_dead
                else redelivery_rows.pop_retry_topic(group, position.queue.topic)
            )
            delays_ms.append(0 if is_dead else self._delay_ms(position, attempts))
        for name in set(topics):
            self._tables.topics.ensure(name, 1)
        delay_ms = np.array(delays_ms, dtype=np.int64)
        is_later: BoolArray = delay_ms > 0
        return redelivery_rows.build_copies(
            rows,
            kind=np.where(is_later, int(Kind.SCHEDULED), int(Kind.MESSAGE)).astype(np.int8),
            topics=topics,
            properties=_properties(rows, returning, now_ms),
            times=times,
            due_ms=_masked(now_ms + delay_ms, is_later),
            source_seq=_masked(rows.column("seq").to_numpy(), is_later),
            now_ms=now_ms,
            host=self._settings.host,
        )

    def _limit_uncounted(self, rows: pa.RecordBatch, returning: Sequence[Returning]) -> None:
        """Set `counts` of leases that a nack without an attempt ends.

        True if the message had as many of these nacks as its group allows: then this one is an attempt.
        """
        # The row contains the number of these nacks, because a count in memory would begin anew with each leader.
        for index, position in enumerate(returning):
            if position.is_uncounted_nack:
                uncounted = redelivery_rows.count_uncounted_nacks(rows.column("properties")[index].as_py())
                position.lease.counts = uncounted >= self._tables.groups.uncounted_max(position.queue.group)

    def _delay_ms(self, position: Returning, attempts: int) -> int:
        """Compute the delay after `attempts` deliveries of a message: the requested one, or the one of the policy."""
        if position.how.delay_ms is not None:
            return position.how.delay_ms
        group = self._tables.groups.find_group(position.queue.group)
        policy = group.group_retry_policy if group is not None else None
        # At least one attempt, even if the first one does not count.
        return groups.retry_delay_ms(policy, max(1, attempts), first=position.how.first)


def _masked(values: Int64Array, is_set: BoolArray) -> pa.Array | None:
    """Make a column with nulls where `is_set` is false. None if all are null."""
    return pa.array(values, mask=~is_set) if is_set.any() else None


def _properties(rows: pa.RecordBatch, returning: Sequence[Returning], now_ms: int) -> pa.Array:
    """Build the properties of the copies of these rows."""
    texts, first = rows.column("properties"), returning[0]
    queue, pop_ms = first.queue, first.lease.pop_ms
    # Thousands of leases of one request may end at once, and their copies get equal properties, as a column.
    if all(
        position.how is EXPIRED
        and (
            position.queue is queue
            or (position.queue.group, position.queue.topic) == (queue.group, queue.topic)
        )
        and position.lease.pop_ms == pop_ms
        and not position.lease.nack_reason
        for position in returning
    ):
        return redelivery_rows.properties_for(texts, queue.group, queue.topic, pop_ms)
    new_properties = [_new_properties(position, now_ms) for position in returning]
    for index, position in enumerate(returning):
        if position.is_uncounted_nack:
            new_properties[index] |= redelivery_rows.uncounted_nack_property(texts[index].as_py())
    return redelivery_rows.merge_properties_of_each(texts, new_properties)


def _new_properties(position: Returning, now_ms: int) -> dict[str, str]:
    """Build the properties that are added to the copy of one message, apart from the count of uncounted nacks."""
    queue, lease, how = position.queue, position.lease, position.how
    new_properties = redelivery_rows.copy_properties(queue.group, queue.topic, lease.pop_ms)
    if how.is_dead or how.reason is None:
        return new_properties | redelivery_rows.dead_letter_properties(how.reason or lease.nack_reason)
    return new_properties | redelivery_rows.nack_properties(how.reason, now_ms)


def _chunks(returning: Sequence[Returning]) -> Iterator[list[Returning]]:
    """Split positions into chunks within PART_ROWS, PART_BYTES and QUEUES_AT_ONCE.

    The bodies of a chunk are in memory at the same time, and the leases of its queues are saved in its frame.
    """
    chunk: list[Returning] = []
    queues: set[QueueLeases] = set()
    size_bytes = 0
    for position in returning:
        is_full = len(chunk) == PART_ROWS or size_bytes + position.lease.size_bytes > PART_BYTES
        if chunk and (is_full or (len(queues) == QUEUES_AT_ONCE and position.queue not in queues)):
            yield chunk
            chunk, queues, size_bytes = [], set(), 0
        chunk.append(position)
        queues.add(position.queue)
        size_bytes += position.lease.size_bytes
    if chunk:
        yield chunk
