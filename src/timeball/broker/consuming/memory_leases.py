"""Leases kept in memory, and the leases of all groups across a restart.

Positions stay in flight until their receipts come back or their leases end. The number of leases is limited: a full
queue hands out no more messages until a lease ends. A lease that is prolonged in a queue that is more than half full is
written to the log as a scheduled message.

A crash forgets the leases in memory. The group's stored offset is the first position that is not done, so after a crash
the broker hands out the messages in flight again, and none is lost. It skips the positions whose leases are in the log
(log_leases.py). After an orderly stop, receipts stay valid and nothing is handed out twice.

While it serves, `MemoryLeases` waits for the disk only to write a message to its group again. It needs no lock, because
each decision is made between two awaits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.leases import Key, Lease, Leases, OpenCount, QueueLeases
from timeball.broker.consuming.redelivery import Redelivery
from timeball.broker.consuming.redelivery_rows import reason_text
from timeball.broker.consuming.requests import PositionReceipt
from timeball.broker.consuming.selection import Selection
from timeball.broker.registry.groups import Offsets, Parked
from timeball.broker.registry.lease_counts import SavedLease, SavedLeases
from timeball.broker.registry.meta import MetaTable
from timeball.broker.registry.rates import Rates, Stat, of_group
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topic import Topic
from timeball.broker.registry.topics import Topics
from timeball.io.clock import SchedulerClock
from timeball.log.reader import LogReader
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.message import ORIGIN_GROUP, Kind, decode_properties

ACKNOWLEDGED_MAX = 16_384  # receipts remembered, about 300 bytes each


class MemoryLeases:
    """Settles leases kept in memory. Belongs to the event loop, and `close` ends its task."""

    def __init__(
        self,
        waiters: Waiters,
        leases: Leases,
        redelivery: Redelivery,
        *,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        rates: Rates,
    ) -> None:
        self._waiters, self._leases = waiters, leases
        self._clock, self._log, self._tables, self._rates = clock, log, tables, rates
        self.redelivery = redelivery
        # Receipts with an earlier time are from before the last restart (`_ack_ahead`).
        self._started_ms = clock.now_ms()
        # The last receipts that were acknowledged, oldest first: a client that lost the answer sends them again.
        self._acknowledged: dict[PositionReceipt, None] = {}
        # Leases saved by the last stop end at the same time as they would have without the stop.
        for queue in leases.all():
            for offset, lease in queue.in_flight.items():
                self.redelivery.expect(queue, [offset], lease.pop_ms, lease.deadline_ms)

    async def close(self) -> None:
        """Save the leases in flight, so that their receipts stay valid after the next start."""
        await self.redelivery.close()
        if self._log.writer.failed is None:
            # Positions whose rows are still being written become done, and must not be saved as in flight.
            await self._log.writer.flushed()
            save(self._tables.in_flight, self._leases.all(), self._clock.as_wall)

    def hold(self, selection: Selection) -> None:
        """Let the positions of a selection come back at its deadline, unless they are acknowledged before."""
        for queue, offsets in selection.offsets().items():
            self.redelivery.expect(queue, offsets, selection.pop_ms, selection.deadline_ms)

    def acknowledge(self, receipts: Iterable[PositionReceipt]) -> list[bool]:
        """End these leases. The result is False for each receipt that is not valid (any more)."""
        results: list[bool] = []
        was_full: dict[QueueLeases, bool] = {}
        for receipt in receipts:
            queue_and_lease = self._lease_of(receipt)
            if queue_and_lease is not None:
                queue, _ = queue_and_lease
                was_full.setdefault(queue, queue.open_rows >= limits.POP_HELD_PER_QUEUE_MAX)
                queue.done(receipt.offset)
            # A consumer that finished its message before a crash still holds a receipt from then.
            results.append(queue_and_lease is not None or self._ack_ahead(receipt))
            if results[-1]:
                self._acknowledged[receipt] = None
                self._rates.add(Stat.GROUP_ACK_NUMS, of_group(receipt.topic, receipt.group), 1)
        self._leases.store_all(was_full)
        while len(self._acknowledged) > ACKNOWLEDGED_MAX:
            del self._acknowledged[next(iter(self._acknowledged))]
        # Consumers may be waiting for space in a queue that was full or, in order, for the end of the last lease.
        self._waiters.wake(
            {
                acked_queue.topic
                for acked_queue, is_full in was_full.items()
                if is_full or not acked_queue.in_flight
            }
        )
        return results

    def was_acknowledged(self, receipt: PositionReceipt) -> bool:
        """Check whether this receipt is among the last ACKNOWLEDGED_MAX receipts that were acknowledged."""
        return receipt in self._acknowledged

    async def change(self, receipt: PositionReceipt, invisible_ms: int) -> PositionReceipt | None:
        """Make a lease end `invisible_ms` from now. Returns the new receipt, or None if the old one is not valid.

        In order the receipt stays the same, because RocketMQ's clients go on using it.
        """
        queue_and_lease = self._lease_of(receipt)
        if queue_and_lease is None:
            return None
        queue, lease = queue_and_lease
        now_ms = self._clock.now_ms()
        lease.deadline_ms = self._clock.elapsed_ms() + invisible_ms
        queue.mark_held(receipt.offset)
        if not lease.in_order:
            # Always a different number, otherwise the old receipt would still be valid.
            lease.pop_ms = max(now_ms, receipt.pop_ms + 1)
        changed = receipt._replace(pop_ms=lease.pop_ms)
        # A long lease takes up one of the limited positions for long. A scheduled message in the log does not.
        if not lease.in_order and queue.open_rows > limits.POP_HELD_PER_QUEUE_MAX // 2:
            await self.redelivery.write(queue, [receipt.offset], later=True)
        else:
            self.redelivery.expect(queue, [receipt.offset], lease.pop_ms, lease.deadline_ms)
        return changed

    async def nack(self, receipt: PositionReceipt, delay_ms: int, reason: str) -> PositionReceipt | None:
        """Give a message back for its next delivery in `delay_ms`, and keep the reason in its lease.

        Returns the new receipt, like `change`.
        """
        changed = await self.change(receipt, delay_ms)
        queue_and_lease = None if changed is None else self._lease_of(changed)
        if queue_and_lease is not None:
            queue, lease = queue_and_lease
            queue.nack(receipt.offset, self._clock.now_ms())
            lease.nack_reason = reason_text(reason)
        return changed

    def give_back(self, receipts: Iterable[PositionReceipt]) -> None:
        """End leases whose consumer disconnected before it received the messages. They are handed out next."""
        topics = set()
        for receipt in receipts:
            queue_and_lease = self._lease_of(receipt)
            if queue_and_lease is not None:
                queue_and_lease[0].give_back(receipt.offset)
                topics.add(receipt.topic)
        self._waiters.wake(topics)

    async def dead_letter(self, receipt: PositionReceipt, reason: str) -> bool:
        """Write the message to the group's dead letters. False if the receipt is not valid."""
        queue_and_lease = self._lease_of(receipt)
        if queue_and_lease is not None:
            queue_and_lease[1].nack_reason = reason_text(reason) or queue_and_lease[1].nack_reason
            await self.redelivery.write(queue_and_lease[0], [receipt.offset], dead=True)
        return queue_and_lease is not None

    def _lease_of(self, receipt: PositionReceipt) -> tuple[QueueLeases, Lease] | None:
        if receipt.pop_ms < 0:  # NO_RECEIPT is negative and marks positions without a valid receipt
            return None
        queue = self._leases.get(receipt.group, receipt.topic, receipt.queue_id)
        lease = queue.lease_of(receipt.offset, receipt.pop_ms) if queue is not None else None
        return (queue, lease) if queue is not None and lease is not None else None

    def _ack_ahead(self, receipt: PositionReceipt) -> bool:
        """Accept a receipt from before a crash, so that a consumer need not process the message again."""
        topic = self._tables.topics.find_topic(receipt.topic)
        stored = self._tables.offsets.find_offset(receipt.group, receipt.topic, receipt.queue_id)
        if topic is None or stored is None or not 0 <= receipt.pop_ms < self._started_ms:
            return False
        (queue,) = self._leases.open(receipt.group, topic, [receipt.queue_id], from_max=False)
        return self._leases.ack_ahead(queue, receipt.offset)


