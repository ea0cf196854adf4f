"""Leases kept in memory: positions stay in flight until their receipts come back or their leases end.

A crash forgets these leases. The group's stored offset is the first position that is not done, so after a crash the
broker hands out the messages in flight again, and none is lost. The number of leases is limited: a full queue hands out
no more messages until a lease ends. A lease that is prolonged in a queue that is more than half full is written to the
log as a scheduled message.

This module waits for the disk only to write a message to its group again. It needs no lock, because each decision is
made between two awaits.
"""

from __future__ import annotations

from collections.abc import Iterable

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming import restart
from timeball.broker.consuming.leases import Lease, Leases, QueueLeases
from timeball.broker.consuming.redelivery import Redelivery
from timeball.broker.consuming.redelivery_rows import reason_text
from timeball.broker.consuming.requests import PositionReceipt
from timeball.broker.consuming.selection import Selection
from timeball.broker.registry.rates import Rates, Stat, of_group
from timeball.broker.registry.tables import Tables
from timeball.io.clock import SchedulerClock
from timeball.log.writer import CommitLog
from timeball.model import limits

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
            restart.save(self._tables.in_flight, self._leases.all(), self._clock.as_wall)

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