# ---- after a crash: skip the positions that are done ---------------------------------------------------------
# A group's offsets are saved once a second, but each scheduled message is saved before a consumer sees its message. So
# the log may contain scheduled messages of positions that the saved offsets do not count as done. If these positions
# were handed out again, their scheduled messages would bring the messages back a second time. Each scheduled message
# names its group, and the row that it is a copy of, which has queue and position.

_COLUMNS = ["seq", "kind", "properties", "source_seq"]
_BATCH_ROWS = 65_536

Positions = dict[Key, set[int]]  # (group, topic, queue) -> positions


def done_positions(reader: LogReader, parked: Parked) -> Positions:
    """Find the done positions, in the state saved with the offsets and in later rows of the log (reader thread).

    The log is read from the row on that was saved with the offsets. Earlier scheduled messages do not count, because
    the group may have been moved back since, and then these messages must be handed out again.
    """
    positions: Positions = defaultdict(set)
    for group, topics in parked.ahead.items():
        for topic, queues in topics.items():
            for queue_id, ranges in queues.items():
                for begin, end in ranges:
                    positions[(group, topic, queue_id)].update(range(begin, end))
    # Earlier scheduled messages were saved as positions (`ahead`), together with the offsets.
    begin = max(parked.from_seq, reader.first_seq)
    for rows in reader.coalesced(begin, reader.next_seq, [Kind.SCHEDULED], _BATCH_ROWS, _COLUMNS):
        sources = rows.column("source_seq").fill_null(0).to_numpy()
        # A row that retention has removed cannot be handed out again, so its position need not be skipped.
        matches = np.flatnonzero(sources >= reader.first_seq)
        if len(matches):
            _add(
                positions,
                reader.read_rows(sources[matches]),
                rows.column("properties").take(pa.array(matches)),
            )
    return positions


def _add(positions: Positions, handed_out: pa.RecordBatch, texts: pa.Array) -> None:
    names = ("topic", "queue_id", "queue_offset")
    queue_positions = zip(*(handed_out.column(name).to_pylist() for name in names), strict=True)
    for (topic, queue_id, offset), text in zip(queue_positions, texts.to_pylist(), strict=True):
        group = decode_properties(text or "").get(ORIGIN_GROUP)
        if group is not None and offset is not None:
            positions[(group, topic, queue_id)].add(offset)


def skip_done(leases: Leases, done: Positions, *, topics: Topics, offsets: Offsets) -> None:
    """Make the groups skip these positions."""
    for (group, name, queue_id), positions in done.items():
        topic = topics.find_topic(name)
        # A group without an offset was deleted, and a new group of the same name starts from the beginning.
        has_offset = offsets.find_offset(group, name, queue_id) is not None
        if topic is not None and has_offset and queue_id < len(topic.queues):
            # Through the leases and not as stored offsets, because earlier positions may still be open.
            leases.skip_done(group, topic, queue_id, positions)


# ---- an orderly stop: save the leases, and restore them ------------------------------------------------------
# The broker writes one META row for each queue when it stops, and deletes these rows before the next start serves, so
# that a crash never finds old ones. A queue whose stored offset has changed by then (a crash during the stop, or a
# group that was moved) is forgotten.


def save(kept: MetaTable[SavedLeases], queues: Iterable[QueueLeases], as_wall: Callable[[int], int]) -> None:
    """Append all queues that are not idle to the log. `as_wall` converts deadlines to wall-clock times (ms)."""
    # No name contains `@` (check_name), so the keys are distinct.
    named = ((f"{q.group}@{q.topic}@{q.queue_id}", q) for q in queues if not q.idle)
    kept.put((name, saved(queue, as_wall)) for name, queue in named)


def pop_leases(
    kept: MetaTable[SavedLeases], find_topic: Callable[[str], Topic | None], count: OpenCount, now_ms: int
) -> list[QueueLeases]:
    """Restore the leases that the last stop saved, and delete them from the log, so that the next start finds none.

    A lease that seems to have begun after `now_ms` began before the clock was set back. It lasts at most its whole
    invisible time from now on.
    """
    # When a topic is deleted, its messages and their leases are gone too.
    saved_queues = [(saved_queue, find_topic(saved_queue.topic)) for saved_queue in kept.values.values()]
    restored = [
        _restored(saved_queue, topic, count, now_ms)
        for saved_queue, topic in saved_queues
        if topic is not None
    ]
    # Deleted at once: after a crash, leases of an older stop must not come back, as they have ended long ago.
    kept.put([(name, None) for name in kept.values])
    return restored


def saved(queue: QueueLeases, as_wall: Callable[[int], int]) -> SavedLeases:
    """Convert the leases of one queue to their saved form."""
    return SavedLeases(
        queue.group, queue.topic, queue.queue_id, queue.next_offset, queue.stored_offset,
        queue.last_pop_ms, queue.attempt_id, [_as_row(*item, as_wall) for item in queue.in_flight.items()],
        [_as_row(*item, as_wall) for item in queue.returned.items()], sorted(queue.acked_ahead), queue.in_log,
    )  # fmt: skip


def _restored(kept: SavedLeases, topic: Topic, count: OpenCount, now_ms: int) -> QueueLeases:
    queue = QueueLeases(
        kept.group, kept.topic, kept.queue_id, topic.queues[kept.queue_id].index,
        kept.next_offset, kept.stored_offset, count,
        last_pop_ms=kept.last_pop_ms, attempt_id=kept.attempt_id, in_log=kept.in_log,
    )  # fmt: skip
    in_flight, returned = (
        {row.offset: _lease(row, now_ms) for row in rows} for rows in (kept.in_flight, kept.returned)
    )
    queue.restore(in_flight, returned, set(kept.acked_ahead))
    return queue


def _as_row(offset: int, lease: Lease, as_wall: Callable[[int], int]) -> SavedLease:
    return SavedLease(
        offset, lease.seq, lease.size_bytes, lease.pop_ms, as_wall(lease.deadline_ms), lease.in_order, lease.times,
        lease.nacked_ms, lease.nack_reason,
    )  # fmt: skip


def _lease(row: SavedLease, now_ms: int) -> Lease:
    # After a start, elapsed time begins at wall-clock time. `pop_ms` is the time when the lease began or was renewed.
    deadline_ms = row.deadline_ms - max(0, row.pop_ms - now_ms)
    return Lease(
        row.seq, row.size_bytes, row.pop_ms, deadline_ms, row.in_order, row.times, row.nacked_ms, row.nack_reason
    )  # fmt: skip
